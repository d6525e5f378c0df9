"""Ranks that are threads of this process: a communicator for what the page records, without MPI.

Messages are copies in memory, made when they are started, as an engine that works by itself would have them.
Every rank keeps how many bytes it has sent in each exchange.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from .. import _arrays, _dtypes
from .._description import Array

_Result = TypeVar("_Result")


class _Shared:
    """What the ranks have in common."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.values: list[Any] = [None] * size
        ranks = range(size)
        self.queues: dict[tuple[int, int], queue.SimpleQueue[Array | None]] = {
            (a, b): queue.SimpleQueue() for a in ranks for b in ranks
        }

    def give_up(self, rank: int) -> None:
        """Let nobody wait for a rank that has failed."""
        self.barrier.abort()
        for other in range(self.size):
            self.queues[rank, other].put(None)


class _Messages:
    """Messages under way to a rank; `finish` puts them where they belong."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> None:
        self._finish()


class _Gathering:
    """Bytes of all ranks, which are there already."""

    def __init__(self, everyone: Array) -> None:
        self._everyone = everyone

    def wait(self) -> Array:
        return self._everyone


class ThreadRank:
    """The `pyflash.distributed.Communicator` of one rank."""

    def __init__(self, shared: _Shared, rank: int) -> None:
        self._shared, self._rank = shared, rank
        #: Of each call of `start`, the bytes that left.
        self.bytes_sent: list[int] = []

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._shared.size

    def mark(self) -> None:
        """Return None: kernels do not go on by themselves."""

    def see(self, name: str, x: Any) -> Any:
        """Return an argument as a NumPy array over the same memory."""
        return _arrays.see(name, x)

    def give_back(self, array: Array, like: Any) -> Any:
        """Return a result as an array of the caller's library."""
        return _arrays.give_back(array, _arrays.kind_of(like), like)

    def empty(self, shape: tuple[int, ...], dtype: Any, like: Any) -> Array:
        """Return a new array."""
        return np.empty(shape, _dtypes.numpy_dtype(dtype) if isinstance(dtype, str) else dtype)

    def from_host(self, array: Array, like: Any) -> Array:
        """Return the array itself."""
        return array

    def allgather(self, value: Any) -> list[Any]:
        """Return a value of every rank."""
        shared = self._shared
        shared.values[self._rank] = value
        shared.barrier.wait()
        values = list(shared.values)
        shared.barrier.wait()  # before anybody writes the next ones
        return values

    def start_allgather_bytes(self, mine: Array) -> _Gathering:
        """Gather bytes of every rank."""
        return _Gathering(np.stack(self.allgather(mine.copy())))

    def start_allgather(self, mine: Array, everyone: Array) -> _Messages:
        """Gather an array of every rank."""
        everyone[...] = np.stack(self.allgather(mine.copy()))
        return _Messages(lambda: None)

    def start(
        self, sends: Sequence[tuple[Array, int]], receives: Sequence[tuple[Array, int]], after: Any = None
    ) -> _Messages:
        """Send copies; receive at the latest moment."""
        queues = self._shared.queues
        self.bytes_sent.append(sum(array.nbytes for array, _ in sends))
        for array, rank in sends:
            queues[self._rank, rank].put(array.copy())

        def finish() -> None:
            for array, rank in receives:
                came = queues[rank, self._rank].get()
                if came is None:
                    raise RuntimeError(f"rank {rank} has failed")
                array[...] = came

        return _Messages(finish)


def on_ranks(size: int, work: Callable[[ThreadRank], _Result]) -> list[_Result]:
    """Return what a function returns on each of so many ranks, or raise what one of them raised first."""
    shared = _Shared(size)
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRank(shared, rank))
        except BaseException as error:
            failures.append(error)
            shared.give_up(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
