"""Measures, for the demo, how much memory attention holds besides its inputs and its output.

What NumPy allocates is traced. What C allocates is seen from outside only, as the resident memory
of a process: so each measurement of C runs in a process of its own,
``python -m pyflash._demo_memory METHOD N``, which prints one number.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pyflash

from ._description import Array

LENGTHS = (512, 2048, 8192)
HEAD_DIM, PAGE_SIZE, WORKERS = 16, 16, 4
#: Keys per tile in NumPy: larger than by default, for fewer steps in Python, but no split is shorter.
NUMPY_TILE = {1: LENGTHS[0], WORKERS: LENGTHS[0] // WORKERS}
#: Resident memory is counted in pages and by thread, and includes what the runtimes allocate.
RESIDENT_SLACK = 2**20
_CONSTANT, _QUADRATIC = "constant", "quadratic"


def _options(backend: str, num_splits: int = 1) -> dict[str, Any]:
    """Return the tile of NumPy; one thread for C, where each holds its own work space."""
    return {"tile": NUMPY_TILE[num_splits]} if backend == "numpy" else {"num_threads": 1}


def _naive(q: Array, out: Array, backend: str) -> None:
    pyflash.naive_attention(q, q, q, out=out)


def _tiled(q: Array, out: Array, backend: str) -> None:
    pyflash.flash_attention(q, q, q, out=out, backend=backend, **_options(backend))


def _paged(q: Array, out: Array, backend: str) -> None:
    cache, table, seq_lens = _in_pages(q)
    pyflash.paged_attention(q, cache, cache, table, seq_lens, out=out, backend=backend, **_options(backend))


def _flash_decoding(q: Array, out: Array, backend: str) -> None:
    options = _options(backend, WORKERS)
    pyflash.flash_decoding(q, q, q, num_splits=WORKERS, out=out, backend=backend, **options)


_CALLS: dict[str, Callable[[Array, Array, str], None]] = {
    "naive": _naive,
    "tiled": _tiled,
    "paged": _paged,
    "flash-decoding": _flash_decoding,
}


def _in_pages(x: Array) -> tuple[Array, Array, Array]:
    """Return a page pool in the memory of `x`, a table with its pages in reverse, and the length."""
    cache = x.reshape(-1, PAGE_SIZE, 1, HEAD_DIM)
    return cache, np.arange(len(cache))[np.newaxis, ::-1].copy(), np.array([x.shape[1]])


def _arrays(n: int) -> tuple[Array, Array]:
    """Return an array that serves as q, k and v, and an output whose memory has been touched."""
    q = np.random.default_rng(n).standard_normal((1, n, 1, HEAD_DIM))
    return q, np.zeros_like(q)


def traced(method: str, n: int) -> int:
    """Return the peak of what NumPy allocates during a call, in bytes."""
    _CALLS[method](*_arrays(PAGE_SIZE), "numpy")  # what is imported on the first call is not part of it
    q, out = _arrays(n)
    tracemalloc.start()
    try:
        _CALLS[method](q, out, "numpy")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def counted(method: str, n: int) -> int:
    """Return the work space in bytes that the C backend says a call uses."""
    q, _ = _arrays(n)
    options = _options("c")
    if method == "paged":
        cache, table, seq_lens = _in_pages(q)
        return pyflash.explain(
            q, cache, cache, block_table=table, seq_lens=seq_lens, backend="c", **options
        ).workspace_bytes
    num_splits = WORKERS if method == "flash-decoding" else None
    return pyflash.explain(q, q, q, num_splits=num_splits, backend="c", **options).workspace_bytes


def resident(method: str, n: int) -> int:
    """Return by how many bytes the resident memory of a fresh process rises during a call of C."""
    child = subprocess.run(
        [sys.executable, "-m", "pyflash._demo_memory", method, str(n)],
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        last_line = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise pyflash.PyflashError(f"the measuring process failed: {last_line}")
    return int(child.stdout)


def _resident_growth(method: str, n: int) -> int:
    """Measure in this process, which has done nothing else yet."""
    q, out = _arrays(n)
    counted(method, 64)  # loads the library, computes nothing
    _reset_peak()
    before = _peak_bytes()
    _CALLS[method](q, out, "c")
    return _peak_bytes() - before


def _reset_peak() -> None:
    """Set the peak of the resident memory back to what is resident now, where that is possible."""
    # Linux, see proc_pid_clear_refs(5). Elsewhere the peak stays that of the process so far, and
    # the growth may be understated.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """Return the peak of this process's resident memory."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource  # not on every system, and only needed here

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Measurement(NamedTuple):
    """One row of the table: how to measure it and what is claimed of it."""

    name: str
    backend: str
    measure: Callable[[int], int]
    growth: str
    slack: int  # bytes by which a constant may seem to grow

    def as_claimed(self, peaks: list[int]) -> bool:
        """Return whether measurements at `LENGTHS` have the growth that is claimed."""
        if self.growth == _QUADRATIC:
            factor = (LENGTHS[-1] / LENGTHS[-2]) ** 2
            return 0.8 * factor <= peaks[-1] / peaks[-2] <= 1.25 * factor
        return max(peaks) <= 1.25 * min(peaks) + self.slack


def _measurements() -> list[Measurement]:
    def of(measure: Callable[[str, int], int], method: str) -> Callable[[int], int]:
        return lambda n: measure(method, n)

    rows = [Measurement("naive, NumPy", "numpy", of(traced, "naive"), _QUADRATIC, 0)]
    flash = ("tiled", "paged", "flash-decoding")
    rows += [Measurement(f"{m}, NumPy", "numpy", of(traced, m), _CONSTANT, 0) for m in flash]
    rows += [Measurement(f"{m}, C, counted", "c", of(counted, m), _CONSTANT, 0) for m in flash]
    rows += [Measurement(f"{m}, C, resident", "c", of(resident, m), _CONSTANT, RESIDENT_SLACK) for m in flash]
    return rows


MEASUREMENTS = _measurements()

if __name__ == "__main__":
    print(_resident_growth(sys.argv[1], int(sys.argv[2])))
