"""What `pyflash bench` shows: a progress bar, tables, and in words what has no number."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .. import _backends
from .._errors import PyflashError
from . import _libraries
from ._engine import Key
from ._limits import described
from ._peers import PEERS, importable, installed
from ._plots import label
from ._process import Row
from ._results import Results
from ._workloads import SUITES, Workload, by_group, picked

try:
    from rich import box
    from rich.console import Console, Group
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise PyflashError(
        "bench: the package 'rich' is not installed: pip install 'pyflash-attention[bench]'"
    ) from error

#: Columns where nobody's window says how many.
WIDTH = 160


class Output(Console):
    """Where things are shown, whose reader may go (`| head`); rich would end the process with status 1."""

    #: Whether results go elsewhere as well, and are worth having without a reader.
    goes_on = False
    reader_is_gone = False

    def on_broken_pipe(self) -> None:
        """Write nothing any more; raise BrokenPipeError where nothing else comes of the command."""
        self.quiet = self.reader_is_gone = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())  # Python flushes it at exit
        if not self.goes_on:
            raise BrokenPipeError


def console_of(stderr: bool = False) -> Output:
    """Return where things are shown; a file or a pipe gets lines that are not cut to a window."""
    found = Output(stderr=stderr, highlight=False)
    return found if found.is_terminal else Output(stderr=stderr, highlight=False, width=WIDTH)


class Bar:
    """The progress bar of a run, in a file a line per group: on stderr, so that a table can be piped."""

    def __init__(self, console: Console, num_groups: int) -> None:
        self._console, self._num_groups = console, num_groups
        self._progress = Progress(
            TextColumn("{task.percentage:>3.0f}%"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            transient=True,
        )
        self._task: TaskID = self._progress.add_task("", total=num_groups)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # of a closed terminal; it must not hide why the run ends
            self._progress.stop()

    def __call__(self, part: float, text: str) -> None:
        """Go on by a part of a group; say what is being done, if that is new."""
        if text:
            self._progress.update(self._task, advance=part, description=_shortened(text, 70))
        else:
            self._progress.update(self._task, advance=part)

    def group_done(self, number: int, rows: dict[Key, Row]) -> None:
        """Stand where so many groups are done, whatever was left out of them; a file gets their medians."""
        self._progress.update(self._task, completed=number)
        if not self._console.is_terminal:
            line = f"{number} of {self._num_groups}: {_medians(rows)}"
            self._console.print(line, markup=False, soft_wrap=True)


def _medians(rows: dict[Key, Row]) -> str:
    """Return the rows of a group in one line."""
    found: dict[str, list[str]] = {}
    for (workload, library), row in rows.items():
        if "median" in row:
            word = seconds(row["median"])
        elif "growth_bytes" in row:
            word = f"{mebibytes(row['growth_bytes'])} MiB"
        else:
            word = next((name for name in ("wrong", "failed") if name in row), "-")
        found.setdefault(workload, []).append(f"{label(library)} {word}")
    return "; ".join(f"{workload}: {', '.join(words)}" for workload, words in found.items())


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def seconds(value: float) -> str:
    """Return a time with three digits and its unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size or unit == "us":
            number = value / size
            digits = 0 if number >= 100 else 1 if number >= 10 else 2
            return f"{number:.{digits}f} {unit}"
    raise AssertionError


def mebibytes(value: float) -> str:
    """Return a size in MiB."""
    return f"{max(value, 0) / 2**20:.2f}"


def tables(results: Results) -> Iterator[Group]:
    """Yield the table of times, and that of memory, where there are such rows."""
    timed = [w for w in results.workloads() if not w.memory]
    memory = [w for w in results.workloads() if w.memory]
    if timed:
        title = f"Time of {label(results.first)}, and how many times longer the others take"
        yield Group(Text(title, style="bold"), _times(results, timed))
    if memory:
        title = "Memory beyond inputs and output at the peak of one call, MiB"
        yield Group(Text(title, style="bold"), _growth(results, memory))


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, pad_edge=False)


def _times(results: Results, workloads: list[Workload]) -> Table:
    first = results.first
    table = _table()
    table.add_column("call", overflow="fold")
    for name in (label(first), "of limit"):
        table.add_column(name, justify="right")
    for library in results.peers:
        table.add_column(label(library), justify="right")
    for group in by_group(workloads):
        for w in group:
            table.add_row(w.name, *_cells(results, w), end_section=w is group[-1] and len(group) > 1)
    return table


def _cells(results: Results, w: Workload) -> Iterator[str]:
    """Yield the cells of a row; where the first library has no time, times stand instead of ratios."""
    median = results.value(w.name, results.first, "median")
    part = results.of_limit(w)
    yield results.cell(w.name, results.first) if median is None else seconds(median)
    yield "-" if part is None else f"{part:.0%}"
    for library in results.peers:
        found = results.value(w.name, library, "median")
        if found is not None and median is None:
            yield seconds(found)
        else:
            cell = results.cell(w.name, library)
            yield f"{cell}x" if found is not None else cell


def _growth(results: Results, workloads: list[Workload]) -> Table:
    table = _table()
    table.add_column("call", overflow="fold")
    for library in results.libraries:
        table.add_column(label(library), justify="right")
    for w in workloads:
        grown = [results.value(w.name, library, "growth_bytes") for library in results.libraries]
        cells = [
            results.cell(w.name, library) if value is None else mebibytes(value)
            for library, value in zip(results.libraries, grown, strict=True)
        ]
        table.add_row(w.name, *cells)
    return table


def notes(results: Results) -> Iterator[str]:
    """Yield why cells have no number, each reason once, and what else a reader should know."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for w in results.workloads():
        for library in results.libraries:
            for row in results.row(w.name, library):
                if (reason := _reason(row)) and w.name not in reasons.setdefault((library, reason), []):
                    reasons[library, reason].append(w.name)
    for (library, reason), names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{label(library)}: {_shortened(reason, 120)}: {names[0]}{more}"
    for library in results.libraries:
        info = results.content["libraries"][library]
        if not info["held"] and not results.on_device(library) and "backend" not in info:
            yield f"{library} cannot be held to {results.content['isa']}: it takes what the processor has"


def _reason(row: Row) -> str:
    if "wrong" in row:
        wrong = math.nan if row["wrong"] is None else row["wrong"]  # JSON has no NaN
        return f"WRONG by {wrong:.2g} of the largest element, {row.get('tolerance', 0):.2g} allowed"
    return f"FAILED: {row['failed']}" if "failed" in row else str(row.get("unsupported", ""))


def limits_line(run: Row) -> str:
    """Return whether the machine stayed the same during a run, in words."""
    limits = run["limits"]
    if "after" not in limits:
        return "the limits were not measured again"
    if limits["agree"]:
        return "limits before and after agree within 5 %"
    found = described(limits["after"])
    return f"limits afterwards: {found}: they differ by more than 5 %, the machine is not quiet"


def listing(console: Console, workloads: Iterable[Workload], peers_folder: Path) -> None:
    """Show what can be asked for."""
    table = _table()
    for name in ("name", "group", "queries", "GFLOP", "K+V MiB"):
        table.add_column(name, justify="left" if name in ("name", "group") else "right", overflow="fold")
    for w in workloads:
        table.add_row(w.name, w.group, f"{w.seqlen_q:,}", _short(w.flops / 1e9), _short(w.kv_bytes / 2**20))
    _titled(console, "Workloads: names, groups, and patterns like 'decode-*'", table)
    suites = _table()
    suites.show_header = False
    for name in SUITES:
        default = ", where no workload is named" if name == "quick" else ""
        suites.add_row(name, f"{len(picked([name]))} workloads{default}")
    _titled(console, "Suites", suites)
    libraries = _table()
    libraries.show_header = False
    for name, why in [*_backend_lines(), *_peer_lines(peers_folder)]:
        libraries.add_row(name, why)
    _titled(console, "Libraries", libraries)


def _titled(console: Console, title: str, table: Table) -> None:
    console.print(Group(Text(title, style="bold"), table))


def _peer_lines(peers_folder: Path) -> Iterator[tuple[str, Text]]:
    own = installed(peers_folder)
    for name, peer in PEERS.items():
        if name in own:
            why = f"in {own[name].parents[1]}"
        elif peer.on_device and _libraries.no_device() is not None:
            why = "not here, like --backends cuda"
        else:
            why = "in this Python" if importable(peer) else f"not installed: {peer.how_to_install}"
        yield f"--peers {name}", Text(why)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _backend_lines() -> Iterator[tuple[str, Text]]:
    reasons: dict[str, Any] = dict(_backends.available_backends(), cuda=_libraries.no_device(), naive=None)
    for name in _libraries.BACKENDS:
        why = f"not here: {reasons[name]}" if reasons[name] else "available"
        yield f"--backends {name}", Text(why)  # brackets in it are no markup
