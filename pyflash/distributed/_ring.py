"""Ring attention: queries stay, keys and values go round, states are merged."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from .._description import Array
from . import _agreement, _ranges, _routes
from ._arguments import Arguments, arguments
from ._communicator import Communicator, communicator
from ._routes import Route
from ._schedules import Layout
from ._states import State, States
from ._step import Held, Steps
from ._tree import RankTree
from ._visible import Rows, visible

Result = Any
_AnyRing = TypeVar("_AnyRing", bound="_Ring")


def ring_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    comm: Any,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    spans: tuple[Any, Any] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    q_offset: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: str | None = None,
    schedule: str = "zigzag",
    layout: str = "bshd",
    return_lse: bool = False,
    lse_includes_sinks: bool = False,
    out_dtype: Any = None,
    num_threads: int | None = None,
    isa: str | None = None,
    backend: str | None = None,
) -> Result:
    """Attention of a sequence that is spread over ranks; keys and values go round in a ring.

    All ranks call it, each with its own tokens, and each gets the result of its own queries. Queries stay
    where they are. Memory per rank is that of its tokens: keys and values of two other ranks at a time,
    and states of its rows.

    Parameters
    ----------
    q : (batch, seqlen_q, num_heads, head_dim) ndarray
        This rank's queries, in rising order of position, as `shard` cuts them. Types and axes as in
        `pyflash.flash_attention`; with `cu_seqlens_q` ``(total_q, num_heads, head_dim)``.
    k : (batch, seqlen_kv, num_kv_heads, head_dim) ndarray
        This rank's keys. Ranks may have different numbers of queries and keys, none included.
    v : (batch, seqlen_kv, num_kv_heads, head_dim_v) ndarray
        This rank's values.
    comm : mpi4py.MPI.Intracomm, NcclCommunicator, torch.distributed.ProcessGroup or Communicator
        The ranks. A communicator of MPI is used through a duplicate.
    causal, window, scale, softcap, alibi_slopes, sinks, q_offset
        As in `pyflash.flash_attention`, about the whole sequence; the same on all ranks. `q_offset` is the
        position of the first query of all.
    spans : (lo, hi), optional
        Of this rank's rows: they see keys at positions ``lo <= j < hi`` of the whole sequence.
    cu_seqlens_q, cu_seqlens_kv : (batch + 1,) int32 or int64 ndarray, optional
        Prefix sums of this rank's parts of packed sequences. Each sequence is spread over all ranks.
    k_scale, v_scale, kv_dtype
        Of stored types, as in `pyflash.flash_attention`; a number or one per head.
    schedule : {"zigzag", "contiguous", "stripe"}
        Which positions ranks have: see `shard`. With causal order "zigzag" and "stripe" give all ranks
        the same work.
    layout : {"bshd", "bhsd"}, default "bshd"
        Order of the axes of q, k, v and out.
    return_lse, lse_includes_sinks, out_dtype
        As in `pyflash.flash_attention`.
    num_threads, isa, backend
        As in `pyflash.flash_attention`; each rank may choose its own.

    Returns
    -------
    out : ndarray
        The result of this rank's queries, shaped like `q` with the width of the values.
    lse : ndarray
        Only with ``return_lse=True``: ``(batch, num_heads, seqlen_q)``, without the axes that `out` lacks.

    Raises
    ------
    InvalidArgument
        An argument is wrong on some rank, or differs between ranks; all ranks raise the same.
    UnsupportedError, BackendUnavailable
        As in `pyflash.flash_attention`, on all ranks.
    RankFailed
        A rank failed in another way; all ranks raise it.

    Notes
    -----
    In step ``s`` a rank computes with the keys of rank ``rank - s`` while they travel on to the next
    rank and those of the step after come in. Only keys that somebody further on sees travel: with a
    window they stop after a few ranks. Keys that no row here sees cost nothing.

    States are float32 (float64 of float64 queries) and are merged along the fixed tree of rank numbers,
    whichever comes first: bits are equal from run to run. They equal those of one process within the
    error rule, not bit for bit, since the borders between ranks are borders of sums.

    Two or three small collectives come before the work: one compares arguments; one, unless a call like this
    was made before, says which keys each rank needs; one whether all found memory. One comes after it, and
    says whether all went well. A rank that dies is for the launcher to notice.

    References
    ----------
    Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023.
    Brandon et al., "Striped Attention: Faster Ring Attention for Causal Transformers", 2023.
    Zhu, "ring-flash-attention" (software), 2024: zigzag. Dubey et al., "The Llama 3 Herd of Models",
    2024, section 3.3.2: two chunks per rank.
    """
    given = dict(locals())
    like, world = q, communicator(given.pop("comm"))
    for name in ("q", "k", "v"):
        given.pop(name)
    call, error = _agreement.attempt(lambda: arguments(world, q, k, v, given))
    ring = agreed(world, call, error, _Ring)
    state, error = ring.run()
    _agreement.exchange(world, None, error)
    assert call is not None and state is not None
    return call.finished(world, state.out, state.lse, like, return_lse)


def agreed(
    comm: Communicator,
    call: Arguments | None,
    error: Exception | None,
    make: Callable[[Communicator, Arguments, tuple[Layout, Layout], Route], _AnyRing],
) -> _AnyRing:
    """Return the ring of a call on which all ranks agree, or raise the first error of any. A collective."""
    key = None if call is None else _routes.key_of(call)
    before, route = _routes.recall(comm.rank, key)
    mine: dict[str, Any] | None = None
    ring, failure = None, None
    if call is not None and route is not None and comm.mark() is not None:
        # What the ranks tell one another while kernels work costs nothing.
        ring, failure = _agreement.attempt(functools.partial(_begun, make, comm, call, route))
    if call is not None:
        mine = {"facts": call.facts, "lengths": (call.lengths_q, call.lengths_kv), "keys": (key, before)}
        mine["begun"] = ring is not None
    everyone = _agreement.exchange(comm, mine, error)
    _agreement.check_same([one["facts"] for one in everyone])
    assert call is not None
    keys = b"".join(one["keys"][0] or b"-" for one in everyone)
    if route is None or any(one["keys"][1] != keys for one in everyone):
        ring, failure = None, None  # it was the ring of another call, and so was its failure
        route = _found(comm, call, call.layouts(everyone))
        _routes.remember(comm.rank, key, keys, route)
        all_began = False
    else:
        all_began = all(one["begun"] for one in everyone)
    if not all_began:
        if ring is None and failure is None:
            ring, failure = _agreement.attempt(functools.partial(make, comm, call, route.layouts, route))
        _agreement.exchange(comm, None, failure)
    assert ring is not None
    return ring


def _begun(
    make: Callable[[Communicator, Arguments, tuple[Layout, Layout], Route], _AnyRing],
    comm: Communicator,
    call: Arguments,
    route: Route,
) -> _AnyRing:
    """Return a ring whose first step has begun: it needs this rank's own keys alone."""
    ring = make(comm, call, route.layouts, route)
    ring.begin()
    return ring


def _found(comm: Communicator, call: Arguments, layouts: tuple[Layout, Layout]) -> Route:
    """Find out what this rank sees, and with what the others need, what comes and goes. A collective."""

    def needs() -> tuple[Rows, list[Array]]:
        rows = visible(*layouts, comm.rank, call.mask, call.q_offset)
        return rows, [rows.needs(layouts[1], rank) for rank in range(comm.size)]

    mine, error = _agreement.attempt(needs)
    everyone = _agreement.exchange(comm, None if mine is None else mine[1], error)
    assert mine is not None
    return _routes.route_of(comm.rank, mine[0], everyone, layouts)


class _Ring:
    """One call on one rank."""

    def __init__(
        self, comm: Communicator, call: Arguments, layouts: tuple[Layout, Layout], route: Route
    ) -> None:
        self._comm, self._call, self._layouts, self._route = comm, call, layouts, route
        self._states = States(comm, call)
        self._steps = Steps(comm.rank, call, route, layouts, self._states)
        room = max(_ranges.total(message.ranges) for message in route.incoming)
        if self._is_packed_first():
            room = max(room, self._num_tokens(comm.rank))
        self._buffers = [(self._buffer(call.k, room), self._buffer(call.v, room)) for _ in "ab"]
        self._tree: RankTree[State] | None = None
        self._begun: Held | None = None
        self._mark: Any = None  # before which this rank's keys can be sent

    def _num_tokens(self, rank: int) -> int:
        return int(self._layouts[1].lengths[rank].sum())

    def _is_packed_first(self) -> bool:
        """Return whether this rank's keys have gaps and are copied before they can be sent."""
        contiguous = all(_is_contiguous(_by_token(x)) for x in (self._call.k, self._call.v))
        return len(self._route.outgoing[0]) > 0 and not contiguous

    def _buffer(self, like: Any, num_tokens: int) -> Any:
        shape = tuple(int(n) for n in _by_token(like).shape[1:])
        return self._comm.empty((num_tokens, *shape), like.dtype, like)

    def _own(self) -> Held:
        """Return this rank's keys, as they lie or where `_pack` puts them."""
        rank, k, v = self._comm.rank, self._call.k, self._call.v
        num_tokens = self._num_tokens(rank)
        if self._is_packed_first():
            k, v = (_by_token(x[:num_tokens]) for x in self._buffers[0])
        return Held(rank, _ranges.pair(0, num_tokens), k, v)

    def _pack(self) -> None:
        """Put this rank's keys into the first buffer if they can't be sent from where they lie."""
        if self._is_packed_first():
            for buffer, x in zip(self._buffers[0], (self._call.k, self._call.v), strict=True):
                buffer[: self._num_tokens(self._comm.rank)] = _by_token(x)

    def begin(self) -> None:
        """Compute with this rank's own keys, before ranks have agreed."""
        self._tree, self._begun = RankTree(self._comm.size, self._states.merged), self._own()
        self._pack()
        self._mark = self._comm.mark()
        self._take(self._tree, self._begun)

    def run(self) -> tuple[State | None, Exception | None]:
        """Compute while keys go round; a failure is kept until they have, for others wait for them."""
        tree = RankTree(self._comm.size, self._states.merged) if self._tree is None else self._tree
        rank, size = self._comm.rank, self._comm.size
        held, failure = self._begun, None
        if held is None:
            held = self._own()
            _, failure = _agreement.attempt(self._pack)
        for step in range(size):
            coming = self._route.incoming[step]
            k, v = (x[: _ranges.total(coming.ranges)] for x in self._buffers[(step + 1) % 2])
            sends = [
                (_by_token(x)[first:last], (rank + 1) % size)
                for first, last in self._route.outgoing[step].tolist()
                for x in (held.k, held.v)
            ]
            ends = np.cumsum(coming.stretches).tolist()
            receives = [
                (x[end - num : end], (rank - 1) % size)
                for end, num in zip(ends, coming.stretches.tolist(), strict=True)
                for x in (k, v)
            ]
            transfer = self._comm.start(sends, receives, None if step else self._mark)
            if failure is None and held is not self._begun:
                _, failure = _agreement.attempt(functools.partial(self._take, tree, held))
            transfer.wait()
            held = Held((rank - step - 1) % size, coming.ranges, _by_token(k), _by_token(v))
        if failure is not None:
            return None, failure
        return _agreement.attempt(lambda: self._states.finish(tree.rest()))

    def _take(self, tree: RankTree[State], held: Held) -> None:
        tree.add(held.rank, self._steps.attend(held))


def _by_token(x: Any) -> Any:
    """Return keys or values with their tokens on the first axis, or back; packed ones are so already."""
    return x.swapaxes(0, 1) if len(x.shape) == 4 else x


def _is_contiguous(x: Any) -> bool:
    return bool(x.is_contiguous() if hasattr(x, "is_contiguous") else x.flags.c_contiguous)
