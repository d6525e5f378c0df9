"""How long attention over ranks takes: a model of `ring_attention`, `head_parallel_attention` and decoding.

What is counted (pairs of rows and keys, bytes, merges) is what these functions do, and tests hold the counts
to theirs. Times are counts divided by speeds: of the kernel, of memory, of links. `hardware_of` takes
speeds from measured points; docs/scaling.md compares and draws.

Counts are exact where every rank has the same even number of tokens, and else those of such ranks on average.
"""

from ._counts import head_parallel_bytes, memory_bytes, pairs, tokens_sent
from ._machine import H200, MERGE_PASSES, Hardware, Link, Workload, hardware_of, workload_of
from ._times import (
    Prediction,
    Step,
    alone,
    balanced_seconds,
    best_decode_ranks,
    decode,
    head_parallel,
    hidden_from,
    ring,
    ring_steps,
)

__all__ = [
    "H200",
    "MERGE_PASSES",
    "Hardware",
    "Link",
    "Prediction",
    "Step",
    "Workload",
    "alone",
    "balanced_seconds",
    "best_decode_ranks",
    "decode",
    "hardware_of",
    "head_parallel",
    "head_parallel_bytes",
    "hidden_from",
    "memory_bytes",
    "pairs",
    "ring",
    "ring_steps",
    "tokens_sent",
    "workload_of",
]
