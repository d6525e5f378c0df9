"""JAX: `jax.nn.dot_product_attention`, compiled, on (batch, seqlen, heads, head_dim).

XLA takes as many threads as the process has CPUs, which is how they are bound.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .._workloads import Array, Workload
from . import Call, Unsupported

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_x64", True)

VERSION = jax.__version__


def prepare(w: Workload, arrays: dict[str, Array], threads: int, option: str) -> Call:
    """Return the compiled call; JAX allocates the result each time."""
    if w.kv_dtype:
        raise Unsupported("keys and values have the type of the queries")
    inputs = [np.moveaxis(arrays[name], 1, 2) for name in ("q", "k", "v")]
    if w.dtype == "bfloat16":
        inputs = [x.view(jax.numpy.bfloat16) for x in map(np.ascontiguousarray, inputs)]
    q, k, v = (jax.device_put(np.ascontiguousarray(x)) for x in inputs)
    jitted = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=w.causal))
    try:
        attention = jitted.lower(q, k, v).compile()
    except ValueError as error:
        raise Unsupported(str(error).splitlines()[0]) from error
    last: list[Any] = [None]

    def run() -> None:
        last[0] = attention(q, k, v).block_until_ready()

    return Call(run, lambda: np.moveaxis(np.asarray(last[0]).astype(np.float64), 2, 1), allocates_output=True)
