"""`pyflash demo`: three claims about FlashAttention, checked in front of the reader.

Every kernel gives the numbers of the textbook; its memory doesn't grow with the keys; and the
guard of the running maximum is what keeps a row of masked keys from becoming NaN. Only the public
functions are used. The exit status is 1 if any claim fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import pyflash

from . import _demo_memory
from ._description import Array

try:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress
    from rich.table import Table
except ModuleNotFoundError as error:
    raise pyflash.PyflashError(
        "the demo needs the package 'rich': pip install 'pyflash-attention[demo]'"
    ) from error

BACKENDS = ("numpy", "c")
#: Sequence lengths, each with every tile size from 1 to the length.
LENGTHS = (1, 2, 3, 7, 16, 33, 64)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16
WORKERS = 4
#: Largest difference from the textbook that passes, in units of the largest value.
TOLERANCE = 1e-14


class Case(NamedTuple):
    """One input of the comparison, dense and paged."""

    q: Array  # (1, seqlen_q, num_heads, head_dim)
    k: Array  # (1, seqlen_kv, num_kv_heads, head_dim)
    v: Array
    k_cache: Array  # (num_pages, page_size, num_kv_heads, head_dim), NaN where no key lies
    v_cache: Array
    block_table: Array  # (1, max_pages)
    seq_lens: Array  # (1,)
    causal: bool
    tile: int
    expected: Array  # textbook attention, shaped as q


def _tiled(case: Case, backend: str) -> Any:
    return pyflash.flash_attention(
        case.q, case.k, case.v, causal=case.causal, tile=case.tile, backend=backend
    )


def _paged(case: Case, backend: str) -> Any:
    return pyflash.paged_attention(
        case.q,
        case.k_cache,
        case.v_cache,
        case.block_table,
        case.seq_lens,
        causal=case.causal,
        tile=case.tile,
        backend=backend,
    )


def _flash_decoding(case: Case, backend: str) -> Any:
    return pyflash.flash_decoding(
        case.q, case.k, case.v, num_splits=WORKERS, causal=case.causal, tile=case.tile, backend=backend
    )


METHODS: dict[str, Callable[[Case, str], Any]] = {
    "tiled": _tiled,
    "paged": _paged,
    f"flash-decoding, {WORKERS} workers": _flash_decoding,
}


def run(console: Console) -> int:
    """Run the demo.

    Parameters
    ----------
    console : rich.console.Console
        Where tables and progress go.

    Returns
    -------
    int
        0 if every claim held, 1 if not.
    """
    missing = pyflash.available_backends()
    backends = [name for name in BACKENDS if missing[name] is None]
    held = len(backends) == len(BACKENDS)
    for name in BACKENDS:
        if missing[name] is not None:
            console.print(f"backend {name!r} is not available: {missing[name]}", style="red", markup=False)
    for section in (_show_agreement, _show_memory, _show_guard):
        try:
            held = section(console, backends) and held
        except Exception as error:  # a demo says what went wrong and goes on
            console.print(f"FAILED {type(error).__name__}: {error}", style="red", markup=False)
            held = False
        console.print()
    console.print(_verdict(held), "everything held" if held else "something did not hold: see above")
    return 0 if held else 1


def _verdict(held: bool) -> str:
    return "[green]ok[/green]" if held else "[bold red]FAILED[/bold red]"


def _claim(console: Console, title: str, text: str) -> None:
    """Print what the next table is to show."""
    console.print(f"[bold]{title}[/bold]")
    console.print(text, highlight=False)


def _columns(table: Table, *names: str, text: int) -> None:
    """Add columns to a table: so many of text, then numbers."""
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i < text else "right")


def _cases(rng: np.random.Generator) -> Iterator[Case]:
    """Yield random inputs: each length, full and causal, with each tile size, pages and rows drawn."""
    for n in LENGTHS:
        q = rng.standard_normal((1, n, NUM_HEADS, HEAD_DIM))
        k, v = (rng.standard_normal((1, n, NUM_KV_HEADS, HEAD_DIM)) for _ in range(2))
        for causal in (False, True):
            expected: Any = pyflash.naive_attention(q, k, v, causal=causal)
            for tile in range(1, n + 1):
                page_size = int(rng.integers(1, n + 1))
                pages = rng.permutation(-(-n // page_size) + 2)  # two of the pool stay unused
                table = pages[np.newaxis, :-2]
                # Bottom-right alignment: the last rows alone see what they see among all rows.
                rows = slice(n - int(rng.integers(1, n + 1)), n)
                yield Case(
                    q[:, rows],
                    k,
                    v,
                    k_cache=_in_pages(k[0], table[0], page_size, len(pages)),
                    v_cache=_in_pages(v[0], table[0], page_size, len(pages)),
                    block_table=table,
                    seq_lens=np.array([n]),
                    causal=causal,
                    tile=tile,
                    expected=expected[:, rows],
                )


def _in_pages(x: Array, table: Array, page_size: int, num_pages: int) -> Array:
    """Return a page pool that holds `x` in the pages of `table` and NaN everywhere else."""
    pool = np.full((num_pages, page_size, *x.shape[1:]), np.nan)
    place = np.arange(len(x))
    pool[table[place // page_size], place % page_size] = x
    return pool


def _difference(case: Case, got: Array) -> float:
    """Return the largest difference from the textbook in units of the largest value."""
    return float(np.abs(got - case.expected).max() / np.abs(case.v).max())


def _show_agreement(console: Console, backends: list[str]) -> bool:
    """Compare every method on every backend with the textbook; return whether all agree."""
    # Per backend and method: the largest difference of full and of causal attention.
    worst = {(backend, name): [0.0, 0.0] for backend in backends for name in METHODS}
    failures: dict[tuple[str, str], str] = {}
    num_cases = 2 * sum(LENGTHS)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("comparing with the textbook", total=num_cases)
        for case in _cases(np.random.default_rng(2022)):
            for backend, name in worst:
                try:
                    difference = _difference(case, METHODS[name](case, backend))
                except Exception as error:  # as in `run`, but with the other methods going on
                    failures.setdefault((backend, name), f"{type(error).__name__}: {error}")
                    difference = np.nan
                # np.maximum keeps a NaN, which then doesn't pass.
                before = worst[backend, name][case.causal]
                worst[backend, name][case.causal] = float(np.maximum(before, difference))
            progress.advance(task)

    _claim(
        console,
        "1  The numbers of the textbook",
        f"{num_cases} random inputs in float64: lengths {', '.join(map(str, LENGTHS))}, each with every tile "
        "size from 1 to its length. Shown is the largest difference from naive attention, in units of the "
        f"largest value; up to {TOLERANCE:.0e} passes.",
    )
    table = Table()
    _columns(table, "backend", "method", "full", "causal", "", text=2)
    for (backend, name), differences in worst.items():
        passed = all(difference <= TOLERANCE for difference in differences)
        table.add_row(backend, name, *(f"{x:.1e}" for x in differences), _verdict(passed))
    console.print(table)
    for (backend, name), message in failures.items():
        console.print(f"{backend}, {name}: {message}", style="red", markup=False)
    return all(difference <= TOLERANCE for row in worst.values() for difference in row)


def _show_memory(console: Console, backends: list[str]) -> bool:
    """Measure what each method holds besides inputs and output; return whether it is as claimed."""
    lengths = _demo_memory.LENGTHS
    _claim(
        console,
        "2  Memory that doesn't grow with the keys",
        "What one head holds besides inputs and output; in brackets the growth from the column before. "
        "NumPy: peak of the traced allocations. C, on one thread (each further one holds as much again): the "
        "work space that explain() counts, and by how much the resident memory of a process of its own rose "
        "during the call, code and runtimes included.",
    )
    table = Table()
    _columns(table, "method", *(f"N = {n}" for n in lengths), "claim", "", text=1)
    rows = [row for row in _demo_memory.MEASUREMENTS if row.backend in backends]
    held = True
    # Refreshed by hand: the thread that would do it allocates while allocations are traced.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("measuring memory", total=len(rows) * len(lengths))
        for row in rows:
            cells, peaks = [], []
            for n in lengths:
                try:
                    peaks.append(row.measure(n))
                    cells.append(_bytes(peaks))
                except Exception as error:  # as in `run`
                    cells.append(f"{type(error).__name__}: {error}")
                progress.update(task, advance=1, refresh=True)
            passed = len(peaks) == len(lengths) and row.as_claimed(peaks)
            table.add_row(row.name, *map(escape, cells), row.growth, _verdict(passed))
            held = held and passed
    console.print(table)
    return held


def _bytes(peaks: list[int]) -> str:
    """Return the last number of bytes and its growth from the one before."""
    text = f"{peaks[-1] / 2**10:,.0f} KiB"
    return text if len(peaks) == 1 else f"{text} (x{peaks[-1] / max(peaks[-2], 1):.3g})"


def _show_guard(console: Console, backends: list[str]) -> bool:
    """Trace a row whose first tile is fully masked, with and without the guard of the maximum."""
    rng = np.random.default_rng(2018)
    q, k, v = (rng.standard_normal((4, 8)) for _ in range(3))
    traces = {guard: pyflash.trace(q, k, v, tile=2, window=(1, 0), guard=guard) for guard in (True, False)}
    _claim(
        console,
        "3  A first tile that is fully masked",
        "The last of four rows sees keys 2 and 3 only, and tiles have two keys. After its first tile its "
        "maximum m is still -inf; unguarded, exp(m - m) is exp(-inf - -inf), which is NaN and stays NaN. The "
        "guard holds m above the lowest finite number wherever it is subtracted.",
    )
    table = Table()
    _columns(table, "recurrence", "keys", "m", "alpha", "l", "|out - exact|", text=1)
    for guard, trace in traces.items():
        for step in trace.steps:
            error = np.abs(step.out[-1] - trace.exact[-1]).max()
            table.add_row(
                "guarded" if guard else "unguarded",
                f"{step.key_lo} to {step.key_hi - 1}",
                *(f"{x[-1]:.4g}" for x in (step.m_after, step.alpha, step.l)),
                f"{error:.1e}",
            )
        table.add_section()
    console.print(table)
    guarded = traces[True].error <= TOLERANCE * np.abs(v).max()
    unguarded = bool(np.isnan(traces[False].out[-1]).all())
    console.print(_verdict(guarded), "guarded: the exact answer")
    console.print(_verdict(unguarded), "unguarded: NaN")
    held = guarded and unguarded
    for backend in backends:
        out = pyflash.flash_attention(q, k, v, window=(1, 0), tile=2, backend=backend)
        right = bool(np.abs(out - traces[True].exact).max() <= TOLERANCE * np.abs(v).max())
        console.print(_verdict(right), f"backend {backend!r}: the exact answer")
        held = held and right
    return bool(held)
