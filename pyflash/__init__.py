"""Exact FlashAttention for NumPy: tiled, paged, split over keys, in C on any CPU.

>>> import numpy as np, pyflash
>>> q = np.random.default_rng(0).standard_normal((1, 128, 8, 64), np.float32)
>>> out = pyflash.flash_attention(q, q, q, causal=True)
"""

from ._api import (
    append_kv,
    explain,
    flash_attention,
    flash_attention_varlen,
    flash_decoding,
    merge_states,
    naive_attention,
    paged_attention,
)
from ._backends import available_backends, use_backend
from ._cache import PagedKVCache
from ._description import Explanation
from ._errors import BackendUnavailable, InvalidArgument, OutOfPages, PyflashError, UnsupportedError
from ._runtime import available_isas, show_runtime
from ._trace import trace
from ._version import __version__

__all__ = [
    "BackendUnavailable",
    "Explanation",
    "InvalidArgument",
    "OutOfPages",
    "PagedKVCache",
    "PyflashError",
    "UnsupportedError",
    "__version__",
    "append_kv",
    "available_backends",
    "available_isas",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "flash_decoding",
    "merge_states",
    "naive_attention",
    "paged_attention",
    "show_runtime",
    "trace",
    "use_backend",
]
