"""Calls whose sequences are spread over ranks: cases, and how every rank computes its part of one.

All ranks have the whole arrays, of which each takes its shard; what comes out is gathered and held to the
oracle. It makes no difference here who the ranks are: threads, or processes under MPI.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from calls import dense, pages_of, quantised, varlen
from oracle import Call, assert_matches

import pyflash
from pyflash.distributed import (
    context_parallel_decode,
    head_parallel_attention,
    ring_attention,
    shard,
    unshard,
)
from pyflash.distributed._schedules import SCHEDULES

FUNCTIONS = {"ring": ring_attention, "heads": head_parallel_attention}

#: Per head, not in any order.
SLOPES = np.array([0.5, 0.0625, 0.25, 0.125])
SINKS = np.array([0.5, -1.0, 2.0, -np.inf])

#: name -> (what is computed, whether ranks have different numbers of tokens)
_SPECS: dict[str, tuple[dict[str, Any], bool]] = {
    "full": (dict(seqlen_q=37, seqlen_kv=37), False),
    "causal": (dict(seqlen_q=64, seqlen_kv=64, causal=True), False),
    "causal float64": (dict(seqlen_q=37, seqlen_kv=37, causal=True, dtype="float64"), False),
    "causal float16": (dict(seqlen_q=50, seqlen_kv=50, causal=True, dtype="float16"), True),
    "causal bfloat16": (dict(seqlen_q=50, seqlen_kv=50, causal=True, dtype="bfloat16"), False),
    "uneven": (dict(seqlen_q=41, seqlen_kv=41, causal=True, head_dim_v=5), True),
    "more keys": (dict(seqlen_q=20, seqlen_kv=61, causal=True), True),
    "more queries": (dict(seqlen_q=61, seqlen_kv=20, causal=True), False),
    "top left": (dict(seqlen_q=20, seqlen_kv=31, causal="top_left"), False),
    "offsets": (dict(seqlen_q=20, seqlen_kv=31, causal=True, q_offset=np.array([3, -4])), True),
    "window": (dict(seqlen_q=64, seqlen_kv=64, causal=True, window=(9, 0)), False),
    "uneven window": (dict(seqlen_q=50, seqlen_kv=50, window=(4, 7)), True),
    "window of one": (dict(seqlen_q=33, seqlen_kv=33, window=(0, 0)), False),
    "terms": (dict(seqlen_q=40, seqlen_kv=40, causal=True, softcap=3.0, sinks=SINKS, scale=0.5), False),
    "slopes": (dict(seqlen_q=40, seqlen_kv=40, alibi_slopes=SLOPES), False),
    "causal slopes": (dict(seqlen_q=40, seqlen_kv=45, causal=True, alibi_slopes=SLOPES, sinks=SINKS), True),
    "slopes of sequences": (
        dict(
            seqlen_q=30,
            seqlen_kv=40,
            window=(8, 3),
            alibi_slopes=np.stack([SLOPES, SLOPES[::-1]]),
            q_offset=np.array([3, 12]),
        ),
        False,
    ),
    "one token": (dict(seqlen_q=1, seqlen_kv=1, causal=True), False),
    "fewer tokens than ranks": (dict(seqlen_q=3, seqlen_kv=2), False),
    "no queries": (dict(seqlen_q=0, seqlen_kv=9), False),
    "no keys": (dict(seqlen_q=9, seqlen_kv=0, sinks=SINKS), False),
    "heads first": (dict(seqlen_q=40, seqlen_kv=40, causal=True, layout="bhsd"), True),
    "stored int8": (dict(seqlen_q=40, seqlen_kv=40, causal=True), False),
    "packed": (dict(seqlens=([7, 0, 20, 3, 1], [9, 5, 22, 0, 1]), causal=True), False),
    "packed full": (dict(seqlens=([13, 30], [13, 30])), False),
    "packed uneven": (dict(seqlens=([17, 12, 20], [17, 12, 20]), causal=True, window=(8, 0)), True),
    "packed slopes": (
        dict(
            seqlens=([7, 0, 20], [9, 5, 22]),
            causal=True,
            alibi_slopes=np.stack([SLOPES, SLOPES[::-1], SLOPES]),
        ),
        False,
    ),
    "spans": (dict(seqlen_q=40, seqlen_kv=40, causal=True, spans=pyflash.spans.chunked(40, 40, 16)), True),
    "spans of sequences": (
        dict(
            seqlen_q=40, seqlen_kv=40, spans=pyflash.spans.left_padding(np.array([3, 30], np.int64), 40, 40)
        ),
        False,
    ),
}
CASES = tuple(_SPECS)


def _in_layout(call: Call) -> Call:
    """The call with the axes of its arrays in the order that it says."""
    if call.options.get("layout") != "bhsd":
        return call
    return call.of(**{name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in call.arrays.items()})


@functools.cache
def call_of(name: str) -> Call:
    spec = dict(num_heads=4, num_kv_heads=2) | _SPECS[name][0]
    if "seqlens" in spec:
        return varlen(*spec.pop("seqlens"), seed=81, **spec)
    call = _in_layout(dense(80, **spec))
    return quantised(call, "int8", "heads") if name.startswith("stored") else call


def lengths_of(name: str, size: int, schedule: str, which: str) -> np.ndarray | None:
    """Tokens of each rank and sequence where they are not as equal as can be; the last rank has none."""
    if not _SPECS[name][1] or schedule == "stripe":
        return None
    call = call_of(name)
    packed = call.arrays.get(f"cu_seqlens_{which}")
    axis = -2 if call.options.get("layout") == "bhsd" else -3
    totals = [call.arrays["q" if which == "q" else "k"].shape[axis]] if packed is None else np.diff(packed)
    rng = np.random.default_rng(size)
    num = max(size - 1, 1)
    lengths = np.zeros((size, len(totals)), np.int64)
    lengths[:num] = np.stack([rng.multinomial(total, np.full(num, 1 / num)) for total in totals], axis=1)
    return lengths


def result(
    comm: Any, name: str, schedule: str, function: str = "ring", made: Any = np.asarray, **more: Any
) -> Any:
    """What a rank gets: out, lse, and its prefix sums if the call is packed; `made` makes its arrays."""
    call, size = call_of(name), comm.size
    options = dict(call.options)
    axis = -2 if options.get("layout") == "bhsd" else -3
    how = dict(rank=comm.rank, size=size, schedule=schedule)
    lengths = {which: lengths_of(name, size, schedule, which) for which in ("q", "kv")}
    cu = {which: call.arrays.get(f"cu_seqlens_{which}") for which in ("q", "kv")}
    arrays = {}
    for array, which in (("q", "q"), ("k", "kv"), ("v", "kv")):
        cut = shard(call.arrays[array], **how, axis=axis, cu_seqlens=cu[which], lengths=lengths[which])
        arrays[array] = cut if cu[which] is None else cut[0]
        if cu[which] is not None:
            options[f"cu_seqlens_{which}"] = cut[1]
    if "spans" in options:
        rows = [
            np.broadcast_to(end, (*end.shape[:-1], call.arrays["q"].shape[axis])) for end in options["spans"]
        ]
        options["spans"] = tuple(shard(end, **how, axis=-1, lengths=lengths["q"]) for end in rows)
    options = dict(num_threads=1) | options | more
    arrays = {array: made(x) for array, x in arrays.items()}
    got = FUNCTIONS[function](**arrays, comm=comm, schedule=schedule, return_lse=True, **options)
    return (*got, options.get("cu_seqlens_q"))


def whole(results: list[Any], name: str, schedule: str) -> tuple[np.ndarray, np.ndarray]:
    """Results of all ranks, put together."""
    axis = -2 if call_of(name).options.get("layout") == "bhsd" else -3
    cu = [one[2] for one in results]
    if cu[0] is None:
        return tuple(
            unshard([one[i] for one in results], schedule=schedule, axis=a) for i, a in enumerate((axis, -1))
        )
    return tuple(
        unshard([one[i] for one in results], schedule=schedule, axis=a, cu_seqlens=cu)[0]
        for i, a in enumerate((-3, -1))
    )


def check(results: list[Any], name: str, schedule: str) -> None:
    """Hold the results of all ranks to the error rule."""
    assert_matches(*whole(results, name, schedule), call_of(name))


# --- decoding ---

#: name -> (call, page size or None)
_DECODES: dict[str, tuple[dict[str, Any], int | None]] = {
    "one token": (dict(seqlen_q=1, seqlen_kv=50), None),
    "several tokens": (dict(seqlen_q=4, seqlen_kv=50), None),
    "heads first": (dict(seqlen_q=4, seqlen_kv=50, layout="bhsd"), None),
    "window": (dict(seqlen_q=1, seqlen_kv=50, window=(11, 0)), None),
    "float64": (dict(seqlen_q=2, seqlen_kv=50, dtype="float64"), None),
    "bfloat16": (dict(seqlen_q=1, seqlen_kv=50, dtype="bfloat16"), None),
    "terms": (dict(seqlen_q=3, seqlen_kv=50, softcap=4.0, alibi_slopes=SLOPES, sinks=SINKS), None),
    "few keys": (dict(seqlen_q=1, seqlen_kv=2), None),
    "no keys": (dict(seqlen_q=1, seqlen_kv=0, sinks=SINKS), None),
    "pages": (dict(seqlen_q=1, seqlen_kv=50, sinks=SINKS), 4),
    "pages of one": (dict(seqlen_q=2, seqlen_kv=21, window=(6, 0)), 1),
    "large pages": (dict(seqlen_q=3, seqlen_kv=50), 16),
}
DECODES = tuple(_DECODES)


@functools.cache
def decode_call(name: str) -> Call:
    return _in_layout(dense(82, **dict(num_heads=4, num_kv_heads=2, causal=True) | _DECODES[name][0]))


def decode(comm: Any, name: str, *, uneven: bool = False, made: Any = np.asarray, **more: Any) -> Any:
    """What a rank gets: out and lse of all rows; `made` makes its arrays."""
    call, page_size = decode_call(name), _DECODES[name][1]
    axis = -2 if call.options.get("layout") == "bhsd" else -3
    total = call.arrays["k"].shape[axis]
    lengths = None
    if uneven:  # the first rank has none
        lengths = np.zeros(comm.size, np.int64)
        lengths[-1] = total
        if comm.size > 2:
            lengths[1:] = np.random.default_rng(comm.size).multinomial(
                total, np.full(comm.size - 1, 1 / (comm.size - 1))
            )
    how = dict(schedule="contiguous", axis=axis, lengths=lengths)
    keys = [shard(call.arrays[x], comm.rank, comm.size, **how) for x in "kv"]
    options = dict(num_threads=1) | call.options | more
    if page_size is not None:
        arrays = pages_of(list(zip(*keys, strict=True)), page_size, seed=comm.rank)
        keys = [arrays.pop("k_cache"), arrays.pop("v_cache")]
        options |= arrays
    q, k, v = (made(x) for x in (call.arrays["q"], *keys))
    return context_parallel_decode(q, k, v, comm=comm, return_lse=True, **options)


__all__ = ["CASES", "DECODES", "SCHEDULES", "call_of", "check", "decode", "decode_call", "result", "whole"]
