"""What only a GPU can show: arrays of CuPy and PyTorch, streams, graphs, devices, leaks."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import assert_same_bits, dense, paged, paged_varlen, run, varlen
from conftest import TestedBackend
from oracle import assert_matches

import pyflash

CUDA = TestedBackend("cuda", {"backend": "cuda"})


def _why_not() -> str | None:
    from pyflash.gpu import _device

    if type(_device.platform).__module__ != _device.__name__:
        return "the GPU is emulated"
    return _device.platform.unavailable()


pytestmark = pytest.mark.skipif(_why_not() is not None, reason=f"no GPU: {_why_not()}")


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch


def on_torch(torch: Any, x: np.ndarray) -> Any:
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(np.ascontiguousarray(x)).cuda()


def from_torch(torch: Any, x: Any, dtype: np.dtype) -> np.ndarray:
    if dtype.name == "bfloat16":
        return x.view(torch.int16).cpu().numpy().view(dtype)
    return x.cpu().numpy()


CALLS = {
    "prefill": lambda dtype: dense(
        701, seqlen_q=70, seqlen_kv=130, num_heads=4, num_kv_heads=2, head_dim=64, dtype=dtype, causal=True
    ),
    "decode": lambda dtype: dense(
        702, batch=3, seqlen_q=1, seqlen_kv=900, num_heads=8, num_kv_heads=2, head_dim=64, dtype=dtype
    ),
    "packed": lambda dtype: varlen(
        [1, 0, 60, 3], [900, 7, 60, 130], seed=703, num_heads=4, num_kv_heads=2, head_dim=64, dtype=dtype
    ),
    "paged": lambda dtype: paged(
        dense(
            704, batch=3, seqlen_q=1, seqlen_kv=600, num_heads=4, head_dim=64, dtype=dtype,
            seq_lens=np.array([600, 3, 520]),
        ),
        16,
    ),
    "paged and packed": lambda dtype: paged_varlen(
        varlen([1, 40, 3], [300, 60, 130], seed=705, num_heads=4, head_dim=64, dtype=dtype, causal=True), 16
    ),
}  # fmt: skip
DTYPES = ("float64", "float32", "float16", "bfloat16")


def moved(call: Any, to: Any) -> tuple[list[Any], dict[str, Any]]:
    """Arrays and options of a call with every array put somewhere else."""
    arrays = [to(x) for x in call.arrays.values()]
    return arrays, {n: to(x) if isinstance(x, np.ndarray) else x for n, x in call.options.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_arrays_of_cupy(cupy, name, dtype):
    """All arrays on the device, lengths and tables too: the result is CuPy's."""
    call = CALLS[name](dtype)
    want = run(call, CUDA)
    assert_matches(*want, call)
    arrays, options = moved(call, cupy.asarray)
    out, lse = getattr(pyflash, call.function)(*arrays, **options, return_lse=True)
    assert isinstance(out, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    assert_matches(cupy.asnumpy(out), cupy.asnumpy(lse), call)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_arrays_of_torch(torch, name, dtype):
    call = CALLS[name](dtype)
    arrays, options = moved(call, lambda x: on_torch(torch, x))
    out, lse = getattr(pyflash, call.function)(*arrays, **options, return_lse=True)
    assert isinstance(out, torch.Tensor) and out.is_cuda and out.dtype == arrays[0].dtype
    own = call.arrays["q"].dtype
    assert_matches(from_torch(torch, out, own), lse.cpu().numpy(), call)
    given = torch.full_like(out, float("nan"))
    again = getattr(pyflash, call.function)(*arrays, **options, out=given)
    assert again is given
    assert_same_bits(from_torch(torch, given, own), from_torch(torch, out, own))


class Interface:
    """An array that says where it lies, and nothing else."""

    def __init__(self, array: Any) -> None:
        self.keep = array
        self.__cuda_array_interface__ = {**array.__cuda_array_interface__, "stream": None}


class DLPack:
    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("kind", [Interface, DLPack])
def test_arrays_of_protocols(cupy, kind):
    call = CALLS["prefill"]("float32")
    arrays, options = moved(call, lambda x: kind(cupy.asarray(x)))
    out = pyflash.flash_attention(*arrays, **options)
    assert_same_bits(cupy.asnumpy(out), run(call, CUDA)[0])


def test_strided_arrays_are_not_copied(cupy):
    """Views of larger arrays, negative and zero strides among them."""
    call = CALLS["prefill"]("float16")
    want = run(call, CUDA)[0]
    q, k, v = (cupy.asarray(x) for x in call.arrays.values())
    wide = cupy.full((*q.shape[:-1], 2 * q.shape[-1]), np.nan, q.dtype)
    wide[..., ::2] = q
    back = cupy.ascontiguousarray(k[:, ::-1])[:, ::-1]
    got = pyflash.flash_attention(wide[..., ::2], back, v, causal=True)
    np.testing.assert_allclose(cupy.asnumpy(got).astype("f4"), want.astype("f4"), atol=2e-3)


def test_the_stream_is_the_callers(cupy):
    """Work before and after a call on the same stream is in order; nothing is put on another one."""
    call = dense(706, seqlen_q=300, seqlen_kv=2000, num_heads=8, head_dim=64, dtype="float16")
    want = run(call, CUDA)[0]
    stream = cupy.cuda.Stream(non_blocking=True)
    q, k, v = (cupy.asarray(x) for x in call.arrays.values())
    late = cupy.zeros_like(q)
    cupy.cuda.Device().synchronize()
    for _ in range(5):
        with stream:
            late[...] = 0
            large = cupy.ones((4000, 4000), "f4")
            for _ in range(4):
                large = large @ large * np.float32(1e-4)  # keeps the stream busy
            late[...] = q
            out = pyflash.flash_attention(late, k, v)
            late[...] = np.nan
            kept = out.copy()
        stream.synchronize()
        assert_same_bits(cupy.asnumpy(kept), want)


def test_the_stream_of_torch(torch):
    call = dense(707, seqlen_q=300, seqlen_kv=2000, num_heads=8, head_dim=64, dtype="float16")
    want = run(call, CUDA)[0]
    q, k, v = (on_torch(torch, x) for x in call.arrays.values())
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late = q.clone()
        out = pyflash.flash_attention(late, k, v)
        late.fill_(float("nan"))
    stream.synchronize()
    assert_same_bits(out.cpu().numpy(), want)


def test_a_call_waits_for_nothing(torch):
    """It returns while the stream is still busy with what came before."""
    q = torch.randn(1, 64, 4, 64, device="cuda", dtype=torch.float16)
    out = pyflash.flash_attention(q, q, q)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    event = torch.cuda.Event()
    event.record()
    for _ in range(3):
        pyflash.flash_attention(q, q, q, out=out)
    assert not event.query()
    torch.cuda.synchronize()


# ------------------------------------------------------------------------- graphs


def captured(cupy: Any, function: Any) -> tuple[Any, Any]:
    """A graph of what a function puts onto a stream; memory taken inside is an error."""
    stream = cupy.cuda.Stream(non_blocking=True)

    def refuse(size: int) -> None:
        raise AssertionError(f"{size} bytes were taken during the capture")

    with stream:
        function()  # compiles, and takes what is kept
        stream.synchronize()
        before = cupy.cuda.get_allocator()
        cupy.cuda.set_allocator(refuse)
        try:
            stream.begin_capture()
            function()
            graph = stream.end_capture()
        finally:
            cupy.cuda.set_allocator(before)
    return graph, stream


def test_a_graph_follows_contents_and_lengths(cupy):
    """After cupy#8318, pytorch#68985: q, cache and lengths change in place, also to longer lengths."""
    rng = np.random.default_rng(708)
    pages, page_size, heads, dim = 40, 16, 2, 64
    k_host, v_host = (rng.standard_normal((pages, page_size, heads, dim)).astype("f2") for _ in range(2))
    table_host = rng.permutation(pages)[:36].reshape(3, 12).astype("i4")
    lens_host = np.array([5, 100, 17], "i4")
    q_host = rng.standard_normal((3, 8, dim)).astype("f2")
    k, v, table, lens, q = map(cupy.asarray, (k_host, v_host, table_host, lens_host, q_host))
    out = cupy.full(q.shape, np.nan, q.dtype)
    told = pyflash.explain(q, k, v, block_table=table, seq_lens=lens)
    workspace = cupy.empty(max(told.workspace_bytes, 1), np.uint8)

    def call() -> None:
        pyflash.paged_attention(q, k, v, table, lens, out=out, workspace=workspace)

    graph, stream = captured(cupy, call)
    second, _ = captured(cupy, call)  # the first one stays right
    assert second is not None
    for seed, lengths in ((1, [5, 100, 17]), (2, [192, 1, 0]), (3, [64, 191, 192])):
        q_new = np.random.default_rng(seed).standard_normal(q_host.shape).astype("f2")
        k_new = np.random.default_rng(seed + 10).standard_normal(k_host.shape).astype("f2")
        q.set(q_new)
        k.set(k_new)
        lens.set(np.array(lengths, "i4"))
        out.fill(np.nan)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        for b, n in enumerate(lengths):
            keys = [pool[table_host[b]].reshape(-1, heads, dim)[None, :n] for pool in (k_new, v_host)]
            exact = pyflash.naive_attention(q_new[b][None, None], *keys)
            np.testing.assert_allclose(
                cupy.asnumpy(out)[b].astype("f4"), exact[0, 0].astype("f4"), atol=2e-3, rtol=2e-3
            )


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_graph_of_a_prefill_with_lengths_on_the_device(cupy, dtype):
    call = dense(709, batch=2, seqlen_q=70, seqlen_kv=150, num_heads=4, head_dim=64, dtype=dtype, causal=True)
    q, k, v = (cupy.asarray(x) for x in call.arrays.values())
    lens, out = cupy.asarray(np.array([150, 90])), cupy.full(q.shape, np.nan, q.dtype)
    graph, stream = captured(
        cupy, lambda: pyflash.flash_attention(q, k, v, causal=True, seq_lens=lens, out=out)
    )
    for lengths in ([150, 90], [71, 150]):
        lens.set(np.array(lengths))
        out.fill(np.nan)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        want = call.but(seq_lens=np.array(lengths))
        _, lse = run(want, CUDA)
        assert_matches(cupy.asnumpy(out), lse, want)


def decodes_with_splits(to: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """One query, and two sets of keys and values, each of them cut into parts."""
    rng = np.random.default_rng(710)
    q = to(rng.standard_normal((1, 1, 32, 128)).astype("f2"))
    caches = [
        tuple(to(rng.standard_normal((1, 8192, 8, 128)).astype("f2")) for _ in range(2)) for _ in range(2)
    ]
    told = pyflash.explain(q, *caches[0])
    assert told.num_splits > 1 and told.workspace_bytes > 0
    return q, caches


def mode_of_this_thread() -> int:
    """How this thread takes part in captures: 0 global, 1 of threads, 2 relaxed."""
    from pyflash.gpu import _device

    exchange, mode = _device._driver_library().cuThreadExchangeStreamCaptureMode, ctypes.c_int(2)
    assert exchange(ctypes.byref(mode)) == 0
    found = mode.value
    assert exchange(ctypes.byref(mode)) == 0 and mode.value == 2
    return found


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("stream", ["that of the calls before", "one of torch's own"])
@pytest.mark.parametrize("pool", ["as it is", "empty"])
def test_a_graph_of_torch_takes_memory_for_splits(torch, cupy, pool, stream, mode):
    """More than the calls before it have left: where that ends, the driver is asked during the capture."""
    q, caches = decodes_with_splits(lambda x: on_torch(torch, x))
    outs = [torch.full_like(q, float("nan")) for _ in caches]

    def both() -> None:
        for (k, v), out in zip(caches, outs, strict=True):
            pyflash.flash_attention(q, k, v, out=out)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        both()
    torch.cuda.synchronize()
    if pool == "empty":
        cupy.get_default_memory_pool().free_all_blocks()
    graph = torch.cuda.CUDAGraph()
    given = dict(stream=side) if stream == "that of the calls before" else {}
    with torch.cuda.graph(graph, capture_error_mode=mode, **given):
        both()
        assert mode_of_this_thread() == 0
    for seed in range(3):
        q.copy_(on_torch(torch, np.random.default_rng(seed).standard_normal(q.shape).astype("f2")))
        want = [pyflash.flash_attention(q, k, v) for k, v in caches]  # with memory that no graph may have
        for out in outs:
            out.fill_(float("nan"))
        with torch.cuda.stream(side):
            side.wait_stream(torch.cuda.current_stream())
            both()
            for out in outs:
                out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        for out, other in zip(outs, want, strict=True):
            assert_same_bits(out.cpu().numpy(), other.cpu().numpy())


@pytest.mark.parametrize("mode", ["Global", "ThreadLocal", "Relaxed"])
def test_a_graph_of_cupy_takes_memory_for_splits(cupy, mode):
    q, caches = decodes_with_splits(cupy.asarray)
    outs = [cupy.full_like(q, np.nan) for _ in caches]

    def both() -> None:
        for (k, v), out in zip(caches, outs, strict=True):
            pyflash.flash_attention(q, k, v, out=out)

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        both()
        stream.synchronize()
        stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
        try:
            both()
            assert mode_of_this_thread() == 0
        finally:
            graph = stream.end_capture()
        for seed in range(3):
            q.set(np.random.default_rng(seed).standard_normal(q.shape).astype("f2"))
            want = [pyflash.flash_attention(q, k, v) for k, v in caches]
            for out in outs:
                out.fill(np.nan)
            graph.launch(stream)
            stream.synchronize()
            for out, other in zip(outs, want, strict=True):
                assert_same_bits(cupy.asnumpy(out), cupy.asnumpy(other))


def test_host_arrays_are_refused_during_a_capture(cupy):
    q = cupy.zeros((2, 1, 4, 64), np.float16)
    k = cupy.zeros((2, 50, 4, 64), np.float16)
    out = cupy.empty_like(q)
    lens = np.array([3, 50])
    there = cupy.asarray(lens)
    pyflash.flash_attention(q, k, k, seq_lens=lens, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(pyflash.UnsupportedError, match="host memory"):
                pyflash.flash_attention(q, k, k, seq_lens=lens, out=out)
            with pytest.raises(pyflash.UnsupportedError, match="check_indices"):
                pyflash.flash_attention(q, k, k, seq_lens=there, out=out, check_indices=True)
        finally:
            stream.end_capture()


# ------------------------------------------------------------- indices on the device


def surrounded(cupy: Any, x: np.ndarray) -> tuple[Any, Any]:
    """An array on the device in the middle of a larger one, which is to stay as it is."""
    frame = cupy.full((x.size + 2048,), 77, x.dtype)
    inner = frame[1024 : 1024 + x.size].reshape(x.shape)
    inner[...] = cupy.asarray(x)
    return inner, frame


BAD_TABLES = {
    "a page outside of the pool": (lambda t, n: t.__setitem__((0, 1), 10**6), [0]),
    "a negative page": (lambda t, n: t.__setitem__((1, 0), -1), [1]),
    "a length below 0": (lambda t, n: n.__setitem__(0, -5), [0]),
    "a length beyond the table": (lambda t, n: n.__setitem__(1, 10**6), [1]),
}


@pytest.mark.parametrize("seqlen_q", [1, 40])
@pytest.mark.parametrize("what", BAD_TABLES)
def test_a_bad_index_makes_its_own_rows_nan(cupy, what, seqlen_q):
    call = paged(
        dense(710, batch=3, seqlen_q=seqlen_q, seqlen_kv=100, num_heads=2, head_dim=64, dtype="float16"), 16
    )
    spoil, bad = BAD_TABLES[what]
    want, _ = run(call, CUDA)
    table, lens = call.arrays["block_table"].copy(), call.arrays["seq_lens"].copy()
    spoil(table, lens)
    arrays = {n: cupy.asarray(x) for n, x in call.arrays.items()} | {
        "block_table": cupy.asarray(table), "seq_lens": cupy.asarray(lens),
    }  # fmt: skip
    out, frame = surrounded(cupy, np.zeros_like(want))
    pyflash.paged_attention(*arrays.values(), out=out)
    got = cupy.asnumpy(out)
    for b in range(3):
        if b in bad:
            assert np.isnan(got[b]).all()
        else:
            np.testing.assert_allclose(got[b].astype("f4"), want[b].astype("f4"), atol=2e-3)
    border = cupy.asnumpy(frame)
    assert (border[:1024] == 77).all() and (border[-1024:] == 77).all()
    with pytest.raises(pyflash.InvalidArgument, match=r"^(block_table|seq_lens)\["):
        pyflash.paged_attention(*arrays.values(), out=out, check_indices=True)


def test_bad_prefix_sums_stay_inside(cupy):
    call = CALLS["packed"]("float16")
    arrays = {n: cupy.asarray(x) for n, x in call.arrays.items()}
    out, frame = surrounded(cupy, np.zeros((64, 4, 64), "f2"))
    for bad in ([0, 1, 1, 10**6, 64], [0, -7, 1, 61, 64], [0, 64, 1, 61, 64]):
        arrays["cu_seqlens_q"] = cupy.asarray(np.array(bad, "i4"))
        pyflash.flash_attention_varlen(*arrays.values(), out=out, max_seqlen_q=64)
        border = cupy.asnumpy(frame)
        assert (border[:1024] == 77).all() and (border[-1024:] == 77).all()
        with pytest.raises(pyflash.InvalidArgument, match="cu_seqlens_q"):
            pyflash.flash_attention_varlen(*arrays.values(), out=out, check_indices=True)


# -------------------------------------------------------------------- devices, leaks


def test_two_devices(cupy):
    """After flash-attention#54, cupy#5795: arrays on another device than the current one."""
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    call = CALLS["prefill"]("float16")
    want = run(call, CUDA)[0]
    for current, other in ((0, 1), (1, 0)):
        with cupy.cuda.Device(other):
            arrays, options = moved(call, cupy.asarray)
        with cupy.cuda.Device(current):
            out = pyflash.flash_attention(*arrays, **options)
            assert cupy.cuda.runtime.getDevice() == current
            assert out.device.id == other
            with cupy.cuda.Device(other):
                assert_same_bits(cupy.asnumpy(out), want)
            here = cupy.asarray(call.arrays["k"])
            with pytest.raises(pyflash.InvalidArgument, match=f"k: found an array on GPU {current}"):
                pyflash.flash_attention(arrays[0], here, arrays[2], **options)


def test_arrays_on_a_device_are_refused_by_other_backends(cupy):
    q = cupy.zeros((1, 3, 2, 8), np.float32)
    for backend in ("c", "numpy"):
        with pytest.raises(pyflash.UnsupportedError, match=r"^q: "):
            pyflash.flash_attention(q, q, q, backend=backend)


def test_memory_is_flat(cupy):
    """After keops#342: 2,000 calls of one shape, 200 of new shapes; memory of the device, modules, files."""
    from pyflash.gpu import _compile

    def same(count: int) -> None:
        q, k = cupy.ones((1, 2, 4, 64), np.float16), cupy.ones((1, 100, 2, 64), np.float16)
        for _ in range(count):
            pyflash.flash_attention(q, k, k, return_lse=True)

    def new(first: int) -> None:
        for i in range(first, first + 200):
            q, k = cupy.ones((1, 1 + i % 40, 2, 64), np.float16), cupy.ones((1, 50 + i, 2, 64), np.float16)
            pyflash.flash_attention(q, k, k, causal=True, scale=i / 7)

    def used() -> int:
        cupy.cuda.Device().synchronize()
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
        return int(cupy.get_default_memory_pool().total_bytes())

    same(100), new(0)
    before, files = used(), len(os.listdir("/proc/self/fd"))
    same(2000), new(300)
    assert used() - before <= 1 << 20
    assert len(os.listdir("/proc/self/fd")) == files
    assert all(len(loaded.kernels) <= _compile.CAPACITY for loaded in _compile._loaded.values())


FORKED = """
import os
import numpy as np, pyflash

q = np.ones((1, 3, 2, 8), "f4")
pyflash.flash_attention(q, q, q, backend="cuda")
child = os.fork()
if child == 0:
    try:
        pyflash.flash_attention(q, q, q, backend="cuda")
    except pyflash.BackendUnavailable as error:
        os._exit(0 if "forked" in str(error) else 4)
    os._exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
pyflash.flash_attention(q, q, q, backend="cuda")
"""


def test_a_child_of_a_fork_says_why_it_cannot():
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", FORKED],
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_c_and_cuda_agree(name, dtype):
    """On the same inputs in one process, each within the error rule of the exact answer."""
    call = CALLS[name](dtype)
    for backend in (TestedBackend("c", {"backend": "c"}), CUDA):
        assert_matches(*run(call, backend), call)


@pytest.mark.parametrize("head_dim_v", [129, 131, 133, 136])
def test_static_variables_count_as_shared_memory(head_dim_v):
    """A launch that needs a little less than 48 KiB besides them has to ask for it."""
    call = paged(dense(0, seqlen_q=1, seqlen_kv=129, head_dim=3, head_dim_v=head_dim_v, causal=True), 1)
    assert_matches(*run(call, CUDA, family="prefill"), call)
