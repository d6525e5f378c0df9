"""Measure what the machine can do: fused multiply-adds and bytes read per second, on n threads."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

FLAGS = {
    "scalar": ["-DWIDTH=16"],
    "avx2": ["-DWIDTH=32", "-mavx2", "-mfma"],
    "avx512": ["-DWIDTH=64", "-mavx512f", "-mavx512vl", "-mprefer-vector-width=512"],
}


class Limits:
    """The compiled probes of one instruction set; ctypes releases the lock while they run."""

    def __init__(self, isa: str, cpus: list[int]) -> None:
        self._cpus = cpus
        folder = tempfile.mkdtemp()
        library = Path(folder, "limits.so")
        source = Path(__file__).with_name("limits.c")
        command = [os.environ.get("CC", "cc"), "-O3", "-ffp-contract=fast", "-fPIC", "-shared", *FLAGS[isa]]
        subprocess.run([*command, str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.peak_flops.restype = ctypes.c_double
        self._library.peak_flops.argtypes = [ctypes.c_long, ctypes.POINTER(ctypes.c_float)]
        self._library.read_bytes.restype = ctypes.c_float
        self._library.read_bytes.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._buffer = np.ones(2**26, np.float32)  # 256 MB, far beyond any cache here

    def flops(self, num_threads: int, rounds: int = 20_000_000) -> float:
        """Return float32 operations per second, a fused multiply-add being two."""

        def one(thread: int) -> float:
            os.sched_setaffinity(0, {self._cpus[thread]})
            return self._library.peak_flops(rounds, ctypes.byref(ctypes.c_float()))

        return self._rate(one, num_threads, repeats=3)

    def read(self, num_threads: int) -> float:
        """Return bytes per second read from memory."""
        part = self._buffer.size // num_threads

        def one(thread: int) -> float:
            os.sched_setaffinity(0, {self._cpus[thread]})
            self._library.read_bytes(self._buffer.ctypes.data + 4 * part * thread, part)
            return 4.0 * part

        return self._rate(one, num_threads, repeats=5)

    @staticmethod
    def _rate(work, num_threads: int, repeats: int) -> float:
        """Return the best rate of a few rounds: a limit is what nothing disturbed.

        Every thread times its own work, so that a late start does not count; all start together.
        """
        barrier = threading.Barrier(num_threads)

        def timed(thread: int) -> float:
            barrier.wait()
            start = time.perf_counter()
            done = work(thread)
            return done / (time.perf_counter() - start)

        with ThreadPoolExecutor(num_threads) as pool:
            return max(sum(pool.map(timed, range(num_threads))) for _ in range(repeats))
