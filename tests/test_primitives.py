"""The vector primitives of each instruction set against NumPy."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from calls import assert_same_bits, bits, numpy_dtype

from pyflash import _c

REALS = ["float32", "float64"]
HALVES = ["float16", "bfloat16"]
#: Below 2**-RANGE weights are dropped, far above the denormal numbers.
RANGE = {"float32": 100, "float64": 900}


@pytest.fixture
def primitive(c_backend) -> Any:
    """The primitives of one instruction set."""
    return functools.partial(_c.primitive, c_backend.kwargs["isa"])


def same_or_both_nan(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Where two arrays have the same bits or both hold some NaN."""
    return (bits(got) == bits(want)) | (np.isnan(got) & np.isnan(want))


# ------------------------------------------------------------------------------ exp2


@pytest.mark.parametrize("dtype", REALS)
def test_exp2_over_its_range(primitive, dtype):
    """Every weight is 2**x to within two units of the last place, down to where weights are dropped."""
    x = -np.random.default_rng(1).uniform(0, RANGE[dtype] - 1, 50_000).astype(dtype)
    x[:1000] = -np.arange(1000) / 64
    got = primitive("exp2", x)
    assert got.dtype == x.dtype
    exact = np.exp2(x.astype(np.longdouble))
    error = np.abs(got - exact) / exact
    assert (error <= 1.75 * np.finfo(dtype).eps).all(), (error.max(), x[error.argmax()])


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("factor", [1.0, 1.4426950408889634, 0.18033688, 1e-6, 1e4])
def test_exp2_with_a_factor(primitive, dtype, factor):
    x = (-np.random.default_rng(2).uniform(0, RANGE[dtype] - 1, 5000) / factor).astype(dtype)
    exact = np.exp2(x.astype(np.longdouble) * np.longdouble(np.dtype(dtype).type(factor)))
    error = np.abs(primitive("exp2", x, factor=factor) - exact) / exact
    assert (error <= (4 + 2 * np.abs(x * factor)) * np.finfo(dtype).eps).all()


@pytest.mark.parametrize("dtype", REALS)
def test_exp2_at_the_ends(primitive, dtype):
    lowest = float(np.finfo(dtype).min)
    last = RANGE[dtype] - 1
    x = np.array([0.0, -0.0, -1.0, -2.0, -last, -np.inf, lowest, -1e30, -1100.0, -last - 1], dtype)
    got = primitive("exp2", x)
    assert got[:5].tolist() == [1.0, 1.0, 0.5, 0.25, 2.0**-last]
    assert bits(got)[5:].tolist() == [0] * 5, "a weight that is 0 is exactly +0, and none is denormal"


@pytest.mark.parametrize("dtype", REALS)
def test_exp2_never_rises_above_one_and_never_falls_below_zero(primitive, dtype):
    x = -np.concatenate([np.linspace(0, 200, 20_001), np.geomspace(1e-40, 1e38, 20_001)]).astype(dtype)
    got = primitive("exp2", x)
    assert (got >= 0).all() and (got <= 1).all() and not np.signbit(got).any()


@pytest.mark.parametrize("dtype", REALS)
@pytest.mark.parametrize("factor", [1.0, 0.18033688])
def test_exp2_of_nan_is_nan_whatever_its_payload(primitive, dtype, factor):
    integer = np.dtype(f"u{np.dtype(dtype).itemsize}")
    mantissa_bits = 23 if dtype == "float32" else 52
    payloads = [1 << i for i in range(mantissa_bits)] + [(1 << mantissa_bits) - 1, 0x3FFFFF, 0x200001]
    infinity = int(np.array(np.inf, dtype).view(integer))
    sign = 1 << (8 * integer.itemsize - 1)
    patterns = [infinity | payload | s for payload in payloads for s in (0, sign)]
    x = np.array(patterns, integer).view(dtype)
    with np.errstate(invalid="ignore"):
        assert np.isnan(x).all() and np.isnan(primitive("exp2", x, factor=factor)).all()


# ------------------------------------------------------------------------------ tanh


@pytest.mark.parametrize("dtype", REALS)
def test_tanh_keeps_its_relative_accuracy(primitive, dtype):
    """Near 0 too, where 1 - 2 / (e^2x + 1) would lose all of it."""
    x = np.random.default_rng(3).uniform(-20, 20, 20_000).astype(dtype)
    x[:10_000] = np.geomspace(1e-30, 12, 10_000)
    x[:10_000:2] *= -1
    exact = np.tanh(x.astype(np.longdouble))
    error = np.abs(primitive("tanh", x) - exact) / np.abs(exact)
    assert (error <= 2.5 * np.finfo(dtype).eps).all(), (error.max(), x[error.argmax()])


@pytest.mark.parametrize("dtype", REALS)
def test_tanh_at_the_ends(primitive, dtype):
    x = np.array([0.0, -0.0, np.inf, -np.inf, 1e30, -1e30, np.finfo(dtype).max], dtype)
    got = primitive("tanh", x)
    assert got.tolist() == [0.0, 0.0, 1.0, -1.0, 1.0, -1.0, 1.0] and np.signbit(got[1])
    assert np.isnan(primitive("tanh", np.array([np.nan, -np.nan], dtype))).all()


# ------------------------------------------------------------------- load and store


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("wide", [False, True])
def test_loads_widen_every_float8_exactly(primitive, dtype, wide):
    """As an array of the type and as plain codes."""
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(numpy_dtype(dtype)).astype(np.float32)
    for x in (codes, codes.view(numpy_dtype(dtype))):
        got = primitive("load", x, dtype=dtype)
        assert got.dtype == np.float32 and same_or_both_nan(got, want).all()


def test_loads_widen_every_integer(primitive):
    x = np.arange(-128, 128).astype(np.int8)
    assert primitive("load", x).tolist() == list(range(-128, 128))
    codes = np.arange(256, dtype=np.uint8)
    want = [(nibble ^ 8) - 8 for code in range(256) for nibble in (code & 15, code >> 4)]
    assert primitive("load", codes, dtype="int4").tolist() == want


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "int4"])
@pytest.mark.parametrize("stride", [1, 2, -1, -3, 0])
def test_loads_of_codes_of_any_length_and_stride(primitive, dtype, stride):
    """No byte more than asked for is touched, which the last ones of a page would show."""
    for length in (0, 1, 2, 3, 4, 7, 8, 9, 15, 16, 17, 33):
        buffer = np.random.default_rng(length).integers(0, 120, 4 * length + 8).astype(np.uint8)
        start = 4 * length if stride < 0 else 4
        x = np.lib.stride_tricks.as_strided(buffer[start:], (length,), (stride,))
        x = x.view(np.int8) if dtype == "int8" else x
        got = primitive("load", x, dtype=dtype)
        assert_same_bits(got, primitive("load", x.copy(), dtype=dtype))
        table = primitive("load", np.arange(256, dtype=np.uint8).view(x.dtype), dtype=dtype)
        per_item = table.size // 256
        assert_same_bits(got, table.reshape(256, per_item)[x.view(np.uint8)].reshape(-1))


def every_half(dtype: str) -> np.ndarray:
    """All 65,536 values of a 16-bit type."""
    return np.arange(1 << 16, dtype=np.uint16).view(numpy_dtype(dtype))


@pytest.mark.parametrize("dtype", HALVES)
def test_loads_widen_every_value_exactly(primitive, dtype):
    x = every_half(dtype)
    got = primitive("load", x)
    with np.errstate(invalid="ignore"):
        assert got.dtype == np.float32 and same_or_both_nan(got, x.astype(np.float32)).all()


@pytest.mark.parametrize("dtype", [*HALVES, *REALS])
@pytest.mark.parametrize("stride", [1, 2, 3, -1, 0])
def test_loads_of_any_length_and_stride(primitive, dtype, stride):
    """No element more than asked for is touched: what lies around is NaN and stays out."""
    for length in (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65):
        buffer = np.full(4 * length + 8, np.nan, numpy_dtype(dtype))
        start = 4 * length if stride < 0 else 4
        x = np.lib.stride_tricks.as_strided(buffer[start:], (length,), (stride * buffer.itemsize,))
        x[...] = np.arange(length) % 50 - 20 if stride else 3
        got = primitive("load", x)
        assert (got == x.astype(got.dtype)).all()


def floats_around_halves(dtype: str) -> np.ndarray:
    """Each value of a 16-bit type, the midpoints to its neighbours, and the float32 beside those."""
    with np.errstate(invalid="ignore"):
        values = every_half(dtype).astype(np.float32)
    finite = np.unique(values[np.isfinite(values)].astype(np.float64))
    midpoints = (finite[:-1] + finite[1:]) / 2
    largest, step = finite[-1], finite[-1] - finite[-2]
    points = np.concatenate([finite, midpoints, [largest + step / 2, -largest - step / 2]]).astype(np.float32)
    with np.errstate(over="ignore"):
        around = [points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))]
    special = np.array([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, -0.0], np.float32)
    return np.concatenate([*around, special])


@pytest.mark.parametrize("dtype", HALVES)
def test_stores_round_to_nearest_even(primitive, dtype):
    x = floats_around_halves(dtype)
    got = primitive("store", x, dtype=dtype)
    with np.errstate(over="ignore"):
        want = x.astype(numpy_dtype(dtype))
    assert got.dtype == want.dtype
    wrong = ~same_or_both_nan(got, want)
    assert not wrong.any(), (x[wrong][:5], got[wrong][:5], want[wrong][:5])


@pytest.mark.parametrize("dtype", HALVES)
def test_stores_keep_nan_whatever_its_payload(primitive, dtype):
    patterns = [0x7F800000 | 1 << i for i in range(23)] + [0x7F800001, 0x7FFFFFFF, 0x7FC00000]
    x = np.array(patterns + [p | 0x80000000 for p in patterns], np.uint32).view(np.float32)
    assert np.isnan(primitive("store", x, dtype=dtype)).all()


@pytest.mark.parametrize("source", REALS)
@pytest.mark.parametrize("target", ["float64", "float32", "float16", "bfloat16"])
def test_stores_of_any_length(primitive, source, target):
    for length in (0, 1, 3, 4, 7, 8, 9, 16, 17, 33):
        x = np.random.default_rng(length).standard_normal(length).astype(source)
        assert_same_bits(primitive("store", x, dtype=target), x.astype(numpy_dtype(target)), f"{length}")


@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
def test_float64_is_rounded_once(primitive, target):
    """Just beside the midpoint of two halves, by less than float32 can say: not twice to the even one."""
    values = np.array([1.0, 1.5, -3.0, 1024.0, 2.0**-20, 0.1], np.float64).astype(numpy_dtype(target))
    steps = np.nextafter(values, numpy_dtype(target).type(np.inf)).astype(np.float64)
    low = values.astype(np.float64)
    middle = (low + steps) / 2
    beside = [np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)]
    got = [primitive("store", x, dtype=target) for x in beside]
    assert_same_bits(got[0].astype(np.float64), steps, "above the midpoint")
    assert_same_bits(got[1].astype(np.float64), low, "below the midpoint")


# --------------------------------------------------------- transposes and reductions


@pytest.mark.parametrize("dtype", REALS)
def test_transpose(primitive, dtype):
    lanes = primitive("lanes")[REALS.index(dtype)]
    square = np.arange(lanes * lanes, dtype=dtype).reshape(lanes, lanes)
    assert (primitive("transpose", square) == square.T).all()


@pytest.mark.parametrize("dtype", REALS)
def test_reductions(primitive, dtype):
    lanes = primitive("lanes")[REALS.index(dtype)]
    for seed in range(20):
        x = np.random.default_rng(seed).standard_normal((4, lanes)).astype(dtype)
        sums, maximum = primitive("reduce", x)
        assert maximum == x[0].max()
        exact = x.astype(np.longdouble).sum(axis=1)
        magnitude = np.abs(x).sum(axis=1)
        assert (np.abs(sums - exact) <= lanes * np.finfo(dtype).eps * magnitude).all()


@pytest.mark.parametrize("dtype", REALS)
def test_a_sum_does_not_depend_on_its_neighbours(primitive, dtype):
    """Each of four sums has one order of additions, wherever it stands and whatever the others are."""
    lanes = primitive("lanes")[REALS.index(dtype)]
    x = (np.random.default_rng(3).standard_normal((4, lanes)) * 1e3).astype(dtype)
    sums, _ = primitive("reduce", x)
    for order in ([3, 2, 1, 0], [1, 1, 1, 1], [2, 0, 3, 1]):
        assert_same_bits(primitive("reduce", x[order])[0], sums[order])
    spoiled = x.copy()
    spoiled[1] = np.nan
    others = [0, 2, 3]
    assert_same_bits(primitive("reduce", spoiled)[0][others], sums[others])


@pytest.mark.parametrize("dtype", REALS)
def test_every_lane_is_reduced(primitive, dtype):
    lanes = primitive("lanes")[REALS.index(dtype)]
    for lane in range(lanes):
        x = np.full((4, lanes), -1.0, dtype)
        x[:, lane] = [5, 6, 7, 8]
        sums, maximum = primitive("reduce", x)
        assert maximum == 5 and (sums == np.array([5, 6, 7, 8]) - (lanes - 1)).all()
        x[0, :] = -np.inf
        x[0, lane] = -7
        assert primitive("reduce", x)[1] == -7


# ------------------------------------------------------------------------------ limits, for benchmarks


def test_operations_at_most(c_backend, primitive):
    isa = c_backend.kwargs["isa"]
    chains, operations_of_fma = 12, 2
    for kind, lanes in zip(("float32", "float64"), primitive("lanes"), strict=True):
        assert _c.limit_operations(isa, kind, 1000) == operations_of_fma * chains * lanes * 1000
    assert (_c.limit_operations(isa, "amx", 10) > 0) == (isa == "amx")


@pytest.mark.parametrize("count", [0, 15, 63, 64, 6417])
def test_a_buffer_is_read_once(c_backend, count):
    """Whole cache lines of four streams; what is behind the end is not touched."""
    x = np.ones(count, np.float32)
    assert _c.limit_read(c_backend.kwargs["isa"], x) == 4 * (count // 64 * 64)
