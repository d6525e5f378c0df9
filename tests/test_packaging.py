"""The build: what setup.py reads and refuses, what the extension holds, what the metadata say."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import pytest

import pyflash
from pyflash import _c

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTION = "pyflash-attention"
EXTRAS = {
    "cuda12",
    "cuda13",
    "torch",
    "mpi",
    "demo",
    "generate",
    "examples",
    "docs",
    "bench",
    "browser",
    "test",
    "release",
    "dev",
}


@pytest.fixture(scope="module")
def metadata():
    try:
        return importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{DISTRIBUTION} is not installed, only importable")


@pytest.fixture(scope="module")
def setup_py():
    for needed in ("setuptools", "cffi"):
        pytest.importorskip(needed, reason=f"{needed} is needed to load setup.py")
    spec = importlib.util.spec_from_file_location("pyflash_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_version(metadata):
    assert metadata.version == pyflash.__version__


def test_version_is_in_the_changelog():
    assert f"## [{pyflash.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_extras(metadata):
    assert set(metadata.metadata.get_all("Provides-Extra")) == EXTRAS


def test_command(metadata):
    (command,) = metadata.entry_points.select(group="console_scripts")
    assert (command.name, command.value) == ("pyflash", "pyflash.__main__:main")


def test_gpu_is_a_part_of_the_package():
    assert importlib.util.find_spec("pyflash.gpu") is not None


def test_isas_are_those_of_the_table(setup_py):
    machine = {"arm64": "aarch64", "AMD64": "x86_64"}.get(platform.machine(), platform.machine())
    rows = setup_py.read_isas(ROOT / "c_src" / "isa.def")
    assert list(_c.compiled_isas()) == [isa.name for isa in rows if isa.architecture in ("any", machine)]


def test_available_isas_were_compiled():
    assert set(pyflash.available_isas()) <= set(_c.compiled_isas())


def test_no_isa_loosens_arithmetic(setup_py):
    for isa in setup_py.read_isas(ROOT / "c_src" / "isa.def"):
        for flag in [*setup_py.COMMON_FLAGS, *isa.flags]:
            assert not flag.startswith(("-Ofast", "-ffast", "-funsafe", "-ffinite", "-fopenmp", "-flto")), isa


def test_broken_isa_row(setup_py, tmp_path):
    table = tmp_path / "isa.def"
    table.write_text('PF_ISA(scalar, any, "")\nPF_ISA(avx2, "-mavx2")\n')
    with pytest.raises(SystemExit, match=r"a row is not of the form PF_ISA\("):
        setup_py.read_isas(table)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["cc", "-march=native", "-O2"], ["cc", "-O2"]),
        (["cc", "-mavx512f", "-mtune=native", "-m64"], ["cc", "-m64"]),
        (["cc", "-flto=auto", "-flto", "-g"], ["cc", "-g"]),
        (["cc", "-Ofast", "-ffast-math", "-fno-math-errno"], ["cc", "-fno-math-errno"]),
        (["cc", "-Xpreprocessor", "-fopenmp", "-I/x"], ["cc", "-I/x"]),
        (["cc", "-fsanitize=address", "-mbranch-protection=standard"],) * 2,
    ],
)
def test_flags_of_the_environment(setup_py, given, kept):
    assert setup_py.overrule(given) == kept


@pytest.mark.parametrize(
    ("variable", "limited"),
    [(None, True), (0, True), (1, False)],
    ids=["a Python that has no such variable", "a Python with the lock", "a free-threaded one"],
)
def test_free_threaded_python_gets_no_limited_api(setup_py, variable, limited):
    assert setup_py.limited_api(variable) is limited


def test_this_extension_has_the_api_that_is_meant(setup_py):
    path = importlib.util.find_spec("pyflash._pyflash_c").origin
    shared = setup_py.limited_api(sysconfig.get_config_var("Py_GIL_DISABLED"))
    assert (".abi3." in path) == (shared and os.name == "posix")


def test_gcc_and_clang_get_flags_as_they_are(setup_py):
    flags = ["-std=c11", "-fPIC", "-mavx2", "-pthread"]
    assert setup_py.spelled(flags, "unix") == flags


def test_clang_cl_gets_what_it_takes(setup_py):
    """Every flag of the build, so that a new one is thought about; -fPIC is an error there."""
    isas = setup_py.read_isas(ROOT / "c_src" / "isa.def")
    flags = [*setup_py.COMMON_FLAGS, *setup_py.BASELINE_FLAGS["x86_64"], "-pthread"]
    flags += [flag for isa in isas for flag in isa.flags]
    said = setup_py.spelled(flags, "msvc")
    for flag in (
        "-std=c11",
        "-ffp-contract=off",
        "-march=x86-64",
        "-mavx2",
        "-mfma",
        "-mavx512f",
        "-mamx-bf16",
    ):
        assert f"/clang:{flag}" in said
    assert all(flag.startswith("/clang:-") for flag in said)
    assert {flag.removeprefix("/clang:") for flag in said} == set(flags) - setup_py.NOT_ON_WINDOWS
    assert not any("-fPIC" in flag for flag in said)


@pytest.mark.parametrize(
    ("platform", "flags"),
    [
        ("linux", ["-pthread", "-Wl,-z,nodelete", "-lm"]),
        ("darwin", ["-pthread", "-lm"]),
        ("win32", []),
    ],
)
def test_link_flags(setup_py, platform, flags):
    assert setup_py.link_flags(platform) == flags


STUDIO = "C:\\VS\\VC\\"


@pytest.mark.parametrize(
    ("environment", "installed", "found"),
    [
        ({}, {"clang-cl"}, "clang-cl"),
        ({"CC": "D:\\llvm\\clang-cl.exe"}, {"clang-cl", "D:\\llvm\\clang-cl.exe"}, "D:\\llvm\\clang-cl.exe"),
        ({"VCINSTALLDIR": STUDIO}, {STUDIO + "Tools\\Llvm\\x64\\bin\\clang-cl.exe"},
         STUDIO + "Tools\\Llvm\\x64\\bin\\clang-cl.exe"),
        ({"VCINSTALLDIR": STUDIO}, {"clang-cl"}, "clang-cl"),
    ],
)  # fmt: skip
def test_clang_cl_is_found(setup_py, environment, installed, found):
    which = {name: name for name in installed}.get
    assert setup_py.clang_cl(environment, which) == found


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({}, "Microsoft's compiler cannot be used"),
        ({"VCINSTALLDIR": STUDIO}, "Microsoft's compiler cannot be used"),
        ({"CC": "cl.exe"}, "CC=cl.exe is not clang-cl"),
        ({"CC": "clang-cl"}, "CC=clang-cl does not exist"),
    ],
)
def test_other_compilers_of_windows_are_refused_in_words(setup_py, environment, reason):
    with pytest.raises(SystemExit, match=re.escape(f"pyflash: {reason}")) as refusal:
        setup_py.clang_cl(environment, lambda name: None)
    assert "install LLVM" in str(refusal.value)


def compiler_of(kind: str, **attributes) -> SimpleNamespace:
    return SimpleNamespace(compiler_type=kind, **attributes)


def test_clang_cl_takes_the_place_of_microsofts_compiler(setup_py, monkeypatch):
    monkeypatch.setattr(setup_py, "clang_cl", lambda environment: "clang-cl.exe")
    monkeypatch.setattr(sysconfig, "get_platform", lambda: "win-amd64")
    compiler = compiler_of("msvc", initialized=True, cc="cl.exe", compile_options=["/nologo", "/GL", "/MD"])
    assert setup_py.prepare(compiler) == "x86_64"
    assert setup_py.commands_of(compiler) == ["clang-cl.exe", "/nologo", "/MD"]
    assert setup_py.openmp_flags(compiler) == ([], [])


def test_gcc_on_windows_is_refused(setup_py):
    with pytest.raises(SystemExit, match="compiler mingw32 cannot be used"):
        setup_py.prepare(compiler_of("mingw32"))


def test_openmp_is_off_where_it_is_not_wanted_or_not_there(setup_py, monkeypatch):
    """Clang without libomp, as macOS has it: both spellings fail, the build is serial."""
    from setuptools.errors import CompileError

    tried = []

    def fails(*_, extra_postargs, **__):
        tried.append(extra_postargs)
        raise CompileError("omp.h not found")

    monkeypatch.delenv("PYFLASH_NO_OPENMP", raising=False)
    assert setup_py.openmp_flags(compiler_of("unix", compile=fails)) == ([], [])
    assert tried == [["-fopenmp"], ["-Xpreprocessor", "-fopenmp"]]
    monkeypatch.setenv("PYFLASH_NO_OPENMP", "1")
    assert setup_py.openmp_flags(compiler_of("unix", compile=fails)) == ([], [])
    assert len(tried) == 2


def test_extension_exports_only_its_init_function():
    """What is visible could be bound to a symbol of another library in the process."""
    if platform.system() != "Linux" or shutil.which("nm") is None:
        pytest.skip("needs nm, and the dynamic symbols of ELF")
    path = importlib.util.find_spec("pyflash._pyflash_c").origin
    listing = subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in listing.stdout.splitlines()}
    assert {name for name in names if not name.startswith("PyInit_")} <= {"_init", "_fini"}


def test_both_tables_of_element_types_agree():
    """C has the element types in dtypes.def, Python in _dtypes: code, size and name of each."""
    from pyflash._dtypes import DTYPES

    text = (ROOT / "c_src" / "shared" / "dtypes.def").read_text(encoding="utf-8")
    rows = re.findall(r'^PF_DTYPE\(\w+, (\d+), (\d+), "(\w+)"\)', text, re.MULTILINE)
    assert rows == [(str(d.code), str(d.itemsize), d.name) for d in DTYPES]


def test_the_status_that_python_knows_is_that_of_c():
    from pyflash import _c

    text = (ROOT / "c_src" / "abi" / "status.def").read_text(encoding="utf-8")
    assert f"PF_STATUS(WORKSPACE_TOO_SMALL, {_c._WORKSPACE_TOO_SMALL}," in text
