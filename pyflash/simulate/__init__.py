"""`pyflash simulate`: FlashAttention step by step, as one page for a browser.

The page is made of the files in ``page``, put together by `page`, and of the traces and rings that `payload`
runs. It needs no network, and it computes nothing of attention.
"""

from ._arrays import MAX_HEAD_DIM_V, MAX_KEYS, MAX_QUERIES, Inputs, inputs_of_file, random_inputs
from ._page import page

__all__ = [
    "MAX_HEAD_DIM_V",
    "MAX_KEYS",
    "MAX_QUERIES",
    "Inputs",
    "inputs_of_file",
    "page",
    "random_inputs",
]
