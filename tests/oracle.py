"""The oracle: what an attention call must give, computed without the package under test.

It reads a call as the documentation describes it, cuts it into sequences, states every mask as a
predicate of (query position, key), and computes each head by the textbook formula: once exactly (float64,
longdouble for float64 inputs) and once naively in the query's own type. `assert_matches` holds a result to
the error rule ``E <= 2 * E_naive + floor * max|v|`` (3 times with softcap). The predicates and terms of
each option stand in `oracle_terms`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from oracle_terms import Call, Sequence, dequantised, modified_scores, seen_by, value_width

#: Added to the error that naive attention makes, in units of the largest value: that of the output's
#: type, or of the type that was computed in where that is narrower.
FLOOR = {"float64": 5e-15, "float32": 1e-6, "float16": 2.0**-11, "bfloat16": 2.0**-8}


class Expected(NamedTuple):
    """The exact answer, the naive one, and what the error rule needs besides."""

    # per sequence out (seqlen_q, num_heads, head_dim_v) and lse (num_heads, seqlen_q)
    exact: list[tuple[np.ndarray, np.ndarray]]
    naive: list[tuple[np.ndarray, np.ndarray]]
    largest_value: float
    empty: list[np.ndarray]  # (seqlen_q, num_heads) bool: 0 by the contract, not by its values


def sequences(call: Call) -> Iterator[Sequence]:
    """Cut a call into its sequences."""
    queries = split_rows(call.arrays["q"], call)
    keys, values = (_keys(call, name) for name in "kv")
    cu_seqlens_q = call.arrays.get("cu_seqlens_q", call.options.get("cu_seqlens_q"))
    for b, (q, k, v) in enumerate(zip(queries, keys, values, strict=True)):
        offset = call.options.get("q_offset")
        if call.options.get("causal") == "top_left":
            offset = 0
        if offset is None:
            offset = len(k) - len(q)
        elif np.ndim(offset):
            offset = offset[b]
        rows = None if cu_seqlens_q is None else slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        yield Sequence(q, k, v, int(offset), b, rows, len(queries))


def _keys(call: Call, name: str) -> list[np.ndarray]:
    """The valid keys (name "k") or values ("v") of each sequence, dequantised: (seqlen_kv, heads, width)."""
    scale, kv_dtype = call.options.get(f"{name}_scale"), call.options.get("kv_dtype")
    if call.function == "paged_attention":
        pool = call.arrays[f"{name}_cache"]
        hnd = call.options.get("cache_layout", "nhd") == "hnd"
        if scale is not None and np.ndim(scale) == 3:
            scale = scale.swapaxes(1, 2) if hnd else scale
        pool = pool.swapaxes(1, 2) if hnd else pool
        return [_gather(call, pool, scale, b) for b in range(len(call.arrays["seq_lens"]))]
    stored = call.arrays[name]
    if call.function == "flash_attention_varlen":
        array = dequantised(stored, scale, kv_dtype, head_axis=-2)
        borders = [int(x) for x in call.arrays["cu_seqlens_kv"]]
        return [array[lo:hi] for lo, hi in itertools.pairwise(borders)]
    bhsd = call.options.get("layout", "bshd") == "bhsd" and stored.ndim > 2
    array = dequantised(stored, scale, kv_dtype, head_axis=-3 if bhsd else -2)
    lens = call.options.get("seq_lens")
    parts = split_rows(array, call)
    return parts if lens is None else [x[: int(n)] for x, n in zip(parts, lens, strict=True)]


def _gather(call: Call, pool: np.ndarray, scale: Any, b: int) -> np.ndarray:
    """The valid keys or values of sequence b, one token at a time, through its block table."""
    table, page_size = call.arrays["block_table"], pool.shape[1]
    length = int(call.arrays["seq_lens"][b])
    places = [(int(table[b, t // page_size]), t % page_size) for t in range(length)]

    def gathered(array: np.ndarray) -> np.ndarray:
        tokens = [array[place] for place in places]
        return np.array(tokens, array.dtype).reshape(length, *array.shape[2:])

    if scale is not None and np.ndim(scale) == 3:
        scale = gathered(scale)
    return dequantised(gathered(pool), scale, call.options.get("kv_dtype"), head_axis=-2)


def split_rows(array: np.ndarray, call: Call) -> list[np.ndarray]:
    """Views (seqlen, heads, width) of each sequence of an array that is laid out like q."""
    cu_seqlens_q = call.arrays.get("cu_seqlens_q", call.options.get("cu_seqlens_q"))
    if cu_seqlens_q is not None:
        borders = [int(x) for x in cu_seqlens_q]
        return [array[lo:hi] for lo, hi in itertools.pairwise(borders)]
    if array.ndim == 2:
        return [array[:, None, :]]
    if array.ndim == 3 and call.function == "paged_attention":
        return [token[None] for token in array]
    if call.options.get("layout", "bshd") == "bhsd":
        array = array.swapaxes(-2, -3)
    return [array] if array.ndim == 3 else list(array)


def split_lse(lse: np.ndarray, call: Call) -> list[np.ndarray]:
    """Views (num_heads, seqlen_q) of each sequence of a log-sum-exp."""
    cu_seqlens_q = call.arrays.get("cu_seqlens_q", call.options.get("cu_seqlens_q"))
    if cu_seqlens_q is not None:
        borders = [int(x) for x in cu_seqlens_q]
        return [lse[:, lo:hi] for lo, hi in itertools.pairwise(borders)]
    if call.function == "paged_attention" and lse.ndim == 2:
        return [token[:, None] for token in lse]
    if lse.ndim == 1:
        return [lse[None]]
    return [lse] if lse.ndim == 2 else list(lse)


def lse_shape(call: Call) -> tuple[int, ...]:
    """The shape that the log-sum-exp of a call must have."""
    shape = call.arrays["q"].shape[:-1]
    if len(shape) == 1:
        return shape
    if len(shape) == 2 and call.function == "paged_attention" and "cu_seqlens_q" not in call.options:
        return shape
    packed = call.function == "flash_attention_varlen" or "cu_seqlens_q" in call.options
    if packed or call.options.get("layout", "bshd") == "bshd":
        return (*shape[:-2], shape[-1], shape[-2])
    return shape


def _textbook(sequence: Sequence, call: Call, wide: Any, narrow: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Attention head by head in type `wide`; the naive one rounds scores and probabilities to `narrow`."""
    exactly = narrow is None
    narrow = wide if exactly else narrow
    q, k, v = (x.astype(wide) for x in sequence[:3])
    seqlen_q, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1] if k.shape[1] else 1
    scale = call.options.get("scale")
    scale = wide(1) / np.sqrt(wide(head_dim)) if scale is None else wide(scale)
    seen = seen_by(sequence, call)
    sinks = call.options.get("sinks")
    out = np.zeros((seqlen_q, num_heads, v.shape[2]), wide)
    lse = np.full((num_heads, seqlen_q), -np.inf, wide)
    with np.errstate(all="ignore"):
        for h in range(num_heads):
            sink = wide(-np.inf if sinks is None else sinks[h])
            if call.options.get("lse_includes_sinks"):
                lse[h] = sink
            rows = seen[h].any(axis=1)
            if not rows.any():
                continue
            scores = scale * _products(q[:, h], k[:, h // group], exactly=exactly)
            scores = _rounded(modified_scores(scores, h, sequence, call), narrow)
            share, sums = softmax(np.where(seen[h], scores, -np.inf)[rows], sink)
            out[rows, h] = _weighted_sum(share.astype(narrow).astype(wide), v[:, h // group], seen[h][rows])
            lse[h, rows] = sums[1 if call.options.get("lse_includes_sinks") else 0]
    return out, lse


def _rounded(scores: np.ndarray, narrow: Any) -> np.ndarray:
    """Scores rounded to a narrow type in which finite ones stay finite."""
    if scores.dtype == narrow:
        return scores
    rounded = scores.astype(narrow).astype(scores.dtype)
    largest = np.nextafter(narrow.type(np.inf), narrow.type(0)).astype(scores.dtype)
    return np.where(np.isfinite(scores), rounded.clip(-largest, largest), rounded)


def softmax(scores: np.ndarray, sink: Any) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Shares of the scores beside a sink, and the log-sum-exp of each row without and with the sink."""
    top = scores.max(axis=1, keepdims=True)
    pivot = np.maximum(top, sink)
    # Nothing but scores of -inf: softmax is not a number, the logarithm of an empty sum is.
    weights = np.exp(scores - pivot)
    if sink == np.inf:
        # All of the sum is the sink's; a score that is no number, or as large, still shows.
        weights = np.where(top < np.inf, 0, np.nan) * np.ones_like(scores)
        return weights, (log_sum_exp(scores)[:, 0], np.where(top < np.inf, sink, np.nan)[:, 0])
    total = weights.sum(axis=1, keepdims=True) + np.exp(sink - pivot)
    with_sink = np.where(np.isneginf(pivot), pivot, pivot + np.log(total))
    return weights / total, (log_sum_exp(scores)[:, 0], with_sink[:, 0])


def log_sum_exp(scores: np.ndarray) -> np.ndarray:
    """(rows, 1): ln sum exp, -inf where there is nothing but scores of -inf."""
    top = scores.max(axis=1, keepdims=True)
    return np.where(np.isneginf(top), top, top + np.log(np.exp(scores - top).sum(axis=1, keepdims=True)))


def _products(q: np.ndarray, k: np.ndarray, *, exactly: bool) -> np.ndarray:
    """All q . k; the naive ones are one chain over the head dimension, as in a textbook's loop."""
    if exactly:
        return q @ k.T
    result = np.zeros((len(q), len(k)), q.dtype)
    for d in range(q.shape[1]):
        result += q[:, d, None] * k[:, d]
    return result


def _weighted_sum(weights: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Sum of weight times value over the visible keys only: 0 times NaN must not arise."""
    finite = np.isfinite(v)
    result = weights @ np.where(finite, v, 0)
    for j in np.flatnonzero(~finite.all(axis=1)):
        result[seen[:, j]] += weights[seen[:, j], j, None] * np.where(finite[j], 0, v[j])
    return result


@functools.lru_cache(maxsize=512)
def expected(call: Call) -> Expected:
    """The exact and the naive answer of a call."""
    narrow = call.arrays["q"].dtype
    exact_type, naive_type = (np.longdouble, np.float64) if narrow == np.float64 else (np.float64, np.float32)
    exact, naive, empty, largest = [], [], [], 0.0
    sinks = call.options.get("sinks")
    for sequence in sequences(call):
        exact.append(_textbook(sequence, call, exact_type))
        naive.append(_textbook(sequence, call, naive_type, narrow))
        finite = sequence.v.astype(np.float64)
        largest = max(largest, float(np.abs(finite[np.isfinite(finite)]).max(initial=0.0)))
        empty.append(~seen_by(sequence, call).any(axis=2).T)
        if sinks is not None:
            empty[-1] |= np.isposinf(sinks.astype(np.float64)) & np.isfinite(exact[-1][0]).all(axis=2)
    return Expected(exact, naive, largest, empty)


def assert_matches(out: np.ndarray, lse: np.ndarray | None, call: Call, *, factor: float = 0) -> None:
    """Hold a result to the contract: shapes, types, empty rows, non-finite rows, error rule."""
    q = call.arrays["q"]
    factor = factor or (3.0 if call.options.get("softcap") else 2.0)
    want = expected(call)
    assert out.shape == (*q.shape[:-1], value_width(call))
    if "out" in call.options:
        assert out.dtype == call.options["out"].dtype
    else:
        assert out.dtype == np.dtype(call.options.get("out_dtype") or q.dtype)
    computed = "float64" if q.dtype == np.float64 else "float32"
    floor = max(FLOOR[out.dtype.name], FLOOR[computed]) * want.largest_value
    naive = [x.astype(out.dtype).astype(x.dtype) for x, _ in want.naive]
    rows = split_rows(out, call)
    _assert_close("out", rows, [x for x, _ in want.exact], naive, factor, lambda _: floor)
    for b, (mine, empty) in enumerate(zip(rows, want.empty, strict=True)):
        assert not mine[empty].any(), f"out of sequence {b}: not 0 where no key is visible"
    if lse is None:
        return
    assert lse.shape == lse_shape(call)
    lse_type = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    assert lse.dtype == lse_type
    # A log-sum-exp below 1 is held to the last place of 1: an error there is one of all weights alike.
    naive = [x for _, x in want.naive]
    _assert_close(
        "lse",
        split_lse(lse, call),
        [x for _, x in want.exact],
        naive,
        factor,
        lambda exact: 4 * _spacing(exact, lse_type),
    )


def _spacing(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The last place of each number in a type, of a number below 1 that of 1."""
    return np.spacing(np.abs(numbers).clip(1, np.finfo(dtype).max / 4).astype(dtype)).astype(np.float64)


def _assert_close(
    name: str,
    got: list[np.ndarray],
    exact: list[np.ndarray],
    naive: list[np.ndarray],
    factor: float,
    slack: Any,
) -> None:
    """Exact values that are finite within the rule, infinite log-sum-exps exactly, the rest not hidden."""
    naive_error = 0.0
    for one, other in zip(exact, naive, strict=True):
        both = np.isfinite(one) & np.isfinite(other)
        naive_error = max(naive_error, float(np.abs(other[both] - one[both]).max(initial=0.0)))
    for b, (mine, right) in enumerate(zip(got, exact, strict=True)):
        assert mine.shape == right.shape, f"{name} of sequence {b}: shape {mine.shape}, exact {right.shape}"
        mine = mine.astype(right.dtype)
        empty = np.isneginf(right) if name == "lse" else np.zeros(right.shape, bool)
        finite = np.isfinite(right)
        assert np.isneginf(mine[empty]).all(), f"{name} of sequence {b}: finite where no key is visible"
        hidden = np.isfinite(mine) & ~finite
        assert not hidden.any(), f"{name} of sequence {b}: {_where(hidden)} hides a visible NaN or Inf"
        broken = ~np.isfinite(mine) & finite
        assert not broken.any(), f"{name} of sequence {b}: {_where(broken)} is not finite"
        error = np.abs(mine[finite] - right[finite])
        allowed = factor * naive_error + slack(right[finite])
        wrong = np.zeros(right.shape, bool)
        wrong[finite] = error > allowed
        assert not wrong.any(), (
            f"{name} of sequence {b}: error {float(error.max()):.3g} at {_where(wrong)}, "
            f"allowed {float(np.min(allowed)):.3g} (naive {naive_error:.3g})"
        )


def _where(mask: np.ndarray) -> str:
    places = np.argwhere(mask)
    return f"{tuple(int(x) for x in places[0])} and {len(places) - 1} more"
