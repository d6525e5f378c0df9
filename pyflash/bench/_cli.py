"""The options of `pyflash bench`, and what it does with them."""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._errors import invalid
from . import _libraries, _peers, _plots, _results
from ._engine import Key
from ._limits import described
from ._process import Row
from ._session import Session, cpus
from ._signals import as_interruption
from ._workloads import SUITES, UnknownWorkload, Workload, by_group, picked

DESCRIPTION = """\
Time attention: backends of pyflash and other libraries side by side, on this machine. Each answer is checked
before it is timed; all are timed in turn, in one run, beside what the machine can do at most.
"""
EXAMPLES = """\
examples:
  pyflash bench                                a few calls in some three minutes
  pyflash bench --list                         workloads, backends and peers by name
  pyflash bench 'decode-*' --backends c --peers torch --threads 2 --seconds 2
  pyflash bench over-n 'memory-over-n-*' --json run.json --plots plots
  pyflash bench --from run.json --plots plots  table and plots of a file
  pyflash bench gpu                            what is measured on a GPU
"""
_INTERRUPTED = 130  # 128 + SIGINT
#: How lines of text are printed: as they are, without breaks.
_PLAIN: dict[str, Any] = {"markup": False, "soft_wrap": True}


def add_arguments(parser: Any, add: str = "add_argument") -> None:
    """Declare what says how to measure; a group of pytest's options calls its method `addoption`."""
    option = getattr(parser, add)
    option(
        "--backends",
        nargs="+",
        metavar="NAME",
        help="of pyflash: c, numpy, cuda, and naive, which keeps the whole matrix of scores; by default all "
        "that can run here",
    )
    option(
        "--peers",
        nargs="*",
        metavar="NAME",
        help="other libraries by name or pattern, or NAME=PYTHON for one that another Python has; by default "
        "all that are found, none with --peers alone",
    )
    option(
        "--peers-from",
        type=Path,
        default=_libraries.PEERS_FOLDER,
        metavar="FOLDER",
        help="environments that `make bench-peers` has made (build/peers)",
    )
    option(
        "--also",
        action="append",
        default=[],
        metavar="NAME=WHERE",
        help="another build of pyflash: a Python that has it, or a folder to import it from",
    )
    option("--isa", help="instruction set of pyflash and, where they can be held, of the peers (the best)")
    option("--threads", default=str(len(cpus())), metavar="N", help="one number, or several with commas")
    option("--seconds", type=float, default=1.0, metavar="S", help="time per workload and library (1)")
    option("--turn", type=float, metavar="S", help="seconds of one turn (0.05; on a GPU 0.01)")
    option(
        "--rotate",
        type=float,
        default=0.0,
        metavar="MIB",
        help="decodes rotate through sets of keys and values that are so large together: for caches that are "
        "larger than one set",
    )
    option("--commit", help="what the result file says, by default what git says of the sources")


def add_to(commands: Any) -> None:
    """Add the command to the parser of `pyflash`."""
    parser = commands.add_parser(
        "bench",
        usage="pyflash bench [WORKLOAD ...] [options]",
        help="time attention beside other libraries and the machine's limits; tables, JSON, plots",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option(
        "workloads",
        nargs="*",
        default=[],
        metavar="WORKLOAD",
        help=f"names, groups or patterns, or one of {', '.join(SUITES)}; quick if there is none",
    )
    option("--list", action="store_true", dest="list_only", help="show what can be named; measure nothing")
    add_arguments(parser)
    option("--runs", type=int, default=1, metavar="N", help="whole runs, whose median counts (1)")
    option("--json", type=Path, metavar="FILE", help="write results, in the format of benchmarks/results")
    option(
        "--plots",
        type=Path,
        metavar="FOLDER",
        help="draw speed over length, fraction of the limit and peak memory, as SVG and PNG",
    )
    option("--from", type=Path, metavar="FILE", dest="source", help="measure nothing, show what a file says")
    parser.set_defaults(command=run)


def libraries(
    backends: Sequence[str] | None, peers: Sequence[str] | None, peers_from: Path, also: Sequence[str]
) -> list[_libraries.Library]:
    """Return pyflash, its other builds, and the peers."""
    found = _libraries.backends(backends)
    found += [_libraries.Library.parse("--also", text, "pyflash", "c") for text in also]
    found += _libraries.peers(peers, peers_from, any(library.on_device for library in found))
    names = [library.name for library in found]
    for name in names:
        if names.count(name) > 1:
            raise invalid("--also", repr(name), "a name that no other library has")
    return found


def threads_of(text: str) -> list[int]:
    """Read ``--threads``."""
    most = len(cpus())
    counts = [int(part) if part.strip().isdecimal() else 0 for part in str(text).split(",")]
    if not all(1 <= n <= most for n in counts):
        raise invalid("--threads", repr(text), f"numbers from 1 to {most}, the CPUs of this process")
    return counts


def workloads_of(patterns: Sequence[str]) -> list[Workload]:
    """Return the workloads that are asked for."""
    try:
        return picked(patterns or ["quick"])
    except UnknownWorkload as error:
        near = f"; near it: {', '.join(error.near)}" if error.near else ""
        expected = f"a workload, a group or a pattern that fits one (pyflash bench --list shows them){near}"
        raise invalid("WORKLOAD", repr(error.pattern), expected) from None


def check_writable(json: Path | None, plots: Path | None) -> None:
    """Raise InvalidArgument where the results could not be written afterwards; leave nothing behind."""
    if json is not None:
        _try_folder("--json", _results.target(json).parent, json)
    if plots is not None:
        _plots.check()
        _try_folder("--plots", plots, plots)


def _try_folder(argument: str, folder: Path, given: Path) -> None:
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (FileExistsError, NotADirectoryError):
        raise invalid(argument, repr(str(given)), "a place to write to (a file is in its way)") from None
    except OSError as error:
        raise invalid(argument, repr(str(given)), f"a place to write to ({error.strerror})") from None
    finally:
        for path in new:  # what is refused later, or interrupted, leaves no empty folders
            with contextlib.suppress(OSError):
                path.rmdir()


class Run:
    """All runs of one command, and the file that grows with them."""

    def __init__(self, path: Path | None) -> None:
        self.header: Row = {}
        self.runs: list[Row] = []
        self._path = path

    def keep(self, session: Session, rows: dict[Key, Row], after: dict[str, float] | None = None) -> Row:
        """Add what a session has measured so far, and write the file."""
        record = session.finished(rows, after)
        self.header = session.header()
        if self._path is not None:
            _results.save(self._path, self.header, [*self.runs, record])
        return record

    def results(self) -> _results.Results:
        """Return what there is."""
        return _results.Results("this run", {**self.header, "runs": self.runs})


def measure(run: Run, console: Any, workloads: list[Workload], session: Session) -> bool:
    """Measure the workloads in one session; return whether it was not interrupted."""
    from ._terminal import Bar

    groups = list(by_group(workloads))
    rows: dict[Key, Row] = {}
    after = None
    interrupted = False
    try:
        with Bar(console, len(groups)) as bar:
            for number, of_group in enumerate(groups):
                group = session.group(of_group, bar)
                try:
                    group.measure()
                finally:
                    clocks = session.clocks()
                    rows |= {
                        key: row | ({"afterwards": clocks} if clocks else {})
                        for key, row in group.rows.items()
                    }
                bar.group_done(number + 1, group.rows)
                run.keep(session, rows)
            after = session.measure_limits()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        session.close()
    if rows:
        run.runs.append(run.keep(session, rows, after))
    return not interrupted


def run(
    workloads: list[str], list_only: bool, runs: int, json: Path | None, plots: Path | None,
    source: Path | None, **how: Any,
) -> int:  # fmt: skip
    """Do what the command line says; return the exit status."""
    from . import _terminal

    console, errors = _terminal.console_of(), _terminal.console_of(stderr=True)
    console.goes_on, errors.goes_on = bool(json or plots), True
    with as_interruption():
        status = _run(console, errors, workloads, list_only, runs, json, plots, source, how)
    return _INTERRUPTED if console.reader_is_gone else status


def _run(
    console: Any, errors: Any, workloads: list[str], list_only: bool, runs: int, json: Path | None,
    plots: Path | None, source: Path | None, how: dict[str, Any],
) -> int:  # fmt: skip
    from . import _terminal

    if list_only:
        shown = workloads_of(workloads or ["all"])
        _terminal.listing(console, shown, how["peers_from"])
        return 0
    if source is not None and json is not None:
        raise invalid("--json", repr(str(json)), "no file to write with --from, which measures nothing")
    check_writable(json, plots)
    if source is not None:
        return _show(console, _results.Results.read(source), plots)
    chosen, counts = workloads_of(workloads), threads_of(how["threads"])
    _check_numbers(runs, how)
    compared = libraries(how["backends"], how["peers"], how["peers_from"], how["also"])
    if not any(library.takes(w) for library in compared for w in chosen):
        names = ", ".join(library.name for library in compared)
        raise invalid("WORKLOAD", chosen[0].name, f"one that is for any of {names or 'no library at all'}")
    found = Run(json)
    for number in range(runs):
        for threads in counts:
            session = _session(compared, threads, how)
            if not found.runs:
                _say_what(console, session)
            words = f"run {number + 1} of {runs}, {_plots.threads_in_words(threads)}"
            console.print(f"{words}: {described(session.before)}", **_PLAIN)
            if not measure(found, errors, chosen, session):
                return _interrupted(console, errors, found, json, plots)
            console.print(_terminal.limits_line(found.runs[-1]), **_PLAIN)
    status = _show(console, found.results(), plots)
    if json is not None:
        console.print(f"written to {json}", **_PLAIN)
    return status


def _session(compared: list[_libraries.Library], threads: int, how: dict[str, Any]) -> Session:
    """Return a session; of the peers that nobody named those that cannot be loaded are left out."""
    of_commit = _results.own_commit() if how["commit"] is None else how["commit"]
    optional = _peers.PEERS if how["peers"] is None else ()
    numbers = how["seconds"], how["turn"], how["rotate"]
    return Session(compared, how["isa"], threads, *numbers, of_commit, optional)


def _check_numbers(runs: int, how: dict[str, Any]) -> None:
    if runs < 1:
        raise invalid("--runs", runs, "at least 1")
    for name in ("seconds", "turn", "rotate"):
        if how[name] is not None and not (math.isfinite(how[name]) and how[name] >= 0):
            raise invalid(f"--{name}", how[name], "a number that is not negative")


def _say_what(console: Any, session: Session) -> None:
    """Say what is compared, before it takes its time."""
    machine = session.header()["machine"]
    console.print(f"{machine['cpu']}, {machine['cpus']} CPUs, {session.isa}", **_PLAIN)
    if "gpu" in machine:
        console.print(machine["gpu"], **_PLAIN)
    words = [f"{_plots.label(name)} {info['version']}" for name, info in session.info.items()]
    for text in session.left_out:
        console.print(f"not compared: {text}", **_PLAIN)
    console.print(f"compared: {', '.join(words)}", **_PLAIN)


def _interrupted(console: Any, errors: Any, found: Run, json: Path | None, plots: Path | None) -> int:
    if not found.runs:
        errors.print("interrupted before anything was measured; nothing is written", **_PLAIN)
        return _INTERRUPTED
    with contextlib.suppress(KeyboardInterrupt, OSError):  # the terminal may have been closed
        _show(console, found.results(), plots)
    count = sum(len(rows) for one in found.runs for rows in one["rows"].values())
    kept = f"written to {json}" if json is not None else "shown above and, without --json, not written"
    with contextlib.suppress(OSError):
        errors.print(f"interrupted: {count} rows were measured before, {kept}", **_PLAIN)
    return _INTERRUPTED


def _show(console: Any, results: _results.Results, plots: Path | None) -> int:
    """Print the tables and draw the plots; the status is 1 where an answer of pyflash is wrong or missing."""
    from . import _terminal

    for table in _terminal.tables(results):
        console.print(table)
    for note in _terminal.notes(results):
        console.print(note, **_PLAIN)
    if plots is not None:
        paths, missing = _plots.draw_all(results, plots)
        console.print(f"drawn: {', '.join(str(path) for path in paths) or 'nothing'}", **_PLAIN)
        for text in missing:
            console.print(f"no plot of {text}", **_PLAIN)
    infos = results.content["libraries"]
    own = [name for name in results.libraries if {"isas", "backend"} & infos[name].keys()]
    bad = [row for w in results.workloads() for name in own for row in results.row(w.name, name)]
    return int(any({"wrong", "failed"} & row.keys() for row in bad))
