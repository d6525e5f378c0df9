"""Tree attention: draft tokens behind a prefix, each of which sees its own branch alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import (
    DTYPE_NAMES,
    assert_same_bits,
    assert_same_rows,
    dense,
    once,
    paged,
    paged_varlen,
    quantised,
    run,
    varlen,
)
from oracle import Call, assert_matches, expected
from oracle_terms import ancestors
from terms import holes, parents

FAMILIES = ["prefill", "decode"]

#: name -> parents of the draft tokens of one sequence
TREES = {
    "one token": [-1],
    "a chain": [-1, 0, 1, 2, 3, 4, 5],
    "a star": [-1, -1, -1, -1, -1],
    "a star on a root": [-1, 0, 0, 0, 0],
    "two branches": [-1, 0, 0, 1, 2, 3, 4],
    "binary": [-1, 0, 0, 1, 1, 2, 2],
    "a forest": [-1, -1, 0, 1, 0, 4, 1, 5],
    "no token": [],
}


@once
def drafted(
    name: str, prefix: int = 66, dtype: str = "float32", extra_rows: int = 0, causal: Any = True
) -> Call:
    tree = np.array([TREES[name]] * 2, np.int32).reshape(2, -1)
    call = dense(
        401,
        seqlen_q=tree.shape[1] + extra_rows,
        seqlen_kv=prefix + tree.shape[1],
        num_heads=4,
        num_kv_heads=2,
        dtype=dtype,
        causal=causal,
    )
    return call.but(tree=tree)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("name", TREES)
def test_trees(backend, name, dtype, causal):
    for prefix in (0, 5, 66):
        call = drafted(name, prefix, dtype, causal=causal)
        for family in FAMILIES:
            assert_matches(*run(call, backend, family=family), call)


@pytest.mark.parametrize("name", TREES)
def test_parents_and_their_ancestors_mean_the_same(backend, name):
    call = drafted(name)
    tree = call.options["tree"]
    mask = np.array([ancestors(one) for one in tree]).reshape(*tree.shape, tree.shape[1])
    want = run(call, backend)
    for other in (mask, mask.transpose(2, 1, 0).copy().transpose(2, 1, 0), tree.astype("i8")):
        assert_same_bits(run(call.but(tree=other), backend), want)


@pytest.mark.parametrize("name", ["two branches", "binary", "a forest"])
def test_each_branch_is_what_it_is_alone(backend, name):
    """A draft token gives what it gives when the other branches had not been drafted."""
    call = drafted(name)
    out, lse = run(call, backend)
    assert_matches(out, lse, call)
    exact = expected(call).exact
    prefix = call.arrays["k"].shape[1] - len(TREES[name])
    for i, branch in enumerate(ancestors(np.array(TREES[name]))):
        keys = [*range(prefix), *(prefix + np.flatnonzero(branch))]
        arrays = {"q": call.arrays["q"][:, i : i + 1]}
        arrays |= {part: call.arrays[part][:, keys] for part in "kv"}
        alone = expected(Call("flash_attention", arrays, {"causal": True})).exact
        for b in range(2):
            np.testing.assert_allclose(exact[b][0][i], alone[b][0][0], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_before_the_draft_are_not_touched(backend, family):
    call = drafted("binary", extra_rows=20)
    assert_matches(*run(call, backend, family=family), call)
    out, lse = run(call, backend, family=family)
    plain = Call(call.function, call.arrays, {"causal": True})
    other_out, other_lse = run(plain, backend, family=family)
    for mine, other in ((out[:, :20], other_out[:, :20]), (lse[..., :20], other_lse[..., :20])):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        dict(window=(5, 0)),
        dict(window=(5, 0), sink_tokens=3),
        dict(spans=(4, 70)),
        dict(alibi_slopes=np.full(4, 0.5)),
        dict(softcap=1.0, sinks=np.zeros(4)),
        dict(q_offset=60),
        dict(q_offset=np.array([68, 100])),
        dict(num_splits=3),
        dict(num_splits=70),
        dict(seq_lens=np.array([73, 41])),
        dict(seq_lens=np.array([7, 8])),
    ],
    ids=lambda options: " ".join(f"{name} {np.ravel(value)[:2]}" for name, value in options.items()),
)
def test_trees_with_other_options(backend, options):
    call = drafted("two branches").but(**options)
    for family in FAMILIES:
        assert_matches(*run(call, backend, family=family), call)


@pytest.mark.parametrize("stored", ["bfloat16", "float8_e4m3fn", "int4"])
@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_a_tree_behind_pages(backend, page_size, stored):
    call = dense(402, batch=3, seqlen_q=6, seqlen_kv=70, num_heads=4, num_kv_heads=2)
    call = call.but(causal=True, seq_lens=np.array([70, 6, 41]), tree=parents(3, 6, 402))
    call = quantised(call, stored, "tokens")
    want = run(call, backend)
    assert_matches(*want, call)
    assert_same_bits(run(paged(call, page_size), backend), want)


@pytest.mark.parametrize("masked", [False, True])
def test_packed_sequences_with_trees(backend, masked):
    """Some verify all of their draft, some a part of it, some stand elsewhere."""
    call = varlen([5, 2, 9, 0], [40, 5, 9, 7], seed=403, num_heads=4, num_kv_heads=2, causal=True)
    tree = parents(4, 5, 403)
    if masked:
        tree = np.array([ancestors(one) for one in tree]) & holes((4, 5, 5), 403, 0.9)
    call = call.but(tree=tree)
    want = run(call, backend)
    assert_matches(*want, call)
    assert_same_bits(run(paged_varlen(call, 4), backend), want)


def test_a_mask_that_hides_a_token_from_itself(backend):
    """The mask is taken as it is: a draft token without prefix that sees nothing is a row without keys."""
    call = drafted("a chain", prefix=0)
    tree = np.tril(np.ones((2, 7, 7), bool), -1)
    out, lse = run(call.but(tree=tree), backend)
    assert_matches(out, lse, call.but(tree=tree))
    assert not out[:, 0].any() and np.isneginf(lse[..., 0]).all()


def test_a_mask_of_bytes_other_than_0_and_1(backend):
    call = drafted("a chain")
    mask = holes((2, 7, 7), 404)
    strange = (mask * np.arange(2, 9, dtype=np.uint8)).view(bool)
    assert_same_bits(run(call.but(tree=strange), backend), run(call.but(tree=mask), backend))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("family", FAMILIES)
def test_other_branches_never_reach_a_row(backend, family, value):
    call = drafted("two branches")
    clean = run(call, backend, family=family)
    seen = ancestors(np.array(TREES["two branches"]))
    for token in (2, 4):
        for name in "kv":
            array = call.arrays[name].copy()
            array[:, 66 + token] = value
            out, lse = run(call.of(**{name: array}), backend, family=family)
            others = np.flatnonzero(~seen[:, token])
            assert_same_rows(
                backend, (out[:, others], lse[..., others]), (clean[0][:, others], clean[1][..., others])
            )
            assert not np.isfinite(out[:, np.flatnonzero(seen[:, token])]).any()
