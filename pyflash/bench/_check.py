"""Whether an answer is right: some of its rows against float64, computed the textbook's way."""

from __future__ import annotations

import numpy as np

from ._workloads import Array, Workload, numbers

#: Largest error on rows of float64, relative to their largest element.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 2e-2, "bfloat16": 3e-2}
#: The same where a library quantises keys to its own type, and queries with them.
REQUANTISED = {"int8": 0.1, "int4": 1.0}
CHECKED_ROWS = 8


def checked_rows(w: Workload) -> list[tuple[int, int, int]]:
    """Return (batch, head, query) of the rows that are compared: the corners and some between."""
    rng = np.random.default_rng(1)
    shape = (w.batch, w.num_heads, w.seqlen_q)
    picked = {(0, 0, 0), (w.batch - 1, w.num_heads - 1, w.seqlen_q - 1)}
    for _ in range(CHECKED_ROWS - 2):
        batch, head, query = (int(x) for x in rng.integers(0, shape))
        picked.add((batch, head, query))
    return sorted(picked)


def exact_rows(w: Workload, arrays: dict[str, Array], rows: list[tuple[int, int, int]]) -> Array:
    """Return attention of single rows in float64, the textbook's way."""
    found = []
    for batch, head, query in rows:
        kv_head = head // (w.num_heads // w.num_kv_heads)
        q = numbers(arrays["q"][batch, head, query], w.dtype).astype(np.float64)
        k, v = (
            numbers(
                arrays[name][batch, kv_head],
                w.stored,
                arrays[f"{name}_scale"][batch, kv_head] if f"{name}_scale" in arrays else None,
            ).astype(np.float64)
            for name in ("k", "v")
        )
        visible = query + 1 + w.seqlen_kv - w.seqlen_q if w.causal else w.seqlen_kv
        scores = k[:visible] @ q * w.head_dim**-0.5
        weights = np.exp(scores - scores.max())
        found.append(weights @ v[:visible] / weights.sum())
    return np.array(found)


def largest_error(found: Array, exact: Array) -> float:
    """Return the largest error of some rows, relative to the largest element; NaN where there is one."""
    return float(np.abs(found - exact).max() / np.abs(exact).max())


def tolerance(w: Workload, requantised: bool) -> float:
    """Return the largest error that is not wrong."""
    return REQUANTISED[w.kv_dtype] if requantised else TOLERANCE[w.dtype]
