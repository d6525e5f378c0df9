"""Where the rows and keys of a call lie: its sequences, blocks of query rows, addresses of keys.

This is the only place of the reference that knows dense from packed from paged. Whatever is
loaded becomes a contiguous float64 copy of a few rows, so that the arithmetic after it is the
same, to the bit, for every layout and for every type that stores the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ._description import Array, AttentionArgs
from ._storage import decode


class Sequence(NamedTuple):
    """One sequence of a call."""

    number: int
    q_batch: int  # its place on the first axis of q, out and lse
    q_start: int  # where its queries begin on the token axis
    seqlen_q: int
    kv_batch: int  # its place on the first axis of k and v; no meaning for paged keys
    kv_start: int  # where its keys begin on the token axis
    seqlen_kv: int  # valid keys
    offset: int  # query row i sits at key position i + offset


def sequences(args: AttentionArgs) -> Iterator[Sequence]:
    """Yield the sequences of a call in order."""
    for number in range(args.batch):
        q_batch, q_start, seqlen_q = number, 0, args.q.shape[1]
        if args.cu_seqlens_q is not None:
            q_batch, q_start = 0, int(args.cu_seqlens_q[number])
            seqlen_q = int(args.cu_seqlens_q[number + 1]) - q_start
        kv_batch, kv_start, seqlen_kv = number, 0, args.k.shape[1]
        if args.cu_seqlens_kv is not None:
            kv_batch, kv_start = 0, int(args.cu_seqlens_kv[number])
            seqlen_kv = int(args.cu_seqlens_kv[number + 1]) - kv_start
        if args.seq_lens is not None:
            seqlen_kv = int(args.seq_lens[number])
        offset = seqlen_kv - seqlen_q if args.q_offset is None else int(args.q_offset[number])
        yield Sequence(number, q_batch, q_start, seqlen_q, kv_batch, kv_start, seqlen_kv, offset)


def group_size(args: AttentionArgs) -> int:
    """Return how many query heads read one kv head."""
    return int(args.q.shape[2] // max(args.k.shape[2], 1))


class RowBlock(NamedTuple):
    """Query rows that are computed together: they share a sequence and a kv head."""

    sequence: Sequence
    kv_head: int
    row: Array  # (size,) query row i of the sequence
    head: Array  # (size,) query head
    num_rows: int  # how many are real; the rest repeat the last one and are not stored

    @property
    def position(self) -> Array:
        """Key position at which each row sits, shape (size,)."""
        position: Array = self.row + self.sequence.offset
        return position


class Pairs(NamedTuple):
    """The pairs of a query row and a key that masks and score terms are asked about.

    The arrays are read-only int64 and broadcast against each other to ``(rows, keys)``.
    """

    sequence: Sequence
    row: Array  # (rows, 1) query row i of the sequence
    head: Array  # (rows, 1) query head
    query: Array  # (rows, 1) position i + offset of the row, counted from the first key
    key: Array  # (1, keys) position j of the key; all are keys of the sequence

    @property
    def shape(self) -> tuple[int, int]:
        """``(rows, keys)``."""
        return self.row.shape[0], self.key.shape[1]

    def of(self, array: Array) -> Array:
        """Return the elements of a bias or mask ``(batch, num_heads, rows, keys)`` at the pairs."""
        elements: Array = array[self.sequence.number, self.head, self.row, self.key]
        return elements


def pairs(block: RowBlock, key: Array) -> Pairs:
    """Return the pairs of all rows of a block and the keys at positions `key`, shape (keys,)."""
    columns = [x.astype(np.int64)[:, np.newaxis] for x in (block.row, block.head, block.position)]
    axes = [*columns, key.astype(np.int64)[np.newaxis, :]]
    for axis in axes:
        axis.flags.writeable = False
    return Pairs(block.sequence, *axes)


def row_blocks(args: AttentionArgs, sequence: Sequence, size: int | None) -> Iterator[RowBlock]:
    """Yield the query rows of a sequence, kv head by kv head, in blocks of exactly `size` rows.

    The rows of a kv head are its query heads at row 0, its query heads at row 1, and so on.
    BLAS picks its kernel, and with it the order of additions, by the shape of the matrices; blocks
    of one shape keep a row's bits independent of how many other rows there are. A size of None
    is one block of all rows.
    """
    group = group_size(args)
    num_rows = sequence.seqlen_q * group
    size = max(num_rows, 1) if size is None else size
    for kv_head in range(args.k.shape[2]):
        for lo in range(0, num_rows, size):
            flat = np.minimum(np.arange(lo, lo + size), num_rows - 1)
            row, place = np.divmod(flat, group)
            yield RowBlock(sequence, kv_head, row, kv_head * group + place, min(size, num_rows - lo))


def load_q(args: AttentionArgs, block: RowBlock) -> Array:
    """Return the queries of a block as a new float64 array ``(size, head_dim)``."""
    sequence = block.sequence
    rows = args.q[sequence.q_batch, sequence.q_start + block.row, block.head]
    return np.ascontiguousarray(rows, dtype=np.float64)


def store(args: AttentionArgs, block: RowBlock, out: Array, lse: Array) -> None:
    """Write the results of a block, ``(size, head_dim_v)`` and ``(size,)``, where they belong."""
    sequence, n = block.sequence, block.num_rows
    token, head = sequence.q_start + block.row[:n], block.head[:n]
    args.out[sequence.q_batch, token, head] = out[:n].astype(args.out.dtype)
    if args.lse is not None:
        # Scores as low as a bias can make them are numbers, also in the narrower type.
        largest = np.finfo(args.lse.dtype).max
        cut = np.where(np.isinf(lse), lse, np.clip(lse, -largest, largest))
        args.lse[sequence.q_batch, head, token] = cut[:n]


def pages_of(args: AttentionArgs, sequence: Sequence, key: Array) -> Array:
    """Return the page that holds each key position of a paged call."""
    assert args.block_table is not None
    pages: Array = args.block_table[sequence.number, key // args.k.shape[1]]
    return pages


def load_keys(args: AttentionArgs, block: RowBlock, key: Array) -> Array:
    """Return the keys at positions `key` as a new float64 array ``(keys, head_dim)``.

    Every position must lie within the sequence; nothing else of the block table, of a page, of
    the arrays or of their scales is read.
    """
    return _loaded(args, block, key, args.k, args.k_scale)


def load_values(args: AttentionArgs, block: RowBlock, key: Array) -> Array:
    """Return the values at positions `key`, ``(keys, head_dim_v)``; as `load_keys`."""
    return _loaded(args, block, key, args.v, args.v_scale)


def _loaded(args: AttentionArgs, block: RowBlock, key: Array, stored: Array, scale: Array | None) -> Array:
    """Return what the elements stored at positions `key` stand for: their number times their scale."""
    sequence = block.sequence
    address: tuple[Any, ...] = (sequence.kv_batch, sequence.kv_start + key, block.kv_head)
    if args.block_table is not None:
        address = (pages_of(args, sequence, key), key % args.k.shape[1], block.kv_head)
    numbers = np.ascontiguousarray(decode(stored[address], args.kv_dtype))
    if scale is not None:
        numbers *= scale[address].astype(np.float64)[:, np.newaxis]
    return numbers
