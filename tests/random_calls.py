"""Hypothesis strategies for calls over the whole argument space, and what each of them exercises."""

from __future__ import annotations

from typing import Any

import numpy as np
from calls import (
    DTYPE_NAMES,
    STORED_NAMES,
    dense,
    normal,
    numpy_dtype,
    paged,
    paged_varlen,
    quantised,
    varlen,
)
from hypothesis import strategies as st
from oracle_terms import Call, UserFunction, ancestors, stored_name
from terms import BATCHED, BY_BATCH, SOFTER, SPARSE, Sizes, holes, parents, rising_spans, rng

#: Lengths around the sizes of vectors, panels, tiles and splits.
LENGTHS = st.one_of(
    st.integers(0, 12),
    st.sampled_from([15, 16, 17, 23, 24, 25, 31, 33, 47, 49, 63, 65, 96, 97, 129, 191, 193, 257]),
)
WIDTHS = st.one_of(st.integers(1, 20), st.sampled_from([24, 31, 32, 33, 48, 64, 65, 80, 128]))
INDEX = st.sampled_from(["i4", "i8"])

#: What hides keys or changes scores; a call has some of them.
TERMS = (
    "window",
    "q_offset",
    "spans",
    "softcap",
    "alibi_slopes",
    "bias",
    "mask",
    "sinks",
    "tree",
    "score_mod",
    "mask_mod",
)
#: How the work is cut and what comes out.
HOW = ("family", "num_splits", "tile", "out_dtype", "scale", "max_seqlen_q")


def some_of(names: tuple[str, ...], most: int) -> st.SearchStrategy[list[str]]:
    """Some of the names, each of them about as often as the others."""
    return st.lists(st.sampled_from(names), max_size=most, min_size=min(2, most), unique=True)


@st.composite
def windows_and_offsets(draw: st.DrawFn, names: list[str], batch: int) -> dict[str, Any]:
    """Causal, window and offset in any combination."""
    options: dict[str, Any] = {"causal": draw(st.sampled_from([False, True, "top_left"]))}
    if "window" in names:
        side = st.one_of(st.none(), st.integers(-1, 40), st.sampled_from([64, 200, 10**6]))
        options["window"] = (draw(side), draw(side))
        options["sink_tokens"] = draw(st.sampled_from([0, 1, 4, 30, 10**6]))
    if "q_offset" in names:
        options["causal"] = bool(options["causal"])
        far = [] if "alibi_slopes" in names or "score_mod" in names else [-(10**9), 10**9]
        offset = st.one_of(st.integers(-20, 80), st.sampled_from([0, *far]))
        if draw(st.booleans()):
            offsets = draw(st.lists(offset, min_size=batch, max_size=batch))
            options["q_offset"] = np.array(offsets, draw(INDEX))
        else:
            options["q_offset"] = draw(offset)
    return options


def _term(draw: st.DrawFn, name: str, n: Sizes, seed: int) -> np.ndarray:
    """A bias or a mask of any rank and type."""
    full = tuple(n)[draw(st.sampled_from([2, 0, 1, 3])) :]
    shape = tuple(draw(st.sampled_from([size, size, 1])) for size in full)
    seen = holes(shape, seed, draw(st.sampled_from([0.1, 0.7, 0.95])))
    if name == "mask":
        return seen
    dtype = numpy_dtype(draw(st.sampled_from(DTYPE_NAMES)))
    values = normal(seed, shape).astype(dtype)
    return np.where(seen, values, dtype.type(-np.inf)) if draw(st.booleans()) else values


def _tree(draw: st.DrawFn, batch: int, most: int, seed: int) -> np.ndarray:
    tree = parents(batch, draw(st.integers(0, min(most, 9))), seed)
    if draw(st.booleans()):
        return tree.astype(draw(INDEX))
    seen = np.zeros((*tree.shape, tree.shape[1]), bool)
    for b in range(batch):
        seen[b] = ancestors(tree[b])
    return seen & holes(seen.shape, seed, 0.9)


def _spans(n: Sizes, seqlens_q: list[int] | None, seed: int) -> tuple[np.ndarray, np.ndarray]:
    lo, hi = rising_spans(n, seed)
    if seqlens_q is None:
        return lo, hi
    packed = [[rows[:count] for rows, count in zip(end, seqlens_q, strict=True)] for end in (lo, hi)]
    return tuple(np.concatenate([np.zeros(0, "i4"), *end]).astype("i8") for end in packed)


@st.composite
def terms(
    draw: st.DrawFn,
    names: list[str],
    n: Sizes,
    *,
    seqlens_q: list[int] | None = None,
    fewest_keys: int,
    by_batch: bool = True,
) -> dict[str, Any]:
    """Options that change scores or hide keys, of a call of these sizes."""
    options: dict[str, Any] = {}
    seed = draw(st.integers(0, 10**6))
    float_type = st.sampled_from(DTYPE_NAMES)
    for name in names:
        if name == "spans":
            options[name] = _spans(n, seqlens_q, seed)
        elif name == "softcap":
            options[name] = draw(st.sampled_from([0.5, 2.0, 30.0, 1000.0]))
        elif name == "alibi_slopes":
            shape = draw(st.sampled_from([(n.num_heads,), (n.batch, n.num_heads)]))
            options[name] = normal(seed, shape, draw(float_type), 0.5)
        elif name in ("bias", "mask"):
            options[name] = _term(draw, name, n, seed + len(options))
        elif name == "sinks":
            options[name] = normal(seed, (n.num_heads,), draw(float_type), 3.0)
            options[name][rng(seed).random(n.num_heads) < 0.1] = -np.inf
            options["lse_includes_sinks"] = draw(st.sampled_from([True, True, False]))
        elif name == "tree":
            options[name] = _tree(draw, n.batch, fewest_keys, seed)
        elif name == "score_mod":
            options[name] = draw(st.sampled_from([SOFTER, BY_BATCH])) if by_batch else SOFTER
        elif name == "mask_mod":
            options[name] = draw(st.sampled_from([SPARSE, BATCHED])) if by_batch else SPARSE
    return options


@st.composite
def options_of_results(draw: st.DrawFn) -> dict[str, Any]:
    """How the work is cut and what comes out."""
    values = {
        "family": st.sampled_from(["prefill", "decode"]),
        "num_splits": st.sampled_from([1, 2, 3, 5, 16, 1000]),
        "tile": st.sampled_from([1, 16, 64, 100]),
        "out_dtype": st.sampled_from(DTYPE_NAMES),
        "scale": st.sampled_from([0.0, 1.0, -0.3, 0.125, 2.0]),
        "max_seqlen_q": st.sampled_from([257, 2**31 - 1]),
    }
    return {name: draw(values[name]) for name in draw(some_of(HOW, 4))}


@st.composite
def stored_keys(draw: st.DrawFn, dtype: str) -> dict[str, Any]:
    """Arguments of `quantised` for a stored type."""
    forms = ["number", "heads", "tokens", "tokens", None]
    return {"dtype": dtype, "scales": draw(st.sampled_from(forms)), "as_bytes": draw(st.booleans())}


@st.composite
def specs(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `dense` or `varlen`, and of `quantised`."""
    num_kv_heads = draw(st.integers(1, 3))
    dtype, stored = draw(st.sampled_from(DTYPE_NAMES)), draw(st.sampled_from(STORED_NAMES[1:]))
    stored = "float64" if dtype == "float64" else stored
    spec: dict[str, Any] = dict(
        seed=draw(st.integers(0, 10**6)),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 1, 2, 3, 4, 7])),
        num_kv_heads=num_kv_heads,
        head_dim=draw(WIDTHS),
        head_dim_v=draw(WIDTHS),
        dtype=dtype,
        kv_dtype="float64" if dtype == "float64" else "float32",
        amplitude=draw(st.sampled_from([0.1, 1.0, 1.0, 0.3])),
    )
    if stored == "int4":
        spec |= {name: spec[name] + spec[name] % 2 for name in ("head_dim", "head_dim_v")}
    return spec, draw(stored_keys(stored))


@st.composite
def attention_calls(draw: st.DrawFn) -> Call:
    """A call to one of the attention functions."""
    spec, storage = draw(specs())
    batch = draw(st.sampled_from([0, 1, 1, 2, 2, 3, 3]))
    kind = draw(st.sampled_from(["dense", "packed", "paged", "paged packed", "packed", "paged", "lengths"]))
    names = draw(some_of(TERMS, 6))
    # Python functions that C calls for each element take their time.
    lengths = st.integers(0, 20) if {"score_mod", "mask_mod"} & {*names} else LENGTHS
    options = {**draw(windows_and_offsets(names, batch)), **draw(options_of_results())}
    if kind in ("packed", "paged packed"):
        several = st.lists(lengths, min_size=batch, max_size=batch)
        seqlens_q, seqlens_kv = draw(several), draw(several)
        call = varlen(seqlens_q, seqlens_kv, index_dtype=draw(INDEX), **spec, **options)
        n = Sizes(batch, spec["num_heads"], max(seqlens_q, default=0), max(seqlens_kv, default=0))
        fewest = min(seqlens_kv, default=5)
    else:
        seqlens_q = None
        call = dense(batch=batch, seqlen_q=draw(lengths), seqlen_kv=draw(lengths), **spec, **options)
        n = Sizes(batch, spec["num_heads"], call.arrays["q"].shape[1], call.arrays["k"].shape[1])
        fewest = n.seqlen_kv
    if kind in ("lengths", "paged"):
        lens = draw(st.lists(st.integers(0, n.seqlen_kv), min_size=batch, max_size=batch))
        call = call.but(seq_lens=np.array(lens, draw(INDEX)))
        fewest = min(lens, default=5)
    more = draw(terms(names, n, seqlens_q=seqlens_q, fewest_keys=fewest))
    call = quantised(call.but(**more), **storage)
    if kind.startswith("paged") and batch:
        how = dict(
            page_size=draw(st.one_of(st.integers(1, 20), st.sampled_from([64, 300]))),
            cache_layout=draw(st.sampled_from(["hnd", "nhd", "hnd"])),
            stale=draw(st.sampled_from([-1, 2**31 - 1])),
        )
        call = paged(call, **how) if kind == "paged" else paged_varlen(call, **how)
    if "packed" not in kind and draw(st.booleans()):
        call = heads_first(call)
    return strided(draw, call) if draw(st.integers(0, 2)) == 0 else call


def heads_first(call: Call) -> Call:
    """The same call in layout bhsd, which page pools do not follow."""
    if call.function == "paged_attention":
        return call.of(q=np.ascontiguousarray(call.arrays["q"].swapaxes(1, 2))).but(layout="bhsd")
    arrays = {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in call.arrays.items()}
    options = {
        name: x.swapaxes(1, 2) if name in ("k_scale", "v_scale") and np.ndim(x) == 3 else x
        for name, x in call.options.items()
    }
    return Call(call.function, arrays, {**options, "layout": "bhsd"})


def strided(draw: st.DrawFn, call: Call) -> Call:
    """The same call on arrays with other strides."""
    arrays = {name: moved(draw, x) if x.ndim > 1 else x for name, x in call.arrays.items()}
    options = {
        name: moved(draw, x) if isinstance(x, np.ndarray) and x.ndim > 1 else x
        for name, x in call.options.items()
    }
    return Call(call.function, arrays, options)


def moved(draw: st.DrawFn, array: np.ndarray) -> np.ndarray:
    """An equal array with other strides."""
    order = draw(st.permutations(range(array.ndim)))
    array = np.ascontiguousarray(array.transpose(order)).transpose(np.argsort(order))
    axis = draw(st.integers(-1, array.ndim - 1))
    if axis < 0 or not array.size:
        return array
    flip = (slice(None),) * axis + (slice(None, None, -1),)
    return np.repeat(array, 2, axis=axis)[(slice(None),) * axis + (slice(None, None, 2),)][flip].copy(
        order="K"
    )[flip]


@st.composite
def batches(draw: st.DrawFn) -> Call:
    """A dense call of one family with lengths, whose rows are aligned by explicit offsets."""
    spec, storage = draw(specs())
    batch = draw(st.integers(1, 3))
    names = draw(some_of(TERMS, 4))
    lengths = st.integers(0, 20) if {"score_mod", "mask_mod"} & {*names} else LENGTHS
    seqlen_q, seqlen_kv = draw(lengths), draw(lengths)
    lens = np.array(draw(st.lists(st.integers(0, seqlen_kv), min_size=batch, max_size=batch)))
    options = draw(windows_and_offsets(names, batch))
    offset = options.get("q_offset", 0 if options["causal"] == "top_left" else lens - seqlen_q)
    options["q_offset"] = np.broadcast_to(np.asarray(offset, np.int64), (batch,)).copy()
    options["causal"] = bool(options["causal"])
    n = Sizes(batch, spec["num_heads"], seqlen_q, seqlen_kv)
    options |= draw(terms(names, n, fewest_keys=int(lens.min()), by_batch=False))
    family = draw(st.sampled_from(["prefill", "decode"]))
    call = dense(
        batch=batch, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, seq_lens=lens, family=family, **spec, **options
    )
    return quantised(call, **storage)


def drawn(call: Call) -> set[str]:
    """Names of everything that a call exercises: its keywords, and in which form they come."""
    options = {
        name: value
        for name, value in call.options.items()
        if value is not None and not (isinstance(value, (bool, int, float)) and not value and name != "scale")
    }
    k = call.arrays.get("k", call.arrays.get("k_cache"))
    names = {*options, *call.arrays, call.function, f"q of {call.arrays['q'].dtype.name}"}
    names.add(f"stored {stored_name(k, options.get('kv_dtype'))}")
    for name, value in options.items():
        if isinstance(value, (str, np.ndarray)) or np.ndim(value) == 0:
            form = value if isinstance(value, str) else f"{np.ndim(value)} axes"
            if not isinstance(value, UserFunction):
                names.add(f"{name} {form}")
    names |= {"pages of packed queries"} if "cu_seqlens_q" in call.options else set()
    names |= {"lengths of a dense cache"} if "seq_lens" in call.options else set()
    return names
