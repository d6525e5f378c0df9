"""pyflash: the public functions, as a user calls them. The environment sets threads and instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
from workloads import Workload

import pyflash
from calls import Call

VERSION = pyflash.__version__
PAGE_SIZE = 16


def _typed(x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype != "bfloat16":
        return x
    import ml_dtypes

    return x.view(ml_dtypes.bfloat16)


def _in_pages(x: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return keys, values or their scales as pages of (place, head, ...), the pages in some order."""
    x = np.moveaxis(x, 1, 2)
    pages = x.reshape(-1, PAGE_SIZE, *x.shape[2:])
    pool = np.empty_like(pages)
    pool[order] = pages
    return pool


def prepare(w: Workload, arrays: dict[str, np.ndarray], threads: int) -> Call:
    """Return the call; the result is allocated once unless the workload says otherwise."""
    q = _typed(arrays["q"], w.dtype)
    k, v = (_typed(arrays[name], w.stored) for name in ("k", "v"))
    scales = {name: arrays[name] for name in ("k_scale", "v_scale") if name in arrays}
    options: dict[str, Any] = {"kv_dtype": "int4"} if w.kv_dtype == "int4" else {}
    out = np.full(q.shape, 0, q.dtype)  # its memory is there before the call
    if w.variant == "paged":
        order = np.random.default_rng(1).permutation(w.batch * (w.seqlen_kv // PAGE_SIZE))
        table = order.astype(np.int32).reshape(w.batch, -1)
        lengths = np.full(w.batch, w.seqlen_kv, np.int32)
        options |= {name: _in_pages(scale, order) for name, scale in scales.items()}
        k, v = _in_pages(k, order), _in_pages(v, order)
        q, out = (np.ascontiguousarray(np.moveaxis(x, 1, 2)) for x in (q, out))

        def run() -> np.ndarray:
            return pyflash.paged_attention(q, k, v, table, lengths, out=out, **options)

        explained = pyflash.explain(q, k, v, block_table=table, seq_lens=lengths, **options)
        notes = {name: getattr(explained, name) for name in ("isa", "family", "workspace_bytes")}
        return Call(run, lambda: np.moveaxis(out, 2, 1), notes)
    options |= {"layout": "bhsd", "causal": w.causal, **scales}
    notes = {
        name: getattr(pyflash.explain(q, k, v, **options), name)
        for name in ("isa", "family", "workspace_bytes")
    }
    if w.variant == "no-out":
        last = [out]

        def run() -> np.ndarray:
            last[0] = pyflash.flash_attention(q, k, v, **options)
            return last[0]

        return Call(run, lambda: last[0], notes, allocates_output=True)
    return Call(lambda: pyflash.flash_attention(q, k, v, out=out, **options), lambda: out, notes)
