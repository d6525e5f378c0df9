"""Which keys a row sees: causal, window, offsets and lengths against the oracle's predicate."""

from __future__ import annotations

import numpy as np
import pytest
from calls import assert_same_bits, dense, once, run
from oracle import Call, assert_matches, sequences, visible, window_of

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
    left, right = window_of(call)
    for b, sequence in enumerate(sequences(call)):
        position = np.arange(len(sequence.q))[:, None] + sequence.offset
        seen = np.zeros(out.shape[1::2], bool)
        seen[:, : len(sequence.k)] = visible(
            position,
            np.arange(len(sequence.k)),
            causal=bool(call.options.get("causal")),
            left=left,
            right=right,
        )
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
    [{}, dict(causal=True), dict(causal="top_left"), dict(causal=True, window=(4, 0)), dict(window=(0, 3))],
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
