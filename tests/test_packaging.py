"""The build: what setup.py reads and refuses, what the extension holds, what the metadata say."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import pyflash
from pyflash import _c

ROOT = Path(__file__).resolve().parents[1]
DISTRIBUTION = "pyflash-attention"
EXTRAS = {"cuda12", "cuda13", "torch", "demo", "generate", "docs", "bench", "browser", "test", "dev"}


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
