"""What went wrong in other attention kernels, by public report, each at shapes and types of our own."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
from calls import (
    DTYPE_NAMES,
    assert_same_bits,
    assert_same_rows,
    dense,
    normal,
    numpy_dtype,
    once,
    paged,
    paged_varlen,
    quantised,
    run,
    varlen,
)
from oracle import FLOOR, Call, assert_matches, expected
from terms import holes

import pyflash

FAMILIES = ["prefill", "decode"]


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_nan_in_the_causal_future(backend, family, dtype):
    """pytorch/pytorch#101967: NaN in keys and values that are masked out reached the output."""
    for length, first_bad in ((40, 30), (200, 131), (9, 1)):
        call = dense(201, batch=1, seqlen_q=length, seqlen_kv=length, num_heads=2, dtype=dtype, causal=True)
        call.arrays["k"][0, first_bad:] = np.nan
        call.arrays["v"][0, first_bad:] = np.nan
        out, lse = run(call, backend, family=family)
        assert_matches(out, lse, call)
        assert np.isnan(out[0, first_bad:].astype("f4")).all() and np.isnan(lse[..., first_bad:]).all()


@pytest.mark.parametrize("junk", [-1, 0, 5, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("page_size", [1, 8, 16])
def test_rubbish_behind_the_used_part_of_a_block_table(backend, page_size, junk):
    """vllm-project/vllm#42494: stale entries of the table past the end of a sequence were read."""
    call = dense(202, batch=4, seqlen_q=1, seqlen_kv=48, num_heads=6, num_kv_heads=2, dtype="bfloat16")
    call = call.but(seq_lens=np.array([7, 8, 9, 48]))
    behind = paged(call, page_size, stale=junk, spare_columns=4)
    assert_same_bits(run(behind, backend), run(call, backend))


@once
def far_from_zero(sign: float, dtype: str, seqlen_q: int, seqlen_kv: int) -> Call:
    call = dense(
        203,
        batch=1,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        num_heads=14,
        num_kv_heads=2,
        amplitude=0.1,
        dtype=dtype,
        scale=1.0,
        causal=True,
    )
    call.arrays["q"][..., 0] = 1
    call.arrays["k"][..., 0] = sign * (150 + 4 * np.arange(seqlen_kv) / seqlen_kv)[None, :, None]
    return call


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_far_from_zero_beside_empty_tiles(backend, sign, family, dtype):
    """Dao-AILab/flash-attention#2082: the running maximum stayed at 0 after a tile without visible keys."""
    for lengths in ((30, 250), (70, 40)):
        call = far_from_zero(sign, dtype, *lengths)
        for more in ({}, dict(window=(60, 0)), dict(num_splits=3)):
            one = call.but(**more)
            assert_matches(*run(one, backend, family=family), one)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_rows_without_keys_have_an_infinite_lse(backend, dtype, family):
    """flashinfer-ai/flashinfer#4452: rows that see no key had a finite log-sum-exp."""
    for queries, keys in ((48, 32), (5, 3), (130, 100)):
        call = dense(204, batch=1, seqlen_q=queries, seqlen_kv=keys, num_heads=4, num_kv_heads=2, dtype=dtype)
        call = call.but(causal=True, family=family)
        call.arrays["v"][...] = 1
        for one in (call, paged(call, 16)):
            out, lse = run(one, backend)
            empty = queries - keys
            assert np.isneginf(lse[..., :empty]).all() and np.isfinite(lse[..., empty:]).all()
            assert not out[:, :empty].any()
            np.testing.assert_allclose(out[:, empty:].astype("f8"), 1, rtol=4 * FLOOR[dtype])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [(5, 2), (150, 70), (20, 7), (2, 1), (300, 10)])
def test_causal_with_more_queries_than_keys(backend, lengths, family):
    """Dao-AILab/flash-attention#1778: the first rows, which see nothing, were wrong."""
    for dtype in ("float32", "bfloat16"):
        call = dense(
            205, batch=1, seqlen_q=lengths[0], seqlen_kv=lengths[1], num_heads=4, num_kv_heads=2, dtype=dtype
        )
        call = call.but(causal=True, family=family)
        assert_matches(*run(call, backend), call)


@pytest.mark.parametrize(
    "window", [(None, 10**6), (10**6, 10**6), (2**31 - 1, 2**31 - 1), (-1, 5), (-1, 4), (-1, 3)]
)
def test_a_right_window_wider_than_the_keys(backend, window):
    """Dao-AILab/flash-attention#895: a huge right side was clamped to the number of keys."""
    for lengths in ((6, 3), (50, 20), (1, 9)):
        for family in FAMILIES:
            call = dense(
                206, batch=1, seqlen_q=lengths[0], seqlen_kv=lengths[1], window=window, family=family
            )
            assert_matches(*run(call, backend), call)


#: name -> lengths of queries and keys, head counts, head_dim
PACKS = {
    "at most one query": ([1, 0, 1], [3, 0, 5], 9, 3, 64),
    "one token in four sequences": ([0, 0, 0, 1], [0, 0, 0, 1], 21, 7, 120),
    "queries without keys": ([2, 3], [0, 4], 4, 2, 16),
    "keys without queries": ([0, 3, 0], [6, 4, 9], 4, 2, 16),
    "all empty": ([0, 0, 0], [0, 0, 0], 4, 2, 16),
    "mixed": ([5, 0, 70, 1], [5, 8, 70, 33], 4, 2, 16),
    "empty before a long one": ([0, 0, 33], [0, 1, 300], 2, 1, 8),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", PACKS)
def test_packs_with_empty_sequences(backend, name, dtype, causal):
    """Dao-AILab/flash-attention#1537: empty sequences in a packed batch."""
    seqlens_q, seqlens_kv, num_heads, num_kv_heads, head_dim = PACKS[name]
    call = varlen(
        seqlens_q,
        seqlens_kv,
        seed=207,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        causal=causal,
    )
    want = run(call, backend)
    assert_matches(*want, call)
    assert_same_bits(run(paged_varlen(call, 4), backend), want, "paged")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 0), (2, 0, 5), (0, 3, 4), (1, 0, 0), (0, 0, 0)], ids=str)
def test_sizes_of_zero(backend, shape, causal):
    """pytorch/pytorch#141219: zero-size inputs."""
    for dtype in ("float64", "bfloat16"):
        call = dense(
            batch=shape[0], seqlen_q=shape[1], seqlen_kv=shape[2], num_heads=4, num_kv_heads=2, dtype=dtype
        )
        for more in ({}, dict(num_splits=2), dict(layout="bhsd")):
            one = call.but(causal=causal, **more)
            if "layout" in more:
                one = one.of(**{name: x.swapaxes(1, 2) for name, x in one.arrays.items()})
            assert_matches(*run(one, backend), one)


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float32", 64), ("bfloat16", 64), ("float16", 48), ("float32", 512)]
)
def test_keys_and_values_with_stride_0(backend, dtype, head_dim):
    """pytorch/pytorch#191937: keys broadcast over heads, one more than a multiple of 32 of them."""
    for seqlen_kv in (1, 32, 33, 64, 65, 97):
        one_head = dense(
            208,
            batch=1,
            seqlen_q=5,
            seqlen_kv=seqlen_kv,
            num_heads=4,
            num_kv_heads=1,
            head_dim=head_dim,
            dtype=dtype,
        )
        shape = (1, seqlen_kv, 4, head_dim)
        spread = one_head.of(**{name: np.broadcast_to(one_head.arrays[name], shape) for name in ("k", "v")})
        for family in FAMILIES:
            want = run(one_head, backend, family=family)
            assert_matches(*want, one_head)
            assert_same_bits(run(spread, backend, family=family), want, f"{seqlen_kv} keys")


def test_keys_broadcast_over_the_batch(backend):
    """pytorch/pytorch#191937: the same with a stride of 0 on the first axis."""
    call = dense(209, batch=3, seqlen_q=5, seqlen_kv=33, num_heads=4, num_kv_heads=2, head_dim=64)
    call = call.of(**{n: np.broadcast_to(call.arrays[n][:1], call.arrays[n].shape) for n in ("k", "v")})
    assert_matches(*run(call, backend), call)


def address_space(nbytes: int) -> np.ndarray:
    """Zeros of which only the pages that are touched cost memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        return np.frombuffer(mmap.mmap(-1, nbytes, flags=flags), np.uint8)
    except (OSError, ValueError, OverflowError) as error:
        pytest.skip(f"no {nbytes >> 20} MiB of address space: {error}")


@pytest.mark.parametrize("seqlen_q", [3, 20])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_offsets_beyond_32_bits(backend, dtype, seqlen_q):
    """Dao-AILab/flash-attention#2611: element offsets above 2**31 through a large token stride."""
    step, head_dim = 2**31 // (seqlen_q - 1) + 1000, 16
    itemsize = numpy_dtype(dtype).itemsize
    buffer = address_space((seqlen_q * step + 4096) * itemsize).view(dtype)
    call = dense(
        210, batch=1, seqlen_q=seqlen_q, seqlen_kv=seqlen_q, num_heads=1, head_dim=head_dim, dtype=dtype
    )
    far = {}
    for i, name in enumerate(("q", "k", "v", "out")):
        start = buffer[64 * i :]
        shape, strides = (1, seqlen_q, 1, head_dim), (0, step * itemsize, 0, itemsize)
        far[name] = np.lib.stride_tricks.as_strided(start, shape, strides)
        far[name][...] = call.arrays.get(name, np.nan)
    assert (seqlen_q - 1) * step > 2**31
    out = far.pop("out")
    for family in FAMILIES:
        assert_same_bits(
            run(call.of(**far), backend, out=out, family=family), run(call, backend, family=family)
        )
        out[...] = np.nan


def test_pages_beyond_32_bits(backend):
    """After the same report: a page whose first element lies above 2**31, and a page number near 2**30."""
    page_size, width, page = 4, 8, 2**28 + 3
    pool = address_space(2 * (page + 1) * page_size * width).view(np.float16).reshape(-1, page_size, 1, width)
    call = dense(211, batch=1, seqlen_q=2, seqlen_kv=4, num_heads=2, num_kv_heads=1, dtype="float16")
    pool[page] = call.arrays["k"][0]
    arrays = {
        "q": call.arrays["q"],
        "k_cache": pool,
        "v_cache": pool,
        "block_table": np.array([[page]], np.int32),
    }
    one = Call("paged_attention", {**arrays, "seq_lens": np.array([4])}, {})
    keys = call.arrays["k"]
    got = pyflash.paged_attention(*one.arrays.values(), return_lse=True, **backend.kwargs)
    assert_same_bits(got, run(call.of(v=keys), backend))


@pytest.mark.parametrize("page_size", [1, 3, 7, 16, 96, 128, 192, 200, 256])
def test_page_sizes_that_are_large_or_no_power_of_two(backend, page_size):
    """flashinfer-ai/flashinfer#4347: page sizes that are large or not a power of two."""
    lens = np.array([1, page_size, page_size + 1, 2 * page_size + 1])
    for seqlen_q in (1, 2, 19):
        call = dense(
            212,
            batch=4,
            seqlen_q=seqlen_q,
            seqlen_kv=int(lens.max()),
            num_heads=4,
            num_kv_heads=2,
            causal=True,
        )
        call = call.but(seq_lens=lens)
        want = run(call, backend)
        assert_matches(*want, call)
        assert_same_bits(run(paged(call, page_size), backend), want)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_query_counts_that_do_not_fill_a_tile(backend, family, dtype):
    """ggml-org/llama.cpp#7903: a number of queries that is no multiple of the tile."""
    call = dense(
        213, batch=3, seqlen_q=27, seqlen_kv=70, num_heads=4, num_kv_heads=2, head_dim=64, dtype=dtype
    )
    out, lse = run(call, backend, family=family)
    assert_matches(out, lse, call)
    for count in range(1, 27):
        few = call.of(q=call.arrays["q"][:, :count])
        assert_same_bits(
            run(few, backend, family=family), (out[:, :count], lse[..., :count]), f"{count} queries"
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_many_partial_results_are_as_exact_as_one(backend, dtype):
    """zhuzilin/ring-flash-attention#42: the error grew with the number of partial results."""
    call = dense(214, batch=1, seqlen_q=8, seqlen_kv=256, num_heads=4, head_dim=64, dtype=dtype)
    exact = expected(call).exact[0][0]

    def error(out: np.ndarray) -> float:
        return float(np.abs(out[0].astype(np.float64) - exact).max())

    allowed = 2 * error(run(call, backend)[0]) + FLOOR[dtype] / 2 * np.abs(exact).max()
    for count in (2, 4, 8, 16):
        assert error(run(call, backend, num_splits=count)[0]) <= allowed, f"{count} splits"
        size = 256 // count
        parts = [
            run(
                call.of(**{n: call.arrays[n][:, i : i + size] for n in ("k", "v")}),
                backend,
                out_dtype="float32",
            )
            for i in range(0, 256, size)
        ]
        stacked = np.stack([o for o, _ in parts]), np.stack([x for _, x in parts])
        with backend.chosen() as name:
            out, _ = pyflash.merge_states(*stacked, out_dtype=dtype, backend=name)
        assert error(out) <= allowed, f"{count} states"


@pytest.mark.parametrize("seqlen_q", [1, 2, 4, 8])
def test_several_queries_a_step_with_a_sliding_window(backend, seqlen_q):
    """flashinfer-ai/flashinfer#3864: decoding several tokens at once with a window."""
    for dtype, left in (("float32", 9), ("float16", 0), ("bfloat16", 40)):
        call = dense(
            215,
            batch=3,
            seqlen_q=seqlen_q,
            seqlen_kv=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            dtype=dtype,
            causal=True,
            window=(left, 0),
            seq_lens=np.array([37, 64, 9]),
        )
        for page_size in (5, 16):
            one = paged(call, page_size)
            for family in (None, *FAMILIES):
                assert_matches(*run(one, backend, family=family), one)


@once
def offset_scores(base: float, dtype: str, seqlen_q: int) -> Call:
    """Scores that are exactly base + step, so that everything depends on the steps alone."""
    steps = np.arange(97) % 13 / 4
    root = 2.0 ** int(np.log2(abs(base)) / 2)
    call = dense(216, batch=1, seqlen_q=seqlen_q, seqlen_kv=97, num_heads=1, dtype=dtype, scale=1.0)
    for name in ("q", "k"):
        call.arrays[name][...] = 0
    call.arrays["q"][..., 0], call.arrays["q"][..., 1] = root, 1
    call.arrays["k"][..., 0] = base / root
    call.arrays["k"][0, :, 0, 1] = steps
    return call


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("base", [1024.0, -1024.0, 65536.0, -65536.0, 2.0**20, -(2.0**20)])
@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_weights_depend_on_differences_of_scores(backend, seqlen_q, base, dtype):
    """The bound is that of scores near 0, plus what a score of this size itself is rounded by."""
    call = offset_scores(base, dtype, seqlen_q)
    out, lse = run(call, backend)
    exact, exact_lse = expected(call).exact[0]
    unit = np.finfo("f8" if dtype == "float64" else "f4").eps
    allowed = FLOOR[dtype] * 4 + unit * abs(base)
    assert np.abs(out[0].astype("f8") - exact).max() <= allowed * np.abs(call.arrays["v"].astype("f8")).max()
    assert np.abs(lse[0] - exact_lse).max() <= 4 * unit * abs(base)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_merging_states_with_holes(backend, dtype):
    """Parts of which some have seen nothing, and parts whose sums differ by 200 orders of magnitude."""
    parts = normal(217, (4, 2, 3, 2, 5), dtype)
    lse = normal(218, (4, 2, 2, 3), dtype, 200.0)
    lse[1], lse[3, 0], lse[:, 1, 1] = -np.inf, -np.inf, -np.inf
    parts[np.isneginf(lse).swapaxes(2, 3)] = 0
    with backend.chosen() as name:
        out, merged = pyflash.merge_states(parts, lse, backend=name)
    wide = lse.astype(np.longdouble)
    top = np.where(np.isneginf(wide.max(axis=0)), 0, wide.max(axis=0))
    weights = np.exp(wide - top)
    total = weights.sum(axis=0)
    share = weights / np.where(total == 0, 1, total)
    exact = (share.swapaxes(2, 3)[..., None] * parts).sum(axis=0)
    with np.errstate(divide="ignore"):
        exact_lse = np.where(total == 0, -np.inf, top + np.log(total))
    np.testing.assert_allclose(out, exact.astype("f8"), rtol=0, atol=4 * FLOOR[dtype])
    np.testing.assert_allclose(merged, exact_lse.astype("f8"), rtol=4 * FLOOR[dtype])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_nan_behind_a_mask(backend, family, dtype, value):
    """pytorch/pytorch#101967: the same with a mask, also where other rows do see the token."""
    call = dense(221, batch=1, seqlen_q=9, seqlen_kv=70, num_heads=2, dtype=dtype, family=family)
    seen = holes((9, 70), 221, 0.8)
    seen[:, [1, 65]], seen[4, 1] = False, True
    clean = run(call.but(mask=seen), backend)
    for name in "kv":
        array = call.arrays[name].copy()
        array[0, [1, 65], :, 2] = value
        bad = call.of(**{name: array}).but(mask=seen)
        out, lse = run(bad, backend)
        others = [0, 1, 2, 3, 5, 6, 7, 8]
        assert_same_rows(
            backend, (out[:, others], lse[..., others]), (clean[0][:, others], clean[1][..., others])
        )
        assert_matches(out, lse, bad)


@once
def far_from_zero_behind_a_mask(sign: float, kind: str, dtype: str, seqlen_q: int) -> Call:
    call = far_from_zero(sign, dtype, seqlen_q, 400).but(causal=False)
    seen = np.ones((seqlen_q, 400), bool)
    seen[:, :130], seen[:, 290:], seen[seqlen_q // 2] = False, False, False
    return call.but(**{kind: seen if kind == "mask" else np.where(seen, 0, -np.inf).astype("f4")})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["mask", "bias"])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_far_from_zero_beside_masked_tiles(backend, sign, kind, family, dtype):
    """Dao-AILab/flash-attention#2082: with tiles that a mask hides on both sides, and rows it empties."""
    for seqlen_q in (3, 60):
        call = far_from_zero_behind_a_mask(sign, kind, dtype, seqlen_q)
        for more in ({}, dict(num_splits=5)):
            assert_matches(*run(call, backend, family=family, **more), call)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("page_size", [1, 7, 16])
def test_alibi_in_prefill_and_token_by_token(backend, page_size, dtype):
    """Dao-AILab/flash-attention#907: a prompt and its tokens one by one, from a cache, disagreed."""
    call = dense(222, batch=2, seqlen_q=19, seqlen_kv=19, num_heads=6, num_kv_heads=3, dtype=dtype)
    call = call.but(causal=True, alibi_slopes=2.0 ** -np.arange(1.0, 7), family="decode")
    out, lse = run(call, backend)
    assert_matches(out, lse, call)
    for t in (0, 6, 18):
        arrays = {n: x[:, t : t + 1] if n == "q" else x for n, x in call.arrays.items()}
        one = Call(call.function, arrays, {**call.options, "seq_lens": np.full(2, t + 1)})
        got = run(paged(one, page_size), backend)
        assert_same_bits(got, (out[:, t : t + 1], lse[..., t : t + 1]), f"token {t}")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("sink", [-300.0, -5.0, 5.0, 90.0, 300.0])
@pytest.mark.parametrize("num_splits", [None, 2, 5, 40])
def test_a_sink_larger_or_smaller_than_every_score(backend, num_splits, sink, dtype):
    """Dao-AILab/flash-attention#2752: the sink was left out of the maximum, or counted once a split."""
    sinks = np.array([sink, 0, -np.inf, sink / 2], "f4")
    for seqlen_q in (1, 30):
        call = dense(223, batch=2, seqlen_q=seqlen_q, seqlen_kv=90, num_heads=4, num_kv_heads=1, dtype=dtype)
        call = call.but(sinks=sinks, seq_lens=np.array([90, 0]), lse_includes_sinks=seqlen_q == 30)
        for one in (call, paged(call, 8)):
            assert_matches(*run(one, backend, num_splits=num_splits), call)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_bool_mask_is_no_number_to_be_added(backend, dtype, family):
    """openvinotoolkit/openvino#31630: True meant 1 and False 0; and bytes other than 1 are True too."""
    call = dense(224, batch=2, seqlen_q=13, seqlen_kv=70, num_heads=4, num_kv_heads=2, dtype=dtype)
    seen = holes((2, 4, 13, 70), 224, 0.5)
    call = call.but(mask=seen, family=family)
    want = run(call, backend)
    assert_matches(*want, call)
    for true in (2, 128, 255):
        assert_same_bits(run(call.but(mask=(seen * np.uint8(true)).view(bool)), backend), want, f"{true}")


@pytest.mark.parametrize("dtype", ["float32", "float16", "float8_e4m3fn", "int8"])
def test_keys_and_values_with_stride_0_behind_a_mask(backend, dtype):
    """pytorch/pytorch#191937: the same with a mask, in every place of a vector and behind it."""
    for seqlen_kv in (31, 33, 65):
        call = dense(225, batch=1, seqlen_q=5, seqlen_kv=seqlen_kv, num_heads=4, num_kv_heads=1, head_dim=40)
        seen = holes((1, 1, 5, seqlen_kv), seqlen_kv, 0.8)
        seen[..., -1] = True
        call = quantised(call.but(mask=seen), dtype, "number")
        spread = {n: np.broadcast_to(call.arrays[n], (1, seqlen_kv, 4, 40)) for n in "kv"}
        for family in FAMILIES:
            want = run(call, backend, family=family)
            assert_matches(*want, call)
            assert_same_bits(run(call.of(**spread), backend, family=family), want)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("low", [-3.4028234663852886e38, -3.3895313892515355e38, -65504.0, -1e30])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_additive_masks_of_low_numbers(backend, dtype, low, family):
    """huggingface/transformers#31035: finfo.min in place of -inf; a row of nothing else is the plain mean."""
    for seqlen_kv in (21, 150):
        call = dense(226, batch=1, seqlen_q=20, seqlen_kv=seqlen_kv, num_heads=2, dtype=dtype, amplitude=0.01)
        bias = np.zeros((20, seqlen_kv), "f4")
        bias[:, seqlen_kv // 2 :], bias[[0, 7, 19]] = low, low
        call = call.but(bias=bias, family=family)
        out, lse = run(call, backend)
        assert_matches(out, lse, call)
        with np.errstate(over="ignore"):
            twice = run(call.but(bias=np.float32(low) + bias), backend)
        assert not any(np.isnan(x.astype("f4")).any() for x in twice)


@pytest.mark.parametrize("page_size", [None, 5, 64])
@pytest.mark.parametrize("scales", ["number", "heads", "tokens"])
@pytest.mark.parametrize("dtype", ["int8", "int4", "float8_e4m3fn", "float8_e5m2"])
def test_scales_of_a_quantised_cache(backend, dtype, scales, page_size):
    """flashinfer-ai/flashinfer#1023: they were ignored."""
    call = dense(
        227, batch=2, seqlen_q=2, seqlen_kv=55, num_heads=4, num_kv_heads=2, head_dim=32, causal=True
    )
    call = quantised(call, dtype, scales)
    call = call if page_size is None else paged(call, page_size)
    for part in ("k_scale", "v_scale"):
        for factor in (0.25, 1, 40):
            one = call.but(**{part: call.options[part] * factor})
            if scales == "tokens":
                one = one.but(**{part: one.options[part].astype("f4")})
            for family in FAMILIES:
                assert_matches(*run(one, backend, family=family), one)


@pytest.mark.parametrize("bias_dtype", DTYPE_NAMES)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_a_float_mask_of_0_and_1_is_a_bias(backend, dtype, bias_dtype):
    """ml-explore/mlx#2626: it was taken as a bool mask."""
    call = dense(228, batch=1, seqlen_q=11, seqlen_kv=40, num_heads=2, dtype=dtype)
    ones = holes((11, 40), 228, 0.5)
    call = call.but(bias=ones.astype(numpy_dtype(bias_dtype)))
    for family in FAMILIES:
        out, lse = run(call, backend, family=family)
        assert_matches(out, lse, call)
    hard = run(Call(call.function, call.arrays, {"mask": ones}), backend)[0]
    assert np.abs(out.astype("f8") - hard.astype("f8")).max() > 0.05
