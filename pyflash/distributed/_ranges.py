"""Sets of tokens as sorted, disjoint, half-open ranges: int64 arrays of shape ``(num_ranges, 2)``.

What travels of a rank's keys is such a set. It lies in a buffer without gaps, one range behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .._description import Array

EMPTY: Array = np.zeros((0, 2), np.int64)


def pair(begin: int, end: int) -> Array:
    """Return the set of the tokens ``begin <= t < end``."""
    return union([np.array([[begin, end]], np.int64)])


def union(parts: Sequence[Array]) -> Array:
    """Return the union of sets; ranges that touch become one. The parts' ranges may be in any order."""
    ranges = np.concatenate([EMPTY, *parts])
    ranges = ranges[ranges[:, 0] < ranges[:, 1]]
    if len(ranges) < 2:
        return ranges
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    end = np.maximum.accumulate(ranges[:, 1])
    begins = np.flatnonzero(np.concatenate([[True], ranges[1:, 0] > end[:-1]]))
    ends = np.concatenate([begins[1:], [len(ranges)]]) - 1
    return np.stack([ranges[begins, 0], end[ends]], axis=1)


def total(ranges: Array) -> int:
    """Return the number of tokens in a set."""
    return int((ranges[:, 1] - ranges[:, 0]).sum())


def place(ranges: Array, token: Array) -> Array:
    """Return how many tokens of a set lie below each token: where it is in the buffer of the set."""
    if not len(ranges):
        return np.zeros_like(token)
    length = ranges[:, 1] - ranges[:, 0]
    if len(ranges) == 1:
        below: Array = np.clip(token - ranges[0, 0], 0, length[0])
        return below
    first = np.cumsum(length) - length
    index = np.searchsorted(ranges[:, 0], token, side="right") - 1
    inside = np.minimum(token - ranges[index, 0], length[index])
    return np.where(index < 0, 0, first[index] + inside)


def runs(wanted: Array, held: Array) -> Array:
    """Return which parts of the buffer of `held` are the tokens of its subset `wanted`, as ranges."""
    begin = place(held, wanted[:, 0])
    end = begin + wanted[:, 1] - wanted[:, 0]
    return union([np.stack([begin, end], axis=1)])
