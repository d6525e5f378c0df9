"""Statistics of the probabilities of an attention whose log-sum-exp is known, tile by tile.

A probability is ``exp(s - lse)``. With the lse at hand no tile depends on another, so that a second
pass over the keys finds whatever is asked for in memory that doesn't grow with their square.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ._description import Array, StatsArgs
from ._layout import RowBlock, Sequence, load_keys, load_q, row_blocks
from ._masks import key_tiles
from ._scores import scores


class _Tile(NamedTuple):
    """The probabilities of one tile, of the rows that are real."""

    block: RowBlock
    key: Array  # (keys,) positions; the last one may be repeated, invisibly
    visible: Array  # (rows, keys)
    s: Array  # (rows, keys) final scores
    p: Array  # (rows, keys) 0 where not visible
    lse: Array  # (rows, 1)


class _RowResults:
    """What is found out about each row of a block: its largest score, entropy, top k."""

    def __init__(self, args: StatsArgs, block: RowBlock) -> None:
        sequence, n = block.sequence, block.num_rows
        self.args = args
        # The place of each row in the lse and in everything that is shaped like it.
        self.place = sequence.q_batch, block.head[:n], sequence.q_start + block.row[:n]
        self.max_logit, self.entropy = np.full(n, -np.inf), np.zeros(n)
        values = args.top_k_values
        if values is not None:
            # Compared as they will be given out, so that equal ones are equal to the reader; -1
            # stands for no key.
            self.top = np.full((n, values.shape[-1]), -1, values.dtype)
            self.top_key = np.full(self.top.shape, -1, np.int64)

    def add(self, tile: _Tile) -> None:
        """Take in one tile; tiles come in the order of their keys."""
        if self.args.max_logit is not None:
            largest = np.where(tile.visible, tile.s, -np.inf).max(axis=1)
            self.max_logit = np.maximum(self.max_logit, largest)
        if self.args.entropy is not None:
            # -p ln p, which is 0 for a p of 0
            self.entropy += np.where(tile.p == 0, 0, tile.p * (tile.lse - tile.s)).sum(axis=1)
        if self.args.top_k_values is not None:
            there = tile.visible & ~np.isneginf(tile.s)
            p = np.where(there, tile.p.astype(self.top.dtype), -1)
            key = np.where(there, tile.key, -1)
            p, key = np.concatenate([self.top, p], axis=1), np.concatenate([self.top_key, key], axis=1)
            # Stable: of equal ones the first stays first. NaN counts as the largest, to be seen.
            order = np.argsort(-np.where(np.isnan(p), np.inf, p), axis=1, kind="stable")
            order = order[:, : self.top.shape[1]]
            self.top, self.top_key = (np.take_along_axis(x, order, axis=1) for x in (p, key))

    def store(self) -> None:
        """Write the results of the rows where they belong."""
        args = self.args
        if args.max_logit is not None:
            args.max_logit[self.place] = self.max_logit
        if args.entropy is not None:
            args.entropy[self.place] = self.entropy
        if args.top_k_values is not None and args.top_k_indices is not None:
            args.top_k_values[self.place] = np.where(self.top_key < 0, 0, self.top)
            args.top_k_indices[self.place] = self.top_key


def stats_of_sequence(args: StatsArgs, sequence: Sequence, rows: int, tile: int) -> None:
    """Fill the results of one sequence, in blocks of so many rows and tiles of so many keys."""
    n = sequence.seqlen_kv
    mass = np.zeros((args.attention.q.shape[2], n))
    if args.row_probabilities is not None and args.rows is not None:
        exists = np.flatnonzero(args.rows < sequence.seqlen_q)
        args.row_probabilities[sequence.number, :, exists, :n] = 0  # most keys of a row may be hidden
    for block in row_blocks(args.attention, sequence, rows):
        results = _RowResults(args, block)
        for found in _probabilities(args, block, results.place, tile):
            results.add(found)
            _add_mass(args, found, mass)
            _store_rows(args, found)
        results.store()
    if args.key_mass is not None:
        args.key_mass[sequence.number, :, :n] = mass


def _probabilities(
    args: StatsArgs, block: RowBlock, place: tuple[int, Array, Array], tile: int
) -> Iterator[_Tile]:
    """Yield the probabilities of each tile of keys that a row of the block sees."""
    n = block.num_rows
    q = load_q(args.attention, block)
    lse = args.lse[place].astype(np.float64)[:, np.newaxis]
    for at, visible in key_tiles(args.attention, block, 0, block.sequence.seqlen_kv, tile):
        s = scores(args.attention, at, q, load_keys(args.attention, block, at.key[0]))[:n]
        p = np.where(visible[:n], np.exp(s - lse), 0)
        yield _Tile(block, at.key[0], visible[:n], s, p, lse)


def _add_mass(args: StatsArgs, tile: _Tile, mass: Array) -> None:
    """Add the probabilities of the rows that count to ``(num_heads, keys)``."""
    if args.key_mass is None:
        return
    block = tile.block
    n, first = block.num_rows, int(tile.key[0])
    counts = np.ones(n, dtype=bool)
    if args.last_queries is not None:
        counts = block.row[:n] >= block.sequence.seqlen_q - args.last_queries
    for head in np.unique(block.head[:n]):
        added = tile.p[counts & (block.head[:n] == head)].sum(axis=0)
        there = mass[head, first : first + len(added)]
        there += added[: len(there)]  # the rest is the last key repeated, invisibly


def _store_rows(args: StatsArgs, tile: _Tile) -> None:
    """Write the probabilities of the rows that were asked for."""
    if args.row_probabilities is None or args.rows is None:
        return
    block = tile.block
    first, last = int(tile.key[0]), int(tile.key[-1])
    asked, mine = np.nonzero(args.rows[:, np.newaxis] == block.row[: block.num_rows])
    target = args.row_probabilities[block.sequence.number, :, :, first : last + 1]
    target[block.head[mine], asked] = tile.p[mine, : last + 1 - first]
