"""Appending tokens to a cache: rotated, divided by their scales, rounded once to how it stores them."""

from __future__ import annotations

import numpy as np

from . import _dtypes
from ._description import AppendArgs, Array
from ._storage import assignable, encode


def append(args: AppendArgs) -> None:
    """Write the tokens into their slots, and the scales of their heads if the call chooses them."""
    assert args.slots is not None  # nothing lies on a device
    token = np.flatnonzero(args.slots >= 0)
    place = np.divmod(args.slots[token], args.k_cache.shape[1])
    k, v = args.k[token], args.v[token]
    if args.cos is not None and args.sin is not None:
        k = _rotated(k, args.cos[token], args.sin[token], args.interleaved)
    _write(args, k, args.k_cache, args.k_scale, place)
    _write(args, v, args.v_cache, args.v_scale, place)


def _write(args: AppendArgs, x: Array, cache: Array, scale: Array | None, place: tuple[Array, Array]) -> None:
    """Write ``(tokens, num_kv_heads, width)`` to the places ``(page, place in it)`` of a cache."""
    dtype = _dtypes.BY_NAME[args.kv_dtype]
    quantised = dtype in _dtypes.QUANTISED
    if quantised or scale is not None:
        x = x.astype(dtype.compute)
    if scale is not None:
        if args.writes_scales:
            scale[place], x = _scaled_to_fit(x, dtype.largest)
        else:
            x = x / scale[place][..., np.newaxis]
    if quantised:
        assignable(cache, dtype.name)[place] = encode(x, dtype.name)
    else:
        cache[place] = x.astype(cache.dtype)


def _scaled_to_fit(x: Array, largest: float) -> tuple[Array, Array]:
    """Return a scale per token and head and what is to be stored, at most about `largest`.

    Where x is not finite the scale is NaN, so that it shows, and 0 is stored. Where x is 0, or so
    small that the scale would be, the scale is 1.
    """
    scale = np.abs(x).max(axis=-1) / np.float32(largest)
    scale = np.where(np.isfinite(scale), np.where(scale == 0, np.float32(1), scale), np.float32(np.nan))
    shown = scale[..., np.newaxis]
    return scale, np.where(np.isnan(shown), 0, x / shown)


def _rotated(k: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Return keys ``(tokens, num_kv_heads, head_dim)`` rotated by ``(tokens, rotary_dim / 2)``.

    Each pair ``(a, b)`` becomes ``(a cos - b sin, b cos + a sin)``. The pairs are neighbours if
    `interleaved`, else element d and element d + rotary_dim / 2. What lies past rotary_dim stays.
    """
    half = cos.shape[1]
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    cos, sin = cos[:, np.newaxis].astype(np.float64), sin[:, np.newaxis].astype(np.float64)
    rotated = k.astype(np.float64)
    a, b = rotated[..., first].copy(), rotated[..., second].copy()
    rotated[..., first] = a * cos - b * sin
    rotated[..., second] = b * cos + a * sin
    return rotated
