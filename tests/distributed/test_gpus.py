"""What test_ranks.py does, with arrays on GPUs that travel by NCCL: through CuPy, and by a group of torch.

MPI says which rank is which and compares results. A machine with two GPUs runs it:
``PYFLASH_TEST_GPUS=1 mpiexec -n 2 python -m mpi4py tests/distributed/run.py``.
"""

from __future__ import annotations

import os
from typing import Any

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

if "PYFLASH_TEST_GPUS" not in os.environ:
    pytest.skip("run between processes with a GPU each", allow_module_level=True)


class Cupy:
    """A communicator of NCCL that CuPy has made."""

    def __init__(self, comm: Any) -> None:
        import cupy
        from cupy.cuda import nccl

        self._cupy = cupy
        cupy.cuda.Device(comm.rank).use()
        self._nccl = nccl.NcclCommunicator(comm.size, comm.bcast(nccl.get_unique_id()), comm.rank)
        self.given: Any = self._nccl

    def made(self, x: np.ndarray) -> Any:
        return self._cupy.asarray(np.ascontiguousarray(x))

    def on_host(self, x: Any) -> np.ndarray:
        assert isinstance(x, self._cupy.ndarray)
        return self._cupy.asnumpy(x)

    def stream(self) -> Any:
        return self._cupy.cuda.Stream(non_blocking=True)

    def end(self) -> None:
        self._nccl.destroy()


class Torch:
    """A process group of torch on NCCL."""

    def __init__(self, comm: Any, path: str) -> None:
        import torch
        from torch import distributed

        self._torch, self._distributed = torch, distributed
        torch.cuda.set_device(comm.rank)
        store = distributed.FileStore(path, comm.size)
        distributed.init_process_group("nccl", store=store, rank=comm.rank, world_size=comm.size)
        self.given: Any = distributed.group.WORLD

    def made(self, x: np.ndarray) -> Any:
        if x.dtype.name == "bfloat16":
            return self._torch.from_numpy(x.view(np.int16).copy()).view(self._torch.bfloat16).cuda()
        return self._torch.from_numpy(x.copy()).cuda()

    def on_host(self, x: Any) -> np.ndarray:
        assert isinstance(x, self._torch.Tensor) and x.is_cuda
        if x.dtype == self._torch.bfloat16:
            import ml_dtypes

            return x.view(self._torch.int16).cpu().numpy().view(ml_dtypes.bfloat16)
        return x.cpu().numpy()

    def stream(self) -> Any:
        return self._torch.cuda.stream(self._torch.cuda.Stream())

    def end(self) -> None:
        self._distributed.destroy_process_group()


@pytest.fixture(scope="module", params=["cupy", "torch"])
def engine(request, tmp_path_factory):
    pytest.importorskip(request.param)
    mpi = pytest.importorskip("mpi4py.MPI").COMM_WORLD
    if request.param == "cupy":
        made: Any = Cupy(mpi)
    else:
        made = Torch(mpi, mpi.bcast(str(tmp_path_factory.mktemp("store") / "file")))
    yield made
    made.end()


def result(engine, name, schedule, function="ring", **more):
    world = communicator(engine.given)
    *got, cu_seqlens = spread.result(
        world, name, schedule, function, engine.made, **dict(num_threads=None) | more
    )
    return (*(engine.on_host(x) for x in got), cu_seqlens)


def decode(engine, name, **how):
    got = spread.decode(communicator(engine.given), name, made=engine.made, num_threads=None, **how)
    return tuple(engine.on_host(x) for x in got)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", spread.CASES)
def test_ring(comm, engine, name, schedule):
    spread.check(comm.allgather(result(engine, name, schedule)), name, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", [name for name in spread.CASES if not name.startswith("spans")])
def test_heads(comm, engine, name, schedule):
    spread.check(comm.allgather(result(engine, name, schedule, "heads")), name, schedule)


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("name", spread.DECODES)
def test_decode(comm, engine, name, uneven):
    for _ in range(2):  # the second time arguments are known
        got = decode(engine, name, uneven=uneven)
        assert_matches(*got, spread.decode_call(name))
        for other in comm.allgather(got):
            assert_same_bits(other, got)


@pytest.mark.parametrize("name", ["causal", "causal float16", "slopes", "packed"])
def test_bits_are_equal_from_run_to_run(comm, engine, name):
    first = result(engine, name, "zigzag")
    for _ in range(3):
        assert_same_bits(result(engine, name, "zigzag")[:2], first[:2])


def test_the_current_stream_is_kept_in_order(comm, engine):
    """What is computed before on a stream of the caller's is what travels, and results wait for it."""
    rng = np.random.default_rng(9)
    whole = [rng.standard_normal((1, 8192, 4, 64)).astype(np.float16) for _ in range(3)]
    want = pyflash.flash_attention(*whole, causal=True)
    parts = [shard(x, comm.rank, comm.size) for x in whole]
    with engine.stream():
        for _ in range(5):
            arrays = [engine.made(np.zeros_like(x)) for x in parts]
            for array, part in zip(arrays, parts, strict=True):
                array[...] = engine.made(part)
            out = ring_attention(*arrays, comm=engine.given, causal=True)
            doubled = engine.on_host(out + out)
    mine = shard(want, comm.rank, comm.size).astype(np.float32)
    np.testing.assert_allclose(doubled.astype(np.float32), 2 * mine, atol=4e-3)


# --- errors ---


def error_of(comm, work, kind=pyflash.InvalidArgument):
    with pytest.raises(kind) as caught:
        work()
    (text,) = set(comm.allgather(str(caught.value)))
    return text


def arrays(engine, length, width=8):
    rng = np.random.default_rng(9)
    return [engine.made(rng.standard_normal((1, length, 2, width), dtype=np.float32)) for _ in "qkv"]


FUNCTIONS = (ring_attention, head_parallel_attention, context_parallel_decode)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_wrong_arguments(comm, engine, function):
    last = comm.size - 1
    softcap = -1.0 if comm.rank == last else 2.0
    text = error_of(comm, lambda: function(*arrays(engine, 8), comm=engine.given, softcap=softcap))
    assert text.startswith("softcap: found -1.0") and text.endswith(f"(on rank {last})")
    width = 8 if comm.rank else 16
    text = error_of(comm, lambda: function(*arrays(engine, 8, width), comm=engine.given))
    assert "on rank 0 and " in text and "on rank 1, expected the same everywhere" in text
    on_host = [np.ones((1, 8, 2, 8), np.float32)] * 3
    text = error_of(comm, lambda: function(*on_host, comm=engine.given))
    assert text.startswith("q: found an array of shape")


@pytest.mark.parametrize("words", ["no scratch", "x" * 3000], ids=["short", "long"])
def test_a_failure_in_the_middle(comm, engine, words, monkeypatch):
    """All ranks raise it in full, also where it is longer than what travels with the first bytes."""
    attend = _ring.Steps.attend

    def failing(self, held):
        if self._rank == 1 and held.rank == 0:
            raise MemoryError(words)
        return attend(self, held)

    monkeypatch.setattr(_ring.Steps, "attend", failing)
    text = error_of(comm, lambda: ring_attention(*arrays(engine, 4096), comm=engine.given), MemoryError)
    assert text == f"{words} (on rank 1)"
