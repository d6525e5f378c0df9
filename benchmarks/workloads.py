"""The calls that are timed, by name, and what each of them has to do at least."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Workload(NamedTuple):
    """One attention call: shapes as in ``(batch, heads, seqlen, head_dim)``."""

    name: str
    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_kv: int
    head_dim: int
    causal: bool = False
    dtype: str = "float32"

    @property
    def flops(self) -> float:
        """Operations of both products, half of them when causal."""
        pairs = self.seqlen_q * self.seqlen_kv / (2 if self.causal else 1)
        return 4.0 * self.batch * self.num_heads * pairs * self.head_dim

    @property
    def kv_bytes(self) -> float:
        """Bytes of keys and values, each counted once."""
        itemsize = 4 if self.dtype == "float32" else 8 if self.dtype == "float64" else 2
        return 2.0 * self.batch * self.num_kv_heads * self.seqlen_kv * self.head_dim * itemsize

    def arrays(self, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return q, k, v in layout bhsd."""
        rng = np.random.default_rng(seed)
        if self.dtype == "bfloat16":
            import ml_dtypes

            dtype = np.dtype(ml_dtypes.bfloat16)
        else:
            dtype = np.dtype(self.dtype)
        shape_q = (self.batch, self.num_heads, self.seqlen_q, self.head_dim)
        shape_kv = (self.batch, self.num_kv_heads, self.seqlen_kv, self.head_dim)
        return tuple(rng.standard_normal(s, np.float32).astype(dtype) for s in (shape_q, shape_kv, shape_kv))


def _prefill(b: int, h: int, n: int, d: int, dtype: str = "float32") -> list[Workload]:
    suffix = "" if dtype == "float32" else f"-{dtype}"
    return [
        Workload(
            f"prefill-{b}x{h}x{n}x{d}{'-causal' if causal else ''}{suffix}", b, h, h, n, n, d, causal, dtype
        )
        for causal in (False, True)
    ]


def _decode(b: int, n: int, dtype: str = "float32") -> Workload:
    suffix = "" if dtype == "float32" else f"-{dtype}"
    return Workload(f"decode-{b}x{n}-32/8x128{suffix}", b, 32, 8, 1, n, 128, False, dtype)


WORKLOADS = [
    *_prefill(1, 12, 128, 64),
    *_prefill(8, 12, 128, 32),
    *_prefill(1, 8, 1024, 64),
    *_prefill(1, 8, 4096, 64),
    *_prefill(1, 8, 4096, 128),
    *_prefill(1, 8, 4096, 128, "bfloat16"),
    *_prefill(1, 8, 4096, 128, "float16"),
    *(
        _decode(b, n, dtype)
        for dtype in ("float32", "bfloat16", "float16")
        for b, n in ((1, 32768), (8, 4096))
    ),
]
