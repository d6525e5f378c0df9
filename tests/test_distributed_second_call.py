"""A ring like one before begins before ranks have agreed: what if they do not, or if not all can."""

from __future__ import annotations

import numpy as np
import pytest
from calls import assert_same_bits
from threads import Failed, ThreadCommunicator, on_ranks

import pyflash
from pyflash.distributed import _ring, _routes, _step, head_parallel_attention, ring_attention


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


def arrays(seqlen, seed=0):
    return np.random.default_rng(seed).standard_normal((3, 1, seqlen, 2, 8)).astype(np.float32)


def test_memory_for_what_others_had_before_is_nobodys_error():
    """Rank 1 had far more keys in the call before, and room for them is not there any more."""

    def work(comm):
        own = Ahead(comm.shared, comm.rank)
        q, k, v = arrays(8)
        _, many, more = arrays(5000, 1)
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
        x = arrays(8)
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
        x = arrays(16)[:, :, ::2]
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
    x = arrays(8)[:, 0]

    def work(comm):
        options = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, layout="nonsense")
        return function(*x, comm=comm, **options)

    with pytest.raises(Failed) as caught:
        on_ranks(2, work)
    for error in caught.value.errors:
        assert isinstance(error, pyflash.InvalidArgument) and "layout: found 'nonsense'" in str(error)
