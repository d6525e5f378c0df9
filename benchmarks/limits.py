"""Measure what the machine can do: operations and bytes read per second, on n threads.

python benchmarks/limits.py ISA [THREADS ...]
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

_AVX512 = ["-DWIDTH=64", "-mavx512f", "-mavx512vl", "-mprefer-vector-width=512"]
FLAGS = {
    "scalar": ["-DWIDTH=16"],
    "neon": ["-DWIDTH=16"],
    "avx2": ["-DWIDTH=32", "-mavx2", "-mfma"],
    "avx512": _AVX512,
    "amx": [*_AVX512, "-mamx-tile", "-mamx-bf16"],
}
#: Limits before and after a run agree within this, or the run does not count.
AGREEMENT = 0.05
#: Far beyond any cache that a virtual machine gets to see for itself.
BUFFER_BYTES = {"default": 2**28, "amx": 2**30, "avx512": 2**30}
_SECONDS = 0.1


def _compiled(isa: str, kind: str) -> ctypes.CDLL:
    """Return the probes of an instruction set and a float type."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "limits.so")
        source = Path(__file__).with_name("limits.c")
        command = [
            os.environ.get("CC", "cc"),
            "-O3",
            "-ffp-contract=fast",
            "-fPIC",
            "-shared",
            f"-DTYPE={kind}",
        ]
        subprocess.run([*command, *FLAGS[isa], str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))


def _probe(function: Callable[..., float], kind: type) -> Callable[[int], float]:
    """Return a probe of C as a function from rounds to operations done."""
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_long, ctypes.POINTER(kind)]
    return lambda rounds: function(rounds, ctypes.byref(kind()))


class Limits:
    """The compiled probes of one instruction set; ctypes releases the lock while they run."""

    def __init__(self, isa: str, cpus: list[int]) -> None:
        self._cpus = cpus
        single, double = (_compiled(isa, kind) for kind in ("float", "double"))
        self._read_bytes = single.read_bytes
        self._read_bytes.restype = ctypes.c_float
        self._read_bytes.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._peaks = {
            "float32": _probe(single.peak_fma, ctypes.c_float),
            "float64": _probe(double.peak_fma, ctypes.c_double),
        }
        if isa == "amx":
            if single.amx_request():
                raise OSError("the kernel grants no AMX tiles")
            self._peaks["amx"] = _probe(single.peak_amx, ctypes.c_float)
        self._buffer = np.ones(BUFFER_BYTES.get(isa, BUFFER_BYTES["default"]) // 4, np.float32)

    def measure(self, num_threads: int) -> dict[str, float]:
        """Return operations per second by type, a multiply-add being two, and bytes read per second."""
        found = {name: self._flops(probe, num_threads) for name, probe in self._peaks.items()}
        return {**found, "read": self._read(num_threads)}

    def _flops(self, probe: Callable[[int], float], num_threads: int) -> float:
        rounds = 100_000
        begin = time.perf_counter()
        probe(rounds)
        rounds = int(rounds * _SECONDS / (time.perf_counter() - begin))
        return self._rate(lambda thread: probe(rounds), num_threads, repeats=10)

    def _read(self, num_threads: int) -> float:
        part = self._buffer.size // num_threads

        def one(thread: int) -> float:
            self._read_bytes(self._buffer.ctypes.data + 4 * part * thread, part)
            return 4.0 * part

        return self._rate(one, num_threads, repeats=20)

    def _rate(self, work: Callable[[int], float], num_threads: int, repeats: int) -> float:
        """Return the best rate of a few rounds: a limit is what nothing disturbed.

        Every thread times its own work, so that a late start does not count; all start together.
        """
        barrier = threading.Barrier(num_threads)

        def timed(thread: int) -> float:
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
    words = [f"{name} {value / 1e9:.1f} GFLOP/s" for name, value in limits.items() if name != "read"]
    return ", ".join([*words, f"read {limits['read'] / 1e9:.1f} GB/s"])


if __name__ == "__main__":
    all_cpus = sorted(os.sched_getaffinity(0))
    probes = Limits(sys.argv[1], all_cpus)
    for count in [int(x) for x in sys.argv[2:]] or [1, len(all_cpus)]:
        print(f"{count} threads: {described(probes.measure(count))}")
