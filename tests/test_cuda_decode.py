"""The decode kernel: chunks that are not full, how keys lie in memory, and the merge of splits."""

from __future__ import annotations

import numpy as np
import pytest
from calls import dense, normal, on_device, on_host, paged, quantised, run, varlen
from conftest import TestedBackend
from oracle import Call, assert_matches

import pyflash

CUDA = TestedBackend("cuda", {"backend": "cuda"})


@pytest.fixture
def check():
    """Compares a call with the oracle."""
    reason = pyflash.available_backends()["cuda"]
    if reason is not None:
        pytest.skip(reason)

    def compare(call: Call, compute=run, **options) -> None:
        assert_matches(*compute(call, CUDA, **options), call)

    return compare


def one_query(seqlen_kv: int, seed: int = 0, **spec) -> Call:
    shape = dict(batch=2, num_heads=4, num_kv_heads=1, head_dim=128, dtype="bfloat16")
    return dense(seed, seqlen_kv=seqlen_kv, **{"seqlen_q": 1, **shape, **spec})


@pytest.mark.parametrize("seqlen_kv", [1, 15, 16, 17, 127, 500])
def test_lengths_cuda(check, seqlen_kv):
    check(one_query(seqlen_kv))


@pytest.mark.parametrize("page_size", [3, 16, 24, 64])
def test_pages_cuda(check, page_size):
    """What lies behind the lengths is NaN, and is not read."""
    call = one_query(600, seqlen_q=3, seq_lens=np.array([600, 77]), causal=True)
    check(paged(call, page_size, fill=np.nan))


@pytest.mark.parametrize(
    "options",
    [
        {"window": (40, 0), "sink_tokens": 5, "causal": True, "seqlen_q": 4},
        {"window": (9, 0), "seqlen_q": 2, "num_heads": 8},
        {"mask": np.arange(700) % 3 == 0},
    ],
)
def test_chunks_of_which_few_keys_are_seen_cuda(check, options):
    """Places of a stage hold zeros where rows were, and rows again after that."""
    check(one_query(700, **options))


def test_ragged_rows_cuda(check):
    check(varlen([1, 2, 1, 3], [40, 300, 0, 17], num_heads=4, num_kv_heads=2, head_dim=64, dtype="float16"))


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_scales_cuda(check, stored):
    call = one_query(300, kv_dtype="float32", seq_lens=np.array([300, 41]))
    check(quantised(call, stored, "tokens"))


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_scale_of_values_keeps_its_digits_cuda(check, stored, dtype):
    """A row of one key is that key's values, however fine the type of the result is."""
    call = one_query(1, kv_dtype="float32", dtype=dtype, out_dtype="float32")
    check(quantised(call, stored, "tokens"))


@pytest.mark.parametrize("seqlen_kv", [5, 33, 290])
def test_latent_cache_cuda(check, seqlen_kv):
    """Values inside of keys, on the GPU, are not copied again."""
    call = dense(5, batch=1, seqlen_q=1, seqlen_kv=seqlen_kv, num_heads=16, num_kv_heads=1, head_dim=576,
                 head_dim_v=512, dtype="float16")  # fmt: skip
    check(call)

    def compute(call: Call, backend: TestedBackend) -> tuple[np.ndarray, ...]:
        q, k = (on_device(call.arrays[name]) for name in "qk")
        results = pyflash.flash_attention(q, k, k[..., :512], return_lse=True, **backend.kwargs)
        return tuple(on_host(x) for x in results)

    check(Call(call.function, {**call.arrays, "v": call.arrays["k"][..., :512]}, call.options), compute)


def test_rows_far_apart_cuda(check):
    """Heads before tokens, and tokens with a gap between them."""
    call = one_query(130, num_kv_heads=2)
    wide = {name: normal(9, (2, 260, 2, 128), "bfloat16") for name in "kv"}
    arrays = {"q": call.arrays["q"], **{name: x[:, ::2] for name, x in wide.items()}}
    check(Call(call.function, arrays, call.options))


@pytest.mark.parametrize("num_splits", [2, 16, 17, 40])
@pytest.mark.parametrize("width", [80, 128, 256])
def test_many_splits_cuda(check, num_splits, width):
    """The merge: threads without an output, rows wider than a block, more states than it takes at once."""
    check(one_query(350, head_dim=64, head_dim_v=width), num_splits=num_splits)
