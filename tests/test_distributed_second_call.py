"""A call like one before: what it does not find out again, and a ring that begins before ranks agree."""

from __future__ import annotations

import numpy as np
import pytest
from calls import assert_same_bits
from rank_calls import arrays
from threads import Failed, ThreadCommunicator, on_ranks

import pyflash
from pyflash.distributed import (
    _ring,
    _routes,
    _step,
    _visible,
    head_parallel_attention,
    ring_attention,
    shard,
    unshard,
)
from pyflash.distributed._schedules import SCHEDULES


class Ahead(ThreadCommunicator):
    """A rank whose kernels go on by themselves."""

    most = 1 << 40  # elements of an array

    def mark(self):
        return "now"

    def empty(self, shape, dtype, like):
        if np.prod(shape) > self.most:
            raise MemoryError(f"no room for {shape}")
        return super().empty(shape, dtype, like)


@pytest.fixture(autouse=True)
def forgotten():
    _routes._kept.clear()


def tokens(seqlen, seed=0):
    return np.random.default_rng(seed).standard_normal((3, 1, seqlen, 2, 8)).astype(np.float32)


def test_memory_for_what_others_had_before_is_nobodys_error():
    """Rank 1 had far more keys in the call before, and room for them is not there any more."""

    def work(comm):
        own = Ahead(comm.shared, comm.rank)
        q, k, v = tokens(8)
        _, many, more = tokens(5000, 1)
        results = []
        for call, most in ((0, 10**4), (1, 10**6), (0, 10**4), (0, 10**4)):
            own.most = most
            keys = (many, more) if call and comm.rank else (k, v)
            results.append(ring_attention(q, *keys, comm=own))
        return results

    for first, _, third, last in on_ranks(2, work):
        assert_same_bits(third, first)
        assert_same_bits(last, first)


def test_ranks_that_begin_and_ranks_that_do_not():
    def work(comm):
        own = Ahead(comm.shared, comm.rank) if comm.rank else comm
        x = tokens(8)
        return [ring_attention(*x, comm=own, causal=True) for _ in range(3)]

    for results in on_ranks(3, work):
        for result in results[1:]:
            assert_same_bits(result, results[0])


@pytest.mark.parametrize("kind", [ThreadCommunicator, Ahead])
@pytest.mark.parametrize("call", [0, 1])
def test_keys_that_cannot_be_packed_are_everybodys_error(monkeypatch, kind, call):
    pack, calls = _ring._Ring._pack, {}

    def failing(self):
        rank = self._comm.rank
        calls[rank] = calls.get(rank, 0) + 1
        if rank == 1 and calls[rank] == call + 1:
            raise MemoryError("no room to pack")
        pack(self)

    monkeypatch.setattr(_ring._Ring, "_pack", failing)

    def work(comm):
        x = tokens(16)[:, :, ::2]
        return [ring_attention(*x, comm=kind(comm.shared, comm.rank)) for _ in range(call + 1)]

    with pytest.raises(Failed) as caught:
        on_ranks(2, work)
    assert {str(error) for error in caught.value.errors} == {"no room to pack (on rank 1)"}


@pytest.mark.parametrize("size", [2, 5])
def test_what_is_kept_of_packed_sequences_is_in_proportion_to_own_rows(size, monkeypatch):
    monkeypatch.setattr(_step, "_KEPT_BYTES", 48)
    cu_seqlens = np.array([0, 100, 240], np.int64)
    x = np.random.default_rng(2).standard_normal((3, 240, 2, 8)).astype(np.float32)
    options = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, causal=True)
    first, second = (on_ranks(size, lambda c: ring_attention(*x, comm=c, **options)) for _ in range(2))
    assert_same_bits(tuple(second[0:2]), tuple(first[0:2]))
    assert len(_routes._kept) == size
    for _, route in _routes._kept.values():
        kept = sum(map(_step._bytes_of, route.calls.values()))
        assert 0 < kept <= 48 * 240
    if size > 4:
        assert len(route.calls) < size, "not all of them fit"


@pytest.mark.parametrize("function", [ring_attention, head_parallel_attention], ids=lambda f: f.__name__)
def test_a_layout_is_checked_where_it_means_nothing(function):
    cu_seqlens = np.array([0, 8])
    x = tokens(8)[:, 0]

    def work(comm):
        options = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, layout="nonsense")
        return function(*x, comm=comm, **options)

    with pytest.raises(Failed) as caught:
        on_ranks(2, work)
    for error in caught.value.errors:
        assert isinstance(error, pyflash.InvalidArgument) and "layout: found 'nonsense'" in str(error)


class Talking(ThreadCommunicator):
    """Counts small collectives."""

    told = 0

    def allgather(self, value):
        self.told += 1
        return super().allgather(value)


def test_a_call_like_one_before_needs_one_collective_less(monkeypatch):
    """What each rank sees is not found out again, unless something is different on any of them."""
    _routes._kept.clear()
    monkeypatch.setattr(_routes, "_MOST", 100)
    whole = arrays(48)
    uneven, other = np.array([16, 8, 24]), np.array([16, 24, 8])  # rank 0 has as many each time
    calls = [  # lengths, options, small collectives
        (None, dict(causal=True), 4),
        (None, dict(causal=True), 3),
        (uneven, dict(causal=True), 4),
        (other, dict(causal=True), 4),
        (other, dict(causal=True), 3),
        (None, dict(causal=True), 4),  # and remembers the last
        (None, dict(), 4),
        (None, dict(causal=True, q_offset=-3), 4),
        (None, dict(causal=True, q_offset=-3, softcap=3.0), 3),
        (None, dict(spans=(0, 20)), 4),
        (None, dict(spans=(0, 20)), 4),
    ]

    def work(comm):
        done = []
        for lengths, options, _ in calls:
            mine = Talking(comm.shared, comm.rank)
            parts = [shard(x, comm.rank, comm.size, lengths=lengths) for x in whole]
            done.append((ring_attention(*parts, comm=mine, **options), mine.told))
        return done

    results = on_ranks(3, work)
    for i, (_, options, told) in enumerate(calls):
        assert [mine[i][1] for mine in results] == [told] * 3, (i, options)
        want = pyflash.flash_attention(*whole, **options)
        np.testing.assert_allclose(unshard([mine[i][0] for mine in results]), want, atol=2e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", [dict(), dict(causal=True), dict(window=(9, 3))], ids=str)
def test_a_call_like_one_before_looks_at_no_rows(monkeypatch, options, schedule):
    """What each step computes is known; with slopes that is something else."""
    looked = []
    on = _visible.Rows.on
    monkeypatch.setattr(_visible.Rows, "on", lambda *args: looked.append(args) or on(*args))
    _routes._kept.clear()
    whole, slopes = arrays(48), np.array([0.5, 0.1, -0.2, 1.0], "f4")

    def check(**more):
        want = pyflash.flash_attention(*whole, **options, **more)
        wanted = [shard(want, rank, 3, schedule=schedule) for rank in range(3)]
        parts = [[shard(x, rank, 3, schedule=schedule) for x in whole] for rank in range(3)]
        found = on_ranks(
            3, lambda c: ring_attention(*parts[c.rank], comm=c, schedule=schedule, **options, **more)
        )
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
        return len(looked)

    first = check()
    assert 0 < first == check() == check()
    with_slopes = check(alibi_slopes=slopes)
    assert first < with_slopes == check(alibi_slopes=-slopes) == check()
