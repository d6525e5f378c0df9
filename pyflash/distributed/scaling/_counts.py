"""What each rank computes, sends and holds. Tests hold this to what the functions themselves do."""

from __future__ import annotations

import math

import numpy as np

from ..._checks import choice, integer
from ..._description import Array
from .._heads import heads_of
from .._schedules import SCHEDULES
from ._machine import Workload


def pairs(workload: Workload, ranks: int, step: int, schedule: str = "zigzag") -> Array:
    """Return the pairs of a row and a key that each rank computes in a step, of one head of one sequence.

    Parameters
    ----------
    workload : Workload
        The call.
    ranks, step : int
        Number of ranks; which step, from 0.
    schedule : {"zigzag", "contiguous", "stripe"}
        As in `ring_attention`.

    Returns
    -------
    (ranks,) float64 ndarray
        Pairs.
    """
    rank, origin, share = _places(workload, ranks, step, schedule)
    if not workload.causal:
        return np.full(ranks, share * share)
    if schedule == "zigzag":
        return (share * share + np.where(origin == rank, share, 0)) / 2
    below, own = share * share, share * (share + 1) / 2
    if schedule == "stripe":
        return np.where(origin <= rank, own, below - own)
    return np.where(origin < rank, below, np.where(origin == rank, own, 0))


def tokens_sent(workload: Workload, ranks: int, step: int, schedule: str = "zigzag") -> Array:
    """Return the tokens whose keys and values each rank sends on in a step.

    Parameters
    ----------
    workload : Workload
        The call.
    ranks, step : int
        Number of ranks; which step, from 0.
    schedule : {"zigzag", "contiguous", "stripe"}
        As in `ring_attention`.

    Returns
    -------
    (ranks,) float64 ndarray
        Tokens; where there are any, keys and values are a message each.
    """
    _, origin, share = _places(workload, ranks, step, schedule)
    if step == ranks - 1:
        return np.zeros(ranks)
    if not workload.causal:
        return np.full(ranks, share)
    if schedule == "zigzag":  # the second half of rank 0 is the end of the sequence, which nobody else sees
        return np.where(origin == 0, share / 2, share)
    is_behind = origin + step + 1 < ranks  # whoever it goes to has later tokens
    return np.where(is_behind, share, max(share - 1, 0) if schedule == "stripe" else 0)


def _places(workload: Workload, ranks: int, step: int, schedule: str) -> tuple[Array, Array, float]:
    choice("schedule", schedule, SCHEDULES)
    integer("ranks", ranks, 1)
    integer("step", step, 0, ranks - 1)
    rank = np.arange(ranks)
    return rank, (rank - step) % ranks, workload.tokens / ranks


def head_parallel_bytes(workload: Workload, ranks: int) -> Array:
    """Return the bytes of the messages of `head_parallel_attention`.

    Parameters
    ----------
    workload : Workload
        The call.
    ranks : int
        Number of ranks.

    Returns
    -------
    (2, 2, ranks) float64 ndarray
        In the exchange before the work and in that after it: what each rank sends, and what it receives.
    """
    num_q, num_kv = heads_of_ranks(workload, ranks)
    share = workload.tokens / ranks * workload.batch
    tensors = (num_q + 2 * num_kv) * workload.head_dim * workload.itemsize * share
    results = num_q * (workload.head_dim * workload.itemsize + 4) * share  # with a log-sum-exp
    there, back = (np.stack([x.sum() - x, (ranks - 1) * x]) for x in (tensors, results))
    return np.stack([there, back[::-1]])


def heads_of_ranks(workload: Workload, ranks: int) -> tuple[Array, Array]:
    """Return how many query heads and key/value heads each rank has."""
    found = [heads_of(rank, ranks, workload.heads, workload.kv_heads) for rank in range(ranks)]
    return np.array([len(x.q) for x in found]), np.array([len(x.kv) for x in found])


def memory_bytes(workload: Workload, ranks: int, function: str = "ring") -> float:
    """Return the memory that a rank needs beside its queries, keys and values.

    Parameters
    ----------
    workload : Workload
        The call.
    ranks : int
        Number of ranks.
    function : {"ring", "heads"}
        `ring_attention` or `head_parallel_attention`.

    Returns
    -------
    float
        Bytes at the highest point, without blocks whose size does not depend on the length.
    """
    choice("function", function, ("ring", "heads"))
    share = workload.tokens / integer("ranks", ranks, 1)
    if function == "heads":  # what came, once more in order; results of these heads twice, of this rank twice
        num_q, num_kv = (int(x.max()) for x in heads_of_ranks(workload, ranks))
        width = workload.head_dim * workload.itemsize * workload.batch
        return workload.tokens * width * (2 * (num_q + 2 * num_kv) + 2 * num_q) + 2 * share * workload.q_bytes
    buffers = 2 * workload.kv_bytes if ranks > 1 else 0
    states = max(min(ranks, 2), 2 * math.ceil(math.log2(ranks)) - 1)
    return share * (buffers + states * workload.state_bytes + workload.q_bytes)
