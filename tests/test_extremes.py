"""Numbers at the ends of their types: values whose sum overflows, scales, states of nothing but -inf."""

from __future__ import annotations

import numpy as np
import pytest

import pyflash

LARGEST = {dtype: np.finfo(dtype).max for dtype in ("float32", "float64")}


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", list(LARGEST))
@pytest.mark.parametrize("causal", [False, True])
def test_the_mean_of_the_largest_values(backend, dtype, family, causal):
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, n, 2, 8)).astype(dtype) for n in (40, 700))
    share = rng.uniform(-0.9, 0.9, (1, 700, 2, 8))
    v = (share * LARGEST[dtype]).astype(dtype)
    out = pyflash.flash_attention(q, k, v, causal=causal, family=family, **backend.kwargs)
    exact = pyflash.naive_attention(*(x.astype("f8") for x in (q, k)), share, causal=causal)
    assert np.abs(out / LARGEST[dtype] - exact).max() < 1e-6


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_column_beside_one_that_overflows(backend, family, bad):
    v = np.full((1, 64, 1, 3), 3e38, "f4")
    v[0, 5, 0, 0] = bad
    q, k = np.zeros((1, 2, 1, 3), "f4"), np.zeros((1, 64, 1, 3), "f4")
    out = pyflash.flash_attention(q, k, v, family=family, **backend.kwargs)
    assert not np.isfinite(out[..., 0]).any()
    assert np.allclose(out[..., 1:] / np.float32(3e38), 1)


@pytest.mark.parametrize("scale", [0.0, 1e-320, 1e-38, 1e-31, 1e31, 1e38, 1e39, 1e300, -1e31])
def test_any_finite_scale(backend, scale):
    q = np.zeros((3, 4), "f4")
    k, v = np.ones((5, 4), "f4"), np.arange(10, dtype="f4").reshape(5, 2)
    out = pyflash.flash_attention(q, k, v, scale=scale, **backend.kwargs)
    assert np.allclose(out, v.mean(axis=0))


@pytest.mark.parametrize(("dtype", "small", "scale"), [("f4", 1e-39, 1e31), ("f8", 1e-312, 1e304)])
def test_a_large_scale_on_small_products(backend, dtype, small, scale):
    q = np.full((1, 1), 1e8, dtype)
    k = np.array([[1], [2]], dtype) * np.dtype(dtype).type(small)
    out = pyflash.flash_attention(q, k, np.array([[1], [0]], dtype), scale=scale, **backend.kwargs)
    s = scale * (q.astype("f8") * k.astype("f8")).ravel()
    exact = 1 / (1 + np.exp(s[1] - s[0]))
    assert abs(out.item() - exact) < 1e-5


@pytest.mark.parametrize("family", ["prefill", "decode"])
def test_a_small_scale_on_products_beyond_the_type(backend, family):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, 1, 32)).astype("f4") for n in (20, 40, 40))
    k[0, 5, 0, 3:5] = 3e38
    out = pyflash.flash_attention(q, k, v, scale=1e-40, family=family, **backend.kwargs)
    exact = pyflash.naive_attention(*(x.astype("f8") for x in (q, k, v)), scale=1e-40)
    assert np.abs(out - exact).max() < 1e-5


@pytest.mark.parametrize("num_splits", [None, 1])
def test_equal_values_are_not_summed_in_one_chain(backend, num_splits):
    n = 4096
    q, k, v = np.zeros((1, 1, 1, 1), "f4"), np.zeros((1, n, 1, 1), "f4"), np.full((1, n, 1, 1), 0.1, "f4")
    for family in ("prefill", "decode"):
        out = pyflash.flash_attention(q, k, v, num_splits=num_splits, family=family, **backend.kwargs)
        assert abs(out.item() - float(v[0, 0, 0, 0])) < 3e-7, family


def test_merging_states_whose_scores_were_all_minus_inf(backend):
    out, lse = np.array([[np.nan, np.nan]], "f4"), np.array([-np.inf], "f4")
    with backend.chosen():
        both, both_lse = pyflash.merge_states(np.stack([out, out]), np.stack([lse, lse]))
        assert np.isnan(both).all() and np.isneginf(both_lse).all()
        other, zero = np.array([[2, 3]], "f4"), np.zeros(1, "f4")
        mixed, mixed_lse = pyflash.merge_states(np.stack([out, other]), np.stack([lse, zero]))
    assert (mixed == other).all() and (mixed_lse == zero).all()


@pytest.mark.parametrize("dtype", list(LARGEST))
def test_merging_the_largest_values(backend, dtype):
    parts = np.array([0.9, -0.9, 0.9, 0.9], dtype).reshape(4, 1, 1) * LARGEST[dtype]
    with backend.chosen():
        out, _ = pyflash.merge_states(parts, np.zeros((4, 1), dtype))
    assert np.isclose(out.item() / LARGEST[dtype], 0.45)


@pytest.mark.parametrize("name", ["block_table", "seq_lens", "q_offset"])
def test_outputs_do_not_overlap_index_arrays(backend, name):
    memory = np.zeros(64, np.int32)
    arrays = {"block_table": memory[:4].reshape(2, 2), "seq_lens": memory[:2], "q_offset": memory[:2]}
    index = {"block_table": np.zeros((2, 2), np.int32), "seq_lens": np.zeros(2, np.int32), name: arrays[name]}
    q, pool = np.ones((2, 2, 8), "f4"), np.ones((4, 4, 2, 8), "f4")
    out = memory.view("f4")[: q.size].reshape(q.shape)
    with pytest.raises(pyflash.InvalidArgument, match=f"^out: found memory that it shares with {name}, "):
        pyflash.paged_attention(q, k_cache=pool, v_cache=pool, **index, **backend.kwargs, out=out)
    assert not memory.any()
