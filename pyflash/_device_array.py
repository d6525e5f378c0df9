"""`DeviceArray`: a NumPy array over memory that the host may not read.

Shape, strides, type and address of an array on a GPU are those of NumPy, and so is everything that
only computes new ones from them: slices, transposes, broadcasts, views, tests for shared memory. All
checks of arguments are written once, for both. Whatever would touch an element raises a TypeError.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ._description import Array

if TYPE_CHECKING:
    from ._device_kind import DeviceKind

#: Where an array without elements lies: NumPy would replace a null pointer.
_NOWHERE = 64

#: Functions of NumPy that look at shapes, strides and addresses alone.
_LAYOUT_FUNCTIONS = frozenset(
    (
        *(np.may_share_memory, np.shares_memory, np.broadcast_to, np.swapaxes, np.moveaxis, np.transpose),
        *(np.expand_dims, np.squeeze, np.reshape, np.shape, np.ndim, np.size, np.diagonal),
    )
)
#: The same of methods.
_LAYOUT_METHODS = frozenset(("view", "reshape", "transpose", "swapaxes", "squeeze", "diagonal", "setflags"))
#: Operators that do not go through a ufunc.
_READING_OPERATORS = (
    *("__setitem__", "__delitem__", "__bool__", "__int__", "__float__", "__complex__", "__index__"),
    *("__iter__", "__contains__", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__"),
    *("__array__", "__dlpack__"),
)


class DeviceArray(np.ndarray[Any, np.dtype[Any]]):
    """The description of an array on a device; made by `described`, and by views of one.

    Attributes
    ----------
    kind : DeviceKind
        What knows the library that the array is of.
    owner : object
        The caller's array, which keeps the memory.
    device : int
        Number of the GPU.
    """

    kind: DeviceKind
    owner: Any
    device: int = 0  # type: ignore[assignment] # NumPy's own says "cpu"
    _as_given: tuple[Any, ...] = ()

    def __array_finalize__(self, other: Any) -> None:
        if isinstance(other, DeviceArray):
            self.kind, self.owner, self.device = other.kind, other.owner, other.device
            self._as_given = other._as_given

    @property
    def address(self) -> int:
        """Where the first element lies, in the memory of the device."""
        return int(self.__array_interface__["data"][0])

    @property
    def is_whole(self) -> bool:
        """Whether this describes the caller's array as it is, and not another view of its memory."""
        return self._as_given == (self.address, self.shape, self.strides, self.dtype)

    def __repr__(self) -> str:
        return f"<DeviceArray on GPU {self.device}: shape {self.shape}, dtype {self.dtype}>"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def refuse(self, what: str) -> NoReturn:
        """Raise the TypeError of an access from the host."""
        raise TypeError(
            f"{what} would touch the elements of an array of shape {self.shape} and dtype {self.dtype} on "
            f"GPU {self.device}, which the host cannot"
        )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        self.refuse(f"numpy.{ufunc.__name__}")

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func not in _LAYOUT_FUNCTIONS:
            self.refuse(f"numpy.{func.__name__}")
        if func is np.broadcast_to:
            kwargs = {**kwargs, "subok": True}
        return super().__array_function__(func, types, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        parts = key if isinstance(key, tuple) else (key,)
        one_place = True
        for part in parts:
            if part is None or part is Ellipsis or isinstance(part, slice):
                one_place = False
            elif isinstance(part, (bool, np.bool_, np.ndarray)) or not hasattr(part, "__index__"):
                self.refuse("an index that is no slice or integer")
            else:
                operator.index(part)
        # With an ellipsis NumPy gives a view without axes instead of the element.
        whole = parts if any(part is Ellipsis for part in parts) else (*parts, Ellipsis)
        view = super().__getitem__(whole)
        if one_place and parts and view.ndim == 0:
            self.refuse("an index of one element")
        return view

    def reshape(self, *shape: Any) -> Any:  # type: ignore[override]
        """Return a view of another shape; a shape that would need a copy is refused."""
        wanted = shape[0] if len(shape) == 1 else shape
        try:
            try:
                return super().reshape(wanted, copy=False)
            except TypeError:  # before NumPy 2.1
                view = self.view()
                view.shape = wanted
                return view
        except (AttributeError, ValueError):
            if np.prod(self.shape) != np.prod(wanted) and -1 not in np.atleast_1d(wanted):
                raise
        self.refuse(f"reshape to {wanted}, which needs a copy,")

    @property
    def flat(self) -> NoReturn:
        """Refused: an iterator over elements."""
        self.refuse("flat")

    @flat.setter
    def flat(self, value: Any) -> NoReturn:
        self.refuse("flat")

    @property
    def data(self) -> NoReturn:
        """Refused: a buffer for the host."""
        self.refuse("data")


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: DeviceArray, *args: Any, **kwargs: Any) -> NoReturn:
        self.refuse(name)

    method.__name__ = name
    return method


for _name in (*_READING_OPERATORS, *(n for n in dir(np.ndarray) if not n.startswith("_"))):
    if _name in _READING_OPERATORS or (callable(getattr(np.ndarray, _name)) and _name not in _LAYOUT_METHODS):
        setattr(DeviceArray, _name, _refusing(_name))


class _Memory:
    """What NumPy asks of memory that is somebody else's, and what keeps it."""

    def __init__(self, interface: dict[str, Any], owner: object) -> None:
        self.__array_interface__ = interface
        self.owner = owner


def over_memory(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: np.dtype[Any],
    *,
    owner: object,
    readonly: bool = False,
) -> Array:
    """Return a NumPy array over memory, strides in bytes; None for C order. Nothing is read."""
    interface = {
        "version": 3,
        "data": (address or _NOWHERE, readonly),
        "shape": shape,
        "strides": strides,
        "typestr": f"|V{dtype.itemsize}",  # bfloat16 and float8 have no name here
    }
    return np.asarray(_Memory(interface, owner)).view(dtype)


def over_device(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dtype: np.dtype[Any],
    *,
    kind: DeviceKind,
    owner: object,
    device: int,
    readonly: bool = False,
) -> DeviceArray:
    """Return the description of an array of the caller's on a device."""
    array = over_memory(address, shape, strides, dtype, owner=owner, readonly=readonly).view(DeviceArray)
    array.kind, array.owner, array.device = kind, owner, device
    array._as_given = (address or _NOWHERE, shape, array.strides, dtype)
    return array
