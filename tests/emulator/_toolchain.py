"""g++: sources to shared libraries, each compiled once and kept in build/emulator."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

from pyflash.gpu import _compile

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / "build" / "emulator"
HEADERS = ("cuda_on_host.h", "ptx_on_host.h", "hopper_on_host.h")
FLAGS = (
    "-O1",
    "-g1",
    "-gdwarf-4",  # what addr2line of older binutils reads without mistakes
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",  # a fused multiply-add is one where the source says so
    "-fno-strict-aliasing",  # sources read words of 16-bit pairs
    "-fno-exceptions",
    "-fno-rtti",
    "-fvisibility=hidden",
    "-fstack-clash-protection",  # no step over the page below a stack
    # What a GPU refuses at run time: an address that is no multiple of the size.
    "-fsanitize=alignment",
    "-fsanitize-undefined-trap-on-error",
)


class CompileError(_compile.CompileError):
    """The source does not compile; the message holds what the compiler said."""


def unavailable() -> str | None:
    """Why nothing can be compiled here."""
    if platform.system() != "Linux":
        return f"the emulator of CUDA needs Linux, this is {platform.system()}"
    if shutil.which(compiler()) is None:
        return f"the emulator of CUDA needs a C++ compiler, {compiler()} is not installed"
    return None


def compiler() -> str:
    return os.environ.get("CXX", "g++")


@functools.cache
def _flags() -> tuple[str, ...]:
    """FLAGS and those that depend on processor and compiler."""
    flags = list(FLAGS)
    processor = Path("/proc/cpuinfo").read_text().split() if platform.machine() == "x86_64" else []
    if {"avx2", "fma"} <= set(processor):
        flags += ["-mavx2", "-mfma"]  # one instruction for fmaf instead of a call
    version = subprocess.run([compiler(), "-dumpversion"], capture_output=True, check=True, text=True).stdout
    if int(version.partition(".")[0]) >= 12:
        flags.append("-ftrivial-auto-var-init=pattern")  # a register that was not set is no accidental 0
    return tuple(flags)


@functools.cache
def _fingerprint() -> bytes:
    """What every library depends on besides its source."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, check=True).stdout
    return b"\0".join([version, *((HERE / name).read_bytes() for name in HEADERS)])


def library(source: str, options: tuple[str, ...] = ()) -> Path:
    """Compile a source to a shared library, or find it where that has been done."""
    flags = (*_flags(), *options)
    key = hashlib.sha256(b"\0".join([_fingerprint(), source.encode(), *(f.encode() for f in flags)]))
    path = CACHE / f"{key.hexdigest()[:32]}.so"
    if path.exists():
        return path
    CACHE.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it
        if not path.exists():
            _compile(source, flags, path)
    return path


def line_of(path: Path, offset: int) -> str:
    """Where in its source an instruction of a library stands; empty where that cannot be found out."""
    if shutil.which("addr2line") is None:
        return ""
    command = ["addr2line", "-e", str(path), "-f", "-i", "-p", "-C", hex(offset)]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def _compile(source: str, flags: tuple[str, ...], path: Path) -> None:
    text = path.with_suffix(".cpp")
    text.write_text(source, encoding="utf-8")
    unfinished = path.with_suffix(".new")
    command = [compiler(), *flags, f"-I{HERE}", "-x", "c++", str(text), "-o", str(unfinished)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise CompileError(f"{' '.join(command)}:\n{result.stderr}")
    unfinished.replace(path)
