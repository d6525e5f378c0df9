"""Arrays on the emulated GPU, for what pyflash makes on a device for itself: caches, tables, new tokens.

CuPy, whose arrays these are elsewhere, has no memory without a GPU. The elements lie where the emulator
watches: what nobody has written is NaN, and behind each allocation there is a page that cannot be touched.
"""

from __future__ import annotations

from typing import Any

import emulator
import numpy as np
from fake_cuda import FakeArray, FakeCuda

from pyflash import _arrays
from pyflash._device_array import over_memory


class EmulatedArray(FakeArray):
    """An array on the emulated GPU."""

    @property
    def dtype(self) -> np.dtype:
        return self.memory.dtype

    def get(self) -> np.ndarray:
        """Return a copy on the host; so is it called in CuPy."""
        return self.memory.copy()


class EmulatedKind(FakeCuda):
    """Their library."""

    def recognises(self, x: Any) -> bool:
        return isinstance(x, EmulatedArray)

    def wrap(self, native: EmulatedArray | np.ndarray) -> _arrays.DeviceArray:
        if isinstance(native, np.ndarray):  # what NumPy has computed or copied, for the device to have
            found = self.new(native.shape, native.dtype, 0)
            found.memory[...] = native
            native = found
        return super().wrap(native)

    def give_back(self, array: _arrays.DeviceArray) -> EmulatedArray:
        return array.owner if array.is_whole else EmulatedArray(self.native(array), array.device)

    def new(self, shape: tuple[int, ...], dtype: np.dtype, device: int) -> EmulatedArray:
        memory = emulator.Memory(max(int(np.prod(shape)) * dtype.itemsize, 1))
        return EmulatedArray(over_memory(memory.address, tuple(shape), None, dtype, owner=memory), device)

    def stream(self, device: int) -> int:
        return 0


def install() -> None:
    """Let pyflash make its arrays on the emulated GPU, for this process."""
    kind = EmulatedKind()
    _arrays.register(kind)
    _arrays.own_kind = kind
