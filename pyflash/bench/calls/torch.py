"""PyTorch on the host: scaled_dot_product_attention on (batch, heads, seqlen, head_dim), without gradients.

The heads of a group are packed as queries of their key/value head, which is faster than `enable_gqa`.
"""

from __future__ import annotations

from typing import Any

import torch

from .._workloads import Array, Workload
from . import Call, Unsupported

VERSION = torch.__version__


def prepare(w: Workload, arrays: dict[str, Array], threads: int, option: str) -> Call:
    """Return the call; torch allocates the result each time."""
    if w.kv_dtype:
        raise Unsupported("keys and values have the type of the queries")
    torch.set_num_threads(threads)
    tensors = [torch.from_numpy(arrays[name]) for name in ("q", "k", "v")]
    if w.dtype == "bfloat16":
        tensors = [x.view(torch.bfloat16) for x in tensors]
    q, k, v = tensors
    if w.num_heads != w.num_kv_heads:
        q = q.reshape(w.batch, w.num_kv_heads, -1, w.head_dim)
    attention = torch.nn.functional.scaled_dot_product_attention
    last: list[Any] = [None]

    def run() -> None:
        with torch.no_grad():
            last[0] = attention(q, k, v, is_causal=w.causal)

    return Call(run, lambda: last[0].double().numpy(), allocates_output=True)
