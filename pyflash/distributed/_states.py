"""States of rows, (out, lse), kept in the type of computation and merged a block of rows at a time.

Every merge is `pyflash.merge_states` of two; blocks bound what it needs beside the states.
"""

from __future__ import annotations

import math
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
    """

    def __init__(self, comm: Communicator, call: Arguments) -> None:
        self._comm, self._call = comm, call
        shape = tuple(int(n) for n in call.q.shape[:-1])
        self.num_rows = shape[-2]
        self._shape = (*shape, call.width)
        self._lse_shape = (*shape[:-2], shape[-1], shape[-2])
        self._free: list[State] = []
        self.num_made = 0
        row = math.prod(self._shape[:-3]) * math.prod(self._shape[-2:])
        self._rows = max(1, _BLOCK // max(row, 1), -(-self.num_rows // _PARTS))

    def _empty(self, dtype: Any, rows: int, *leading: int) -> State:
        make = self._comm.empty
        out = make((*leading, *self._shape[:-3], rows, *self._shape[-2:]), dtype, self._call.q)
        lse = make((*leading, *self._lse_shape[:-1], rows), self._call.compute, self._call.q)
        return State(out, lse)

    def new(self) -> State:
        """Return a state without contents."""
        if self._free:
            return self._free.pop()
        self.num_made += 1
        return self._empty(self._call.compute, self.num_rows)

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
            states = [self.new()]
            states[0].clear(0, self.num_rows)
        result = self._empty(call.out_dtype, self.num_rows)
        parts = self._empty(call.compute, min(self._rows, self.num_rows), len(states))
        sinks = {}
        if call.sinks is not None:
            sinks = dict(sinks=call.sinks, lse_includes_sinks=call.lse_includes_sinks)
        for first, last in self._blocks(0, self.num_rows):
            block = parts.at(0, last - first)
            for i, state in enumerate(states):
                block.out[i, ...] = state.at(first, last).out
                block.lse[i, ...] = state.at(first, last).lse
            out, lse = _api_cache.merge_states(
                block.out, block.lse, out_dtype=call.out_dtype, backend=call.backend, **sinks
            )
            result.put(first, last, out, lse)
        return result
