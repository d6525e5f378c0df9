"""How many tiles of keys the work items of a call have, and how many of them some row of the item sees.

Without looking at tiles one by one: what rows see by their positions alone are intervals of keys, and so
intervals of tiles, which are added up for all items at once. Only masks with elements of their own (`mask`,
`bias`, `tree`, `mask_mod`) have to be looked at, many pairs at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ._description import UNLIMITED, Array, AttentionArgs
from ._layout import RowBlock, Sequence, group_size, pairs
from ._masks import visible_keys

#: Pairs of a row and a key that are looked at together.
_PAIRS = 1 << 20


class Count(NamedTuple):
    """Of one sequence."""

    items: int
    tiles: int  # of all items
    seen: int  # those that some row of their item sees


class _Cut(NamedTuple):
    """How the keys of a sequence are cut: into splits, and each split into tiles, which are numbered."""

    begins: Array  # (num_splits,) first key of each split
    first_tile: Array  # (num_splits,) number of its first tile
    num_tiles: int
    tile: int

    def number(self, key: Array) -> Array:
        """Return the number of the tile that holds each key."""
        split: Any = 0
        if len(self.begins) > 1:
            split = np.searchsorted(self.begins, key, side="right") - 1
        numbers: Array = self.first_tile[split] + (key - self.begins[split]) // self.tile
        return numbers


def count_tiles(
    args: AttentionArgs, sequence: Sequence, rows: int, borders: tuple[tuple[int, int], ...], tile: int
) -> Count:
    """Return the work items of a sequence and their tiles.

    Parameters
    ----------
    args : AttentionArgs
        The call; its masks must lie in host memory.
    sequence : Sequence
        One of its sequences.
    rows : int
        Query rows of an item: heads of one key/value head, rows of the sequence.
    borders : tuple of (int, int)
        First and last key, exclusive, of the splits, which follow one another.
    tile : int
        Keys of a tile; the first one of a split begins with it.

    Notes
    -----
    Takes time and memory of O(items), with `spans` O(rows), with a mask or a bias of one row of keys for all
    heads O(keys) more: of a million rows and keys that is a few milliseconds, with spans some tenths of a
    second. Other masks with elements cost the pairs of all rows and keys, as attention with them does.
    """
    num_rows, num_kv_heads = sequence.seqlen_q * group_size(args), int(args.k.shape[2])
    num_items = -(-num_rows // rows)
    sizes = np.array([-(-(hi - lo) // tile) for lo, hi in borders], np.int64)
    cut = _Cut(np.array([lo for lo, _ in borders]), np.cumsum(sizes) - sizes, int(sizes.sum()), tile)
    if num_items * cut.num_tiles * num_kv_heads == 0:
        return Count(num_items * num_kv_heads, 0, 0)
    if _has_elements(args) and not _is_one_row(args):
        heads = range(num_kv_heads) if _heads_differ(args) else range(1)
        seen = sum(_seen_by_elements(args, sequence, head, rows, cut) for head in heads)
        seen *= num_kv_heads // len(heads)
    else:
        seen = num_kv_heads * _seen_by_position(args, sequence, rows, cut)
    return Count(num_items * num_kv_heads, num_items * cut.num_tiles * num_kv_heads, seen)


def _has_elements(args: AttentionArgs) -> bool:
    return any(x is not None for x in (args.mask, args.bias, args.tree, args.mask_mod))


def _is_one_row(args: AttentionArgs) -> bool:
    """Return whether the masks with elements say the same of all rows and heads of a sequence."""
    given = [x for x in (args.mask, args.bias) if x is not None]
    alike = all(x.strides[axis] == 0 or x.shape[axis] == 1 for x in given for axis in (1, 2))
    return alike and args.tree is None and args.mask_mod is None


def _heads_differ(args: AttentionArgs) -> bool:
    given = [x for x in (args.mask, args.bias) if x is not None]
    return args.mask_mod is not None or any(x.strides[1] != 0 and x.shape[1] != 1 for x in given)


# --- masks of positions ---


def _seen_by_position(args: AttentionArgs, sequence: Sequence, rows: int, cut: _Cut) -> int:
    """Return the tiles that items of one key/value head see: the others see as many."""
    first, last = _rows_of_items(args, sequence, rows)
    item = np.arange(len(first))
    if args.spans is None:
        # Rows beside each other see intervals that touch: those of an item are one, from its first row on.
        intervals = [(lo[0], hi[1]) for lo, hi in _intervals(args, sequence, np.stack([first, last]))]
    else:
        count = last - first + 1
        item = np.repeat(item, count)
        row = np.arange(len(item)) - np.repeat(np.cumsum(count) - count - first, count)
        intervals = list(_intervals(args, sequence, row))
    number = _numbering(args, sequence, cut)
    tiles = [number(lo, hi) for lo, hi in intervals]
    begin, end = (np.concatenate([pair[side] for pair in tiles]) for side in (0, 1))
    return _num_covered(np.tile(item, len(tiles)), begin, end, cut.num_tiles)


def _rows_of_items(args: AttentionArgs, sequence: Sequence, rows: int) -> tuple[Array, Array]:
    """Return the first and the last row of each item; heads of one row may be several items."""
    group = group_size(args)
    num_rows = sequence.seqlen_q * group
    begin = np.arange(0, num_rows, rows)
    return begin // group, (np.minimum(begin + rows, num_rows) - 1) // group


def _intervals(args: AttentionArgs, sequence: Sequence, row: Array) -> list[tuple[Array, Array]]:
    """Return what rows see by their positions: keys ``lo <= j < hi`` of one or two intervals, some empty."""
    position = row + sequence.offset
    lo, hi = np.zeros_like(position), np.full_like(position, sequence.seqlen_kv)
    if args.causal:
        hi = np.minimum(hi, position + 1)
    if args.spans is not None:
        address = sequence.q_batch, sequence.q_start + row
        lo, hi = np.maximum(lo, args.spans[0][address]), np.minimum(hi, args.spans[1][address])
    exempt = lo, np.minimum(hi, args.sink_tokens)
    left, right = args.window
    if left != UNLIMITED:
        lo = np.maximum(lo, position - left)
    if right != UNLIMITED:
        hi = np.minimum(hi, position + right + 1)
    return [(lo, hi), exempt] if args.sink_tokens else [(lo, hi)]


def _numbering(args: AttentionArgs, sequence: Sequence, cut: _Cut) -> Any:
    """Return what turns intervals of keys into intervals of the tiles in them that have a key to be seen.

    Tiles in which the masks with elements hide all keys have no number.
    """
    if not _has_elements(args):
        return lambda lo, hi: (
            cut.number(np.minimum(lo, sequence.seqlen_kv - 1)),
            np.where(lo < hi, cut.number(np.maximum(hi, 1) - 1) + 1, 0),
        )
    bare = args._replace(causal=False, window=(UNLIMITED, UNLIMITED), spans=None)
    one = np.zeros(1, np.int64)
    at = pairs(RowBlock(sequence, 0, one, one, 1), np.arange(sequence.seqlen_kv))
    key = np.flatnonzero(visible_keys(bare, at)[0])
    tile = cut.number(key)
    dense = np.cumsum(np.diff(tile, prepend=tile[:1]) != 0)

    def number(lo: Array, hi: Array) -> tuple[Array, Array]:
        begin, end = np.searchsorted(key, lo), np.searchsorted(key, hi)
        if not len(key):
            return np.zeros_like(begin), np.zeros_like(end)
        return dense[np.minimum(begin, len(key) - 1)], np.where(begin < end, dense[end - 1] + 1, 0)

    return number


def _num_covered(item: Array, begin: Array, end: Array, num_tiles: int) -> int:
    """Return how many tiles the intervals ``begin <= t < end`` of each item cover, of all items together."""
    chosen = begin < end
    offset = item[chosen] * num_tiles  # items one behind the other, on one line of tiles
    begin, end = begin[chosen] + offset, end[chosen] + offset
    if (begin[1:] < begin[:-1]).any():
        order = np.argsort(begin, kind="stable")
        begin, end = begin[order], end[order]
    covered = np.concatenate([[0], np.maximum.accumulate(end)[:-1]]) if len(end) else end
    return int(np.maximum(end - np.maximum(begin, covered), 0).sum())


# --- masks with elements ---


def _seen_by_elements(args: AttentionArgs, sequence: Sequence, kv_head: int, rows: int, cut: _Cut) -> int:
    """Return the tiles that items of a key/value head see, by looking at its pairs."""
    group, n = group_size(args), sequence.seqlen_kv
    num_rows = sequence.seqlen_q * group
    num_keys = min(n, max(_PAIRS // rows, 1))
    items = max(_PAIRS // (rows * num_keys), 1)
    seen = 0
    for first in range(0, num_rows, items * rows):
        flat = np.arange(first, min(first + items * rows, num_rows))
        row, place = np.divmod(flat, group)
        block = RowBlock(sequence, kv_head, row, kv_head * group + place, len(flat))
        found = np.zeros((-(-len(flat) // rows), cut.num_tiles), bool)
        for lo in range(0, n, num_keys):
            key = np.arange(lo, min(lo + num_keys, n))
            visible = visible_keys(args, pairs(block, key))
            tile = cut.number(key)
            begins = np.flatnonzero(np.diff(tile, prepend=-1))
            by_item = np.logical_or.reduceat(visible, np.arange(0, len(flat), rows), axis=0)
            found[:, tile[begins]] |= np.logical_or.reduceat(by_item, begins, axis=1)
        seen += int(found.sum())
    return seen
