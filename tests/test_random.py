"""Random calls over the whole argument space against the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from calls import DTYPE_NAMES, TYPE_PAIRS, assert_same_bits, dense, paged, paged_varlen, run, varlen
from conftest import available
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Call, assert_matches

FEW = settings(max_examples=200, deadline=None, derandomize=True)
MANY = settings(FEW, max_examples=4000, derandomize=False)

#: Lengths around the sizes of vectors, panels, tiles and splits.
LENGTHS = st.one_of(
    st.integers(0, 12),
    st.sampled_from([15, 16, 17, 23, 24, 25, 31, 33, 47, 49, 63, 65, 96, 97, 129, 191, 193, 257]),
)
WIDTHS = st.one_of(st.integers(1, 20), st.sampled_from([24, 31, 32, 33, 48, 64, 65, 80, 128]))


@st.composite
def masks(draw: st.DrawFn, batch: int) -> dict[str, Any]:
    """Causal, window and offset in any combination."""
    options: dict[str, Any] = {"causal": draw(st.sampled_from([False, True, "top_left"]))}
    if draw(st.booleans()):
        side = st.one_of(st.none(), st.integers(-1, 40), st.sampled_from([64, 200, 10**6]))
        options["window"] = (draw(side), draw(side))
    if options["causal"] != "top_left" and draw(st.booleans()):
        offset = st.one_of(st.integers(-20, 80), st.sampled_from([-(10**9), 10**9]))
        if draw(st.booleans()):
            offsets = draw(st.lists(offset, min_size=batch, max_size=batch))
            options["q_offset"] = np.array(offsets, draw(st.sampled_from(["i4", "i8"])))
        else:
            options["q_offset"] = draw(offset)
    return options


@st.composite
def options_of_results(draw: st.DrawFn) -> dict[str, Any]:
    """How the work is cut and what comes out."""
    options: dict[str, Any] = {}
    if draw(st.booleans()):
        options["family"] = draw(st.sampled_from(["prefill", "decode"]))
    if draw(st.integers(0, 3)) == 0:
        options["num_splits"] = draw(st.sampled_from([1, 2, 3, 5, 16, 1000]))
    if draw(st.integers(0, 3)) == 0:
        options["out_dtype"] = draw(st.sampled_from(DTYPE_NAMES))
    if draw(st.integers(0, 3)) == 0:
        options["scale"] = draw(st.sampled_from([0.0, 1.0, -0.3, 0.125, 2.0]))
    return options


def moved(draw: st.DrawFn, array: np.ndarray) -> np.ndarray:
    """An equal array with other strides."""
    order = draw(st.permutations(range(array.ndim)))
    array = np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))
    axis = draw(st.integers(-1, array.ndim - 1))
    if axis < 0 or not array.size:
        return array
    flip = (slice(None),) * axis + (slice(None, None, -1),)
    return np.repeat(array, 2, axis=axis)[(slice(None),) * axis + (slice(None, None, 2),)][flip].copy(
        order="K"
    )[flip]


@st.composite
def attention_calls(draw: st.DrawFn) -> Call:
    """A call to one of the attention functions."""
    num_kv_heads = draw(st.integers(1, 3))
    dtype, kv_dtype = draw(st.sampled_from(TYPE_PAIRS))
    spec: dict[str, Any] = dict(
        seed=draw(st.integers(0, 10**6)),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 1, 2, 3, 4, 7])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(WIDTHS),
        head_dim_v=draw(WIDTHS),
        dtype=dtype,
        kv_dtype=kv_dtype,
        amplitude=draw(st.sampled_from([0.1, 1.0, 1.0, 3.0])),
    )
    batch = draw(st.integers(0, 3))
    kind = draw(st.sampled_from(["dense", "dense", "lengths", "packed", "paged", "paged packed"]))
    options = {**draw(masks(batch)), **draw(options_of_results())}
    if kind in ("packed", "paged packed"):
        lengths = st.lists(LENGTHS, min_size=batch, max_size=batch)
        call = varlen(draw(lengths), draw(lengths), **spec, **options)
    else:
        call = dense(batch=batch, seqlen_q=draw(LENGTHS), seqlen_kv=draw(LENGTHS), **spec, **options)
    if kind in ("lengths", "paged"):
        longest = call.arrays["k"].shape[1]
        lens = draw(st.lists(st.integers(0, longest), min_size=batch, max_size=batch))
        call = call.but(seq_lens=np.array(lens, draw(st.sampled_from(["i4", "i8"]))))
    if kind.startswith("paged") and batch:
        how = dict(
            page_size=draw(st.one_of(st.integers(1, 20), st.sampled_from([64, 300]))),
            cache_layout=draw(st.sampled_from(["nhd", "hnd"])),
            stale=draw(st.sampled_from([-1, 2**31 - 1])),
        )
        call = paged(call, **how) if kind == "paged" else paged_varlen(call, **how)
    if draw(st.integers(0, 2)) == 0:
        call = call.of(**{name: moved(draw, x) for name, x in call.arrays.items() if x.ndim > 1})
    return call


@st.composite
def batches(draw: st.DrawFn) -> Call:
    """A dense call of one family with lengths, whose rows are aligned by explicit offsets."""
    num_kv_heads = draw(st.integers(1, 2))
    dtype, kv_dtype = draw(st.sampled_from(TYPE_PAIRS))
    batch, seqlen_q, seqlen_kv = draw(st.integers(1, 3)), draw(LENGTHS), draw(LENGTHS)
    lens = np.array(draw(st.lists(st.integers(0, seqlen_kv), min_size=batch, max_size=batch)))
    options = draw(masks(batch))
    offset = options.get("q_offset", 0 if options["causal"] == "top_left" else lens - seqlen_q)
    options["q_offset"] = np.broadcast_to(np.asarray(offset, np.int64), (batch,)).copy()
    options["causal"] = bool(options["causal"])
    return dense(
        draw(st.integers(0, 10**6)),
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        num_heads=num_kv_heads * draw(st.integers(1, 5)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(WIDTHS),
        head_dim_v=draw(WIDTHS),
        dtype=dtype,
        kv_dtype=kv_dtype,
        seq_lens=lens,
        family=draw(st.sampled_from(["prefill", "decode"])),
        **options,
    )


def check_bits(data: st.DataObject, call: Call) -> None:
    """Pages, threads, other sequences and other rows leave no trace in the bits of a row."""
    batch, seqlen_q = call.arrays["q"].shape[:2]
    pages = paged(call, data.draw(st.integers(1, 70), label="page_size"))
    b = data.draw(st.integers(0, batch - 1), label="sequence")
    lo = data.draw(st.integers(0, seqlen_q), label="lo")
    hi = data.draw(st.integers(lo, seqlen_q), label="hi")
    num_threads = data.draw(st.integers(2, 9), label="num_threads")
    offsets, lens = call.options["q_offset"], call.options["seq_lens"]
    alone = call.of(**{name: x[b : b + 1] for name, x in call.arrays.items()})
    alone = alone.but(q_offset=offsets[b : b + 1], seq_lens=lens[b : b + 1])
    rows = call.of(q=call.arrays["q"][:, lo:hi]).but(q_offset=offsets + lo)
    for backend in available():
        out, lse = run(call, backend)
        assert_same_bits(run(pages, backend), (out, lse), f"{backend.id}: paged")
        assert_same_bits(run(alone, backend), (out[b : b + 1], lse[b : b + 1]), f"{backend.id}: alone")
        assert_same_bits(run(rows, backend), (out[:, lo:hi], lse[..., lo:hi]), f"{backend.id}: rows")
        if backend.has_threads:
            assert_same_bits(
                run(call, backend, num_threads=num_threads), (out, lse), f"{backend.id}: threads"
            )


def check(call: Call, num_threads: int) -> None:
    """Hold every backend that is available here to one oracle."""
    for backend in available():
        out, lse = run(call, backend, **({"num_threads": num_threads} if backend.has_threads else {}))
        try:
            assert_matches(out, lse, call)
        except AssertionError as error:
            raise AssertionError(f"{backend.id}: {error}") from None


@FEW
@given(call=attention_calls(), num_threads=st.integers(1, 4))
def test_random_calls(call, num_threads):
    check(call, num_threads)


@FEW
@given(data=st.data(), call=batches())
def test_random_calls_keep_their_bits(data, call):
    check_bits(data, call)


@pytest.mark.long
@MANY
@given(data=st.data(), call=batches())
def test_many_random_calls_keep_their_bits(data, call):
    check_bits(data, call)


@pytest.mark.long
@MANY
@given(call=attention_calls(), num_threads=st.integers(1, 8))
def test_many_random_calls(call, num_threads):
    check(call, num_threads)
