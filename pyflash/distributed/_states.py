"""States of rows, (out, lse), kept in the type of computation, and merged.

Every merge is `pyflash.merge_states` of two. The last one reads two states that lie side by side; the others
are done a block of rows at a time, which bounds what they need beside the states.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .. import _api_cache
from .._description import Array
from ._arguments import Arguments
from ._communicator import Communicator

#: Elements of `out` that are merged at a time, or a part of all if that is more: on a GPU each block is a few
#: launches.
_BLOCK = 1 << 18
_PARTS = 16


class State(NamedTuple):
    """What rows have seen of some keys: rows on axis -3 of `out` and on the last of `lse`."""

    out: Any  # (..., rows, num_heads, head_dim_v)
    lse: Any  # (..., num_heads, rows)

    def at(self, begin: int, end: int) -> State:
        """Return the state of some rows, a view."""
        return State(self.out[..., begin:end, :, :], self.lse[..., begin:end])

    def put(self, begin: int, end: int, out: Any, lse: Any) -> None:
        """Replace the state of some rows."""
        self.out[..., begin:end, :, :] = out
        self.lse[..., begin:end] = lse

    def clear(self, begin: int, end: int) -> None:
        """Let some rows have seen nothing."""
        if begin < end:
            self.put(begin, end, 0.0, -math.inf)


class States:
    """The states of a rank's rows: makes them, merges them, uses their memory again.

    Parameters
    ----------
    comm : Communicator
        Whose kind of arrays they are.
    call : Arguments
        Whose rows they are of.

    Notes
    -----
    The last merge is that of the two halves of the ranks. The state of the first rank of each half, into
    which all others of its half are merged, has a place beside the other half's.
    """

    def __init__(self, comm: Communicator, call: Arguments) -> None:
        self._comm, self._call = comm, call
        shape = tuple(int(n) for n in call.q.shape[:-1])
        self.num_rows = shape[-2]
        self._shape = (*shape, call.width)
        self._lse_shape = (*shape[:-2], shape[-1], shape[-2])
        self._free: list[State] = []
        self._halves = (0, 1 << max((comm.size - 1).bit_length() - 1, 0)) if comm.size > 1 else ()
        self._both: State | None = None
        self._sides: tuple[State, ...] = ()
        row = math.prod(self._shape[:-3]) * math.prod(self._shape[-2:])
        self._rows = max(1, _BLOCK // max(row, 1), -(-self.num_rows // _PARTS))

    def _empty(self, dtype: Any, rows: int, *leading: int) -> State:
        make = self._comm.empty
        out = make((*leading, *self._shape[:-3], rows, *self._shape[-2:]), dtype, self._call.q)
        lse = make((*leading, *self._lse_shape[:-1], rows), self._call.compute, self._call.q)
        return State(out, lse)

    def new(self, rank: int) -> State:
        """Return a state without contents, for the keys of a rank."""
        if rank in self._halves:
            return self._pair()[self._halves.index(rank)]
        if self._free:
            return self._free.pop()
        return self._empty(self._call.compute, self.num_rows)

    def _pair(self) -> tuple[State, ...]:
        if not self._sides:
            both = self._both = self._empty(self._call.compute, self.num_rows, 2)
            self._sides = tuple(State(both.out[i], both.lse[i]) for i in range(2))
        return self._sides

    def part(self, num_rows: int) -> State:
        """Return a state of some rows, without contents."""
        return self._empty(self._call.compute, num_rows)

    def scaled(self, slopes: Any, factor: int) -> Any:
        """Return slopes times a number, in the type of computation: in their own they might be rounded."""
        return self._comm.from_host(np.full(1, factor, self._call.compute), self._call.q) * slopes

    def shift(self, amount: Array, slopes: Any) -> Any:
        """Return the amounts of one or all sequences of a batch times the slopes of heads, for an `lse`."""
        by_head = np.broadcast_to(amount[:, np.newaxis], (len(amount), int(self._lse_shape[-2])))
        by_head = by_head.astype(self._call.compute)[..., np.newaxis]
        if len(self._lse_shape) == 2:
            by_head = by_head[0]
        return self._comm.from_host(by_head, self._call.q) * slopes[..., None]

    def _blocks(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        for first in range(begin, end, self._rows):
            yield first, min(first + self._rows, end)

    def merge_part(self, left: State, right: State, begin: int) -> None:
        """Merge a state of the rows from `begin` on into those rows of another."""
        end = begin + int(right.lse.shape[-1])
        both = self._empty(self._call.compute, min(self._rows, end - begin), 2)
        for first, last in self._blocks(begin, end):
            pair = both.at(0, last - first)
            for i, part in enumerate((left.at(first, last), right.at(first - begin, last - begin))):
                pair.out[i, ...] = part.out
                pair.lse[i, ...] = part.lse
            left.put(first, last, *_api_cache.merge_states(pair.out, pair.lse, backend=self._call.backend))

    def merged(self, left: State, right: State) -> State:
        """Return the merge of two states, which are used up."""
        self.merge_part(left, right, 0)
        self._free.append(right)
        return left

    def finish(self, states: list[State]) -> State:
        """Return the result of the rows: the last merge, the sinks, the caller's type."""
        call = self._call
        if not states:
            states = [self._empty(call.compute, self.num_rows)]
            states[0].clear(0, self.num_rows)
        sinks = {}
        if call.sinks is not None:
            sinks = dict(sinks=call.sinks, lse_includes_sinks=call.lse_includes_sinks)
        last: dict[str, Any] = dict(out_dtype=call.out_dtype, backend=call.backend, **sinks)
        if self._both is not None and len(states) == 2 and all(map(operator.is_, states, self._sides)):
            return State(*_api_cache.merge_states(self._both.out, self._both.lse, **last))
        result = self._empty(call.out_dtype, self.num_rows)
        parts = self._empty(call.compute, min(self._rows, self.num_rows), len(states))
        for begin, end in self._blocks(0, self.num_rows):
            block = parts.at(0, end - begin)
            for i, state in enumerate(states):
                block.out[i, ...] = state.at(begin, end).out
                block.lse[i, ...] = state.at(begin, end).lse
            result.put(begin, end, *_api_cache.merge_states(block.out, block.lse, **last))
        return result
