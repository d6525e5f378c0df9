"""Which keys the rows of a rank see, on every rank: an interval of positions, and so one of tokens.

From this follows what a rank computes, what it skips and which keys have to come to it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._description import Array
from . import _ranges
from ._schedules import Layout


class Mask(NamedTuple):
    """The options that hide keys."""

    causal: bool
    window: tuple[int | None, int | None]
    spans: tuple[Array, Array] | None  # (batch, rows) or (rows,) each: positions of keys


class Rows(NamedTuple):
    """A rank's query rows and what they see: keys at positions ``lo <= j < hi`` of their sequence.

    Rows of a dense batch that all see the same have one line for all of them.
    """

    position: Array  # (lines, rows)
    lo: Array  # (lines, rows)
    hi: Array
    sequence: Array  # (rows,) number of the sequence; 0 in a dense batch
    group: Array  # (rows,) rows of one piece of one sequence have one number, which rises along the rows

    def on(self, keys: Layout, rank: int) -> tuple[Array, Array]:
        """Return the span of another rank's keys of the row's sequence; empty ones are rising too."""
        lo = keys.count_below(rank, self.sequence, self.lo)
        return lo, np.maximum(lo, keys.count_below(rank, self.sequence, self.hi))

    def needs(self, keys: Layout, rank: int) -> Array:
        """Return the tokens of another rank that rows here see, as ranges: a hull for each piece of rows."""
        lo, hi = self.on(keys, rank)
        sees = (lo < hi).any(axis=0)
        if not sees.any():
            return _ranges.EMPTY
        nothing = lo >= hi
        lo = np.where(nothing, np.iinfo(np.int64).max, lo).min(axis=0)[sees]
        hi = np.where(nothing, 0, hi).max(axis=0)[sees]
        group, sequence = self.group[sees], self.sequence[sees]
        begins = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
        first = keys.borders(rank)[sequence[begins]]
        hull = [np.minimum.reduceat(lo, begins) + first, np.maximum.reduceat(hi, begins) + first]
        return _ranges.union([np.stack(hull, axis=1)])


def visible(queries: Layout, keys: Layout, rank: int, mask: Mask, q_offset: Array | None) -> Rows:
    """Return the rows of a rank.

    Parameters
    ----------
    queries, keys : Layout
        Where queries and keys lie.
    rank : int
        Whose rows.
    mask : Mask
        What hides keys.
    q_offset : (num_sequences,) or (batch, 1) ndarray or None
        Position of row 0 of each sequence; the latter of a dense batch, which is one sequence here. None:
        the last query stands at the last key.
    """
    sequence = queries.sequence_of(rank)
    offset = keys.totals - queries.totals if q_offset is None else q_offset
    position = np.atleast_2d(queries.positions(rank) + offset[..., sequence])
    lo = np.zeros_like(position)
    hi = np.broadcast_to(keys.totals[sequence], position.shape)
    left, right = mask.window
    if mask.causal:
        hi = np.minimum(hi, position + 1)
    if right is not None:
        hi = np.minimum(hi, position + right + 1)
    if left is not None:
        lo = np.maximum(lo, position - left)
    if mask.spans is not None:
        lo, hi = np.maximum(lo, mask.spans[0]), np.minimum(hi, mask.spans[1])
        position = np.broadcast_to(position, lo.shape)
    hi = np.maximum(hi, lo)
    _, count = queries.pieces(rank)
    group = np.repeat(np.arange(count.size), count.reshape(-1))
    return Rows(position, lo, hi, sequence, group)


def messages(needs: list[list[Array]], origin: int) -> list[Array]:
    """Return what is under way of one rank's keys: element ``s`` is what arrives ``s`` ranks further on.

    `needs` has, for each rank, the tokens of each origin that it sees. A message holds what the rank
    that it goes to needs, or one behind it; keys that nobody further on sees do not travel on.
    Element 0 is not a message, but all that leaves.
    """
    size = len(needs)
    wanted = [_ranges.EMPTY] * (size + 1)
    for distance in range(size - 1, 0, -1):
        mine = needs[(origin + distance) % size][origin]
        further = wanted[distance + 1]
        wanted[distance] = _ranges.union([mine, further]) if len(mine) else further
    wanted[0] = wanted[1]
    return wanted[:size]
