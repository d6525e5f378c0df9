"""What is remembered of calls that succeeded, so that one like them need not be checked again.

A key holds everything that the checks of a call may depend on, but for what its arrays contain and
where they lie: types, shapes, strides, options with their types, the environment. Only calls whose
options are plain Python values have one. A call with a key in the table goes to the function that its
backend has prepared, which looks at contents and places; whatever is unusual is checked from the
start, so that there is one place for the words of refusals.

Entries never change and are replaced as a whole, so that any number of threads may use one at once.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np

from . import _backends, _environment
from ._description import Array, Repeat

#: Entries; a full table is emptied. One entry takes some three kilobytes.
CAPACITY = 256

#: Types of options of which equal values mean the same. A float of 0 has two signs.
_PLAIN = frozenset((bool, int, float, str, type, type(None)))

# A small call is a few microseconds: names without dots are found faster.
_ndarray, _empty = np.ndarray, np.empty
_backend_in_context, _variables = _backends.in_context, _environment.variables


class Known(NamedTuple):
    """How to make a call again."""

    repeat: Repeat
    out_shape: tuple[int, ...]
    out_dtype: np.dtype[Any] | None  # None: that of q
    lse_shape: tuple[int, ...] | None  # None: not wanted
    lse_dtype: np.dtype[Any] | None


_table: dict[Any, Known] = {}
_find = _table.get
#: Keys that came once. To prepare a call costs more than it saves where none like it follows: keys of a
#: dense cache that grows by a token have another length each time.
_once: set[Any] = set()


def clear() -> None:
    """Forget everything."""
    _table.clear()
    _once.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=clear)  # the number of threads is another one there


def plain_options(
    options: dict[str, Any], looked_into: tuple[str, ...] = ("max_seqlen_q",)
) -> tuple[Any, ...] | None:
    """Return options as part of a key, None if calls that have one of them are not remembered.

    `looked_into` are the names of options that go with a look into index arrays.
    """
    key: tuple[Any, ...] = ()
    for name, value in options.items():
        kind = type(value)
        if name in looked_into:
            return None
        if kind in _PLAIN:
            key += name, kind, repr(value) if kind is float and not value else value
        elif kind is tuple and _PLAIN.issuperset(map(type, value)):
            key += name, value, *map(type, value)
        else:
            return None
    return key


def _layout_of(index: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return what is to be known of index arrays before they are read."""
    for array in index:
        if array is not None and type(array) is not _ndarray:
            return None
    return tuple([None if array is None else (array.shape, array.strides, array.dtype) for array in index])


def attempt(
    kind: str,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    index: tuple[Any, ...],
    layout: Any,
    cache_layout: Any,
    backend: Any,
    options: dict[str, Any],
) -> tuple[Any, Array | tuple[Array, Array] | None]:
    """Make a call again that has been made before.

    Returns the key of the call, None if it has none, and its result, None if it has to be checked.
    """
    if (
        type(q) is not _ndarray
        or type(k) is not _ndarray
        or type(v) is not _ndarray
        or type(layout) is not str
        or type(cache_layout) is not str
        or (backend is not None and type(backend) is not str)
    ):
        return None, None
    into: Any = None
    if out is not None:
        if type(out) is not _ndarray or not out.flags.writeable:
            return None, None
        into = out.shape, out.strides, out.dtype
    given: Any = None
    if options and (given := plain_options(options)) is None:
        return None, None
    indices: Any = None
    if index and (indices := _layout_of(index)) is None:
        return None, None
    key = (
        q.shape, q.strides, q.dtype, k.shape, k.strides, k.dtype, v.shape, v.strides, v.dtype, into,
        kind, layout, cache_layout, backend, _backend_in_context(), _variables(), given, indices,
    )  # fmt: skip
    known = _find(key)
    if known is None:
        return key, None
    repeat, out_shape, out_dtype, lse_shape, lse_dtype = known
    if out is None:
        out = _empty(out_shape, q.dtype if out_dtype is None else out_dtype)
    if lse_shape is None:
        return key, out if repeat(q, k, v, out, None, index) else None
    lse = _empty(lse_shape, lse_dtype)
    return key, (out, lse) if repeat(q, k, v, out, lse, index) else None


def comes_again(key: Any) -> bool:
    """Return whether a call with this key has been made before, and note that one has been now."""
    if key in _once:
        return True
    if len(_once) >= CAPACITY:
        _once.clear()
    _once.add(key)
    return False


def remember(key: Any, known: Known) -> None:
    """Keep how to make the calls that have this key."""
    if len(_table) >= CAPACITY:
        _table.clear()
    _table[key] = known
