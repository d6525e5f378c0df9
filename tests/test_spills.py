"""No kernel spills in its inner loops, judged by the machine code of the extension under test."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pyflash import _c, _pyflash_c

ROOT = Path(__file__).resolve().parents[1]

#: 24 sums of 8 floats for 16 registers.
TOO_MANY_SUMS = """
typedef float vec __attribute__((vector_size(32)));
void spilling(vec *out, const vec *x, const float *y, long n) {
    vec sums[NUM_SUMS] = {0};
    for (long i = 0; i < n; i++) {
        _Pragma("GCC unroll 32")
        for (int k = 0; k < NUM_SUMS; k++)
            sums[k] = x[i] * y[NUM_SUMS * i + k] + sums[k];
    }
    _Pragma("GCC unroll 32")
    for (int k = 0; k < NUM_SUMS; k++)
        out[k] = sums[k];
}
"""


@pytest.fixture(scope="module")
def spills():
    if shutil.which("objdump") is None:
        pytest.skip("objdump is not installed")
    spec = importlib.util.spec_from_file_location("pyflash_spills", ROOT / "tools" / "spills.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a NamedTuple looks up its annotations there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def kernel_loops(spills):
    extension = Path(_pyflash_c.__file__)
    if extension.read_bytes()[:4] != b"\x7fELF":
        pytest.skip(f"{extension.name} is no ELF file")
    return spills.loops_of(extension)


def test_no_kernel_spills(spills, kernel_loops):
    faults = spills.faults(kernel_loops)
    assert not faults, "\n".join(faults)


def test_every_isa_with_vectors_was_looked_at(kernel_loops):
    """Each prefill kernel of each instruction set but the portable one has loops of its products."""
    isas = set(_c.compiled_isas()) - {"scalar"}
    assert isas
    for isa in isas:
        for real in ("f32", "f64"):
            found = [
                loop
                for loop in kernel_loops
                if loop.isa == isa and loop.function.name.startswith(f"{real}_prefill_")
            ]
            # An innermost loop of 4 steps of a panel of more than one vector.
            assert max(loop.multiply_adds for loop in found) >= 48, (isa, real)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the example is for AVX2")
@pytest.mark.parametrize(("num_sums", "spilled"), [(12, False), (24, True)])
def test_spills_are_found(spills, tmp_path, num_sums, spilled):
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    source, target = tmp_path / "example.c", tmp_path / "example.o"
    source.write_text(TOO_MANY_SUMS)
    flags = ["-O3", "-mavx2", "-mfma", "-ffp-contract=fast", f"-DNUM_SUMS={num_sums}"]
    subprocess.run(["gcc", *flags, "-c", source, "-o", target], check=True)
    loops = spills.loops_of(target)
    assert max(loop.multiply_adds for loop in loops) >= num_sums
    faults = spills.faults(loops)
    assert bool(faults) == spilled
    assert all(fault.startswith("example: spilling: loop at ") for fault in faults)
