"""Result files: what they say of the machine, how they are written, and what is read from them."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

from .._errors import invalid
from .._runtime import cpu_name
from ._file_format import check
from ._limits import fraction
from ._process import Row
from ._workloads import WORKLOADS, Workload


def commit(folder: Path | str) -> str:
    """Return the commit of a checkout, with a mark where files differ from it; "" outside of any."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+changes", "--abbrev=10"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def own_commit() -> str:
    """Return the commit that this pyflash was imported from, "" where it is installed."""
    root = Path(__file__).resolve().parents[2]
    return commit(root) if (root / "pyproject.toml").exists() else ""


def machine() -> Row:
    """Return what a reader needs to know about where the numbers come from."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": cpu_name(), "cpus": available, "platform": platform.platform()}


def smi(*fields: str) -> dict[str, str]:
    """Return what nvidia-smi says of the first GPU, nothing where it is not there."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    values = done.stdout.strip().split(", ")
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {}


def target(path: Path) -> Path:
    """Return the file that is written for a path: what links lead to. A device or a pipe is not replaced."""
    found = Path(os.path.realpath(path))
    if path.is_dir():
        raise invalid("--json", repr(str(path)), "a file, not a folder")
    if found.is_symlink() or (path.exists() and not path.is_file()):
        raise invalid("--json", repr(str(path)), "a regular file, or the name of a new one")
    return found


def save(path: Path, header: Row, runs: list[Row]) -> None:
    """Write a result file, as a whole or not at all."""
    path = target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        text = json.dumps(_finite({**header, "runs": runs}), indent=1, allow_nan=False)
        part.write_text(f"{text}\n", encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _finite(content: Any) -> Any:
    """Return the same with null for what JSON has no number for: the error of an answer with NaN in it."""
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def default_name(header: Row, runs: list[Row]) -> str:
    """Return how a file is called unless told: the machine, the instruction set and the threads."""
    of = header["machine"].get("gpu") or header["machine"]["cpu"]
    cpu = "".join(c if c.isalnum() else "-" for c in of.lower())
    words = [w for w in cpu.split("-") if w and w not in ("r", "tm", "processor", "cpu")]
    threads = "-".join(str(n) for n in sorted({run["threads"] for run in runs}))
    return f"{'-'.join(words)}-{header['isa']}-{threads}.json"


class Results:
    """The content of one file: medians over its runs, at one number of threads unless asked for another."""

    def __init__(self, name: str, content: dict[str, Any]) -> None:
        self.name, self.content = name, content
        self.first: str = content["first"]
        self.all_threads = sorted({run["threads"] for run in content["runs"]})
        self.threads: int = self.all_threads[-1]

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a file, or raise InvalidArgument where it is none of these."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            check(content)
        except (OSError, ValueError, RecursionError) as error:
            what = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
            raise invalid("--from", repr(str(path)), f"a result file ({what})") from None
        return cls(path.stem, content)

    @property
    def libraries(self) -> list[str]:
        """All libraries, the first one first."""
        return [self.first, *(name for name in self.content["libraries"] if name != self.first)]

    @property
    def peers(self) -> list[str]:
        """The libraries beside the first."""
        return self.libraries[1:]

    def on_device(self, library: str) -> bool:
        """Return whether a library computes on a GPU."""
        return bool(self.content["libraries"][library].get("on_device"))

    def runs(self, threads: int | None = None) -> list[dict[str, Any]]:
        """Return the runs at so many threads: those whose limits agreed, or all if none did."""
        found = [run for run in self.content["runs"] if run["threads"] == (threads or self.threads)]
        return [run for run in found if run["limits"]["agree"]] or found

    def row(self, workload: str, library: str, threads: int | None = None) -> list[Row]:
        """Return a row of each run."""
        return [run["rows"].get(workload, {}).get(library, {}) for run in self.runs(threads)]

    def value(self, workload: str, library: str, field: str, threads: int | None = None) -> float | None:
        """Return the median over the runs of a number of a row."""
        found = [row[field] for row in self.row(workload, library, threads) if field in row]
        return statistics.median(found) if found else None

    def limits(self, run: Row) -> dict[str, float]:
        """Return the limits of a run, the better of before and after."""
        before = run["limits"]["before"]
        after = run["limits"].get("after", before)
        return {name: max(before[name], after[name]) for name in before}

    def limit(self, name: str, threads: int | None = None) -> float:
        """Return a limit of the machine as the median over the runs."""
        return statistics.median(self.limits(run)[name] for run in self.runs(threads))

    def of_limit(self, w: Workload, library: str = "", threads: int | None = None) -> float | None:
        """Return which part of the machine's limit a library reaches, by default the first one."""
        library, found = library or self.first, []
        for run in self.runs(threads):
            row = run["rows"].get(w.name, {}).get(library, {})
            if "median" in row:
                part = fraction(w, row["median"], self.limits(run), self.on_device(library))
                found += [] if part is None else [part]
        return statistics.median(found) if found else None

    def workloads(self) -> list[Workload]:
        """Return the workloads in the file, in their order."""
        there = {name for run in self.runs() for name in run["rows"]}
        return [w for w in WORKLOADS.values() if w.name in there]

    def best_peer(self, workload: str) -> tuple[str, float] | None:
        """Return the peer that is slower by the least, and how many times; pyflash itself is no peer."""
        infos = self.content["libraries"]
        peers = [p for p in self.peers if not {"isas", "backend"} & infos[p].keys()]
        found = [(ratio, p) for p in peers if (ratio := self.value(workload, p, "ratio")) is not None]
        return min(found)[::-1] if found else None

    def cell(self, workload: str, library: str) -> str:
        """Return how many times slower another library is, or why there is no such number."""
        if (ratio := self.value(workload, library, "ratio")) is not None:
            return f"{ratio:.2f}"
        rows = self.row(workload, library)
        if any("wrong" in row for row in rows):
            return "wrong"
        return "failed" if any("failed" in row for row in rows) else "-"
