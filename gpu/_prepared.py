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
_NO_INDEX = (0,) * len(INDEX_NAMES)


class Prepared(NamedTuple):
    """One launch."""

    kernel: _device.Kernel
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    words: Array  # its argument
    uses_workspace: bool

    def put(self, device: _device.Device, stream: int, workspace: int, places: Any = None) -> None:
        """Put the launch onto a stream, with other places where there are."""
        words = self.words
        if places is not None:
            words = words.copy()
            words[_positions()] = places
        if self.uses_workspace:
            if places is None:
                words = words.copy()
            words[_workspace_position()] = workspace
        device.launch(self.kernel, self.grid, self.threads, self.shared_bytes, stream, words)


def _position(field: str) -> int:
    offset = _launch.struct("pf_call").fields[field][1]  # type: ignore[index]
    return int(offset) // _WORD


_cached: dict[str, Any] = {}


def _positions() -> Any:
    """Return where the places stand among the words of a pf_call."""
    found = _cached.get("places")
    if found is None:
        found = _cached["places"] = np.array([_position(name) for name in _FIELDS])
    return found


def _workspace_position() -> int:
    found = _cached.get("workspace")
    if found is None:
        found = _cached["workspace"] = _position("partial")
    return int(found)


def prepare(device: _device.Device, step: _plan.Step, call: Array) -> Prepared:
    """Return the launch of a step of a plan; `call` has everything that belongs to no step."""
    own = call.copy()
    for name, value in step.fields:
        own[name] = value
    own["max_splits"], own["num_splits"], own["split_keys"] = step.splits
    words = own.reshape(1).view(np.uint64)
    kernel = _compile.kernel(device, step.source)
    grid = step.num_blocks, 1, 1
    return Prepared(kernel, grid, step.threads, step.shared_bytes, words, step.splits.are_merged)


def _extent(array: Array) -> tuple[int, int]:
    """Return the first and the last byte of an array, relative to its place."""
    steps = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    if not array.size:
        return 0, 0
    return sum(s for s in steps if s < 0), sum(s for s in steps if s > 0) + array.itemsize


def repeat(
    device: _device.Device,
    stream: int,
    prepared: list[Prepared],
    places: _places.Places,
    args: AttentionArgs,
    workspace_bytes: int,
) -> Repeat | None:
    """Return what makes a call again with arrays in other places, None if there are none that it may take.

    What it returns takes the places of q, k, v, out, lse and the index arrays, 0 for those that are
    missing, a stream, and the place of a workspace as large as that of `args`, 0 to allocate one; it
    returns False, and has done nothing, where what is written would overlap something else.
    """
    if device.is_capturing(stream):
        return None
    index = [getattr(args, name) for name in INDEX_NAMES]
    if any(x is not None and not isinstance(x, DeviceArray) for x in index):
        return None  # it is checked and copied by every call
    # Copies of small arrays of the host stay; on another stream they might not be there yet.
    of_this_stream = stream if places.has_copies else None
    read = [args.q, args.k, args.v, *index]
    extents = [None if x is None else _extent(x) for x in read]
    out_low, out_high = _extent(args.out)
    room = 0 if args.workspace is None else args.workspace.nbytes

    def launch(where: tuple[int, ...], stream: int, workspace: int, _kept: object = places) -> bool:
        if of_this_stream not in (None, stream):
            return False
        where = (*where, *_NO_INDEX)[: len(_FIELDS)]
        low, high = where[3] + out_low, where[3] + out_high
        if workspace and workspace < high and low < workspace + room:
            return False
        for place, extent in zip((*where[:3], *where[5:]), extents, strict=True):
            if extent is not None:
                first, last = place + extent[0], place + extent[1]
                if (first < high and low < last) or (first < workspace + room and workspace < last):
                    return False
        memory = device.allocate(workspace_bytes, stream) if workspace_bytes and not workspace else None
        if memory is not None:
            workspace = memory.address
        for one in prepared:
            one.put(device, stream, workspace, where)
        return True

    return launch
