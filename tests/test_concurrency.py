"""Threads, forks, other OpenMP runtimes in the process, and memory over thousands of calls."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
from calls import DTYPE_NAMES, assert_same_bits, dense, explain, numpy_dtype, paged, run
from oracle import assert_matches

import pyflash

TESTS = Path(__file__).parent


def fresh(code: str, backend, **environment: str) -> str:
    """Run code in a fresh interpreter that knows this suite and `kwargs`; return what it prints."""
    # conftest puts an emulator in the place of a missing GPU where that is asked for
    emulated = "import conftest\n" if backend.name == "cuda" else ""
    code = f"{emulated}kwargs = {backend.kwargs!r}\n" + textwrap.dedent(code)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), **environment}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def mixed_calls() -> list:
    """Calls of many shapes and types."""
    calls = []
    for i in range(16):
        dtype = DTYPE_NAMES[i % 4]
        call = dense(
            i,
            batch=1 + i % 3,
            seqlen_q=(1, 40, 7, 90)[i // 4],
            seqlen_kv=50 + 37 * i,
            num_heads=4,
            num_kv_heads=(4, 2, 1)[i % 3],
            head_dim=8 + i,
            dtype=dtype,
            causal=i % 2 == 0,
        )
        calls.append(paged(call, 16) if i % 5 == 0 else call)
    return calls


FIRST_CALLS = """
import threading
import numpy as np
import test_concurrency as suite, pyflash

calls = suite.mixed_calls()
barrier = threading.Barrier(len(calls))
results = [None] * len(calls)

def first_call(i):
    call = calls[i]
    threads = {"num_threads": 3} if kwargs["backend"] == "c" and i % 2 else {}
    barrier.wait()
    function = getattr(pyflash, call.function)
    results[i] = function(*call.arrays.values(), **call.options, return_lse=True, **kwargs, **threads)

threads = [threading.Thread(target=first_call, args=(i,)) for i in range(len(calls))]
for thread in threads: thread.start()
for thread in threads: thread.join()
for call, (out, lse) in zip(calls, results):
    function = getattr(pyflash, call.function)
    again = function(*call.arrays.values(), **call.options, return_lse=True, **kwargs)
    suite.assert_same_bits((out, lse), again)
    suite.assert_matches(out, lse, call)
print("done")
"""


def test_first_calls_of_16_threads_at_once(any_isa):
    """After cffi#271: a fresh process whose first calls all start at a barrier."""
    assert fresh(FIRST_CALLS, any_isa) == "done\n"


@pytest.mark.parametrize("callers", [4, 20])
def test_many_threads_call_at_the_same_time(backend, callers):
    """More callers than there are regions, too: the others compute alone."""
    calls = mixed_calls()
    want = [run(call, backend) for call in calls]
    if backend.has_threads:
        calls = [call.but(num_threads=1 + i % 3) for i, call in enumerate(calls)]
    failures = []

    def work(first: int) -> None:
        try:
            for i in range(len(calls)):
                place = (first + i) % len(calls)
                assert_same_bits(run(calls[place], backend), want[place], f"call {place}")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(4 * i,)) for i in range(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def held(inside: set[int], release: threading.Event) -> object:
    """A mask that shows everything and holds each thread that asks it until the event."""

    @ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 4)
    def mask_mod(batch, head, query, key):
        inside.add(threading.get_ident())
        release.wait()
        return 1

    return mask_mod


def needs_threads(call, backend, num_threads: int) -> int:
    """The threads that a call gets; a serial build has nothing to show here."""
    granted = explain(call, backend, num_threads=num_threads).num_threads
    if granted == 1:
        pytest.skip("a serial build")
    return granted


@pytest.mark.parametrize("family", ["prefill", "decode"])
def test_helpers_that_have_not_begun_are_not_waited_for(c_backend, family):
    """While all helpers are held inside one call, another is finished by its own thread."""
    holding = dense(12, batch=40, seqlen_q=2, seqlen_kv=2, num_heads=1, head_dim=8)
    call = dense(13, batch=2, seqlen_q=30, seqlen_kv=1500, num_heads=4, num_kv_heads=2, head_dim=8)
    want = run(call, c_backend, num_threads=1, family=family)
    inside: set[int] = set()
    release = threading.Event()
    granted = needs_threads(holding, c_backend, 16)
    options = {"num_threads": 16, "mask_mod": held(inside, release), **c_backend.kwargs}
    holder = threading.Thread(target=pyflash.flash_attention, args=holding.arrays.values(), kwargs=options)
    got: list = []
    caller = threading.Thread(
        target=lambda: got.append(run(call, c_backend, num_threads=granted, family=family))
    )
    holder.start()
    try:
        while len(inside) < granted and holder.is_alive():
            holder.join(timeout=0.001)
        assert len(inside) == granted
        caller.start()
        caller.join(timeout=60)
        assert got, "the call waits for helpers that are inside another one"
    finally:
        release.set()
        holder.join()
    caller.join()
    assert_same_bits(got[0], want)


def test_a_call_inside_a_call(c_backend):
    """A task may open a region of its own, on a helper as well."""
    outer = dense(14, batch=6, seqlen_q=1, seqlen_kv=2, num_heads=2, head_dim=8)
    inner = dense(15, batch=4, seqlen_q=20, seqlen_kv=40, num_heads=2, head_dim=8)
    needs_threads(outer, c_backend, 4)
    want = run(inner, c_backend, num_threads=1)
    results = []

    @ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 4)
    def mask_mod(batch, head, query, key):
        results.append(run(inner, c_backend, num_threads=4))
        return 1

    run(outer, c_backend, num_threads=4, mask_mod=mask_mod)
    assert len(results) >= 6 * 2 * 2
    for got in results:
        assert_same_bits(got, want)


THREADS_AFTER_FORK = """
import os
import test_concurrency as suite, pyflash
from pyflash import _c

call = suite.dense(16, batch=4, seqlen_q=150, seqlen_kv=150, num_heads=4)

def attention():
    return pyflash.flash_attention(*call.arrays.values(), num_threads=4, **kwargs)

before = attention()
child = os.fork()
if child == 0:
    _c._forked = False
    suite.assert_same_bits(attention(), before)
    print(len(os.listdir("/proc/self/task")), flush=True)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
suite.assert_same_bits(attention(), before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs /proc/self/task")
def test_the_pool_starts_again_after_a_fork(c_backend):
    """Calls of a child are serial by choice; were they not, they would find helpers of their own."""
    needs_threads(mixed_calls()[4], c_backend, 4)
    assert int(fresh(THREADS_AFTER_FORK, c_backend)) >= 4


BOUND = """
import os
import test_concurrency as suite, pyflash

call = suite.dense(17, batch=4, seqlen_q=150, seqlen_kv=150, num_heads=4)
allowed = set()
for _ in range(10000):  # a helper binds itself when it first runs, which a short call does not wait for
    pyflash.flash_attention(*call.arrays.values(), num_threads=2, **kwargs)
    allowed = {tuple(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}
    if len(allowed) > 1:
        break
assert all(len(cpus) == 1 for cpus in allowed), allowed
print(len(allowed))
"""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads can't be bound here")
def test_bound_threads_are_on_different_cpus(c_backend):
    """OMP_PROC_BIND has bound the first thread before a helper is made, which would inherit that."""
    needs_threads(mixed_calls()[4], c_backend, 2)
    cpus = len(os.sched_getaffinity(0))
    environment = {"OMP_PROC_BIND": "true", "OMP_PLACES": "threads", "OPENBLAS_NUM_THREADS": "1"}
    assert int(fresh(BOUND, c_backend, **environment)) == min(2, cpus)


WORK_FOR_ALL = {
    "decode, one head": dict(seqlen_q=1, seqlen_kv=32768, num_heads=1),
    "decode, a group": dict(seqlen_q=1, seqlen_kv=32768, num_heads=8, num_kv_heads=1),
    "prefill, one head": dict(seqlen_q=2048, seqlen_kv=2048, num_heads=1),
}


@pytest.mark.parametrize("name", WORK_FOR_ALL)
def test_fewer_heads_than_threads_still_use_all(c_backend, name):
    call = dense(18, batch=1, head_dim=16, **WORK_FOR_ALL[name])
    needs_threads(call, c_backend, 2)
    told = explain(call, c_backend, num_threads=16)
    assert told.num_threads == 16 and told.num_items >= 16


AFTER_FORK = """
import os, traceback
import test_concurrency as suite, pyflash

call = suite.dense(7, batch=4, seqlen_q=150, seqlen_kv=150, num_heads=4, causal=True)

def attention():
    return pyflash.flash_attention(*call.arrays.values(), **call.options, **kwargs)

def threads():
    return pyflash.explain(*call.arrays.values(), **kwargs).num_threads

def check():
    suite.assert_same_bits(attention(), before)
    assert threads() == 1

def in_child(work):
    child = os.fork()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(3)
    os._exit(0)

def child():
    check()
    in_child(check)
    check()

before, usual = attention(), threads()
in_child(child)
assert threads() == usual
suite.assert_same_bits(attention(), before)
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("threads", ["1", "4"])
def test_a_child_of_a_fork_runs_serial_and_right(any_isa, threads):
    """A child, and a child of that child, after the parent has used its threads."""
    if any_isa.name == "cuda":
        pytest.skip("CUDA does not work in a child of a fork; a test of the device holds it to saying so")
    assert fresh(AFTER_FORK, any_isa, OMP_NUM_THREADS=threads) == "done\n"


FEWER_THREADS = """
import numpy as np
import test_concurrency as suite, pyflash

for call in suite.mixed_calls():
    function = getattr(pyflash, call.function)
    options = {**call.options, **kwargs, "return_lse": True}
    one, eight = (function(*call.arrays.values(), **options, num_threads=n) for n in (1, 8))
    suite.assert_same_bits(eight, one)
print("done")
"""


@pytest.mark.parametrize("limit", ["1", "3"])
def test_fewer_threads_than_were_asked_for(c_backend, limit):
    """OpenMP may give fewer threads than a call asks for: somebody else has set a limit."""
    assert fresh(FEWER_THREADS, c_backend, OMP_THREAD_LIMIT=limit) == "done\n"


BESIDE = """
import sys
{first}
{second}
import numpy as np
import test_concurrency as suite
from threadpoolctl import threadpool_info

call = suite.dense(8, batch=2, seqlen_q=130, seqlen_kv=130, num_heads=4, head_dim=32)
here = pyflash.flash_attention(*call.arrays.values(), **kwargs)
x = [torch.from_numpy(array).transpose(1, 2) for array in call.arrays.values()]
attention = torch.nn.functional.scaled_dot_product_attention
there = attention(*x).transpose(1, 2).numpy()
np.testing.assert_allclose(here, there, atol=3e-6)
suite.assert_same_bits(pyflash.flash_attention(*call.arrays.values(), **kwargs), here)
np.testing.assert_allclose(attention(*x).transpose(1, 2).numpy(), there)
runtimes = {{entry["filepath"] for entry in threadpool_info() if entry["user_api"] == "openmp"}}
assert len(runtimes) <= 2, runtimes
print("done")
"""


@pytest.mark.parametrize("first", ["torch", "pyflash"])
def test_beside_torch(any_isa, first):
    """After faiss-wheels#40: two packages with OpenMP runtimes of their own, in both orders of import."""
    for name in ("torch", "threadpoolctl"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    second = "pyflash" if first == "torch" else "torch"
    code = BESIDE.format(first=f"import {first}", second=f"import {second}")
    assert fresh(code, any_isa) == "done\n"


MEMORY = """
import gc, os, resource
import numpy as np, pyflash

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()

def same_shape(count):
    q, k = np.ones((1, 2, 4, 16), "f4"), np.ones((1, 100, 2, 16), "f4")
    for _ in range(count):
        pyflash.flash_attention(q, k, k, return_lse=True, **kwargs)

def new_shapes(count, start):
    for i in range(start, start + count):
        q = np.ones((1, 1 + i % 40, 2, 8), "f4")
        k = np.ones((1, 50 + i, 2, 8), "f4")
        pyflash.flash_attention(q, k, k, causal=True, scale=i / 7, **kwargs)

def growth(work, *arguments):
    gc.collect()
    before = resident()
    work(*arguments)
    gc.collect()
    return resident() - before

{warm_up}
files = len(os.listdir("/proc/self/fd"))
print(growth(same_shape, {same}), growth(new_shapes, {new}, 300), len(os.listdir("/proc/self/fd")) - files)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs /proc/self/statm")
def test_memory_is_flat_over_many_calls(any_isa):
    """After keops#342: 2,000 calls of one shape, 200 of new shapes; resident memory and open files."""
    same, new = (2000, 200) if any_isa.name != "numpy" else (200, 60)
    code = MEMORY.format(warm_up="same_shape(200); new_shapes(100, 100)", same=same, new=new)
    same_growth, new_growth, files = map(int, fresh(code, any_isa).split())
    assert same_growth <= 1 << 20 and new_growth <= 2 << 20 and files == 0, (same_growth, new_growth, files)


@pytest.mark.parametrize("num_threads", [2, 4, 64])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_fewer_items_than_threads(c_backend, dtype, num_threads):
    """After picolm#3: one valid key of a long half-precision cache, more threads than work."""
    cache = np.full((1, 2048, 4, 64), np.nan, numpy_dtype(dtype))
    cache[:, 0] = dense(9, batch=1, seqlen_kv=1, num_heads=4, head_dim=64, dtype=dtype).arrays["k"][:, 0]
    call = dense(10, batch=1, seqlen_q=1, seqlen_kv=1, num_heads=32, num_kv_heads=4, head_dim=64, dtype=dtype)
    call = call.of(k=cache, v=cache).but(seq_lens=np.array([1]))
    want = run(call, c_backend, num_threads=1)
    assert_matches(*want, call)
    for _ in range(20):
        assert_same_bits(run(call, c_backend, num_threads=num_threads), want)


def test_the_interpreter_runs_on_during_a_call(c_backend):
    """Kernels hold no lock of the interpreter: another thread makes progress during one long call."""
    call = dense(11, batch=1, seqlen_q=1500, seqlen_kv=1500, num_heads=4, head_dim=64)
    done = threading.Event()

    def work() -> None:
        pyflash.flash_attention(*call.arrays.values(), num_threads=1, **c_backend.kwargs)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    steps = 0
    while not done.wait(timeout=0.001):
        steps += 1
    thread.join()
    assert steps >= 2
