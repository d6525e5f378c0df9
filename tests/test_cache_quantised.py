"""`PagedKVCache` of quantised types: the scales travel with the codes, whatever becomes of a page."""

from __future__ import annotations

import numpy as np
import pytest
from calls import on_host

import pyflash

NUM_KV_HEADS, HEAD_DIM, HEAD_DIM_V, PAGE_SIZE = 2, 16, 8, 4
#: Name of the type -> largest error of an element in units of the largest one of its row.
STEPS = {"int8": 0.5 / 127, "int4": 0.5 / 7, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}


def make_cache(dtype, **options):
    return pyflash.PagedKVCache(
        12, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM, head_dim_v=HEAD_DIM_V, dtype=dtype, num_layers=2, **options
    )


def tokens(seed, num_tokens):
    rng = np.random.default_rng(seed)
    loud = np.exp(rng.standard_normal((2, num_tokens, NUM_KV_HEADS, 1)) * 3)  # scales have work to do
    return tuple(
        (rng.standard_normal((2, num_tokens, NUM_KV_HEADS, width)) * loud).astype(np.float32)
        for width in (HEAD_DIM, HEAD_DIM_V)
    )


def attend(cache, layer, seqs, q, **backend):
    """Attention of queries in host memory over a cache wherever it lies, the result in host memory."""
    table, lens = cache.block_table(seqs), cache.seq_lens(seqs)
    out = pyflash.paged_attention(
        *cache.placed(q),
        cache.k_cache[layer],
        cache.v_cache[layer],
        table,
        lens,
        **cache.options(layer),
        **backend,
    )
    return on_host(out)


@pytest.mark.parametrize("cache_layout", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", STEPS)
def test_attention_over_a_quantised_cache(backend, dtype, cache_layout):
    """Close to attention over the tokens as they were, by the step of the type."""
    with backend.chosen() as name:
        cache = make_cache(dtype, cache_layout=cache_layout, backend=name)
        seq = cache.add_sequence()
        k, v = tokens(1, 11)
        cache.append(seq, k[:, :7], v[:, :7])
        cache.append(seq, k[:, 7:], v[:, 7:])
    q = np.zeros((1, 4, HEAD_DIM), np.float32)  # all keys count alike, so only values are off
    for layer in range(2):
        out = attend(cache, layer, [seq], q, **backend.kwargs)
        exact = v[layer].mean(axis=0).repeat(2, axis=0)
        allowed = (np.abs(v[layer]).max(axis=-1).mean(axis=0) * STEPS[dtype] * 1.01).repeat(2)[:, None]
        assert (np.abs(out[0] - exact) <= allowed).all()
        assert np.abs(out[0] - exact).max() > 0  # it is quantised


@pytest.mark.parametrize("dtype", STEPS)
def test_forks_copy_scales_with_their_pages(any_isa, dtype):
    """A fork that diverges in the middle of a page reads what a cache of its own would."""
    with any_isa.chosen() as name:
        cache, alone = (make_cache(dtype, backend=name) for _ in range(2))
        k, v = tokens(2, 6)
        other_k, other_v = tokens(3, 3)
        a = cache.add_sequence()
        cache.append(a, k, v)
        b = cache.fork(a, length=5)
        cache.append(b, other_k, other_v)
        c = alone.add_sequence()
        alone.append(c, *(np.concatenate([x[:, :5], y], axis=1) for x, y in ((k, other_k), (v, other_v))))
        d = alone.add_sequence()
        alone.append(d, k, v)
    q = np.random.default_rng(4).standard_normal((2, 4, HEAD_DIM)).astype(np.float32)
    for layer in range(2):
        got = attend(cache, layer, [b, a], q, **any_isa.kwargs)
        assert got.tobytes() == attend(alone, layer, [c, d], q, **any_isa.kwargs).tobytes()


@pytest.mark.parametrize("dtype", STEPS)
def test_no_package_of_types_is_needed(dtype):
    """The pools are plain bytes."""
    cache = make_cache(dtype)
    assert cache.k_cache.dtype == (np.int8 if dtype == "int8" else np.uint8)
    assert cache.k_cache.shape[-1] == (HEAD_DIM // 2 if dtype == "int4" else HEAD_DIM)
    assert cache.k_scale.shape == cache.k_cache.shape[:-1] and cache.k_scale.dtype == np.float32


def test_odd_widths_do_not_pack():
    message = "^head_dim_v: found 7, expected a multiple of 2 for int4$"
    with pytest.raises(pyflash.InvalidArgument, match=message):
        pyflash.PagedKVCache(4, 4, 1, 8, head_dim_v=7, dtype="int4")


def test_float_caches_have_no_scales():
    cache = make_cache("float16")
    assert cache.k_scale is None and cache.options(0) == {"cache_layout": "nhd"}
