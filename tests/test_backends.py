"""Which backend and instruction set a call uses, what `explain` and `show_runtime` say of it."""

from __future__ import annotations

import contextvars
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from calls import assert_same_bits, dense, explain, once, paged, paged_varlen, run, varlen
from conftest import BACKENDS, TestedBackend, available
from oracle import Call, assert_matches

import pyflash
from pyflash import _backends, _runtime
from pyflash._description import DECODE_MAX_ROWS
from pyflash.gpu import _device


@once
def small_call() -> Call:
    return dense(121, seqlen_q=20, seqlen_kv=70, num_heads=4, num_kv_heads=2, causal=True)


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter."""
    clean = {n: x for n, x in os.environ.items() if not n.startswith(("PYFLASH_", "OMP_"))}
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_this_backend_is_tested_here(name):
    """Skipped, with the reason, where all tests of a backend are left out."""
    backend = TestedBackend(name, BACKENDS[name])
    if backend.missing() is not None:
        pytest.skip(f"no test ran on {name}: {backend.missing()}")
    assert backend in available()
    assert_matches(*run(small_call(), backend), small_call())


def test_every_backend_and_instruction_set_is_in_the_suite():
    assert set(pyflash.available_backends()) == {kwargs["backend"] for kwargs in BACKENDS.values()}
    assert {f"c[{isa}]" for isa in pyflash.available_isas()} <= set(BACKENDS)


def test_available_backends_say_why_not():
    backends = pyflash.available_backends()
    assert backends["numpy"] is None
    for reason in backends.values():
        assert reason is None or (isinstance(reason, str) and len(reason) > 10)


def test_an_unavailable_backend_says_why_at_the_call():
    missing = {name: reason for name, reason in pyflash.available_backends().items() if reason}
    if not missing:
        pytest.skip("every backend is available here")
    call = small_call()
    for name, reason in missing.items():
        for attempt in (
            lambda name=name: pyflash.flash_attention(*call.arrays.values(), backend=name),
            lambda name=name: pyflash.explain(*call.arrays.values(), backend=name),
            lambda name=name: pyflash.use_backend(name),
        ):
            with pytest.raises(pyflash.BackendUnavailable) as caught:
                attempt()
            assert isinstance(caught.value, RuntimeError)
            assert repr(name) in str(caught.value) and reason in str(caught.value)


def test_an_unknown_backend_is_refused_by_name():
    words = "found 'blas' (str), expected one of 'numpy', 'c', 'cuda', 'auto'"
    with pytest.raises(pyflash.InvalidArgument) as caught:
        pyflash.flash_attention(*small_call().arrays.values(), backend="blas")
    assert str(caught.value) == f"backend: {words}"
    with pytest.raises(pyflash.InvalidArgument) as caught:
        pyflash.use_backend("blas")
    assert str(caught.value) == f"name: {words}"


def backend_used(**options) -> str:
    """The backend that a call would use."""
    return pyflash.explain(*small_call().arrays.values(), **options).backend


def test_numpy_arrays_go_to_the_c_kernels(c_backend):
    call = small_call()
    assert backend_used() == backend_used(backend="auto") == "c"
    out = pyflash.flash_attention(*call.arrays.values(), **call.options)
    best = TestedBackend("c", {"backend": "c", "isa": pyflash.available_isas()[-1]})
    assert pyflash.explain(*call.arrays.values()).isa == best.kwargs["isa"]
    assert_same_bits(out, run(call, best)[0])


def test_use_backend_as_a_context_manager():
    with pyflash.use_backend("numpy"):
        assert backend_used() == "numpy"
        assert backend_used(backend="numpy") == "numpy"
        with pyflash.use_backend("auto"):
            assert backend_used() == "c" or pyflash.available_backends()["c"]
        assert backend_used() == "numpy"
        with pytest.raises(ZeroDivisionError), pyflash.use_backend("auto"):
            raise ZeroDivisionError
        assert backend_used() == "numpy"


def test_use_backend_as_a_setter_is_local_to_its_context():
    def in_a_context() -> str:
        pyflash.use_backend("numpy")
        return backend_used()

    assert contextvars.copy_context().run(in_a_context) == "numpy"
    with pyflash.use_backend("numpy"):
        seen = []
        thread = threading.Thread(target=lambda: seen.append(pyflash._backends._current.get()))
        thread.start()
        thread.join()
        assert seen == [None]


@pytest.mark.parametrize("isa", [name for name in BACKENDS if name.startswith("c[")])
def test_environment_variables(isa):
    name = isa[2:-1]
    if name not in pyflash.available_isas():
        pytest.skip(f"instruction set {name} is not available")
    show = (
        "import numpy, pyflash; x = numpy.ones((1, 4, 2, 8), 'f4'); e = pyflash.explain(x, x, x); "
        "print(e.backend, e.isa, pyflash.explain(x, x, x, backend='numpy').backend)"
    )
    assert python(show, PYFLASH_ISA=name).stdout.split() == ["c", name, "numpy"]
    assert python(show, PYFLASH_BACKEND="numpy").stdout.split()[::2] == ["numpy", "numpy"]


def test_an_unknown_instruction_set_in_the_environment_is_an_error():
    code = "import numpy, pyflash; x = numpy.ones((1, 4, 2, 8), 'f4'); pyflash.flash_attention(x, x, x)"
    done = python(code, PYFLASH_ISA="avx3")
    assert done.returncode == 1
    assert "PYFLASH_ISA" in done.stderr and "avx3" in done.stderr and "scalar" in done.stderr
    done = python(code, PYFLASH_BACKEND="blas")
    assert done.returncode == 1 and "'blas'" in done.stderr


@pytest.mark.parametrize("text", ["many", "0", "-1", "1.5", "99999999999"])
def test_a_bad_number_of_threads_in_the_environment_is_an_error(c_backend, text, monkeypatch):
    monkeypatch.setenv("PYFLASH_NUM_THREADS", text)
    with pytest.raises(pyflash.InvalidArgument) as caught:
        run(small_call(), c_backend)
    assert str(caught.value) == f"PYFLASH_NUM_THREADS: found {text!r}, expected an integer, at least 1"


def test_threads_from_the_environment(c_backend):
    code = (
        "import numpy, pyflash; x = numpy.ones((4, 300, 4, 8), 'f4'); "
        "print(pyflash.explain(x, x, x).num_threads, pyflash.explain(x, x, x, num_threads=2).num_threads)"
    )
    assert python(code, PYFLASH_NUM_THREADS="1").stdout.split()[0] == "1"
    if (
        len(os.sched_getaffinity(0)) > 1
        and pyflash.explain(*[np.ones((4, 300, 4, 8), "f4")] * 3).num_threads > 1
    ):
        assert python(code, PYFLASH_NUM_THREADS="1").stdout.split()[1] == "2"
        assert python(code, OMP_NUM_THREADS="1").stdout.split()[0] == "1"


def test_families_and_instruction_sets_agree_to_the_error_rule(backend):
    for family in ("prefill", "decode"):
        for seqlen_q in (1, 20):
            call = dense(122, seqlen_q=seqlen_q, seqlen_kv=600, num_heads=4, num_kv_heads=2, causal=True)
            assert_matches(*run(call, backend, family=family), call)


# ------------------------------------------------------------------------- explain

EXPLAINED = {
    "decode": dense(123, seqlen_q=1, seqlen_kv=600, num_heads=4, num_kv_heads=2),
    "prefill": dense(124, seqlen_q=40, seqlen_kv=600, num_heads=4, num_kv_heads=2, causal=True),
    "prefill+decode": varlen([40, 1], [60, 600], seed=125, num_heads=4, num_kv_heads=2, causal=True),
}


@pytest.mark.parametrize("family", EXPLAINED)
def test_explain_names_what_a_call_uses(backend, family):
    call = EXPLAINED[family]
    told = explain(call, backend)
    assert told.backend == backend.name and told.family == family
    if backend.name == "cuda":
        assert told.isa.startswith("sm_")
    else:
        assert told.isa == backend.kwargs.get("isa", "numpy")
    assert told.kernel and told.tile >= 1 and told.num_items >= 1 and told.num_threads >= 1
    assert told.workspace_bytes >= 0 and told.rows_per_item >= 1
    assert 0 <= told.tiles_skipped <= told.tiles_total
    assert told.reasons and all(isinstance(reason, str) for reason in told.reasons)
    for forced in ("prefill", "decode"):
        assert explain(call, backend, family=forced).family == forced


def test_explain_of_paged_calls(backend):
    one = dense(126, batch=3, seqlen_q=1, seqlen_kv=600, num_heads=4, seq_lens=np.array([600, 3, 0]))
    assert explain(paged(one, 16), backend).family == "decode"
    assert explain(paged_varlen(EXPLAINED["prefill+decode"], 16), backend).family == "prefill+decode"


def test_explain_counts_skipped_tiles(backend):
    call = dense(127, batch=1, seqlen_q=2000, seqlen_kv=2000, num_heads=1)
    full, causal = explain(call, backend), explain(call, backend, causal=True)
    window = explain(call, backend, causal=True, window=(10, 0))
    assert full.tiles_skipped == 0
    assert 0 < causal.tiles_skipped < window.tiles_skipped < causal.tiles_total == full.tiles_total


def test_explain_counts_splits(backend):
    for seqlen_kv, num_splits in ((1, 1), (512, 1), (513, 2), (1024, 2), (1025, 3)):
        assert explain(dense(seqlen_q=1, seqlen_kv=seqlen_kv), backend).num_splits == num_splits
    call = EXPLAINED["decode"]
    assert explain(call, backend, num_splits=7).num_splits == 7
    assert explain(EXPLAINED["prefill"], backend).num_splits == 1


def test_explain_computes_nothing(backend):
    call = EXPLAINED["decode"]
    out = np.full((2, 1, 4, 8), 5.0, np.float32)
    explain(call, backend, out=out, return_lse=True)
    assert (out == 5).all()


def test_explain_of_nothing(backend):
    for shape in (dict(batch=0), dict(seqlen_q=0), dict(seqlen_kv=0), dict(num_heads=0, num_kv_heads=0)):
        told = explain(dense(**shape), backend)
        assert told.backend == backend.name and told.tiles_total >= told.tiles_skipped


def test_memory_of_a_call_does_not_grow_with_the_keys(backend):
    """Scratch of a prefill is constant in the number of keys, and in that of the queries."""
    sizes = [
        explain(
            dense(batch=1, seqlen_q=n, seqlen_kv=n, num_heads=1), backend, **one_thread(backend)
        ).workspace_bytes
        for n in (1000, 4000)
    ]
    assert sizes[1] <= sizes[0] * 1.1 + 4096


def one_thread(backend) -> dict[str, int]:
    """Options that fix the number of threads where there are any."""
    return {"num_threads": 1} if backend.has_threads else {}


# -------------------------------------------------------------------- show_runtime


def test_show_runtime_says_what_runs(capsys):
    assert pyflash.show_runtime() is None
    text = capsys.readouterr().out
    for word in (pyflash.__version__, np.__version__, "OpenMP", *pyflash.available_isas()):
        assert word in text, word


@pytest.fixture
def fake_cupy(monkeypatch):
    """Two GPUs that say what they are, as CuPy passes it on, and that nobody starts."""
    fields = ("name", "major", "minor", "multiProcessorCount", "totalGlobalMem")
    values = [(b"NVIDIA H200", 9, 0, 132, 139 * 2**30), (b"NVIDIA L4", 8, 9, 58, 22 * 2**30)]
    gpus = [dict(zip(fields, row, strict=True)) for row in values]
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 2, getDeviceProperties=gpus.__getitem__, driverGetVersion=lambda: 12080
    )
    nvrtc = SimpleNamespace(getVersion=lambda: (12, 8))
    device = lambda index: SimpleNamespace(compute_capability=("90", "89")[index])  # noqa: E731
    cuda = SimpleNamespace(runtime=runtime, nvrtc=nvrtc, Device=device)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, __version__="14.2.0"))
    monkeypatch.setattr(_device, "platform", _device._CupyPlatform())


def test_show_runtime_says_which_gpus_there_are(fake_cupy, monkeypatch, tmp_path):
    monkeypatch.setenv("PYFLASH_CACHE_DIR", str(tmp_path))
    lines = dict(_runtime.runtime_report())
    assert lines["backend cuda"] == "available"
    assert lines["  GPU 0"] == "NVIDIA H200, sm_90a, 132 SMs, 139.0 GiB"
    assert lines["  GPU 1"] == "NVIDIA L4, sm_89, 58 SMs, 22.0 GiB"
    assert (lines["  CuPy"], lines["  NVRTC"], lines["  driver"]) == ("14.2.0", "12.8", "for CUDA 12.8")
    assert lines["  compiled kernels"] == f"kept in {tmp_path}"
    monkeypatch.setenv("PYFLASH_CACHE_DIR", "")
    assert dict(_runtime.runtime_report())["  compiled kernels"].startswith("not kept")


def test_show_runtime_says_why_there_is_no_gpu(monkeypatch):
    platform = _device._CupyPlatform()
    monkeypatch.setattr(_device, "platform", platform)
    monkeypatch.setattr(platform, "unavailable", lambda: "CUDA finds no GPU: none was built in")
    lines = dict(_runtime.runtime_report())
    assert lines["backend cuda"] == "CUDA finds no GPU: none was built in"
    assert not any("GPU 0" in label for label in lines)


def test_available_isas_end_with_the_best():
    isas = pyflash.available_isas()
    assert isas[0] == "scalar" and len(set(isas)) == len(isas)


# ----------------------------------------------------------------------- tile=


@pytest.mark.parametrize("family", ["prefill", "decode"])
@pytest.mark.parametrize("tile", [1, 2, 3, 8, 13, 24, 64, 100, 1000])
def test_tiles_of_any_size_or_a_refusal_by_name(backend, tile, family):
    call = dense(128, seqlen_q=11, seqlen_kv=77, num_heads=2, causal=True, window=(50, 0), family=family)
    try:
        out, lse = run(call, backend, tile=tile)
    except pyflash.UnsupportedError as error:
        assert backend.name != "numpy" and str(error).startswith("tile: ")  # noqa: PT017
        return
    assert_matches(out, lse, call)
    if tile < 77:
        assert explain(call, backend, tile=tile).tile == tile


@pytest.mark.parametrize(("seqlen_q", "num_heads"), [(DECODE_MAX_ROWS, 1), (DECODE_MAX_ROWS // 4, 4)])
def test_the_border_between_the_families(backend, seqlen_q, num_heads):
    """C and Python each have the number of rows up to which a sequence is decoded: the same."""
    for extra, family in ((0, "decode"), (1, "prefill")):
        call = dense(
            129, batch=1, seqlen_q=seqlen_q + extra, seqlen_kv=40, num_heads=num_heads, num_kv_heads=1
        )
        assert explain(call, backend).family == family


def test_a_folder_of_sources_says_so(monkeypatch):
    """Without an installation the module of a backend may be missing; that is a reason, not a crash."""
    monkeypatch.setitem(_backends.MODULES, "cuda", ".no_such_module")
    monkeypatch.delitem(_backends._loaded, "cuda", raising=False)
    assert "imported from a source folder" in pyflash.available_backends()["cuda"]
    with pytest.raises(pyflash.BackendUnavailable, match="imported from a source folder"):
        pyflash.explain(*[np.zeros((1, 1), "f4")] * 3, backend="cuda")
