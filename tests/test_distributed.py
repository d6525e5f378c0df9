"""Ring, heads and decoding with ranks that are threads; tests/distributed runs the same under MPI."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import spread
from calls import assert_same_bits, dense, quantised
from oracle import assert_matches
from threads import Failed, ThreadCommunicator, on_ranks

import pyflash
from pyflash._dtypes import numpy_dtype
from pyflash._state import fold_tree
from pyflash.distributed import (
    RankFailed,
    _decode,
    _heads,
    _ring,
    _routes,
    _visible,
    communicator,
    context_parallel_decode,
    head_parallel_attention,
    ring_attention,
    shard,
    unshard,
)
from pyflash.distributed._schedules import SCHEDULES

SIZES = (1, 2, 3, 4)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", spread.CASES)
def test_ring_against_the_oracle(name, schedule):
    for size in (*SIZES, 5):
        spread.check(on_ranks(size, lambda c: spread.result(c, name, schedule)), name, schedule)


@pytest.mark.parametrize("backend", ["numpy", "c"])
def test_ring_on_backends(backend):
    if pyflash.available_backends()[backend] is not None:
        pytest.skip(pyflash.available_backends()[backend])
    for name in ("causal", "window", "slopes", "packed"):
        threads = {} if backend == "c" else dict(num_threads=None)
        results = on_ranks(3, lambda c: spread.result(c, name, "zigzag", backend=backend, **threads))  # noqa: B023
        spread.check(results, name, "zigzag")


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [name for name in spread.CASES if not name.startswith("spans")])
def test_heads_against_the_oracle(name, schedule):
    for size in (*SIZES, 5):
        spread.check(on_ranks(size, lambda c: spread.result(c, name, schedule, "heads")), name, schedule)


def test_whole_groups_of_heads_have_the_bits_of_one_process():
    q, k, v = _arrays(64)
    out = pyflash.flash_attention(q, k, v, causal=True)

    def work(comm):
        parts = [shard(x, comm.rank, comm.size) for x in (q, k, v)]
        return head_parallel_attention(*parts, comm=comm, causal=True, schedule="zigzag")

    for rank, mine in enumerate(on_ranks(2, work)):
        assert (mine == shard(out, rank, 2)).all()


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("name", spread.DECODES)
def test_decode_against_the_oracle(name, uneven):
    for size in SIZES:
        results = on_ranks(size, lambda c: spread.decode(c, name, uneven=uneven))
        for result in results:
            assert_matches(*result, spread.decode_call(name))
            assert_same_bits(result, results[0])


def test_decode_with_known_places_gathers_no_lengths():
    q, k, v = _arrays(40)
    q = q[:, -3:]
    options = dict(causal=True, window=(9, 0))
    want = pyflash.flash_attention(q, k, v, **options)
    lengths = []

    class Counting(ThreadCommunicator):
        def start_allgather(self, mine, everyone):
            lengths.append(mine.nbytes)
            return super().start_allgather(mine, everyone)

        def start_allgather_bytes(self, mine):
            lengths.append(mine.nbytes)
            return super().start_allgather_bytes(mine)

    def work(comm):
        mine = Counting(comm.shared, comm.rank)
        parts = [shard(x, comm.rank, comm.size, schedule="contiguous") for x in (k, v)]
        places = dict(kv_start=np.full(2, 20 * comm.rank), q_offset=37)
        return context_parallel_decode(q, *parts, comm=mine, **options, **places)

    for out in on_ranks(2, work):
        np.testing.assert_allclose(out, want, atol=1e-6)
    state = 4 * (q.size + q.size // q.shape[-1])
    assert sorted(lengths) == [1, 1, 40, 40, state, state]  # each of two ranks: all well, a greeting, states


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
    arrays = _arrays(48)
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
            parts = [shard(x, comm.rank, comm.size, lengths=lengths) for x in arrays]
            done.append((ring_attention(*parts, comm=mine, **options), mine.told))
        return done

    results = on_ranks(3, work)
    for i, (_, options, told) in enumerate(calls):
        assert [mine[i][1] for mine in results] == [told] * 3, (i, options)
        want = pyflash.flash_attention(*arrays, **options)
        np.testing.assert_allclose(unshard([mine[i][0] for mine in results]), want, atol=2e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("options", [dict(), dict(causal=True), dict(window=(9, 3))], ids=str)
def test_a_call_like_one_before_looks_at_no_rows(monkeypatch, options, schedule):
    """What each step computes is known; with slopes that is something else."""
    looked = []
    on = _visible.Rows.on
    monkeypatch.setattr(_visible.Rows, "on", lambda *args: looked.append(args) or on(*args))
    _routes._kept.clear()
    arrays, slopes = _arrays(48), np.array([0.5, 0.1, -0.2, 1.0], "f4")

    def check(**more):
        want = pyflash.flash_attention(*arrays, **options, **more)
        wanted = [shard(want, rank, 3, schedule=schedule) for rank in range(3)]
        parts = [[shard(x, rank, 3, schedule=schedule) for x in arrays] for rank in range(3)]
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


# --- bits ---


class Late(ThreadCommunicator):
    """Messages come late, by a time that differs from run to run."""

    delays = iter(())

    def start(self, sends, receives, after=None):
        time.sleep(next(self.delays, 0) / 1000)
        return super().start(sends, receives, after)


def test_bits_are_equal_from_run_to_run():
    def work(comm):
        late = Late(comm.shared, comm.rank)
        late.delays = iter(np.random.default_rng().integers(0, 5, 20).tolist())
        return spread.result(late, "causal float16", "zigzag", out_dtype="float32")

    first, *others = (on_ranks(5, work) for _ in range(3))
    for other in others:
        for mine, again in zip(first, other, strict=True):
            assert_same_bits(again[:2], mine[:2])


def test_states_are_merged_in_the_order_of_ranks():
    """The result of a rank is that of merging what each rank's keys give, along the fixed tree."""
    size, (q, k, v) = 5, _arrays(60, dtype="float64")
    parts = [[shard(x, rank, size, schedule="contiguous") for x in (q, k, v)] for rank in range(size)]
    results = on_ranks(
        size, lambda c: ring_attention(*parts[c.rank], comm=c, schedule="contiguous", return_lse=True)
    )
    for (mine, _, _), result in zip(parts, results, strict=True):
        states = [pyflash.flash_attention(mine, k, v, return_lse=True) for _, k, v in parts]

        def merge(left, right):
            return pyflash.merge_states(*(np.stack(pair) for pair in zip(left, right, strict=True)))

        assert_same_bits(result, fold_tree(states, merge))


# --- memory and messages ---


@pytest.mark.parametrize("size", [2, 4, 8])
def test_what_travels_is_what_paper_says(size):
    """Causal zigzag: keys go once round, but for the last step and the half that is nobody else's past."""
    q, k, v = _arrays(32 * size, batch=1)
    seen = []

    def work(comm):
        seen.append(comm.shared)
        parts = [shard(x, comm.rank, size) for x in (q, k, v)]
        ring_attention(*parts, comm=comm, causal=True)

    on_ranks(size, work)
    per_step = (k.nbytes + v.nbytes) // size
    sent = seen[0].bytes_sent
    for rank in range(size):
        assert sent[rank].sum() == sent[rank, (rank + 1) % size] <= per_step * (size - 1)
    assert sent.sum() == per_step * (size - 1) * size - per_step // 2 * (size - 1)


def test_a_window_sends_the_keys_that_it_reaches():
    size, (q, k, v) = 4, _arrays(64, batch=1)
    seen = []

    def work(comm):
        seen.append(comm.shared)
        parts = [shard(x, comm.rank, size, schedule="contiguous") for x in (q, k, v)]
        ring_attention(*parts, comm=comm, causal=True, window=(5, 0), schedule="contiguous")

    on_ranks(size, work)
    assert seen[0].bytes_sent.sum() == 3 * 5 * (k.nbytes + v.nbytes) // 64


def test_memory_is_that_of_the_shard(monkeypatch):
    """Bytes that a rank makes: two buffers of keys, states, its result; no copy of the queries."""
    made: dict[int, list[tuple[int, ...]]] = {}

    class Counting(ThreadCommunicator):
        def empty(self, shape, dtype, like):
            array = super().empty(shape, dtype, like)
            made.setdefault(self.rank, []).append(array.nbytes)
            return array

    def bytes_of(size):
        made.clear()
        q, k, v = _arrays(4096, batch=1)

        def work(comm):
            parts = [shard(x, comm.rank, size) for x in (q, k, v)]
            ring_attention(*parts, comm=Counting(comm.shared, comm.rank), causal=True)

        on_ranks(size, work)
        return max(sum(sizes) for sizes in made.values()), q.nbytes, k.nbytes

    monkeypatch.setattr("pyflash.distributed._states._BLOCK", 1 << 9)
    monkeypatch.setattr("pyflash.distributed._states._PARTS", 1 << 10)
    for size in (2, 4, 8):
        total, q_bytes, kv_bytes = bytes_of(size)
        states = max(2, 2 * np.log2(size) - 1)  # of which two are there with two ranks, three with four
        lse = 1 + 1 / 8
        assert total <= (4 * kv_bytes + (states * lse + 2) * q_bytes) / size


# --- errors ---


def _arrays(length: int, *, batch: int = 2, dtype: str = "float32"):
    rng = np.random.default_rng(5)
    return [rng.standard_normal((batch, length, heads, 8)).astype(dtype) for heads in (4, 2, 2)]


def errors_of(size, work):
    with pytest.raises(Failed) as caught:
        on_ranks(size, work)
    assert all(caught.value.errors), caught.value
    return caught.value.errors


def ring_with(comm, schedule="zigzag", **options):
    parts = [shard(x, comm.rank, comm.size, schedule=schedule) for x in _arrays(24)]
    return ring_attention(*parts, comm=comm, schedule=schedule, **options)


FUNCTIONS = {
    "ring": ring_with,
    "heads": lambda comm, **options: head_parallel_attention(*_arrays(8), comm=comm, **options),
    "decode": lambda comm, **options: context_parallel_decode(*_arrays(8), comm=comm, **options),
}


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
        q, k, v = (x[:, :6] for x in _arrays(24))
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
        parts = [
            shard(x, comm.rank, 2, schedule="contiguous", lengths=np.array([5, 19])) for x in _arrays(24)
        ]
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
    q, k, v = _arrays(8)
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
    errors = errors_of(3, lambda c: context_parallel_decode(*_arrays(8), comm=c, window=(3, 0)))
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
        return ring_attention(*_arrays(8), comm=own)

    errors = errors_of(2, work)
    assert {str(error) for error in errors} == {"Wordless: an exception without words (on rank 1)"}


def test_what_is_no_communicator():
    with pytest.raises(pyflash.InvalidArgument, match=r"comm: found 3 .*expected a communicator of mpi4py"):
        communicator(3)


@pytest.mark.parametrize("options", [dict(kv_start=np.zeros(2, int)), dict(causal="top_left")])
def test_decode_refuses(options):
    errors = errors_of(2, lambda c: context_parallel_decode(*_arrays(8), comm=c, **options))
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


@pytest.mark.parametrize("function", FUNCTIONS)
def test_two_numbers_in_a_byte(function):
    """Values of int4 are twice as wide as their arrays."""
    seqlen_q = 2 if function == "decode" else 40
    call = quantised(dense(80, num_heads=4, num_kv_heads=2, seqlen_q=seqlen_q, seqlen_kv=40), "int4", "heads")
    options = dict(call.options, causal=True)
    q, k, v = (call.arrays[name] for name in "qkv")
    want = pyflash.flash_attention(q, k, v, **options)

    def work(comm):
        if function == "decode":
            parts = [shard(x, comm.rank, comm.size, schedule="contiguous") for x in (k, v)]
            return context_parallel_decode(q, *parts, comm=comm, **options)
        parts = [shard(x, comm.rank, comm.size, schedule="zigzag") for x in (q, k, v)]
        return spread.FUNCTIONS[function](*parts, comm=comm, schedule="zigzag", **options)

    results = on_ranks(3, work)
    out = results[0] if function == "decode" else unshard(results)
    np.testing.assert_allclose(out, want, atol=2e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_slopes_of_stripes_are_not_rounded(dtype):
    """Between stripes of three ranks a step is three positions, and three times a slope has more digits."""
    q, k, v = _arrays(200, dtype="float64")
    slopes = np.array([0.1, 0.3, 0.05, 0.7]).astype(numpy_dtype(dtype))
    options = dict(causal=True, alibi_slopes=slopes)
    want = pyflash.flash_attention(q, k, v, **options)

    def work(comm):
        parts = [shard(x, comm.rank, comm.size, schedule="stripe") for x in (q, k, v)]
        return ring_attention(*parts, comm=comm, schedule="stripe", **options)

    np.testing.assert_allclose(unshard(on_ranks(3, work), schedule="stripe"), want, atol=1e-12)


@pytest.mark.parametrize("reach", [2**63 - 1, 2**70])
def test_a_window_reaches_as_far_as_it_says(reach):
    q, k, v = _arrays(24)
    want = pyflash.flash_attention(q, k, v, window=(reach, reach))
    out = unshard(on_ranks(2, lambda c: ring_with(c, window=(reach, reach))))
    np.testing.assert_allclose(out, want, atol=1e-6)


def test_torch_tensors_come_back_as_such():
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, _arrays(24))
    want = pyflash.flash_attention(q, k, v, causal=True)

    def work(comm):
        parts = [shard(x, comm.rank, comm.size) for x in (q, k, v)]
        return ring_attention(*parts, comm=comm, causal=True)

    for rank, out in enumerate(on_ranks(2, work)):
        torch.testing.assert_close(out, shard(want, rank, 2))


def test_strided_shards_are_taken_as_they_are():
    """Keys with gaps between them are packed before they travel; nothing of the caller's is changed."""
    wide = [x.repeat(2, axis=3) for x in _arrays(24)]
    before = [x.copy() for x in wide]
    parts = [[shard(x, rank, 3, schedule="stripe")[..., ::2] for x in wide] for rank in range(3)]
    whole = [x[..., ::2] for x in wide]
    want = pyflash.flash_attention(*whole, causal=True)
    results = on_ranks(3, lambda c: ring_attention(*parts[c.rank], comm=c, schedule="stripe", causal=True))
    for rank, out in enumerate(results):
        np.testing.assert_allclose(out, shard(want, rank, 3, schedule="stripe"), atol=1e-6)
    assert all((x == y).all() for x, y in itertools.zip_longest(wide, before))


# --- corners ---


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_hidden_key_that_is_no_number_reaches_nobody(schedule):
    q, k, v = _arrays(30)
    k[:, 20], v[:, 20] = np.nan, np.inf
    want = pyflash.flash_attention(q, k, v, causal=True)

    def work(comm):
        parts = [shard(x, comm.rank, comm.size, schedule=schedule) for x in (q, k, v)]
        return ring_attention(*parts, comm=comm, schedule=schedule, causal=True)

    out = unshard(on_ranks(3, work), schedule=schedule)
    assert (np.isfinite(out) == np.isfinite(want)).all() and np.isfinite(out[:, :20]).all()
    np.testing.assert_allclose(out[:, :20], want[:, :20], atol=1e-6)


@pytest.mark.parametrize("function", [ring_attention, head_parallel_attention])
@pytest.mark.parametrize("shape", [(30, 8), (30, 2, 8)])
def test_arrays_without_batch_or_heads(function, shape):
    q, k, v = np.random.default_rng(6).standard_normal((3, *shape))
    axis = -2 if len(shape) == 2 else -3
    want, lse = pyflash.flash_attention(q, k, v, causal=True, return_lse=True)

    def work(comm):
        parts = [shard(x, comm.rank, comm.size, axis=axis) for x in (q, k, v)]
        return function(*parts, comm=comm, schedule="zigzag", causal=True, return_lse=True)

    results = on_ranks(3, work)
    np.testing.assert_allclose(unshard([out for out, _ in results], axis=axis), want, atol=1e-14)
    np.testing.assert_allclose(unshard([lse for _, lse in results], axis=-1), lse, atol=1e-14)


@pytest.mark.parametrize("shape", [(0, 4, 2, 8), (1, 4, 0, 8)])
def test_nothing_to_compute(shape):
    nothing = np.ones(shape)
    for function in (ring_attention, head_parallel_attention, context_parallel_decode):
        for out in on_ranks(3, lambda c: function(nothing, nothing, nothing, comm=c)):  # noqa: B023
            assert out.shape == shape


def test_ranks_may_have_backends_of_their_own():
    q, k, v = _arrays(30)

    def work(comm):
        parts = [shard(x, comm.rank, comm.size) for x in (q, k, v)]
        return ring_attention(*parts, comm=comm, causal=True, backend=("numpy", "c")[comm.rank])

    want = pyflash.flash_attention(q, k, v, causal=True)
    np.testing.assert_allclose(unshard(on_ranks(2, work)), want, atol=1e-6)
