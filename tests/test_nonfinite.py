"""NaN and Inf: what a row may not see never reaches it, what it sees is never hidden."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import (
    DTYPE_NAMES,
    assert_same_bits,
    assert_same_rows,
    dense,
    once,
    paged,
    paged_varlen,
    quantised,
    run,
    varlen,
)
from oracle import Call, assert_matches, sequences
from oracle_terms import seen_by
from terms import TERMS, poisoned_where_unseen, rubbish, with_terms

BAD = [np.nan, np.inf, -np.inf]

SEQLEN = 75


@once
def causal_call(dtype: str = "float32") -> Call:
    return dense(
        91,
        seqlen_q=SEQLEN,
        seqlen_kv=SEQLEN,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        dtype=dtype,
        causal=True,
    )


@once
def spoiled(name: str, token: int, value: float, dtype: str = "float32", window: Any = None) -> Call:
    """The causal call with a non-finite number in one token of k or v of sequence 0."""
    call = causal_call(dtype).but(window=window)
    array = call.arrays[name].copy()
    array[0, token, :, 1:3] = value
    return call.of(**{name: array})


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_the_causal_future_stays_unseen(backend, dtype, name, value, family):
    clean = run(causal_call(dtype), backend, family=family)
    for token in (1, 30, SEQLEN - 1):
        call = spoiled(name, token, value, dtype)
        out, lse = run(call, backend, family=family)
        assert_same_rows(backend, out[0, :token], clean[0][0, :token], f"rows before token {token}")
        assert_same_rows(backend, lse[0, :, :token], clean[1][0, :, :token], f"lse before token {token}")
        assert_same_rows(backend, out[1], clean[0][1], "the other sequence")
        assert_matches(out, lse, call)


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", ["k", "v"])
def test_keys_outside_a_window_stay_unseen(backend, name, value, family):
    clean = run(causal_call(), backend, window=(4, 0), family=family)
    for token in (0, 20, 63, 64):
        call = spoiled(name, token, value, window=(4, 0))
        out, lse = run(call, backend, family=family)
        others = [i for i in range(SEQLEN) if not token <= i <= token + 4]
        assert_same_rows(backend, out[:, others], clean[0][:, others], f"rows without token {token}")
        assert_same_rows(backend, lse[..., others], clean[1][..., others], f"lse without token {token}")
        assert_matches(out, lse, call)


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("value", [*BAD, 3e38])
@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_what_lies_behind_the_length_stays_unseen(backend, seqlen_q, value, family):
    lens = np.array([13, 0, 64])
    call = dense(92, batch=3, seqlen_q=seqlen_q, seqlen_kv=70, num_heads=2, seq_lens=lens)
    want = run(call, backend, family=family)
    arrays = {name: call.arrays[name].copy() for name in ("k", "v")}
    for b, n in enumerate(lens):
        arrays["k"][b, n:] = arrays["v"][b, n:] = value
    assert_same_bits(run(call.of(**arrays), backend, family=family), want)


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("value", BAD)
def test_neighbours_in_a_pack_stay_unseen(backend, value, family):
    call = varlen([3, 2, 40], [9, 17, 40], seed=93, num_heads=2, causal=True)
    out, lse = run(call, backend, family=family)
    arrays = {name: call.arrays[name].copy() for name in ("k", "v")}
    arrays["k"][9:26] = arrays["v"][9:26] = value
    got_out, got_lse = run(call.of(**arrays), backend, family=family)
    others = [*range(3), *range(5, 45)]
    assert_same_bits((got_out[others], got_lse[:, others]), (out[others], lse[:, others]))
    assert not np.isfinite(got_out[3:5]).any()


#: Types and lengths: one key and many, one tile and several, one split and several.
SHAPES = [("float32", *lengths) for lengths in ((1, 1), (1, 70), (1, 700), (30, 70), (30, 300))]
SHAPES += [(dtype, *lengths) for dtype in ("float16", "float64") for lengths in ((1, 70), (30, 300))]


@once
def visibly_bad(dtype: str, seqlen_q: int, seqlen_kv: int, name: str, value: float, where: float) -> Call:
    call = dense(94, batch=1, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, num_heads=2, dtype=dtype)
    array = call.arrays[name]
    array[0, int(where * (array.shape[1] - 1)), 1, 2] = value
    return call


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_visible_bad_numbers_are_not_hidden(backend, shape, name, value):
    for where in (0, 0.5, 1):
        call = visibly_bad(*shape, name, value, where)
        assert_matches(*run(call, backend), call)
        assert_matches(*run(call, backend, num_splits=3), call)


@pytest.mark.parametrize("payload", [1, 0x200001, 0x3FFFFF])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_nan_with_a_payload_is_nan(backend, seqlen_q, name, payload):
    call = dense(95, batch=1, seqlen_q=seqlen_q, seqlen_kv=60, num_heads=1)
    array = call.arrays[name].copy()
    array.view(np.uint32)[0, -1, 0, 0] = 0x7FC00000 | payload
    call = call.of(**{name: array})
    out, lse = run(call, backend)
    assert_matches(out, lse, call)
    array.view(np.uint32)[0, -1, 0, 0] |= 0x80000000  # NaN all the same
    assert_matches(*run(call, backend), call)


@pytest.mark.parametrize("family", ["prefill", "decode"])
def test_a_score_of_minus_infinity_has_no_weight(backend, family):
    call = dense(96, batch=1, seqlen_q=9, seqlen_kv=70, num_heads=1, family=family)
    call.arrays["q"][..., 0] = 1
    for tokens in ([5], [0, 1, 2], [69], [*range(64)]):
        keys = call.arrays["k"].copy()
        keys[0, tokens, 0, 0] = -np.inf
        bad = call.of(k=keys)
        out, lse = run(bad, backend)
        assert_matches(out, lse, bad)
        assert np.isfinite(out).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nothing_but_scores_of_minus_infinity(backend, dtype, family):
    """Unlike a row without keys it is no mean of anything: not 0 but NaN; the sum of its weights is 0."""
    call = dense(99, batch=1, seqlen_q=9, seqlen_kv=70, num_heads=1, dtype=dtype, causal=True, family=family)
    call.arrays["q"][..., 0] = 1
    call.arrays["k"][..., 0] = -np.inf
    for more in ({}, dict(num_splits=3)):
        out, lse = run(call, backend, **more)
        assert_matches(out, lse, call)
        assert np.isnan(out).all() and np.isneginf(lse).all()


@pytest.mark.parametrize("family", ["prefill", "decode"])
def test_an_infinite_value_gives_infinity_or_nan_in_its_column_only(backend, family):
    call = dense(97, batch=1, seqlen_q=9, seqlen_kv=70, num_heads=1, family=family)
    values = call.arrays["v"].copy()
    values[0, 33, 0, 3] = np.inf
    bad = call.of(v=values)
    out, lse = run(bad, backend)
    assert_matches(out, lse, bad)
    assert not np.isfinite(out[..., 3]).any() and np.isfinite(np.delete(out, 3, axis=-1)).all()


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_poisoned_pages(backend, dtype):
    """NaN in every unused place of a pool, in whole unused pages and behind every length."""
    one = dense(
        98, batch=4, seqlen_q=2, seqlen_kv=50, dtype=dtype, seq_lens=np.array([50, 0, 17, 16]), causal=True
    )
    for page_size in (1, 16, 33):
        poisoned = paged(one, page_size, fill=np.nan, spare_pages=5)
        assert_same_bits(run(poisoned, backend), run(one, backend), f"page size {page_size}")


# --- with every option ---

#: name -> how keys and values are stored: type and form of the scale
STORED = {
    "float32": None,
    "bfloat16": ("bfloat16", None),
    "float8_e5m2 with scales of tokens": ("float8_e5m2", "tokens"),
    "int8 with scales of tokens": ("int8", "tokens"),
    "int4 with scales of heads": ("int4", "heads"),
}


@once
def with_option(name: str, stored: str = "float32", seqlen_q: int = 21) -> Call:
    call = dense(121, batch=2, seqlen_q=seqlen_q, seqlen_kv=140, num_heads=4, num_kv_heads=2)
    call = with_terms(call.but(seq_lens=np.array([140, 75])), name)
    return call if STORED[stored] is None else quantised(call, *STORED[stored])


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("name", TERMS)
def test_what_no_row_sees_leaves_no_trace(backend, name, family):
    """Hidden by whatever option, past the length, in a hidden page or an unused part of one."""
    call = with_option(name)
    want = run(call, backend, family=family)
    for value in BAD:
        assert_same_rows(
            backend, run(poisoned_where_unseen(call, value), backend, family=family), want, f"{value}"
        )
    pages = paged(poisoned_where_unseen(call), 13)
    assert_same_rows(backend, run(pages, backend, family=family), want, "paged")


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["none", "mask of keys", "sink tokens", "many"])
@pytest.mark.parametrize("stored", STORED)
def test_what_no_row_sees_leaves_no_trace_in_any_type(backend, stored, name, family):
    for seqlen_q in (1, 21):
        call = with_option(name, stored, seqlen_q)
        want = run(call, backend, family=family)
        poisoned = poisoned_where_unseen(call)
        assert_same_rows(backend, run(poisoned, backend, family=family), want)
        assert_same_rows(backend, run(paged(poisoned, 16), backend, family=family), want, "paged")
        assert_same_rows(
            backend, run(paged(poisoned, 7, cache_layout="hnd"), backend, family=family), want, "hnd"
        )


@pytest.mark.parametrize("name", TERMS)
def test_packed_neighbours_with_every_option(backend, name):
    """Pages of a pack whose unused places, and hidden sequences, hold NaN."""
    call = with_terms(varlen([3, 9, 30], [17, 9, 40], seed=122, num_heads=2, causal=True), name)
    out, lse = run(call, backend)
    assert_same_bits(run(paged_varlen(call, 8), backend), (out, lse), "paged")
    arrays = {part: call.arrays[part].copy() for part in "kv"}
    arrays["k"][17:26] = arrays["v"][17:26] = np.nan
    got_out, got_lse = run(call.of(**arrays), backend)
    others = [*range(3), *range(12, 42)]
    assert_same_bits((got_out[others], got_lse[:, others]), (out[others], lse[:, others]))


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("part", ["k", "v"])
@pytest.mark.parametrize("name", TERMS)
def test_a_bad_token_reaches_the_rows_that_see_it_and_no_other(backend, name, part, family):
    call = with_option(name)
    clean_out, clean_lse = run(call, backend, family=family)
    for token, value in ((2, np.nan), (70, np.inf), (133, np.nan)):
        bad = _with_token(call, part, token, value)
        out, lse = run(bad, backend, family=family)
        assert_matches(out, lse, bad)
        for b, sequence in enumerate(sequences(call)):
            blind = np.ones((4, 21), bool)
            if token < len(sequence.k):
                blind = ~seen_by(sequence, call)[:, :, token]
            assert_same_rows(
                backend, out[b].swapaxes(0, 1)[blind], clean_out[b].swapaxes(0, 1)[blind], f"{token}"
            )
            assert_same_rows(backend, lse[b][blind], clean_lse[b][blind], f"lse {token}")


@once
def _with_token(call: Call, part: str, token: int, value: float) -> Call:
    array = call.arrays[part].copy()
    array[:, token] = value
    return call.of(**{part: array})


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("stored", ["bfloat16", "float8_e5m2 with scales of tokens"])
@pytest.mark.parametrize("part", ["k", "v"])
def test_a_bad_stored_token_shows(backend, part, stored, family):
    call = with_option("many", stored)
    bad = _with_token(call, part, 50, rubbish(call.arrays[part].dtype))
    assert_matches(*run(bad, backend, family=family), bad)
