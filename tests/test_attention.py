"""Dense attention against the oracle: types, head counts, widths, lengths, scales, output types."""

from __future__ import annotations

import numpy as np
import pytest
from calls import DTYPE_NAMES, TYPE_PAIRS, assert_same_bits, dense, normal, once, poisoned, run
from oracle import Call, assert_matches

import pyflash

#: name -> shape and options of `calls.dense`
SHAPES = {
    "one key": dict(batch=1, seqlen_q=1, seqlen_kv=1, num_heads=1, head_dim=1),
    "one query, a group of 4": dict(seqlen_q=1, seqlen_kv=70, num_heads=8, num_kv_heads=2, head_dim=16),
    "one query, MQA": dict(seqlen_q=1, seqlen_kv=33, num_heads=7, num_kv_heads=1, head_dim=64),
    "one query, MHA": dict(seqlen_q=1, seqlen_kv=65, num_heads=3, head_dim=24),
    "three queries, causal": dict(seqlen_q=3, seqlen_kv=40, num_heads=4, num_kv_heads=2, causal=True),
    "square": dict(seqlen_q=24, seqlen_kv=24, num_heads=3, head_dim=32),
    "square, causal": dict(seqlen_q=49, seqlen_kv=49, num_heads=2, head_dim=16, causal=True),
    "more keys than a tile": dict(batch=1, seqlen_q=31, seqlen_kv=413, num_heads=2, num_kv_heads=1),
    "more keys than a tile, causal": dict(batch=1, seqlen_q=70, seqlen_kv=270, num_heads=1, causal=True),
    "more queries than keys, causal": dict(seqlen_q=67, seqlen_kv=20, num_heads=2, causal=True),
    "more keys than a split": dict(batch=1, seqlen_q=1, seqlen_kv=1100, num_heads=4, num_kv_heads=2),
    "top left": dict(seqlen_q=9, seqlen_kv=14, causal="top_left"),
    "one wide head": dict(batch=1, seqlen_q=5, seqlen_kv=9, num_heads=1, head_dim=300),
}

WIDTHS = [
    (1, 1),
    (2, 3),
    (3, 2),
    (7, 7),
    (8, 16),
    (17, 9),
    (31, 33),
    (64, 64),
    (80, 80),
    (96, 128),
    (192, 128),
    (256, 7),
]


@once
def call_of(name: str, dtype: str = "float32", kv_dtype: str | None = None) -> Call:
    return dense(len(name), dtype=dtype, kv_dtype=kv_dtype, **SHAPES[name])


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_types(backend, name, dtype):
    call = call_of(name, dtype)
    assert_matches(*run(call, backend), call)


@pytest.mark.parametrize("pair", [pair for pair in TYPE_PAIRS if pair[0] != pair[1]], ids="-".join)
@pytest.mark.parametrize("name", ["one query, a group of 4", "square, causal"])
def test_keys_of_another_type(backend, name, pair):
    call = call_of(name, *pair)
    assert_matches(*run(call, backend), call)


@once
def call_of_width(head_dim: int, head_dim_v: int, seqlen_q: int, dtype: str) -> Call:
    return dense(
        head_dim,
        batch=1,
        seqlen_q=seqlen_q,
        seqlen_kv=37,
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seqlen_q", [1, 13])
@pytest.mark.parametrize("widths", WIDTHS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_widths(backend, widths, seqlen_q, dtype):
    call = call_of_width(*widths, seqlen_q, dtype)
    assert_matches(*run(call, backend), call)


@once
def call_of_lengths(seqlen_q: int, causal: bool) -> Call:
    return dense(
        seqlen_q,
        batch=1,
        seqlen_q=seqlen_q,
        seqlen_kv=35,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        causal=causal,
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("seqlen_q", [1, 2, 4, 7, 8, 15, 16, 17, 23, 25, 33, 40, 48, 50])
def test_query_counts_in_both_families(backend, seqlen_q, family, causal):
    call = call_of_lengths(seqlen_q, causal).but(family=family)
    assert_matches(*run(call, backend), call)


@once
def call_of_keys(seqlen_kv: int, seqlen_q: int) -> Call:
    return dense(
        seqlen_kv, batch=1, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, num_heads=2, head_dim=4, causal=True
    )


@pytest.mark.parametrize("seqlen_q", [1, 26])
@pytest.mark.parametrize(
    "seqlen_kv",
    [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 257, 385, 513],
)
def test_key_counts(backend, seqlen_kv, seqlen_q):
    call = call_of_keys(seqlen_kv, seqlen_q)
    assert_matches(*run(call, backend), call)


@once
def call_of_scale(scale: float, seqlen_q: int) -> Call:
    return dense(3, seqlen_q=seqlen_q, seqlen_kv=40, head_dim=16, scale=scale)


@pytest.mark.parametrize("seqlen_q", [1, 20])
@pytest.mark.parametrize("scale", [0, 0.0, -0.5, 1, 1e-30, 3.0, np.float32(0.125), np.int64(2)], ids=repr)
def test_scales(backend, scale, seqlen_q):
    call = call_of_scale(scale, seqlen_q)
    out, lse = run(call, backend)
    assert_matches(out, lse, call)
    if scale == 0:
        assert_same_bits(lse, np.full(lse.shape, np.log(np.float32(40)), np.float32), "lse of equal scores")


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("scale", [0.0, -0.0, -1.0, -1e-35, 1e-31, 1e25])
def test_scales_beside_masks(backend, scale, family):
    """A masked score is -inf, which no scale may turn into NaN or into the largest score."""
    call = dense(
        3, seqlen_q=30, seqlen_kv=90, head_dim=4, causal=True, window=(40, 0), q_offset=-3, amplitude=1e-3
    )
    if abs(scale) > 1:
        call.arrays["k"][...] *= np.float32(1 / scale)
    call = call.but(scale=scale, family=family)
    assert_matches(*run(call, backend), call)
    assert_matches(*run(call, backend, num_splits=3), call)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_default_scale_is_one_over_root_head_dim(backend, dtype):
    call = dense(4, dtype=dtype, head_dim=24)
    assert_same_bits(run(call, backend, scale=1 / 24**0.5), run(call, backend))


#: name -> (seqlen_q, q, k): scores far from 0, equal or far apart, whose weights are easy to say
EXTREME_SCORES = {
    "all +3000": (1, [1000.0], [3.0] * 9),
    "all -3000": (1, [1000.0], [-3.0] * 9),
    "rising": (1, [1000.0], [i / 8 for i in range(50)]),
    "falling": (30, [1000.0], [-i / 8 for i in range(50)]),
    "one far above": (1, [100.0], [0.0] * 40 + [5.0] + [0.0] * 300),
    "one far below": (30, [100.0], [0.0] * 40 + [-5.0] + [0.0] * 300),
    "each tile far above the last": (30, [8.0], [float(i // 64) * 32 for i in range(400)]),
    "each tile far below the last": (1, [8.0], [float(-(i // 64)) * 32 for i in range(400)]),
    "beyond float16": (1, [300.0], [250.0, 249.9375, 0.0]),
}


@once
def call_of_extremes(name: str, dtype: str) -> Call:
    seqlen_q, q, k = EXTREME_SCORES[name]
    call = dense(
        5, batch=1, seqlen_q=seqlen_q, seqlen_kv=len(k), num_heads=1, head_dim=4, dtype=dtype, scale=1.0
    )
    call.arrays["q"][...] = np.array([*q, 0, 0, 0])
    call.arrays["k"][...] = 0
    call.arrays["k"][0, :, 0, 0] = k
    return call


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", EXTREME_SCORES)
def test_extreme_scores(backend, name, dtype):
    call = call_of_extremes(name, dtype)
    assert_matches(*run(call, backend), call)


@pytest.mark.parametrize("amplitude", [1e-20, 5.0, 40.0])
@pytest.mark.parametrize("seqlen_q", [1, 40])
def test_amplitudes(backend, amplitude, seqlen_q):
    call = dense(
        6, seqlen_q=seqlen_q, seqlen_kv=300, num_heads=2, head_dim=8, amplitude=amplitude, causal=True
    )
    assert_matches(*run(call, backend), call)


@pytest.mark.parametrize("magnitude", [1e-38, 1e-44, 1e36])
@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_values_at_the_ends_of_float32(backend, magnitude, seqlen_q):
    call = dense(7, seqlen_q=seqlen_q, seqlen_kv=300)
    call.arrays["v"][...] = np.sign(call.arrays["v"]) * np.float32(magnitude)
    out, lse = run(call, backend)
    assert_matches(out, lse, call)


@pytest.mark.parametrize("out_dtype", DTYPE_NAMES)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_out_dtype(backend, dtype, out_dtype, seqlen_q):
    call = dense(8, seqlen_q=seqlen_q, seqlen_kv=50, dtype=dtype, out_dtype=out_dtype)
    out, lse = run(call, backend)
    assert_matches(out, lse, call)
    assert_same_bits(lse, run(dense(8, seqlen_q=seqlen_q, seqlen_kv=50, dtype=dtype), backend)[1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_half_types_are_computed_in_float32(backend, dtype, seqlen_q):
    call = dense(9, seqlen_q=seqlen_q, seqlen_kv=300, head_dim=64, dtype=dtype, causal=True)
    result = run(call, backend, out_dtype="float32")
    # A matrix unit multiplies weights in the type of q: there the rule of that type is all that is promised.
    on_matrix_unit = dtype == "bfloat16" and seqlen_q == 30 and backend.kwargs.get("isa") == "amx"
    if on_matrix_unit or backend.name == "cuda":
        call = call.but(out_dtype="float32")
    else:
        widened = {n: x.astype(np.float32) for n, x in call.arrays.items()}
        call = Call("flash_attention", widened, call.options)
    assert_matches(*result, call)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_output_is_rounded_once_to_nearest_even(backend, dtype, seqlen_q):
    call = dense(10, seqlen_q=seqlen_q, seqlen_kv=300, num_heads=4, head_dim=16, dtype=dtype)
    wide, _ = run(call, backend, out_dtype="float32")
    narrow, _ = run(call, backend)
    assert_same_bits(narrow, wide.astype(narrow.dtype))


@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_float16_output_overflows_to_infinity(backend, seqlen_q):
    call = dense(11, seqlen_q=seqlen_q, kv_dtype="float32", dtype="float16")
    call.arrays["v"][...] = 65519.0  # rounds down to the largest float16; 65520 is the tie that rounds up
    call.arrays["v"][..., 0] = -65536.0
    out, _ = run(call, backend)
    assert (out[..., 1:] == 65504).all() and np.isneginf(out[..., 0]).all()


@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_one_visible_key_gives_its_value_exactly(backend, seqlen_q):
    call = dense(
        12, seqlen_q=seqlen_q, seqlen_kv=seqlen_q, causal=True, window=(0, 0), num_heads=4, num_kv_heads=2
    )
    out, lse = run(call, backend)
    assert_same_bits(out, np.repeat(call.arrays["v"], 2, axis=2))
    assert_matches(out, lse, call)


@pytest.mark.parametrize("name", ["one query, a group of 4", "square, causal"])
def test_without_lse_and_without_out(backend, name):
    call = call_of(name)
    out, _ = run(call, backend)
    plain = pyflash.flash_attention(*call.arrays.values(), **call.options, **backend.kwargs)
    assert isinstance(plain, np.ndarray)
    assert_same_bits(plain, out)
    given = poisoned(call)
    assert (
        pyflash.flash_attention(*call.arrays.values(), **call.options, **backend.kwargs, out=given) is given
    )
    assert_same_bits(given, out)


@pytest.mark.parametrize(
    "name", ["one query, a group of 4", "square, causal", "more queries than keys, causal"]
)
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_naive_attention(name, dtype):
    call = call_of(name, dtype)
    out, lse = pyflash.naive_attention(*call.arrays.values(), **call.options, return_lse=True)
    assert_matches(out, lse, call)


@pytest.mark.parametrize("num_splits", [None, 1])
@pytest.mark.parametrize("family", ["prefill", "decode"])
def test_many_keys_do_not_add_up_errors(backend, family, num_splits):
    """With equal scores and values near 1, one running sum over all keys would lose four digits."""
    keys = 60_000 if backend.name != "numpy" else 5_000
    call = dense(13, batch=1, seqlen_q=2, seqlen_kv=keys, num_heads=1, head_dim=2, head_dim_v=2)
    call.arrays["q"][...] = 0
    call.arrays["v"][...] = 1 + normal(14, call.arrays["v"].shape) / 64
    out, lse = run(call, backend, family=family, num_splits=num_splits)
    exact = call.arrays["v"].astype(np.float64).mean(axis=1, keepdims=True)
    assert np.abs(out - exact).max() <= 1e-6
    assert np.abs(lse - np.log(keys)).max() <= 2e-6


@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("seqlen_q", range(1, 61, 3))
def test_sweep_of_lengths(backend, seqlen_q, dtype):
    for seqlen_kv in range(1, 420, 19):
        for causal in (False, True):
            call = dense(
                seqlen_kv,
                batch=1,
                seqlen_q=seqlen_q,
                seqlen_kv=seqlen_kv,
                num_heads=4,
                num_kv_heads=2,
                head_dim=seqlen_kv % 40 + 1,
                head_dim_v=seqlen_kv % 23 + 1,
                dtype=dtype,
                causal=causal,
            )
            assert_matches(*run(call, backend), call)
