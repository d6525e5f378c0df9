"""Calls on an NVIDIA GPU: pyflash's CUDA kernels, and PyTorch's, in one process on the same tensors.

The option is "pyflash" or the backend that `scaled_dot_product_attention` is held to. PyTorch makes the
arrays, the events and the graphs. How a time is taken:

* more than 16 queries: CUDA events around a batch of calls of about a turn, after a call that does not
  count. Outputs are passed in, where the library takes them.
* fewer, so a decode: the same around replays of a CUDA graph that holds one call for each of several sets of
  keys and values, together several times the second-level cache: no set is found there, and the host does
  not count.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import warnings
from collections.abc import Callable
from importlib.metadata import packages_distributions, version
from typing import Any

import numpy as np
import torch

import pyflash

from .._workloads import Array, Workload
from . import Call, Unsupported
from .pyflash import Bound, bound, notes_of

VERSION = torch.__version__
DEVICE = "cuda"  # the current one
#: How PyTorch says that such a backend has no kernel for a call.
NO_KERNEL = ("No available kernel", "No viable backend")
#: Sets of keys and values of a decode hold so many times what the second-level cache does; but there are no
#: more than so many.
ROTATED, MOST_SETS = 6, 128
#: Calls with so few queries a sequence are decodes.
DECODE_QUERIES = 16

Context = Callable[[], contextlib.AbstractContextManager[Any]]


class Inputs:
    """The arrays of the workload at hand on the device: those of all sets, made once for all libraries."""

    def __init__(self, w: Workload, arrays: dict[str, Array]) -> None:
        self.w, self.arrays = w, arrays
        self._placed: dict[tuple[str, int], Any] = {}

    def __len__(self) -> int:
        if self.w.seqlen_q > DECODE_QUERIES:
            return 1
        cache_bytes: int = torch.cuda.get_device_properties(0).L2_cache_size
        return min(max(2, math.ceil(ROTATED * cache_bytes / self.w.kv_bytes)), MOST_SETS)

    def placed(self, name: str, number: int) -> Any:
        """Return q, k or v of a set; queries are those of all."""
        key = (name, 0 if name == "q" else number)
        if key not in self._placed:
            w = self.w
            self._placed[key] = place(self.arrays[name], w.dtype if name == "q" else w.stored)
        return self._placed[key]


_current: list[Inputs] = []


def inputs_of(w: Workload, arrays: dict[str, Array]) -> Inputs:
    """Return the inputs of a workload, those of the call before if it is the same one."""
    if not _current or _current[0].w != w:
        forget()
        _current.append(Inputs(w, arrays))
    return _current[0]


def forget() -> None:
    """Let go of the memory of what has been measured."""
    _current.clear()
    torch.cuda.empty_cache()


def place(x: Array, dtype: str) -> Any:
    """Return bits of the host as a tensor on the device."""
    if dtype == "bfloat16":
        return torch.from_numpy(np.array(x.view(np.int16))).to(DEVICE).view(torch.bfloat16)
    return torch.from_numpy(np.array(x)).to(DEVICE)


def on_host(x: Any) -> Array:
    """Return a tensor's numbers in float64."""
    found: Array = x.double().cpu().numpy()
    return found


def info() -> dict[str, Any]:
    """Return what a reader needs to know about the GPU and its software."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "sms": properties.multi_processor_count,
        "cupy": ", ".join(version(name) for name in packages_distributions().get("cupy", ())),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "pyflash": pyflash.__version__,
    }


def prepare(w: Workload, arrays: dict[str, Array], threads: int, option: str) -> Call:
    """Return the calls of one library on all sets, and how they are timed."""
    inputs = inputs_of(w, arrays)
    return _pyflash(inputs) if option == "pyflash" else _torch(inputs, option)


def _pyflash(inputs: Inputs) -> Call:
    w, calls, outs = inputs.w, [], []
    for number in range(len(inputs)):
        calls.append(_bound(inputs, number))
        q = calls[0].arguments[0]
        outs.append(torch.full_like(q, float("nan")))
    told = calls[0].explained
    workspace = torch.empty(max(told.workspace_bytes, 1), dtype=torch.uint8, device=DEVICE)
    passed: list[dict[str, Any]] = [{} if w.variant == "no-out" else {"out": out} for out in outs]

    def one(number: int) -> Any:
        return calls[number](workspace=workspace, **passed[number])

    notes = notes_of(told, "kernel", "num_splits", "workspace_bytes")
    call = _timed(inputs, one, notes, heads_axis=calls[0].heads_axis)
    return call._replace(allocates_output=w.variant == "no-out")


def _bound(inputs: Inputs, number: int) -> Bound:
    """Return the call on one set; dense arrays are those that the peers get too."""
    names = {id(inputs.arrays[name]): name for name in "qkv"}

    def placed(x: Array, dtype: str) -> Any:
        name = names.get(id(x))  # not of pages, scales and tables: they are pyflash's own
        return place(x, dtype) if name is None else inputs.placed(name, number)

    return bound(inputs.w, inputs.arrays, placed)


def _torch(inputs: Inputs, backend: str) -> Call:
    """Return PyTorch's call; of the two ways to share key/value heads the faster one."""
    w = inputs.w
    if w.kv_dtype:
        raise Unsupported("keys and values have the type of the queries")
    if backend == "EFFICIENT_ATTENTION" and w.dtype != "float32":
        raise Unsupported("timed for float32 only, which the others do not have")
    attention = torch.nn.functional.scaled_dot_product_attention
    attend = importlib.import_module("torch.nn.attention")
    backends = [getattr(attend.SDPBackend, backend)]

    def form(q: Any, **options: Any) -> Callable[[int], Any]:
        def one(number: int) -> Any:
            k, v = (inputs.placed(name, number) for name in "kv")
            return attention(q, k, v, is_causal=w.causal, **options)

        return one

    q = inputs.placed("q", 0)
    forms = {"": form(q)}
    if w.num_heads != w.num_kv_heads:
        forms = {"enable_gqa": form(q, enable_gqa=True)}
        if not w.causal:  # queries of a head would count as later ones than those of the head before
            forms["heads as queries"] = form(q.reshape(w.batch, w.num_kv_heads, -1, w.head_dim))
    found, refused = [], ""
    for name, one in forms.items():
        notes = {"kernel": backend, "form": name}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # which say why there is no kernel
                found.append(_timed(inputs, one, notes, lambda: attend.sdpa_kernel(backends)))
        except RuntimeError as error:
            if not str(error).startswith(NO_KERNEL):
                raise
            refused = str(error).splitlines()[0]
    if not found:
        raise Unsupported(refused)
    return found[0] if len(found) == 1 else min(found, key=_first_turn)


def _first_turn(call: Call) -> float:
    assert call.turn is not None
    return call.turn(0.0)[0]


def _timed(
    inputs: Inputs,
    one: Callable[[int], Any],
    notes: dict[str, Any],
    context: Context = contextlib.nullcontext,
    heads_axis: int = 1,
) -> Call:
    """Return a call of one set of keys as turns that are timed on the device."""
    w, sets = inputs.w, range(len(inputs))
    run: Callable[[], Any]
    with torch.no_grad(), context():
        answers = [one(number).clone() for number in sorted({0, len(sets) - 1})]
        run = (lambda: one(0)) if len(sets) == 1 else _captured(one, sets)
    torch.cuda.synchronize()

    def timed(count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.no_grad(), context():
            run()  # does not count
            begin.record()
            for _ in range(count):
                run()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / count

    alone = timed(1)

    def turn(seconds: float) -> list[float]:
        return [timed(max(1, round(seconds / max(alone, 1e-6)))) / len(sets)]

    def answer(out: Any) -> Callable[[], Array]:
        shape = (w.batch, w.num_heads, w.seqlen_q, w.head_dim)
        if heads_axis == 2:
            return lambda: np.moveaxis(on_host(out), 2, 1)
        return lambda: on_host(out.reshape(shape))

    first, *also = map(answer, answers)
    return Call(run, first, notes, turn=turn, also=tuple(also), allocates_output=True)


def _captured(one: Callable[[int], Any], sets: range) -> Callable[[], Any]:
    """Return what replays the calls of all sets as one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in sets:
            one(number)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        kept = [one(number) for number in sets]
    # A replay writes to what the calls were given, so that must not be freed before the graph is.
    return lambda: (graph.replay(), kept, one)


def limits() -> dict[str, float]:
    """Return bytes copied and bfloat16 operations per second, by PyTorch, best of a few rounds."""
    found = _measure_limits()
    torch.cuda.empty_cache()
    return found


def _measure_limits() -> dict[str, float]:
    source = torch.zeros(2**30, dtype=torch.uint8, device=DEVICE)
    target, a = torch.empty_like(source), torch.randn(8192, 8192, device=DEVICE).bfloat16()

    def rate(run: Callable[[], Any], done: float) -> float:
        def seconds() -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(10):
                run()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e4

        seconds()
        return done / min(seconds() for _ in range(3))

    found = {"copy": rate(lambda: target.copy_(source), 2.0 * source.numel())}
    found["matmul"] = rate(lambda: a @ a, 2.0 * 8192**3)
    return found
