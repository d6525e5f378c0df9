"""The backends side by side: ``pytest benchmarks --benchmark-group-by=param:workload``."""

from __future__ import annotations

import numpy as np
import pytest
from workloads import Workload

import pyflash

BACKENDS = {"numpy": {"backend": "numpy"}} | {f"c-{isa}": {"isa": isa} for isa in pyflash.available_isas()}

WORKLOADS = [
    Workload("prefill", 1, 4, 4, 256, 256, 64, causal=True),
    Workload("chunk", 1, 8, 2, 64, 1024, 64, causal=True),
    Workload("decode", 4, 8, 2, 1, 1024, 64),
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
@pytest.mark.parametrize("backend", list(BACKENDS))
def test_attention(benchmark, backend: str, workload: Workload) -> None:
    q, k, v = workload.arrays()
    options = {"causal": workload.causal, "layout": "bhsd"}
    exact = pyflash.naive_attention(q, k, v, **options)
    out = benchmark(pyflash.flash_attention, q, k, v, **options, **BACKENDS[backend])
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-5)
