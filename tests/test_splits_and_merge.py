"""Keys in parts: `num_splits`, `flash_decoding`, `merge_states` with and without sinks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from calls import DTYPE_NAMES, assert_same_bits, dense, normal, once, paged, run, varlen
from oracle import FLOOR, Call, assert_matches, expected

import pyflash

SPLITS = [1, 2, 3, 4, 7, 16, 70, 71, 200]


@once
def call_of(seqlen_q: int, dtype: str = "float32", seqlen_kv: int = 70, **options) -> Call:
    return dense(
        61,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        num_heads=4,
        num_kv_heads=2,
        dtype=dtype,
        causal=True,
        **options,
    )


@pytest.mark.parametrize("seqlen_q", [1, 30])
@pytest.mark.parametrize("num_splits", SPLITS)
def test_num_splits(backend, num_splits, seqlen_q):
    call = call_of(seqlen_q)
    out, lse = run(call, backend, num_splits=num_splits)
    assert_matches(out, lse, call)
    assert_same_bits(run(call, backend, num_splits=num_splits), (out, lse), "second run")
    decoded = call.named("flash_decoding").but(num_splits=num_splits)
    assert_same_bits(run(decoded, backend), (out, lse), "flash_decoding")


@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_far_more_splits_than_keys(backend, seqlen_q):
    call = call_of(seqlen_q)
    told = pyflash.explain(*call.arrays.values(), num_splits=10**5, **backend.kwargs)
    assert told.num_splits <= 70  # or a billion of them would take hours
    assert_matches(*run(call, backend, num_splits=2**31 - 1), call)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_splits_of_every_type(backend, seqlen_q, dtype):
    call = call_of(seqlen_q, dtype)
    assert_matches(*run(call, backend, num_splits=4), call)


@pytest.mark.parametrize("num_splits", [1, 2, 5, 100])
@pytest.mark.parametrize("window", [(3, 0), (40, 0), None])
def test_splits_without_a_visible_key(backend, window, num_splits):
    for seqlen_q, seqlen_kv in ((1, 90), (20, 90), (30, 9)):
        call = dense(62, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, causal=True, window=window)
        assert_matches(*run(call, backend, num_splits=num_splits), call)


@pytest.mark.parametrize("num_splits", [1, 3, 8])
def test_splits_of_packed_and_paged_sequences(backend, num_splits):
    call = varlen([1, 0, 20, 1], [300, 7, 40, 0], seed=63, num_heads=4, num_kv_heads=2, causal=True)
    assert_matches(*run(call, backend, num_splits=num_splits), call)
    one = dense(64, batch=3, seqlen_q=2, seqlen_kv=90, seq_lens=np.array([90, 0, 13]), causal=True)
    want = run(one, backend, num_splits=num_splits)
    assert_matches(*want, one)
    assert_same_bits(run(paged(one, 7), backend, num_splits=num_splits), want, "paged")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_error_does_not_grow_with_the_number_of_splits(backend, dtype):
    call = dense(65, batch=1, seqlen_q=8, seqlen_kv=256, num_heads=4, head_dim=64, dtype=dtype)
    exact = expected(call).exact[0][0]
    errors = {}
    for num_splits in (1, 2, 4, 8, 16, 64):
        out, _ = run(call, backend, num_splits=num_splits)
        errors[num_splits] = np.abs(out[0].astype(np.float64) - exact).max()
    allowed = 2 * errors[1] + FLOOR[dtype] / 2 * np.abs(exact).max()
    assert max(errors.values()) <= allowed, errors


# ------------------------------------------------------------------ merge_states


def parts_of(call: Call, borders: list[int], backend, **options) -> tuple[np.ndarray, np.ndarray]:
    """States of a call without mask over key ranges, stacked."""
    results = []
    for lo, hi in itertools.pairwise(borders):
        part = call.of(k=call.arrays["k"][:, lo:hi], v=call.arrays["v"][:, lo:hi])
        results.append(run(part, backend, **options))
    return np.stack([out for out, _ in results]), np.stack([lse for _, lse in results])


def merge(parts, backend, **options):
    """Merge and see that the parts have not changed."""
    before = [x.copy() for x in parts]
    with backend.chosen() as name:
        result = pyflash.merge_states(*parts, backend=name, **options)
    for one, other in zip(parts, before, strict=True):
        assert_same_bits(one, other, "parts")
    return result


BORDERS = [
    [0, 50],
    [0, 20, 50],
    [0, 1, 2, 50],
    [0, 10, 20, 30, 50],
    [0, 0, 25, 25, 50, 50],
    list(range(0, 51, 5)),
]


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("borders", BORDERS, ids=str)
def test_parts_merge_to_the_whole(backend, borders, dtype):
    call = dense(66, seqlen_q=6, seqlen_kv=50, num_heads=4, num_kv_heads=2, dtype=dtype)
    wide = "float64" if dtype == "float64" else "float32"
    parts = parts_of(call, borders, backend, out_dtype=wide)
    out, lse = merge(parts, backend, out_dtype=dtype)
    assert_matches(out, lse, call)


def test_parts_of_16_bits(backend):
    call = dense(67, seqlen_q=6, seqlen_kv=50, dtype="float16")
    out, lse = merge(parts_of(call, [0, 13, 50], backend), backend)
    assert_matches(out, lse, call)


@pytest.mark.parametrize("out_dtype", DTYPE_NAMES)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_what_any_call_returns_can_be_merged(backend, dtype, out_dtype):
    call = dense(70, seqlen_q=6, seqlen_kv=50, dtype=dtype, out_dtype=out_dtype)
    out, lse = merge(parts_of(call, [0, 13, 50], backend), backend)
    exact = np.stack([one for one, _ in expected(call).exact])
    largest = expected(call).largest_value
    allowed = 4 * max(FLOOR[dtype], FLOOR[out_dtype]) * largest
    assert np.abs(out.astype("f8") - exact).max() <= allowed
    assert lse.dtype == (np.float64 if dtype == "float64" else np.float32)


def merge_exactly(parts, lse, sinks=None):
    """The merge in float64, for layout bshd with all axes."""
    weight = lse.astype(np.float64).transpose(0, 1, 3, 2)[..., None]
    top = np.where(np.isneginf(weight.max(axis=0)), 0, weight.max(axis=0))
    weight = np.exp(weight - top)
    total = weight.sum(axis=0)
    with np.errstate(divide="ignore"):
        merged_lse = (top + np.log(total))[..., 0].transpose(0, 2, 1)
    if sinks is not None:
        total = total + np.exp(sinks.astype(np.float64)[:, None] - top)
    out = (weight * parts.astype(np.float64)).sum(axis=0) / np.where(total == 0, 1, total)
    return out, merged_lse


@once
def random_parts(num_parts: int, dtype: str):
    parts = normal(num_parts, (num_parts, 2, 5, 3, 4), dtype)
    lse = normal(99, (num_parts, 2, 3, 5), "float64" if dtype == "float64" else "float32", 4.0)
    lse[::3, 0] = -np.inf
    lse[:, 1, 1, 2] = -np.inf
    parts[np.isneginf(lse).transpose(0, 1, 3, 2)] = 0
    return parts, lse


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("num_parts", [1, 2, 3, 5, 8, 17])
def test_merge_of_any_states(backend, num_parts, dtype):
    parts, lse = random_parts(num_parts, dtype)
    sinks = np.array([0.5, -3.0, 20.0], "f4")
    for given in (None, sinks):
        out, merged = merge((parts, lse), backend, sinks=given)
        want_out, want_lse = merge_exactly(parts, lse, given)
        tolerance = 4 * FLOOR[dtype]
        np.testing.assert_allclose(out.astype(np.float64), want_out, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(merged, want_lse, rtol=1e-14 if dtype == "float64" else 1e-6)
        assert not out[1, 2, 1].any() and np.isneginf(merged[1, 1, 2])
        assert out.dtype == parts.dtype and merged.dtype == lse.dtype


def test_merge_tree_is_the_binary_tree_of_indices(backend):
    """Five states at once are ((0, 1), (2, 3)) and then 4, merged in pairs."""
    parts, lse = random_parts(5, "float64")
    pair = [merge((parts[i : i + 2], lse[i : i + 2]), backend) for i in (0, 2)]
    four = merge((np.stack([out for out, _ in pair]), np.stack([x for _, x in pair])), backend)
    want = merge_exactly(parts, lse)
    got = merge((parts, lse), backend)
    by_hand = merge((np.stack([four[0], parts[4]]), np.stack([four[1], lse[4]])), backend)
    for one, other, exact in zip(got, by_hand, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-14, atol=1e-15)
        np.testing.assert_allclose(one, exact, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_an_empty_state_is_neutral(backend, dtype):
    parts, lse = random_parts(2, dtype)
    want = merge((parts, lse), backend)
    empty, nothing = np.zeros_like(parts), np.full_like(lse, -np.inf)
    aligned = merge((np.concatenate([parts, empty]), np.concatenate([lse, nothing])), backend)
    assert_same_bits(aligned, want, "empty states behind")
    aligned = merge((np.concatenate([empty, parts]), np.concatenate([nothing, lse])), backend)
    assert_same_bits(aligned, want, "empty states before")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_merge_of_one_state_is_that_state(backend, dtype):
    parts, lse = random_parts(1, dtype)
    assert_same_bits(merge((parts, lse), backend), (parts[0], lse[0]))


def test_far_apart_states_do_not_overflow(backend):
    parts = normal(68, (3, 1, 2, 1, 4))
    lse = np.array([3e38, -3e38, 1.0, 1000.0, -1000.0, 2.0], "f4").reshape(3, 1, 1, 2)
    out, merged = merge((parts, lse), backend)
    assert_same_bits(out[0, 0], parts[0, 0, 0])
    assert_same_bits(out[0, 1], parts[1, 0, 1])
    assert merged.tolist() == [[[float(np.float32(3e38)), 1000.0]]]


@pytest.mark.parametrize(
    ("sink", "row"),
    [(-np.inf, "unchanged"), (np.inf, "zero"), (np.nan, "nan"), (-1e30, "unchanged"), (1e30, "zero")],
    ids=str,
)
def test_extreme_sinks(backend, sink, row):
    parts, lse = random_parts(4, "float32")
    plain, plain_lse = merge((parts, lse), backend)
    out, merged = merge((parts, lse), backend, sinks=np.array([0.0, sink, 0.0], "f4"))
    assert_same_bits(merged, plain_lse, "lse without the sinks")
    with_keys = np.isfinite(lse).any(axis=0)[:, 1]
    got, base = out[:, :, 1][with_keys], plain[:, :, 1][with_keys]
    if row == "unchanged":
        np.testing.assert_allclose(got, base, rtol=1e-6)
    elif row == "zero":
        assert not got.any()
    else:
        assert np.isnan(got).all()
    if row != "nan":
        assert np.isfinite(out).all()


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_sinks_of_any_float_type(backend, dtype):
    parts, lse = random_parts(3, "float32")
    sinks = normal(69, (3,), dtype)
    out, _ = merge((parts, lse), backend, sinks=sinks)
    np.testing.assert_allclose(out, merge_exactly(parts, lse, sinks)[0], rtol=1e-5, atol=1e-6)


def test_layouts_and_fewer_axes_of_a_merge(backend):
    parts, lse = random_parts(3, "float32")
    want, want_lse = merge((parts, lse), backend)
    out, merged = merge((np.ascontiguousarray(parts.swapaxes(2, 3)), lse), backend, layout="bhsd")
    assert_same_bits((out.swapaxes(1, 2), merged), (want, want_lse), "bhsd")
    assert_same_bits(merge((parts[:, 0], lse[:, 0]), backend), (want[0], want_lse[0]), "4-D")
    assert_same_bits(
        merge((parts[:, 0, :, 1], lse[:, 0, 1]), backend), (want[0, :, 1], want_lse[0, 1]), "3-D"
    )
    swapped = (np.ascontiguousarray(parts[:, 0].swapaxes(1, 2)), lse[:, 0])
    out, merged = merge(swapped, backend, layout="bhsd")
    assert_same_bits((out.swapaxes(0, 1), merged), (want[0], want_lse[0]), "4-D bhsd")


def test_strided_parts(backend):
    parts, lse = random_parts(4, "float32")
    want = merge((parts, lse), backend)
    moved = np.ascontiguousarray(parts.transpose(4, 1, 0, 3, 2)).transpose(2, 1, 4, 3, 0)
    moved_lse = np.repeat(lse, 2, axis=3)[..., ::2][::-1][::-1]
    assert_same_bits(merge((moved, moved_lse), backend), want)


@pytest.mark.parametrize("shape", [(2, 0, 5, 3, 4), (2, 2, 0, 3, 4), (2, 2, 5, 0, 4)], ids=str)
def test_merge_of_nothing(backend, shape):
    lse = np.zeros((shape[0], shape[1], shape[3], shape[2]), "f4")
    out, merged = merge((np.zeros(shape, "f4"), lse), backend)
    assert out.shape == shape[1:] and merged.shape == lse.shape[1:]


def test_nan_of_a_state_stays_visible(backend):
    parts, lse = random_parts(2, "float32")
    lse, parts = lse.copy(), parts.copy()
    lse[:] = 0
    parts[1, 0, 2, 1, 3] = np.nan
    lse[0, 1, 0, 4] = np.nan
    out, merged = merge((parts, lse), backend)
    bad = np.zeros(out.shape, bool)
    bad[0, 2, 1, 3] = bad[1, 4, 0] = True
    assert (np.isnan(out) == bad).all()
    assert np.isnan(merged).sum() == 1 and np.isnan(merged[1, 0, 4])
