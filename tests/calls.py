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
from oracle import Call

import pyflash
from pyflash._dtypes import DTYPES, numpy_dtype

DTYPE_NAMES = tuple(row.name for row in DTYPES)

#: Every type that k and v may have beside each type of q.
TYPE_PAIRS = tuple(
    (q, kv) for q in DTYPE_NAMES for kv in DTYPE_NAMES if q == kv or (q != "float64" and kv != "float64")
)


def normal(seed: int, shape: tuple[int, ...], dtype: str = "float32", amplitude: float = 1.0) -> np.ndarray:
    """Normally distributed numbers of any type in the registry."""
    numbers = np.random.default_rng(seed).standard_normal(shape) * amplitude
    return numbers.astype(numpy_dtype(dtype))


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


def pages_of(
    keys: list[tuple[np.ndarray, np.ndarray]],
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
    """Scatter keys and values of each sequence over shuffled pages of a pool that holds `fill` elsewhere."""
    pages_used = [-(-len(k) // page_size) for k, _ in keys]
    num_pages = sum(pages_used) + spare_pages
    order = iter(np.random.default_rng(seed).permutation(num_pages))
    pools = [np.full((num_pages, page_size, *x.shape[1:]), fill, x.dtype) for x in keys[0]]
    table = np.full((len(keys), max(pages_used) + spare_columns), stale, index_dtype)
    for b, sequence in enumerate(keys):
        for column in range(pages_used[b]):
            page = table[b, column] = next(order)
            for pool, tokens in zip(pools, sequence, strict=True):
                part = tokens[column * page_size : (column + 1) * page_size]
                pool[page, : len(part)] = part
    if cache_layout == "hnd":
        pools = [np.ascontiguousarray(pool.swapaxes(1, 2)) for pool in pools]
    lens = np.array([len(k) for k, _ in keys], index_dtype)
    return {"k_cache": pools[0], "v_cache": pools[1], "block_table": table, "seq_lens": lens}


def paged(call: Call, page_size: int, **how: Any) -> Call:
    """The `paged_attention` call that means the same as a dense one; `how` as for `pages_of`."""
    options = dict(call.options)
    lens = options.pop("seq_lens", None)
    k, v = call.arrays["k"], call.arrays["v"]
    keys = [(k[b], v[b]) if lens is None else (k[b, : lens[b]], v[b, : lens[b]]) for b in range(len(k))]
    if how.get("cache_layout", "nhd") != "nhd":
        options["cache_layout"] = how["cache_layout"]
    return Call("paged_attention", {"q": call.arrays["q"], **pages_of(keys, page_size, **how)}, options)


def paged_varlen(call: Call, page_size: int, **how: Any) -> Call:
    """The `paged_attention` call with packed queries that means the same as a varlen one."""
    borders = call.arrays["cu_seqlens_kv"]
    k, v = call.arrays["k"], call.arrays["v"]
    keys = [(k[lo:hi], v[lo:hi]) for lo, hi in itertools.pairwise(borders)]
    options = {**call.options, "cu_seqlens_q": call.arrays["cu_seqlens_q"]}
    if how.get("cache_layout", "nhd") != "nhd":
        options["cache_layout"] = how["cache_layout"]
    return Call("paged_attention", {"q": call.arrays["q"], **pages_of(keys, page_size, **how)}, options)


def result_shape(call: Call) -> tuple[int, ...]:
    """The shape that the output of a call must have."""
    v = call.arrays.get("v", call.arrays.get("v_cache"))
    return (*call.arrays["q"].shape[:-1], v.shape[-1])


def poisoned(call: Call) -> np.ndarray:
    """An output array full of NaN."""
    wanted = call.options.get("out_dtype") or call.arrays["q"].dtype
    dtype = numpy_dtype(wanted) if isinstance(wanted, str) else np.dtype(wanted)
    return np.full(result_shape(call), np.nan, dtype)


def run(call: Call, backend: Any, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """Make a call on a backend into a poisoned output; return (out, lse); see that no input has changed."""
    options = {**call.options, **more}
    options.setdefault("out", poisoned(Call(call.function, call.arrays, options)))
    inputs = {**call.arrays, **{n: x for n, x in options.items() if n != "out" and isinstance(x, np.ndarray)}}
    before = {name: array.tobytes() for name, array in inputs.items()}
    out, lse = getattr(pyflash, call.function)(
        *call.arrays.values(), **options, return_lse=True, **backend.kwargs
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
    return pyflash.explain(*positional, **arrays, **call.options, **backend.kwargs, **more)


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


def once(build: Any) -> Any:
    """Decorate a function that builds a call, so that all backends share the call and its oracle."""
    return functools.lru_cache(maxsize=None)(build)
