"""Corners of the CUDA kernels: float16 in decode, shared rows, trees and bad lengths on the GPU."""

from __future__ import annotations

import numpy as np
import pytest
from calls import dense, explain, normal, on_device, on_host, quantised, run, varlen
from conftest import CUDA_IS_EMULATED, available
from oracle import Call, assert_matches
from oracle_terms import ancestors
from terms import parents

import pyflash
from pyflash.gpu import _device

CUDA = [backend for backend in available() if backend.name == "cuda"]
pytestmark = pytest.mark.skipif(not CUDA, reason="needs a GPU, or the emulator of one")

INTEGERS_AND_FLOATS = ("int8", "float8_e4m3fn", "float8_e5m2", "int4")


def decode(dtype: str = "bfloat16", kv_dtype: str = "float32", **options) -> Call:
    return dense(
        811, batch=1, seqlen_kv=40, num_heads=4, num_kv_heads=1, head_dim=64, dtype=dtype,
        kv_dtype=kv_dtype, **{"seqlen_q": 1, **options},
    )  # fmt: skip


def with_scales(call: Call, place: tuple, k_scale: float | None = None, v_scale: float | None = None) -> Call:
    """The same call with other scales in one place."""
    options = dict(call.options)
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if value is not None:
            options[name] = options[name].copy()
            options[name][place] = value
    return Call(call.function, call.arrays, options)


@pytest.mark.parametrize("stored", INTEGERS_AND_FLOATS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_scale_of_a_hidden_value_changes_no_bits(stored, dtype):
    """Scales go into weights of float16, relative to the largest: of those that a row sees."""
    hidden = np.ones(40, bool)
    hidden[3] = False
    by_mask = quantised(decode(dtype, mask=hidden), stored, "tokens")
    future = quantised(decode(dtype, seqlen_q=3, causal=True), stored, "tokens")
    for call, place, rows in ((by_mask, (0, 3), slice(None)), (future, (0, 39), slice(2))):
        assert explain(call, CUDA[0]).kernel == "decode_mma"
        out, lse = run(call, CUDA[0])
        other_out, other_lse = run(with_scales(call, place, v_scale=1e30), CUDA[0])
        np.testing.assert_array_equal(other_out[:, rows], out[:, rows])
        np.testing.assert_array_equal(other_lse, lse)


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e5])
@pytest.mark.parametrize("stored", INTEGERS_AND_FLOATS)
def test_scales_of_different_size(stored, scale):
    """A value of zeros may have any scale; some write 1."""
    call = quantised(decode(v_scale=None), stored, "tokens")
    call = call.of(v=call.arrays["v"].copy())
    call.arrays["v"][:, 3] = 0
    call = with_scales(call, (0, 3), v_scale=scale)
    assert explain(call, CUDA[0]).kernel == "decode_mma"
    assert_matches(*run(call, CUDA[0]), call)


@pytest.mark.parametrize("largest", [1e4, 1e6, 1e8])
@pytest.mark.parametrize("stored", [None, *INTEGERS_AND_FLOATS])
def test_queries_with_one_large_element(stored, largest):
    """Queries of bfloat16 have more exponents than the float16 that they become."""
    call = decode(kv_dtype="float32" if stored else "float16", scale=1.0)
    arrays = {name: x.copy() for name, x in call.arrays.items()}
    arrays["q"][..., 0], arrays["k"][..., 0] = largest, 0
    call = Call(call.function, arrays, call.options)
    call = quantised(call, stored, "tokens") if stored else call
    assert explain(call, CUDA[0]).kernel == "decode_mma"
    assert_matches(*run(call, CUDA[0]), call)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "first"),
    [(72, 64, 16), (72, 64, 8), (80, 64, 16), (64, 32, 0), (568, 512, 64), (576, 512, 0)],
)
def test_values_in_the_rows_of_keys(head_dim, head_dim_v, first):
    """They are read once, unless they go on where the key has ended."""
    rows = normal(812, (2, 20, 1, max(head_dim, first + head_dim_v)), "float16")
    q = normal(813, (2, 1, 4, head_dim), "float16")
    cut = slice(head_dim), slice(first, first + head_dim_v)
    call = Call("flash_attention", {"q": q, "k": rows[..., cut[0]], "v": rows[..., cut[1]]}, {})
    on_gpu = on_device(rows)
    arrays = on_device(q), on_gpu[..., cut[0]], on_gpu[..., cut[1]]
    assert pyflash.explain(*arrays, backend="cuda").kernel == "decode_mma"
    out, lse = pyflash.flash_attention(*arrays, backend="cuda", return_lse=True)
    assert_matches(on_host(out), on_host(lse), call)


@pytest.mark.parametrize(
    ("seqlens_q", "max_seqlen_q"), [([10, 3], 4), ([40, 3], 4), ([40, 30], 20), ([300, 3], 20)]
)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_more_queries_than_announced(dtype, seqlens_q, max_seqlen_q):
    """All of the rows of a sequence that is longer than `max_seqlen_q` are NaN, those of no block too."""
    call = varlen(seqlens_q, [30, 30], 814, num_heads=2, head_dim=64, dtype=dtype)
    out = on_device(np.full(call.arrays["q"].shape, 7, dtype))
    _, lse = pyflash.flash_attention_varlen(
        *map(on_device, call.arrays.values()), max_seqlen_q=max_seqlen_q, out=out, return_lse=True,
        backend="cuda",
    )  # fmt: skip
    rows, lse = on_host(out).astype(np.float32), on_host(lse)
    for lo, hi in ((0, seqlens_q[0]), (seqlens_q[0], sum(seqlens_q))):
        is_bad = hi - lo > max_seqlen_q
        assert (np.isnan(rows[lo:hi]) == is_bad).all() and (np.isnan(lse[:, lo:hi]) == is_bad).all()


@pytest.mark.parametrize("as_parents", [True, False])
@pytest.mark.parametrize(("seqlen_q", "dtype"), [(5, "float16"), (30, "float16"), (30, "float32")])
def test_a_tree_on_the_gpu(seqlen_q, dtype, as_parents):
    """As parents it has indices that may be bad, as a mask it has none."""
    call = dense(815, seqlen_q=seqlen_q, seqlen_kv=40, num_heads=4, num_kv_heads=2, head_dim=64, dtype=dtype)
    tree = parents(2, 5, 816)
    call = call.but(causal=True, tree=tree if as_parents else np.stack([ancestors(one) for one in tree]))
    options = {**call.options, "tree": on_device(call.options["tree"])}
    out, lse = pyflash.flash_attention(
        *map(on_device, call.arrays.values()), **options, return_lse=True, backend="cuda"
    )
    assert_matches(on_host(out), on_host(lse), call)


@pytest.mark.skipif(not CUDA_IS_EMULATED, reason="a GPU has the shared memory that it has")
@pytest.mark.parametrize("head_dim", [64, 192])
def test_a_tile_that_leaves_little_shared_memory(monkeypatch, head_dim):
    """What a kernel has besides takes a whole KiB: dynamic memory begins at multiples of it."""
    from emulator import Platform

    dtype = "float64" if head_dim == 64 else "float32"
    widths = dict(head_dim=head_dim, head_dim_v=min(head_dim, 128))
    call = dense(812, seqlen_q=40, seqlen_kv=40, dtype=dtype, causal=True, **widths)
    monkeypatch.setattr(_device, "platform", Platform("sm_86"))
    assert_matches(*run(call, CUDA[0]), call)


@pytest.mark.parametrize("scale", [1e-35, -1e33])
def test_statistics_of_scales_beyond_float32(scale):
    """They are computed in double, and results of float32 have room for no more than their type."""
    call = dense(813, batch=1, seqlen_q=20, seqlen_kv=60, head_dim=32)
    q, k, _ = call.arrays.values()
    lse = pyflash.flash_attention(*call.arrays.values(), scale=scale, return_lse=True, backend="numpy")[1]
    options = dict(scale=scale, top_k=3, rows=np.array([0, 5]))
    want = pyflash.attention_stats(q, k, lse, **options, backend="numpy")
    got = pyflash.attention_stats(q, k, lse, **options, backend="cuda")
    for name in ("max_logit", "entropy", "key_mass", "top_k_values", "top_k_indices", "rows"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), rtol=1e-5, err_msg=name)
