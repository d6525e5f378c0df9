"""`pyflash demo`: it says ok when everything holds, and 1 to the shell when anything does not."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys

import numpy as np
import pytest

import pyflash

pytest.importorskip("rich")

from rich.console import Console

from pyflash import _demo, _demo_memory

_MEASUREMENTS = _demo_memory.MEASUREMENTS


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The demo in small, on NumPy alone, without measurements."""
    monkeypatch.setattr(_demo, "BACKENDS", ("numpy",))
    monkeypatch.setattr(_demo, "LENGTHS", (1, 4, 9))
    monkeypatch.setattr(_demo_memory, "MEASUREMENTS", [])


@pytest.fixture
def short(monkeypatch):
    """Measurements after all, of fewer keys."""
    monkeypatch.setattr(_demo_memory, "MEASUREMENTS", _MEASUREMENTS)
    monkeypatch.setattr(_demo_memory, "LENGTHS", (64, 256, 1024))
    monkeypatch.setattr(_demo_memory, "NUMPY_TILE", {1: 64, _demo_memory.WORKERS: 16})


def run() -> tuple[int, str]:
    stream = io.StringIO()
    status = _demo.run(Console(file=stream, width=200))
    text = stream.getvalue()
    assert "Traceback" not in text
    assert ("FAILED" in text) == (status == 1)
    return status, text


@pytest.mark.usefixtures("short")
def test_everything_holds():
    status, text = run()
    assert status == 0
    for name in (*_demo.METHODS, "naive, NumPy", "guarded", "unguarded", "quadratic", "everything held"):
        assert name in text


@pytest.mark.usefixtures("short")
def test_both_backends(monkeypatch):
    reason = pyflash.available_backends()["c"]
    if reason is not None:
        pytest.skip(f"c: {reason}")
    monkeypatch.setattr(_demo, "BACKENDS", ("numpy", "c"))
    monkeypatch.setattr(_demo_memory, "LENGTHS", (512, 2048))  # what C holds is bounded, from some length on
    monkeypatch.setattr(_demo_memory, "MEASUREMENTS", [m for m in _MEASUREMENTS if m.backend == "c"])
    status, text = run()
    assert status == 0, text
    assert "tiled, C, counted" in text and "flash-decoding, C, resident" in text


@pytest.mark.parametrize("function", ["flash_attention", "paged_attention", "flash_decoding"])
@pytest.mark.parametrize("wrong", [1e-12, np.nan])
def test_one_wrong_number_is_found(monkeypatch, function, wrong):
    right = getattr(pyflash, function)

    def slightly_wrong(*args, **options):
        out = right(*args, **options)
        if out.ndim == 4 and out.shape[1] > 7:  # not in the smaller inputs
            out[(0,) * out.ndim] += wrong
        return out

    monkeypatch.setattr(pyflash, function, slightly_wrong)
    status, _ = run()
    assert status == 1


def test_an_error_is_one_line(monkeypatch):
    def broken(*args, **options):
        raise pyflash.UnsupportedError("tile: 3 is [not] supported")

    monkeypatch.setattr(pyflash, "paged_attention", broken)
    status, text = run()
    assert status == 1
    assert "numpy, paged: UnsupportedError: tile: 3 is [not] supported" in text


@pytest.mark.parametrize("function", ["flash_attention", "naive_attention", "trace"])
def test_no_error_escapes(monkeypatch, function):
    def broken(*args, **options):
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(pyflash, function, broken)
    status, text = run()
    assert status == 1
    assert "RuntimeError: unforeseen" in text


def test_a_missing_backend_is_named(monkeypatch):
    monkeypatch.setattr(_demo, "BACKENDS", ("numpy", "c"))
    monkeypatch.setattr(pyflash, "available_backends", lambda: {"numpy": None, "c": "no [compiled] part"})
    status, text = run()
    assert status == 1
    assert "backend 'c' is not available: no [compiled] part" in text


@pytest.mark.parametrize(
    ("name", "peaks", "expected"),
    [
        ("naive, NumPy", [10, 160, 2560], True),
        ("naive, NumPy", [10, 40, 160], False),
        ("tiled, NumPy", [1000, 1010, 1005], True),
        ("tiled, NumPy", [1000, 4000, 16000], False),
        ("tiled, C, counted", [1000, 1000, 1000], True),
        ("tiled, C, resident", [0, 2**18, 2**19], True),
        ("tiled, C, resident", [2**20, 2**21, 2**23], False),
    ],
)
def test_claims_about_memory(name, peaks, expected):
    (row,) = [row for row in _MEASUREMENTS if row.name == name]
    assert row.as_claimed(peaks) is expected


def test_a_failing_child_is_one_sentence():
    with pytest.raises(pyflash.PyflashError, match=r"the measuring process failed: .*no such method"):
        _demo_memory.resident("no such method", 64)


_ALLOCATES = """
import sys
import numpy as np
from pyflash import _demo_memory

size = int(sys.argv[1])
_demo_memory._CALLS["tiled"] = lambda q, out, backend: np.ones(size, np.uint8)
_demo_memory.counted = lambda method, n: 0
print(_demo_memory._resident_growth("tiled", 64))
"""


def test_resident_growth_sees_what_is_allocated():
    """In a process of its own, as the demonstration does it: this one has been larger before."""
    size = 64 * 2**20
    command = [sys.executable, "-c", _ALLOCATES, str(size)]
    grown = int(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert 0.95 * size <= grown < 1.2 * size


def test_without_rich_it_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "pyflash._demo")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(pyflash.PyflashError, match=r"pip install 'pyflash-attention\[demo\]'"):
        importlib.import_module("pyflash._demo")
