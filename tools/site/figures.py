"""The pictures of the documentation, drawn from `pyflash.trace`, `pyflash.spans` and real caches.

Each function draws one picture from numbers that the library gives; nothing is recomputed here. Those of
docs/scaling.md are in `scaling_figures`.
"""

from __future__ import annotations

import functools
import html
import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, PathPatch, Rectangle
from matplotlib.path import Path
from palette import COLOURS, SERIES, STYLE, C
from scaling_figures import (
    scaling_decode,
    scaling_efficiency,
    scaling_heads,
    scaling_links,
    scaling_measured,
    scaling_steps,
)

import pyflash

#: How large a picture becomes where there is room: 10 points of a font are some 14 pixels.
PIXELS_OF_AN_INCH = 100

TILE = 4
NUM_KEYS = 32


def one_row() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return queries, keys and values of the example that the pages go through: one row, 32 keys."""
    rng = np.random.default_rng(4)
    q, k, v = (rng.standard_normal((n, 16)) for n in (1, NUM_KEYS, NUM_KEYS))
    return 2 * q, k, v


def online_softmax() -> Figure:
    """Draw scores with their running maximum, correction factors, running sum and error, tile by tile."""
    steps = pyflash.trace(*one_row(), tile=TILE).steps
    figure, axes = plt.subplots(
        4, 1, figsize=(7.4, 6.6), sharex=True, gridspec_kw={"height_ratios": [3, 1.3, 1.3, 1.3]}
    )
    centre = [(step.key_lo + step.key_hi - 1) / 2 for step in steps]
    for number, step in enumerate(steps):
        keys = np.arange(step.key_lo, step.key_hi)
        colour = C["one"] if number % 2 == 0 else C["faint"]
        axes[0].bar(keys, step.scores[0], width=0.8, color=colour)
        axes[0].hlines(step.m_after[0], step.key_lo - 0.5, step.key_hi - 0.5, color=C["two"], lw=2)
    axes[0].set_title("scores of one row, tile by tile, and the running maximum m")
    alpha = np.array([step.alpha[0] for step in steps])
    bars = axes[1].bar(centre, alpha, width=3, color=C["soft"])
    for bar, value, step in zip(bars, alpha, steps, strict=True):
        if step.rescaled:
            bar.set_color(C["two"])
        axes[1].annotate(f"{value:.2f}", (bar.get_x() + 1.5, value), ha="center", va="bottom", fontsize=8)
    axes[1].set_ylim(0, 1.45)
    axes[1].set_title("correction factor alpha = exp(m_old - m_new); orange: what was summed up is rescaled")
    axes[2].bar(centre, [step.l[0] for step in steps], width=3, color=C["three"])
    axes[2].set_title("running sum l")
    axes[3].plot(centre, [step.error for step in steps], "o-", color=C["four"])
    axes[3].set_yscale("log")
    axes[3].set_title("largest error of o / l against the exact answer")
    axes[3].set_xlabel("key")
    axes[3].set_xticks(range(0, NUM_KEYS + 1, TILE))
    return figure


def _cells(ax: Axes, cells: np.ndarray, colour: str, gap: float = 0.0) -> None:
    """Fill the cells of a matrix that are True, as one path of the runs in each row."""
    corners: list[tuple[float, float]] = []
    for row, line in enumerate(cells):
        edges = np.flatnonzero(np.diff(line, prepend=False, append=False))
        for lo, hi in edges.reshape(-1, 2):
            left, right, top, bottom = lo + gap, hi - gap, row + gap, row + 1 - gap
            corners += [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * (len(corners) // 5)
    ax.add_patch(PathPatch(Path(corners, codes), facecolor=C[colour], linewidth=0))


def _square(ax: Axes, size: int) -> None:
    """Give a picture of a matrix its limits, row 0 at the top."""
    ax.set_xlim(0, size)
    ax.set_ylim(size, 0)
    ax.set_aspect("equal")


def score_matrix() -> Figure:
    """Draw the causal score matrix as the tiled pass sees it: done, held now, not yet read, never read."""
    rng = np.random.default_rng(0)
    n, tile, now = 24, 4, 3
    q, k, v = (rng.standard_normal((n, 16)) for _ in range(3))
    figure, axes = plt.subplots(figsize=(5.4, 4.6))
    for number, step in enumerate(pyflash.trace(q, k, v, tile=tile, causal=True).steps):
        visible = np.zeros((n, n), bool)
        visible[:, step.key_lo : step.key_hi] = step.scores > -np.inf
        _cells(axes, visible, "soft" if number < now else "two" if number == now else "line", gap=0.04)
    _square(axes, n)
    axes.set_xticks(range(0, n + 1, tile))
    axes.set_yticks(range(0, n + 1, tile))
    axes.set_xlabel("key")
    axes.set_ylabel("query")
    named = {"soft": "folded into the state, forgotten", "two": "in memory now", "line": "not yet read"}
    handles = [Rectangle((0, 0), 1, 1, color=C[name]) for name in named]
    axes.legend(handles, named.values(), loc="upper right", bbox_to_anchor=(1.02, 1.0))
    return figure


def guard() -> Figure:
    """Draw a row whose first tile is hidden, with and without the guard."""
    q, k, v = one_row()
    shown = dict(tile=TILE, window=(11, 0), q_offset=NUM_KEYS - 1)
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 2.6), sharey=True)
    for ax, guarded in zip(axes, (True, False), strict=True):
        with np.errstate(invalid="ignore"):
            steps = pyflash.trace(q, k, v, guard=guarded, **shown).steps
        for number, step in enumerate(steps):
            l = step.l[0]
            if np.isnan(l):
                ax.bar(number, 1, color=C["bad"], alpha=0.25, width=0.8)
                ax.text(number, 0.5, "NaN", ha="center", va="center", color=C["bad"], fontsize=9)
            else:
                ax.bar(number, l, color=C["three"], width=0.8)
                ax.text(number, l, f"{l:.2f}", ha="center", va="bottom", fontsize=8)
        ax.set_title("guarded" if guarded else "unguarded: guard=False")
        ax.set_xticks(range(len(steps)))
        ax.set_xlabel("tile; the row sees keys from tile 5 on")
    axes[0].set_ylabel("running sum l")
    return figure


def _grid(ax: Axes, visible: np.ndarray, tile: int, title: str) -> None:
    """Draw which keys rows see, and which tiles are skipped, need no test, or are tested."""
    size = len(visible)
    kinds = {colour: np.zeros_like(visible) for colour in ("line", "two", "one")}
    for row in range(0, size, tile):
        for key in range(0, size, tile):
            at = slice(row, row + tile), slice(key, key + tile)
            if visible[at].all():
                kinds["one"][at] = True
            elif visible[at].any():
                kinds["two"][at], kinds["line"][at] = visible[at], ~visible[at]
    for colour, cells in kinds.items():
        _cells(ax, cells, colour)
    for edge in range(0, size + 1, tile):
        ax.axhline(edge, color=C["faint"], lw=0.5)
        ax.axvline(edge, color=C["faint"], lw=0.5)
    _square(ax, size)
    ax.spines[:].set_visible(True)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_title(title, fontsize=9)


def _seen(spans: Any = None, **options: Any) -> np.ndarray:
    """Return which keys 24 rows see: those whose probability is not 0, of scores that are all equal."""
    q = np.zeros((24, 1, 8), np.float32)
    _, lse = pyflash.flash_attention(q, q, q, spans=spans, return_lse=True, **options)
    stats = pyflash.attention_stats(q, q, lse, want=("rows",), rows=np.arange(24), spans=spans, **options)
    seen: np.ndarray = stats.rows[0] > 0
    return seen


def masks() -> Figure:
    """Draw six masks of the same size and what becomes of their tiles."""
    n, tile = 24, 4
    ids = np.repeat([0, 1, 2], [7, 11, 6])
    spans = pyflash.spans
    pictures = {
        "causal": _seen(causal=True),
        "window=(7, 0)": _seen(window=(7, 0), causal=True),
        "window and sink_tokens=3": _seen(window=(7, 0), causal=True, sink_tokens=3),
        "spans.chunked, chunk of 8": _seen(spans.chunked(n, n, 8), causal=True),
        "spans.prefix_lm, prefix of 10": _seen(spans.prefix_lm(n, n, 10)),
        "spans.documents": _seen(spans.documents(ids, ids), causal=True),
    }
    figure, axes = plt.subplots(2, 3, figsize=(7.4, 5.6))
    for ax, (title, visible) in zip(axes.flat, pictures.items(), strict=True):
        _grid(ax, visible, tile, title)
    named = {"one": "seen, tile without a test", "two": "seen, tile with a test", "line": "hidden there"}
    handles = [Rectangle((0, 0), 1, 1, color=C[name]) for name in named]
    figure.legend(handles, named.values(), loc="outside lower center", ncols=3)
    return figure


def splits() -> Figure:
    """Draw four splits of one row's keys, their states, and the tree in which these are merged."""
    found = pyflash.trace(*one_row(), tile=TILE, num_splits=4)
    last = {step.split: step for step in found.steps}
    figure, ax = plt.subplots(figsize=(7.4, 3.9))
    ax.set_axis_off()
    ax.set_xlim(-0.1, 4.1)
    ax.set_ylim(-0.2, 3.6)

    def box(x: float, y: float, text: str, colour: str) -> None:
        ax.add_patch(Rectangle((x - 0.44, y), 0.88, 0.62, facecolor=C["paper"], edgecolor=colour, lw=1.5))
        ax.text(x, y + 0.31, text, ha="center", va="center", fontsize=8.5)

    def arrow(start: tuple[float, float], end: tuple[float, float]) -> None:
        ax.add_patch(FancyArrowPatch(start, end, arrowstyle="->", mutation_scale=10, color=C["faint"]))

    for split, step in last.items():
        lo = min(s.key_lo for s in found.steps if s.split == split)
        box(split + 0.5, 2.6, f"split {split}\nkeys {lo} to {step.key_hi - 1}", SERIES[split])
        box(split + 0.5, 1.6, f"m = {step.m_after[0]:.3f}\nl = {step.l[0]:.3f}", SERIES[split])
        arrow((split + 0.5, 2.58), (split + 0.5, 2.24))
    for merged in found.combinations:
        lo, hi = merged.left[0], merged.right[1]
        level = 0.7 if hi - lo == 2 else -0.2
        x = (lo + hi) / 2
        text = f"m = {merged.m[0]:.3f}\nl = {merged.l[0]:.3f}"
        box(x, level, text, C["ink"])
        for side in (merged.left, merged.right):
            below = 1.58 if side[1] - side[0] == 1 else 0.68
            end = x + (0.2 if side is merged.right else -0.2), level + 0.64
            arrow(((side[0] + side[1]) / 2, below), end)
    text = f"error against\nexact: {found.error:.0e}"
    ax.text(3.55, 0.1, text, fontsize=8.5, color=C["faint"], va="center")
    return figure


def pages() -> Figure:
    """Draw the pages of a cache with a prompt and two continuations that share its pages."""
    cache = pyflash.PagedKVCache(num_pages=8, page_size=4, num_kv_heads=1, head_dim=8)
    tokens = np.ones((10, 1, 8), np.float32)
    first = cache.add_sequence()
    cache.append(first, tokens, tokens)
    second = cache.fork(first)
    cache.append(second, tokens[:3], tokens[:3])
    cache.append(first, tokens[:1], tokens[:1])
    table, lengths = cache.block_table([first, second]), cache.seq_lens([first, second])
    figure, ax = plt.subplots(figsize=(7.4, 3.6))
    ax.set_axis_off()
    ax.set_xlim(-1.6, 8.1)
    ax.set_ylim(-0.3, 4.5)
    holders = [int(np.count_nonzero(table == page)) for page in range(cache.num_pages)]
    for page, held in enumerate(holders):
        colour = {0: "paper", 1: "soft", 2: "two"}[held]
        ax.add_patch(Rectangle((page, 1.7), 0.9, 0.9, facecolor=C[colour], edgecolor=C["faint"]))
        ax.text(page + 0.45, 2.15, str(page), ha="center", va="center")
    ax.text(-0.2, 2.15, "pool", ha="right", va="center")
    for row, (y, edge) in enumerate(((3.5, 2.62), (0.0, 1.68))):
        ax.text(-0.2, y + 0.35, f"sequence {row}\n{lengths[row]} tokens", ha="right", va="center", fontsize=9)
        for place, page in enumerate(int(p) for p in table[row] if p >= 0):
            ax.add_patch(Rectangle((place, y), 0.9, 0.7, facecolor=C["paper"], edgecolor=SERIES[0]))
            last = min(lengths[row], (place + 1) * 4) - 1
            text = f"{place * 4} to {last}" if last > place * 4 else str(last)
            ax.text(place + 0.45, y + 0.35, text, ha="center", va="center", fontsize=9)
            start = (place + 0.45, y if row == 0 else y + 0.7)
            ax.add_patch(
                FancyArrowPatch(
                    start, (page + 0.45, edge), arrowstyle="->", mutation_scale=10, color=SERIES[0]
                )
            )
    ax.text(8.0, 3.85, "orange: held by both", ha="right", va="center", fontsize=9, color=C["faint"])
    return figure


def groups() -> Figure:
    """Draw which key/value head each query head reads, and what a token takes in the cache."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.4, 2.7), gridspec_kw={"width_ratios": [2.4, 1]})
    num_heads, num_kv_heads = 8, 2
    left.set_axis_off()
    left.set_xlim(-1.9, num_heads)
    left.set_ylim(-0.2, 2.6)
    for head in range(num_heads):
        kv = head // (num_heads // num_kv_heads)
        x = (kv + 0.5) * num_heads / num_kv_heads
        left.add_patch(Rectangle((head + 0.1, 1.7), 0.8, 0.6, facecolor=C["paper"], edgecolor=SERIES[kv]))
        left.text(head + 0.5, 2.0, str(head), ha="center", va="center")
        left.plot([head + 0.5, x], [1.7, 0.6], color=SERIES[kv], lw=1)
        shape = Rectangle((x - 0.6, 0.0), 1.2, 0.6, facecolor=C["paper"], edgecolor=SERIES[kv], lw=2)
        left.add_patch(shape)
        left.text(x, 0.3, f"k, v {kv}", ha="center", va="center")
    left.text(-0.1, 2.0, "query heads", ha="right", va="center")
    left.text(-0.1, 0.3, "key/value\nheads", ha="right", va="center")
    names, sizes = [], []
    for name, heads in (("8 heads", 8), ("2 heads", 2), ("1 head", 1)):
        cache = pyflash.PagedKVCache(1, 1, num_kv_heads=heads, head_dim=128, dtype="float16")
        names.append(name)
        sizes.append(cache.k_cache.nbytes + cache.v_cache.nbytes)
    bars = right.barh(names[::-1], sizes[::-1], color=[C["soft"], C["one"], C["soft"]])
    right.bar_label(bars, [f"{size:,} B" for size in sizes[::-1]], padding=3, fontsize=9)
    right.set_xlim(0, 1.5 * sizes[0])
    right.set_xticks([])
    right.spines["bottom"].set_visible(False)
    right.set_title("a token, float16, width 128")
    return figure


#: What draws each picture.
FIGURES: dict[str, Callable[[], Figure]] = {
    "online-softmax": online_softmax,
    "score-matrix": score_matrix,
    "guard": guard,
    "masks": masks,
    "splits": splits,
    "pages": pages,
    "groups": groups,
    "scaling-measured": scaling_measured,
    "scaling-steps": scaling_steps,
    "scaling-efficiency": scaling_efficiency,
    "scaling-heads": scaling_heads,
    "scaling-decode": scaling_decode,
    "scaling-links": scaling_links,
}


@functools.cache
def svg(name: str) -> str:
    """Return a picture as a file by itself."""
    with plt.style.context([STYLE, {"svg.hashsalt": name}]):
        figure = FIGURES[name]()
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        plt.close(figure)
    text = file.getvalue()
    for variable, (mark, colour) in COLOURS.items():
        text = text.replace(mark, f"var(--picture-{variable}, {colour})")
    # Texts in the reader's own sans-serif; the sizes stay.
    return re.sub(r"(font: [0-9.]+px) [^;\"]*", r"\1 system-ui, sans-serif", text)


def inline(name: str, caption: str) -> str:
    """Return a picture as a part of a page, with a caption that is its description too.

    Parameters
    ----------
    name : str
        A key of `FIGURES`.
    caption : str
        Text.
    """
    text = svg(name)
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # Several pictures share a page, and so their names.
    for pattern in (r'id="()', r'href="(#)', r"url\((#)"):
        text = re.sub(pattern, lambda match: f"{match[0]}{name}-", text)
    size = re.search(r' width="([0-9.]+)pt" height="[^"]*"', text)
    assert size is not None
    widest = round(float(size[1]) / 72 * PIXELS_OF_AN_INCH)
    text = text.replace(size[0], f' style="max-width: {widest}px"', 1)
    text = text.replace("<svg", f'<svg role="img" aria-labelledby="caption-{name}"', 1)
    return (
        f'<figure class="picture"><div>{text}</div>'
        f'<figcaption id="caption-{name}">{html.escape(caption)}</figcaption></figure>'
    )
