"""Every CUDA kernel compiles for its architectures, by NVRTC without a GPU, and as well as it has to.

The normal run compiles the variants of plain calls, and a set that covers the architectures; ``-m long``
all of them. What the compiler said is kept in build/nvrtc: a text compiles once.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from emulator import Platform
from emulator._toolchain import HEADERS, HERE

from pyflash.gpu import _choose, _compile, _device, _forward_fma, _plan

KEPT = Path(__file__).resolve().parents[1] / "build" / "nvrtc"
KERNELS = Path(_compile.__file__).parent / "kernels"

#: By compute capability; "a" where the kernels use what only this architecture has.
ARCHITECTURES = {
    75: "sm_75",
    80: "sm_80",
    86: "sm_86",
    89: "sm_89",
    90: "sm_90a",
    100: "sm_100",
    120: "sm_120",
}
#: What most variants are compiled for if they may be: the newest one that they were tuned on.
USUAL = 90
MAX_STATIC_SHARED = 48 * 1024
#: Static shared memory of kernels that take dynamic memory too: what their plans leave for it.
STATIC_BYTES = {"forward_fma.cu": _forward_fma._STATIC_BYTES, "stats.cu": 1024}
STATIC_BYTES |= dict.fromkeys(("forward_mma.cu", "forward_wgmma.cu", "decode_mma.cu"), 0)
#: ptxas makes the matrix unit of sm_90 wait after each instruction, and says so in a line like any other.
SERIALISED = re.compile(r"C75(?:10|11|12|20)\b")


class Case:
    """One variant for one architecture."""

    def __init__(self, variant: _plan.Variant, capability: int) -> None:
        self.variant, self.architecture = variant, ARCHITECTURES[capability]

    @property
    def id(self) -> str:
        source = self.variant.source
        constants = ",".join(f"{name.removeprefix('PF_')}={value}" for name, value in source.defines)
        return f"{source.name}-{self.architecture}-{constants}"


def capabilities(variant: _plan.Variant) -> list[int]:
    """The architectures of a variant; none named means all."""
    return [c for c in ARCHITECTURES if not variant.architectures or c in variant.architectures]


def cases() -> Iterator[tuple[Case, bool]]:
    """Every case, and whether it belongs to the normal run.

    That has the variants of plain calls on the usual architecture; of each kernel one for another
    architecture, a different one from kernel to kernel; and one each where code differs between them.
    """
    own_code = {(v.source.name, v.architectures) for v in _choose.variants() if v.architectures}
    differing = {name for name, _ in own_code if sum(name == other for other, _ in own_code) > 1}
    turn = itertools.cycle(c for c in ARCHITECTURES if c != USUAL)
    others: dict[str, int] = {}
    covered: set[tuple[str, int]] = set()
    for variant in _choose.variants():
        name = variant.source.name
        if name not in others:
            others[name] = next(turn)
        for capability in capabilities(variant):
            first = (name, capability) not in covered
            covered.add((name, capability))
            is_own = name in differing or capability in (USUAL, others[name])
            plain = variant.is_common and capability == USUAL
            yield Case(variant, capability), plain or (first and is_own)


def parameters() -> list[object]:
    marks = {False: [pytest.mark.long], True: []}
    return [pytest.param(case, id=case.id, marks=marks[normal]) for case, normal in cases()]


@functools.cache
def nvrtc_missing() -> str | None:
    """Why nothing can be compiled here."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # CuPy finds no GPU, and says so
            from cupy.cuda import nvrtc

            nvrtc.getVersion()
    except Exception as error:  # CuPy's loader has its own class for each version
        return f"CuPy with NVRTC is not installed: {error}"
    return None


def log_of(text: str, options: tuple[str, ...], architecture: str) -> str:
    """What the compiler says about a source; RuntimeError if it is wrong."""
    if (reason := nvrtc_missing()) is not None:
        pytest.skip(reason)
    from cupy.cuda import nvrtc

    key = repr((text, options, architecture, nvrtc.getVersion(), Path(_compile.__file__).read_text("utf-8")))
    path = KEPT / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.log"
    if path.exists():
        return path.read_text(encoding="utf-8")
    _, log = _compile.compile_cubin(text, options, architecture)
    log = log.rstrip("\0")
    KEPT.mkdir(parents=True, exist_ok=True)
    path.write_text(log, encoding="utf-8")
    return log


def faults(log: str, spill_bytes: int = 0, static_bytes: int = MAX_STATIC_SHARED) -> list[str]:
    """What is wrong with a kernel, judged by what the compiler said."""
    found = [
        line.strip() for line in log.splitlines() if SERIALISED.search(line) or "warning" in line.lower()
    ]
    functions = re.findall(r"Function properties for (\S+)\n.*?(\d+) bytes spill stores", log)
    assert functions, f"the compiler has not said what is spilled:\n{log}"
    spilled = {name: int(size) for name, size in functions if int(size)}
    if sum(spilled.values()) > spill_bytes:
        found.append(f"spills {spilled}, {spill_bytes} bytes are allowed")
    for size in map(int, re.findall(r"(\d+) bytes smem", log)):
        if size > static_bytes:
            found.append(f"{size} bytes of static shared memory, there is room for {static_bytes}")
    return found


@pytest.mark.parametrize("case", parameters())
def test_kernel_compiles(case):
    source = case.variant.source
    log = log_of(_compile.text(source), source.options, case.architecture)
    assert f"Compiling entry function '{source.name}'" in log
    assert not faults(log, case.variant.spill_bytes, STATIC_BYTES.get(source.file, MAX_STATIC_SHARED)), log


def test_every_kernel_file_has_variants():
    assert {path.name for path in KERNELS.glob("*.cu")} == {v.source.file for v in _choose.variants()}


def test_variants_are_for_architectures_that_exist():
    for variant in _choose.variants():
        assert set(variant.architectures) <= set(ARCHITECTURES), variant
        assert all(c >= _device.MIN_CAPABILITY for c in variant.architectures)


def test_every_architecture_is_in_the_normal_run():
    assert {case.architecture for case, normal in cases() if normal} == set(ARCHITECTURES.values())


# --- the judge ---

KERNEL = """
extern "C" __global__ void __launch_bounds__(1024) pf_test(float *x) {
    float y[NUM_SUMS];
    for (int i = 0; i < NUM_SUMS; i++)
        y[i] = x[i * 1024 + threadIdx.x];
    for (int round = 0; round < 100; round++)
#pragma unroll
        for (int i = 0; i < NUM_SUMS; i++)
            y[i] = y[i] * y[(i + 7) % NUM_SUMS] + x[round];
#pragma unroll
    for (int i = 0; i < NUM_SUMS; i++)
        x[i * 1024 + threadIdx.x] = y[i];
}
"""


def test_spills_are_found():
    """1024 threads leave 64 registers each: enough for 24 sums, too few for 96."""
    assert not faults(log_of(KERNEL, ("-DNUM_SUMS=24",), "sm_80"))
    log = log_of(KERNEL, ("-DNUM_SUMS=96",), "sm_80")
    (found,) = faults(log)
    assert found.startswith("spills {'pf_test': ")
    assert not faults(log, 100_000)


def test_serialised_matrix_products_are_found():
    log = "ptxas info : Function properties for pf_test\n  0 bytes stack frame, 0 bytes spill stores\n"
    assert not faults(log)
    for code in ("C7510", "C7511", "C7512", "C7520"):
        line = (
            f"ptxas info : ({code}) Potential Performance Loss: wgmma.mma_async instructions are serialized"
        )
        assert faults(f"{line} in function pf_test\n{log}") == [f"{line} in function pf_test"]


def test_warnings_and_errors_are_found():
    unreachable = 'extern "C" __global__ void pf_test(int *x) { unsigned y = *x; if (y < 0) return; *x = 1; }'
    assert any("warning" in fault for fault in faults(log_of(unreachable, (), "sm_80")))
    with pytest.raises(RuntimeError, match="no_such_thing"):
        log_of('extern "C" __global__ void pf_test(int *x) { no_such_thing(); }', (), "sm_80")
    too_much = (
        'extern "C" __global__ void pf_test(int *x) { __shared__ int y[20000]; y[*x] = 1; *x = y[x[1]]; }'
    )
    with pytest.raises(RuntimeError, match="shared"):
        log_of(too_much, (), "sm_80")


# --- the emulator's half ---


@pytest.mark.parametrize("file", ["ptx.cuh", "hopper.cuh"])
def test_every_function_with_ptx_has_a_twin(file):
    """The headers with PTX and tests/emulator: the same names and parameters."""
    ours = "".join((HERE / name).read_text(encoding="utf-8") for name in HEADERS)
    there = (KERNELS / file).read_text(encoding="utf-8")
    names = set(re.findall(r"^\s*(?:template <.*> )?PF_DEVICE .*?\b(pf_\w+)\(", there, re.MULTILINE))
    names -= {"pf_factor", "pf_further"}  # plain arithmetic, which serves both
    assert len(names) > 10
    assert names <= set(re.findall(r"\bpf_\w+", ours)), "tests/emulator lacks some"


@pytest.mark.parametrize("name", sorted({v.source.file for v in _choose.variants()}))
def test_kernel_compiles_for_the_emulator(name):
    platform = Platform()
    if (reason := platform.unavailable()) is not None:
        pytest.skip(reason)
    source = next(v.source for v in _choose.variants() if v.source.file == name)
    kernel = platform.device(0).compile(_compile.text(source), source.name, source.options)
    assert kernel.static_shared_bytes <= MAX_STATIC_SHARED
