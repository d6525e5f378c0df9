"""`append_kv` into caches of float8, int8 and int4: codes and scales, exactly as they are defined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import BYTES, DTYPE_NAMES, LARGEST, normal, stored_as
from oracle_terms import dequantised, stored_values
from test_append import LENS, PLACES, append, rotated_exactly, tables

import pyflash

QUANTISED = ["float8_e4m3fn", "float8_e5m2", "int8", "int4"]
WIDTHS = (8, 6)


def tokens(shape: tuple[int, ...], dtype: str = "float32") -> list[np.ndarray]:
    """Keys and values of new tokens, of sizes that differ from token to token and head to head."""
    both = []
    for seed, width in zip((701, 702), WIDTHS, strict=True):
        x = normal(seed, (*shape, 2, width)) * np.exp(2 * normal(seed + 5, (*shape, 2, 1)))
        both.append(x.astype(normal(0, (1,), dtype).dtype))
    return both


class Cache:
    """Pools of codes and of scales, full of numbers of their own, so that a stray write shows."""

    def __init__(self, dtype: str, *, layout: str = "nhd", as_bytes: bool = False) -> None:
        self.dtype, self.layout = dtype, layout
        self.options: dict[str, Any] = {"cache_layout": layout} if layout != "nhd" else {}
        self.pools, self.scales = [], []
        for width in WIDTHS:
            shape = (6, 4, 2, width)
            pool = stored_as((np.arange(np.prod(shape)).reshape(shape) % 13 - 6.0), dtype)
            self.pools.append(self.laid(pool.view(np.uint8) if as_bytes else pool))
            self.scales.append(self.laid(np.arange(48, dtype="f4").reshape(6, 4, 2) + 100))
        if as_bytes or dtype == "int4":
            self.options["kv_dtype"] = BYTES[dtype]

    def laid(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.swapaxes(1, 2)) if self.layout == "hnd" else x

    def seen(self, x: np.ndarray) -> np.ndarray:
        """A pool with the axes of layout nhd."""
        return x.swapaxes(1, 2) if self.layout == "hnd" else x

    def copies(self) -> list[np.ndarray]:
        return [self.seen(x).copy() for x in (*self.pools, *self.scales)]

    def written(self) -> dict[str, Any]:
        """Options of an append that chooses the scales, or of a call that reads them."""
        return {**self.options, "k_scale": self.scales[0], "v_scale": self.scales[1]}

    def compare(self, want: list[np.ndarray]) -> None:
        names = ("k_cache", "v_cache", "k_scale", "v_scale")
        for name, pool, right in zip(names, (*self.pools, *self.scales), want, strict=True):
            mine = np.ascontiguousarray(self.seen(pool)).view(f"u{pool.itemsize}")
            different = mine != np.ascontiguousarray(right).view(f"u{pool.itemsize}")
            assert not different.any(), f"{name}: {np.argwhere(different)[:3].tolist()}"


def codes_of(x: np.ndarray, scale: np.ndarray, dtype: str) -> np.ndarray:
    """What a number becomes: x / scale in float32, rounded half to even, saturated."""
    assert x.dtype == np.float32 and scale.dtype == np.float32
    return stored_as(x / scale, dtype)


def absmax_scale(x: np.ndarray, dtype: str) -> np.ndarray:
    """(tokens, heads): the largest number becomes the largest code; 1 where the scale would be 0."""
    top = np.abs(x).max(axis=-1)
    scale = top / np.float32(LARGEST[dtype])
    return np.where(scale == 0, np.float32(1), scale).astype(np.float32)


def put(pools: list[np.ndarray], places: Any, per_token: list[np.ndarray]) -> None:
    for pool, new in zip(pools, per_token, strict=True):
        for place, token in zip(places, new, strict=True):
            if place is not None:
                pool[place] = token


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("name", PLACES)
def test_places_of_codes_and_of_written_scales(backend, name, dtype, layout):
    shape, options, places = PLACES[name]
    k, v = tokens(shape)
    cache = Cache(dtype, layout=layout)
    want = cache.copies()
    flat = [x.reshape(-1, *x.shape[-2:]) for x in (k, v)]
    scales = [absmax_scale(x, dtype) for x in flat]
    codes = [codes_of(x, s[..., None], dtype) for x, s in zip(flat, scales, strict=True)]
    put(want, places, [*(x.view(want[0].dtype) for x in codes), *scales])
    append(
        backend,
        k,
        v,
        *cache.pools,
        **options,
        **cache.written(),
        expect_written=True,
    )
    cache.compare(want)


@pytest.mark.parametrize("source", DTYPE_NAMES[1:])
@pytest.mark.parametrize("dtype", QUANTISED)
@pytest.mark.parametrize("form", ["number", "heads", "tokens"])
def test_values_of_every_type(backend, form, dtype, source):
    k, v = tokens((4,), source)
    places = [(0, 0), (2, 1), (5, 3), (1, 1)]
    cache = Cache(dtype)
    want = cache.copies()
    wide = [x.astype(np.float32) for x in (k, v)]
    if form == "tokens":
        scales = [absmax_scale(x, dtype) for x in wide]
        put(want[2:], places, scales)
        options = cache.written()
        spread = [s[..., None] for s in scales]
    else:
        # Small enough for some numbers to be too large for the codes.
        one = np.array([1.5, 0.75] if form == "heads" else [1.5, 1.5], "f4") / np.float32(LARGEST[dtype])
        options = {
            **cache.options,
            **dict.fromkeys(("k_scale", "v_scale"), one if form == "heads" else float(one[0])),
        }
        spread = [one[:, None]] * 2
    put(want[:2], places, [codes_of(x, s, dtype) for x, s in zip(wide, spread, strict=True)])
    slots = np.array([0, 9, 23, 5])
    append(backend, k, v, *cache.pools, slots=slots, **options, expect_written=form == "tokens")
    cache.compare(want)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_bytes_with_a_name_are_the_type(backend, dtype):
    k, v = tokens((4,))
    typed, as_bytes = Cache(dtype), Cache(dtype, as_bytes=True)
    for cache in (typed, as_bytes):
        append(
            backend,
            k,
            v,
            *cache.pools,
            slots=np.array([0, 9, -1, 5]),
            **cache.written(),
            expect_written=True,
        )
    typed.compare(as_bytes.copies())


@pytest.mark.parametrize("dtype", QUANTISED)
def test_halves_go_to_even_and_large_numbers_saturate(backend, dtype):
    """A fixed scale of 1: the numbers are the codes."""
    k, v = (np.zeros((1, 2, width), "f4") for width in WIDTHS)
    ends = [0.5, 1.5, -2.5, 1e9, -1e9, 6.5, 3.4e38, -0.0]
    k[0, 0] = ends
    k[0, 1] = np.nextafter(np.float32(ends), np.float32(0)) if dtype != "int4" else -np.float32(ends)
    cache = Cache(dtype)
    want = cache.copies()
    one = np.ones((), "f4")
    put(want[:2], [(1, 1)], [codes_of(x, one, dtype) for x in (k, v)])
    append(backend, k, v, *cache.pools, slots=np.array([5]), **cache.options, k_scale=1, v_scale=1.0)
    cache.compare(want)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_zeros_tiny_and_broken_tokens(backend, dtype):
    """A head of zeros has scale 1; one that is not finite has scale NaN and codes 0."""
    k, v = tokens((7,))
    k[0, 0], v[1, 1] = 0, -0.0
    k[6] = np.float32(1e-45)
    k[2, 0, 3], v[2, 1, 5], k[3, 1, 0] = np.nan, np.inf, -np.inf
    k[4] *= np.float32(1e-30)
    k[5] *= np.float32(1e30)
    cache = Cache(dtype)
    want = cache.copies()
    places = [(0, 0), (0, 1), (2, 1), (5, 3), (1, 1), (4, 0), (3, 3)]
    slots = np.array([0, 1, 9, 23, 5, 16, 15])
    with np.errstate(invalid="ignore"):
        scales = [absmax_scale(x, dtype) for x in (k, v)]
        codes = []
        for x, scale in zip((k, v), scales, strict=True):
            broken = ~np.isfinite(x).all(axis=-1)
            scale[broken] = np.nan
            clean = np.where(broken[..., None], 0, x)
            safe = np.where(broken, np.float32(1), scale)
            codes.append(codes_of(clean, safe[..., None], dtype))
    put(want, places, [*codes, *scales])
    append(backend, k, v, *cache.pools, slots=slots, **cache.written(), expect_written=True)
    for name, pool, right in zip(("k", "v"), cache.scales, want[2:], strict=True):
        np.testing.assert_array_equal(pool, right, err_msg=name)  # NaN has more than one pattern
        right[...] = pool
    cache.compare(want)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [2, 8])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_rotation_comes_before_the_codes(backend, dtype, rotary_dim, interleaved):
    cos, sin = tables(12, rotary_dim // 2, "float32")
    k, v = tokens((3, 2))
    _, options, places = PLACES["several tokens a sequence"]
    positions = [int(n) + t for n in LENS for t in (0, 1)]
    exact = rotated_exactly(k.reshape(-1, 2, 8), cos[positions], sin[positions], interleaved)
    cache = Cache(dtype)
    rotary = dict(cos=cos, sin=sin, interleaved=interleaved)
    append(
        backend,
        k,
        v,
        *cache.pools,
        **options,
        **rotary,
        **cache.written(),
        expect_written=True,
    )
    scale = np.array([cache.scales[0][place] for place in places])
    np.testing.assert_allclose(scale, np.abs(exact).max(axis=-1) / LARGEST[dtype], rtol=3e-7)
    stored = np.array([cache.pools[0][place] for place in places])
    got = dequantised(stored, scale, cache.options.get("kv_dtype"), head_axis=-2)
    step = scale[..., None] * (1 if dtype.startswith("int") else 0)
    relative = {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}.get(dtype, 0)
    smallest = {"float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-17}.get(dtype, 0) * scale[..., None]
    allowed = (0.5 * step + relative * np.abs(exact) + smallest) * (1 + 1e-5) + 1e-6 * np.abs(exact)
    assert (np.abs(got - exact) <= allowed).all()


@pytest.mark.parametrize("form", ["number", "heads"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_fixed_scales_of_float_caches(backend, dtype, form):
    """Stored is x / scale, rounded once."""
    k, v = tokens((4,))
    scale = np.array([3.0, 0.1] if form == "heads" else [0.3, 0.3], "f4")
    cache = Cache(dtype)
    want = cache.copies()
    places = [(0, 0), (2, 1), None, (1, 1)]
    put(want[:2], places, [(x / scale[:, None]).astype(cache.pools[0].dtype) for x in (k, v)])
    options = dict.fromkeys(("k_scale", "v_scale"), scale if form == "heads" else float(scale[0]))
    append(backend, k, v, *cache.pools, slots=np.array([0, 9, -1, 5]), **options)
    cache.compare(want)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_fixed_scale_keeps_nan_in_float8(backend, dtype):
    k, v = tokens((2,))
    k[0, 0, 3], v[1, 1, 2] = np.nan, np.nan
    cache = Cache(dtype)
    append(backend, k, v, *cache.pools, slots=np.array([0, 5]), k_scale=0.1, v_scale=0.1)
    for pool, place in ((cache.pools[0], (0, 0, 0, 3)), (cache.pools[1], (1, 1, 1, 2))):
        values = stored_values(pool)
        assert np.isnan(values[place]) and np.isnan(values).sum() == 1


REFUSED = {
    "no scale": (dict(), "k_scale"),
    "one scale": (dict(k_scale=0.1), "v_scale"),
    "NaN": (dict(k_scale=np.nan, v_scale=1.0), "k_scale"),
    "zero": (dict(k_scale=1.0, v_scale=0.0), "v_scale"),
    "a head of infinity": (dict(k_scale=np.array([1, np.inf], "f4"), v_scale=1.0), r"k_scale\[1\]"),
    "three heads": (dict(k_scale=np.ones(3, "f4"), v_scale=1.0), "k_scale"),
    "float64 per token": (dict(k_scale=np.ones((6, 4, 2)), v_scale=1.0), "k_scale"),
    "per token and fixed": (dict(k_scale=np.ones((6, 4, 2), "f4"), v_scale=1.0), "v_scale"),
    "another pool": (dict(k_scale=np.ones((5, 4, 2), "f4"), v_scale=1.0), "k_scale"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("dtype", QUANTISED)
def test_refused_by_name_with_nothing_written(any_isa, dtype, name):
    options, words = REFUSED[name]
    k, v = tokens((2,))
    cache = Cache(dtype)
    before = cache.copies()
    with pytest.raises(pyflash.InvalidArgument, match=f"^{words}: found .*, expected "):
        append(any_isa, k, v, *cache.pools, slots=np.array([0, 5]), **cache.options, **options)
    cache.compare(before)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integers_hold_no_nan_under_a_fixed_scale(any_isa, dtype):
    k, v = tokens((2,))
    v[1, 0, 0] = np.nan
    cache = Cache(dtype)
    with pytest.raises(pyflash.InvalidArgument, match=r"^v: found NaN or Inf, expected "):
        append(any_isa, k, v, *cache.pools, slots=np.array([0, 5]), **cache.options, k_scale=1.0, v_scale=1.0)


def test_scales_that_overlap_are_refused(any_isa):
    k, v = tokens((2,))
    cache = Cache("int8")
    for scales in (
        dict(k_scale=cache.scales[0], v_scale=cache.scales[0]),
        dict(k_scale=cache.scales[0], v_scale=cache.scales[0][::-1]),
        dict(k_scale=np.broadcast_to(np.ones((), "f4"), (6, 4, 2)), v_scale=cache.scales[1]),
    ):
        with pytest.raises(pyflash.InvalidArgument, match=r"^[kv]_scale: found "):
            append(any_isa, k, v, *cache.pools, slots=np.array([0, 5]), **scales)


@pytest.mark.parametrize("dtype", QUANTISED)
def test_attention_reads_what_was_appended(backend, dtype):
    """A sequence that grows token by token has the bits of one that was appended at once."""
    k, v = tokens((1, 11))
    q = normal(703, (1, 4, 8))
    table = np.array([[5, 1, 0]])
    whole, single = Cache(dtype), Cache(dtype)
    append(
        backend,
        k,
        v,
        *whole.pools,
        block_table=table,
        seq_lens=np.array([0]),
        **whole.written(),
        expect_written=True,
    )
    for t in range(11):
        append(
            backend,
            k[:, t],
            v[:, t],
            *single.pools,
            block_table=table,
            seq_lens=np.array([t]),
            **single.written(),
            expect_written=True,
        )
    single.compare(whole.copies())
    options = {**whole.written()}
    out = pyflash.paged_attention(q, *whole.pools, table, np.array([11]), **options, **backend.kwargs)
    exact = pyflash.flash_attention(q[:, None], k, v, backend="numpy")[:, 0]
    step = {"int8": 0.02, "int4": 0.5, "float8_e4m3fn": 0.15, "float8_e5m2": 0.3}[dtype]
    assert np.abs(out - exact).max() < step * np.abs(v).max()
