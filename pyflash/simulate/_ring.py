"""Ring attention as it happens: what each rank holds, computes, merges and sends, step by step.

The ring is that of `pyflash.distributed`, with ranks that are threads. What is written down of a step is what
its kernel was called with and gave; m and l, which kernels keep to themselves, are those of `trace` for the
same call.
"""

from __future__ import annotations

import inspect
from typing import NamedTuple

import numpy as np

import pyflash

from .._description import Array
from .._state import State, state_empty, state_merge
from ..distributed import _ring as ring_of_ranks
from ..distributed import ring_attention, shard
from ..distributed._arguments import Arguments, arguments
from ..distributed._communicator import Communicator
from ..distributed._routes import Route
from ..distributed._schedules import Layout
from ..distributed._states import State as Found
from ..distributed._states import States
from ..distributed._step import Held, Part, Steps
from ..distributed._tree import RankTree
from ._ranks import ThreadRank, on_ranks

#: Every keyword of `ring_attention` with its default.
_OPTIONS = {
    name: parameter.default
    for name, parameter in inspect.signature(ring_attention).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name != "comm"
}


class Known(NamedTuple):
    """The state of a rank's rows over the keys of ranks ``lo`` to ``hi - 1``."""

    lo: int
    hi: int
    state: State  # m, l, o as `trace` has them
    lse: Array  # (rows,) as the ring has it
    out: Array  # (rows, head_dim_v) likewise


class RankStep(NamedTuple):
    """What one rank did in one step."""

    origin: int  # whose keys it held
    held: Array  # (keys,) int64: their positions, those that came
    buffer: int  # in which of its two buffers, -1 for its own memory
    call: tuple[int, int, int, int] | None  # first and last row, first and last key of those that are held
    mask: str  # "", "causal" or "spans": what the call was told
    seen: Array  # (rows, keys) bool: the pairs that were computed
    made: tuple[int, ...]  # the states it made, in their order, by their place in `RankRecord.known`
    known: tuple[int, ...]  # the states there were after it
    bytes_sent: int


class RankRecord(NamedTuple):
    """What one rank did."""

    positions: Array  # (rows,) of its queries, and of its own keys
    known: tuple[Known, ...]  # every state there was, the result last
    steps: tuple[RankStep, ...]


def record(q: Array, k: Array, v: Array, *, size: int, schedule: str, causal: bool) -> tuple[RankRecord, ...]:
    """Run ring attention of one head on so many ranks and return what each of them did.

    Parameters
    ----------
    q : (seqlen, head_dim) float64 ndarray
        A query for each position.
    k : (seqlen, head_dim) float64 ndarray
        Keys.
    v : (seqlen, head_dim_v) float64 ndarray
        Values.
    size : int
        The number of ranks.
    schedule : {"contiguous", "zigzag", "stripe"}
        Who has which positions.
    causal : bool
        Whether a query sees only keys up to its own position.
    """

    def work(comm: ThreadRank) -> RankRecord:
        # Without gaps, as a rank has what it got or computed.
        shards = (shard(x, comm.rank, size, schedule=schedule, axis=0) for x in (q, k, v))
        mine_q, mine_k, mine_v = map(np.ascontiguousarray, shards)
        options = {**_OPTIONS, "schedule": schedule, "causal": causal, "num_threads": 1}
        call = arguments(comm, mine_q, mine_k, mine_v, options)
        ring = ring_of_ranks.agreed(comm, call, None, _RecordedRing)
        _, error = ring.run()
        if error is not None:
            raise error
        return ring.record(comm.bytes_sent)

    return tuple(on_ranks(size, work))


class _RecordedRing(ring_of_ranks._Ring):
    """The ring, which writes down what it does."""

    def __init__(
        self, comm: Communicator, call: Arguments, layouts: tuple[Layout, Layout], route: Route
    ) -> None:
        super().__init__(comm, call, layouts, route)
        self._states = self._watched = _RecordedStates(comm, call)
        self._steps = self._calls = _RecordedSteps(comm.rank, call, route, layouts, self._watched)
        self._taken: list[RankStep] = []

    def _take(self, tree: RankTree[Found], held: Held) -> None:
        before = len(self._watched.known)
        state = self._calls.attend(held)
        if state is not None:
            self._watched.begin(held.rank, state, self._calls.state)
        tree.add(held.rank, state)
        positions = self._layouts[1].positions(held.rank)
        tokens = [np.arange(begin, end) for begin, end in held.ranges]
        self._taken.append(
            RankStep(
                origin=held.rank,
                held=positions[np.concatenate([np.zeros(0, np.int64), *tokens])],
                buffer=next((i for i, (k, _) in enumerate(self._buffers) if np.shares_memory(k, held.k)), -1),
                call=self._calls.call,
                mask=self._calls.mask,
                seen=self._calls.seen,
                made=tuple(range(before, len(self._watched.known))),
                known=tuple(sorted(self._watched.places.values())),
                bytes_sent=0,
            )
        )

    def record(self, bytes_sent: list[int]) -> RankRecord:
        """Return what has been written down."""
        steps = (step._replace(bytes_sent=sent) for step, sent in zip(self._taken, bytes_sent, strict=True))
        positions = self._layouts[0].positions(self._comm.rank)
        return RankRecord(positions, tuple(self._watched.known), tuple(steps))


class _RecordedSteps(Steps):
    """The steps; keeps the last one's call."""

    call: tuple[int, int, int, int] | None
    mask: str
    seen: Array
    state: State

    def attend(self, held: Held) -> Found | None:
        rows, width = self._states.num_rows, int(held.v.shape[-1])
        self.call, self.mask = None, ""
        self.seen = np.zeros((rows, int(held.k.shape[0])), bool)
        self.state = state_empty(rows, width)
        return super().attend(held)

    def _call_kernel(self, held: Held, part: Part, target: Found) -> None:
        super()._call_kernel(held, part, target)
        (begin, end), (first, last) = part.rows, part.keys
        options = dict(part.options)
        if "spans" in options:
            options["spans"] = tuple(ends[0] for ends in options["spans"])
        arrays = (self._call.q[begin:end, 0], held.k[first:last, 0], held.v[first:last, 0])
        (step,) = pyflash.trace(*arrays, tile=last - first, **options).steps
        assert self.call is None, "rows with several calls in a step: their states would have to be merged"
        self.call = (begin, end, first, last)
        self.mask = next((name for name in ("causal", "spans") if name in options), "")
        self.seen[begin:end, first:last] = step.scores > -np.inf
        for whole, rows in zip(self.state, (step.m_after, step.l, step.o), strict=True):
            whole[begin:end] = rows


class _RecordedStates(States):
    """The states; knows of each over whose keys it is."""

    def __init__(self, comm: Communicator, call: Arguments) -> None:
        super().__init__(comm, call)
        self.known: list[Known] = []
        #: Where in `known` the contents of a state are, by the state that has them now.
        self.places: dict[int, int] = {}

    def _keep(self, lo: int, hi: int, state: State, found: Found) -> int:
        self.known.append(Known(lo, hi, state, found.lse[0].copy(), found.out[:, 0].copy()))
        return len(self.known) - 1

    def begin(self, rank: int, found: Found, state: State) -> None:
        """Take note of the state over the keys of one rank."""
        self.places[id(found)] = self._keep(rank, rank + 1, state, found)

    def merged(self, left: Found, right: Found) -> Found:
        a, b = (self.known[self.places.pop(id(side))] for side in (left, right))
        found = super().merged(left, right)
        self.places[id(found)] = self._keep(a.lo, b.hi, state_merge(a.state, b.state), found)
        return found

    def finish(self, states: list[Found]) -> Found:
        found = super().finish(states)
        parts = [self.known[self.places[id(state)]] for state in states]
        whole = state_empty(self.num_rows, int(self._call.v.shape[-1]))
        for part in parts:
            whole = state_merge(whole, part.state)
        self._keep(0, self._comm.size, whole, found)
        return found
