"""Keys behind a block table: the bits of dense attention, whatever the pages look like."""

from __future__ import annotations

import numpy as np
import pytest
from calls import (
    DTYPE_NAMES,
    TYPE_PAIRS,
    assert_same_bits,
    dense,
    once,
    paged,
    paged_varlen,
    prefix_sums,
    run,
    varlen,
)
from oracle import Call, assert_matches

import pyflash

PAGE_SIZES = [1, 2, 3, 7, 16, 64, 100, 256]

LENS = np.array([70, 1, 0, 33, 64], np.int32)


@pytest.fixture
def backend(backend):
    """What is promised about bits is promised on CUDA where it is asked for."""
    return backend.reproducible


@once
def dense_of(seqlen_q: int, dtype: str = "float32", kv_dtype: str | None = None) -> Call:
    return dense(
        51,
        batch=5,
        seqlen_q=seqlen_q,
        seqlen_kv=70,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        head_dim_v=5,
        dtype=dtype,
        kv_dtype=kv_dtype,
        causal=True,
        seq_lens=LENS,
    )


@pytest.mark.parametrize("family", [None, "prefill", "decode"])
@pytest.mark.parametrize("seqlen_q", [1, 3, 30])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_any_page_size_has_the_bits_of_dense(backend, page_size, seqlen_q, family):
    want = run(dense_of(seqlen_q), backend, family=family)
    call = paged(dense_of(seqlen_q), page_size, seed=page_size)
    assert_same_bits(run(call, backend, family=family), want)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_against_the_oracle(backend, seqlen_q, dtype):
    call = paged(dense_of(seqlen_q, dtype), 7)
    assert_matches(*run(call, backend), call)


@pytest.mark.parametrize("pair", TYPE_PAIRS, ids="-".join)
def test_every_type_of_cache_has_the_bits_of_dense(backend, pair):
    for seqlen_q in (1, 30):
        want = run(dense_of(seqlen_q, *pair), backend)
        assert_same_bits(run(paged(dense_of(seqlen_q, *pair), 16), backend), want, f"seqlen_q {seqlen_q}")


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("stale", [-1, 0, 2**31 - 1, -(2**31)])
def test_stale_entries_of_the_table_are_not_read(backend, stale, index_dtype):
    call = paged(dense_of(3), 16, stale=stale, spare_columns=3, index_dtype=index_dtype)
    assert_same_bits(run(call, backend), run(dense_of(3), backend))


@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("family", ["prefill", "decode"])
def test_what_lies_behind_the_length_does_not_matter(backend, family, fill):
    for page_size in (1, 7, 64):
        call = paged(dense_of(3), page_size, fill=fill)
        want = run(paged(dense_of(3), page_size, fill=0), backend, family=family)
        assert_same_bits(run(call, backend, family=family), want, f"page size {page_size}")


@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_pools_with_heads_before_places(backend, seqlen_q):
    want = run(dense_of(seqlen_q), backend)
    assert_same_bits(run(paged(dense_of(seqlen_q), 7, cache_layout="hnd"), backend), want)


@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_strided_pools_and_tables(backend, seqlen_q):
    call = paged(dense_of(seqlen_q), 7)
    moved = {}
    for name in ("k_cache", "v_cache"):
        pool = call.arrays[name]
        wide = np.full((*pool.shape[:3], 2 * pool.shape[3] + 1), np.nan, pool.dtype)
        moved[name] = wide[::-1, :, :, 1::2][..., : pool.shape[3]]
        moved[name][...] = pool
    table = call.arrays["block_table"]
    moved["block_table"] = np.asfortranarray(np.repeat(table, 2, axis=0))[::2]
    moved["seq_lens"] = call.arrays["seq_lens"][::-1].copy()[::-1]
    assert_same_bits(run(call.of(**moved), backend), run(call, backend))


def test_keys_and_values_in_one_pool(backend):
    call = paged(dense_of(3), 16)
    k, v = call.arrays["k_cache"], call.arrays["v_cache"]
    pool = np.full((len(k), 2, *k.shape[1:]), np.nan, k.dtype)
    pool[:, 0], pool[:, 1, ..., : v.shape[-1]] = k, v
    joint = call.of(k_cache=pool[:, 0], v_cache=pool[:, 1, ..., : v.shape[-1]])
    assert_same_bits(run(joint, backend), run(call, backend))


@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_pages_may_be_shared(backend, seqlen_q):
    """Three sequences with the same first 32 keys hold the pages of that prefix in common."""
    one = dense(52, batch=3, seqlen_q=seqlen_q, seqlen_kv=50, num_heads=4, num_kv_heads=2, causal=True)
    for name in ("k", "v"):
        one.arrays[name][:, :32] = one.arrays[name][:1, :32]
    call = paged(one, 8)
    table = call.arrays["block_table"].copy()
    table[:, :4] = table[:1, :4]
    assert_same_bits(run(call.of(block_table=table), backend), run(one, backend))


def test_one_page_many_times(backend):
    call = paged(dense(53, batch=1, seqlen_q=3, seqlen_kv=40), 4)
    call = call.of(block_table=np.full((1, 10), call.arrays["block_table"][0, 0]))
    assert_matches(*run(call, backend), call)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_one_token_a_sequence(backend, dtype):
    several = paged(dense_of(1, dtype), 16)
    want_out, want_lse = run(several, backend)
    call = several.of(q=several.arrays["q"][:, 0])
    out, lse = run(call, backend)
    assert_matches(out, lse, call)
    assert_same_bits((out, lse), (want_out[:, 0], want_lse[..., 0]))


#: name -> (lengths of the queries, lengths of the keys, options)
PACKED = {
    "chunked prefill and decode": ([20, 1, 1, 33], [20, 70, 1, 80], dict(causal=True)),
    "nothing but decode": ([1, 1, 1], [33, 2, 70], dict(causal=True)),
    "empty sequences": ([0, 2, 0, 3], [9, 0, 0, 9], dict(causal=True)),
    "window": ([20, 1, 5], [40, 70, 65], dict(causal=True, window=(9, 0))),
    "offsets": ([5, 1], [40, 70], dict(causal=True, q_offset=np.array([4, 60]))),
    "no sequence": ([], [], {}),
}


@once
def packed_of(name: str) -> Call:
    seqlens_q, seqlens_kv, options = PACKED[name]
    return varlen(seqlens_q, seqlens_kv, seed=54, num_heads=4, num_kv_heads=2, **options)


@pytest.mark.parametrize("family", [None, "prefill", "decode"])
@pytest.mark.parametrize("page_size", [1, 16, 100])
@pytest.mark.parametrize("name", [name for name in PACKED if name != "no sequence"])
def test_packed_queries(backend, name, page_size, family):
    call = paged_varlen(packed_of(name), page_size)
    out, lse = run(call, backend, family=family)
    assert_matches(out, lse, call)
    assert_same_bits((out, lse), run(packed_of(name), backend, family=family))


def test_no_sequence(backend):
    call = packed_of("no sequence")
    pools = {"k_cache": np.zeros((3, 4, 2, 8), "f4"), "v_cache": np.zeros((3, 4, 2, 8), "f4")}
    index = {"block_table": np.zeros((0, 2), "i4"), "seq_lens": np.zeros(0, "i4")}
    packed = Call(
        "paged_attention", {"q": call.arrays["q"], **pools, **index}, {"cu_seqlens_q": prefix_sums([])}
    )
    for one in (packed, Call("paged_attention", packed.arrays, {})):
        out, lse = run(one, backend)
        assert out.shape == (0, 4, 8) and lse.shape == ((4, 0) if one is packed else (0, 4))


def test_a_pool_without_pages_serves_sequences_without_keys(backend):
    arrays = {
        "q": np.ones((2, 4, 8), "f4"),
        "k_cache": np.zeros((0, 4, 2, 8), "f4"),
        "v_cache": np.zeros((0, 4, 2, 8), "f4"),
        "block_table": np.full((2, 3), -1, "i4"),
        "seq_lens": np.zeros(2, "i4"),
    }
    call = Call("paged_attention", arrays, {})
    assert_matches(*run(call, backend), call)
    assert_matches(*run(call.of(block_table=np.zeros((2, 0), "i4")), backend), call)


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("chunks", [[60], [1] * 6 + [54], [17, 43], [30, 1, 29], [25, 24, 11]], ids=str)
def test_a_prompt_in_chunks_has_the_bits_of_one_call(backend, chunks, family):
    whole = dense(55, batch=1, seqlen_q=60, seqlen_kv=60, num_heads=4, num_kv_heads=2, causal=True)
    want_out, want_lse = run(whole, backend, family=family)
    cache = paged(whole, 16)
    done = 0
    for chunk in chunks:
        rows, done = slice(done, done + chunk), done + chunk
        part = cache.of(q=whole.arrays["q"][:, rows], seq_lens=np.array([done]))
        out, lse = run(part, backend, family=family)
        assert_same_bits((out, lse), (want_out[:, rows], want_lse[..., rows]), f"rows {rows}")


@pytest.mark.parametrize("seqlen_q", [1, 30])
def test_where_pages_lie_does_not_matter(backend, seqlen_q):
    want = run(paged(dense_of(seqlen_q), 16, seed=0), backend)
    for seed in (1, 2):
        call = paged(dense_of(seqlen_q), 16, seed=seed, spare_pages=9)
        assert_same_bits(run(call, backend), want)


@pytest.mark.parametrize("page_size", [1, 48, 512, 2000])
def test_longer_than_a_split(backend, page_size):
    lens = np.array([1100, 513, 3])
    one = dense(56, batch=3, seqlen_q=1, seqlen_kv=1100, num_heads=4, num_kv_heads=1, seq_lens=lens)
    call = paged(one, page_size)
    out, lse = run(call, backend)
    assert_matches(out, lse, one)
    assert_same_bits((out, lse), run(one, backend))


@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_heads_before_queries(backend, seqlen_q):
    """`layout` orders a q of four axes and its out; neither the pools nor a q of one token a sequence."""
    call = paged(dense(95, batch=2, seqlen_q=seqlen_q, seqlen_kv=40, num_heads=4, num_kv_heads=2), 8)
    out, lse = run(call, backend)
    swapped = {**call.arrays, "q": np.ascontiguousarray(call.arrays["q"].swapaxes(1, 2))}
    got = pyflash.paged_attention(
        *swapped.values(), **call.options, **backend.kwargs, layout="bhsd", return_lse=True
    )
    assert_same_bits(got, (out.swapaxes(1, 2), lse))
