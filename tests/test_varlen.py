"""Packed sequences of different lengths: each is computed as if it were alone."""

from __future__ import annotations

import numpy as np
import pytest
from calls import DTYPE_NAMES, assert_same_bits, dense, once, paged_varlen, prefix_sums, run, varlen
from oracle import Call, assert_matches

#: name -> (lengths of the queries, lengths of the keys, spec)
BATCHES = {
    "one sequence": ([7], [9], {}),
    "one token each": ([1, 1, 1], [5, 1, 33], dict(causal=True)),
    "mixed": ([5, 1, 40, 1], [5, 80, 70, 33], dict(causal=True)),
    "full": ([5, 1, 40, 1], [5, 80, 70, 33], {}),
    "top left": ([5, 12, 3], [9, 7, 3], dict(causal="top_left")),
    "window": ([30, 1, 9], [30, 40, 70], dict(causal=True, window=(6, 0))),
    "empty in the middle": ([3, 0, 2], [4, 0, 6], dict(causal=True)),
    "empty at both ends": ([0, 3, 0], [0, 4, 0], {}),
    "queries without keys": ([2, 3, 30], [0, 4, 0], {}),
    "keys without queries": ([0, 3, 0], [6, 4, 9], dict(causal=True)),
    "all empty": ([0, 0], [0, 0], {}),
    "no sequence": ([], [], {}),
    "many short ones": ([1, 2, 3, 4] * 5, [4, 3, 2, 1] * 5, dict(causal=True)),
    "own offsets": ([4, 4, 4], [9, 9, 9], dict(causal=True, q_offset=np.array([0, 3, -2]))),
    "one offset": ([4, 2], [9, 9], dict(causal=True, q_offset=5)),
}


@once
def call_of(name: str, dtype: str = "float32", index_dtype: str = "int32") -> Call:
    seqlens_q, seqlens_kv, spec = BATCHES[name]
    spec = dict(num_heads=4, num_kv_heads=2, head_dim=8, head_dim_v=5) | spec
    return varlen(seqlens_q, seqlens_kv, seed=41, dtype=dtype, index_dtype=index_dtype, **spec)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("name", BATCHES)
def test_against_the_oracle(backend, name, dtype):
    call = call_of(name, dtype, "int64" if dtype == "float16" else "int32")
    assert_matches(*run(call, backend), call)


@pytest.mark.parametrize("family", [None, "prefill", "decode"])
@pytest.mark.parametrize("name", ["mixed", "window", "own offsets", "empty in the middle", "many short ones"])
def test_each_sequence_has_the_bits_it_has_alone(backend, name, family):
    call = call_of(name)
    out, lse = run(call, backend, family=family)
    cu_q, cu_kv = call.arrays["cu_seqlens_q"], call.arrays["cu_seqlens_kv"]
    for b in range(len(cu_q) - 1):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
        options = {n: x[b] if isinstance(x, np.ndarray) else x for n, x in call.options.items()}
        arrays = {"q": call.arrays["q"][rows], "k": call.arrays["k"][keys], "v": call.arrays["v"][keys]}
        alone = Call("flash_attention", arrays, options)
        assert_same_bits(run(alone, backend, family=family), (out[rows], lse[:, rows]), f"sequence {b}")


def test_equal_lengths_are_a_dense_batch(backend):
    one = dense(42, batch=3, seqlen_q=4, seqlen_kv=30, causal=True)
    arrays = {name: x.reshape(-1, *x.shape[2:]) for name, x in one.arrays.items()}
    packed = Call(
        "flash_attention_varlen",
        {**arrays, "cu_seqlens_q": prefix_sums([4] * 3), "cu_seqlens_kv": prefix_sums([30] * 3)},
        one.options,
    )
    out, lse = run(packed, backend)
    want_out, want_lse = run(one, backend)
    assert_same_bits(out.reshape(want_out.shape), want_out)
    assert_same_bits(lse.reshape(2, 3, 4).swapaxes(0, 1), want_lse)


def test_strided_packed_arrays(backend):
    call = call_of("mixed")
    moved = {}
    for name in ("q", "k", "v"):
        x = call.arrays[name]
        moved[name] = np.ascontiguousarray(x.transpose(1, 2, 0)).transpose(2, 0, 1)
        assert moved[name].strides != x.strides
    index = {n: np.repeat(call.arrays[n], 2)[::2] for n in ("cu_seqlens_q", "cu_seqlens_kv")}
    assert_same_bits(run(call.of(**moved, **index), backend), run(call, backend))


def test_index_arrays_may_differ_in_type(backend):
    call = call_of("mixed")
    wide = call.of(cu_seqlens_kv=call.arrays["cu_seqlens_kv"].astype(np.int64))
    assert_same_bits(run(wide, backend), run(call, backend))


def test_one_long_sequence_among_short_ones(backend):
    call = varlen([1, 60, 1, 1], [1200, 60, 3, 700], seed=43, num_heads=4, num_kv_heads=2, causal=True)
    assert_matches(*run(call, backend), call)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("num_splits", [None, 3])
def test_few_and_many_rows_in_one_call(backend, dtype, num_splits):
    """Prompts beside single tokens over many keys: each family leaves the rows of the other alone."""
    call = varlen(
        [1, 0, 60, 3, 9],
        [900, 7, 60, 1130, 20],
        seed=71,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        dtype=dtype,
        causal=True,
        num_splits=num_splits,
    )
    assert_matches(*run(call, backend), call)
    assert_matches(*run(paged_varlen(call, 16), backend), paged_varlen(call, 16))
