"""The C backend: turns a checked call into the structures of ``c_src/abi`` and makes one call.

cffi releases the interpreter lock for the length of the call, and the C side has no state.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from . import _dtypes
from ._description import (
    DECODE_MAX_ROWS,
    INDEX_NAMES,
    AppendArgs,
    Array,
    Arrays,
    AttentionArgs,
    CFunction,
    Explanation,
    IndexArrays,
    MergeArgs,
    Repeat,
    StatsArgs,
)
from ._errors import PyflashError, UnsupportedError, invalid

try:
    from ._pyflash_c import ffi, lib
except ImportError as error:  # the reason is shown by available_backends()
    ffi = lib = None  # type: ignore[assignment]  # nothing uses them then
    _import_error: str | None = (
        f"the compiled extension cannot be loaded ({error}); reinstall pyflash-attention, or, "
        f"if {Path(__file__).parent} is a folder of sources, run Python from another folder"
    )
else:
    _import_error = None

#: Of ``c_src/abi/status.def``.
_WORKSPACE_TOO_SMALL = 2

_FAMILIES = {None: 0, "prefill": 1, "decode": 2}

#: Whether this process was forked from one that had loaded the library. Such a child computes on one
#: thread: it is mostly one of many workers, and what it inherited of OpenMP must not be relied on.
_forked = False


def _after_fork_in_child() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@functools.cache
def compiled_isas() -> dict[str, int]:
    """Return the instruction sets in this build, slowest first, with their rows in the C table."""
    return {ffi.string(lib.pf_isa_name(i)).decode(): i for i in range(lib.pf_num_isas())}


@functools.cache
def supported_isas() -> tuple[str, ...]:
    """Return the instruction sets that this machine can run, slowest first."""
    return tuple(name for name, i in compiled_isas().items() if lib.pf_isa_supported(i))


def choose_isa(isa: str | None) -> tuple[str, str]:
    """Return the instruction set of a call and why it was chosen; an unknown name is an error."""
    source = "isa"
    if isa is None:
        isa, source = os.environ.get("PYFLASH_ISA") or None, "PYFLASH_ISA"
    if isa is None:
        return supported_isas()[-1], "the best that this machine supports"
    if isa not in supported_isas():
        if isa in compiled_isas():
            raise UnsupportedError(
                f"{source}: {isa!r} is not supported by this machine; "
                f"available: {', '.join(supported_isas())}"
            )
        raise invalid(source, repr(isa), "one of " + ", ".join(map(repr, supported_isas())))
    return isa, f"asked for by {source}"


def default_threads() -> int | None:
    """Return the number of threads that the environment or a fork asks for, None for OpenMP's own."""
    if _forked:
        return 1
    text = os.environ.get("PYFLASH_NUM_THREADS")
    if not text:
        return None
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise invalid("PYFLASH_NUM_THREADS", repr(text), "an integer, at least 1")
    return int(text)


def openmp_version() -> int:
    """Return the version date of OpenMP in this build, 0 for a serial one."""
    return int(lib.pf_openmp_version())


def max_threads() -> int:
    """Return the threads that OpenMP would use now, at most the processors of this process."""
    return int(lib.pf_max_threads())


def _threads(num_threads: int | None) -> int:
    if _forked:
        return 1
    return num_threads or default_threads() or 0


def _check(status: int) -> None:
    if status:
        text = ffi.string(lib.pf_status_text(status)).decode()
        raise MemoryError(text) if "allocated" in text else PyflashError(text)


def _pointer(array: Array) -> Any:
    return ffi.cast("void *", array.__array_interface__["data"][0])


def _data(array: Array) -> Any:
    """Return where an array lies, never null: a null pointer means that there is no array."""
    if not array.size:
        return ffi.cast("void *", 64)
    return _place_reader(array)(array)


def _first_element(array: Array) -> Any:
    """Return where an array of any strides and any type lies: a part of one element is contiguous."""
    first = array[(_FIRST,) * array.ndim]
    return ffi.from_buffer(first if first.dtype.char in _BUFFER_TYPES else first.view(_BITS[first.itemsize]))


_FIRST = slice(1)
#: Types that have a buffer protocol, and how to look at the others.
_BUFFER_TYPES = frozenset("?bBhHiIlLqQefd")
_BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16}


def _place_reader(array: Array) -> Callable[[Array], Any]:
    """Return what says where arrays of this shape, type and strides lie; none may be empty."""
    if array.dtype.char in _BUFFER_TYPES and array.flags.c_contiguous:
        reader: Callable[[Array], Any] = ffi.from_buffer
        return reader
    return _first_element


def _repeat(args: AttentionArgs, call: Any, given: Arrays) -> Repeat | None:
    """Return what makes a call again that has no arrays of its caller but those in `given`."""
    if not (given.q.size and given.k.size and given.v.size):
        return None  # empty arrays lie nowhere
    for name, x in zip(INDEX_NAMES, given.index_arrays, strict=False):
        # A copy of an unaligned array has strides of its own.
        if x is not None and (x is not getattr(args, name) or not x.size):
            return None
    max_pages = 0 if args.block_table is None else args.block_table.shape[1]
    known = ffi.new("pf_known_call *", (call[0], args.q.shape[0], args.k.shape[0], max_pages))
    # Made from numbers, not the caller's: read again by every such call.
    kept = (args.q_offset, args.k_scale, args.v_scale, args.spans)
    place_q, place_k, place_v, place_out = (_place_reader(x) for x in given[:4])
    place_index = [_first_element if x is None else _place_reader(x) for x in given.index_arrays]
    function, place_lse, null, new = lib.pf_attention_again, ffi.from_buffer, ffi.NULL, ffi.new

    def repeat(
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array | None,
        index: IndexArrays,
        _kept: object = kept,
    ) -> bool:
        table = null
        if index:
            places = [null if x is None else place(x) for place, x in zip(place_index, index, strict=True)]
            table = new("void *[4]", places)
        lse_place = null if lse is None else place_lse(lse)
        return not function(known, place_q(q), place_k(k), place_v(v), place_out(out), lse_place, table)

    return repeat


def _code(array: Array) -> int:
    dtype = _dtypes.lookup(array.dtype)
    assert dtype is not None
    return dtype.code


def _tensor(
    array: Array, axes: tuple[int | None, ...] | None = None, code: int | None = None
) -> tuple[Any, ...]:
    """Return the fields of a pf_tensor; `axes` are the array's in the order batch, token, head, dim."""
    size = array.itemsize
    if axes is None:
        b, t, h, d = array.strides
    else:
        b, t, h, d = (0 if axis is None else array.strides[axis] for axis in axes)
    return _data(array), b // size, t // size, h // size, d // size, _code(array) if code is None else code


def _index(array: Array) -> tuple[Any, ...]:
    """Return the fields of a pf_index."""
    size = array.itemsize
    return _data(array), [stride // size for stride in array.strides], size


def _terms(args: AttentionArgs) -> dict[str, Any]:
    """Return the fields of a call that change scores, hide keys or scale stored elements."""
    fields: dict[str, Any] = {}
    for name in ("k_scale", "v_scale"):
        if (scale := getattr(args, name)) is not None:
            fields[name] = _tensor(scale, (0, 1, 2, None))
    if args.spans is not None:
        fields["span_lo"], fields["span_hi"] = (_index(end) for end in args.spans)
    if args.bias is not None:
        fields["bias"] = _tensor(args.bias, (0, 2, 1, 3))
    if args.mask is not None:
        fields["mask"] = _tensor(args.mask, (0, 2, 1, 3), code=0)
    if args.tree is not None and args.tree.size:
        fields["tree"] = ffi.cast("uint8_t *", _pointer(args.tree))
        fields["num_draft"] = args.tree.shape[1]
    for name in ("alibi_slopes", "sinks"):
        array = getattr(args, name)
        if array is not None and array.size:
            fields[name] = ffi.cast("double *", _pointer(array))
    for name in ("score_mod", "mask_mod"):
        if isinstance(function := getattr(args, name), CFunction):
            fields[name] = ffi.cast(_function_type(name), function.address)
    return fields


@functools.cache
def _function_type(name: str) -> Any:
    return ffi.typeof(getattr(ffi.new("pf_attention_call *"), name))


def _attention_call(args: AttentionArgs, isa: str) -> Any:
    kv_code = _dtypes.BY_NAME[args.kv_dtype].code
    fields = _terms(args)
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "seq_lens", "block_table", "q_offset"):
        if (array := getattr(args, name)) is not None:
            fields[name] = _index(array)
    if args.lse is not None:
        fields["lse"] = _tensor(args.lse, (0, 2, 1, None))
    if args.workspace is not None:
        fields["workspace"] = _pointer(args.workspace)
        fields["workspace_bytes"] = args.workspace.nbytes
    q, k, v, out = args.q, args.k, args.v, args.out
    _, seqlen_q, num_heads, head_dim = q.shape
    _, seqlen_kv, num_kv_heads, _ = k.shape
    fields |= {
        "q": _tensor(q),
        "k": _tensor(k, code=kv_code),
        "v": _tensor(v, code=kv_code),
        "out": _tensor(out),
        "batch": args.batch,
        "seqlen_q": seqlen_q,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "seqlen_kv": seqlen_kv,
        "num_kv_heads": num_kv_heads,
        "page_size": seqlen_kv,
        "head_dim_v": out.shape[3],
        "window_left": args.window[0],
        "window_right": args.window[1],
        "sink_tokens": args.sink_tokens,
        "scale": args.scale,
        "softcap": args.softcap,
        "causal": args.causal,
        "lse_includes_sinks": args.lse_includes_sinks,
        "num_splits": args.num_splits or 0,
        "tile": args.tile or 0,
        "family": _FAMILIES[args.family],
        "isa": compiled_isas()[isa],
        "num_threads": _threads(args.num_threads),
    }
    return ffi.new("pf_attention_call *", fields)


class CBackend:
    """The compiled kernels; implements `pyflash._description.Backend`."""

    name = "c"

    def unavailable(self) -> str | None:
        """Return why the extension cannot be used, None if it can."""
        return _import_error

    def attention(self, args: AttentionArgs, *, again: Arrays | None = None) -> Repeat | None:
        """Fill ``args.out`` and ``args.lse``; with `again`, return what makes such calls again."""
        isa, _ = choose_isa(args.isa)
        call = _attention_call(args, isa)
        status = lib.pf_attention(call)
        if args.workspace is not None and status == _WORKSPACE_TOO_SMALL:  # nothing has been done
            needed = self._plan(call).workspace_bytes
            raise invalid("workspace", f"{args.workspace.nbytes} bytes", f"at least {needed}")
        _check(status)
        return None if again is None else _repeat(args, call, again)

    def merge_states(self, args: MergeArgs) -> None:
        """Fill ``args.out`` and ``args.lse``."""
        call = ffi.new("pf_merge_call *")
        call.isa = compiled_isas()[choose_isa(None)[0]]
        call.num_parts, call.batch, call.seqlen, call.num_heads, call.head_dim = args.parts.shape
        call.parts = _tensor(args.parts, (1, 2, 3, 4))
        call.part_lse = _tensor(args.part_lse, (1, 3, 2, None))
        call.parts_stride_part = args.parts.strides[0] // args.parts.itemsize
        call.part_lse_stride_part = args.part_lse.strides[0] // args.part_lse.itemsize
        call.out = _tensor(args.out)
        call.lse = _tensor(args.lse, (0, 2, 1, None))
        call.lse_includes_sinks = args.lse_includes_sinks
        if args.sinks is not None and args.sinks.size:
            call.sinks = ffi.cast("double *", _pointer(args.sinks))
        _check(lib.pf_merge_states(call))

    def attention_stats(self, args: StatsArgs) -> None:
        """Fill the results in `args` that are not None."""
        attention = _attention_call(args.attention, choose_isa(args.attention.isa)[0])
        # Nothing reads values; as keys they need no fetching of their own.
        attention.v, attention.v_scale = attention.k, attention.k_scale
        attention.head_dim_v = attention.head_dim
        call = ffi.new("pf_stats_call *")
        call.attention = attention
        call.lse = _pointer(args.lse)
        call.rows_of_lse = args.lse.shape[2]
        for name in ("max_logit", "entropy", "top_k_values", "key_mass", "row_probabilities"):
            array = getattr(args, name)
            if array is not None and array.size:
                setattr(call, name, _pointer(array))
        if args.top_k_values is not None and args.top_k_indices is not None:
            call.top_k = args.top_k_values.shape[-1]
            call.top_k_indices = ffi.cast("int64_t *", _pointer(args.top_k_indices))
        if args.key_mass is not None:
            call.num_keys = args.key_mass.shape[-1]
        if args.rows is not None and args.row_probabilities is not None and args.row_probabilities.size:
            call.rows = ffi.cast("int64_t *", _pointer(args.rows))
            call.num_rows, call.num_keys = args.row_probabilities.shape[2:]
        call.last_queries = -1 if args.last_queries is None else args.last_queries
        _check(lib.pf_attention_stats(call))

    def append_kv(self, args: AppendArgs) -> None:
        """Write the tokens into the caches."""
        call = ffi.new("pf_append_call *")
        call.isa = compiled_isas()[choose_isa(None)[0]]
        call.k = _tensor(args.k, (None, 0, 1, 2))
        call.v = _tensor(args.v, (None, 0, 1, 2))
        code = _dtypes.BY_NAME[args.kv_dtype].code
        call.k_cache = _tensor(args.k_cache, code=code)
        call.v_cache = _tensor(args.v_cache, code=code)
        for name in ("k_scale", "v_scale"):
            if (scale := getattr(args, name)) is not None:
                setattr(call, name, _tensor(scale, (0, 1, 2, None)))
        call.writes_scales = args.writes_scales
        call.num_tokens, call.num_kv_heads, call.head_dim = args.k.shape
        call.head_dim_v = args.v.shape[2]
        call.page_size = args.k_cache.shape[1]
        slots = np.ascontiguousarray(args.slots, np.int64)
        call.slots = ffi.cast("int64_t *", _pointer(slots))
        if args.cos is not None:
            cos, sin = (np.ascontiguousarray(x, np.float64) for x in (args.cos, args.sin))
            call.cos, call.sin = (ffi.cast("double *", _pointer(x)) for x in (cos, sin))
            call.rotary_pairs = cos.shape[1]
        call.interleaved = args.interleaved
        _check(lib.pf_append_kv(call))

    def _plan(self, call: Any) -> Any:
        plan = ffi.new("pf_plan *")
        _check(lib.pf_attention_plan(call, plan))
        return plan

    def check(self, args: AttentionArgs) -> None:
        """Refuse an instruction set that is not there."""
        choose_isa(args.isa)

    def explain(self, args: AttentionArgs) -> Explanation:
        """Say what `attention` would do, without doing it."""
        isa, why_isa = choose_isa(args.isa)
        plan = self._plan(_attention_call(args, isa))
        families = [
            name for name, n in (("prefill", plan.num_prefill_items), ("decode", plan.num_decode_items)) if n
        ]
        only_decode = families == ["decode"]
        group = args.q.shape[2] // args.k.shape[2] if args.k.shape[2] else 0
        reasons = [f"isa: {why_isa}"]
        if args.family is not None:
            reasons.append("family: asked for")
        else:
            reasons.append(
                f"family: decode up to {DECODE_MAX_ROWS} query rows per key/value head ({group} per query)"
            )
        if args.num_splits is None and "decode" in families:
            reasons.append("splits: the decode family's own borders, every 512 keys")
        return Explanation(
            backend=self.name,
            kernel="decode_block" if only_decode else "prefill_tile_bf16" if plan.matrix else "prefill_tile",
            family="+".join(families) or "none",
            isa=isa,
            tile=plan.tile_decode if only_decode else plan.tile_prefill,
            rows_per_item=plan.max_rows if only_decode else plan.block_rows,
            num_splits=plan.num_splits,
            num_items=plan.num_prefill_items + plan.num_decode_items,
            num_threads=plan.num_threads,
            tiles_total=plan.tiles_total,
            tiles_skipped=plan.tiles_skipped,
            workspace_bytes=plan.workspace_bytes,
            reasons=tuple(reasons),
        )


BACKEND = CBackend()


def primitive(isa: str, name: str, *arrays: Array, factor: float = 1.0, dtype: str = "float32") -> Any:
    """Run one vector primitive of an instruction set; for tests.

    Parameters
    ----------
    isa : str
        One of `supported_isas`.
    name : {"exp2", "tanh", "load", "store", "transpose", "reduce", "lanes"}
        exp2: ``2**(x * factor)`` for x <= 0. tanh. load: a 1-D array of a stored type (any stride) to
        its compute type; of uint8 codes that of `dtype`. store: a 1-D array of a compute type to
        `dtype`. transpose: a square of lanes x lanes. reduce: (4, lanes) to its 4 sums and the maximum
        of row 0. lanes: lanes of float32 and float64.
    *arrays : ndarray
        The one operand; its compute type (float32 or float64) chooses the kernel.
    """
    row = compiled_isas()[isa]
    if name == "lanes":
        return lib.pf_primitive_lanes(row, 0), lib.pf_primitive_lanes(row, 1)
    (x,) = arrays
    compute = np.dtype("float64" if x.dtype == np.float64 else "float32")
    wide = int(compute == np.float64)
    if name == "exp2":
        out = np.empty(x.shape, compute)
        lib.pf_primitive_exp2(row, wide, _pointer(x), factor, _pointer(out), x.size)
    elif name == "tanh":
        out = np.empty(x.shape, compute)
        lib.pf_primitive_tanh(row, wide, _pointer(x), _pointer(out), x.size)
    elif name == "load":
        stored = _dtypes.BY_NAME[dtype] if x.dtype == np.uint8 else _dtypes.lookup_stored(x.dtype)
        assert stored is not None
        out = np.empty(x.size * stored.per_item, compute)
        stride = x.strides[0] // x.itemsize
        lib.pf_primitive_load(row, wide, stored.code, _pointer(x), stride, _pointer(out), out.size)
    elif name == "store":
        out = np.empty(x.shape, _dtypes.numpy_dtype(dtype))
        lib.pf_primitive_store(row, wide, _code(out), _pointer(x), _pointer(out), 1, x.size)
    elif name == "transpose":
        out = np.empty(x.shape, compute)
        lib.pf_primitive_transpose(row, wide, _pointer(x), _pointer(out))
    elif name == "reduce":
        out, maximum = np.empty(4, compute), np.empty(1, compute)
        lib.pf_primitive_reduce(row, wide, _pointer(x), _pointer(out), _pointer(maximum))
        return out, maximum[0]
    else:
        raise invalid("name", repr(name), "a primitive")
    return out


_LIMIT_KINDS = {"float32": 0, "float64": 1, "amx": 2}


def limit_operations(isa: str, kind: str, rounds: int) -> float:
    """Compute as fast as this thread can, for benchmarks; return the operations done.

    Zero where `kind`, "float32", "float64" or "amx", the products of a matrix unit, is not there.
    """
    return float(lib.pf_limit_operations(compiled_isas()[isa], _LIMIT_KINDS[kind], rounds))


def limit_read(isa: str, x: Array) -> float:
    """Read contiguous float32 once, as fast as this thread can; return the bytes."""
    return float(lib.pf_limit_read(compiled_isas()[isa], ffi.from_buffer("float[]", x), x.size))
