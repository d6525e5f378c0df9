"""What `cascade_attention` and `attention_stats` refuse, word for word."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from calls import normal
from oracle_terms import UserFunction

import pyflash

# --- cascade_attention ---


def cascade(**changes: Any) -> dict[str, Any]:
    """Arguments of a dense cascade that is fine, with some changes."""
    arrays = dict(q=normal(1, (2, 3, 4, 8)), k_shared=normal(2, (7, 2, 8)), v_shared=normal(3, (7, 2, 6)))
    return {**arrays, "k": normal(4, (2, 5, 2, 8)), "v": normal(5, (2, 5, 2, 6)), **changes}


def paged_cascade(**changes: Any) -> dict[str, Any]:
    """The same of one in pages."""
    k, v = normal(2, (6, 4, 2, 8)), normal(3, (6, 4, 2, 8))
    arrays = dict(q=normal(1, (2, 4, 8)), k_shared=k, v_shared=v, k=k, v=v)
    tables = dict(block_table=np.array([[5, 1], [0, 2]]), shared_block_table=np.array([3, 4, -1]))
    return {**arrays, **tables, "seq_lens": np.array([8, 5]), "shared_len": 7, **changes}


READ_ONLY = np.zeros((2, 3, 4, 6), "f4")
READ_ONLY.flags.writeable = False
PREFIX = normal(2, (7, 2, 8))
CASCADE = {
    "no batch": (
        cascade(q=normal(1, (3, 4, 8))),
        "q: found shape (3, 4, 8), expected shape (batch, seqlen_q, num_heads, head_dim) in the order of "
        "layout",
    ),
    "prefix with a batch": (
        cascade(k_shared=PREFIX[None]),
        "k_shared: found shape (1, 7, 2, 8), expected shape (shared_len, num_kv_heads, head_dim)",
    ),
    "prefix of another type": (
        cascade(v_shared=normal(3, (7, 2, 6), "float16")),
        "v_shared: found dtype float16, expected float32, the dtype of v",
    ),
    "prefix of other heads": (
        cascade(k_shared=normal(3, (7, 4, 8))),
        "k_shared: found 4 heads of width 8, expected 2 heads of width 8, as k",
    ),
    "prefix of other width": (
        cascade(v_shared=PREFIX),
        "v_shared: found 2 heads of width 8, expected 2 heads of width 6, as v",
    ),
    "values of another length": (
        cascade(v_shared=normal(3, (6, 2, 6))),
        "v_shared: found shape (6, 2, 6), expected as many tokens as k_shared, (7, 2, 8)",
    ),
    "shared_len past the prefix": (cascade(shared_len=8), "shared_len: found 8, expected an integer, 0 to 7"),
    "bool shared_len": (cascade(shared_len=True), "shared_len: found True (bool), expected an integer"),
    "no shared_len": (
        paged_cascade(shared_len=None),
        "shared_len: found None (NoneType), expected an integer",
    ),
    "shared_len past the table": (
        paged_cascade(shared_len=13),
        "shared_len: found 13, expected an integer, 0 to 12",
    ),
    "page outside": (
        paged_cascade(shared_len=9),
        "shared_block_table[2]: found -1, expected 0 to 5 (a page of the pool)",
    ),
    "table of many": (
        paged_cascade(shared_block_table=np.zeros((1, 2), int)),
        "shared_block_table: found shape (1, 2), expected shape (num_shared_pages,)",
    ),
    "packed rows of dense keys": (
        cascade(cu_seqlens_q=np.array([0, 3])),
        "cu_seqlens_q: found an array of shape (2,) and dtype int64, expected None, or beside it block_table "
        "or cu_seqlens_kv: where the own keys of each sequence are",
    ),
    "two addresses": (
        paged_cascade(cu_seqlens_kv=np.array([0, 3])),
        "block_table: found an array of shape (2, 2) and dtype int64, expected None beside cu_seqlens_kv",
    ),
    "own length past the cache": (
        cascade(seq_lens=np.array([5, 6])),
        "seq_lens[1]: found 6, expected 0 to 5 (valid keys of the cache)",
    ),
    "bias of the own keys only": (
        cascade(bias=normal(1, (5,))),
        "bias: found shape (5,), expected a shape that broadcasts to "
        "(batch, num_heads, seqlen_q, seqlen_kv) = (2, 4, 3, 12)",
    ),
    "tree into the prefix": (
        cascade(tree=np.full((2, 6), -1)),
        "tree: found 6 draft tokens, expected at most 5, the own keys of sequence 0",
    ),
    "scales per token of own keys only": (
        cascade(k_scale=np.ones((2, 5, 2), "f4")),
        "k_scale_shared: found None, expected scales of the prefix, since k_scale has one per token",
    ),
    "scale of another shape": (
        cascade(k_scale_shared=np.ones((3, 2), "f4")),
        "k_scale_shared: found shape (3, 2), expected a number, shape (num_kv_heads,) = (2,), or (7, 2), "
        "one per token and head",
    ),
    "read-only out": (cascade(out=READ_ONLY), "out: found a read-only array, expected a writable array"),
    "layout": (cascade(layout="sbhd"), "layout: found 'sbhd' (str), expected one of 'bshd', 'bhsd'"),
}


@pytest.mark.parametrize("name", CASCADE)
def test_cascade_refusals(any_isa, name):
    arguments, words = CASCADE[name]
    with pytest.raises(pyflash.InvalidArgument, match="^" + re.escape(words) + "$"):
        pyflash.cascade_attention(**arguments, **any_isa.kwargs)


def test_out_of_a_cascade_must_not_overlap(any_isa):
    memory = np.zeros((2, 3, 4, 8), "f4")
    prefix = memory.reshape(24, 8)[:14].reshape(7, 2, 8)
    arrays = cascade(v_shared=normal(3, (7, 2, 8)), v=normal(5, (2, 5, 2, 8)))
    for name in ("k_shared", "v_shared"):
        with pytest.raises(pyflash.InvalidArgument, match=f"out: found memory that it shares with {name}"):
            pyflash.cascade_attention(**{**arrays, name: prefix}, out=memory, **any_isa.kwargs)


def test_workspace_of_a_cascade_is_refused(any_isa):
    with pytest.raises(pyflash.UnsupportedError, match=r"workspace: .* not supported by cascade_attention"):
        pyflash.cascade_attention(**cascade(), workspace=np.zeros(9, np.uint8), **any_isa.kwargs)


def test_unknown_option_of_a_cascade():
    with pytest.raises(TypeError, match="unexpected keyword argument 'casual'"):
        pyflash.cascade_attention(**cascade(), casual=True)


# --- attention_stats ---


def stats(**changes: Any) -> dict[str, Any]:
    """Arguments that are fine, with some changes."""
    return {
        "q": normal(1, (2, 3, 4, 8)),
        "k": normal(2, (2, 5, 2, 8)),
        "lse": normal(3, (2, 4, 3)),
        **changes,
    }


NAMES = "('max_logit', 'entropy', 'key_mass', 'top_k', 'rows')"
STATS = {
    "list": (
        stats(lse=[1.0]),
        "lse: found [1.0] (list), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "shape of rows": (
        stats(lse=normal(3, (2, 3, 4))),
        "lse: found shape (2, 3, 4), expected shape (2, 4, 3), that of the log-sum-exp of q and k",
    ),
    "axes": (stats(lse=normal(3, (4, 3))), "lse: found shape (4, 3), expected shape (2, 4, 3)"),
    "half lse": (
        stats(lse=normal(3, (2, 4, 3), "float16")),
        "lse: found dtype float16, expected float32 or float64",
    ),
    "a name": (
        stats(want="entropy"),
        f"want: found 'entropy' (str), expected a tuple of names out of {NAMES}",
    ),
    "unknown name": (
        stats(want=("entropies",)),
        "want: found 'entropies' (str), expected one of 'max_logit', 'entropy', 'key_mass', 'top_k', 'rows'",
    ),
    "no rows": (
        stats(want=("rows", "entropy")),
        "rows: found None, expected row numbers, since want asks for rows",
    ),
    "rows for nothing": (
        stats(want=("entropy",), rows=np.array([0])),
        "rows: found an array of shape (1,) and dtype int64, expected None, or 'rows' in want",
    ),
    "row outside": (
        stats(rows=np.array([0, 3])),
        "rows[1]: found 3, expected 0 to 2 (a row of the longest sequence)",
    ),
    "row from the end": (
        stats(rows=np.array([-1])),
        "rows[0]: found -1, expected 0 to 2 (a row of the longest sequence)",
    ),
    "list of rows": (
        stats(rows=[0]),
        "rows: found [0] (list), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "top_k 0": (stats(top_k=0), "top_k: found 0, expected an integer, 1 to 2147483647"),
    "top_k of floats": (stats(top_k=2.0), "top_k: found 2.0 (float), expected an integer"),
    "no queries": (stats(last_queries=0), "last_queries: found 0, expected an integer, at least 1"),
    "packed rows of dense keys": (
        stats(cu_seqlens_q=np.array([0, 3])),
        "cu_seqlens_q: found an array of shape (2,) and dtype int64, expected None, or beside it block_table "
        "or cu_seqlens_kv: where the keys of each sequence are",
    ),
    "two addresses": (
        stats(cu_seqlens_kv=np.array([0, 3]), seq_lens=np.array([1, 2])),
        "seq_lens: found an array of shape (2,) and dtype int64, expected None beside cu_seqlens_kv",
    ),
    "keys of another width": (
        stats(k=normal(2, (2, 5, 2, 6))),
        "k: found head_dim 6, expected head_dim 8, that of q",
    ),
    "causal": (stats(causal="bottom"), "causal: found 'bottom' (str), expected False, True or 'top_left'"),
}


@pytest.mark.parametrize("name", STATS)
def test_stats_refusals(any_isa, name):
    arguments, words = STATS[name]
    with pytest.raises(pyflash.InvalidArgument, match="^" + re.escape(words) + "$"):
        pyflash.attention_stats(**arguments, **any_isa.kwargs)


@pytest.mark.parametrize("option", ["sinks", "out", "return_lse", "num_splits", "v_scale", "kausal"])
def test_options_that_mean_nothing_here(option):
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        pyflash.attention_stats(**stats(**{option: None}))


def test_wrong_kind_of_user_function(any_isa):
    function = UserFunction(lambda s, b, h, i, j: s, "score", of_score=True)
    wrong = function.of_backend("c" if any_isa.name == "numpy" else "numpy")
    with pytest.raises(pyflash.UnsupportedError, match="score_mod: "):
        pyflash.attention_stats(**stats(score_mod=wrong), **any_isa.kwargs)
