"""The only module that knows CuPy and the CUDA driver: devices, memory, streams, compiling, launching.

`platform` is what the rest of the backend uses; tests put another one in its place.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from .._array_kinds import cupy_stream
from .._description import Array

#: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES and CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT.
_STATIC_SHARED, _MAX_DYNAMIC_SHARED, _SHARED_CARVEOUT = 1, 8, 9
#: A CUtensorMap, and its kinds that are used: CU_TENSOR_MAP_DATA_TYPE_UINT16, ..._INTERLEAVE_NONE,
#: ..._SWIZZLE_128B, ..._L2_PROMOTION_L2_256B, ..._FLOAT_OOB_FILL_NONE.
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_MAP_OF_UINT16, _MAP_NOT_INTERLEAVED, _MAP_SWIZZLE_128, _MAP_PROMOTION_256, _MAP_ZEROS = 1, 0, 3, 3, 0
#: CU_STREAM_CAPTURE_MODE_RELAXED.
_RELAXED = 2
#: The oldest architecture that the kernels are written for.
MIN_CAPABILITY = 75
_INSTALL = "pip install 'pyflash-attention[cuda13]', or [cuda12] for drivers of CUDA 12"


#: Numbers that stand for the default stream.
_DEFAULT_STREAMS = (0, 1)


class Memory(Protocol):
    """Device memory; freed with the object."""

    @property
    def address(self) -> int:
        """Where it begins."""


class Kernel(Protocol):
    """A function that `Device.launch` takes."""


class Device(Protocol):
    """One GPU."""

    index: int
    name: str
    architecture: str  # what to compile for, "sm_90a"
    capability: int  # 90
    num_sms: int
    shared_bytes: int  # most dynamic shared memory of one block

    def compile(self, source: str, name: str, options: tuple[str, ...]) -> Kernel:
        """Return the kernel `name` of a source text without includes."""

    def launch(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        argument: Array,
    ) -> None:
        """Start a kernel whose only parameter is a struct, `argument`, by value."""

    def tensor_map(
        self, address: int, extents: tuple[int, ...], strides: tuple[int, ...], rows: int
    ) -> Array:
        """Return the words of a map by which the copy unit brings boxes of `rows` rows of 64 elements.

        Extents are innermost first, strides those of the others, in bytes; elements have 16 bits, and what is
        outside of the tensor comes as zeros.
        """

    def allocate(self, num_bytes: int, stream: int) -> Memory:
        """Return memory for work that is put on `stream`."""

    def upload(self, array: Array, stream: int) -> Memory:
        """Return a copy of a C-contiguous array."""

    def download(self, address: int, into: Array, stream: int) -> None:
        """Fill a C-contiguous array, once the work on `stream` is done."""

    def stream(self) -> int:
        """Return the stream that CuPy puts its work on."""

    def is_capturing(self, stream: int) -> bool:
        """Return whether work on a stream is recorded for a graph instead of done."""

    def wait_for(self, stream: int, other: int) -> None:
        """Let work on `stream` begin only when what is on `other` by now is done."""


class Platform(Protocol):
    """The GPUs of this process."""

    def unavailable(self) -> str | None:
        """Return why there are none that can be used, None if there are."""

    def device(self, index: int) -> Device:
        """Return a GPU by number."""

    def current_device(self) -> int:
        """Return the number of the GPU that CuPy uses now."""

    def report(self) -> list[tuple[str, str]]:
        """Return labels and values that say which GPUs and which versions of what drives them there are."""


class _CupyKernel:
    """A loaded function, with what keeps its module loaded."""

    def __init__(self, function: Any, static_bytes: int) -> None:
        self.function = function
        self.handle = ctypes.c_void_p(function.ptr)
        # What every kernel may have without asking is 48 KiB, static variables among them.
        self.shared_bytes = 48 * 1024 - static_bytes


class _CupyMemory:
    def __init__(self, pointer: Any) -> None:
        self._pointer = pointer
        self.address = int(pointer.ptr)


class _On:
    """Makes a device current for a while."""

    def __init__(self, runtime: Any, index: int) -> None:
        self._runtime, self._index = runtime, index

    def __enter__(self) -> None:
        self._before = self._runtime.getDevice()
        if self._before != self._index:
            self._runtime.setDevice(self._index)

    def __exit__(self, *error: object) -> None:
        if self._before != self._index:
            self._runtime.setDevice(self._before)


class _CupyDevice:
    def __init__(self, index: int) -> None:
        import cupy

        self._cupy, self._runtime = cupy, cupy.cuda.runtime
        self._driver = _driver_library()
        #: What graphs use as often as they are replayed. It stays: nobody says when a graph ends.
        self._captured: dict[int, Any] = {}
        self.index = index
        with self.current():
            self._runtime.free(0)  # makes the device's context
            properties = self._runtime.getDeviceProperties(index)
        self.name = properties["name"].decode()
        self.capability = _capability(properties)
        self.architecture = _architecture(self.capability)
        self.num_sms = properties["multiProcessorCount"]
        self.shared_bytes = properties["sharedMemPerBlockOptin"]

    def current(self) -> _On:
        return _On(self._runtime, self.index)

    def _stream(self, address: int) -> Any:
        return cupy_stream(self._cupy, address, self.index)

    def compile(self, source: str, name: str, options: tuple[str, ...]) -> _CupyKernel:
        from . import _compile

        cubin = _compile.cubin(source, name, options, self.architecture)
        with self.current():
            module = self._cupy.cuda.function.Module()
            module.load(cubin)
            function = module.get_function(name)
            kernel = _CupyKernel(
                function, self._cupy.cuda.driver.funcGetAttribute(_STATIC_SHARED, function.ptr)
            )
            # All alike: a multiprocessor that has to divide its memory anew between two launches runs dry.
            status = self._driver.cuFuncSetAttribute(kernel.handle, _SHARED_CARVEOUT, 100)
            _check(self._driver, status, "set how a kernel of pyflash divides the memory of multiprocessors")
            return kernel

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        argument: Array,
    ) -> None:
        parameters = (ctypes.c_void_p * 1)(argument.ctypes.data)
        with self.current():
            if shared_bytes > kernel.shared_bytes:
                status = self._driver.cuFuncSetAttribute(kernel.handle, _MAX_DYNAMIC_SHARED, shared_bytes)
                _check(self._driver, status, f"give a kernel {shared_bytes} bytes of shared memory")
                kernel.shared_bytes = shared_bytes
            status = self._driver.cuLaunchKernel(
                kernel.handle, *grid, threads, 1, 1, shared_bytes, ctypes.c_void_p(stream), parameters, None
            )
            if self._captures(stream):
                self._captured[id(kernel)] = kernel
        _check(self._driver, status, "launch a kernel of pyflash")

    @functools.lru_cache(maxsize=256)  # noqa: B019 - devices stay
    def tensor_map(
        self, address: int, extents: tuple[int, ...], strides: tuple[int, ...], rows: int
    ) -> Array:
        room = np.zeros(2 * _MAP_BYTES // 8, np.uint64)
        begin = -room.ctypes.data % _MAP_ALIGNMENT // 8
        words = room[begin : begin + _MAP_BYTES // 8]
        rank = len(extents)
        status = self._driver.cuTensorMapEncodeTiled(
            ctypes.c_void_p(words.ctypes.data),
            _MAP_OF_UINT16,
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*extents),
            (ctypes.c_uint64 * (rank - 1))(*strides),
            (ctypes.c_uint32 * rank)(64, rows, *(1,) * (rank - 2)),
            (ctypes.c_uint32 * rank)(*(1,) * rank),
            _MAP_NOT_INTERLEAVED,
            _MAP_SWIZZLE_128,
            _MAP_PROMOTION_256,
            _MAP_ZEROS,
        )
        _check(self._driver, status, f"describe a tensor of {extents} elements, {strides} bytes apart")
        return words

    def allocate(self, num_bytes: int, stream: int) -> _CupyMemory:
        with self.current(), self._stream(stream):
            if not self._captures(stream):
                return _CupyMemory(self._cupy.cuda.alloc(num_bytes))
            with _relaxed(self._driver):
                memory = _CupyMemory(self._cupy.cuda.alloc(num_bytes))
            self._captured[id(memory)] = memory
            return memory

    def _captures(self, stream: int) -> bool:
        # The default stream can't be captured, and must not be asked while another one is.
        return stream not in _DEFAULT_STREAMS and bool(self._runtime.streamIsCapturing(stream))

    def upload(self, array: Array, stream: int) -> _CupyMemory:
        memory = self.allocate(array.nbytes, stream)
        if array.nbytes:
            with self.current():
                # From pageable memory this returns when the data has been read.
                self._runtime.memcpyAsync(memory.address, array.ctypes.data, array.nbytes, 1, stream)
        return memory

    def download(self, address: int, into: Array, stream: int) -> None:
        with self.current():
            if into.nbytes:
                self._runtime.memcpyAsync(into.ctypes.data, address, into.nbytes, 2, stream)
            self._runtime.streamSynchronize(stream)

    def stream(self) -> int:
        with self.current():
            return int(self._cupy.cuda.get_current_stream().ptr)

    def is_capturing(self, stream: int) -> bool:
        with self.current():
            return self._captures(stream)

    def wait_for(self, stream: int, other: int) -> None:
        with self.current():
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(self._stream(other))
            self._stream(stream).wait_event(event)


class _CupyPlatform:
    def __init__(self) -> None:
        self._process: int | None = None  # in which the driver has been started

    def unavailable(self) -> str | None:
        """Return why no GPU can be used, in one sentence."""
        if self._process not in (None, os.getpid()):
            return "this process was forked from one that had used CUDA; start it by spawn or forkserver"
        reason = self._missing()
        self._process = os.getpid()
        return reason

    @functools.cache  # noqa: B019 - there is one platform
    def _missing(self) -> str | None:
        try:
            import cupy
        except ImportError as error:
            return f"CuPy is not installed ({error}): {_INSTALL}"
        except Exception as error:  # what it imports may be broken in any way
            return f"CuPy cannot be imported ({type(error).__name__}: {error})"
        try:
            count = cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            return f"CUDA finds no GPU: {error}"
        if count == 0:
            return "CUDA finds no GPU: the number of devices is 0"
        try:
            cupy.cuda.nvrtc.getVersion()
        except Exception as error:  # CuPy's loader has its own class for each version
            return f"NVRTC, which compiles the kernels, is not installed ({error}): {_INSTALL}"
        capability = max(int(cupy.cuda.Device(i).compute_capability) for i in range(count))
        if capability < MIN_CAPABILITY:
            return (
                f"the GPU is of architecture sm_{capability}, the kernels need sm_{MIN_CAPABILITY} or newer"
            )
        return None

    @functools.cache  # noqa: B019
    def device(self, index: int) -> Device:
        """Return a GPU by number."""
        return _CupyDevice(index)

    def current_device(self) -> int:
        """Return the number of the GPU that CuPy uses now."""
        import cupy

        return int(cupy.cuda.runtime.getDevice())

    def report(self) -> list[tuple[str, str]]:
        """Return what is known without starting any GPU."""
        import cupy

        runtime, lines = cupy.cuda.runtime, []
        for index in range(runtime.getDeviceCount()):
            properties = runtime.getDeviceProperties(index)
            name, architecture = properties["name"].decode(), _architecture(_capability(properties))
            sms, memory = properties["multiProcessorCount"], properties["totalGlobalMem"] / 2**30
            lines.append((f"GPU {index}", f"{name}, {architecture}, {sms} SMs, {memory:.1f} GiB"))
        driver = runtime.driverGetVersion()
        nvrtc = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
        return [
            *lines,
            ("CuPy", cupy.__version__),
            ("NVRTC", nvrtc),
            ("driver", f"for CUDA {driver // 1000}.{driver % 1000 // 10}"),
        ]


def _capability(properties: Any) -> int:
    return int(10 * properties["major"] + properties["minor"])


def _architecture(capability: int) -> str:
    return f"sm_{capability}" + ("a" if capability == 90 else "")


@functools.cache
def _driver_library() -> Any:
    library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    word, place = ctypes.c_uint, ctypes.c_void_p
    library.cuLaunchKernel.argtypes = [place, *(word,) * 7, place, place, place]
    library.cuFuncSetAttribute.argtypes = [place, ctypes.c_int, ctypes.c_int]
    library.cuThreadExchangeStreamCaptureMode.argtypes = [place]
    return library


@contextlib.contextmanager
def _relaxed(library: Any) -> Iterator[None]:
    """Let this thread take memory from the driver while a stream is captured.

    In the mode of PyTorch's graphs that would end the capture, since in general it may wait for a stream.
    Here it is safe: nothing that has been recorded needs the memory before the graph runs.
    """
    mode = ctypes.c_int(_RELAXED)  # after the exchange, what was before

    def exchange() -> None:
        status = library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        _check(library, status, "change how a thread takes part in the capture of a graph")

    exchange()
    try:
        yield
    finally:
        exchange()


def _check(library: Any, status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"CUDA could not {what}: {_driver_error(library, status)}")


def _driver_error(library: Any, status: int) -> str:
    text = ctypes.c_char_p()
    library.cuGetErrorString(status, ctypes.byref(text))
    return (text.value or b"unknown error").decode() + f" ({status})"


platform: Platform = _CupyPlatform()
