"""Who holds which tokens, which keys travel, in which order states are merged: without any rank."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pyflash import InvalidArgument
from pyflash._state import fold_tree
from pyflash.distributed import _ranges, positions, shard, unshard
from pyflash.distributed._heads import heads_of
from pyflash.distributed._schedules import SCHEDULES, even_lengths, layout
from pyflash.distributed._tree import RankTree
from pyflash.distributed._visible import Mask, messages, visible

SIZES = (1, 2, 3, 4, 7)
NO_MASK = Mask(False, (None, None), None)
CAUSAL = Mask(True, (None, None), None)


def lengths_for(schedule: str, size: int, totals: list[int], seed: int = 0) -> np.ndarray:
    if schedule == "stripe":
        return even_lengths(np.array(totals), size)
    rng = np.random.default_rng(seed)
    return np.stack([rng.multinomial(total, np.full(size, 1 / size)) for total in totals], axis=1)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [0, 1, 5, 24, 97])
def test_shards_share_out_all_tokens(schedule, size, length):
    held = [shard(np.arange(length), rank, size, schedule=schedule, axis=0) for rank in range(size)]
    assert sorted(np.concatenate(held).tolist()) == list(range(length))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    for rank, tokens in enumerate(held):
        assert tokens.tolist() == sorted(tokens.tolist())
        assert tokens.tolist() == positions(length, rank, size, schedule=schedule).tolist()
    assert unshard(held, schedule=schedule, axis=0).tolist() == list(range(length))


def test_what_the_schedules_are():
    def of(schedule):
        return [shard(np.arange(12), rank, 3, schedule=schedule, axis=0).tolist() for rank in range(3)]

    assert of("contiguous") == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert of("zigzag") == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert of("stripe") == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


@pytest.mark.parametrize("schedule", ["zigzag", "contiguous"])
@pytest.mark.parametrize("size", SIZES)
def test_uneven_shards(schedule, size):
    x = np.random.default_rng(1).standard_normal((2, 61, 3, 4))
    lengths = lengths_for(schedule, size, [61], seed=2)[:, 0]
    parts = [shard(x, rank, size, schedule=schedule, lengths=lengths) for rank in range(size)]
    assert [part.shape[1] for part in parts] == lengths.tolist()
    assert (unshard(parts, schedule=schedule) == x).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
def test_packed_shards(schedule, size):
    cu_seqlens = np.array([0, 7, 7, 30, 31], np.int32)
    x = np.arange(31)
    parts = [shard(x, r, size, schedule=schedule, axis=0, cu_seqlens=cu_seqlens) for r in range(size)]
    for b, (lo, hi) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        alone = [shard(x[lo:hi], r, size, schedule=schedule, axis=0).tolist() for r in range(size)]
        assert [part[cu[b] : cu[b + 1]].tolist() for part, cu in parts] == alone
    whole, cu = unshard([p for p, _ in parts], schedule=schedule, axis=0, cu_seqlens=[c for _, c in parts])
    assert whole.tolist() == x.tolist() and cu.tolist() == cu_seqlens.tolist()


def test_shards_of_torch_tensors():
    torch = pytest.importorskip("torch")
    x = torch.arange(60).reshape(1, 20, 3, 1)
    for schedule in SCHEDULES:
        parts = [shard(x, rank, 3, schedule=schedule) for rank in range(3)]
        assert torch.equal(unshard(parts, schedule=schedule), x)


def test_views_where_tokens_lie_evenly():
    x = np.zeros((1, 24, 2, 4))
    for schedule, is_view in (("contiguous", True), ("stripe", True), ("zigzag", False)):
        assert np.shares_memory(shard(x, 1, 3, schedule=schedule), x) is is_view


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(rank=3), "rank: found 3, expected an integer, 0 to 2"),
        (dict(size=0), "size: found 0"),
        (dict(schedule="ring"), r"schedule: found 'ring'.*'zigzag'"),
        (dict(lengths=np.array([4, 4, 4])), r"lengths: found \[12\] tokens over all ranks.*\[10\]"),
        (dict(lengths=np.array([5, 5])), r"lengths: found shape \(2, 1\), expected shape \(3, 1\)"),
        (
            dict(schedule="stripe", lengths=np.array([2, 4, 4])),
            r"lengths: found 2 of 10 tokens on rank 0 of 3",
        ),
        (dict(cu_seqlens=np.array([0, 9])), r"cu_seqlens\[-1\]: found 9, expected 10"),
    ],
)
def test_shard_refuses(options, message):
    with pytest.raises(InvalidArgument, match=message):
        shard(np.zeros((10, 2, 4)), **dict(rank=0, size=3) | options)


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (lambda: shard([1, 2], 0, 2, axis=0), r"x: found \[1, 2\] \(list\), expected an array"),
        (lambda: unshard([np.zeros((2, 2)), np.zeros((2, 1))], axis=0), r"shards\[1\]: found one of numpy"),
        (lambda: unshard([np.zeros(2), np.zeros((2, 1))], axis=0), r"shards\[1\]: found one of numpy"),
        (lambda: unshard([np.zeros(2), 3], axis=0), r"shards\[1\]: found 3 \(int\), expected an array"),
        (lambda: unshard(7), r"shards: found 7 \(int\), expected a sequence"),
        (lambda: unshard([np.zeros(2)] * 2, axis=0, cu_seqlens=[None, None]), r"cu_seqlens\[0\]: found None"),
        (lambda: unshard([np.zeros(2)] * 2, axis=0, cu_seqlens=5), r"cu_seqlens: found 5 \(int\)"),
        (lambda: positions(2**62, 0, 2), "seqlen: found 4611686018427387904"),
        (lambda: shard(np.zeros(8), 0, 2), r"axis: found -3, expected an axis of arrays of shape \(8,\)"),
        (lambda: unshard([np.zeros(8)] * 2), r"axis: found -3, expected an axis of arrays of shape \(8,\)"),
        (
            lambda: unshard([np.zeros(8)] * 2, axis=0, cu_seqlens=[np.array([0, 8])]),
            "cu_seqlens: found those of 1 ranks, expected of 2",
        ),
        (lambda: positions(8.0, 0, 2), "seqlen: found 8.0"),
        (lambda: positions(np.array([8.0]), 0, 2), "seqlen: found dtype float64"),
        (lambda: positions(np.array([3, -1]), 0, 2), r"seqlen\[1\]: found -1"),
    ],
)
def test_helpers_name_what_is_wrong(work, message):
    with pytest.raises(InvalidArgument, match=message):
        work()


def test_shards_of_a_class_of_ones_own():
    class Own(np.ndarray):
        pass

    parts = [shard(np.arange(8).view(Own), rank, 2, axis=0) for rank in (0, 1)]
    assert unshard(parts, axis=0).tolist() == list(range(8))


# --- what rows see, on whom ---

MASKS = {
    "full": NO_MASK,
    "causal": CAUSAL,
    "window": Mask(True, (6, None), None),
    "both sides": Mask(False, (5, 3), None),
}


def by_hand(queries, keys, rank, other, mask, offset):
    """(rows, keys) bool: which tokens of another rank each row sees, from the definitions."""
    row, key = queries.positions(rank)[:, None] + offset, keys.positions(other)[None]
    left, right = mask.window
    seen = np.ones((row.size, key.size), bool)
    if mask.causal:
        seen &= key <= row
    if left is not None:
        seen &= key >= row - left
    if right is not None:
        seen &= key <= row + right
    return seen


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("lengths", [(40, 40), (17, 40), (40, 17), (2, 3)])
def test_rows_see_what_positions_say(size, schedule, mask, lengths):
    queries, keys = (
        layout(schedule, lengths_for(schedule, size, [n], seed=i)) for i, n in enumerate(lengths)
    )
    for rank, other in itertools.product(range(size), repeat=2):
        rows = visible(queries, keys, rank, MASKS[mask], None)
        seen = by_hand(queries, keys, rank, other, MASKS[mask], lengths[1] - lengths[0])
        lo, hi = rows.on(keys, other)
        token = np.arange(seen.shape[1])
        assert ((token >= lo[0][:, None]) & (token < hi[0][:, None])).tolist() == seen.tolist()
        assert (np.diff(lo) >= 0).all() and (np.diff(hi) >= 0).all()
        needed = rows.needs(keys, other)
        travels = np.zeros(seen.shape[1], bool)
        for first, last in needed:
            travels[first:last] = True
        assert (travels >= seen.any(axis=0)).all()
        if schedule == "contiguous":  # one piece: nothing but what is seen
            assert (travels == seen.any(axis=0)).all()


@pytest.mark.parametrize("size", SIZES)
def test_causal_zigzag_and_stripe_share_the_work_evenly(size):
    def work(schedule, length):
        where = layout(schedule, even_lengths(np.array([length]), size))
        rows = [visible(where, where, rank, CAUSAL, None) for rank in range(size)]
        return [
            [int((hi - lo).sum()) for lo, hi in (one.on(where, (rank - step) % size) for step in range(size))]
            for rank, one in enumerate(rows)
        ]

    length = 2 * size * 32
    zigzag = work("zigzag", length)
    assert len({sum(steps) for steps in zigzag}) == 1
    # In every step but the first each rank has the same to do: half of its rows times its keys.
    assert {pairs for steps in zigzag for pairs in steps[1:]} <= {(length // size) ** 2 // 2}
    stripe = [sum(steps) for steps in work("stripe", length)]
    assert max(stripe) - min(stripe) <= length  # a row's own key, more or less
    contiguous = [sum(steps) for steps in work("contiguous", length)]
    assert contiguous == sorted(contiguous)
    if size > 1:
        assert contiguous[-1] > 2 * contiguous[0]


def needs_of(schedule, size, length, mask):
    where = layout(schedule, even_lengths(np.array([length]), size))
    rows = [visible(where, where, rank, mask, None) for rank in range(size)]
    return where, [[one.needs(where, other) for other in range(size)] for one in rows]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", SIZES)
def test_messages_hold_what_is_needed_further_on(schedule, mask, size):
    _, needs = needs_of(schedule, size, 48, MASKS[mask])
    for origin in range(size):
        sent = messages(needs, origin)
        for distance in range(1, size):
            held = {t for lo, hi in sent[distance] for t in range(lo, hi)}
            wanted = {t for lo, hi in needs[(origin + distance) % size][origin] for t in range(lo, hi)}
            further = {t for later in sent[distance + 1 :] for lo, hi in later for t in range(lo, hi)}
            assert held == wanted | further


def test_what_nobody_sees_does_not_travel():
    size, length = 4, 64
    _, needs = needs_of("contiguous", size, length, Mask(True, (5, 0), None))
    assert [_ranges.total(x) for x in messages(needs, 1)] == [5, 5, 0, 0]  # five keys, one rank on
    _, needs = needs_of("contiguous", size, length, CAUSAL)
    assert [_ranges.total(x) for x in messages(needs, 1)] == [16, 16, 16, 0]  # never back to rank 0
    _, needs = needs_of("zigzag", size, length, Mask(True, (5, 0), None))
    # The end of the first half is seen by rank 2, that of the second by rank 0: it goes through the others.
    assert [x.tolist() for x in messages(needs, 1)[1:]] == [[[3, 8], [11, 16]], [[11, 16]], [[11, 16]]]


def test_sets_of_tokens():
    held = _ranges.union([np.array([[8, 10], [0, 3]]), np.array([[2, 5], [9, 9]])])
    assert held.tolist() == [[0, 5], [8, 10]] and _ranges.total(held) == 7
    assert _ranges.place(held, np.array([0, 4, 5, 8, 9, 10, 99])).tolist() == [0, 4, 5, 5, 6, 7, 7]
    assert _ranges.runs(np.array([[3, 5], [8, 9]]), held).tolist() == [[3, 6]]
    assert _ranges.runs(np.array([[1, 3], [9, 10]]), held).tolist() == [[1, 3], [6, 7]]
    assert _ranges.place(_ranges.EMPTY, np.array([3])).tolist() == [0]


# --- merging ---


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 13])
def test_merges_do_not_depend_on_the_order_of_arrival(size):
    """States are texts here: what is merged with what stands in the result."""

    def merge(left, right):
        return f"({left} {right})"

    want = fold_tree(map(str, range(size)), merge)
    rng = np.random.default_rng(size)
    for _ in range(10):
        tree = RankTree(size, merge)
        for rank in rng.permutation(size).tolist():
            tree.add(rank, str(rank))
        assert fold_tree(tree.rest(), merge) == want


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_ranks_that_saw_nothing_are_neutral(size):
    for empty in itertools.product([False, True], repeat=size):
        tree = RankTree(size, lambda left, right: left + right)
        for rank in reversed(range(size)):
            tree.add(rank, None if empty[rank] else [rank])
        assert [rank for state in tree.rest() for rank in state] == [
            rank for rank in range(size) if not empty[rank]
        ]


def test_few_states_wait():
    """In the order of the ring: the number of states that are there at a time grows as log2."""
    for size in (2, 4, 8, 64, 100):
        for first in range(0, size, 7):
            there = most = 0

            def merge(left, right):
                nonlocal there
                there -= 1
                return left

            tree = RankTree(size, merge)
            for step in range(size):
                there += 1
                most = max(most, there)
                tree.add((first - step) % size, "state")
            assert most <= 2 * np.log2(size)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 8), (8, 2), (6, 3), (5, 1), (4, 0)])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_heads_are_shared_out(size, num_heads, num_kv_heads):
    if not num_kv_heads:
        num_heads = 0
    heads = [heads_of(rank, size, num_heads, num_kv_heads) for rank in range(size)]
    assert [h for one in heads for h in one.q] == list(range(num_heads))
    for one in heads:
        assert {h // (num_heads // num_kv_heads) for h in one.q} == set(one.kv)
