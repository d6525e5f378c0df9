"""Packs a checked call into the struct that the kernels take.

The layout of the struct is read from ``kernels/call.cuh``: there is no second list of its fields.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import numpy as np

from .. import _dtypes
from .._description import Array, AttentionArgs

_HEADER = Path(__file__).parent / "kernels" / "call.cuh"
_KINDS: dict[str, Any] = {"int64_t": np.int64, "double": np.float64, "void *": np.uint64}
_TREE_SEEN, _TREE_PARENTS = 1, 2


@functools.cache
def struct(name: str, header: Path = _HEADER) -> np.dtype[Any]:
    """Return a struct of a header, or of call.cuh, as a NumPy dtype.

    All of its fields have 8 bytes or are such structs.
    """
    text = re.sub(r"/\*.*?\*/", "", header.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.DOTALL)
    if found is None and header != _HEADER:
        return struct(name)
    if found is None:
        raise LookupError(f"{header.name} has no struct {name}")
    fields: list[Any] = []
    for statement in filter(None, (part.strip() for part in found[1].split(";"))):
        kind, names = re.fullmatch(r"(?:const )?(\w+(?: \*)?)\s*(.*)", statement, re.DOTALL).groups()  # type: ignore[union-attr]
        dtype = _KINDS.get(kind) or struct(kind, header)
        for field in names.split(","):
            bare, _, length = field.strip().partition("[")
            fields.append((bare, dtype, (int(length[:-1]),)) if length else (bare, dtype))
    return np.dtype(fields)


class Places:
    """Where the arrays of a call lie on the device, as ``place(array) -> (address, strides in bytes)``."""

    def place(self, array: Array) -> tuple[int, tuple[int, ...]]:
        """Return address and strides of an array that the kernels read or write."""
        raise NotImplementedError


def code_of(array: Array) -> int:
    """Return the code of an array's element type; bytes without one are 0."""
    dtype = _dtypes.lookup(array.dtype)
    return 0 if dtype is None else dtype.code


def tensor(
    places: Places, array: Array | None, axes: tuple[int | None, ...] = (0, 1, 2, 3), code: int | None = None
) -> tuple[int, ...]:
    """Return a pf_tensor; `axes` are the array's in the order batch, token, head, dim."""
    if array is None:
        return (0,) * 6
    address, strides = places.place(array)
    size = array.itemsize
    steps = [0 if axis is None else strides[axis] // size for axis in axes]
    return (address, *steps, code_of(array) if code is None else code)


def index(places: Places, array: Array | None) -> tuple[Any, ...]:
    """Return a pf_index."""
    if array is None:
        return 0, (0, 0), 0
    address, strides = places.place(array)
    steps = [stride // array.itemsize for stride in strides]
    return address, (*steps, 0, 0)[:2], array.itemsize


def scale_of(args: AttentionArgs) -> float:
    """Return the factor of products of queries and keys, with a scale that all queries have."""
    return args.scale * args.q_scale if isinstance(args.q_scale, float) else args.scale


def pack(args: AttentionArgs, places: Places, unchecked: int) -> Array:
    """Return a pf_call; what belongs to a plan is still 0."""
    call = np.zeros((), struct("pf_call"))
    kv_code = _dtypes.BY_NAME[args.kv_dtype].code
    stored_q = _dtypes.lookup_stored(args.q.dtype)
    assert stored_q is not None
    call["q"] = tensor(places, args.q, code=stored_q.code)
    call["k"] = tensor(places, args.k, code=kv_code)
    call["v"] = tensor(places, args.v, code=kv_code)
    call["out"] = tensor(places, args.out)
    call["lse"] = tensor(places, args.lse, (0, 2, 1, None))
    call["k_scale"] = tensor(places, args.k_scale, (0, 1, 2, None))
    call["v_scale"] = tensor(places, args.v_scale, (0, 1, 2, None))
    if args.q_scale is not None and not isinstance(args.q_scale, float):
        call["q_scale"] = tensor(places, args.q_scale, (0, 1, 2, None))
    call["bias"] = tensor(places, args.bias, (0, 2, 1, 3))
    call["mask"] = tensor(places, args.mask, (0, 2, 1, 3), code=0)
    call["alibi_slopes"] = tensor(places, args.alibi_slopes, (0, None, 1, None))
    call["sinks"] = tensor(places, args.sinks, (None, None, 0, None))
    for name in ("cu_seqlens_q", "cu_seqlens_kv", "seq_lens", "block_table", "q_offset"):
        call[name] = index(places, getattr(args, name))
    if args.spans is not None:
        call["span_lo"], call["span_hi"] = (index(places, end) for end in args.spans)
    if args.tree is not None and args.tree.size:
        address, strides = places.place(args.tree)
        call["tree"], call["tree_item_bytes"] = address, args.tree.itemsize
        call["tree_stride"] = (*(stride // args.tree.itemsize for stride in strides), 0)[:3]
        call["tree_kind"] = _TREE_SEEN if args.tree.ndim == 3 else _TREE_PARENTS
        call["num_draft"] = args.tree.shape[1]
    q, k = args.q, args.k
    call["batch"] = args.batch
    _, call["seqlen_q"], call["num_heads"], call["head_dim"] = q.shape
    call["num_pages"], call["seqlen_kv"], call["num_kv_heads"], _ = k.shape
    call["page_size"] = k.shape[1]
    call["head_dim_v"] = args.out.shape[3]
    call["max_pages"] = 0 if args.block_table is None else args.block_table.shape[1]
    call["max_seqlen_q"] = args.max_seqlen_q
    for name in ("bias", "mask"):
        if (term := getattr(args, name)) is not None:
            call[f"{name}_rows"], call[f"{name}_keys"] = term.shape[2:]
    call["window_left"], call["window_right"] = args.window
    call["sink_tokens"] = args.sink_tokens
    call["scale"], call["softcap"] = scale_of(args), args.softcap
    call["causal"], call["lse_includes_sinks"] = args.causal, args.lse_includes_sinks
    call["unchecked"] = unchecked
    return call
