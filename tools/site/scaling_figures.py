"""The pictures of docs/scaling.md, drawn from `pyflash.distributed.scaling` and the measured points."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from palette import SERIES, C

from pyflash.distributed import scaling
from pyflash.distributed.scaling import H200, Hardware, Link, Workload

#: Files of measured points; each that is there is drawn.
MEASURED = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "ring"

#: One layer of a model with 32 heads on 8, of 128, in bfloat16.
LAYER = Workload(tokens=1 << 20, heads=32, kv_heads=8, head_dim=128)
LENGTHS = {"128 Ki": 1 << 17, "1 Mi": 1 << 20, "4 Mi": 1 << 22, "16 Mi": 1 << 24}
GPUS = [1 << i for i in range(3, 13)]


def _of(tokens: int) -> Workload:
    return dataclasses.replace(LAYER, tokens=tokens)


def _gpus(ax: Axes, gpus: list[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(gpus, [f"{n:,}" for n in gpus])
    ax.minorticks_off()
    ax.set_xlabel("GPUs")


def _share(ax: Axes) -> None:
    ax.set_ylim(0, 1.02)
    ax.set_yticks(np.arange(0, 1.01, 0.2), [f"{n} %" for n in range(0, 101, 20)])
    ax.grid(axis="y", color=C["line"], lw=0.5)


def scaling_measured() -> Figure:
    """Draw predicted over measured times of every file of measured points."""
    found: dict[str, list[tuple[str, float]]] = {}
    for path in sorted(MEASURED.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        ratios = found.setdefault(f"{content['machine']}, {content['engine']}", [])
        for run in content["prefill"]:
            hardware, call = scaling.hardware_of(content, run), scaling.workload_of(run)
            shape = f"{run['ranks']} ranks, {run['tokens']:,} tokens, {run['heads']}/{run['kv_heads']} heads"
            for name, seconds in run["seconds"].items():
                if name == "heads":
                    predicted = scaling.head_parallel(hardware, call, run["ranks"])
                else:
                    predicted = scaling.ring(hardware, call, run["ranks"], name)
                ratios.append((f"{shape}, {name}", predicted.seconds / seconds))
        for run in content.get("decode", ()):
            predicted = scaling.decode(scaling.hardware_of(content), scaling.workload_of(run), run["ranks"])
            shape = f"{run['ranks']} ranks, {run['tokens']:,} keys"
            ratios.append((f"{shape}, decode", predicted.seconds / run["seconds"]))
    rows = sum(map(len, found.values()))
    figure, ax = plt.subplots(figsize=(7.4, 0.9 + 0.24 * rows))
    labels: list[str] = []
    for colour, (machine, ratios) in zip(SERIES, found.items(), strict=False):
        at = np.arange(len(labels), len(labels) + len(ratios))
        ax.barh(at, [100 * (ratio - 1) for _, ratio in ratios], height=0.6, color=colour, label=machine)
        labels += [label for label, _ in ratios]
    ax.set_yticks(range(len(labels)), labels, fontsize=8)
    ax.invert_yaxis()
    ax.axvline(0, color=C["ink"], lw=0.8)
    ax.set_xlim(-12, 12)
    ax.set_xlabel("predicted time against measured, %")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def scaling_steps() -> Figure:
    """Draw what a step of the ring takes, over the tokens of a rank, and from where work hides messages."""
    figure, ax = plt.subplots(figsize=(7.4, 4.2))
    tokens = np.logspace(7, 17, 41, base=2)
    kernel = tokens**2 / 2 * LAYER.flops_of_pair / H200.flops
    merge = tokens * scaling.MERGE_PASSES * LAYER.state_bytes / H200.merge
    assert H200.far is not None
    ax.loglog(tokens, kernel, color=C["one"], lw=2.5, label="kernel")
    ax.loglog(tokens, merge, color=C["three"], label="merging the state")
    ax.loglog(tokens, kernel + merge, color=C["one"], lw=1, ls="--", label="kernel and merging")
    for link, name, style in ((H200.near, "NVLink", ":"), (H200.far, "InfiniBand", "-")):
        message = link.seconds(tokens * LAYER.kv_bytes)
        ax.loglog(tokens, message, color=C["two"], ls=style, label=f"message, {name}")
        border = scaling.hidden_from(H200, LAYER, link)
        ax.plot(border, link.seconds(border * LAYER.kv_bytes), "o", color=C["two"])
        ax.annotate(f"{border:,.0f} tokens", (border, link.seconds(border * LAYER.kv_bytes)), (6, -12),
                    textcoords="offset points", fontsize=9)  # fmt: skip
    ax.axhline(H200.step_seconds, color=C["faint"], lw=1, label="Python, launches (assumed)")
    ax.set_xlabel("tokens of a rank")
    ax.set_ylabel("seconds of a step")
    ax.set_xscale("log", base=2)
    ticks = [1 << i for i in range(7, 18, 2)]
    ax.set_xticks(ticks, [f"{n:,}" for n in ticks])
    ax.set_ylim(1e-6, 1)
    ax.legend(loc="upper left")
    return figure


def scaling_efficiency() -> Figure:
    """Draw the efficiency of zigzag over GPUs for several lengths, with and without what the caller costs."""
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 3.6), sharey=True)
    free = dataclasses.replace(H200, step_seconds=0.0)
    for ax, hardware, title in (
        (axes[0], H200, f"{1e3 * H200.step_seconds:.2g} ms of Python a step"),
        (axes[1], free, "none"),
    ):
        for colour, (name, length) in zip(SERIES, LENGTHS.items(), strict=True):
            one = scaling.alone(H200, _of(length))
            times = [scaling.balanced_seconds(hardware, _of(length), gpus) for gpus in GPUS]
            found = one / np.array(times) / np.array(GPUS)
            ax.plot(GPUS, found, "o-", ms=3, color=colour, label=f"{name} tokens")
        _gpus(ax, GPUS)
        ax.set_xticks(GPUS[::2], [f"{n:,}" for n in GPUS[::2]])
        ax.set_title(title)
        _share(ax)
    axes[0].set_ylabel("efficiency of zigzag")
    axes[1].legend(loc="lower left")
    return figure


def scaling_heads() -> Figure:
    """Draw the time of a call over GPUs: three schedules and head-parallel attention."""
    gpus = [1 << i for i in range(10)]
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 3.6), sharey=True)
    for ax, kv_heads in zip(axes, (8, 32), strict=True):
        call = dataclasses.replace(LAYER, kv_heads=kv_heads)
        one = scaling.alone(H200, call)
        for colour, schedule in zip(SERIES, ("zigzag", "contiguous"), strict=False):
            times = [scaling.ring(H200, call, n, schedule).seconds for n in gpus]
            ax.loglog(gpus, times, "o-", ms=3, color=colour, label=f"ring, {schedule}")
        times = [scaling.head_parallel(H200, call, n).seconds for n in gpus]
        ax.loglog(gpus, times, "o-", ms=3, color=SERIES[2], label="all to all")
        ax.loglog(gpus, [one / n for n in gpus], color=C["faint"], lw=1, ls="--", label="one GPU / GPUs")
        _gpus(ax, gpus)
        ax.set_xticks(gpus[::2], [str(n) for n in gpus[::2]])
        ax.set_title(f"1 Mi tokens, 32 heads on {kv_heads}")
    axes[0].set_ylabel("seconds of a call")
    axes[0].legend(loc="lower left")
    return figure


def scaling_decode() -> Figure:
    """Draw the latency of a decode step over GPUs, with and without what the call costs its caller."""
    gpus = [1 << i for i in range(13)]
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 3.6), sharey=True)
    free = dataclasses.replace(H200, decode_seconds=0.0)
    for ax, hardware, title in (
        (axes[0], H200, f"{1e3 * H200.decode_seconds:.2g} ms of Python a call"),
        (axes[1], free, "none (a CUDA graph)"),
    ):
        for colour, (name, length) in zip(SERIES, LENGTHS.items(), strict=True):
            times = np.array([scaling.decode(hardware, _of(length), n).seconds for n in gpus])
            ax.loglog(gpus, times, "-", color=colour, label=f"{name} keys")
            best = int(np.argmin(times))
            ax.plot(gpus[best], times[best], "o", color=colour)
        _gpus(ax, gpus)
        ax.set_xticks(gpus[::3], [f"{n:,}" for n in gpus[::3]])
        ax.set_title(title)
    axes[0].set_ylabel("seconds of a layer's step")
    axes[1].legend(loc="upper right")
    return figure


def scaling_links() -> Figure:
    """Draw how efficiency depends on links between hosts, on merging and on what a step costs its caller."""
    figure, axes = plt.subplots(1, 3, figsize=(7.4, 3.2), sharey=True)
    call, sizes = LAYER, (64, 128, 256, 512)
    free = dataclasses.replace(H200, step_seconds=0.0)

    def draw(ax: Axes, values: np.ndarray, used: list[Hardware], mark: float, label: str) -> None:
        for colour, ranks in zip(SERIES, sizes, strict=True):
            found = [scaling.ring(hardware, call, ranks).efficiency for hardware in used]
            ax.semilogx(values, found, color=colour, label=f"{ranks} GPUs")
        ax.axvline(mark, color=C["faint"], lw=1)
        ax.set_xlabel(label)
        _share(ax)

    speeds = np.logspace(0, np.log10(450), 12)
    links = [dataclasses.replace(free, far=Link(1e9 * x, 15e-6)) for x in speeds]
    draw(axes[0], speeds, links, 50, "link between hosts, GB/s")
    speeds = np.logspace(-1, 2, 12)
    draw(axes[1], speeds, [dataclasses.replace(free, merge=1e12 * x) for x in speeds], 4.2, "merging, TB/s")
    costs = np.logspace(-5, -2, 12)
    steps = [dataclasses.replace(H200, step_seconds=x) for x in costs]
    draw(axes[2], 1e3 * costs, steps, 1e3 * H200.step_seconds, "Python of a step, ms")
    axes[0].set_ylabel("efficiency, 1 Mi tokens")
    axes[0].legend(loc="lower right", fontsize=8)
    return figure
