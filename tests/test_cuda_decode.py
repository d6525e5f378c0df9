"""The decode kernel by what its plan chooses: rows that come by bulk copies, and the merge of splits."""

from __future__ import annotations

import numpy as np
import pytest
from calls import assert_same_bits, dense, normal, on_device, on_host, paged, quantised, run, varlen
from conftest import TestedBackend
from oracle import Call, assert_matches
from test_cuda_forward_mma import H200

import pyflash
from pyflash import _device_calls
from pyflash.gpu import _choose, _decode

CUDA = TestedBackend("cuda", {"backend": "cuda"})
DECODE = H200._replace(max_seqlen_q=1, num_queries=1, head_dim=128, head_dim_v=128)
#: The shortest row that is copied whole: as the plan has it, or longer than any.
USUAL, NEVER = _decode.BULK_BYTES, 10**9


def is_bulk(**change) -> bool:
    plan = _decode.plan(DECODE._replace(**change))
    assert plan is not None
    return dict(plan.steps[0].source.defines)["PF_BULK"] == "1"


def test_rows_are_copied_whole_where_that_pays():
    assert is_bulk() and is_bulk(capability=100) and is_bulk(page_size=24)
    assert is_bulk(head_dim=576, head_dim_v=512)
    assert is_bulk(kv_dtype="int8", scaled=True)
    assert not is_bulk(capability=89, shared_bytes=101376)
    assert not is_bulk(head_dim=72), "a row that is padded has more bytes than are stored"
    assert not is_bulk(kv_dtype="int4", scaled=True), "short rows"


def test_the_merge_of_splits_may_begin_early():
    steps = _choose.plan(DECODE._replace(num_splits=4)).steps
    assert [(step.source.name, step.overlaps) for step in steps] == [
        ("pf_decode_mma", False),
        ("pf_combine", True),
    ]


@pytest.fixture
def both(monkeypatch):
    """Computes a call by either kind of copies, which have the same bits, and compares with the oracle."""
    reason = pyflash.available_backends()["cuda"]
    if reason is not None:
        pytest.skip(reason)

    def check(call: Call, compute=run, **options) -> None:
        results = []
        for shortest in (USUAL, NEVER):
            monkeypatch.setattr(_decode, "BULK_BYTES", shortest)
            _device_calls.clear()  # it makes calls again as they were planned before
            results.append(compute(call, CUDA, **options))
        assert_same_bits(*results)
        assert_matches(*results[0], call)

    return check


def one_query(seqlen_kv: int, seed: int = 0, **spec) -> Call:
    shape = dict(batch=2, num_heads=4, num_kv_heads=1, head_dim=128, dtype="bfloat16")
    return dense(seed, seqlen_kv=seqlen_kv, **{"seqlen_q": 1, **shape, **spec})


@pytest.mark.parametrize("seqlen_kv", [1, 15, 16, 17, 127, 500])
def test_lengths_cuda(both, seqlen_kv):
    both(one_query(seqlen_kv))


@pytest.mark.parametrize("page_size", [3, 16, 24, 64])
def test_pages_cuda(both, page_size):
    """What lies behind the lengths is NaN, and is not read."""
    call = one_query(600, seqlen_q=3, seq_lens=np.array([600, 77]), causal=True)
    both(paged(call, page_size, fill=np.nan))


@pytest.mark.parametrize(
    "options",
    [
        {"window": (40, 0), "sink_tokens": 5, "causal": True, "seqlen_q": 4},
        {"window": (9, 0), "seqlen_q": 2, "num_heads": 8},
        {"mask": np.arange(700) % 3 == 0},
    ],
)
def test_chunks_of_which_few_keys_are_seen_cuda(both, options):
    """A stage has zeros in places where rows were, and rows again after that."""
    both(one_query(700, **options))


def test_ragged_rows_cuda(both):
    both(varlen([1, 2, 1, 3], [40, 300, 0, 17], num_heads=4, num_kv_heads=2, head_dim=64, dtype="float16"))


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_scales_come_by_other_copies_cuda(both, stored):
    call = one_query(300, kv_dtype="float32", seq_lens=np.array([300, 41]))
    both(quantised(call, stored, "tokens"))


@pytest.mark.parametrize("seqlen_kv", [5, 33, 290])
def test_latent_cache_cuda(both, seqlen_kv):
    """Values inside of keys, on the GPU, are not copied again."""
    call = dense(5, batch=1, seqlen_q=1, seqlen_kv=seqlen_kv, num_heads=16, num_kv_heads=1, head_dim=576,
                 head_dim_v=512, dtype="float16")  # fmt: skip
    both(call)

    def compute(call: Call, backend: TestedBackend) -> tuple[np.ndarray, ...]:
        q, k = (on_device(call.arrays[name]) for name in "qk")
        results = pyflash.flash_attention(q, k, k[..., :512], return_lse=True, **backend.kwargs)
        return tuple(on_host(x) for x in results)

    both(Call(call.function, {**call.arrays, "v": call.arrays["k"][..., :512]}, call.options), compute)


def test_rows_far_apart_cuda(both):
    """Heads before tokens, and tokens with a gap between them."""
    call = one_query(130, num_kv_heads=2)
    wide = {name: normal(9, (2, 260, 2, 128), "bfloat16") for name in "kv"}
    arrays = {"q": call.arrays["q"], **{name: x[:, ::2] for name, x in wide.items()}}
    both(Call(call.function, arrays, call.options))


@pytest.mark.parametrize("num_splits", [2, 16, 17, 40])
@pytest.mark.parametrize("width", [80, 128, 256])
def test_many_splits_cuda(both, num_splits, width):
    """The merge: lanes without an output, outputs for several rounds, more states than it takes at once."""
    both(one_query(350, head_dim=64, head_dim_v=width), num_splits=num_splits)
