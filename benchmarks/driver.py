"""Start the libraries under test, check their answers, and time them in turn in random order.

Each library is a process (server.py); all but the one whose turn it is are stopped, so that threads that
spin while they wait for work take nothing from the others. A group of workloads is measured in rounds: every
pair of library and workload has one turn a round, and ratios are medians of the ratios of single rounds.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from limits import Limits, agree
from peers import PEERS
from workloads import Workload, numbers

HERE = Path(__file__).resolve().parent
#: Largest error on rows of float64, relative to their largest element.
TOLERANCE = {"float64": 1e-12, "float32": 2e-5, "float16": 2e-2, "bfloat16": 3e-2}
#: The same where a library quantises keys to its own type, and queries with them.
REQUANTISED = {"int8": 0.1, "int4": 1.0}
MIN_ROUNDS = 5
CHECKED_ROWS = 8

Row = dict[str, Any]


class Library(NamedTuple):
    """A library under test: its name in the results, the module in calls/, and where it is."""

    name: str
    module: str
    python: str
    path: str = ""  # a folder to import from before all others

    @classmethod
    def parse(cls, text: str, module: str = "") -> Library:
        """Read ``name=PYTHON``, or ``name=FOLDER`` with a package that this Python imports from there."""
        name, _, where = text.partition("=")
        if not name or not where:
            raise ValueError(f"{text!r}: expected NAME=PYTHON or NAME=FOLDER")
        if Path(where).is_dir():
            return cls(name, module or name, sys.executable, str(Path(where).resolve()))
        return cls(name, module or name, where)

    @property
    def is_pyflash(self) -> bool:
        """Whether this is a build of pyflash."""
        return self.module == "pyflash"

    def held_to(self, isa: str) -> bool:
        """Whether the library can be held to an instruction set."""
        return self.is_pyflash or isa in PEERS[self.module].held

    def environment(self, isa: str, threads: int) -> dict[str, str]:
        """Return the variables of its process."""
        found = dict(os.environ, OMP_NUM_THREADS=str(threads), OMP_PROC_BIND="true", OMP_DYNAMIC="false")
        if self.path:
            found["PYTHONPATH"] = self.path
        elif not self.is_pyflash:
            found.pop("PYTHONPATH", None)
        if not self.is_pyflash:
            return found | PEERS[self.module].held.get(isa, {})
        return found | {"PYFLASH_NUM_THREADS": str(threads)} | ({"PYFLASH_ISA": isa} if isa else {})


class Ended(Exception):
    """A library's process ended by itself."""


class Process:
    """The process of a library, running only while it is asked something."""

    def __init__(self, library: Library, isa: str, cpus: list[int]) -> None:
        self.library = library
        command = [
            library.python,
            str(HERE / "server.py"),
            library.module,
            ",".join(map(str, cpus)),
            str(len(cpus)),
        ]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with the process
        self._process = subprocess.Popen(
            command,
            env=library.environment(isa, len(cpus)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
        )

    def ask(self, do: str, **arguments: Any) -> Row:
        """Send a command and return the answer; the process is stopped again afterwards."""
        assert self._process.stdin and self._process.stdout
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._log.seek(0)
            said = self._log.read().strip().splitlines()
            raise Ended(f"the process ended: {said[-1] if said else self._process.wait()}")
        self._process.send_signal(signal.SIGSTOP)
        return json.loads(answer)

    def end(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


def interleave(turns: dict[Any, Callable[[], list[float]]], seconds: float) -> dict[Any, list[list[float]]]:
    """Give each turn round by round in random order, for about so many seconds; the times of each round."""
    rng = np.random.default_rng(0)
    names, times = list(turns), {name: [] for name in turns}
    rounds = spent = 0
    while rounds < MIN_ROUNDS or spent < seconds:
        for index in rng.permutation(len(names)):
            found = turns[names[index]]()
            times[names[index]].append(found)
            spent += sum(found)
        rounds += 1
    return times


def checked_rows(w: Workload) -> list[tuple[int, int, int]]:
    """Return (batch, head, query) of the rows that are compared: the corners and some between."""
    rng = np.random.default_rng(1)
    shape = (w.batch, w.num_heads, w.seqlen_q)
    picked = {(0, 0, 0), (w.batch - 1, w.num_heads - 1, w.seqlen_q - 1)}
    picked |= {tuple(int(x) for x in rng.integers(0, shape)) for _ in range(CHECKED_ROWS - 2)}
    return sorted(picked)


def exact_rows(w: Workload, arrays: dict[str, np.ndarray], rows: list[tuple[int, int, int]]) -> np.ndarray:
    """Return attention of single rows in float64, the textbook's way."""
    found = []
    for batch, head, query in rows:
        kv_head = head // (w.num_heads // w.num_kv_heads)
        q = numbers(arrays["q"][batch, head, query], w.dtype).astype(np.float64)
        k, v = (
            numbers(
                arrays[name][batch, kv_head],
                w.stored,
                arrays[f"{name}_scale"][batch, kv_head] if f"{name}_scale" in arrays else None,
            ).astype(np.float64)
            for name in ("k", "v")
        )
        visible = query + 1 + w.seqlen_kv - w.seqlen_q if w.causal else w.seqlen_kv
        scores = k[:visible] @ q * w.head_dim**-0.5
        weights = np.exp(scores - scores.max())
        found.append(weights @ v[:visible] / weights.sum())
    return np.array(found)


class Group:
    """The workloads of a group on all libraries, prepared and checked; what failed has its row already."""

    def __init__(self, session: Session, workloads: list[Workload]) -> None:
        self._session = session
        self._processes: dict[str, Process] = {}
        self.rows: dict[tuple[str, str], Row] = {}  # (workload, library)
        self.times: dict[tuple[str, str], list[list[float]]] = {}
        self._workloads = {w.name: w for w in workloads}

    def measure(self) -> None:
        """Fill `rows` and `times`."""
        try:
            for library in self._session.libraries:
                self._processes[library.name] = self._session.start(library)
            for w in self._workloads.values():
                self._prepare(w)
            self._time()
        finally:
            for process in self._processes.values():
                process.end()

    def _prepare(self, w: Workload) -> None:
        """Write the inputs, let each library load and compute them, and compare."""
        arrays, rows = w.arrays(), checked_rows(w)
        exact = exact_rows(w, arrays, rows)
        folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            for name, x in arrays.items():
                np.save(folder / f"{name}.npy", x)
            del arrays
            for library in self._session.libraries:
                if library.is_pyflash or not (w.alone or w.variant):
                    self.rows[w.name, library.name] = self._checked(w, library, folder, rows, exact)
        finally:
            shutil.rmtree(folder)

    def _checked(
        self, w: Workload, library: Library, folder: Path, rows: list[tuple[int, int, int]], exact: np.ndarray
    ) -> Row:
        """Return a row without times: notes and the error, or why there are none."""
        try:
            process = self._processes[library.name]
            copies = self._session.copies(w)
            row = process.ask("prepare", workload=list(w), folder=str(folder), copies=copies)
            if "notes" not in row:
                return row
            if w.memory:
                row |= process.ask("memory", name=w.name)
                if row["allocates_output"]:
                    row["growth_bytes"] -= int(w.out_bytes)
            shape = (w.batch, w.num_heads, w.seqlen_q, w.head_dim)
            answer = process.ask("answer", name=w.name, rows=rows, shape=shape)
        except Ended as error:
            self._processes[library.name].end()
            self._processes[library.name] = self._session.start(library)
            return {"failed": str(error)}
        if "rows" not in answer:
            return answer
        error = float(np.abs(np.array(answer["rows"]) - exact).max() / np.abs(exact).max())
        requantised = row.pop("requantised")
        row.pop("allocates_output")
        tolerance = REQUANTISED[w.kv_dtype] if requantised else TOLERANCE[w.dtype]
        # Not "error > tolerance": NaN is wrong as well.
        return {**row, "error": error} if error <= tolerance else {"wrong": error, "tolerance": tolerance}

    def _time(self) -> None:
        """Time what was right, and finish the rows."""

        def turn(workload: str, library: str) -> Callable[[], list[float]]:
            process, seconds = self._processes[library], self._session.turn_seconds
            return lambda: process.ask("turn", name=workload, seconds=seconds)["times"]

        right = [
            key for key, row in self.rows.items() if "error" in row and not self._workloads[key[0]].memory
        ]
        if not right:
            return
        self.times = interleave({key: turn(*key) for key in right}, self._session.seconds * len(right))
        medians = {key: [statistics.median(times) for times in self.times[key]] for key in right}
        first = self._session.libraries[0].name

        def ratio(key: tuple[str, str], other: tuple[str, str]) -> float:
            return statistics.median(x / y for x, y in zip(medians[key], medians[other], strict=True))

        for key in right:
            workload, library = key
            every = [x for times in self.times[key] for x in times]
            row = self.rows[key]
            row |= {"median": statistics.median(every), "min": min(every), "repetitions": len(every)}
            if library != first and (workload, first) in medians:
                row["ratio"] = ratio(key, (workload, first))  # how many times slower than the first library
            base = (self._workloads[workload].base, library)
            if base in medians:
                row["base_ratio"] = ratio(key, base)


class Session:
    """One run: libraries, threads, an instruction set, and the limits before and after."""

    def __init__(
        self,
        libraries: list[Library],
        isa: str,
        threads: int,
        seconds: float,
        turn: float,
        rotate: float,
        of_commit: str,
    ) -> None:
        self.libraries, self.threads, self._commit = libraries, threads, of_commit
        self.seconds, self.turn_seconds, self._rotate_bytes = seconds, turn, rotate * 2**20
        self._cpus = sorted(os.sched_getaffinity(0))
        if threads > len(self._cpus):
            raise ValueError(f"{threads} threads on {len(self._cpus)} CPUs")
        self.isa, self.info = "", {}
        for library in libraries:
            process = self.start(library)
            try:
                self.info[library.name] = process.ask("info") | self._source(library)
            finally:
                process.end()
        isas = self.info[libraries[0].name].get("isas", [])
        self.isa = isa or isas[-1]
        if self.isa not in isas:
            raise ValueError(f"instruction set {isa}: there are {', '.join(isas)}")
        for library in libraries:
            self.info[library.name]["held"] = library.held_to(self.isa)
        self._probes = Limits(self.isa, self._cpus)
        self.before = self.measure_limits()

    def measure_limits(self) -> dict[str, float]:
        """Return what the machine can do at this moment."""
        return self._probes.measure(self.threads)

    @staticmethod
    def _source(library: Library) -> Row:
        """Return the commit of a build that is imported from a checkout."""
        if not library.path:
            return {}
        return {"commit": commit(Path(library.path))}

    def start(self, library: Library) -> Process:
        """Start a library's process on the first CPUs."""
        isas = self.info.get(library.name, {}).get("isas", [self.isa])
        # An older build may lack the instruction set; it then takes its best.
        return Process(library, self.isa if self.isa in isas else "", self._cpus[: self.threads])

    def copies(self, w: Workload) -> int:
        """Return how many sets of inputs a decode rotates through, so that no cache keeps them."""
        if w.seqlen_q > 16 or w.memory:
            return 1
        return max(1, -int(-self._rotate_bytes // w.kv_bytes)) if self._rotate_bytes else 1

    def group(self, workloads: list[Workload]) -> Group:
        """Measure workloads of one group."""
        group = Group(self, workloads)
        group.measure()
        return group

    def finished(self, rows: dict[tuple[str, str], Row]) -> Row:
        """Return the record of the run, the limits measured once more."""
        after = self.measure_limits()
        nested: dict[str, dict[str, Row]] = {}
        for (workload, library), row in rows.items():
            nested.setdefault(workload, {})[library] = row
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
            "threads": self.threads,
            "limits": {"before": self.before, "after": after, "agree": agree(self.before, after)},
            "rows": nested,
        }

    def header(self) -> Row:
        """Return what all runs of a file have in common."""
        return {
            "machine": machine(),
            "commit": self._commit,
            "isa": self.isa,
            "libraries": self.info,
            "first": self.libraries[0].name,
            "settings": {
                "seconds": self.seconds,
                "turn_seconds": self.turn_seconds,
                "rotate_mib": self._rotate_bytes / 2**20,
                "OMP_PROC_BIND": "true",
            },
        }


def by_group(workloads: Iterable[Workload]) -> Iterator[list[Workload]]:
    """Yield the workloads group by group, in their order."""
    groups: dict[str, list[Workload]] = {}
    for w in workloads:
        groups.setdefault(w.group, []).append(w)
    yield from groups.values()


def commit(folder: Path) -> str:
    """Return the commit of a checkout, with a mark where files differ from it; "" outside of any."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+changes", "--abbrev=10"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def machine() -> Row:
    """Return what a reader needs to know about where the numbers come from."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {"cpu": model, "cpus": len(os.sched_getaffinity(0)), "platform": platform.platform()}


def save(path: Path, header: Row, runs: list[Row]) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**header, "runs": runs}, indent=1) + "\n", encoding="utf-8")


def default_path(header: Row, runs: list[Row]) -> Path:
    """Return where results go unless told: the machine, the instruction set and the threads name the file."""
    cpu = "".join(c if c.isalnum() else "-" for c in header["machine"]["cpu"].lower())
    words = [w for w in cpu.split("-") if w and w not in ("r", "tm", "processor", "cpu")]
    threads = "-".join(str(n) for n in sorted({run["threads"] for run in runs}))
    return HERE / "results" / f"{'-'.join(words)}-{header['isa']}-{threads}.json"
