"""The arguments of a call on one rank: checked by pyflash's own checks, and in one canonical form."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .. import _api, _dtypes
from .._arrays import on_host
from .._checks import choice, dtype_named
from .._description import Array
from .._errors import invalid, unsupported
from ._agreement import fact_of
from ._communicator import Communicator
from ._schedules import SCHEDULES, Layout, layout
from ._visible import Mask

#: Options that have to be the same on all ranks. What a rank does by itself (threads, an instruction set, a
#: backend) need not be.
_AGREED = (
    *("causal", "window", "scale", "softcap", "alibi_slopes", "sinks", "q_offset", "lse_includes_sinks"),
    *("k_scale", "v_scale", "kv_dtype", "schedule", "return_lse"),
)

#: As far as any key is from any query: what `q_offset` may be, and as much again. A window that reaches
#: further is cut to it, so that sums of positions stay numbers of int64.
_FARTHEST = 1 << 50

#: Options that kernels get as they are, call by call.
_FOR_KERNELS = ("scale", "softcap", "k_scale", "v_scale", "kv_dtype", "backend", "num_threads", "isa")


class Arguments(NamedTuple):
    """What a rank was given, as arrays of the communicator's kind.

    A dense batch is one sequence with a leading axis: all of its sequences lie alike. Packed arrays have the
    axes ``(tokens, heads, width)``, and so has a single sequence.
    """

    q: Any  # (batch, rows, num_heads, head_dim) or (rows, num_heads, head_dim)
    k: Any
    v: Any
    lengths_q: tuple[int, ...]  # this rank's tokens of each sequence
    lengths_kv: tuple[int, ...]
    mask: Mask
    q_offset: Array | None  # (num_sequences,), or (batch, 1) of a dense batch
    alibi_slopes: Any
    sinks: Any
    lse_includes_sinks: bool
    schedule: str
    out_dtype: Any
    kernel: dict[str, Any]  # what every call of a kernel gets
    facts: dict[str, Any]  # what has to be the same on all ranks, by the names of arguments
    squeezed: bool  # arrays were given without heads
    bhsd: bool
    backend: str | None

    @property
    def width(self) -> int:
        """Width of the result."""
        return width_of(self.v, self.kernel.get("kv_dtype"))

    @property
    def compute(self) -> str:
        """The type of states."""
        return "float64" if dtype_name(self.q) == "float64" else "float32"

    def layouts(self, everyone: list[Any]) -> tuple[Layout, Layout]:
        """Return where queries and keys lie, of what all ranks said about their lengths."""
        queries, keys = (
            layout(self.schedule, np.array([one["lengths"][i] for one in everyone], np.int64), name)
            for i, name in enumerate(("q", "k"))
        )
        return queries, keys

    def finished(self, comm: Communicator, out: Any, lse: Any, like: Any, return_lse: bool) -> Any:
        """Return results in the form that the caller's arrays have."""
        if self.squeezed:
            out, lse = out[..., 0, :], lse[..., 0, :]
        if self.bhsd:
            out = out.swapaxes(-2, -3)
        given = comm.give_back(out, like)
        return (given, comm.give_back(lse, like)) if return_lse else given


def dtype_name(x: Any) -> str:
    """Return the name of an array's type, the same for all libraries."""
    return str(x.dtype).rpartition(".")[2]


def width_of(v: Any, kv_dtype: str | None) -> int:
    """Return the width of values, of which an item of an array may hold two."""
    stored = None if kv_dtype is None else _dtypes.BY_NAME[_dtypes.OF_BYTES[kv_dtype]]
    return int(v.shape[-1]) * (1 if stored is None else stored.per_item)


def named_dtype(out_dtype: Any) -> str | None:
    """Return the name of a type that may be given in several ways; ranks compare names."""
    return None if out_dtype is None else dtype_named("out_dtype", out_dtype).name


def arguments(comm: Communicator, q: Any, k: Any, v: Any, options: dict[str, Any]) -> Arguments:
    """Check what a rank was given; its keys stand for all keys."""
    choice("schedule", options["schedule"], SCHEDULES)
    q, k, v = (comm.see(name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    for name in ("alibi_slopes", "sinks", "cu_seqlens_q", "cu_seqlens_kv", "k_scale", "v_scale"):
        options[name] = comm.see(name, options[name])
    options["out_dtype"] = named_dtype(options["out_dtype"])
    _check(q, k, v, options)
    cu_seqlens = [options["cu_seqlens_q"], options["cu_seqlens_kv"]]
    cu_seqlens = [None if x is None else on_host(x) for x in cu_seqlens]
    bhsd = options["layout"] == "bhsd" and len(q.shape) > 2 and cu_seqlens[0] is None
    squeezed = len(q.shape) == 2
    if bhsd:
        q, k, v = (x.swapaxes(-2, -3) for x in (q, k, v))
    if squeezed:
        q, k, v = (x[:, None, :] for x in (q, k, v))
    lengths = [
        (int(x.shape[-3]),) if cu is None else tuple(np.diff(cu).tolist())
        for x, cu in zip((q, k), cu_seqlens, strict=True)
    ]
    top_left = options["causal"] == "top_left"
    return Arguments(
        q=q,
        k=k,
        v=v,
        lengths_q=lengths[0],
        lengths_kv=lengths[1],
        mask=Mask(bool(options["causal"]), _window(options["window"]), _spans(options["spans"], q)),
        q_offset=_offset(0 if top_left else options["q_offset"], len(lengths[0]), cu_seqlens[0] is not None),
        alibi_slopes=options["alibi_slopes"],
        sinks=options["sinks"],
        lse_includes_sinks=bool(options["lse_includes_sinks"]),
        schedule=options["schedule"],
        out_dtype=options["out_dtype"] or dtype_name(q),
        kernel={name: options[name] for name in _FOR_KERNELS if options[name] is not None},
        facts=_facts(q, k, v, lengths, options),
        squeezed=squeezed,
        bhsd=bhsd,
        backend=options["backend"],
    )


def _check(q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    """Let pyflash check the arguments as those of a call on this rank's tokens alone."""
    packed = options["cu_seqlens_q"] is not None or options["cu_seqlens_kv"] is not None
    own = ("schedule", "cu_seqlens_q", "cu_seqlens_kv")
    checked = {name: x for name, x in options.items() if name not in own}
    for name in ("k_scale", "v_scale"):
        if len(getattr(options[name], "shape", ())) > 1:
            instead = "give a number or one per head"
            raise unsupported(name, "a scale per token", "pyflash.distributed", instead)
    if packed:
        choice("layout", checked.pop("layout"), ("bshd", "bhsd"))
        checked.update(cu_seqlens_q=options["cu_seqlens_q"], cu_seqlens_kv=options["cu_seqlens_kv"])
        if options["cu_seqlens_kv"] is None:
            raise invalid("cu_seqlens_kv", "None", "prefix sums beside cu_seqlens_q")
    _api.check(q, k, v, **checked)


def _facts(q: Any, k: Any, v: Any, lengths: list[tuple[int, ...]], options: dict[str, Any]) -> dict[str, Any]:
    def heads(x: Any) -> str:
        batch = f"batch {x.shape[0]}, " if len(x.shape) == 4 else ""
        return f"{batch}{x.shape[-2]} heads of width {x.shape[-1]}, dtype {dtype_name(x)}"

    facts: dict[str, Any] = {"number of axes": len(q.shape), "q": heads(q), "k": heads(k), "v": heads(v)}
    facts["cu_seqlens_q"] = f"{len(lengths[0])} sequences"
    facts["cu_seqlens_kv"] = f"{len(lengths[1])} sequences"
    facts["spans"] = "None" if options["spans"] is None else "spans"
    facts["out_dtype"] = options["out_dtype"]
    for name in _AGREED:
        value = options[name]
        facts[name] = fact_of(tuple(value) if name == "window" and value is not None else value)
    return facts


def _window(window: Any) -> tuple[int | None, int | None]:
    left, right = (None, None) if window is None else window
    return (
        None if left is None or left == -1 else min(int(left), _FARTHEST),
        None if right is None or right == -1 else min(int(right), _FARTHEST),
    )


def _spans(spans: Any, q: Any) -> tuple[Array, Array] | None:
    """Return the spans with an axis for rows, and one for the batch where its sequences differ."""
    if spans is None:
        return None
    rows = int(q.shape[-3])
    ends = []
    for end in spans:
        array = np.asarray(end if isinstance(end, int) else on_host(end), np.int64)
        ends.append(np.broadcast_to(array, (*array.shape[:-1], rows)))
    return ends[0], ends[1]


def _offset(given: Any, num_sequences: int, packed: bool) -> Array | None:
    if given is None:
        return None
    array = np.asarray(given if isinstance(given, int) else on_host(given), np.int64)
    if array.ndim and not packed:
        return array[:, np.newaxis]
    return np.broadcast_to(array, (num_sequences,))
