"""The bits of a row depend on its query, its keys and the options: not on threads or on company."""

from __future__ import annotations

import numpy as np
import pytest
from calls import (
    DTYPE_NAMES,
    assert_same_bits,
    dense,
    explain,
    given,
    once,
    paged,
    paged_varlen,
    quantised,
    run,
    varlen,
)
from oracle import Call
from terms import TERMS, first_keys_of, rows_of, sequence_of, with_terms

import pyflash

#: name -> call: enough work items that threads share them out differently
CALLS = {
    "prefill": lambda dtype: dense(
        101, seqlen_q=130, seqlen_kv=200, num_heads=4, num_kv_heads=2, head_dim=16, dtype=dtype, causal=True
    ),
    "decode": lambda dtype: dense(102, seqlen_q=1, seqlen_kv=1100, num_heads=8, num_kv_heads=2, dtype=dtype),
    "one head, many keys": lambda dtype: dense(
        103, batch=1, seqlen_q=1, seqlen_kv=3000, num_heads=1, head_dim=4, dtype=dtype
    ),
    "packed": lambda dtype: varlen(
        [1, 0, 60, 3, 1],
        [900, 7, 60, 130, 0],
        seed=104,
        num_heads=4,
        num_kv_heads=2,
        dtype=dtype,
        causal=True,
    ),
    "paged": lambda dtype: paged(
        dense(105, batch=3, seqlen_q=2, seqlen_kv=600, seq_lens=np.array([600, 3, 520]), dtype=dtype), 24
    ),
}


@pytest.fixture
def backend(backend):
    """What is promised about bits is promised on CUDA where it is asked for."""
    return backend.reproducible


@once
def call_of(name: str, dtype: str = "float32") -> Call:
    return CALLS[name](dtype)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("name", CALLS)
def test_any_number_of_threads(c_backend, name, dtype):
    call = call_of(name, dtype)
    want = run(call, c_backend, num_threads=1)
    assert explain(call, c_backend, num_threads=8).num_threads > 3
    for num_threads in (2, 3, 8, None):
        assert_same_bits(run(call, c_backend, num_threads=num_threads), want, f"{num_threads} threads")


@pytest.mark.parametrize("num_splits", [2, 5, 16])
@pytest.mark.parametrize("name", CALLS)
def test_any_number_of_threads_with_splits(c_backend, name, num_splits):
    call = call_of(name)
    want = run(call, c_backend, num_threads=1, num_splits=num_splits)
    for num_threads in (2, 3, 8):
        assert_same_bits(run(call, c_backend, num_threads=num_threads, num_splits=num_splits), want)


@pytest.mark.parametrize("name", CALLS)
def test_run_to_run(backend, name):
    call = call_of(name)
    want = run(call, backend)
    for _ in range(3):
        assert_same_bits(run(call, backend), want)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("family", ["prefill", "decode"])
def test_a_row_alone_and_among_others(backend, family, dtype):
    """Any sub-set of the rows, given with its own offsets, has the bits it has in the whole."""
    call = dense(
        106,
        batch=1,
        seqlen_q=61,
        seqlen_kv=150,
        num_heads=4,
        num_kv_heads=2,
        head_dim=12,
        dtype=dtype,
        causal=True,
        window=(100, 3),
        q_offset=80,
        family=family,
    )
    out, lse = run(call, backend)
    for lo, hi in ((0, 1), (17, 18), (60, 61), (3, 12), (8, 32), (0, 60), (24, 61), (37, 39)):
        part = call.of(q=call.arrays["q"][:, lo:hi]).but(q_offset=80 + lo)
        assert_same_bits(run(part, backend), (out[:, lo:hi], lse[..., lo:hi]), f"rows {lo}:{hi}")


@pytest.mark.parametrize("family", ["prefill", "decode"])
def test_a_row_alone_and_among_others_beside_underflow(backend, family):
    """Values so small that products underflow, of both signs: even the sign of a zero stays."""
    call = dense(
        115,
        batch=1,
        seqlen_q=7,
        seqlen_kv=1300,
        num_heads=1,
        causal=True,
        window=(20, 0),
        q_offset=500,
        family=family,
    )
    call.arrays["v"][...] = np.sign(call.arrays["v"]) * np.float32(1e-45)
    out, lse = run(call, backend)
    for row in range(7):
        part = call.of(q=call.arrays["q"][:, row : row + 1]).but(q_offset=500 + row)
        assert_same_bits(run(part, backend), (out[:, row : row + 1], lse[..., row : row + 1]), f"row {row}")


@pytest.mark.parametrize("family", ["prefill", "decode"])
def test_a_head_group_alone_and_among_others(backend, family):
    call = dense(107, seqlen_q=9, seqlen_kv=90, num_heads=6, num_kv_heads=3, head_dim=12, family=family)
    out, lse = run(call, backend)
    for h in range(3):
        arrays = {"q": call.arrays["q"][:, :, 2 * h : 2 * h + 2]}
        arrays |= {name: call.arrays[name][:, :, h : h + 1] for name in ("k", "v")}
        group = run(call.of(**arrays), backend)
        assert_same_bits(group, (out[:, :, 2 * h : 2 * h + 2], lse[:, 2 * h : 2 * h + 2]), f"kv head {h}")


@pytest.mark.parametrize("family", ["prefill", "decode"])
def test_heads_of_a_group_do_not_know_of_each_other(backend, family):
    """Within one family a query head has the same bits in a group of 4 as when k and v are repeated."""
    call = dense(108, seqlen_q=9, seqlen_kv=90, num_heads=8, num_kv_heads=2, head_dim=12, family=family)
    repeated = {name: np.repeat(call.arrays[name], 4, axis=2) for name in ("k", "v")}
    assert_same_bits(run(call.of(**repeated), backend), run(call, backend))


@pytest.mark.parametrize("seqlen_q", [1, 40])
@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_sequence_alone_and_in_a_batch(backend, dtype, seqlen_q):
    call = dense(109, batch=5, seqlen_q=seqlen_q, seqlen_kv=70, num_heads=2, dtype=dtype, causal=True)
    out, lse = run(call, backend)
    for b in (0, 3):
        alone = call.of(**{name: x[b : b + 1] for name, x in call.arrays.items()})
        assert_same_bits(run(alone, backend), (out[b : b + 1], lse[b : b + 1]), f"sequence {b}")
    order = np.array([4, 0, 0, 2])
    shuffled = call.of(**{name: x[order] for name, x in call.arrays.items()})
    assert_same_bits(run(shuffled, backend), (out[order], lse[order]), "another batch")


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_keys_that_a_row_does_not_see_leave_no_trace(backend, dtype, family):
    """A causal row has the same bits when the keys behind it do not exist."""
    call = dense(
        110,
        batch=1,
        seqlen_q=40,
        seqlen_kv=220,
        num_heads=2,
        dtype=dtype,
        causal=True,
        q_offset=10,
        family=family,
    )
    out, lse = run(call, backend)
    for length in (50, 51, 64, 128, 193, 219):
        shorter = call.of(**{name: call.arrays[name][:, :length] for name in ("k", "v")})
        assert_same_bits(run(shorter, backend), (out, lse), f"{length} keys")


def test_a_longer_decode_has_the_bits_of_a_shorter_one(backend):
    """The borders of the splits are fixed: masking the last keys away is the same as not having them."""
    call = dense(111, batch=1, seqlen_q=1, seqlen_kv=1500, num_heads=4, num_kv_heads=1, causal=True)
    for length in (1, 511, 512, 513, 1024, 1100):
        masked = call.but(q_offset=length - 1)
        shorter = call.of(**{name: call.arrays[name][:, :length] for name in ("k", "v")})
        assert_same_bits(run(masked, backend), run(shorter, backend), f"{length} keys")


def test_the_family_follows_from_rows_per_kv_head_alone(backend):
    """Default and forced family agree in bits: explain() names the one that was used."""
    for seqlen_q in (1, 2, 4, 5, 16, 17, 60):
        for num_heads, num_kv_heads in ((4, 4), (4, 1)):
            call = dense(
                112, batch=1, seqlen_q=seqlen_q, seqlen_kv=600, num_heads=num_heads, num_kv_heads=num_kv_heads
            )
            family = pyflash.explain(*call.arrays.values(), **backend.kwargs).family
            assert family == ("decode" if seqlen_q * num_heads // num_kv_heads <= 16 else "prefill")
            assert_same_bits(run(call, backend), run(call, backend, family=family), f"{seqlen_q} {num_heads}")


@pytest.mark.parametrize("page_size", [5, 64])
def test_mixed_families_in_one_call(backend, page_size):
    """Prompt chunks and single tokens of one call keep the bits they have in calls of their own."""
    call = varlen([40, 1, 1, 30], [40, 300, 7, 90], seed=113, num_heads=4, num_kv_heads=2, causal=True)
    want = run(call, backend)
    assert_same_bits(run(paged_varlen(call, page_size), backend), want)
    cu_q, cu_kv = call.arrays["cu_seqlens_q"], call.arrays["cu_seqlens_kv"]
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_kv[b], cu_kv[b + 1])
        arrays = {"q": call.arrays["q"][rows], "k": call.arrays["k"][keys], "v": call.arrays["v"][keys]}
        alone = Call("flash_attention", arrays, call.options)
        assert_same_bits(run(alone, backend), (want[0][rows], want[1][:, rows]), f"sequence {b}")


def test_work_space_of_the_caller_changes_nothing(c_backend):
    for name in CALLS:
        call = call_of(name)
        want = run(call, c_backend, num_threads=2)
        told = explain(call, c_backend, num_threads=2).workspace_bytes
        for fill in (0, 255):
            space = np.full(told + 200, fill, np.uint8)
            view = space[64 : 64 + told]
            before = space.copy()
            assert_same_bits(run_with_workspace(call, c_backend, view), want, name)
            view[...] = before[64 : 64 + told]
            assert (space == before).all(), f"{name}: written outside the work space"


def run_with_workspace(call, backend, workspace):
    """`calls.run`, which would see the work space change, without its comparison of inputs."""
    return getattr(pyflash, call.function)(
        *call.arrays.values(),
        **given(call.options, backend),
        return_lse=True,
        workspace=workspace,
        num_threads=2,
        **backend.kwargs,
    )


# --- with every option ---

#: Combinations of an option and how the keys are stored: type and form of the scale.
OPTIONS = [(name, None) for name in TERMS if name != "none"]
OPTIONS += [
    (name, stored)
    for stored in (("float16", None), ("float8_e4m3fn", "heads"), ("int8", "tokens"), ("int4", "tokens"))
    for name in ("none", "many")
]


def option_id(option: object) -> str:
    name, stored = option
    return name if stored is None else f"{name}, {stored[0]}"


@once
def with_option(option: object) -> Call:
    name, stored = option
    call = dense(116, batch=3, seqlen_q=27, seqlen_kv=150, num_heads=4, num_kv_heads=2, q_offset=90)
    call = with_terms(call, name)
    return call if stored is None else quantised(call, *stored)


each_option = pytest.mark.parametrize("option", OPTIONS, ids=option_id)
each_family = pytest.mark.parametrize("family", ["prefill", "decode"])


@each_option
def test_options_and_any_number_of_threads(c_backend, option):
    call = with_option(option)
    for family in ("prefill", "decode"):
        want = run(call, c_backend, num_threads=1, family=family)
        for num_threads in (2, 5):
            assert_same_bits(run(call, c_backend, num_threads=num_threads, family=family), want)
    want = run(call, c_backend, num_threads=1, num_splits=4)
    assert_same_bits(run(call, c_backend, num_threads=3, num_splits=4), want, "splits")


@each_family
@each_option
def test_options_and_a_row_alone(backend, option, family):
    """A tile that other rows alone see must not show, nor which rows share a tile."""
    call = with_option(option)
    out, lse = run(call, backend, family=family)
    for lo, hi in ((0, 1), (13, 14), (26, 27), (3, 9), (8, 27)):
        part = run(rows_of(call, lo, hi), backend, family=family)
        assert_same_bits(part, (out[:, lo:hi], lse[..., lo:hi]), f"rows {lo}:{hi}")


@each_family
@each_option
def test_options_and_a_sequence_alone(backend, option, family):
    call = with_option(option)
    out, lse = run(call, backend, family=family)
    for b in range(3):
        alone = run(sequence_of(call, b), backend, family=family)
        assert_same_bits(alone, (out[b : b + 1], lse[b : b + 1]), f"sequence {b}")


#: A tree counts from the last key, so that its rows are no longer the same when keys follow.
CONTINUED = [option for option in OPTIONS if "tree" not in option[0]]


@each_family
@pytest.mark.parametrize("option", CONTINUED, ids=option_id)
def test_options_and_a_prompt_continued_from_a_cache(backend, option, family):
    """Chunks of a prompt, each on the keys so far and in pages, have the bits of the whole prompt."""
    call = with_option(option).but(causal=True)
    out, lse = run(call, backend, family=family)
    for lo, hi in ((0, 5), (5, 26), (26, 27)):
        chunk = first_keys_of(rows_of(call, lo, hi), 90 + hi)
        want = out[:, lo:hi], lse[..., lo:hi]
        assert_same_bits(run(chunk, backend, family=family), want, f"rows {lo}:{hi}")
        assert_same_bits(run(paged(chunk, 16), backend, family=family), want, f"rows {lo}:{hi} in pages")


@each_option
def test_options_run_to_run_and_explained(backend, option):
    call = with_option(option)
    want = run(call, backend)
    assert_same_bits(run(call, backend), want)
    assert explain(call, backend).family == "prefill"


@pytest.mark.parametrize("name", ["many", "sinks", "mask of blocks", "score_mod"])
def test_work_space_of_the_caller_with_options(c_backend, name):
    call = with_option((name, None))
    want = run(call, c_backend, num_threads=2)
    told = explain(call, c_backend, num_threads=2).workspace_bytes
    for fill in (0, 255):
        assert_same_bits(run_with_workspace(call, c_backend, np.full(told, fill, np.uint8)), want, name)
