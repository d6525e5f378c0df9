"""Calls of few rows per key/value head: how the keys are split, and the constants of the kernels.

The matrix unit has 16 rows; what limits these calls is how fast keys and values come from memory, so that the
plan is about bytes under way on every multiprocessor and about borders that keep all of them at work.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._description import DECODE_MAX_ROWS
from .._dtypes import BY_NAME
from . import _plan
from ._compile import Source
from ._plan import Plan, Problem, Splits, Step, Variant

#: Keys of a chunk, the step of a stream.
KEYS = 16
#: Most rows of a block: those of the matrix unit.
MAX_ROWS = 16
#: Warps and stages of a block that are asked for first; less where shared memory does not hold them.
WARPS, STAGES = 8, 6
#: Dims from which on values do not fit the registers of one warp, and the warps of a team that shares them.
WIDEST, TEAM = 256, 4
#: Blocks of a team that share a multiprocessor: one computes while the other waits at its barriers.
TEAM_BLOCKS = 2
#: Registers per lane that fragments of queries may take; others are read from shared memory each time.
QUERY_REGISTERS = 64
#: Keys of a split that never depends on the batch.
INVARIANT_SPLIT_KEYS = 1024
#: What a block costs besides its keys, beginning and end, and the merge of splits: in bytes that a
#: multiprocessor reads meanwhile.
BLOCK_BYTES, MERGE_BYTES = 48 * 1024, 96 * 1024
#: Part of the multiprocessors that draws all the bandwidth there is.
ENOUGH = 0.95
#: Positions are 32-bit numbers.
MAX_KEYS = 2**31 - 2**16

#: Shared memory that every block takes besides.
_RESERVED = 1024

_BITS = {"float16": 16, "bfloat16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8, "int8": 8, "int4": 4}


class Shape(NamedTuple):
    """The constants of decode_mma.cu."""

    head_dim: int
    head_dim_v: int
    rows: int
    q_dtype: str
    kv_dtype: str
    scaled: bool
    paged: int  # 0 not, 1 with any page size, 2 with no chunk across pages
    terms: int
    warps: int
    stages: int
    keys: int
    blocks: int  # that share a multiprocessor

    @property
    def bits(self) -> int:
        """Bits of a stored element."""
        return _BITS[self.kv_dtype]

    @property
    def halves(self) -> int:
        """Terms that a number of 16 bits is split into: a float16 is two bfloat16."""
        return 2 if (self.q_dtype, self.kv_dtype) == ("float16", "bfloat16") else 1

    @property
    def team(self) -> int:
        """Warps that share the outputs of a stream."""
        return TEAM if self.head_dim_v > WIDEST else 1

    @property
    def k_dim(self) -> int:
        """Dims of a key, rounded up to whole fragments."""
        return _round_up(self.head_dim, 32 if self.bits == 4 else 16)

    @property
    def v_dim(self) -> int:
        """Dims of a value, rounded up to whole fragments."""
        return _round_up(self.head_dim_v, self.team * 256 // self.bits)

    @property
    def keeps_queries(self) -> bool:
        """Whether fragments of queries stay in registers."""
        steps = -(-self.k_dim // 16 // self.team)
        # Beside 256 outputs of eight rows the compiler spills more with them than it does with 16 rows.
        crowded = self.v_dim // self.team > 128 and self.rows == 8
        return self.halves * steps * self.rows // 4 <= QUERY_REGISTERS and not crowded

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one chunk; rows have an odd number of 16-byte pieces."""
        row_bytes = sum(16 * (dim * self.bits // 128 | 1) for dim in (self.k_dim, self.v_dim))
        return self.keys * (row_bytes + (8 if self.scaled else 0))

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        streams = self.warps // self.team
        queries = self.halves * self.k_dim // 16 * 512 + 128
        exchange = self.team * self.keys * 64 if self.team > 1 else 0
        states = 4 * streams * self.rows * (self.v_dim + 8 + 2)
        return queries + exchange + max(streams * self.stages * self.stage_bytes, states)

    @property
    def source(self) -> Source:
        """The kernel."""
        return Source(
            "decode_mma.cu",
            "pf_decode_mma",
            (
                ("PF_HEAD_DIM", str(self.head_dim)),
                ("PF_HEAD_DIM_V", str(self.head_dim_v)),
                ("PF_ROWS", str(self.rows)),
                ("PF_Q_TYPE", str(BY_NAME[self.q_dtype].code)),
                ("PF_KV_TYPE", str(BY_NAME[self.kv_dtype].code)),
                ("PF_MMA_BF16", str(int(self.kv_dtype == "bfloat16"))),
                ("PF_HALVES", str(self.halves)),
                ("PF_SCALED", str(int(self.scaled))),
                ("PF_PAGED", str(self.paged)),
                ("PF_TERMS", str(self.terms)),
                ("PF_KEYS", str(self.keys)),
                ("PF_WARPS", str(self.warps)),
                ("PF_TEAM_WARPS", str(self.team)),
                ("PF_STAGES", str(self.stages)),
                ("PF_KEEPS_QUERIES", str(int(self.keeps_queries))),
                ("PF_SHARED_BYTES", str(self.shared_bytes)),
                ("PF_BLOCKS_PER_SM", str(self.blocks)),
            ),
        )


def _round_up(a: int, multiple: int) -> int:
    return -(-a // multiple) * multiple


def _takes(problem: Problem) -> bool:
    """Return whether the matrix unit computes a problem's decode family."""
    bits = _BITS.get(problem.kv_dtype)
    if bits is None or problem.q_dtype not in ("float16", "bfloat16") or not problem.aligned:
        return False
    if problem.kv_dtype == "bfloat16" and problem.capability < 80:
        return False
    dims = problem.head_dim, problem.head_dim_v
    if any(dim * bits % 128 for dim in dims) or problem.tile is not None or problem.max_seqlen_kv > MAX_KEYS:
        return False
    wide = bits == 16 and not problem.scaled and dims[0] <= 576 and dims[1] <= 512
    return max(dims) <= WIDEST or wide


def shape_of(problem: Problem) -> Shape | None:
    """Return the constants of the kernel for a problem, None if it is not this kernel's."""
    if not _takes(problem):
        return None
    num_rows = problem.max_seqlen_q * problem.group
    paged = 0 if problem.page_size == 0 else 2 if problem.page_size % KEYS == 0 else 1
    shape = Shape(
        problem.head_dim, problem.head_dim_v, 8 if num_rows <= 8 else MAX_ROWS,
        problem.q_dtype, problem.kv_dtype, problem.scaled, paged, _plan.term_bits(problem),
        WARPS, STAGES, KEYS, 1,
    )  # fmt: skip
    if shape.team > 1:
        shape = shape._replace(warps=TEAM, blocks=TEAM_BLOCKS)
    # Where bits may not depend on other rows, there is room for as many as a block can have.
    found = _fit(shape._replace(rows=MAX_ROWS) if problem.batch_invariant else shape, problem)
    return None if found is None else found._replace(rows=shape.rows)


def _fit(shape: Shape, problem: Problem) -> Shape | None:
    """Return the shape with as many warps and stages as the shared memory of the device holds."""
    # Before sm_80 a copy is done when it is issued: more stages than one are of no use.
    most = shape.stages if problem.capability >= 80 else 1
    for blocks in range(shape.blocks, 0, -1):
        limit = (problem.shared_bytes + _RESERVED) // blocks - _RESERVED
        for warps in (shape.warps, *(w for w in (4, 2, 1) if shape.team <= w < shape.warps)):
            for stages in range(most, min(most, 2) - 1, -1):
                found = shape._replace(warps=warps, stages=stages, blocks=blocks)
                if found.shared_bytes <= limit:
                    return found
    return None


def _splits(problem: Problem, shape: Shape, items: int) -> Splits:
    """Return how keys are cut so that all multiprocessors are at work.

    Where the caller asks for nothing, every sequence is cut into the same number of parts, equally long: its
    real length may lie on the device, far below the bound, and all blocks are to have a part of it.
    """
    if problem.num_splits is not None or problem.batch_invariant:
        return _plan.fixed_splits(problem, INVARIANT_SPLIT_KEYS)
    key_bytes = (shape.k_dim + shape.v_dim) * shape.bits // 8
    splits = _best_splits(
        items,
        problem.max_seqlen_kv,
        key_bytes,
        problem.num_sms * shape.blocks,
        shape.keys * shape.warps // shape.team,
    )
    return Splits(splits, splits) if splits > 1 else Splits()


@functools.lru_cache(maxsize=1024)
def _best_splits(items: int, num_keys: int, key_bytes: int, slots: int, step: int) -> int:
    """Return into how many parts sequences of `num_keys` keys are best cut; `slots` blocks run at a time."""
    best_cost, best = math.inf, 1
    for splits in range(1, max(min(_plan.ceil_div(num_keys, step), slots), 1) + 1):
        full, rest = divmod(items * splits, slots)
        waves = full + (max(rest / slots, ENOUGH) if rest else 0)
        part = _round_up(_plan.ceil_div(num_keys, splits), KEYS) * key_bytes
        cost = waves * part + (full + (rest > 0)) * BLOCK_BYTES + (MERGE_BYTES if splits > 1 else 0)
        if cost < best_cost:
            best_cost, best = cost, splits
    return best


def _compose(problem: Problem, shape: Shape, limits: tuple[tuple[str, int], ...]) -> tuple[Step, ...]:
    blocks = max(_plan.ceil_div(problem.max_seqlen_q * problem.group, shape.rows), 1)
    items = blocks * problem.num_kv_heads * problem.batch
    splits = _splits(problem, shape, items)
    source = shape.source._replace(expressions=problem.expressions)
    steps = [
        Step(
            source, 32 * shape.warps, items * splits.max_splits, shape.shared_bytes,
            (*limits, ("row_blocks", blocks)), splits,
        )
    ]  # fmt: skip
    if splits.are_merged:
        steps.append(_plan.combine_step(problem, limits, splits))
    return tuple(steps)


def decode_steps(problem: Problem) -> tuple[Step, ...] | None:
    """Return the launches for the sequences of the decode family.

    None if the kernels here do not take them. The steps leave sequences of other families alone.
    """
    limits = _plan.row_limits(problem, "decode")
    if problem.packed and problem.family is None:
        # Longer sequences are another family's.
        most = DECODE_MAX_ROWS // max(problem.group, 1)
        problem = problem._replace(max_seqlen_q=min(problem.max_seqlen_q, most))
    shape = shape_of(problem)
    return None if shape is None else _compose(problem, shape, limits)


def plan(problem: Problem) -> Plan | None:
    """Return how a call whose sequences are all of the decode family is computed, None if not here."""
    if _plan.families_of(problem) != ("decode",):
        return None
    shape = shape_of(problem)
    if shape is None:
        return None
    steps = _compose(problem, shape, _plan.row_limits(problem, "decode"))
    splits = steps[0].splits
    return Plan(
        "decode_mma", "decode", steps, KEYS, shape.rows, splits,
        (
            f"kernel: decode_mma, {shape.warps} warps, {shape.stages} stages of {KEYS} keys each",
            f"splits: {splits.max_splits}, so that {problem.num_kv_heads * problem.batch} heads of keys keep "
            f"{problem.num_sms} multiprocessors at work" if splits.max_splits > 1 else "splits: none",
        ),
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    """Yield kernels as they may be compiled: each stored type, widths at the ends, pages, terms."""
    everything = frozenset(_plan.TERMS) - {"score_mod", "mask_mod"}
    usual = Problem(
        90, 132, 232448, "bfloat16", "bfloat16", "bfloat16", 1, 8, 1, 128, 128, 1, 1, 8192, False, 0,
        aligned=True, scaled=False,
    )  # fmt: skip
    changes: list[tuple[dict[str, Any], int]] = [
        ({}, 0),
        ({"num_heads": 16}, 0),
        ({"page_size": 16}, 0),
        ({"page_size": 24, "num_heads": 16}, 0),
        ({"terms": everything, "num_heads": 16}, 64),
        ({"head_dim": 64, "head_dim_v": 64}, 0),
        ({"head_dim": 256, "head_dim_v": 256}, 64),
        ({"head_dim": 256, "head_dim_v": 256, "num_heads": 16}, 192),
        ({"head_dim": 576, "head_dim_v": 512, "num_heads": 16}, 64),
        ({"q_dtype": "float16"}, 0),
        ({"q_dtype": "float16", "kv_dtype": "float16"}, 0),
        *(({"kv_dtype": name, "scaled": True}, 0) for name, bits in _BITS.items() if bits < 16),
    ]
    for capability, shared_bytes in ((75, 65536), (80, 166912), (90, 232448)):
        for number, (change, spill_bytes) in enumerate(changes):
            shape = shape_of(usual._replace(capability=capability, shared_bytes=shared_bytes, **change))
            if shape is not None:
                yield Variant(shape.source, (capability,), spill_bytes, is_common=number < 3)
