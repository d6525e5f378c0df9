"""The smallest use: one call for a prompt, one for the token after it, and the proof that both are exact.

    python examples/minimal.py

Eight query heads share two key/value heads, and rows see only keys before them. The naive computation holds
8 * 1024 * 1024 scores, 32 MiB; the fused one a tile of them at a time.
"""

from __future__ import annotations

import numpy as np

import pyflash


def main() -> None:
    rng = np.random.default_rng(0)
    # (batch, seqlen, heads, head_dim)
    q = rng.standard_normal((1, 1024, 8, 64), dtype=np.float32)
    k = rng.standard_normal((1, 1024, 2, 64), dtype=np.float32)
    v = rng.standard_normal((1, 1024, 2, 64), dtype=np.float32)

    out = pyflash.flash_attention(q, k, v, causal=True)
    naive = pyflash.naive_attention(q, k, v, causal=True)
    print(f"prompt of 1024: {out.shape}, largest difference from naive {abs(out - naive).max():.1e}")

    # The last query alone, as when a token is generated: another kernel, the same result.
    last = pyflash.flash_attention(q[:, -1:], k, v, causal=True)
    print(f"one token: {last.shape}, largest difference from naive {abs(last - naive[:, -1:]).max():.1e}")

    for name, plan in (
        ("prompt", pyflash.explain(q, k, v, causal=True)),
        ("token", pyflash.explain(q[:, -1:], k, v, causal=True)),
    ):
        print(
            f"{name}: {plan.family} on {plan.isa}, {plan.num_threads} threads, {plan.workspace_bytes} bytes"
        )


if __name__ == "__main__":
    main()
