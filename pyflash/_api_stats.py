"""The public function `attention_stats`: what attention looked at, in a second pass over queries and keys."""

from __future__ import annotations

from typing import Any

from . import _args_stats, _backends
from ._args import Caller
from ._args_options import DEFAULTS
from ._args_stats import OPTIONS, WANT, AttentionStats
from ._description import Array
from ._options import attention_options

__all__ = ["AttentionStats", "attention_stats"]


@attention_options("", without=tuple(DEFAULTS.keys() - set(OPTIONS)))
def attention_stats(
    q: Array,
    k: Array,
    lse: Array,
    *,
    want: tuple[str, ...] = WANT,
    top_k: int = 8,
    rows: Array | None = None,
    last_queries: int | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    block_table: Array | None = None,
    seq_lens: Array | None = None,
    k_scale: float | Array | None = None,
    layout: str = "bshd",
    cache_layout: str = "nhd",
    backend: str | None = None,
    **options: Any,
) -> AttentionStats:
    """Say what the probabilities of attention are like, without the matrix of them.

    A second pass over queries and keys, after an attention call that returned its log-sum-exp: with
    that known, each probability ``p = exp(s - lse)`` is known by itself, and a pass tile by tile can
    add them up per row and per key. Memory is O(rows + keys); the fused kernels pay nothing for it.

    Parameters
    ----------
    q, k : ndarray
        As they were given to the attention call: `flash_attention`, or with `cu_seqlens_kv`
        `flash_attention_varlen`, or with `block_table` `paged_attention` (k is the page pool).
    lse : float32 or float64 ndarray
        The log-sum-exp that the call returned. With ``lse_includes_sinks=True`` the probabilities of
        a row add up to less than 1, without it to 1.
    want : tuple of str, default all
        Out of "max_logit", "entropy", "key_mass", "top_k" and "rows"; "rows" needs `rows`, and by
        default counts only where they are given.
    top_k : int, default 8
        How many of each row's largest probabilities "top_k" gives.
    rows : (num_rows,) int32 or int64 ndarray, optional
        Rows, counted inside each sequence, of which "rows" gives all probabilities. A sequence that
        has no such row gets 0.
    last_queries : int, optional
        "key_mass" counts only so many rows at the end of each sequence. Default: all of them.
    cu_seqlens_q, cu_seqlens_kv, block_table, seq_lens, k_scale, layout, cache_layout
        As the attention call got them.
    {parameters}

    Returns
    -------
    AttentionStats
        A named tuple of arrays, float32 (float64 beside a float64 q), None for what is not wanted:

        max_logit, entropy : shaped like `lse`
            Largest final score, -inf without a visible key; ``-sum(p ln p)`` in nats, 0 without one.
        key_mass : (batch, num_heads, num_keys)
            Sum of the probabilities of each key over the rows.
        top_k_values, top_k_indices : (..., top_k), shaped like `lse` before that
            Largest probabilities of each row, falling, and their keys (int64); of equal ones the first
            key comes first. Behind the last visible key 0 and -1.
        rows : (batch, num_heads, num_rows, num_keys)
            All probabilities of the chosen rows.

        ``num_keys`` is the length of dense keys, the longest valid length of packed and paged ones; what
        lies past a sequence's own length is 0. batch and num_heads are missing where `q` lacks them.

    Raises
    ------
    {raises}

    Notes
    -----
    Every option that says what a score is or which keys a row sees has to be what the attention call
    got. Keys that a row may not see do not reach its results, even when they hold NaN.

    The mass of each key over all rows is what H2O keeps the largest of in a cache, over a window of the
    last rows (``last_queries``) what SnapKV does; the largest logit is what QK-clip watches, and a low
    entropy is the sign of a training run about to diverge.

    References
    ----------
    Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
    2023, section 4. Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024,
    section 4. Zhai et al., "Stabilizing Transformer Training by Preventing Attention Entropy Collapse",
    2023, section 3. Kimi Team, "Kimi K2: Open Agentic Intelligence", 2025, section 2.1 (QK-Clip).

    Examples
    --------
    >>> import numpy as np, pyflash
    >>> q = np.ones((1, 4, 2, 8), np.float32)
    >>> out, lse = pyflash.flash_attention(q, q, q, causal=True, return_lse=True)
    >>> stats = pyflash.attention_stats(q, q, lse, causal=True, want=("key_mass", "entropy"))
    >>> print(stats.key_mass[0, 0].round(2))  # 1 + 1/2 + 1/3 + 1/4, and so on
    [2.08 1.08 0.58 0.25]
    """
    chosen = _backends.resolve(backend, q)
    call = _args_stats.stats(
        q,
        k,
        lse,
        backend=chosen.name,
        want=want,
        top_k=top_k,
        rows=rows,
        last_queries=last_queries,
        index={
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_kv": cu_seqlens_kv,
            "block_table": block_table,
            "seq_lens": seq_lens,
        },
        layouts={"layout": layout, "cache_layout": cache_layout},
        options={**options, "k_scale": k_scale},
    )
    chosen.attention_stats(call.args)
    return call.result(Caller.of(q))
