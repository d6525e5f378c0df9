"""From the files in ``kernels`` to something that a device can launch.

A kernel is a source file, the name of its function, and constants (``-D``). Local includes are put in place,
so that the text is all that NVRTC needs and all that a cache has to know. Compiled code is kept in memory per
device, up to a bound, and in a folder of the user's for other processes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import sys
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from . import _device

_HERE = Path(__file__).parent
#: Where included files lie: the kernels, and the headers that C and CUDA share.
FOLDERS = (_HERE / "kernels", _HERE)
#: The headers that C and CUDA share are installed beside the kernels; in a checkout they are C's.
_SHARED_IN_CHECKOUT = _HERE.parent / "c_src" / "shared"

#: What <stdint.h> declares, which NVRTC lacks.
INTEGERS = """\
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
"""
_INCLUDE = re.compile(r'^[ \t]*#include[ \t]*["<]([^">]+)[">].*$', re.MULTILINE)
#: Kernels that stay loaded per device; the one that was used least recently goes first.
CAPACITY = 256


class CompileError(RuntimeError):
    """A source is wrong; the message is the compiler's."""


class Source(NamedTuple):
    """What makes a kernel."""

    file: str  # in gpu/kernels
    name: str  # of its function
    defines: tuple[tuple[str, str], ...] = ()
    #: C++ expressions of the caller, by the macro that stands for them.
    expressions: tuple[tuple[str, str], ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the compiler."""
        return tuple(f"-D{name}={value}" for name, value in self.defines)


def _find(name: str) -> Path:
    for folder in FOLDERS:
        if (folder / name).is_file():
            return folder / name
    return _SHARED_IN_CHECKOUT / Path(name).name


def _inlined(path: Path, seen: set[Path]) -> str:
    seen.add(path)

    def replacement(match: re.Match[str]) -> str:
        name = match[1]
        if name == "stdint.h":
            return "/* fixed-width integers are declared above */"
        here = path.parent / name
        found = here if here.is_file() else _find(name)
        if found in seen and found.suffix != ".def":  # lists are read several times
            return ""
        return _inlined(found, seen)

    return _INCLUDE.sub(replacement, path.read_text(encoding="utf-8"))


@functools.cache
def text_of(file: str) -> str:
    """Return a file of ``kernels`` with all that it includes put in place."""
    return _inlined(_HERE / "kernels" / file, set())


def text(source: Source) -> str:
    """Return what the compiler gets: expressions of the caller as macros, then the file."""
    macros = "".join(f"#define {name} {' '.join(value.split())}\n" for name, value in source.expressions)
    return macros + text_of(source.file)


def cache_folder() -> Path | None:
    """Return where compiled kernels are kept for other processes, None for nowhere.

    ``PYFLASH_CACHE_DIR`` names it; empty means nowhere. Default: ``pyflash`` in the user's cache folder.
    """
    named = os.environ.get("PYFLASH_CACHE_DIR")
    if named is not None:
        return Path(named) if named else None
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "pyflash" if base else None


def compile_cubin(source_text: str, options: tuple[str, ...], architecture: str) -> tuple[bytes, str]:
    """Compile by NVRTC, without a device; return the machine code and what the compiler said.

    Raises
    ------
    CompileError
        The source is wrong; the message is the compiler's.
    """
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(INTEGERS + source_text, "pyflash.cu", (), ())
    # 177: a function of a header that this kernel does not use. The report of ptxas is for tests.
    flags = ["-std=c++17", f"--gpu-architecture={architecture}", "--ptxas-options=-v", "-diag-suppress=177"]
    try:
        nvrtc.compileProgram(program, (*flags, *options))
        return nvrtc.getCUBIN(program), nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise CompileError(f"a kernel of pyflash does not compile ({error}):\n{log}") from None
    finally:
        nvrtc.destroyProgram(program)


def cubin(source_text: str, name: str, options: tuple[str, ...], architecture: str) -> bytes:
    """Return the machine code of a kernel, from the cache folder if it has been compiled before."""
    from cupy.cuda import nvrtc

    folder = cache_folder()
    if folder is None:
        return compile_cubin(source_text, options, architecture)[0]
    key = repr((source_text, name, options, architecture, nvrtc.getVersion()))
    path = folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        code, _ = compile_cubin(source_text, options, architecture)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(code)
        Path(file.name).replace(path)  # other processes see all of it or nothing
    except OSError:
        pass  # a cache that cannot be written is none
    return code


class _Loaded:
    """Kernels of one device, least recently used first."""

    def __init__(self) -> None:
        self.kernels: OrderedDict[Source, _device.Kernel] = OrderedDict()
        self.lock = threading.Lock()


_loaded: dict[tuple[int, int], _Loaded] = {}


def _loaded_on(device: _device.Device) -> _Loaded:
    return _loaded.setdefault((id(_device.platform), device.index), _Loaded())


def kernel(device: _device.Device, source: Source) -> _device.Kernel:
    """Return a kernel, compiled and loaded if need be."""
    loaded = _loaded_on(device)
    with loaded.lock:
        found = loaded.kernels.get(source)
        if found is not None:
            loaded.kernels.move_to_end(source)
            return found
    found = device.compile(text(source), source.name, source.options)
    with loaded.lock:
        loaded.kernels[source] = found
        while len(loaded.kernels) > CAPACITY:
            loaded.kernels.popitem(last=False)
    return found


def warm_up(device: _device.Device, sources: Sequence[Source]) -> None:
    """Compile and load kernels side by side; NVRTC works on one of them per thread."""
    missing = [source for source in dict.fromkeys(sources) if source not in _loaded_on(device).kernels]
    if len(missing) > 1:
        with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as pool:
            list(pool.map(functools.partial(kernel, device), missing))
