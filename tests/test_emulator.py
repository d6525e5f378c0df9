"""The emulator of CUDA that other tests lean on: each primitive against NumPy, and what it has to find."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import emulator
import ml_dtypes
import numpy as np
import pytest
from emulator import CompileError, EmulationError, Platform

TESTS = Path(__file__).resolve().parent
WARP = 32

pytestmark = pytest.mark.skipif(
    Platform().unavailable() is not None, reason=str(Platform().unavailable() or "available")
)


def launch(
    body: str, *arrays: np.ndarray, grid: int = 1, block: int = WARP, shared: int = 0, before: str = ""
):
    """Run a kernel with the text `body` on copies of arrays, there called a, b, c...; return them.

    ``t`` is the thread's number in its block.
    """
    types = {
        "float32": "float",
        "int32": "int",
        "uint32": "unsigned",
        "uint16": "uint16_t",
        "float64": "double",
    }
    names = "abcdefgh"[: len(arrays)]
    fields = "".join(f"{types[x.dtype.name]} *{name}; " for name, x in zip(names, arrays, strict=True))
    locals_ = "".join(f"auto *{name} = call.{name}; (void){name}; " for name in names)
    device = Platform().device(0)
    kernel = device.compile(
        f"{before}\nstruct call_t {{ {fields} }};\n"
        f'extern "C" __global__ void __launch_bounds__({min(block, 1024)}) pf_test('
        "const __grid_constant__ call_t call) {\n"
        f"const int t = threadIdx.x; (void)t; {locals_}\n{body}\n}}\n",
        "pf_test",
        ("-DPF_ONE=1",),
    )
    memories = [device.upload(x, 0) for x in arrays]
    argument = np.zeros((), dtype=[(name, "u8") for name in names])
    for name, memory in zip(names, memories, strict=True):
        argument[name] = memory.address
    device.launch(kernel, (grid, 1, 1), block, shared, device.stream(), argument)
    results = [np.empty_like(x) for x in arrays]
    for memory, result in zip(memories, results, strict=True):
        device.download(memory.address, result, 0)
    return results


def floats(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bits16(x: np.ndarray, dtype: object) -> np.ndarray:
    return np.ascontiguousarray(x.astype(dtype)).view(np.uint16)


# --- threads, barriers, shared memory ---


def test_every_thread_of_every_block_runs_once():
    (got,) = launch(
        "atomicAdd(&a[blockIdx.x * blockDim.x + t], 1);", np.zeros(5 * 70, np.int32), grid=5, block=70
    )
    assert (got == 1).all()


def test_coordinates():
    device = Platform().device(0)
    kernel = device.compile(
        "struct call_t { int *a; };\n"
        'extern "C" __global__ void pf_test(const __grid_constant__ call_t call) {\n'
        "    const int i = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);\n"
        "    if (threadIdx.x + 1 == blockDim.x) call.a[i] = i * 100 + gridDim.z * 10 + warpSize % 10;\n"
        "}\n",
        "pf_test",
    )
    memory = device.upload(np.zeros(24, np.int32))
    device.launch(kernel, (2, 3, 4), 33, 0, 0, np.array((memory.address,), dtype=[("a", "u8")]))
    got = np.empty(24, np.int32)
    device.download(memory.address, got)
    assert got.tolist() == [i * 100 + 42 for i in range(24)]


@pytest.mark.parametrize("seed", ["0", "1", "2"])
def test_barriers_in_a_loop(monkeypatch, seed):
    """A prefix sum by doubling: wrong as soon as one thread runs ahead."""
    monkeypatch.setenv("PYFLASH_EMULATOR_SEED", seed)
    x = np.arange(200, dtype=np.int32) % 7
    (got,) = launch(
        """
        __shared__ int sums[200];
        sums[t] = a[t];
        __syncthreads();
        for (int step = 1; step < 200; step *= 2) {
            const int other = t >= step ? sums[t - step] : 0;
            __syncthreads();
            sums[t] += other;
            __syncthreads();
        }
        a[t] = sums[t];
        """,
        x,
        block=200,
    )
    assert got.tolist() == np.cumsum(x).tolist()


def test_a_missing_barrier_shows_under_some_seed(monkeypatch):
    wrong = 0
    for seed in range(1, 6):
        monkeypatch.setenv("PYFLASH_EMULATOR_SEED", str(seed))
        (got,) = launch("__shared__ int x[64]; x[t] = t; a[t] = x[63 - t];", np.zeros(64, np.int32), block=64)
        wrong += got.tolist() != list(range(63, -1, -1))
    assert wrong


def test_barriers_that_reduce():
    counts, ands, ors = launch(
        """
        a[t] = __syncthreads_count(t % 3 == 0);
        b[t] = __syncthreads_and(t < 69) + 2 * __syncthreads_and(t < 70);
        c[t] = __syncthreads_or(t == 69) + 2 * __syncthreads_or(t == 70);
        """,
        *np.zeros((3, 70), np.int32),
        block=70,
    )
    assert (counts == 24).all() and (ands == 2).all() and (ors == 1).all()


def test_threads_that_have_left_do_not_count_in_barriers():
    (got,) = launch(
        """
        __shared__ int x[100];
        if (t >= 41) return;
        x[t] = t;
        __syncthreads();
        a[t] = x[40 - t];
        __syncwarp();
        """,
        np.full(100, -1, np.int32),
        block=100,
    )
    assert got.tolist() == [*range(40, -1, -1), *[-1] * 59]


def test_shared_memory_holds_nan_before_each_block():
    static, dynamic = launch(
        """
        __shared__ float x[64];
        PF_DYNAMIC_SHARED(bytes);
        float *y = (float *)bytes;
        a[blockIdx.x * 64 + t] = x[t];
        b[blockIdx.x * 64 + t] = y[t];
        x[t] = y[t] = 1;
        """,
        *np.zeros((2, 3 * 64), np.float32),
        grid=3,
        block=64,
        shared=256,
    )
    assert np.isnan(static).all() and np.isnan(dynamic).all()


def test_registers_that_were_not_set_are_no_accidental_zeros():
    (got,) = launch("float x[4]; for (int i = 0; i < t; i++) x[i] = 0; a[t] = x[2];", floats(4), block=4)
    assert got[3] == 0 and (np.abs(got[:3]) > 1e30).all()


def test_fresh_memory_is_nan():
    device = Platform().device(0)
    memory = device.allocate(100)
    got = np.zeros(25, np.float32)
    device.download(memory.address, got)
    assert np.isnan(got).all()


# --- within a warp ---


def test_shuffles_of_four_and_eight_bytes():
    lane = np.arange(64) % 32
    first = np.arange(64) - lane
    sources = {
        "__shfl_sync(~0u, x, 5)": first + 5,
        "__shfl_sync(~0u, x, t * 7)": first + lane * 7 % 32,
        "__shfl_sync(~0u, x, t + 3, 8)": first + lane // 8 * 8 + (lane + 3) % 8,
        "__shfl_xor_sync(~0u, x, 9)": first + (lane ^ 9),
        "__shfl_xor_sync(~0u, x, 3, 4)": first + (lane ^ 3),
        "__shfl_xor_sync(~0u, x, 12, 8)": first + np.where(lane & 8, lane ^ 12, lane),
        "__shfl_up_sync(~0u, x, 3)": first + np.where(lane >= 3, lane - 3, lane),
        "__shfl_up_sync(~0u, x, 3, 16)": first + np.where(lane % 16 >= 3, lane - 3, lane),
        "__shfl_down_sync(~0u, x, 4)": first + np.where(lane + 4 < 32, lane + 4, lane),
        "__shfl_down_sync(~0u, x, 1, 2)": first + (lane | 1),
    }
    x = np.random.default_rng(1).integers(-(2**20), 2**20, 64).astype(np.int32)
    for type_, factor in (("int", 1), ("unsigned", 1), ("long long", 2**33), ("double", 0.3), ("float", 0.5)):
        results = "".join(
            f"b[64 * {i} + t] = (int)rint((double)({call} / factor));\n" for i, call in enumerate(sources)
        )
        if type_ == "unsigned":
            results = results.replace("(double)", "(double)(int)")
        body = f"const {type_} factor = {factor}, x = a[t] * factor;\n{results}"
        _, got = launch(body, x, np.zeros((len(sources), 64), np.int32), block=64)
        for row, (call, source) in zip(got, sources.items(), strict=True):
            assert row.tolist() == x[source].tolist(), (type_, call)


def test_sums_by_shuffles():
    x = floats(96)
    _, got = launch(
        """
        float sum = a[t];
        for (int step = 16; step > 0; step /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, step);
        b[t] = sum;
        """,
        x,
        np.zeros_like(x),
        block=96,
    )
    np.testing.assert_allclose(
        got.reshape(3, 32), x.reshape(3, 32).sum(1, keepdims=True).repeat(32, 1), rtol=1e-5
    )


def test_halves_of_a_warp_go_their_own_ways():
    (got,) = launch(
        """
        int x = t;
        if (t < 16) {
            for (int i = 0; i < 3; i++)
                x = __shfl_sync(0x0000ffffu, x, (t + 1) % 16);
        } else if (t < 24) {
            x = __shfl_xor_sync(0x00ff0000u, x, 1);
            __syncwarp(0x00ff0000u);
            x += 100;
        }
        __syncwarp();
        a[t] = x + 1000 * __shfl_sync(~0u, x, 31);
        """,
        np.zeros(32, np.int32),
    )
    expected = [(t + 3) % 16 if t < 16 else (t ^ 1) + 100 if t < 24 else t for t in range(32)]
    assert (got - 31000).tolist() == expected


def test_votes():
    ballots, anys, alls, active = launch(
        """
        a[t] = __ballot_sync(~0u, t % 3 == 0);
        b[t] = __any_sync(~0u, t == 40) + 2 * __any_sync(~0u, t >= 64);
        c[t] = __all_sync(~0u, t < 40) + 2 * __all_sync(~0u, t < 64);
        if (t % 2) return;
        __syncwarp();
        d[t] = __activemask();
        """,
        *np.zeros((4, 64), np.uint32),
        block=64,
    )
    lanes = np.arange(64).reshape(2, 32)
    ballot = ((lanes % 3 == 0) * 2 ** np.arange(32)).sum(1)
    assert ballots.tolist() == ballot.repeat(32).tolist()
    assert anys.tolist() == [0] * 32 + [1] * 32
    assert alls.tolist() == [3] * 32 + [2] * 32
    assert (active[1::2] == 0).all()
    assert all(active[t] >> t % 32 & 1 and active[t] & 0xAAAAAAAA == 0 for t in range(0, 64, 2))


# --- what has to be reported ---

FAULTS = {
    "a barrier that half of a warp goes to": (
        "if (t < 16) __syncthreads(); else __syncwarp();",
        r"deadlock.*\n.*\(0 to 15\) in __syncthreads.*:.*\n.*16 threads \(16 to 31\) in __syncwarp with mask",
    ),
    "barriers of two places": (
        "if (t < 16) __syncthreads();\n else __syncthreads();",
        "others of the block wait in",
    ),
    "a shuffle that some lanes leave out": (
        "if (t < 16) a[t] = __shfl_xor_sync(0xffffffffu, t, 1); else __syncthreads();",
        r"deadlock.*\n.*16 threads \(0 to 15\) in __shfl_xor_sync with mask 0xffffffff",
    ),
    "a shuffle from a lane that has left": ("if (t == 3) return; __shfl_sync(~0u, t, 3);", "reads lane 3"),
    "a lane outside its own mask": (
        "__shfl_sync(0xffffu, t, 0);",
        "thread 16 .* not in its own mask 0x0000ffff",
    ),
    "masks that differ": ("__syncwarp(t < 16 ? 0xffffffffu : 0xffff0001u);", "deadlock"),
    "a trap": (
        "if (t == 7) __trap();",
        r"thread 7 of block \(0, 0, 0\) of pf_test: __trap\(\), pf_test.cu:\d+\n *\d+: if \(t == 7\) __trap",
    ),
    "an assertion": ("assert(a[t] != 0);", r"assertion failed: a\[t\] != 0"),
    "a write behind an allocation": (
        "a[32 + t] = 1;",
        "write to address .*, 0 bytes behind an allocation of 128",
    ),
    "a read behind an allocation": ("a[0] = a[1024 + t];", "read of address .*, 3968 bytes behind"),
    "a write just before an allocation": ("a[-1] = 5;", "wrote before an allocation of 128 bytes"),
    "a write behind dynamic shared memory": (
        "PF_DYNAMIC_SHARED(x); x[1024 + t] = 0;",
        "write to address .*, 0 bytes behind the 1024 bytes of dynamic shared memory",
    ),
    "a null pointer": ("*(int *)(uintptr_t)a[t] = t;", r"write to address \(nil\)"),
    "a read at an odd place": (
        "a[0] = ((int2 *)(a + 1))->x;",
        r"thread 0 .*: misaligned access\n(?s:.*)\n *\d+: a\[0\] = \(\(int2",
    ),
    "an integer division by zero": ("a[t] = 5 / (a[t] - 0);", "division by zero"),
    "a stack overflow": (
        "volatile int x[20000]; x[t] = t; a[t] = x[t] + x[0];",
        "stack overflow: a thread has 64 KiB",
    ),
    "an endless loop": ("while (*(volatile int *)&a[0] == 0) {}", "did not end in time"),
    "an endless loop that yields": (
        "while (*(volatile int *)&a[0] == 0) __syncwarp();",
        "did not end in time",
    ),
    "an asynchronous copy to memory that is not shared": (
        "pf_cp_async4(&a[t], a, true);",
        "not 4 aligned bytes of",
    ),
    "an asynchronous copy to an odd place": (
        "PF_DYNAMIC_SHARED(x); pf_cp_async16(x + 4, a, true);",
        "not 16 aligned bytes of shared memory",
    ),
    "bytes that never come": (
        "PF_DYNAMIC_SHARED(x); uint64_t *b = (uint64_t *)x; if (t == 0) { pf_barrier_init(b, 1); "
        "pf_barrier_expect(b, 16); pf_barrier_wait(b, 0); }",
        "nobody ends the phase",
    ),
    "ldmatrix of part of a warp": (
        "PF_DYNAMIC_SHARED(x); uint32_t r[4]; if (t < 31) pf_ldmatrix_x4(r, x);",
        "ldmatrix without lane 31",
    ),
    "mma of part of a warp": (
        "float d[4] = {}; uint32_t x[4] = {}, y[2] = {}; if (t > 3) pf_mma_f16(d, x, y);",
        "without lane 0",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_reported(monkeypatch, fault):
    body, reason = FAULTS[fault]
    if reason == "did not end in time":
        monkeypatch.setenv("PYFLASH_EMULATOR_SECONDS", "0.2")
    with pytest.raises(EmulationError, match=reason):
        launch(body, np.zeros(32, np.int32), shared=1024)
    # The emulator is as good as before.
    (got,) = launch("a[t] = __shfl_xor_sync(~0u, t, 1);", np.zeros(32, np.int32))
    assert got.tolist() == [t ^ 1 for t in range(32)]


def test_writes_behind_odd_sizes():
    with pytest.raises(EmulationError, match="wrote behind an allocation of 10 bytes"):
        launch("a[5] = 1;", np.zeros(5, np.uint16))
    with pytest.raises(EmulationError, match="wrote behind the 100 bytes of dynamic shared memory"):
        launch("PF_DYNAMIC_SHARED(x); x[100] = 1;", np.zeros(5, np.uint16), shared=100)


@pytest.mark.parametrize(
    ("grid", "block", "shared", "reason"),
    [
        (0, 32, 0, "a grid of"),
        (1, 1025, 0, "a block of 1025 threads, at most 1024"),
        (1, 32, 232449, "232449 of dynamic shared memory"),
    ],
)
def test_launches_that_a_gpu_refuses(grid, block, shared, reason):
    with pytest.raises(EmulationError, match=reason):
        launch("", np.zeros(1, np.int32), grid=grid, block=block, shared=shared)


def test_a_block_larger_than_the_launch_bounds():
    device = Platform().device(0)
    kernel = device.compile(
        'extern "C" __global__ void __launch_bounds__(32 * (PF_WARPS), 1) pf_test(int x) {}',
        "pf_test",
        ("-DPF_WARPS=3",),
    )
    device.launch(kernel, (1, 1, 1), 96, 0, 0, np.zeros((), np.int32))
    with pytest.raises(EmulationError, match="a block of 97 threads, at most 96"):
        device.launch(kernel, (1, 1, 1), 97, 0, 0, np.zeros((), np.int32))


def test_argument_of_another_size():
    device = Platform().device(0)
    kernel = device.compile(
        'struct call_t { long a[3]; };\nextern "C" __global__ void pf_test(call_t call) {}', "pf_test"
    )
    with pytest.raises(EmulationError, match="pf_test takes 24 bytes, at most 4096, not 16"):
        device.launch(kernel, (1, 1, 1), 32, 0, 0, np.zeros(2))


def test_a_source_that_does_not_compile():
    with pytest.raises(CompileError, match=r"pf_test\.cu:\d+:.*no_such_thing"):
        launch("no_such_thing();", np.zeros(1, np.int32))


def test_options_are_macros():
    (got,) = launch("a[0] = PF_ONE + __CUDA_ARCH__ + PF_EMULATED;", np.zeros(1, np.int32))
    assert got[0] == 902


# --- numbers ---


def test_float16_and_bfloat16_as_numpy():
    every = np.arange(2**16, dtype=np.uint16)
    for dtype, name in ((np.float16, "f16"), (ml_dtypes.bfloat16, "bf16")):
        _, wide = launch(
            f"for (int i = t; i < 65536; i += 32) b[i] = pf_from_{name}(a[i]);",
            every,
            np.zeros(2**16, np.float32),
        )
        np.testing.assert_array_equal(wide, every.view(dtype).astype(np.float32))
        # Numbers around each value and each middle between two, and all exponents.
        random = np.random.default_rng(3).integers(0, 2**32, 2**16, dtype=np.uint32).view(np.float32)
        with np.errstate(all="ignore"):
            middles = (wide[1:] / 2 + wide[:-1] / 2).astype(np.float32)
            narrow = np.concatenate(
                [
                    wide,
                    middles,
                    np.nextafter(middles, np.float32(9e9)),
                    np.nextafter(middles, np.float32(-9e9)),
                    random,
                ]
            )
            expected = narrow.astype(dtype)
        body = f"for (int i = t; i < {narrow.size}; i += 32) b[i] = pf_to_{name}(a[i]);"
        got = launch(body, narrow, np.zeros(narrow.size, np.uint16))[1].view(dtype)
        nan = np.isnan(narrow)
        assert np.isnan(got[nan].astype(np.float32)).all()
        np.testing.assert_array_equal(got.view(np.uint16)[~nan], expected.view(np.uint16)[~nan])


def test_packing_puts_the_first_low():
    got = launch(
        "b[0] = pf_pack_f16(a[0], a[1]); b[1] = pf_pack_bf16(a[0], a[1]);", floats(2), np.zeros(2, np.uint32)
    )
    half = got[1].view(np.uint16)
    assert half[:2].tolist() == bits16(got[0], np.float16).tolist()
    assert half[2:].tolist() == bits16(got[0], ml_dtypes.bfloat16).tolist()


def test_powers_and_logarithms_of_two():
    x = np.array(
        [0, -0.0, 1, -1.5, 127.9, 128, -126, -126.5, -200, np.inf, -np.inf, np.nan, 1e-40], np.float32
    )
    _, power, logarithm = launch("b[t] = pf_exp2(a[t]); c[t] = pf_log2(a[t]);", x, x, x, block=len(x))
    with np.errstate(all="ignore"):
        expected = np.exp2(x)
        expected[expected < 2.0**-126] = 0
        np.testing.assert_allclose(power, expected, rtol=1e-6)
        expected = np.log2(np.where(np.abs(x) < 2.0**-126, 0, x))
    np.testing.assert_allclose(logarithm, expected, rtol=1e-6)


def test_integer_functions():
    (got,) = launch(
        """
        int i = 0;
        a[i++] = __popc(0xf0f0u);
        a[i++] = __clz(1) + __clz(0);
        a[i++] = __ffs(8) + __ffs(0);
        a[i++] = min(3, 5) + max(3, 5) * 10;
        a[i++] = (int)max(-1, 5u);
        a[i++] = (int)(min(1.5f, 2.5f) * 2) + (int)(max(-1.0, 0.5f) * 20);
        a[i++] = min(5ll, 7ll) + min(5ul, 7ul) * 10;
        a[i++] = __byte_perm(0x33221100, 0x77665544, 0x7350) == 0x77335500;
        a[i++] = __brev(1) == 0x80000000u;
        a[i++] = (int)__umulhi(0x80000000u, 6);
        a[i++] = __float_as_int(1.0f) == 0x3f800000 && __uint_as_float(0x40000000u) == 2.0f;
        a[i++] = __funnelshift_r(0x12345678u, 0x9abcdef0u, 8) == 0xf0123456u;
        a[i++] = __float2int_rn(2.5f) + 10 * __float2int_rn(3.5f) + 100 * __float2int_rz(-1.9f);
        a[i++] = __float2int_rn(1e20f) == 0x7fffffff && __float2int_rn(0.0f / 0.0f) == 0;
        """,
        np.zeros(14, np.int32),
        block=1,
    )
    assert got.tolist() == [8, 63, 4, 53, -1, 13, 55, 1, 1, 3, 1, 1, -58, 1]


def test_atomics_give_back_what_was_there():
    sums, most, order, taken = launch(
        """
        atomicAdd(&a[0], 0.5f);
        atomicMax(&b[0], t * 7 % 32);
        atomicMin(&b[1], -t);
        c[atomicAdd(&d[0], 1)] = t;
        if (atomicCAS(&d[1], 0, t + 1) == 0) d[2] = t;
        c[32 + t] = atomicExch(&d[3], t);
        """,
        np.zeros(1, np.float32),
        np.zeros(2, np.int32),
        np.zeros(64, np.int32),
        np.zeros(4, np.int32),
        block=32,
    )
    assert sums[0] == 16 and most.tolist() == [31, -31]
    assert sorted(order[:32]) == list(range(32))
    assert taken[0] == 32 and taken[1] == taken[2] + 1
    assert sorted([*order[32:], taken[3]]) == sorted([*range(32), 0])


# --- asynchronous copies ---

COPY = """
    PF_DYNAMIC_SHARED(bytes);
    int *x = (int *)bytes;
    x[t] = -1; x[t + 32] = -2;
    pf_cp_async4(&x[t], &a[t], t != 5);
    pf_cp_async_commit();
    pf_cp_async4(&x[t + 32], &a[t], true);
    pf_cp_async_commit();
"""


def test_data_that_is_not_waited_for_is_old():
    x = np.arange(100, 132, dtype=np.int32)
    body = COPY + "b[t] = x[t]; pf_cp_async_wait<1>(); c[t] = x[t]; d[t] = x[t + 32];"
    body += "pf_cp_async_wait<0>(); e[t] = x[t + 32];"
    _, before, first, second, both = launch(body, x, *np.zeros((4, 32), np.int32), shared=256)
    assert (before == -1).all() and (second == -2).all()
    assert first.tolist() == [0 if t == 5 else 100 + t for t in range(32)]
    assert both.tolist() == x.tolist()


def test_what_is_not_committed_is_not_waited_for():
    body = "PF_DYNAMIC_SHARED(x); x[0] = 7; pf_cp_async16(x, a, true); pf_cp_async_wait<0>(); b[0] = x[0];"
    assert launch(body, np.zeros(4, np.int32), np.zeros(1, np.int32), block=1, shared=16)[1][0] == 7


def test_copies_may_land_early(monkeypatch):
    landed = set()
    for seed in range(1, 4):
        monkeypatch.setenv("PYFLASH_EMULATOR_SEED", str(seed))
        x = np.arange(100, 132, dtype=np.int32)
        landed |= set(launch(COPY + "b[t] = x[t + 32];", x, np.zeros(32, np.int32), shared=256)[1].tolist())
    assert -2 in landed and len(landed) > 8


def test_a_copy_that_is_not_valid_reads_nothing():
    body = "PF_DYNAMIC_SHARED(x); pf_cp_async16(x, (void *)16, false); pf_cp_async_commit();"
    body += "pf_cp_async_wait<0>(); a[t] = ((int *)x)[t];"
    assert launch(body, np.ones(4, np.int32), block=4, shared=16)[0].tolist() == [0] * 4


# --- matrices ---


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count, transposed):
    """The table of PTX: lane 4 r + c holds elements 2 c and 2 c + 1 of row r, or of column r."""
    matrices = np.random.default_rng(4).integers(0, 2**16, (count, 8, 8)).astype(np.uint16)
    pitch = 24  # elements from row to row
    rows = np.zeros((8 * count, pitch), np.uint16)
    rows[:, :8] = matrices.reshape(-1, 8)
    suffix = "_trans" if transposed else ""
    _, got = launch(
        f"""
        PF_DYNAMIC_SHARED(bytes);
        uint16_t *x = (uint16_t *)bytes;
        for (int i = t; i < {rows.size}; i += 32) x[i] = a[i];
        __syncwarp();
        uint32_t r[{count}];
        pf_ldmatrix_x{count}{suffix}(r, x + (t % {8 * count}) * {pitch});
        for (int i = 0; i < {count}; i++) b[t * {count} + i] = r[i];
        """,
        rows,
        np.zeros((32, count), np.uint32),
        shared=rows.nbytes,
    )
    expected = np.zeros((32, count, 2), np.uint16)
    for lane in range(32):
        for m in range(count):
            matrix = matrices[m].T if transposed else matrices[m]
            expected[lane, m] = matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
    assert got.view(np.uint16).reshape(32, count, 2).tolist() == expected.tolist()


def fragment(matrix: np.ndarray, rows: list[int], columns: list[int]) -> np.ndarray:
    """Registers of each lane: pairs (row g + dr, columns 2 t + dc and the next)."""
    registers = [
        [
            matrix[lane // 4 + dr, 2 * (lane % 4) + dc : 2 * (lane % 4) + dc + 2]
            for dr, dc in zip(rows, columns, strict=True)
        ]
        for lane in range(32)
    ]
    return np.ascontiguousarray(np.array(registers)).view(np.uint32).reshape(32, -1)


@pytest.mark.parametrize(
    ("name", "k", "dtype"),
    [
        ("pf_mma_f16", 16, np.float16),
        ("pf_mma_bf16", 16, ml_dtypes.bfloat16),
        ("pf_mma_f16_k8", 8, np.float16),
    ],
)
def test_matrix_product(name, k, dtype):
    a, b, d = floats(16, k, seed=5), floats(k, 8, seed=6), floats(16, 8, seed=7)
    a16, b16 = a.astype(dtype), b.astype(dtype)
    eights = range(0, k, 8)
    a_registers = fragment(
        a16.view(np.uint16), [dr for _ in eights for dr in (0, 8)], [dc for dc in eights for _ in range(2)]
    )
    b_registers = fragment(np.ascontiguousarray(b16.T).view(np.uint16), [0] * len(eights), list(eights))
    d_registers = np.array(
        [[d[i // 4 + j // 2 * 8, i % 4 * 2 + j % 2] for j in range(4)] for i in range(32)], np.float32
    )
    *_, got = launch(
        f"""
        uint32_t x[{k // 4}], y[{k // 8}];
        float d[4];
        for (int i = 0; i < {k // 4}; i++) x[i] = a[t * {k // 4} + i];
        for (int i = 0; i < {k // 8}; i++) y[i] = b[t * {k // 8} + i];
        for (int i = 0; i < 4; i++) d[i] = c[t * 4 + i];
        {name}(d, x, y);
        for (int i = 0; i < 4; i++) c[t * 4 + i] = d[i];
        """,
        a_registers,
        b_registers,
        d_registers,
    )
    expected = d.astype(np.float64) + a16.astype(np.float64) @ b16.astype(np.float64)
    for lane in range(32):
        for j in range(4):
            place = lane // 4 + j // 2 * 8, lane % 4 * 2 + j % 2
            np.testing.assert_allclose(got[lane, j], expected[place], rtol=1e-5, atol=2e-6)


def test_matrix_product_keeps_nan_and_infinity():
    """One row with a NaN, one with an infinity: the other rows stay finite."""
    a = np.zeros((16, 16), np.float16)
    a[3, 7], a[9, 0] = np.nan, np.inf
    b = np.ones((8, 16), np.float16)
    registers = (
        fragment(a.view(np.uint16), [0, 8, 0, 8], [0, 0, 8, 8]),
        fragment(b.view(np.uint16), [0, 0], [0, 8]),
    )
    *_, got = launch(
        """
        uint32_t x[4], y[2] = {b[2 * t], b[2 * t + 1]};
        for (int i = 0; i < 4; i++) x[i] = a[t * 4 + i];
        float d[4] = {};
        pf_mma_f16(d, x, y);
        for (int i = 0; i < 4; i++) c[t * 4 + i] = d[i];
        """,
        *registers,
        np.zeros((32, 4), np.float32),
    )
    for lane in range(32):
        rows = np.array([lane // 4, lane // 4, lane // 4 + 8, lane // 4 + 8])
        assert (np.isnan(got[lane]) == (rows == 3)).all() and (np.isposinf(got[lane]) == (rows == 9)).all()


# --- the emulator as a program ---


def test_other_ways_to_switch_stacks():
    """Without assembly, as on other processors, a part of these tests passes as well."""
    names = (
        "barriers_in_a_loop or sums_by_shuffles or matrix_product or trap or endless or behind_an_allocation"
    )
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", names],
        env=os.environ | {"PYFLASH_EMULATOR_FLAGS": "-DPF_EMU_UCONTEXT"},
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
        timeout=300,
    )
    assert result.returncode == 0, result.stdout


def test_switches_are_cheap():
    """A shuffle is one switch a lane: with two, or with a system call in each, the suite would crawl."""
    before = emulator.num_switches()
    launch(
        "int x = t; for (int i = 0; i < 100; i++) x = __shfl_xor_sync(~0u, x, 1); a[t] = x;",
        np.zeros(32, np.int32),
    )
    assert emulator.num_switches() - before < 1.2 * 32 * 100
