"""Builds the C backend: one static library per instruction set, one cffi extension linked with them.

Everything that is not about compiling stands in ``pyproject.toml``. The flags of an instruction
set stand in ``c_src/isa.def`` and nowhere else; this file reads them there. All flags are written as
GCC and Clang take them; `spelled` says them to clang-cl.

Linux on x86-64 and aarch64 is tested. macOS and Windows are written for and untested.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from cffi import FFI
from setuptools import Extension, find_packages, setup
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

C_SRC = Path("c_src")
ISA_TABLE = C_SRC / "isa.def"
EXTENSION = "pyflash._pyflash_c"
ABI_HEADER = C_SRC / "abi" / "pyflash_abi.h"

#: Masks and empty rows need infinities and NaN, and bits must not depend on what a compiler
#: contracts into a fused multiply-add on its own: hence no -ffast-math, hence -ffp-contract=off.
COMMON_FLAGS = [
    "-std=c11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off",
    "-fvisibility=hidden", "-fPIC", "-fno-lto", "-Wall", "-Wextra",
]  # fmt: skip

if "-g" not in os.environ.get("CFLAGS", "").split():
    # Python's own -g makes the extension ten times larger and a quarter slower to build.
    COMMON_FLAGS.append("-g0")

#: The oldest processor of each architecture: what code outside the ISA libraries may use, and what
#: an ISA's own flags are added to. Also overrules a compiler that was configured for something newer.
BASELINE_FLAGS = {"x86_64": ["-march=x86-64"], "aarch64": ["-march=armv8-a"]}

#: Flags that a user's CC, CFLAGS or LDFLAGS may carry and that would break the build's promises:
#: an instruction set for every file at once (SIGILL on older processors), link-time optimisation
#: (inlines across files with different instruction sets), loose arithmetic (at link time it even
#: makes the library flush denormals of the whole process), and OpenMP, which is decided below.
OVERRULED = re.compile(
    r"-m(arch|cpu|tune)=.*"
    r"|-m(mmx|sse|ssse|avx|amx|fma|f16c|bmi|lzcnt|movbe|popcnt|abm|adx|aes|pclmul|vaes|vpclmul|gfni|sha).*"
    r"|-Ofast|-f(fast-math|finite-math-only|unsafe-math-optimizations|associative-math|reciprocal-math|no-signed-zeros)"
    r"|-flto.*|-fopenmp.*"
)

#: How OpenMP is switched on, (compile, link): GCC and Clang, then Apple's Clang with a libomp beside it.
OPENMP_SPELLINGS = [(["-fopenmp"], ["-fopenmp"]), (["-Xpreprocessor", "-fopenmp"], ["-lomp"])]
OPENMP_PROBE = "#include <omp.h>\nint pyflash_probe(void) { return omp_get_max_threads(); }\n"

#: What clang-cl refuses or what means nothing there.
NOT_ON_WINDOWS = {"-fPIC", "-fvisibility=hidden", "-fno-lto", "-g0", "-pthread", "-lm"}

CLANG_CL_NEEDED = (
    "pyflash: {}: the C sources use vector types, built-in functions and inline assembly of GCC and Clang. "
    "On Windows they need clang-cl: install LLVM, or 'C++ Clang Compiler for Windows' with Visual Studio's "
    "installer, and put clang-cl on PATH or name it in CC"
)


class Isa(NamedTuple):
    """One row of ``c_src/isa.def``."""

    name: str
    architecture: str  # "any", or the only one it exists on
    flags: list[str]


def read_isas(path: Path) -> list[Isa]:
    """Return the rows of ``isa.def``, which C reads as an X-macro."""
    text = path.read_text(encoding="utf-8")
    rows = re.findall(r'^PF_ISA\((\w+),\s*(\w+),\s*"([^"]*)"\)', text, re.MULTILINE)
    if len(rows) != len(re.findall(r"^PF_ISA\(", text, re.MULTILINE)):
        raise SystemExit(f'{path}: a row is not of the form PF_ISA(name, architecture, "flags")')
    return [Isa(name, architecture, flags.split()) for name, architecture, flags in rows]


def sources(*folders: str) -> list[str]:
    """Return the C files of these folders of ``c_src`` in a fixed order."""
    return [path.as_posix() for folder in folders for path in sorted((C_SRC / folder).glob("*.c"))]


def dependencies(*folders: str, suffixes: tuple[str, ...]) -> list[str]:
    """Return the files whose change makes stale what is compiled from these folders of ``c_src``."""
    found = [
        path for folder in folders for path in sorted((C_SRC / folder).rglob("*")) if path.suffix in suffixes
    ]
    return ["setup.py", ISA_TABLE.as_posix(), *(path.as_posix() for path in found)]


def overrule(command: list[str]) -> list[str]:
    """Return a compiler command without the flags that are not the user's to choose."""
    kept: list[str] = []
    for argument in command:
        if not OVERRULED.fullmatch(argument):
            kept.append(argument)
            continue
        report(f"{argument} of CC, CFLAGS or LDFLAGS is not used: setup.py and {ISA_TABLE} decide")
        if kept[-1] in {"-Xpreprocessor", "-Xclang"}:
            kept.pop()
    return kept


@functools.cache  # once for both commands and all their tools
def report(line: str) -> None:
    """Put a line into the build log."""
    print(f"pyflash: {line}")


def limited_api(gil_disabled: object) -> bool:
    """Return whether the extension uses the limited API, so that one wheel serves many versions of Python.

    Free-threaded Python (``Py_GIL_DISABLED`` among its configuration variables) has none: it gets a wheel of
    its own. Other builds of Python say 0, or have no such variable.
    """
    return not gil_disabled


def spelled(flags: list[str], compiler_type: str) -> list[str]:
    """Return flags as the driver of a setuptools compiler type takes them: "unix", or "msvc" for clang-cl."""
    if compiler_type != "msvc":
        return list(flags)
    return [f"/clang:{flag}" for flag in flags if flag not in NOT_ON_WINDOWS]


def link_flags(platform: str) -> list[str]:
    """Return how the extension is linked on ``sys.platform``, OpenMP aside."""
    if platform == "win32":
        return []
    # Helper threads sleep in this library: it must not be unloaded under them.
    stay = ["-Wl,-z,nodelete"] if platform == "linux" else []
    return ["-pthread", *stay, "-lm"]


def clang_cl(environment: Mapping[str, str], which=shutil.which) -> str:
    """Find clang-cl: the program that CC names, on PATH, or in the Visual Studio of this command prompt."""
    named = environment.get("CC")
    if named:
        if "clang-cl" not in Path(named.replace("\\", "/")).name.lower():
            raise SystemExit(CLANG_CL_NEEDED.format(f"CC={named} is not clang-cl"))
        candidates = [named]
    else:
        candidates = ["clang-cl"]
        if "VCINSTALLDIR" in environment:
            folder = environment["VCINSTALLDIR"].rstrip("\\/")
            candidates.append(f"{folder}\\Tools\\Llvm\\x64\\bin\\clang-cl.exe")
    found = next(filter(None, map(which, candidates)), None)
    if found is None:
        missing = f"CC={named} does not exist" if named else "Microsoft's compiler cannot be used"
        raise SystemExit(CLANG_CL_NEEDED.format(missing))
    return found


def prepare(compiler) -> str:
    """Make a compiler obey the rules above and return the architecture it compiles for."""
    if compiler.compiler_type == "msvc":
        if not compiler.initialized:
            compiler.initialize()
        compiler.cc = clang_cl(os.environ)
        # /GL is Microsoft's link-time optimisation.
        compiler.compile_options = [option for option in compiler.compile_options if option != "/GL"]
        return {"win-amd64": "x86_64", "win-arm64": "aarch64"}.get(sysconfig.get_platform(), "other")
    if compiler.compiler_type != "unix":
        # On 64-bit Windows GCC leaves vectors on the stack misaligned (its bug 54412): AVX code crashes.
        raise SystemExit(CLANG_CL_NEEDED.format(f"compiler {compiler.compiler_type} cannot be used"))
    for tool in ("compiler_so", "linker_so"):
        setattr(compiler, tool, overrule(getattr(compiler, tool)))
    return architecture(compiler.compiler_so)


def architecture(compiler_command: list[str]) -> str:
    """Ask a compiler what it compiles for: when crossing, that is not the machine it runs on."""
    query = [*compiler_command, "-dM", "-E", "-x", "c", os.devnull]
    try:
        macros = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        raise SystemExit(f"pyflash: no C compiler: {query[0]!r} is not installed") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"pyflash: {' '.join(query)} failed:\n{error.stderr}") from None
    return next((name for name in BASELINE_FLAGS if f"#define __{name}__ 1" in macros), "other")


def openmp_flags(compiler) -> tuple[list[str], list[str]]:
    """Return what switches OpenMP on, (compile, link), after trying it; nothing for a serial build."""
    if os.environ.get("PYFLASH_NO_OPENMP", "0") not in ("", "0"):
        report("PYFLASH_NO_OPENMP is set: serial build, every call will use one core")
        return [], []
    if compiler.compiler_type == "msvc":
        report("Windows has no POSIX threads: serial build, every call will use one core")
        return [], []
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder, "probe.c")
        probe.write_text(OPENMP_PROBE, encoding="utf-8")
        for compile_flags, link_flags in OPENMP_SPELLINGS:
            try:
                objects = compiler.compile([str(probe)], output_dir=folder, extra_postargs=compile_flags)
                compiler.link_shared_object(objects, str(Path(folder, "probe")), extra_postargs=link_flags)
            except (CompileError, LinkError):
                continue
            return compile_flags, link_flags
    report("no OpenMP found: serial build, every call will use one core")
    return [], []


class BuildIsaLibraries(build_clib):
    """Compiles ``kernels/isa_<name>.c`` once per ISA of the target, each with the flags of its row."""

    def build_libraries(self, libraries) -> None:
        target = prepare(self.compiler)
        # build_ext links what stands in self.libraries by now.
        self.libraries = [row for row in libraries if row[1]["architecture"] in ("any", target)]
        stale_with = [
            *dependencies("kernels", "simd", "shared", suffixes=(".h", ".def")),
            record(Path(self.build_temp, "isa_settings.txt"), commands_of(self.compiler)),
        ]
        for _, info in self.libraries:
            flags = [*COMMON_FLAGS, *BASELINE_FLAGS.get(target, []), *info["isa_flags"]]
            info["cflags"] = spelled(flags, self.compiler.compiler_type)
            info["obj_deps"] = {"": stale_with}
        build_one = super().build_libraries
        # One large translation unit per library: building them side by side is what makes a build short.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda row: build_one([row]), self.libraries))


class BuildExtension(build_ext):
    """Writes the cffi glue from the ABI header, and builds the ISA libraries before anything else."""

    def run(self) -> None:
        self.run_command("build_clib")  # neither `build_ext --inplace` nor an editable install does
        glue = Path(self.build_temp, "_pyflash_c.c")
        glue.parent.mkdir(parents=True, exist_ok=True)
        write_glue(glue)
        self.extensions[0].sources.insert(0, str(glue))
        super().run()

    def build_extensions(self) -> None:
        target = prepare(self.compiler)
        openmp_compile, openmp_link = openmp_flags(self.compiler)
        extension = self.extensions[0]
        flags = [*COMMON_FLAGS, *BASELINE_FLAGS.get(target, []), *openmp_compile, "-pthread"]
        extension.extra_compile_args = spelled(flags, self.compiler.compiler_type)
        extension.extra_link_args = [*openmp_link, *link_flags(sys.platform)]
        commands = [*commands_of(self.compiler), *openmp_compile, *openmp_link]
        extension.depends = [
            *dependencies(".", suffixes=(".c", ".h", ".def")),  # the kernels too: they are linked in
            record(Path(self.build_temp, "settings.txt"), commands),
        ]
        super().build_extensions()


def commands_of(compiler) -> list[str]:
    """Return the programs and flags of a compiler, which objects depend on."""
    if compiler.compiler_type == "msvc":
        return [compiler.cc, *compiler.compile_options]
    return [*compiler.compiler_so, *compiler.linker_so]


def record(path: Path, commands: list[str]) -> str:
    """Keep the commands of a build in a file that is newer than its objects once they change."""
    text = " ".join(commands)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return str(path)


def write_glue(path: Path) -> None:
    """Write the C source of the extension module: the ABI header is its cdef, word for word."""
    header = ABI_HEADER.read_text(encoding="utf-8")
    ffi = FFI()
    ffi.cdef("\n".join(line for line in header.splitlines() if not line.startswith("#")))
    ffi.set_source(EXTENSION, f'#include "{ABI_HEADER.relative_to(C_SRC).as_posix()}"')
    ffi.emit_c_code(str(path))


def isa_library(isa: Isa) -> tuple[str, dict]:
    """Describe the static library of one ISA to build_clib."""
    source = (C_SRC / "kernels" / f"isa_{isa.name}.c").as_posix()
    return f"pyflash_{isa.name}", {
        "sources": [source],
        "include_dirs": [str(C_SRC)],
        "architecture": isa.architecture,
        "isa_flags": isa.flags,
    }


if __name__ == "__main__":
    if sys.platform == "darwin":
        # A universal Python asks for two architectures in one compiler call; an ISA belongs to one.
        os.environ.setdefault("ARCHFLAGS", f"-arch {os.uname().machine}")
    shared = limited_api(sysconfig.get_config_var("Py_GIL_DISABLED"))
    setup(
        packages=[*find_packages(include=["pyflash", "pyflash.*"]), "pyflash.gpu", "pyflash.gpu.shared"],
        libraries=[isa_library(isa) for isa in read_isas(ISA_TABLE)],
        ext_modules=[
            Extension(
                EXTENSION,
                sources=sources("abi", "driver", "dispatch"),
                include_dirs=[str(C_SRC)],
                define_macros=[] if shared else [("_CFFI_NO_LIMITED_API", None)],
                py_limited_api=shared,
            )
        ],
        cmdclass={"build_clib": BuildIsaLibraries, "build_ext": BuildExtension},
        options={"bdist_wheel": {"py_limited_api": "cp310"}} if shared else {},
    )
