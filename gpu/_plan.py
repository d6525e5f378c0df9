"""How calls are described to those who plan them, and the plan of the generic kernel. Pure: needs no device.

A `Problem` holds all that the choice of a kernel depends on; a `Plan` says what is launched for it. Who is
asked in which order stands in `_choose`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .._description import DECODE_MAX_ROWS
from .._dtypes import BY_NAME
from ._compile import Source

#: Bits of PF_TERMS in call.cuh, by the option of a call.
TERMS = {
    "softcap": 1,
    "alibi_slopes": 2,
    "bias": 4,
    "mask": 8,
    "tree": 16,
    "score_mod": 32,
    "mask_mod": 64,
}
#: Bits of PF_INDICES in call.cuh, by the option of a call.
INDICES = {
    "cu_seqlens_q": 1,
    "cu_seqlens_kv": 2,
    "seq_lens": 4,
    "block_table": 8,
    "q_offset": 16,
    "spans": 32,
    "tree": 64,
}
#: Most blocks of a grid in its first dimension.
MAX_BLOCKS = 2**31 - 1
#: What stands for "no limit" among numbers of rows.
NO_LIMIT = 2**62


class Problem(NamedTuple):
    """What the choice of a kernel depends on."""

    capability: int  # 90 for sm_90
    num_sms: int
    shared_bytes: int  # most dynamic shared memory of one block
    q_dtype: str
    kv_dtype: str
    out_dtype: str
    batch: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    num_queries: int  # tokens of all sequences
    max_seqlen_q: int  # bounds, where lengths lie on the device
    max_seqlen_kv: int
    packed: bool  # queries of several sequences on one axis: their numbers differ
    page_size: int  # 0: not paged
    #: Rows of q, k, v and out begin at multiples of 16 bytes and have unit stride.
    aligned: bool
    scaled: bool  # k_scale, v_scale or q_scale
    terms: frozenset[str] = frozenset()  # of `TERMS`
    spans: bool = False  # causal, window or spans: not every row sees every key
    causal: bool = False
    window: tuple[int, int] = (-1, -1)  # keys to the left and to the right, -1: no limit
    sink_tokens: int = 0
    positive_scale: bool = True
    wide_scores: bool = False  # scores, or products before they are scaled, may be beyond float32
    num_splits: int | None = None
    tile: int | None = None
    family: str | None = None
    batch_invariant: bool = False
    hopper: bool = False  # whether kernels for Hopper alone may be taken
    mapped: bool = False  # whether the copy unit can be told of k and v by a map
    out_mapped: bool = False  # and of the result
    expressions: tuple[tuple[str, str], ...] = ()
    indices: frozenset[str] | None = None  # of `INDICES`; None: nobody has said

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // max(self.num_kv_heads, 1)

    @property
    def real(self) -> str:
        """The type of C that is computed in."""
        return "double" if self.q_dtype == "float64" or self.wide_scores else "float"

    @property
    def state_bytes(self) -> int:
        """Bytes of one number of a state."""
        return 8 if self.real == "double" else 4

    @property
    def num_rows(self) -> int:
        """Rows of states."""
        return self.num_queries * self.num_heads


def for_call(problem: Problem, steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Return launches of kernels that know which index arrays a call has, and whether its keys are split."""
    if problem.indices is None:
        return steps
    indices = "PF_INDICES", str(sum(INDICES[name] for name in problem.indices))

    def told(step: Step) -> Step:
        defines = *step.source.defines, indices, ("PF_HAS_SPLITS", str(int(step.splits.are_merged)))
        return step._replace(source=step.source._replace(defines=defines))

    return tuple(map(told, steps))


class Splits(NamedTuple):
    """How keys are cut into parts: fields of pf_call."""

    max_splits: int = 1  # of any sequence
    num_splits: int = 0  # asked for
    split_keys: int = 0  # keys between two borders
    split_seen: int = 0  # 1: parts are of the tiles that a block sees, not of all keys

    @property
    def are_merged(self) -> bool:
        """Whether states of parts go to the workspace, for another kernel to merge."""
        return self.max_splits > 1 or self.num_splits > 1


class Step(NamedTuple):
    """One launch."""

    source: Source
    threads: int
    num_blocks: int
    shared_bytes: int = 0
    fields: tuple[tuple[str, int], ...] = ()  # of pf_call, that this step sets
    splits: Splits = Splits()
    #: Rows of boxes for the copy unit, of k and v and of the result; 0: there is room for the map only.
    box_rows: tuple[int, int] | None = None


class Plan(NamedTuple):
    """The launches of a call, in order, and what `explain` says about them."""

    kernel: str
    family: str
    steps: tuple[Step, ...]
    tile: int
    rows_per_item: int
    splits: Splits = Splits()  # of the first launch
    reasons: tuple[str, ...] = ()


class Variant(NamedTuple):
    """A kernel as it may be compiled, for tests that compile all there are."""

    source: Source
    architectures: tuple[int, ...]  # capabilities that it is for
    spill_bytes: int = 0  # most that it may spill
    is_common: bool = False  # one of those that plain calls use


def term_bits(problem: Problem) -> int:
    """Return PF_TERMS of a problem."""
    return sum(TERMS[name] for name in problem.terms)


def families_of(problem: Problem) -> tuple[str, ...]:
    """Return the families of the sequences that a call may have: chosen by rows per key/value head."""
    if problem.family is not None:
        return (problem.family,)
    if problem.max_seqlen_q * problem.group <= DECODE_MAX_ROWS:
        return ("decode",)
    return ("prefill", "decode") if problem.packed else ("prefill",)


def row_limits(problem: Problem, family: str) -> tuple[tuple[str, int], ...]:
    """Return the fields of pf_call that leave a kernel the sequences of its family."""
    if problem.family is not None or families_of(problem) == (family,):
        low, high = 0, NO_LIMIT
    elif family == "decode":
        low, high = 0, DECODE_MAX_ROWS
    else:
        low, high = DECODE_MAX_ROWS + 1, NO_LIMIT
    return ("min_rows", low), ("max_rows", high)


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def row_blocks(problem: Problem, rows: int, others: int) -> int:
    """Return how many blocks share the rows of a sequence, where there are `others` along other axes."""
    wanted = max(ceil_div(problem.max_seqlen_q, rows), 1)
    return max(min(wanted, MAX_BLOCKS // max(others, 1)), 1)


def fixed_splits(problem: Problem, split_keys: int) -> Splits:
    """Return how keys are cut: as asked for, else with a border every `split_keys` keys, 0 for none."""
    if problem.num_splits is not None:
        return Splits(min(problem.num_splits, max(problem.max_seqlen_kv, 1)), problem.num_splits)
    if split_keys and problem.max_seqlen_kv > split_keys:
        return Splits(ceil_div(problem.max_seqlen_kv, split_keys), split_keys=split_keys)
    return Splits()


#: Bytes of keys and values that a section may have: what stays in the second cache beside everything else.
SECTION_BYTES = 32 * 2**20


def section(problem: Problem, heads: int, splits: int) -> tuple[str, int]:
    """Return the field of pf_call that says how many heads, of `heads` in the grid, are taken together.

    Each part of the keys counts as a head.

    Where every row sees as much as any other, the order of blocks says nothing about their length.
    """
    if not problem.spans:
        return "section", 1
    size = BY_NAME[problem.kv_dtype].itemsize * (problem.head_dim + problem.head_dim_v)
    fitting = SECTION_BYTES * splits // max(size * problem.max_seqlen_kv, 1)
    return "section", max(min(fitting, heads), 1)  # times blocks of a head it is no more than the grid


#: Threads of a block of combine.cu, and rows per multiprocessor from which on blocks have several.
_COMBINE_THREADS, _COMBINE_ROWS = 128, 4


def combine_step(problem: Problem, fields: tuple[tuple[str, int], ...], splits: Splits) -> Step:
    """Return the launch that merges the states of splits.

    Few rows wait for the way to memory and back: each has a block, and each output a thread. Of many rows a
    block has as many heads of one query as it has threads for, and a thread four outputs: they share the
    weights of states. The bits are the same.
    """
    many = problem.num_rows >= _COMBINE_ROWS * problem.num_sms
    outputs = 4 if many and problem.real == "float" and problem.head_dim_v % 4 == 0 else 1
    lanes = min(max(ceil_div(problem.head_dim_v, outputs), 1), _COMBINE_THREADS)
    most = _COMBINE_THREADS // lanes if many else 1
    blocks = max(ceil_div(problem.num_heads, most), 1)  # of a query
    threads = 32 * ceil_div(ceil_div(problem.num_heads, blocks) * lanes, 32)
    tokens = max(min(problem.num_queries, MAX_BLOCKS // blocks), 1)
    defines = (*generic_defines(problem), ("PF_OUTPUTS", str(outputs)))
    source = Source("combine.cu", "pf_combine", defines, problem.expressions)
    return Step(source, threads, blocks * tokens, 0, (*fields, ("row_blocks", blocks)), splits)


def with_merge(problem: Problem, step: Step, family: str) -> tuple[Step, ...]:
    """Return a launch for the sequences of a family, and that of the merge if it leaves states."""
    if not step.splits.are_merged:
        return (step,)
    return step, combine_step(problem, row_limits(problem, family), step.splits)


def generic_defines(problem: Problem) -> tuple[tuple[str, str], ...]:
    """Constants of the kernels that test at run time which terms there are."""
    terms = sum(bit for name, bit in TERMS.items() if not name.endswith("_mod") or name in problem.terms)
    return ("PF_REAL", problem.real), ("PF_TERMS", str(terms))


#: Keys per tile of the generic kernel (PF_CAREFUL_TILE).
GENERIC_TILE = 256
#: Rows of a block of the generic kernel, a warp each.
GENERIC_WARPS = 4
#: Keys per split of the generic kernel in the decode family.
GENERIC_SPLIT_KEYS = 512


def generic_steps(problem: Problem, family: str) -> tuple[Step, ...]:
    """Return the launches that compute the sequences of a family by the generic kernel."""
    splits = fixed_splits(problem, GENERIC_SPLIT_KEYS if family == "decode" else 0)
    warps = GENERIC_WARPS
    others = problem.num_heads * splits.max_splits * problem.batch
    blocks = row_blocks(problem, warps, others)
    limits = row_limits(problem, family)
    source = Source("generic.cu", "pf_generic", generic_defines(problem), problem.expressions)
    step = Step(source, 32 * warps, blocks * others, 0, (*limits, ("row_blocks", blocks)), splits)
    return with_merge(problem, step, family)


def generic(problem: Problem) -> Plan:
    """One warp a row: every option, every type, every width."""
    (family,) = families_of(problem)
    steps = generic_steps(problem, family)
    reasons = ("kernel: generic, since no faster one takes this call",)
    return Plan("generic", family, steps, GENERIC_TILE, GENERIC_WARPS, steps[0].splits, reasons)


def workspace_bytes(problem: Problem, found: Plan) -> int:
    """Return the bytes of the states of splits, 0 without splits."""
    most = max((step.splits.max_splits for step in found.steps if step.splits.are_merged), default=0)
    return most * problem.num_rows * (problem.head_dim_v + 2) * problem.state_bytes


def variants() -> Iterator[Variant]:
    """Yield the kernels of this module as they may be compiled."""
    everything = sum(bit for name, bit in TERMS.items() if not name.endswith("_mod"))
    for real in ("float", "double"):
        defines: tuple[tuple[str, str], ...] = (("PF_REAL", real), ("PF_TERMS", str(everything)))
        # Right first: these keep more at hand than there are registers.
        yield Variant(Source("generic.cu", "pf_generic", defines), (), 2048, is_common=real == "float")
        for outputs in (1, 4) if real == "float" else (1,):
            combine = Source("combine.cu", "pf_combine", (*defines, ("PF_OUTPUTS", str(outputs))))
            yield Variant(combine, (), 2048, is_common=outputs == 4)
