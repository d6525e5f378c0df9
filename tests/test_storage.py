"""Keys and values in every stored type, with every form of scale, against their dequantised values."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from calls import (
    DTYPE_NAMES,
    LARGEST,
    SCALE_FORMS,
    STORED_NAMES,
    assert_same_bits,
    assert_same_rows,
    dense,
    explain,
    normal,
    once,
    paged,
    paged_varlen,
    quantised,
    run,
    stored_as,
    varlen,
)
from oracle import Call, assert_matches
from oracle_terms import FLOAT8_VALUES, stored_values

import pyflash

FAMILIES = ["prefill", "decode"]
QUANTISED = ["float8_e4m3fn", "float8_e5m2", "int8", "int4"]
PAIRS = [
    (q, stored) for q in DTYPE_NAMES for stored in STORED_NAMES if (q == "float64") == (stored == "float64")
]


def test_the_oracle_decodes_float8_as_its_types_do():
    for name, values in FLOAT8_VALUES.items():
        theirs = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(np.float64)
        np.testing.assert_array_equal(values, theirs)


@once
def stored(q: str, dtype: str, scales: str | None, seqlen_q: int = 9, **spec: Any) -> Call:
    spec = dict(num_heads=4, num_kv_heads=2, head_dim=12, head_dim_v=10) | spec
    call = dense(601, seqlen_q=seqlen_q, seqlen_kv=71, dtype="float64", causal=True, **spec)
    # Rounded to the types of the call from float64; without a scale, codes have to be small themselves.
    call = quantised(call, dtype, scales)
    return call.of(q=call.arrays["q"].astype(normal(0, (1,), q).dtype))


@pytest.mark.parametrize("scales", SCALE_FORMS)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_type_and_scale(backend, pair, scales):
    for seqlen_q, family in ((1, "decode"), (9, "decode"), (9, "prefill"), (1, "prefill")):
        call = stored(*pair, scales, seqlen_q)
        assert_matches(*run(call, backend, family=family), call)


@once
def many_keys(dtype: str, seqlen_q: int) -> Call:
    call = dense(602, batch=1, seqlen_q=seqlen_q, seqlen_kv=700, num_heads=4, num_kv_heads=1, head_dim=64)
    return quantised(call, dtype, "tokens")


@pytest.mark.parametrize("dtype", STORED_NAMES[1:])
def test_many_tiles_and_splits(backend, dtype):
    for seqlen_q in (1, 20):
        call = many_keys(dtype, seqlen_q)
        assert_matches(*run(call, backend), call)
        assert_matches(*run(call, backend, num_splits=5), call)


@pytest.mark.parametrize("head_dim", [2, 6, 16, 30, 32, 34, 64, 80, 128])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_widths(backend, dtype, head_dim):
    for family in FAMILIES:
        call = stored("float32", dtype, "heads", 3, head_dim=head_dim, head_dim_v=130 - head_dim)
        assert_matches(*run(call, backend, family=family), call)


@pytest.mark.parametrize("head_dim", [1, 7, 33])
@pytest.mark.parametrize("dtype", QUANTISED[:3])
def test_odd_widths(backend, dtype, head_dim):
    for family in FAMILIES:
        call = stored("bfloat16", dtype, "tokens", 3, head_dim=head_dim, head_dim_v=head_dim + 2)
        assert_matches(*run(call, backend, family=family), call)


# --- every code ---


def all_codes(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Every code of a type, in the array that holds them, and its value."""
    if dtype == "int4":
        codes = np.arange(256, dtype=np.uint8)
    else:
        codes = np.arange(256, dtype=np.uint8).view(stored_as(np.zeros(1), dtype).dtype)
    kv_dtype = "int4" if dtype == "int4" else None
    return codes, stored_values(codes, kv_dtype)


def options_of(dtype: str) -> dict[str, Any]:
    return {"kv_dtype": "int4"} if dtype == "int4" else {}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scale", [None, 1.0, 0.37, -2.0])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_every_code_of_a_value(backend, dtype, scale, family):
    """One key has the weight 1: out is the dequantised value, rounded once."""
    codes, values = all_codes(dtype)
    q = np.ones((1, 3, 1, 8), "f4")
    k = stored_as(np.ones((1, 1, 1, 8)), dtype)
    how = dict(v_scale=scale, family=family, **options_of(dtype))
    out = pyflash.flash_attention(q, k, codes.reshape(1, 1, 1, -1), **how, **backend.kwargs)
    exact = values * np.float64(np.float32(1 if scale is None else scale))
    np.testing.assert_array_equal(np.isnan(out[0, :, 0]), np.tile(np.isnan(exact), (3, 1)))
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(out[0, 0, 0, finite], exact[finite].astype("f4"))
    assert not np.isfinite(out[0, 0, 0, ~finite]).any()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scale", [None, 0.37])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_every_code_of_a_key(backend, dtype, scale, family):
    """Queries of one 1: each reads one code, and with one key the lse is its score."""
    codes, values = all_codes(dtype)
    if dtype != "int4":
        codes, values = codes[np.isfinite(values)], values[np.isfinite(values)]
    q = np.eye(len(values), dtype="f4").reshape(1, len(values), 1, -1)
    v = stored_as(np.ones((1, 1, 1, 2)), dtype)
    how = dict(k_scale=scale, family=family, scale=1.0, return_lse=True, **options_of(dtype))
    _, lse = pyflash.flash_attention(q, codes.reshape(1, 1, 1, -1), v, **how, **backend.kwargs)
    exact = values * np.float64(np.float32(1 if scale is None else scale))
    np.testing.assert_allclose(lse[0, 0], exact, rtol=2.5e-7)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_bytes_with_a_name_are_the_type(backend, name):
    for scales in SCALE_FORMS:
        call = stored("float32", name, scales)
        as_bytes = call.of(**{part: call.arrays[part].view(np.uint8) for part in "kv"})
        as_bytes = as_bytes.but(kv_dtype=name.removeprefix("float8_"))
        assert_same_bits(run(as_bytes, backend), run(call, backend))


# --- scales ---


@pytest.mark.parametrize("dtype", ["int8", "float8_e5m2", "float32"])
def test_forms_of_the_same_scale_have_the_same_bits(backend, dtype):
    call = stored("float32", dtype, "number")
    want = run(call, backend)
    for part in ("k_scale", "v_scale"):
        number = call.options[part]
        for same in (
            np.float64(number),
            np.full(2, number, "f4"),
            np.full(2, number, "f8"),
            np.full((2, 71, 2), number, "f4"),
            np.broadcast_to(np.float32(number), (2, 71, 2)),
        ):
            assert_same_bits(run(call.but(**{part: same}), backend), want, f"{part} {np.shape(same)}")


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("scales", ["number", "heads", "tokens"])
def test_one_scale_without_the_other(backend, scales, name):
    call = stored("float32", "int8", scales)
    call = call.but(**{name: None})
    call = call.of(k=call.arrays["k"] // 30) if name == "k_scale" else call
    for family in FAMILIES:
        assert_matches(*run(call, backend, family=family), call)


@pytest.mark.parametrize("scale", [0.0, -0.01, 1e-30, 3.0])
def test_scales_of_any_sign_and_size(backend, scale):
    call = stored("float32", "int8", "number").but(k_scale=scale, v_scale=-scale)
    for family in FAMILIES:
        assert_matches(*run(call, backend, family=family), call)


def test_strided_scales(backend):
    call = stored("float32", "int8", "tokens")
    want = run(call, backend)
    moved = {
        name: np.repeat(np.ascontiguousarray(call.options[name].transpose(2, 0, 1)), 2, axis=2)
        .transpose(1, 2, 0)[:, ::-2][:, ::-1]
        for name in ("k_scale", "v_scale")
    }  # fmt: skip
    assert all((moved[name] == call.options[name]).all() for name in moved)
    assert_same_bits(run(call.but(**moved), backend), want)
    by_head = stored("float32", "int8", "heads")
    backwards = {n: by_head.options[n][::-1].copy()[::-1] for n in ("k_scale", "v_scale")}
    assert_same_bits(run(by_head.but(**backwards), backend), run(by_head, backend))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn"])
def test_a_bad_scale_of_a_token_reaches_only_rows_that_see_it(backend, dtype, name, value):
    call = stored("float32", dtype, "tokens", 40)
    scale = call.options[name].copy()
    scale[0, 45, 1] = value  # rows from 14 on see it
    bad = call.but(**{name: scale})
    for family in FAMILIES:
        clean_out, clean_lse = run(call, backend, family=family)
        out, lse = run(bad, backend, family=family)
        assert_matches(out, lse, bad)
        assert_same_rows(backend, (out[:, :14], lse[..., :14]), (clean_out[:, :14], clean_lse[..., :14]))
        assert_same_rows(backend, out[:, :, :2], clean_out[:, :, :2], "the other kv head")


# --- where they lie ---


@pytest.mark.parametrize("scales", SCALE_FORMS)
@pytest.mark.parametrize("dtype", ["float16", *QUANTISED])
def test_layouts_of_fewer_axes(backend, dtype, scales):
    call = stored("float32", dtype, scales, num_heads=2, num_kv_heads=1).but(family="prefill")
    out, lse = run(call, backend)

    def cut(x: Any, index: Any, axes: int) -> Any:
        return np.ascontiguousarray(x[index]) if np.ndim(x) == axes else x

    options = {n: x for n, x in call.options.items() if x is not None}
    three = Call(
        call.function,
        {n: x[1] for n, x in call.arrays.items()},
        {n: cut(x, 1, 3) for n, x in options.items()},
    )
    assert_same_bits(run(three, backend), (out[1], lse[1]), "three axes")
    swapped = {n: np.ascontiguousarray(x.swapaxes(1, 2)) for n, x in call.arrays.items()}
    swapped_options = {
        n: np.ascontiguousarray(x.swapaxes(1, 2)) if np.ndim(x) == 3 else x for n, x in options.items()
    }
    other = Call(call.function, swapped, {**swapped_options, "layout": "bhsd"})
    got, got_lse = run(other, backend)
    assert_same_bits((np.ascontiguousarray(got.swapaxes(1, 2)), got_lse), (out, lse), "bhsd")
    assert_matches(got, got_lse, other)
    arrays = {n: x[1, :, 0] for n, x in call.arrays.items()}
    two = Call(call.function, arrays, {n: cut(cut(x, 1, 3), (slice(None), 0), 2) for n, x in options.items()})
    assert_same_bits(run(two, backend), (out[1, :, 0], lse[1, 0]), "two axes")


@pytest.mark.parametrize("scales", SCALE_FORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", *QUANTISED])
def test_pages(backend, dtype, scales):
    call = stored("float32", dtype, scales).but(seq_lens=np.array([71, 38]))
    want = run(call, backend)
    assert_matches(*want, call)
    for page_size, cache_layout in ((1, "nhd"), (16, "hnd"), (33, "nhd"), (100, "hnd")):
        one = paged(call, page_size, cache_layout=cache_layout)
        assert_same_bits(run(one, backend), want, f"{page_size} {cache_layout}")
    assert_matches(*run(one, backend), one)


@pytest.mark.parametrize("scales", SCALE_FORMS)
@pytest.mark.parametrize("dtype", ["float16", *QUANTISED])
def test_packed(backend, dtype, scales):
    call = varlen([9, 0, 1, 30], [40, 3, 33, 30], seed=603, num_heads=4, num_kv_heads=2, causal=True)
    call = quantised(call, dtype, scales)
    want = run(call, backend)
    assert_matches(*want, call)
    assert_same_bits(run(paged_varlen(call, 7), backend), want, "paged")


@pytest.mark.parametrize("dtype", QUANTISED)
def test_strides(backend, dtype):
    call = stored("float32", dtype, "heads", num_kv_heads=1)
    want = run(call, backend)
    for name in "kv":
        array = call.arrays[name]
        moved = np.ascontiguousarray(array.transpose(3, 1, 2, 0))[::-1].transpose(3, 1, 2, 0)[..., ::-1]
        assert_same_bits(run(call.of(**{name: moved}), backend), want, name)
    spread = {n: np.broadcast_to(call.arrays[n], (2, 71, 4, call.arrays[n].shape[3])) for n in "kv"}
    options = {n: np.repeat(call.options[n], 4) for n in ("k_scale", "v_scale")}
    for family in FAMILIES:
        one = run(call.of(**spread).but(**options), backend, family=family)
        assert_same_bits(one, run(call, backend, family=family), "broadcast over the heads")


# --- latent caches ---


@once
def latent(dtype: str, q: str, seqlen_q: int, num_heads: int = 16) -> Call:
    """MLA: the values are the first 512 of the 576 numbers of a key."""
    call = dense(
        604,
        batch=2,
        seqlen_q=seqlen_q,
        seqlen_kv=40,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=576,
        dtype="float64",
    )
    call = quantised(call, dtype, "number" if dtype in QUANTISED else None)
    if dtype in QUANTISED:
        call = call.but(v_scale=call.options["k_scale"])
    k, width = call.arrays["k"], 256 if dtype == "int4" else 512
    q_array = call.arrays["q"].astype(normal(0, (1,), q).dtype)
    return call.of(q=q_array, k=k, v=k[..., :width]).but(causal=True, scale=192**-0.5)


LATENT = [("bfloat16", "bfloat16"), ("float32", "float32"), *((dtype, "bfloat16") for dtype in QUANTISED)]


@pytest.mark.parametrize("pair", LATENT, ids="-".join)
def test_a_latent_cache(backend, pair):
    for seqlen_q in (1, 2):
        call = latent(*pair, seqlen_q)
        assert np.shares_memory(call.arrays["k"], call.arrays["v"])
        for family in FAMILIES:
            want = run(call, backend, family=family)
            assert_matches(*want, call)
            copied = call.of(v=call.arrays["v"].copy())
            assert_same_bits(run(copied, backend, family=family), want, "values of their own")


@pytest.mark.parametrize("pair", [p for p in LATENT if p[0] != "float32"], ids="-".join)
def test_values_in_keys_are_fetched_once(c_backend, pair):
    """One tile of converted rows serves both products: values of their own need room for another."""
    call = latent(*pair, 2)
    if "k_scale" in call.options:
        scale = np.full(1, 0.01, np.float32)
        call = call.but(k_scale=scale, v_scale=scale)
    copied = call.of(v=call.arrays["v"].copy())
    room, more = (explain(x, c_backend, family="prefill").workspace_bytes for x in (call, copied))
    if (
        explain(call, c_backend, family="prefill").kernel == "prefill_tile"
    ):  # tiles are packed for each product
        assert more - room > 40 * 512 * 4 / 2
    assert_same_bits(run(call, c_backend, family="prefill"), run(copied, c_backend, family="prefill"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4"])
def test_a_latent_cache_in_pages(backend, dtype):
    call = latent(dtype, "bfloat16", 1, 8).but(seq_lens=np.array([40, 7]))
    one = paged(call, 16)
    width = call.arrays["v"].shape[-1]
    one = one.of(v_cache=one.arrays["k_cache"][..., :width])
    assert_same_bits(run(one, backend.reproducible), run(call, backend.reproducible))


# --- refused ---


@pytest.mark.parametrize("dtype", [*QUANTISED, "float16"])
def test_no_such_type_beside_float64(backend, dtype):
    call = stored("float32", dtype, None)
    call = call.of(q=call.arrays["q"].astype("f8"))
    with pytest.raises(pyflash.InvalidArgument, match=r"^k: .*float64"):
        run(call, backend)


def test_int4_is_of_even_width(any_isa):
    call = stored("float32", "int4", "heads")
    for q in (call.arrays["q"][..., :11], call.arrays["q"][..., :10]):
        with pytest.raises(pyflash.InvalidArgument, match=r"^k: .*head_dim"):
            run(call.of(q=np.ascontiguousarray(q)), any_isa)


def test_largest_numbers():
    """The table that the tests quantise by, against the types' own words."""
    for name in QUANTISED[:2]:
        assert float(ml_dtypes.finfo(name).max) == LARGEST[name]
