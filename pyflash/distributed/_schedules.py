"""Who holds which tokens: the schedules, as positions. Integers only; knows nothing of attention or messages.

A rank holds one or two pieces of each sequence, and a piece is an arithmetic progression of positions.
Along a rank's tokens positions rise, so the keys of a rank that lie below a position are its first so many:
an interval of positions is an interval of tokens on every rank, whatever the schedule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .._checks import choice
from .._description import Array
from .._errors import invalid

SCHEDULES = ("zigzag", "contiguous", "stripe")


def even_lengths(totals: Array, size: int) -> Array:
    """Return how many tokens each rank gets of sequences, (size, num_sequences), as even as can be."""
    rank = np.arange(size)[:, np.newaxis]
    lengths: Array = totals // size + (rank < totals % size)
    return lengths


class Layout(NamedTuple):
    """Where the tokens of every sequence lie.

    Piece ``p`` of a sequence ``b`` on rank ``r`` has the positions ``starts[p, r, b] + step * i`` for
    ``i < counts[p, r, b]``, and pieces follow one another in a rank's memory.
    """

    lengths: Array  # (size, num_sequences)
    starts: Array  # (num_pieces, size, num_sequences)
    counts: Array
    step: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return int(self.lengths.shape[0])

    @property
    def totals(self) -> Array:
        """Length of each sequence, ``(num_sequences,)``."""
        totals: Array = self.lengths.sum(axis=0)
        return totals

    def borders(self, rank: int) -> Array:
        """Return where each sequence begins among the rank's tokens, ``(num_sequences + 1,)``."""
        return np.concatenate([[0], np.cumsum(self.lengths[rank])])

    def pieces(self, rank: int) -> tuple[Array, Array]:
        """Return position of the first token and number of tokens of the rank's pieces, in memory order.

        Both ``(num_sequences, num_pieces)``.
        """
        return self.starts[:, rank].T, self.counts[:, rank].T

    def positions(self, rank: int) -> Array:
        """Return the position of each of the rank's tokens in its sequence."""
        start, count = (x.reshape(-1) for x in self.pieces(rank))
        first = np.repeat(np.cumsum(count) - count, count)
        positions: Array = np.repeat(start, count) + self.step * (np.arange(first.size) - first)
        return positions

    def sequence_of(self, rank: int) -> Array:
        """Return the sequence of each of the rank's tokens."""
        return np.repeat(np.arange(self.lengths.shape[1]), self.lengths[rank])

    def places(self, rank: int) -> Array:
        """Return where the rank's tokens lie in the whole packed array."""
        first = np.cumsum(self.totals) - self.totals
        places: Array = first[self.sequence_of(rank)] + self.positions(rank)
        return places

    def order(self) -> Array:
        """Return which token lies at each place of the whole packed array, counted rank after rank."""
        places = np.concatenate([self.places(rank) for rank in range(self.size)])
        return np.argsort(places, kind="stable")  # places are a few rising runs

    def count_below(self, rank: int, sequence: Any, position: Array) -> Array:
        """Return how many of the rank's tokens of a sequence lie below a position, elementwise."""
        below = np.zeros(np.broadcast_shapes(position.shape, np.shape(sequence)), np.int64)
        if self.starts.shape[2] == 1:  # numbers, which go with all rows
            sequence = 0
        start, count = self.starts[:, rank, sequence], self.counts[:, rank, sequence]
        for first, num in zip(start, count, strict=True):
            below += np.clip(-((first - position) // self.step), 0, num)
        return below


def layout(schedule: str, lengths: Array, name: str = "lengths") -> Layout:
    """Return where the tokens of sequences lie.

    Parameters
    ----------
    schedule : {"zigzag", "contiguous", "stripe"}
        How positions are dealt out.
    lengths : (size, num_sequences) int64 ndarray
        Tokens that each rank holds of each sequence.
    name : str
        The argument that an error is about.

    Notes
    -----
    contiguous: ranks follow one another. zigzag: a rank's tokens are two halves, the first not shorter;
    first halves follow one another from rank 0 on, then second halves from the last rank back, so that
    early and late positions meet on every rank. Both take any lengths. stripe: position ``p`` lies on rank
    ``p % size``, which determines the lengths.
    """
    choice("schedule", schedule, SCHEDULES)
    size = lengths.shape[0]
    if schedule == "contiguous":
        start = np.cumsum(lengths, axis=0) - lengths
        return Layout(lengths, start[np.newaxis], lengths[np.newaxis], 1)
    if schedule == "zigzag":
        second = lengths // 2
        first = lengths - second
        start = np.cumsum(first, axis=0) - first
        back = first.sum(axis=0) + np.cumsum(second[::-1], axis=0)[::-1] - second
        return Layout(lengths, np.stack([start, back]), np.stack([first, second]), 1)
    wrong = np.argwhere(lengths != even_lengths(lengths.sum(axis=0), size))
    if wrong.size:
        at, b = (int(x) for x in wrong[0])
        total = int(lengths[:, b].sum())
        want = int(even_lengths(lengths.sum(axis=0), size)[at, b])
        raise invalid(
            name,
            f"{int(lengths[at, b])} of {total} tokens on rank {at} of {size} (sequence {b})",
            f"{want}, the positions p with p % {size} == {at}; zigzag and contiguous take any lengths",
        )
    ranks = np.arange(size)[:, np.newaxis] + np.zeros_like(lengths)
    return Layout(lengths, ranks[np.newaxis], lengths[np.newaxis], size)
