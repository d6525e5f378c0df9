"""What a library of arrays has to do for pyflash, and what follows from it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ._description import Array
from ._device_array import DeviceArray

#: Integers of each size.
BITS: dict[int, Any] = {
    1: np.dtype(np.int8),
    2: np.dtype(np.int16),
    4: np.dtype(np.int32),
    8: np.dtype(np.int64),
}


class Kind:
    """A library of arrays."""

    def recognises(self, x: Any) -> bool:
        """Return whether `x` is an array of this library."""
        raise NotImplementedError

    def is_on_device(self, x: Any) -> bool:
        """Return whether an array of this library lies on a device."""
        raise NotImplementedError

    def see(self, name: str, x: Any) -> Array:
        """Return an array of this library as a NumPy array over its memory; errors name the argument."""
        raise NotImplementedError

    def from_host(self, array: Array, like: Any) -> Any:
        """Return a NumPy array as one of this library over the same memory, where it has such."""
        raise NotImplementedError


class DeviceKind(Kind):
    """A library of arrays on a device. Everything that it does is in the order of its current stream."""

    # --- what each library does in its own way ---

    def wrap(self, native: Any) -> DeviceArray:
        """Return the description of one of the library's arrays."""
        raise NotImplementedError

    def native(self, array: DeviceArray) -> Any:
        """Return an array of the library over the memory that is described, of whichever library it is."""
        raise NotImplementedError

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> Any:
        """Return a new array of the library, uninitialised."""
        raise NotImplementedError

    def upload(self, array: Array, device: int) -> Any:
        """Return a copy of an array of the host, in the library."""
        raise NotImplementedError

    def download(self, native: Any) -> Array:
        """Return a copy on the host, once the stream is there."""
        raise NotImplementedError

    def on(self, device: int) -> AbstractContextManager[Any]:
        """Return a context in which the library works on a device."""
        return contextlib.nullcontext()

    def stream(self, device: int) -> int:
        """Return the CUDA stream that the library uses now: a handle, 0 for the legacy default stream."""
        raise NotImplementedError

    def capturing(self, device: int) -> bool:
        """Return whether that stream is being captured into a graph."""
        raise NotImplementedError

    def wait_for(self, array: DeviceArray) -> int | None:
        """Return the stream behind which such an array is complete, None if it is already."""
        return self.stream(array.device)

    def int64(self, native: Any) -> Any:
        """Return an integer array of the library as int64."""
        raise NotImplementedError

    def current_device(self) -> int:
        """Return the number of the GPU on which the library makes new arrays."""
        raise NotImplementedError

    # --- what follows from that ---

    def give_back(self, array: DeviceArray) -> Any:
        """Return the caller's array, or one of the library over the part of it that is described."""
        return array.owner if array.is_whole else self.native(array)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> DeviceArray:
        """Return a new array, uninitialised."""
        with self.on(device):
            return self.wrap(self.new(shape, dtype, device))

    def read(self, array: DeviceArray) -> Array:
        """Return a copy on the host."""
        with self.on(array.device):
            return self.download(self.native(array))

    def uploaded(self, arrays: tuple[Array, ...], device: int) -> list[Any]:
        """Return copies of arrays of the host, all in one transfer, as arrays of the library."""
        starts = [0]
        for x in arrays:
            starts.append(starts[-1] + -(-x.nbytes // 16) * 16)  # aligned for whatever reads it
        packed = np.zeros(starts[-1], np.int8)
        for x, start in zip(arrays, starts, strict=False):
            packed[start : start + x.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.int8)
        with self.on(device):
            copy = self.wrap(self.upload(packed, device))
        parts = [copy[start : start + x.nbytes] for x, start in zip(arrays, starts, strict=False)]
        return [
            self.give_back(as_type(part, x.dtype).reshape(x.shape))
            for part, x in zip(parts, arrays, strict=True)
        ]

    def fill(self, array: DeviceArray, value: float) -> None:
        """Set all elements of an array of numbers."""
        with self.on(array.device):
            self.native(array)[...] = value

    def assign(self, target: DeviceArray, source: DeviceArray) -> None:
        """Copy elements, converted to the type of the target."""
        if target.dtype == source.dtype:  # of any type, known to the library or not
            target, source = bits(target), bits(source)
        with self.on(target.device):
            self.native(target)[...] = self.native(source)

    def take(self, array: DeviceArray, rows: Array) -> DeviceArray:
        """Return a new array of some rows of the first axis."""
        with self.on(array.device):
            taken = self.native(bits(array))[self.upload(rows, array.device)]
            return as_type(self.wrap(taken), array.dtype)

    def put(self, target: DeviceArray, rows: Array, source: DeviceArray) -> None:
        """Copy elements into some rows of the first axis."""
        with self.on(target.device):
            self.native(bits(target))[self.upload(rows, target.device)] = self.native(bits(source))

    def computed(self, function: Callable[..., Any], arrays: tuple[Array, ...], device: int) -> DeviceArray:
        """Return what operators make of integer arrays, in int64."""
        with self.on(device):
            natives = [
                self.native(x) if isinstance(x, DeviceArray) else self.upload(x, device) for x in arrays
            ]
            return self.wrap(function(*map(self.int64, natives)))


def as_type(array: DeviceArray, dtype: np.dtype[Any]) -> DeviceArray:
    """Return the same memory as elements of another type: of the same size, or of any where it is dense."""
    view = array.view(dtype)
    assert isinstance(view, DeviceArray)
    return view


def bits(array: DeviceArray) -> DeviceArray:
    """Return the same memory as integers, of which every library has all."""
    return as_type(array, BITS[array.itemsize])
