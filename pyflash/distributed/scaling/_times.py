"""Times: counts divided by speeds, and who waits for whom."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..._checks import integer
from ..._description import Array
from ._counts import head_parallel_bytes, heads_of_ranks, pairs, tokens_sent
from ._machine import MERGE_PASSES, Hardware, Link, Workload


class Step(NamedTuple):
    """A step of the ring on each rank, in seconds; all ``(ranks,)``.

    Attributes
    ----------
    compute, merge : ndarray
        Of the kernel, and of merging its state.
    overhead : ndarray
        Of the caller, as far as the two do not hide it.
    transfer : ndarray
        Of the message that a rank sends, by itself.
    exposed : ndarray
        Waiting for messages and for ranks that are late.
    """

    compute: Array
    merge: Array
    overhead: Array
    transfer: Array
    exposed: Array


class Prediction(NamedTuple):
    """What a call takes, in seconds.

    Attributes
    ----------
    ranks : int
        How many.
    seconds : float
        The call, of the rank that ends last: the sum of the four that follow.
    compute, merge, overhead, exposed : float
        What that rank spends in the kernel, in merging and copying, in the caller, in waiting for messages.
    transfer : float
        Messages by themselves, as if nothing hid them.
    alone : float
        The same call in one process.
    """

    ranks: int
    seconds: float
    compute: float
    merge: float
    overhead: float
    exposed: float
    transfer: float
    alone: float

    @property
    def speedup(self) -> float:
        """How many times as fast as one process."""
        return self.alone / self.seconds

    @property
    def efficiency(self) -> float:
        """The share of all ranks' time that one process would have needed."""
        return self.speedup / self.ranks


def ring_steps(
    hardware: Hardware, workload: Workload, ranks: int, schedule: str = "zigzag"
) -> Iterator[Step]:
    """Yield the steps of `ring_attention`, each rank starting when its own last step and messages allow it.

    Parameters
    ----------
    hardware, workload : Hardware, Workload
        Speeds, and the call.
    ranks : int
        Number of ranks.
    schedule : {"zigzag", "contiguous", "stripe"}
        As in `ring_attention`.

    Yields
    ------
    Step
        One for each rank whose keys come by.

    Notes
    -----
    A message starts when both sides have come to its step, or, where the engine makes no progress by itself,
    when both have done its work. All states but a rank's first are merged as they come; in `ring_attention`
    some wait for others, and the sum is the same.
    """
    per_host, near, far = hardware.links(integer("ranks", ranks, 1))
    rank = np.arange(ranks)
    leaves_host = (rank + 1) % ranks // per_host != rank // per_host
    merge = MERGE_PASSES * workload.state_bytes * workload.tokens / ranks / hardware.merge
    begin, has_state = np.zeros(ranks), np.zeros(ranks, bool)
    for step in range(ranks):
        todo = pairs(workload, ranks, step, schedule)
        compute = todo * workload.flops_of_pair / hardware.flops
        merged = np.where((todo > 0) & has_state, merge, 0.0)
        has_state |= todo > 0
        work = compute + merged
        spent = np.maximum(work, hardware.step_seconds) if hardware.overlaps else work + hardware.step_seconds
        num_bytes = tokens_sent(workload, ranks, step, schedule) * workload.kv_bytes
        transfer = np.where(leaves_host, far.seconds(num_bytes), near.seconds(num_bytes))
        ready = begin if hardware.overlaps else begin + spent
        there = np.where(num_bytes > 0, np.maximum(ready, np.roll(ready, -1)) + transfer, 0.0)
        end = np.maximum(begin + spent, np.maximum(there, np.roll(there, 1)))
        yield Step(compute, merged, spent - work, transfer, np.maximum(end - begin - spent, 0.0))
        begin = end


def ring(hardware: Hardware, workload: Workload, ranks: int, schedule: str = "zigzag") -> Prediction:
    """Predict `ring_attention`.

    Parameters
    ----------
    hardware, workload : Hardware, Workload
        Speeds, and the call.
    ranks : int
        Number of ranks.
    schedule : {"zigzag", "contiguous", "stripe"}
        As in `ring_attention`.

    Returns
    -------
    Prediction
        Times.
    """
    total = np.zeros((5, integer("ranks", ranks, 1)))
    for step in ring_steps(hardware, workload, ranks, schedule):
        total += step
    compute, merge, overhead, transfer, exposed = total
    seconds = compute + merge + overhead + exposed
    last = int(np.argmax(seconds))
    return Prediction(
        ranks=ranks,
        seconds=float(seconds[last]),
        compute=float(compute[last]),
        merge=float(merge[last]),
        overhead=float(overhead[last]),
        exposed=float(exposed[last]),
        transfer=float(transfer.max()),
        alone=alone(hardware, workload),
    )


def alone(hardware: Hardware, workload: Workload) -> float:
    """Return the seconds of one process.

    Parameters
    ----------
    hardware, workload : Hardware, Workload
        Speeds, and the call.

    Returns
    -------
    float
        Seconds of the kernel.
    """
    return workload.pairs * workload.flops_of_pair / hardware.flops


def balanced_seconds(hardware: Hardware, workload: Workload, ranks: int) -> float:
    """Return the seconds of a ring whose steps are all alike, in closed form.

    Parameters
    ----------
    hardware, workload : Hardware, Workload
        Speeds, and the call.
    ranks : int
        Number of ranks.

    Returns
    -------
    float
        What `ring` says of zigzag and, without causal order, of any schedule, but for the shorter messages of
        zigzag's first rank.

    Notes
    -----
    ``max(w1, t) + (ranks - 2) max(w, t) + w`` with the work `w` of a step, `w1` of the first, which has
    nothing to merge, and `t` of a message on the slower link. Where messages and work take turns it is
    the sum of all.
    """
    share = workload.tokens / integer("ranks", ranks, 1)
    per_host, near, far = hardware.links(ranks)
    square = share * share * workload.flops_of_pair / hardware.flops / (2 if workload.causal else 1)
    diagonal = share / 2 * workload.flops_of_pair / hardware.flops if workload.causal else 0.0
    merge = MERGE_PASSES * workload.state_bytes * share / hardware.merge
    message = float((near if per_host == ranks else far).seconds(share * workload.kv_bytes))
    first, other = square + diagonal, square + merge
    if not hardware.overlaps:
        steps = ranks * hardware.step_seconds + (ranks - 1) * message
        return first + (ranks - 1) * other + steps
    first, other = max(first, hardware.step_seconds), max(other, hardware.step_seconds)
    if ranks == 1:
        return first
    return max(first, message) + (ranks - 2) * max(other, message) + other


def hidden_from(hardware: Hardware, workload: Workload, link: Link | None = None) -> float:
    """Return how many tokens a rank must have for a step's work to hide its message.

    Parameters
    ----------
    hardware, workload : Hardware, Workload
        Speeds, and the call; its length does not matter.
    link : Link, optional
        What messages go through; by default that to other hosts.

    Returns
    -------
    float
        Tokens of a rank, of a balanced schedule (without causal order any).

    Notes
    -----
    With ``a`` seconds of the kernel for a row and a key, ``b`` of merging and ``c`` of sending a token, and a
    latency of ``t``: ``a n^2 + b n >= c n + t``. Without merging and latency ``n >= c / a``; under a causal
    mask that is ``flops * itemsize / (group * bytes_per_second)``, with `group` query heads to a key head.
    """
    link = link or hardware.far or hardware.near
    a = workload.flops_of_pair / hardware.flops / (2 if workload.causal else 1)
    b = MERGE_PASSES * workload.state_bytes / hardware.merge
    c = workload.kv_bytes / link.bytes_per_second
    return max(0.0, (c - b + math.sqrt((c - b) ** 2 + 4 * a * link.latency)) / (2 * a))


def head_parallel(hardware: Hardware, workload: Workload, ranks: int) -> Prediction:
    """Predict `head_parallel_attention`.

    Parameters
    ----------
    hardware, workload : Hardware, Workload
        Speeds, and the call.
    ranks : int
        Number of ranks; those beyond `Workload.heads` have nothing to do.

    Returns
    -------
    Prediction
        Times. Nothing is hidden: exchange, work and exchange follow one another.
    """
    num_q, num_kv = heads_of_ranks(workload, integer("ranks", ranks, 1))
    most = int(np.argmax(num_q))
    compute = float(workload.pairs * workload.flops_of_pair * num_q[most] / workload.heads / hardware.flops)
    per_host, near, far = hardware.links(ranks)
    transfer, others = 0.0, max(ranks - 1, 1)
    for num_bytes in head_parallel_bytes(workload, ranks).max(axis=(1, 2)):
        parts = (
            near.seconds(num_bytes * (per_host - 1) / others),
            far.seconds(num_bytes * (ranks - per_host) / others),
        )
        transfer += float(max(parts))
    # Tokens are packed and put in order; results put aside, in order, together. Each reads and writes.
    token = workload.head_dim * workload.itemsize * workload.batch
    passed = 2 * workload.tokens * token * float(2 * (num_q + 2 * num_kv)[most] + 3 * num_q[most])
    copied = passed / hardware.copy if ranks > 1 else 0.0
    work = compute + copied
    overhead = max(work, hardware.step_seconds) - work if hardware.overlaps else hardware.step_seconds
    seconds = work + overhead + transfer
    return Prediction(
        ranks, seconds, compute, copied, overhead, transfer, transfer, alone(hardware, workload)
    )


def decode(hardware: Hardware, workload: Workload, ranks: int, rows: int = 1) -> Prediction:
    """Predict `context_parallel_decode`.

    Parameters
    ----------
    hardware, workload : Hardware, Workload
        Speeds, and the call over `Workload.tokens` keys.
    ranks : int
        Number of ranks.
    rows : int, default 1
        New tokens of each sequence.

    Returns
    -------
    Prediction
        Times; `compute` is reading the cache.

    Notes
    -----
    States are gathered in ``log2(ranks)`` rounds, and a rank receives all of them.
    """
    integer("ranks", ranks, 1)
    reading = workload.tokens * workload.kv_bytes / hardware.read
    if ranks == 1:
        return Prediction(1, reading, reading, 0.0, 0.0, 0.0, 0.0, reading)
    state = integer("rows", rows, 1) * workload.state_bytes
    per_host, near, far = hardware.links(ranks)
    rounds = math.ceil(math.log2(per_host)), math.ceil(math.log2(-(-ranks // per_host)))
    gather = rounds[0] * near.latency + rounds[1] * far.latency
    gather += max(
        (per_host - 1) * state / near.bytes_per_second, (ranks - per_host) * state / far.bytes_per_second
    )
    merge = (ranks + 1) * state / hardware.merge
    work = reading / ranks + merge
    overhead = hardware.decode_seconds
    return Prediction(
        ranks, work + overhead + gather, reading / ranks, merge, overhead, gather, gather, reading
    )


def best_decode_ranks(hardware: Hardware, workload: Workload, rows: int = 1) -> float:
    """Return the number of ranks after which decoding gets slower.

    Parameters
    ----------
    hardware, workload : Hardware, Workload
        Speeds, and the call over `Workload.tokens` keys.
    rows : int, default 1
        New tokens of each sequence.

    Returns
    -------
    float
        Where what a rank saves of reading is what one more state costs it, latencies aside.
    """
    state = integer("rows", rows, 1) * workload.state_bytes
    link = hardware.far or hardware.near
    reading = workload.tokens * workload.kv_bytes / hardware.read
    return math.sqrt(reading / (state * (1 / link.bytes_per_second + 1 / hardware.merge)))
