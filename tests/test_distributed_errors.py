"""Errors on ranks: found before work, told to all in the same words; no rank waits for one that failed."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from rank_calls import FUNCTIONS, arrays, errors_of, ring_with
from threads import Failed, ThreadCommunicator, on_ranks

import pyflash
from pyflash.distributed import (
    RankFailed,
    _decode,
    _heads,
    _ring,
    communicator,
    context_parallel_decode,
    head_parallel_attention,
    ring_attention,
    shard,
)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_wrong_argument_on_one_rank_is_everybodys_error(function):
    errors = errors_of(3, lambda c: FUNCTIONS[function](c, softcap=-1.0 if c.rank == 1 else 2.0))
    assert {type(error) for error in errors} == {pyflash.InvalidArgument}
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith("softcap: found -1.0") and str(errors[0]).endswith("(on rank 1)")


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        (
            "softcap",
            (2.0, 3.0),
            "softcap: found 2.0 on rank 0 and 3.0 on rank 1, expected the same everywhere",
        ),
        ("window", ((3, 0), None), r"window: found (3, 0) on rank 0 and None on rank 1"),
        ("scale", (0.5, 0.25), "scale: found 0.5 on rank 0 and 0.25 on rank 1"),
        ("sinks", (np.zeros(4), np.ones(4)), "sinks: found an array of shape (4,)"),
        ("kv_dtype", (None, "int4"), "kv_dtype"),
    ],
)
def test_options_that_differ(function, option, values, message):
    errors = errors_of(2, lambda c: FUNCTIONS[function](c, **{option: values[c.rank]}))
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], pyflash.InvalidArgument) and message in str(errors[0])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_shapes_that_differ(function):
    def work(comm, change):
        q, k, v = (x[:, :6] for x in arrays(24))
        q, k, v = change(q, k, v) if comm.rank == 1 else (q, k, v)
        call = {"ring": ring_attention, "heads": head_parallel_attention, "decode": context_parallel_decode}
        return call[function](q, k, v, comm=comm)

    for name, change in {
        "q": lambda q, k, v: (q[:, :, :2], k, v),
        "k": lambda q, k, v: (q, k[:, :, :1], v[:, :, :1]),
        "v": lambda q, k, v: (q, k, v[..., :4]),
    }.items():
        errors = errors_of(2, lambda c: work(c, change))  # noqa: B023
        assert len({str(error) for error in errors}) == 1
        assert str(errors[0]).startswith(f"{name}: found "), errors[0]
        assert "on rank 0 and " in str(errors[0])


def test_stripes_have_their_lengths():
    def work(comm):
        parts = [shard(x, comm.rank, 2, schedule="contiguous", lengths=np.array([5, 19])) for x in arrays(24)]
        return ring_attention(*parts, comm=comm, schedule="stripe")

    errors = errors_of(2, work)
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith("q: found 5 of 24 tokens on rank 0 of 2 (sequence 0), expected 12")


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_failure_in_the_middle_is_everybodys_error(monkeypatch, step):
    """The rank that fails goes on sending: the others wait for what comes through it."""
    attend = _ring.Steps.attend

    def failing(self, held):
        if self._rank == 1 and (1 - held.rank) % 3 == step:
            raise ZeroDivisionError("a kernel's own fault")
        return attend(self, held)

    monkeypatch.setattr(_ring.Steps, "attend", failing)
    errors = errors_of(3, lambda c: ring_with(c, causal=True))
    assert {type(error) for error in errors} == {ZeroDivisionError}
    assert {str(error) for error in errors} == {"a kernel's own fault (on rank 1)"}
    assert isinstance(errors[1].__cause__, ZeroDivisionError) and errors[0].__cause__ is None


def test_a_foreign_exception_is_named(monkeypatch):
    class KernelFault(Exception):
        pass

    def failing(*args, **options):
        raise KernelFault("no such luck")

    monkeypatch.setattr(_ring.Steps, "attend", failing)
    errors = errors_of(2, ring_with)
    assert {type(error) for error in errors} == {RankFailed}
    assert {str(error) for error in errors} == {"KernelFault: no such luck (on rank 0)"}


def test_no_memory_for_buffers_is_everybodys_error():
    class Full(ThreadCommunicator):
        def empty(self, shape, dtype, like):
            if self.rank == 2 and np.prod(shape) > 200:
                raise MemoryError(f"no room for {shape}")
            return super().empty(shape, dtype, like)

    for function in FUNCTIONS.values():
        errors = errors_of(3, lambda c: function(Full(c.shared, c.rank)))  # noqa: B023
        assert {type(error) for error in errors} == {MemoryError}
        assert len({str(error) for error in errors}) == 1


def test_a_decode_kernel_that_fails_is_everybodys_error(monkeypatch):
    from pyflash.distributed import _decode

    attend = _decode._attend

    def failing(call, offset):
        attend(call, offset)
        if call.k.shape[1] == 3:
            raise MemoryError("no scratch")

    monkeypatch.setattr(_decode, "_attend", failing)
    q, k, v = arrays(8)
    for options in ({}, dict(window=(3, 0))):
        errors = errors_of(
            2,
            lambda c: context_parallel_decode(
                *(x[:, : 3 + c.rank] if x is not q else q for x in (q, k, v)),
                comm=c,
                **options,  # noqa: B023
            ),
        )
        assert {str(error) for error in errors} == {"no scratch (on rank 0)"}


def test_lengths_that_cannot_be_read_are_everybodys_error(monkeypatch):
    """They are read before ranks tell them to one another: others would wait for a rank that has none."""

    num_keys, first = _decode._num_keys, iter([True])

    def failing(call):
        if next(first, False):
            raise MemoryError("no lengths")
        return num_keys(call)

    monkeypatch.setattr(_decode, "_num_keys", failing)
    errors = errors_of(3, lambda c: context_parallel_decode(*arrays(8), comm=c, window=(3, 0)))
    assert len({str(error) for error in errors}) == 1 and "no lengths" in str(errors[0])


@pytest.mark.parametrize("function", FUNCTIONS)
def test_memory_that_ends_anywhere_is_everybodys_error(function):
    class Scarce(ThreadCommunicator):
        left = 10**9  # arrays that can still be made

        def empty(self, *of):
            self.left -= 1
            if self.left < 0:
                raise MemoryError("no more")
            return super().empty(*of)

    def errors_with(left):
        def work(comm):
            own = Scarce(comm.shared, comm.rank)
            if comm.rank == 1:
                own.left = left
            FUNCTIONS[function](own, causal=True)

        try:
            on_ranks(3, work)
        except Failed as failed:
            return {str(error) for error in failed.errors}
        return None

    found = list(itertools.takewhile(bool, map(errors_with, range(40))))
    assert 0 < len(found) < 40
    assert all(errors == {"no more (on rank 1)"} for errors in found)


def test_rows_that_cannot_be_packed_are_everybodys_error(monkeypatch):
    rows_at, first = _heads.rows_at, iter([True])

    def failing(*of):
        if len(of[0].shape) == 3 and next(first, False):  # of lse, when all has been computed
            raise MemoryError("no rows")
        return rows_at(*of)

    monkeypatch.setattr(_heads, "rows_at", failing)
    errors = errors_of(3, FUNCTIONS["heads"])
    assert len({str(error) for error in errors}) == 1 and "no rows" in str(errors[0])


def test_an_exception_without_words_is_told():
    class Wordless(Exception):
        def __str__(self):
            raise RuntimeError

    class Failing(ThreadCommunicator):
        def see(self, name, x):
            raise Wordless

    def work(comm):
        own = Failing(comm.shared, comm.rank) if comm.rank == 1 else comm
        return ring_attention(*arrays(8), comm=own)

    errors = errors_of(2, work)
    assert {str(error) for error in errors} == {"Wordless: an exception without words (on rank 1)"}


def test_what_is_no_communicator():
    with pytest.raises(pyflash.InvalidArgument, match=r"comm: found 3 .*expected a communicator of mpi4py"):
        communicator(3)


@pytest.mark.parametrize("options", [dict(kv_start=np.zeros(2, int)), dict(causal="top_left")])
def test_decode_refuses(options):
    errors = errors_of(2, lambda c: context_parallel_decode(*arrays(8), comm=c, **options))
    assert {type(error) for error in errors} == {pyflash.InvalidArgument}


@pytest.mark.parametrize(
    ("kv_start", "message"),
    [
        (np.zeros(3, int), "kv_start: found shape (3,), expected shape (batch,) = (2,)"),
        (np.zeros(2, np.uint64), "kv_start: found dtype uint64, expected int32 or int64"),
        (0.5, "kv_start: found"),
    ],
)
def test_decode_refuses_wrong_places(kv_start, message):
    places = dict(kv_start=kv_start, q_offset=9)
    errors = errors_of(2, lambda c: FUNCTIONS["decode"](c, **places))
    assert {type(error) for error in errors} == {pyflash.InvalidArgument}
    assert str(errors[0]).startswith(message)


def test_numbers_of_numpy_are_compared_after_a_call_that_was_right():
    """They have a shape and a type, like arrays, which say nothing about them."""
    wrong = dict(
        scale=(np.float64(0.5), np.float64(0.25)),
        softcap=(np.float32(2), np.float32(3)),
        q_offset=(np.int64(9), np.int64(8)),
        causal=(np.True_, np.False_),  # of which one gathers lengths and the other does not
    )
    for name, values in wrong.items():
        on_ranks(2, lambda c: FUNCTIONS["decode"](c, **{name: values[0]}))  # noqa: B023
        errors = errors_of(2, lambda c: FUNCTIONS["decode"](c, **{name: values[c.rank]}))  # noqa: B023
        assert len({str(error) for error in errors}) == 1
        assert str(errors[0]) == (
            f"{name}: found {values[0]} on rank 0 and {values[1]} on rank 1, expected the same everywhere"
        )


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_type_of_results_may_be_said_in_several_ways(function):
    ways = ["float16", np.float16, np.dtype("float16")]
    for out in on_ranks(3, lambda c: FUNCTIONS[function](c, out_dtype=ways[c.rank])):
        assert out.dtype == np.float16
    errors = errors_of(2, lambda c: FUNCTIONS[function](c, out_dtype=int))
    assert str(errors[0]).startswith("out_dtype: found") and str(errors[0]).endswith("(on rank 0)")
