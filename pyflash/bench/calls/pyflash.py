"""pyflash on the host: the public functions, as a user calls them.

The option is the backend, or "naive" for the textbook's computation with the whole matrix of scores. The
environment sets threads and instruction set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import pyflash

from .._workloads import Array, Workload
from . import Call, Unsupported

VERSION = pyflash.__version__
PAGE_SIZE = 16
#: The most operations and bytes of keys and values that end in time: of calls sized for a GPU, and in NumPy.
MOST_ON_HOST = {"c": (3e11, 2e9), "numpy": (5e9, 1e8), "naive": (5e10, 1e9)}
#: The most elements of a matrix of scores, which takes several times 8 bytes of each.
MOST_SCORES = 2**26


class Bound(NamedTuple):
    """A call of pyflash with its arrays, wherever they lie."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    explained: Any
    heads_axis: int  # of the output

    def __call__(self, **more: Any) -> Any:
        """Compute once."""
        return self.function(*self.arguments, **self.options, **more)


def bound(w: Workload, arrays: dict[str, Array], place: Callable[[Array, str], Any], **more: Any) -> Bound:
    """Return the call of a workload; `place` makes of bits and the name of their type what it is given."""
    scales = {name: arrays[name] for name in ("k_scale", "v_scale") if name in arrays}
    options: dict[str, Any] = {"kv_dtype": "int4"} if w.kv_dtype == "int4" else {}
    q, k, v = (arrays[name] for name in "qkv")
    if w.variant == "paged":
        order = np.random.default_rng(1).permutation(w.batch * (w.seqlen_kv // PAGE_SIZE))
        k, v = _in_pages(k, order), _in_pages(v, order)
        options |= {name: place(_in_pages(scale, order), "float32") for name, scale in scales.items()}
        table = place(order.astype(np.int32).reshape(w.batch, -1), "int32")
        lengths = place(np.full(w.batch, w.seqlen_kv, np.int32), "int32")
        q = np.ascontiguousarray(np.moveaxis(q, 1, 2))
        q, k, v = inputs = (place(q, w.dtype), place(k, w.stored), place(v, w.stored))
        explained = pyflash.explain(q, k, v, block_table=table, seq_lens=lengths, **options, **more)
        return Bound(pyflash.paged_attention, (*inputs, table, lengths), options | more, explained, 2)
    options |= {name: place(scale, "float32") for name, scale in scales.items()}
    options |= {"layout": "bhsd", "causal": w.causal}
    q, k, v = inputs = (place(q, w.dtype), place(k, w.stored), place(v, w.stored))
    explained = pyflash.explain(q, k, v, **options, **more)
    return Bound(pyflash.flash_attention, inputs, options | more, explained, 1)


def notes_of(explained: Any, *names: str) -> dict[str, Any]:
    """Return what `pyflash.explain` says; an older build may say less."""
    found = {name: getattr(explained, name, None) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def prepare(w: Workload, arrays: dict[str, Array], threads: int, option: str) -> Call:
    """Return the call; the result is allocated once unless the workload says otherwise."""
    _check_size(w, option)
    if option == "naive":
        return _naive(w, arrays)
    call = bound(w, arrays, _typed, backend=option)
    q = call.arguments[0]
    out = np.full(q.shape, 0, q.dtype)  # its memory is there before the call
    notes = notes_of(call.explained, "isa", "family", "workspace_bytes")
    if w.variant == "no-out":
        last = [out]

        def run() -> Array:
            last[0] = call()
            return last[0]

        return Call(run, lambda: last[0], notes, allocates_output=True)
    return Call(lambda: call(out=out), lambda: np.moveaxis(out, call.heads_axis, 1), notes)


def _naive(w: Workload, arrays: dict[str, Array]) -> Call:
    if w.variant:
        raise Unsupported("the textbook's computation is measured on dense keys, with out=")
    q, k, v = (_typed(arrays[name], w.dtype if name == "q" else w.stored) for name in "qkv")
    options: dict[str, Any] = {name: arrays[name] for name in ("k_scale", "v_scale") if name in arrays}
    options |= {"kv_dtype": "int4"} if w.kv_dtype == "int4" else {}
    out = np.full(q.shape, 0, q.dtype)

    def run() -> Any:
        return pyflash.naive_attention(q, k, v, out=out, layout="bhsd", causal=w.causal, **options)

    return Call(run, lambda: out)


def _check_size(w: Workload, option: str) -> None:
    """Refuse what would not end in time, or not fit."""
    flops, kv_bytes = MOST_ON_HOST[option]
    if w.memory:
        flops *= 4  # computed a few times, not for a while
    if (w.device or option != "c") and (w.flops > flops or w.kv_bytes > kv_bytes):
        raise Unsupported("would take too long")
    if option == "naive" and w.num_scores > MOST_SCORES:
        raise Unsupported("the matrix of scores would be too large")


def _typed(x: Array, dtype: str) -> Array:
    if dtype != "bfloat16":
        return x
    import ml_dtypes

    return x.view(ml_dtypes.bfloat16)


def _in_pages(x: Array, order: Array) -> Array:
    """Return keys, values or their scales as pages of (place, head, ...), the pages in some order."""
    x = np.moveaxis(x, 1, 2)
    pages = x.reshape(-1, PAGE_SIZE, *x.shape[2:])
    pool = np.empty_like(pages)
    pool[order] = pages
    return pool
