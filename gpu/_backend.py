"""The backend object: AttentionArgs -> plan -> kernels -> launches on the caller's stream.

Nothing waits for the device, unless arrays lie in host memory: those are copied there and back. Device memory
is taken only for what the caller did not provide.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .. import _arrays
from .._arrays import DeviceArray
from .._description import (
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
from . import _compile, _device, _launch, _plan

_UNCHECKED = {"block_table": 1, "spans": 2, "tree": 4}
_ALIGNMENT = 16


class _Places(_launch.Places):
    """Puts arrays of host memory onto the device, each once, and takes results back."""

    def __init__(self, device: _device.Device, stream: int) -> None:
        self.device, self.stream = device, stream
        self._kept: dict[int, tuple[Array, int, tuple[int, ...], Any]] = {}
        self._results: list[tuple[Array, Array, int]] = []

    def place(self, array: Array) -> tuple[int, tuple[int, ...]]:
        if isinstance(array, DeviceArray):
            return array.address, array.strides
        found = self._kept.get(id(array))
        if found is None:
            # Broadcast axes stay so: what a stride of 0 repeats is copied once.
            axes = [slice(None, 1) if s == 0 else slice(None) for s in array.strides]
            part = np.ascontiguousarray(array[tuple(axes)])
            memory = self._upload(part)
            strides = tuple(
                0 if given == 0 else own for given, own in zip(array.strides, part.strides, strict=True)
            )
            found = self._kept[id(array)] = array, memory.address, strides, memory
        return found[1:3]

    def _upload(self, array: Array) -> _device.Memory:
        if self.device.is_capturing(self.stream):
            raise unsupported(
                "stream", "a stream that is being captured", "arrays in host memory", "put them on the device"
            )
        return self.device.upload(array, self.stream)

    def result(self, array: Array, *, holds: bool = False) -> Array:
        """Return an array of the same shape to be written on the device; `fetch` brings it back.

        holds : whether the kernels read it, or leave parts of it as they are.
        """
        if isinstance(array, DeviceArray):
            return array
        copy = np.array(array, order="C") if holds else np.empty(array.shape, array.dtype)
        address, _ = self.place(copy)
        self._results.append((array, copy, address))
        return copy

    def fetch(self) -> None:
        """Wait for the results that belong into host memory and put them there."""
        for array, copy, address in self._results:
            self.device.download(address, copy, self.stream)
            array[...] = copy


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
            positive_scale=args.scale > 0,
            num_splits=args.num_splits,
            tile=args.tile,
            family=args.family,
            batch_invariant=args.batch_invariant,
            expressions=expressions,
        )

    def attention(self, args: AttentionArgs, *, again: Arrays | None = None) -> Repeat | None:
        """Fill ``args.out`` and ``args.lse``."""
        device, stream = self._device_of(args.q, args)
        problem = self._problem(args, device)
        plan = _plan.plan(problem)
        if not args.out.size:
            return None
        places = _Places(device, stream)
        unchecked = sum(
            bit for name, bit in _UNCHECKED.items() if _any_on_device(getattr(args, name))
        )
        here = args._replace(
            out=places.result(args.out), lse=None if args.lse is None else places.result(args.lse)
        )
        call = _launch.pack(here, places, unchecked)
        call["max_splits"] = plan.max_splits
        call["num_splits"], call["split_keys"] = plan.num_splits, plan.split_keys
        needed = _plan.workspace_bytes(problem, plan)
        memory = None  # kept until the launches are on the stream
        if needed:
            if args.workspace is None:
                memory = device.allocate(needed, stream)
                call["partial"] = memory.address
            else:
                if args.workspace.nbytes < needed:
                    raise invalid("workspace", f"{args.workspace.nbytes} bytes", f"at least {needed}")
                call["partial"] = places.place(args.workspace)[0]
        for step in plan.steps:
            self._launch(device, stream, step, call)
        places.fetch()
        return None

    def _launch(self, device: _device.Device, stream: int, step: _plan.Step, call: Array) -> None:
        for name, value in step.fields:
            call[name] = value
        kernel = _compile.kernel(device, step.source)
        device.launch(kernel, (step.num_blocks, 1, 1), step.threads, step.shared_bytes, stream, call)

    def merge_states(self, args: MergeArgs) -> None:
        """Fill ``args.out`` and ``args.lse``."""
        raise NotImplementedError

    def append_kv(self, args: AppendArgs) -> None:
        """Write the tokens into the caches."""
        raise NotImplementedError

    def attention_stats(self, args: StatsArgs) -> None:
        """Fill the results in `args` that are not None."""
        raise NotImplementedError

    def explain(self, args: AttentionArgs) -> Explanation:
        """Say what `attention` would do, without doing it."""
        device, _ = self._device_of(args.q, args)
        problem = self._problem(args, device)
        plan = _plan.plan(problem)
        rows = "family: asked for" if args.family is not None else (
            f"family: decode up to {_plan.DECODE_MAX_ROWS} query rows per key/value head "
            f"({problem.group} per query)"
        )
        return Explanation(
            backend=self.name,
            kernel=plan.kernel,
            family=plan.family if args.out.size else "none",
            isa=device.architecture,
            tile=plan.tile,
            rows_per_item=plan.rows_per_item,
            num_splits=plan.max_splits,
            num_items=plan.steps[0].num_blocks,
            num_threads=plan.steps[0].threads,
            tiles_total=0,
            tiles_skipped=0,
            workspace_bytes=_plan.workspace_bytes(problem, plan),
            reasons=(f"isa: {device.name}", rows, *plan.reasons),
        )


def _any_on_device(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_any_on_device, value))
    return isinstance(value, DeviceArray)


def _is_aligned(array: Array) -> bool:
    """Return whether rows begin at multiples of 16 bytes and have unit stride; copies of host arrays do."""
    if not isinstance(array, DeviceArray):
        return array.shape[3] * array.itemsize % _ALIGNMENT == 0
    *others, dim = array.strides
    return (
        (dim == array.itemsize or array.shape[3] == 1)
        and array.address % _ALIGNMENT == 0
        and all(s % _ALIGNMENT == 0 or n <= 1 for s, n in zip(others, array.shape[:3], strict=True))
    )


