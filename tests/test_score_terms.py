"""What is added to scores: softcap, ALiBi, bias, mask, learned sinks, and all of them together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import (
    DTYPE_NAMES,
    assert_same_bits,
    assert_same_rows,
    between_items,
    dense,
    normal,
    once,
    paged,
    paged_varlen,
    quantised,
    run,
    varlen,
)
from oracle import Call, assert_matches, expected
from terms import TERMS, bias_with_holes, holes, sizes_of, with_terms

import pyflash

FAMILIES = ["prefill", "decode"]


# --- every term and combination, everywhere ---


@once
def small(name: str, dtype: str = "float32", seqlen_q: int = 11) -> Call:
    call = dense(301, seqlen_q=seqlen_q, seqlen_kv=71, num_heads=4, num_kv_heads=2, dtype=dtype)
    return with_terms(call, name)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("name", TERMS)
def test_every_term_in_both_families(backend, name, dtype):
    for family in FAMILIES:
        call = small(name, dtype)
        assert_matches(*run(call, backend, family=family), call)


@pytest.mark.parametrize("name", TERMS)
def test_one_query_and_splits(backend, name):
    call = small(name, "float32", 1)
    assert_matches(*run(call, backend), call)
    one_size = [] if backend.name == "cuda" else [dict(tile=16)]  # of the tiles of a kernel
    for more in (dict(num_splits=3), dict(num_splits=1000), *one_size):
        assert_matches(*run(call, backend, **more), call)
        assert_matches(*run(small(name), backend, **more), small(name))


@once
def long_one(name: str, seqlen_q: int) -> Call:
    seqlen_kv = 700 if seqlen_q < 20 else 230
    call = dense(302, batch=1, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, num_heads=2, num_kv_heads=1)
    return with_terms(call, name)


@pytest.mark.parametrize("seqlen_q", [2, 50])
@pytest.mark.parametrize("name", TERMS)
def test_many_tiles(backend, name, seqlen_q):
    call = long_one(name, seqlen_q)
    assert_matches(*run(call, backend), call)


@once
def packed(name: str) -> Call:
    call = varlen([1, 0, 30, 5], [40, 8, 30, 71], seed=303, num_heads=4, num_kv_heads=2)
    return with_terms(call, name)


@pytest.mark.parametrize("name", TERMS)
def test_packed_and_pages_of_packed(backend, name):
    call = packed(name)
    want = run(call, backend)
    assert_matches(*want, call)
    for page_size, cache_layout in ((7, "nhd"), (64, "hnd")):
        assert_same_bits(run(paged_varlen(call, page_size, cache_layout=cache_layout), backend), want)


@once
def with_lengths(name: str, seqlen_q: int) -> Call:
    lens = np.array([71, 8, 30])
    call = dense(304, batch=3, seqlen_q=seqlen_q, seqlen_kv=71, num_heads=4, num_kv_heads=2)
    return with_terms(call.but(seq_lens=lens), name)


@pytest.mark.parametrize("seqlen_q", [1, 9])
@pytest.mark.parametrize("name", TERMS)
def test_lengths_and_pages(backend, name, seqlen_q):
    call = with_lengths(name, seqlen_q)
    want = run(call, backend)
    assert_matches(*want, call)
    for page_size in (1, 16, 100):
        assert_same_bits(run(paged(call, page_size), backend), want, f"page size {page_size}")


@pytest.mark.parametrize("name", TERMS)
def test_layout_bhsd_and_three_axes(backend, name):
    call = small(name)
    want = run(call, backend)
    other = call.of(**{n: np.ascontiguousarray(x.swapaxes(1, 2)) for n, x in call.arrays.items()})
    out, lse = run(other.but(layout="bhsd"), backend)
    assert_same_bits((np.ascontiguousarray(out.swapaxes(1, 2)), lse), want)


@pytest.mark.parametrize(
    "name", [name for name in TERMS if name not in ("none", "softcap", "score_mod", "mask_mod")]
)
def test_options_anywhere_in_memory(backend, name):
    """Arrays that start between the places that their items like, and that are read-only."""

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(moved(part) for part in value)
        if not isinstance(value, np.ndarray):
            return value
        value = between_items(value)
        value.flags.writeable = False
        return value

    call = quantised(small(name), "int8", "tokens")
    other = call.but(**{key: moved(value) for key, value in call.options.items()})
    for family in FAMILIES:
        assert_same_bits(run(other, backend, family=family), run(call, backend, family=family))


# --- softcap ---


@once
def capped(cap: float, amplitude: float, dtype: str) -> Call:
    return dense(
        311, batch=1, seqlen_q=20, seqlen_kv=70, num_heads=4, amplitude=amplitude, dtype=dtype, softcap=cap
    )


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    ("cap", "amplitude"),
    [
        *((cap, amplitude) for cap in (1e-3, 0.7, 50.0, 1e6) for amplitude in (1e-3, 0.3, 1.0)),
        # Scores far beyond the cap: a row would have one weight only if they were not capped.
        *((cap, amplitude) for cap in (1e-3, 0.7, 4.0) for amplitude in (30.0, 1e4, 1e15)),
    ],
)
def test_softcap_of_small_and_huge_scores(backend, cap, amplitude, dtype):
    for family in FAMILIES:
        call = capped(cap, amplitude, dtype)
        assert_matches(*run(call, backend, family=family), call)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_softcap_makes_infinite_scores_finite(backend, value, family):
    """The cap comes before any mask: -inf becomes -softcap, a score like others."""
    call = dense(312, batch=1, seqlen_q=9, seqlen_kv=70, num_heads=1, softcap=2.0, causal=True)
    call.arrays["q"][..., 0] = 1
    call.arrays["k"][0, [3, 64], 0, 0] = value
    out, lse = run(call, backend, family=family)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
    assert_matches(out, lse, call)


@pytest.mark.parametrize("cap", [None, 0, 0.0, np.float32(0)])
def test_no_softcap(backend, cap):
    call = small("none")
    assert_same_bits(run(call.but(softcap=cap), backend), run(call, backend))


# --- ALiBi ---


@once
def with_slopes(options: str, seqlen_q: int, dtype: str = "float32") -> Call:
    call = dense(321, batch=2, seqlen_q=40, seqlen_kv=66, num_heads=4, num_kv_heads=2, dtype=dtype)
    call = call.of(q=call.arrays["q"][:, 40 - seqlen_q :])
    return call.but(alibi_slopes=2.0 ** -np.arange(1, 5).astype("f4"), **ALIGNED[options])


ALIGNED: dict[str, dict[str, Any]] = {
    "causal": dict(causal=True),
    "both ways": {},
    "top left": dict(causal="top_left"),
    "window": dict(window=(9, 5)),
    "offset": dict(q_offset=np.array([3, 200])),
}


@pytest.mark.parametrize("options", ALIGNED)
def test_alibi_is_the_same_in_prefill_and_decode(backend, options):
    """Distances count from the last key, so a token has one answer alone and among others."""
    for family in FAMILIES:
        whole = with_slopes(options, 40)
        assert_matches(*run(whole, backend, family=family), whole)
        for count in (1, 4):
            few = with_slopes(options, count)
            assert_matches(*run(few, backend, family=family), few)
    exact, few = (expected(with_slopes(options, n)).exact[0][0] for n in (40, 4))
    if options in ("causal", "both ways", "window"):
        np.testing.assert_allclose(exact[-4:], few, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("slopes", [0.0, -0.3, 40.0, 1e30], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_slopes_of_any_size_and_type(backend, slopes, dtype):
    for slope_dtype in ("float64", "float32") if slopes == 1e30 else DTYPE_NAMES:
        call = dense(322, batch=1, seqlen_q=3, seqlen_kv=70, num_heads=2, dtype=dtype)
        call = call.but(alibi_slopes=np.full(2, slopes).astype(normal(0, (1,), slope_dtype).dtype))
        assert_matches(*run(call, backend), call)


# --- bias and mask: shapes, types, strides ---

#: Which axes of (batch, num_heads, seqlen_q, seqlen_kv) a term has in full; leading ones may be absent.
SHAPES = ["k", "1", "qk", "q1", "1k", "hqk", "h1k", "1q1", "bhqk", "b11k", "1hq1", "bh11", "b1qk", "1111"]


def shape_of(axes: str, call: Call) -> tuple[int, ...]:
    sizes = dict(zip("bhqk", sizes_of(call), strict=True))
    return tuple(sizes.get(axis, 1) for axis in axes)


@once
def with_shape(axes: str, kind: str, dtype: str = "float32", seqlen_q: int = 9) -> Call:
    call = dense(331, seqlen_q=seqlen_q, seqlen_kv=71, num_heads=4, num_kv_heads=2)
    shape = shape_of(axes, call)
    return call.but(**{kind: holes(shape, 331) if kind == "mask" else bias_with_holes(shape, 331, dtype)})


@pytest.mark.parametrize("kind", ["bias", "mask"])
@pytest.mark.parametrize("axes", SHAPES)
def test_ranks_and_broadcasting(backend, axes, kind):
    for seqlen_q in (1, 9):
        call = with_shape(axes, kind, seqlen_q=seqlen_q)
        want = run(call, backend)
        assert_matches(*want, call)
        full = call.but(**{kind: np.broadcast_to(call.options[kind], sizes_of(call))})
        assert_same_bits(run(full, backend), want, "expanded")
        assert_same_bits(run(call.but(**{kind: full.options[kind].copy()}), backend), want, "copied")


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("kind", ["bias", "mask"])
@pytest.mark.parametrize("place", ["transposed", "backwards", "every second", "read-only"])
def test_strides(backend, kind, place, dtype):
    call = with_shape("bhqk", kind, dtype)
    term = call.options[kind]
    if place == "transposed":
        term = np.ascontiguousarray(term.T).T
    elif place == "backwards":
        term = np.ascontiguousarray(term[..., ::-1, ::-1])[..., ::-1, ::-1]
    elif place == "every second":
        term = np.repeat(term, 2, axis=-1)[..., ::2]
    else:
        term = term.copy()
        term.flags.writeable = False
    assert_same_bits(run(call.but(**{kind: term}), backend), run(call, backend))


@pytest.mark.parametrize("bias_dtype", DTYPE_NAMES)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_bias_of_any_type_beside_any_type(backend, dtype, bias_dtype):
    call = dense(332, seqlen_q=9, seqlen_kv=70, num_heads=2, dtype=dtype)
    call = call.but(bias=bias_with_holes(sizes_of(call), 332, bias_dtype))
    for family in FAMILIES:
        assert_matches(*run(call, backend, family=family), call)


def test_a_mask_of_bytes_other_than_0_and_1(backend):
    call = with_shape("bhqk", "mask")
    mask = call.options["mask"]
    strange = np.where(mask, np.arange(1, 1 + mask.size).reshape(mask.shape) % 255 + 1, 0).astype(np.uint8)
    for family in FAMILIES:
        want = run(call, backend, family=family)
        assert_same_bits(run(call.but(mask=strange.view(bool)), backend, family=family), want)


@pytest.mark.parametrize("kind", ["bias", "mask"])
def test_rows_that_a_term_leaves_without_keys(backend, kind):
    """Holes in the first tile, in the last and in all of them."""
    call = dense(333, batch=1, seqlen_q=70, seqlen_kv=200, num_heads=2, causal=True)
    seen = holes((70, 200), 333, 0.9)
    seen[[0, 13, 69]] = False
    seen[20:24, :130], seen[30:34, 60:] = False, False
    call = call.but(**{kind: seen if kind == "mask" else np.where(seen, 0, -np.inf).astype("f2")})
    for family in FAMILIES:
        out, lse = run(call, backend, family=family)
        assert_matches(out, lse, call)
        assert not out[:, [0, 13, 69]].any() and np.isneginf(lse[..., [0, 13, 69]]).all()


# --- biases at the ends of their types ---

ENDS = {name: normal(0, (1,), name).dtype for name in DTYPE_NAMES}


def lowest(dtype: str) -> float:
    return -float(np.nextafter(ENDS[dtype].type(np.inf), ENDS[dtype].type(0)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bias_dtype", DTYPE_NAMES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_finite_bias_is_a_number(backend, dtype, bias_dtype, family):
    """A row of nothing but the lowest number is the plain mean; beside others such keys have no weight."""
    call = dense(341, batch=1, seqlen_q=5, seqlen_kv=70, num_heads=2, dtype=dtype)
    bias = np.zeros((5, 70), ENDS[bias_dtype])
    bias[1:3], bias[3, 11:60], bias[4, 5] = lowest(bias_dtype), lowest(bias_dtype), -lowest(bias_dtype)
    call = call.but(bias=bias)
    out, lse = run(call, backend, family=family)
    assert np.isfinite(out.astype("f8")).all() and np.isfinite(lse).all()
    values = call.arrays["v"][0].astype("f8")
    if bias_dtype != "float16" and (bias_dtype != "float64" or dtype == "float64"):
        assert_matches(out, lse, call)
    if bias_dtype != "float16":
        rounding = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 2e-2}[dtype]
        np.testing.assert_allclose(out[0, 1].astype("f8"), values.mean(axis=0), atol=rounding)
        np.testing.assert_allclose(out[0, 4].astype("f8"), values[5], atol=rounding)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("base", [-1e38, -1e34, 1e30])
def test_scores_that_a_bias_pushes_past_the_end(backend, base, family):
    """Where the score is finite, score + bias stays finite: all at the end, so a plain mean."""
    call = dense(342, batch=1, seqlen_q=4, seqlen_kv=40, num_heads=1, head_dim=4, scale=1.0)
    call.arrays["q"][...], call.arrays["k"][...] = 0, 0
    call.arrays["q"][..., 0], call.arrays["k"][..., 0] = np.sqrt(abs(base)), base / np.sqrt(abs(base))
    call = call.but(bias=np.full((4, 40), np.finfo("f4").min))
    out, lse = run(call, backend, family=family)
    np.testing.assert_allclose(
        out[0, :, 0], np.tile(call.arrays["v"][0, :, 0].mean(axis=0), (4, 1)), atol=1e-6
    )
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bias_of_minus_infinity_hides_the_key(backend, value, family):
    call = dense(343, batch=1, seqlen_q=9, seqlen_kv=70, num_heads=2)
    bias = bias_with_holes((9, 70), 343)
    bias[:, [0, 5, 66]] = -np.inf
    bias[4, 5] = 0
    clean = run(call.but(bias=bias), backend, family=family)
    for name in ("k", "v"):
        array = call.arrays[name].copy()
        array[0, [0, 5, 66]] = value
        bad = call.of(**{name: array}).but(bias=bias)
        out, lse = run(bad, backend, family=family)
        others = [0, 1, 2, 3, 5, 6, 7, 8]
        assert_same_rows(
            backend, (out[:, others], lse[..., others]), (clean[0][:, others], clean[1][..., others])
        )
        assert_matches(out, lse, bad)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_visible_nan_of_a_bias_shows(backend, value, family):
    call = dense(344, batch=1, seqlen_q=9, seqlen_kv=70, num_heads=2, causal=True)
    bias = normal(344, (9, 70))
    bias[3, 20] = bias[5, 69] = value  # the second one is in the causal future
    call = call.but(bias=bias)
    out, lse = run(call, backend, family=family)
    assert_matches(out, lse, call)
    assert not np.isfinite(out[0, 3]).any() and np.isfinite(np.delete(out, 3, axis=1)).all()


# --- sinks ---


@once
def with_sinks(sinks: tuple[float, ...], dtype: str = "float32", **options: Any) -> Call:
    call = dense(351, batch=2, seqlen_q=4, seqlen_kv=128, num_heads=2, num_kv_heads=1, dtype=dtype)
    return call.but(sinks=np.array(sinks, "f4"), **options)


@pytest.mark.parametrize("includes", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "sinks", [(0.0, 1.0), (100.0, 0.5), (-100.0, 1e4), (-np.inf, 0.0), (np.inf, 2.0), (np.nan, 1.0)], ids=str
)
def test_sinks_of_any_size(backend, sinks, dtype, includes):
    for more in ({}, dict(family="prefill"), dict(num_splits=4), dict(num_splits=7, family="prefill")):
        call = with_sinks(sinks, dtype, lse_includes_sinks=includes)
        assert_matches(*run(call, backend, **more), call)


def test_a_sink_of_infinity_makes_the_row_0(backend):
    out, _ = run(with_sinks((np.inf, 2.0)), backend)
    assert not out[:, :, 0].any() and out[:, :, 1].all()


@pytest.mark.parametrize("sinks_dtype", DTYPE_NAMES)
def test_types_of_sinks(backend, sinks_dtype):
    call = with_sinks((0.5, -2.0))
    assert_same_bits(
        run(call.but(sinks=call.options["sinks"].astype(ENDS[sinks_dtype])), backend), run(call, backend)
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_splits", [None, 2, 8])
def test_sinks_and_rows_without_keys(backend, num_splits, family):
    """Their lse is -inf, or the sink itself where it is asked for."""
    seen = np.zeros((4, 128), bool)
    seen[1:3, 40:44] = True
    how = dict(family=family, num_splits=num_splits)
    for includes in (False, True):
        call = with_sinks((2.0, 100.0)).but(
            mask=seen, seq_lens=np.array([0, 128]), lse_includes_sinks=includes
        )
        out, lse = run(call, backend, **how)
        assert_matches(out, lse, call)
        empty = np.broadcast_to([[2], [100]] if includes else [[-np.inf]], (2, 4))
        assert not out[0].any() and (lse[0] == empty).all() and (lse[1][:, [0, 3]] == empty[:, :2]).all()


def test_sinks_of_nothing_change_nothing(backend):
    call = with_sinks((0.0, 0.0))
    without = Call(call.function, call.arrays, {})
    assert_same_bits(run(call.but(sinks=np.full(2, -np.inf)), backend), run(without, backend))
    assert_same_bits(run(without.but(lse_includes_sinks=True), backend), run(without, backend))


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_but_scores_of_minus_infinity_beside_a_sink(backend, family):
    """Without a sink NaN; a finite one takes all of the sum."""
    call = dense(352, batch=1, seqlen_q=5, seqlen_kv=70, num_heads=2, family=family)
    call.arrays["q"][..., 0] = 1
    call.arrays["k"][..., 0] = -np.inf
    call = call.but(sinks=np.array([1.0, -np.inf]))
    out, lse = run(call, backend)
    assert not out[:, :, 0].any() and np.isnan(out[:, :, 1]).all() and np.isneginf(lse).all()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_sinks_given_to_the_merge(backend, dtype):
    """Parts without sinks, merged with them, are the call with sinks."""
    call = with_sinks((3.0, -1.0), dtype)
    parts = []
    for part in (slice(0, 50), slice(50, 51), slice(51, 128)):
        arrays = {n: x if n == "q" else x[:, part] for n, x in call.arrays.items()}
        parts.append(run(Call(call.function, arrays, {}), backend))
    with backend.chosen() as name:
        got = pyflash.merge_states(
            *(np.stack(x) for x in zip(*parts, strict=True)), sinks=call.options["sinks"], backend=name
        )
    assert_matches(*got, call)


# --- scores in their order ---


def test_the_order_of_the_terms(backend):
    """softcap, then score_mod's place, then ALiBi and bias, neither of which is capped; masks last."""
    call = dense(361, batch=1, seqlen_q=3, seqlen_kv=40, num_heads=1, amplitude=4.0)
    q, k = (call.arrays[name][0, :, 0].astype("f8") for name in "qk")
    bias = normal(361, (3, 40), amplitude=9.0)
    mask = holes((3, 40), 361)
    score = (
        2 * np.tanh(q @ k.T / np.sqrt(8) / 2)
        - 0.5 * np.abs(np.arange(3)[:, None] + 37 - np.arange(40))
        + bias
    )
    score = np.where(mask & (np.arange(40) <= np.arange(3)[:, None] + 37), score, -np.inf)
    weights = np.exp(score - score.max(axis=1, keepdims=True))
    exact = weights / weights.sum(axis=1, keepdims=True) @ call.arrays["v"][0, :, 0].astype("f8")
    options = dict(softcap=2.0, alibi_slopes=np.array([0.5]), bias=bias, mask=mask, causal=True)
    out, _ = run(call.but(**options), backend)
    np.testing.assert_allclose(out[0, :, 0], exact, atol=5e-6)
