"""Prefill on the ordinary arithmetic units: float32 and float64, and 16-bit queries over keys of other types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .. import _dtypes
from ._compile import Source
from ._plan import (
    TERMS,
    Plan,
    Problem,
    Step,
    Variant,
    combine_step,
    families_of,
    row_blocks,
    row_limits,
    split_fields,
    term_bits,
)

#: Widths that kernels are compiled for; others are padded in shared memory.
CLASSES = (32, 64, 96, 128, 192, 256)
#: Positions in a kernel have 32 bits.
MAX_KEYS = 2**31 - 2**16
_COLUMNS = 16  # lanes that share a row, of the kernel
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
    chunk: int  # outputs of a row that a thread sums up at a time

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 2 * self.thread_rows * self.warps


#: By class, the preferred tile first; the first that fits into shared memory is taken.
TILES = {
    "float": {
        32: (Tile(4, 4, 8, 64, 64, 2), Tile(2, 4, 8, 64, 64, 2)),
        64: (Tile(4, 3, 8, 64, 64, 4), Tile(2, 4, 8, 64, 64, 4)),
        96: (Tile(4, 2, 8, 64, 32, 6), Tile(2, 2, 8, 32, 32, 6)),
        128: (Tile(4, 2, 8, 64, 32, 8), Tile(4, 2, 8, 32, 32, 8), Tile(2, 2, 8, 32, 32, 8)),
        192: (Tile(4, 2, 8, 32, 32, 4), Tile(2, 1, 8, 16, 16, 4)),
        256: (Tile(8, 1, 8, 32, 32, 4), Tile(4, 1, 8, 16, 16, 4), Tile(1, 1, 8, 16, 16, 4)),
    },
    "double": {
        32: (Tile(4, 2, 4, 64, 64, 2), Tile(2, 2, 4, 32, 32, 2)),
        64: (Tile(4, 2, 4, 64, 64, 4), Tile(2, 2, 4, 32, 32, 4)),
        96: (Tile(4, 2, 4, 32, 32, 6), Tile(2, 2, 4, 16, 16, 6)),
        128: (Tile(4, 2, 4, 32, 32, 8), Tile(2, 1, 4, 16, 16, 8)),
        192: (Tile(4, 1, 4, 32, 32, 4), Tile(2, 1, 4, 16, 16, 4), Tile(1, 1, 4, 16, 16, 4)),
        256: (Tile(4, 1, 4, 32, 32, 4), Tile(2, 1, 4, 16, 16, 4)),
    },
}


def class_of(width: int) -> int | None:
    """Return the width that a kernel is compiled for, None if there is none."""
    return next((c for c in CLASSES if width <= c), None)


def shared_bytes(tile: Tile, real: str, dim: int, dim_v: int, *, paged: bool, scaled: bool, spans: bool) -> int:
    """Return the dynamic shared memory of a block, as forward_fma.cu lays it out."""
    size = 8 if real == "double" else 4
    groups = 2 * tile.warps
    queries = tile.rows * dim * size + 16 * groups
    keys = tile.keys * (dim * size + 16)
    values = tile.keys * dim_v * size
    weights = tile.rows * tile.part * size + 64 * groups
    factors = 4 * tile.keys * size if paged or scaled else 0
    offsets = 4 * tile.keys * 8 if paged else 0
    ends = 2 * tile.rows * 8 if spans else 0
    return queries + keys + values + weights + factors + offsets + ends


def _chosen(problem: Problem) -> tuple[Tile, int, int, int] | None:
    """Return (tile, class of head_dim, of head_dim_v, shared bytes)."""
    dim, dim_v = class_of(problem.head_dim), class_of(problem.head_dim_v)
    if dim is None or dim_v is None:
        return None
    for tile in TILES[problem.real][max(dim, dim_v)]:
        fitting = tile._replace(chunk=_chunk(tile, dim_v, max(dim, dim_v)))
        needed = shared_bytes(
            fitting, problem.real, dim, dim_v,
            paged=bool(problem.page_size), scaled=problem.scaled, spans=problem.spans,
        )  # fmt: skip
        if needed <= problem.shared_bytes:
            return fitting, dim, dim_v, needed
    return None


def _chunk(tile: Tile, dim_v: int, widest: int) -> int:
    """Return the chunk of a tile made for another class of head_dim_v: all of a narrower one's outputs."""
    return tile.chunk if dim_v == widest else min(dim_v // _COLUMNS, 8 if dim_v % 128 == 0 else 4 if dim_v % 64 == 0 else 6)


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
    tile: Tile, real: str, dim: int, dim_v: int, dtypes: tuple[str, str, str], *,
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
        "PF_CHUNK": tile.chunk,
        "PF_DIM": dim,
        "PF_DIM_V": dim_v,
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
    max_splits, _, _ = split_fields(problem, 0)
    chosen = _chosen(problem)
    assert chosen is not None
    tile, dim, dim_v, needed = chosen
    others = problem.num_heads * max_splits * problem.batch
    blocks = row_blocks(problem, tile.rows, others)
    fold = problem.real == "float" and problem.positive_scale and not problem.terms & _SCORE_TERMS
    defines = _defines(
        tile, problem.real, dim, dim_v, (problem.q_dtype, problem.kv_dtype, problem.out_dtype),
        vector=_is_vector(problem), paged=bool(problem.page_size), scaled=problem.scaled, spans=problem.spans,
        fold=fold, terms=term_bits(problem),
    )  # fmt: skip
    source = Source("forward_fma.cu", "pf_forward_fma", defines, problem.expressions)
    fields = (*row_limits(problem, "prefill"), ("row_blocks", blocks))
    return Step(source, 32 * tile.warps, blocks * others, needed, fields)


def plan(problem: Problem) -> Plan | None:
    """Prefill of all sequences; a call that has sequences of the decode family too is composed elsewhere."""
    if families_of(problem) != ("prefill",) or not takes(problem):
        return None
    chosen = _chosen(problem)
    assert chosen is not None
    tile = chosen[0]
    max_splits, num_splits, split_keys = split_fields(problem, 0)
    steps = [prefill_step(problem)]
    if max_splits > 1 or num_splits > 1:
        steps.append(combine_step(problem, row_limits(problem, "prefill")))
    what = "float64" if problem.real == "double" else "float32"
    return Plan(
        "forward_fma", "prefill", tuple(steps), tile.keys, tile.rows, max_splits, num_splits, split_keys,
        (f"kernel: forward_fma, {what} arithmetic in tiles of {tile.rows} rows and {tile.keys} keys",),
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    """Yield a covering set: every class and tile, and each option of the class most used."""
    every = (75, 80, 86, 89, 90, 100, 120)
    everything = sum(TERMS.values()) - TERMS["score_mod"] - TERMS["mask_mod"]

    def variant(
        tile: Tile, real: str, dim: int, dim_v: int, kv: str, *, q: str | None = None, vector: bool = True,
        paged: bool = False, scaled: bool = False, spans: bool = True, fold: bool = True, terms: int = 0,
    ) -> Variant:  # fmt: skip
        q = q or ("float64" if real == "double" else "float32")
        defines = _defines(
            tile, real, dim, dim_v, (q, kv, "bfloat16" if q.startswith("float8") else q), vector=vector, paged=paged,
            scaled=scaled, spans=spans, fold=fold and real == "float", terms=terms,
        )  # fmt: skip
        return Variant(Source("forward_fma.cu", "pf_forward_fma", defines), every)

    for real, classes in TILES.items():
        same = "float64" if real == "double" else "float32"
        for dim, tiles in classes.items():
            for tile in tiles:
                yield variant(tile, real, dim, dim, same)
        tile = TILES[real][128][0]
        yield variant(tile, real, 128, 128, same, spans=False)
        yield variant(tile, real, 128, 128, same, vector=False)
        yield variant(tile, real, 128, 128, same, paged=True)
        yield variant(tile, real, 128, 128, same, fold=False)
        yield variant(tile, real, 128, 128, same, fold=False, terms=everything)
    tile = TILES["float"][128][0]
    for q in ("float32", "float16", "bfloat16"):
        for kv in ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "int4"):
            yield variant(tile, "float", 128, 128, kv, q=q, paged=True, scaled=kv[0] == "i")
