"""Messages by MPI, through mpi4py: arrays in host memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import _arrays, _dtypes
from .._checks import describe
from .._description import Array
from .._errors import invalid, unsupported


@functools.cache
def _key() -> int:
    """Return the key under which a caller's communicator keeps the one that messages go through."""
    from mpi4py import MPI

    return int(MPI.Comm.Create_keyval(delete_fn=lambda comm, key, mine: mine.comm.Free()))


def _bytes(array: Array) -> list[Any]:
    """Return an array as MPI takes it: bytes, whatever the type (MPI knows no bfloat16)."""
    from mpi4py import MPI

    return [array.reshape(-1).view(np.uint8), MPI.BYTE]


class _Requests:
    """Messages under way; the arrays stay alive until they are there."""

    def __init__(self, requests: list[Any], arrays: Sequence[Any]) -> None:
        self._requests, self._arrays = requests, arrays

    def wait(self) -> None:
        from mpi4py import MPI

        MPI.Request.Waitall(self._requests)
        self._arrays = ()


class _Gathering:
    """Bytes of all ranks under way."""

    def __init__(self, requests: _Requests, everyone: Array) -> None:
        self._requests, self._everyone = requests, everyone

    def wait(self) -> Array:
        self._requests.wait()
        return self._everyone


class MpiCommunicator:
    """A communicator of mpi4py, through a duplicate of it: messages never meet those of the caller.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        It is duplicated, a collective.
    """

    def __init__(self, comm: Any) -> None:
        self.comm = comm.Dup()
        self._rank, self._size = comm.Get_rank(), comm.Get_size()

    @classmethod
    def of(cls, comm: Any) -> MpiCommunicator:
        """Return the one for a caller's communicator, made at its first use and freed with it."""
        from mpi4py import MPI

        if comm == MPI.COMM_NULL or not isinstance(comm, MPI.Intracomm):
            raise invalid("comm", describe(comm), "an intracommunicator of mpi4py that this process is in")
        known = comm.Get_attr(_key())
        if isinstance(known, cls):
            return known
        made = cls(comm)
        comm.Set_attr(_key(), made)
        return made

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self._rank  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._size  # type: ignore[no-any-return]

    def mark(self) -> None:
        """Return None: those of the host do not go on by themselves."""

    def see(self, name: str, x: Any) -> Any:
        """Return an argument as a NumPy array over the same memory."""
        array = _arrays.see(name, x)
        if isinstance(array, _arrays.DeviceArray):
            instead = "expected host memory"
            raise unsupported(name, f"an array on GPU {array.device}", "an MPI communicator", instead)
        return array

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
        return self.comm.allgather(value)  # type: ignore[no-any-return]

    def start_allgather_bytes(self, mine: Array) -> _Gathering:
        """Start to gather bytes of every rank."""
        everyone = np.empty((self._size, mine.size), np.uint8)
        return _Gathering(self.start_allgather(mine, everyone), everyone)

    def start_allgather(self, mine: Array, everyone: Array) -> _Requests:
        """Start to gather an array of every rank."""
        return _Requests([self.comm.Iallgather(_bytes(mine), _bytes(everyone))], (mine, everyone))

    def start(
        self, sends: Sequence[tuple[Array, int]], receives: Sequence[tuple[Array, int]], after: Any = None
    ) -> _Requests:
        """Post receives, then sends."""
        requests = [self.comm.Irecv(_bytes(array), source=rank) for array, rank in receives if array.size]
        requests += [self.comm.Isend(_bytes(array), dest=rank) for array, rank in sends if array.size]
        return _Requests(requests, [array for array, _ in (*sends, *receives)])
