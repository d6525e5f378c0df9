"""Cascade attention: keys that all sequences share are read once for all of them, then states are merged.

A use of the other calls, not a kernel. One pass attends to the shared prefix with the queries of all
sequences packed into one, another to each sequence's own keys, and `merge_states` joins the two. What
the passes get are the canonical descriptions of `_args`, cut at the border between prefix and own keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from . import _args, _args_cascade, _arrays, _backends
from ._args_cascade import Cascade, Prefix, num_keys
from ._description import UNLIMITED, Array, AttentionArgs, Backend, CFunction, MergeArgs, UserFunction
from ._device_array import DeviceArray
from ._options import attention_options

#: What means the same in every pass.
_SAME_IN_BOTH = (
    *("scale", "softcap", "alibi_slopes", "causal", "window"),
    *("num_splits", "tile", "family", "isa", "num_threads", "batch_invariant", "q_scale"),
)


@attention_options(
    "``(batch, num_heads, seqlen_q)``, ``(batch, num_heads)`` or ``(num_heads, total_q)``",
    without=("workspace",),
)
def cascade_attention(
    q: Array,
    k_shared: Array,
    v_shared: Array,
    k: Array,
    v: Array,
    *,
    block_table: Array | None = None,
    seq_lens: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    shared_block_table: Array | None = None,
    shared_len: int | None = None,
    k_scale_shared: float | Array | None = None,
    v_scale_shared: float | Array | None = None,
    layout: str = "bshd",
    cache_layout: str = "nhd",
    backend: str | None = None,
    **options: Any,
) -> Array | tuple[Array, Array]:
    """Attention of sequences that begin with the same keys, which are read once for all of them.

    The keys of each sequence are the shared prefix and then its own; the result is that of attention
    over both together. One pass over the prefix serves the queries of all sequences, another goes over
    each sequence's own keys, and their states are merged.

    Parameters
    ----------
    q : ndarray
        ``(batch, seqlen_q, num_heads, head_dim)``; with `block_table` also
        ``(batch, num_heads, head_dim)``, one token a sequence; with `cu_seqlens_q`
        ``(total_q, num_heads, head_dim)``.
    k_shared : (shared_len, num_kv_heads, head_dim) ndarray
        Keys of the prefix, of the dtype of `k`; with `shared_block_table` a page pool, mostly that of `k`.
    v_shared : (shared_len, num_kv_heads, head_dim_v) ndarray
        Values of the prefix.
    k, v : ndarray
        Each sequence's own keys and values, those behind the prefix: as in `flash_attention`, with
        `block_table` as in `paged_attention`, with `cu_seqlens_kv` as in `flash_attention_varlen`.
    block_table : (batch, max_pages) int32 or int64 ndarray, optional
        Pages of the own keys; k and v are page pools then. The pages of the prefix are not among them.
    seq_lens : (batch,) int32 or int64 ndarray, optional
        Valid own keys of each sequence, the prefix not counted. Needed with `block_table`.
    cu_seqlens_q, cu_seqlens_kv : (batch + 1,) int32 or int64 ndarray, optional
        Prefix sums of packed queries (with `block_table` or `cu_seqlens_kv`) and of packed own keys.
    shared_block_table : (num_shared_pages,) int32 or int64 ndarray, optional
        Pages of the prefix; k_shared and v_shared are page pools then.
    shared_len : int, optional
        Valid keys of the prefix. Default: all of k_shared; needed with `shared_block_table`.
    k_scale_shared, v_scale_shared : float or ndarray, optional
        Storage scales of the prefix, as `k_scale` and `v_scale` are of the own keys. Default: those;
        only scales per token have to be given, unless k_shared is k.
    layout : {"bshd", "bhsd"}, default "bshd"
        Order of the axes of q, out and all dense keys and values, those of the prefix included.
    cache_layout : {"nhd", "hnd"}, default "nhd"
        Order of the axes of all page pools.
    {parameters}

    Returns
    -------
    {returns}

    Raises
    ------
    {raises}

    Notes
    -----
    Every option means what it means over the concatenated keys: positions, `q_offset`, spans, the key
    axis of bias and mask, and `sink_tokens` count from the first key of the prefix, ``seqlen_kv`` is
    ``shared_len`` and the own keys. Only `tree` is about the own keys alone.

    In the pass over the prefix, sequences that see all of it are one sequence of many rows. Where an
    option depends on positions (`alibi_slopes`, `score_mod`, `mask_mod`, a window or spans that end in
    the prefix), sequences at equal positions become heads of one sequence; the others, and all where
    bias or mask differ by head or batch, take a pass each. C functions see the positions of one pass
    only and are refused.

    Bits are equal from run to run and for any number of threads, and equal to `flash_attention` over the
    concatenated keys within the error rule.

    References
    ----------
    Juravsky et al., "Hydragen: High-Throughput LLM Inference with Shared Prefixes", 2024, section 3.
    Ye et al., "Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch Decoding", 2024.

    Examples
    --------
    >>> import numpy as np, pyflash
    >>> q = np.ones((3, 1, 2, 8), np.float32)
    >>> prefix, own = np.ones((50, 2, 8), np.float32), np.ones((3, 4, 2, 8), np.float32)
    >>> pyflash.cascade_attention(q, prefix, prefix, own, own, causal=True).shape
    (3, 1, 2, 8)
    """
    chosen = _backends.resolve(backend, q)
    cascade = _args_cascade.cascade(
        q,
        (k_shared, v_shared),
        (k, v),
        index={
            "block_table": block_table,
            "seq_lens": seq_lens,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv,
        },
        shared_index=(shared_block_table, shared_len),
        shared_scales=(k_scale_shared, v_scale_shared),
        layouts={"layout": layout, "cache_layout": cache_layout, "backend": chosen.name},
        options=options,
    )
    _run(cascade, chosen)
    result: Array | tuple[Array, Array] = cascade.call.result(_args.Caller.of(q, options.get("out")))
    return result


def _run(cascade: Cascade, backend: Backend) -> None:
    """Fill the results by passes over the prefix, one over the own keys, and a merge."""
    whole, own, prefix = cascade.call.args, cascade.own, cascade.prefix
    batch, seqlen, num_heads = whole.q.shape[:3]
    num_rows = batch * seqlen
    compute = np.dtype(np.float64 if whole.q.dtype == np.float64 else np.float32)
    parts = _arrays.empty((2, num_rows, num_heads, whole.out.shape[3]), compute, whole.q)
    part_lse = _arrays.empty((2, num_heads, num_rows), compute, whole.q)
    shaped = parts.reshape(2, *whole.out.shape)
    shaped_lse = part_lse.reshape(2, num_heads, batch, seqlen).swapaxes(1, 2)
    _arrays.fill(parts[0], 0)
    _arrays.fill(part_lse[0], -np.inf)
    keys = _arrays.computed(lambda n: n + prefix.length, num_keys(own))
    base = _base(whole, own, prefix)
    if _is_unread(whole):
        if prefix.length:
            backend.attention(
                _unread_pass(base, whole, keys, (parts[0], part_lse[0]), (shaped[0], shaped_lse[0]))
            )
    else:
        for one in _passes(base, _rows(whole, keys), prefix.length):
            backend.attention(one.args)
            one.store(parts[0], part_lse[0])
    backend.attention(_rest(whole, own, prefix.length, shaped[1], shaped_lse[1]))
    lse = whole.lse
    if lse is None:
        lse = _arrays.empty((batch, num_heads, seqlen), compute, whole.q)
    backend.merge_states(
        MergeArgs(
            parts=shaped,
            part_lse=shaped_lse,
            sinks=whole.sinks,
            lse_includes_sinks=whole.lse_includes_sinks,
            out=whole.out,
            lse=lse,
        )
    )


def _rest(whole: AttentionArgs, own: AttentionArgs, shared_len: int, out: Array, lse: Array) -> AttentionArgs:
    """Return the pass over the own keys; positions count from the first of them."""

    def shifted(function: UserFunction | None) -> UserFunction | None:
        if function is None:
            return None
        if isinstance(function, str):
            return (
                "[&](long long query, long long key) { return "
                f"({function}); }}(query + {shared_len}, key + {shared_len})"
            )
        return _renamed(function, lambda b, h, query, key: (b, h, query + shared_len, key + shared_len))

    def moved(positions: Array) -> Array:
        return _arrays.computed(lambda x: x - shared_len, positions)

    return own._replace(
        out=out,
        lse=lse,
        spans=None if whole.spans is None else (moved(whole.spans[0]), moved(whole.spans[1])),
        bias=None if whole.bias is None else whole.bias[..., shared_len:],
        mask=None if whole.mask is None else whole.mask[..., shared_len:],
        sink_tokens=max(0, whole.sink_tokens - shared_len),
        q_offset=None if whole.q_offset is None else moved(whole.q_offset),
        score_mod=shifted(whole.score_mod),
        mask_mod=shifted(whole.mask_mod),
        **{name: getattr(whole, name) for name in (*_SAME_IN_BOTH, "tree")},
    )


def _base(whole: AttentionArgs, own: AttentionArgs, prefix: Prefix) -> AttentionArgs:
    """Return what all passes over the prefix have in common."""
    return whole._replace(
        k=prefix.k,
        v=prefix.v,
        kv_dtype=own.kv_dtype,
        k_scale=prefix.k_scale,
        v_scale=prefix.v_scale,
        bias=None if whole.bias is None else whole.bias[..., : prefix.length],
        mask=None if whole.mask is None else whole.mask[..., : prefix.length],
        sink_tokens=min(whole.sink_tokens, prefix.length),
        tree=None,
        sinks=None,
        lse_includes_sinks=False,
        spans=None,
        q_offset=None,
        cu_seqlens_q=None,
        cu_seqlens_kv=None,
        seq_lens=np.array([prefix.length], np.int64),
        block_table=prefix.table[np.newaxis],
    )


def _is_unread(whole: AttentionArgs) -> bool:
    """Return whether rows stay where they are: the host does not know their positions or what they see."""
    index = [whole.seq_lens, whole.cu_seqlens_q, whole.q_offset, *(whole.spans or ())]
    functions = (whole.score_mod, whole.mask_mod)
    return (
        any(isinstance(x, DeviceArray) for x in index)
        or any(isinstance(x, str) for x in functions)
        or isinstance(whole.q_scale, np.ndarray)  # which belongs to rows where they are
    )


def _unread_pass(
    base: AttentionArgs,
    whole: AttentionArgs,
    keys: Array,
    as_rows: tuple[Array, Array],
    as_sequences: tuple[Array, Array],
) -> AttentionArgs:
    """Return the one pass over the prefix of rows whose positions the host does not know.

    Where every row certainly sees all of the prefix they are one sequence of many rows, else all
    sequences as they are. `as_rows` and `as_sequences` are the same results in both shapes.
    """
    assert base.seq_lens is not None and base.block_table is not None
    batch, seqlen, num_heads, head_dim = whole.q.shape
    shared_len = int(base.seq_lens[0])
    terms = ("alibi_slopes", "score_mod", "mask_mod", "bias", "mask")
    at_the_end = whole.max_seqlen_q <= 1 and whole.q_offset is None  # a single row sees what is before it
    if (
        (at_the_end or not base.causal)
        and (base.window == (UNLIMITED, UNLIMITED) or base.sink_tokens >= shared_len)
        and whole.spans is None
        and not isinstance(whole.q_scale, np.ndarray)
        and all(getattr(base, name) is None for name in terms)
    ):
        q = _arrays.reshaped(whole.q, (1, batch * seqlen, num_heads, head_dim))
        return base._replace(
            q=q,
            out=as_rows[0][np.newaxis],
            lse=as_rows[1][np.newaxis],
            causal=False,
            window=(UNLIMITED, UNLIMITED),
            max_seqlen_q=batch * seqlen,
        )
    offset, start = whole.q_offset, whole.cu_seqlens_q
    if offset is None and start is None:
        offset = _arrays.computed(lambda n: n - seqlen, keys)
    elif offset is None and start is not None:
        offset = _arrays.computed(lambda n, start: n - (start[1:] - start[:-1]), keys, start)
    num = whole.batch
    return base._replace(
        out=as_sequences[0],
        lse=as_sequences[1],
        spans=whole.spans,
        q_offset=offset,
        cu_seqlens_q=whole.cu_seqlens_q,
        seq_lens=np.repeat(base.seq_lens, num),
        block_table=np.broadcast_to(base.block_table, (num, base.block_table.shape[1])),
    )


class _Rows(NamedTuple):
    """The query rows of all sequences, one behind the other."""

    q: Array  # (num_rows, num_heads, head_dim)
    start: Array  # (batch + 1,) where the rows of each sequence begin
    offset: Array  # (batch,) position of its first row
    spans: tuple[Array, Array] | None  # (num_rows,)

    def of(self, sequences: Array) -> Array:
        """Return the numbers of all rows of some sequences."""
        ranges = [np.arange(self.start[b], self.start[b + 1]) for b in sequences]
        return np.concatenate(ranges) if ranges else np.arange(0)

    def spans_at(self, numbers: Array) -> tuple[Array, Array] | None:
        """Return the spans of rows."""
        return None if self.spans is None else (self.spans[0][numbers], self.spans[1][numbers])


def _rows(whole: AttentionArgs, keys: Array) -> _Rows:
    batch, seqlen, num_heads, head_dim = whole.q.shape
    if whole.cu_seqlens_q is None:
        start = np.arange(batch + 1) * seqlen
    else:
        start = whole.cu_seqlens_q.astype(np.int64)
    spans = None
    if whole.spans is not None:
        spans = (whole.spans[0].reshape(-1), whole.spans[1].reshape(-1))
    offset = keys - np.diff(start) if whole.q_offset is None else whole.q_offset
    return _Rows(_arrays.reshaped(whole.q, (batch * seqlen, num_heads, head_dim)), start, offset, spans)


class _Pass(NamedTuple):
    """One pass over the prefix, and where its results go."""

    args: AttentionArgs
    rows: Array  # (...) numbers of the rows
    #: From a result with rows on axis 1 and heads on axis 2 to (..., num_heads, _).
    to_rows: Callable[[Array], Array]

    def store(self, out: Array, lse: Array) -> None:
        """Copy the results to ``(num_rows, num_heads, head_dim_v)`` and ``(num_heads, num_rows)``."""
        assert self.args.lse is not None
        _arrays.put(out, self.rows, self.to_rows(self.args.out))
        by_row = self.to_rows(self.args.lse.swapaxes(1, 2)[..., np.newaxis])[..., 0]
        _arrays.put(lse.swapaxes(0, 1), self.rows, by_row)


def _passes(base: AttentionArgs, rows: _Rows, shared_len: int) -> Iterator[_Pass]:
    """Yield passes over the prefix for all sequences that have rows, as few as the options allow."""
    if shared_len == 0:
        return
    todo = np.diff(rows.start) > 0
    sees_all, placed = _dependence(base, rows, shared_len)
    if (todo & sees_all).any():
        yield _as_rows(base, rows, np.flatnonzero(todo & sees_all))
    rest = np.flatnonzero(todo & ~sees_all)
    if not (_same_for_heads(base.bias) and _same_for_heads(base.mask)):
        yield _one_by_one(base, rows, np.arange(len(todo)))  # bias and mask as they are
        return
    groups: dict[Any, list[int]] = {}
    for b in rest.tolist():
        lo, hi = int(rows.start[b]), int(rows.start[b + 1])
        key = (hi - lo, int(rows.offset[b]) if placed[b] else None)
        if rows.spans is not None:
            key += tuple(end[lo:hi].tobytes() for end in rows.spans)  # type: ignore[assignment]
        groups.setdefault(key, []).append(b)
    for group in groups.values():
        if len(group) > 1:
            yield _as_heads(base, rows, np.array(group))
    alone = [group[0] for group in groups.values() if len(group) == 1]
    if alone:
        yield _one_by_one(base, rows, np.array(alone))


def _dependence(args: AttentionArgs, rows: _Rows, shared_len: int) -> tuple[Array, Array]:
    """Return whether each sequence simply sees the whole prefix, and whether its position matters there."""
    first, num_rows = rows.offset, np.diff(rows.start)
    last = first + num_rows - 1
    left, right = args.window
    inside = np.ones(num_rows.shape, dtype=bool)
    if args.causal:
        inside &= first >= shared_len - 1
    if args.sink_tokens < shared_len:
        if left != UNLIMITED:
            inside &= last <= left
        if right != UNLIMITED:
            inside &= first + right >= shared_len - 1
    by_position = (args.alibi_slopes, args.score_mod, args.mask_mod)
    placed = ~inside | any(x is not None for x in by_position)
    sees_all = ~placed & (args.bias is None and args.mask is None)
    if rows.spans is not None:
        cut = np.cumsum([0, *((rows.spans[0] > 0) | (rows.spans[1] < shared_len))])
        sees_all &= cut[rows.start[1:]] == cut[rows.start[:-1]]
    return sees_all, placed


def _same_for_heads(term: Array | None) -> bool:
    """Return whether a bias or mask repeats itself in memory along batch and heads."""
    if term is None:
        return True
    return all(n == 1 or stride == 0 for n, stride in zip(term.shape[:2], term.strides[:2], strict=True))


def _with_results(args: AttentionArgs, q: Array, max_seqlen_q: int) -> AttentionArgs:
    """Return a pass with queries ``(batch, rows, heads, head_dim)`` and arrays for its results."""
    batch, num_rows, num_heads = q.shape[:3]
    compute = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    out = _arrays.empty((batch, num_rows, num_heads, args.out.shape[3]), compute, q)
    lse = _arrays.empty((batch, num_heads, num_rows), compute, q)
    return args._replace(q=q, out=out, lse=lse, max_seqlen_q=max_seqlen_q)


def _as_rows(base: AttentionArgs, rows: _Rows, sequences: Array) -> _Pass:
    """Return the pass of sequences that see the whole prefix: they are one sequence of many rows."""
    numbers = rows.of(sequences)
    q = (rows.q if len(numbers) == len(rows.q) else _arrays.take(rows.q, numbers))[np.newaxis]
    args = base._replace(causal=False, window=(UNLIMITED, UNLIMITED))
    return _Pass(_with_results(args, q, len(numbers)), numbers, lambda x: x[0])


def _as_heads(base: AttentionArgs, rows: _Rows, sequences: Array) -> _Pass:
    """Return the pass of sequences whose rows are at the same positions: they become heads of one sequence.

    The heads of a kv head have to follow one another, so the order is (kv head, sequence, head in group).
    """
    num_heads, head_dim = rows.q.shape[1:]
    num_kv_heads, num = base.k.shape[2], len(sequences)
    group = num_heads // max(num_kv_heads, 1)
    numbers = np.stack([rows.of(sequences[i : i + 1]) for i in range(num)])
    seqlen = numbers.shape[1]
    q = _arrays.take(rows.q, numbers)
    q = q.reshape(num, seqlen, num_kv_heads, group, head_dim).transpose(1, 2, 0, 3, 4)
    q = _arrays.reshaped(q, (1, seqlen, num_kv_heads * num * group, head_dim))

    def to_rows(x: Array) -> Array:
        width = x.shape[3]
        x = x.reshape(seqlen, num_kv_heads, num, group, width).transpose(2, 0, 1, 3, 4)
        return _arrays.reshaped(x, (num, seqlen, num_heads, width))

    def named(batch: Any, head: Any, query: Any, key: Any) -> tuple[Any, ...]:
        kv_head, place = np.divmod(head, num * group)
        return sequences[place // group], kv_head * group + place % group, query, key

    def term(x: Array | None) -> Array | None:
        return None if x is None else np.broadcast_to(x[:1, :1, :seqlen], (1, q.shape[2], seqlen, x.shape[3]))

    slopes = base.alibi_slopes
    if slopes is not None:
        slopes = _arrays.take(slopes, sequences).reshape(num, num_kv_heads, group).swapaxes(0, 1)
        slopes = _arrays.reshaped(slopes, (1, q.shape[2]))
    args = base._replace(
        alibi_slopes=slopes,
        bias=term(base.bias),
        mask=term(base.mask),
        spans=rows.spans_at(numbers[:1]),
        score_mod=None if base.score_mod is None else _renamed(base.score_mod, named),
        mask_mod=None if base.mask_mod is None else _renamed(base.mask_mod, named),
        q_offset=rows.offset[sequences[:1]],
    )
    return _Pass(_with_results(args, q, seqlen), numbers, to_rows)


def _one_by_one(base: AttentionArgs, rows: _Rows, sequences: Array) -> _Pass:
    """Return the pass of sequences that have nothing but the prefix in common, as packed sequences."""
    assert base.seq_lens is not None and base.block_table is not None
    numbers, num = rows.of(sequences), len(sequences)
    q = _arrays.take(rows.q, numbers)[np.newaxis]
    counts = np.diff(rows.start)[sequences]
    every = num == len(rows.offset)

    def term(x: Array | None) -> Array | None:
        # Where sequences are left out here, bias and mask are the same for all of them.
        return x if x is None or every else np.broadcast_to(x[:1], (num, *x.shape[1:]))

    def named(batch: Any, head: Any, query: Any, key: Any) -> tuple[Any, ...]:
        return sequences[batch], head, query, key

    args = base._replace(
        alibi_slopes=None if base.alibi_slopes is None else _arrays.take(base.alibi_slopes, sequences),
        bias=term(base.bias),
        mask=term(base.mask),
        spans=rows.spans_at(numbers[np.newaxis]),
        score_mod=None if base.score_mod is None else _renamed(base.score_mod, named),
        mask_mod=None if base.mask_mod is None else _renamed(base.mask_mod, named),
        q_offset=rows.offset[sequences],
        cu_seqlens_q=np.cumsum([0, *counts]),
        seq_lens=np.repeat(base.seq_lens, num),
        block_table=np.broadcast_to(base.block_table, (num, base.block_table.shape[1])),
    )
    return _Pass(_with_results(args, q, int(counts.max(initial=0))), numbers, lambda x: x[0])


def _renamed(function: UserFunction, rename: Callable[..., tuple[Any, ...]]) -> UserFunction:
    """Return a user's function that is told the caller's batch, head and positions instead of a pass's."""
    assert not isinstance(function, (CFunction, str))

    def renamed(*args: Any) -> Any:
        return function(*args[:-4], *rename(*args[-4:]))

    return renamed
