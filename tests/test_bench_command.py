"""`pyflash bench`: what it refuses, and when; what it shows, writes and draws, and keeps when interrupted."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import pyflash
from pyflash.__main__ import main
from pyflash.bench import _cli, _engine, _libraries, _peers, _plots, _process, _session, _signals

pytest.importorskip("rich")
#: A run of a second: no peers, one thread.
QUICK = ("--peers", "--seconds", "0", "--turn", "0", "--threads", "1")


#: A result file with one row.
CONTENT: dict = {
    "machine": {"cpu": "a processor"},
    "isa": "avx2",
    "libraries": {"c": {"version": "1", "held": True}},
    "first": "c",
    "runs": [
        {
            "threads": 1,
            "limits": {"agree": False, "before": {"float32": 1e11, "read": 1e10}},
            "rows": {"tiny-float32": {"c": {"median": 1.0}}},
        }
    ],
}


class FixedLimits:
    """Limits without the seconds that measuring them takes."""

    def __init__(self, isa, cpus):
        pass

    def measure(self, num_threads):
        return {"float32": 1e11, "float64": 5e10, "read": 1e10}


@pytest.fixture
def fixed_limits(monkeypatch):
    monkeypatch.setattr(_session, "Limits", FixedLimits)


@pytest.fixture
def nothing_measured(monkeypatch):
    """What is refused is refused before anything takes its time."""
    monkeypatch.setattr(_cli, "Session", lambda *args: pytest.fail("it measures"))


def bench(*arguments):
    return main(["bench", *map(str, arguments)])


def refused(capsys, *arguments):
    assert bench(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("pyflash: ") and error.count("\n") == 1
    return error


# --- what is refused ---


def test_an_unknown_workload_has_neighbours(nothing_measured, capsys):
    error = refused(capsys, "decode-1x4096-flot32")
    assert "WORKLOAD: found 'decode-1x4096-flot32'" in error and "decode-1x4096-float32" in error
    assert "near" not in refused(capsys, "zzz")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backends", "metal"], "--backends: found 'metal', expected any of c, numpy, cuda, naive"),
        (["--backends", "c", "tiny"], "cuda, naive; workloads stand before the options"),
        (["--peers", "over-n-128"], "NAME=PYTHON; workloads stand before the options"),
        (["--peers", "keras"], "--peers: found 'keras', expected any of torch, onnxruntime"),
        (["--peers", "torch=/no/such/python"], "after '=' a Python that can be run"),
        (["--peers", "torch-flash=python3"], "before '=' one of torch, onnxruntime"),
        (["--also", "old"], "--also: found 'old', expected NAME=PYTHON or NAME=FOLDER"),
        (["--also", "c=."], "--also: found 'c', expected a name that no other library has"),
        (["--threads", "0"], "--threads: found '0', expected numbers from 1 to "),
        (["--threads", "1,x"], "--threads: found '1,x'"),
        (["--threads", "100000"], "--threads: found '100000'"),
        (["--seconds", "-1"], "--seconds: found -1.0"),
        (["--turn", "nan"], "--turn: found nan"),
        (["--runs", "0"], "--runs: found 0, expected at least 1"),
        (["--from", "no-such.json"], "--from: found 'no-such.json', expected a result file"),
        (["--from", "x.json", "--json", "y.json"], "--json: found 'y.json', expected no file to write with"),
    ],
)
def test_bad_options_are_found_first(nothing_measured, capsys, arguments, words):
    assert words in refused(capsys, *arguments)


def test_workloads_for_nobody(nothing_measured, monkeypatch, capsys):
    cuda = _libraries.Library("cuda", "cuda", option="pyflash")
    monkeypatch.setattr(_libraries, "backends", lambda names: [cuda])
    error = refused(capsys, "memory-over-n-512", "--peers")
    assert error == "pyflash: WORKLOAD: found memory-over-n-512, expected one that is for any of cuda\n"


def test_an_instruction_set_that_is_not_there(capsys):
    assert "isa: found 'sse9', expected one of 'scalar'" in refused(capsys, "tiny", *QUICK, "--isa", "sse9")


def test_a_peer_that_is_not_installed(nothing_measured, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(_libraries, "importable", lambda peer: False)
    error = refused(capsys, "--peers", "openvino", "--peers-from", tmp_path)
    assert "pip install openvino==" in error and "openvino=PYTHON" in error
    assert _libraries.peers(None, tmp_path, on_device=True) == []


@pytest.mark.skipif(_libraries.no_device() is None, reason="there is a GPU")
def test_no_gpu_is_one_sentence(nothing_measured, capsys):
    for arguments in (["--backends", "cuda"], ["--peers", "torch-flash"]):
        error = refused(capsys, *arguments)
        assert "cannot be measured: " in error and _libraries.no_device() in error


def test_a_peer_that_cannot_be_loaded(fixed_limits, capsys, tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('a library is missing')")
    error = refused(capsys, "tiny", *QUICK, "--peers", f"torch={tmp_path}")
    assert error == f"pyflash: torch cannot be loaded by {sys.executable}: OSError: a library is missing\n"


def test_what_a_folder_lacks_is_not_taken_from_elsewhere(fixed_limits, monkeypatch, capsys, tmp_path):
    class Elsewhere(_session.Process):
        def ask(self, do, **arguments):
            return {"version": "1", "file": f"/elsewhere/{arguments['imported']}.py"}

    monkeypatch.setattr(_session, "Process", Elsewhere)
    for option, name, imported in (("--also", "old", "pyflash"), ("--peers", "ggml", "libggml")):
        error = refused(
            capsys, "tiny", *QUICK[1:], "--backends", "c", "--peers", option, f"{name}={tmp_path}"
        )
        where = f"/elsewhere/{imported}.py, which is not in {tmp_path}"
        assert error == f"pyflash: {name}: {imported} was imported from {where}\n"


def test_a_peer_that_was_found_but_cannot_be_loaded_is_left_out(fixed_limits, monkeypatch, capsys, tmp_path):
    (tmp_path / "jax.py").write_text("raise OSError('a library is missing')")
    broken = _libraries.Library("jax", "jax", path=str(tmp_path))
    monkeypatch.setattr(_libraries, "peers", lambda names, folder, on_device: [broken])
    assert bench("tiny-float32", *QUICK[1:], "--backends", "c") == 0
    said = capsys.readouterr().out
    assert "not compared: jax cannot be loaded by" in said and "OSError: a library is missing" in said


def test_where_nothing_can_be_written(nothing_measured, capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert "--json: found" in refused(capsys, "--json", tmp_path)
    assert "a place to write to (a file is in its way)" in refused(capsys, "--json", file / "x.json")
    pytest.importorskip("matplotlib")
    assert "--plots: found" in refused(capsys, "--plots", file)
    assert list(tmp_path.iterdir()) == [file]


def test_a_device_or_a_pipe_is_not_replaced(nothing_measured, capsys, tmp_path):
    pipe, link, loop = tmp_path / "pipe", tmp_path / "link", tmp_path / "loop"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    loop.symlink_to(loop)
    for path in (pipe, link, loop, "/dev/null"):
        assert "expected a regular file, or the name of a new one" in refused(capsys, "--json", path)
    assert pipe.is_fifo() and link.is_symlink()


def test_what_is_refused_leaves_no_folders(nothing_measured, capsys, tmp_path):
    refused(capsys, "zzz", "--json", tmp_path / "a" / "b" / "run.json")
    pytest.importorskip("matplotlib")
    refused(capsys, "zzz", "--plots", tmp_path / "c" / "d")
    assert not list(tmp_path.iterdir())


def without(*path):
    """Return a change of a file's content that removes a part of it."""

    def change(content):
        for name in path[:-1]:
            content = content[name]
        del content[path[-1]]

    return change


def with_(value, *path):
    """Return a change of a file's content that replaces a part of it."""

    def change(content):
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("libraries"), "libraries is missing"),
        (without("first"), "first is missing"),
        (without("machine"), "machine is missing"),
        (without("libraries", "c", "held"), "libraries.c.held is missing"),
        (with_("d", "first"), "first is 'd', which is not in libraries"),
        (with_([], "runs"), "runs is empty"),
        (with_([None], "runs"), "runs[0] is NoneType, not an object"),
        (without("runs", 0, "limits"), "runs[0].limits is missing"),
        (with_({}, "runs", 0, "limits", "after"), "runs[0].limits.after.float32 is missing"),
        (with_(None, "runs", 0, "rows"), "runs[0].rows is null, not an object"),
        (with_(0, "runs", 0, "rows", "tiny-float32", "c", "median"), "c.median is 0, not a positive number"),
        (with_("1", "runs", 0, "rows", "tiny-float32", "c", "median"), "c.median is '1', not a number"),
        (with_({"new": {}}, "runs", 0, "rows"), "none of its workloads is known here: new"),
        (with_({"tiny-float32": {"d": {}}}, "runs", 0, "rows"), "'d', which is not in libraries"),
    ],
)
def test_a_malformed_file_is_one_sentence(capsys, tmp_path, change, words):
    content, path = copy.deepcopy(CONTENT), tmp_path / "x.json"
    path.write_text(json.dumps(content))
    assert bench("--from", path) == 0
    change(content)
    path.write_text(json.dumps(content))
    error = refused(capsys, "--from", path)
    assert f"--from: found '{path}', expected a result file (" in error and words in error


def test_files_that_are_none_of_these(capsys, tmp_path):
    path = tmp_path / "x.json"
    for text, words in (("[" * 100_000, "recursion"), ("", "Expecting value"), ("[]", "the whole is list")):
        path.write_text(text)
        assert words in refused(capsys, "--from", path)
    path.write_bytes(b"\xff")
    assert "codec can't decode" in refused(capsys, "--from", path)
    for old in ({"rows": [], "peers": {}}, {"groups": []}):
        path.write_text(json.dumps({"machine": {}, **old}))
        expected = "a file of an older format" if "rows" in old else "benchmarks/options.py"
        assert expected in refused(capsys, "--from", path)


def test_missing_packages_are_one_sentence(nothing_measured, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(_plots.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'pyflash-attention[bench]'" in refused(capsys, "--plots", tmp_path)
    monkeypatch.undo()
    code = (
        "import sys; sys.modules['rich'] = None; from pyflash.__main__ import main; sys.exit(main(['bench']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "pip install 'pyflash-attention[bench]'" in done.stderr


# --- what it does ---


def test_list(capsys, tmp_path, monkeypatch):
    python = _peers.interpreter(tmp_path, "ggml")
    python.parent.mkdir(parents=True)
    (tmp_path / "ggml" / "installed").write_text("1\n")
    monkeypatch.setenv("COLUMNS", "200")
    assert bench("--list", "tiny", "--peers-from", tmp_path) == 0
    said = capsys.readouterr().out
    assert "tiny-float32-no-out" in said and "prefill" not in said
    assert "--backends numpy" in said and str(tmp_path / "ggml") in said
    assert "quick" in said and "--peers openvino" in said


def test_a_run_shows_writes_and_draws(fixed_limits, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path, plots = tmp_path / "new" / "run.json", tmp_path / "plots"
    names = (
        "over-n-128",
        "over-n-256",
        "prefill-1x12x128x64-float32",
        "memory-over-n-512",
        "memory-over-n-1024",
    )
    assert bench(*names, *QUICK, "--backends", "c", "naive", "--json", path, "--plots", plots) == 0
    content = json.loads(path.read_text())
    assert content.keys() >= {"machine", "commit", "isa", "libraries", "first", "settings", "runs"}
    (run,) = content["runs"]
    assert run["limits"]["agree"] and run["threads"] == 1
    assert set(run["rows"]) == set(names)
    for name in names:
        for library in ("c", "naive"):
            row = run["rows"][name][library]
            assert row["error"] < 1e-5
            assert ("growth_bytes" if name.startswith("memory") else "median") in row
    said = capsys.readouterr().out
    assert "Time of pyflash c" in said and "Memory beyond" in said and "limits before and after agree" in said
    assert {file.name for file in plots.iterdir()} == {
        f"{name}.{suffix}" for name in ("speed", "limit", "memory") for suffix in ("svg", "png")
    }
    for file in plots.iterdir():
        if file.suffix == ".svg":
            text = "".join(ElementTree.fromstring(file.read_text()).itertext())
            assert "pyflash c" in text and "naive" in text and "1 thread" in text
        else:
            assert file.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    assert bench("--from", path, "--plots", tmp_path / "again") == 0  # the same without measuring
    assert "Time of pyflash c" in capsys.readouterr().out
    assert (tmp_path / "again" / "speed.svg").read_bytes() == (plots / "speed.svg").read_bytes()


def test_a_wrong_answer_of_pyflash_is_the_status(fixed_limits, monkeypatch, capsys):
    monkeypatch.setattr(_engine, "largest_error", lambda found, exact: 0.5)
    assert bench("tiny-float32", *QUICK, "--backends", "c") == 1
    assert "pyflash c: WRONG by 0.5 of the largest element" in capsys.readouterr().out


def test_nan_is_null_in_the_file(fixed_limits, monkeypatch, capsys, tmp_path):
    path = tmp_path / "run.json"
    monkeypatch.setattr(_engine, "largest_error", lambda found, exact: float("nan"))
    assert bench("tiny-float32", *QUICK, "--backends", "c", "--json", path) == 1
    rows = json.loads(path.read_text(), parse_constant=pytest.fail)["runs"][0]["rows"]
    assert rows["tiny-float32"]["c"]["wrong"] is None
    assert bench("--from", path) == 1
    assert capsys.readouterr().out.count("WRONG by nan") == 2


def test_an_answer_has_to_be_right_after_the_last_turn_as_well(fixed_limits, monkeypatch, tmp_path):
    errors, path = iter([0.0, 0.0, 0.0, 0.5]), tmp_path / "run.json"  # of both, before and after
    monkeypatch.setattr(_engine, "largest_error", lambda found, exact: next(errors))
    assert bench("tiny", *QUICK, "--backends", "c", "--json", path) == 1
    rows = json.loads(path.read_text())["runs"][0]["rows"]
    assert rows["tiny-float32-no-out"]["c"] == {"wrong": 0.5, "tolerance": 2e-5}
    assert "median" in rows["tiny-float32"]["c"]


def test_a_process_that_ends_after_its_last_turn_is_a_row(fixed_limits, monkeypatch, tmp_path):
    ask, done, path = _session.Process.ask, [], tmp_path / "run.json"

    def dies(process, do, **arguments):
        done.append(do)
        if do == "answer" and "turn" in done:
            process._process.kill()
        return ask(process, do, **arguments)

    monkeypatch.setattr(_session.Process, "ask", dies)
    assert bench("tiny", *QUICK, "--backends", "c", "--json", path) == 1
    rows = json.loads(path.read_text())["runs"][0]["rows"]
    assert "the process ended" in rows["tiny-float32"]["c"]["failed"]
    assert rows["tiny-float32-no-out"]["c"] == {"failed": _engine.ENDED_ELSEWHERE}


def test_an_interruption_keeps_what_was_measured(fixed_limits, monkeypatch, capsys, tmp_path):
    time_group, path = _engine.Group._time, tmp_path / "run.json"

    def interrupted(group):
        if "over-n-128" in group._workloads:
            raise KeyboardInterrupt
        time_group(group)

    monkeypatch.setattr(_engine.Group, "_time", interrupted)
    status = bench("tiny-float32", "over-n-128", *QUICK, "--backends", "c", "--json", path)
    assert status == 130
    said = capsys.readouterr()
    assert "interrupted: 1 rows were measured before, written to" in " ".join(said.err.split())
    assert "tiny-float32" in said.out
    (run,) = json.loads(path.read_text())["runs"]
    assert list(run["rows"]) == ["tiny-float32"] and "median" in run["rows"]["tiny-float32"]["c"]
    assert not run["limits"]["agree"] and "after" not in run["limits"]
    assert bench("--from", path) == 0


def test_an_interruption_before_the_first_row(fixed_limits, monkeypatch, capsys, tmp_path):
    def interrupted(group):
        raise KeyboardInterrupt

    monkeypatch.setattr(_engine.Group, "_time", interrupted)
    path = tmp_path / "run.json"
    assert bench("tiny-float32", *QUICK, "--backends", "c", "--json", path) == 130
    assert "interrupted before anything was measured" in " ".join(capsys.readouterr().err.split())
    assert not path.exists()


@pytest.fixture
def heeded():
    """Signals as a terminal has them: under nohup one is ignored, and stays so."""
    before = [signal.signal(number, signal.default_int_handler) for number in _signals.ENDING]
    yield
    for number, handler in zip(_signals.ENDING, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", _signals.ENDING)
def test_a_signal_is_an_interruption(fixed_limits, heeded, monkeypatch, capsys, tmp_path, number):
    time_group, path = _engine.Group._time, tmp_path / "run.json"
    monkeypatch.setattr(_engine, "_shared_folder", lambda num_bytes: Path(tempfile.mkdtemp(dir=tmp_path)))

    def ended(group):
        if "over-n-128" in group._workloads:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # as `timeout` does
            pytest.fail("it goes on")
        time_group(group)

    monkeypatch.setattr(_engine.Group, "_time", ended)
    before = [signal.getsignal(other) for other in _signals.ENDING]
    assert bench("tiny-float32", "over-n-128", *QUICK, "--backends", "c", "--json", path) == 130
    assert [signal.getsignal(other) for other in _signals.ENDING] == before
    assert "interrupted: 1 rows were measured before" in " ".join(capsys.readouterr().err.split())
    assert list(json.loads(path.read_text())["runs"][0]["rows"]) == ["tiny-float32"]
    assert list(tmp_path.iterdir()) == [path]


def test_signals_that_are_ignored_stay_so_and_other_threads_have_none():
    number = _signals.ENDING[-1]
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with _signals.as_interruption():
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(bench, "--list", "tiny").result() == 0


def bench_without_reader(*arguments):
    """Run with a pipe for stdout whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout, contextlib.redirect_stdout(stdout):
        return bench(*arguments)


def test_a_closed_pipe_ends_the_command(nothing_measured, capfd):
    assert bench_without_reader("--list") == 130
    assert capfd.readouterr().err == ""


def test_a_closed_pipe_ends_no_run_that_is_written(fixed_limits, tmp_path):
    path = tmp_path / "run.json"
    assert bench_without_reader("tiny", *QUICK, "--backends", "c", "--json", path) == 130
    (run,) = json.loads(path.read_text())["runs"]
    assert run["limits"]["agree"] and len(run["rows"]) == 2


def test_a_file_gets_a_line_per_group(fixed_limits, monkeypatch, capsys):
    finish = _engine.Group._finish

    def finished(group, found):
        finish(group, found)
        group.rows["tiny-float32", "c"] |= {"median": 1.5e-6}

    monkeypatch.setattr(_engine.Group, "_finish", finished)
    assert bench("tiny-float32", *QUICK, "--backends", "c") == 0
    assert "1 of 1: tiny-float32: pyflash c 1.50 us\n" in capsys.readouterr().err


def test_a_library_that_does_not_answer_has_failed(fixed_limits, monkeypatch, capsys):
    ask = _session.Process.ask

    def hangs(process, do, **arguments):
        if do == "turn":
            monkeypatch.setattr(_process, "ANSWER_SECONDS", 0.0)
        return ask(process, do, **arguments)

    monkeypatch.setattr(_session.Process, "ask", hangs)
    assert bench("tiny-float32", *QUICK, "--backends", "c") == 1
    assert "FAILED: no answer in 0 seconds" in capsys.readouterr().out


def test_several_threads_and_runs(fixed_limits, monkeypatch, capsys, tmp_path):
    path = tmp_path / "run.json"
    arguments = [*QUICK[:-1], "1,1", "--runs", "2", "--backends", "numpy", "c", "--json", path]
    assert bench("tiny-float32", *arguments) == 0
    content = json.loads(path.read_text())
    assert len(content["runs"]) == 4 and content["first"] == "numpy"
    assert "run 2 of 2" in capsys.readouterr().out


@pytest.mark.skipif(not pyflash.available_isas(), reason="needs the backend C")
def test_another_build_has_the_packages_of_this_process(monkeypatch, tmp_path):
    """They may come from PYTHONPATH, as cffi did once; pyflash itself comes from the folder."""
    monkeypatch.syspath_prepend(tmp_path / "packages")
    library = _libraries.Library.parse("--also", f"before={tmp_path}", "pyflash", "c")
    first, *others = library.environment("", 1)["PYTHONPATH"].split(os.pathsep)
    assert first == str(tmp_path)
    assert str(tmp_path / "packages") in others


def test_another_build_is_compared(fixed_limits, capsys, tmp_path):
    folder = Path(pyflash.__file__).parents[1]
    path = tmp_path / "run.json"
    arguments = ["--backends", "c", "--also", f"before={folder}", "--json", path, "--isa", "scalar"]
    assert bench("tiny-float32", *QUICK, *arguments) == 0
    content = json.loads(path.read_text())
    row = content["runs"][0]["rows"]["tiny-float32"]["before"]
    assert row["ratio"] > 0 and row["notes"]["isa"] == "scalar"
    assert content["libraries"]["before"]["version"] == pyflash.__version__
