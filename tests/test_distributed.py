"""Ring, heads and decoding with ranks that are threads; tests/distributed runs the same under MPI."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import spread
from calls import assert_same_bits, dense, quantised
from oracle import assert_matches
from rank_calls import FUNCTIONS, arrays, ring_with
from threads import ThreadCommunicator, on_ranks

import pyflash
from pyflash._dtypes import numpy_dtype
from pyflash._state import fold_tree
from pyflash.distributed import (
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
    q, k, v = arrays(64)
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
    q, k, v = arrays(40)
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
    size, (q, k, v) = 5, arrays(60, dtype="float64")
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
    q, k, v = arrays(32 * size, batch=1)
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
    size, (q, k, v) = 4, arrays(64, batch=1)
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
        q, k, v = arrays(4096, batch=1)

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
    q, k, v = arrays(200, dtype="float64")
    slopes = np.array([0.1, 0.3, 0.05, 0.7]).astype(numpy_dtype(dtype))
    options = dict(causal=True, alibi_slopes=slopes)
    want = pyflash.flash_attention(q, k, v, **options)

    def work(comm):
        parts = [shard(x, comm.rank, comm.size, schedule="stripe") for x in (q, k, v)]
        return ring_attention(*parts, comm=comm, schedule="stripe", **options)

    np.testing.assert_allclose(unshard(on_ranks(3, work), schedule="stripe"), want, atol=1e-12)


@pytest.mark.parametrize("reach", [2**63 - 1, 2**70])
def test_a_window_reaches_as_far_as_it_says(reach):
    q, k, v = arrays(24)
    want = pyflash.flash_attention(q, k, v, window=(reach, reach))
    out = unshard(on_ranks(2, lambda c: ring_with(c, window=(reach, reach))))
    np.testing.assert_allclose(out, want, atol=1e-6)


def test_torch_tensors_come_back_as_such():
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, arrays(24))
    want = pyflash.flash_attention(q, k, v, causal=True)

    def work(comm):
        parts = [shard(x, comm.rank, comm.size) for x in (q, k, v)]
        return ring_attention(*parts, comm=comm, causal=True)

    for rank, out in enumerate(on_ranks(2, work)):
        torch.testing.assert_close(out, shard(want, rank, 2))


def test_strided_shards_are_taken_as_they_are():
    """Keys with gaps between them are packed before they travel; nothing of the caller's is changed."""
    wide = [x.repeat(2, axis=3) for x in arrays(24)]
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
    q, k, v = arrays(30)
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
    q, k, v = arrays(30)

    def work(comm):
        parts = [shard(x, comm.rank, comm.size) for x in (q, k, v)]
        return ring_attention(*parts, comm=comm, causal=True, backend=("numpy", "c")[comm.rank])

    want = pyflash.flash_attention(q, k, v, causal=True)
    np.testing.assert_allclose(unshard(on_ranks(2, work)), want, atol=1e-6)
