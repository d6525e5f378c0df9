"""The builders of spans: each against a predicate of (row, key) that knows no span, alone and in calls."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from calls import assert_same_rows, dense, once, paged_varlen, prefix_sums, run, varlen
from oracle import assert_matches

import pyflash
from pyflash import spans


def chunked(p, j, chunk):
    return p // chunk == j // chunk


def prefix_lm(p, j, prefix_len):
    return (j < prefix_len) | (j <= p)


def left_padding(p, j, num_padding):
    return (j >= num_padding) & (p == p)  # whatever p is, in the shape of both


#: name -> (builder with the parameter first, predicate, values of the parameter)
BUILDERS = {
    "chunked": (lambda c, *lengths, **o: spans.chunked(*lengths, c, **o), chunked, (1, 3, 4, 100)),
    "prefix_lm": (lambda n, *lengths, **o: spans.prefix_lm(*lengths, n, **o), prefix_lm, (0, 1, 5, 100)),
    "left_padding": (spans.left_padding, left_padding, (0, 1, 4, 6)),
}


def seen(span, num_keys):
    """(..., rows, keys): what a span lets each row see."""
    lo, hi = (x[..., None] for x in span)
    key = np.arange(num_keys)
    return (lo <= key) & (key < hi)


def assert_is_span(span, shape, num_keys):
    for end in span:
        assert end.shape == shape and end.dtype == np.int64
        assert (np.diff(end, axis=-1) >= 0).all()
        assert ((end >= 0) & (end <= num_keys)).all()


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("lengths", [(1, 1), (1, 13), (9, 9), (4, 11), (12, 7), (3, 0), (0, 6)])
def test_numbers(name, lengths):
    build, predicate, parameters = BUILDERS[name]
    seqlen_q, seqlen_kv = lengths
    for parameter in parameters:
        if name == "left_padding" and parameter > seqlen_kv:
            continue
        offsets = (None,) if name == "left_padding" else (None, 0, 5, -4, 1000)
        for q_offset in offsets:
            options = {} if q_offset is None else {"q_offset": q_offset}
            span = build(parameter, seqlen_q, seqlen_kv, **options)
            assert_is_span(span, (seqlen_q,), seqlen_kv)
            offset = seqlen_kv - seqlen_q if q_offset is None else q_offset
            p, j = np.arange(seqlen_q)[:, None] + offset, np.arange(seqlen_kv)
            np.testing.assert_array_equal(seen(span, seqlen_kv), predicate(p, j, parameter))


@pytest.mark.parametrize(
    ("name", "arrays"),
    [
        (name, arrays)
        for name, *arrays in itertools.product(BUILDERS, *[(False, True)] * 3)
        if not (name == "left_padding" and arrays[2])  # it has no offset
    ],
)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_arrays(name, dtype, arrays):
    """Each of keys, parameter and offset as a number or as one of each sequence."""
    build, predicate, _ = BUILDERS[name]
    of_keys, of_parameter, of_offset = arrays
    keys = np.array([5, 9, 7], dtype) if of_keys else 7
    parameter = np.array([2, 1, 4], dtype) if of_parameter else 3
    offset = np.array([0, 6, -2], dtype) if of_offset else 1
    options = {} if name == "left_padding" else {"q_offset": offset}
    span = build(parameter, 6, keys, **options)
    shape = (3, 6) if any(arrays) else (6,)
    assert_is_span(span, shape, 9)
    keys, parameter, offset = (np.broadcast_to(x, 3) for x in (keys, parameter, offset))
    whole = np.broadcast_to(seen(span, 9), (3, 6, 9))
    for b in range(3):
        p, j = np.arange(6)[:, None] + offset[b], np.arange(9)
        np.testing.assert_array_equal(whole[b], predicate(p, j, parameter[b]) & (j < keys[b]))


@pytest.mark.parametrize("name", BUILDERS)
def test_packed(name):
    build, predicate, _ = BUILDERS[name]
    lengths, keys, parameter = np.array([3, 0, 5, 1]), np.array([6, 4, 5, 9]), np.array([2, 1, 3, 4])
    span = build(parameter, lengths, keys)
    whole, start = seen(span, 9), prefix_sums(lengths)
    for b, (lo, hi) in enumerate(itertools.pairwise(start)):
        assert_is_span([end[lo:hi] for end in span], (hi - lo,), keys[b])
        p, j = np.arange(hi - lo)[:, None] + keys[b] - lengths[b], np.arange(9)
        np.testing.assert_array_equal(whole[lo:hi], predicate(p, j, parameter[b]) & (j < keys[b]))


def test_positions_at_the_end_of_the_range():
    far = 2**48
    lo, hi = spans.chunked(2, far, far - 1, q_offset=np.array([far - 2, -far]))
    assert lo.tolist() == [[0, far - 1], [0, 0]] and hi.tolist() == [[far - 1, far], [0, 0]]
    assert spans.prefix_lm(1, far, 0)[1].tolist() == [far]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_documents(seed, dtype):
    rng = np.random.default_rng(seed)
    ids_q, ids_kv = (np.sort(rng.integers(-3, 4, (3, n)), axis=1).astype(dtype) for n in (11, 17))
    span = spans.documents(ids_q, ids_kv)
    assert_is_span(span, (3, 11), 17)
    np.testing.assert_array_equal(seen(span, 17), ids_q[:, :, None] == ids_kv[:, None, :])
    for b in range(3):
        one = spans.documents(ids_q[b], ids_kv[b])
        np.testing.assert_array_equal(one, (span[0][b], span[1][b]))


@pytest.mark.parametrize("shapes", [((0,), (4,)), ((4,), (0,)), ((0, 3), (0, 5)), ((2, 0), (2, 0))])
def test_documents_of_nothing(shapes):
    span = spans.documents(*(np.zeros(shape, np.int64) for shape in shapes))
    assert_is_span(span, shapes[0], 4 if shapes[1] == (4,) else 0)
    assert not seen(span, 0).any()


# --- in calls ---


@once
def dense_cases():
    """name -> (call with spans, the same call with the mask that they mean)."""
    call = dense(1, batch=3, seqlen_q=9, seqlen_kv=14, num_heads=4, num_kv_heads=2)
    p, j = np.arange(9)[:, None] + 5, np.arange(14)
    chunk, padding, prefix = np.array([4, 1, 6]), np.array([0, 3, 14]), np.array([2, 0, 9])
    ids_q = np.sort(np.random.default_rng(1).integers(0, 4, (3, 9)), axis=1)
    ids_kv = np.sort(np.random.default_rng(2).integers(0, 4, (3, 14)), axis=1)
    each = [x[:, None, None] for x in (chunk, padding, prefix)]
    cases = {
        "chunked": (spans.chunked(9, 14, chunk), chunked(p, j, each[0])),
        "prefix_lm": (spans.prefix_lm(9, 14, prefix), prefix_lm(p, j, each[2])),
        "prefix_lm for all": (spans.prefix_lm(9, 14, 7), prefix_lm(p, j, 7)[None]),
        "left_padding": (spans.left_padding(padding, 9, 14), left_padding(p, j, each[1])),
        "documents": (spans.documents(ids_q, ids_kv), ids_q[:, :, None] == ids_kv[:, None, :]),
        "documents for all": (spans.documents(ids_q[0], ids_kv[0]), (ids_q[0][:, None] == ids_kv[0])[None]),
    }
    return {
        name: (call.but(spans=span), call.but(mask=mask[:, None])) for name, (span, mask) in cases.items()
    }


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", dense_cases())
def test_dense_calls(backend, name, causal):
    call, meaning = (x.but(causal=causal) for x in dense_cases()[name])
    assert_matches(*run(call, backend), meaning)
    hidden = ~np.broadcast_to(meaning.options["mask"], (3, 1, 9, 14)).any(axis=(1, 2))
    poison = {n: np.where(hidden[..., None, None], np.nan, call.arrays[n]).astype("f4") for n in "kv"}
    assert_same_rows(backend, run(call.of(**poison), backend), run(call, backend), "poisoned")


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_types(backend, dtype):
    call = dense(4, batch=1, seqlen_q=40, seqlen_kv=40, dtype=dtype, causal=True)
    p, j = np.arange(40)[:, None], np.arange(40)
    meaning = call.but(mask=chunked(p, j, 16))
    assert_matches(*run(call.but(spans=spans.chunked(40, 40, 16)), backend), meaning)


@pytest.mark.parametrize("page_size", [None, 1, 4])
@pytest.mark.parametrize("name", BUILDERS)
def test_packed_calls(backend, name, page_size):
    build, predicate, _ = BUILDERS[name]
    lengths, keys, parameter = np.array([3, 0, 5, 1]), np.array([6, 4, 5, 9]), np.array([2, 1, 3, 4])
    call = varlen(lengths, keys, 3, num_heads=4, num_kv_heads=2)
    row, j = np.arange(5)[:, None], np.arange(9)
    each = [x[:, None, None] for x in (keys - lengths, parameter)]
    meaning = call.but(mask=predicate(row + each[0], j, each[1])[:, None])
    call = call.but(spans=build(parameter, lengths, keys))
    assert_matches(*run(paged_varlen(call, page_size) if page_size else call, backend), meaning)


def test_offsets_and_lengths_in_calls(backend):
    """The offset and the valid lengths that the call has, given to the builder as they are."""
    lens, offset = np.array([12, 5, 0]), np.array([3, 4, 0])
    call = dense(5, batch=3, seqlen_q=4, seqlen_kv=12, seq_lens=lens, q_offset=offset, causal=True)
    p, j = np.arange(4)[:, None] + offset[:, None, None, None], np.arange(12)
    span = spans.chunked(4, lens, 3, q_offset=offset)
    assert_matches(*run(call.but(spans=span), backend), call.but(mask=chunked(p, j, 3)))


# --- refusals ---

ONES, IDS = np.ones(3, np.int64), np.array([[0, 0, 1], [2, 3, 3]])
REFUSED = {
    "float length": (lambda: spans.chunked(4.0, 4, 2), "seqlen_q: found 4.0 (float), expected an integer"),
    "bool length": (lambda: spans.chunked(4, True, 2), "seqlen_kv: found True (bool), expected an integer"),
    "negative length": (
        lambda: spans.prefix_lm(-1, 4, 2),
        "seqlen_q: found -1, expected an integer, 0 to 281474976710656",
    ),
    "chunk 0": (lambda: spans.chunked(4, 4, 0), "chunk: found 0, expected an integer, 1 to 281474976710656"),
    "chunk 0 of a sequence": (
        lambda: spans.chunked(4, 4, np.array([2, 0])),
        "chunk[1]: found 0, expected 1 to 281474976710656 (an integer of each sequence)",
    ),
    "float array": (
        lambda: spans.prefix_lm(4, 4, np.ones(2)),
        "prefix_len: found dtype float64, expected int32 or int64",
    ),
    "2-D parameter": (
        lambda: spans.prefix_lm(4, 4, np.ones((2, 2), int)),
        "prefix_len: found shape (2, 2), expected shape (batch,)",
    ),
    "two batches": (
        lambda: spans.chunked(4, np.array([4, 5]), ONES),
        "chunk: found shape (3,), expected shape (batch,) = (2,), as seqlen_kv has it",
    ),
    "offset of another batch": (
        lambda: spans.chunked(ONES, ONES, 2, q_offset=np.array([1, 2])),
        "q_offset: found shape (2,), expected shape (batch,) = (3,), as seqlen_q has it",
    ),
    "far offset": (
        lambda: spans.chunked(1, 1, 1, q_offset=2**49),
        "q_offset: found 562949953421312, expected an integer, -281474976710656 to 281474976710656",
    ),
    "too much padding": (
        lambda: spans.left_padding(5, 3, 4),
        "num_padding: found 5, expected 0 to 4: the padding is part of the keys",
    ),
    "too much padding of a sequence": (
        lambda: spans.left_padding(np.array([1, 4]), 3, np.array([4, 3])),
        "num_padding[1]: found 4, expected 0 to 3: the padding is part of the keys",
    ),
    "list of ids": (
        lambda: spans.documents([0, 1], IDS[0]),
        "segment_ids_q: found [0, 1] (list), expected an array (NumPy, CuPy, torch or DLPack)",
    ),
    "float ids": (
        lambda: spans.documents(IDS, IDS.astype(float)),
        "segment_ids_kv: found dtype float64, expected int32 or int64",
    ),
    "3-D ids": (
        lambda: spans.documents(IDS[None], IDS),
        "segment_ids_q: found shape (1, 2, 3), expected shape (seqlen,) or (batch, seqlen)",
    ),
    "another batch": (
        lambda: spans.documents(IDS, IDS[:1]),
        "segment_ids_kv: found shape (1, 3), expected shape (2, seqlen_kv), beside segment_ids_q",
    ),
    "another rank": (
        lambda: spans.documents(IDS, IDS[0]),
        "segment_ids_kv: found shape (3,), expected shape (2, seqlen_kv), beside segment_ids_q",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    call, words = REFUSED[name]
    with pytest.raises(pyflash.InvalidArgument, match=re.escape(words) + "$"):
        call()


@pytest.mark.parametrize("which", [0, 1])
def test_unsorted_documents_point_to_the_mask(which):
    """What the message says works: the mask that it spells out means these documents."""
    ids = [np.array([[0, 0, 1, 1], [0, 2, 3, 1]]), np.array([[0, 1, 1, 5], [0, 1, 2, 3]])]
    if which:
        ids.reverse()
    name = ("segment_ids_q", "segment_ids_kv")[which]
    words = rf"{name}\[1, 3\]: found 1 behind 3, expected ids that do not fall .* mask=\((.*)\), with an axis"
    with pytest.raises(pyflash.InvalidArgument, match=words) as refusal:
        spans.documents(*ids)
    expression = re.search(words, str(refusal.value))[1]
    mask = eval(expression, {"segment_ids_q": ids[0], "segment_ids_kv": ids[1]})
    np.testing.assert_array_equal(mask, ids[0][:, :, None] == ids[1][:, None, :])
