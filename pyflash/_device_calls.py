"""What is remembered of calls with arrays on a device, as `_call_table` does for NumPy's.

The arrays stay what the caller gave: of each only its place is asked for. A call is remembered once it
comes for the second time, if all of its arrays are of one library and all other options plain Python
values; it then goes to what the backend has prepared, launches whose arguments are complete but for places.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _backends, _dtypes, _environment
from ._call_table import CAPACITY, plain_options

#: Launches with arrays in these places, q, k, v, out, lse and the index arrays (0: none), on a stream, with
#: the options that are arrays in these. False: nothing was done, check the arguments.
Launch = Callable[[tuple[int, ...], int, tuple[int, ...]], bool]

#: Options that may be arrays, and the fields of the kernels' arguments for where they, or their parts, lie.
_FIELDS = {
    "workspace": ("partial",),
    **{
        name: (name,)
        for name in (
            "k_scale", "v_scale", "q_scale", "bias", "mask", "alibi_slopes", "sinks", "tree", "q_offset"
        )
    },
    "spans": ("span_lo", "span_hi"),
}  # fmt: skip


class Library(NamedTuple):
    """What has to be asked of the arrays of a library, without wrapping them."""

    layout: Callable[[Any], Any]  # all that the checks depend on, None where they have more to say
    place: Callable[[Any], int]
    device: Callable[[Any], int]
    stream: Callable[[int], int]
    new: Callable[[tuple[int, ...], str, int], Any]


class Known(NamedTuple):
    """How to make a call again."""

    launch: Launch
    out_shape: tuple[int, ...]
    out_dtype: str
    lse_shape: tuple[int, ...] | None  # None: not wanted
    lse_dtype: str


#: Contents of index arrays on a device are looked into only where that is asked for.
_LOOKED_INTO = ("check_indices",)

_table: dict[Any, Known] = {}
_backend_in_context, _variables = _backends.in_context, _environment.variables


def clear() -> None:
    """Forget everything."""
    _table.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=clear)  # a child has no CUDA, and is to be told so


def _cupy(module: Any) -> Library:
    stream = module.cuda.get_current_stream

    def new(shape: tuple[int, ...], dtype: str, device: int) -> Any:
        with module.cuda.Device(device):
            return module.empty(shape, _dtypes.numpy_dtype(dtype))

    return Library(
        lambda x: (x.shape, x.strides, x.dtype, x.data.device_id),
        lambda x: x.data.ptr,
        lambda x: x.data.device_id,
        lambda device: stream(device).ptr,
        new,
    )


def _torch(module: Any) -> Library:
    stream = module.cuda.current_stream

    def layout(x: Any) -> Any:
        if not x.is_cuda or x.requires_grad or x.is_conj() or x.is_neg() or x.layout is not module.strided:
            return None
        return x.shape, x.stride(), x.dtype, x.device

    return Library(
        layout,
        lambda x: x.data_ptr(),
        lambda x: x.device.index,
        lambda device: stream(device).cuda_stream,
        lambda shape, dtype, device: module.empty(
            shape, dtype=getattr(module, dtype), device=f"cuda:{device}"
        ),
    )


_libraries: dict[type, Library] = {}


def _library_of(x: Any) -> Library | None:
    """Return how to ask an array, None if its library has no short way."""
    found = _libraries.get(type(x))
    if found is None:
        for name, kind, make in (("cupy", "ndarray", _cupy), ("torch", "Tensor", _torch)):
            module = sys.modules.get(name)
            if module is not None and type(x) is getattr(module, kind, None):
                found = _libraries[type(x)] = make(module)
    return found


def _parted(options: dict[str, Any], own: type) -> tuple[dict[str, Any], tuple[str, ...], tuple[Any, ...]]:
    """Return the options that are no arrays of this type, and fields and arrays of those that are."""
    fields: tuple[str, ...] = ()
    arrays: tuple[Any, ...] = ()
    plain = options
    for name, value in options.items():
        parts = value if name == "spans" and type(value) is tuple else (value,)
        wanted = _FIELDS.get(name, ())
        if len(parts) == len(wanted) and all(type(part) is own for part in parts):
            if plain is options:
                plain = dict(options)
            del plain[name]
            fields += wanted
            arrays += parts
    return plain, fields, arrays


def others(key: Any, options: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    """Return field and place of each option that is an array, of a call with this key."""
    if not is_of_device(key):
        return ()
    own = key[1]
    _, fields, arrays = _parted(options, own)
    return tuple((field, _libraries[own].place(x)) for field, x in zip(fields, arrays, strict=True))


def attempt(
    kind: str,
    arrays: tuple[Any, Any, Any, Any],
    index: tuple[Any, ...],
    layouts: tuple[Any, ...],
    backend: Any,
    options: dict[str, Any],
) -> tuple[Any, Any]:
    """Make a call again that has been made before.

    Parameters
    ----------
    kind : str
        Which function it is.
    arrays, index
        q, k, v, out (None: to be made), and the index arrays, None for those that are missing.
    layouts
        More that the key has to hold.
    backend, options
        As the caller gave them.

    Returns
    -------
    key, result
        The key of the call, None if it has none; its result, None if it has to be checked.
    """
    library = _library_of(arrays[0])
    if library is None or not all(type(name) is str for name in layouts):
        return None, None
    layout, place, own = library.layout, library.place, type(arrays[0])
    options, fields, more = _parted(options, own) if options else (options, (), ())
    if not isinstance(backend, (str, type(None))) or (
        options and (given := plain_options(options, _LOOKED_INTO)) is None
    ):
        return None, None
    key: list[Any] = [kind, own, layouts, backend, _backend_in_context(), _variables(), fields]
    key.append(given if options else None)
    places = []
    for x in (*arrays, *index, *more):
        if x is None:
            key.append(None)
            places.append(0)
            continue
        if type(x) is not own or (seen := layout(x)) is None:
            return None, None
        address = place(x)
        key += seen, address % 16  # rows at multiples of 16 bytes are read faster
        places.append(address)
    whole = tuple(key)
    known = _table.get(whole)
    if known is None:
        return whole, None
    device = library.device(arrays[0])
    out, lse = arrays[3], None
    if out is None:
        out = library.new(known.out_shape, known.out_dtype, device)
        places[3] = place(out)
        if places[3] % 16:
            return whole, None
    if known.lse_shape is not None:
        lse = library.new(known.lse_shape, known.lse_dtype, device)
    places.insert(4, 0 if lse is None else place(lse))
    end = 5 + len(index)
    if not known.launch(tuple(places[:end]), library.stream(device), tuple(places[end:])):
        return whole, None
    return whole, out if lse is None else (out, lse)


def is_of_device(key: Any) -> bool:
    """Return whether a key is one of this table's."""
    return type(key[0]) is str


def remember(key: Any, known: Known) -> None:
    """Keep how to make the calls that have this key."""
    if len(_table) >= CAPACITY:
        _table.clear()
    _table[key] = known
