"""How the suite makes calls: data for every address of keys, and one way to run them on a backend.

Results are asked for in poisoned memory, and inputs are compared with copies taken before the call, in
every test that goes through `run`.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
from oracle_terms import Call, UserFunction, value_width

import pyflash
from pyflash import _arrays
from pyflash._dtypes import DTYPES, FLOATS, numpy_dtype

#: Types of queries and outputs, and of all that may be stored.
DTYPE_NAMES = tuple(row.name for row in FLOATS)
STORED_NAMES = tuple(row.name for row in DTYPES)
LARGEST = {row.name: row.largest for row in DTYPES}
BYTES = {"float8_e4m3fn": "e4m3fn", "float8_e5m2": "e5m2", "int4": "int4"}

#: Every type that k and v may have beside each type of q.
TYPE_PAIRS = tuple(
    (q, kv) for q in DTYPE_NAMES for kv in DTYPE_NAMES if q == kv or (q != "float64" and kv != "float64")
)


def normal(seed: int, shape: tuple[int, ...], dtype: str = "float32", amplitude: float = 1.0) -> np.ndarray:
    """Normally distributed numbers of any type in the registry."""
    numbers = np.random.default_rng(seed).standard_normal(shape) * amplitude
    return numbers.astype(numpy_dtype(dtype))


def on_host(x: Any) -> np.ndarray:
    """Return an array of NumPy, of CuPy or of the emulated GPU as NumPy's."""
    return x if isinstance(x, np.ndarray) else x.get()


def on_device(x: Any) -> Any:
    """Return a copy of an array on the GPU, a real or an emulated one; any other value as it is."""
    kind = _arrays.own_kind
    return kind.uploaded((x,), kind.current_device())[0] if isinstance(x, np.ndarray) else x


def dense(
    seed: int = 0,
    *,
    batch: int = 2,
    seqlen_q: int = 5,
    seqlen_kv: int = 7,
    num_heads: int = 2,
    num_kv_heads: int | None = None,
    head_dim: int = 8,
    head_dim_v: int | None = None,
    dtype: str = "float32",
    kv_dtype: str | None = None,
    amplitude: float = 1.0,
    **options: Any,
) -> Call:
    """A `flash_attention` call in layout bshd on random arrays."""
    kv_dtype = kv_dtype or dtype
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    keys = (batch, seqlen_kv, num_kv_heads)
    arrays = {
        "q": normal(3 * seed, (batch, seqlen_q, num_heads, head_dim), dtype, amplitude),
        "k": normal(3 * seed + 1, (*keys, head_dim), kv_dtype, amplitude),
        "v": normal(3 * seed + 2, (*keys, head_dim if head_dim_v is None else head_dim_v), kv_dtype),
    }
    return Call("flash_attention", arrays, options)


def varlen(seqlens_q: Any, seqlens_kv: Any, seed: int = 0, index_dtype: str = "int32", **spec: Any) -> Call:
    """A `flash_attention_varlen` call; `spec` as for `dense`."""
    one = dense(seed, batch=1, seqlen_q=sum(seqlens_q), seqlen_kv=sum(seqlens_kv), **spec)
    arrays = {name: array[0] for name, array in one.arrays.items()}
    arrays["cu_seqlens_q"] = prefix_sums(seqlens_q, index_dtype)
    arrays["cu_seqlens_kv"] = prefix_sums(seqlens_kv, index_dtype)
    return Call("flash_attention_varlen", arrays, one.options)


def prefix_sums(lengths: Any, dtype: str = "int32") -> np.ndarray:
    """Cumulative lengths from 0."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)


def stored_as(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers rounded to a stored type, saturated; int4 packed, even index in the low half."""
    if not dtype.startswith(("int", "float8")):
        return numbers.astype(numpy_dtype(dtype))
    # Two's complement reaches one further down than up.
    numbers = np.clip(numbers, -LARGEST[dtype] - dtype.startswith("int"), LARGEST[dtype])
    if dtype != "int4":
        return np.rint(numbers).astype(dtype) if dtype == "int8" else numbers.astype(numpy_dtype(dtype))
    nibbles = np.rint(numbers).astype(np.int64) & 15
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).astype(np.uint8)


#: Forms of a scale: one number, one per head, one per token and head, none.
SCALE_FORMS = ("number", "heads", "tokens", None)


def quantised(call: Call, dtype: str, scales: str | None = "heads", *, as_bytes: bool = False) -> Call:
    """The same call on keys and values that are stored in `dtype` with scales, or as bytes of it."""
    arrays, options = dict(call.arrays), dict(call.options)
    heads_axis = -3 if options.get("layout") == "bhsd" else -2
    for name in "kv":
        numbers = np.asarray(arrays[name], np.float64)
        size = np.abs(numbers)
        form = scales
        if form == "tokens":
            scale = size.max(axis=-1, initial=0).astype(np.float32)
        elif form == "heads":
            others = tuple(i for i in range(size.ndim) if i != size.ndim + heads_axis)
            scale = size.max(axis=others, initial=0).astype(np.float32)
        else:
            scale = np.float32(size.max(initial=0))
        # Floats need no scale to fit: one that is no power of two shows that it is applied.
        step = LARGEST[dtype] if dtype.startswith(("int", "float8")) else 1.5
        scale = np.where(scale == 0, 1, scale / np.float32(step)).astype(np.float32)
        if form is None:
            arrays[name] = stored_as(numbers * (2 if dtype == "int4" else 1), dtype)
        else:
            spread = scale[..., None] if form == "tokens" else scale
            spread = spread.reshape(-1, *[1] * (-heads_axis - 1)) if form == "heads" else spread
            arrays[name] = stored_as(numbers / spread, dtype)
            options[f"{name}_scale"] = float(scale) if form == "number" else scale
        if dtype == "int4" or (as_bytes and dtype in BYTES):
            arrays[name] = arrays[name].view(np.uint8)
            options["kv_dtype"] = BYTES[dtype]
    return Call(call.function, arrays, options)


def between_items(x: np.ndarray) -> np.ndarray:
    """An equal array that starts one byte behind an item's own alignment."""
    view = np.ndarray(x.shape, x.dtype, np.zeros(x.nbytes + 1, np.uint8), 1)
    view[...] = x
    return view


def filled(shape: tuple[int, ...], dtype: np.dtype, fill: Any) -> np.ndarray:
    """An array of one number, which integers cannot hold: their bytes are 0x7f, a NaN of float8."""
    return np.full(shape, 0x7F if dtype.kind in "iu" and fill != fill else fill, dtype)


def pages_of(
    keys: list[tuple[np.ndarray, ...]],
    page_size: int,
    *,
    seed: int = 0,
    fill: Any = np.nan,
    stale: int = -1,
    spare_pages: int = 2,
    spare_columns: int = 1,
    index_dtype: str = "int32",
    cache_layout: str = "nhd",
) -> dict[str, np.ndarray]:
    """Scatter keys and values of each sequence over shuffled pages of a pool that holds `fill` elsewhere.

    Scales per token may come behind the keys and values: they get pools of their own.
    """
    pages_used = [-(-len(sequence[0]) // page_size) for sequence in keys]
    num_pages = sum(pages_used) + spare_pages
    order = iter(np.random.default_rng(seed).permutation(num_pages))
    pools = [filled((num_pages, page_size, *x.shape[1:]), x.dtype, fill) for x in keys[0]]
    table = np.full((len(keys), max(pages_used) + spare_columns), stale, index_dtype)
    for b, sequence in enumerate(keys):
        for column in range(pages_used[b]):
            page = table[b, column] = next(order)
            for pool, tokens in zip(pools, sequence, strict=True):
                part = tokens[column * page_size : (column + 1) * page_size]
                pool[page, : len(part)] = part
    if cache_layout == "hnd":
        pools = [np.ascontiguousarray(pool.swapaxes(1, 2)) for pool in pools]
    lens = np.array([len(sequence[0]) for sequence in keys], index_dtype)
    pools = dict(zip(("k_cache", "v_cache", "k_scale", "v_scale"), pools, strict=False))
    return {**pools, "block_table": table, "seq_lens": lens}


def paged(call: Call, page_size: int, **how: Any) -> Call:
    """The `paged_attention` call that means the same as a dense one; `how` as for `pages_of`."""
    options = dict(call.options)
    lens = options.pop("seq_lens", None)
    length = call.arrays["k"].shape[1]
    lens = np.full(len(call.arrays["k"]), length) if lens is None else lens
    for name in ("bias", "mask"):
        # The last axis of a paged call's is as long as the longest sequence, not as a cache.
        if options.get(name) is not None and options[name].shape[-1] == length:
            options[name] = options[name][..., : int(lens.max(initial=0))]
    stored = _stored_tokens(call, options)
    keys = [tuple(x[b, : lens[b]] for x in stored) for b in range(len(lens))]
    return _paged(call.arrays["q"], keys, page_size, options, how)


def paged_varlen(call: Call, page_size: int, **how: Any) -> Call:
    """The `paged_attention` call with packed queries that means the same as a varlen one."""
    options = {**call.options, "cu_seqlens_q": call.arrays["cu_seqlens_q"]}
    stored = _stored_tokens(call, options)
    borders = itertools.pairwise(call.arrays["cu_seqlens_kv"])
    keys = [tuple(x[lo:hi] for x in stored) for lo, hi in borders]
    return _paged(call.arrays["q"], keys, page_size, options, how)


def _stored_tokens(call: Call, options: dict[str, Any]) -> list[np.ndarray]:
    """Keys, values, and their scales if there is one for each token; those leave `options`."""
    k = call.arrays["k"]
    if any(np.ndim(options.get(f"{name}_scale")) == k.ndim - 1 for name in "kv"):
        return [k, call.arrays["v"], options.pop("k_scale"), options.pop("v_scale")]
    return [k, call.arrays["v"]]


def _paged(q: np.ndarray, keys: Any, page_size: int, options: dict[str, Any], how: dict[str, Any]) -> Call:
    if how.get("cache_layout", "nhd") != "nhd":
        options["cache_layout"] = how["cache_layout"]
    arrays = pages_of(keys, page_size, **how)
    options |= {name: arrays.pop(name) for name in ("k_scale", "v_scale") if name in arrays}
    return Call("paged_attention", {"q": q, **arrays}, options)


def result_shape(call: Call) -> tuple[int, ...]:
    """The shape that the output of a call must have."""
    return (*call.arrays["q"].shape[:-1], value_width(call))


def poisoned(call: Call) -> np.ndarray:
    """An output array full of NaN."""
    wanted = call.options.get("out_dtype") or call.arrays["q"].dtype
    dtype = numpy_dtype(wanted) if isinstance(wanted, str) else np.dtype(wanted)
    return np.full(result_shape(call), np.nan, dtype)


def given(options: dict[str, Any], backend: Any) -> dict[str, Any]:
    """The options as a backend takes them: its own kind of user functions."""
    return {
        name: value.of_backend(backend.name) if isinstance(value, UserFunction) else value
        for name, value in options.items()
    }


def _arrays_in(options: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every array among the options that a call only reads."""
    found = {}
    for name, value in options.items():
        for i, part in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(part, np.ndarray) and name != "out":
                found[f"{name}[{i}]" if isinstance(value, tuple) else name] = part
    return found


def run(call: Call, backend: Any, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """Make a call on a backend into a poisoned output; return (out, lse); see that no input has changed."""
    options = {**call.options, **more}
    options.setdefault("out", poisoned(Call(call.function, call.arrays, options)))
    inputs = {**call.arrays, **_arrays_in(options)}
    before = {name: array.tobytes() for name, array in inputs.items()}
    out, lse = getattr(pyflash, call.function)(
        *call.arrays.values(), **given(options, backend), return_lse=True, **backend.kwargs
    )
    assert out is options["out"]
    changed = [name for name, array in inputs.items() if array.tobytes() != before[name]]
    assert not changed, f"the call modified {changed}"
    return out, lse


def explain(call: Call, backend: Any, **more: Any) -> pyflash.Explanation:
    """`pyflash.explain` of a call to any of the three functions."""
    arrays = dict(call.arrays)
    keys = ("q", "k_cache", "v_cache") if call.function == "paged_attention" else ("q", "k", "v")
    positional = [arrays.pop(name) for name in keys]
    options = given({**call.options, **more}, backend)
    return pyflash.explain(*positional, **arrays, **options, **backend.kwargs)


def bits(array: np.ndarray) -> np.ndarray:
    """The bit patterns of a float array."""
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


def assert_same_bits(got: Any, want: Any, what: str = "") -> None:
    """Hold one array, or each of a tuple of arrays, to the bits of another."""
    if isinstance(got, tuple):
        for part, one, other in zip(("out", "lse"), got, want, strict=True):
            assert_same_bits(one, other, f"{what} {part}")
        return
    assert got.shape == want.shape and got.dtype == want.dtype
    different = bits(got) != bits(want)
    if different.any():
        place = tuple(int(i) for i in np.argwhere(different)[0])
        count = int(different.sum())
        pytest.fail(
            f"{what}: {count} of {got.size} differ, first {place}: {got[place]!r}, not {want[place]!r}"
        )


def assert_same_rows(backend: Any, got: Any, want: Any, what: str = "") -> None:
    """Hold rows to the bits that they have without what they may not see.

    On CUDA a row beside NaN or Inf of other rows is computed a second time, in another order.
    """
    if backend.name != "cuda":
        assert_same_bits(got, want, what)
        return
    if isinstance(got, tuple):
        for one, other in zip(got, want, strict=True):
            assert_same_rows(backend, one, other, what)
        return
    assert got.shape == want.shape and got.dtype == want.dtype
    epsilon = {8: 2.0**-52, 4: 2.0**-23}.get(
        got.dtype.itemsize, 2.0**-7 if got.dtype.name == "bfloat16" else 2.0**-10
    )
    wide_got, wide_want = got.astype(np.float64), want.astype(np.float64)
    size = np.abs(wide_want[np.isfinite(wide_want)]).max(initial=1.0)
    np.testing.assert_allclose(wide_got, wide_want, rtol=0, atol=16 * epsilon * size, err_msg=what)


def once(build: Any) -> Any:
    """Decorate a function that builds a call, so that all backends share the call and its oracle."""
    return functools.lru_cache(maxsize=None)(build)
