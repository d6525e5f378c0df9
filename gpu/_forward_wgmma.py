"""The prefill kernel for Hopper's matrix unit, ``kernels/forward_wgmma.cu``: what it takes, and its tiles."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._dtypes import BY_NAME
from . import _forward_mma, _plan, _splits
from ._compile import Source
from ._plan import Plan, Problem, Step, Variant

#: Who wants the kernel of other GPUs on Hopper too, to compare them, says so before the first import.
is_on = os.environ.get("PYFLASH_CUDA_WGMMA", "1") != "0"

#: Widths that rows are padded to in shared memory: 64 elements of all rows lie together there.
CLASSES = (64, 128, 192, 256)
CAPABILITY = 90
#: Multiply-adds of a multiprocessor in a microsecond: what plans compare times by.
RATE = 2.5e6
#: Bytes that a kernel may spill: those of the warps that find blocks and copy, who have few registers.
_SPILLS = 1024
#: What a block of rows is, in bytes.
_BLOCK_BYTES = 384
#: Rows of a warp, which are written together.
_WARP_ROWS = 16


class Tiles(NamedTuple):
    """The shape of a block, and its registers."""

    groups: int  # of four warps with 64 rows, beside the one that copies
    tile: int  # keys
    stages: int  # tiles of keys and of values in shared memory
    query_stages: int  # blocks of rows whose queries have a place
    turns: bool  # whether groups begin their products in turn
    copy_registers: int
    compute_registers: int

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * (self.groups + 1)


def width_class(width: int) -> int:
    """Return what rows of `width` elements are padded to."""
    return next(c for c in CLASSES if c >= width)


def shared_bytes(tiles: Tiles, width: int, width_v: int, *, final: bool) -> int:
    """Return the shared memory of a block: the sum that the enumeration in forward_mma_tile.cuh has."""
    queries = tiles.rows * max(width, width_v) * 2 + _BLOCK_BYTES + (48 if final else 16) * tiles.rows
    barriers = 8 * (3 * tiles.query_stages + 4 * tiles.stages) + _BLOCK_BYTES
    return tiles.query_stages * queries + tiles.stages * tiles.tile * (width + width_v) * 2 + barriers


#: Queries from which on blocks of three groups are filled well enough, and where rows see only what is
#: before them.
_LONG, _LONG_CAUSAL = 1024, 4096
#: Keys from which on blocks whose rows do not all see the same are taken by whoever is free: they are long
#: beside what begins and ends them, and who shares a multiprocessor with others falls behind.
_LONG_BLOCKS = 16384
#: Keys from which on wide heads have tiles of 80 keys.
_MANY_KEYS = 8192


def _candidates(problem: Problem) -> Iterator[Tiles]:
    """Yield shapes, best first."""
    widest = max(width_class(problem.head_dim), width_class(problem.head_dim_v))
    final = _forward_mma.is_final(problem)
    if widest <= 64:
        rows = problem.max_seqlen_q * (problem.group if _forward_mma.is_packed(problem) else 1)
        if rows >= (_LONG_CAUSAL if problem.spans else _LONG) and not (final or problem.page_size):
            yield Tiles(3, 128, 2, 2, True, 32, 160)
        yield Tiles(2, 128, 2, 2, True, 104, 200)
    if widest <= 128:
        yield Tiles(2, 128, 2, 2, True, 72, 216)
    if widest <= 192:
        yield Tiles(2, 96, 2, 1, True, 72, 216)
    # Tiles decide about bits: where these may not depend on others' lengths, there is one size.
    if problem.max_seqlen_kv >= _MANY_KEYS and not problem.batch_invariant:
        yield Tiles(2, 80, 2, 1, False, 56, 224)
    yield Tiles(2, 64, 2, 1, False, 56, 224)


def _tiles(problem: Problem) -> Tiles | None:
    width, width_v = width_class(problem.head_dim), width_class(problem.head_dim_v)
    for tiles in _candidates(problem):
        needed = shared_bytes(tiles, width, width_v, final=_forward_mma.is_final(problem))
        if needed <= problem.shared_bytes and problem.tile in (None, tiles.tile):
            return tiles
    return None


def takes(problem: Problem) -> bool:
    """Return whether the kernel computes the prefill sequences of a problem."""
    return (
        problem.hopper
        and problem.capability == CAPABILITY
        and _forward_mma.takes(problem._replace(tile=None))
        and (tiles := _tiles(problem)) is not None
        and _forward_mma.fits(problem, tiles.rows)
    )


def _source(
    tiles: Tiles,
    width: int,
    width_v: int,
    expressions: tuple[tuple[str, str], ...] = (),
    *,
    mapped: bool,
    stored: bool,
    out_dtype: str,
    **options: Any,
) -> Source:
    constants = _forward_mma.constants_of(width, width_v, **options) | {
        "PF_WARPS": 4 * tiles.groups,
        "PF_TILE": tiles.tile,
        "PF_STAGES": tiles.stages,
        "PF_QUERY_STAGES": tiles.query_stages,
        "PF_TURNS": int(tiles.turns),
        "PF_MAPPED": int(mapped),
        "PF_STORED": int(stored),
        "PF_OUT_TYPE": BY_NAME[out_dtype].code,
        "PF_COPY_REGISTERS": tiles.copy_registers,
        "PF_COMPUTE_REGISTERS": tiles.compute_registers,
    }
    defines = tuple((name, str(value)) for name, value in constants.items())
    return Source("forward_wgmma.cu", "pf_forward_wgmma", defines, expressions)


def tile_of(problem: Problem) -> tuple[int, int]:
    """Return (keys of a tile, rows of a block) of a problem that `takes` takes."""
    tiles = _tiles(problem)
    assert tiles is not None
    return tiles.tile, tiles.rows


def _is_stored(problem: Problem) -> bool:
    """Return whether the copy unit writes the result: rows of one head in the order of their queries."""
    return problem.out_mapped and not _forward_mma.is_packed(problem)


def prefill_step(problem: Problem) -> Step:
    """Return the launch that computes the prefill sequences of a problem that `takes` takes."""
    tiles = _tiles(problem)
    assert tiles is not None, "asked `takes` before"
    width, width_v = width_class(problem.head_dim), width_class(problem.head_dim_v)
    options = _forward_mma.options_of(problem)
    source = _source(
        tiles,
        width,
        width_v,
        problem.expressions,
        mapped=problem.mapped,
        stored=_is_stored(problem),
        out_dtype=problem.out_dtype,
        **options,
    )
    shared = shared_bytes(tiles, width, width_v, final=_forward_mma.is_final(problem))
    blocks = _splits.Blocks(tiles.rows, tiles.tile, 1, RATE, _forward_mma.is_packed(problem))
    step = _forward_mma.step_of(problem, source, blocks, tiles.threads, shared)
    step = step._replace(
        box_rows=(tiles.tile if problem.mapped else 0, _WARP_ROWS if _is_stored(problem) else 0)
    )
    if tiles.query_stages == 1 or (problem.spans and problem.max_seqlen_kv >= _LONG_BLOCKS):
        return step
    return step._replace(num_blocks=min(step.num_blocks, problem.num_sms))


def plan(problem: Problem) -> Plan | None:
    """Prefill of 16-bit types on Hopper; a call with sequences of few rows is composed elsewhere."""
    if _plan.families_of(problem) != ("prefill",) or not takes(problem):
        return None
    reason = f"kernel: wgmma, {problem.q_dtype} of up to {CLASSES[-1]} elements a row on Hopper"
    return _forward_mma.plan_of(problem, "forward_wgmma", prefill_step(problem), tile_of(problem), reason)


def variants() -> Iterator[Variant]:
    """Yield the kernel in every shape, and with every option in those that are used most."""
    everything = sum(bit for name, bit in _plan.TERMS.items() if not name.endswith("_mod"))
    types = ("bfloat16",) * 3
    for width, width_v in [(c, c) for c in CLASSES] + [(192, 128), (64, 128)]:
        options: list[dict[str, Any]] = [{}, {"spans": 1}]
        if width == width_v and width in (64, 128):
            options += [
                {"spans": 1, "paged": 1, "packed": 1},
                {"spans": 1, "paged": 1, "packed": 1, "terms": everything},
                {"spans": 1, "positive_scale": 0},
            ]
        found: dict[Source, None] = {}
        for option, length in itertools.product(options, (512, 16384)):
            shape = Problem(
                CAPABILITY, 132, 232448, *types, 1, 8, 8, width, width_v, *(length,) * 3, False,
                16 * option.get("paged", 0), True, False,
                terms=frozenset(("bias",) if option.get("terms") else ()),
                spans=bool(option.get("spans")), positive_scale=bool(option.get("positive_scale", 1)),
            )  # fmt: skip
            tiles = _tiles(shape)
            assert tiles is not None
            mapped = not option.get("paged") and "positive_scale" not in option
            source = _source(
                tiles, width, width_v, mapped=mapped, stored=not option.get("packed"),
                out_dtype="bfloat16", bfloat16=True, **option,
            )  # fmt: skip
            if mapped:  # as plain calls have it
                source = source._replace(
                    defines=(*source.defines, ("PF_INDICES", "0"), ("PF_HAS_SPLITS", "0"))
                )
            found[source] = None
        for source in found:
            plain = ("PF_INDICES", "0") in source.defines
            yield Variant(source, (CAPABILITY,), _SPILLS, plain and width == width_v == 128)
    float16 = _source(
        Tiles(2, 128, 2, 2, True, 72, 216), 128, 128, mapped=True, stored=True,
        out_dtype="float16", bfloat16=False,
    )  # fmt: skip
    yield Variant(float16, (CAPABILITY,), _SPILLS)
