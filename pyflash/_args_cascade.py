"""Checks of a cascade: what is shared, what each sequence has of its own, and the call over both together."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from . import _args, _args_terms, _arrays, _checks
from ._description import Array, AttentionArgs, CFunction
from ._device_array import DeviceArray
from ._errors import invalid, unsupported

_PREFIX_AXES = {
    "bshd": {3: "(shared_len, num_kv_heads, head_dim)"},
    "bhsd": {3: "(num_kv_heads, shared_len, head_dim)"},
}
_QUERY_AXES = {4: "(batch, seqlen_q, num_heads, head_dim) in the order of layout"}
#: The options that are about how keys are stored and where the result goes, and not about scores.
_STORAGE = ("k_scale", "v_scale", "kv_dtype", "out", "out_dtype", "max_seqlen_q", "check_indices", "q_scale")


class Prefix(NamedTuple):
    """The shared keys, as pages of a pool; dense ones are a pool of one page."""

    k: Array  # (num_pages, page_size, num_kv_heads, head_dim)
    v: Array
    k_scale: Array | None
    v_scale: Array | None
    table: Array  # (num_shared_pages,)
    length: int


class Cascade(NamedTuple):
    """A checked cascade."""

    call: _args.Call  # over the concatenated keys, which exist as a shape only; holds the results
    own: AttentionArgs  # over the own keys, without the options that are about scores
    prefix: Prefix


def cascade(
    q: Any,
    shared: tuple[Any, Any],
    keys: tuple[Any, Any],
    *,
    index: dict[str, Any],
    shared_index: tuple[Any, Any],
    shared_scales: tuple[Any, Any],
    layouts: dict[str, Any],
    options: dict[str, Any],
) -> Cascade:
    """Check a cascade.

    `index` has the arrays that say where own keys and queries are, `shared_index` the block table and the
    length of the prefix, `layouts` the keywords layout, cache_layout and backend.
    """
    one_pool = [mine is theirs for mine, theirs in zip(keys, shared, strict=True)]
    q, shared, keys = _arrays.see("q", q), _see_pair("_shared", shared), _see_pair("", keys)
    index, options = _arrays.see_all(index), _arrays.see_all(options)
    shared_index = (_arrays.see("shared_block_table", shared_index[0]), shared_index[1])
    shared_scales = _see_pair("_scale_shared", shared_scales)
    if options.get("workspace") is not None:
        found, instead = (
            _checks.describe(options["workspace"]),
            "its passes need different ones; leave it out",
        )
        raise unsupported("workspace", found, "cascade_attention", instead)
    storage = {name: options[name] for name in _STORAGE if name in options}
    own = _own(q, *keys, index, layouts, storage)
    scales = tuple(
        _scale_of_prefix(name, storage.get(name), given, same)
        for name, given, same in zip(("k_scale", "v_scale"), shared_scales, one_pool, strict=True)
    )
    prefix = _prefix(shared, scales, shared_index, own, layouts, storage.get("kv_dtype"))
    inputs: dict[str, Array | None] = {"k_shared": prefix.k, "v_shared": prefix.v}
    inputs.update(k_scale_shared=shared_scales[0], v_scale_shared=shared_scales[1])
    inputs["shared_block_table"] = None if shared_index[0] is None else prefix.table
    _arrays.check_places(layouts["backend"], "q", {"q": q, **inputs})
    if storage.get("out") is not None:
        inputs.update(k_scale_shared=prefix.k_scale, v_scale_shared=prefix.v_scale)
        given = {name: x for name, x in inputs.items() if x is not None}
        _checks.writable_output("out", storage["out"], given)
    call = _whole(q, own, prefix.length, layouts, options)
    _check_functions_and_tree(call.args, own)
    return Cascade(call, own, prefix)


def _see_pair(suffix: str, pair: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return an argument of the keys and that of the values, seen; one array stays one."""
    first = _arrays.see(f"k{suffix}", pair[0])
    return first, first if pair[1] is pair[0] else _arrays.see(f"v{suffix}", pair[1])


def _own(
    q: Any, k: Any, v: Any, index: dict[str, Any], layouts: dict[str, Any], storage: dict[str, Any]
) -> AttentionArgs:
    """Return the call over the own keys alone, without options that are about scores."""
    layout, backend = layouts["layout"], layouts["backend"]
    for name, other in (("block_table", "cu_seqlens_kv"), ("seq_lens", "cu_seqlens_kv")):
        if index[name] is not None and index[other] is not None:
            raise invalid(name, _checks.describe(index[name]), f"None beside {other}")
    if index["block_table"] is not None:
        return _args.paged(
            q,
            k,
            v,
            index["block_table"],
            index["seq_lens"],
            cu_seqlens_q=index["cu_seqlens_q"],
            **layouts,
            **storage,
        ).args
    if index["cu_seqlens_kv"] is not None:
        return _args.varlen(
            q, k, v, index["cu_seqlens_q"], index["cu_seqlens_kv"], backend=backend, **storage
        ).args
    if index["cu_seqlens_q"] is not None:
        expected = "None, or beside it block_table or cu_seqlens_kv: where the own keys of each sequence are"
        raise invalid("cu_seqlens_q", _checks.describe(index["cu_seqlens_q"]), expected)
    _checks.plain_array("q", q, _QUERY_AXES)
    return _args.dense(q, k, v, layout=layout, seq_lens=index["seq_lens"], backend=backend, **storage).args


def _scale_of_prefix(name: str, own: Any, given: Any, is_one_pool: bool) -> Any:
    """Return a storage scale of the prefix: its own, or that of the own keys where that says it."""
    if given is not None:
        return given
    if isinstance(own, np.ndarray) and own.ndim > 1 and not is_one_pool:
        raise invalid(f"{name}_shared", "None", f"scales of the prefix, since {name} has one per token")
    return own


def _prefix(
    arrays: tuple[Any, Any],
    scales: tuple[Any, ...],
    index: tuple[Any, Any],
    own: AttentionArgs,
    layouts: dict[str, Any],
    kv_dtype: Any,
) -> Prefix:
    """Check the shared keys against the own ones."""
    (table, length), layout, cache_layout = index, layouts["layout"], layouts["cache_layout"]
    axes = _PREFIX_AXES[_checks.choice("layout", layout, tuple(_PREFIX_AXES))]
    to_pool = functools.partial(_args.canonical, layout=layout)
    if table is not None:
        to_pool = functools.partial(_args.cache_view, cache_layout=cache_layout)
        axes = _args.CACHE_AXES[_checks.choice("cache_layout", cache_layout, tuple(_args.CACHE_AXES))]
    pools, canonical_scales = [], []
    for name, x, scale, mine in zip("kv", arrays, scales, (own.k, own.v), strict=True):
        array, dtype = _checks.stored_array(f"{name}_shared", x, axes, kv_dtype)
        pool = to_pool(array)
        if dtype.name != own.kv_dtype:
            raise invalid(f"{name}_shared", f"dtype {dtype.name}", f"{own.kv_dtype}, the dtype of {name}")
        if pool.shape[2:] != mine.shape[2:]:
            found = f"{pool.shape[2]} heads of width {pool.shape[3] * dtype.per_item}"
            want = f"{mine.shape[2]} heads of width {mine.shape[3] * dtype.per_item}, as {name}"
            raise invalid(f"{name}_shared", found, want)
        pools.append(pool)
        canonical_scales.append(
            _args_terms.scale_of(f"{name}_scale_shared", scale, array, pool.shape[:3], to_pool)
        )
    num_pages, page_size = pools[0].shape[:2]
    if pools[1].shape[:2] != pools[0].shape[:2]:
        raise invalid(
            "v_shared", f"shape {arrays[1].shape}", f"as many tokens as k_shared, {arrays[0].shape}"
        )
    if table is None:
        used = page_size if length is None else _checks.integer("shared_len", length, 0, page_size)
        table = np.zeros(1, np.int32)
        return Prefix(pools[0], pools[1], canonical_scales[0], canonical_scales[1], table, used)
    table = _checks.index_array("shared_block_table", table, (None,), "(num_shared_pages,)")
    if page_size == 0:
        raise invalid("k_shared", "page size 0", "a page size of at least 1")
    used = _checks.integer("shared_len", length, 0, table.shape[0] * page_size)
    table = table[: -(-used // page_size)]
    _checks.index_range("shared_block_table", table, 0, num_pages - 1, "a page of the pool")
    return Prefix(pools[0], pools[1], canonical_scales[0], canonical_scales[1], table, used)


def _whole(
    q: Any, own: AttentionArgs, shared_len: int, layouts: dict[str, Any], options: dict[str, Any]
) -> _args.Call:
    """Return the call over the concatenated keys, which exist only as shapes of one repeated number.

    It checks and brings into canonical form everything that is about scores, and provides the results.
    """
    options = {name: x for name, x in options.items() if name not in ("k_scale", "v_scale", "kv_dtype")}
    if q.dtype != own.q.dtype:  # bytes, which kv_dtype has named
        q = q.view(own.q.dtype)
    widths, backend = (own.q.shape[3], own.out.shape[3]), layouts["backend"]
    lengths = _arrays.computed(lambda keys: keys + shared_len, num_keys(own))
    if own.block_table is None and own.cu_seqlens_kv is None:
        shape = (own.batch, own.k.shape[1] + shared_len, own.k.shape[2])
        if layouts["layout"] == "bhsd":
            shape = (shape[0], shape[2], shape[1])
        k, v = (_arrays.of_shape((*shape, width), own.q.dtype, own.q) for width in widths)
        seq_lens = None if own.seq_lens is None else lengths
        return _args.dense(q, k, v, layout=layouts["layout"], seq_lens=seq_lens, backend=backend, **options)
    capacity = own.k.shape[1] + shared_len  # of packed keys: all of them
    if not isinstance(lengths, DeviceArray):
        capacity = int(lengths.max(initial=shared_len))
    if own.block_table is not None:
        capacity = own.block_table.shape[1] * own.k.shape[1] + shared_len
    shape = (1, max(capacity, 1), own.k.shape[2])
    k, v = (_arrays.of_shape((*shape, width), own.q.dtype, own.q) for width in widths)
    table = np.zeros((own.batch, 1), np.int32)
    how = {"cu_seqlens_q": own.cu_seqlens_q, "layout": layouts["layout"], "backend": backend}
    return _args.paged(q, k, v, table, lengths, **how, **options)


def _check_functions_and_tree(whole: AttentionArgs, own: AttentionArgs) -> None:
    for name in ("score_mod", "mask_mod"):
        if isinstance(getattr(whole, name), CFunction):
            instead = "it would see positions inside one pass; use backend='numpy', a bias or a mask"
            raise unsupported(name, "a C function", "cascade_attention", instead)
    if whole.tree is None:
        return
    num_draft, keys = whole.tree.shape[1], num_keys(own)
    if isinstance(keys, DeviceArray):
        return
    short = np.flatnonzero(keys < num_draft)
    if short.size:
        b = int(short[0])
        raise invalid(
            "tree",
            f"{num_draft} draft tokens",
            f"at most {int(keys[b])}, the own keys of sequence {b}",
        )


def num_keys(args: AttentionArgs) -> Array:
    """Return the valid keys of each sequence, int64 (batch,); of lengths on a device, there."""
    if args.seq_lens is not None:
        return _arrays.computed(lambda x: x, args.seq_lens)
    if args.cu_seqlens_kv is not None:
        return _arrays.computed(lambda x: x[1:] - x[:-1], args.cu_seqlens_kv)
    return np.full(args.batch, args.k.shape[1], np.int64)
