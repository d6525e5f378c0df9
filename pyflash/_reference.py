"""The definition of correct, written to be read first.

`naive` is attention as in the textbook: the whole score matrix, softmax in two passes. It is the
oracle. `NumpyBackend` computes the same in memory that doesn't grow with the keys: it folds the
state of `_state` over tiles of keys, as every kernel of pyflash does. Both compute in float64
whatever the inputs are; the one rounding to another type is that of the result.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ._description import (
    DECODE_MAX_ROWS,
    AppendArgs,
    Array,
    Arrays,
    AttentionArgs,
    Explanation,
    MergeArgs,
    StatsArgs,
)
from ._layout import (
    RowBlock,
    Sequence,
    group_size,
    load_keys,
    load_q,
    load_values,
    pairs,
    row_blocks,
    sequences,
    store,
)
from ._masks import key_tiles, visible_keys
from ._reference_append import append
from ._reference_stats import stats_of_sequence
from ._scores import scores
from ._state import (
    LOWEST,
    State,
    state_empty,
    state_finish,
    state_merge_tree,
    state_update,
    weighted_sum,
    with_sinks,
)
from ._tiles import count_tiles

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
    at = pairs(block, key)
    visible = visible_keys(args, at)
    s = scores(args, at, load_q(args, block), load_keys(args, block, key))
    np.copyto(s, -np.inf, where=~visible)
    lse = _log_sum_exp(s)
    if args.sinks is not None:
        # A sink is one more column, whose value is zero. It is held finite, so that +inf takes all
        # the weight instead of being inf - inf.
        sinks = args.sinks[block.head]
        s = np.column_stack([s, np.minimum(sinks, -LOWEST)])
        if args.lse_includes_sinks:
            lse = np.logaddexp(lse, sinks)

    p = s  # in place: few matrices of N^2 numbers are what the textbook needs
    p -= s.max(axis=1, initial=-np.inf, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=1, keepdims=True)

    # Without a visible key p may be NaN, by -inf - -inf; such rows are selected away.
    seen = visible.any(axis=1, keepdims=True)
    out = weighted_sum(p[:, : key.size], load_values(args, block, key), visible)
    return np.where(seen, out, 0.0), lse


def _log_sum_exp(s: Array) -> Array:
    """Return the logarithm of the sum of the exponentials of each row, -inf for a sum of nothing."""
    m = s.max(axis=1, initial=-np.inf)
    terms = s - m[:, np.newaxis]
    np.exp(terms, out=terms)
    return np.where(m == -np.inf, -np.inf, m + np.log(terms.sum(axis=1)))


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


class NumpyBackend:
    """The tiled recurrence in NumPy, in memory that doesn't depend on the number of keys."""

    name = "numpy"

    def unavailable(self) -> str | None:
        """Return None: NumPy is always there."""
        return None

    def attention(self, args: AttentionArgs, *, again: Arrays | None = None) -> None:
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
        """Write the tokens into their slots, rotated and quantised as the call says."""
        with quiet():
            append(args)

    def attention_stats(self, args: StatsArgs) -> None:
        """Fill the results in `args` that are not None, one tile of one block of rows at a time."""
        with quiet():
            for sequence in sequences(args.attention):
                stats_of_sequence(args, sequence, PREFILL_ROWS, TILE)

    def check(self, args: AttentionArgs) -> None:
        """Refuse nothing: what the checks let through, NumPy computes."""

    def explain(self, args: AttentionArgs) -> Explanation:
        """Say how `attention` would cut the call."""
        cuts: list[Plan] = []
        items = total = computed = 0
        for sequence in sequences(args):
            cut = plan(args, sequence)
            cuts.append(cut)
            count = count_tiles(args, sequence, cut.rows, cut.borders, cut.tile)
            items, total, computed = items + count.items, total + count.tiles, computed + count.seen
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
        sinks = args.sinks.astype(np.float64)
        state = with_sinks(state, sinks)
        if args.lse_includes_sinks:
            lse = np.logaddexp(lse, sinks)
    # All scores of a part with an lse of -inf and a broken output were -inf: it has seen keys. A score
    # in another part or a sink makes that a weight of 0; else it is softmax of nothing but -inf.
    seen = ~empty.all(axis=0) | ~np.isfinite(parts).all(axis=(0, -1))
    out, _ = state_finish(state, seen)
    return np.where(seen[..., np.newaxis], out, 0.0) / value_factor, lse


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
        state = state_empty(cut.rows, args.out.shape[3])
        for at, visible in key_tiles(args, block, *border, cut.tile):
            key = at.key[0]
            s = scores(args, at, q, load_keys(args, block, key))
            state = state_update(state, s, load_values(args, block, key) * value_factor, visible)
            seen[visible.any(axis=1)] = True
        return state

    state = state_merge_tree(map(fold, cut.borders))
    out, lse = state_finish(state, seen)
    if args.sinks is not None:
        sinks = args.sinks[block.head]
        shared, _ = state_finish(with_sinks(state, sinks), seen)
        out = np.where(seen[:, np.newaxis], shared, out)  # a row without keys is 0 whatever its sink
        if args.lse_includes_sinks:
            lse = np.logaddexp(lse, sinks)
    return out / value_factor, lse


def _working_bytes(args: AttentionArgs, cut: Plan) -> int:
    """Return about how many bytes `attention` holds besides its inputs and outputs."""
    head_dim, head_dim_v = args.q.shape[3], args.out.shape[3]
    # Scores, selected, their difference to m, p. While a mask or a term is found there are others
    # instead: what of the user's arrays lies at the pairs, as stored and as computed.
    score_matrices = 4 * cut.rows * cut.tile
    tile_of_keys = 2 * cut.tile * (head_dim + head_dim_v)  # as stored and as computed
    states = (len(cut.borders).bit_length() + 3) * cut.rows * (head_dim_v + 2)
    numbers = score_matrices + tile_of_keys + states + 2 * cut.rows * head_dim
    return 8 * int(numbers) + 2 * cut.rows * cut.tile


#: The backend object that `_backends` hands out.
BACKEND = NumpyBackend()
