"""Time and memory as the context grows: the naive computation against the fused one.

    pip install 'pyflash-attention[demo]'
    python examples/long_context.py --lengths 1024 2048 4096 8192

One head of 64, causal, float32, one thread each. Every number is measured in a process of its own, which
makes the arrays, touches the output, and then reports by how much its resident memory peaked during the call,
and the median time of three calls. Naive attention holds scores and weights of all pairs: twice the length,
four times the memory. Flash attention holds a tile, at any length: --lengths 8192 65536 --skip-naive.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import pyflash

METHODS = {"naive": pyflash.naive_attention, "flash": pyflash.flash_attention}
CALLS = 3


class Measured(NamedTuple):
    """What one call takes."""

    seconds: float
    bytes: int  # by which resident memory peaked, beyond inputs and output
    checksum: float  # the mean of |out|: both methods have to agree


def measure(method: str, length: int) -> Measured:
    """Measure in a fresh process."""
    command = [sys.executable, __file__, "--child", method, "--lengths", str(length)]
    environment = {**os.environ, "PYFLASH_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    return Measured(*json.loads(child.stdout))


def measure_here(method: str, length: int) -> Measured:
    """Measure in this process, which has done nothing else yet."""
    attention = METHODS[method]
    q, k, v = np.random.default_rng(length).standard_normal((3, 1, length, 1, 64), dtype=np.float32)
    out = np.zeros_like(q)
    out += 1  # so that its memory is there
    attention(q[:, :32], k[:, :32], v[:, :32], causal=True)  # what the first call loads is not part of it
    before = reset_peak()
    seconds = []
    for number in range(CALLS):
        start = time.perf_counter()
        attention(q, k, v, causal=True, out=out)
        seconds.append(time.perf_counter() - start)
        if number == 0:
            grown = peak() - before
    return Measured(float(np.median(seconds)), grown, float(np.abs(out).mean(dtype=np.float64)))


def reset_peak() -> int:
    """Forget the peak of this process's resident memory so far; return the one that counts from now on."""
    # On Linux, proc_pid_clear_refs(5). Elsewhere the peak stays, and growth below it is not seen.
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """Return the peak of this process's resident memory in bytes."""
    if Path("/proc/self/status").exists():
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def main(lengths: list[int], *, skip_naive: bool = False) -> None:
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    methods = ["flash"] if skip_naive else list(METHODS)
    table = Table("keys")
    for method in methods:
        table.add_column(f"{method}, ms", justify="right")
        table.add_column("MiB", justify="right")
    if not skip_naive:
        table.add_column("times faster", justify="right")
    console = Console()
    for length in track(lengths, "measuring", console=Console(stderr=True), transient=True):
        rows = [measure(method, length) for method in methods]
        if not np.allclose([row.checksum for row in rows], rows[0].checksum, rtol=1e-4):
            raise SystemExit(f"long_context.py: the results for {length} keys differ: {rows}")
        cells = [cell for row in rows for cell in (f"{row.seconds * 1e3:.1f}", f"{row.bytes / 2**20:.1f}")]
        if not skip_naive:
            cells.append(f"{rows[0].seconds / rows[1].seconds:.1f}")
        table.add_row(f"{length:,}", *cells)
    console.print(table)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], metavar="N")
    parser.add_argument("--skip-naive", action="store_true", help="flash attention alone, for long lengths")
    parser.add_argument("--child", choices=METHODS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse()
    if options.child:
        print(json.dumps(measure_here(options.child, options.lengths[0])))
    else:
        main(options.lengths, skip_naive=options.skip_naive)
