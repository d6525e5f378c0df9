"""`append_kv`: tokens go to their places, rotated if asked, and nothing else in a cache changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import DTYPE_NAMES, assert_same_bits, normal, on_device, on_host, prefix_sums
from oracle import FLOOR

import pyflash
from pyflash._dtypes import numpy_dtype

PAGE = 4


def new_cache(
    num_pages: int = 6, page_size: int = PAGE, width: int = 8, dtype: str = "float32"
) -> np.ndarray:
    """A cache whose every element is another number, so that a stray write shows."""
    shape = (num_pages, page_size, 2, width)
    return (np.arange(np.prod(shape)).reshape(shape) % 97 - 48).astype(numpy_dtype(dtype))


def tokens(shape: tuple[int, ...], dtype: str = "float32", widths: tuple[int, int] = (8, 8)):
    """Keys and values of new tokens."""
    return normal(71, (*shape, 2, widths[0]), dtype), normal(72, (*shape, 2, widths[1]), dtype)


def append(backend, k, v, k_cache, v_cache, *, expect_written: bool = False, **options: Any) -> None:
    """Append and see that no input but scales to be written has changed, and that nothing is returned.

    On "cuda" once more with all arrays on the device, where the same has to come out.
    """
    read = {n: x for n, x in options.items() if not (expect_written and n in ("k_scale", "v_scale"))}
    inputs = [x for x in (k, v, *read.values()) if isinstance(x, np.ndarray)]
    before = [x.tobytes() for x in inputs]
    arrays = {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache, **options}
    dtypes = {x.dtype for x in arrays.values() if isinstance(x, np.ndarray)}
    # CuPy has no float8: there such caches are bytes, which are tested as well.
    on_gpu = backend.name == "cuda" and not any("float8" in dtype.name for dtype in dtypes)
    there = {name: on_device(x) for name, x in arrays.items()} if on_gpu else {}
    with backend.chosen() as name:
        assert pyflash.append_kv(**arrays, backend=name) is None
        if there:
            assert pyflash.append_kv(**there) is None
    assert [x.tobytes() for x in inputs] == before
    for name, x in there.items():
        if isinstance(arrays[name], np.ndarray):
            assert_same_bits(on_host(x), arrays[name], f"{name} on the device")


def written(cache: np.ndarray, places: list[tuple[int, int] | None], new: np.ndarray) -> np.ndarray:
    """A copy of a cache in which token t of `new` stands at (page, place) = places[t]."""
    cache = cache.copy()
    for place, token in zip(places, new.reshape(-1, *new.shape[-2:]), strict=True):
        if place is not None:
            cache[place] = token.astype(cache.dtype)
    return cache


TABLE = np.array([[5, 0, -1], [2, 4, 1], [3, -1, -1]], np.int32)
LENS = np.array([3, 8, 0], np.int32)

#: name -> (shape of the tokens, options, where each token must go)
PLACES = {
    "one token a sequence": ((3,), dict(block_table=TABLE, seq_lens=LENS), [(5, 3), (1, 0), (3, 0)]),
    "several tokens a sequence": (
        (3, 2),
        dict(block_table=TABLE, seq_lens=LENS),
        [(5, 3), (0, 0), (1, 0), (1, 1), (3, 0), (3, 1)],
    ),
    "packed": (
        (6,),
        dict(block_table=TABLE, seq_lens=LENS, cu_seqlens=prefix_sums([2, 0, 4])),
        [(5, 3), (0, 0), (3, 0), (3, 1), (3, 2), (3, 3)],
    ),
    "packed, a sequence over three pages": (
        (9,),
        dict(
            block_table=TABLE.astype("i8"),
            seq_lens=np.array([0, 1, 0]),
            cu_seqlens=prefix_sums([0, 9, 0], "int64"),
        ),
        [(2, 1), (2, 2), (2, 3), (4, 0), (4, 1), (4, 2), (4, 3), (1, 0), (1, 1)],
    ),
    "dense cache": (
        (6, 2),
        dict(seq_lens=np.array([0, 1, 2, 0, 1, 2])),
        [(b, b % 3 + t) for b in range(6) for t in (0, 1)],
    ),
    "slots": ((4,), dict(slots=np.array([9, 0, 23, 5])), [(2, 1), (0, 0), (5, 3), (1, 1)]),
    "slots to skip": ((4,), dict(slots=np.array([-1, 0, -1, 5], "i4")), [None, (0, 0), None, (1, 1)]),
    "slots of a batch": ((2, 2), dict(slots=np.array([[9, -1], [23, 5]])), [(2, 1), None, (5, 3), (1, 1)]),
    "all slots skipped": ((3,), dict(slots=np.full(3, -1)), [None] * 3),
    "the later of two tokens for one place": ((3,), dict(slots=np.array([7, 7, 7])), [(1, 3)] * 3),
    "no token": ((0,), dict(slots=np.zeros(0, "i8")), []),
    "no sequence": ((0,), dict(block_table=np.zeros((0, 3), "i4"), seq_lens=np.zeros(0, "i4")), []),
}


@pytest.mark.parametrize("cache_layout", ["nhd", "hnd"])
@pytest.mark.parametrize("name", PLACES)
def test_places(backend, name, cache_layout):
    shape, options, places = PLACES[name]
    k, v = tokens(shape, widths=(8, 5))
    k_cache, v_cache = new_cache(), new_cache(width=5)
    want = written(k_cache, places, k), written(v_cache, places, v)
    if cache_layout == "hnd":
        k_cache, v_cache = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k_cache, v_cache))
    append(backend, k, v, k_cache, v_cache, **options, cache_layout=cache_layout)
    if cache_layout == "hnd":
        k_cache, v_cache = k_cache.swapaxes(1, 2), v_cache.swapaxes(1, 2)
    assert_same_bits(k_cache, want[0], "k_cache")
    assert_same_bits(v_cache, want[1], "v_cache")


CONVERSIONS = [(a, b) for a in DTYPE_NAMES for b in DTYPE_NAMES if (a == "float64") == (b == "float64")]


@pytest.mark.parametrize("pair", CONVERSIONS, ids="-".join)
def test_conversion_to_the_type_of_the_cache(backend, pair):
    source, target = pair
    k, v = tokens((4,), source)
    ends = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        65504.0,
        65519.9,
        65520.0,
        1 + 2.0**-11,
        1 + 2.0**-8,
        6e-8,
        2e-8,
        3.4e38,
    ]
    with np.errstate(over="ignore"):
        k.reshape(-1)[: len(ends)] = np.array(ends).astype(k.dtype)
    k_cache, v_cache = new_cache(dtype=target), new_cache(dtype=target)
    places = [(0, 0), (2, 1), (5, 3), (1, 1)]
    with np.errstate(over="ignore"):
        want = written(k_cache, places, k), written(v_cache, places, v)
    append(backend, k, v, k_cache, v_cache, slots=np.array([0, 9, 23, 5]))
    assert_same_bits(k_cache, want[0], "k_cache")
    assert_same_bits(v_cache, want[1], "v_cache")


@pytest.mark.parametrize("target", DTYPE_NAMES)
def test_nan_stays_nan(backend, target):
    k, v = tokens((1,), target)
    k[...] = np.nan
    cache = new_cache(dtype=target)
    append(backend, k, v, cache, new_cache(dtype=target), slots=np.array([5]))
    assert np.isnan(cache[1, 1].astype(np.float64)).all()


def rotated_exactly(k: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """Each pair (a, b) of a key becomes (a cos - b sin, b cos + a sin), one number at a time."""
    result = k.astype(np.float64)
    half = cos.shape[1]
    for t, h, i in np.ndindex(len(k), k.shape[1], half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        a, b = float(k[t, h, first]), float(k[t, h, second])
        c, s = float(cos[t, i]), float(sin[t, i])
        result[t, h, first], result[t, h, second] = a * c - b * s, b * c + a * s
    return result


def tables(num_positions: int, half: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of a rotary embedding."""
    angle = np.arange(num_positions)[:, None] * 100.0 ** (-np.arange(half) / half)
    return np.cos(angle).astype(dtype), np.sin(angle).astype(dtype)


@pytest.mark.parametrize("table_dtype", ["float32", "float64"])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("rotary_dim", [2, 6, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation(backend, interleaved, rotary_dim, dtype, table_dtype):
    cos, sin = tables(12, rotary_dim // 2, table_dtype)
    k, v = tokens((3, 2), dtype)
    k_cache, v_cache = new_cache(dtype=dtype), new_cache(dtype=dtype)
    _, options, places = PLACES["several tokens a sequence"]
    positions = [int(n) + t for n in LENS for t in (0, 1)]
    exact = rotated_exactly(k.reshape(-1, 2, 8), cos[positions], sin[positions], interleaved)
    before = k_cache.copy()
    want_v = written(v_cache, places, v)
    append(backend, k, v, k_cache, v_cache, **options, cos=cos, sin=sin, interleaved=interleaved)
    got = np.array([k_cache[place] for place in places]).astype(np.float64)
    np.testing.assert_allclose(got, exact, rtol=FLOOR[dtype], atol=2 * FLOOR[dtype])
    assert_same_bits(
        got[..., rotary_dim:], k.reshape(-1, 2, 8)[..., rotary_dim:].astype(np.float64), "not rotated"
    )
    assert_same_bits(v_cache, want_v, "v_cache")
    for place in places:
        k_cache[place] = before[place]
    assert_same_bits(k_cache, before, "other places of k_cache")


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_with_slots_takes_one_row_per_token(backend, interleaved):
    k, v = tokens((4,))
    cos, sin = tables(4, 4, "float32")
    k_cache, v_cache = new_cache(), new_cache()
    append(
        backend,
        k,
        v,
        k_cache,
        v_cache,
        slots=np.array([5, -1, 0, 9]),
        cos=cos,
        sin=sin,
        interleaved=interleaved,
    )
    exact = rotated_exactly(k, cos, sin, interleaved)
    for t, place in ((0, (1, 1)), (2, (0, 0)), (3, (2, 1))):
        np.testing.assert_allclose(k_cache[place], exact[t], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotation_of_one_token_has_the_bits_it_has_in_a_prompt(backend, dtype, interleaved):
    k, v = tokens((1, 9), dtype)
    cos, sin = tables(20, 4, "float32")
    table = np.array([[4, 0, 3]])
    how = dict(cos=cos, sin=sin, interleaved=interleaved, block_table=table)
    whole, v_whole = new_cache(dtype=dtype), new_cache(dtype=dtype)
    append(backend, k, v, whole, v_whole, seq_lens=np.array([2]), **how)
    single, v_single = new_cache(dtype=dtype), new_cache(dtype=dtype)
    for t in range(9):
        append(backend, k[:, t], v[:, t], single, v_single, seq_lens=np.array([2 + t]), **how)
    assert_same_bits(single, whole, "k_cache")
    assert_same_bits(v_single, v_whole, "v_cache")


@pytest.mark.parametrize("rotate", [False, True])
def test_strided_tokens_tables_and_caches(backend, rotate):
    k, v = tokens((3, 2))
    _, options, _ = PLACES["several tokens a sequence"]
    cos, sin = tables(12, 3, "float32")
    want = new_cache(), new_cache()
    append(backend, k, v, *want, **options, **(dict(cos=cos, sin=sin) if rotate else {}))
    buffer = np.full((2, 6, 2, PAGE, 17), np.nan, np.float32)
    caches = [buffer[i, ::-1, :, :, 1::2].swapaxes(1, 2) for i in (0, 1)]
    for cache in caches:
        cache[...] = new_cache()
    before = buffer.copy()
    k, v = (np.ascontiguousarray(x.transpose(3, 0, 2, 1)).transpose(1, 3, 2, 0) for x in (k, v))
    cos, sin = (np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1] for x in (cos, sin))
    options = {name: np.asfortranarray(x) for name, x in options.items()}
    append(backend, k, v, *caches, **options, **(dict(cos=cos, sin=sin) if rotate else {}))
    assert_same_bits(caches[0], want[0], "k_cache")
    assert_same_bits(caches[1], want[1], "v_cache")
    assert_same_bits(buffer[..., ::2], before[..., ::2], "between the elements")


def test_an_append_that_is_refused_writes_nothing(backend):
    k, v = tokens((3,))
    k_cache, v_cache = new_cache(), new_cache()
    table = TABLE.copy()
    table[2, 0] = -1
    with pytest.raises(pyflash.InvalidArgument):
        append(backend, k, v, k_cache, v_cache, block_table=table, seq_lens=LENS)
    assert_same_bits(k_cache, new_cache())
    assert_same_bits(v_cache, new_cache())


def test_attention_reads_what_was_appended(backend):
    """A sequence that grows token by token gives the bits of dense attention over the same keys."""
    k, v = tokens((1, 11), "float16")
    q = normal(73, (1, 11, 4, 8), "float16")
    k_cache, v_cache = new_cache(dtype="float16"), new_cache(dtype="float16")
    table = np.array([[5, 1, 0]])
    for t in range(11):
        append(backend, k[:, t], v[:, t], k_cache, v_cache, block_table=table, seq_lens=np.array([t]))
        got = pyflash.paged_attention(q[:, t], k_cache, v_cache, table, np.array([t + 1]), **backend.kwargs)
        want = pyflash.flash_attention(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], **backend.kwargs)
        assert_same_bits(got, want[:, 0], f"token {t}")
