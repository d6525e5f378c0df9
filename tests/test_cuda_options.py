"""Options that only the CUDA backend has: float8 queries, and bits that depend on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from calls import assert_same_bits, dense, numpy_dtype, paged, quantised, run
from conftest import CUDA_IS_EMULATED, available
from emulator import Platform
from oracle import assert_matches
from oracle_terms import FLOAT8_VALUES

import pyflash
from pyflash.gpu import _device, _plan

CUDA = [backend for backend in available() if backend.name == "cuda"]
pytestmark = pytest.mark.skipif(not CUDA, reason="needs a GPU, or the emulator of one")


@pytest.mark.parametrize("scale", [None, "number", "below 0", "heads", "tokens"])
@pytest.mark.parametrize(("seqlen_q", "kv_dtype"), [(1, "bfloat16"), (20, "bfloat16"), (20, "float8_e4m3fn")])
def test_float8_queries(seqlen_q, kv_dtype, scale):
    """They mean their number times the scale; what comes out is bfloat16 unless it is asked otherwise."""
    call = dense(801, seqlen_q=seqlen_q, seqlen_kv=50, num_heads=4, num_kv_heads=2, head_dim=32, causal=True)
    codes = call.arrays["q"].astype(numpy_dtype("float8_e4m3fn"))
    numbers = FLOAT8_VALUES["float8_e4m3fn"][codes.view(np.uint8)]
    scales = {
        None: 1.0,
        "number": 0.5,
        "below 0": -0.5,
        "heads": np.linspace(0.25, 1, 4, dtype=np.float32),
        "tokens": np.random.default_rng(0).uniform(0.25, 1, codes.shape[:3]).astype(np.float32),
    }[scale]
    spread = scales[..., None] if np.ndim(scales) else scales
    stored = {n: call.arrays[n].astype(numpy_dtype(kv_dtype)) for n in "kv"}
    options = {} if scale is None else {"q_scale": scales}
    out, lse = run(call.of(q=codes, **stored).but(out_dtype="float32", **options), CUDA[0])
    wide = {n: x.astype(np.float32) for n, x in stored.items()}
    assert_matches(out, lse, call.of(q=(numbers * spread).astype(np.float32), **wide))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_that_do_not_depend_on_the_batch(dtype):
    """A sequence alone, and beside others that are longer."""
    call = dense(
        802, batch=4, seqlen_q=1, seqlen_kv=3000, num_heads=4, num_kv_heads=2, head_dim=64, dtype=dtype
    )
    lens = np.array([700, 3000, 1, 1500])
    backend = CUDA[0].reproducible
    out, lse = run(call.but(seq_lens=lens), backend)
    for b, n in enumerate(lens):
        alone = call.of(q=call.arrays["q"][b : b + 1], **{x: call.arrays[x][b : b + 1, :n] for x in "kv"})
        assert_same_bits(run(alone, backend), (out[b : b + 1], lse[b : b + 1]), f"sequence {b}")


@pytest.mark.skipif(not CUDA_IS_EMULATED, reason="a GPU has the shared memory that it has")
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_bits_of_pages_where_shared_memory_is_short(monkeypatch, dtype):
    """Where the keys of a tile lie takes shared memory, but not from the tile."""
    monkeypatch.setattr(_device, "platform", Platform("sm_86"))
    call = dense(
        803, batch=1, seqlen_q=40, seqlen_kv=300, num_heads=1, dtype=dtype,
        head_dim=32 if dtype == "float16" else 64, head_dim_v=64, causal=dtype == "float16",
    )  # fmt: skip
    backend = CUDA[0].reproducible
    assert_same_bits(run(paged(call, 16), backend), run(call, backend), "paged")


@pytest.mark.skipif(not CUDA_IS_EMULATED, reason="a GPU has the shared memory that it has")
def test_bits_of_few_rows_where_shared_memory_is_short(monkeypatch):
    """Twice as many rows take more shared memory, but not from what decides the order of sums."""
    monkeypatch.setattr(_device, "platform", Platform("sm_75"))
    call = dense(804, batch=1, seqlen_q=2, seqlen_kv=300, num_heads=8, num_kv_heads=1, head_dim=128)
    call = quantised(call.of(q=call.arrays["q"].astype(np.float16)), "int8")
    backend = CUDA[0].reproducible
    out, lse = run(call, backend)
    one = run(call.of(q=call.arrays["q"][:, :1]), backend)
    assert_same_bits(one, (out[:, :1], lse[..., :1]), "one query")


def test_more_blocks_than_can_be_launched_are_refused(monkeypatch):
    """A launch takes 2^31 - 1 blocks; what is beyond would be cut off, and results left unwritten."""
    monkeypatch.setattr(_plan, "MAX_BLOCKS", 20)
    call = dense(802, batch=7, seqlen_q=1, seqlen_kv=9, num_heads=3, head_dim=24, dtype="float64")
    with pytest.raises(pyflash.UnsupportedError, match=r"q: 7 sequences of 3 heads, \d+ blocks of threads"):
        run(call, CUDA[0])
