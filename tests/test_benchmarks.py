"""The benchmarks: what is called right there is right, wrong answers are seen, pages fit the result files."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from bench_sessions import SMALL, C, FixedLimits, measured, new_session

import pyflash
from pyflash.bench import _check, _engine, _libraries, _plots, _server, _session, _workloads
from pyflash.bench._libraries import Library
from pyflash.bench._limits import Limits, agree, fraction
from pyflash.bench._process import Ended, Process
from pyflash.bench._results import Results, default_name, save
from pyflash.bench._workloads import WORKLOADS
from pyflash.bench.calls import pyflash as pyflash_calls

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import report  # noqa: E402 - it lies in another folder


@pytest.fixture
def session(monkeypatch):
    """A session of pyflash on one thread."""
    monkeypatch.setattr(_session, "Limits", FixedLimits)
    return new_session(C)


def test_names_and_bases():
    for name, w in WORKLOADS.items():
        assert name == w.name
        assert not w.base or WORKLOADS[w.base].group == w.group, "a base is timed in the same rounds"


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_numbers_are_those_of_the_library(dtype):
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 8), dtype=np.float32)
    codes, scale = _workloads.quantised(x, dtype)
    meant = _workloads.numbers(codes, dtype, scale)
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
    bits = _workloads.stored_as(x, "bfloat16")
    np.testing.assert_array_equal(bits, x.astype(ml_dtypes.bfloat16).view(np.uint16))


@pytest.mark.parametrize("causal", [False, True])
def test_rows_to_compare_with(causal):
    w = SMALL._replace(seqlen_q=48, causal=causal)
    arrays, rows = w.arrays(), _check.checked_rows(w)
    full = pyflash.naive_attention(*(arrays[x] for x in "qkv"), causal=causal, layout="bhsd")
    np.testing.assert_allclose(_check.exact_rows(w, arrays, rows), [full[row] for row in rows], atol=1e-5)


@pytest.mark.parametrize("change", [{}, {"kv_dtype": "int8"}, {"variant": "paged"}, {"variant": "no-out"}])
def test_a_right_answer_is_timed(session, change):
    row = measured(session, SMALL._replace(**change)).rows[SMALL.name, "c"]
    assert row["error"] <= _check.TOLERANCE["float32"]
    assert row["repetitions"] >= _engine.MIN_ROUNDS and row["median"] >= row["min"] > 0


def test_backends_side_by_side(monkeypatch):
    monkeypatch.setattr(_session, "Limits", FixedLimits)
    session = new_session(*_libraries.backends(["numpy", "naive", "c"]))
    large, paged = (
        SMALL._replace(name="large", seqlen_kv=10**9),
        SMALL._replace(name="paged", variant="paged"),
    )
    rows = measured(session, SMALL).rows
    assert "ratio" not in rows[SMALL.name, "numpy"]
    assert rows[SMALL.name, "naive"]["ratio"] > 0 and rows[SMALL.name, "c"]["ratio"] > 0
    for w, option, reason in (
        (large, "numpy", "too long"),
        (large._replace(memory=True, seqlen_q=10**9), "naive", "too long"),
        (SMALL._replace(seqlen_q=4000, seqlen_kv=10000), "naive", "matrix of scores"),
        (SMALL._replace(device=True, seqlen_q=10**5, seqlen_kv=10**5, num_heads=64), "c", "too long"),
        (paged, "naive", "dense keys"),
    ):
        with pytest.raises(pyflash_calls.Unsupported, match=reason):
            pyflash_calls.prepare(w, {}, 1, option)


def test_a_wrong_answer_is_not_timed(session, monkeypatch):
    monkeypatch.setattr(_engine, "exact_rows", lambda w, arrays, rows: np.ones((len(rows), w.head_dim)))
    group = measured(session, SMALL)
    assert "wrong" in group.rows[SMALL.name, "c"] and not group.times


def test_nan_is_wrong(session, monkeypatch):
    monkeypatch.setattr(_engine, "largest_error", lambda found, exact: float("nan"))
    assert "wrong" in measured(session, SMALL).rows[SMALL.name, "c"]


def test_a_call_that_fails_is_a_row(session):
    group = measured(session, SMALL._replace(variant="paged", seqlen_kv=50), SMALL._replace(name="right"))
    assert "ValueError" in group.rows[SMALL.name, "c"]["failed"]
    assert "median" in group.rows["right", "c"]


def test_a_process_that_ends_is_a_row_and_the_others_go_on(session, monkeypatch):
    ask = Process.ask

    def dies(process, do, **arguments):
        if do == "turn" and arguments["name"] == "dies":
            process._process.kill()
        return ask(process, do, **arguments)

    monkeypatch.setattr(Process, "ask", dies)
    rows = measured(session, SMALL._replace(name="dies")).rows
    assert "ended" in rows["dies", "c"]["failed"]
    assert "median" in measured(session, SMALL).rows[SMALL.name, "c"]


def test_what_was_prepared_in_a_process_ends_with_it(session, monkeypatch):
    ask = Process.ask

    def dies(process, do, **arguments):
        if do == "answer" and arguments["name"] == "dies":
            process._process.kill()
        return ask(process, do, **arguments)

    monkeypatch.setattr(Process, "ask", dies)
    rows = measured(session, SMALL, SMALL._replace(name="dies"), SMALL._replace(name="later")).rows
    assert rows[SMALL.name, "c"] == {"failed": _engine.ENDED_ELSEWHERE}
    assert "the process ended" in rows["dies", "c"]["failed"] and "median" in rows["later", "c"]


def test_a_process_says_why_it_ended(tmp_path):
    process = Process(C._replace(path=str(tmp_path)), "", _session.cpus()[:1])
    (tmp_path / "pyflash.py").write_text("raise SystemExit('no such luck')")
    with pytest.raises(Ended, match="no such luck"):
        process.ask("info", module="pyflash")
    process.end()


def test_growth_of_memory_is_flat(session):
    group = measured(session, SMALL._replace(memory=True))
    assert 0 <= group.rows[SMALL.name, "c"]["growth_bytes"] < 2**20


def test_growth_of_memory_of_the_textbook_is_seen(monkeypatch):
    monkeypatch.setattr(_session, "Limits", FixedLimits)
    session = new_session(*_libraries.backends(["c", "naive"]))
    w = WORKLOADS["memory-over-n-1024"]
    rows = measured(session, w).rows
    assert rows[w.name, "naive"]["growth_bytes"] > 8 * 1024**2 > 4 * rows[w.name, "c"]["growth_bytes"]


def test_turns_are_given_round_by_round():
    calls = []
    turns = {name: lambda name=name: (calls.append(name) or [float(len(calls))], 0.0) for name in "abc"}
    times = _engine.interleave(turns, 0.0)
    assert [len(found) for found in times.values()] == [_engine.MIN_ROUNDS] * 3
    rounds = [sorted(calls[i : i + 3]) for i in range(0, len(calls), 3)]
    assert rounds == [["a", "b", "c"]] * _engine.MIN_ROUNDS
    assert _engine.interleave({}, 1.0) == {}
    assert _engine.ratio([[2.0], [9.0], [4.0]], [[1.0], [3.0], [4.0]]) == 2.0
    assert _engine.ratio([[4.0]], [[1.0], [2.0], [3.0]]) == 2.0


def test_a_turn_that_fails_is_left_out():
    said, parts = {}, []

    def fails():
        raise _engine.TurnFailed("no")

    turns = {"right": lambda: ([1.0], 0.125), "fails": fails}
    times = _engine.interleave(turns, 1.0, parts.append, said.__setitem__)
    assert list(times) == ["right"] and len(times["right"]) == 8 and said == {"fails": "no"}
    assert sum(parts) == pytest.approx(1.0)


@pytest.mark.parametrize(("turns_before", "kept"), [(2 * _engine.MIN_ROUNDS - 1, None), (15, 7)])
def test_an_interruption_keeps_whole_rounds(turns_before, kept):
    times, calls = {}, []

    def turn():
        if len(calls) == turns_before:
            raise KeyboardInterrupt
        calls.append(1)
        return [1.0], 0.0

    with pytest.raises(KeyboardInterrupt):
        _engine.interleave({"a": turn, "b": turn}, 1.0, times=times)
    assert {name: len(rounds) for name, rounds in times.items()} == ({"a": kept, "b": kept} if kept else {})


def test_a_peer_needs_no_pyflash():
    """Its process finds workloads and calls without importing the package, which may not be there."""
    code = (
        "import importlib, sys, types; package = types.ModuleType('alone'); "
        f"package.__path__ = [{str(Path(_server.__file__).parent)!r}]; sys.modules['alone'] = package; "
        "importlib.import_module('alone._server'); importlib.import_module('alone.calls'); "
        "importlib.import_module('alone._workloads'); assert 'pyflash' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_limits_are_measured():
    isa = pyflash.available_isas()[-1]
    found = Limits(isa, _session.cpus(), scale=0.001).measure(len(_session.cpus()))
    assert set(found) == {"float32", "float64", "read"} | ({"amx"} if isa == "amx" else set())
    assert min(found.values()) > 0


def test_fractions_compare_with_what_binds():
    limits = {"float32": 1e11, "float64": 5e10, "amx": 1e12, "read": 1e10, "matmul": 1e15, "copy": 4e12}
    prefill, decode = WORKLOADS["prefill-1x8x4096x128-float32"], WORKLOADS["decode-1x32768-float32"]
    assert fraction(prefill, 1.0, limits) == prefill.flops / 1e11
    assert fraction(decode, 1.0, limits) == decode.kv_bytes / 1e10
    assert fraction(prefill._replace(dtype="bfloat16"), 1.0, limits) == prefill.flops / 1e12
    assert fraction(prefill, 1.0, limits, on_device=True) == prefill.flops / 1e15
    assert fraction(prefill, 1.0, {"float32": 1e11, "read": 1e10}, on_device=True) is None
    assert agree(limits, {**limits, "read": 1.04e10}) and not agree(limits, {**limits, "read": 0.9e10})


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
    results = Results("x", content)
    assert results.value(name, "pyflash", "median") == 2.0
    assert results.best_peer(name) == ("torch", 2.0)
    text = "\n".join(report.page_section([results]))
    assert "in 3 of 4 runs" in text and "| 2e+03 " in text and "2.00" in text
    failed = copy.deepcopy(content)
    for run in failed["runs"]:
        run["rows"][name]["torch"] = {"wrong": 0.5}
    assert "wrong" in "\n".join(report.times_table(Results("x", failed)))


def test_a_library_is_a_python_or_a_folder(tmp_path):
    assert Library.parse("--also", f"old={tmp_path}", "pyflash", "c") == Library(
        "old", "pyflash", path=str(tmp_path.resolve()), option="c"
    )
    assert Library.parse("--peers", f"torch={sys.executable}").module == "torch"
    for text in ("torch", "torch=", "torch=/no/such/python"):
        with pytest.raises(pyflash.PyflashError, match="--peers"):
            Library.parse("--peers", text)


def test_what_is_for_whom():
    peer, cuda = Library("torch", "torch"), Library("cuda", "cuda", option="pyflash")
    flash = Library("torch-flash", "cuda", option="FLASH_ATTENTION")
    assert cuda.is_pyflash and not flash.is_pyflash and cuda.process == flash.process != peer.process
    device = WORKLOADS["decode-16x8192-bfloat16"]
    assert [library.takes(device) for library in (peer, C, cuda, flash)] == [False, True, True, True]
    paged = WORKLOADS["decode-1x4096-float32-paged"]
    assert [library.takes(paged) for library in (peer, C, cuda, flash)] == [False, True, True, False]
    memory = WORKLOADS["memory-over-n-512"]
    assert [library.takes(memory) for library in (peer, C, cuda, flash)] == [True, True, False, False]
    assert C.held_to("avx2") and peer.held_to("avx2") and not flash.held_to("avx2")
    assert C.environment("avx2", 3)["PYFLASH_ISA"] == "avx2"


def test_styles_tell_libraries_apart():
    names = [*_libraries.BACKENDS, *_libraries.PEERS]
    assert set(names) <= set(_plots.STYLES) and len(set(_plots.STYLES.values())) == len(_plots.STYLES)


def test_files_are_written_as_a_whole(tmp_path):
    path = tmp_path / "folder" / "x.json"
    header = {"machine": {"cpu": "A(R) CPU @ 2 GHz"}, "isa": "avx2"}
    save(path, header, [{"threads": 2}])
    assert json.loads(path.read_text())["runs"] == [{"threads": 2}]
    with pytest.raises(TypeError):
        save(path, header, [{"threads": object()}])
    assert json.loads(path.read_text())["isa"] == "avx2" and list(path.parent.iterdir()) == [path]
    assert default_name(header, [{"threads": 2}]) == "a-2-ghz-avx2-2.json"


def test_links_stay_and_their_target_is_written(tmp_path):
    link, file = tmp_path / "link.json", tmp_path / "elsewhere" / "run.json"
    link.symlink_to(file)
    for isa in ("avx2", "amx"):  # a new file, and one that is there
        save(link, {"isa": isa}, [])
        assert json.loads(file.read_text())["isa"] == isa and link.is_symlink()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(pyflash.InvalidArgument, match="regular file"):
        save(tmp_path / "pipe", {}, [])


def test_the_pytest_benchmarks_know_the_options():
    """`make bench` collects the rows that its options ask for."""
    pytest.importorskip("pytest_benchmark")
    command = [sys.executable, "-m", "pytest", "benchmarks", "-p", "no:cacheprovider", "--collect-only", "-q"]
    command += [
        "--backends",
        "numpy",
        "c",
        "--peers",
        "--seconds=0",
        "-k",
        "tiny-float32-c or tiny-float32-numpy",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if "::" in line]
    assert [line.split("[")[1] for line in found] == ["tiny-float32-numpy]", "tiny-float32-c]"]
