"""ONNX Runtime: models of one node with bound inputs and outputs, the fastest of its three operators.

They are Attention of opset 23, and MultiHeadAttention and GroupQueryAttention of com.microsoft, the last one
with past and present keys in one shared buffer.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from .._workloads import Array, Workload
from . import Call, Unsupported

VERSION = ort.__version__
#: Before any thread is bound.
CPUS = sorted(os.sched_getaffinity(0))
#: CPUs of the pool's threads, the next one first; empty before the pool's size is set.
ORDER: list[int] = []
TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float64": TensorProto.DOUBLE,
    "int32": TensorProto.INT32,
}
#: Calls of each operator, after a first one, by which the fastest is chosen.
TRIALS = 5

Arrays = dict[str, Array]


@contextlib.contextmanager
def bound_threads(threads: int) -> Iterator[None]:
    """Bind the threads that are made meanwhile, each to a CPU of its own, and the calling one to the first.

    There is an option for this, but not for the pool that sessions share.
    """
    if not ORDER:
        ort.set_global_thread_pool_sizes(threads, 1)
        ORDER.extend(CPUS[1:threads] or CPUS)
    before = set(os.listdir("/proc/self/task"))
    yield
    for thread in sorted(set(os.listdir("/proc/self/task")) - before, key=int):
        os.sched_setaffinity(int(thread), {ORDER[0]})
        ORDER.append(ORDER.pop(0))
    os.sched_setaffinity(0, {CPUS[0]})


class Operator:
    """A session with everything bound; `order` brings the output to (batch, heads, seqlen, head_dim).

    Outputs lie in memory that has been touched before the call.
    """

    def __init__(
        self,
        node: dict[str, Any],
        inputs: Arrays,
        outputs: Arrays,
        threads: int,
        order: Callable[[Array], Array] = lambda x: x,
    ) -> None:
        self.name = node["op_type"]
        domain = node.get("domain", "")
        made = helper.make_node(
            inputs=[name if name in inputs else "" for name in node.pop("inputs")],
            outputs=list(outputs),
            **node,
        )
        infos = [
            [helper.make_tensor_value_info(n, TYPES[str(x.dtype)], x.shape) for n, x in arrays.items()]
            for arrays in (inputs, outputs)
        ]
        opsets = [helper.make_opsetid("", 23)] + ([helper.make_opsetid(domain, 1)] if domain else [])
        model = helper.make_model(
            helper.make_graph([made], "attention", *infos), opset_imports=opsets, ir_version=11
        )
        options = ort.SessionOptions()
        # One pool for all sessions: the threads of a session spin for a while after its calls, and would
        # take the time of the next session's.
        options.use_per_session_threads = False
        options.log_severity_level = 4
        with bound_threads(threads):
            self._session = ort.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
        self._binding = self._session.io_binding()
        self._kept = (inputs, outputs)
        for arrays, bind in ((inputs, self._binding.bind_input), (outputs, self._binding.bind_output)):
            for name, x in arrays.items():
                bind(name, "cpu", 0, TYPES[str(x.dtype)], x.shape, x.ctypes.data)
        self.result = lambda: order(outputs["out"]).astype(np.float64)

    def run(self) -> None:
        """Compute once."""
        self._session.run_with_iobinding(self._binding)

    def seconds(self) -> float:
        """Return the time of one call, the best of a few."""
        times = []
        for _ in range(TRIALS + 1):
            begin = time.perf_counter()
            self.run()
            times.append(time.perf_counter() - begin)
        return min(times[1:])


def _attention(w: Workload, arrays: Arrays, threads: int) -> Operator:
    node = dict(op_type="Attention", inputs=["q", "k", "v"], is_causal=int(w.causal))
    return Operator(node, arrays, {"out": np.full_like(arrays["q"], 0)}, threads)


def _rows(x: Array) -> Array:
    """(batch, heads, seqlen, head_dim) as (batch, seqlen, heads * head_dim)."""
    return np.ascontiguousarray(np.moveaxis(x, 1, 2)).reshape(x.shape[0], x.shape[2], -1)


def _heads(w: Workload) -> Callable[[Array], Array]:
    return lambda out: np.moveaxis(out.reshape(w.batch, w.seqlen_q, w.num_heads, w.head_dim), 1, 2)


def _multi_head(w: Workload, arrays: Arrays, threads: int) -> Operator:
    if w.num_heads != w.num_kv_heads:
        raise Unsupported("MultiHeadAttention has no grouped heads")
    inputs = {name: _rows(x) for name, x in arrays.items()}
    node = dict(
        op_type="MultiHeadAttention",
        domain="com.microsoft",
        inputs=["q", "k", "v"],
        num_heads=w.num_heads,
        unidirectional=int(w.causal),
    )
    return Operator(node, inputs, {"out": np.full_like(inputs["q"], 0)}, threads, _heads(w))


def _group_query(w: Workload, arrays: Arrays, threads: int) -> Operator:
    """The last tokens are given as new, those before them lie in the shared buffer."""
    if not (w.causal or w.seqlen_q == 1):
        raise Unsupported("GroupQueryAttention is always causal")
    inputs = {"q": _rows(arrays["q"])}
    inputs |= {name: _rows(arrays[name][:, :, -w.seqlen_q :]) for name in ("k", "v")}
    inputs |= {f"past_{name}": arrays[name] for name in ("k", "v")}
    inputs["seqlens_k"] = np.full(w.batch, w.seqlen_kv - 1, np.int32)
    inputs["total"] = np.array([w.seqlen_kv], np.int32)
    outputs = {"out": np.full_like(inputs["q"], 0)}
    outputs |= {f"present_{name}": arrays[name] for name in ("k", "v")}
    node = dict(
        op_type="GroupQueryAttention",
        domain="com.microsoft",
        inputs=list(inputs),
        num_heads=w.num_heads,
        kv_num_heads=w.num_kv_heads,
    )
    return Operator(node, inputs, outputs, threads, _heads(w))


def _operators(w: Workload, arrays: Arrays, threads: int, reasons: list[str]) -> Iterator[Operator]:
    for make in (_attention, _multi_head, _group_query):
        try:
            operator = make(w, arrays, threads)
            operator.run()
        except Unsupported as error:
            reasons.append(str(error))
        except Exception as error:  # ONNX Runtime's own classes: an operator without this type or shape
            reasons.append(f"{make.__name__.strip('_')}: {str(error).splitlines()[0]:.100}")
        else:
            yield operator


def prepare(w: Workload, arrays: Arrays, threads: int, option: str) -> Call:
    """Return the fastest operator, judged by a few calls."""
    if w.kv_dtype:
        raise Unsupported("called with keys and values of the type of the queries only")
    if w.dtype == "bfloat16":
        arrays = {name: x.view(ml_dtypes.bfloat16) for name, x in arrays.items()}
    reasons: list[str] = []
    operators = list(_operators(w, arrays, threads, reasons))
    if not operators:
        raise Unsupported("; ".join(reasons))
    fastest = min(operators, key=Operator.seconds) if len(operators) > 1 and not w.memory else operators[0]
    return Call(fastest.run, fastest.result, {"operator": fastest.name})
