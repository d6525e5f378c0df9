"""What the machine can do: operations and bytes read per second, on n threads; fractions are of this.

The loops are in the extension, compiled for each instruction set with the flags of its kernels
(``c_src/kernels/limits.h``). Those of a GPU are measured in its process, see calls/cuda.py.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from .. import _c
from ._workloads import Workload

#: Limits before and after a run agree within this, or the run does not count.
AGREEMENT = 0.05
#: Far beyond any cache that a virtual machine gets to see for itself.
BUFFER_BYTES = {"default": 2**28, "amx": 2**30, "avx512": 2**30}
_SECONDS = 0.1
#: Limits in bytes a second; all others are operations a second.
BYTES = ("read", "copy")


class Limits:
    """Measures the machine in one instruction set, on the first of some CPUs."""

    def __init__(self, isa: str, cpus: list[int], scale: float = 1.0) -> None:
        """Touch the buffer; `scale` shortens everything, for tests."""
        self._isa, self._cpus, self._scale = isa, cpus, scale
        self._kinds = [kind for kind in ("float32", "float64", "amx") if _c.limit_operations(isa, kind, 1)]
        count = int(BUFFER_BYTES.get(isa, BUFFER_BYTES["default"]) * scale) // 4
        self._buffer = np.ones(max(count, 2**16), np.float32)

    def measure(self, num_threads: int) -> dict[str, float]:
        """Return operations per second by type, a multiply-add being two, and bytes read per second."""
        found = {kind: self._operations(kind, num_threads) for kind in self._kinds}
        return {**found, "read": self._read(num_threads)}

    def _operations(self, kind: str, num_threads: int) -> float:
        rounds = max(1, int(10_000 * self._scale))
        begin = time.perf_counter()
        _c.limit_operations(self._isa, kind, rounds)
        took = time.perf_counter() - begin
        rounds = max(rounds, int(rounds * _SECONDS * self._scale / took))
        return self._rate(
            lambda thread: _c.limit_operations(self._isa, kind, rounds), num_threads, repeats=10
        )

    def _read(self, num_threads: int) -> float:
        parts = np.array_split(self._buffer, num_threads)
        return self._rate(lambda thread: _c.limit_read(self._isa, parts[thread]), num_threads, repeats=20)

    def _rate(self, work: Callable[[int], float], num_threads: int, repeats: int) -> float:
        """Return the best rate of a few rounds: a limit is what nothing disturbed.

        Every thread times its own work, so that a late start does not count; all start together.
        """
        barrier = threading.Barrier(num_threads)

        def timed(thread: int) -> float:
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {self._cpus[thread]})
            barrier.wait()
            start = time.perf_counter()
            done = work(thread)
            return done / (time.perf_counter() - start)

        with ThreadPoolExecutor(num_threads) as pool:
            return max(sum(pool.map(timed, range(num_threads))) for _ in range(repeats))


def agree(before: dict[str, float], after: dict[str, float]) -> bool:
    """Return whether two measurements of the limits tell the same machine."""
    return all(abs(after[name] / before[name] - 1) <= AGREEMENT for name in before)


def described(limits: dict[str, float]) -> str:
    """Return the limits in words."""
    units = {name: "B/s" if name in BYTES else "FLOP/s" for name in limits}
    return ", ".join(f"{name} {_scaled(value, units[name])}" for name, value in limits.items())


def _scaled(value: float, unit: str) -> str:
    return f"{value / 1e12:.2f} T{unit}" if value >= 1e12 else f"{value / 1e9:.1f} G{unit}"


def fraction(w: Workload, seconds: float, limits: dict[str, float], on_device: bool = False) -> float | None:
    """Return the part of the machine's limit that a time reaches: what binds is the longer of both.

    Operations over their peak, or one pass over keys and values. On a GPU the peak is that of bfloat16
    products, whatever the type. None without limits of that kind.
    """
    if on_device:
        peak, read = limits.get("matmul"), limits.get("copy")
    else:
        peak, read = limits.get("float64" if w.dtype == "float64" else "float32"), limits.get("read")
        if w.dtype == "bfloat16":
            peak = limits.get("amx", peak)
    return max(w.flops / peak, w.kv_bytes / read) / seconds if peak and read else None
