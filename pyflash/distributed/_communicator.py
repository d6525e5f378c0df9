"""What the algorithms ask of whoever moves arrays between ranks. pyflash has no transport of its own.

A communicator has arrays of one kind: those that it can send. What it makes is of that kind, and what comes
from the caller is seen as that kind before anything else looks at it. Everything else here works on such
arrays by shape, slices, ``swapaxes``, assignment to slices and the public functions of pyflash.

Transfers and work are ordered as on a stream: what was computed before `start` is what is sent, and after
`Transfer.wait` the next computation sees what has come. An engine that works by itself (NCCL on a stream of
its own) moves data between the two; it gets all messages of a step at once, which is one group.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from .._checks import describe
from .._description import Array
from .._errors import invalid
from . import _nccl, _torch


class Transfer(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Let the next computation see what has come, and let buffers be used again."""


class Gathering(Protocol):
    """Bytes of all ranks on their way to the host."""

    def wait(self) -> Array:
        """Return them, ``(size, num_bytes)`` uint8. Work on a device that was begun goes on meanwhile."""


@runtime_checkable
class Communicator(Protocol):
    """Ranks that can send arrays to one another.

    Ranks call the same methods in the same order. Messages from one rank to another arrive in the order in
    which they were started; there are no tags.
    """

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def mark(self) -> Any:
        """Return a mark of what has been started up to here, for `start`.

        None where kernels do not go on by themselves while ranks speak to one another: nothing is started
        before they have agreed.
        """

    def see(self, name: str, x: Any) -> Any:
        """Return an argument as an array of the communicator's kind, over the same memory.

        What is no array comes back as it is. An array that cannot be sent from where it lies is an
        `UnsupportedError`.
        """

    def give_back(self, array: Any, like: Any) -> Any:
        """Return a result as an array of the kind of `like`, an argument as the caller gave it."""

    def empty(self, shape: tuple[int, ...], dtype: Any, like: Any) -> Any:
        """Return a new contiguous array, uninitialised.

        `dtype` is that of an array of this kind, or a name such as "float32"; the array lies where `like`
        does, itself an array of this kind.
        """

    def from_host(self, array: Array, like: Any) -> Any:
        """Return a NumPy array's numbers as an array of this kind that lies where `like` does."""

    def allgather(self, value: Any) -> list[Any]:
        """Return a small Python value of every rank, in their order. A collective."""

    def start_allgather_bytes(self, mine: Array) -> Gathering:
        """Start to gather a few bytes of each rank, a NumPy array of uint8, as many on each. A collective.

        They depend on nothing that was computed, and need not wait for it.
        """

    def start_allgather(self, mine: Any, everyone: Any) -> Transfer:
        """Start to fill ``everyone[r]`` with the array `mine` of rank r. A collective; both contiguous."""

    def start(
        self, sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]], after: Any = None
    ) -> Transfer:
        """Start messages to and from other ranks: pairs of a contiguous array and a rank.

        Sizes agree on both sides; arrays without elements may be left out on both. With a mark they wait for
        what was started before it alone, not for the kernels that have been started since.
        """


def communicator(comm: Any) -> Communicator:
    """Return the communicator for what a caller has.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, NcclCommunicator, torch.distributed.ProcessGroup or Communicator
        A communicator of mpi4py, for arrays in host memory; one of ``cupy.cuda.nccl``, for arrays of CuPy on
        its GPU; a process group, for tensors where its backend sends them from; or an object with the
        methods of `Communicator`.

    Raises
    ------
    InvalidArgument
        It is none of these.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and isinstance(comm, mpi.Comm):
        from ._mpi import MpiCommunicator

        return MpiCommunicator.of(comm)
    if _torch.is_group(comm):
        return _torch.TorchCommunicator(comm)
    if _nccl.is_nccl(comm):
        return _nccl.NcclCommunicator(comm)
    if isinstance(comm, Communicator):
        return comm
    expected = (
        "a communicator of mpi4py or of CuPy's NCCL, a process group of torch, or an object with the methods "
        "of Communicator"
    )
    raise invalid("comm", describe(comm), expected)
