"""Where the arrays of a call lie on the device: those of host memory are copied there, and results back."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._arrays import DeviceArray
from .._description import Array, AttentionArgs
from .._errors import unsupported
from . import _device, _launch

#: Bits of pf_call.unchecked, see call.cuh.
_UNCHECKED = {"block_table": 1, "spans": 2, "tree": 4}


class Places(_launch.Places):
    """Puts arrays of host memory onto the device, each once, and takes results back."""

    def __init__(self, device: _device.Device, stream: int) -> None:
        self.device, self.stream = device, stream
        self._kept: dict[int, tuple[Array, int, tuple[int, ...], Any]] = {}
        self._results: list[tuple[Array, Array, int]] = []

    def place(self, array: Array) -> tuple[int, tuple[int, ...]]:
        if isinstance(array, DeviceArray):
            return array.address, array.strides
        found = self._kept.get(id(array))
        if found is None:
            # Broadcast axes stay so: what a stride of 0 repeats is copied once.
            axes = [slice(None, 1) if s == 0 else slice(None) for s in array.strides]
            part = np.ascontiguousarray(array[tuple(axes)])
            memory = self._upload(part)
            strides = tuple(
                0 if given == 0 else own for given, own in zip(array.strides, part.strides, strict=True)
            )
            found = self._kept[id(array)] = array, memory.address, strides, memory
        return found[1:3]

    @property
    def has_copies(self) -> bool:
        """Whether there are copies of arrays of the host."""
        return bool(self._kept)

    def _upload(self, array: Array) -> _device.Memory:
        if self.device.is_capturing(self.stream):
            raise unsupported(
                "stream", "a stream that is being captured", "arrays in host memory", "put them on the device"
            )
        return self.device.upload(array, self.stream)

    def result(self, array: Array, *, holds: bool = False) -> Array:
        """Return an array of the same shape to be written on the device; `fetch` brings it back.

        holds : whether the kernels read it, or leave parts of it as they are.
        """
        if isinstance(array, DeviceArray):
            return array
        copy = np.array(array, order="C") if holds else np.empty(array.shape, array.dtype)
        address, _ = self.place(copy)
        self._results.append((array, copy, address))
        return copy

    def fetch(self) -> None:
        """Wait for the results that belong into host memory and put them there."""
        for array, copy, address in self._results:
            self.device.download(address, copy, self.stream)
            array[...] = copy


def unchecked(args: AttentionArgs) -> int:
    """Return the bits of those index arrays that nobody has looked into, since they lie on the device."""
    return sum(bit for name, bit in _UNCHECKED.items() if any_on_device(getattr(args, name)))


def any_on_device(value: Any) -> bool:
    """Return whether an array, or one of several, lies on the device."""
    if isinstance(value, tuple):
        return any(map(any_on_device, value))
    return isinstance(value, DeviceArray)
