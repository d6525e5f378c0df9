"""Ring, heads and decoding between processes. `make test-mpi` runs this with 2, 3 and 4 ranks."""

from __future__ import annotations

import os
import tracemalloc
import warnings

import numpy as np
import pytest
import spread
from calls import assert_same_bits
from oracle import assert_matches

import pyflash
from pyflash.distributed import (
    _ring,
    communicator,
    context_parallel_decode,
    head_parallel_attention,
    ring_attention,
    shard,
)
from pyflash.distributed._schedules import SCHEDULES

if "PYFLASH_TEST_MPI" not in os.environ:
    pytest.skip("run between processes, by make test-mpi", allow_module_level=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", spread.CASES)
def test_ring(comm, name, schedule):
    spread.check(comm.allgather(spread.result(comm, name, schedule)), name, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [name for name in spread.CASES if not name.startswith("spans")])
def test_heads(comm, name, schedule):
    spread.check(comm.allgather(spread.result(comm, name, schedule, "heads")), name, schedule)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("name", spread.DECODES)
def test_decode(comm, name, uneven):
    result = spread.decode(comm, name, uneven=uneven)
    assert_matches(*result, spread.decode_call(name))
    for other in comm.allgather(result):
        assert_same_bits(other, result)


@pytest.mark.parametrize("name", ["causal", "causal float16", "slopes", "packed"])
def test_bits_are_equal_from_run_to_run(comm, name):
    first = spread.result(comm, name, "zigzag")
    for num_threads in (1, 2):
        assert_same_bits(spread.result(comm, name, "zigzag", num_threads=num_threads)[:2], first[:2])


@pytest.mark.parametrize("schedule", ["zigzag", "contiguous"])
def test_large_messages(comm, schedule):
    """Beyond what MPI sends before the other side has asked for it."""
    length = 4096
    arrays = _arrays(length, heads=(4, 4, 4), width=64)
    parts = [shard(x, comm.rank, comm.size, schedule=schedule) for x in arrays]
    want = pyflash.flash_attention(*arrays, causal=True, num_threads=1)
    out = ring_attention(*parts, comm=comm, causal=True, schedule=schedule, num_threads=1)
    np.testing.assert_allclose(out, shard(want, comm.rank, comm.size, schedule=schedule), atol=2e-6)


def _arrays(length, *, heads=(4, 2, 2), width=8):
    rng = np.random.default_rng(9)
    return [rng.standard_normal((1, length, n, width), dtype=np.float32) for n in heads]


def test_memory_falls_with_the_number_of_ranks(comm):
    """NumPy's memory at its highest, beside the shards, is that of a share of the sequence."""
    length = 1 << 15
    arrays = _arrays(length // comm.size * comm.size, heads=(8, 8, 8))
    parts = [np.ascontiguousarray(shard(x, comm.rank, comm.size)) for x in arrays]
    ring_attention(*(x[:, :8] for x in parts), comm=comm, causal=True, num_threads=1)  # first uses
    tracemalloc.start()
    ring_attention(*parts, comm=comm, causal=True, num_threads=1)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    one = 4 * 8 * 8 * (length // comm.size)  # bytes of q, k, v or out
    states = max(2, 2 * int(np.ceil(np.log2(comm.size))) - 1) * (1 + 1 / 8)
    spare = 14e6  # a block that is merged, positions and spans
    assert most <= (4 + 2 + states) * one + spare
    assert most >= 4 * one  # or it has not been measured


# --- tensors, sent by a process group of torch.distributed ---


class Group:
    """A process group of the ranks of MPI, whose results come back as NumPy arrays."""

    def __init__(self, comm, path):
        import torch
        from torch import distributed

        distributed.init_process_group(
            "gloo", store=distributed.FileStore(path, comm.size), rank=comm.rank, world_size=comm.size
        )
        self.group, self.rank, self.size = distributed.group.WORLD, comm.rank, comm.size
        self.tensor = torch.from_numpy


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    torch = pytest.importorskip("torch", reason="needs torch")
    mpi = pytest.importorskip("mpi4py.MPI").COMM_WORLD
    path = mpi.bcast(str(tmp_path_factory.mktemp("store") / "file"))
    yield Group(mpi, path)
    torch.distributed.destroy_process_group()


TENSORS = ["full", "causal", "uneven", "causal slopes", "terms", "packed", "no keys", "heads first", "spans"]


@pytest.mark.parametrize(
    ("name", "function"), [*((name, "ring") for name in TENSORS), *((name, "heads") for name in TENSORS[:-1])]
)
def test_tensors(comm, group, name, function):
    import torch

    out, lse, cu_seqlens = spread.result(
        communicator(group.group), name, "zigzag", function, lambda x: torch.from_numpy(x.copy())
    )
    assert isinstance(out, torch.Tensor) and isinstance(lse, torch.Tensor)
    mine = (out.numpy(), lse.numpy(), cu_seqlens)
    spread.check(comm.allgather(mine), name, "zigzag")
    assert_same_bits(mine[:2], spread.result(comm, name, "zigzag", function)[:2])


def test_decode_of_tensors(comm, group):
    import torch

    q, k, v = (torch.from_numpy(x) for x in _arrays(40))
    keys = [shard(x, comm.rank, comm.size, schedule="contiguous") for x in (k, v)]
    for options in ({}, dict(window=(6, 0))):
        out = context_parallel_decode(q[:, -2:], *keys, comm=group.group, **options)
        want = pyflash.flash_attention(q[:, -2:], k, v, causal=True, **options)
        torch.testing.assert_close(out, want)


def test_terms_of_numpy_beside_tensors(comm, group):
    """Whatever their strides are, and in types that torch does not know by NumPy's names."""
    import ml_dtypes
    import torch

    x = [torch.from_numpy(x) for x in _arrays(8)]
    slopes = np.array([0.5, 0.25, 0.125, 1.0], np.float32)[: x[0].shape[2]]
    want = ring_attention(*x, comm=group.group, alibi_slopes=torch.from_numpy(slopes), sinks=slopes)
    frozen = slopes.copy()
    frozen.flags.writeable = False
    for same in (slopes[::-1].copy()[::-1], frozen, slopes.astype(ml_dtypes.bfloat16)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            out = ring_attention(*x, comm=group.group, alibi_slopes=same, sinks=same)
        assert_same_bits(out.numpy(), want.numpy())
    text = _error(comm, lambda: ring_attention(*x, comm=group.group, alibi_slopes=slopes.astype(">f4")))
    assert text.startswith("alibi_slopes: ")


def test_a_tensor_of_one_element_of_any_stride(comm, group):
    import torch

    x = torch.ones(1, 1, 1, 2)[..., ::2]
    out = ring_attention(x, x, x, comm=group.group)
    assert out.shape == x.shape and (out == 1).all()


def test_arrays_that_a_group_cannot_send(comm, group):
    text = _error(comm, lambda: ring_attention(*_arrays(8), comm=group.group))
    assert text.startswith("q: found an array of shape") and "expected a torch tensor" in text


# --- errors ---


def _error(comm, work, kind=pyflash.InvalidArgument):
    """The error that all ranks raise, checked to be the same."""
    with pytest.raises(kind) as caught:
        work()
    (text,) = set(comm.allgather(str(caught.value)))
    return text


def test_a_wrong_argument_on_the_last_rank(comm):
    last = comm.size - 1
    softcap = -1.0 if comm.rank == last else 2.0
    for function in (ring_attention, head_parallel_attention, context_parallel_decode):
        text = _error(comm, lambda: function(*_arrays(8), comm=comm, softcap=softcap))  # noqa: B023
        assert text.startswith("softcap: found -1.0") and text.endswith(f"(on rank {last})")


def test_shapes_that_differ(comm):
    width = 8 if comm.rank else 16
    for function in (ring_attention, head_parallel_attention, context_parallel_decode):
        text = _error(comm, lambda: function(*_arrays(8, width=width), comm=comm))  # noqa: B023
        assert "on rank 0 and " in text and "on rank 1, expected the same everywhere" in text


def test_a_failure_in_the_middle(comm, monkeypatch):
    attend = _ring.Steps.attend

    def failing(self, held):
        if self._rank == 1 and held.rank == 0:
            raise MemoryError("no scratch")
        return attend(self, held)

    monkeypatch.setattr(_ring.Steps, "attend", failing)
    parts = [shard(x, comm.rank, comm.size) for x in _arrays(4096, heads=(4, 4, 4))]
    text = _error(comm, lambda: ring_attention(*parts, comm=comm), MemoryError)
    assert text == "no scratch (on rank 1)"


def test_messages_of_the_caller_are_not_touched(comm):
    """A receive from anybody, posted before, does not take what travels in the ring."""
    request = comm.irecv()
    spread.check(comm.allgather(spread.result(comm, "causal", "zigzag")), "causal", "zigzag")
    comm.send("mine", dest=(comm.rank + 1) % comm.size)
    assert request.wait() == "mine"


def test_a_communicator_is_duplicated_once_and_freed(comm):
    from mpi4py import MPI

    own = comm.Dup()
    first = communicator(own)
    assert communicator(own) is first and first.comm != own
    own.Free()
    assert first.comm == MPI.COMM_NULL


def test_a_part_of_the_ranks(comm):
    """Ranks that are split into two groups have a ring each."""
    group = comm.Split(comm.rank % 2, key=-comm.rank)
    spread.check(group.allgather(spread.result(group, "uneven", "zigzag")), "uneven", "zigzag")
    group.Free()


def test_an_intercommunicator_is_refused(comm):
    from mpi4py import MPI

    with pytest.raises(pyflash.InvalidArgument, match=r"comm: found .*expected an intracommunicator"):
        communicator(MPI.COMM_NULL)
