"""One step of the ring: a rank's queries against the keys of one rank, as calls of pyflash's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .. import _api
from .._description import Array
from . import _ranges
from ._arguments import Arguments
from ._routes import Route
from ._schedules import Layout
from ._states import State, States


class Held(NamedTuple):
    """Keys of one rank, or those of them that travelled."""

    rank: int
    ranges: Array  # which of the rank's tokens
    k: Any  # (..., tokens, num_kv_heads, head_dim) in the order of the ranges
    v: Any


class Part(NamedTuple):
    """One call: rows against keys that are held, and what is added to the log-sum-exp, times the slope."""

    rows: tuple[int, int]
    keys: tuple[int, int]
    options: dict[str, Any]
    shift: Array | None = None  # (1,) or (batch,)


class Packed(NamedTuple):
    """One call for all packed sequences."""

    cu_seqlens_kv: Array
    options: dict[str, Any]


#: Bytes for each row of a rank, however many ranks there are, that a route may keep of calls of its steps.
_KEPT_BYTES = 256


def _bytes_of(calls: Packed | list[Part]) -> int:
    """Return the bytes of the spans of a step's calls."""
    some = [calls] if isinstance(calls, Packed) else calls
    return sum(end.nbytes for one in some for end in one.options.get("spans", ()))


def spans_or_less(lo: Array, hi: Array, num_keys: int, q_offset: Array | None = None) -> dict[str, Any]:
    """Return the options that say that rows see keys ``lo <= j < hi``: none, causal order, or spans.

    All are ``(lines, rows)``, `q_offset` is ``(lines,)`` where the call has to have one. Kernels look
    through spans, and need not where there is nothing to say.
    """
    options = {} if q_offset is None else dict(q_offset=_offset(q_offset))
    if lo.any():
        return dict(spans=(lo, hi), **options)
    if (hi == num_keys).all():
        return options
    row = np.arange(hi.shape[1])
    inside = (hi > 0) & (hi < num_keys)
    offset = np.where(inside, hi - row, np.iinfo(np.int64).min).max(axis=1) - 1
    causal = np.clip(row + offset[:, np.newaxis] + 1, 0, num_keys)
    if inside.any(axis=1).all() and (hi == causal).all() and (q_offset is None or (offset == q_offset).all()):
        return dict(causal=True, q_offset=_offset(offset))
    return dict(spans=(lo, hi), **options)


def _offset(of_lines: Array) -> int | Array:
    return int(of_lines[0]) if len(of_lines) == 1 else of_lines


class Steps:
    """What a rank computes in each step.

    Parameters
    ----------
    rank : int
        This rank.
    call : Arguments
        Its arguments.
    route : Route
        What its rows see. The calls that follow from it are kept with it: they are found out by looking at
        all rows, which takes a GPU's host longer than the GPU takes for some steps.
    layouts : (Layout, Layout)
        Where queries and keys lie.
    states : States
        Where results go.
    """

    def __init__(
        self, rank: int, call: Arguments, route: Route, layouts: tuple[Layout, Layout], states: States
    ) -> None:
        self._rank, self._call, self._rows, self._states = rank, call, route.rows, states
        self._known = route.calls
        self._queries, self._keys = layouts
        slopes, step = call.alibi_slopes, self._keys.step
        #: Of a step between keys, which is one position or, of stripes, several.
        self._slopes_of_steps = slopes if slopes is None or step == 1 else states.scaled(slopes, step)

    def attend(self, held: Held) -> State | None:
        """Return the state of all rows over the keys that are held, None if no row sees any."""
        key = held.rank, self._call.alibi_slopes is not None
        calls = self._known.get(key)
        if calls is None:
            calls = self._calls(held)
            kept = sum(map(_bytes_of, self._known.values())) + _bytes_of(calls)
            if kept <= _KEPT_BYTES * self._states.num_rows:
                self._known[key] = calls
        return self._all_sequences(held, calls) if isinstance(calls, Packed) else self._run(held, calls)

    def _calls(self, held: Held) -> Packed | list[Part]:
        """Return the calls of a step, of which all but the arrays is known."""
        if self._call.alibi_slopes is not None:
            return list(self._with_slopes(held))
        lo, hi = self._spans(held)
        if self._queries.lengths.shape[1] == 1 or not (lo < hi).any():
            return list(_one_call(lo, hi))
        return self._packed(held, lo[0], hi[0])

    def _spans(self, held: Held) -> tuple[Array, Array]:
        """Return what rows see of the keys that are held, as places among those of their sequence."""
        first = self._keys.borders(held.rank)[self._rows.sequence]
        start = _ranges.place(held.ranges, first)
        lo, hi = (_ranges.place(held.ranges, x + first) - start for x in self._rows.on(self._keys, held.rank))
        return lo, hi

    def _packed(self, held: Held, lo: Array, hi: Array) -> Packed:
        cu_seqlens_kv = _ranges.place(held.ranges, self._keys.borders(held.rank))
        num_keys = np.diff(cu_seqlens_kv)[self._rows.sequence]
        sees_all = not lo.any() and (hi == num_keys).all()
        return Packed(cu_seqlens_kv, {} if sees_all else dict(spans=(lo, hi)))

    def _all_sequences(self, held: Held, packed: Packed) -> State:
        """Compute packed sequences in one call."""
        state = self._states.new(held.rank)
        _, lse = _api.flash_attention_varlen(
            self._call.q,
            held.k,
            held.v,
            self._queries.borders(self._rank),
            packed.cu_seqlens_kv,
            **self._call.kernel,
            **packed.options,
            out=state.out,
            return_lse=True,
        )
        state.lse[...] = lse
        return state

    def _with_slopes(self, held: Held) -> Iterator[Part]:
        """Yield calls of pieces against pieces, in which distances of tokens say those of positions."""
        lo, hi = self._rows.on(self._keys, held.rank)
        row_counts = self._queries.pieces(self._rank)[1]
        key_starts, key_counts = self._keys.pieces(held.rank)
        rows = np.concatenate([[0], np.cumsum(row_counts.reshape(-1))]).reshape(-1)
        first = self._keys.borders(held.rank)
        for b, (starts, counts) in enumerate(zip(key_starts, key_counts, strict=True)):
            token = 0  # of this sequence
            for start, num_keys in zip(starts, counts, strict=True):
                for piece in range(b * row_counts.shape[1], (b + 1) * row_counts.shape[1]):
                    span = slice(int(rows[piece]), int(rows[piece + 1]))
                    if span.start < span.stop and num_keys:
                        first_key, end = (np.clip(x[:, span] - token, 0, num_keys) for x in (lo, hi))
                        place = _Place(held.ranges, int(first[b]) + token, int(start), self._keys.step)
                        yield from _sides(first_key, end, span.start, self._rows.position[:, span], place)
                token += int(num_keys)

    def _run(self, held: Held, parts: list[Part]) -> State | None:
        """Make the calls, and merge where rows have several."""
        state, touched = None, np.zeros(self._states.num_rows, bool)
        for part in parts:
            state = self._states.new(held.rank) if state is None else state
            begin, end = part.rows
            before = touched[begin:end]
            target = state.at(begin, end)
            if before.any():
                for first, last in _runs(~before):
                    target.clear(first, last)
                target = self._states.part(end - begin)
            self._call_kernel(held, part, target)
            if before.any():
                self._states.merge_part(state, target, begin)
            touched[begin:end] = True
        if state is not None:
            for first, last in _runs(~touched):
                state.clear(first, last)
        return state

    def _call_kernel(self, held: Held, part: Part, target: State) -> None:
        call, (begin, end), (first, last) = self._call, part.rows, part.keys
        options = dict(part.options)
        slopes, of_steps = call.alibi_slopes, self._slopes_of_steps
        if slopes is not None:
            if len(slopes.shape) == 2 and len(call.q.shape) == 3:  # of packed sequences
                sequence = int(self._rows.sequence[begin])
                slopes, of_steps = slopes[sequence], of_steps[sequence]
            options["alibi_slopes"] = of_steps
        _, lse = _api.flash_attention(
            call.q[..., begin:end, :, :],
            held.k[..., first:last, :, :],
            held.v[..., first:last, :, :],
            **call.kernel,
            **options,
            out=target.out,
            return_lse=True,
        )
        if part.shift is not None:
            lse = lse + self._states.shift(part.shift, slopes)
        target.lse[...] = lse


class _Place(NamedTuple):
    """Where the keys of a piece are: among those held, and as positions."""

    ranges: Array
    token: int  # the piece's first token, of its rank
    position: int
    step: int

    def held(self, key: int) -> int:
        """Return where a key of the piece lies among those that are held."""
        return int(_ranges.place(self.ranges, np.array(self.token + key)))


def _runs(chosen: Array) -> list[tuple[int, int]]:
    """Return the ranges of elements that are True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _one_call(
    lo: Array,
    hi: Array,
    row: int = 0,
    place: _Place | None = None,
    position: Array | None = None,
    behind: bool = False,
) -> Iterator[Part]:
    """Yield the call of rows from `row` on, cut to the rows that see something and the keys that are seen.

    With a place, keys count from there, and the call measures distances in steps from the position of its
    first row, rounded down; `behind` says that all keys are behind their row.
    """
    sees = np.flatnonzero((lo < hi).any(axis=0))
    if not sees.size:
        return
    begin, end = int(sees[0]), int(sees[-1]) + 1
    lo, hi = lo[:, begin:end], hi[:, begin:end]
    seen = lo < hi
    first, last = int(lo[seen].min()), int(hi[seen].max())
    lo, hi = (np.clip(x - first, 0, last - first) for x in (lo, hi))
    rows = (row + begin, row + end)
    if place is None or position is None:
        yield Part(rows, (first, last), spans_or_less(lo, hi, last - first))
        return
    distance, off = np.divmod(position[:, begin] - place.position - first * place.step, place.step)
    at = place.held(first)
    options = spans_or_less(lo, hi, last - first, distance)
    yield Part(rows, (at, at + last - first), options, (off if behind else -off) if off.any() else None)


def _sides(lo: Array, hi: Array, row: int, position: Array, place: _Place) -> Iterator[Part]:
    """Yield the calls of a piece of rows against a piece of keys, with the positions' distances.

    Of stripes every `step`-th position lies here: a distance is a whole number of steps, and less than one
    step more, for keys up to the row, or less, for keys behind it. That is the same for all pairs on one
    side, and so it is one number, added to the log-sum-exp.
    """
    if place.step == 1:
        yield from _one_call(lo, hi, row, place, position)
        return
    up_to_row = np.maximum((position - place.position) // place.step + 1, 0)
    yield from _one_call(lo, np.clip(up_to_row, lo, hi), row, place, position)
    yield from _one_call(np.clip(up_to_row, lo, hi), hi, row, place, position, behind=True)
