"""ggml: a graph of one ggml_flash_attn_ext on the CPU backend, with a thread pool that is kept.

Queries are float32, as there is no other; keys and values float32, float16, q8_0 or q4_0. The package holds
ggml's own shared libraries, which are called through ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from importlib.metadata import version
from pathlib import Path
from typing import Any

import libggml
import numpy as np

from .._workloads import Array, Workload, numbers
from . import Call, Unsupported

F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8
STORED = {"float32": F32, "float16": F16, "int8": Q8_0, "int4": Q4_0}
GRAPH_BYTES = 1 << 20
#: Below so many operations one thread is faster than two.
FLOPS_OF_A_THREAD = 1e6


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class _PoolParams(ctypes.Structure):
    _fields_ = [
        ("cpumask", c_bool * 512), ("n_threads", c_int), ("prio", c_int), ("poll", ctypes.c_uint32),
        ("strict_cpu", c_bool), ("paused", c_bool),
    ]  # fmt: skip


def _library() -> ctypes.CDLL:
    folder = next(Path(libggml.__file__).parent.glob("lib*/libggml-base.so")).parent
    base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
    signatures: dict[ctypes.CDLL, dict[str, tuple[Any, ...]]] = {
        base: {
            "ggml_init": (c_void_p, _InitParams),
            "ggml_new_tensor_4d": (c_void_p, c_void_p, c_int, c_int64, c_int64, c_int64, c_int64),
            "ggml_flash_attn_ext": (c_void_p, *[c_void_p] * 5, c_float, c_float, c_float),
            "ggml_new_graph": (c_void_p, c_void_p),
            "ggml_build_forward_expand": (None, c_void_p, c_void_p),
            "ggml_backend_alloc_ctx_tensors": (c_void_p, c_void_p, c_void_p),
            "ggml_backend_graph_compute": (c_int, c_void_p, c_void_p),
            "ggml_backend_tensor_set": (None, c_void_p, c_void_p, c_size_t, c_size_t),
            "ggml_backend_tensor_get": (None, c_void_p, c_void_p, c_size_t, c_size_t),
            "ggml_nbytes": (c_size_t, c_void_p),
            "ggml_quantize_chunk": (c_size_t, c_int, c_void_p, c_void_p, *[c_int64] * 3, c_void_p),
            "ggml_threadpool_params_default": (_PoolParams, c_int),
        },
        cpu: {
            "ggml_backend_cpu_init": (c_void_p,),
            "ggml_backend_cpu_set_n_threads": (None, c_void_p, c_int),
            "ggml_threadpool_new": (c_void_p, ctypes.POINTER(_PoolParams)),
            "ggml_backend_cpu_set_threadpool": (None, c_void_p, c_void_p),
        },
    }
    for library, functions in signatures.items():
        for name, (result, *arguments) in functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
            setattr(base, name, function)
    return base


LIB = _library()
#: Before any thread is bound.
CPUS = sorted(os.sched_getaffinity(0))
VERSION = version("libggml-python")


@functools.cache
def _pool(threads: int) -> int:
    """Return a pool whose threads are bound, each to a CPU of its own."""
    parameters = LIB.ggml_threadpool_params_default(threads)
    for cpu in CPUS[:threads]:
        parameters.cpumask[cpu] = True
    parameters.strict_cpu = True
    pool: int = LIB.ggml_threadpool_new(ctypes.byref(parameters))
    return pool


def _fill(tensor: int, x: Array, stored: int) -> None:
    if stored in (Q4_0, Q8_0):
        codes = np.empty(LIB.ggml_nbytes(tensor), np.uint8)
        x = np.ascontiguousarray(x, np.float32)
        width = x.shape[-1]
        LIB.ggml_quantize_chunk(stored, x.ctypes.data, codes.ctypes.data, 0, x.size // width, width, None)
        x = codes
    LIB.ggml_backend_tensor_set(tensor, x.ctypes.data, 0, x.nbytes)


def prepare(w: Workload, arrays: dict[str, Array], threads: int, option: str) -> Call:
    """Return the computation of a graph whose tensors lie in ggml's own memory."""
    if w.stored not in STORED:
        raise Unsupported(f"no {w.stored} in attention on a CPU")
    stored = STORED[w.stored]
    inputs = {name: numbers(arrays[name], w.stored, arrays.get(f"{name}_scale")) for name in ("k", "v")}
    if stored == F16:
        inputs = {name: x.astype(np.float16) for name, x in inputs.items()}
    inputs["q"] = np.ascontiguousarray(arrays["q"], np.float32)
    context = LIB.ggml_init(_InitParams(GRAPH_BYTES, None, True))

    def tensor(kind: int, x: Array) -> int:
        made: int = LIB.ggml_new_tensor_4d(context, kind, *x.shape[::-1])
        return made

    tensors = {name: tensor(F32 if name == "q" else stored, inputs[name]) for name in ("q", "k", "v")}
    mask = None
    if w.causal:
        hidden = np.triu(
            np.full((w.seqlen_q, w.seqlen_kv), -np.inf, np.float16), w.seqlen_kv - w.seqlen_q + 1
        )
        inputs["mask"] = hidden[np.newaxis, np.newaxis]
        mask = tensors["mask"] = tensor(F16, inputs["mask"])
    node = LIB.ggml_flash_attn_ext(
        context, tensors["q"], tensors["k"], tensors["v"], mask, w.head_dim**-0.5, 0.0, 0.0
    )
    graph = LIB.ggml_new_graph(context)
    LIB.ggml_build_forward_expand(graph, node)
    threads = threads if w.flops > FLOPS_OF_A_THREAD else 1
    backend = LIB.ggml_backend_cpu_init()
    LIB.ggml_backend_cpu_set_threadpool(backend, _pool(threads))
    LIB.ggml_backend_cpu_set_n_threads(backend, threads)
    LIB.ggml_backend_alloc_ctx_tensors(context, backend)
    for name, x in inputs.items():
        _fill(tensors[name], x, F32 if name == "q" else F16 if name == "mask" else stored)

    def result() -> Array:
        out = np.empty((w.batch, w.seqlen_q, w.num_heads, w.head_dim), np.float32)
        LIB.ggml_backend_tensor_get(node, out.ctypes.data, 0, out.nbytes)
        return np.moveaxis(out, 1, 2)

    return Call(
        lambda: LIB.ggml_backend_graph_compute(backend, graph), result, requantised=stored in (Q4_0, Q8_0)
    )
