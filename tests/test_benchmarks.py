"""The benchmarks: what is called right there is right, wrong answers are seen, pages fit the result files."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import pyflash

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import bench_gpu as gpu
import driver
import report
import workloads
from workloads import WORKLOADS

SMALL = WORKLOADS["tiny-float32"]._replace(num_heads=4, num_kv_heads=2, seqlen_kv=48)


@pytest.fixture
def session(monkeypatch):
    """A session of pyflash on one thread, without the seconds that measuring limits takes."""
    monkeypatch.setattr(driver, "Limits", lambda isa, cpus: None)
    monkeypatch.setattr(driver.Session, "measure_limits", lambda self: {"float32": 1e9, "read": 1e9})
    folder = str(Path(pyflash.__file__).parents[1])  # the pyflash that this process has
    library = driver.Library("pyflash", "pyflash", sys.executable, folder)
    return driver.Session([library], "", 1, seconds=0.0, turn=0.0, rotate=0.0, of_commit="")


def test_names_and_bases():
    for name, w in WORKLOADS.items():
        assert name == w.name
        assert not w.base or WORKLOADS[w.base].group == w.group, "a base is timed in the same rounds"


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_numbers_are_those_of_the_library(dtype):
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 8), dtype=np.float32)
    codes, scale = workloads.quantised(x, dtype)
    meant = workloads.numbers(codes, dtype, scale)
    assert np.abs(meant - x).max() <= scale.max() * 0.5001
    k, v, q = (np.moveaxis(a, 1, 2) for a in (codes, codes, x))
    scales = np.moveaxis(scale, 1, 2)
    exact = pyflash.naive_attention(q, *[np.moveaxis(meant, 1, 2)] * 2)
    short = "int4" if dtype == "int4" else None
    out = pyflash.naive_attention(q, k, v, k_scale=scales, v_scale=scales, kv_dtype=short)
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)


def test_bfloat16_bits():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.random.default_rng(0).standard_normal(10000, dtype=np.float32)
    bits = workloads.stored_as(x, "bfloat16")
    np.testing.assert_array_equal(bits, x.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize("causal", [False, True])
def test_rows_to_compare_with(causal):
    w = SMALL._replace(seqlen_q=48, causal=causal)
    arrays, rows = w.arrays(), driver.checked_rows(w)
    full = pyflash.naive_attention(*(arrays[x] for x in "qkv"), causal=causal, layout="bhsd")
    np.testing.assert_allclose(driver.exact_rows(w, arrays, rows), [full[row] for row in rows], atol=1e-5)


@pytest.mark.parametrize("change", [{}, {"kv_dtype": "int8"}, {"variant": "paged"}, {"variant": "no-out"}])
def test_a_right_answer_is_timed(session, change):
    group = session.group([SMALL._replace(**change)])
    row = group.rows[SMALL.name, "pyflash"]
    assert row["error"] <= driver.TOLERANCE["float32"]
    assert row["repetitions"] >= driver.MIN_ROUNDS and row["median"] >= row["min"] > 0


def test_a_wrong_answer_is_not_timed(session, monkeypatch):
    monkeypatch.setattr(driver, "exact_rows", lambda w, arrays, rows: np.ones((len(rows), w.head_dim)))
    group = session.group([SMALL])
    assert "wrong" in group.rows[SMALL.name, "pyflash"] and not group.times


def test_a_call_that_fails_is_a_row(session):
    group = session.group([SMALL._replace(variant="paged", seqlen_kv=50), SMALL._replace(name="right")])
    assert "ValueError" in group.rows[SMALL.name, "pyflash"]["failed"]
    assert "median" in group.rows["right", "pyflash"]


def test_growth_of_memory_is_flat(session):
    group = session.group([SMALL._replace(memory=True)])
    assert 0 <= group.rows[SMALL.name, "pyflash"]["growth_bytes"] < 2**20


def test_pages_fit_the_result_files():
    assert report.main(["--check"]) == 0


def result(agree: bool, seconds: float) -> dict:
    row = {"pyflash": {"median": seconds, "min": seconds}, "torch": {"median": 2 * seconds, "ratio": 2.0}}
    limits = {
        "before": {"float32": 1e11, "read": 1e10},
        "after": {"float32": 1e11, "read": 1e10},
        "agree": agree,
    }
    return {
        "date": "2026-01-01",
        "threads": 2,
        "limits": limits,
        "rows": {"prefill-1x8x1024x64-float32": row},
    }


def test_runs_whose_limits_moved_do_not_count():
    content = {
        "first": "pyflash",
        "machine": {"cpu": "a processor", "cpus": 2},
        "commit": "0",
        "isa": "avx2",
        "libraries": {name: {"version": "1", "held": True} for name in ("pyflash", "torch")},
        "runs": [result(False, 9.0), result(True, 1.0), result(True, 2.0), result(True, 4.0)],
    }
    name = "prefill-1x8x1024x64-float32"
    results = report.Results(Path("x.json"), content)
    assert results.value(name, "pyflash", "median") == 2.0
    assert results.best_peer(name) == ("torch", 2.0)
    text = "\n".join(report.page_section([results]))
    assert "in 3 of 4 runs" in text and "| 2e+03 " in text and "2.00" in text
    failed = copy.deepcopy(content)
    for run in failed["runs"]:
        run["rows"][name]["torch"] = {"wrong": 0.5}
    assert "wrong" in "\n".join(report.times_table(report.Results(Path("x.json"), failed)))


def test_a_library_is_a_python_or_a_folder(tmp_path):
    assert driver.Library.parse(f"old={tmp_path}", "pyflash").path == os.fspath(tmp_path.resolve())
    assert driver.Library.parse("torch=/some/python") == driver.Library("torch", "torch", "/some/python")
    with pytest.raises(ValueError, match="expected NAME=PYTHON"):
        driver.Library.parse("torch")


# --- the script for a GPU ---


def test_gpu_workloads_are_those_that_are_asked_for():
    assert all(name == w.name for name, w in gpu.WORKLOADS.items())
    by_shape = {(w.head_dim, w.num_heads, w.seqlen_q, w.causal) for w in gpu.picked(["prefill-*-bfloat16"])}
    for d, heads in ((64, 32), (128, 16), (256, 8)):
        assert {(d, heads, n, c) for n in (1024, 4096, 16384) for c in (False, True)} <= by_shape
    large = [w for w in gpu.picked(["prefill-*"]) if w.batch > 1]
    assert large and all(w.batch * w.seqlen_q == 16384 for w in large)
    assert {(w.batch, w.seqlen_kv) for w in gpu.picked(["decode-*"])} == {
        (1, 8192),
        (16, 8192),
        (64, 4096),
    }
    assert [w.name for w in gpu.picked(["*1x16x4096x128-float32"])] == ["prefill-1x16x4096x128-float32"]
    for w in gpu.picked(["decode-*"]):
        assert gpu.num_sets(w, 50 * 2**20) * w.kv_bytes >= 6 * 50 * 2**20
    assert gpu.num_sets(gpu.picked(["prefill-*"])[0], 50 * 2**20) == 1


def test_turns_are_given_round_by_round():
    calls = []
    turns = {name: lambda name=name: calls.append(name) or float(len(calls)) for name in "abc"}
    times = gpu.in_turn(turns, 0.0)
    assert [len(found) for found in times.values()] == [driver.MIN_ROUNDS] * 3
    rounds = [sorted(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert rounds == [["a", "b", "c"]] * driver.MIN_ROUNDS
    assert gpu.in_turn({}, 1.0) == {}
    assert gpu.ratio([2.0, 9.0, 4.0], [1.0, 3.0, 4.0]) == 2.0 and gpu.ratio([4.0], [1.0, 2.0, 3.0]) == 2.0


@pytest.fixture
def bench_on_cpu(monkeypatch):
    """The script with its tensors on the CPU, where the backend that has the name of cuda is C."""
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

    properties = SimpleNamespace(L2_cache_size=2**20, name="no GPU", multi_processor_count=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "missing", lambda: None)
    monkeypatch.setattr(gpu.Bench, "measure_limits", lambda self: {"copy": 1e10, "matmul": 1e11})
    monkeypatch.setattr(
        gpu.Bench, "_captured", lambda self, one, sets: lambda: [one(number) for number in sets]
    )
    small = {
        "prefill": SMALL._replace(name="prefill", seqlen_q=48, causal=True, dtype="bfloat16"),
        "decode": SMALL._replace(name="decode"),
    }
    monkeypatch.setattr(gpu, "WORKLOADS", small)


def test_the_gpu_script_end_to_end(bench_on_cpu, tmp_path, capsys):
    path = tmp_path / "results" / "gpu.json"
    pytest.importorskip("cupy")
    assert gpu.main(["--seconds", "0", "--turn", "0.0001", "--results", str(path), "--commit", "abc"]) == 0
    said = capsys.readouterr().out.splitlines()
    head, prefill, decode = said[-3:]  # the table stands last
    assert head.split()[:5] == ["workload", "kernel", "us", "TFLOP/s", "TB/s"]
    assert prefill.startswith("prefill ") and decode.startswith("decode ")
    content = json.loads(path.read_text())
    assert (content["commit"], len(content["limits"]), content["machine"]["gpu"]) == ("abc", 2, "no GPU")
    for w in gpu.WORKLOADS.values():
        rows = content["rows"][w.name]
        assert list(rows) == list(gpu.LIBRARIES)
        for library in ("cuda", "torch-flash", "c", "numpy"):
            assert "error" in rows[library], (library, rows[library])
            assert rows[library]["error"] <= driver.TOLERANCE[w.dtype], library
            assert rows[library]["median"] >= rows[library]["min"] > 0
            assert ("ratio" in rows[library]) == (library != "cuda")
        assert "unsupported" in rows["torch-cudnn"]


def test_the_gpu_script_times_no_wrong_answer(bench_on_cpu, monkeypatch, tmp_path, capsys):
    right = gpu.exact_row
    monkeypatch.setattr(gpu, "exact_row", lambda *args: right(*args) + 0.1)
    path = tmp_path / "gpu.json"
    pytest.importorskip("cupy")
    assert gpu.main(["--libraries", "cuda", "--only", "decode", "--results", str(path)]) == 1
    assert set(json.loads(path.read_text())["rows"]["decode"]["cuda"]) == {"wrong", "afterwards"}
    assert capsys.readouterr().out.splitlines()[-1].split()[:3] == ["decode", "-", "wrong"]


def test_the_gpu_script_says_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "missing", lambda: "cuda: no GPU")
    assert gpu.main(["--only", "decode-*"]) == 1
    assert capsys.readouterr().err == "nothing to measure: cuda: no GPU\n"
    with pytest.raises(SystemExit):
        gpu.main(["--only", "nothing"])
    assert "no workload fits ['nothing']" in capsys.readouterr().err
