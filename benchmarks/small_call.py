"""What one tiny call costs from Python: (1, 1, 1, 64) queries on 16 keys, float32, one thread.

    python benchmarks/small_call.py [--batches 200] [--calls 500]

Batches of calls of all kinds take turns; each row is the fastest batch and the median, in microseconds
per call. torch's scaled_dot_product_attention is the yardstick where it is installed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import pyflash
from pyflash import _call_table
from pyflash._c import ffi, lib


def checked(function: Callable[[], object]) -> Callable[[], object]:
    """Return a call whose shapes have never been seen."""

    def call() -> object:
        _call_table.clear()
        return function()

    return call


def in_c(q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray) -> Callable[[], object]:
    """Return the call of the compiled function alone, with its structure made before."""
    names = [ffi.string(lib.pf_isa_name(i)).decode() for i in range(lib.pf_num_isas())]

    def tensor(x: np.ndarray) -> tuple[object, ...]:
        return (ffi.cast("void *", x.ctypes.data), *(s // x.itemsize for s in x.strides), 1)

    call = ffi.new(
        "pf_attention_call *",
        {
            "q": tensor(q), "k": tensor(k), "v": tensor(v), "out": tensor(out),
            "batch": 1, "seqlen_q": 1, "seqlen_kv": 16, "num_heads": 1, "num_kv_heads": 1,
            "head_dim": 64, "head_dim_v": 64, "page_size": 16, "window_left": -1, "window_right": -1,
            "scale": 0.125, "isa": names.index(pyflash.available_isas()[-1]), "num_threads": 1,
        },
    )  # fmt: skip
    return lambda: lib.pf_attention(call)


def kinds() -> dict[str, Callable[[], object]]:
    """Return what is measured, checked to agree."""
    random = np.random.default_rng(0)
    q = random.standard_normal((1, 1, 1, 64), np.float32)
    k, v = (random.standard_normal((1, 16, 1, 64), np.float32) for _ in range(2))
    out, into = np.empty_like(q), np.empty_like(q)
    attention = pyflash.flash_attention
    found = {
        "pyflash, out=": lambda: attention(q, k, v, out=out),
        "pyflash": lambda: attention(q, k, v),
        "pyflash, checked anew": checked(lambda: attention(q, k, v, out=out)),
        "C alone, through cffi": in_c(q, k, v, into),
    }
    found["C alone, through cffi"]()
    np.testing.assert_array_equal(into, attention(q, k, v))
    try:
        import torch
    except ImportError:
        return found
    torch.set_num_threads(1)
    tensors = [torch.from_numpy(x).transpose(1, 2).contiguous() for x in (q, k, v)]
    theirs = torch.nn.functional.scaled_dot_product_attention
    np.testing.assert_allclose(theirs(*tensors).transpose(1, 2).numpy(), into, atol=1e-6)

    def torch_call() -> object:
        return theirs(*tensors)

    torch.set_grad_enabled(False)
    return {"torch, no_grad": torch_call, **found}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=200)
    parser.add_argument("--calls", type=int, default=500)
    options = parser.parse_args()
    measured = kinds()
    times: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(options.batches):
        for name, call in measured.items():
            start = time.perf_counter()
            for _ in range(options.calls):
                call()
            times[name].append((time.perf_counter() - start) / options.calls * 1e6)
    yardstick = times[next(iter(times))]
    print(f"{'us per call':24}{'minimum':>9}{'median':>9}{'of the first (minimum)':>24}")
    for name, x in times.items():
        print(f"{name:24}{min(x):9.2f}{statistics.median(x):9.2f}{min(x) / min(yardstick):24.2f}")


if __name__ == "__main__":
    main()
