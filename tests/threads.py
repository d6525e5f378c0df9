"""A communicator whose ranks are threads of this process: the algorithms without MPI."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from pyflash import _arrays, _dtypes

#: A rank that waits longer waits for a message that nobody sends.
SECONDS = 60


class Failed(Exception):
    """What ranks raised, in their order."""

    def __init__(self, errors: list[BaseException | None]) -> None:
        super().__init__("; ".join(f"rank {rank}: {error!r}" for rank, error in enumerate(errors)))
        self.errors = errors


class Shared:
    """What the ranks have in common."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=SECONDS)
        self.values: list[Any] = [None] * size
        self.queues = {(a, b): queue.Queue() for a in range(size) for b in range(size)}
        self.bytes_sent = np.zeros((size, size), np.int64)


class Waiting:
    def __init__(self, finish: Callable[[], None]) -> None:
        self.wait = finish


class ThreadCommunicator:
    """A rank. Messages are copies that were made when they were started."""

    def __init__(self, shared: Shared, rank: int) -> None:
        self.shared, self.rank, self.size = shared, rank, shared.size

    def mark(self):
        return None

    def see(self, name: str, x: Any) -> Any:
        return _arrays.see(name, x)

    def give_back(self, array: Any, like: Any) -> Any:
        return _arrays.give_back(array, _arrays.kind_of(like), like)

    def empty(self, shape, dtype, like):
        dtype = _dtypes.numpy_dtype(dtype) if isinstance(dtype, str) else dtype
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[...] = 0xFF  # NaN in every float type
        return array

    def from_host(self, array, like):
        return array

    def allgather(self, value):
        self.shared.values[self.rank] = value
        self.shared.barrier.wait()
        values = list(self.shared.values)
        self.shared.barrier.wait()
        return values

    def start_allgather_bytes(self, mine):
        assert mine.dtype == np.uint8
        gathered = np.stack(self.allgather(mine.copy()))
        return Waiting(lambda: gathered)

    def start_allgather(self, mine, everyone):
        gathered = self.allgather(mine.copy())

        def finish():
            for slot, part in zip(everyone, gathered, strict=True):
                assert slot.nbytes == part.nbytes
                slot[...] = part

        return Waiting(finish)

    def start(self, sends, receives, after=None):
        for array, rank in sends:
            assert array.flags.c_contiguous and rank != self.rank
            if array.size:
                self.shared.bytes_sent[self.rank, rank] += array.nbytes
                self.shared.queues[self.rank, rank].put(array.copy())

        def finish():
            for array, rank in receives:
                if array.size:
                    came = self.shared.queues[rank, self.rank].get(timeout=SECONDS)
                    assert came.shape == array.shape and came.dtype == array.dtype
                    array[...] = came

        return Waiting(finish)


def on_ranks(size: int, work: Callable[[ThreadCommunicator], Any]) -> list[Any]:
    """What `work` returns on each of so many ranks; `Failed` if it raises on one."""
    shared = Shared(size)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadCommunicator(shared, rank))
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    if any(errors):
        raise Failed(errors)
    assert all(q.empty() for q in shared.queues.values()), "a message that nobody received"
    return results
