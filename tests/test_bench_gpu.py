"""`pyflash bench` on a GPU: which calls are timed there, and their timing with tensors of the CPU instead."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
from bench_sessions import SMALL, FixedLimits, measured, new_session
from conftest import CUDA_IS_EMULATED

from pyflash.bench import _check, _libraries, _server, _session, _workloads
from pyflash.bench._libraries import Library
from pyflash.bench._results import Results
from pyflash.bench._workloads import WORKLOADS
from pyflash.bench.calls import pyflash as pyflash_calls


def test_gpu_workloads_are_those_that_are_asked_for():
    gpu = _workloads.picked(["gpu"])
    by_shape = {(w.head_dim, w.num_heads, w.seqlen_q, w.causal) for w in gpu if w.dtype == "bfloat16"}
    for d, heads in ((64, 32), (128, 16), (256, 8)):
        assert {(d, heads, n, c) for n in (1024, 4096, 16384) for c in (False, True)} <= by_shape
    large = [w for w in gpu if w.batch > 1 and w.seqlen_q > 1]
    assert large and all(w.batch * w.seqlen_q == 16384 for w in large)
    decodes = {(w.batch, w.seqlen_kv) for w in gpu if w.seqlen_q == 1}
    assert decodes == {(1, 8192), (16, 8192), (64, 4096)}
    assert "prefill-1x16x4096x128-float32" in {w.name for w in gpu}


class LocalProcess:
    """The other end of the pipe in this process: what goes through it is JSON all the same."""

    def __init__(self, library, isa, cpus):
        self._server = _server.Server(len(cpus), "pyflash.bench")

    def ask(self, do, **arguments):
        command = json.loads(json.dumps({"do": do, **arguments}))
        return json.loads(json.dumps(self._server.reply(command)))

    def end(self):
        pass


@pytest.fixture
def gpu_on_cpu(monkeypatch):
    """calls/cuda.py with its tensors on the CPU, where pyflash takes C for them."""
    torch = pytest.importorskip("torch")

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.now = time.perf_counter()

        def synchronize(self):
            pass

        def elapsed_time(self, other):
            return 1e3 * (other.now - self.now)

    # PyTorch itself asks for the version where there is a GPU.
    properties = SimpleNamespace(
        L2_cache_size=2**20, name="no GPU", multi_processor_count=0, major=9, minor=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = importlib.import_module("pyflash.bench.calls.cuda")
    monkeypatch.setattr(calls, "DEVICE", "cpu")
    monkeypatch.setattr(calls, "_measure_limits", lambda: {"copy": 1e10, "matmul": 1e11})
    monkeypatch.setattr(calls, "_captured", lambda one, sets: lambda: [one(number) for number in sets])
    monkeypatch.setattr(_session, "Process", LocalProcess)
    monkeypatch.setattr(_session, "Limits", FixedLimits)
    return calls


def gpu_libraries(*hosts):
    torch = [_libraries.here(name) for name in ("torch-flash", "torch-cudnn", "torch-efficient")]
    return [Library("cuda", "cuda", option="pyflash"), *torch, *_libraries.backends(hosts or None)]


@pytest.mark.skipif(CUDA_IS_EMULATED, reason="tensors on the CPU go to the backend C")
def test_a_gpu_end_to_end(gpu_on_cpu, monkeypatch):
    monkeypatch.setattr(gpu_on_cpu, "MOST_SETS", 3)
    session = new_session(*gpu_libraries("c", "numpy"), turn=1e-4)
    assert session.before.keys() == {"float32", "float64", "read", "copy", "matmul"}
    prefill = SMALL._replace(name="prefill", seqlen_q=48, causal=True, dtype="bfloat16")
    workloads = [
        prefill,
        SMALL._replace(name="decode"),
        SMALL._replace(name="paged", variant="paged"),
        SMALL._replace(name="int8", kv_dtype="int8", dtype="float16"),
        SMALL._replace(name="new", variant="no-out"),
    ]
    rows = measured(session, *workloads).rows
    for w in workloads:
        for library in ("cuda", "c", "numpy"):
            row = rows[w.name, library]
            assert row.get("error", 1) <= _check.TOLERANCE[w.dtype], (w.name, library, row)
            assert row["median"] >= row["min"] > 0
            assert ("ratio" in row) == (library != "cuda")
    assert "median" in rows["prefill", "torch-flash"] and "median" in rows["decode", "torch-flash"]
    assert rows["decode", "torch-flash"]["notes"]["form"] in ("enable_gqa", "heads as queries")
    assert ("paged", "torch-flash") not in rows
    for workload in ("prefill", "decode"):
        assert "unsupported" in rows[workload, "torch-cudnn"]
    assert "type of the queries" in rows["int8", "torch-flash"]["unsupported"]
    header = session.header()
    assert (header["machine"]["gpu"], header["first"]) == ("no GPU", "cuda")
    assert header["libraries"]["cuda"]["backend"] == "cuda"
    record = session.finished(rows, session.measure_limits())
    assert record["limits"]["agree"]
    results = Results("x", {**header, "runs": [json.loads(json.dumps(record))]})
    assert results.on_device("cuda") and not results.on_device("c")
    session.close()


def test_a_decode_on_a_gpu_finds_no_keys_in_its_cache(gpu_on_cpu):
    for w in (w for w in WORKLOADS.values() if w.device and w.seqlen_q == 1):
        inputs = gpu_on_cpu.Inputs(w, {})
        assert len(inputs) * w.kv_bytes >= 6 * 2**20 and len(inputs) >= 2
    inputs = gpu_on_cpu.Inputs(SMALL, SMALL.arrays())
    assert len(inputs) == gpu_on_cpu.MOST_SETS
    tensors = [inputs.placed("k", number) for number in range(2)]
    assert tensors[0].data_ptr() != tensors[1].data_ptr() and tensors[0].equal(tensors[1])
    assert inputs.placed("q", 0) is inputs.placed("q", 1) and inputs.placed("k", 1) is tensors[1]
    assert len(gpu_on_cpu.Inputs(SMALL._replace(seqlen_q=48), {})) == 1


def test_what_a_graph_writes_to_lives_as_long_as_the_graph(monkeypatch):
    """Its workspace is in no result."""
    torch = pytest.importorskip("torch")
    calls = importlib.import_module("pyflash.bench.calls.cuda")
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in (
        ("Stream", lambda: stream),
        ("current_stream", lambda: stream),
        ("stream", contextlib.nullcontext),
        ("synchronize", lambda: None),
        ("CUDAGraph", lambda: SimpleNamespace(replay=lambda: None)),
        ("graph", lambda graph, stream: contextlib.nullcontext()),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)

    def call_on(workspace):
        return lambda number: number if workspace.size else None

    workspace = np.ones(1)
    freed = weakref.ref(workspace)
    run = calls._captured(call_on(workspace), range(2))
    del workspace
    gc.collect()
    run()
    assert freed() is not None
    del run
    gc.collect()
    assert freed() is None


@pytest.mark.skipif(CUDA_IS_EMULATED, reason="tensors on the CPU go to the backend C")
def test_every_set_of_a_gpu_has_to_be_right(gpu_on_cpu, monkeypatch):
    session = new_session(*gpu_libraries("c")[:1])
    place, seen = gpu_on_cpu.place, []

    def spoilt(x, dtype):
        found = place(x, dtype)
        seen.append(found)
        return found * 2 if len(seen) > 3 else found  # q, k and v of the first set are right

    monkeypatch.setattr(gpu_on_cpu, "place", spoilt)
    assert "wrong" in measured(session, SMALL).rows[SMALL.name, "cuda"]
    gpu_on_cpu.forget()


@pytest.mark.skipif(not CUDA_IS_EMULATED, reason="needs PYFLASH_TEST_EMULATED_CUDA=1")
@pytest.mark.parametrize("change", [{}, {"kv_dtype": "int8"}, {"variant": "paged"}, {"causal": True}])
def test_calls_on_cuda_emulated(change):
    """What is timed on a GPU, put together here and computed by the emulator from arrays of the host."""
    w = SMALL._replace(seqlen_q=2, dtype="float16", **change)
    arrays, rows = w.arrays(), _check.checked_rows(w)
    call = pyflash_calls.bound(w, arrays, lambda x, dtype: x, backend="cuda")
    assert call.explained.backend == "cuda" and pyflash_calls.notes_of(call.explained, "kernel")
    out = np.moveaxis(call(), call.heads_axis, 1)
    found = np.array([out[row] for row in rows]).astype(np.float64)
    assert _check.largest_error(found, _check.exact_rows(w, arrays, rows)) <= _check.TOLERANCE["float16"]
