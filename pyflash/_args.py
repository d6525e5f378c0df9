"""All checking of an attention call, once, for every backend: arguments in, `AttentionArgs` out.

The order of the checks is part of the contract only in so far as everything that shapes, types,
strides and plain numbers can tell is found before any work, with the same words everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import _args_options, _args_terms, _arrays, _checks, _dtypes
from ._args_options import DEFAULTS
from ._args_terms import Extent
from ._description import UNLIMITED, Array, AttentionArgs
from ._device_array import DeviceArray
from ._errors import invalid, unsupported

_LAYOUT_AXES = {
    "bshd": {
        4: "(batch, seqlen, heads, head_dim)",
        3: "(seqlen, heads, head_dim)",
        2: "(seqlen, head_dim)",
    },
    "bhsd": {
        4: "(batch, heads, seqlen, head_dim)",
        3: "(heads, seqlen, head_dim)",
        2: "(seqlen, head_dim)",
    },
}
_PACKED_AXES = {3: "(total, heads, head_dim)"}
CACHE_AXES = {
    "nhd": {4: "(num_pages, page_size, num_kv_heads, head_dim)"},
    "hnd": {4: "(num_pages, num_kv_heads, page_size, head_dim)"},
}

#: The fields of `AttentionArgs` that change scores or hide keys, as they are where none is asked for.
_PLAIN: dict[str, Any] = {
    "window": (UNLIMITED, UNLIMITED),
    "sink_tokens": 0,
    "softcap": 0.0,
    "lse_includes_sinks": False,
    **dict.fromkeys(("score_mod", "alibi_slopes", "bias", "spans", "mask", "mask_mod", "tree", "sinks")),
}
_SCORE_OPTIONS = frozenset(_PLAIN)
#: Where states may begin on a GPU, whose loads and stores want multiples of their sizes.
_WORKSPACE_ALIGNMENT = 8


class Caller(NamedTuple):
    """What the caller gave, as it was given: results are of the kind of his queries."""

    q: Any
    out: Any
    kind: _arrays.Kind | None

    @classmethod
    def of(cls, q: Any, out: Any = None) -> Caller:
        """Return the caller of a function with these arguments."""
        return cls(q, out, _arrays.kind_of(q))

    def give_back(self, array: Array) -> Any:
        """Return a result in the caller's kind."""
        return _arrays.give_back(array, self.kind, self.q)


class Call(NamedTuple):
    """A checked call and the arrays that go back to the caller once a backend has filled them."""

    args: AttentionArgs
    out: Array
    lse: Array | None

    def result(self, caller: Caller) -> Any:
        """Return what the public function returns."""
        out = caller.give_back(self.out) if caller.out is None else caller.out
        return out if self.lse is None else (out, caller.give_back(self.lse))


def canonical(array: Array, layout: str) -> Array:
    """Return a view with axes (batch, seqlen, heads, width) of an array in a user's layout."""
    if array.ndim == 2:
        return array[None, :, None, :]
    if layout == "bhsd":
        array = array.swapaxes(-3, -2)
    return array if array.ndim == 4 else array[None]


def cache_view(cache: Array, cache_layout: str) -> Array:
    """Return a view with axes (num_pages, page_size, num_kv_heads, width) of a page pool."""
    return cache if cache_layout == "nhd" else cache.swapaxes(1, 2)


def _reader(options: dict[str, Any], backend: str) -> Callable[[str, Array], Array | None]:
    """Return what says what index arrays contain, as far as that is looked at."""
    read_back = _args_options.owned_flag("check_indices", options, backend)
    return functools.partial(_arrays.contents, read_back=read_back)


class _Keys(NamedTuple):
    """Keys and values of a call: as given, in canonical axes, and what they are called."""

    given: tuple[Array, Array]
    canonical: tuple[Array, Array]
    dtype: _dtypes.DType
    names: tuple[str, str]
    to_canonical: Callable[[Array], Array]


def _stored_keys(
    k: Any,
    v: Any,
    names: tuple[str, str],
    axes: dict[int, str],
    options: dict[str, Any],
    to_canonical: Callable[[Array], Array],
) -> _Keys:
    kv_dtype = options.get("kv_dtype")
    if kv_dtype is not None:
        _checks.choice("kv_dtype", kv_dtype, (None, *_dtypes.OF_BYTES))
    k, stored = _checks.stored_array(names[0], k, axes, kv_dtype)
    v, stored_v = _checks.stored_array(names[1], v, axes, kv_dtype)
    if stored_v is not stored:
        raise invalid(names[1], f"dtype {stored_v.name}", f"{stored.name}, the dtype of {names[0]}")
    return _Keys((k, v), (to_canonical(k), to_canonical(v)), stored, names, to_canonical)


def dense(
    q: Any, k: Any, v: Any, *, backend: str, layout: str = "bshd", seq_lens: Any = None, **options: Any
) -> Call:
    """Check a call with dense queries and keys."""
    _checks.choice("layout", layout, ("bshd", "bhsd"))
    axes = _LAYOUT_AXES[layout]
    q, k, v, seq_lens = _seen(q=q, k=k, v=v, seq_lens=seq_lens)
    options = _arrays.see_all(options)
    q = _queries(q, axes, options, backend)
    keys = _stored_keys(k, v, ("k", "v"), axes, options, lambda x: canonical(x, layout))
    for name, x in zip(keys.names, keys.given, strict=True):
        if x.ndim != q.ndim:
            raise invalid(name, f"shape {x.shape}", f"{q.ndim} axes, as many as q {axes[q.ndim]}")
    queries = canonical(q, layout)
    batch, longest = keys.canonical[0].shape[:2]
    if batch != queries.shape[0]:
        raise invalid("k", f"batch {batch}", f"batch {queries.shape[0]}, that of q")
    contents, lengths = _reader(options, backend), longest
    if seq_lens is not None:
        seq_lens = _checks.index_array("seq_lens", seq_lens, (batch,), f"(batch,) = ({batch},)")
        values = contents("seq_lens", seq_lens)
        if values is not None:
            _checks.index_range("seq_lens", values, 0, longest, "valid keys of the cache")
            lengths = values
    extent = Extent(batch, queries.shape[2], queries.shape[1], (longest,), None, None, lengths, contents)
    return _call(q, queries, keys, extent, layout, backend, {"seq_lens": seq_lens}, options)


def varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any, *, backend: str, **options: Any
) -> Call:
    """Check a call with packed queries and keys."""
    q, k, v = _seen(q=q, k=k, v=v)
    cu_seqlens_q, cu_seqlens_kv = _seen(cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv)
    options = _arrays.see_all(options)
    q = _queries(q, _PACKED_AXES, options, backend)
    keys = _stored_keys(k, v, ("k", "v"), _PACKED_AXES, options, lambda x: x[np.newaxis])
    contents, total_kv = _reader(options, backend), keys.given[0].shape[0]
    cu_seqlens_q, starts = _checks.prefix_sums("cu_seqlens_q", cu_seqlens_q, None, q.shape[0], contents)
    batch = cu_seqlens_q.shape[0] - 1
    cu_seqlens_kv, ends = _checks.prefix_sums("cu_seqlens_kv", cu_seqlens_kv, batch, total_kv, contents)
    lengths = total_kv if ends is None else np.diff(ends)
    longest_kv = int(np.max(lengths, initial=0))
    longest_q = _longest_q(starts, q.shape[0], options)
    extent = Extent(batch, q.shape[1], longest_q, (longest_kv,), q.shape[0], starts, lengths, contents)
    index = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    return _call(q, q[np.newaxis], keys, extent, "packed", backend, index, options)


def paged(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    block_table: Any,
    seq_lens: Any,
    *,
    backend: str,
    cu_seqlens_q: Any = None,
    layout: str = "bshd",
    cache_layout: str = "nhd",
    **options: Any,
) -> Call:
    """Check a call whose keys lie in pages behind a block table."""
    _checks.choice("layout", layout, ("bshd", "bhsd"))
    _checks.choice("cache_layout", cache_layout, ("nhd", "hnd"))
    if cu_seqlens_q is not None:
        axes = _PACKED_AXES
    else:
        axes = {3: "(batch, heads, head_dim)", 4: _LAYOUT_AXES[layout][4]}
    q, k_cache, v_cache = _seen(q=q, k_cache=k_cache, v_cache=v_cache)
    options = _arrays.see_all(options)
    q = _queries(q, axes, options, backend)
    keys = _stored_keys(
        k_cache,
        v_cache,
        ("k_cache", "v_cache"),
        CACHE_AXES[cache_layout],
        options,
        lambda x: cache_view(x, cache_layout),
    )
    contents = _reader(options, backend)
    given = {"cu_seqlens_q": cu_seqlens_q, "block_table": block_table, "seq_lens": seq_lens}
    index, starts, num_keys, lengths = _page_index(given, q, keys.canonical[0], contents)
    if cu_seqlens_q is not None:
        layout, queries = "packed", q[np.newaxis]
        longest_q = _longest_q(starts, q.shape[0], options)
        batch, total_q = index["cu_seqlens_q"].shape[0] - 1, q.shape[0]
    else:
        layout, queries = ("token", q[:, np.newaxis]) if q.ndim == 3 else (layout, canonical(q, layout))
        longest_q = queries.shape[1]
        batch, total_q = q.shape[0], None
    extent = Extent(batch, queries.shape[2], longest_q, lengths, total_q, starts, num_keys, contents)
    return _call(q, queries, keys, extent, layout, backend, index, options)


def _page_index(
    given: dict[str, Any], q: Array, pool: Array, contents: Callable[[str, Array], Array | None]
) -> tuple[dict[str, Any], Array | None, Array | int, tuple[int, ...]]:
    """Check what says where queries and keys of a paged call are.

    Returns the index arrays, the contents of cu_seqlens_q, the valid keys of each sequence or a bound on
    them, and the lengths that the key axis of a bias may have.
    """
    given = _arrays.see_all(given)
    num_pages, page_size = pool.shape[:2]
    if page_size == 0:
        raise invalid("k_cache", "page size 0", "a page size of at least 1")
    batch, starts, cu_seqlens_q = q.shape[0], None, given["cu_seqlens_q"]
    if cu_seqlens_q is not None:
        cu_seqlens_q, starts = _checks.prefix_sums("cu_seqlens_q", cu_seqlens_q, None, q.shape[0], contents)
        batch = cu_seqlens_q.shape[0] - 1
    block_table = _checks.index_array(
        "block_table", given["block_table"], (batch, None), f"(batch, max_pages) = ({batch}, ...)"
    )
    seq_lens = _checks.index_array("seq_lens", given["seq_lens"], (batch,), f"(batch,) = ({batch},)")
    index = {"cu_seqlens_q": cu_seqlens_q, "block_table": block_table, "seq_lens": seq_lens}
    capacity = block_table.shape[1] * page_size
    values = contents("seq_lens", seq_lens)
    if values is None:
        return index, starts, capacity, (capacity,)
    _checks.index_range("seq_lens", values, 0, capacity, "what the block table can hold")
    num_keys = values.astype(np.int64)
    table = contents("block_table", block_table)
    if table is not None:
        check_table(table, -(-num_keys // page_size), num_pages)
    return index, starts, num_keys, (int(num_keys.max(initial=0)), capacity)


def check_table(block_table: Array, pages_used: Array, num_pages: int) -> None:
    """Refuse a block table that names a page outside the pool among the pages in use."""
    used = np.arange(block_table.shape[1])[None, :] < pages_used[:, None]
    bad = used & ((block_table < 0) | (block_table >= num_pages))
    if bad.any():
        b, i = (int(x) for x in np.argwhere(bad)[0])
        raise invalid(
            f"block_table[{b}, {i}]",
            int(block_table[b, i]),
            f"0 to {num_pages - 1}: a page of the pool, since the sequence uses {int(pages_used[b])} pages",
        )


def _seen(**arguments: Any) -> Any:
    """Return arguments with all arrays seen, in their order."""
    return [_arrays.see(name, x) for name, x in arguments.items()]


def _queries(q: Any, axes: dict[int, str], options: dict[str, Any], backend: str) -> Array:
    """Return the queries: floats, or float8 where the backend has that."""
    if backend == "cuda" and isinstance(q, np.ndarray):
        if q.dtype == np.uint8 and options.get("kv_dtype") == "e4m3fn" and options.get("q_scale") is not None:
            q = q.view(_dtypes.numpy_dtype("float8_e4m3fn"))  # the bytes of a library without the type
        if q.dtype.name == "float8_e4m3fn":
            return _checks.plain_array("q", q, axes)
    return _checks.float_array("q", q, axes)[0]


def _longest_q(starts: Array | None, total_q: int, options: dict[str, Any]) -> int:
    """Return the queries of the longest packed sequence, or what bounds them."""
    if starts is not None:
        return int(np.diff(starts).max(initial=0))
    bound = options.get("max_seqlen_q")
    return total_q if bound is None else _checks.integer("max_seqlen_q", bound, 0)


def _call(
    q: Array,
    queries: Array,
    keys: _Keys,
    extent: Extent,
    layout: str,
    backend: str,
    index: dict[str, Any],
    given: dict[str, Any],
) -> Call:
    """Check what all addresses of keys share, provide the outputs, and freeze the description."""
    if not given.keys() <= DEFAULTS.keys():
        unknown, known = min(given.keys() - DEFAULTS.keys()), ", ".join(DEFAULTS)
        raise TypeError(f"unexpected keyword argument {unknown!r}; options are {known}")
    options = {**DEFAULTS, **given}
    dtype = _check_types(queries, keys)
    head_dim_v = _check_shapes(queries, keys)
    inputs = {"q": queries, keys.names[0]: keys.canonical[0], keys.names[1]: keys.canonical[1]}
    _add_arrays(inputs, index)
    _add_arrays(inputs, given)
    _arrays.check_places(backend, "q", {**inputs, "out": options["out"], "workspace": options["workspace"]})
    out = _provide_out(options["out"], options["out_dtype"], q, (*q.shape[:-1], head_dim_v), inputs)
    lse = lse_view = None
    if _checks.flag("return_lse", options["return_lse"]):
        lse, lse_view = _provide_lse(q, queries, layout, dtype)
    causal, q_offset = _args_options.alignment(
        options["causal"], options["q_offset"], extent.batch, extent.contents
    )
    if options["max_seqlen_q"] is not None:
        _max_seqlen_q(options["max_seqlen_q"], extent)
    plain = given.keys().isdisjoint(_SCORE_OPTIONS)
    k_scale = v_scale = _storage_scale("k_scale", options, keys, 0)
    if options["v_scale"] is not options["k_scale"]:  # else values that lie in keys stay one with them
        v_scale = _storage_scale("v_scale", options, keys, 1)
    args = AttentionArgs(
        q=queries,
        k=keys.canonical[0],
        v=keys.canonical[1],
        out=_canonical_out(out, layout),
        lse=lse,
        kv_dtype=keys.dtype.name,
        k_scale=k_scale,
        v_scale=v_scale,
        scale=_args_options.scale(options["scale"], queries.shape[3]),
        causal=causal,
        **(_PLAIN if plain else _score_options(options, extent, backend)),
        q_offset=q_offset,
        cu_seqlens_q=index.get("cu_seqlens_q"),
        cu_seqlens_kv=index.get("cu_seqlens_kv"),
        seq_lens=index.get("seq_lens"),
        block_table=index.get("block_table"),
        num_splits=_args_options.positive("num_splits", options["num_splits"]),
        tile=_args_options.positive("tile", options["tile"]),
        family=_checks.choice("family", options["family"], (None, "prefill", "decode")),
        isa=_args_options.isa(options["isa"]),
        num_threads=_args_options.positive("num_threads", options["num_threads"]),
        workspace=_workspace(options["workspace"], {**inputs, "out": out}, backend),
        max_seqlen_q=min(extent.seqlen_q, queries.shape[1]),  # a bound may be above all queries there are
        batch_invariant=_args_options.owned_flag("batch_invariant", given, backend),
        q_scale=_q_scale(options["q_scale"], q, queries, layout, backend),
    )
    _args_options.refuse_foreign(given, backend)  # last, so that a bad value is called the same everywhere
    return Call(args, out, lse_view)


def _score_options(options: dict[str, Any], extent: Extent, backend: str) -> dict[str, Any]:
    """Return the fields of `AttentionArgs` that change scores or hide keys."""
    window = _args_options.window(options["window"])
    sink_tokens = _args_terms.sink_tokens(options["sink_tokens"])
    return {
        "window": window,
        # Without a window there is nothing that they are exempt from.
        "sink_tokens": 0 if window == (UNLIMITED, UNLIMITED) else sink_tokens,
        "softcap": _args_terms.softcap(options["softcap"]),
        "score_mod": _args_terms.user_function("score_mod", options["score_mod"], backend),
        "alibi_slopes": _args_terms.alibi_slopes(options["alibi_slopes"], extent),
        "bias": _args_terms.broadcast_term("bias", options["bias"], extent),
        "spans": _args_terms.spans(options["spans"], extent),
        "mask": _args_terms.broadcast_term("mask", options["mask"], extent),
        "mask_mod": _args_terms.user_function("mask_mod", options["mask_mod"], backend),
        "tree": _args_terms.tree(options["tree"], extent),
        "sinks": _args_terms.sinks(options["sinks"], extent.num_heads),
        "lse_includes_sinks": _checks.flag("lse_includes_sinks", options["lse_includes_sinks"]),
    }


def _storage_scale(name: str, options: dict[str, Any], keys: _Keys, which: int) -> Array | None:
    if options[name] is None:
        return None
    shape = keys.canonical[which].shape[:3]
    return _args_terms.scale_of(name, options[name], keys.given[which], shape, keys.to_canonical)


def _q_scale(value: Any, q: Array, queries: Array, layout: str, backend: str) -> float | Array | None:
    """Return the storage scale of float8 queries: a number, or with the axes (batch, seqlen, heads)."""
    if value is None or backend != "cuda":
        return None
    if _dtypes.lookup(q.dtype) is not None:
        raise invalid("q_scale", _checks.describe(value), f"None: q is {q.dtype}, not float8_e4m3fn")
    if not isinstance(value, np.ndarray):
        return _args_terms.narrowed("q_scale", _checks.number("q_scale", value))
    return _args_terms.scale_of(
        "q_scale", value, q, queries.shape[:3], lambda x: _canonical_out(x, layout), heads="num_heads"
    )


def _add_arrays(inputs: dict[str, Array], given: dict[str, Any]) -> None:
    """Add every array that a call reads by the name of its argument."""
    for name, x in given.items():
        if isinstance(x, np.ndarray):
            if name not in ("out", "workspace"):
                inputs[name] = x
        elif name == "spans" and isinstance(x, (tuple, list)):
            inputs.update((f"spans[{i}]", end) for i, end in enumerate(x) if isinstance(end, np.ndarray))


def _max_seqlen_q(value: Any, extent: Extent) -> None:
    """Check the bound on query lengths, which only lengths on a device need."""
    bound = _checks.integer("max_seqlen_q", value, 0)
    if extent.seqlen_q > bound:
        starts = extent.starts
        counts = np.array([extent.seqlen_q]) if starts is None else np.diff(starts)
        b = int(np.argmax(counts > bound))
        raise invalid("max_seqlen_q", bound, f"at least {int(counts[b])}, the queries of sequence {b}")


def _check_types(queries: Array, keys: _Keys) -> _dtypes.DType:
    dtype = _dtypes.lookup(queries.dtype) or _dtypes.lookup_stored(queries.dtype)
    assert dtype is not None  # _queries has seen to it
    if (dtype.name == "float64") != (keys.dtype.name == "float64"):
        expected = (
            "float64 beside a float64 q" if dtype.name == "float64" else f"no float64 beside a {dtype.name} q"
        )
        raise invalid(keys.names[0], f"dtype {keys.dtype.name}", expected)
    return dtype


def _check_shapes(queries: Array, keys: _Keys) -> int:
    """Return the width of the values."""
    names, (k, v) = keys.names, keys.canonical
    head_dim, head_dim_v = (x.shape[3] * keys.dtype.per_item for x in (k, v))
    if queries.shape[3] == 0 or head_dim_v == 0:
        name = "q" if queries.shape[3] == 0 else names[1]
        raise invalid(name, "head_dim 0", "a head_dim of at least 1")
    if head_dim != queries.shape[3]:
        raise invalid(names[0], f"head_dim {head_dim}", f"head_dim {queries.shape[3]}, that of q")
    if v.shape[:3] != k.shape[:3]:
        raise invalid(names[1], f"shape {v.shape}", f"shape {k.shape[:3]} + (head_dim_v,), as {names[0]}")
    num_heads, num_kv_heads = queries.shape[2], k.shape[2]
    if num_heads % num_kv_heads if num_kv_heads else num_heads:
        raise invalid(names[0], f"{num_kv_heads} heads", f"a divisor of the {num_heads} heads of q")
    return int(head_dim_v)


def _provide_out(
    out: Any, out_dtype: Any, q: Array, shape: tuple[int, ...], inputs: dict[str, Array]
) -> Array:
    """Return the caller's `out`, checked, or a new array in the caller's layout."""
    wanted = None if out_dtype is None else _checks.dtype_named("out_dtype", out_dtype)
    if out is None:
        if wanted is None:
            wanted = q.dtype if _dtypes.lookup(q.dtype) else _dtypes.numpy_dtype("bfloat16")
        return _arrays.empty(shape, wanted, q)
    axes = {len(shape): "" if isinstance(out, np.ndarray) and out.ndim == len(shape) else str(shape)}
    array, _ = _checks.float_array("out", out, axes)
    if array.shape != shape:
        raise invalid("out", f"shape {array.shape}", f"shape {shape}")
    if wanted is not None and array.dtype != wanted:
        raise invalid("out", f"dtype {array.dtype}", f"{wanted}, as out_dtype says")
    _checks.writable_output("out", array, inputs)
    return array


def _canonical_out(out: Array, layout: str) -> Array:
    if layout == "packed":
        return out[None]
    return out[:, None] if layout == "token" else canonical(out, layout)


def _provide_lse(q: Array, queries: Array, layout: str, dtype: _dtypes.DType) -> tuple[Array, Array]:
    """Return the lse in canonical axes (batch, num_heads, seqlen_q) and the caller's view of it."""
    batch, seqlen, num_heads = queries.shape[:3]
    lse = _arrays.empty((batch, num_heads, seqlen), np.dtype(dtype.compute), q)
    if layout == "packed":
        return lse, lse[0]
    if layout == "token":
        return lse, lse[:, :, 0]
    if q.ndim == 2:
        return lse, lse[0, 0]
    return lse, lse if q.ndim == 4 else lse[0]


def _workspace(workspace: Any, others: dict[str, Array], backend: str) -> Array | None:
    if workspace is None:
        return None
    array = _checks.plain_array("workspace", workspace, {1: "(num_bytes,)"})
    if array.dtype != np.uint8 or not array.flags.c_contiguous or not array.flags.writeable:
        raise invalid("workspace", _checks.describe(workspace), "a writable contiguous uint8 array")
    if backend == "cuda" and not isinstance(workspace, DeviceArray):
        where = "the cuda backend beside arrays in host memory"
        raise unsupported("workspace", _checks.describe(workspace), where, "leave it out")
    if isinstance(array, DeviceArray) and array.address % _WORKSPACE_ALIGNMENT:
        expected = f"a multiple of {_WORKSPACE_ALIGNMENT} on a GPU"
        raise invalid("workspace", f"address {array.address:#x}", expected)
    _checks.writable_output("workspace", array, others)
    return array
