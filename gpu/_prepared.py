"""Launches whose arguments are complete but for the places of arrays, and calls made of them.

A call that comes again differs from the one before in nothing but where its arrays lie. It needs no
checks, no plan and no packing: places are put into a copy of the arguments, and the driver is told.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .._arrays import DeviceArray
from .._description import INDEX_NAMES, Array, AttentionArgs, Repeat
from . import _compile, _device, _launch, _places, _plan

#: Fields of pf_call that are places, in the order of `Repeat`; then that of the states of splits.
_FIELDS = ("q", "k", "v", "out", "lse", *INDEX_NAMES)
_WORD = 8
#: Words of a tensor map, and of what its place is a multiple of.
_MAP_WORDS, _MAP_ALIGNMENT = 16, 8
#: Tensors with maps, in the order of pf_mapped_call, by whose boxes theirs are like.
_MAPPED = {"k": "k", "v": "k", "out": "out"}
#: Fields of pf_call that are the extents of their axes, innermost first.
_EXTENTS = {
    "k": ("head_dim", "seqlen_kv", "num_kv_heads", "num_pages"),
    "v": ("head_dim_v", "seqlen_kv", "num_kv_heads", "num_pages"),
    "out": ("head_dim_v", "seqlen_q", "num_heads", "batch"),
}
_NO_INDEX = (0,) * len(INDEX_NAMES)


class Map(NamedTuple):
    """A tensor map among the words of a launch."""

    at: int
    of: int  # the word with the tensor's place
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    rows: int  # of a box


class Prepared(NamedTuple):
    """One launch."""

    kernel: _device.Kernel
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    words: Array  # its argument
    uses_workspace: bool
    maps: tuple[Map, ...] = ()

    def put(self, device: _device.Device, stream: int, workspace: int) -> None:
        """Put the launch onto a stream."""
        words = self.words
        if self.uses_workspace or self.maps:
            words = words.copy()
        self._launch(device, stream, workspace, words)

    def put_again(
        self, device: _device.Device, stream: int, workspace: int, positions: Array, places: tuple[int, ...]
    ) -> None:
        """Put it there with other places, at these positions among the words."""
        words = self.words.copy()
        words[positions] = places
        self._launch(device, stream, workspace, words)

    def _launch(self, device: _device.Device, stream: int, workspace: int, words: Array) -> None:
        if self.uses_workspace:
            words[_workspace_position()] = workspace
        for one in self.maps:
            found = device.tensor_map(int(words[one.of]), one.extents, one.strides, one.rows)
            words[one.at : one.at + _MAP_WORDS] = found
        device.launch(self.kernel, self.grid, self.threads, self.shared_bytes, stream, words)


def _position(field: str) -> int:
    offset = _launch.struct("pf_call").fields[field][1]  # type: ignore[index]
    return int(offset) // _WORD


_cached: dict[str, Any] = {}


def _workspace_position() -> int:
    found = _cached.get("workspace")
    if found is None:
        found = _cached["workspace"] = _position("partial")
    return int(found)


def prepare(device: _device.Device, step: _plan.Step, call: Array) -> Prepared:
    """Return the launch of a step of a plan; `call` has everything that belongs to no step."""
    own = call.copy()
    for name, value in (*step.fields, *step.splits._asdict().items()):
        own[name] = value
    words = own.reshape(1).view(np.uint64)
    maps: tuple[Map, ...] = ()
    if step.box_rows is not None:
        at = _plan.ceil_div(len(words), _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        words = np.concatenate([words, np.zeros(at - len(words) + len(_MAPPED) * _MAP_WORDS, np.uint64)])
        rows = dict(zip(("k", "out"), step.box_rows, strict=True))
        maps = tuple(
            _map(own, field, at + i * _MAP_WORDS, rows[of])
            for i, (field, of) in enumerate(_MAPPED.items())
            if rows[of]
        )
    kernel = _compile.kernel(device, step.source)
    grid = step.num_blocks, 1, 1
    merged = step.splits.are_merged
    return Prepared(kernel, grid, step.threads, step.shared_bytes, words, merged, maps)


def _map(call: Array, field: str, at: int, rows: int) -> Map:
    """Return what the map of k, v or the result says, whose elements have 16 bits."""
    width, *lengths = _EXTENTS[field]
    axes = dict(zip(lengths, ("stride_token", "stride_head", "stride_batch"), strict=True))
    extents = [int(call[axis]) for axis in axes]
    # The stride of an axis of one element is never used, and need not be what a map may have.
    strides = [2 * int(call[field][s]) if n > 1 else 16 for n, s in zip(extents, axes.values(), strict=True)]
    return Map(at, _position(field), (int(call[width]), *extents), tuple(strides), rows)


def _extent(array: Array) -> tuple[int, int]:
    """Return the first and the last byte of an array, relative to its place."""
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    if not array.size:
        return 0, 0
    return sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + array.itemsize


def _option(args: AttentionArgs, field: str) -> Array | None:
    """Return the option that is an array whose place is this field of pf_call."""
    if field == "partial":
        return args.workspace
    if field in ("span_lo", "span_hi"):
        return None if args.spans is None else args.spans[field == "span_hi"]
    found: Array | None = getattr(args, field)
    return found


def repeat(
    device: _device.Device,
    stream: int,
    prepared: list[Prepared],
    places: _places.Places,
    args: AttentionArgs,
    workspace_bytes: int,
    others: tuple[tuple[str, int], ...],
) -> Repeat | None:
    """Return what makes a call again with arrays in other places, None if there are none that it may take.

    What it returns takes the places of q, k, v, out, lse and the index arrays, 0 for those that are
    missing, a stream, and the places of the options in `others`; it returns False, and has done nothing,
    where what is written would overlap something else.
    """
    if device.is_capturing(stream):
        return None
    index = [getattr(args, name) for name in INDEX_NAMES]
    if any(x is not None and not isinstance(x, DeviceArray) for x in index):
        return None  # it is checked and copied by every call
    fields = [field for field, _ in others]
    for field, place in others:
        array = _option(args, field)
        if not isinstance(array, DeviceArray) or array.address != place:
            return None  # the checks made another array of it
    # Copies of small arrays of the host stay; on another stream they might not be there yet.
    of_this_stream = stream if places.has_copies else None
    at = fields.index("partial") if "partial" in fields else None
    room = 0 if args.workspace is None else args.workspace.nbytes
    moved = [field for field in fields if field != "partial"]
    positions = np.array([_position(name) for name in (*_FIELDS, *moved)])
    read = (args.q, args.k, args.v, *index, *(_option(args, field) for field in moved))
    extents = [None if x is None else _extent(x) for x in read]
    out_low, out_high = _extent(args.out)

    def launch(where: tuple[int, ...], stream: int, others: tuple[int, ...], _kept: object = places) -> bool:
        if of_this_stream is not None and (stream != of_this_stream or device.is_capturing(stream)):
            return False  # a graph may live longer than the copies
        workspace = 0
        if at is not None:
            workspace, others = others[at], (*others[:at], *others[at + 1 :])
        where = (*where, *_NO_INDEX)[: len(_FIELDS)] + others
        low, high = where[3] + out_low, where[3] + out_high
        if workspace < high and low < workspace + room:
            return False
        for place, extent in zip((*where[:3], *where[5:]), extents, strict=True):
            if extent is not None:
                first, last = place + extent[0], place + extent[1]
                if (first < high and low < last) or (first < workspace + room and workspace < last):
                    return False
        memory = None
        if workspace_bytes and at is None:
            memory = device.allocate(workspace_bytes, stream)
            workspace = memory.address
        for one in prepared:
            one.put_again(device, stream, workspace, positions, where)
        return True

    return launch
