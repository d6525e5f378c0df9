"""A library under test in a process and an environment of its own, told over pipes what to compute and time.

    python benchmarks/server.py MODULE CPUS THREADS

MODULE is one of calls/, CPUS a list like 0,1 that this process may use. Each line of the input is a JSON
object with a command, answered by one line.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

#: A batch of calls is timed as one where a call is so short that reading the clock would show.
BATCH_SECONDS = 2e-4
#: The first call of a turn is not counted: another process has had the caches. A call longer than this has
#: time to fill them, and is not made twice.
WARM_BELOW_SECONDS = 0.2


class Prepared:
    """A workload ready to run, on one or more copies of its inputs that take turns."""

    def __init__(self, module: Any, workload: Any, folder: Path, copies: int, threads: int) -> None:
        import numpy as np

        def arrays() -> dict[str, Any]:
            return {path.stem: np.load(path) for path in sorted(folder.glob("*.npy"))}

        self.calls = [module.prepare(workload, arrays(), threads) for _ in range(copies)]
        self._turn = itertools.cycle([call.run for call in self.calls])
        self.seconds = 0.0  # of the last calls

    def once(self) -> float:
        """Run once; the seconds that it took."""
        run = next(self._turn)
        begin = time.perf_counter()
        run()
        self.seconds = time.perf_counter() - begin
        return self.seconds

    def batch(self, count: int) -> float:
        """Return the seconds per call of so many calls."""
        if count == 1:
            return self.once()
        runs = list(itertools.islice(self._turn, count))
        begin = time.perf_counter()
        for run in runs:
            run()
        self.seconds = (time.perf_counter() - begin) / count
        return self.seconds

    def turn(self, seconds: float) -> list[float]:
        """Return times per call, measured for about so many seconds and at least once."""
        if self.seconds < WARM_BELOW_SECONDS:
            self.once()
        count = max(1, round(BATCH_SECONDS / max(self.seconds, 1e-9)))
        end, times = time.perf_counter() + seconds, [self.batch(count)]
        while time.perf_counter() < end:
            times.append(self.batch(count))
        return times


def peak_bytes(reset: bool = False) -> int:
    """Return the peak of this process's resident memory, after setting it back to what is resident now."""
    if reset:
        with contextlib.suppress(OSError):  # Linux, see proc_pid_clear_refs(5)
            Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


class Server:
    """The commands."""

    def __init__(self, module: Any, threads: int) -> None:
        self._module, self._threads = module, threads
        self._prepared: dict[str, Prepared] = {}

    def info(self) -> dict[str, Any]:
        """Return versions, and of pyflash the instruction sets."""
        import numpy as np

        found = {
            "version": self._module.VERSION,
            "python": platform.python_version(),
            "numpy": np.__version__,
        }
        if hasattr(self._module, "pyflash"):
            found["isas"] = list(self._module.pyflash.available_isas())
        return found

    def prepare(self, workload: list[Any], folder: str, copies: int) -> dict[str, Any]:
        """Load the inputs and make the call."""
        from workloads import Workload

        w = Workload(*workload)
        prepared = self._prepared[w.name] = Prepared(self._module, w, Path(folder), copies, self._threads)
        call = prepared.calls[0]
        return {
            "notes": dict(call.notes),
            "requantised": call.requantised,
            "allocates_output": call.allocates_output,
        }

    def answer(self, name: str, rows: list[tuple[int, int, int]], shape: list[int]) -> dict[str, Any]:
        """Run every copy once and return some rows (batch, head, query) of the first copy's answer."""
        prepared = self._prepared[name]
        for _ in prepared.calls:
            prepared.once()
        out = prepared.calls[0].result().reshape(shape)
        return {"rows": [out[tuple(row)].astype(float).tolist() for row in rows], "seconds": prepared.seconds}

    def turn(self, name: str, seconds: float) -> dict[str, Any]:
        """Time one workload for a while."""
        return {"times": self._prepared[name].turn(seconds)}

    def memory(self, name: str) -> dict[str, Any]:
        """Return by how much the resident memory rises during one call, the output left out."""
        from workloads import WORKLOADS

        # What the first call of any kind takes, threads and code, is not this call's.
        first = WORKLOADS["prefill-1x12x128x64-float32"]
        kept = self._module.prepare(first, first.arrays(), self._threads)
        kept.run()
        with contextlib.suppress(AttributeError):  # glibc; what was freed must not hide what is allocated
            ctypes.CDLL(None).malloc_trim(0)
        before = peak_bytes(reset=True)
        self._prepared[name].once()
        return {"growth_bytes": peak_bytes() - before}


def main() -> None:
    """Answer commands until the input ends."""
    name, cpus, threads = sys.argv[1:]
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})  # before any library counts the CPUs
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like an answer
    server = Server(importlib.import_module(f"calls.{name}"), int(threads))
    unsupported = importlib.import_module("calls").Unsupported
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = getattr(server, command.pop("do"))(**command)
        except unsupported as error:
            reply = {"unsupported": str(error)}
        except Exception as error:  # of any library: the row shows it, the other rows go on
            reply = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
