"""Exact FlashAttention for NumPy: tiled, paged, split over keys, in C on any CPU.

>>> import numpy as np, pyflash
>>> q = np.random.default_rng(0).standard_normal((1, 128, 8, 64), np.float32)
>>> out = pyflash.flash_attention(q, q, q, causal=True)
"""

from . import spans
from ._api import (
    explain,
    flash_attention,
    flash_attention_varlen,
    flash_decoding,
    naive_attention,
    paged_attention,
)
from ._api_cache import append_kv, merge_states
from ._api_stats import AttentionStats, attention_stats
from ._backends import available_backends, use_backend
from ._cache import PagedKVCache
from ._cascade import cascade_attention
from ._description import Explanation
from ._errors import BackendUnavailable, InvalidArgument, OutOfPages, PyflashError, UnsupportedError
from ._runtime import available_isas, show_runtime
from ._trace import trace
from ._version import __version__

__all__ = [
    "AttentionStats",
    "BackendUnavailable",
    "Explanation",
    "InvalidArgument",
    "OutOfPages",
    "PagedKVCache",
    "PyflashError",
    "UnsupportedError",
    "__version__",
    "append_kv",
    "attention_stats",
    "available_backends",
    "available_isas",
    "cascade_attention",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "flash_decoding",
    "merge_states",
    "naive_attention",
    "paged_attention",
    "show_runtime",
    "spans",
    "trace",
    "use_backend",
]
