"""Corners of options in which a kernel or a check once went wrong, or easily could."""

from __future__ import annotations

import numpy as np
import pytest
from calls import assert_same_bits, dense, normal, run
from oracle import assert_matches

import pyflash

F4 = np.float32


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("size", "scale"), [(1e38, 1e-38), (1e-37, 1e37)])
def test_scales_come_before_the_product(backend, family, dtype, size, scale):
    """q . stored would overflow, or lose its digits, where q . (stored * scale) does not."""
    call = dense(900, seqlen_q=3, seqlen_kv=70, num_heads=4, num_kv_heads=2, kv_dtype=dtype)
    k, v = ((x.astype(np.float64) * size / 4).astype(x.dtype) for x in (call.arrays["k"], call.arrays["v"]))
    call = call.of(k=k, v=v).but(k_scale=scale * 4, v_scale=scale * 4, family=family)
    out, lse = run(call, backend)
    assert_matches(out, lse, call)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_alibi_at_positions_beyond_the_mantissa(backend, dtype):
    """Distances are rounded there, but not differently for who shares a panel."""
    seqlen_q, offset = 64, 2**24 + 1
    lo = np.arange(seqlen_q) + 1
    call = dense(901, batch=1, seqlen_q=seqlen_q, seqlen_kv=300, num_heads=1, head_dim=16, dtype=dtype)
    call = call.but(alibi_slopes=np.array([1e-7], F4), family="prefill")
    whole = run(call.but(q_offset=offset, spans=(lo, 300)), backend)
    for first in (1, 23, 63):
        rows = call.of(q=call.arrays["q"][:, first:]).but(q_offset=offset + first, spans=(lo[first:], 300))
        got = run(rows, backend)
        assert_same_bits(got, (whole[0][:, first:], whole[1][..., first:]), f"rows from {first}")


@pytest.mark.parametrize("place", [0, 5, 19])
def test_statistics_show_a_visible_nan(backend, place):
    q, k = normal(902, (1, 1, 1, 8)), normal(903, (1, 20, 1, 8))
    k[0, place] = np.nan
    _, lse = pyflash.flash_attention(q, k, k, return_lse=True, **backend.kwargs)
    found = pyflash.attention_stats(q, k, lse, **backend.kwargs)
    assert np.isnan(found.max_logit).all() and np.isnan(found.entropy).all()
    assert np.isnan(found.top_k_values[..., 0]).all()


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("softcap", [1e-310, 1e-39, 1e-20, 1e20, 1e39])
def test_any_positive_softcap(backend, family, dtype, softcap):
    call = dense(904, seqlen_q=5, seqlen_kv=9, dtype=dtype, softcap=softcap, family=family)
    call.arrays["q"][0] = 0  # scores of 0, which an infinite factor would make NaN
    assert_matches(*run(call, backend), call, factor=3.0)


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("slope", [1e39, 1e300])
def test_slopes_too_steep_for_the_type(backend, family, slope):
    """Each row sees the nearest key and no other."""
    call = dense(905, batch=1, seqlen_q=5, seqlen_kv=9, num_heads=1)
    out, _ = run(call.but(alibi_slopes=np.array([slope]), family=family), backend)
    np.testing.assert_array_equal(out, call.arrays["v"][:, 4:])


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
def test_cascade_shifts_the_widest_spans(any_isa, index_dtype):
    lowest, highest = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    q, shared, own = normal(906, (1, 2, 1, 8)), normal(907, (10, 1, 8)), normal(908, (1, 4, 1, 8))
    full = np.concatenate([shared[None], own], axis=1)
    ends = (np.full(2, lowest, index_dtype), np.full(2, highest, index_dtype))
    got = pyflash.cascade_attention(q, shared, shared, own, own, spans=ends, **any_isa.kwargs)
    want = pyflash.flash_attention(q, full, full, spans=ends, **any_isa.kwargs)
    np.testing.assert_allclose(got, want, atol=2e-6)


def int8_append(any_isa, **more):
    k_cache, v_cache = np.zeros((2, 1, 4, 1, 4), np.int8)
    x = np.ones((1, 1, 1, 4), F4)
    given = {"seq_lens": np.array([0]), "k_scale": 0.1, "v_scale": 0.1, **more}
    with any_isa.chosen() as name:
        pyflash.append_kv(given.pop("k", x), x, k_cache, v_cache, backend=name, **given)
    return k_cache


@pytest.mark.parametrize("table", ["cos", "sin"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_rotation_that_integers_cannot_hold(any_isa, table, value):
    tables = {"cos": np.ones((8, 2)), "sin": np.zeros((8, 2))}
    tables[table][0, 1] = value
    message = f"^{table}: found NaN or Inf, expected finite numbers for a cache of int8 with a fixed scale$"
    with pytest.raises(pyflash.InvalidArgument, match=message):
        int8_append(any_isa, **tables)
    tables[table][0, 1] = 0.5
    tables[table][5] = value  # of a position that no token has
    assert int8_append(any_isa, **tables)[0, 0].any()


@pytest.mark.parametrize("scale", [1e-46, np.array([1e-46])])
def test_a_scale_that_float32_makes_zero(any_isa, scale):
    with pytest.raises(pyflash.InvalidArgument, match=r"^k_scale: found 0 as a float32, expected a scale"):
        int8_append(any_isa, k_scale=scale)


def test_tokens_that_are_skipped_may_hold_nan(any_isa):
    k = np.ones((2, 1, 4), F4)
    k[0] = np.nan
    k_cache, v_cache = np.zeros((2, 1, 4, 1, 4), np.int8)
    with any_isa.chosen() as name:
        slots = np.array([-1, 2])
        pyflash.append_kv(k, k, k_cache, v_cache, slots=slots, k_scale=0.1, v_scale=0.1, backend=name)
    assert (k_cache[0, 2] == 10).all() and not k_cache[0, [0, 1, 3]].any()


def test_a_workspace_costs_no_second_look_at_a_mask(c_backend):
    """Its size is compared where the plan is made anyway; a user's function would tell."""
    import ctypes

    calls = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 4)
    seen = kind(lambda *where: calls.append(where) or 1)
    q, k = normal(909, (3, 1, 8)), normal(910, (20, 1, 8))
    pyflash.flash_attention(q, k, k, mask_mod=seen, num_threads=1, **c_backend.kwargs)
    once, workspace = len(calls), np.empty(1 << 20, np.uint8)
    pyflash.flash_attention(q, k, k, mask_mod=seen, num_threads=1, workspace=workspace, **c_backend.kwargs)
    assert len(calls) == 2 * once


def test_functions_that_are_none(c_backend):
    class Bogus:
        address = -5

    q = np.ones((1, 2, 1, 4), F4)
    with pytest.raises(
        pyflash.InvalidArgument, match=r"^score_mod: found address -5, expected the address of"
    ):
        pyflash.flash_attention(q, q, q, score_mod=Bogus(), **c_backend.kwargs)
    cffi = pytest.importorskip("cffi")
    ffi = cffi.FFI()
    variadic = ffi.cast("double (*)(double, int64_t, int64_t, int64_t, int64_t, ...)", 64)
    with pytest.raises(pyflash.InvalidArgument, match=r"^score_mod: found .*, expected a C function"):
        pyflash.flash_attention(q, q, q, score_mod=variadic, **c_backend.kwargs)
