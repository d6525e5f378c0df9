"""A GPU that lies in host memory, for tests: a library of arrays on it, and a backend that reads them.

What the checks hand over is what a GPU would get; the backend looks at the memory behind it and has the
reference compute. Whatever else reads an element on the host fails, as it would on a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pyflash import _args_terms
from pyflash._description import AppendArgs, AttentionArgs, MergeArgs, StatsArgs
from pyflash._device_array import DeviceArray, over_device
from pyflash._device_kind import DeviceKind
from pyflash._reference import BACKEND as REFERENCE


class FakeArray:
    """An array of the library; `memory` is for the library itself and for tests."""

    def __init__(self, memory: np.ndarray, device: int = 0) -> None:
        self.memory = memory
        self.device = device

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("somebody reads an array on a GPU")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.memory.shape

    @property
    def ndim(self) -> int:
        return self.memory.ndim

    def __getitem__(self, key: Any) -> FakeArray:
        part = self.memory[key]
        assert part.base is not None, "no part of the memory"
        return type(self)(part, self.device)


class FakeCuda(DeviceKind):
    """The library: works on what lies behind, and counts what it is asked for."""

    def __init__(self) -> None:
        self.streams = {0: 7, 1: 8}
        self.is_capturing = False
        self.uploads = self.downloads = 0

    def recognises(self, x: Any) -> bool:
        return isinstance(x, FakeArray)

    def is_on_device(self, x: Any) -> bool:
        return True

    def see(self, name: str, x: Any) -> DeviceArray:
        return self.wrap(x)

    def wrap(self, native: Any) -> DeviceArray:
        if isinstance(native, np.ndarray):
            native = FakeArray(native)
        x = native.memory
        return over_device(
            x.__array_interface__["data"][0],
            x.shape,
            x.strides,
            x.dtype,
            kind=self,
            owner=native,
            device=native.device,
            readonly=not x.flags.writeable,
        )

    def native(self, array: DeviceArray) -> np.ndarray:
        return read(array)

    def give_back(self, array: DeviceArray) -> FakeArray:
        return array.owner if array.is_whole else FakeArray(read(array), array.device)

    def new(self, shape: tuple[int, ...], dtype: np.dtype, device: int) -> FakeArray:
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        memory = np.full(num_bytes, 0x7F, np.uint8).view(dtype).reshape(shape)  # rubbish
        return FakeArray(memory, device)

    def upload(self, array: np.ndarray, device: int) -> np.ndarray:
        self.uploads += 1
        return np.array(array)

    def download(self, native: np.ndarray) -> np.ndarray:
        self.downloads += 1
        return np.array(native)

    def stream(self, device: int) -> int:
        return self.streams[device]

    def capturing(self, device: int) -> bool:
        return self.is_capturing

    def int64(self, native: np.ndarray) -> np.ndarray:
        return native.astype(np.int64)

    def current_device(self) -> int:
        return 0


def read(array: Any) -> Any:
    """The memory behind an array, which on a GPU only kernels reach."""
    return array.view(np.ndarray) if isinstance(array, DeviceArray) else array


def on_host(args: Any) -> Any:
    """A description with all arrays readable."""
    seen = args._replace(**{name: read(x) for name, x in args._asdict().items()})
    if isinstance(args, AttentionArgs):
        spans = None if args.spans is None else tuple(read(end) for end in args.spans)
        tree = seen.tree
        if tree is not None and tree.ndim == 2:
            tree = _args_terms._ancestors(tree)
        return seen._replace(spans=spans, tree=tree)
    if isinstance(args, StatsArgs):
        return seen._replace(attention=on_host(args.attention))
    return seen


def _with_slots(args: AppendArgs) -> AppendArgs:
    """The places of tokens, as a kernel looks them up."""
    if args.slots is None:
        assert args.seq_lens is not None
        batch, page_size = len(args.seq_lens), args.k_cache.shape[1]
        starts = args.cu_seqlens
        if starts is None:
            starts = np.arange(batch + 1) * (len(args.k) // max(batch, 1))
        sequence = np.repeat(np.arange(batch), np.diff(starts))
        positions = args.seq_lens[sequence] + np.arange(len(args.k)) - starts[sequence]
        table = np.arange(batch)[:, None] if args.block_table is None else args.block_table
        slots = table[sequence, positions // page_size].astype(np.int64) * page_size + positions % page_size
        args = args._replace(slots=slots, positions=positions)
    if args.cos is not None and args.sin is not None and args.positions is not None:
        args = args._replace(cos=args.cos[args.positions], sin=args.sin[args.positions])
    return args


class FakeBackend:
    """The backend "cuda" on that GPU; keeps the descriptions that it was given."""

    name = "cuda"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def unavailable(self) -> str | None:
        return None

    def attention(self, args: AttentionArgs, *, again: Any = None) -> None:
        self.calls.append(args)
        REFERENCE.attention(on_host(args))

    def merge_states(self, args: MergeArgs) -> None:
        self.calls.append(args)
        REFERENCE.merge_states(on_host(args))

    def append_kv(self, args: AppendArgs) -> None:
        self.calls.append(args)
        REFERENCE.append_kv(_with_slots(on_host(args)))

    def attention_stats(self, args: StatsArgs) -> None:
        self.calls.append(args)
        REFERENCE.attention_stats(on_host(args))

    def check(self, args: AttentionArgs) -> None:
        self.calls.append(args)

    def explain(self, args: AttentionArgs) -> Any:
        self.calls.append(args)
        return REFERENCE.explain(on_host(args))
