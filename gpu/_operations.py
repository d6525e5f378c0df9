"""The operations around attention on the device: merging states, appending to a cache, statistics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from .. import _dtypes
from .._arrays import DeviceArray
from .._description import AppendArgs, Array, MergeArgs, StatsArgs
from . import _compile, _device, _launch, _places, _plan
from ._compile import Source

_KERNELS = Path(__file__).parent / "kernels"
#: Dynamic shared memory of a block of the statistics; the kernel checks that its tile has room there.
_STATS_BYTES = 48_000
_STATS_THREADS = 256
#: Rows of the tile of a block; with few of them its keys are more.
_STATS_ROWS, _STATS_FEW_ROWS = 64, 16
#: Tokens per block of an append, and what a block's warps write at a time.
_MOST_TOKENS = 256
_APPEND_WARPS = 8


def _struct(operation: str) -> Array:
    return np.zeros((), _launch.struct(f"pf_{operation}_call", _KERNELS / f"{operation}.cuh"))


def _run(
    device: _device.Device,
    stream: int,
    source: Source,
    num_blocks: int,
    threads: int,
    call: Array,
    shared_bytes: int = 0,
) -> None:
    kernel = _compile.kernel(device, source)
    device.launch(kernel, (num_blocks, 1, 1), threads, shared_bytes, stream, call)


def _real(wide: bool) -> tuple[str, str]:
    return "PF_REAL", "double" if wide else "float"


# --- merging states ---


def _merge_source(parts: _dtypes.DType, part_lse: _dtypes.DType, num_parts: int) -> Source:
    """Return the merge of parts of these types; it is computed in the wider one.

    Two parts, as of two ranks, are many rows of little to do, which are not to wait for registers of sixteen.
    """
    at_once = ("PF_AT_ONCE", "2" if num_parts <= 2 else "16")
    types = (("PF_PARTS", str(parts.code)), ("PF_PART_LSE", str(part_lse.code)), at_once)
    return Source("merge.cu", "pf_merge", (_real("float64" in (parts.name, part_lse.name)), *types))


def merge_states(device: _device.Device, stream: int, places: _places.Places, args: MergeArgs) -> None:
    """Fill ``args.out`` and ``args.lse``."""
    if not args.out.size:
        return
    call = _struct("merge")
    num_parts, batch, seqlen, num_heads, head_dim = args.parts.shape
    call["parts"] = _launch.tensor(places, args.parts, (1, 2, 3, 4))
    call["part_lse"] = _launch.tensor(places, args.part_lse, (1, 3, 2, None))
    for name, array in (("parts", args.parts), ("part_lse", args.part_lse)):
        call[f"{name}_stride_part"] = places.place(array)[1][0] // array.itemsize
    call["out"] = _launch.tensor(places, places.result(args.out))
    call["lse"] = _launch.tensor(places, places.result(args.lse), (0, 2, 1, None))
    call["sinks"] = _launch.tensor(places, args.sinks, (None, None, 0, None))
    call["num_parts"], call["batch"], call["seqlen"] = num_parts, batch, seqlen
    call["num_heads"], call["head_dim"] = num_heads, head_dim
    call["lse_includes_sinks"] = args.lse_includes_sinks
    warps = 4
    num_blocks = min(_plan.ceil_div(batch * seqlen * num_heads, warps), _plan.MAX_BLOCKS)
    types = [_dtypes.lookup(x.dtype) for x in (args.parts, args.part_lse)]
    assert types[0] is not None and types[1] is not None
    _run(device, stream, _merge_source(types[0], types[1], num_parts), num_blocks, 32 * warps, call)
    places.fetch()


# --- appending to a cache ---


def _append_source(name: str, wide: bool, types: tuple[int, int] | None = None) -> Source:
    """Return a kernel of an append; `types` are the codes of the types of tokens and caches."""
    names = ("PF_FROM", "PF_TO")
    constants = () if types is None else tuple(zip(names, map(str, types), strict=True))
    return Source("append.cu", name, (_real(wide), *constants))


def _without_replaced(slots: Array) -> Array:
    """Return slots of which none occurs twice: of two tokens for one place the later one stays."""
    kept = np.full(slots.shape, -1, np.int64)
    _, from_behind = np.unique(slots[::-1], return_index=True)
    last = len(slots) - 1 - from_behind
    kept[last] = slots[last]
    return kept


def _num_sequences(args: AppendArgs) -> int:
    """Return how many sequences an append without slots is to."""
    if args.cu_seqlens is not None:
        return int(args.cu_seqlens.shape[0]) - 1
    return 0 if args.seq_lens is None else int(args.seq_lens.shape[0])


def append_kv(device: _device.Device, stream: int, places: _places.Places, args: AppendArgs) -> None:
    """Write the tokens into the caches."""
    if not args.k.shape[0] or (args.slots is None and _num_sequences(args) == 0):
        return
    call = _struct("append")
    _pack_append(call, places, args)
    wide = args.k.dtype == np.float64
    found = None  # kept until the launches are on the stream
    if args.slots is None:
        found = _find_slots(device, stream, places, args, call, wide)
    num_tokens, num_rows = args.k.shape[0], 2 * args.k.shape[1]
    # Every block looks through the slots of all later tokens: no more blocks than keep the device busy.
    per_block = min(_plan.ceil_div(num_tokens, 8 * device.num_sms), _MOST_TOKENS)
    num_runs = _plan.ceil_div(num_tokens, per_block)
    wanted = _plan.ceil_div(8 * device.num_sms, num_runs)
    per_run = max(min(wanted, _plan.ceil_div(num_rows * per_block, _APPEND_WARPS)), 1)
    call["tokens_per_block"], call["blocks_per_run"] = per_block, per_run
    source = _append_source("pf_append", wide, (int(call["k"]["dtype"]), int(call["k_cache"]["dtype"])))
    _run(device, stream, source, num_runs * per_run, 32 * _APPEND_WARPS, call)
    del found
    places.fetch()


def _pack_append(call: Array, places: _places.Places, args: AppendArgs) -> None:
    tokens, code = (None, 0, 1, 2), _dtypes.BY_NAME[args.kv_dtype].code
    caches = [places.result(cache, holds=True) for cache in (args.k_cache, args.v_cache)]
    scales = [args.k_scale, args.v_scale]
    if args.writes_scales:
        scales = [None if scale is None else places.result(scale, holds=True) for scale in scales]
    for name, x, cache, scale in zip("kv", (args.k, args.v), caches, scales, strict=True):
        call[name] = _launch.tensor(places, x, tokens)
        call[f"{name}_cache"] = _launch.tensor(places, cache, code=code)
        call[f"{name}_scale"] = _launch.tensor(places, scale, (0, 1, 2, None))
    angles = (None, 0, None, 1)
    call["cos"], call["sin"] = (_launch.tensor(places, x, angles) for x in (args.cos, args.sin))
    if args.cos is not None:
        call["rotary_rows"], call["rotary_pairs"] = args.cos.shape
    slots = args.slots
    if slots is not None and not isinstance(slots, DeviceArray):
        slots, call["unique"] = _without_replaced(slots), True
    call["slots"] = _launch.index(places, slots)
    for name in ("positions", "block_table", "seq_lens", "cu_seqlens"):
        call[name] = _launch.index(places, getattr(args, name))
    call["num_tokens"], call["num_kv_heads"], call["head_dim"] = args.k.shape
    call["head_dim_v"] = args.v.shape[2]
    call["num_pages"], call["page_size"] = args.k_cache.shape[:2]
    call["interleaved"], call["writes_scales"] = args.interleaved, args.writes_scales


def _find_slots(
    device: _device.Device, stream: int, places: _places.Places, args: AppendArgs, call: Array, wide: bool
) -> _device.Memory:
    """Let the device turn lengths and table into slots and positions; return the memory that they lie in."""
    num_tokens = args.k.shape[0]
    found = device.allocate(2 * 8 * num_tokens, stream)
    call["batch"] = _num_sequences(args)
    call["max_pages"] = 0 if args.block_table is None else args.block_table.shape[1]
    call["found"] = found.address
    num_blocks = min(_num_sequences(args), _plan.MAX_BLOCKS)
    _run(device, stream, _append_source("pf_append_places", wide), num_blocks, 256, call)
    call["slots"] = (found.address, (1, 0), 8)
    call["positions"] = (found.address + 8 * num_tokens, (1, 0), 8)
    return found


# --- statistics ---


def _stats_source(name: str, rows: int, problem_defines: tuple[tuple[str, str], ...]) -> Source:
    sizes = (("PF_TILE_ROWS", str(rows)), ("PF_SHARED_BYTES", str(_STATS_BYTES)))
    return Source("stats.cu", name, (*problem_defines, *sizes))


def attention_stats(
    device: _device.Device, stream: int, places: _places.Places, args: StatsArgs, problem: _plan.Problem
) -> None:
    """Fill the results in `args` that are not None; `problem` is that of ``args.attention``."""
    attention = args.attention
    if not attention.q.size or not attention.batch:
        return
    call = _struct("stats")
    # Values and outputs are never touched.
    here = attention._replace(v=attention.k, out=attention.q, lse=None)
    call["attention"] = _launch.pack(here, places, _places.unchecked(attention))
    _pack_stats(call, places, args)
    few = problem.max_seqlen_q <= _STATS_FEW_ROWS
    rows = _STATS_FEW_ROWS if few else _STATS_ROWS
    keys = 16 * _STATS_THREADS // rows
    defines = _plan.generic_defines(problem)
    if problem.wide_scores and problem.q_dtype != "float64":
        defines = (*defines, ("PF_RESULT", "float"))
    others = problem.num_heads * problem.batch
    passes = []
    if any(x is not None for x in (args.max_logit, args.entropy, args.top_k_values, args.row_probabilities)):
        passes.append(("pf_stats_rows", _plan.ceil_div(problem.max_seqlen_q, rows)))
    if args.key_mass is not None and args.key_mass.size:
        passes.append(("pf_stats_keys", _plan.ceil_div(args.key_mass.shape[2], keys)))
    for name, wanted in passes:
        blocks = max(min(wanted, _plan.MAX_BLOCKS // others), 1)
        call["attention"]["row_blocks"] = blocks
        source = _stats_source(name, rows, defines)._replace(expressions=problem.expressions)
        _run(device, stream, source, blocks * others, _STATS_THREADS, call, _STATS_BYTES)
    places.fetch()


def _pack_stats(call: Array, places: _places.Places, args: StatsArgs) -> None:
    def result(array: Array | None) -> Array | None:
        return None if array is None else places.result(array, holds=True)

    of_rows = (0, 2, 1, None)
    call["lse"] = _launch.tensor(places, args.lse, of_rows)
    for name in ("max_logit", "entropy"):
        call[name] = _launch.tensor(places, result(getattr(args, name)), of_rows)
    call["key_mass"] = _launch.tensor(places, result(args.key_mass), of_rows)
    if args.top_k_values is not None:
        for name in ("top_k_values", "top_k_indices"):
            call[name] = _launch.tensor(places, result(getattr(args, name)), (0, 2, 1, 3))
        call["top_k"] = args.top_k_values.shape[3]
    if args.row_probabilities is not None and args.rows is not None:
        call["row_probabilities"] = _launch.tensor(places, result(args.row_probabilities), (0, 2, 1, 3))
        call["rows"] = _launch.index(places, args.rows)
        call["num_rows"] = args.rows.shape[0]
    of_keys = args.key_mass if args.row_probabilities is None else args.row_probabilities
    call["num_keys"] = 0 if of_keys is None else of_keys.shape[-1]
    call["last_queries"] = -1 if args.last_queries is None else args.last_queries


def variants() -> Iterator[_plan.Variant]:
    """Yield every kernel of this module that may be compiled, but for expressions of callers."""
    everything = 2 ** len(_plan.TERMS) - 1 - _plan.TERMS["score_mod"] - _plan.TERMS["mask_mod"]
    for parts in _dtypes.FLOATS:
        for part_lse in _dtypes.FLOATS[:2]:
            for num_parts in (2, 3):
                # The stack of waiting states lies in local memory anyway.
                yield _plan.Variant(_merge_source(parts, part_lse, num_parts), (), spill_bytes=1024)
    for wide in (False, True):
        yield _plan.Variant(_append_source("pf_append_places", wide), ())
        floats = [dtype for dtype in _dtypes.FLOATS if (dtype.name == "float64") == wide]
        for given in floats:
            for stored in floats if wide else (*floats, *_dtypes.QUANTISED):
                yield _plan.Variant(_append_source("pf_append", wide, (given.code, stored.code)), ())
        defines = (_real(wide), ("PF_TERMS", str(everything)))
        for name in ("pf_stats_rows", "pf_stats_keys"):
            for rows in (_STATS_ROWS, _STATS_FEW_ROWS):
                yield _plan.Variant(_stats_source(name, rows, defines), ())
