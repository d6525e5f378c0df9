"""The backend object: AttentionArgs -> plan -> kernels -> launches on the caller's stream.

Nothing waits for the device, unless arrays lie in host memory: those are copied there and back. Device memory
is taken only for what the caller did not provide.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from .. import _arrays
from .._arrays import DeviceArray
from .._description import (
    DECODE_MAX_ROWS,
    AppendArgs,
    Array,
    Arrays,
    AttentionArgs,
    Explanation,
    MergeArgs,
    Repeat,
    StatsArgs,
)
from .._errors import BackendUnavailable, invalid, unsupported
from .._layout import sequences
from .._tiles import count_tiles
from . import _choose, _compile, _device, _forward_wgmma, _launch, _operations, _places, _plan, _prepared

_ALIGNMENT = 16
#: Extents and strides in bytes of a tensor map are less than these.
_MAP_EXTENT, _MAP_STRIDE = 2**31, 2**40
#: Beyond these scales, scores or the products that are scaled may not be numbers of float32.
_SMALLEST_SCALE, _LARGEST_SCALE = 1e-30, 1e30


class CudaBackend:
    """The kernels of ``gpu/kernels``; implements `pyflash._description.Backend`."""

    name = "cuda"

    def unavailable(self) -> str | None:
        """Return why no GPU can be used, None if one can."""
        return _device.platform.unavailable()

    def _device_of(self, first: Array, others: Iterable[Any]) -> tuple[_device.Device, int]:
        """Return the device of a call and the stream for its work, which is that of its first argument."""
        if (reason := self.unavailable()) is not None:
            raise BackendUnavailable(f"backend: 'cuda' is not available: {reason}")
        if not isinstance(first, DeviceArray):
            device = _device.platform.device(_device.platform.current_device())
            return device, device.stream()
        device = _device.platform.device(first.device)
        stream, waits = _arrays.streams_of(first, others)
        for other in waits:
            device.wait_for(stream, other)
        return device, stream

    def _problem(self, args: AttentionArgs, device: _device.Device) -> _plan.Problem:
        paged = args.block_table is not None
        if paged:
            assert args.block_table is not None
            longest = args.block_table.shape[1] * args.k.shape[1]
        else:
            longest = args.k.shape[1]
        scale = _launch.scale_of(args)
        terms = {name for name in _plan.TERMS if name not in ("softcap",) and getattr(args, name) is not None}
        if args.softcap:
            terms.add("softcap")
        expressions = tuple(
            (f"PF_{name.upper()}_EXPRESSION", f"({getattr(args, name)})")
            for name in ("score_mod", "mask_mod")
            if getattr(args, name) is not None
        )
        return _plan.Problem(
            capability=device.capability,
            num_sms=device.num_sms,
            shared_bytes=device.shared_bytes,
            q_dtype=str(args.q.dtype),
            kv_dtype=args.kv_dtype,
            out_dtype=str(args.out.dtype),
            batch=args.batch,
            num_heads=args.q.shape[2],
            num_kv_heads=args.k.shape[2],
            head_dim=args.q.shape[3],
            head_dim_v=args.out.shape[3],
            num_queries=args.q.shape[0] * args.q.shape[1],
            max_seqlen_q=args.max_seqlen_q,
            max_seqlen_kv=longest,
            packed=args.cu_seqlens_q is not None,
            page_size=args.k.shape[1] if paged else 0,
            aligned=all(map(_is_aligned, (args.q, args.k, args.v, args.out))),
            scaled=not (args.k_scale is None and args.v_scale is None and args.q_scale is None),
            terms=frozenset(terms),
            spans=args.causal or args.spans is not None or args.window != (-1, -1),
            causal=args.causal,
            window=args.window,
            sink_tokens=args.sink_tokens,
            positive_scale=scale > 0,
            wide_scores=scale != 0 and not _SMALLEST_SCALE <= abs(scale) <= _LARGEST_SCALE,
            num_splits=args.num_splits,
            tile=args.tile,
            family=args.family,
            batch_invariant=args.batch_invariant,
            hopper=_forward_wgmma.is_on,
            mapped=not paged and all(map(_has_map, (args.k, args.v))),
            out_mapped=args.cu_seqlens_q is None and args.out.itemsize == 2 and _has_map(args.out),
            expressions=expressions,
            indices=frozenset(name for name in _plan.INDICES if getattr(args, name) is not None),
        )

    def _planned(self, args: AttentionArgs) -> tuple[_device.Device, _plan.Problem, _plan.Plan]:
        device, _ = self._device_of(args.q, (*args, *(args.spans or ())))
        problem = self._problem(args, device)
        return device, problem, self._plan(problem)

    def _plan(self, problem: _plan.Problem) -> _plan.Plan:
        plan = _choose.plan(problem)
        if problem.tile not in (None, plan.tile):
            where = f"the {plan.kernel} kernel of the cuda backend"
            raise unsupported(
                "tile", repr(problem.tile), where, f"leave it out: its tiles have {plan.tile} keys"
            )
        blocks = max((step.num_blocks for step in plan.steps), default=0)
        if blocks > _plan.MAX_BLOCKS:
            found = f"{problem.batch} sequences of {problem.num_heads} heads, {blocks} blocks of threads"
            raise unsupported("q", found, "the cuda backend", f"at most {_plan.MAX_BLOCKS} can be launched")
        return plan

    def attention(self, args: AttentionArgs, *, again: Arrays | None = None) -> Repeat | None:
        """Fill ``args.out`` and ``args.lse``."""
        device, stream = self._device_of(args.q, (*args, *(args.spans or ())))
        problem = self._problem(args, device)
        plan = self._plan(problem)
        if not args.out.size:
            return None
        places = _places.Places(device, stream)
        here = args._replace(
            out=places.result(args.out), lse=None if args.lse is None else places.result(args.lse)
        )
        call = _launch.pack(here, places, _places.unchecked(args))
        needed = _plan.workspace_bytes(problem, plan)
        workspace = 0
        memory = None  # kept until the launches are on the stream
        if args.workspace is not None:
            if args.workspace.nbytes < needed:
                raise invalid("workspace", f"{args.workspace.nbytes} bytes", f"at least {needed}")
            workspace, _ = places.place(args.workspace)
        elif needed:
            memory = device.allocate(needed, stream)
            workspace = memory.address
        with _naming_expressions(args):
            _compile.warm_up(device, [step.source for step in plan.steps])
            prepared = [_prepared.prepare(device, step, call) for step in plan.steps]
        for launch in prepared:
            launch.put(device, stream, workspace)
        places.fetch()
        if again is None or not isinstance(args.out, DeviceArray):
            return None
        return _prepared.repeat(device, stream, prepared, places, args, needed, again.others)

    def merge_states(self, args: MergeArgs) -> None:
        """Fill ``args.out`` and ``args.lse``."""
        device, stream = self._device_of(args.parts, args)
        _operations.merge_states(device, stream, _places.Places(device, stream), args)

    def append_kv(self, args: AppendArgs) -> None:
        """Write the tokens into the caches."""
        device, stream = self._device_of(args.k, args)
        _operations.append_kv(device, stream, _places.Places(device, stream), args)

    def attention_stats(self, args: StatsArgs) -> None:
        """Fill the results in `args` that are not None."""
        device, stream = self._device_of(args.attention.q, (*args.attention, *args))
        problem = self._problem(args.attention, device)
        with _naming_expressions(args.attention):
            _operations.attention_stats(device, stream, _places.Places(device, stream), args, problem)

    def check(self, args: AttentionArgs) -> None:
        """Refuse what no kernel takes."""
        self._planned(args)

    def explain(self, args: AttentionArgs) -> Explanation:
        """Say what `attention` would do, without doing it."""
        device, problem, plan = self._planned(args)
        rows = (
            "family: asked for"
            if args.family is not None
            else (
                f"family: decode up to {DECODE_MAX_ROWS} query rows per key/value head "
                f"({problem.group} per query)"
            )
        )
        total, seen, told = _tiles(args, plan)
        return Explanation(
            backend=self.name,
            kernel=plan.kernel,
            family=plan.family if args.out.size else "none",
            isa=device.architecture,
            tile=plan.tile,
            rows_per_item=plan.rows_per_item,
            num_splits=plan.splits.max_splits,
            num_items=plan.steps[0].num_blocks,
            num_threads=plan.steps[0].threads,
            tiles_total=total,
            tiles_skipped=total - seen,
            workspace_bytes=_plan.workspace_bytes(problem, plan),
            reasons=(f"isa: {device.name}", rows, *plan.reasons, *told),
        )


def report() -> list[tuple[str, str]]:
    """Return what `pyflash.show_runtime` says of the GPUs, as labels and values."""
    folder = _compile.cache_folder()
    kept = f"kept in {folder}" if folder else "not kept: PYFLASH_CACHE_DIR is empty"
    return [*_device.platform.report(), ("compiled kernels", kept)]


@contextlib.contextmanager
def _naming_expressions(args: AttentionArgs) -> Iterator[None]:
    """Say of a kernel that does not compile with expressions of the caller that it is for them."""
    try:
        yield
    except _compile.CompileError as error:
        given = [name for name in ("score_mod", "mask_mod") if getattr(args, name) is not None]
        if not given:
            raise
        # The compiler shows the line that it stumbles over, or names the function.
        name = next((name for name in given if f"pf_{name}" in str(error).lower()), given[0])
        reason = next((line.strip() for line in str(error).splitlines() if "error:" in line), str(error))
        expected = f"a C++ expression that compiles ({reason})"
        raise invalid(name, repr(getattr(args, name)), expected) from None


def _tiles(args: AttentionArgs, plan: _plan.Plan) -> tuple[int, int, tuple[str, ...]]:
    """Return the key tiles of all work items and those that some row of the item sees, and what to add."""
    if any(map(_places.any_on_device, args._replace(q=None, k=None, v=None, out=None, lse=None))):  # type: ignore[arg-type]
        return 0, 0, ("tiles: not counted, since lengths or masks lie on the device",)
    args = args._replace(
        score_mod=None, mask_mod=None
    )  # expressions, which hide no whole tile as far as is known
    total = seen = 0
    for sequence in sequences(args):
        all_keys = ((0, sequence.seqlen_kv),)
        count = count_tiles(args, sequence, plan.rows_per_item, all_keys, plan.tile)
        total, seen = total + count.tiles, seen + count.seen
    return total, seen, ()


def _has_map(array: Array) -> bool:
    """Return whether a tensor map can describe an aligned array: no axis repeats or goes backwards."""
    return all(
        0 < n < _MAP_EXTENT and (n == 1 or 0 < stride < _MAP_STRIDE)
        for n, stride in zip(array.shape, array.strides, strict=True)
    )


def _is_aligned(array: Array) -> bool:
    """Return whether rows begin at multiples of 16 bytes and have unit stride.

    Of an array in host memory that is asked of its copy: only axes that repeat one element stay as they are.
    """
    if not isinstance(array, DeviceArray):
        return array.shape[3] * array.itemsize % _ALIGNMENT == 0 and (
            array.strides[3] != 0 or array.shape[3] == 1
        )
    *others, dim = array.strides
    return (
        (dim == array.itemsize or array.shape[3] == 1)
        and array.address % _ALIGNMENT == 0
        and all(s % _ALIGNMENT == 0 or n <= 1 for s, n in zip(others, array.shape[:3], strict=True))
    )
