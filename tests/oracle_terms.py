"""The oracle's parts: what stored keys are worth, which keys a row sees, what is added to its scores.

Each is stated from the words of the contract, one predicate or formula for each option, without the
package under test.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

#: What ``kv_dtype=`` says about bytes.
OF_BYTES = {"e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2", "int4": "int4"}


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
    k: np.ndarray  # (seqlen_kv, num_kv_heads, head_dim), the valid keys only, dequantised
    v: np.ndarray  # (seqlen_kv, num_kv_heads, head_dim_v)
    offset: int  # position of the first query row
    index: int  # number of the sequence in the call
    rows: slice | None  # where its rows lie, if packed
    batch: int  # number of sequences of the call

    @property
    def position(self) -> np.ndarray:
        """(seqlen_q, 1): where each row stands."""
        return np.arange(len(self.q))[:, None] + self.offset


class UserFunction:
    """A `score_mod` or `mask_mod` for every backend: arithmetic that works on arrays as on numbers.

    `cuda` is the same as a C++ expression.
    """

    def __init__(self, function: Callable[..., Any], cuda: str, *, of_score: bool) -> None:
        self.numpy = function
        self.cuda = cuda
        arguments = [ctypes.c_double] * of_score + [ctypes.c_int64] * 4
        result = float if of_score else int
        # Kept here: the pointer must not outlive what it points to.
        self.c = ctypes.CFUNCTYPE(ctypes.c_double if of_score else ctypes.c_int32, *arguments)(
            lambda *numbers: result(function(*numbers))
        )

    def of_backend(self, name: str) -> Any:
        """What a backend takes."""
        return {"numpy": self.numpy, "c": self.c, "cuda": self.cuda}[name]


# --- storage ---


def stored_name(array: np.ndarray, kv_dtype: str | None = None) -> str:
    """The name of the type in which an array of keys or values is stored."""
    return OF_BYTES[kv_dtype] if array.dtype == np.uint8 and kv_dtype else array.dtype.name


def value_width(call: Call) -> int:
    """head_dim_v: the width of the values, of which int4 packs two into a byte."""
    v = call.arrays.get("v", call.arrays.get("v_cache"))
    return v.shape[-1] * (2 if stored_name(v, call.options.get("kv_dtype")) == "int4" else 1)


def _float8_values(exponent_bits: int, *, infinities: bool) -> np.ndarray:
    """The value of each of the 256 codes of a type of sign, exponent and mantissa."""
    code = np.arange(256)
    mantissa_bits = 7 - exponent_bits
    bias = 2 ** (exponent_bits - 1) - 1
    mantissa = code & (2**mantissa_bits - 1)
    exponent = code >> mantissa_bits & (2**exponent_bits - 1)
    normal = exponent != 0
    values = (mantissa + normal * 2**mantissa_bits) * 2.0 ** (np.maximum(exponent, 1) - bias - mantissa_bits)
    top = exponent == 2**exponent_bits - 1
    if infinities:
        values[top] = np.where(mantissa[top] == 0, np.inf, np.nan)
    else:
        values[top & (mantissa == 2**mantissa_bits - 1)] = np.nan
    return np.where(code & 0x80, -values, values)


FLOAT8_VALUES = {
    "float8_e4m3fn": _float8_values(4, infinities=False),
    "float8_e5m2": _float8_values(5, infinities=True),
}


def stored_values(array: np.ndarray, kv_dtype: str | None = None) -> np.ndarray:
    """What a stored array says, without its scale: float64, or the array where it is float32 or wider."""
    name = stored_name(array, kv_dtype)
    if name in FLOAT8_VALUES:
        return FLOAT8_VALUES[name][np.ascontiguousarray(array).view(np.uint8)]
    if name == "int4":
        nibbles = np.stack([array & 15, array >> 4], axis=-1).astype(np.int64)
        return ((nibbles ^ 8) - 8.0).reshape(*array.shape[:-1], 2 * array.shape[-1])
    return array if name in ("float32", "float64") else array.astype(np.float64)


def dequantised(array: np.ndarray, scale: Any, kv_dtype: str | None, *, head_axis: int) -> np.ndarray:
    """Value = stored * scale for every form of a scale; exactly, but for float64 with a scale.

    A (num_kv_heads,) scale goes along `head_axis` (from the end); an array of as many axes as the
    stored one less the last has a scale for each token and head.
    """
    values = stored_values(array, kv_dtype)
    if scale is None:
        return values
    if np.ndim(scale):
        per_token = np.ndim(scale) == array.ndim - 1
        scale = scale[..., None] if per_token else np.reshape(scale, (-1, *[1] * (-head_axis - 1)))
    wide = np.longdouble if array.dtype == np.float64 else np.float64
    with np.errstate(invalid="ignore"):
        return values.astype(wide) * np.asarray(scale).astype(np.float32).astype(wide)


# --- which keys a row sees ---


def visible(
    position: Any,
    key: Any,
    *,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    sink_tokens: int = 0,
    lo: Any = None,
    hi: Any = None,
) -> Any:
    """Whether the query at a position may see a key, both counted from the start of the sequence."""
    seen = np.full(np.broadcast_shapes(np.shape(position), np.shape(key)), True)
    if left is not None:
        seen &= (key >= position - left) | (key < sink_tokens)
    if right is not None:
        seen &= (key <= position + right) | (key < sink_tokens)
    if causal:
        seen &= key <= position
    if lo is not None:
        seen &= key >= lo
    if hi is not None:
        seen &= key < hi
    return seen


def window_of(call: Call) -> tuple[int | None, int | None]:
    """Both sides of the window of a call, None for no limit."""
    left, right = call.options.get("window") or (None, None)
    return _side(left), _side(right)


def _side(side: int | None) -> int | None:
    """A side of a window, None for no limit; cut so that NumPy can add it to a position."""
    return None if side in (None, -1) else min(int(side), 2**60)


def structure(sequence: Sequence, call: Call) -> np.ndarray:
    """(seqlen_q, seqlen_kv): what causal, window, sink tokens and spans let a row see."""
    left, right = window_of(call)
    bounds = {}
    if call.options.get("spans") is not None:
        for name, bound in zip(("lo", "hi"), call.options["spans"], strict=True):
            bounds[name] = _of_rows(bound, sequence)
    return visible(
        sequence.position,
        np.arange(len(sequence.k)),
        causal=bool(call.options.get("causal")),
        left=left,
        right=right,
        sink_tokens=int(call.options.get("sink_tokens") or 0),
        **bounds,
    )


def _of_rows(bound: Any, sequence: Sequence) -> np.ndarray:
    """(seqlen_q, 1): the part of a number or of an array over the rows that belongs to a sequence."""
    if not np.ndim(bound):
        return np.full((len(sequence.q), 1), bound)
    if sequence.rows is None:
        return np.broadcast_to(bound, (sequence.batch, len(sequence.q)))[sequence.index][:, None]
    total = bound if len(bound) != 1 else np.repeat(bound, max(sequence.rows.stop, 1))
    return total[sequence.rows][:, None]


def of_scores(term: np.ndarray, sequence: Sequence) -> np.ndarray:
    """The part (num_heads, seqlen_q, seqlen_kv) of a bias or mask that belongs to a sequence."""
    term = term.reshape((1,) * (4 - term.ndim) + term.shape)
    term = term[sequence.index if term.shape[0] > 1 else 0]
    seqlen_q, num_heads, seqlen_kv = len(sequence.q), sequence.q.shape[1], len(sequence.k)
    return np.broadcast_to(term[:, :seqlen_q, :seqlen_kv], (num_heads, seqlen_q, seqlen_kv))


def ancestors(tree: np.ndarray) -> np.ndarray:
    """(num_draft, num_draft) bool of parent indices: a token sees itself and those above it."""
    if tree.dtype == bool:
        return tree.view(np.uint8) != 0
    seen = np.zeros((len(tree), len(tree)), bool)
    for i in range(len(tree)):
        above = i
        while above >= 0:
            seen[i, above] = True
            above = int(tree[above])
    return seen


def seen_by(sequence: Sequence, call: Call) -> np.ndarray:
    """(num_heads, seqlen_q, seqlen_kv): which keys each row of each head sees."""
    options = call.options
    seqlen_q, num_heads, seqlen_kv = len(sequence.q), sequence.q.shape[1], len(sequence.k)
    seen = structure(sequence, call)
    if options.get("tree") is not None:
        allowed = ancestors(options["tree"][sequence.index])
        first = seqlen_kv - len(allowed)
        for i, p in enumerate(sequence.position[:, 0]):
            if first <= p < seqlen_kv:
                seen[i, first:] &= allowed[p - first]
    seen = np.broadcast_to(seen, (num_heads, seqlen_q, seqlen_kv)).copy()
    if options.get("mask") is not None:
        mask = options["mask"]
        seen &= of_scores(mask.view(np.uint8) != 0, sequence)
    if options.get("bias") is not None:
        seen &= ~np.isneginf(of_scores(options["bias"], sequence).astype(np.float64))
    if options.get("mask_mod") is not None and seen.size:
        where = places(sequence)
        for h in range(num_heads):
            seen[h] &= np.asarray(options["mask_mod"].numpy(where[0], h, *where[1:]), bool)
    return seen


def places(sequence: Sequence) -> tuple[int, np.ndarray, np.ndarray]:
    """What a user's function is told, but for the head: batch, position of the query, key."""
    return sequence.index, sequence.position, np.arange(len(sequence.k))[None, :]


# --- what a score becomes ---


def modified_scores(scores: np.ndarray, h: int, sequence: Sequence, call: Call) -> np.ndarray:
    """Softcap, the user's function, ALiBi and bias, in this order, in the type of the scores."""
    options, number = call.options, scores.dtype.type
    if options.get("softcap"):
        cap = number(options["softcap"])
        scores = cap * np.tanh(scores / cap)
    if options.get("score_mod") is not None and scores.size:
        where = places(sequence)
        scores = np.asarray(options["score_mod"].numpy(scores, where[0], h, *where[1:])).astype(number)
    if options.get("alibi_slopes") is not None:
        slopes = options["alibi_slopes"]
        slope = number(slopes[h] if slopes.ndim == 1 else slopes[sequence.index, h])
        scores = scores - slope * np.abs(sequence.position - np.arange(len(sequence.k))).astype(number)
    if options.get("bias") is not None:
        largest = np.finfo(np.float64 if sequence.q.dtype == np.float64 else np.float32).max
        bias = of_scores(options["bias"], sequence)[h].astype(np.float64)
        bias = np.where(np.isfinite(bias), bias.clip(-largest, largest), bias).astype(number)
        total = scores + bias
        # A finite bias is a number, never -inf.
        held = np.isfinite(scores) & np.isfinite(bias) & (total < -largest)
        scores = np.where(held, number(-largest), total)
    return scores
