"""`trace`: the recurrence of one head, step by step, beside the exact answer.

It runs the state functions that every kernel runs and keeps what they return. The recurrence
without its guard, which gives NaN, exists here and nowhere else.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import _args, _checks
from ._description import Array, AttentionArgs
from ._errors import invalid
from ._layout import RowBlock, load_keys, load_q, load_values, pages_of, pairs, row_blocks, sequences
from ._masks import visible_keys
from ._reference import naive, plan, quiet
from ._scores import scores
from ._state import (
    LOWEST,
    State,
    fold_tree,
    rescaling,
    state_empty,
    state_finish,
    state_merge,
    state_update,
)


class Step(NamedTuple):
    """One tile of keys folded into the state of its split. Arrays have one entry per query row.

    Attributes
    ----------
    split, tile : int
        Which split, and which tile of it.
    key_lo, key_hi : int
        The keys of the tile, ``key_lo <= j < key_hi``.
    pages : tuple of int
        Physical pages that were read, in order; empty without a block table.
    scores : (seqlen_q, key_hi - key_lo) ndarray
        -inf where the row may not see the key.
    m_before, m_after : (seqlen_q,) ndarray
        Largest score before and after the tile.
    alpha : (seqlen_q,) ndarray
        Factor that brings l and o from m_before to m_after.
    l : (seqlen_q,) ndarray
        Sum of weights after the tile.
    o : (seqlen_q, head_dim_v) ndarray
        Weighted values after the tile.
    out : (seqlen_q, head_dim_v) ndarray
        What the split would give out if it ended here.
    error : float
        Largest ``|out - exact|``; NaN if out holds one.
    rescaled : int
        Rows whose earlier sums were multiplied by an alpha other than 1.
    """

    split: int
    tile: int
    key_lo: int
    key_hi: int
    pages: tuple[int, ...]
    scores: Array
    m_before: Array
    m_after: Array
    alpha: Array
    l: Array
    o: Array
    out: Array
    error: float
    rescaled: int


class Combination(NamedTuple):
    """The states of two neighbouring runs of splits merged into one.

    Attributes
    ----------
    left, right : (int, int)
        The splits ``[lo, hi)`` on both sides; hi of left is lo of right.
    m, l : (seqlen_q,) ndarray
        The merged state.
    o : (seqlen_q, head_dim_v) ndarray
        Its weighted values.
    out : (seqlen_q, head_dim_v) ndarray
        What it would give out.
    error : float
        Largest ``|out - exact|``.
    """

    left: tuple[int, int]
    right: tuple[int, int]
    m: Array
    l: Array
    o: Array
    out: Array
    error: float


class Trace(NamedTuple):
    """All steps of one head's attention, and what came out.

    Attributes
    ----------
    out : (seqlen_q, head_dim_v) float64 ndarray
        The result.
    lse : (seqlen_q,) float64 ndarray
        Its log-sum-exp.
    exact, exact_lse : float64 ndarray
        Textbook attention, shaped alike.
    error : float
        Largest ``|out - exact|``.
    steps : tuple of Step
        Every tile of every split.
    combinations : tuple of Combination
        Every merge.
    """

    out: Array
    lse: Array
    exact: Array
    exact_lse: Array
    error: float
    steps: tuple[Step, ...]
    combinations: tuple[Combination, ...]


class _Part(NamedTuple):
    """The state of splits ``[lo, hi)`` and the rows that have seen any of their keys."""

    lo: int
    hi: int
    state: State
    seen: Array


def trace(
    q: Array,
    k: Array,
    v: Array,
    *,
    tile: int,
    guard: bool = True,
    num_splits: int = 1,
    block_table: Array | None = None,
    seq_lens: int | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    spans: tuple[Any, Any] | None = None,
    scale: float | None = None,
    q_offset: int | None = None,
) -> Trace:
    """Run the online-softmax recurrence of one head and return every step of it.

    Parameters
    ----------
    q : (seqlen_q, head_dim) ndarray
        Queries of one head, at least one; types as in `flash_attention`.
    k : (seqlen_kv, head_dim) ndarray
        Keys; with `block_table` the page pool ``(num_pages, page_size, head_dim)``.
    v : (seqlen_kv, head_dim_v) ndarray
        Values; with `block_table` the page pool ``(num_pages, page_size, head_dim_v)``.
    tile : int
        Keys per step. Tiles are counted from the start of each split; the last may be shorter.
    guard : bool, default True
        Hold m above the lowest finite number wherever it is subtracted. False runs the
        recurrence as it is often written: a row that sees nothing of its first tile computes
        ``exp(-inf - -inf)`` and is NaN from there on.
    num_splits : int, default 1
        Run the recurrence on so many parts of the keys, ``[s * n // num_splits, ...)``, and
        merge their states along the tree ((0, 1), (2, 3)).
    block_table : (max_pages,) int32 or int64 ndarray, optional
        Page number of each logical page; entries past the length are not read.
    seq_lens : int, optional
        Number of valid keys. Default: all of them; needed with `block_table`.
    causal, window, spans, scale, q_offset
        As in `flash_attention`, `q_offset` being one number.

    Returns
    -------
    Trace
        The result, the exact answer, a `Step` for each tile of each split, and a `Combination`
        for each merge. Kernels leave out tiles that no row sees; here they are steps too.

    Raises
    ------
    InvalidArgument
        An argument has a wrong type, shape or value; the message names it.

    Notes
    -----
    With ``s`` the scores of a tile, a step is::

        m' = max(m, max(s))     alpha = exp(m - m')     p = exp(s - m')
        l' = alpha l + sum(p)                           o' = alpha o + p v

    and the end is ``out = o / l``, ``lse = m + log(l)``. Two states merge by the same rule:
    with m' the larger m, ``l' = sum of exp(m_i - m') l_i``, and o' alike.

    References
    ----------
    Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
    Dao, Fu, Ermon, Rudra, Ré, "FlashAttention: Fast and Memory-Efficient Exact Attention with
    IO-Awareness", 2022, algorithm 1.
    Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
    2023, section 3.1: o is divided by l once, at the end.

    Examples
    --------
    Of four keys in two tiles, the second query sees nothing of the first tile:

    >>> import numpy as np, pyflash
    >>> q, k, v = np.zeros((2, 1)), np.zeros((4, 1)), np.arange(4.0)[:, None]
    >>> for step in pyflash.trace(q, k, v, tile=2, window=(1, 0)).steps:
    ...     print(step.key_lo, step.m_after, step.l, step.out.ravel())
    0 [  0. -inf] [1. 0.] [1. 0.]
    2 [0. 0.] [2. 2.] [1.5 2.5]
    >>> pyflash.trace(q, k, v, tile=2, window=(1, 0), guard=False).out.ravel()
    array([1.5, nan])
    """
    floor = LOWEST if _checks.flag("guard", guard) else -np.inf
    options: dict[str, Any] = {
        "tile": _checks.integer("tile", tile, 1),
        "num_splits": _checks.integer("num_splits", num_splits, 1),
        "causal": causal,
        "window": window,
        "spans": spans,
        "scale": scale,
        "q_offset": q_offset,
    }
    call = _checked(q, k, v, block_table, seq_lens, options)
    args = call.args
    exact, exact_lse = np.empty(args.out.shape), np.empty((1, 1, len(q)))
    naive(args._replace(out=exact, lse=exact_lse))
    recorder = _Recorder(call, exact[0, :, 0], floor)
    with quiet():
        whole = fold_tree(map(recorder.run_split, range(len(recorder.borders))), recorder.merge)
        out, lse, error = recorder.judge(whole.state, whole.seen)
    return Trace(
        out,
        lse,
        recorder.exact,
        exact_lse[0, 0],
        error,
        tuple(recorder.steps),
        tuple(recorder.combinations),
    )


class _Recorder:
    """Runs the splits of one head and keeps their steps and merges."""

    def __init__(self, call: _args.Call, exact: Array, floor: float) -> None:
        self.args, self.exact, self.floor = call.args, exact, floor
        (self.sequence,) = sequences(self.args)
        (self.block,) = row_blocks(self.args, self.sequence, size=None)
        self.q = load_q(self.args, self.block)
        cut = plan(self.args, self.sequence)
        self.tile, self.borders = cut.tile, cut.borders
        self.steps: list[Step] = []
        self.combinations: list[Combination] = []

    def judge(self, state: State, seen: Array) -> tuple[Array, Array, float]:
        """Return what a state gives out, and how far that is from the exact answer."""
        out, lse = state_finish(state, seen)
        return out, lse, float(np.abs(out - self.exact).max())

    def run_split(self, split: int) -> _Part:
        """Fold the tiles of one split, recording each step."""
        lo, hi = self.borders[split]
        state = state_empty(self.block.row.size, self.args.out.shape[3])
        seen = np.zeros(self.block.row.shape, dtype=bool)
        for tile, start in enumerate(range(lo, hi, self.tile)):
            key = np.arange(start, min(start + self.tile, hi))
            at = pairs(self.block, key)
            visible = visible_keys(self.args, at)
            s = scores(self.args, at, self.q, load_keys(self.args, self.block, key))
            v = load_values(self.args, self.block, key)
            after = state_update(state, s, v, visible, floor=self.floor)
            seen = seen | visible.any(axis=1)
            self.steps.append(self._step(split, tile, key, np.where(visible, s, -np.inf), state, after, seen))
            state = after
        return _Part(split, split + 1, state, seen)

    def _step(
        self, split: int, tile: int, key: Array, s: Array, before: State, after: State, seen: Array
    ) -> Step:
        alpha = rescaling(before.m, after.m, self.floor)
        out, _, error = self.judge(after, seen)
        return Step(
            split,
            tile,
            key_lo=int(key[0]),
            key_hi=int(key[-1]) + 1,
            pages=_pages(self.args, self.block, key),
            scores=s,
            m_before=before.m,
            m_after=after.m,
            alpha=alpha,
            l=after.l,
            o=after.o,
            out=out,
            error=error,
            rescaled=int(np.count_nonzero((before.l != 0) & (alpha != 1))),
        )

    def merge(self, left: _Part, right: _Part) -> _Part:
        """Merge two neighbouring parts, recording the combination."""
        state, seen = state_merge(left.state, right.state), left.seen | right.seen
        out, _, error = self.judge(state, seen)
        self.combinations.append(
            Combination((left.lo, left.hi), (right.lo, right.hi), *state, out=out, error=error)
        )
        return _Part(left.lo, right.hi, state, seen)


def _pages(args: AttentionArgs, block: RowBlock, key: Array) -> tuple[int, ...]:
    """Return the physical pages of consecutive keys in logical order, each logical page once."""
    if args.block_table is None:
        return ()
    page_size = args.k.shape[1]
    first_key_of_page = np.unique(key // page_size) * page_size
    return tuple(int(page) for page in pages_of(args, block.sequence, first_key_of_page))


def _checked(
    q: Array,
    k: Array,
    v: Array,
    block_table: Array | None,
    seq_lens: int | None,
    options: dict[str, Any],
) -> _args.Call:
    """Check the arrays of one head and describe them as a call."""
    _checks.float_array("q", q, {2: "(seqlen_q, head_dim)"})
    if len(q) == 0:
        raise invalid("q", f"shape {q.shape}", "at least one row")
    axes = {2: "(seqlen_kv, head_dim)"} if block_table is None else {3: "(num_pages, page_size, head_dim)"}
    for name, array in (("k", k), ("v", v)):
        _checks.float_array(name, array, axes)
    lengths = None if seq_lens is None else np.array([_checks.integer("seq_lens", seq_lens, 0)])
    if block_table is None:
        return _args.dense(q, k, v, seq_lens=lengths, backend="numpy", **options)
    if lengths is None:
        raise invalid("seq_lens", "None", "the number of keys behind the block table")
    _checks.index_array("block_table", block_table, (None,), "(max_pages,)")
    table = block_table[np.newaxis]
    return _args.paged(
        q[np.newaxis, :, np.newaxis],
        k[:, :, np.newaxis],
        v[:, :, np.newaxis],
        table,
        lengths,
        backend="numpy",
        **options,
    )
