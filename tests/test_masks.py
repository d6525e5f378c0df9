"""Which keys a row sees: causal, window, sink tokens, spans, offsets and lengths against the predicate.

The last test measures what a row sees under random combinations of everything that hides a key.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import assert_same_bits, dense, once, paged, run
from conftest import TestedBackend, on_cuda, on_host
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from oracle import Call, assert_matches, sequences
from oracle_terms import ancestors, seen_by
from terms import SPARSE, holes, parents, rising_spans, sizes_of

import pyflash

#: name -> options; every one is tried on every pair of lengths
MASKS = {
    "full": {},
    "causal": dict(causal=True),
    "top left": dict(causal="top_left"),
    "window 3 0": dict(window=(3, 0)),
    "window 0 0": dict(window=(0, 0)),
    "window 0 2": dict(window=(0, 2)),
    "left only": dict(window=(5, None)),
    "right only": dict(window=(-1, 4)),
    "right of all": dict(window=(None, -1)),
    "window beyond the causal end": dict(window=(7, 9), causal=True),
    "top left with window": dict(window=(40, 2), causal="top_left"),
    "wide window": dict(window=(66, 1)),
    "offset 0": dict(q_offset=0, causal=True),
    "offset 5": dict(q_offset=5, causal=True),
    "offset before the keys": dict(q_offset=-10, causal=True),
    "window before the keys": dict(q_offset=-30, window=(2, 2)),
    "window behind the keys": dict(q_offset=1000, window=(3, 3)),
    "huge window": dict(window=(2**31 - 1, 2**31 - 1)),
    "more than int64": dict(window=(2**70, 2**70), causal=True),
    "huge offset": dict(q_offset=2**47, causal=True, window=(2**47 + 3, 0)),
    "hugely negative offset": dict(q_offset=-(2**47), window=(0, 2**47 + 3)),
    "sink tokens": dict(sink_tokens=3, window=(4, 0), causal=True),
    "sink tokens right of a window": dict(sink_tokens=70, window=(2, 1)),
    "sink tokens of a causal future": dict(sink_tokens=40, window=(0, 0), causal=True),
    "sink tokens, top left": dict(sink_tokens=2, window=(1, 0), causal="top_left"),
    "sink tokens in front of all rows": dict(sink_tokens=2, window=(3, None), q_offset=-30),
    "sink tokens, rows far behind": dict(sink_tokens=66, window=(3, 3), q_offset=1000),
    "sink tokens without a window": dict(sink_tokens=4, causal=True),
    "more sink tokens than keys": dict(sink_tokens=10**9, window=(0, 0)),
    "a span of numbers": dict(spans=(2, 64)),
    "a span past both ends": dict(spans=(-5, 2**40)),
    "an empty span": dict(spans=(7, 7)),
    "a span that is turned round": dict(spans=(40, 3)),
    "a causal span": dict(spans=(np.array([1]), 66), causal=True),
    "a span with a window and sink tokens": dict(spans=(1, 65), window=(9, 2), sink_tokens=5),
    "a span, top left": dict(spans=(0, 16), causal="top_left", window=(5, 5)),
}

LENGTHS = [(1, 1), (2, 5), (5, 2), (6, 3), (1, 80), (30, 30), (33, 70), (70, 33), (17, 300)]


def probe(seqlen_q: int, seqlen_kv: int, batch: int = 1, **options) -> Call:
    """Equal scores and one value column per key: out[i, j] is 1 / (number of visible keys) or 0."""
    call = dense(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        num_heads=1,
        head_dim=3,
        head_dim_v=seqlen_kv,
        **options,
    )
    call.arrays["q"][...] = 0
    call.arrays["v"][...] = np.eye(seqlen_kv, dtype=np.float32)[None, :, None, :]
    return call


def assert_sees_what_the_predicate_says(out: np.ndarray, lse: np.ndarray, call: Call) -> None:
    for b, sequence in enumerate(sequences(call)):
        seen = np.zeros(out.shape[1::2], bool)
        seen[:, : len(sequence.k)] = seen_by(sequence, call)[0]
        assert ((out[b, :, 0] != 0) == seen).all()
        count = seen.sum(axis=1)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[b, 0], np.log(count), rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(
            out[b, :, 0].max(axis=1), 1 / np.maximum(count, 1) * (count > 0), rtol=2e-6
        )


@once
def probe_of(name: str, seqlen_q: int, seqlen_kv: int) -> Call:
    return probe(seqlen_q, seqlen_kv, **MASKS[name])


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("name", MASKS)
def test_visible_keys(backend, name, family):
    for lengths in LENGTHS:
        call = probe_of(name, *lengths)
        assert_sees_what_the_predicate_says(*run(call, backend, family=family), call)


@once
def random_of(name: str) -> Call:
    return dense(21, seqlen_q=21, seqlen_kv=91, num_heads=4, num_kv_heads=2, **MASKS[name])


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("name", MASKS)
def test_values_under_masks(backend, name, family):
    call = random_of(name)
    assert_matches(*run(call, backend, family=family), call)


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(causal=True),
        dict(causal="top_left"),
        dict(causal=True, window=(4, 0)),
        dict(window=(0, 3)),
        dict(causal=True, window=(4, 0), sink_tokens=15),
        dict(spans=(2, 14), causal=True),
    ],
    ids=str,
)
def test_lengths_of_a_dense_cache(backend, options, index_dtype, family):
    lens = np.array([0, 1, 13, 69, 70], index_dtype)
    call = probe(9, 70, batch=5, seq_lens=lens, **options)
    assert_sees_what_the_predicate_says(*run(call, backend, family=family), call)
    call = dense(22, batch=5, seqlen_q=9, seqlen_kv=70, num_heads=2, num_kv_heads=1, seq_lens=lens, **options)
    assert_matches(*run(call, backend, family=family), call)


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize(
    "options", [dict(causal=True), dict(window=(2, 1)), dict(causal=True, window=(5, 5))], ids=str
)
def test_offset_of_each_sequence(backend, options, index_dtype):
    call = probe(9, 20, batch=5, q_offset=np.array([0, -12, 11, 40, -3], index_dtype), **options)
    assert_sees_what_the_predicate_says(*run(call, backend), call)


def test_offsets_and_lengths_together(backend):
    lens = np.array([30, 0, 7], np.int32)
    call = probe(5, 30, batch=3, q_offset=np.array([3, 3, 3]), seq_lens=lens, causal=True)
    assert_sees_what_the_predicate_says(*run(call, backend), call)


#: name -> two sets of options that mean the same, so that the results have the same bits
SAME = {
    "top left is offset 0": (dict(causal="top_left"), dict(causal=True, q_offset=0)),
    "causal is a right window of 0": (dict(causal=True), dict(window=(None, 0))),
    "default offset": (dict(causal=True), dict(causal=True, q_offset=91 - 21)),
    "offset array": (dict(causal=True, q_offset=33), dict(causal=True, q_offset=np.array([33, 33]))),
    "None is -1": (dict(window=(None, 3)), dict(window=[-1, 3])),
    "unlimited both ways": ({}, dict(window=(-1, None))),
    "wider than the keys": ({}, dict(window=(1000, 1000))),
    "full lengths": (dict(causal=True), dict(causal=True, seq_lens=np.array([91, 91]))),
    "NumPy numbers": (
        dict(causal=True, window=(3, 1)),
        dict(causal=np.True_, window=(np.int32(3), np.int64(1))),
    ),
    "an offset behind the keys sees all": ({}, dict(causal=True, q_offset=10**6)),
    "no sink tokens": (dict(window=(3, 1)), dict(window=(3, 1), sink_tokens=0)),
    "sink tokens need a window": (dict(causal=True), dict(causal=True, sink_tokens=5)),
    "a full span": (dict(causal=True), dict(causal=True, spans=(0, 91))),
    "a span of every row": (dict(spans=(3, 80)), dict(spans=(np.array([3]), np.full((2, 21), 80)))),
    "a span of both types": (dict(spans=(3, 80)), dict(spans=(np.array([[3]], "i4"), np.full(21, 80, "i8")))),
    "a span instead of causal": (dict(causal=True), dict(spans=(0, 71 + np.arange(21)))),
    "a span instead of a window": (
        dict(window=(7, 2)),
        dict(spans=(63 + np.arange(21), 73 + np.arange(21))),
    ),
    "a list of two ends": (dict(spans=(3, 80)), dict(spans=[np.int32(3), np.int64(80)])),
}


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("name", SAME)
def test_options_that_mean_the_same(backend, name, family):
    one, other = SAME[name]
    call = dense(21, seqlen_q=21, seqlen_kv=91, num_heads=4, num_kv_heads=2)
    assert_same_bits(
        run(call.but(**one), backend, family=family), run(call.but(**other), backend, family=family)
    )


def test_causal_rows_of_the_contract(backend):
    """Bottom-right: 2 queries on 5 keys see 4 and 5, of 5 queries on 2 keys the first three see none."""
    out, _ = run(probe(2, 5, causal=True), backend)
    assert [(row > 0).sum() for row in out[0, :, 0]] == [4, 5]
    out, lse = run(probe(5, 2, causal=True), backend)
    assert (out[0, :, 0] > 0).tolist() == [[False, False]] * 3 + [[True, False], [True, True]]
    assert np.isneginf(lse[0, 0]).tolist() == [True] * 3 + [False] * 2


@pytest.mark.long
@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize(
    "seqlen_kv", [*range(1, 40), 63, 64, 65, 127, 128, 129, 191, 192, 193, 511, 512, 513]
)
def test_sweep_of_windows(backend, seqlen_kv, family):
    for seqlen_q in (1, 2, 7, 8, 9, 23, 24, 25, 49):
        for left in (None, 0, 1, 5, 24, 64):
            for right in (None, 0, 3, 24):
                call = probe(seqlen_q, seqlen_kv, window=(left, right), causal=right == 3)
                assert_sees_what_the_predicate_says(*run(call, backend, family=family), call)


def test_sink_tokens_do_not_pass_the_causal_end_nor_a_span_nor_the_length(backend):
    """They are exempt from the window alone."""
    call = probe(6, 12, sink_tokens=8, window=(0, 0), causal=True, seq_lens=np.array([5]), spans=(1, 12))
    out, _ = run(call, backend)
    rows = [np.flatnonzero(row).tolist() for row in out[0, :, 0]]
    assert rows == [[], [], [1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]


def test_spans_of_each_row_and_sequence(backend):
    for seqlen_q, seqlen_kv in ((1, 40), (9, 33), (40, 90)):
        call = probe(seqlen_q, seqlen_kv, batch=3)
        call = call.but(spans=rising_spans(sizes_of(call), seqlen_q), causal=True, q_offset=seqlen_kv // 2)
        for family in ("prefill", "decode"):
            assert_sees_what_the_predicate_says(*run(call, backend, family=family), call)


SIDE = st.one_of(st.none(), st.integers(-1, 30))


@st.composite
def probes(draw: st.DrawFn) -> Call:
    """A probe under any combination of what hides keys."""
    batch, seqlen_q = draw(st.integers(1, 3)), draw(st.integers(1, 40))
    seqlen_kv = draw(st.one_of(st.integers(1, 20), st.integers(1, 140)))
    seed = draw(st.integers(0, 10**6))
    call = probe(seqlen_q, seqlen_kv, batch, causal=draw(st.sampled_from([False, True, "top_left"])))
    n = sizes_of(call)
    options: dict[str, Any] = {}
    lens = np.full(batch, seqlen_kv)
    kinds = ("window", "q_offset", "spans", "seq_lens", "mask", "bias", "mask_mod", "tree")
    for kind in draw(st.lists(st.sampled_from(kinds), unique=True)):
        if kind == "window":
            options |= dict(window=(draw(SIDE), draw(SIDE)), sink_tokens=draw(st.integers(0, 9)))
        elif kind == "q_offset" and call.options["causal"] != "top_left":
            options["q_offset"] = np.array([draw(st.integers(-9, 60)) for _ in range(batch)])
        elif kind == "spans":
            options["spans"] = rising_spans(n, seed)
        elif kind == "seq_lens":
            lens = options["seq_lens"] = np.array([draw(st.integers(0, seqlen_kv)) for _ in range(batch)])
        elif kind in ("mask", "bias"):
            shape = tuple(draw(st.sampled_from([1, size])) for size in n)[draw(st.integers(0, 3)) :]
            made = holes(shape, seed)
            options[kind] = made if kind == "mask" else np.where(made, 0, -np.inf).astype("f4")
        elif kind == "mask_mod" and seqlen_q * seqlen_kv < 500:
            options["mask_mod"] = SPARSE
        elif kind == "tree":
            tree = parents(batch, draw(st.integers(0, 12)), seed)
            if draw(st.booleans()):
                tree = np.array([ancestors(one) for one in tree]).reshape(*tree.shape, tree.shape[1])
            options["tree"] = tree
    if "tree" in options:
        options["tree"] = options["tree"][:, : lens.min()]
        if options["tree"].ndim == 3:
            options["tree"] = options["tree"][:, :, : lens.min()]
    return call.but(**options)


def check_probe(call: Call, family: str, page_size: int, backends: list[TestedBackend]) -> None:
    behind_a_table = paged(call, page_size)
    for backend in backends:
        got = run(call, backend, family=family)
        try:
            assert_sees_what_the_predicate_says(*got, call)
            assert_same_bits(run(behind_a_table, backend, family=family), got, "paged")
        except (AssertionError, pyflash.PyflashError) as error:
            raise AssertionError(f"{backend.id}: {error}") from None


FAMILY = st.sampled_from(["prefill", "decode"])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(call=probes(), family=FAMILY, page_size=st.integers(1, 40))
def test_random_combinations(call, family, page_size):
    check_probe(call, family, page_size, on_host())


@pytest.mark.parametrize("part", range(8))
@pytest.mark.parametrize("backend", on_cuda(), ids=lambda backend: backend.id)
def test_random_combinations_on_cuda(backend, part):
    @seed(part)
    @settings(max_examples=8, deadline=None, database=None)
    @given(call=probes(), family=FAMILY, page_size=st.integers(1, 40))
    def check(call, family, page_size):
        check_probe(call, family, page_size, [backend.reproducible])

    check()


@pytest.mark.long
@settings(max_examples=3000, deadline=None)
@given(call=probes(), family=FAMILY, page_size=st.integers(1, 40))
def test_many_random_combinations(call, family, page_size):
    check_probe(call, family, page_size, on_host())
