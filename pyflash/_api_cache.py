"""The public functions around attention, merging states and appending to a cache; no arithmetic."""

from __future__ import annotations

from typing import Any

from . import _args_cache, _arrays, _backends
from ._description import Array


def merge_states(
    out: Array,
    lse: Array,
    *,
    layout: str = "bshd",
    sinks: Array | None = None,
    lse_includes_sinks: bool = False,
    out_dtype: Any = None,
    backend: str | None = None,
) -> tuple[Array, Array]:
    """Merge attention results over disjoint sets of keys into the result over their union.

    Parameters
    ----------
    out : (num_parts, batch, seqlen, num_heads, head_dim) ndarray
        Outputs of the parts (without sinks), stacked on axis 0; the axes behind it as `layout`
        says, without batch or heads where the parts lack them.
    lse : (num_parts, batch, num_heads, seqlen) ndarray
        Their log-sum-exp, float32 or float64. -inf is an empty part.
    layout : {"bshd", "bhsd"}, default "bshd"
        Order of the axes of the parts.
    sinks : (num_heads,) ndarray, optional
        Learned logits that enter the denominator once, here.
    lse_includes_sinks : bool, default False
        Whether they count in the merged `lse` too.
    out_dtype : dtype or str, optional
        Type of the result. Default: that of the parts.
    backend : {"auto", "numpy", "c", "cuda"}, optional
        As in `flash_attention`.

    Returns
    -------
    out : ndarray
        One part's shape.
    lse : ndarray
        Log-sum-exp over the union.

    Raises
    ------
    InvalidArgument, BackendUnavailable
        As in `flash_attention`.

    Notes
    -----
    The parts are merged along the fixed binary tree of their indices, ((0, 1), (2, 3)) and so on,
    in float32 or wider; parts computed with ``out_dtype="float32"`` lose nothing on the way.
    """
    chosen = _backends.resolve(backend, out)
    call = _args_cache.merge(
        out,
        lse,
        backend=chosen.name,
        layout=layout,
        sinks=sinks,
        lse_includes_sinks=lse_includes_sinks,
        out_dtype=out_dtype,
    )
    chosen.merge_states(call.args)
    kind = _arrays.kind_of(out)
    return _arrays.give_back(call.out, kind, out), _arrays.give_back(call.lse, kind, out)


def append_kv(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    block_table: Array | None = None,
    seq_lens: Array | None = None,
    slots: Array | None = None,
    cu_seqlens: Array | None = None,
    cos: Array | None = None,
    sin: Array | None = None,
    interleaved: bool = False,
    k_scale: float | Array | None = None,
    v_scale: float | Array | None = None,
    kv_dtype: str | None = None,
    cache_layout: str = "nhd",
    backend: str | None = None,
) -> None:
    """Write new keys and values into a cache, in place, rotating the keys on the way if asked.

    Parameters
    ----------
    k : ndarray
        ``(batch, seqlen, num_kv_heads, head_dim)``; ``(batch, num_kv_heads, head_dim)``: one token
        a sequence; ``(total, num_kv_heads, head_dim)`` with `cu_seqlens` or `slots`.
    v : ndarray
        As `k`, of width ``head_dim_v``.
    k_cache, v_cache : (num_pages, page_size, num_kv_heads, head_dim) ndarray
        The page pools, of any type that attention reads; values are converted to it. Without a
        `block_table` they are dense caches ``(batch, max_seqlen, num_kv_heads, head_dim)``.
    block_table : (batch, max_pages) int32 or int64 ndarray, optional
        Page number of each logical page.
    seq_lens : (batch,) int32 or int64 ndarray
        Length of each sequence *before* the append.
    slots : int32 or int64 ndarray, optional
        Instead of table and lengths, the place of each token: ``page * page_size + place``;
        tokens with -1 are skipped. Of two tokens for one place the later one stays.
    cu_seqlens : (batch + 1,) int32 or int64 ndarray, optional
        Prefix sums of packed tokens.
    cos, sin : (max_position, rotary_dim / 2) float32 or float64 ndarray, optional
        Rotary tables, looked up at each token's position; with `slots`, one row per token.
    interleaved : bool, default False
        Rotate neighbouring pairs ``(x[2i], x[2i+1])`` instead of ``(x[i], x[i + rotary_dim/2])``.
    k_scale, v_scale : float or ndarray, optional
        Scales of the caches; float8, int8 and int4 need them. A number or (num_kv_heads,) is what
        values are divided by before they are rounded (to nearest even) and saturated. A float32 array
        of the cache's shape without its last axis is *written*: each token and head gets the scale
        with which its largest number is the largest of the type (NaN where that is not finite).
    kv_dtype : {"e4m3fn", "e5m2", "int4"}, optional
        What caches of uint8 hold, as in `flash_attention`.
    cache_layout : {"nhd", "hnd"}, default "nhd"
        With "hnd" the caches have heads before places.
    backend : {"auto", "numpy", "c", "cuda"}, optional
        As in `flash_attention`.

    Raises
    ------
    InvalidArgument, BackendUnavailable
        As in `flash_attention`; nothing has been written then.

    References
    ----------
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, section 3.2.
    """
    chosen = _backends.resolve(backend, k)
    args = _args_cache.append(
        k,
        v,
        k_cache,
        v_cache,
        backend=chosen.name,
        block_table=block_table,
        seq_lens=seq_lens,
        slots=slots,
        cu_seqlens=cu_seqlens,
        cos=cos,
        sin=sin,
        interleaved=interleaved,
        k_scale=k_scale,
        v_scale=v_scale,
        kv_dtype=kv_dtype,
        cache_layout=cache_layout,
    )
    chosen.append_kv(args)
