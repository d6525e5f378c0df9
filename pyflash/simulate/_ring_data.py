"""The rings of the page, as data: what `record` saw, for every number of ranks and every schedule."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import pyflash

from .._description import Array
from ..distributed._schedules import SCHEDULES
from ._arrays import Inputs
from ._numbers import Numbers
from ._ring import RankRecord, RankStep, record

RANKS = (2, 3, 4)
#: Numbers of tokens that the page has beside all there are. Twelve are even shares for three ranks.
_LENGTHS = (8, 12)


def lengths(max_keys: int) -> list[int]:
    """Return the numbers of tokens that the page has."""
    return [*(length for length in _LENGTHS if length < max_keys), max_keys]


def rings(inputs: Inputs, numbers: Numbers, tolerance: float) -> dict[str, Any]:
    """Run every ring of the page and return what is embedded; the page's ``ringdata.js`` reads it.

    Parameters
    ----------
    inputs : Inputs
        The arrays; the ring computes in float64 whatever their type, as `trace` does.
    numbers : Numbers
        Where numbers go.
    tolerance : float
        An output has arrived when it differs from the exact one by at most so much.
    """
    q, k, v = (np.asarray(x, np.float64) for x in (inputs.queries_of_keys, inputs.k, inputs.v))
    exact, runs = {}, {}
    for length, causal in itertools.product(lengths(len(k)), (False, True)):
        flags = ["causal"] if causal else []
        arrays = q[:length], k[:length], v[:length]
        answer = pyflash.trace(*arrays, tile=length, causal=causal).exact
        exact["/".join([str(length), *flags])] = numbers.place(answer)
        for size, schedule in itertools.product(RANKS, SCHEDULES):
            ranks = record(*arrays, size=size, schedule=schedule, causal=causal)
            name = "/".join([str(length), str(size), schedule, *flags])
            runs[name] = _run(ranks, answer, numbers, tolerance)
    return {
        "lengths": lengths(len(k)),
        "ranks": list(RANKS),
        "schedules": list(SCHEDULES),
        "bytesPerToken": k[0].nbytes + v[0].nbytes,
        "ownQueries": inputs.prompt is not None or len(inputs.q) == len(k),
        "exact": exact,
        "runs": runs,
    }


def _run(ranks: tuple[RankRecord, ...], exact: Array, numbers: Numbers, tolerance: float) -> dict[str, Any]:
    """Return one ring: what ranks did, and what can be said of all of them together."""
    pairs = np.array([[step.seen.sum() for step in rank.steps] for rank in ranks])
    sent = np.array([[step.bytes_sent for step in rank.steps] for rank in ranks])
    error = max((_errors(rank, exact).max(initial=0.0) for rank in ranks), default=0.0)
    return {
        "ranks": [_rank(rank, exact, numbers, tolerance) for rank in ranks],
        "pairs": pairs.sum(axis=0).tolist(),
        "allPairs": int(pairs.sum()),
        "bytesOfStep": sent.sum(axis=0).tolist(),
        "bytes": np.cumsum(sent.sum(axis=0)).tolist(),
        "unevenness": [_unevenness(of_step) for of_step in pairs.T],
        "allUnevenness": _unevenness(pairs.sum(axis=1)),
        "error": numbers.place(error),
    }


def _unevenness(pairs: Array) -> float:
    """Return how many times an even share the rank with most has; 1 if nobody has anything."""
    return float(pairs.max() / pairs.mean()) if pairs.any() else 1.0


def _errors(rank: RankRecord, exact: Array) -> Array:
    """Return ``|out - exact|`` of a rank's result."""
    errors: Array = np.abs(rank.known[-1].out - exact[rank.positions])
    return errors


def _rank(rank: RankRecord, exact: Array, numbers: Numbers, tolerance: float) -> dict[str, Any]:
    errors = _errors(rank, exact)
    arrived = [sum(1 << c for c in np.flatnonzero(row <= tolerance).tolist()) for row in errors]
    return {
        "positions": rank.positions.tolist(),
        # Of each row: m, l, lse, out.
        "known": [
            [
                *(known.lo, known.hi),
                [
                    numbers.place(known.state.m[row], known.state.l[row], known.lse[row], known.out[row])
                    for row in range(len(rank.positions))
                ],
            ]
            for known in rank.known
        ],
        "steps": [_step(step) for step in rank.steps],
        "pairs": int(sum(step.seen.sum() for step in rank.steps)),
        "result": [numbers.place(row.max(), bits) for row, bits in zip(errors, arrived, strict=True)],
    }


def _step(step: RankStep) -> list[Any]:
    pairs = int(step.seen.sum())
    seen = [sum(1 << key for key in np.flatnonzero(row).tolist()) for row in step.seen]
    return [
        *(step.origin, step.held.tolist(), step.buffer, step.call, step.mask, seen),
        *(pairs, step.seen.size - pairs, step.bytes_sent, step.made, step.known),
    ]
