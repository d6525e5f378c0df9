"""Decoding over a cache that is spread over ranks: every rank has all queries and some of the keys."""

from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import numpy as np

from .. import _api, _api_cache
from .._arrays import on_host
from .._checks import flag, index_array, integer
from .._description import Array
from .._errors import invalid
from . import _agreement
from ._agreement import attempt, fact_of
from ._arguments import dtype_name, named_dtype, width_of
from ._communicator import Communicator, communicator

#: What is compared between ranks.
_AGREED = (
    *("causal", "window", "scale", "softcap", "alibi_slopes", "sinks", "q_offset", "layout", "return_lse"),
    *("lse_includes_sinks", "kv_dtype"),
)

#: What the kernel gets as it is.
_FOR_KERNELS = (
    *("scale", "softcap", "k_scale", "v_scale", "kv_dtype", "seq_lens", "num_threads", "isa", "backend"),
)

_ARRAYS = ("seq_lens", "block_table", "kv_start", "alibi_slopes", "sinks", "q_offset")

#: Of those that are compared, the ones that may be arrays, whose elements count.
_COMPARED_ARRAYS = ("alibi_slopes", "sinks", "q_offset")

#: Digests of arguments that were found right, by their forms: a decode makes the same call again and again.
_digests: dict[tuple[Any, ...] | None, bytes] = {}
_MOST_DIGESTS = 256

#: Bytes of a digest of the arguments, and whether they are in order.
_GREETING_BYTES = 40


def context_parallel_decode(
    q: Any,
    k: Any,
    v: Any,
    *,
    comm: Any,
    seq_lens: Any = None,
    block_table: Any = None,
    kv_start: Any = None,
    causal: bool = True,
    window: tuple[int | None, int | None] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    q_offset: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    kv_dtype: str | None = None,
    layout: str = "bshd",
    cache_layout: str = "nhd",
    return_lse: bool = False,
    lse_includes_sinks: bool = False,
    out_dtype: Any = None,
    num_threads: int | None = None,
    isa: str | None = None,
    backend: str | None = None,
) -> Any:
    """Attention of a few queries over keys of which each rank has some; all ranks get the result.

    Parameters
    ----------
    q : (batch, seqlen_q, num_heads, head_dim) ndarray
        The queries, the same on all ranks; with `block_table` also ``(batch, num_heads, head_dim)``, one
        token a sequence.
    k : (batch, seqlen_kv, num_kv_heads, head_dim) ndarray
        This rank's keys of each sequence, with `block_table` a page pool, as in `pyflash.paged_attention`.
        Keys of rank 0 come first; a rank may have none.
    v : (batch, seqlen_kv, num_kv_heads, head_dim_v) ndarray
        This rank's values.
    comm : mpi4py.MPI.Intracomm, NcclCommunicator, torch.distributed.ProcessGroup or Communicator
        The ranks.
    seq_lens : (batch,) int32 or int64 ndarray, optional
        Valid keys of each sequence on this rank. Needed with `block_table`.
    block_table : (batch, max_pages) int32 or int64 ndarray, optional
        Pages of this rank's keys.
    kv_start : (batch,) int32 or int64 ndarray, optional
        How many keys of each sequence lie on the ranks before. Only with `q_offset`.
    causal : bool, default True
        Queries are the last tokens of their sequence, and see keys up to their own.
    window, scale, softcap, alibi_slopes, sinks, q_offset
        As in `pyflash.flash_attention`, about whole sequences.
    k_scale, v_scale, kv_dtype
        Of stored types, per token too: of this rank's keys.
    layout, cache_layout, return_lse, lse_includes_sinks, out_dtype
        As in `pyflash.paged_attention`; the same on all ranks.
    num_threads, isa, backend
        Each rank may choose its own.

    Returns
    -------
    out : ndarray
        Shaped like `q` with the width of the values, with the same bits on all ranks.
    lse : ndarray
        Only with ``return_lse=True``; as in `pyflash.flash_attention`.

    Raises
    ------
    InvalidArgument, UnsupportedError, BackendUnavailable
        As in `pyflash.flash_attention`, on all ranks the same.
    RankFailed
        A rank failed in another way; all ranks raise it.

    Notes
    -----
    One collective gathers the states of all ranks, ``head_dim_v + 1`` numbers of float32 (float64 of float64
    queries) for each row and head, and each rank merges them in the order of ranks. Before that 40 bytes of
    each rank say whether arguments match, and one byte whether the kernel could be started; on a GPU they
    travel while the kernel works, and nothing waits for it.

    Where the positions of keys matter (a window, slopes, `q_offset`, several causal queries), another one
    gathers the lengths, unless `kv_start` and `q_offset` say them.

    References
    ----------
    Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023: the same split, over
    workers of one device. Yang et al., "Context Parallelism for Scalable Million-Token Inference", 2024,
    section 3.5.
    """
    given = dict(locals())
    like, world = q, communicator(given.pop("comm"))
    for name in ("q", "k", "v"):
        given.pop(name)
    call, error = attempt(lambda: _call(world, q, k, v, given))
    greeting = np.zeros(_GREETING_BYTES, np.uint8)
    greeting[0] = error is not None
    if call is not None:
        greeting[8:] = np.frombuffer(call.digest, np.uint8)
    greetings = world.start_allgather_bytes(greeting)
    if call is not None and not call.needs_lengths:
        _, error = attempt(lambda: _attend(call, None))
    _check_greetings(world, greetings.wait(), call, error)
    assert call is not None
    if call.needs_lengths:
        lengths = world.start_allgather_bytes(call.num_keys.view(np.uint8)).wait()
        _, error = attempt(lambda: _attend(call, _local_offset(world, call, lengths)))
    return _merged(world, call, error, like)


class _Call(NamedTuple):
    """A call on one rank, with the axes ``(batch, seqlen_q, num_heads, head_dim)`` or without the batch."""

    q: Any
    k: Any
    v: Any
    options: dict[str, Any]
    digest: bytes  # of the facts
    is_paged: bool
    axis: int | None  # what was added to q: that of rows or of heads
    bhsd: bool
    num_keys: Any  # of each sequence on this rank, (batch,) int64; where ranks have to tell one another
    mine: Any  # out and lse, as one array
    everyone: Any  # (size, len(mine))

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Shape of `out`."""
        return (*(int(n) for n in self.q.shape[:-1]), width_of(self.v, self.options["kv_dtype"]))

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Shape of `lse`."""
        *batch, rows, heads, _ = self.out_shape
        return (*batch, heads, rows)

    def states(self, flat: Any) -> tuple[Any, Any]:
        """Return `out` and `lse` of one rank or, on a leading axis, of all."""
        leading = tuple(flat.shape[:-1])
        num = math.prod(self.out_shape)
        out = flat[..., :num].reshape(*leading, *self.out_shape)
        return out, flat[..., num:].reshape(*leading, *self.lse_shape)

    @property
    def facts(self) -> dict[str, Any]:
        """What is compared between ranks, by the names of arguments."""
        given = self.options
        facts: dict[str, Any] = {"q": f"shape {tuple(self.q.shape)}, dtype {dtype_name(self.q)}"}
        heads = 1 if self.is_paged and given["cache_layout"] == "hnd" else -2
        facts["k"] = f"{self.k.shape[heads]} heads, dtype {dtype_name(self.k)}"
        facts["v"] = f"{self.v.shape[heads]} heads of width {self.v.shape[-1]}, dtype {dtype_name(self.v)}"
        facts["out_dtype"] = given["out_dtype"]
        facts["kv_start"] = "None" if given["kv_start"] is None else "numbers"
        for name in _AGREED:
            value = given[name]
            facts[name] = fact_of(tuple(value) if name == "window" and value is not None else value)
        return facts

    @property
    def needs_lengths(self) -> bool:
        """Whether it matters where this rank's keys stand in their sequence, and nobody has said it."""
        given = self.options
        matters = any(given[name] is not None for name in ("window", "alibi_slopes", "q_offset"))
        return (matters or (bool(given["causal"]) and self.q.shape[-3] > 1)) and given["kv_start"] is None


def _call(comm: Communicator, q: Any, k: Any, v: Any, options: dict[str, Any]) -> _Call:
    """Check the arguments of a rank, and make room for the states of all."""
    q, k, v = (comm.see(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    for name in (*_ARRAYS, "k_scale", "v_scale"):
        options[name] = comm.see(name, options[name])
    options["out_dtype"] = named_dtype(options["out_dtype"])
    form = _form(q, k, v, options)
    digest = _digests.get(form, b"")
    if not digest:
        _check(q, k, v, options)
    is_paged = options["block_table"] is not None
    axis = None
    bhsd = options["layout"] == "bhsd" and len(q.shape) > (3 if is_paged else 2)
    if bhsd:
        q = q.swapaxes(-2, -3)
        k, v = (k, v) if is_paged else (k.swapaxes(-2, -3), v.swapaxes(-2, -3))
    if is_paged and len(q.shape) == 3:
        axis, q = -3, q[:, None]
    elif len(q.shape) == 2:
        axis, q, k, v = -2, q[:, None, :], k[:, None, :], v[:, None, :]
    call = _Call(q, k, v, options, digest, is_paged, axis, bhsd, None, None, None)
    if not digest:
        digest = hashlib.sha256(repr(call.facts).encode()).digest()
        if form is not None:
            if len(_digests) >= _MOST_DIGESTS:
                _digests.clear()
            _digests[form] = digest
    num = math.prod(call.out_shape) + math.prod(call.lse_shape)
    compute = "float64" if dtype_name(q) == "float64" else "float32"
    return call._replace(
        digest=digest,
        num_keys=np.ascontiguousarray(_num_keys(call)) if call.needs_lengths else None,
        mine=comm.empty((num,), compute, q),
        everyone=comm.empty((comm.size, num), compute, q),
    )


def _form(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return all that decides about arguments; None where that is more than forms and numbers."""
    if any(len(getattr(options[name], "shape", ())) for name in _COMPARED_ARRAYS):
        return None
    form = (*(_form_of(x) for x in (q, k, v)), *(_form_of(x) for x in options.values()))
    try:
        hash(form)
    except TypeError:
        return None
    return form


def _form_of(x: Any) -> Any:
    """Return what can be told of an argument without looking at elements."""
    shape = getattr(x, "shape", None)
    if shape is None or isinstance(x, np.generic):  # NumPy's numbers have a shape too, but what counts is x
        return x if x is None else (type(x), x)
    strides = x.stride() if callable(getattr(x, "stride", None)) else x.strides
    return type(x), tuple(shape), x.dtype, tuple(strides), str(getattr(x, "device", None))


def _check(q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    """Let pyflash check the arguments as those of a call over this rank's keys alone."""
    flag("causal", options["causal"])
    checked = {name: x for name, x in options.items() if name != "kv_start"}
    if options["block_table"] is None:
        for name in ("block_table", "cache_layout"):
            checked.pop(name)
    _api.check(q, k, v, **checked)
    if options["kv_start"] is not None:
        if options["q_offset"] is None:
            raise invalid("q_offset", "None", "the position of the first query, beside kv_start")
        start = options["kv_start"]
        if isinstance(start, (int, np.integer)):
            integer("kv_start", start)
        else:
            batch = int(q.shape[0]) if len(k.shape) == 4 else 1
            index_array("kv_start", on_host(start), (batch,), f"(batch,) = ({batch},)")


def _num_keys(call: _Call) -> Array:
    """Return this rank's keys of each sequence, ``(batch,)`` int64."""
    seq_lens = call.options["seq_lens"]
    if seq_lens is not None:
        return on_host(seq_lens).astype(np.int64)
    return np.full(call.k.shape[0] if len(call.k.shape) == 4 else 1, call.k.shape[-3], np.int64)


def _local_offset(comm: Communicator, call: _Call, told: Array) -> Array:
    """Return the position of the first query, counted from this rank's first key, of all ranks' lengths."""
    lengths = np.ascontiguousarray(told).view(np.int64)
    offset = call.options["q_offset"]
    if offset is None:
        offset = lengths.sum(axis=0) - call.q.shape[-3]
    local: Array = np.asarray(on_host(offset), np.int64) - lengths[: comm.rank].sum(axis=0)
    return local


def _attend(call: _Call, offset: Array | None) -> None:
    """Compute the state over this rank's keys."""
    given = call.options
    options = {name: given[name] for name in _FOR_KERNELS if given[name] is not None}
    if offset is None and given["kv_start"] is not None:
        offset = np.asarray(on_host(given["q_offset"]), np.int64) - on_host(given["kv_start"])
    if offset is not None:
        batch = _num_keys(call).shape
        options.update(causal=given["causal"], q_offset=np.ascontiguousarray(np.broadcast_to(offset, batch)))
        options.update({name: given[name] for name in ("window", "alibi_slopes") if given[name] is not None})
    out, lse = call.states(call.mine)
    options.update(out=out, return_lse=True)
    if call.is_paged:
        table, seq_lens, cache_layout = given["block_table"], options.pop("seq_lens"), given["cache_layout"]
        _, found = _api.paged_attention(
            call.q, call.k, call.v, table, seq_lens, cache_layout=cache_layout, **options
        )
    else:
        _, found = _api.flash_attention(call.q, call.k, call.v, **options)
    lse[...] = found


def _check_greetings(comm: Communicator, told: Array, call: _Call | None, error: Exception | None) -> None:
    """Raise on all ranks alike if arguments are wrong on one, or differ. A collective only then."""
    if not told[:, 0].any() and (told == told[0]).all():
        return
    if call is not None:
        error = None  # that of the kernel, which others do not know of yet
    facts = _agreement.exchange(comm, None if call is None else call.facts, error)
    _agreement.check_same(facts)


def _merged(comm: Communicator, call: _Call, error: Exception | None, like: Any) -> Any:
    """Gather the states and return their merge; or raise, if the kernel failed on a rank."""
    failed = comm.start_allgather_bytes(np.array([error is not None], np.uint8))
    comm.start_allgather(call.mine, call.everyone).wait()
    if failed.wait().any():
        _agreement.exchange(comm, None, error)
    given = call.options
    sinks = {} if given["sinks"] is None else {n: given[n] for n in ("sinks", "lse_includes_sinks")}
    out, lse = _api_cache.merge_states(
        *call.states(call.everyone),
        out_dtype=given["out_dtype"] or dtype_name(call.q),
        backend=given["backend"],
        **sinks,
    )
    if call.axis == -3:
        out, lse = out[..., 0, :, :], lse[..., 0]
    elif call.axis == -2:
        out, lse = out[..., 0, :], lse[..., 0, :]
    if call.bhsd:
        out = out.swapaxes(-2, -3)
    result = comm.give_back(out, like)
    return (result, comm.give_back(lse, like)) if given["return_lse"] else result
