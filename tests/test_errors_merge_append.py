"""Refusals of `merge_states` and `append_kv`, word for word the same on every backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import normal, prefix_sums

import pyflash

F4, F2 = np.dtype(np.float32), np.dtype(np.float16)
TYPES = "one of float64, float32, float16, bfloat16"

PARTS, PART_LSE = normal(4, (3, 2, 5, 4, 8)), normal(5, (3, 2, 4, 5))


def parts(**changes: Any) -> dict[str, Any]:
    """Arguments of a merge that is fine, with some changes."""
    return {"out": PARTS, "lse": PART_LSE, **changes}


MERGE = {
    "two axes": (
        parts(out=np.zeros((2, 3), F4)),
        "out: found shape (2, 3), expected shape (num_parts, batch, seqlen, heads, head_dim) or "
        "(num_parts, seqlen, heads, head_dim) or (num_parts, seqlen, head_dim)",
    ),
    "no part": (
        parts(out=PARTS[:0], lse=PART_LSE[:0]),
        "out: found 0 parts, expected at least 1 part on axis 0",
    ),
    "lse of another shape": (
        parts(lse=np.ascontiguousarray(PART_LSE.swapaxes(2, 3))),
        "lse: found shape (3, 2, 5, 4), expected shape (3, 2, 4, 5), one number per row of out",
    ),
    "lse with fewer axes": (
        parts(lse=PART_LSE[0]),
        "lse: found shape (2, 4, 5), expected shape (3, 2, 4, 5)",
    ),
    "integer lse": (parts(lse=PART_LSE.astype("i8")), f"lse: found dtype int64, expected {TYPES}"),
    "half lse": (
        parts(lse=PART_LSE.astype(F2)),
        "lse: found dtype float16, expected float32 or float64",
    ),
    "layout": (parts(layout="thd"), "layout: found 'thd' (str), expected one of 'bshd', 'bhsd'"),
    "sinks of another shape": (
        parts(sinks=np.zeros(5, F4)),
        "sinks: found shape (5,), expected shape (num_heads,) = (4,)",
    ),
    "integer sinks": (parts(sinks=np.zeros(4, "i4")), f"sinks: found dtype int32, expected {TYPES}"),
    "a number as sink": (
        parts(sinks=1.0),
        "sinks: found 1.0 (float), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "out_dtype": (parts(out_dtype="int8"), f"out_dtype: found 'int8' (str), expected {TYPES}"),
}


def new_tokens(**changes: Any) -> dict[str, Any]:
    """Arguments of an append that is fine, with some changes."""
    fine = {
        "k": normal(1, (2, 3, 2, 8)),
        "v": normal(2, (2, 3, 2, 6)),
        "k_cache": np.zeros((6, 4, 2, 8), F4),
        "v_cache": np.zeros((6, 4, 2, 6), F4),
        "block_table": np.array([[5, 1, -1], [0, 2, 3]], np.int32),
        "seq_lens": np.array([2, 9], np.int32),
    }
    return {name: value for name, value in {**fine, **changes}.items() if value is not OMITTED}


OMITTED = object()
SLOTS = dict(block_table=OMITTED, seq_lens=OMITTED)
COS = np.ones((12, 4), F4)
HALF_READ_ONLY = np.zeros((6, 4, 2, 6), F4)
HALF_READ_ONLY.flags.writeable = False
JOINT = np.zeros((6, 4, 2, 8), F4)
APPEND = {
    "tokens of two axes": (
        new_tokens(k=np.zeros((2, 8), F4)),
        "k: found shape (2, 8), expected shape (tokens, num_kv_heads, head_dim) or "
        "(batch, seqlen, num_kv_heads, head_dim)",
    ),
    "v of other tokens": (
        new_tokens(v=normal(2, (2, 2, 2, 6))),
        "v: found shape (2, 2, 2, 6), expected shape (2, 3, 2) + (head_dim_v,), as k",
    ),
    "width of the cache": (
        new_tokens(k_cache=np.zeros((6, 4, 2, 9), F4)),
        "k_cache: found 2 heads of width 9, expected 2 heads of width 8, as k",
    ),
    "heads of the cache": (
        new_tokens(v_cache=np.zeros((6, 4, 3, 6), F4)),
        "v_cache: found 3 heads of width 6, expected 2 heads of width 6, as v",
    ),
    "caches differ": (
        new_tokens(v_cache=np.zeros((5, 4, 2, 6), F4)),
        "v_cache: found (num_pages, page_size) = (5, 4), expected (6, 4), as k_cache",
    ),
    "float64 cache": (
        new_tokens(k_cache=np.zeros((6, 4, 2, 8)), v_cache=np.zeros((6, 4, 2, 6))),
        "k_cache: found dtype float64 beside float32 tokens, expected float64 on both sides or on none",
    ),
    "v of another type": (
        new_tokens(v=normal(2, (2, 3, 2, 6), "float64"), v_cache=np.zeros((6, 4, 2, 6))),
        "v: found dtype float64, expected float32, the dtype of k",
    ),
    "v_cache of another type": (
        new_tokens(v_cache=np.zeros((6, 4, 2, 6), F2)),
        "v_cache: found dtype float16, expected float32, the dtype of k_cache",
    ),
    "read-only cache": (
        new_tokens(v_cache=HALF_READ_ONLY),
        "v_cache: found a read-only array, expected a writable array",
    ),
    "cache over the tokens": (
        new_tokens(k=JOINT[:2, :3], k_cache=JOINT),
        "k_cache: found memory that it shares with k, expected memory of its own",
    ),
    "caches over each other": (
        new_tokens(k_cache=JOINT, v_cache=JOINT[..., :6]),
        "v_cache: found memory that it shares with k_cache, expected memory of its own",
    ),
    "cache layout": (
        new_tokens(cache_layout="bshd"),
        "cache_layout: found 'bshd' (str), expected one of 'nhd', 'hnd'",
    ),
    "neither slots nor lengths": (
        new_tokens(**SLOTS),
        "slots: found neither of slots and seq_lens, expected either slots, or seq_lens (and a block_table)",
    ),
    "slots and lengths": (
        new_tokens(slots=np.zeros((2, 3), "i4")),
        "slots: found both of slots and seq_lens, expected either slots, or seq_lens (and a block_table)",
    ),
    "slots and table": (
        new_tokens(slots=np.zeros((2, 3), "i4"), seq_lens=OMITTED),
        "block_table: found an array of shape (2, 3) and dtype int32, "
        "expected None beside slots, which say every place",
    ),
    "slots of another shape": (
        new_tokens(slots=np.zeros(6, "i4"), **SLOTS),
        "slots: found shape (6,), expected shape (2, 3), one per token",
    ),
    "slot outside the cache": (
        new_tokens(slots=np.array([[0, 1, 2], [3, 24, 5]]), **SLOTS),
        "slots[1, 1]: found 24, expected -1 to 23 (page * page_size + place, or -1 to skip the token)",
    ),
    "slot below -1": (
        new_tokens(slots=np.array([[0, -2, 2], [3, 4, 5]]), **SLOTS),
        "slots[0, 1]: found -2, expected -1 to 23 (page * page_size + place, or -1 to skip the token)",
    ),
    "table of another batch": (
        new_tokens(block_table=np.zeros((3, 3), "i4")),
        "block_table: found shape (3, 3), expected shape (batch, max_pages) = (2, ...)",
    ),
    "lengths of another batch": (
        new_tokens(seq_lens=np.zeros(3, "i4")),
        "seq_lens: found shape (3,), expected shape (batch,) = (2,)",
    ),
    "dense cache of another batch": (
        new_tokens(block_table=OMITTED),
        "k_cache: found batch 6, expected batch 2, one row per sequence where there is no block_table",
    ),
    "length below 0": (
        new_tokens(seq_lens=np.array([-1, 0])),
        "seq_lens[0]: found -1, expected 0 to 12 (length before the append, within the cache)",
    ),
    "no room": (
        new_tokens(seq_lens=np.array([2, 10])),
        "seq_lens[1]: found 10, expected at most 9: 3 tokens are appended",
    ),
    "page -1 where a token goes": (
        new_tokens(seq_lens=np.array([6, 0])),
        "block_table[0, 2]: found -1, expected 0 to 5: a page of the pool, since a token goes there",
    ),
    "batch with cu_seqlens": (
        new_tokens(cu_seqlens=np.array([0, 1, 2])),
        "k: found shape (2, 3, 2, 8), expected shape (tokens, num_kv_heads, head_dim) beside cu_seqlens",
    ),
    "cu_seqlens too short": (
        new_tokens(k=normal(1, (5, 2, 8)), v=normal(2, (5, 2, 6)), cu_seqlens=prefix_sums([1, 3])),
        "cu_seqlens[-1]: found 4, expected 5, the number of packed tokens",
    ),
    "cos alone": (
        new_tokens(cos=COS),
        "sin: found None (NoneType), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "half tables": (
        new_tokens(cos=COS.astype(F2), sin=COS),
        "cos: found dtype float16, expected float32 or float64",
    ),
    "tables too wide": (
        new_tokens(cos=np.ones((12, 5), F4), sin=np.ones((12, 5), F4)),
        "cos: found shape (12, 5), "
        "expected shape (max_position, rotary_dim / 2) with rotary_dim from 2 to head_dim = 8",
    ),
    "tables differ": (
        new_tokens(cos=COS, sin=COS[:, :3]),
        "sin: found an array of shape (12, 3) and dtype float32, "
        "expected shape (12, 4) and dtype float32, as cos",
    ),
    "tables too short": (
        new_tokens(cos=COS[:11], sin=COS[:11]),
        "cos: found shape (11, 4), expected a row for position 11",
    ),
    "interleaved": (new_tokens(interleaved=0), "interleaved: found 0 (int), expected True or False"),
}


@pytest.mark.parametrize("name", MERGE)
def test_merges_refused_by_name(any_isa, name):
    arguments, words = MERGE[name]
    with pytest.raises(pyflash.InvalidArgument) as caught:
        pyflash.merge_states(**arguments, backend=any_isa.name)
    assert str(caught.value) == words


@pytest.mark.parametrize("name", APPEND)
def test_appends_refused_by_name(any_isa, name):
    arguments, words = APPEND[name]
    caches = [arguments[name].copy() for name in ("k_cache", "v_cache")]
    with pytest.raises(pyflash.InvalidArgument) as caught:
        pyflash.append_kv(**arguments, backend=any_isa.name)
    assert str(caught.value) == words
    for cache, before in zip((arguments["k_cache"], arguments["v_cache"]), caches, strict=True):
        assert (cache == before).all()
