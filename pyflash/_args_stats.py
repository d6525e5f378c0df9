"""Checks of `attention_stats`: what is wanted of which call, and the arrays that it is written to."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import _args, _arrays, _checks
from ._description import Array, AttentionArgs, StatsArgs
from ._device_array import DeviceArray
from ._errors import invalid

#: What there is to want, in the order of the results.
WANT = ("max_logit", "entropy", "key_mass", "top_k", "rows")

#: The options of attention that say what a score is and which keys a row sees, and how to compute it.
OPTIONS = (
    "causal",
    "window",
    "spans",
    "scale",
    "softcap",
    "alibi_slopes",
    "bias",
    "mask",
    "sink_tokens",
    "q_offset",
    "tree",
    "score_mod",
    "mask_mod",
    "k_scale",
    "kv_dtype",
    "max_seqlen_q",
    "num_threads",
    "isa",
)


class AttentionStats(NamedTuple):
    """What `attention_stats` found out; None is what nobody wanted.

    Attributes
    ----------
    max_logit : ndarray or None
        Largest final score of each row, shaped like the log-sum-exp; -inf where no key is visible.
    entropy : ndarray or None
        Entropy of each row's probabilities in nats, shaped alike; 0 where no key is visible.
    key_mass : (batch, num_heads, num_keys) ndarray or None
        Sum of each key's probabilities over the rows.
    top_k_values, top_k_indices : (..., top_k) ndarray or None
        Largest probabilities of each row, falling, and their keys (int64): the log-sum-exp's shape
        and one more axis. Behind the last visible key 0 and -1.
    rows : (batch, num_heads, num_rows, num_keys) ndarray or None
        All probabilities of the chosen rows; 0 for keys that a row does not see.
    """

    max_logit: Array | None
    entropy: Array | None
    key_mass: Array | None
    top_k_values: Array | None
    top_k_indices: Array | None
    rows: Array | None


class StatsCall(NamedTuple):
    """A checked call and how its results look to the caller."""

    args: StatsArgs
    lse_shape: tuple[int, ...]  # of the caller's lse
    table_axes: tuple[int, ...]  # of batch and heads, those that the results drop

    def result(self, caller: _args.Caller) -> AttentionStats:
        """Return the filled arrays in the caller's shapes and kind."""
        args = self.args

        def of_rows(x: Array | None) -> Any:
            return None if x is None else caller.give_back(x.reshape(self.lse_shape + x.shape[3:]))

        def of_keys(x: Array | None) -> Any:
            return None if x is None else caller.give_back(x.squeeze(self.table_axes))

        return AttentionStats(
            max_logit=of_rows(args.max_logit),
            entropy=of_rows(args.entropy),
            key_mass=of_keys(args.key_mass),
            top_k_values=of_rows(args.top_k_values),
            top_k_indices=of_rows(args.top_k_indices),
            rows=of_keys(args.row_probabilities),
        )


def stats(
    q: Any,
    k: Any,
    lse: Any,
    *,
    backend: str,
    want: Any,
    top_k: Any,
    rows: Any,
    last_queries: Any,
    index: dict[str, Any],
    layouts: dict[str, Any],
    options: dict[str, Any],
) -> StatsCall:
    """Check a call; `index` has the arrays that say where queries and keys are, `layouts` their axes."""
    unknown = options.keys() - set(OPTIONS)
    if unknown:
        known = ", ".join(OPTIONS)
        raise TypeError(f"unexpected keyword argument {sorted(unknown)[0]!r}; options are {known}")
    q, k, lse = (_arrays.see(name, x) for name, x in (("q", q), ("k", k), ("lse", lse)))
    rows, index = _arrays.see("rows", rows), _arrays.see_all(index)
    attention = _attention(q, k, index, layouts, {**options, "backend": backend})
    _arrays.check_places(backend, "q", {"q": q, "lse": lse, "rows": rows})
    shape = _lse_shape(attention, q.ndim, index["cu_seqlens_q"] is not None)
    compute = np.dtype(np.float64 if attention.q.dtype == np.float64 else np.float32)
    wanted = _wanted(want, rows)
    top_k = _checks.integer("top_k", top_k, 1, 2**31 - 1)
    if last_queries is not None:
        last_queries = _checks.integer("last_queries", last_queries, 1)
    if "rows" in wanted:
        rows = _rows(rows, attention.max_seqlen_q)
    batch, seqlen, num_heads = attention.q.shape[:3]
    of_rows = (batch, num_heads, seqlen)
    of_keys = (attention.batch, num_heads, _num_keys(attention))

    def new(name: str, shape: tuple[int, ...], fill: float, dtype: Any = compute) -> Array | None:
        return _arrays.empty(shape, dtype, q, fill) if name in wanted else None

    args = StatsArgs(
        attention=attention,
        lse=_lse(lse, shape, compute).reshape(of_rows),
        last_queries=last_queries,
        max_logit=new("max_logit", of_rows, -np.inf),
        entropy=new("entropy", of_rows, 0),
        key_mass=new("key_mass", of_keys, 0),
        top_k_values=new("top_k", (*of_rows, top_k), 0),
        top_k_indices=new("top_k", (*of_rows, top_k), -1, np.int64),
        rows=rows if "rows" in wanted else None,
        row_probabilities=(
            new("rows", (*of_keys[:2], len(rows), of_keys[2]), 0) if "rows" in wanted else None
        ),
    )
    dropped = {2: (0, 1), 3: (0,)}.get(q.ndim, ()) if _is_dense(attention) else ()
    return StatsCall(args, shape, dropped)


def _attention(
    q: Any, k: Any, index: dict[str, Any], layouts: dict[str, Any], options: dict[str, Any]
) -> AttentionArgs:
    """Return the call that the probabilities are of, with the keys in place of values."""
    table, seq_lens = index["block_table"], index["seq_lens"]
    cu_seqlens_q, cu_seqlens_kv = index["cu_seqlens_q"], index["cu_seqlens_kv"]
    for name in ("block_table", "seq_lens"):
        if index[name] is not None and cu_seqlens_kv is not None:
            raise invalid(name, _checks.describe(index[name]), "None beside cu_seqlens_kv")
    if table is not None:
        call = _args.paged(q, k, k, table, seq_lens, cu_seqlens_q=cu_seqlens_q, **layouts, **options)
    elif cu_seqlens_kv is not None:
        call = _args.varlen(q, k, k, cu_seqlens_q, cu_seqlens_kv, **options)
    elif cu_seqlens_q is not None:
        expected = "None, or beside it block_table or cu_seqlens_kv: where the keys of each sequence are"
        raise invalid("cu_seqlens_q", _checks.describe(cu_seqlens_q), expected)
    else:
        call = _args.dense(q, k, k, layout=layouts["layout"], seq_lens=seq_lens, **options)
    return call.args


def _is_dense(args: AttentionArgs) -> bool:
    return args.block_table is None and args.cu_seqlens_kv is None


def _lse_shape(args: AttentionArgs, num_axes: int, packed: bool) -> tuple[int, ...]:
    """Return the shape that the log-sum-exp of the call has for its caller."""
    batch, seqlen, num_heads = args.q.shape[:3]
    if packed:
        return num_heads, seqlen
    if num_axes == 4:
        return batch, num_heads, seqlen
    if not _is_dense(args):  # one token a sequence
        return batch, num_heads
    return (num_heads, seqlen) if num_axes == 3 else (seqlen,)


def _lse(lse: Any, shape: tuple[int, ...], compute: np.dtype[Any]) -> Array:
    """Return the log-sum-exp, contiguous, in the type that scores are computed in."""
    array, dtype = _checks.float_array("lse", lse, {len(shape): str(shape)})
    if dtype.name not in ("float32", "float64"):
        raise invalid("lse", f"dtype {dtype.name}", "float32 or float64")
    if array.shape != shape:
        raise invalid("lse", f"shape {array.shape}", f"shape {shape}, that of the log-sum-exp of q and k")
    return _arrays.contiguous(array, compute)


def _wanted(want: Any, rows: Any) -> set[str]:
    """Return what is wanted; the default, everything, has rows only where they are chosen."""
    if not isinstance(want, (tuple, list, set, frozenset)):
        raise invalid("want", _checks.describe(want), f"a tuple of names out of {WANT}")
    for name in want:
        _checks.choice("want", name, WANT)
    wanted = set(want)
    if rows is None:
        if "rows" in wanted and wanted != set(WANT):
            raise invalid("rows", "None", "row numbers, since want asks for rows")
        wanted.discard("rows")
    elif "rows" not in wanted:
        raise invalid("rows", _checks.describe(rows), "None, or 'rows' in want")
    return wanted


def _rows(rows: Any, longest: int) -> Array:
    """Return the chosen rows, as int64 unless they lie on a device."""
    array = _checks.index_array("rows", rows, (None,), "(num_rows,)")
    _checks.index_range("rows", array, 0, longest - 1, "a row of the longest sequence")
    return array if isinstance(array, DeviceArray) else np.ascontiguousarray(array, np.int64)


def _num_keys(args: AttentionArgs) -> int:
    """Return the length of the axis of keys: that of dense keys, else the longest valid length.

    Of lengths on a device it is what they can be at most: all that the table holds, all packed keys.
    """
    if args.block_table is not None:
        assert args.seq_lens is not None
        if isinstance(args.seq_lens, DeviceArray):
            return int(args.block_table.shape[1] * args.k.shape[1])
        return int(args.seq_lens.max(initial=0))
    if args.cu_seqlens_kv is not None and not isinstance(args.cu_seqlens_kv, DeviceArray):
        return int(np.diff(args.cu_seqlens_kv).max(initial=0))
    return int(args.k.shape[1])
