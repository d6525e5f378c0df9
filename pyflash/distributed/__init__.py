"""Attention of sequences that are spread over ranks: each rank holds some of the tokens.

`ring_attention` lets keys and values go round, `head_parallel_attention` exchanges tokens for heads, and
`context_parallel_decode` decodes over a cache that is spread. `shard`, `unshard` and `positions` say who
holds what. Messages are MPI's, through mpi4py (extra ``mpi``), those of a group of torch.distributed, or
those of any object with the methods of `Communicator`.
"""

from ._agreement import RankFailed
from ._communicator import Communicator, communicator
from ._decode import context_parallel_decode
from ._heads import head_parallel_attention
from ._ring import ring_attention
from ._shards import positions, shard, unshard

__all__ = [
    "Communicator",
    "RankFailed",
    "communicator",
    "context_parallel_decode",
    "head_parallel_attention",
    "positions",
    "ring_attention",
    "shard",
    "unshard",
]
