"""Pictures of a result file: speed over length, fraction of the limit, peak memory, scaling over threads."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from .._errors import PyflashError
from ._results import Results
from ._workloads import MEMORY_LENGTHS, Workload

#: Of Okabe and Ito, told apart by colour-blind readers too, and by markers besides. A library keeps its own
#: colour in all plots.
STYLES = {
    "c": ("#0072B2", "o"),
    "cuda": ("#009E73", "o"),
    "numpy": ("#56B4E9", "s"),
    "naive": ("#000000", "x"),
    "torch": ("#D55E00", "^"),
    "onnxruntime": ("#CC79A7", "v"),
    "openvino": ("#E69F00", "<"),
    "ggml": ("#8C6D31", ">"),
    "jax": ("#7F7F7F", "D"),
    "torch-flash": ("#D55E00", "v"),
    "torch-cudnn": ("#CC79A7", "<"),
    "torch-efficient": ("#E69F00", ">"),
}
OTHER_STYLES = [("#0072B2", "P"), ("#882255", "P"), ("#44AA99", "P"), ("#999933", "P")]
#: Memory is counted in pages of so many bytes.
PAGE = 4096
MANY_ROWS = 25


class Plot(NamedTuple):
    """One picture, and what has to be measured to draw it."""

    name: str
    title: str
    draw: Callable[[Any, Results], None]
    workloads: Callable[[Results], list[Workload]]
    needs: str


def check() -> None:
    """Raise PyflashError where nothing can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PyflashError(
            "bench: plots need the package 'matplotlib': pip install 'pyflash-attention[bench]'"
        )


def label(library: str) -> str:
    """Return how a library is called in a picture and a table."""
    return f"pyflash {library}" if library in ("c", "cuda", "numpy") else library


def threads_in_words(count: int) -> str:
    """Return so many threads."""
    return f"{count} thread{'s' if count > 1 else ''}"


def plots_of(results: Results) -> Iterator[Plot]:
    """Yield the plots that a file has data for."""
    for plot in PLOTS:
        if len(plot.workloads(results)) > 1 or (plot.name == "limit" and plot.workloads(results)):
            yield plot
    if len(results.all_threads) > 1 and _timed(results):
        yield Plot("scaling", "scaling over threads", _scaling, _timed, "")


def _timed(results: Results) -> list[Workload]:
    return [w for w in results.workloads() if not w.memory and results.of_limit(w) is not None]


def _compared(results: Results) -> list[Workload]:
    return [w for w in _timed(results) if not w.variant and w.group.startswith(("prefill", "decode"))]


def _over_n(results: Results) -> list[Workload]:
    """Return calls that differ in their length only; where there are none, those that are sized for a GPU."""
    timed = _timed(results)
    found = [w for w in timed if w.group == "over-n"]
    return found or [w for w in timed if w.device and w.seqlen_q == w.seqlen_kv and w.head_dim == 128]


def _memory_over_n(results: Results) -> list[Workload]:
    names = {f"memory-over-n-{n}" for n in MEMORY_LENGTHS}
    return [w for w in results.workloads() if w.name in names]


def _style(results: Results, library: str) -> dict[str, Any]:
    if library == "pyflash":  # a file from before there were backends to choose
        library = "c"
    others = [name for name in results.libraries if name not in STYLES]
    style = STYLES.get(library) or OTHER_STYLES[others.index(library) % len(OTHER_STYLES)]
    return {"color": style[0], "marker": style[1], "label": label(library)}


def _speed(ax: Any, results: Results) -> None:
    rows = _over_n(results)
    on_device = results.on_device(results.first)
    scale, unit = (1e12, "TFLOP/s") if on_device else (1e9, "GFLOP/s")
    speeds: list[float] = []
    for causal, line in ((False, "-"), (True, ":")):
        for library in results.libraries:
            points = [
                (w.seqlen_kv, w.flops / seconds / scale)
                for w in rows
                if w.causal == causal and (seconds := results.value(w.name, library, "median"))
            ]
            if points:
                style = _style(results, library)
                style["label"] += ", causal" if causal else ""
                ax.plot(*zip(*points, strict=True), linestyle=line, **style)
                speeds += [speed for _, speed in points]
    name, kind = ("matmul", "bfloat16 product") if on_device else ("float32", "multiply-adds in float32")
    peak = results.limit(name) / scale
    ax.axhline(peak, color="#555555", linewidth=0.8, linestyle="--")
    ax.text(
        1.0, peak, f"limit: {kind}", transform=ax.get_yaxis_transform(), ha="right", va="bottom", fontsize=8
    )
    if max(speeds) > 10 * min(speeds):
        ax.set_yscale("log")
    else:
        ax.set_ylim(bottom=0)  # ends the choice of limits, so it comes last
    _plain(ax.yaxis)
    _lengths(ax, [w.seqlen_kv for w in rows])
    w = rows[-1]
    tokens = "max(1, 16384/N) heads" if w.group == "over-n" else f"{w.num_heads} heads, 16,384 tokens in all"
    ax.set_xlabel(f"keys and queries (N), {tokens}, head_dim {w.head_dim}, {w.dtype}")
    ax.set_ylabel(f"{unit} of the two products")
    _legend(ax)


def _limit(ax: Any, results: Results) -> None:
    rows = _compared(results)
    ax.figure.set_size_inches(8, 1.6 + 0.22 * len(rows))
    for library in results.libraries:
        points = [
            (100 * part, y) for y, w in enumerate(rows) if (part := results.of_limit(w, library)) is not None
        ]
        if points:
            ax.plot(*zip(*points, strict=True), linestyle="", **_style(results, library))
    ax.set_yticks(range(len(rows)), [w.name for w in rows], fontsize=8 if len(rows) < MANY_ROWS else 7)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(left=0)
    ax.grid(axis="both", alpha=0.25)
    ax.set_xlabel("% of the limit measured in the same run: operations, or one pass over keys and values")
    _legend(ax)


def _memory(ax: Any, results: Results) -> None:
    rows = _memory_over_n(results)
    for library in results.libraries:
        points = [
            (w.seqlen_kv, max(grown, PAGE) / 2**20)
            for w in rows
            if (grown := results.value(w.name, library, "growth_bytes")) is not None
        ]
        if points:
            ax.plot(*zip(*points, strict=True), **_style(results, library))
    lengths = [w.seqlen_kv for w in rows]
    ax.plot(
        lengths, [8 * n * n / 2**20 for n in lengths], color="#999999", linewidth=0.8, linestyle="--",
        label="8 N² bytes, for comparison",
    )  # fmt: skip
    ax.set_yscale("log")
    _plain(ax.yaxis)
    _lengths(ax, lengths)
    ax.set_xlabel("keys and queries (N), one head, head_dim 64, float32")
    ax.set_ylabel("MiB beyond inputs and output, at the peak of one call")
    _legend(ax)


def _scaling(ax: Any, results: Results) -> None:
    """Speed over that of the fewest threads, and that of the machine's own limits."""
    fewest, counts = results.all_threads[0], results.all_threads
    for name in ("float32", "read"):
        speeds = [results.limit(name, n) / results.limit(name, fewest) for n in counts]
        ax.plot(counts, speeds, "k--" if name == "float32" else "k:", label=f"limit: {name}")
    for w in _timed(results):
        times = [results.value(w.name, results.first, "median", n) for n in counts]
        if all(times):
            ax.plot(counts, [(times[0] or 0) / (t or 1) for t in times], "o-", label=w.name)
    ax.set_xlabel("threads")
    ax.set_ylabel(f"speed over {fewest} thread(s)")
    ax.legend(fontsize=6)


def _lengths(ax: Any, lengths: list[int]) -> None:
    """Let the axis of lengths be logarithmic, with the lengths themselves as its ticks."""
    ax.set_xscale("log", base=2)
    ticks = sorted(set(lengths))
    ax.set_xticks(ticks, [f"{n:,}" for n in ticks])


def _plain(axis: Any) -> None:
    """Let numbers be numbers, not powers of ten."""
    axis.set_major_formatter(lambda value, position: f"{value:,.12g}")


def _legend(ax: Any) -> None:
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))


PLOTS = (
    Plot("speed", "speed over length", _speed, _over_n, "over-n, or gpu"),
    Plot("limit", "fraction of the machine's limit", _limit, _compared, "a prefill or a decode"),
    Plot("memory", "peak memory over length", _memory, _memory_over_n, "'memory-over-n-*'"),
)


def draw(path: Path, plot: Plot, results: Results, source: str = "") -> None:
    """Write a picture in the format that the suffix names; SVG notes what it was drawn from."""
    mpl = importlib.import_module("matplotlib")
    mpl.use("agg")
    settings = {
        "svg.hashsalt": "pyflash",  # the same data make the same file
        "svg.fonttype": "none",  # text stays text, to be read and found
        "font.family": ["DejaVu Sans", "sans-serif"],
        "axes.spines.top": False,
        "axes.spines.right": False,
        "savefig.facecolor": "white",
    }
    with mpl.rc_context(settings):
        pyplot = importlib.import_module("matplotlib.pyplot")
        figure, ax = pyplot.subplots(figsize=(8, 5))
        plot.draw(ax, results)
        content = results.content
        where = content["machine"].get("gpu") or content["machine"]["cpu"]
        words = [
            where,
            *filter(None, [content["isa"]]),
            threads_in_words(results.threads),
        ]
        ax.set_title(f"{plot.title}\n{', '.join(words)}", fontsize=10)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Description": f"data {source}"} if path.suffix == ".svg" else None
        figure.savefig(path, bbox_inches="tight", dpi=160, metadata=metadata)
        pyplot.close(figure)


def draw_all(results: Results, folder: Path) -> tuple[list[Path], list[str]]:
    """Draw what there are data for, as SVG and PNG; return the files, and what the rest would need."""
    plots = {plot.name: plot for plot in plots_of(results)}
    paths = []
    for plot in plots.values():
        for suffix in (".svg", ".png"):
            path = folder / f"{plot.name}{suffix}"
            draw(path, plot, results)
            paths.append(path)
    missing = [f"{plot.title}: measure {plot.needs}" for plot in PLOTS if plot.name not in plots]
    return paths, missing
