"""Checks of single arguments: arrays, index arrays, numbers. Knows no operation and no backend.

Each function returns the argument in its final form or raises an error that names the argument,
what was found and what was expected.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from . import _dtypes
from ._description import Array
from ._device_array import DeviceArray
from ._errors import invalid

#: Positions stay far from the end of int64, so that the kernels can add them without overflow.
MAX_POSITION = 2**48

INDEX_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))

AN_ARRAY = "an array (NumPy, CuPy, torch or DLPack)"


def describe(value: object) -> str:
    """Return a short description of a value for an error message."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    text = repr(value)
    if len(text) > 60:
        text = text[:57] + "..."
    return f"{text} ({type(value).__name__})"


def plain_array(name: str, value: object, axes: dict[int, str]) -> Array:
    """Return `value` as a plain array; `axes` maps each allowed number of axes to their names."""
    if type(value) is not np.ndarray:
        if isinstance(value, np.ma.MaskedArray):
            raise invalid(name, "a masked array", "a plain array: its mask would be lost")
        if not isinstance(value, np.ndarray):
            raise invalid(name, describe(value), AN_ARRAY)
    if value.ndim not in axes:
        raise invalid(name, f"shape {value.shape}", "shape " + " or ".join(axes.values()))
    if not value.dtype.isnative:
        raise invalid(name, f"dtype {value.dtype} in foreign byte order", "native byte order")
    itemsize = value.itemsize
    for stride in value.strides if itemsize > 1 else ():
        if stride % itemsize:
            raise invalid(name, f"strides {value.strides}", f"multiples of the item size {itemsize}")
    if isinstance(value, DeviceArray) and not value.flags.aligned:
        raise invalid(name, f"address {value.address:#x}", f"a multiple of the item size {itemsize} on a GPU")
    return value


def float_array(name: str, value: object, axes: dict[int, str]) -> tuple[Array, _dtypes.DType]:
    """Return `value` and its row in the registry of element types."""
    array = plain_array(name, value, axes)
    dtype = _dtypes.lookup(array.dtype)
    if dtype is None:
        raise invalid(name, f"dtype {array.dtype}", f"one of {_dtypes.NAMES}")
    return array, dtype


def stored_array(
    name: str, value: object, axes: dict[int, str], kv_dtype: str | None
) -> tuple[Array, _dtypes.DType]:
    """Return keys or values as stored and their row in the registry; bytes are what `kv_dtype` says."""
    array = plain_array(name, value, axes)
    dtype = _dtypes.lookup_stored(array.dtype)
    if dtype is not None and kv_dtype is None:
        return array, dtype
    named = None if kv_dtype is None else _dtypes.BY_NAME[_dtypes.OF_BYTES[kv_dtype]]
    if array.dtype == np.uint8:
        if named is None:
            raise invalid(name, "dtype uint8", "kv_dtype= beside it, which says what the bytes are")
        return array, named
    if dtype is None:
        raise invalid(name, f"dtype {array.dtype}", f"one of {_dtypes.STORED_NAMES}")
    if named is not None and dtype is not named:
        raise invalid(name, f"dtype {array.dtype}", f"{named.name} or uint8, as kv_dtype={kv_dtype!r} says")
    return array, dtype


def dtype_named(name: str, value: object) -> np.dtype[Any]:
    """Return the NumPy dtype that a name, a NumPy dtype or a scalar type stands for."""
    dtype = None
    try:
        if isinstance(value, str) and value == "bfloat16":
            dtype = _dtypes.numpy_dtype(value)
        elif value is not None and not isinstance(value, np.ndarray):
            dtype = np.dtype(value)  # type: ignore[call-overload]
    except (TypeError, ValueError, SyntaxError):
        pass  # not a type, or what NumPy takes for the text of one; refused below
    except ImportError:
        raise invalid(name, "'bfloat16' without the package ml_dtypes", "ml_dtypes installed") from None
    if dtype is None or _dtypes.lookup(dtype) is None:
        raise invalid(name, describe(value), f"one of {_dtypes.NAMES}")
    return dtype


def index_array(name: str, value: object, shape: tuple[int | None, ...], meaning: str) -> Array:
    """Return an array of int32 or int64 of the given shape (None: any length)."""
    array = plain_array(name, value, {len(shape): meaning})
    if array.dtype not in INDEX_DTYPES:
        raise invalid(name, f"dtype {array.dtype}", "int32 or int64")
    if any(want is not None and have != want for have, want in zip(array.shape, shape, strict=True)):
        raise invalid(name, f"shape {array.shape}", f"shape {meaning}")
    return array if array.flags.aligned else array.copy()  # never large


def index_range(name: str, array: Array, low: int, high: int, meaning: str) -> None:
    """Refuse an index array with a value outside ``low <= value <= high``, naming the first.

    What lies on a device is for the kernel to bound.
    """
    if isinstance(array, DeviceArray):
        return
    outside = (array < low) | (array > high)
    if outside.any():
        where = tuple(int(i) for i in np.argwhere(outside)[0])
        place = f"{name}[{', '.join(map(str, where))}]"
        raise invalid(place, int(array[where]), f"{low} to {high} ({meaning})")


def prefix_sums(
    name: str, value: object, batch: int | None, total: int, contents: Callable[[str, Array], Array | None]
) -> tuple[Array, Array | None]:
    """Return cumulative lengths, and checked contents: from 0, non-decreasing, up to `total` tokens.

    `contents` says what an index array contains, None for one that is not read.
    """
    want = "(batch + 1,)" if batch is None else f"(batch + 1,) = ({batch + 1},)"
    given = index_array(name, value, (None if batch is None else batch + 1,), want)
    if given.shape[0] == 0:
        raise invalid(name, "shape (0,)", f"shape {want}")
    array = contents(name, given)
    if array is None:
        return given, None
    if array[0] != 0:
        raise invalid(f"{name}[0]", int(array[0]), "0")
    falls = np.flatnonzero(array[1:] < array[:-1])
    if falls.size:
        i = int(falls[0]) + 1
        raise invalid(f"{name}[{i}]", int(array[i]), f"at least {name}[{i - 1}] = {int(array[i - 1])}")
    if array[-1] != total:
        raise invalid(f"{name}[-1]", int(array[-1]), f"{total}, the number of packed tokens")
    return given, array


def integer(name: str, value: object, low: int | None = None, high: int | None = None) -> int:
    """Return a Python or NumPy integer within bounds; bool is refused."""
    try:
        if isinstance(value, (bool, np.bool_, np.ndarray)):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise invalid(name, describe(value), "an integer") from None
    if (low is not None and number < low) or (high is not None and number > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise invalid(name, number, f"an integer, {bounds}")
    return number


def number(name: str, value: object) -> float:
    """Return a finite real number; bool, arrays and strings are refused."""
    allowed = (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, allowed):
        raise invalid(name, describe(value), "a finite number")
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise invalid(name, result, "a finite number")
    return result


def choice(name: str, value: object, allowed: tuple[Any, ...]) -> Any:
    """Return `value` if it is one of a few names."""
    if isinstance(value, (str, bool, type(None))) and value in allowed:
        return value
    raise invalid(name, describe(value), "one of " + ", ".join(map(repr, allowed)))


def flag(name: str, value: object) -> bool:
    """Return a bool; anything that is merely true or false in a condition is refused."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise invalid(name, describe(value), "True or False")


def writable_output(name: str, array: Array, inputs: dict[str, Array]) -> None:
    """Refuse an output that is read-only, overlaps an input, or overlaps itself."""
    if not array.flags.writeable:
        raise invalid(name, "a read-only array", "a writable array")
    if overlaps_itself(array):
        raise invalid(name, f"strides {array.strides}", "an array whose elements have places of their own")
    for other_name, other in inputs.items():
        if may_overlap(array, other):
            raise invalid(name, f"memory that it shares with {other_name}", "memory of its own")


def may_overlap(a: Array, b: Array) -> bool:
    """Return whether two arrays share memory, True where that takes too long to decide."""
    if not np.may_share_memory(a, b):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=10_000))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def overlaps_itself(array: Array) -> bool:
    """Return whether two elements may lie in one place (True too where the order of axes can't tell)."""
    if array.size == 0:
        return False
    end = array.itemsize
    for stride, length in sorted(
        (abs(s), n) for s, n in zip(array.strides, array.shape, strict=True) if n > 1
    ):
        if stride < end:
            return True
        end = stride * (length - 1) + end
    return False
