"""Time the first call after a pause, with default settings, pyflash beside torch in one run.

    python benchmarks/region.py                 pauses of 0, 1, 5, 20 and 100 ms
    python benchmarks/region.py --json results/x.json

A library whose threads have gone to sleep has to wake them, and where they wake is for the scheduler
to choose. Threads must not be bound for this: without OMP_PROC_BIND and OMP_WAIT_POLICY is how people
run. Each call is made after a pause of its own, in turn with the others; figures are percentiles in
microseconds, and "1 thread" is the same call of pyflash without helpers. Calls of torch that come
just before leave helpers behind that spin for a while, as they would in a program that uses both.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import pyflash
from pyflash.bench._results import machine
from pyflash.bench._session import cpus

PERCENTILES = (0, 10, 50, 90, 99, 100)
#: (batch, num_heads, seqlen_q, seqlen_kv, head_dim): short calls, in which a stall shows.
SHAPES = {"prefill": (1, 8, 128, 128, 64), "decode": (1, 8, 1, 2048, 64)}


def calls_of(shape: tuple[int, ...], with_torch: bool) -> dict[str, Callable[[], object]]:
    """Return the calls to compare, whose results agree."""
    batch, num_heads, seqlen_q, seqlen_kv, head_dim = shape
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((batch, num_heads, length, head_dim), np.float32)
        for length in (seqlen_q, seqlen_kv, seqlen_kv)
    )
    out = np.empty_like(q)
    calls: dict[str, Callable[[], object]] = {
        "pyflash": lambda: pyflash.flash_attention(q, k, v, layout="bhsd", out=out),
        "pyflash, 1 thread": lambda: pyflash.flash_attention(q, k, v, layout="bhsd", out=out, num_threads=1),
    }
    if with_torch:
        import torch

        tensors = [torch.from_numpy(x) for x in (q, k, v)]
        calls["torch"] = lambda: torch.nn.functional.scaled_dot_product_attention(*tensors)
        calls["pyflash"]()
        np.testing.assert_allclose(calls["torch"]().numpy(), out, atol=1e-5)
    return calls


def measure(calls: dict[str, Callable[[], object]], pause: float, seconds: float) -> dict[str, list[float]]:
    """Return the percentiles of each call in microseconds."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    order, rng = list(calls), np.random.default_rng(1)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        rng.shuffle(order)
        for name in order:
            if pause:
                time.sleep(pause)
            start = time.perf_counter()
            calls[name]()
            times[name].append(1e6 * (time.perf_counter() - start))
    return {name: [float(x) for x in np.percentile(t, PERCENTILES)] for name, t in times.items()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="for one shape and pause (default 3)")
    parser.add_argument("--pauses", type=float, nargs="+", default=[0, 1, 5, 20, 100], help="milliseconds")
    parser.add_argument("--only", default="", help="shapes with this in their names")
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    settings = {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_"))}
    print(f"{len(cpus())} CPUs; {settings or 'default settings'}")
    rows = []
    for shape in (name for name in SHAPES if arguments.only in name):
        calls = calls_of(SHAPES[shape], not arguments.without_torch)
        for pause in arguments.pauses:
            for name, t in measure(calls, pause / 1000, arguments.seconds).items():
                rows.append({"shape": shape, "pause_ms": pause, "call": name, "microseconds": t})
                figures = "  ".join(f"{x:8.0f}" for x in t)
                print(f"{shape:8}{pause:6g} ms  {name:18}{figures}", flush=True)
    if arguments.json:
        result = {"machine": machine(), "settings": settings, "percentiles": PERCENTILES, "rows": rows}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
