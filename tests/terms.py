"""Score terms and masks for any dense call, and what the tests do to such calls.

`TERMS` names combinations of options; `with_terms` adds one to a call, in the shapes that it needs. The
other functions cut, spoil or poison a call together with whatever options it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from calls import normal
from oracle import Call, sequences
from oracle_terms import UserFunction, seen_by


class Sizes(NamedTuple):
    """Sizes of a call, for the shapes of its options."""

    batch: int
    num_heads: int
    seqlen_q: int
    seqlen_kv: int


def sizes_of(call: Call) -> Sizes:
    """The longest lengths of a dense or a packed call."""
    q, k = call.arrays["q"], call.arrays["k"]
    if q.ndim == 4:
        return Sizes(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    lengths = [np.diff(call.arrays[name]) for name in ("cu_seqlens_q", "cu_seqlens_kv")]
    return Sizes(len(lengths[0]), q.shape[1], *(int(x.max(initial=0)) for x in lengths))


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(1000 + seed)


def holes(shape: tuple[int, ...], seed: int = 0, share: float = 0.6) -> np.ndarray:
    """A random mask of which `share` may be seen."""
    return rng(seed).random(shape) < share


def bias_with_holes(shape: tuple[int, ...], seed: int = 0, dtype: str = "float32") -> np.ndarray:
    """A bias that hides some keys."""
    return np.where(holes(shape, seed, 0.8), normal(seed, shape), -np.inf).astype(dtype)


def blocks(seqlen_q: int, seqlen_kv: int, seed: int) -> np.ndarray:
    """A mask of whole blocks of keys, so that a tile sees all, some or none of them."""
    return np.repeat(holes((seqlen_q, -(-seqlen_kv // 33)), seed), 33, axis=1)[:, :seqlen_kv]


def rising_spans(n: Sizes, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two ends that never fall along the rows; some spans are empty, some reach past the keys."""
    lo, hi = np.sort(rng(seed).integers(-4, n.seqlen_kv + 4, (2, n.batch, n.seqlen_q)), axis=2)
    return lo // 2, hi.astype(np.int32)


def parents(batch: int, num_draft: int, seed: int = 0) -> np.ndarray:
    """Random trees: every draft token hangs on an earlier one or on the end of the prefix."""
    below = np.arange(num_draft)
    return np.minimum(rng(seed).integers(-1, num_draft, (batch, num_draft)), below - 1)


def num_draft_of(n: Sizes) -> int:
    return min(n.seqlen_kv, n.seqlen_q, 7)


#: Arithmetic for score_mod and mask_mod, on arrays as on numbers.
SOFTER = UserFunction(
    lambda s, b, h, i, j: s * (1 + 0.25 * (j % 3)) - 0.05 * abs(i - j) * (h + 1),
    "score * (1 + 0.25 * (key % 3)) - 0.05 * (query < key ? key - query : query - key) * (head + 1)",
    of_score=True,
)
BY_BATCH = UserFunction(lambda s, b, h, i, j: s / (1 + b) + h, "score / (1 + batch) + head", of_score=True)
# Remainders of negative positions are another number in C++.
SPARSE = UserFunction(
    lambda b, h, i, j: (i + 2 * j + h) % 4 != 1, "((query + 2 * key + head) % 4 + 4) % 4 != 1", of_score=False
)
BATCHED = UserFunction(
    lambda b, h, i, j: (i + j + h + b) % 3 != 0, "(query + key + head + batch) % 3 != 0", of_score=False
)

#: name -> options of a call of these sizes
TERMS: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "none": lambda n: {},
    "softcap": lambda n: dict(softcap=1.5, causal=True),
    "alibi": lambda n: dict(alibi_slopes=2.0 ** -np.arange(n.num_heads).astype("f4"), causal=True),
    "alibi of each sequence": lambda n: dict(alibi_slopes=normal(1, (n.batch, n.num_heads), "float64")),
    "bias": lambda n: dict(bias=normal(2, n)),
    "bias of keys with holes": lambda n: dict(bias=bias_with_holes((n.seqlen_kv,), 3), causal=True),
    "bias with holes": lambda n: dict(bias=bias_with_holes(n, 4)),
    "mask": lambda n: dict(mask=holes(n, 5)),
    "mask of keys": lambda n: dict(mask=holes((n.batch, 1, 1, n.seqlen_kv), 6), causal=True),
    "mask of blocks": lambda n: dict(mask=blocks(n.seqlen_q, n.seqlen_kv, 7)),
    "sinks": lambda n: dict(sinks=normal(8, (n.num_heads,)), causal=True),
    "sinks in the lse": lambda n: dict(sinks=normal(9, (n.num_heads,)), lse_includes_sinks=True),
    "sink tokens": lambda n: dict(sink_tokens=3, window=(6, 0), causal=True),
    "spans": lambda n: dict(spans=rising_spans(n, 10)),
    "tree": lambda n: dict(tree=parents(n.batch, num_draft_of(n), 11), causal=True),
    "tree of a mask": lambda n: dict(tree=holes((n.batch, num_draft_of(n), num_draft_of(n)), 12)),
    "score_mod": lambda n: dict(score_mod=SOFTER, causal=True),
    "mask_mod": lambda n: dict(mask_mod=SPARSE),
    "many": lambda n: dict(
        softcap=2.0,
        alibi_slopes=np.full(n.num_heads, 0.1, "f2"),
        bias=bias_with_holes((1, n.num_heads, 1, n.seqlen_kv), 13),
        mask=holes((n.batch, 1, n.seqlen_q, n.seqlen_kv), 14, 0.8),
        sinks=normal(15, (n.num_heads,), "float64"),
        causal=True,
        window=(30, None),
        sink_tokens=2,
    ),
}  # fmt: skip


def with_terms(call: Call, name: str) -> Call:
    """A dense or packed call with one of `TERMS` added."""
    options = TERMS[name](sizes_of(call))
    if "spans" in options and "cu_seqlens_q" in call.arrays:
        lengths = np.diff(call.arrays["cu_seqlens_q"])
        ends = [[rows[:n] for rows, n in zip(end, lengths, strict=True)] for end in options["spans"]]
        options["spans"] = tuple(np.concatenate(end) for end in ends)
    return call.but(**options)


#: Options that have, with so many axes, one part for each sequence.
AXES_BY_SEQUENCE = {"alibi_slopes": 2, "q_offset": 1, "k_scale": 3, "v_scale": 3}


def sequence_of(call: Call, b: int) -> Call:
    """The dense call of one sequence of a batch, its options cut along with it."""
    options = dict(call.options)
    part = slice(b, b + 1)
    for name, value in options.items():
        if name in ("bias", "mask") and value.ndim == 4 and value.shape[0] > 1:
            options[name] = value[part]
        elif name == "spans":
            options[name] = tuple(x[part] if np.ndim(x) == 2 and len(x) > 1 else x for x in value)
        elif name in ("tree", "seq_lens") or np.ndim(value) == AXES_BY_SEQUENCE.get(name):
            options[name] = value[part]
    return Call(call.function, {name: x[part] for name, x in call.arrays.items()}, options)


def rows_of(call: Call, lo: int, hi: int) -> Call:
    """The dense call of some rows of each sequence of one whose `q_offset` is given."""
    options = dict(call.options)
    for name, value in options.items():
        if name in ("bias", "mask") and value.ndim > 1 and value.shape[-2] > 1:
            options[name] = value[..., lo:hi, :]
        elif name == "spans":
            options[name] = tuple(x[..., lo:hi] if np.ndim(x) and x.shape[-1] > 1 else x for x in value)
    options["q_offset"] = options["q_offset"] + lo
    return Call(call.function, {**call.arrays, "q": call.arrays["q"][:, lo:hi]}, options)


def first_keys_of(call: Call, count: int) -> Call:
    """The dense call whose keys are the first so many."""
    options = dict(call.options)
    for name, value in options.items():
        if name in ("bias", "mask") and value.shape[-1] > 1:
            options[name] = value[..., :count]
        elif name in ("k_scale", "v_scale") and np.ndim(value) == 3:
            options[name] = value[:, :count]
    arrays = {name: x if name == "q" else x[:, :count] for name, x in call.arrays.items()}
    return Call(call.function, arrays, options)


def unseen_keys(call: Call) -> list[np.ndarray]:
    """(seqlen_kv, num_kv_heads) of each sequence: the valid keys that no row of any head of a group sees."""
    unseen = []
    for sequence in sequences(call):
        num_kv_heads = sequence.k.shape[1]
        seen = seen_by(sequence, call).any(axis=1)
        unseen.append(~seen.reshape(num_kv_heads, -1, seen.shape[1]).any(axis=1).T)
    return unseen


def rubbish(dtype: np.dtype) -> Any:
    """What must not reach a result: NaN, or, in integers, the largest byte."""
    return 0x7F if dtype.kind in "iu" else np.nan


def poisoned_where_unseen(call: Call, value: Any = None) -> Call:
    """A dense call with NaN (or `value`) in every key, value and scale that no row may see."""
    arrays, options = dict(call.arrays), dict(call.options)
    lens = call.options.get("seq_lens")
    hidden = np.ones((len(arrays["k"]), *arrays["k"].shape[1:3]), bool)
    for b, part in enumerate(unseen_keys(call)):
        hidden[b, : len(part) if lens is None else lens[b]] = part
    for name in "kv":
        array = arrays[name] = arrays[name].copy()
        array[hidden] = rubbish(array.dtype) if value is None or array.dtype.kind in "iu" else value
        scale = options.get(f"{name}_scale")
        if np.ndim(scale) == 3:
            scale = options[f"{name}_scale"] = scale.copy()
            scale[hidden] = np.nan if value is None else value
    return Call(call.function, arrays, options)
