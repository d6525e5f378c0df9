"""Into how many parts the keys of a prefill are cut, so that all multiprocessors have something to do.

Pure. Few blocks of rows leave most of a GPU idle, or its last wave of blocks most of it. Blocks that share
the keys of their rows end sooner; but each of them begins and ends, their states go to memory and come back,
and another kernel merges them. Times are estimates in microseconds, those of the merge from an H200: what
they are for is to compare them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from .._dtypes import BY_NAME
from ._plan import Problem, Splits, ceil_div, fixed_splits

#: What a block takes beside its tiles: queries and first keys come, outputs or states go.
BLOCK_TIME = 3.0
#: What a merge takes beside its states: another launch, which begins when the last block has ended.
MERGE_TIME = 30.0
#: Bytes of states that are written or read in a microsecond, most of them in the second cache.
STATE_RATE = 1.2e6
#: Bytes of keys and values that a multiprocessor gets in a microsecond when all of them read memory.
READ_RATE = 34e3
#: What a block takes that has no rows: packed sequences have as many as the longest would need.
EMPTY_TIME = 1.0
#: Part of its rate that a multiprocessor reaches with one of the blocks that it has room for.
ALONE = 0.6
#: Part of the time that has to be saved: a cut takes memory.
WORTH = 0.05
#: More parts than this are looked at only where they are needed for every multiprocessor to have one.
MOST = 16
#: Blocks of rows that are looked at to find out how many tiles they see.
_SAMPLES = 16


class Blocks(NamedTuple):
    """The blocks of a kernel that a sequence's rows are put into."""

    rows: int
    tile: int  # keys
    per_sm: int  # blocks that share a multiprocessor
    rate: float  # multiply-adds of a multiprocessor in a microsecond
    packed: bool = False  # whether the heads that share keys share blocks


class _Grid(NamedTuple):
    """What the times of a prefill depend on."""

    tiles: tuple[int, ...]  # that blocks of rows see, from the first to the last: all of them, or some
    items: int  # blocks without splits
    empty: int  # and such without rows
    num_sms: int
    per_sm: int
    tile_time: float  # on a multiprocessor of its own
    state_time: float  # of the states of one part of all rows, there and back


def prefill_splits(problem: Problem, blocks: Blocks) -> Splits:
    """Return how the keys of a prefill are cut: as asked for, else so that it ends soonest.

    A row's bits may depend neither on the other rows nor on the GPU where they are to be the same in every
    batch, so that keys are not cut there: parts of a fixed length would have to be merged for every row of
    every prompt.
    """
    if problem.num_splits is not None or problem.batch_invariant or not problem.num_rows:
        return fixed_splits(problem, 0)
    splits = _best(_grid(problem, blocks))
    return Splits(splits, splits, split_seen=1) if splits > 1 else Splits()


def reason_of(problem: Problem, splits: Splits) -> str:
    """Return what `explain` says about the splits of a prefill."""
    if problem.num_splits is not None:
        return "splits: as asked for"
    if problem.batch_invariant:
        return "splits: none, since bits do not depend on the batch"
    if splits.are_merged:
        return (
            f"splits: {splits.num_splits} of the keys that a block sees, so that "
            f"{problem.num_sms} multiprocessors have work"
        )
    return "splits: none, since blocks of rows are enough, or keys too few"


def _grid(problem: Problem, blocks: Blocks) -> _Grid:
    sequences, keys = problem.batch, problem.max_seqlen_kv
    if problem.packed:
        # As many as there would be if all had the most queries: others are shorter, or another family's.
        sequences = max(round(problem.num_queries / max(problem.max_seqlen_q, 1)), 1)
        if not problem.page_size:
            keys = ceil_div(keys, sequences)
    group = problem.group if blocks.packed else 1
    heads = problem.num_heads // group
    per_head = max(ceil_div(problem.max_seqlen_q * group, blocks.rows), 1)
    tiles = _seen_tiles(
        problem.max_seqlen_q, keys, blocks.rows / group, blocks.tile, per_head,
        causal=problem.causal, window=problem.window, sink_tokens=problem.sink_tokens,
    )  # fmt: skip
    widths = problem.head_dim + problem.head_dim_v
    products = blocks.rows * blocks.tile * widths / blocks.rate
    # Blocks that run beside each other and read the same keys get them from the second cache.
    readers = per_head * (1 if blocks.packed else problem.group)
    read = blocks.tile * widths * BY_NAME[problem.kv_dtype].itemsize / READ_RATE / readers
    state_bytes = problem.num_rows * (problem.head_dim_v + 2) * problem.state_bytes
    return _Grid(
        tiles,
        sequences * heads * per_head,
        (problem.batch - sequences) * heads * per_head,
        problem.num_sms,
        blocks.per_sm,
        max(products, read),
        2 * state_bytes / STATE_RATE,
    )


@functools.lru_cache(maxsize=1024)
def _seen_tiles(
    num_queries: int, num_keys: int, queries: float, tile: int, num_blocks: int, *, causal: bool,
    window: tuple[int, int], sink_tokens: int,
) -> tuple[int, ...]:  # fmt: skip
    """Return how many tiles blocks of so many `queries` see, the last query being that of the last key."""
    left, right = window
    if causal:
        right = 0 if right < 0 else min(right, 0)
    if left < 0 and right < 0:
        return (ceil_div(num_keys, tile),)
    some = sorted({round(i * (num_blocks - 1) / (_SAMPLES - 1)) for i in range(_SAMPLES)})
    found = []
    for block in some:
        first = int(block * queries)
        last = min(int((block + 1) * queries), num_queries) - 1
        offset = num_keys - num_queries
        lo = max(first + offset - left, 0) if left >= 0 else 0
        hi = max(min(last + offset + right + 1, num_keys), 0) if right >= 0 else num_keys
        sink = min(sink_tokens, lo)
        found.append(max(ceil_div(hi, tile) - lo // tile, 0) + ceil_div(sink, tile))
    return tuple(found)


def _time(grid: _Grid, splits: int) -> float:
    """Return how long a prefill takes whose keys are cut into so many parts.

    Blocks that have the most to do begin first; those that begin last are the shortest.
    """
    items, slots = grid.items * splits, grid.num_sms * grid.per_sm
    # Blocks on one multiprocessor share its rate.
    beside = min(max(items / grid.num_sms, 1 / ALONE), grid.per_sm) if grid.per_sm > 1 else 1
    times = [ceil_div(tiles, splits) * grid.tile_time * beside + BLOCK_TIME for tiles in grid.tiles]
    waves = items / slots
    even = waves * sum(times) / len(times)
    last = (ceil_div(items, slots) - waves) * min(times)
    empty = grid.empty * splits * EMPTY_TIME / slots
    merge = MERGE_TIME + splits * grid.state_time if splits > 1 else 0
    return max(even + last, max(times)) + empty + merge


@functools.lru_cache(maxsize=1024)
def _best(grid: _Grid) -> int:
    """Return into how many parts keys are best cut."""
    whole = _time(grid, 1)
    slots = grid.num_sms * grid.per_sm
    most = min(max(2 * slots // max(grid.items, 1), MOST), max(*grid.tiles, 1))
    best = min(range(1, most + 1), key=lambda splits: _time(grid, splits))
    return best if _time(grid, best) <= (1 - WORTH) * whole else 1
