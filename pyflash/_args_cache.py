"""Checks of the two operations around attention: merging states and appending to a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import _args, _args_terms, _arrays, _checks, _dtypes
from ._description import AppendArgs, Array, MergeArgs
from ._device_array import DeviceArray
from ._errors import invalid

_PART_AXES = {
    5: "(num_parts, batch, seqlen, heads, head_dim)",
    4: "(num_parts, seqlen, heads, head_dim)",
    3: "(num_parts, seqlen, head_dim)",
}
_TOKEN_AXES = {3: "(tokens, num_kv_heads, head_dim)", 4: "(batch, seqlen, num_kv_heads, head_dim)"}


#: What an append takes beside tokens and caches.
_APPENDED = ("slots", "block_table", "seq_lens", "cu_seqlens", "cos", "sin", "k_scale", "v_scale")


class MergeCall(NamedTuple):
    """A checked merge and the arrays that go back to the caller."""

    args: MergeArgs
    out: Array
    lse: Array


def merge(
    out: Any,
    lse: Any,
    *,
    backend: str,
    layout: str = "bshd",
    sinks: Any = None,
    lse_includes_sinks: bool = False,
    out_dtype: Any = None,
) -> MergeCall:
    """Check the parts of a merge and provide its result arrays."""
    _checks.choice("layout", layout, ("bshd", "bhsd"))
    out, lse, sinks = (_arrays.see(name, x) for name, x in (("out", out), ("lse", lse), ("sinks", sinks)))
    out, _ = _checks.float_array("out", out, _PART_AXES)
    if out.shape[0] == 0:
        raise invalid("out", "0 parts", "at least 1 part on axis 0")
    missing = {5: (), 4: (1,), 3: (1, 3)}[out.ndim]
    parts = np.expand_dims(out.swapaxes(-3, -2) if layout == "bhsd" and out.ndim > 3 else out, missing)
    num_parts, batch, seqlen, num_heads, _ = parts.shape
    shape = {
        5: (num_parts, batch, num_heads, seqlen),
        4: (num_parts, num_heads, seqlen),
        3: (num_parts, seqlen),
    }[out.ndim]
    lse, lse_dtype = _checks.float_array("lse", lse, {len(shape): str(shape)})
    if lse.shape != shape:
        raise invalid("lse", f"shape {lse.shape}", f"shape {shape}, one number per row of out")
    if lse_dtype.name not in ("float32", "float64"):
        raise invalid("lse", f"dtype {lse_dtype.name}", "float32 or float64")
    sinks = _args_terms.sinks(sinks, num_heads)
    _arrays.check_places(backend, "out", {"out": out, "lse": lse, "sinks": sinks})
    dtype = out.dtype if out_dtype is None else _checks.dtype_named("out_dtype", out_dtype)
    result = _arrays.empty(out.shape[1:], dtype, out)
    result_lse = _arrays.empty((batch, num_heads, seqlen), lse.dtype, out)
    args = MergeArgs(
        parts=parts,
        part_lse=np.expand_dims(lse, {5: (), 4: (1,), 3: (1, 2)}[out.ndim]),
        sinks=sinks,
        lse_includes_sinks=_checks.flag("lse_includes_sinks", lse_includes_sinks),
        out=_args.canonical(result, layout),
        lse=result_lse,
    )
    return MergeCall(args, result, result_lse.reshape(shape[1:]))


def append(
    k: Any,
    v: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    backend: str,
    interleaved: bool = False,
    kv_dtype: Any = None,
    cache_layout: str = "nhd",
    **others: Any,
) -> AppendArgs:
    """Check an append and turn tables, lengths or slots on the host into one slot per token.

    `others` are the places, ``block_table, seq_lens, slots, cu_seqlens``, the rotation, ``cos, sin``, and
    the scales, ``k_scale, v_scale``.
    """
    _checks.choice("cache_layout", cache_layout, ("nhd", "hnd"))
    tokens = _arrays.see_all({"k": k, "v": v})
    given = {**dict.fromkeys(_APPENDED), **_arrays.see_all(others)}
    k, v = (_checks.float_array(name, x, _TOKEN_AXES)[0] for name, x in tokens.items())
    _checks.choice("kv_dtype", kv_dtype, (None, *_dtypes.OF_BYTES))
    given_caches, caches, stored = [], [], []
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        x = _arrays.see(name, x)
        cache, dtype = _checks.stored_array(name, x, _args.CACHE_AXES[cache_layout], kv_dtype)
        given_caches.append(cache)
        caches.append(_args.cache_view(cache, cache_layout))
        stored.append(dtype)
    _check_append_shapes(k, v, caches, stored)
    tokens = {"k": k, "v": v}
    places = {**tokens, "k_cache": caches[0], "v_cache": caches[1], **given}
    _arrays.check_places(backend, "k", places)
    scales_given = given.pop("k_scale"), given.pop("v_scale")
    inputs = {name: x for name, x in {**tokens, **given}.items() if isinstance(x, np.ndarray)}
    _checks.writable_output("k_cache", caches[0], inputs)
    _checks.writable_output("v_cache", caches[1], {**inputs, "k_cache": caches[0]})
    where = _places(k, caches[0], given)
    scales, writes_scales = _append_scales(
        scales_given,
        given_caches,
        stored[0],
        lambda x: _args.cache_view(x, cache_layout),
        {**inputs, "k_cache": caches[0], "v_cache": caches[1]},
    )
    fixed = scales[0] is not None and not writes_scales
    interleaved = _checks.flag("interleaved", interleaved)
    num_tokens = k.shape[0] if k.ndim == 3 else k.shape[0] * k.shape[1]
    rotation = _rotation(given["cos"], given["sin"], k, where, num_tokens)
    if k.ndim == 4:
        k, v = (_arrays.reshaped(x, (num_tokens, *x.shape[2:])) for x in (k, v))
    if fixed and stored[0].name in ("int8", "int4") and where.slots is not None:
        _check_finite({"k": k, "v": v, **rotation}, where.slots, stored[0].name)
    return AppendArgs(
        k=k,
        v=v,
        k_cache=caches[0],
        v_cache=caches[1],
        kv_dtype=stored[0].name,
        k_scale=scales[0],
        v_scale=scales[1],
        writes_scales=writes_scales,
        slots=where.slots,
        interleaved=interleaved,
        **rotation,
        **where.looked_up,
    )


def _check_finite(rows: dict[str, Array | None], slots: Array, dtype: str) -> None:
    """Refuse what integers cannot hold, in the rows of tokens that are written.

    On a device they are not looked at; what is no number is stored as 0 there.
    """
    if isinstance(slots, DeviceArray):  # so are the tokens
        return
    written = slots >= 0
    for name, x in rows.items():
        if isinstance(x, np.ndarray) and not isinstance(x, DeviceArray) and not np.isfinite(x[written]).all():
            raise invalid(name, "NaN or Inf", f"finite numbers for a cache of {dtype} with a fixed scale")


class _Where(NamedTuple):
    """The places of tokens: slots, on the host with the positions that they come from, or an index."""

    slots: Array | None
    positions: Array | None
    looked_up: dict[
        str, Array | None
    ]  # block_table, seq_lens and cu_seqlens, where they have to be looked up


def _places(k: Array, cache: Array, given: dict[str, Any]) -> _Where:
    """Return where the tokens go."""
    slots, seq_lens = given["slots"], given["seq_lens"]
    if (slots is None) == (seq_lens is None):
        found = "neither" if slots is None else "both"
        raise invalid(
            "slots", f"{found} of slots and seq_lens", "either slots, or seq_lens (and a block_table)"
        )
    if slots is not None:
        for name in ("block_table", "cu_seqlens"):
            if given[name] is not None:
                found = _checks.describe(given[name])
                raise invalid(name, found, "None beside slots, which say every place")
        slots = _given_slots(slots, k, cache)
        return _Where(slots if isinstance(slots, DeviceArray) else slots.astype(np.int64), None, {})
    return _slots_of_sequences(k, cache, given["block_table"], seq_lens, given["cu_seqlens"])


def _given_slots(slots: Any, k: Array, cache: Array) -> Array:
    """Return the caller's slots, one per token."""
    slots = _checks.index_array("slots", slots, k.shape[:-2], f"{k.shape[:-2]}, one per token")
    last = cache.shape[0] * cache.shape[1] - 1
    _checks.index_range("slots", slots, -1, last, "page * page_size + place, or -1 to skip the token")
    return _arrays.reshaped(slots, (slots.size,))


def _append_scales(
    scales: tuple[Any, Any],
    caches: list[Array],
    stored: _dtypes.DType,
    to_canonical: Callable[[Array], Array],
    others: dict[str, Array],
) -> tuple[list[Array | None], bool]:
    """Return the scales of keys and values, and whether they are to be chosen and written."""
    result: list[Array | None] = []
    per_token = []
    for name, scale, cache in zip(("k_scale", "v_scale"), scales, caches, strict=True):
        if scale is None and stored in _dtypes.QUANTISED:
            raise invalid(name, "None", f"the scale of a {stored.name} cache")
        shape = to_canonical(cache).shape[:3]
        result.append(_args_terms.scale_of(name, scale, cache, shape, to_canonical, any_float=True))
        per_token.append(isinstance(scale, np.ndarray) and scale.shape == cache.shape[:-1])
        if per_token[-1]:
            if stored not in _dtypes.QUANTISED:
                raise invalid(
                    name, _checks.describe(scale), f"a number or (num_kv_heads,) for a {stored.name} cache"
                )
            _checks.writable_output(name, scale, others)
            others = {**others, name: scale}
        elif (
            scale is not None
            and not isinstance(scale, DeviceArray)
            and not np.asarray(scale, np.float32).all()
        ):
            raise invalid(name, "0 as a float32", "a scale to divide by")
    if per_token[0] != per_token[1]:
        name, other = ("v_scale", "k_scale") if per_token[0] else ("k_scale", "v_scale")
        raise invalid(
            name,
            _checks.describe(scales[name == "v_scale"]),
            f"a scale per token and head as {other}, or fixed scales for both",
        )
    return result, per_token[0]


def _check_append_shapes(k: Array, v: Array, caches: list[Array], stored: list[_dtypes.DType]) -> None:
    if v.shape[:-1] != k.shape[:-1]:
        raise invalid("v", f"shape {v.shape}", f"shape {k.shape[:-1]} + (head_dim_v,), as k")
    for name, cache, dtype, tokens in zip(("k_cache", "v_cache"), caches, stored, (k, v), strict=True):
        heads, width = cache.shape[2], cache.shape[3] * dtype.per_item
        if (heads, width) != tokens.shape[-2:]:
            found = f"{heads} heads of width {width}"
            raise invalid(name, found, f"{tokens.shape[-2]} heads of width {tokens.shape[-1]}, as {name[0]}")
        if (dtype.name == "float64") != (tokens.dtype == np.float64):
            raise invalid(
                name, f"dtype {dtype.name} beside {tokens.dtype} tokens", "float64 on both sides or on none"
            )
    if v.dtype != k.dtype:
        raise invalid("v", f"dtype {v.dtype}", f"{k.dtype}, the dtype of k")
    if stored[1] is not stored[0]:
        raise invalid("v_cache", f"dtype {stored[1].name}", f"{stored[0].name}, the dtype of k_cache")
    k_cache, v_cache = caches
    if v_cache.shape[:2] != k_cache.shape[:2]:
        raise invalid(
            "v_cache", f"(num_pages, page_size) = {v_cache.shape[:2]}", f"{k_cache.shape[:2]}, as k_cache"
        )
    if k_cache.shape[1] == 0:
        raise invalid("k_cache", "page size 0", "a page size of at least 1")


def _slots_of_sequences(k: Array, cache: Array, block_table: Any, seq_lens: Any, cu_seqlens: Any) -> _Where:
    """Return the slot and the position of every token; a cache without a table has a page per sequence.

    What lies on a device is not looked at: the kernel looks tokens up in all three.
    """
    num_pages, page_size = cache.shape[:2]
    starts = None
    if cu_seqlens is not None:
        if k.ndim != 3:
            raise invalid("k", f"shape {k.shape}", f"shape {_TOKEN_AXES[3]} beside cu_seqlens")
        cu_seqlens, starts = _checks.prefix_sums("cu_seqlens", cu_seqlens, None, k.shape[0], _on_host)
    batch = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    seq_lens = _checks.index_array("seq_lens", seq_lens, (batch,), f"(batch,) = ({batch},)")
    if block_table is None and num_pages != batch:
        expected = f"batch {batch}, one row per sequence where there is no block_table"
        raise invalid("k_cache", f"batch {num_pages}", expected)
    if block_table is not None:
        meaning = f"(batch, max_pages) = ({batch}, ...)"
        block_table = _checks.index_array("block_table", block_table, (batch, None), meaning)
    index = {"block_table": block_table, "seq_lens": seq_lens, "cu_seqlens": cu_seqlens}
    if any(isinstance(x, DeviceArray) for x in index.values()):
        return _Where(None, None, index)
    per_sequence = 1 if k.ndim == 3 else k.shape[1]
    counts = np.full(batch, per_sequence, np.int64) if starts is None else np.diff(starts).astype(np.int64)
    table = np.arange(batch)[:, None] if block_table is None else block_table
    return _looked_up(table, seq_lens.astype(np.int64), counts, num_pages, page_size)


def _on_host(name: str, array: Array) -> Array | None:
    """Return the contents of an index array that can be read."""
    return _arrays.contents(name, array, read_back=False)


def _looked_up(block_table: Array, seq_lens: Array, counts: Array, num_pages: int, page_size: int) -> _Where:
    """Return the slots and positions of so many tokens behind the end of each sequence."""
    room = block_table.shape[1] * page_size
    _checks.index_range("seq_lens", seq_lens, 0, room, "length before the append, within the cache")
    full = np.flatnonzero(seq_lens + counts > room)
    if full.size:
        b = int(full[0])
        raise invalid(
            f"seq_lens[{b}]",
            int(seq_lens[b]),
            f"at most {room - int(counts[b])}: {int(counts[b])} tokens are appended",
        )
    sequence = np.repeat(np.arange(len(counts)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    positions = np.arange(len(sequence)) - first + seq_lens[sequence]
    pages = block_table[sequence, positions // page_size].astype(np.int64)
    bad = np.flatnonzero((pages < 0) | (pages >= num_pages))
    if bad.size:
        t = int(bad[0])
        place = f"block_table[{int(sequence[t])}, {int(positions[t]) // page_size}]"
        raise invalid(
            place, int(pages[t]), f"0 to {num_pages - 1}: a page of the pool, since a token goes there"
        )
    return _Where(pages * page_size + positions % page_size, positions, {})


def _rotation(cos: Any, sin: Any, k: Array, where: _Where, num_tokens: int) -> dict[str, Array | None]:
    """Return cos and sin with one row per token, or as tables with what says which rows are meant."""
    if cos is None and sin is None:
        return {"cos": None, "sin": None}
    by_position = where.slots is None or where.positions is not None
    meaning = f"({'max_position' if by_position else 'num_tokens'}, rotary_dim / 2)"
    cos, sin = _rotary_tables(cos, sin, meaning, k.shape[-1])
    if not by_position:
        if len(cos) != num_tokens:
            raise invalid("cos", f"shape {cos.shape}", f"{num_tokens} rows, one per token")
        return {"cos": cos, "sin": sin}
    positions = where.positions
    if positions is None:
        return {"cos": cos, "sin": sin}
    if positions.size and int(positions.max()) >= len(cos):
        raise invalid("cos", f"shape {cos.shape}", f"a row for position {int(positions.max())}")
    if isinstance(cos, DeviceArray):
        return {"cos": cos, "sin": sin, "positions": positions}
    return {"cos": cos[positions], "sin": sin[positions]}


def _rotary_tables(cos: Any, sin: Any, meaning: str, head_dim: int) -> tuple[Array, Array]:
    tables = []
    for name, table in (("cos", cos), ("sin", sin)):
        table, dtype = _checks.float_array(name, table, {2: meaning})
        if dtype.name not in ("float32", "float64"):
            raise invalid(name, f"dtype {dtype.name}", "float32 or float64")
        if not 0 < 2 * table.shape[1] <= head_dim:
            raise invalid(
                name,
                f"shape {table.shape}",
                f"shape {meaning} with rotary_dim from 2 to head_dim = {head_dim}",
            )
        tables.append(table)
    if tables[0].shape != tables[1].shape or tables[0].dtype != tables[1].dtype:
        raise invalid(
            "sin", _checks.describe(tables[1]), f"shape {tables[0].shape} and dtype {tables[0].dtype}, as cos"
        )
    return tables[0], tables[1]
