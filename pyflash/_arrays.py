"""Arrays of all kinds, seen as NumPy arrays, and results given back as arrays of the caller's kind.

On the host that is a view of the same memory, on a device a `DeviceArray`. Everything behind the checks
works on these; what has to be done with elements on a device goes through the functions below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ._array_kinds import CUPY, TORCH, Protocols
from ._description import Array
from ._device_array import DeviceArray, over_device
from ._device_kind import DeviceKind, Kind
from ._errors import UnsupportedError, invalid, unsupported

__all__ = ["DeviceArray", "DeviceKind", "Kind", "see"]

#: The kinds of arrays beside NumPy's, each asked in turn.
_kinds: list[Kind] = [TORCH, CUPY, Protocols()]

#: Kinds by the type of their arrays, of those whose arrays are of one type.
_by_type: dict[type, Kind] = {}

#: The kind of arrays that pyflash makes on a device for itself.
own_kind: DeviceKind = CUPY

#: What may lie on the host beside queries on a device: small, and uploaded with the call. Scales per head
#: are too, those per token are not.
_SMALL = frozenset(
    (
        *("seq_lens", "block_table", "cu_seqlens_q", "cu_seqlens_kv", "q_offset", "spans[0]", "spans[1]"),
        *("tree", "alibi_slopes", "sinks", "shared_block_table", "slots", "cu_seqlens", "rows"),
    )
)
_SCALES = frozenset(f"{x}_scale{y}" for x in "qkv" for y in ("", "_shared"))


def register(kind: Kind) -> None:
    """Let another library's arrays be recognised, before those that are known."""
    _kinds.insert(0, kind)


def kind_of(x: Any) -> Kind | None:
    """Return the kind of an array, None for NumPy's and for whatever is no array."""
    found = _by_type.get(type(x))
    if found is not None:
        return found
    # Numbers and texts come as often as arrays.
    if isinstance(x, (np.ndarray, np.generic, str, int, float, tuple, list, type(None))):
        return None
    for kind in _kinds:
        if kind.recognises(x):
            if kind in (TORCH, CUPY):
                _by_type[type(x)] = kind
            return kind
    return None


def see(name: str, x: Any) -> Any:
    """Return an array of any kind as a NumPy array, anything else as it is; errors name the argument."""
    if type(x) is np.ndarray:
        return x
    kind = kind_of(x)
    return x if kind is None else kind.see(name, x)


def see_all(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with all arrays seen, those in a pair of spans too."""
    seen = {name: see(name, x) for name, x in arguments.items()}
    if arguments.get("v_scale") is arguments.get("k_scale") and "k_scale" in arguments:
        seen["v_scale"] = seen["k_scale"]  # one array stays one
    spans = seen.get("spans")
    if isinstance(spans, (tuple, list)) and any(kind_of(end) is not None for end in spans):
        seen["spans"] = tuple(see(f"spans[{i}]", end) for i, end in enumerate(spans))
    return seen


def is_on_device(x: Any) -> bool:
    """Return whether an argument is an array on a device."""
    if type(x) is np.ndarray:
        return False
    kind = kind_of(x)
    return isinstance(x, DeviceArray) if kind is None else kind.is_on_device(x)


def give_back(array: Array, kind: Kind | None, like: Any) -> Any:
    """Return a result as an array of the kind of `like`, which is what the caller gave."""
    if isinstance(array, DeviceArray):
        return array.kind.give_back(array)
    return array if kind is None else kind.from_host(array, like)


def on_host(x: Any) -> Array:
    """Return an array of any kind as NumPy's, a copy of one that lies on a device."""
    array: Array = see("array", x)
    return array.kind.read(array) if isinstance(array, DeviceArray) else array


# --- where arguments lie ---


def check_places(backend: str, first: str, arguments: dict[str, Any]) -> None:
    """Refuse arguments that lie where the backend, or the argument called `first`, does not."""
    if backend != "cuda":
        for name, x in arguments.items():
            if isinstance(x, DeviceArray):
                instead = "expected host memory, or backend='cuda'"
                raise unsupported(name, f"an array on GPU {x.device}", f"the {backend} backend", instead)
        return
    home = arguments[first]
    for name, x in arguments.items():
        if isinstance(x, DeviceArray):
            if not isinstance(home, DeviceArray):
                raise invalid(name, f"an array on GPU {x.device}", f"host memory, where {first} lies")
            if x.device != home.device:
                raise invalid(name, f"an array on GPU {x.device}", f"GPU {home.device}, where {first} lies")
        elif isinstance(x, np.ndarray) and isinstance(home, DeviceArray):
            small = name in _SMALL or (name in _SCALES and x.ndim == 1)
            if not small:
                raise invalid(name, "an array in host memory", f"GPU {home.device}, where {first} lies")


def streams_of(first: DeviceArray, others: Iterable[Any]) -> tuple[int, list[int]]:
    """Return the stream for the work on some arrays, and the streams that it has to wait for before.

    Parameters
    ----------
    first : DeviceArray
        The queries: the work goes to the current stream of their library.
    others : iterable
        All other arguments; only arrays on a device count.
    """
    stream = first.kind.stream(first.device)
    waits: dict[int, None] = {}
    for x in others:
        if isinstance(x, DeviceArray) and x.kind is not first.kind:
            wait = x.kind.wait_for(x)
            if wait is not None and wait != stream:
                waits[wait] = None
    return stream, list(waits)


def contents(name: str, array: Array, read_back: bool) -> Array | None:
    """Return what an index array contains, None if it lies on a device and is not to be read back."""
    if not isinstance(array, DeviceArray):
        return array
    if not read_back:
        return None
    if array.kind.capturing(array.device):
        raise UnsupportedError(
            f"check_indices: {name} cannot be read back while its stream is being captured; leave it out"
        )
    return array.kind.read(array)


# --- work on elements, on the host or on a device ---


def empty(shape: tuple[int, ...], dtype: Any, like: Array, fill: float | None = None) -> Array:
    """Return a new array where `like` lies, of its library; uninitialised or filled."""
    if not isinstance(like, DeviceArray):
        return np.empty(shape, dtype) if fill is None else np.full(shape, fill, dtype)
    array = like.kind.empty(shape, np.dtype(dtype), like.device)
    if fill is not None and array.size:
        like.kind.fill(array, fill)
    return array


def of_shape(shape: tuple[int, ...], dtype: np.dtype[Any], like: Array) -> Array:
    """Return an array that is a shape only, of one repeated element, where `like` lies."""
    if not isinstance(like, DeviceArray):
        return np.broadcast_to(np.zeros((), dtype), shape)
    one = over_device(
        like.address, (), (), dtype, kind=like.kind, owner=like.owner, device=like.device, readonly=True
    )
    return np.broadcast_to(one, shape)


def fill(array: Array, value: float) -> None:
    """Set all elements."""
    if isinstance(array, DeviceArray):
        array.kind.fill(array, value)
    else:
        array[...] = value


def assign(target: Array, source: Array) -> None:
    """Copy all elements from one array to another of the same shape on the same side."""
    if isinstance(target, DeviceArray) and isinstance(source, DeviceArray):
        target.kind.assign(target, source)
    else:
        target[...] = source


def reshaped(array: Array, shape: tuple[int, ...]) -> Array:
    """Return another shape of an array, a copy where its strides do not allow a view."""
    if not isinstance(array, DeviceArray):
        return array.reshape(shape)
    try:
        view: Array = array.reshape(shape)
    except TypeError:
        return contiguous(array, array.dtype).reshape(shape)
    return view


def contiguous(array: Array, dtype: Any) -> Array:
    """Return an array in C order and of a type, a copy where it is not."""
    if not isinstance(array, DeviceArray):
        with np.errstate(over="ignore"):
            return np.ascontiguousarray(array, dtype)
    if array.flags.c_contiguous and array.dtype == dtype:
        return array
    copy = empty(array.shape, dtype, array)
    if array.size:
        assign(copy, array)
    return copy


def take(array: Array, rows: Array) -> Array:
    """Return a new array of some rows of the first axis; the numbers of rows lie on the host."""
    if isinstance(array, DeviceArray):
        return array.kind.take(array, rows)
    taken: Array = array[rows]
    return taken


def put(target: Array, rows: Array, source: Array) -> None:
    """Copy into some rows of the first axis."""
    if isinstance(target, DeviceArray) and isinstance(source, DeviceArray):
        target.kind.put(target, rows, source)
    else:
        target[rows] = source


def computed(function: Callable[..., Any], *arrays: Array) -> Array:
    """Return what operators make of integer arrays, in int64; on a device if one of them is there."""
    for array in arrays:
        if isinstance(array, DeviceArray):
            return array.kind.computed(function, arrays, array.device)
    result: Array = function(*(x.astype(np.int64) for x in arrays))
    return result
