"""ONNX Runtime: models of one node with bound inputs and outputs, the fastest of its three operators.

They are Attention of opset 23, and MultiHeadAttention and GroupQueryAttention of com.microsoft, the last one
with past and present keys in one shared buffer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper
from workloads import Workload

from calls import Call, Unsupported

VERSION = ort.__version__
#: Before any thread is bound.
CPUS = sorted(os.sched_getaffinity(0))
TYPES = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float64": TensorProto.DOUBLE,
    "int32": TensorProto.INT32,
}
#: Calls of each operator, after a first one, by which the fastest is chosen.
TRIALS = 5

Arrays = dict[str, np.ndarray]


class Operator:
    """A session with everything bound; `order` brings the output to (batch, heads, seqlen, head_dim).

    Outputs lie in memory that has been touched before the call.
    """

    def __init__(
        self, node: dict, inputs: Arrays, outputs: Arrays, threads: int, order: Callable = lambda x: x
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
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 4
        if threads > 1:
            # The list counts CPUs from 1 and leaves out the calling thread, which is one of them.
            others = ";".join(str(cpu + 1) for cpu in CPUS[1:threads])
            options.add_session_config_entry("session.intra_op_thread_affinities", others)
        self._session = ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        os.sched_setaffinity(0, {CPUS[0]})
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


def _rows(x: np.ndarray) -> np.ndarray:
    """(batch, heads, seqlen, head_dim) as (batch, seqlen, heads * head_dim)."""
    return np.ascontiguousarray(np.moveaxis(x, 1, 2)).reshape(x.shape[0], x.shape[2], -1)


def _heads(w: Workload) -> Callable[[np.ndarray], np.ndarray]:
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


def prepare(w: Workload, arrays: Arrays, threads: int) -> Call:
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
