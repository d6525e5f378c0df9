"""The definition of correct, written to be read first.

`naive` is attention as in the textbook: the whole score matrix, softmax in two passes. It is the
oracle. `NumpyBackend` computes the same in memory that doesn't grow with the keys: it folds the
state of `_state` over tiles of keys, as every kernel of pyflash does. Both compute in float64
whatever the inputs are; the one rounding to another type is that of the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ._description import (
    DECODE_MAX_ROWS,
    AppendArgs,
    Array,
    AttentionArgs,
    Explanation,
    MergeArgs,
)
from ._layout import RowBlock, Sequence, group_size, load_keys, load_q, row_blocks, sequences, store
from ._masks import visible_keys
from ._state import (
    State,
    state_empty,
    state_finish,
    state_merge_tree,
    state_update,
    weighted_sum,
    with_sinks,
)

#: Keys per tile unless the call says otherwise.
TILE = 128
#: Keys per split of a decode; the borders are fixed, so that the result doesn't depend on workers.
DECODE_SPLIT = 512
#: What values are multiplied by where their sum is infinite: no sum of fewer than 2^40 can be then.
SMALLER_VALUES = 2.0**-40
#: Query rows per block of a prefill; a decode has no more than DECODE_MAX_ROWS to begin with. Few
#: enough that BLAS, which starts its threads above some 2^18 multiplications, mostly doesn't: for
#: products this small they cost more than they bring, on busy cores by a factor of ten.
PREFILL_ROWS = 32


def scores(args: AttentionArgs, q: Array, k: Array) -> Array:
    """Return the final scores ``(rows, keys)`` before any mask: ``scale * (q . k)``."""
    s: Array = q @ k.T
    s *= args.scale
    return s


def quiet() -> np.errstate:
    """Return a context without NumPy's warnings: infinities and NaN belong to the definition."""
    return np.errstate(all="ignore")


def naive(args: AttentionArgs) -> None:
    """Fill ``args.out`` and ``args.lse`` by textbook attention, one score matrix per kv head.

    How a call is to be cut (`tile`, `num_splits`, `family`) means nothing here.
    """
    with quiet():
        for sequence in sequences(args):
            for block in row_blocks(args, sequence, size=None):
                store(args, block, *_textbook(args, block))


def _textbook(args: AttentionArgs, block: RowBlock) -> tuple[Array, Array]:
    """Return out and lse of all rows of one kv head, by softmax over the whole score matrix."""
    key = np.arange(block.sequence.seqlen_kv)
    k, v = load_keys(args, block, key)
    visible = visible_keys(args, block.position, key)
    s = scores(args, load_q(args, block), k)
    np.copyto(s, -np.inf, where=~visible)
    m = s.max(axis=1, initial=-np.inf)

    p = s  # in place: one matrix of N^2 numbers is what the textbook needs
    p -= m[:, np.newaxis]
    np.exp(p, out=p)
    l = p.sum(axis=1)
    p /= l[:, np.newaxis]

    # Without a visible key p is NaN, by -inf - -inf; such rows are selected away.
    seen = visible.any(axis=1, keepdims=True)
    out = np.where(seen, weighted_sum(p, v, visible), 0.0)
    return out, np.where(m == -np.inf, -np.inf, m + np.log(l))


class Plan(NamedTuple):
    """How one sequence is cut: into blocks of rows, its keys into splits, a split into tiles."""

    family: str
    rows: int
    tile: int
    borders: tuple[tuple[int, int], ...]  # [key_lo, key_hi) of each split


def plan(args: AttentionArgs, sequence: Sequence) -> Plan:
    """Return how a sequence is cut, from its shape and the options alone."""
    n = sequence.seqlen_kv
    family = args.family
    if family is None:
        rows = sequence.seqlen_q * group_size(args)
        family = "decode" if rows <= DECODE_MAX_ROWS else "prefill"
    if args.num_splits is not None:
        parts = min(args.num_splits, max(n, 1))  # more would be empty
        cuts = [s * n // parts for s in range(parts + 1)]
    elif family == "decode":
        cuts = [*range(0, n, DECODE_SPLIT), n]
    else:
        cuts = [0, n]
    borders = tuple(pairwise(cuts)) or ((0, 0),)
    longest = max(hi - lo for lo, hi in borders)
    # The default tile is kept where there are fewer keys too: see `key_tiles`.
    tile = TILE if args.tile is None else min(args.tile, max(longest, 1))
    return Plan(family, DECODE_MAX_ROWS if family == "decode" else PREFILL_ROWS, tile, borders)


def key_tiles(
    args: AttentionArgs, block: RowBlock, lo: int, hi: int, tile: int
) -> Iterator[tuple[Array, Array]]:
    """Yield positions ``(tile,)`` and visibility ``(rows, tile)`` of each tile that a row sees.

    The last tile of a split is as long as the others: it repeats its last key, invisibly. So the
    sums over a tile have one order, and a row's bits don't depend on how many keys follow those
    that it sees. Tiles that no row of the block sees would change nothing and are left out.
    """
    for start in range(lo, hi, tile):
        position = np.arange(start, start + tile)
        key = np.minimum(position, hi - 1)
        visible = visible_keys(args, block.position, key) & (position < hi)
        if visible.any():
            yield key, visible


class NumpyBackend:
    """The tiled recurrence in NumPy, in memory that doesn't depend on the number of keys."""

    name = "numpy"

    def unavailable(self) -> str | None:
        """Return None: NumPy is always there."""
        return None

    def attention(self, args: AttentionArgs) -> None:
        """Fill ``args.out`` and ``args.lse``, holding one tile of one block of rows at a time."""
        with quiet():
            for sequence in sequences(args):
                cut = plan(args, sequence)
                for block in row_blocks(args, sequence, cut.rows):
                    store(args, block, *_attend(args, block, cut))

    def merge_states(self, args: MergeArgs) -> None:
        """Fill ``args.out`` and ``args.lse``; a part is the state with l = 1 and its lse as m."""
        with quiet():
            out, lse = _merged(args, 1.0)
            if not np.isfinite(out).all():
                smaller, _ = _merged(args, SMALLER_VALUES)
                out = np.where(np.isfinite(out), out, smaller)
            args.out[...] = out.astype(args.out.dtype)
            args.lse[...] = lse.swapaxes(1, 2)

    def append_kv(self, args: AppendArgs) -> None:
        """Write the tokens into their slots, keys rotated if ``args.cos`` is given."""
        token = np.flatnonzero(args.slots >= 0)
        page, place = np.divmod(args.slots[token], args.k_cache.shape[1])
        k = args.k[token]
        with quiet():
            if args.cos is not None and args.sin is not None:
                k = _rotated(k, args.cos[token], args.sin[token], args.interleaved)
            args.k_cache[page, place] = k.astype(args.k_cache.dtype)
            args.v_cache[page, place] = args.v[token].astype(args.v_cache.dtype)

    def explain(self, args: AttentionArgs) -> Explanation:
        """Say how `attention` would cut the call; walks over all tiles, but loads none."""
        cuts: list[Plan] = []
        items = total = computed = 0
        for sequence in sequences(args):
            cut = plan(args, sequence)
            cuts.append(cut)
            tiles = sum(-(-(hi - lo) // cut.tile) for lo, hi in cut.borders)
            for block in row_blocks(args, sequence, cut.rows):
                items, total = items + 1, total + tiles
                computed += sum(1 for lo, hi in cut.borders for _ in key_tiles(args, block, lo, hi, cut.tile))
        cuts = cuts or [Plan("prefill", PREFILL_ROWS, TILE, ((0, 0),))]
        families = {cut.family for cut in cuts}
        family = families.pop() if len(families) == 1 else "prefill+decode"
        largest = max(cuts, key=lambda cut: cut.rows)
        if args.family is not None:
            why = f"family: {family}, as asked"
        else:
            why = f"family: decode up to {DECODE_MAX_ROWS} query rows per kv head, prefill above"
        return Explanation(
            backend=self.name,
            kernel="tiled",
            family=family,
            isa="numpy",
            tile=largest.tile,
            rows_per_item=largest.rows,
            num_splits=max(len(cut.borders) for cut in cuts),
            num_items=items,
            num_threads=1,
            tiles_total=total,
            tiles_skipped=total - computed,
            workspace_bytes=max(_working_bytes(args, cut) for cut in cuts),
            reasons=(why, "num_threads: blocks follow one another; only BLAS has threads of its own"),
        )


def _merged(args: MergeArgs, value_factor: float) -> tuple[Array, Array]:
    """Return out and lse, ``(batch, seqlen, num_heads)``, of merged parts."""
    m = args.part_lse.swapaxes(2, 3).astype(np.float64)  # axes as those of the parts
    parts = args.parts.astype(np.float64) * value_factor
    empty = m == -np.inf
    states = (
        State(m_i, np.where(empty_i, 0.0, 1.0), np.where(empty_i[..., np.newaxis], 0.0, part))
        for m_i, empty_i, part in zip(m, empty, parts, strict=True)
    )
    state = state_merge_tree(states)
    _, lse = state_finish(state, seen=state.m != -np.inf)
    if args.sinks is not None:
        state = with_sinks(state, args.sinks.astype(np.float64))
    out, _ = state_finish(state, seen=state.m != -np.inf)
    # All scores of such parts were -inf. A score in another part makes that a weight of 0; where
    # there is none, the union is what they are: softmax of nothing but -inf.
    broken = (empty & ~np.isfinite(parts).all(axis=-1)).any(axis=0) & empty.all(axis=0)
    return np.where(broken[..., np.newaxis], np.nan, out) / value_factor, lse


def _attend(args: AttentionArgs, block: RowBlock, cut: Plan) -> tuple[Array, Array]:
    """Return out and lse of a block of rows."""
    out, lse = _folded(args, block, cut, 1.0)
    if not np.isfinite(out).all():
        # Finite values near the largest number may have an infinite sum, though not an infinite mean.
        smaller, _ = _folded(args, block, cut, SMALLER_VALUES)
        out = np.where(np.isfinite(out), out, smaller)
    return out, lse


def _folded(args: AttentionArgs, block: RowBlock, cut: Plan, value_factor: float) -> tuple[Array, Array]:
    """Return out and lse of a block of rows: fold the tiles of each split, merge the splits."""
    q = load_q(args, block)
    seen = np.zeros(cut.rows, dtype=bool)

    def fold(border: tuple[int, int]) -> State:
        state = state_empty(cut.rows, args.v.shape[3])
        for key, visible in key_tiles(args, block, *border, cut.tile):
            k, v = load_keys(args, block, key)
            state = state_update(state, scores(args, q, k), v * value_factor, visible)
            seen[visible.any(axis=1)] = True
        return state

    state = state_merge_tree(map(fold, cut.borders))
    out, lse = state_finish(state, seen)
    return out / value_factor, lse


def _rotated(k: Array, cos: Array, sin: Array, interleaved: bool) -> Array:
    """Return keys ``(tokens, num_kv_heads, head_dim)`` rotated by ``(tokens, rotary_dim / 2)``.

    Each pair ``(a, b)`` becomes ``(a cos - b sin, b cos + a sin)``. The pairs are neighbours if
    `interleaved`, else element d and element d + rotary_dim / 2. What lies past rotary_dim stays.
    """
    half = cos.shape[1]
    first, second = slice(0, half), slice(half, 2 * half)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    cos, sin = cos[:, np.newaxis].astype(np.float64), sin[:, np.newaxis].astype(np.float64)
    rotated = k.astype(np.float64)
    a, b = rotated[..., first].copy(), rotated[..., second].copy()
    rotated[..., first] = a * cos - b * sin
    rotated[..., second] = b * cos + a * sin
    return rotated


def _working_bytes(args: AttentionArgs, cut: Plan) -> int:
    """Return about how many bytes `attention` holds besides its inputs and outputs."""
    head_dim, head_dim_v = args.q.shape[3], args.v.shape[3]
    score_matrices = 4 * cut.rows * cut.tile  # scores, selected, their difference to m, p
    tile_of_keys = 2 * cut.tile * (head_dim + head_dim_v)  # as stored and as computed
    states = (len(cut.borders).bit_length() + 3) * cut.rows * (head_dim_v + 2)
    numbers = score_matrices + tile_of_keys + states + 2 * cut.rows * head_dim
    return 8 * int(numbers) + 2 * cut.rows * cut.tile


#: The backend object that `_backends` hands out.
BACKEND = NumpyBackend()
