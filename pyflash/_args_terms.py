"""Checks of everything that changes a score or hides a key, beyond causal, window and lengths.

Each function returns its argument in the canonical form that `AttentionArgs` documents.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import _checks, _dtypes
from ._checks import MAX_POSITION
from ._description import Array, CFunction, UserFunction
from ._device_array import DeviceArray
from ._errors import invalid, unsupported

_TERM_AXES = {
    1: "(seqlen_kv,)",
    2: "(seqlen_q, seqlen_kv)",
    3: "(num_heads, seqlen_q, seqlen_kv)",
    4: "(batch, num_heads, seqlen_q, seqlen_kv)",
}
#: What all function pointers of ctypes derive from.
_CTYPES_FUNCTION: Any = ctypes.CFUNCTYPE(None).__base__

_SCORE_MOD = "double (*)(double, int64_t, int64_t, int64_t, int64_t)"
_MASK_MOD = "int32_t (*)(int64_t, int64_t, int64_t, int64_t)"


class Extent(NamedTuple):
    """The shape of a call's score matrices, as far as options have to fit it."""

    batch: int
    num_heads: int
    seqlen_q: int  # of the longest sequence
    keys: tuple[int, ...]  # lengths that the key axis of a bias may have; the first one is canonical
    total_q: int | None  # of packed queries
    starts: Array | None  # contents of cu_seqlens_q, None where there is none or it is not read
    lengths: Array | int  # valid keys of each sequence, (batch,), or of all, or a bound on them
    contents: Callable[[str, Array], Array | None]  # of an index array; None where it is not read

    def num_keys(self) -> Array:
        """Return the valid keys of each sequence, (batch,)."""
        return np.broadcast_to(self.lengths, (self.batch,))


def broadcast_term(name: str, value: Any, extent: Extent) -> Array | None:
    """Return a bias or a mask as a view (batch, num_heads, rows, keys) with zero strides."""
    if value is None:
        return None
    if name == "mask":
        array = _checks.plain_array(name, value, _TERM_AXES)
        if array.dtype != np.bool_:
            hint = "; numbers go to bias"
            if array.dtype.kind in "iu":
                hint = ": of zeros and ones, mask.astype(bool)"
            raise invalid(name, f"dtype {array.dtype}", "bool, True where a key may be seen" + hint)
    else:
        array, _ = _checks.float_array(name, value, _TERM_AXES)
    longest = int(np.max(extent.lengths, initial=0))
    allowed = ((extent.batch,), (extent.num_heads,), (extent.seqlen_q,), (*extent.keys, longest))
    shape = (1,) * (4 - array.ndim) + array.shape
    if any(have != 1 and have not in want for have, want in zip(shape, allowed, strict=True)):
        want = ", ".join(" or ".join(dict.fromkeys(map(str, lengths))) for lengths in allowed)
        raise invalid(
            name,
            f"shape {array.shape}",
            f"a shape that broadcasts to (batch, num_heads, seqlen_q, seqlen_kv) = ({want})",
        )
    full = tuple(want[0] if have == 1 else have for have, want in zip(shape, allowed, strict=True))
    return np.broadcast_to(array, full)


def softcap(value: Any) -> float:
    """Return the cap on scores, 0 for none."""
    cap = 0.0 if value is None else _checks.number("softcap", value)
    if cap < 0:
        raise invalid("softcap", cap, "a number above 0, or 0 or None for none")
    return cap


def alibi_slopes(value: Any, extent: Extent) -> Array | None:
    """Return the slopes (batch, num_heads): a new float64 array, or a view of what lies on a device."""
    if value is None:
        return None
    array, _ = _checks.float_array("alibi_slopes", value, {1: "(num_heads,)", 2: "(batch, num_heads)"})
    full = (extent.batch, extent.num_heads)
    if array.shape != full[-array.ndim :]:
        raise invalid(
            "alibi_slopes",
            f"shape {array.shape}",
            f"shape (num_heads,) = ({full[1]},) or (batch, num_heads) = {full}",
        )
    if isinstance(array, DeviceArray):
        return np.broadcast_to(array, full)
    return np.ascontiguousarray(np.broadcast_to(array.astype(np.float64), full))


def sinks(value: Any, num_heads: int) -> Array | None:
    """Return the logits of the sinks (num_heads,): a new float64 array, or what lies on a device."""
    if value is None:
        return None
    array, _ = _checks.float_array("sinks", value, {1: "(num_heads,)"})
    if array.shape != (num_heads,):
        raise invalid("sinks", f"shape {array.shape}", f"shape (num_heads,) = ({num_heads},)")
    return array if isinstance(array, DeviceArray) else array.astype(np.float64)


def sink_tokens(value: Any) -> int:
    """Return how many of the first keys stay visible through a window."""
    return min(_checks.integer("sink_tokens", value, 0), MAX_POSITION)


def spans(value: Any, extent: Extent) -> tuple[Array, Array] | None:
    """Return both ends as views (batch, seqlen_q), or (1, total_q) of packed queries."""
    if value is None:
        return None
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise invalid("spans", _checks.describe(value), "a pair (lo, hi): row i sees lo[i] <= j < hi[i]")
    if extent.total_q is None:
        full: tuple[int, ...] = (extent.batch, extent.seqlen_q)
        meaning = f"a shape that broadcasts to (batch, seqlen_q) = {full}"
        axes = {1: "(seqlen_q,)", 2: "(batch, seqlen_q)"}
    else:
        full = (extent.total_q,)
        meaning = f"a shape that broadcasts to (total_q,) = {full}"
        axes = {1: "(total_q,)"}
    ends = []
    for i, end in enumerate(value):
        name = f"spans[{i}]"
        if isinstance(end, np.ndarray):
            array = _checks.plain_array(name, end, axes)
            if array.dtype not in _checks.INDEX_DTYPES:
                raise invalid(name, f"dtype {array.dtype}", "int32 or int64")
            shape = (1,) * (len(full) - array.ndim) + array.shape
            if any(have not in (1, want) for have, want in zip(shape, full, strict=True)):
                raise invalid(name, f"shape {array.shape}", meaning)
            array = array if array.flags.aligned else array.copy()
        else:
            number = _checks.integer(name, end, -MAX_POSITION, MAX_POSITION)
            array = np.full((1,) * len(full), number, np.int64)
        values = extent.contents(name, array)
        if values is not None:
            if extent.total_q is None or extent.starts is not None:  # else it may fall anywhere
                _check_rising(name, np.broadcast_to(values, full), extent.starts)
            _checks.index_range(name, values, -MAX_POSITION, MAX_POSITION, "a key position")
        array = np.broadcast_to(array, full)
        ends.append(array if extent.total_q is None else array[np.newaxis])
    return ends[0], ends[1]


def _check_rising(name: str, end: Array, starts: Array | None) -> None:
    falls = end[..., 1:] < end[..., :-1]
    if starts is not None and falls.size:
        first = starts[1:-1]
        falls[first[(first > 0) & (first < end.size)] - 1] = False
    if falls.any():
        where = tuple(int(i) for i in np.argwhere(falls)[0])
        before = int(end[where])
        where = (*where[:-1], where[-1] + 1)
        raise invalid(
            f"{name}[{', '.join(map(str, where))}]",
            int(end[where]),
            f"at least {before}, that of the row before: masks that are no rising spans go to mask",
        )


def tree(value: Any, extent: Extent) -> Array | None:
    """Return who sees whom among the draft tokens, bool (batch, num_draft, num_draft).

    What lies on a device stays what it is, parents (batch, num_draft) too.
    """
    if value is None:
        return None
    batch = extent.batch
    array = _checks.plain_array(
        "tree", value, {2: "(batch, num_draft) of parents", 3: "(batch, num_draft, num_draft) of ancestors"}
    )
    if array.shape[0] != batch or (array.ndim == 3 and array.shape[1] != array.shape[2]):
        want = f"({batch}, num_draft)" if array.ndim == 2 else f"({batch}, num_draft, num_draft)"
        raise invalid("tree", f"shape {array.shape}", f"shape {want}")
    if array.ndim == 3 and array.dtype != np.bool_:
        raise invalid("tree", f"dtype {array.dtype}", "bool where it has three axes")
    if array.ndim == 2 and array.dtype not in _checks.INDEX_DTYPES:
        raise invalid("tree", f"dtype {array.dtype}", "int32 or int64 where it has two axes")
    num_draft = array.shape[1]
    num_keys = extent.num_keys()
    short = np.flatnonzero(num_keys < num_draft)
    if short.size:
        b, most = int(short[0]), int(num_keys[short[0]])
        raise invalid("tree", f"{num_draft} draft tokens", f"at most {most}, the keys of sequence {b}")
    if array.ndim == 3:
        return array if isinstance(array, DeviceArray) else np.ascontiguousarray(array)
    values = extent.contents("tree", array)
    seen = None if values is None else _ancestors(values)
    return array if isinstance(array, DeviceArray) else seen


def _ancestors(parents: Array) -> Array:
    """Return for every token which tokens it sees: itself and all above it."""
    batch, num_draft = parents.shape
    bad = (parents < -1) | (parents >= np.arange(num_draft))
    if bad.any():
        b, i = (int(x) for x in np.argwhere(bad)[0])
        raise invalid(
            f"tree[{b}, {i}]",
            int(parents[b, i]),
            ("-1" if i == 0 else f"-1 to {i - 1}") + ": a parent comes before its children",
        )
    seen = np.zeros((batch, num_draft, num_draft), dtype=bool)
    sequence = np.arange(batch)
    for i in range(num_draft):
        parent = parents[:, i]
        seen[:, i] = seen[sequence, parent] & (parent >= 0)[:, np.newaxis]
        seen[:, i, i] = True
    return seen


def user_function(name: str, value: Any, backend: str) -> UserFunction | None:
    """Return a function on elements in the form that the backend calls."""
    if value is None:
        return None
    if backend == "cuda":
        return _cuda_expression(name, value)
    signature = _SCORE_MOD if name == "score_mod" else _MASK_MOD
    if isinstance(value, str):
        instead = "a function of NumPy arrays" if backend == "numpy" else f"a C function {signature}"
        raise unsupported(name, "a CUDA expression", f"the {backend} backend", f"give {instead}")
    found = c_function(name, value, signature)
    if backend == "numpy":
        if found is not None:
            raise unsupported(name, "a C function", "the numpy backend", "give a function of NumPy arrays")
        if not callable(value):
            raise invalid(name, _checks.describe(value), "a function of NumPy arrays")
        return value  # type: ignore[no-any-return]
    if found is None:
        if not callable(value):
            raise invalid(name, _checks.describe(value), f"a C function {signature}")
        raise unsupported(
            name,
            "a Python function",
            f"the {backend} backend",
            f"use backend='numpy', or give a C function {signature} made by cffi, ctypes or numba.cfunc",
        )
    return found


def _cuda_expression(name: str, value: Any) -> str:
    """Return a C++ expression, the only form of a function that can be compiled into a kernel."""
    variables = ("score, " if name == "score_mod" else "") + "batch, head, query, key"
    expected = f"a CUDA C++ expression in {variables}, as a str"
    if not isinstance(value, str):
        if callable(value):
            raise unsupported(name, "a function", "the cuda backend", f"give {expected}")
        raise invalid(name, _checks.describe(value), expected)
    if not value.strip():
        raise invalid(name, repr(value), expected)
    return value


def c_function(name: str, value: Any, signature: str) -> CFunction | None:
    """Return the address of a C function of cffi, ctypes or numba, None for anything else."""
    kinds: list[tuple[str, int]] | None = None  # (letter, size) of the result and the arguments
    if isinstance(value, _CTYPES_FUNCTION):
        address = ctypes.cast(value, ctypes.c_void_p).value or 0
        types: list[Any] = [value.restype, *(value.argtypes or ())]
        kinds = [(_letter(getattr(t, "_type_", "?")), ctypes.sizeof(t) if t else 0) for t in types]
    elif type(value).__module__ == "_cffi_backend":
        ffi = sys.modules["_cffi_backend"].FFI()
        kind = ffi.typeof(value)
        if kind.kind != "function" or kind.ellipsis:
            raise invalid(name, _checks.describe(value), f"a C function {signature}")
        address = int(ffi.cast("intptr_t", value))
        kinds = [
            ("f" if t.cname in ("float", "double") else "i", 0 if t.kind == "void" else ffi.sizeof(t))
            for t in (kind.result, *kind.args)
        ]
    elif isinstance(getattr(value, "address", None), int):
        address = value.address
        if not 0 < address < 2**64:
            raise invalid(name, f"address {address}", f"the address of a C function {signature}")
    else:
        return None
    if not address:
        raise invalid(name, "a null pointer", f"a C function {signature}")
    want = [("f", 8), ("f", 8)] if name == "score_mod" else [("i", 4)]
    if kinds is not None and kinds != want + [("i", 8)] * 4:
        raise invalid(name, f"another signature, {_checks.describe(value)}", f"a C function {signature}")
    return CFunction(address, value)


def _letter(ctypes_code: str) -> str:
    return "f" if ctypes_code in "fd" else "i"


def scale_of(
    name: str,
    value: Any,
    stored: Array,
    keys_shape: tuple[int, ...],
    to_canonical: Callable[[Array], Array],
    *,
    heads: str = "num_kv_heads",
    any_float: bool = False,
) -> Array | None:
    """Return a storage scale as float32 with the axes (batch, token, kv head) of canonical keys.

    `stored` is the array that it belongs to in the caller's axes, `to_canonical` what turns such an
    array into one with four axes. One per head that lies on a device stays of its type, which is
    float32 unless `any_float` says that the kernels ask for the type.
    """
    if value is None:
        return None
    num_heads = keys_shape[2]
    per_token = stored.shape[:-1]
    if not isinstance(value, np.ndarray):
        number = np.asarray(narrowed(name, _checks.number(name, value)), np.float32)
        return np.broadcast_to(number, keys_shape)
    axes = {1: f"({heads},)", len(per_token): str(per_token)}
    array, dtype = _checks.float_array(name, value, axes)
    if array.shape == per_token:
        if dtype.name != "float32":
            raise invalid(name, f"dtype {array.dtype}", "float32 where there is a scale per token and head")
        return to_canonical(array[..., np.newaxis])[..., 0]
    if array.shape != (num_heads,):
        raise invalid(
            name,
            f"shape {array.shape}",
            f"a number, shape ({heads},) = ({num_heads},), or {per_token}, one per token and head",
        )
    if isinstance(array, DeviceArray):
        if dtype.name != "float32" and not any_float:
            raise invalid(name, f"dtype {array.dtype}", "float32 where it lies on a GPU")
        return np.broadcast_to(array, keys_shape)
    for h, x in enumerate(array.tolist()):
        narrowed(f"{name}[{h}]", x)
    return np.broadcast_to(array.astype(np.float32), keys_shape)


def narrowed(name: str, x: float) -> float:
    """Return a scale, refused where it is no finite float32."""
    if not abs(x) <= _dtypes.BY_NAME["float32"].largest:
        raise invalid(name, x, "a finite float32")
    return x
