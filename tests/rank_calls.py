"""Small calls on ranks that are threads: arrays, the three functions, and the errors that ranks raise."""

from __future__ import annotations

import numpy as np
import pytest
from threads import Failed, on_ranks

from pyflash.distributed import context_parallel_decode, head_parallel_attention, ring_attention, shard


def arrays(length: int, *, batch: int = 2, dtype: str = "float32"):
    rng = np.random.default_rng(5)
    return [rng.standard_normal((batch, length, heads, 8)).astype(dtype) for heads in (4, 2, 2)]


def errors_of(size, work):
    with pytest.raises(Failed) as caught:
        on_ranks(size, work)
    assert all(caught.value.errors), caught.value
    return caught.value.errors


def ring_with(comm, schedule="zigzag", **options):
    parts = [shard(x, comm.rank, comm.size, schedule=schedule) for x in arrays(24)]
    return ring_attention(*parts, comm=comm, schedule=schedule, **options)


FUNCTIONS = {
    "ring": ring_with,
    "heads": lambda comm, **options: head_parallel_attention(*arrays(8), comm=comm, **options),
    "decode": lambda comm, **options: context_parallel_decode(*arrays(8), comm=comm, **options),
}
