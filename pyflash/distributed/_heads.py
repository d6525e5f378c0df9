"""Head-parallel attention: tokens are exchanged for heads, each rank has some heads of whole sequences."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import _api
from . import _agreement
from ._arguments import Arguments, arguments
from ._communicator import Communicator, communicator
from ._schedules import Layout
from ._shards import rows_at


def head_parallel_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    comm: Any,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
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
    schedule: str = "contiguous",
    layout: str = "bshd",
    return_lse: bool = False,
    lse_includes_sinks: bool = False,
    out_dtype: Any = None,
    num_threads: int | None = None,
    isa: str | None = None,
    backend: str | None = None,
) -> Any:
    """Attention of a sequence that is spread over ranks; each rank computes some of the heads.

    Tokens are exchanged for heads, all to all: a rank gets all tokens of ``num_heads / size`` query heads
    and of their key/value heads. It computes them as one process would, and sends each rank its rows.

    Parameters
    ----------
    q : (batch, seqlen_q, num_heads, head_dim) ndarray
        This rank's queries, as in `ring_attention`.
    k : (batch, seqlen_kv, num_kv_heads, head_dim) ndarray
        This rank's keys.
    v : (batch, seqlen_kv, num_kv_heads, head_dim_v) ndarray
        This rank's values.
    comm : mpi4py.MPI.Intracomm, NcclCommunicator, torch.distributed.ProcessGroup or Communicator
        The ranks. More of them than query heads leave some without work.
    causal, window, scale, softcap, alibi_slopes, sinks, q_offset, cu_seqlens_q, cu_seqlens_kv
        As in `ring_attention`.
    k_scale, v_scale, kv_dtype, layout, return_lse, lse_includes_sinks, out_dtype, num_threads, isa, backend
        As in `ring_attention`.
    schedule : {"contiguous", "zigzag", "stripe"}
        Which positions ranks have; it makes no difference to the work here.

    Returns
    -------
    out : ndarray
        The result of this rank's queries, shaped like `q` with the width of the values.
    lse : ndarray
        Only with ``return_lse=True``: ``(batch, num_heads, seqlen_q)``, without the axes that `out` lacks.

    Raises
    ------
    InvalidArgument, UnsupportedError, BackendUnavailable, RankFailed
        As in `ring_attention`.

    Notes
    -----
    All keys of a row are summed in one process, so that bits are those of one process where a rank has whole
    groups of query heads. Where ranks share a key/value head, each gets a copy. Memory per rank falls as
    1/ranks too, but no further than one head of the whole sequence.

    References
    ----------
    Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
    Transformer Models", 2023, section 3.
    """
    given = dict(locals())
    like, world = q, communicator(given.pop("comm"))
    for name in ("q", "k", "v"):
        given.pop(name)
    given["spans"] = None
    call, error = _agreement.attempt(lambda: arguments(world, q, k, v, given))
    mine = None if call is None else {"facts": call.facts, "lengths": (call.lengths_q, call.lengths_kv)}
    everyone = _agreement.exchange(world, mine, error)
    _agreement.check_same([one["facts"] for one in everyone])
    assert call is not None
    exchange, error = _agreement.attempt(lambda: _Exchange(world, call, call.layouts(everyone)))
    _agreement.exchange(world, None, error)
    assert exchange is not None
    exchange.send()
    _, error = _agreement.attempt(lambda: exchange.attend(given))
    _agreement.exchange(world, None, error)
    out, lse = exchange.scatter()
    return call.finished(world, out, lse, like, return_lse)


class _Heads(NamedTuple):
    """The heads of a rank."""

    q: range
    kv: range


def heads_of(rank: int, size: int, num_heads: int, num_kv_heads: int) -> _Heads:
    """Return the query heads of a rank and the key/value heads that they read.

    Whole groups where there are enough, else equal parts of the query heads.
    """
    group = num_heads // num_kv_heads if num_kv_heads else 1
    if num_kv_heads >= size:
        kv = range(rank * num_kv_heads // size, (rank + 1) * num_kv_heads // size)
        return _Heads(range(kv.start * group, kv.stop * group), kv)
    q = range(rank * num_heads // size, (rank + 1) * num_heads // size)
    return _Heads(q, range(q.start // group, -(-q.stop // group) if q else q.start // group))


class _Exchange:
    """One call on one rank. Arrays that travel have tokens on their first axis, and any batch behind.

    All memory is taken before ranks have agreed to send, so that a rank without leaves no other waiting.
    """

    def __init__(self, comm: Communicator, call: Arguments, layouts: tuple[Layout, Layout]) -> None:
        self._comm, self._call, self._layouts = comm, call, layouts
        num_heads, num_kv_heads = int(call.q.shape[-2]), int(call.k.shape[-2])
        self._group = num_heads // max(num_kv_heads, 1)
        self._heads = [heads_of(rank, comm.size, num_heads, num_kv_heads) for rank in range(comm.size)]
        mine = self._heads[comm.rank]
        queries, keys = layouts
        #: Array of this rank, its layout, the heads of each rank, and all ranks' tokens for the heads here.
        self._gathered = [
            (x, where, heads, self._empty(x, int(where.totals.sum()), len(heads[comm.rank])))
            for x, where, heads in (
                (call.q, queries, [h.q for h in self._heads]),
                (call.k, keys, [h.kv for h in self._heads]),
                (call.v, keys, [h.kv for h in self._heads]),
            )
        ]
        num_rows, total = int(queries.lengths[comm.rank].sum()), int(queries.totals.sum())
        width = call.width
        batch = tuple(int(n) for n in call.q.shape[:-3])
        make, compute = comm.empty, call.compute
        # Of all rows and the heads here, then of the rows here and all heads.
        self._whole = (
            make((total, *batch, len(mine.q), width), call.out_dtype, call.q),
            make((total, len(mine.q), *batch), compute, call.q),
        )
        self._own = (
            make((*batch, num_rows, num_heads, width), call.out_dtype, call.q),
            make((*batch, num_heads, num_rows), compute, call.q),
        )
        self._parts = [
            (
                make((num_rows, *batch, len(heads.q), width), call.out_dtype, call.q),
                make((num_rows, len(heads.q), *batch), compute, call.q),
            )
            for heads in self._heads
        ]
        self._sends: list[tuple[Any, int]] = []
        self._receives: list[tuple[Any, int]] = []
        self._pack_tokens()

    def _empty(self, like: Any, num_tokens: int, num_heads: int) -> Any:
        shape = (num_tokens, *(int(n) for n in like.shape[:-3]), num_heads, int(like.shape[-1]))
        return self._comm.empty(shape, like.dtype, like)

    def send(self) -> None:
        """Exchange what has been packed."""
        self._comm.start(self._sends, self._receives).wait()
        self._sends, self._receives = [], []

    def _pack_tokens(self) -> None:
        """Pack tokens, by the ranks that have their heads."""
        for x, where, heads, whole in self._gathered:
            ends = np.cumsum(where.lengths.sum(axis=1)).tolist()
            for rank, end in enumerate(ends):
                place = whole[end - int(where.lengths[rank].sum()) : end]
                part = _by_token(x[..., heads[rank].start : heads[rank].stop, :])
                if rank == self._comm.rank:
                    place[...] = part
                    continue
                send = self._empty(x, int(part.shape[0]), len(heads[rank]))
                send[...] = part
                self._sends.append((send, rank))
                self._receives.append((place, rank))

    def attend(self, given: dict[str, Any]) -> None:
        """Compute the heads of this rank over whole sequences, and pack rows by the ranks that have them."""
        self._attend_all(given)
        queries, _ = self._layouts
        for rank, parts in enumerate(self._parts):
            rows = [rows_at(x, queries.places(rank)) for x in self._whole]
            if rank == self._comm.rank:
                for place, x in zip(parts, rows, strict=True):
                    place[...] = x
                continue
            self._sends += [(x, rank) for x in rows]
            self._receives += [(place, rank) for place in parts]

    def _attend_all(self, given: dict[str, Any]) -> None:
        heads, (out, lse) = self._heads[self._comm.rank], self._whole
        if not heads.q:
            return
        of_queries, of_keys = (where.order() for where in self._layouts)
        wholes = [whole for _, _, _, whole in self._gathered]
        q, k, v = (_by_token(rows_at(*x)) for x in zip(wholes, (of_queries, of_keys, of_keys), strict=True))
        calls = [heads]
        if len(heads.q) != self._group * len(heads.kv) and len(heads.kv) > 1:  # groups that are cut
            calls = [
                _Heads(
                    range(max(heads.q.start, h * self._group), min(heads.q.stop, (h + 1) * self._group)),
                    range(h, h + 1),
                )
                for h in heads.kv
            ]
        for part in calls:
            rows = slice(part.q.start - heads.q.start, part.q.stop - heads.q.start)
            keys = slice(part.kv.start - heads.kv.start, part.kv.stop - heads.kv.start)
            result = self._attend(q[..., rows, :], k[..., keys, :], v[..., keys, :], part, given)
            out[..., rows, :] = _by_token(result[0])
            lse[:, rows] = result[1].swapaxes(0, -1)

    def _attend(self, q: Any, k: Any, v: Any, heads: _Heads, given: dict[str, Any]) -> Any:
        options = {**self._call.kernel, "causal": given["causal"], "window": given["window"]}
        kinds = dict(sinks=heads.q, alibi_slopes=heads.q, k_scale=heads.kv, v_scale=heads.kv)
        for name, of in kinds.items():
            value = given[name]
            options[name] = value[..., of.start : of.stop] if getattr(value, "shape", ()) else value
        options.update(
            q_offset=given["q_offset"],
            lse_includes_sinks=self._call.lse_includes_sinks,
            out_dtype=self._call.out_dtype,
            return_lse=True,
        )
        queries, keys = self._layouts
        if queries.lengths.shape[1] == 1:
            return _api.flash_attention(q, k, v, **options)
        borders = [np.concatenate([[0], np.cumsum(x.totals)]) for x in (queries, keys)]
        return _api.flash_attention_varlen(q, k, v, *borders, **options)

    def scatter(self) -> tuple[Any, Any]:
        """Exchange heads for tokens, and return the result of this rank's rows."""
        self.send()
        out, lse = self._own
        for heads, (part, part_lse) in zip(self._heads, self._parts, strict=True):
            out[..., heads.q.start : heads.q.stop, :] = _by_token(part)
            lse[..., heads.q.start : heads.q.stop, :] = part_lse.swapaxes(0, -1)
        return out, lse


def _by_token(x: Any) -> Any:
    """Return an array with tokens on the first axis and the batch behind them, or back."""
    return x.swapaxes(0, 1) if len(x.shape) == 4 else x
