"""The libraries of arrays that pyflash can be given, and what only each of them can do.

None of them is imported: whoever passes an array of a library has imported it. CuPy alone is, where an
array has to be made on a device for somebody who has no library for that.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from . import _dtypes
from ._description import Array
from ._device_array import DeviceArray, over_device, over_memory
from ._device_kind import BITS, DeviceKind, Kind
from ._errors import BackendUnavailable, invalid

#: Device types of DLPack: memory that the host can read, and memory of an NVIDIA GPU.
_DLPACK_HOST, _DLPACK_CUDA = (1, 3), (2, 13)


def _numpy_dtype(name: str, dtype: str, of: str) -> np.dtype[Any]:
    """Return the NumPy type of a library's type by its name."""
    try:
        return _dtypes.numpy_dtype(dtype)
    except ImportError:
        raise invalid(
            name, f"dtype {dtype} of {of} without the package ml_dtypes", "ml_dtypes installed"
        ) from None
    except TypeError:
        raise invalid(name, f"dtype {dtype} of {of}", f"one of {_dtypes.STORED_NAMES}") from None


class Torch(DeviceKind):
    """PyTorch, on the host and on NVIDIA GPUs."""

    def __init__(self) -> None:
        self._dtypes: dict[Any, np.dtype[Any]] = {}

    @staticmethod
    def _torch() -> Any:
        return sys.modules.get("torch")

    def recognises(self, x: Any) -> bool:
        tensor = getattr(self._torch(), "Tensor", None)
        return tensor is not None and isinstance(x, tensor)

    def _numpy_dtype(self, name: str, dtype: Any) -> np.dtype[Any]:
        found = self._dtypes.get(dtype)
        if found is None:
            found = self._dtypes[dtype] = _numpy_dtype(name, str(dtype).removeprefix("torch."), "torch")
        return found

    def is_on_device(self, x: Any) -> bool:
        return bool(x.is_cuda)

    def see(self, name: str, x: Any) -> Array:
        torch = self._torch()
        if x.requires_grad and torch.is_grad_enabled():
            expected = "one without: pyflash has no gradients; call it under torch.no_grad(), or detach()"
            raise invalid(name, "a torch tensor that requires a gradient", expected)
        if x.layout != torch.strided:
            raise invalid(name, f"a torch tensor of layout {x.layout}", "a dense one")
        if x.is_conj() or x.is_neg():
            expected = "one whose elements lie in memory: resolve_conj(), resolve_neg()"
            raise invalid(name, "a torch tensor that is conjugated or negated when it is read", expected)
        if x.device.type not in ("cpu", "cuda") or (x.is_cuda and getattr(torch.version, "hip", None)):
            raise invalid(name, f"a torch tensor on {x.device}", "the host or an NVIDIA GPU")
        return self._seen(x, self._numpy_dtype(name, x.dtype))

    def _seen(self, x: Any, dtype: np.dtype[Any]) -> Array:
        shape = tuple(x.shape)
        strides = tuple(stride * dtype.itemsize for stride in x.stride())
        if not x.is_cuda:
            return over_memory(x.data_ptr(), shape, strides, dtype, owner=x)
        device = x.device.index
        return over_device(x.data_ptr(), shape, strides, dtype, kind=self, owner=x, device=device)

    def from_host(self, array: Array, like: Any) -> Any:
        return self._from_numpy(array)

    def _from_numpy(self, array: Array) -> Any:
        torch = self._torch()
        if array.dtype.isbuiltin == 1:
            return torch.from_numpy(array)
        return torch.from_numpy(array.view(BITS[array.itemsize])).view(getattr(torch, array.dtype.name))

    def wrap(self, native: Any) -> DeviceArray:
        seen = self._seen(native, self._numpy_dtype("a result", native.dtype))
        assert isinstance(seen, DeviceArray)
        return seen

    def native(self, array: DeviceArray) -> Any:
        torch, owner = self._torch(), array.owner
        if not self.recognises(owner):
            return _torch_over(torch, array)
        wanted = getattr(torch, array.dtype.name)
        if owner.dtype != wanted:
            owner = owner.view(wanted)  # only this library's own arrays are of another size
        if not array.size:
            return owner.new_empty(array.shape)
        size = array.itemsize
        offset = owner.storage_offset() + (array.address - owner.data_ptr()) // size
        return torch.as_strided(owner, array.shape, [stride // size for stride in array.strides], offset)

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> Any:
        torch = self._torch()
        return torch.empty(shape, dtype=getattr(torch, dtype.name), device=f"cuda:{device}")

    def upload(self, array: Array, device: int) -> Any:
        return self._from_numpy(np.array(array)).to(f"cuda:{device}")

    def download(self, native: Any) -> Array:
        found: Array = native.cpu().numpy()
        return found

    def on(self, device: int) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._torch().cuda.device(device)
        return context

    def stream(self, device: int) -> int:
        return int(self._torch().cuda.current_stream(device).cuda_stream)

    def capturing(self, device: int) -> bool:
        with self.on(device):
            return bool(self._torch().cuda.is_current_stream_capturing())

    def int64(self, native: Any) -> Any:
        return native.to(self._torch().int64)

    def current_device(self) -> int:
        return int(self._torch().cuda.current_device())


class _Interface:
    """Offers memory on a device by the interface that all libraries for CUDA take."""

    def __init__(self, array: DeviceArray) -> None:
        self.owner = array
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": array.shape,
            "strides": array.strides,
            "typestr": array.dtype.str,
            "data": (array.address, False),
            "stream": None,
        }


def _torch_over(torch: Any, array: DeviceArray) -> Any:
    """Return a tensor over the memory of another library's array of integers."""
    tensor = torch.as_tensor(_Interface(array), device=f"cuda:{array.device}")
    wait = array.kind.wait_for(array)
    if wait is not None:
        torch.cuda.current_stream(tensor.device).wait_stream(
            torch.cuda.ExternalStream(wait, device=tensor.device)
        )
    return tensor


class _StreamAddress:
    """A stream by its address, in the protocol by which libraries share streams."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def cupy_stream(cupy: Any, address: int, device: int) -> Any:
    """Return CuPy's object for a stream of a device that somebody else has made; 0 is the default stream."""
    streams = cupy.cuda
    if not hasattr(streams.Stream, "from_external"):
        return streams.ExternalStream(address, device)  # before CuPy 14, which warns of it
    return streams.Stream.from_external(_StreamAddress(address)) if address else streams.Stream.null


class Cupy(DeviceKind):
    """CuPy; also whatever has to be made on a device for somebody without a library."""

    @staticmethod
    def _cupy() -> Any:
        try:
            return sys.modules.get("cupy") or importlib.import_module("cupy")
        except ImportError as error:
            raise BackendUnavailable(
                f"arrays on a GPU need CuPy, which cannot be imported: {error}"
            ) from None

    def recognises(self, x: Any) -> bool:
        ndarray = getattr(sys.modules.get("cupy"), "ndarray", None)
        return ndarray is not None and isinstance(x, ndarray)

    def is_on_device(self, x: Any) -> bool:
        return True

    def see(self, name: str, x: Any) -> Array:
        return self.wrap(x)

    def wrap(self, native: Any) -> DeviceArray:
        return over_device(
            native.data.ptr,
            native.shape,
            native.strides,
            native.dtype,
            kind=self,
            owner=native,
            device=native.device.id,
        )

    def native(self, array: DeviceArray) -> Any:
        cupy, owner = self._cupy(), array.owner
        if not array.size:
            return self.new(array.shape, array.dtype, array.device)
        if isinstance(owner, cupy.ndarray):
            memory = owner.data + (array.address - owner.data.ptr)
        else:
            if array.kind is not self:
                wait = array.kind.wait_for(array)
                if wait is not None:
                    event = cupy_stream(cupy, wait, array.device).record()
                    cupy.cuda.get_current_stream(array.device).wait_event(event)
            whole = cupy.cuda.UnownedMemory(array.address, max(array.nbytes, 1), array, array.device)
            memory = cupy.cuda.MemoryPointer(whole, 0)
        return cupy.ndarray(array.shape, array.dtype, memory, array.strides)

    def new(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: int) -> Any:
        return self._cupy().empty(shape, dtype)

    def upload(self, array: Array, device: int) -> Any:
        return self._cupy().asarray(array)

    def download(self, native: Any) -> Array:
        found: Array = self._cupy().asnumpy(native)
        return found

    def on(self, device: int) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._cupy().cuda.Device(device)
        return context

    def stream(self, device: int) -> int:
        return int(self._cupy().cuda.get_current_stream(device).ptr)

    def capturing(self, device: int) -> bool:
        return bool(self._cupy().cuda.get_current_stream(device).is_capturing())

    def int64(self, native: Any) -> Any:
        return native.astype(np.int64)

    def device_of(self, address: int) -> int:
        """Return the number of the GPU on which an address lies."""
        return int(self._cupy().cuda.runtime.pointerGetAttributes(address).device)

    def current_device(self) -> int:
        return int(self._cupy().cuda.Device().id)


class Foreign(Cupy):
    """An array of an unknown library on a GPU; CuPy does what has to be done for it."""

    def __init__(self, owner: Any) -> None:
        self._namespace = getattr(owner, "__array_namespace__", None)

    def wrap(self, native: Any) -> DeviceArray:
        array = super().wrap(native)
        array._as_given = ()  # the caller's library is another one
        return array

    def give_back(self, array: DeviceArray) -> Any:
        if array.is_whole:
            return array.owner
        native = self.native(array)
        return native if self._namespace is None else self._namespace().from_dlpack(native)


class OfInterface(Foreign):
    """The same in the order of the stream that its interface names, None if it is complete."""

    def __init__(self, owner: Any, stream: int | None) -> None:
        super().__init__(owner)
        self._stream = stream

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        cupy = self._cupy()
        with cupy.cuda.Device(device), cupy_stream(cupy, self._stream or 0, device):
            yield

    def stream(self, device: int) -> int:
        return self._stream or 0

    def capturing(self, device: int) -> bool:
        return False

    def wait_for(self, array: DeviceArray) -> int | None:
        return self._stream


class Protocols(Kind):
    """Anything that says where its elements lie: by the array interfaces, or by DLPack."""

    def recognises(self, x: Any) -> bool:
        if isinstance(x, (np.generic, type)):
            return False
        return any(
            hasattr(x, f"__{name}__") for name in ("cuda_array_interface", "array_interface", "dlpack")
        )

    def is_on_device(self, x: Any) -> bool:
        if hasattr(x, "__cuda_array_interface__"):
            return True
        if hasattr(x, "__array_interface__"):
            return False
        return _dlpack_device(x)[0] in _DLPACK_CUDA

    def see(self, name: str, x: Any) -> Array:
        interface = getattr(x, "__cuda_array_interface__", None)
        if interface is not None:
            return self._of_interface(name, x, interface)
        if hasattr(x, "__array_interface__"):
            array: Array = np.asarray(x)
            return array
        return self._of_dlpack(name, x)

    def from_host(self, array: Array, like: Any) -> Any:
        namespace = getattr(like, "__array_namespace__", None)
        return array if namespace is None else namespace().from_dlpack(array)

    def _of_interface(self, name: str, x: Any, interface: dict[str, Any]) -> Array:
        if interface.get("mask") is not None:
            raise invalid(name, "a masked array", "a plain array: its mask would be lost")
        address, readonly = interface["data"]
        dtype = np.dtype(interface["typestr"])
        if dtype.kind == "V" and hasattr(x, "dtype"):  # bfloat16 has no name in the interface
            with contextlib.suppress(TypeError):
                dtype = np.dtype(x.dtype)
        address = int(address or 0)
        if not address and all(interface["shape"]):
            raise invalid(name, "a null pointer", "an array with memory")
        kind = OfInterface(x, interface.get("stream"))
        if hasattr(x, "__dlpack_device__"):
            device = _dlpack_device(x)[1]
        else:
            device = CUPY.device_of(address) if address else CUPY.current_device()
        return over_device(
            address,
            tuple(interface["shape"]),
            interface.get("strides"),
            dtype,
            kind=kind,
            owner=x,
            device=device,
            readonly=bool(readonly),
        )

    def _of_dlpack(self, name: str, x: Any) -> Array:
        where, _ = _dlpack_device(x)
        if where not in _DLPACK_HOST + _DLPACK_CUDA:
            found = f"an array on device type {where} of DLPack"
            raise invalid(name, found, f"the host {_DLPACK_HOST} or an NVIDIA GPU {_DLPACK_CUDA}")
        try:
            if where in _DLPACK_HOST:
                return np.from_dlpack(x)
            seen = Foreign(x).wrap(CUPY._cupy().from_dlpack(x))
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            found = f"a {type(x).__name__} that cannot be seen by DLPack ({error})"
            raise invalid(name, found, "an array that can") from None
        seen.owner = x
        seen._as_given = (seen.address, seen.shape, seen.strides, seen.dtype)
        return seen


def _dlpack_device(x: Any) -> tuple[int, int]:
    """Return the type and number of the device of an array, as DLPack counts them."""
    kind, number = x.__dlpack_device__()
    return int(kind), int(number)


TORCH, CUPY = Torch(), Cupy()
