"""The reference itself: against sums of single numbers without rounding, and the laws of its algebra."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from typing import Any, NamedTuple

import numpy as np
import pytest

import pyflash
from pyflash import _args
from pyflash._description import DECODE_MAX_ROWS
from pyflash._layout import pairs, row_blocks, sequences
from pyflash._masks import MASKS, key_tiles, visible_keys
from pyflash._reference import BACKEND, DECODE_SPLIT, PREFILL_ROWS, TILE, plan
from pyflash._state import (
    State,
    fold_tree,
    state_empty,
    state_finish,
    state_merge,
    state_merge_tree,
    state_update,
    weighted_sum,
    with_sinks,
)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


class Rules(NamedTuple):
    """What a row may see, in the plainest words there are."""

    causal: bool = False
    left: int | None = None
    right: int | None = None

    def see(self, position: int, key: int) -> bool:
        if self.causal and key > position:
            return False
        if self.left is not None and key < position - self.left:
            return False
        return self.right is None or key <= position + self.right


def row_by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, keys: list[int]) -> Any:
    """Out and lse of one query over the listed keys; every sum is exact before its one rounding."""
    if not keys:
        return [0.0] * v.shape[1], -math.inf
    scores = [scale * math.fsum(float(a) * float(b) for a, b in zip(q, k[j], strict=True)) for j in keys]
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    total = math.fsum(weights)
    out = [
        math.fsum(w * float(v[j, d]) for w, j in zip(weights, keys, strict=True)) / total
        for d in range(v.shape[1])
    ]
    return out, top + math.log(total)


def by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, rules: Rules, offset: int) -> Any:
    """Out ``(seqlen_q, num_heads, head_dim_v)`` and lse ``(num_heads, seqlen_q)`` of one sequence."""
    seqlen_q, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    out, lse = np.empty((seqlen_q, num_heads, v.shape[2])), np.empty((num_heads, seqlen_q))
    for i in range(seqlen_q):
        keys = [j for j in range(len(k)) if rules.see(i + offset, j)]
        for h in range(num_heads):
            kv = h // group
            out[i, h], lse[h, i] = row_by_hand(q[i, h], k[:, kv], v[:, kv], head_dim**-0.5, keys)
    return out, lse


#: Options of a call and what they mean by hand: rules, and the offset if it isn't bottom-right.
MASKED = {
    "full": ({}, Rules(), None),
    "causal": ({"causal": True}, Rules(causal=True), None),
    "top left": ({"causal": "top_left"}, Rules(causal=True), 0),
    "offset": ({"causal": True, "q_offset": 2}, Rules(causal=True), 2),
    "rows before all keys": ({"causal": True, "q_offset": -3}, Rules(causal=True), -3),
    "window": ({"window": (2, 1)}, Rules(left=2, right=1), None),
    "left": ({"window": (1, None)}, Rules(left=1), None),
    "right": ({"window": (-1, 0)}, Rules(right=0), None),
    "causal window": ({"causal": True, "window": (3, 9)}, Rules(True, 3, 9), None),
}
CUTS: dict[str, dict[str, Any]] = {
    "naive": {},
    "tiled": {"backend": "numpy"},
    "tile 1": {"backend": "numpy", "tile": 1},
    "tile 3": {"backend": "numpy", "tile": 3, "family": "prefill"},
    "splits": {"backend": "numpy", "num_splits": 3},
    "splits and tiles": {"backend": "numpy", "num_splits": 2, "tile": 2, "family": "decode"},
}


def attend(cut: str, *arrays: np.ndarray, **options: Any) -> Any:
    function = pyflash.naive_attention if cut == "naive" else pyflash.flash_attention
    return function(*arrays, return_lse=True, **CUTS[cut], **options)


def assert_close(out: np.ndarray, want: np.ndarray, v: np.ndarray) -> None:
    assert np.abs(out - want).max(initial=0.0) <= 2e-15 * np.abs(v).max(initial=0.0)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("lengths", [(4, 7), (7, 4), (1, 9), (6, 6)], ids=str)
def test_every_row_against_sums_by_hand(cut, name, lengths):
    options, rules, offset = MASKED[name]
    seqlen_q, seqlen_kv = lengths
    q, k, v = normal(1, 2, seqlen_q, 4, 5), normal(2, 2, seqlen_kv, 2, 5), normal(3, 2, seqlen_kv, 2, 3)
    out, lse = attend(cut, q, k, v, **options)
    for b in range(2):
        want = by_hand(q[b], k[b], v[b], rules, seqlen_kv - seqlen_q if offset is None else offset)
        assert_close(out[b], want[0], v)
        np.testing.assert_allclose(lse[b], want[1], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut != "naive"])
def test_packed_and_paged_against_sums_by_hand(cut):
    seqlens_q, seqlens_kv, page_size = (3, 0, 2), (5, 4, 0), 2
    q, k, v = normal(1, 5, 2, 4), normal(2, 9, 1, 4), normal(3, 9, 1, 4)
    cu_q, cu_kv = np.cumsum([0, *seqlens_q]), np.cumsum([0, *seqlens_kv])
    packed = pyflash.flash_attention_varlen(q, k, v, cu_q, cu_kv, causal=True, **CUTS[cut])

    pool_k, pool_v = np.full((2, 6, page_size, 1, 4), np.nan)
    table, free = np.full((3, 3), -1), iter([4, 2, 0, 5, 1])
    for b, (lo, hi) in enumerate(itertools.pairwise(cu_kv)):
        for page, start in enumerate(range(lo, hi, page_size)):
            table[b, page] = next(free)
            stop = min(start + page_size, hi)
            pool_k[table[b, page], : stop - start] = k[start:stop]
            pool_v[table[b, page], : stop - start] = v[start:stop]
    paged = pyflash.paged_attention(
        q, pool_k, pool_v, table, np.array(seqlens_kv), cu_seqlens_q=cu_q, causal=True, **CUTS[cut]
    )
    np.testing.assert_array_equal(paged, packed)
    for b in range(3):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
        want, _ = by_hand(q[rows], k[keys], v[keys], Rules(causal=True), seqlens_kv[b] - seqlens_q[b])
        assert_close(packed[rows], want, v)


@pytest.mark.parametrize("cut", CUTS)
def test_scores_of_minus_infinity_from_the_data(cut):
    q, k, v = np.ones((2, 1)), np.array([[-np.inf], [-np.inf], [0.0]]), normal(4, 3, 2)
    out, lse = attend(cut, q, k, v, causal=True)
    assert np.isnan(out[0]).all()  # sees keys 0 and 1: 0 / 0, as in naive softmax
    assert lse[0] == -np.inf
    np.testing.assert_array_equal(out[1], v[2])
    assert lse[1] == 0.0


def seen_keys(args: _args.AttentionArgs) -> np.ndarray:
    """(rows, keys): what the masks say of all rows and keys of one sequence with one head."""
    (sequence,) = sequences(args)
    (block,) = row_blocks(args, sequence, size=None)
    return visible_keys(args, pairs(block, np.arange(sequence.seqlen_kv)))


def test_masks_of_the_contract():
    """With 2 queries and 5 keys the rows see 4 and 5; with 5 queries and 2 keys three see none."""
    for seqlen_q, seqlen_kv, want in [(2, 5, [4, 5]), (5, 2, [0, 0, 0, 1, 2])]:
        q, k = np.zeros((seqlen_q, 1)), np.zeros((seqlen_kv, 1))
        args = _args.dense(q, k, k, backend="numpy", causal=True).args
        assert seen_keys(args).sum(axis=1).tolist() == want


def test_masks_combine_by_and():
    x = np.zeros((6, 1))
    rng = np.random.default_rng(15)
    options: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "window": {"window": (1, 2), "sink_tokens": 1},
        "spans": {"spans": (np.array([0, 0, 0, 1, 1, 2]), 5)},
        "mask": {"mask": rng.random((6, 6)) < 0.8},
        "mask_mod": {"mask_mod": lambda batch, head, query, key: (query + key) % 5 != 1},
        "tree": {"tree": np.array([[-1, 0, 0]])},
        "bias": {"bias": np.where(rng.random((6, 6)) < 0.2, -np.inf, 1.0)},
    }
    assert options.keys() == {mask.name for mask in MASKS}
    each = {name: seen_keys(_args.dense(x, x, x, backend="numpy", **o).args) for name, o in options.items()}
    for name, seen in each.items():
        assert 0 < seen.sum() < 36, name
    together = {name: value for o in options.values() for name, value in o.items()}
    everything = _args.dense(x, x, x, backend="numpy", **together).args
    np.testing.assert_array_equal(seen_keys(everything), np.logical_and.reduce(list(each.values())))


def state_of(seed: int, keys: int, rows: int = 5, amplitude: float = 3.0) -> State:
    """The state of random keys, of which each row sees about half, one row none and one all."""
    rng = np.random.default_rng(seed)
    visible = rng.random((rows, keys)) < 0.5
    visible[0], visible[1] = False, True
    return state_update(
        state_empty(rows, 2),
        amplitude * rng.standard_normal((rows, keys)),
        rng.standard_normal((keys, 2)),
        visible,
    )


def assert_same_state(a: State, b: State, tolerance: float = 0.0) -> None:
    np.testing.assert_array_equal(a.m, b.m)
    np.testing.assert_allclose(a.l, b.l, rtol=tolerance, atol=0)
    np.testing.assert_allclose(a.o, b.o, rtol=tolerance, atol=tolerance)


def test_an_empty_state_is_neutral_exactly():
    state = state_of(1, 4)
    assert_same_state(state_merge(state, state_empty(5, 2)), state)
    assert_same_state(state_merge(state_empty(5, 2), state), state)


def test_a_tile_that_no_row_sees_changes_nothing():
    state = state_of(2, 4)
    nothing = np.zeros((5, 3), dtype=bool)
    bad = np.full((5, 3), np.nan)
    assert_same_state(state_update(state, bad, bad[:3, :2], nothing), state)


def test_merge_commutes_exactly():
    a, b = state_of(3, 4), state_of(4, 7)
    assert_same_state(state_merge(a, b), state_merge(b, a))


@pytest.mark.parametrize("amplitude", [1.0, 30.0, 700.0])
def test_merge_is_associative_within_rounding(amplitude):
    a, b, c = (state_of(seed, keys, amplitude=amplitude) for seed, keys in ((5, 3), (6, 1), (7, 8)))
    assert_same_state(state_merge(state_merge(a, b), c), state_merge(a, state_merge(b, c)), 1e-13)


@pytest.mark.parametrize("cut", range(1, 9))
def test_keys_in_any_cut_are_the_keys_at_once(cut):
    """Two updates, or two states merged, are one update with all keys."""
    rng = np.random.default_rng(8)
    s, v, visible = 5 * rng.standard_normal((6, 9)), rng.standard_normal((9, 3)), rng.random((6, 9)) < 0.7
    left, right = slice(0, cut), slice(cut, 9)
    empty = state_empty(6, 3)
    whole = state_update(empty, s, v, visible)
    first = state_update(empty, s[:, left], v[left], visible[:, left])
    second = state_update(empty, s[:, right], v[right], visible[:, right])
    assert_same_state(state_update(first, s[:, right], v[right], visible[:, right]), whole, 1e-14)
    assert_same_state(state_merge(first, second), whole, 1e-14)


def test_the_tree_is_that_of_pairs_of_pairs():
    def tree(n: int) -> str:
        return fold_tree(map(str, range(n)), lambda a, b: f"({a} {b})")

    assert [tree(n) for n in range(1, 8)] == [
        "0",
        "(0 1)",
        "((0 1) 2)",
        "((0 1) (2 3))",
        "(((0 1) (2 3)) 4)",
        "(((0 1) (2 3)) (4 5))",
        "(((0 1) (2 3)) ((4 5) 6))",
    ]


def test_the_tree_merges_states():
    states = [state_of(seed, 3) for seed in range(5)]
    pairs = state_merge(state_merge(states[0], states[1]), state_merge(states[2], states[3]))
    assert_same_state(state_merge_tree(states), state_merge(pairs, states[4]))


def test_finish():
    s, v = normal(9, 5, 6), normal(10, 6, 2)
    visible = np.ones((5, 6), dtype=bool)
    visible[0] = False
    with np.errstate(all="ignore"):
        out, lse = state_finish(state_update(state_empty(5, 2), s, v, visible), visible.any(axis=1))
    p = np.exp(s)
    np.testing.assert_allclose(out[1:], (p @ v / p.sum(axis=1, keepdims=True))[1:], rtol=1e-13)
    np.testing.assert_allclose(lse[1:], np.log(p.sum(axis=1))[1:], rtol=1e-13)
    assert (out[0] == 0).all()
    assert lse[0] == -np.inf


@pytest.mark.parametrize(
    ("sink", "weight"), [(-np.inf, 1.0), (0.0, 2 / 3), (np.inf, 0.0), (np.nan, np.nan)], ids=str
)
def test_sinks(sink, weight):
    """Two keys of score 0, so that the values weigh 2 / (2 + exp(sink))."""
    state = State(np.zeros(1), np.full(1, 2.0), np.full((1, 1), 2.0))
    with np.errstate(all="ignore"):
        out, _ = state_finish(with_sinks(state, np.array([sink])), np.ones(1, dtype=bool))
    np.testing.assert_allclose(out, [[weight]], rtol=1e-15)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
def test_what_is_not_finite_reaches_only_rows_that_see_it(bad):
    p = np.array([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25]])
    visible = np.array([[True, True, False], [True, True, True]])
    v = normal(11, 3, 2)
    clean = p @ v
    v[2, 1] = bad
    got = weighted_sum(p, v, visible)
    np.testing.assert_array_equal(got[0], clean[0])
    np.testing.assert_allclose(got[1, 0], clean[1, 0], rtol=1e-15)
    np.testing.assert_equal(got[1, 1], bad)


def only_plan(seqlen_q: int, seqlen_kv: int, num_heads: int = 1, **options: Any) -> Any:
    q, k = np.zeros((seqlen_q, num_heads, 1)), np.zeros((seqlen_kv, 1, 1))
    args = _args.dense(q, k, k, backend="numpy", **options).args
    (sequence,) = sequences(args)
    return plan(args, sequence)


def test_family_follows_from_rows_per_kv_head():
    assert only_plan(DECODE_MAX_ROWS, 9).family == "decode"
    assert only_plan(DECODE_MAX_ROWS + 1, 9).family == "prefill"
    assert only_plan(DECODE_MAX_ROWS // 4, 9, num_heads=4).family == "decode"
    assert only_plan(DECODE_MAX_ROWS // 4 + 1, 9, num_heads=4).family == "prefill"
    assert only_plan(100, 9, family="decode").family == "decode"


def test_borders_of_splits():
    n = 2 * DECODE_SPLIT + 1
    fixed = ((0, DECODE_SPLIT), (DECODE_SPLIT, 2 * DECODE_SPLIT), (2 * DECODE_SPLIT, n))
    assert only_plan(1, n).borders == fixed
    assert only_plan(99, n).borders == ((0, n),)
    assert only_plan(1, 10, num_splits=4).borders == ((0, 2), (2, 5), (5, 7), (7, 10))
    assert only_plan(99, 10, num_splits=2).borders == ((0, 5), (5, 10))
    assert only_plan(1, 2, num_splits=2**31 - 1).borders == ((0, 1), (1, 2))
    assert only_plan(1, 0).borders == ((0, 0),)


def test_tiles_have_one_length_and_repeat_the_last_key_invisibly():
    q, k = np.zeros((3, 1)), np.zeros((5, 1))
    args = _args.dense(q, k, k, backend="numpy").args
    (block,) = row_blocks(args, next(sequences(args)), PREFILL_ROWS)
    ((at, visible),) = key_tiles(args, block, 0, 5, TILE)
    assert at.key.shape == (1, TILE)
    assert at.key.max() == 4
    assert (visible.sum(axis=1) == 5).all()
    assert block.num_rows == 3
    assert block.row.tolist() == [0, 1, *[2] * (PREFILL_ROWS - 2)]


def test_explain_counts_the_tiles_that_causal_skips():
    n = 4 * PREFILL_ROWS
    x = np.zeros((n, 1))
    got = BACKEND.explain(_args.dense(x, x, x, backend="numpy", causal=True, tile=PREFILL_ROWS).args)
    assert (got.num_items, got.tiles_total, got.tiles_skipped) == (4, 16, 6)
    assert (got.backend, got.family, got.tile, got.num_splits) == ("numpy", "prefill", PREFILL_ROWS, 1)


def test_explain_of_both_families():
    q, k = np.zeros((41, 1, 1)), np.zeros((1300, 1, 1))
    cu_q, cu_kv = np.array([0, 40, 41]), np.array([0, 100, 1300])
    got = pyflash.explain(q, k, k, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv, backend="numpy")
    assert (got.family, got.num_splits, got.rows_per_item) == ("prefill+decode", 3, PREFILL_ROWS)


def peak_bytes(args: _args.AttentionArgs) -> int:
    tracemalloc.start()
    try:
        BACKEND.attention(args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"family": "decode"}], ids=str)
def test_memory_is_what_explain_says_and_does_not_grow(options):
    peaks = []
    for n in (300, 1200):
        x = normal(12, n, 32)
        args = _args.dense(x, x, x, backend="numpy", return_lse=True, **options).args
        peaks.append(peak_bytes(args))
        assert 0.5 < peaks[-1] / BACKEND.explain(args).workspace_bytes < 1.5
    assert peaks[1] < 1.2 * peaks[0]


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_complex_product(interleaved):
    k, angle = normal(13, 4, 2, 6), normal(14, 4, 2)
    k_cache, v_cache = np.zeros((2, 3, 2, 6)), np.zeros((2, 3, 2, 6))
    slots = np.array([5, -1, 0, 2])
    pyflash.append_kv(
        k,
        k,
        k_cache,
        v_cache,
        slots=slots,
        cos=np.cos(angle),
        sin=np.sin(angle),
        interleaved=interleaved,
        backend="numpy",
    )
    a, b = (k[..., 0:4:2], k[..., 1:4:2]) if interleaved else (k[..., :2], k[..., 2:4])
    turned = (a + 1j * b) * np.exp(1j * angle)[:, None]
    parts = (turned.real, turned.imag)
    pairs = np.stack(parts, axis=-1).reshape(4, 2, 4) if interleaved else np.concatenate(parts, axis=-1)
    want = np.concatenate([pairs, k[..., 4:]], axis=-1)
    places_k, places_v = k_cache.reshape(6, 2, 6), v_cache.reshape(6, 2, 6)
    for token in (0, 2, 3):
        np.testing.assert_allclose(places_k[slots[token]], want[token], rtol=1e-14)
        np.testing.assert_array_equal(places_v[slots[token]], k[token])
    assert (places_k[[1, 3, 4]] == 0).all()
    assert (places_v[[1, 3, 4]] == 0).all()
