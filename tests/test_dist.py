"""What a release uploads, installed as users install it and tested from another folder.

`make test-dist` builds it and runs these tests; without PYFLASH_TEST_DIST=folder they are skipped.
PYFLASH_TEST_PYTHONS may name other interpreters, which install the same wheel (`make test-pythons`).
"""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

if not os.environ.get("PYFLASH_TEST_DIST"):
    pytest.skip("tests of a built sdist and wheel: `make test-dist`", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[1]
DIST = Path(os.environ["PYFLASH_TEST_DIST"]).resolve()
WHEEL, SDIST = (next(DIST.glob(pattern), DIST / "missing") for pattern in ("*.whl", "*.tar.gz"))
if not (WHEEL.exists() and SDIST.exists()):
    raise pytest.UsageError(f"{DIST} holds no wheel and sdist: `make test-dist` builds and tests them")
PYTHONS = os.environ.get("PYFLASH_TEST_PYTHONS", sys.executable).split()
MAX_WHEEL_BYTES = 5_000_000

#: What a user runs first; prints what the test looks at.
SMOKE = """
import json
import numpy as np
import pyflash
from pyflash._pyflash_c import lib

rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 100, heads, 64), dtype=np.float32) for heads in (8, 2, 2))
out = pyflash.flash_attention(q, k, v, causal=True)
exact = pyflash.naive_attention(*(x.astype(np.float64) for x in (q, k, v)), causal=True)
cache = pyflash.PagedKVCache(16, 16, num_kv_heads=2, head_dim=64)
seq = cache.add_sequence()
cache.append(seq, k[0], v[0])
pages = cache.k_cache[0], cache.v_cache[0], cache.block_table(seq), cache.seq_lens(seq)
last = pyflash.paged_attention(q[:1, -1], *pages)
try:
    pyflash.flash_attention(q, k, v, backend="cuda")
except pyflash.BackendUnavailable as error:
    refusal = str(error)
from pyflash.gpu import _compile
assert "pf_generic" in _compile.text_of("generic.cu"), "the CUDA sources are not in the wheel"
print(json.dumps(dict(
    file=pyflash.__file__,
    version=pyflash.__version__,
    error=float(max(abs(out - exact).max(), abs(last - exact[0, -1]).max())),
    backends=pyflash.available_backends(),
    isas=pyflash.available_isas(),
    openmp=lib.pf_openmp_version(),
    refusal=refusal,
)))
"""

USER = '''
"""A program of a user who checks types."""
import numpy as np
from numpy.typing import NDArray

import pyflash


def serve(q: NDArray[np.float32], k: NDArray[np.float32]) -> float:
    out = pyflash.flash_attention(q, k, k, causal=True, window=(3, 0), spans=pyflash.spans.chunked(4, 4, 2))
    assert out.shape == q.shape
    out, lse = pyflash.flash_attention(q, k, k, causal="top_left", return_lse=True)
    both, lse = pyflash.merge_states(np.stack([out, out]), np.stack([lse, lse]))
    plan: str = pyflash.explain(q, k, k).family
    cache = pyflash.PagedKVCache(8, 4, num_kv_heads=2, head_dim=16)
    table = cache.block_table([cache.add_sequence()])
    error: float = pyflash.trace(q[0, :, 0], k[0, :, 0], k[0, :, 0], tile=4).error
    reason: str | None = pyflash.available_backends()["cuda"]
    print(plan, table.shape, reason, both.shape, lse.shape)
    return error


x = np.zeros((1, 4, 8, 16), np.float32)
serve(x, x[:, :, :2])
'''


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a program without what this process was told about where pyflash is; return what it printed."""
    hidden = ("PYTHONPATH", "PYFLASH_BACKEND", "PYFLASH_ISA")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | variables
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (
        f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    )
    return done.stdout


def environment_of(python: str, folder: Path, *packages: str | Path) -> Path:
    """Return the interpreter of a new environment with these packages."""
    run(python, "-m", "venv", folder, cwd=folder.parent)
    interpreter = folder / "bin" / "python"
    pip = (interpreter, "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    run(*pip, *packages, cwd=folder.parent)
    return interpreter


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The interpreter of an environment that holds the wheel, and what tests of it need."""
    folder = tmp_path_factory.mktemp("wheel")
    tools = ("pytest", "pytest-xdist", "hypothesis", "ml_dtypes", "setuptools", "mypy", "basedpyright")
    return environment_of(sys.executable, folder / "venv", WHEEL, *tools)


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The sdist, unpacked where there is no git."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(SDIST) as file:
        file.extractall(folder)
    return folder / SDIST.name.removesuffix(".tar.gz")


def smoke(python: Path, folder: Path) -> dict:
    said = json.loads(run(python, "-c", SMOKE, cwd=folder))
    assert said["error"] < 2e-6
    assert said["backends"]["numpy"] is None and said["backends"]["c"] is None
    assert "scalar" in said["isas"]
    assert not said["file"].startswith(str(ROOT))
    assert said["version"] in WHEEL.name
    return said


@pytest.mark.parametrize("python", PYTHONS)
def test_the_wheel_without_gpu_parts(python, tmp_path):
    """One wheel for every Python; without CuPy all but CUDA works, and CUDA says what is missing."""
    said = smoke(environment_of(python, tmp_path / "venv", WHEEL), tmp_path)
    assert said["openmp"] > 0
    for text in (said["backends"]["cuda"], said["refusal"]):
        assert "cupy" in text.lower() and "pip install" in text, text
    information = run(tmp_path / "venv" / "bin" / "pyflash", "info", cwd=tmp_path)
    assert information.split()[:2] == ["pyflash", said["version"]] and "OpenMP" in information


def test_tag_and_size():
    name = WHEEL.name.removesuffix(".whl").split("-")
    assert name[2:4] == ["cp310", "abi3"]
    assert name[4].startswith("manylinux_2_"), "not repaired"
    assert WHEEL.stat().st_size < MAX_WHEEL_BYTES


def test_the_wheel_holds_what_it_should():
    with zipfile.ZipFile(WHEEL) as file:
        names = file.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        headers = email.message_from_bytes(file.read(metadata))
    tops = {name.split("/")[0] for name in names}
    assert tops == {"pyflash", "pyflash_attention.libs", metadata.split("/")[0]}
    expected = {
        "py.typed",
        "_pyflash_c.pyi",
        "_pyflash_c.abi3.so",
        "gpu/kernels/generic.cu",
        "gpu/shared/span.h",
    }
    assert {f"pyflash/{name}" for name in expected} <= set(names)
    (library,) = (name for name in names if name.startswith("pyflash_attention.libs/") and name[-1] != "/")
    assert "/libgomp-" in library
    assert headers.get_all("License-File") == ["LICENSE", "LICENSE.libgomp"]
    assert headers["License-Expression"] == "Apache-2.0 AND GPL-3.0-or-later WITH GCC-exception-3.1"
    for text in headers.get_all("License-File"):
        assert metadata.replace("METADATA", f"licenses/{text}") in names


def test_the_wheel_holds_every_file_of_the_package(unpacked):
    """Data beside the modules too: nothing is left out for want of an entry in pyproject.toml."""
    with zipfile.ZipFile(WHEEL) as file:
        names = set(file.namelist())
    for installed_as, folder in (
        ("pyflash", "pyflash"),
        ("pyflash/gpu", "gpu"),
        ("pyflash/gpu/shared", "c_src/shared"),
    ):
        files = [
            path.relative_to(unpacked / folder) for path in (unpacked / folder).rglob("*") if path.is_file()
        ]
        missing = [path for path in files if f"{installed_as}/{path.as_posix()}" not in names]
        assert files and missing == []


def test_the_sdist_is_complete(unpacked):
    """Every file under version control is in it, so that whoever has the sdist can test and change it."""
    if not (ROOT / ".git").exists():
        pytest.skip("no git: this is an sdist")
    listed = run("git", "ls-files", cwd=ROOT).split("\n")
    missing = [name for name in listed if name and not (unpacked / name).exists()]
    assert missing == [".gitignore"]


def test_types_of_the_installed_wheel(installed, tmp_path):
    """mypy --strict has nothing to say against a user's program, and something about each wrong call."""
    mypy = (installed, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache")
    program = tmp_path / "program.py"
    program.write_text(USER, encoding="utf-8")
    run(installed, program, cwd=tmp_path)
    run(*mypy, program, cwd=tmp_path)
    wrong = ["widow=(3, 0)", "window=3", 'layout="sbhd"', "mask=[True]"]
    calls = [f"pyflash.flash_attention(x, x, x, {argument})" for argument in wrong]
    program.write_text("\n".join([USER, *calls]), encoding="utf-8")
    done = subprocess.run([*mypy, program], cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = {int(line) for line in re.findall(r"program\.py:(\d+): error:", done.stdout)}
    assert lines == {USER.count("\n") + 2 + number for number in range(len(calls))}, done.stdout


def test_every_public_type_is_complete(installed, tmp_path):
    # It asks the first Python on PATH where packages are; --pythonpath does not count here.
    environment = {**os.environ, "PATH": f"{installed.parent}{os.pathsep}{os.environ['PATH']}"}
    command = ("basedpyright", "--verifytypes", "pyflash", "--ignoreexternal", "--outputjson")
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)["typeCompleteness"]
    incomplete = [
        (symbol["name"], [d["message"] for d in symbol["diagnostics"]])
        for symbol in said["symbols"]
        if not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]
        # Modules of commands, which nobody imports.
        if not symbol["name"].startswith(("pyflash.bench.", "pyflash.simulate."))
    ]
    assert incomplete == []
    assert said["exportedSymbolCounts"]["withKnownType"] > 30


#: Files of tests that need nothing but the wheel: what C computes, threads and forks, memory, the build.
SUITE = ("concurrency", "memory", "cache", "packaging")


def test_the_suite_of_the_sdist_on_the_wheel(installed, unpacked, tmp_path):
    """From another folder; bundled libgomp or not, helpers are not waited for and children of forks work."""
    files = [unpacked / "tests" / f"test_{name}.py" for name in SUITE]
    options = (
        f"--rootdir={unpacked}",
        "-c",
        unpacked / "pyproject.toml",
        "-p",
        "no:cacheprovider",
        "-q",
        "-n2",
    )
    # The program and not `python -m`, which would put the current folder first.
    summary = run(installed.parent / "pytest", *options, *files, cwd=tmp_path).strip().splitlines()[-1]
    assert re.search(r"[0-9]{3} passed", summary) and "failed" not in summary
    print(summary)
