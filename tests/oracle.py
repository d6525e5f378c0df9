"""The oracle: what an attention call must give, computed without the package under test.

It reads a call as the documentation describes it, cuts it into sequences, states every mask as a
predicate of (query position, key), and computes each head by the textbook formula: once exactly (float64,
longdouble for float64 inputs) and once naively in the query's own type. `assert_matches` holds a result to
the error rule ``E <= 2 * E_naive + floor * max|v|``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

#: Added to the error that naive attention makes, in units of the largest value: that of the output's
#: type, or of the type that was computed in where that is narrower.
FLOOR = {"float64": 5e-15, "float32": 1e-6, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a public function: its name, its arrays in positional order, its keywords."""

    function: str
    arrays: dict[str, np.ndarray]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def but(self, **options: Any) -> Call:
        """The same call with some keywords changed."""
        return Call(self.function, self.arrays, {**self.options, **options})

    def of(self, **arrays: np.ndarray) -> Call:
        """The same call with some arrays changed."""
        return Call(self.function, {**self.arrays, **arrays}, self.options)

    def named(self, function: str) -> Call:
        """The same arguments given to another function."""
        return Call(function, self.arrays, self.options)


class Sequence(NamedTuple):
    """One sequence of a call, gathered from wherever its rows and keys lie."""

    q: np.ndarray  # (seqlen_q, num_heads, head_dim)
    k: np.ndarray  # (seqlen_kv, num_kv_heads, head_dim), the valid keys only
    v: np.ndarray  # (seqlen_kv, num_kv_heads, head_dim_v)
    offset: int  # position of the first query row


class Expected(NamedTuple):
    """The exact answer, the naive one, and what the error rule needs besides."""

    # per sequence out (seqlen_q, num_heads, head_dim_v) and lse (num_heads, seqlen_q)
    exact: list[tuple[np.ndarray, np.ndarray]]
    naive: list[tuple[np.ndarray, np.ndarray]]
    largest_value: float


def visible(position: Any, key: Any, *, causal: bool, left: int | None, right: int | None) -> Any:
    """Whether the query at a position may see a key, both counted from the start of the sequence."""
    seen = np.full(np.broadcast_shapes(np.shape(position), np.shape(key)), True)
    if causal:
        seen &= key <= position
    if left is not None:
        seen &= key >= position - left
    if right is not None:
        seen &= key <= position + right
    return seen


def sequences(call: Call) -> Iterator[Sequence]:
    """Cut a call into its sequences."""
    queries = split_rows(call.arrays["q"], call)
    if call.function == "paged_attention":
        keys = [_gather(call, b) for b in range(len(call.arrays["seq_lens"]))]
    elif call.function == "flash_attention_varlen":
        borders = [int(x) for x in call.arrays["cu_seqlens_kv"]]
        keys = [(call.arrays["k"][lo:hi], call.arrays["v"][lo:hi]) for lo, hi in itertools.pairwise(borders)]
    else:
        lens = call.options.get("seq_lens")
        pairs = zip(split_rows(call.arrays["k"], call), split_rows(call.arrays["v"], call), strict=True)
        keys = [
            (k, v) if lens is None else (k[: int(lens[b])], v[: int(lens[b])])
            for b, (k, v) in enumerate(pairs)
        ]
    for b, (q, (k, v)) in enumerate(zip(queries, keys, strict=True)):
        offset = call.options.get("q_offset")
        if call.options.get("causal") == "top_left":
            offset = 0
        if offset is None:
            offset = len(k) - len(q)
        elif np.ndim(offset):
            offset = offset[b]
        yield Sequence(q, k, v, int(offset))


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


def _gather(call: Call, b: int) -> tuple[np.ndarray, np.ndarray]:
    """The valid keys and values of sequence b, one token at a time, through its block table."""
    pools = [call.arrays["k_cache"], call.arrays["v_cache"]]
    if call.options.get("cache_layout", "nhd") == "hnd":
        pools = [pool.swapaxes(1, 2) for pool in pools]
    page_size = pools[0].shape[1]
    table = call.arrays["block_table"]
    gathered = []
    for pool in pools:
        tokens = np.empty((int(call.arrays["seq_lens"][b]), *pool.shape[2:]), pool.dtype)
        for t in range(len(tokens)):
            tokens[t] = pool[table[b, t // page_size], t % page_size]
        gathered.append(tokens)
    return gathered[0], gathered[1]


def window_of(call: Call) -> tuple[int | None, int | None]:
    """Both sides of the window of a call, None for no limit."""
    left, right = call.options.get("window") or (None, None)
    return _side(left), _side(right)


def _side(side: int | None) -> int | None:
    """A side of a window, None for no limit; cut so that NumPy can add it to a position."""
    return None if side in (None, -1) else min(int(side), 2**60)


def _textbook(sequence: Sequence, call: Call, wide: Any, narrow: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """Attention head by head in type `wide`; the naive one rounds scores and probabilities to `narrow`."""
    exactly = narrow is None
    narrow = wide if exactly else narrow
    q, k, v = (x.astype(wide) for x in sequence[:3])
    seqlen_q, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1] if k.shape[1] else 1
    scale = call.options.get("scale")
    scale = wide(1) / np.sqrt(wide(head_dim)) if scale is None else wide(scale)
    left, right = window_of(call)
    position = np.arange(seqlen_q)[:, None] + sequence.offset
    seen = visible(
        position, np.arange(len(k)), causal=bool(call.options.get("causal")), left=left, right=right
    )
    out = np.zeros((seqlen_q, num_heads, v.shape[2]), wide)
    lse = np.full((num_heads, seqlen_q), -np.inf, wide)
    rows = seen.any(axis=1)
    if not rows.any():
        return out, lse
    seen = seen[rows]
    with np.errstate(all="ignore"):
        for h in range(num_heads):
            products = _products(q[rows, h], k[:, h // group], exactly=exactly)
            scores = (scale * products).astype(narrow).astype(wide)
            scores = np.where(seen, scores, -np.inf)
            top = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(axis=1, keepdims=True)
            share = (weights / total).astype(narrow).astype(wide)
            out[rows, h] = _weighted_sum(share, v[:, h // group], seen)
            # Nothing but scores of -inf: softmax is not a number, the logarithm of an empty sum is.
            lse[h, rows] = np.where(np.isneginf(top), top, top + np.log(total))[:, 0]
    return out, lse


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
    exact, naive, largest = [], [], 0.0
    for sequence in sequences(call):
        exact.append(_textbook(sequence, call, exact_type))
        naive.append(_textbook(sequence, call, naive_type, narrow))
        finite = sequence.v.astype(np.float64)
        largest = max(largest, float(np.abs(finite[np.isfinite(finite)]).max(initial=0.0)))
    return Expected(exact, naive, largest)


def assert_matches(out: np.ndarray, lse: np.ndarray | None, call: Call, *, factor: float = 2.0) -> None:
    """Hold a result to the contract: shapes, types, empty rows, non-finite rows, error rule."""
    q = call.arrays["q"]
    v = call.arrays.get("v", call.arrays.get("v_cache"))
    want = expected(call)
    assert out.shape == (*q.shape[:-1], v.shape[-1])
    if "out" in call.options:
        assert out.dtype == call.options["out"].dtype
    else:
        assert out.dtype == np.dtype(call.options.get("out_dtype") or q.dtype)
    computed = "float64" if q.dtype == np.float64 else "float32"
    floor = max(FLOOR[out.dtype.name], FLOOR[computed]) * want.largest_value
    naive = [x.astype(out.dtype).astype(x.dtype) for x, _ in want.naive]
    rows = split_rows(out, call)
    _assert_close("out", rows, [x for x, _ in want.exact], naive, factor, lambda _: floor)
    for b, (mine, (exact, _)) in enumerate(zip(rows, want.exact, strict=True)):
        empty = ~exact.any(axis=-1)
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
        lambda exact: 4 * np.spacing(np.maximum(np.abs(exact), 1).astype(lse_type)).astype(np.float64),
    )


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
