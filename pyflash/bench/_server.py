"""Libraries under test in a process of their own, told over pipes what to compute and time.

    python _server.py CPUS THREADS

CPUS is a list like 0,1 that this process may use. Each line of the input is a JSON object with a command,
answered by one line. It may be run by a Python that has NumPy and the library, and no pyflash: then this
folder is a package by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
import json
import os
import platform
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: The name of this folder as a package where it is run as a program.
STANDALONE = "pyflash_bench"
#: A batch of calls is timed as one where a call is so short that reading the clock would show.
BATCH_SECONDS = 2e-4
#: The first call of a turn is not counted: another process has had the caches. A call longer than this has
#: time to fill them, and is not made twice.
WARM_BELOW_SECONDS = 0.2


class Prepared:
    """A workload ready to run, on one or more copies of its inputs that take turns."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self._turn = itertools.cycle([call.run for call in calls])
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
        if (own := self.calls[0].turn) is not None:
            times: list[float] = own(seconds)
            return times
        if self.seconds < WARM_BELOW_SECONDS:
            self.once()
        count = max(1, round(BATCH_SECONDS / max(self.seconds, 1e-9)))
        end, times = time.perf_counter() + seconds, [self.batch(count)]
        while time.perf_counter() < end:
            times.append(self.batch(count))
        return times

    def results(self) -> list[Any]:
        """Run every copy once and return the answers that are compared."""
        call = self.calls[0]
        if call.turn is None:
            for _ in self.calls:
                self.once()
        return [call.result(), *(other() for other in call.also)]


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
    """The commands. A library is a module of calls/ and its option."""

    def __init__(self, threads: int, package: str) -> None:
        self._threads, self._package = threads, package
        self._prepared: dict[tuple[str, str], Prepared] = {}  # (library, workload)

    def _module(self, name: str) -> Any:
        return importlib.import_module(f"{self._package}.calls.{name}")

    def info(self, module: str, imported: str = "") -> dict[str, Any]:
        """Return versions, of pyflash the instruction sets, of a GPU what it is, and where a module lies."""
        import numpy as np

        calls = self._module(module)
        found = {"version": calls.VERSION, "python": platform.python_version(), "numpy": np.__version__}
        if module == "pyflash":
            found["isas"] = list(calls.pyflash.available_isas())
        if hasattr(calls, "info"):
            found |= calls.info()
        there = sys.modules.get(imported)
        # A package without an __init__.py has only folders.
        return found | {
            "file": getattr(there, "__file__", None) or next(iter(getattr(there, "__path__", [])), "")
        }

    def limits(self, module: str) -> dict[str, float]:
        """Return what the device of a module can do."""
        found: dict[str, float] = self._module(module).limits()
        return found

    def prepare(
        self, library: str, module: str, option: str, workload: list[Any], folder: str, copies: int
    ) -> dict[str, Any]:
        """Load the inputs and make the call."""
        import numpy as np

        calls = self._module(module)
        w = importlib.import_module(f"{self._package}._workloads").Workload(*workload)
        # A device gets its arrays once for all libraries: those that are not asked for are not read.
        mode: Any = "r" if hasattr(calls, "DEVICE") else None

        def arrays() -> dict[str, Any]:
            return {path.stem: np.load(path, mmap_mode=mode) for path in sorted(Path(folder).glob("*.npy"))}

        made = [calls.prepare(w, arrays(), self._threads, option) for _ in range(copies)]
        self._prepared[library, w.name] = Prepared(made)
        call = made[0]
        return {
            "notes": dict(call.notes),
            "requantised": call.requantised,
            "allocates_output": call.allocates_output,
        }

    def answer(
        self, library: str, name: str, rows: list[tuple[int, int, int]], shape: list[int]
    ) -> dict[str, Any]:
        """Return some rows (batch, head, query) of each answer that is compared."""
        prepared = self._prepared[library, name]
        answers = (out.reshape(shape) for out in prepared.results())
        found = [[out[tuple(row)].astype(float).tolist() for row in rows] for out in answers]
        return {"rows": found, "seconds": prepared.seconds}

    def turn(self, library: str, name: str, seconds: float) -> dict[str, Any]:
        """Time one workload for a while."""
        begin = time.perf_counter()
        times = self._prepared[library, name].turn(seconds)
        return {"times": times, "spent": time.perf_counter() - begin}

    def memory(self, library: str, module: str, option: str, name: str) -> dict[str, Any]:
        """Return by how much the resident memory rises during one call, the output left out."""
        if not Path("/proc/self/status").exists():
            return {"unsupported": "the peak of the resident memory is read from /proc, on Linux"}
        workloads = importlib.import_module(f"{self._package}._workloads").WORKLOADS
        # What the first call of any kind takes, threads and code, is not this call's.
        first = workloads["prefill-1x12x128x64-float32"]
        kept = self._module(module).prepare(first, first.arrays(), self._threads, option)
        kept.run()
        with contextlib.suppress(AttributeError):  # glibc; what was freed must not hide what is allocated
            ctypes.CDLL(None).malloc_trim(0)
        before = peak_bytes(reset=True)
        self._prepared[library, name].once()
        return {"growth_bytes": peak_bytes() - before}

    def forget(self, module: str) -> dict[str, Any]:
        """Let go of everything that was prepared."""
        self._prepared.clear()
        self._module(module).forget()
        return {}

    def reply(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out a command; what goes wrong is an answer too."""
        unsupported = importlib.import_module(f"{self._package}.calls").Unsupported
        do: Callable[..., dict[str, Any]] = getattr(self, command.pop("do"))
        try:
            return do(**command)
        except unsupported as error:
            return {"unsupported": str(error)}
        except Exception as error:  # of any library: the row shows it, the other rows go on
            return {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}


def _die_with_parent() -> None:
    """Have the kernel end this process with the one that started it: it would stay stopped for ever."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def main(package: str) -> None:
    """Answer commands until the input ends."""
    # Sent to the whole group, by Ctrl-C, a closed terminal or `timeout`: the parent ends this process.
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    _die_with_parent()
    cpus, threads = sys.argv[1:]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})  # before any library counts the CPUs
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not look like an answer
    server = Server(int(threads), package)
    for line in sys.stdin:
        print(json.dumps(server.reply(json.loads(line))), file=replies, flush=True)


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    sys.path = [folder for folder in sys.path if Path(folder).resolve() != here]
    alone = types.ModuleType(STANDALONE)
    alone.__path__ = [str(here)]
    sys.modules[STANDALONE] = alone
    importlib.import_module(f"{STANDALONE}._server").main(STANDALONE)
