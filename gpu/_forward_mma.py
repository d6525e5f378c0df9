"""The prefill kernel for the matrix unit, ``kernels/forward_mma.cu``: what it takes, and its tiles."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from . import _plan, _splits
from ._compile import Source
from ._plan import Plan, Problem, Step, Variant

#: Widths that rows are padded to in shared memory.
CLASSES = (32, 64, 96, 128, 192, 256)
#: Positions are 32 bits wide in the kernel.
MAX_LENGTH = 2**31 - 2**16
#: Queries below which the heads that share keys are put into one block: rows that a block has too many cost
#: more there than the arithmetic of their places.
PACKED_QUERIES = 1024
#: Rows of a block that has no more of them: products of rows that do not exist take as long as any.
FEW_ROWS = 64
#: Multiply-adds of a multiprocessor in a microsecond: what plans compare times by.
RATE = 1.3e6
#: Terms that read memory or call an expression for every score; the others are a few instructions.
_WIDE_TERMS = frozenset(("bias", "mask", "tree", "score_mod", "mask_mod"))


class Tiles(NamedTuple):
    """The shape of a block."""

    warps: int
    row_tiles: int  # of 16 rows, a warp
    tile: int  # keys
    stages: int  # tiles of keys and values in shared memory; 1: the next keys come while values are used
    min_blocks: int  # of one multiprocessor

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 16 * self.warps * self.row_tiles


def width_class(width: int) -> int:
    """Return what rows of `width` elements are padded to."""
    return next(c for c in CLASSES if c >= width)


def shared_bytes(tiles: Tiles, width: int, width_v: int, *, paged: bool, final: bool) -> int:
    """Return the shared memory of a block: the sum that the enumeration in forward_mma.cu has."""
    arrays = tiles.rows * width * 2 + tiles.stages * tiles.tile * (width + width_v) * 2
    arrays = max(arrays, tiles.rows * width_v * 2)
    return (
        arrays + 384 + 16 * tiles.rows + (32 * tiles.tile if paged else 0) + (32 * tiles.rows if final else 0)
    )


def _candidates(width: int, width_v: int, *, wide_terms: bool, spans: bool) -> Iterator[Tiles]:
    """Yield shapes, best first: two row tiles a warp halve what is read from shared memory."""
    if width <= 64 and width_v <= 64 and not wide_terms:
        yield Tiles(4, 2, 96 if spans else 128, 2, 2)
    if width_v <= 128 and width <= 192 and not wide_terms:
        yield Tiles(4, 2, 64, 2, 2)
        yield Tiles(8, 2, 64, 2, 1)
    yield Tiles(8, 1, 64, 2, 1)
    yield Tiles(8, 1, 64, 1, 1)
    yield Tiles(4, 1, 64, 1, 1)
    yield Tiles(2, 1, 64, 1, 1)
    yield Tiles(2, 1, 32, 1, 1)


#: Shared memory that a block leaves to the system.
_RESERVED = 1024


def choose_tiles(
    width: int,
    width_v: int,
    capability: int,
    block_bytes: int,
    *,
    paged: bool,
    final: bool,
    wide_terms: bool,
    spans: bool,
) -> Tiles | None:
    """Return the shape of blocks, None if none fits into shared memory."""
    for tiles in _candidates(width, width_v, wide_terms=wide_terms, spans=spans):
        needed = shared_bytes(tiles, width, width_v, paged=paged, final=final)
        # Before sm_80 copies are not asynchronous: a second stage is memory without use.
        if tiles.stages > 1 and capability < 80:
            continue
        if needed <= block_bytes and tiles.min_blocks * (needed + _RESERVED) <= block_bytes + _RESERVED:
            return tiles
    return None


def is_final(problem: Problem) -> bool:
    """Return whether scores need a pass of their own before they become weights."""
    return bool(problem.terms) or not problem.positive_scale


def _tiles(problem: Problem) -> Tiles | None:
    width, width_v = width_class(problem.head_dim), width_class(problem.head_dim_v)
    # Where bits may not depend on pages, tiles leave the room that these take.
    paged, final = problem.page_size > 0 or problem.batch_invariant, is_final(problem)
    tiles = choose_tiles(
        width,
        width_v,
        problem.capability,
        problem.shared_bytes,
        paged=paged,
        final=final,
        wide_terms=bool(problem.terms & _WIDE_TERMS),
        spans=problem.spans,
    )
    rows = problem.max_seqlen_q * (problem.group if is_packed(problem) else 1)
    if tiles is None or rows > FEW_ROWS:
        return tiles
    return few_rows(tiles, width, width_v, problem.shared_bytes, paged=paged, final=final)


def few_rows(tiles: Tiles, width: int, width_v: int, block_bytes: int, *, paged: bool, final: bool) -> Tiles:
    """Return a shape for no more than `FEW_ROWS` rows: what these wait for is keys and values.

    Two blocks of a multiprocessor, if they fit, have twice as many bytes under way. Tiles have as many keys
    as in the shape for more rows, so that a row's bits do not tell how many there are.
    """
    if tiles.rows <= FEW_ROWS:
        return tiles
    few = tiles._replace(warps=FEW_ROWS // 16, row_tiles=1, min_blocks=2)
    needed = 2 * (shared_bytes(few, width, width_v, paged=paged, final=final) + _RESERVED)
    return few if needed <= block_bytes + _RESERVED else few._replace(min_blocks=1)


def takes(problem: Problem) -> bool:
    """Return whether the kernel computes the prefill sequences of a problem."""
    dtypes = ("float16",) if problem.capability < 80 else ("float16", "bfloat16")
    return (
        "prefill" in _plan.families_of(problem)
        and problem.capability >= 75
        and problem.q_dtype in dtypes
        and problem.kv_dtype == problem.q_dtype
        and problem.aligned
        and not problem.scaled
        and all(0 < n <= CLASSES[-1] and n % 8 == 0 for n in (problem.head_dim, problem.head_dim_v))
        and problem.num_kv_heads > 0
        and problem.max_seqlen_kv < MAX_LENGTH
        and problem.max_seqlen_q * problem.group < MAX_LENGTH
        and problem.page_size < MAX_LENGTH
        and (tiles := _tiles(problem)) is not None
        and problem.tile in (None, tiles.tile)
        and fits(problem, tiles.rows)
    )


def is_packed(problem: Problem) -> bool:
    """Return whether the heads that share keys are rows of one block."""
    return problem.group > 1 and problem.max_seqlen_q < PACKED_QUERIES


def num_blocks(problem: Problem, rows_of_block: int) -> tuple[int, int]:
    """Return (blocks of a head, blocks), both without splits."""
    rows, heads = problem.max_seqlen_q, problem.num_heads
    if is_packed(problem):
        rows, heads = rows * problem.group, problem.num_kv_heads
    blocks = max(_plan.ceil_div(rows, rows_of_block), 1)
    return blocks, blocks * heads * problem.batch


def fits(problem: Problem, rows_of_block: int) -> bool:
    """Return whether a grid has room for the blocks of a problem, and the splits that were asked for."""
    splits = _plan.fixed_splits(problem, 0).max_splits
    return num_blocks(problem, rows_of_block)[1] * splits <= _plan.MAX_BLOCKS


def constants_of(
    width: int,
    width_v: int,
    *,
    bfloat16: bool,
    terms: int = 0,
    positive_scale: bool = True,
    spans: bool = False,
    paged: bool = False,
    packed: bool = False,
) -> dict[str, int]:
    """Return the constants of a prefill on a matrix unit that do not depend on its tiles."""
    return {
        "PF_HEAD_DIM": width,
        "PF_HEAD_DIM_V": width_v,
        "PF_BFLOAT16": int(bfloat16),
        "PF_TERMS": terms,
        "PF_POSITIVE_SCALE": int(positive_scale),
        "PF_SPANS": int(spans),
        "PF_PAGED": int(paged),
        "PF_PACKED": int(packed),
    }


def options_of(problem: Problem) -> dict[str, Any]:
    """Return the same of a problem, as options of `constants_of`."""
    return dict(
        bfloat16=problem.q_dtype == "bfloat16",
        terms=_plan.term_bits(problem),
        positive_scale=problem.positive_scale,
        spans=problem.spans,
        paged=problem.page_size > 0,
        packed=is_packed(problem),
    )


def _source(
    tiles: Tiles, width: int, width_v: int, expressions: tuple[tuple[str, str], ...] = (), **options: Any
) -> Source:
    constants = constants_of(width, width_v, **options) | {
        "PF_WARPS": tiles.warps,
        "PF_ROW_TILES": tiles.row_tiles,
        "PF_TILE": tiles.tile,
        "PF_STAGES": tiles.stages,
        "PF_MIN_BLOCKS": tiles.min_blocks,
    }
    # Near a diagonal most tiles are tested; a second loop is more code and more registers.
    constants["PF_ONE_LOOP"] = constants["PF_SPANS"]
    defines = tuple((name, str(value)) for name, value in constants.items())
    return Source("forward_mma.cu", "pf_forward_mma", defines, expressions)


def step_of(problem: Problem, source: Source, blocks: _splits.Blocks, threads: int, shared: int) -> Step:
    """Return the launch of such blocks that covers the prefill sequences of a problem."""
    splits = _splits.prefill_splits(problem, blocks)
    blocks_of_head, num = num_blocks(problem, blocks.rows)
    num *= splits.max_splits
    section = _plan.section(problem, num // blocks_of_head, splits.max_splits)
    fields = (*_plan.row_limits(problem, "prefill"), ("row_blocks", blocks_of_head), section)
    return Step(source, threads, num, shared, fields, splits)


def plan_of(problem: Problem, kernel: str, step: Step, tile: tuple[int, int], reason: str) -> Plan:
    """Return the plan of a prefill whose launch this is; `tile` has its keys and rows."""
    steps = _plan.with_merge(problem, step, "prefill")
    reasons = [reason, _splits.reason_of(problem, step.splits)]
    if is_packed(problem):
        reasons.append(f"rows: {problem.group} heads share their keys, and a block")
    return Plan(kernel, "prefill", steps, *tile, step.splits, tuple(reasons))


def tile_of(problem: Problem) -> tuple[int, int]:
    """Return (keys of a tile, rows of a block) of a problem that `takes` takes."""
    tiles = _tiles(problem)
    assert tiles is not None
    return tiles.tile, tiles.rows


def prefill_step(problem: Problem) -> Step:
    """Return the launch that computes the prefill sequences of a problem that `takes` takes."""
    tiles = _tiles(problem)
    assert tiles is not None, "asked `takes` before"
    width, width_v = width_class(problem.head_dim), width_class(problem.head_dim_v)
    source = _source(tiles, width, width_v, problem.expressions, **options_of(problem))
    shared = shared_bytes(tiles, width, width_v, paged=problem.page_size > 0, final=is_final(problem))
    blocks = _splits.Blocks(tiles.rows, tiles.tile, tiles.min_blocks, RATE, is_packed(problem))
    return step_of(problem, source, blocks, 32 * tiles.warps, shared)


def plan(problem: Problem) -> Plan | None:
    """Prefill of 16-bit types on the matrix unit; a call with sequences of few rows is composed elsewhere."""
    if _plan.families_of(problem) != ("prefill",) or not takes(problem):
        return None
    reason = f"kernel: mma, {problem.q_dtype} of up to {CLASSES[-1]} elements a row on the matrix unit"
    return plan_of(problem, "forward_mma", prefill_step(problem), tile_of(problem), reason)


#: Most shared memory of a block of the architectures whose shapes differ.
_ARCHITECTURES = {75: 65536, 80: 166912, 86: 101376, 90: 232448}
#: Bytes that a kernel of narrow heads may spill, outside its loops, and one of wide heads or many terms.
_FEW_SPILLS, _MANY_SPILLS = 128, 2048


def variants() -> Iterator[Variant]:
    """Yield the kernel in every shape, and with every option in those that are used most."""
    everything = sum(bit for name, bit in _plan.TERMS.items() if not name.endswith("_mod"))
    some = _plan.TERMS["softcap"] | _plan.TERMS["alibi_slopes"]
    for capability, bytes_of_block in _ARCHITECTURES.items():
        for width, width_v in [(c, c) for c in CLASSES] + [(192, 128), (128, 64), (64, 128), (256, 64)]:
            options: list[dict[str, Any]] = [{"spans": 1}]
            if capability == 90:
                options.append({"spans": 1, "paged": 1, "packed": 1, "terms": everything})
            if width == width_v and width in (64, 128):
                options += [
                    {},
                    {"spans": 1, "paged": 1, "packed": 1},
                    {"spans": 1, "positive_scale": 0},
                    {"spans": 1, "terms": some},
                ]
            for option in options:
                terms = option.get("terms", 0)
                room = {
                    "paged": bool(option.get("paged")),
                    "final": bool(terms) or not option.get("positive_scale", 1),
                }
                tiles = choose_tiles(
                    width,
                    width_v,
                    capability,
                    bytes_of_block,
                    **room,
                    wide_terms=terms == everything,
                    spans=bool(option.get("spans")),
                )
                assert tiles is not None
                spills = _MANY_SPILLS if max(width, width_v) > 128 or terms else _FEW_SPILLS
                common = width == width_v and width in (64, 128) and option in ({}, {"spans": 1})
                source = _source(tiles, width, width_v, bfloat16=capability >= 80, **option)
                yield Variant(source, (capability,), spills, common)
                few = few_rows(tiles, width, width_v, bytes_of_block, **room)
                if option.get("packed") and few != tiles:
                    source = _source(few, width, width_v, bfloat16=capability >= 80, **option)
                    yield Variant(source, (capability,), spills)
    float16 = choose_tiles(
        128, 128, 90, _ARCHITECTURES[90], paged=False, final=False, wide_terms=False, spans=False
    )
    assert float16 is not None
    yield Variant(_source(float16, 128, 128, bfloat16=False), (90,), _FEW_SPILLS)
