"""Check the answers of all libraries on a group of workloads, and time them in turn in random order.

Each library is a process; all but the one whose turn it is are stopped, so that threads that spin while
they wait for work take nothing from the others. Those on a GPU share a process. A group of workloads is
measured in rounds: every pair of library and workload has one turn a round, and ratios are medians of the
ratios of single rounds. Nothing else in the project takes a time of a library.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ._check import checked_rows, exact_rows, largest_error, tolerance
from ._libraries import Library
from ._process import Ended, Process, Row
from ._workloads import Array, Workload

if TYPE_CHECKING:
    from ._session import Session

MIN_ROUNDS = 5
ENDED_ELSEWHERE = "its process ended in the call of another workload"

Key = tuple[str, str]  # (workload, library)
#: Called with the part of a group that has been done since the last call, and what is being done.
Progress = Callable[[float, str], None]
#: Times per call, and the seconds that measuring them took.
Turn = Callable[[], tuple[list[float], float]]


class TurnFailed(Exception):
    """A library that was right failed while it was timed."""


def interleave(
    turns: dict[Any, Turn],
    seconds: float,
    progress: Callable[[float], None] = lambda part: None,
    on_failure: Callable[[Any, str], None] | None = None,
    times: dict[Any, list[list[float]]] | None = None,
) -> dict[Any, list[list[float]]]:
    """Give each turn round by round in random order, for about so many seconds; the times of each round.

    One that fails is left out from then on. An interruption goes on to the caller, who finds in `times`
    whole rounds, if there have been enough of them, or nothing.
    """
    rng = np.random.default_rng(0)
    left = dict(turns)
    times = {} if times is None else times
    times |= {name: [] for name in turns}
    rounds, spent, told = 0, 0.0, 0.0
    try:
        while left and (rounds < MIN_ROUNDS or spent < seconds):
            names = list(left)
            for index in rng.permutation(len(names)):
                name = names[index]
                try:
                    found, took = left[name]()
                except TurnFailed as failure:
                    del left[name], times[name]
                    if on_failure:
                        on_failure(name, str(failure))
                    continue
                times[name].append(found)
                spent += took
            rounds += 1
            part = min(1.0, rounds / MIN_ROUNDS, spent / seconds if seconds else 1.0)
            progress(part - told)
            told = part
    except KeyboardInterrupt:
        for name in list(times):
            del times[name][rounds:]
            if rounds < MIN_ROUNDS:
                del times[name]
        raise
    return times


def ratio(times: list[list[float]], others: list[list[float]]) -> float:
    """Return how many times longer: round by round where they were timed in turn, else by the medians."""
    mine, theirs = ([statistics.median(found) for found in rounds] for rounds in (times, others))
    if len(mine) != len(theirs):
        return statistics.median(mine) / statistics.median(theirs)
    return statistics.median(x / y for x, y in zip(mine, theirs, strict=True))


class Group:
    """The workloads of a group on all libraries, prepared and checked; what failed has its row already."""

    def __init__(self, session: Session, workloads: list[Workload], progress: Progress) -> None:
        self._session, self._progress = session, progress
        self._processes: dict[str, Process] = {}  # by the name of the process
        self._libraries = {library.name: library for library in session.libraries}
        self._workloads = {w.name: w for w in workloads}
        self.rows: dict[Key, Row] = {}
        self.times: dict[Key, list[list[float]]] = {}
        self._exact: dict[str, tuple[list[tuple[int, int, int]], Array]] = {}  # rows, and what they are
        self._allowed: dict[Key, float] = {}
        self.num_pairs = sum(library.takes(w) for w in workloads for library in session.libraries)

    def measure(self) -> None:
        """Fill `rows` and `times`. After an interruption only rows that are complete are left."""
        try:
            for w in self._workloads.values():
                self._prepare(w)
            self._time()
        except KeyboardInterrupt:
            self.rows = {key: row for key, row in self.rows.items() if self._is_complete(key, row)}
            raise
        finally:
            for process in self._processes.values():
                self._session.stop(process)

    def _is_complete(self, key: Key, row: Row) -> bool:
        return "error" not in row or "median" in row or "growth_bytes" in row

    def _process(self, library: Library) -> Process:
        if library.process not in self._processes:
            self._processes[library.process] = self._session.start(library)
        return self._processes[library.process]

    def _prepare(self, w: Workload) -> None:
        """Write the inputs, let each library load and compute them, and compare."""
        takers = [library for library in self._libraries.values() if library.takes(w)]
        if not takers:
            return
        self._progress(0.0, f"{w.name}: inputs")
        arrays, rows = w.arrays(), checked_rows(w)
        self._exact[w.name] = rows, exact_rows(w, arrays, rows)
        folder = _shared_folder(sum(x.nbytes for x in arrays.values()))
        try:
            for name, x in arrays.items():
                np.save(folder / f"{name}.npy", x)
            del arrays
            for library in takers:
                self._progress(0.0, f"{w.name}: is {library.name} right?")
                self.rows[w.name, library.name] = self._checked(w, library, folder)
                self._progress(0.3 / self.num_pairs, "")
        finally:
            shutil.rmtree(folder)

    def _checked(self, w: Workload, library: Library, folder: Path) -> Row:
        """Return a row without times: notes and the error, or why there are none."""
        call = {"library": library.name, "module": library.module, "option": library.option}
        try:
            process = self._process(library)
            copies = self._session.copies(w, library)
            row = process.ask("prepare", **call, workload=list(w), folder=str(folder), copies=copies)
            if "notes" not in row:
                return row
            if w.memory:
                found = process.ask("memory", **call, name=w.name)
                if "growth_bytes" not in found:
                    return found
                row |= found
                if row["allocates_output"]:
                    row["growth_bytes"] -= int(w.out_bytes)
            self._allowed[w.name, library.name] = tolerance(w, row.pop("requantised"))
            row.pop("allocates_output")
            found = self._compared(w, library, process)
            return row | found if "error" in found else found
        except Ended as error:
            self._lost(library)
            self._fail_prepared(library)
            return {"failed": str(error)}

    def _compared(self, w: Workload, library: Library, process: Process) -> Row:
        """Let a library compute, and return its error, or what is wrong."""
        rows, exact = self._exact[w.name]
        shape = (w.batch, w.num_heads, w.seqlen_q, w.head_dim)
        answer = process.ask("answer", library=library.name, name=w.name, rows=rows, shape=shape)
        if "rows" not in answer:
            return answer
        # Not max(): it may lose a NaN.
        wrong = float(np.max([largest_error(np.array(found), exact) for found in answer["rows"]]))
        allowed = self._allowed[w.name, library.name]
        # Not "wrong > allowed": NaN is wrong as well.
        return {"error": wrong} if wrong <= allowed else {"wrong": wrong, "tolerance": allowed}

    def _check_again(self, times: dict[Key, list[list[float]]]) -> None:
        """Take the times of libraries away that are not right any more after their last turn."""
        for key in list(times):
            library = self._libraries[key[1]]
            process = self._processes.get(library.process)
            try:
                if process is None:
                    raise Ended(ENDED_ELSEWHERE)
                found = self._compared(self._workloads[key[0]], library, process)
            except Ended as error:
                if process is not None:
                    self._lost(library)
                found = {"failed": str(error)}
            if "error" not in found:
                del times[key]
                self.rows[key] = found

    def _lost(self, library: Library) -> None:
        """Forget a process that has ended: the next call starts another."""
        self._session.lost(self._processes.pop(library.process))

    def _fail_prepared(self, library: Library) -> None:
        """Give up what was prepared in the process of a library, which has ended."""
        for key, row in self.rows.items():
            same = self._libraries[key[1]].process == library.process
            if same and "error" in row and "growth_bytes" not in row:
                self.rows[key] = {"failed": ENDED_ELSEWHERE}

    def _turn(self, workload: str, library: Library) -> Turn:
        seconds = self._session.turn_seconds(library)

        def turn() -> tuple[list[float], float]:
            process = self._processes.get(library.process)
            try:
                if process is None:
                    raise Ended(ENDED_ELSEWHERE)
                found = process.ask("turn", library=library.name, name=workload, seconds=seconds)
            except Ended as error:
                if process is not None:
                    self._lost(library)
                raise TurnFailed(str(error)) from error
            if "times" not in found:
                raise TurnFailed(found.get("failed") or found.get("unsupported"))
            return found["times"], found["spent"]

        return turn

    def _time(self) -> None:
        """Time what was right, and finish the rows."""
        right = [
            key for key, row in self.rows.items() if "error" in row and not self._workloads[key[0]].memory
        ]
        # A GPU that waits for the host cools down, and is faster for a while: so they are timed apart.
        for on_device in (True, False):
            keys = [key for key in right if self._libraries[key[1]].on_device == on_device]
            if not keys:
                continue
            share = 0.7 * len(keys) / self.num_pairs
            names = ", ".join(dict.fromkeys(workload for workload, _ in keys))
            self._progress(0.0, f"{names}: timing")

            def advance(part: float, share: float = share) -> None:
                self._progress(share * part, "")

            turns = {key: self._turn(key[0], self._libraries[key[1]]) for key in keys}
            times: dict[Key, list[list[float]]] = {}
            try:
                interleave(turns, self._session.seconds * len(keys), advance, self._failed, times)
                self._check_again(times)
            finally:
                self.times |= times
                self._finish(times)

    def _failed(self, key: Key, text: str) -> None:
        self.rows[key] = {"failed": text}

    def _finish(self, found: dict[Key, list[list[float]]]) -> None:
        for key, rounds in found.items():
            every = [x for times in rounds for x in times]
            self.rows[key] |= {"median": statistics.median(every), "min": min(every)}
            self.rows[key]["repetitions"] = len(every)
        first = self._session.libraries[0].name
        for key in found:
            workload, library = key
            if library != first and (workload, first) in self.times:
                # How many times slower than the first library.
                self.rows[key]["ratio"] = ratio(self.times[key], self.times[workload, first])
            base = (self._workloads[workload].base, library)
            if base in self.times:
                self.rows[key]["base_ratio"] = ratio(self.times[key], self.times[base])


def _shared_folder(num_bytes: int) -> Path:
    """Return a new folder in memory, where so much fits there; a container may have little."""
    memory = Path("/dev/shm")
    fits = memory.is_dir() and shutil.disk_usage(memory).free > num_bytes + 2**20
    return Path(tempfile.mkdtemp(prefix="pyflash-bench-", dir=memory if fits else None))
