"""The communicator of NCCL on a double of CuPy; between real GPUs tests/distributed/test_gpus.py runs."""

from __future__ import annotations

import functools
import sys
import threading

import fake_nccl
import numpy as np
import pytest
import spread
from calls import assert_same_bits
from oracle import assert_matches
from threads import Failed, on_ranks

import pyflash
from pyflash.distributed import (
    _nccl,
    _ring,
    _routes,
    communicator,
    context_parallel_decode,
    head_parallel_attention,
    ring_attention,
)


@pytest.fixture(autouse=True)
def cupy(monkeypatch):
    for name, module in fake_nccl.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    _nccl._stream_of.cache_clear()
    yield sys.modules["cupy"]
    _nccl._stream_of.cache_clear()


def on_gpus(size, work):
    """What `work` returns on each rank, given NCCL's own object."""

    def run(comm):
        fake_nccl.Device(comm.rank).use()
        return work(fake_nccl.NcclCommunicator(comm.shared, comm.rank))

    return on_ranks(size, run)


def plain(result):
    """The same as NumPy's own arrays."""
    return tuple(None if x is None else np.asarray(x) for x in result)


def placed(x):
    return sys.modules["cupy"].asarray(x)


NAMES = ["causal", "causal bfloat16", "uneven", "causal slopes", "terms", "packed", "no keys"]


@pytest.mark.parametrize(
    ("name", "function"), [*((name, f) for name in NAMES for f in ("ring", "heads")), ("spans", "ring")]
)
def test_against_the_oracle(name, function):
    for size in (1, 2, 3):
        results = on_gpus(
            size, lambda c: plain(spread.result(communicator(c), name, "zigzag", function, placed))
        )
        spread.check(results, name, "zigzag")


@pytest.mark.parametrize("name", spread.DECODES)
def test_decode_against_the_oracle(name):
    for size in (1, 2, 3):
        results = on_gpus(size, lambda c: plain(spread.decode(communicator(c), name, made=placed)))
        for result in results:
            assert_matches(*result, spread.decode_call(name))
            assert_same_bits(result, results[0])


def test_messages_follow_what_was_computed_before(cupy):
    """NCCL's stream waits for the caller's before each step, and the other way round after it."""

    def work(comm):
        q = placed(np.ones((1, 8, 2, 8), np.float32))
        ring_attention(q, q, q, comm=comm)
        return len(_nccl._stream_of(comm.rank_id()).waited), len(cupy.cuda.get_current_stream(0).waited)

    assert on_gpus(3, work) == [(3, 3)] * 3


def test_the_first_messages_do_not_wait_for_a_kernel_that_runs_ahead(cupy, monkeypatch):
    """They wait for what was started before it, where it begins before ranks have agreed."""
    steps = {}

    class Recording(fake_nccl.Stream):
        def record(self):
            event = super().record()
            event.steps = steps.get(threading.get_ident(), 0)
            return event

    def take(self, tree, held, real=_ring._Ring._take):
        real(self, tree, held)
        steps[threading.get_ident()] += 1

    _routes._kept.clear()
    monkeypatch.setattr(_ring._Ring, "_take", take)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", functools.cache(lambda _: Recording()))
    q = placed(np.ones((1, 8, 2, 8), np.float32))

    def work(comm):
        steps[threading.get_ident()] = 0
        waited = _nccl._stream_of(comm.rank_id()).waited
        ring_attention(q, q, q, comm=comm)
        ring_attention(q, q, q, comm=comm)
        return [event.steps for event in waited]

    assert on_gpus(3, work) == [[0, 1, 2, 3, 4, 5]] * 3


@pytest.mark.parametrize("length", [0, 1, 1000, 1024, 1025, 5000])
def test_values_of_any_length(length):
    def work(comm):
        world = communicator(comm)
        return world.allgather((world.rank, "x" * (length * world.rank)))

    for values in on_gpus(3, work):
        assert values == [(rank, "x" * (length * rank)) for rank in range(3)]


@pytest.mark.parametrize(
    "function", [ring_attention, head_parallel_attention, context_parallel_decode], ids=lambda f: f.__name__
)
def test_arrays_that_it_cannot_send(function):
    array = np.ones((1, 8, 2, 8), np.float32)

    def work(comm):
        function(array, placed(array), placed(array), comm=comm)

    def elsewhere(comm):
        with fake_nccl.Device(5):
            here = placed(array)
            work_on(here, comm)

    def work_on(here, comm):
        function(here, here, here, comm=comm)

    with pytest.raises(Failed) as caught:
        on_gpus(2, work)
    for error in caught.value.errors:
        assert isinstance(error, pyflash.InvalidArgument)
        assert str(error).startswith("q: found an array of shape (1, 8, 2, 8)")
        assert "an array of CuPy" in str(error)
    with pytest.raises(Failed) as caught:
        on_gpus(2, elsewhere)
    for error in caught.value.errors:
        assert isinstance(error, pyflash.UnsupportedError)
        assert "GPU 5" in str(error)


def test_the_first_step_of_a_call_like_one_before_does_not_wait_for_the_others(monkeypatch):
    """Its own keys need nobody; what it has computed is used, or dropped where ranks do not agree."""
    began = []

    def begin(self, real=_ring._Ring.begin):
        began.append(self._comm.rank)
        real(self)

    _routes._kept.clear()
    monkeypatch.setattr(_ring._Ring, "begin", begin)
    q = np.random.default_rng(0).standard_normal((1, 33, 2, 8), dtype=np.float32)

    def work(comm):
        parts = placed(q[:, comm.rank_id() :: 3].copy())
        first, second = (
            np.asarray(ring_attention(parts, parts, parts, comm=comm, causal=True, schedule="stripe"))
            for _ in range(2)
        )
        other = ring_attention(parts, parts, parts[:, ::-1], comm=comm, causal=True, schedule="stripe")
        longer = placed(q[:, : 5 + comm.rank_id()].copy()) if comm.rank_id() else parts
        try:  # one rank has what it had before, and begins; the others have not
            ring_attention(longer, longer, longer, comm=comm, causal=True, schedule="stripe")
            error = None
        except pyflash.InvalidArgument as caught:
            error = str(caught)
        again = ring_attention(parts, parts, parts, comm=comm, causal=True, schedule="stripe")
        return first, second, np.asarray(other), np.asarray(again), error

    results = on_gpus(3, work)
    want = pyflash.naive_attention(q, q, q, causal=True)
    for rank, (first, second, _, again, _) in enumerate(results):
        assert_same_bits(second, first)
        assert_same_bits(again, first)
        np.testing.assert_allclose(first, want[:, rank::3], atol=1e-5)
    assert len({error for *_, error in results}) == 1
    assert sorted(began) == sorted([0, 1, 2] * 3 + [0])
