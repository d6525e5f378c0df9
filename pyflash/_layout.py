"""Where the rows and keys of a call lie: its sequences, blocks of query rows, addresses of keys.

This is the only place of the reference that knows dense from packed from paged. Whatever is
loaded becomes a contiguous float64 copy of a few rows, so that the arithmetic after it is the
same, to the bit, for every layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ._description import Array, AttentionArgs


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
        args.lse[sequence.q_batch, head, token] = lse[:n]


def pages_of(args: AttentionArgs, sequence: Sequence, key: Array) -> Array:
    """Return the page that holds each key position of a paged call."""
    assert args.block_table is not None
    pages: Array = args.block_table[sequence.number, key // args.k.shape[1]]
    return pages


def load_keys(args: AttentionArgs, block: RowBlock, key: Array) -> tuple[Array, Array]:
    """Return the keys ``(keys, head_dim)`` and values ``(keys, head_dim_v)`` at positions `key`.

    New float64 arrays. Every position must lie within the sequence; nothing else of the block
    table, of a page or of the arrays is read.
    """
    sequence = block.sequence
    address: tuple[Any, ...] = (sequence.kv_batch, sequence.kv_start + key, block.kv_head)
    if args.block_table is not None:
        address = (pages_of(args, sequence, key), key % args.k.shape[1], block.kv_head)
    return (
        np.ascontiguousarray(args.k[address], dtype=np.float64),
        np.ascontiguousarray(args.v[address], dtype=np.float64),
    )
