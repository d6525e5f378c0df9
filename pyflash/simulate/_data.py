"""What the page shows, as data: one trace, or one ring, for every combination of its controls.

The page computes nothing of attention. It looks numbers up that `trace` returned, so they are kept
to the last bit: as float64, each run of numbers once, base64 in the page.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import pyflash

from .._description import Array
from .._errors import invalid
from .._trace import Combination, Step, Trace
from ._arrays import Inputs
from ._numbers import Numbers
from ._ring_data import rings

WORKERS = 4
PAGE_SIZE = 4
#: Pages of the pool that belong to nobody; their keys and values are NaN.
FREE_PAGES = 2
#: An output has arrived when it differs from the exact one by at most so much, in units of the largest value.
TOLERANCE = 1e-14


class Settings(NamedTuple):
    """One position of the controls."""

    view: str  # "tiles", "pages" or "decoding"
    num_keys: int
    tile: int
    causal: bool
    masked: bool  # the later half of the queries may not see the first tile
    guard: bool

    @property
    def key(self) -> str:
        """Name of these settings in the page; the page puts the same name together."""
        flags = (name for name in ("causal", "masked") if getattr(self, name))
        guard = "guarded" if self.guard else "unguarded"
        return "/".join([self.view, str(self.num_keys), str(self.tile), *flags, guard])


def settings(max_keys: int) -> Iterator[Settings]:
    """Yield every position of the controls that shows something of its own.

    Without a masked tile the guard changes nothing, and a worker's tile is no larger than its part.
    """
    for view in ("tiles", "pages", "decoding"):
        for n in range(1, max_keys + 1):
            for tile in range(1, (n if view != "decoding" else longest_part(n)) + 1):
                for causal in (False, True):
                    yield Settings(view, n, tile, causal, masked=False, guard=True)
                    for guard in (True, False):
                        yield Settings(view, n, tile, causal, masked=True, guard=guard)


def longest_part(num_keys: int) -> int:
    """Return the most keys that one of the workers has."""
    return -(-num_keys // WORKERS)


def block_table(max_keys: int) -> Array:
    """Return the physical page of each logical one: a fixed shuffle."""
    pages = -(-max_keys // PAGE_SIZE)
    order: Array = np.random.default_rng(pages + 3).permutation(pages + FREE_PAGES)[:pages]
    return order


def masked_spans(num_queries: int, num_keys: int, tile: int) -> tuple[Array, int]:
    """Return the spans in which the later half of the queries begins behind the first tile."""
    later = np.arange(num_queries) >= num_queries // 2
    return np.where(later, tile, 0), num_keys


def run(inputs: Inputs, setting: Settings) -> Trace:
    """Return the trace that the page shows for one position of its controls."""
    n = setting.num_keys
    options: dict[str, Any] = {"tile": setting.tile, "causal": setting.causal, "guard": setting.guard}
    if setting.masked:
        options["spans"] = masked_spans(len(inputs.q), n, setting.tile)
    if setting.view == "decoding":
        options["num_splits"] = WORKERS
    if setting.view != "pages":
        return pyflash.trace(inputs.q, inputs.k[:n], inputs.v[:n], **options)
    table = block_table(len(inputs.k))
    k, v = (_pool(x[:n], table) for x in (inputs.k, inputs.v))
    return pyflash.trace(inputs.q, k, v, block_table=table, seq_lens=n, **options)


def _pool(rows: Array, table: Array) -> Array:
    """Return pages that hold `rows` where the table says, and NaN everywhere else."""
    pool = np.full((len(table) + FREE_PAGES, PAGE_SIZE, rows.shape[1]), np.nan, rows.dtype)
    places = np.arange(len(rows))
    pool[table[places // PAGE_SIZE], places % PAGE_SIZE] = rows
    return pool


class _Writer:
    """Turns traces into lists of places in `Numbers`; the page's ``data.js`` reads them."""

    def __init__(self, inputs: Inputs) -> None:
        self.numbers = Numbers()
        self.tolerance = TOLERANCE * float(np.abs(inputs.v).max())

    def trace(self, trace: Trace) -> dict[str, Any]:
        """Return one trace: its scores and the exact answer, steps, combinations."""
        scores = np.concatenate([step.scores for step in self._by_key(trace.steps)], axis=1)
        return {
            "scores": self.numbers.place(scores),
            "exact": self.numbers.place(trace.exact),
            "steps": [
                [
                    *(step.split, step.key_lo, step.key_hi, step.rescaled, self.numbers.place(step.error)),
                    [self._row(trace, step, i) for i in range(len(trace.exact))],
                ]
                for step in trace.steps
            ],
            "combinations": [
                [
                    *(*merge.left, *merge.right, self.numbers.place(merge.error)),
                    [self._row(trace, merge, i) for i in range(len(trace.exact))],
                ]
                for merge in trace.combinations
            ],
        }

    @staticmethod
    def _by_key(steps: tuple[Step, ...]) -> list[Step]:
        return sorted(steps, key=lambda step: step.key_lo)

    def _row(self, trace: Trace, state: Step | Combination, row: int) -> int:
        """Return the place of one row's state: error, arrived, m, l, o, out and, of a step, alpha.

        `arrived` has one bit for each column of the output.
        """
        difference = np.abs(state.out[row] - trace.exact[row])
        arrived = sum(1 << column for column in np.flatnonzero(difference <= self.tolerance).tolist())
        numbers = [difference.max(), arrived, state.m_after[row] if isinstance(state, Step) else state.m[row]]
        numbers += [state.l[row], state.o[row], state.out[row]]
        if isinstance(state, Step):
            numbers.append(state.alpha[row])
        return self.numbers.place(*numbers)


def payload(inputs: Inputs) -> dict[str, Any]:
    """Run every trace of the page and return what is embedded in it.

    Raises
    ------
    InvalidArgument
        Scores of these numbers overflow, or `trace` refuses the arrays.
    """
    writer = _Writer(inputs)
    table = block_table(len(inputs.k))
    traces: dict[str, int] = {}
    runs: dict[str, int] = {}
    pages: dict[str, list[tuple[int, ...]]] = {}
    written: list[dict[str, Any]] = []
    for setting in settings(len(inputs.k)):
        trace = run(inputs, setting)
        if not np.isfinite(trace.exact).all():
            raise invalid("npz", "scores that overflow", "numbers whose products are finite")
        entry = writer.trace(trace)
        index = traces.setdefault(repr(entry), len(traces))
        if index == len(written):
            written.append(entry)
        runs[setting.key] = index
        if setting.view == "pages":
            pages.setdefault(f"{setting.num_keys}/{setting.tile}", [step.pages for step in trace.steps])
    return {
        "source": inputs.source,
        "numQueries": len(inputs.q),
        "maxKeys": len(inputs.k),
        "headDim": inputs.q.shape[1],
        "headDimV": inputs.v.shape[1],
        "dtype": inputs.q.dtype.name,
        "workers": WORKERS,
        "pageSize": PAGE_SIZE,
        "numPages": len(table) + FREE_PAGES,
        "blockTable": table.tolist(),
        "tolerance": TOLERANCE,
        "traces": written,
        "runs": runs,
        "pages": pages,
        "rings": rings(inputs, writer.numbers, writer.tolerance),
        "numbers": writer.numbers.base64(),
    }
