"""Tables and plots of README.md and docs/benchmarks.md, made from the result files.

python benchmarks/report.py           rewrite the marked parts of both pages, and the plots
python benchmarks/report.py --check   fail if one of them does not fit the result files
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from bench import fraction
from workloads import WORKLOADS, Workload

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))
from feature_table import replaced, table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "plots"
WRITER = "benchmarks/report.py"
#: What the README shows of each result file; the page of the benchmarks shows everything.
README_ROWS = (
    "prefill-*float32",
    "prefill-1x8x4096x128-*16",
    "decode-8x4096-float*",
    "decode-1x32768-float*",
)


class Results:
    """One result file: medians over its runs, at one number of threads unless asked for another."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.name, self.content = path.stem, content
        self.first: str = content["first"]
        self.all_threads = sorted({run["threads"] for run in content["runs"]})
        self.threads = self.all_threads[-1]

    @property
    def peers(self) -> list[str]:
        """The libraries beside the first."""
        return [name for name in self.content["libraries"] if name != self.first]

    def runs(self, threads: int | None = None) -> list[dict[str, Any]]:
        """Return the runs at so many threads: those whose limits agreed, or all if none did."""
        found = [run for run in self.content["runs"] if run["threads"] == (threads or self.threads)]
        return [run for run in found if run["limits"]["agree"]] or found

    def value(self, workload: str, library: str, field: str, threads: int | None = None) -> float | None:
        """Return the median over the runs of a number of a row."""
        rows = [run["rows"].get(workload, {}).get(library, {}) for run in self.runs(threads)]
        found = [row[field] for row in rows if field in row]
        return statistics.median(found) if found else None

    def limit(self, name: str, threads: int | None = None) -> float:
        """Return a limit of the machine, the better of before and after, as the median over the runs."""
        limits = (run["limits"] for run in self.runs(threads))
        return statistics.median(max(x["before"][name], x["after"][name]) for x in limits)

    def of_limit(self, w: Workload, threads: int | None = None) -> float | None:
        """Return which part of the machine's limit the first library reaches."""
        found = []
        for run in self.runs(threads):
            before, after = run["limits"]["before"], run["limits"]["after"]
            row = run["rows"].get(w.name, {}).get(self.first, {})
            if "median" in row:
                limits = {name: max(before[name], after[name]) for name in before}
                found.append(fraction(w, row["median"], limits))
        return statistics.median(found) if found else None

    def workloads(self) -> list[Workload]:
        """Return the workloads in the file, in their order."""
        there = {name for run in self.runs() for name in run["rows"]}
        return [w for w in WORKLOADS.values() if w.name in there]

    def best_peer(self, workload: str) -> tuple[str, float] | None:
        """Return the peer that is slower by the least, and how many times; other builds are no peers."""
        peers = [p for p in self.peers if "isas" not in self.content["libraries"][p]]
        found = [(ratio, p) for p in peers if (ratio := self.value(workload, p, "ratio")) is not None]
        return min(found)[::-1] if found else None

    def cell(self, workload: str, library: str) -> str:
        """Return how many times slower another library is, or why there is no such number."""
        if (ratio := self.value(workload, library, "ratio")) is not None:
            return f"{ratio:.2f}"
        rows = [run["rows"].get(workload, {}).get(library, {}) for run in self.runs()]
        if any("wrong" in row for row in rows):
            return "wrong"
        return "failed" if any("failed" in row for row in rows) else "-"


def load(folder: Path) -> list[Results]:
    """Return the result files of a folder; those of options.py have no runs and are not among them."""
    found = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "runs" in content:
            found.append(Results(path, content))
    return found


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.3g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def heading(results: Results) -> Iterator[str]:
    """Yield what a result file was measured on, and what the machine could do meanwhile."""
    content, runs = results.content, results.runs()
    machine = content["machine"]
    every = [run for run in content["runs"] if run["threads"] == results.threads]
    agreed = sum(run["limits"]["agree"] for run in every)
    yield f"### {machine['cpu']}, {results.threads} threads, {content['isa']}"
    yield ""
    versions = ", ".join(
        f"{name} {info['version']}" + ("" if info["held"] else " (not held to this instruction set)")
        for name, info in content["libraries"].items()
    )
    limits = [
        f"{n} {results.limit(n) / 1e9:,.1f} GFLOP/s" for n in runs[0]["limits"]["before"] if n != "read"
    ]
    yield f"`{results.name}.json`, {runs[-1]['date'][:10]}, commit {content['commit']}. {versions}."
    yield f"Limits: {', '.join(limits)}, reading {results.limit('read') / 1e9:,.1f} GB/s; before and after"
    yield f"agree within 5 % in {agreed} of {len(every)} runs" + (
        ", and those count." if agreed else ", so these numbers are provisional."
    )
    yield ""


def times_table(results: Results) -> Iterator[str]:
    """Yield every timed row: the first library's time, how near the limit it is, and the others."""
    head = ["call", f"{results.first} ms", "of limit", *(f"{p} x" for p in results.peers), "beside"]
    rows = [head]
    for w in results.workloads():
        if w.memory:
            continue
        of_limit = results.of_limit(w)
        base = results.value(w.name, results.first, "base_ratio")
        rows.append(
            [
                w.name,
                _milliseconds(results.value(w.name, results.first, "median")),
                "-" if of_limit is None else f"{of_limit:.1%}",
                *(results.cell(w.name, peer) for peer in results.peers),
                "" if base is None else f"{base:.3f} of {w.base}",
            ]
        )
    if len(rows) > 1:
        yield from table(rows)
        yield ""


def memory_table(results: Results) -> Iterator[str]:
    """Yield what calls take beyond their output, in MiB."""
    libraries = [results.first, *results.peers]
    rows = [["MiB beyond the output", "work space as explained", *libraries]]
    for w in results.workloads():
        if not w.memory:
            continue
        found = [results.value(w.name, library, "growth_bytes") for library in libraries]
        notes = results.runs()[0]["rows"][w.name].get(results.first, {}).get("notes", {})
        told = notes.get("workspace_bytes")
        sizes = [f"{x / 2**20:.2f}" if x is not None else "-" for x in (told, *found)]
        rows.append([w.name.removeprefix("memory-"), *sizes])
    if len(rows) > 1:
        yield from table(rows)
        yield ""


def page_section(files: list[Results]) -> Iterator[str]:
    """Yield the results of docs/benchmarks.md."""
    if not files:
        yield "There are no result files."
    for results in files:
        yield from heading(results)
        yield from times_table(results)
        yield from memory_table(results)
        for name, title, _ in plots_of(results):
            yield f"![{title}](plots/{name})"
            yield ""


def readme_section(files: list[Results]) -> Iterator[str]:
    """Yield the table of README.md: a column a result file."""
    columns = [
        f"{r.content['machine']['cpus']} cores, {r.content['isa']}, {r.threads} threads" for r in files
    ]
    rows = [["call", *columns]]
    for w in WORKLOADS.values():
        if not any(fnmatch(w.name, pattern) for pattern in README_ROWS) or w.variant:
            continue
        cells = []
        for results in files:
            ms = _milliseconds(results.value(w.name, results.first, "median"))
            best = results.best_peer(w.name)
            cells.append(ms + (f" ({best[1]:.2f}x, {best[0]})" if best else ""))
        if any(cell != "-" for cell in cells):
            rows.append([w.name, *cells])
    yield from table(rows)


# --- plots ---

Draw = Callable[[Any], None]


def plots_of(results: Results) -> Iterator[tuple[str, str, Draw]]:
    """Yield file name, title and drawing function of each plot that the file has data for."""
    timed = [w for w in results.workloads() if not w.memory and results.of_limit(w) is not None]
    rows = [w for w in timed if not w.variant and w.group.startswith(("prefill", "decode"))]
    if rows:
        yield f"{results.name}-limit.svg", "part of the machine's limit", lambda ax: _bars(ax, results, rows)
    over = [w for w in timed if w.group == "over-n"]
    if len(over) > 2:
        yield f"{results.name}-over-n.svg", "time per operation over N", lambda ax: _over_n(ax, results, over)
    if len(results.all_threads) > 1 and timed:
        yield f"{results.name}-scaling.svg", "scaling over threads", lambda ax: _scaling(ax, results, timed)


def _bars(ax: Any, results: Results, rows: list[Workload]) -> None:
    ax.figure.set_size_inches(8, 1 + 0.2 * len(rows))
    ax.barh([w.name for w in rows], [100 * (results.of_limit(w) or 0) for w in rows])
    ax.invert_yaxis()
    ax.tick_params(axis="y", labelsize=7)
    ax.set_xlabel("% of the limit measured in the same run")


def _over_n(ax: Any, results: Results, rows: list[Workload]) -> None:
    for causal in (False, True):
        picked = [w for w in rows if w.causal == causal]
        picoseconds = [1e12 * (results.value(w.name, results.first, "median") or 0) / w.flops for w in picked]
        ax.plot([w.seqlen_kv for w in picked], picoseconds, "o-", label="causal" if causal else "full")
    ax.set_xscale("log", base=2)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("N")
    ax.set_ylabel("ps per floating-point operation")
    ax.legend()


def _scaling(ax: Any, results: Results, rows: list[Workload]) -> None:
    """Speed over that of the fewest threads, and that of the machine's own limits."""
    fewest, counts = results.all_threads[0], results.all_threads
    for name in ("float32", "read"):
        speeds = [results.limit(name, n) / results.limit(name, fewest) for n in counts]
        ax.plot(counts, speeds, "k--" if name == "float32" else "k:", label=f"limit: {name}")
    for w in rows:
        times = [results.value(w.name, results.first, "median", n) for n in counts]
        if None not in times:
            ax.plot(counts, [times[0] / t for t in times], "o-", label=w.name)
    ax.set_xlabel("threads")
    ax.set_ylabel(f"speed over {fewest} thread(s)")
    ax.legend(fontsize=6)


def digest(results: Results) -> str:
    """Return what a plot says that it was drawn from."""
    return hashlib.sha256(json.dumps(results.content, sort_keys=True).encode()).hexdigest()[:16]


def draw(path: Path, title: str, plot: Draw, source: str) -> None:
    """Write a plot."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "pyflash"  # the same data make the same file
    from matplotlib import pyplot

    figure, ax = pyplot.subplots(figsize=(8, 5))
    plot(ax)
    ax.set_title(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None, "Description": f"data {source}"})
    pyplot.close(figure)


def pages(files: list[Results]) -> Iterator[tuple[Path, str]]:
    """Yield both pages as they should be; one without the mark is left as it is."""
    sections: dict[str, tuple[Path, Callable[[list[Results]], Iterable[str]]]] = {
        "measured": (ROOT / "README.md", readme_section),
        "results": (ROOT / "docs" / "benchmarks.md", page_section),
    }
    for name, (path, section) in sections.items():
        text = path.read_text(encoding="utf-8")
        if f"<!-- {name}: written by {WRITER} -->" in text:
            yield path, replaced(text, name, section(files), WRITER)


def main(arguments: list[str] | None = None) -> int:
    """Write or check; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is stale")
    check = parser.parse_args(arguments).check
    files, stale = load(RESULTS), []
    for path, text in pages(files):
        if path.read_text(encoding="utf-8") != text:
            stale.append(path)
            if not check:
                path.write_text(text, encoding="utf-8")
    wanted = set()
    for results in files:
        for name, title, plot in plots_of(results):
            path, source = PLOTS / name, digest(results)
            wanted.add(path)
            if not path.exists() or source not in path.read_text(encoding="utf-8"):
                stale.append(path)
                if not check:
                    draw(path, title, plot, source)
    for path in sorted(set(PLOTS.glob("*.svg")) - wanted):
        stale.append(path)
        if not check:
            path.unlink()
    for path in stale:
        name = path.relative_to(ROOT)
        print(f"{name} is stale: run python {WRITER}" if check else f"{name} written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main())
