"""CUDA kernels on the CPU: a platform like the one of ``gpu/_device.py``, for where there is no GPU.

A kernel source is compiled by g++ with ``cuda_on_host.h`` before it, and each CUDA thread runs as a fiber.
The emulator is slower than a GPU and stricter: memory starts as NaN, addresses outside an allocation,
barriers and shuffles that not everybody reaches, and endless loops raise EmulationError.

Environment: ``PYFLASH_EMULATOR_SEED`` other than 0 runs blocks and threads in a random order,
``PYFLASH_EMULATOR_ARCHITECTURE`` is the GPU that is emulated ("sm_90a"), ``PYFLASH_EMULATOR_SECONDS``
how long a launch may take, ``PYFLASH_EMULATOR_FLAGS`` more options of the compiler.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
from pathlib import Path

import numpy as np

from . import _toolchain
from ._toolchain import CompileError

__all__ = ["CompileError", "Device", "EmulationError", "Kernel", "Memory", "Platform"]

#: The most dynamic shared memory of a block, by compute capability.
SHARED_BYTES = {
    75: 65536,
    80: 166912,
    86: 101376,
    87: 166912,
    89: 101376,
    90: 232448,
    100: 232448,
    120: 101376,
}
MAX_STATIC_SHARED = 49152
SHARED_ALIGNMENT = 1024
MAX_THREADS = 1024
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_ARGUMENT = 4096
#: Its place is a multiple of this, which is what a tensor map in it needs.
ARGUMENT_ALIGNMENT = 64

#: The runtime has one set of fibers, and a kernel's static shared memory exists once.
_lock = threading.Lock()


def _forget_lock() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


class EmulationError(RuntimeError):
    """A launch went wrong: what a GPU would not survive, or would hang in."""


class _KernelEntry(ctypes.Structure):
    """``pf_emu_kernel``."""

    _fields_ = [
        ("name", ctypes.c_char_p),
        ("enter", ctypes.c_void_p),
        ("argument_bytes", ctypes.c_size_t),
        ("max_threads", ctypes.c_uint),
        ("shared_begin", ctypes.c_void_p),
        ("shared_end", ctypes.c_void_p),
    ]


@functools.cache
def _runtime() -> ctypes.CDLL:
    source = (_toolchain.HERE / "runtime.cpp").read_text(encoding="utf-8")
    options = ("-O2", "-pthread", "-fvisibility=default", *_more_flags())
    # Global: the libraries of the kernels find their functions there.
    runtime = ctypes.CDLL(str(_toolchain.library(source, options)), mode=ctypes.RTLD_GLOBAL)
    runtime.pf_emu_allocate.restype = ctypes.c_void_p
    runtime.pf_emu_allocate.argtypes = [ctypes.c_size_t]
    runtime.pf_emu_free.argtypes = [ctypes.c_void_p]
    runtime.pf_emu_message.restype = ctypes.c_char_p
    runtime.pf_emu_fault_offset.restype = ctypes.c_size_t
    runtime.pf_emu_num_switches.restype = ctypes.c_ulonglong
    runtime.pf_emu_launch.argtypes = [
        ctypes.POINTER(_KernelEntry),
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_uint),
        ctypes.c_uint,
        ctypes.c_uint,
        ctypes.c_uint64,
        ctypes.c_double,
    ]
    return runtime


def _more_flags() -> tuple[str, ...]:
    return tuple(os.environ.get("PYFLASH_EMULATOR_FLAGS", "").split())


def num_switches() -> int:
    """How often a launch has gone from one thread to another since the process started."""
    return _runtime().pf_emu_num_switches()


class Memory:
    """Device memory, here of the host: filled with 0xFF, a page behind it that cannot be touched."""

    def __init__(self, nbytes: int) -> None:
        self._runtime = _runtime()
        self.nbytes = nbytes
        self.address: int = self._runtime.pf_emu_allocate(nbytes)
        if not self.address:
            raise MemoryError(f"{nbytes} bytes of emulated device memory")

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self._runtime.pf_emu_free(self.address)


class Kernel:
    """One kernel of a compiled source."""

    def __init__(self, name: str, source: str, path: Path) -> None:
        self.name, self.path = name, path
        self._source = source
        self._library = ctypes.CDLL(str(path))
        self._library.pf_emulated_kernel.restype = _KernelEntry
        self.entry = self._library.pf_emulated_kernel()

    def explain(self, message: str, offset: int) -> str:
        """Return the message of a failed launch with the lines of the source that it is about."""
        if offset and (place := _toolchain.line_of(self.path, offset)):
            message += f"\n{place}"
        lines = self._source.splitlines()
        for number in sorted({int(n) for n in re.findall(rf"{self.name}\.cu:(\d+)", message)}):
            if 1 <= number <= len(lines):
                message += f"\n{number:6}: {lines[number - 1].strip()}"
        return message

    @property
    def static_shared_bytes(self) -> int:
        """Bytes of its ``__shared__`` variables."""
        return (self.entry.shared_end or 0) - (self.entry.shared_begin or 0)


class Device:
    """One emulated GPU."""

    def __init__(self, index: int, architecture: str, num_sms: int = 4) -> None:
        self.index = index
        self.architecture = architecture
        self.capability = int(re.sub(r"\D", "", architecture))
        self.num_sms = num_sms
        self.shared_bytes = SHARED_BYTES[self.capability]
        self.name = f"emulated {architecture}"

    def compile(self, source: str, name: str, options: tuple[str, ...] = ()) -> Kernel:
        """Compile a source without includes and return its kernel `name`."""
        bounds = re.search(rf"__launch_bounds__\((.*?)\)\s*{name}\b", source)
        text = "\n".join(
            [
                f"#define __CUDA_ARCH__ {10 * self.capability}",
                '#include "cuda_on_host.h"',
                f'#line 1 "{name}.cu"',
                source,
                '#line 1 "emulator"',
                "#pragma GCC visibility push(default)",
                f"PF_EMULATED_KERNEL({name}, {bounds[1] if bounds else MAX_THREADS})",
            ]
        )
        _runtime()
        defines = tuple(option for option in options if option.startswith(("-D", "-U")))
        return Kernel(name, source, _toolchain.library(text, (*defines, *_more_flags())))

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        argument: np.ndarray,
    ) -> None:
        """Run a kernel to its end; `argument` is the one struct that it takes, by value."""
        if not all(1 <= n <= most for n, most in zip(grid, MAX_GRID, strict=True)):
            raise EmulationError(f"{kernel.name}: a grid of {grid} blocks cannot be launched")
        most = kernel.entry.max_threads
        if not 1 <= threads <= most:
            raise EmulationError(
                f"{kernel.name}: a block of {threads} threads, at most {most} can be launched"
            )
        static = kernel.static_shared_bytes
        if shared_bytes:  # which begins at a multiple of what it is aligned to, see ptx.cuh
            static = -(-static // SHARED_ALIGNMENT) * SHARED_ALIGNMENT
        if static > MAX_STATIC_SHARED or shared_bytes < 0 or static + shared_bytes > self.shared_bytes:
            raise EmulationError(
                f"{kernel.name}: {static} bytes of static and {shared_bytes} of dynamic shared memory, "
                f"a block of {self.architecture} has {self.shared_bytes} ({MAX_STATIC_SHARED} static)"
            )
        if argument.nbytes != kernel.entry.argument_bytes or argument.nbytes > MAX_ARGUMENT:
            raise EmulationError(
                f"{kernel.name} takes {kernel.entry.argument_bytes} bytes, at most {MAX_ARGUMENT}, "
                f"not {argument.nbytes}"
            )
        runtime = _runtime()
        seed = int(os.environ.get("PYFLASH_EMULATOR_SEED", "0"))
        seconds = float(os.environ.get("PYFLASH_EMULATOR_SECONDS", "300"))
        room = np.zeros(argument.nbytes + ARGUMENT_ALIGNMENT, np.uint8)
        packed = room[-room.ctypes.data % ARGUMENT_ALIGNMENT :][: argument.nbytes]
        packed[:] = np.ascontiguousarray(argument).reshape(-1).view(np.uint8)
        with _lock:
            failed = runtime.pf_emu_launch(
                ctypes.byref(kernel.entry),
                packed.ctypes.data,
                (ctypes.c_uint * 3)(*grid),
                threads,
                shared_bytes,
                seed,
                seconds,
            )
            if failed:
                message = runtime.pf_emu_message().decode(errors="replace")
                raise EmulationError(kernel.explain(message, runtime.pf_emu_fault_offset()))

    def tensor_map(
        self, address: int, extents: tuple[int, ...], strides: tuple[int, ...], rows: int
    ) -> np.ndarray:
        """What hopper_on_host.h reads; it refuses what the driver does."""
        if len(extents) != 4 or len(strides) != 3 or not 1 <= rows <= 256 or address % 16:
            raise EmulationError(f"no map of {extents}, {strides}, {rows} rows at {address:#x}")
        if not all(0 < n <= 2**32 for n in extents) or any(s % 16 or not 0 <= s < 2**40 for s in strides):
            raise EmulationError(f"no map has extents of {extents} and strides of {strides}")
        words = np.zeros(16, np.uint64)
        words[:9] = address, *extents, *strides, rows
        return words

    def allocate(self, num_bytes: int, stream: int = 0) -> Memory:
        """Memory that nothing has been written to: 0xFF in every byte."""
        return Memory(num_bytes)

    def upload(self, array: np.ndarray, stream: int = 0) -> Memory:
        """A copy of an array, C-contiguous."""
        memory = Memory(array.nbytes)
        if array.nbytes:
            packed = np.ascontiguousarray(array)
            ctypes.memmove(memory.address, packed.ctypes.data, array.nbytes)
        return memory

    def download(self, address: int, into: np.ndarray, stream: int = 0) -> None:
        """Copy from an address into a C-contiguous array."""
        if not into.flags.c_contiguous or not into.flags.writeable:
            raise ValueError("into: expected a C-contiguous array that can be written to")
        ctypes.memmove(into.ctypes.data, address, into.nbytes)

    def stream(self) -> int:
        """The current stream; everything here is done when a call returns."""
        return 0

    def is_capturing(self, stream: int) -> bool:
        """Whether a graph is being captured, which there is none of here."""
        return False

    def wait_for(self, stream: int, other: int) -> None:
        """Order two streams, which they are."""


class Platform:
    """All emulated GPUs: one, or as many as asked for."""

    def __init__(self, architecture: str | None = None, num_devices: int = 1) -> None:
        architecture = architecture or os.environ.get("PYFLASH_EMULATOR_ARCHITECTURE", "sm_90a")
        self._devices = [Device(index, architecture) for index in range(num_devices)]

    def unavailable(self) -> str | None:
        """Why there is no device."""
        return _toolchain.unavailable()

    def device(self, index: int) -> Device:
        return self._devices[index]

    def current_device(self) -> int:
        return 0

    def report(self) -> list[tuple[str, str]]:
        return [(f"GPU {device.index}", f"{device.name}, {device.num_sms} SMs") for device in self._devices]
