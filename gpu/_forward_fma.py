"""Prefill on the ordinary arithmetic units: float32, float64, and 16-bit queries over keys of other types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .. import _dtypes
from . import _splits
from ._compile import Source
from ._plan import (
    TERMS,
    Plan,
    Problem,
    Step,
    Variant,
    families_of,
    row_blocks,
    row_limits,
    section,
    term_bits,
    with_merge,
)

#: Widths that kernels are compiled for; others are padded in shared memory.
CLASSES = (32, 64, 96, 128, 192, 256)
#: Positions in a kernel have 32 bits.
MAX_KEYS = 2**31 - 2**16
#: The kernel's other shared variables lie before these, and fill up to what these are aligned to.
_STATIC_BYTES = 1024
_Q_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
#: Terms that change scores; the others hide keys.
_SCORE_TERMS = frozenset({"softcap", "alibi_slopes", "bias", "score_mod"})


class Tile(NamedTuple):
    """How a block works: constants of forward_fma.cu."""

    warps: int
    blocks: int  # per multiprocessor, for which there are registers
    thread_rows: int
    keys: int
    part: int  # keys whose weights are in shared memory at a time
    stages: int = 1  # tiles of keys and values in shared memory

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 2 * self.thread_rows * self.warps


#: Multiply-adds of a multiprocessor in a microsecond: what plans compare times by.
RATES = {"float": 1.5e5, "double": 5.5e4}

#: By class, the preferred tile first; the first that fits into shared memory is taken.
TILES = {
    "float": {
        32: (Tile(4, 4, 8, 64, 64), Tile(2, 4, 8, 64, 64)),
        64: (
            Tile(8, 1, 8, 128, 64, stages=2),
            Tile(4, 2, 8, 128, 64),
            Tile(4, 3, 8, 64, 64),
            Tile(2, 4, 8, 64, 64),
        ),
        96: (Tile(4, 2, 8, 64, 32), Tile(2, 2, 8, 32, 32)),
        128: (
            Tile(8, 1, 8, 64, 32, stages=2),
            Tile(4, 2, 8, 64, 32),
            Tile(4, 2, 8, 32, 32),
            Tile(2, 2, 8, 32, 32),
        ),
        192: (Tile(4, 2, 8, 32, 32), Tile(2, 1, 8, 16, 16)),
        256: (Tile(8, 1, 8, 32, 32), Tile(4, 1, 8, 16, 16), Tile(1, 1, 8, 16, 16)),
    },
    "double": {
        32: (Tile(4, 2, 4, 64, 64), Tile(2, 2, 4, 32, 32)),
        64: (Tile(4, 2, 4, 64, 64), Tile(2, 2, 4, 32, 32)),
        96: (Tile(4, 2, 4, 32, 32), Tile(2, 2, 4, 16, 16)),
        128: (Tile(4, 2, 4, 32, 32), Tile(2, 1, 4, 16, 16)),
        192: (Tile(4, 1, 4, 32, 32), Tile(2, 1, 4, 16, 16), Tile(1, 1, 4, 16, 16)),
        256: (Tile(4, 1, 4, 32, 32), Tile(2, 1, 4, 16, 16)),
    },
}
#: Outputs of a row that a thread sums up at a time, by class of head_dim_v: all where there are registers.
CHUNKS = {32: 2, 64: 4, 96: 6, 128: 8, 192: 4, 256: 4}


#: Dynamic shared memory of a block by architecture, for `variants`.
_SHARED_BYTES = {75: 65536, 80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
#: Spills lie before and after the loops over a tile, where masks and terms are looked at.
_SPILL_BYTES = 1024


def class_of(width: int) -> int | None:
    """Return the width that a kernel is compiled for, None if there is none."""
    return next((c for c in CLASSES if width <= c), None)


def shared_bytes(
    tile: Tile, real: str, dim: int, dim_v: int, *, paged: bool, scaled: bool, spans: bool
) -> int:
    """Return the dynamic shared memory of a block, as forward_fma.cu lays it out."""
    size = 8 if real == "double" else 4
    groups = 2 * tile.warps
    queries = tile.rows * dim * size + 16 * groups
    keys = tile.stages * tile.keys * (dim * size + 16)
    values = tile.stages * tile.keys * dim_v * size
    weights = tile.rows * tile.part * size + 64 * groups
    factors = 4 * tile.keys * size if paged or scaled else 0
    offsets = 4 * tile.keys * 8 if paged else 0
    ends = 2 * tile.rows * 8 if spans else 0
    return queries + keys + values + weights + factors + offsets + ends


def _chosen(problem: Problem) -> tuple[Tile, int, int, int] | None:
    """Return (tile, class of head_dim, of head_dim_v, shared bytes).

    Where bits may not depend on pages, tiles leave the room that these take.
    """
    dim, dim_v = class_of(problem.head_dim), class_of(problem.head_dim_v)
    if dim is None or dim_v is None:
        return None
    for tile in TILES[problem.real][max(dim, dim_v)]:
        needed = shared_bytes(
            tile, problem.real, dim, dim_v,
            paged=bool(problem.page_size) or problem.batch_invariant,
            scaled=problem.scaled, spans=problem.spans,
        )  # fmt: skip
        if needed + _STATIC_BYTES <= problem.shared_bytes:
            return tile, dim, dim_v, needed
    return None


def takes(problem: Problem) -> bool:
    """Return whether the kernel can compute the prefill part of a problem."""
    return (
        "prefill" in families_of(problem)
        and problem.q_dtype in _Q_DTYPES
        and problem.max_seqlen_kv <= MAX_KEYS
        and _chosen(problem) is not None
    )


def _is_vector(problem: Problem) -> bool:
    return problem.aligned and problem.head_dim % 4 == 0 and problem.head_dim_v % 4 == 0


def _defines(
    tile: Tile, real: str, dim: int, dim_v: int, dtypes: tuple[str, str, str], *, padded: bool = False,
    vector: bool, paged: bool, scaled: bool, spans: bool, fold: bool, terms: int,
) -> tuple[tuple[str, str], ...]:  # fmt: skip
    q, kv, out = (_dtypes.BY_NAME[name].code for name in dtypes)
    numbers = {
        "PF_TERMS": terms,
        "PF_WARPS": tile.warps,
        "PF_MIN_BLOCKS": tile.blocks,
        "PF_THREAD_ROWS": tile.thread_rows,
        "PF_KEYS": tile.keys,
        "PF_PART": tile.part,
        "PF_CHUNK": CHUNKS[dim_v],
        "PF_STAGES": tile.stages,
        "PF_DIM": dim,
        "PF_DIM_V": dim_v,
        "PF_PADDED": int(padded),
        "PF_Q_TYPE": q,
        "PF_KV_TYPE": kv,
        "PF_OUT_TYPE": out,
        "PF_VECTOR": int(vector),
        "PF_PAGED": int(paged),
        "PF_SCALED": int(scaled),
        "PF_SPANS": int(spans),
        "PF_FOLD": int(fold),
    }
    return ("PF_REAL", real), *((name, str(value)) for name, value in numbers.items())


def tile_of(problem: Problem) -> tuple[int, int]:
    """Return (keys of a tile, rows of a block) of a problem that `takes` takes."""
    chosen = _chosen(problem)
    assert chosen is not None
    return chosen[0].keys, chosen[0].rows


def prefill_step(problem: Problem) -> Step:
    """Return the launch that computes the sequences of the prefill family; `takes(problem)` must hold."""
    chosen = _chosen(problem)
    assert chosen is not None
    tile, dim, dim_v, needed = chosen
    rate = RATES[problem.real]
    splits = _splits.prefill_splits(problem, _splits.Blocks(tile.rows, tile.keys, tile.blocks, rate))
    others = problem.num_heads * splits.max_splits * problem.batch
    blocks = row_blocks(problem, tile.rows, others)
    fold = problem.real == "float" and problem.positive_scale and not problem.terms & _SCORE_TERMS
    defines = _defines(
        tile, problem.real, dim, dim_v, (problem.q_dtype, problem.kv_dtype, problem.out_dtype),
        padded=(problem.head_dim, problem.head_dim_v) != (dim, dim_v), vector=_is_vector(problem),
        paged=bool(problem.page_size), scaled=problem.scaled, spans=problem.spans, fold=fold,
        terms=term_bits(problem),
    )  # fmt: skip
    source = Source("forward_fma.cu", "pf_forward_fma", defines, problem.expressions)
    fields = (
        *row_limits(problem, "prefill"), ("row_blocks", blocks), section(problem, others, splits.max_splits)
    )  # fmt: skip
    return Step(source, 32 * tile.warps, blocks * others, needed, fields, splits)


def plan(problem: Problem) -> Plan | None:
    """Prefill of all sequences; a call that has sequences of the decode family too is composed elsewhere."""
    if families_of(problem) != ("prefill",) or not takes(problem):
        return None
    chosen = _chosen(problem)
    assert chosen is not None
    tile = chosen[0]
    step = prefill_step(problem)
    what = "float64" if problem.real == "double" else "float32"
    return Plan(
        "forward_fma", "prefill", with_merge(problem, step, "prefill"), tile.keys, tile.rows, step.splits,
        (
            f"kernel: forward_fma, {what} arithmetic in tiles of {tile.rows} rows and {tile.keys} keys",
            _splits.reason_of(problem, step.splits),
        ),
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    """Yield a covering set: every class and tile, and each option of the class most used."""
    everything = sum(TERMS.values()) - TERMS["score_mod"] - TERMS["mask_mod"]

    def variant(
        tile: Tile, real: str, dim: int, kv: str, *, q: str | None = None, vector: bool = True,
        paged: bool = False, scaled: bool = False, spans: bool = True, fold: bool = True, terms: int = 0,
    ) -> Variant:  # fmt: skip
        q = q or ("float64" if real == "double" else "float32")
        defines = _defines(
            tile, real, dim, dim, (q, kv, q), padded=not vector, vector=vector, paged=paged,
            scaled=scaled, spans=spans, fold=fold and real == "float", terms=terms,
        )  # fmt: skip
        smallest = shared_bytes(tile, real, dim, dim, paged=paged, scaled=scaled, spans=spans) + _STATIC_BYTES
        architectures = tuple(sm for sm, limit in _SHARED_BYTES.items() if smallest <= limit)
        common = dim == 128 and vector and not (paged or terms) and fold
        return Variant(
            Source("forward_fma.cu", "pf_forward_fma", defines), architectures, _SPILL_BYTES, common
        )

    for real, classes in TILES.items():
        same = "float64" if real == "double" else "float32"
        for dim, tiles in classes.items():
            for tile in tiles:
                yield variant(tile, real, dim, same)
        tile = TILES[real][128][0]
        yield variant(tile, real, 128, same, spans=False)
        yield variant(tile, real, 128, same, vector=False)
        yield variant(tile, real, 128, same, paged=True)
        yield variant(tile, real, 128, same, fold=False)
        yield variant(tile, real, 128, same, fold=False, terms=everything)
    tile = TILES["float"][128][0]
    for q in ("float32", "float16", "bfloat16"):
        for kv in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4"):
            yield variant(tile, "float", 128, kv, q=q, paged=True, scaled=kv[0] == "i")
