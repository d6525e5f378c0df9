"""The prefill kernel for Hopper's matrix unit, ``kernels/forward_wgmma.cu``: what it takes, and its tiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._dtypes import BY_NAME
from . import _forward_mma, _plan, _splits
from ._compile import Source
from ._plan import Plan, Problem, Step, Variant

#: Until it has been run and measured on a GPU, only who asks for it before the first import gets it.
is_on = os.environ.get("PYFLASH_CUDA_WGMMA") == "1"

#: Widths that rows are padded to in shared memory: 64 elements of all rows lie together there.
CLASSES = (64, 128, 192, 256)
CAPABILITY = 90
#: Multiply-adds of a multiprocessor in a microsecond: what plans compare times by.
RATE = 2.5e6
#: What a block of rows is, in bytes.
_BLOCK_BYTES = 384


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
    barriers = 8 * (3 * tiles.query_stages + 4 * tiles.stages)
    return tiles.query_stages * queries + tiles.stages * tiles.tile * (width + width_v) * 2 + barriers


def _candidates(width: int, width_v: int) -> Iterator[Tiles]:
    """Yield shapes, best first."""
    widest = max(width, width_v)
    if widest <= 64:
        yield Tiles(2, 128, 2, 2, True, 104, 200)
    if widest <= 128:
        yield Tiles(2, 128, 2, 2, True, 72, 216)
    if widest <= 192:
        yield Tiles(2, 96, 2, 1, True, 72, 216)
    yield Tiles(2, 80, 2, 1, False, 56, 224)
    yield Tiles(2, 64, 2, 1, False, 56, 224)


def _tiles(problem: Problem) -> Tiles | None:
    width, width_v = width_class(problem.head_dim), width_class(problem.head_dim_v)
    for tiles in _candidates(width, width_v):
        needed = shared_bytes(tiles, width, width_v, final=_forward_mma.is_final(problem))
        if needed <= problem.shared_bytes:
            return tiles
    return None


def takes(problem: Problem) -> bool:
    """Return whether the kernel computes the prefill sequences of a problem."""
    return (
        problem.hopper
        and problem.capability == CAPABILITY
        and _forward_mma.takes(problem._replace(tile=None))
        and (tiles := _tiles(problem)) is not None
        and problem.tile in (None, tiles.tile)
        and _forward_mma.fits(problem, tiles.rows)
    )


def _source(
    tiles: Tiles,
    width: int,
    width_v: int,
    expressions: tuple[tuple[str, str], ...] = (),
    *,
    mapped: bool,
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
        out_dtype=problem.out_dtype,
        **options,
    )
    shared = shared_bytes(tiles, width, width_v, final=_forward_mma.is_final(problem))
    blocks = _splits.Blocks(tiles.rows, tiles.tile, 1, RATE, _forward_mma.is_packed(problem))
    step = _forward_mma.step_of(problem, source, blocks, tiles.threads, shared)
    step = step._replace(box_rows=tiles.tile if problem.mapped else 0)
    if tiles.query_stages == 1:
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
    types, lengths = ("bfloat16",) * 3, (4096,) * 3
    usual = Problem(CAPABILITY, 132, 232448, *types, 1, 8, 8, 128, 128, *lengths, False, 0, True, False)
    for width, width_v in [(c, c) for c in CLASSES] + [(192, 128), (64, 128)]:
        options: list[dict[str, Any]] = [{}, {"spans": 1}]
        if width == width_v and width in (64, 128):
            options += [
                {"spans": 1, "paged": 1, "packed": 1},
                {"spans": 1, "paged": 1, "packed": 1, "terms": everything},
                {"spans": 1, "positive_scale": 0},
            ]
        for option in options:
            shape = usual._replace(
                head_dim=width, head_dim_v=width_v, page_size=16 * option.get("paged", 0),
                positive_scale=bool(option.get("positive_scale", 1)),
                terms=frozenset(("bias",) if option.get("terms") else ()),
            )  # fmt: skip
            tiles = _tiles(shape)
            assert tiles is not None
            mapped = not option.get("paged") and option.get("positive_scale", 1) == 1
            source = _source(
                tiles, width, width_v, mapped=mapped, out_dtype="bfloat16", bfloat16=True, **option
            )
            common = width == width_v == 128 and option in ({}, {"spans": 1})
            yield Variant(source, (CAPABILITY,), 64 if max(width, width_v) <= 128 else 256, common)
    tiles = _tiles(usual)
    assert tiles is not None
    yield Variant(
        _source(tiles, 128, 128, mapped=True, out_dtype="float16", bfloat16=False), (CAPABILITY,), 64
    )
