"""All checking of an attention call, once, for every backend: arguments in, `AttentionArgs` out.

The order of the checks is part of the contract only in so far as everything that shapes, types,
strides and plain numbers can tell is found before any work, with the same words everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import _args_terms, _checks, _dtypes
from ._args_terms import Extent
from ._checks import MAX_POSITION
from ._description import UNLIMITED, Array, AttentionArgs
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

#: The options that every attention function takes, with their defaults.
DEFAULTS: dict[str, Any] = {
    "causal": False,
    "window": None,
    "spans": None,
    "scale": None,
    "softcap": None,
    "alibi_slopes": None,
    "bias": None,
    "mask": None,
    "sinks": None,
    "sink_tokens": 0,
    "q_offset": None,
    "tree": None,
    "score_mod": None,
    "mask_mod": None,
    "k_scale": None,
    "v_scale": None,
    "kv_dtype": None,
    "return_lse": False,
    "lse_includes_sinks": False,
    "out": None,
    "out_dtype": None,
    "num_splits": None,
    "num_threads": None,
    "isa": None,
    "workspace": None,
    "tile": None,
    "family": None,
    "max_seqlen_q": None,
    "batch_invariant": False,
    "q_scale": None,
    "check_indices": False,
}

#: Options that only one backend has; the others refuse whatever is not the default.
_OWNERS = {
    **dict.fromkeys(("isa", "num_threads", "workspace"), "c"),
    **dict.fromkeys(("batch_invariant", "q_scale", "check_indices"), "cuda"),
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


class Call(NamedTuple):
    """A checked call and the arrays that go back to the caller once a backend has filled them."""

    args: AttentionArgs
    out: Array
    lse: Array | None

    def result(self) -> Array | tuple[Array, Array]:
        """Return what the public function returns."""
        return self.out if self.lse is None else (self.out, self.lse)


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
    q, _ = _checks.float_array("q", q, axes)
    keys = _stored_keys(k, v, ("k", "v"), axes, options, lambda x: canonical(x, layout))
    for name, x in zip(keys.names, keys.given, strict=True):
        if x.ndim != q.ndim:
            raise invalid(name, f"shape {x.shape}", f"{q.ndim} axes, as many as q {axes[q.ndim]}")
    queries = canonical(q, layout)
    batch, longest = keys.canonical[0].shape[:2]
    if batch != queries.shape[0]:
        raise invalid("k", f"batch {batch}", f"batch {queries.shape[0]}, that of q")
    if seq_lens is not None:
        seq_lens = _checks.index_array("seq_lens", seq_lens, (batch,), f"(batch,) = ({batch},)")
        _checks.index_range("seq_lens", seq_lens, 0, longest, "valid keys of the cache")
    lengths = longest if seq_lens is None else seq_lens
    extent = Extent(batch, queries.shape[2], queries.shape[1], (longest,), None, lengths)
    return _call(q, queries, keys, extent, layout, backend, {"seq_lens": seq_lens}, options)


def varlen(
    q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_kv: Any, *, backend: str, **options: Any
) -> Call:
    """Check a call with packed queries and keys."""
    q, _ = _checks.float_array("q", q, _PACKED_AXES)
    keys = _stored_keys(k, v, ("k", "v"), _PACKED_AXES, options, lambda x: x[np.newaxis])
    cu_seqlens_q = _checks.prefix_sums("cu_seqlens_q", cu_seqlens_q, None, q.shape[0])
    batch = cu_seqlens_q.shape[0] - 1
    cu_seqlens_kv = _checks.prefix_sums("cu_seqlens_kv", cu_seqlens_kv, batch, keys.given[0].shape[0])
    longest_q, longest_kv = (int(np.diff(x).max(initial=0)) for x in (cu_seqlens_q, cu_seqlens_kv))
    extent = Extent(batch, q.shape[1], longest_q, (longest_kv,), cu_seqlens_q, np.diff(cu_seqlens_kv))
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
    q, _ = _checks.float_array("q", q, axes)
    keys = _stored_keys(
        k_cache,
        v_cache,
        ("k_cache", "v_cache"),
        CACHE_AXES[cache_layout],
        options,
        lambda x: cache_view(x, cache_layout),
    )
    num_pages, page_size = keys.canonical[0].shape[:2]
    if page_size == 0:
        raise invalid("k_cache", "page size 0", "a page size of at least 1")
    batch = q.shape[0]
    if cu_seqlens_q is not None:
        cu_seqlens_q = _checks.prefix_sums("cu_seqlens_q", cu_seqlens_q, None, q.shape[0])
        batch = cu_seqlens_q.shape[0] - 1
    block_table = _checks.index_array(
        "block_table", block_table, (batch, None), f"(batch, max_pages) = ({batch}, ...)"
    )
    seq_lens = _checks.index_array("seq_lens", seq_lens, (batch,), f"(batch,) = ({batch},)")
    capacity = block_table.shape[1] * page_size
    _checks.index_range("seq_lens", seq_lens, 0, capacity, "what the block table can hold")
    num_keys = seq_lens.astype(np.int64)
    check_table(block_table, -(-num_keys // page_size), num_pages)
    index = {"cu_seqlens_q": cu_seqlens_q, "block_table": block_table, "seq_lens": seq_lens}
    if cu_seqlens_q is not None:
        layout, queries = "packed", q[np.newaxis]
        longest_q = int(np.diff(cu_seqlens_q).max(initial=0))
    else:
        layout, queries = ("token", q[:, np.newaxis]) if q.ndim == 3 else (layout, canonical(q, layout))
        longest_q = queries.shape[1]
    lengths = (int(num_keys.max(initial=0)), capacity)
    extent = Extent(batch, queries.shape[2], longest_q, lengths, cu_seqlens_q, num_keys)
    return _call(q, queries, keys, extent, layout, backend, index, options)


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
    inputs = {}
    if options["out"] is not None or options["workspace"] is not None:  # which must not overlap them
        inputs = {"q": queries, keys.names[0]: keys.canonical[0], keys.names[1]: keys.canonical[1]}
        _add_arrays(inputs, index)
        _add_arrays(inputs, given)
    out = _provide_out(options["out"], options["out_dtype"], q, (*q.shape[:-1], head_dim_v), inputs)
    lse = lse_view = None
    if _checks.flag("return_lse", options["return_lse"]):
        lse, lse_view = _provide_lse(q, queries, layout, dtype)
    causal, q_offset = _alignment(options["causal"], options["q_offset"], extent.batch)
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
        scale=_scale(options["scale"], queries.shape[3]),
        causal=causal,
        **(_PLAIN if plain else _score_options(options, extent, backend)),
        q_offset=q_offset,
        cu_seqlens_q=index.get("cu_seqlens_q"),
        cu_seqlens_kv=index.get("cu_seqlens_kv"),
        seq_lens=index.get("seq_lens"),
        block_table=index.get("block_table"),
        num_splits=_positive("num_splits", options["num_splits"]),
        tile=_positive("tile", options["tile"]),
        family=_checks.choice("family", options["family"], (None, "prefill", "decode")),
        isa=_isa(options["isa"]),
        num_threads=_positive("num_threads", options["num_threads"]),
        workspace=_workspace(options["workspace"], {**inputs, "out": out}),
        max_seqlen_q=extent.seqlen_q,
    )
    _refuse_foreign(given, backend)  # last, so that a bad value is called the same everywhere
    return Call(args, out, lse_view)


def _score_options(options: dict[str, Any], extent: Extent, backend: str) -> dict[str, Any]:
    """Return the fields of `AttentionArgs` that change scores or hide keys."""
    window = _window(options["window"])
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


def _add_arrays(inputs: dict[str, Array], given: dict[str, Any]) -> None:
    """Add every array that a call reads by the name of its argument."""
    for name, x in given.items():
        if isinstance(x, np.ndarray):
            if name not in ("out", "workspace"):
                inputs[name] = x
        elif name == "spans" and isinstance(x, (tuple, list)):
            inputs.update((f"spans[{i}]", end) for i, end in enumerate(x) if isinstance(end, np.ndarray))


def _refuse_foreign(given: dict[str, Any], backend: str) -> None:
    """Refuse options of other backends, by name."""
    for name, value in given.items():
        if _OWNERS.get(name, backend) != backend and value is not None and value is not DEFAULTS[name]:
            raise unsupported(name, _checks.describe(value), f"the {backend} backend", "leave it out")


def _max_seqlen_q(value: Any, extent: Extent) -> None:
    """Check the bound on query lengths, which only lengths on a device need."""
    bound = _checks.integer("max_seqlen_q", value, 0)
    if extent.seqlen_q > bound:
        cu_seqlens_q = extent.cu_seqlens_q
        counts = np.array([extent.seqlen_q]) if cu_seqlens_q is None else np.diff(cu_seqlens_q)
        b = int(np.argmax(counts > bound))
        raise invalid("max_seqlen_q", bound, f"at least {int(counts[b])}, the queries of sequence {b}")


def _check_types(queries: Array, keys: _Keys) -> _dtypes.DType:
    dtype = _dtypes.lookup(queries.dtype)
    assert dtype is not None  # float_array has seen to it
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
        return np.empty(shape, q.dtype if wanted is None else wanted)
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
    lse = np.empty((batch, num_heads, seqlen), np.dtype(dtype.compute))
    if layout == "packed":
        return lse, lse[0]
    if layout == "token":
        return lse, lse[:, :, 0]
    if q.ndim == 2:
        return lse, lse[0, 0]
    return lse, lse if q.ndim == 4 else lse[0]


def _alignment(causal: Any, q_offset: Any, batch: int) -> tuple[bool, Array | None]:
    """Return whether the call is causal and the offset of each sequence, None for bottom-right."""
    if not isinstance(causal, (bool, np.bool_, str)) or (isinstance(causal, str) and causal != "top_left"):
        raise invalid("causal", _checks.describe(causal), "False, True or 'top_left'")
    if isinstance(causal, str):
        if q_offset is not None:
            raise invalid(
                "q_offset", _checks.describe(q_offset), "None beside causal='top_left', which is q_offset=0"
            )
        return True, np.zeros(batch, np.int64)
    if q_offset is None:
        return bool(causal), None
    if isinstance(q_offset, np.ndarray):
        offsets = _checks.index_array("q_offset", q_offset, (batch,), f"(batch,) = ({batch},)")
        _checks.index_range("q_offset", offsets, -MAX_POSITION, MAX_POSITION, "a position")
        return bool(causal), offsets.astype(np.int64)
    offset = _checks.integer("q_offset", q_offset, -MAX_POSITION, MAX_POSITION)
    return bool(causal), np.full(batch, offset, np.int64)


def _window(window: Any) -> tuple[int, int]:
    """Return both sides of the window, UNLIMITED for none; huge sides are as good as unlimited."""
    if window is None:
        return UNLIMITED, UNLIMITED
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        expected = (
            "a pair (left, right), both inclusive: a single number would not say whether the query counts"
        )
        raise invalid("window", _checks.describe(window), expected)
    left, right = (
        UNLIMITED if side is None else _checks.integer(f"window[{i}]", side, UNLIMITED)
        for i, side in enumerate(window)
    )
    return min(left, MAX_POSITION), min(right, MAX_POSITION)


def _scale(scale: Any, head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim) if scale is None else _checks.number("scale", scale)


def _positive(name: str, value: Any) -> int | None:
    return None if value is None else _checks.integer(name, value, 1, 2**31 - 1)


def _isa(isa: Any) -> str | None:
    if isa is not None and not isinstance(isa, str):
        raise invalid(
            "isa", _checks.describe(isa), "the name of an instruction set (pyflash.available_isas())"
        )
    return isa


def _workspace(workspace: Any, others: dict[str, Array]) -> Array | None:
    if workspace is None:
        return None
    array = _checks.plain_array("workspace", workspace, {1: "(num_bytes,)"})
    if array.dtype != np.uint8 or not array.flags.c_contiguous or not array.flags.writeable:
        raise invalid("workspace", _checks.describe(workspace), "a writable contiguous uint8 array")
    _checks.writable_output("workspace", array, others)
    return array
