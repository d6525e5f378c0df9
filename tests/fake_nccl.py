"""CuPy and its NCCL with ranks that are threads, and arrays in the host's memory: what pyflash asks of them.

Nothing is computed on a device, so kernels take the arrays as NumPy's. A stream does at once what it is told;
messages of a group leave when the group ends, as NCCL's do.
"""

from __future__ import annotations

import ctypes
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from threads import SECONDS, Shared

_here = threading.local()  # .device is the current one, .group the messages of an open group


class Ndarray(np.ndarray):
    """An array that says where its memory is as CuPy's do."""

    data = property(lambda self: SimpleNamespace(ptr=self.__array_interface__["data"][0]))
    device = property(lambda self: SimpleNamespace(id=_here.device))

    def set(self, array: np.ndarray, stream: Any) -> None:
        self[...] = array

    def get(self, stream: Any, out: np.ndarray, blocking: bool) -> None:
        assert not blocking
        out[...] = self


class OnHost(Ndarray):
    """What arrays are, for calls of kernels look for those that are exactly CuPy's."""


class Event:
    def synchronize(self) -> None:
        pass


class Stream:
    """Notes which events it waits for."""

    ptr = 7

    def __init__(self, non_blocking: bool = False, priority: int | None = None) -> None:
        self.waited: list[Event] = []

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def record(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)
        self.waited.append(event)


class Device:
    def __init__(self, index: int) -> None:
        self._index = index

    def __enter__(self) -> Device:
        self._before, _here.device = getattr(_here, "device", 0), self._index
        return self

    def __exit__(self, *error: object) -> None:
        _here.device = self._before

    def use(self) -> None:
        _here.device = self._index


def _memory(address: int, num_bytes: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), np.uint8)


class NcclCommunicator:
    """A rank; its number is that of its GPU."""

    def __init__(self, shared: Shared, rank: int) -> None:
        self._shared, self._rank = shared, rank

    def rank_id(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._shared.size

    def device_id(self) -> int:
        return self._rank

    def allGather(self, send: int, receive: int, count: int, kind: int, stream: int) -> None:
        assert (kind, stream, _here.device) == (UINT8, Stream.ptr, self._rank)
        self._shared.values[self._rank] = _memory(send, count).copy()
        self._shared.barrier.wait()
        _memory(receive, count * self._shared.size)[:] = np.concatenate(self._shared.values)
        self._shared.barrier.wait()

    def send(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert (kind, stream, _here.device) == (UINT8, Stream.ptr, self._rank)
        self._shared.queues[self._rank, peer].put(_memory(address, count).copy())

    def recv(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert (kind, stream, _here.device) == (UINT8, Stream.ptr, self._rank)

        def take() -> None:
            came = self._shared.queues[peer, self._rank].get(timeout=SECONDS)
            assert came.size == count
            _memory(address, count)[:] = came

        _here.group.append(take)


UINT8 = 1


def _group_start() -> None:
    _here.group = []


def _group_end() -> None:
    for take in _here.group:
        take()
    del _here.group


def modules() -> dict[str, ModuleType]:
    """What stands in `sys.modules` where CuPy with NCCL is."""
    cupy, nccl = ModuleType("cupy"), ModuleType("cupy_backends.cuda.libs.nccl")
    current = threading.local()

    def current_stream(device: int) -> Stream:
        if not hasattr(current, "stream"):
            current.stream = Stream()
        return current.stream

    def empty(shape: Any, dtype: Any) -> Ndarray:
        found = np.empty(shape, dtype)
        found.reshape(-1).view(np.uint8)[...] = 0xFF  # NaN in every float type
        return found.view(OnHost)

    cuda = SimpleNamespace(
        Device=Device,
        Stream=Stream,
        get_current_stream=current_stream,
        alloc_pinned_memory=lambda num_bytes: bytearray(num_bytes + 512),  # CuPy's pool rounds up
    )
    vars(cupy).update(
        ndarray=Ndarray, empty=empty, cuda=cuda, asarray=lambda x: np.asarray(x).copy().view(OnHost)
    )
    vars(nccl).update(
        NcclCommunicator=NcclCommunicator,
        NCCL_UINT8=UINT8,
        groupStart=_group_start,
        groupEnd=_group_end,
    )
    return {"cupy": cupy, "cupy_backends.cuda.libs.nccl": nccl}


__all__ = ["Device", "NcclCommunicator", "modules"]
