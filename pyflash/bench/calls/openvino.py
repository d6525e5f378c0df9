"""OpenVINO: ScaledDotProductAttention of opset 13, float32, tuned for latency, one stream."""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13

from .._workloads import Array, Workload
from . import Call, Unsupported

VERSION = ov.__version__.split("-")[0]


def prepare(w: Workload, arrays: dict[str, Array], threads: int, option: str) -> Call:
    """Return an inference whose inputs and output are memory that it shares with NumPy."""
    if w.stored != "float32" or w.dtype != "float32":
        raise Unsupported("called in float32 only")
    q = arrays["q"].reshape(w.batch, w.num_kv_heads, -1, w.head_dim)
    inputs = [q, arrays["k"], arrays["v"]]
    parameters = [opset13.parameter(x.shape, ov.Type.f32) for x in inputs]
    model = ov.Model([opset13.scaled_dot_product_attention(*parameters, causal=w.causal)], parameters)
    options = {
        "INFERENCE_PRECISION_HINT": "f32",
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(threads),
        "ENABLE_CPU_PINNING": "YES",
    }
    request = ov.Core().compile_model(model, "CPU", options).create_infer_request()
    out = np.full(q.shape, 0, np.float32)  # its memory is there before the call
    for index, x in enumerate(inputs):
        request.set_input_tensor(index, ov.Tensor(x, shared_memory=True))
    request.set_output_tensor(0, ov.Tensor(out, shared_memory=True))

    def run(_kept: list[Array] = inputs) -> None:  # its tensors do not own this memory
        request.infer()

    return Call(run, lambda: out)
