"""Tables and plots of README.md and docs/benchmarks.md, made from the result files.

python benchmarks/report.py           rewrite the marked parts of both pages, and the plots
python benchmarks/report.py --check   fail if one of them does not fit the result files
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pyflash.bench import _plots
from pyflash.bench._limits import described
from pyflash.bench._results import Results
from pyflash.bench._workloads import WORKLOADS

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


def load(folder: Path) -> list[Results]:
    """Return the result files of a folder; those of options.py have no runs and are not among them."""
    found = []
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "runs" in content:
            found.append(Results(path.stem, content))
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
    on_device = results.on_device(results.first)
    words = [machine["gpu"], "beside"] if on_device else []
    yield f"### {' '.join([*words, machine['cpu']])}, {results.threads} threads{isa_of(results)}"
    yield ""
    versions = ", ".join(
        f"{name} {info['version']}" + (" (not held to this instruction set)" if _is_free(info) else "")
        for name, info in content["libraries"].items()
    )
    limits = described({name: results.limit(name) for name in runs[0]["limits"]["before"]})
    yield f"`{results.name}.json`, {runs[-1]['date'][:10]}, commit {content['commit']}. {versions}."
    yield f"Limits: {limits}; before and after"
    yield f"agree within 5 % in {agreed} of {len(every)} runs" + (
        ", and those count." if agreed else ", so these numbers are provisional."
    )
    yield ""


def isa_of(results: Results) -> str:
    """Return the instruction set of the host in words, nothing where it was not noted."""
    isa = results.content["isa"]
    return f", {isa}" if isa else ""


def _is_free(info: dict[str, Any]) -> bool:
    """Return whether a peer on the host took a better instruction set than the run's."""
    return not (info["held"] or info.get("on_device") or "backend" in info)


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
        for plot in _plots.plots_of(results):
            yield f"![{plot.title}](plots/{picture(results, plot).name})"
            yield ""


def readme_section(files: list[Results]) -> Iterator[str]:
    """Yield the table of README.md: a column a result file."""
    columns = [f"{r.content['machine']['cpus']} cores{isa_of(r)}, {r.threads} threads" for r in files]
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


def picture(results: Results, plot: _plots.Plot) -> Path:
    """Return the file of a plot."""
    return PLOTS / f"{results.name}-{plot.name}.svg"


def digest(results: Results) -> str:
    """Return what a plot says that it was drawn from."""
    return hashlib.sha256(json.dumps(results.content, sort_keys=True).encode()).hexdigest()[:16]


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
        for plot in _plots.plots_of(results):
            path, source = picture(results, plot), digest(results)
            wanted.add(path)
            if not path.exists() or source not in path.read_text(encoding="utf-8"):
                stale.append(path)
                if not check:
                    _plots.draw(path, plot, results, source)
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
