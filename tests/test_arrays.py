"""Arrays of all kinds: what is seen of them, what is refused, and of which kind results are.

What lies on a GPU lies in host memory here, in arrays that fail when somebody reads them.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from calls import assert_same_bits, bits, normal, numpy_dtype, pages_of, prefix_sums
from fake_cuda import FakeArray, FakeBackend, FakeCuda, on_host, read

import pyflash
from pyflash import _args, _arrays, _backends
from pyflash._array_kinds import cupy_stream
from pyflash._device_array import DeviceArray

F4 = np.float32


@pytest.fixture
def cuda(monkeypatch):
    """A library of arrays on a GPU that is no GPU."""
    kind = FakeCuda()
    monkeypatch.setattr(_arrays, "_kinds", [kind, *_arrays._kinds])
    monkeypatch.setattr(_arrays, "own_kind", kind)
    return kind


@pytest.fixture
def gpu(monkeypatch, cuda):
    """The backend "cuda" on that GPU."""
    backend = FakeBackend()
    monkeypatch.setitem(_backends._loaded, "cuda", backend)
    return backend


def on_gpu(x, device=0):
    """An array of NumPy copied to the GPU, pairs and options too; other values as they are."""
    if isinstance(x, np.ndarray):
        return FakeArray(x.copy(order="K"), device)
    if isinstance(x, tuple):
        return tuple(on_gpu(part, device) for part in x)
    return {name: on_gpu(part, device) for name, part in x.items()} if isinstance(x, dict) else x


def back(x):
    """A result on the host."""
    if isinstance(x, tuple):
        return tuple(back(part) for part in x)
    return x.memory if isinstance(x, FakeArray) else x


def test_numpy_arrays_and_whatever_is_no_array_are_seen_as_they_are():
    for x in (np.ones(3), np.ma.masked_array([1]), np.float32(1), None, 1, 1.0, "x", [1], (1,), print, int):
        assert _arrays.see("x", x) is x
        assert not _arrays.is_on_device(x) and _arrays.kind_of(x) is None


# --- calls with arrays on a GPU ---


def some_call(seed=0, seqlen_q=3, **options):
    arrays = {
        "q": normal(seed, (2, seqlen_q, 4, 8)),
        "k": normal(seed + 1, (2, 5, 2, 8)),
        "v": normal(seed + 2, (2, 5, 2, 6)),
    }
    return arrays, options


PACKED = {
    "q": normal(0, (5, 4, 8)),
    "k": normal(1, (7, 2, 8)),
    "v": normal(2, (7, 2, 6)),
    "cu_seqlens_q": prefix_sums([2, 0, 3]),
    "cu_seqlens_kv": prefix_sums([4, 1, 2], "int64"),
}
POOLS = pages_of([(normal(5, (n, 2, 8)), normal(6, (n, 2, 6))) for n in (5, 2, 7)], 4)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "offset": {"causal": True, "q_offset": np.array([1, 2])},
    "window": {"window": (1, 1), "sink_tokens": 1, "q_offset": 2},
    "lengths": {"seq_lens": np.array([5, 2], np.int32)},
    "spans": {"spans": (np.array([0, 1, 1]), 5)},
    "spans of both": {"spans": (np.zeros((2, 1), np.int32), np.full((2, 3), 4))},
    "slopes": {"alibi_slopes": np.linspace(0.1, 0.4, 4).astype(np.float16), "softcap": 2.0},
    "slopes of each": {"alibi_slopes": normal(7, (2, 4))},
    "bias": {"bias": normal(8, (4, 1, 5), "bfloat16")},
    "mask": {"mask": normal(9, (2, 1, 3, 5)) > -0.5},
    "sinks": {"sinks": normal(10, (4,)), "lse_includes_sinks": True},
    "parents": {"tree": np.array([[-1, 0, 0], [-1, -1, 1]])},
    "ancestors": {"tree": np.tril(np.ones((2, 3, 3), bool))},
    "scales": {"k_scale": np.array([0.5, 2.0], F4), "v_scale": 3.0},
    "scales per token": {"k_scale": np.abs(normal(11, (2, 5, 2))), "v_scale": np.abs(normal(12, (2, 5, 2)))},
}
#: Options that may lie on the host beside queries on a GPU.
ON_EITHER_SIDE = sorted(OPTIONS.keys() - {"bias", "mask", "scales per token"})


@pytest.mark.parametrize("name", OPTIONS)
def test_a_call_on_the_gpu(gpu, cuda, name):
    arrays, options = some_call(**OPTIONS[name])
    want = pyflash.flash_attention(*arrays.values(), **options, return_lse=True, backend="numpy")
    got = pyflash.flash_attention(*on_gpu(arrays).values(), **on_gpu(options), return_lse=True)
    assert [type(x) for x in got] == [FakeArray, FakeArray]
    assert_same_bits(back(got), want)
    assert cuda.uploads == cuda.downloads == 0


@pytest.mark.parametrize("name", ON_EITHER_SIDE)
def test_small_arrays_may_stay_on_the_host(gpu, name):
    arrays, options = some_call(**OPTIONS[name])
    want = pyflash.flash_attention(*arrays.values(), **options, backend="numpy")
    assert_same_bits(pyflash.flash_attention(*on_gpu(arrays).values(), **options).memory, want)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("ndim", [4, 3, 2])
def test_results_are_of_the_kind_and_shape_of_the_queries(gpu, layout, ndim):
    arrays, options = some_call(layout=layout, causal=True)
    if layout == "bhsd":
        arrays = {name: x.swapaxes(1, 2) for name, x in arrays.items()}
    part = {4: np.s_[:], 3: np.s_[0], 2: np.s_[0, 0] if layout == "bhsd" else np.s_[0, :, 0]}[ndim]
    arrays = {name: x[part] for name, x in arrays.items()}
    want = pyflash.flash_attention(*arrays.values(), **options, return_lse=True, backend="numpy")
    got = pyflash.flash_attention(*on_gpu(arrays).values(), **options, return_lse=True, backend="cuda")
    assert_same_bits(back(got), want)
    given = on_gpu(np.full(want[0].shape, np.nan, F4))
    out, lse = pyflash.flash_attention(*on_gpu(arrays).values(), **options, return_lse=True, out=given)
    assert out is given
    assert_same_bits((out.memory, lse.memory), want)


@pytest.mark.parametrize("index", ["device", "host"])
def test_packed_sequences_on_the_gpu(gpu, cuda, index):
    options = {"causal": True, "return_lse": True}
    want = pyflash.flash_attention_varlen(**PACKED, **options, backend="numpy")
    given = on_gpu(PACKED)
    if index == "host":
        given |= {name: PACKED[name] for name in ("cu_seqlens_q", "cu_seqlens_kv")}
    assert_same_bits(back(pyflash.flash_attention_varlen(**given, **options)), want)
    assert gpu.calls[-1].max_seqlen_q == (3 if index == "host" else 5)
    assert gpu.calls[-1].batch == 3
    pyflash.flash_attention_varlen(**given, **options, max_seqlen_q=4)
    assert gpu.calls[-1].max_seqlen_q == (3 if index == "host" else 4)
    pyflash.flash_attention_varlen(**given, **options, max_seqlen_q=10**9)
    assert gpu.calls[-1].max_seqlen_q == (3 if index == "host" else 5)
    assert cuda.uploads == cuda.downloads == 0


@pytest.mark.parametrize("index", ["device", "host"])
@pytest.mark.parametrize("cache_layout", ["nhd", "hnd"])
def test_pages_on_the_gpu(gpu, cache_layout, index):
    pools = dict(POOLS)
    if cache_layout == "hnd":
        pools |= {name: POOLS[name].swapaxes(1, 2) for name in ("k_cache", "v_cache")}
    options = {"cache_layout": cache_layout, "return_lse": True}
    given = on_gpu(pools)
    if index == "host":
        given |= {name: pools[name] for name in ("block_table", "seq_lens")}
    for q, more in (
        (normal(20, (3, 4, 8)), {}),
        (normal(21, (3, 2, 4, 8)), {"causal": True}),
        (normal(22, (5, 4, 8)), {"cu_seqlens_q": prefix_sums([2, 1, 2]), "causal": True}),
    ):
        want = pyflash.paged_attention(q, **pools, **options, **more, backend="numpy")
        got = pyflash.paged_attention(on_gpu(q), **given, **options, **on_gpu(more))
        assert_same_bits(back(got), want)


def test_numpy_arrays_stay_numpy_arrays_for_the_cuda_backend(gpu):
    arrays, _ = some_call()
    want = pyflash.flash_attention(*arrays.values(), backend="numpy")
    got = pyflash.flash_attention(*arrays.values(), backend="cuda")
    assert type(got) is np.ndarray
    assert_same_bits(got, want)
    assert all(type(x) is np.ndarray for x in (gpu.calls[-1].q, gpu.calls[-1].k, gpu.calls[-1].out))


def test_where_queries_lie_chooses_the_backend(gpu):
    arrays, _ = some_call()
    assert _backends.resolve(None, arrays["q"]).name == _backends.resolve("auto", arrays["q"]).name == "c"
    assert (
        _backends.resolve(None, on_gpu(arrays["q"])) is _backends.resolve("auto", on_gpu(arrays["q"])) is gpu
    )
    pyflash.explain(*on_gpu(arrays).values())
    assert len(gpu.calls) == 1
    with pyflash.use_backend("numpy"), pytest.raises(pyflash.UnsupportedError):
        pyflash.flash_attention(*on_gpu(arrays).values())


@pytest.mark.parametrize("backend", ["c", "numpy"])
def test_other_backends_refuse_arrays_on_a_gpu(gpu, backend):
    if pyflash.available_backends()[backend] is not None:
        pytest.skip(f"{backend} is not available")
    arrays, _ = some_call()
    where = f"is not supported by the {backend} backend; expected host memory, or backend='cuda'"
    for given, name in (
        (on_gpu(arrays, 1), "q"),
        ({**arrays, "k": on_gpu(arrays["k"], 1)}, "k"),
        ({**arrays, "seq_lens": on_gpu(np.array([1, 9]), 1)}, "seq_lens"),
        ({**arrays, "spans": (0, on_gpu(np.array([3, 3, 2]), 1))}, "spans[1]"),
        ({**arrays, "out": on_gpu(np.zeros((2, 3, 4, 6), F4), 1)}, "out"),
    ):
        with pytest.raises(pyflash.UnsupportedError) as caught:
            pyflash.flash_attention(**given, backend=backend)
        assert str(caught.value) == f"{name}: an array on GPU 1 {where}"


def test_arrays_in_different_places_are_refused(gpu):
    arrays, _ = some_call()
    for name, value in (
        ("k", arrays["k"]),
        ("out", np.zeros((2, 3, 4, 6), F4)),
        ("bias", np.zeros((3, 5), F4)),
        ("mask", np.ones((3, 5), bool)),
        ("k_scale", np.ones((2, 5, 2), F4)),
        ("workspace", np.zeros(99, np.uint8)),
    ):
        with pytest.raises(pyflash.InvalidArgument) as caught:
            pyflash.flash_attention(**{**on_gpu(arrays), name: value})
        assert str(caught.value) == f"{name}: found an array in host memory, expected GPU 0, where q lies"
    for name, value in (("v", arrays["v"]), ("seq_lens", np.array([1, 2])), ("sinks", np.zeros(4, F4))):
        with pytest.raises(pyflash.InvalidArgument) as caught:
            pyflash.flash_attention(**{**on_gpu(arrays), name: on_gpu(value, 1)})
        assert str(caught.value) == f"{name}: found an array on GPU 1, expected GPU 0, where q lies"
    for name, value in (("v", arrays["v"]), ("seq_lens", np.array([1, 2]))):
        with pytest.raises(pyflash.InvalidArgument) as caught:
            pyflash.flash_attention(**{**arrays, name: on_gpu(value)}, backend="cuda")
        assert str(caught.value) == f"{name}: found an array on GPU 0, expected host memory, where q lies"


def test_overlaps_are_found_on_the_gpu(gpu):
    memory = np.zeros((2, 3, 4, 8), F4)
    q = FakeArray(memory)
    k = on_gpu(normal(1, (2, 5, 2, 8)))
    for out in (q, FakeArray(memory[::-1])):
        with pytest.raises(pyflash.InvalidArgument, match=r"^out: found memory that it shares with q, "):
            pyflash.flash_attention(q, k, k, out=out)
    memory.flags.writeable = False
    with pytest.raises(pyflash.InvalidArgument, match=r"^out: found a read-only array"):
        pyflash.flash_attention(on_gpu(memory), k, k, out=q)


def test_shapes_and_types_are_refused_on_the_gpu_in_the_words_of_the_host(gpu):
    arrays, _ = some_call()
    for wrong in (
        {"k": arrays["k"][..., :7]},
        {"v": arrays["v"].astype(np.float16)},
        {"q": arrays["q"].astype(np.int32)},
        {"seq_lens": np.zeros(3, np.int32)},
        {"seq_lens": np.zeros(2, F4)},
        {"bias": np.zeros((3, 4), F4)},
        {"mask": np.zeros((3, 5), np.int8)},
        {"sinks": np.zeros(3, F4)},
        {"spans": (np.zeros(4, np.int64), 3)},
        {"tree": np.zeros((2, 9), np.int64)},
        {"alibi_slopes": np.zeros(5, F4)},
        {"q_offset": np.zeros(3, np.int64)},
        {"out": np.zeros((2, 3, 4, 5), F4)},
        {"max_seqlen_q": 2},
    ):
        with pytest.raises(pyflash.InvalidArgument) as on_the_host:
            pyflash.flash_attention(**{**arrays, **wrong}, backend="numpy")
        with pytest.raises(pyflash.InvalidArgument) as caught:
            pyflash.flash_attention(**on_gpu({**arrays, **wrong}))
        assert str(caught.value) == str(on_the_host.value)


#: What is wrong with contents, each with the words of the host.
BAD_CONTENTS = {
    "lengths": ("flash_attention", {"seq_lens": np.array([3, 6], np.int32)}),
    "offset": ("flash_attention", {"q_offset": np.array([2**60, 0])}),
    "span": ("flash_attention", {"spans": (np.array([0, 2, 1]), 3)}),
    "parent": ("flash_attention", {"tree": np.array([[-1, 2, 0], [-1, 0, 0]])}),
    "sums": ("flash_attention_varlen", {"cu_seqlens_q": np.array([0, 3, 2, 5], np.int32)}),
    "table": ("paged_attention", {"block_table": np.full((3, 2), 99)}),
    "lengths of pages": ("paged_attention", {"seq_lens": np.array([1, 9, 1])}),
}


@pytest.mark.parametrize("name", BAD_CONTENTS)
def test_contents_of_index_arrays_are_checked_when_asked_for(gpu, cuda, monkeypatch, name):
    function, wrong = BAD_CONTENTS[name]
    arrays = {
        "flash_attention": some_call()[0],
        "flash_attention_varlen": PACKED,
        "paged_attention": {"q": normal(20, (3, 4, 8)), **POOLS},
    }[function]
    call = getattr(pyflash, function)
    with pytest.raises(pyflash.InvalidArgument) as on_the_host:
        call(**{**arrays, **wrong}, backend="numpy")
    given = on_gpu({**arrays, **wrong})
    with pytest.raises(pyflash.InvalidArgument) as caught:
        call(**given, check_indices=True)
    assert str(caught.value) == str(on_the_host.value)
    assert call(**on_gpu(arrays), check_indices=True).shape == call(**arrays, backend="numpy").shape
    cuda.is_capturing = True
    with pytest.raises(pyflash.UnsupportedError, match=r"^check_indices: .* cannot be read back while"):
        call(**given, check_indices=True)
    cuda.downloads, gpu.attention = 0, lambda args, again=None: gpu.calls.append(args)
    call(**given)  # for the kernel to bound
    assert not cuda.downloads
    for name, value in wrong.items():
        there = getattr(gpu.calls[-1], name)
        assert isinstance(there[0] if isinstance(there, tuple) else there, DeviceArray), value


def test_options_of_the_cuda_backend(gpu):
    arrays, _ = some_call()
    given = on_gpu(arrays)
    workspace = on_gpu(np.zeros(256, np.uint8))
    gpu.attention = lambda args, again=None: gpu.calls.append(args)
    pyflash.flash_attention(
        **given, batch_invariant=True, workspace=workspace, score_mod="score * 2", mask_mod="key < query"
    )
    args = gpu.calls[-1]
    assert args.batch_invariant and args.workspace.owner is workspace
    assert (args.score_mod, args.mask_mod) == ("score * 2", "key < query")
    for name, value, words in (
        ("batch_invariant", 1, "found 1 (int), expected True or False"),
        ("check_indices", "yes", "found 'yes' (str), expected True or False"),
        (
            "score_mod",
            " ",
            "found ' ', expected a CUDA C++ expression in score, batch, head, query, key, as a str",
        ),
        ("mask_mod", 1, "found 1 (int), expected a CUDA C++ expression in batch, head, query, key, as a str"),
        ("q_scale", 2.0, "found 2.0 (float), expected None: q is float32, not float8_e4m3fn"),
        ("workspace", on_gpu(np.zeros(9, F4)), None),
        ("k_scale", on_gpu(np.ones(2)), "found dtype float64, expected float32 where it lies on a GPU"),
    ):
        with pytest.raises(pyflash.InvalidArgument) as caught:
            pyflash.flash_attention(**{**given, name: value})
        assert words is None or str(caught.value) == f"{name}: {words}"
    for name, value in (("score_mod", lambda *x: x[0]), ("isa", "scalar"), ("num_threads", 1)):
        with pytest.raises(pyflash.UnsupportedError, match=f"^{name}: .* not supported by the cuda backend"):
            pyflash.flash_attention(**{**given, name: value})
    with pytest.raises(
        pyflash.UnsupportedError, match=r"^workspace: .* the cuda backend beside arrays in host"
    ):
        pyflash.flash_attention(**arrays, workspace=np.zeros(9, np.uint8), backend="cuda")


def test_a_workspace_begins_where_numbers_may(gpu):
    """A GPU that is told to write a number between two places of numbers ends the whole process."""
    given, buffer = on_gpu(some_call()[0]), on_gpu(np.zeros(99, np.uint8))
    pyflash.flash_attention(**given, workspace=buffer[8:])
    with pytest.raises(
        pyflash.InvalidArgument, match=r"^workspace: found address 0x\w+, expected a multiple of 8"
    ):
        pyflash.flash_attention(**given, workspace=buffer[12:])


def test_float8_queries(gpu):
    float8 = numpy_dtype("float8_e4m3fn")
    arrays = {name: x.astype(float8) for name, x in some_call()[0].items()}
    gpu.attention = lambda args, again=None: gpu.calls.append(args)
    out, lse = pyflash.flash_attention(**on_gpu(arrays), q_scale=0.5, return_lse=True)
    assert (out.memory.dtype, lse.memory.dtype) == (numpy_dtype("bfloat16"), F4)
    assert gpu.calls[-1].q_scale == 0.5 and gpu.calls[-1].q.dtype == float8
    per_head = on_gpu(np.ones(4, F4))
    as_bytes = {name: x.view(np.uint8) for name, x in arrays.items()}
    out = pyflash.flash_attention(
        **on_gpu(as_bytes), q_scale=per_head, kv_dtype="e4m3fn", out_dtype="float16"
    )
    assert out.memory.dtype == np.float16 and gpu.calls[-1].q.dtype == float8
    assert gpu.calls[-1].q_scale.shape == (2, 3, 4)
    with pytest.raises(pyflash.InvalidArgument, match=r"^q_scale: found shape .*num_heads"):
        pyflash.flash_attention(**on_gpu(arrays), q_scale=on_gpu(np.ones(3, F4)))
    with pytest.raises(pyflash.InvalidArgument, match=r"^q: found dtype float8_e4m3fn, "):
        pyflash.flash_attention(**arrays, backend="c")


def test_streams(cuda):
    other, third = FakeCuda(), FakeCuda()
    other.streams, third.streams = {0: 9}, {0: 7}
    x = FakeArray(np.zeros(3))
    q, k = cuda.see("q", x), cuda.see("k", x)
    assert _arrays.streams_of(q, [k, None, 3, np.zeros(2)]) == (7, [])
    assert _arrays.streams_of(q, [k, other.see("v", x), other.see("v", x), third.see("v", x)]) == (7, [9])


# --- what is not attention ---


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("ndim", [5, 4, 3])
def test_merge_on_the_gpu(gpu, ndim, layout):
    out, lse = normal(30, (3, 2, 5, 4, 6), "float16"), normal(31, (3, 2, 4, 5))
    if ndim < 5:
        out, lse = (out[:, 0], lse[:, 0]) if ndim == 4 else (out[:, 0, :, 0], lse[:, 0, 0])
    if layout == "bhsd" and ndim > 3:
        out = out.swapaxes(-3, -2)
    sinks = normal(32, (1 if ndim == 3 else 4,))
    for options in ({}, {"sinks": sinks, "out_dtype": "float32"}):
        want = pyflash.merge_states(out, lse, layout=layout, **options, backend="numpy")
        got = pyflash.merge_states(on_gpu(out), on_gpu(lse), layout=layout, **on_gpu(options))
        assert [type(x) for x in got] == [FakeArray, FakeArray]
        assert_same_bits(back(got), want)
    with pytest.raises(pyflash.InvalidArgument) as caught:
        pyflash.merge_states(on_gpu(out), lse, layout=layout)
    assert str(caught.value) == "lse: found an array in host memory, expected GPU 0, where out lies"


APPENDS = {
    "slots": {"slots": np.array([3, -1, 17, 4])},
    "table": {"block_table": np.array([[1, 3], [2, 0]]), "seq_lens": np.array([5, 2], np.int32)},
    "packed": {
        "block_table": np.array([[1, 3, 4], [2, 0, -1]]),
        "seq_lens": np.array([4, 2], np.int32),
        "cu_seqlens": prefix_sums([1, 3]),
    },
    "dense": {"seq_lens": np.array([0, 1])},
}


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("index", ["device", "host"])
@pytest.mark.parametrize("name", APPENDS)
def test_append_on_the_gpu(gpu, name, index, rotary):
    places = APPENDS[name]
    packed = name in ("slots", "packed")
    tokens = [normal(40 + i, (4, 2, 8) if packed else (2, 2, 2, 8)) for i in range(2)]
    pools = [normal(50 + i, (2 if name == "dense" else 5, 4, 2, 8)) for i in range(2)]
    rotation = {}
    if rotary:
        rotation = {"cos": normal(60, (4 if name == "slots" else 9, 3)), "sin": normal(61, (9, 3))}
        rotation["sin"] = rotation["sin"][: len(rotation["cos"])]
    want = [x.copy() for x in pools]
    pyflash.append_kv(*tokens, *want, **places, **rotation, backend="numpy")
    got = [on_gpu(x) for x in pools]
    given = places if index == "host" else on_gpu(places)
    pyflash.append_kv(*map(on_gpu, tokens), *got, **given, **on_gpu(rotation))
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one.memory, other)
    args = gpu.calls[-1]
    assert (args.slots is None) == (index == "device" and name != "slots")
    assert args.k.shape == (4, 2, 8)


def test_append_of_strided_tokens_and_quantised(gpu, cuda):
    k = normal(40, (2, 8, 3, 2)).transpose(0, 2, 3, 1)  # tokens and heads cannot be one axis of it
    places = APPENDS["dense"]
    for scales in ({"k_scale": np.array([0.1, 0.2], F4)}, {"k_scale": np.zeros((2, 4, 2), F4)}):
        scales["v_scale"] = scales["k_scale"].copy()
        want = [np.zeros((2, 4, 2, 8), np.int8) for _ in range(2)]
        got = [on_gpu(x) for x in want]
        there = on_gpu(scales)
        pyflash.append_kv(k, k, *want, **places, **scales, backend="numpy")
        pyflash.append_kv(on_gpu(k), on_gpu(k), *got, **on_gpu(places), **there)
        for one, other in zip(got, want, strict=True):
            assert np.array_equal(one.memory, other)
        assert_same_bits(there["k_scale"].memory, scales["k_scale"])


@pytest.mark.parametrize("index", ["device", "host"])
def test_statistics_on_the_gpu(gpu, cuda, index):
    rows = np.array([0, 2, 2])
    arrays, options = some_call(causal=True, seq_lens=np.array([5, 3]))
    _, lse = pyflash.flash_attention(*arrays.values(), **options, return_lse=True, backend="numpy")
    want = pyflash.attention_stats(
        arrays["q"], arrays["k"], lse, **options, rows=rows, top_k=2, backend="numpy"
    )
    if index == "device":
        options, rows = on_gpu(options), on_gpu(rows)
    strided = FakeArray(np.ascontiguousarray(lse.astype(np.float64)[..., ::-1])[..., ::-1])
    q, k, _ = on_gpu(arrays).values()
    got = pyflash.attention_stats(q, k, strided, **options, rows=rows, top_k=2)
    given = gpu.calls[-1].lse
    assert given.dtype == F4 and given.flags.c_contiguous
    for name, one, other in zip(want._fields, got, want, strict=True):
        assert type(one) is FakeArray
        assert np.array_equal(one.memory, other), name
    assert cuda.downloads == 0


def test_statistics_of_packed_and_paged_calls_on_the_gpu(gpu):
    q, k, _, *cu = PACKED.values()
    _, lse = pyflash.flash_attention_varlen(**PACKED, return_lse=True, backend="numpy")
    where = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), cu, strict=True))
    want = pyflash.attention_stats(q, k, lse, **where, backend="numpy")
    got = pyflash.attention_stats(on_gpu(q), on_gpu(k), on_gpu(lse), **on_gpu(where))
    assert got.key_mass.shape == (3, 4, 7)  # any of them may have all
    assert np.array_equal(got.key_mass.memory[..., :4], want.key_mass)
    assert not got.key_mass.memory[..., 4:].any()
    assert np.array_equal(got.entropy.memory, want.entropy)
    q, pools = normal(20, (3, 4, 8)), {name: POOLS[name] for name in ("block_table", "seq_lens")}
    _, lse = pyflash.paged_attention(q, **POOLS, return_lse=True, backend="numpy")
    want = pyflash.attention_stats(q, POOLS["k_cache"], lse, **pools, backend="numpy")
    got = pyflash.attention_stats(on_gpu(q), on_gpu(POOLS["k_cache"]), on_gpu(lse), **on_gpu(pools))
    assert np.array_equal(got.top_k_indices.memory, want.top_k_indices)
    assert got.key_mass.shape[2] == POOLS["block_table"].shape[1] * 4


CASCADES = {
    "plain": {},
    "causal": {"causal": True},
    "offset": {"causal": True, "q_offset": np.array([6, 9, 7])},
    "window": {"window": (4, 0), "causal": True, "sink_tokens": 2},
    "spans": {"spans": (np.array([[1], [0], [2]]), 9)},
    "slopes": {"alibi_slopes": normal(71, (3, 4)).astype(np.float64), "causal": True},
    "bias": {"bias": normal(72, (4, 2, 9))},
    "mask of each": {"mask": normal(73, (3, 1, 2, 9)) > -1},
    "sinks": {"sinks": normal(74, (4,)), "lse_includes_sinks": True},
    "tree": {"tree": np.array([[-1, 0]] * 3), "causal": True},
}


def prefix_and_own(seqlen_q=2):
    arrays = {
        "q": normal(70, (3, seqlen_q, 4, 8)),
        "k_shared": normal(75, (5, 2, 8)),
        "v_shared": normal(76, (5, 2, 6)),
        "k": normal(77, (3, 4, 2, 8)),
        "v": normal(78, (3, 4, 2, 6)),
    }
    return arrays, np.array([4, 2, 3], np.int32)


@pytest.mark.parametrize("lengths", ["device", "host"])
@pytest.mark.parametrize("name", CASCADES)
def test_cascade_on_the_gpu(gpu, cuda, name, lengths):
    for seqlen_q in (2, 1):
        arrays, seq_lens = prefix_and_own(seqlen_q)
        options = {**CASCADES[name]}
        for term in ("bias", "mask"):
            if term in options:
                options[term] = options[term][..., :seqlen_q, :]
        options |= {"seq_lens": seq_lens, "return_lse": True}
        want = pyflash.cascade_attention(**arrays, **options, backend="numpy")
        given = on_gpu(options)
        if lengths == "host":
            given["seq_lens"] = seq_lens
        got = pyflash.cascade_attention(**on_gpu(arrays), **given)
        assert [type(x) for x in got] == [FakeArray, FakeArray]
        for one, other in zip(back(got), want, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)
        assert cuda.downloads == 0


def test_cascade_reads_the_prefix_once_where_rows_certainly_see_it(gpu):
    arrays, seq_lens = prefix_and_own(1)
    pyflash.cascade_attention(**on_gpu(arrays), seq_lens=on_gpu(seq_lens), causal=True)
    assert gpu.calls[0].q.shape == (1, 3, 4, 8) and gpu.calls[0].batch == 1
    arrays, seq_lens = prefix_and_own(2)
    pyflash.cascade_attention(**on_gpu(arrays), seq_lens=on_gpu(seq_lens), causal=True)
    assert gpu.calls[3].batch == 3  # a row of a short sequence may lie inside of the prefix


@pytest.mark.parametrize("index", ["device", "host"])
def test_cascade_of_pages_on_the_gpu(gpu, index):
    pool = [normal(80 + i, (9, 4, 2, 8)) for i in range(2)]
    arrays = {"k_shared": pool[0], "v_shared": pool[1], "k": pool[0], "v": pool[1]}
    tables = {
        "shared_block_table": np.array([7, 2]),
        "block_table": np.array([[0, 1], [3, -1], [4, 5]], np.int32),
        "seq_lens": np.array([8, 2, 5], np.int32),
        "cu_seqlens_q": prefix_sums([1, 0, 3]),
    }
    q = normal(84, (4, 4, 8))
    options = {"causal": True, "shared_len": 7, "return_lse": True}
    want = pyflash.cascade_attention(q, **arrays, **tables, **options, backend="numpy")
    there = {name: FakeArray(pool[0 if name.startswith("k") else 1]) for name in arrays}
    tables = on_gpu(tables) if index == "device" else tables
    got = pyflash.cascade_attention(on_gpu(q), **there, **tables, **options)
    for one, other in zip(back(got), want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


def test_an_expression_counts_from_the_prefix_in_a_cascade(gpu):
    arrays, seq_lens = prefix_and_own()
    gpu.attention = lambda args, again=None: gpu.calls.append(args)
    gpu.merge_states = lambda args: None
    pyflash.cascade_attention(**on_gpu(arrays), seq_lens=seq_lens, mask_mod="key < query")
    assert gpu.calls[0].mask_mod == "key < query"
    assert gpu.calls[1].mask_mod == (
        "[&](long long query, long long key) { return (key < query); }(query + 5, key + 5)"
    )


# --- the cache ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("cache_layout", ["nhd", "hnd"])
def test_a_cache_on_the_gpu(gpu, cuda, cache_layout, dtype):
    def play(backend, place):
        cache = pyflash.PagedKVCache(
            9, 4, 2, 8, num_layers=2, dtype=dtype, cache_layout=cache_layout, backend=backend
        )
        a, b = cache.add_sequence(), cache.add_sequence()
        seed, outs = itertools.count(90), []

        def step(seqs, counts):
            with cache.reserve(seqs, counts) as reserved:
                for layer in range(2):
                    k, v, q = (place(normal(next(seed), (sum(counts), 2, 8))) for _ in range(3))
                    pools = reserved.append(layer, k, v)
                    outs.append(
                        pyflash.paged_attention(
                            q,
                            *pools,
                            reserved.block_table,
                            reserved.seq_lens,
                            cu_seqlens_q=reserved.cu_seqlens,
                            max_seqlen_q=reserved.max_seqlen_q,
                            causal=True,
                            backend=backend,
                            **cache.options(layer),
                        )
                    )

        step([a, b], [6, 3])
        c = cache.fork(a)
        step([c, a], [1, 2])  # one of them moves to a copy of the page
        cache.append(b, *(place(normal(next(seed), (2, 5, 2, 8))) for _ in range(2)))
        cache.trim(a, 5)
        return cache, outs, [cache.block_table([a, b, c]), cache.seq_lens([a, b, c])]

    numpy_cache, want, want_index = play("numpy", lambda x: x)
    cache, got, index = play("cuda", on_gpu)
    for name in ("k_cache", "v_cache", *(("k_scale", "v_scale") if dtype.startswith("int") else ())):
        one, other = getattr(cache, name), getattr(numpy_cache, name)
        assert type(one) is FakeArray
        assert np.array_equal(bits(one.memory), bits(other)), name
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one.memory, other)
    for one, other in zip(index, want_index, strict=True):
        assert type(one) is FakeArray and one.memory.dtype == np.int32
        assert np.array_equal(one.memory, other)
    assert cuda.downloads == 0


def test_a_step_of_a_cache_goes_to_the_gpu_in_one_copy(gpu, cuda):
    cache = pyflash.PagedKVCache(9, 4, 2, 8, num_layers=2, backend="cuda")
    a = cache.add_sequence()
    cuda.uploads = 0
    with cache.reserve([a], [3]) as step:
        for layer in range(2):
            k = on_gpu(normal(layer, (3, 2, 8)))
            step.append(layer, k, k)
    assert cuda.uploads == 1
    tokens = normal(5, (2, 1, 2, 8))
    cache.append(a, tokens, tokens)  # NumPy's are copied
    assert cuda.uploads == 6  # the step, and keys and values of each layer
    want = pyflash.PagedKVCache(9, 4, 2, 8, num_layers=2, backend="numpy")
    a = want.add_sequence()
    want.append(a, *[np.stack([normal(layer, (3, 2, 8)) for layer in range(2)])] * 2)
    want.append(a, tokens, tokens)
    assert np.array_equal(cache.k_cache.memory, want.k_cache)


# --- other libraries on the host ---


class OnlyInterface:
    """An array that has nothing but the array interface."""

    def __init__(self, x):
        self.x = x
        self.__array_interface__ = x.__array_interface__


class OnlyDlpack:
    """An array that has nothing but DLPack, and a namespace."""

    def __init__(self, x):
        self.x = x

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __array_namespace__(self):
        class Namespace:
            @staticmethod
            def from_dlpack(x):
                return OnlyDlpack(np.from_dlpack(x))

        return Namespace


@pytest.mark.parametrize("wrap", [OnlyInterface, OnlyDlpack])
def test_arrays_of_protocols_on_the_host(any_isa, wrap):
    arrays, options = some_call(causal=True, seq_lens=np.array([5, 2]))
    want = pyflash.flash_attention(*arrays.values(), **options, return_lse=True, **any_isa.kwargs)
    wrapped = {name: wrap(x) for name, x in arrays.items()}
    options["seq_lens"] = wrap(options["seq_lens"])
    got = pyflash.flash_attention(*wrapped.values(), **options, return_lse=True, **any_isa.kwargs)
    kind = OnlyDlpack if wrap is OnlyDlpack else np.ndarray
    assert [type(x) for x in got] == [kind, kind]
    assert_same_bits(tuple(getattr(x, "x", x) for x in got), want)
    if wrap is OnlyInterface:
        out = wrap(np.zeros_like(want[0]))
        assert pyflash.flash_attention(*wrapped.values(), **options, out=out, **any_isa.kwargs) is out
        assert_same_bits(out.x, want[0])


def test_foreign_arrays_that_are_refused(cuda):
    class Elsewhere(OnlyDlpack):
        def __dlpack_device__(self):
            return 10, 0

    class Broken(OnlyDlpack):
        def __dlpack__(self, **options):
            raise BufferError("no")

    class Interface:
        def __init__(self, **more):
            x = {"shape": (2,), "typestr": "<f4", "data": (0, False), "version": 3}
            self.__cuda_array_interface__ = x | more

    x = np.zeros(3, F4)
    for wrong, words in (
        (
            Elsewhere(x),
            "found an array on device type 10 of DLPack, expected the host (1, 3) or an NVIDIA GPU",
        ),
        (Broken(x), "found a Broken that cannot be seen by DLPack (no), expected an array that can"),
        (Interface(mask=x), "found a masked array, expected a plain array: its mask would be lost"),
        (Interface(), "found a null pointer, expected an array with memory"),
    ):
        with pytest.raises(pyflash.InvalidArgument) as caught:
            _arrays.see("k", wrong)
        assert str(caught.value).startswith(f"k: {words}")


def test_the_interface_of_cuda():
    memory = np.arange(12, dtype=np.uint16).reshape(3, 4)

    class Interface:
        dtype = numpy_dtype("bfloat16")
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (3, 2),
            "strides": (8, 4),
            "typestr": "|V2",
            "data": (memory.__array_interface__["data"][0], True),
            "version": 3,
            "stream": 5,
        }

        def __dlpack_device__(self):
            return 2, 3

    x = Interface()
    seen = _arrays.see("x", x)
    assert (seen.shape, seen.strides, seen.dtype, seen.device) == ((3, 2), (8, 4), x.dtype, 3)
    assert not seen.flags.writeable and seen.owner is x and seen.kind.give_back(seen[:]) is x
    assert np.array_equal(bits(read(seen)), memory[:, ::2])
    assert seen.kind.stream(3) == seen.kind.wait_for(seen) == 5
    assert _arrays.is_on_device(x)


# --- PyTorch ---


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_tensors_on_the_host(torch, any_isa, dtype):
    arrays, options = some_call(causal=True)
    arrays = {name: x.astype(numpy_dtype(dtype)) for name, x in arrays.items()}
    tensors = [torch.tensor(x.astype(np.float64)).to(getattr(torch, dtype)) for x in arrays.values()]
    want = pyflash.flash_attention(*arrays.values(), **options, return_lse=True, **any_isa.kwargs)
    got = pyflash.flash_attention(*tensors, **options, return_lse=True, **any_isa.kwargs)
    assert [type(x) for x in got] == [torch.Tensor, torch.Tensor]
    assert got[0].dtype == tensors[0].dtype
    for one, other in zip(got, want, strict=True):
        assert np.array_equal(one.double().numpy(), other.astype(np.float64))
    out = torch.full(got[0].shape, torch.nan, dtype=tensors[0].dtype)
    assert pyflash.flash_attention(*tensors, **options, out=out, **any_isa.kwargs) is out
    assert torch.equal(out, got[0])


def test_tensors_are_seen_where_they_lie(torch):
    for name in ("float8_e4m3fn", "float8_e5m2", "int8", "uint8", "bool", "int32", "int64", "bfloat16"):
        x = torch.zeros((3, 4), dtype=getattr(torch, name)).T[1:]
        seen = _arrays.see("x", x)
        assert type(seen) is np.ndarray and seen.dtype.name == name
        assert seen.shape == (3, 3) and seen.__array_interface__["data"][0] == x.data_ptr()
        assert seen.strides == tuple(n * x.element_size() for n in x.stride())
    assert _arrays.see("x", torch.zeros((0, 4))).shape == (0, 4)
    assert _arrays.see("x", torch.zeros(3)[None].expand(5, 3)).strides == (0, 4)


def test_tensors_in_every_function(torch, any_isa):
    def tensor(x):
        if isinstance(x, dict):
            return {name: tensor(value) for name, value in x.items()}
        return torch.from_numpy(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x

    def hold(function, *arrays, **options):
        want = function(*arrays, **options, **any_isa.kwargs)
        got = function(*map(tensor, arrays), **tensor(options), **any_isa.kwargs)
        for one, other in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
            assert other is None or (isinstance(one, torch.Tensor) and np.array_equal(one.numpy(), other))
        return want

    q, k, _, *cu = PACKED.values()
    _, lse = hold(pyflash.flash_attention_varlen, *PACKED.values(), return_lse=True)
    where = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), cu, strict=True))
    hold(pyflash.attention_stats, q, k, lse, **where, top_k=2, rows=np.array([0]))
    hold(pyflash.paged_attention, normal(20, (3, 4, 8)), *POOLS.values())
    hold(pyflash.merge_states, normal(30, (3, 2, 5, 4, 6)), normal(31, (3, 2, 4, 5)))
    arrays, seq_lens = prefix_and_own()
    hold(pyflash.cascade_attention, *arrays.values(), seq_lens=seq_lens, causal=True)
    arrays, _ = some_call(causal=True)
    scale = np.array([0.5, 2.0], F4)
    hold(pyflash.flash_decoding, *arrays.values(), num_splits=2, k_scale=scale, v_scale=scale)
    pool, token = tensor(np.zeros((2, 4, 2, 8), F4)), tensor(normal(1, (2, 2, 8)))
    pyflash.append_kv(token, token, pool, pool.clone(), seq_lens=tensor(np.array([0, 3])), **any_isa.kwargs)
    assert torch.equal(pool[0, 0], token[0]) and torch.equal(pool[1, 3], token[1])
    assert not pool[0, 1:].any()


def test_one_scale_for_both_stays_one(torch):
    """Values that lie in keys are converted once; with two scales they would be others."""
    scale, x = torch.ones(2), torch.zeros((1, 4, 2, 8))
    args = _args.dense(x, x, x, backend="c", k_scale=scale, v_scale=scale).args
    assert args.k_scale is args.v_scale
    args = _args.dense(x, x, x, backend="c", k_scale=scale, v_scale=scale.clone()).args
    assert args.k_scale is not args.v_scale


def test_tensors_that_are_refused(torch):
    x = torch.zeros((1, 4, 2, 8), requires_grad=True)
    for wrong, words in (
        (x, "found a torch tensor that requires a gradient, expected one without: pyflash has no gradients"),
        (
            torch.zeros((2, 2)).to_sparse(),
            "found a torch tensor of layout torch.sparse_coo, expected a dense",
        ),
        (torch.zeros(2, dtype=torch.complex64).conj(), "found a torch tensor that is conjugated or negated"),
        (torch.zeros(2, device="meta"), "found a torch tensor on meta, expected the host or an NVIDIA GPU"),
    ):
        with pytest.raises(pyflash.InvalidArgument) as caught:
            _arrays.see("k", wrong)
        assert str(caught.value).startswith(f"k: {words}")
    with torch.no_grad():
        assert isinstance(pyflash.flash_attention(x, x, x), torch.Tensor)
    with pytest.raises(pyflash.InvalidArgument, match=r"^q: found dtype complex64, expected one of"):
        pyflash.flash_attention(*[torch.zeros((1, 4, 2, 8), dtype=torch.complex64)] * 3)


def test_descriptions_on_the_host_are_plain(cuda, gpu):
    """The backend of these tests reads what it was given, and nothing else does."""
    arrays, _ = some_call()
    pyflash.flash_attention(*on_gpu(arrays).values())
    args = gpu.calls[-1]
    assert isinstance(args.q, DeviceArray) and type(on_host(args).q) is np.ndarray


# --- what is made on a GPU ---


def test_what_goes_up_in_one_copy_is_aligned(cuda):
    """Kernels read 16 bytes at a time where rows begin at multiples of 16."""
    arrays = (np.arange(3, dtype=np.int8), np.ones((2, 3), F4), np.zeros((0, 4), np.int64), np.ones(5))
    placed = cuda.uploaded(arrays, 0)
    assert cuda.uploads == 1
    first = _arrays.see("x", placed[0]).address
    for x, there in zip(arrays, placed, strict=True):
        np.testing.assert_array_equal(_arrays.on_host(there), x, strict=True)
        assert not x.size or (_arrays.see("x", there).address - first) % 16 == 0


def test_arrays_of_any_side_are_brought_to_the_host(gpu, cuda):
    x = np.arange(6.0).reshape(2, 3)
    assert _arrays.on_host(x) is x
    there = on_gpu(x)
    np.testing.assert_array_equal(_arrays.on_host(there), x)
    assert cuda.downloads == 1


def test_streams_of_others_by_either_generation_of_cupy():
    class Stream:
        null = "the default stream"

        @classmethod
        def from_external(cls, other):
            return "from_external", other.__cuda_stream__()

    new = SimpleNamespace(cuda=SimpleNamespace(Stream=Stream))  # its ExternalStream warns
    assert cupy_stream(new, 7, 1) == ("from_external", (0, 7))
    assert cupy_stream(new, 0, 1) == "the default stream"
    old = SimpleNamespace(cuda=SimpleNamespace(Stream=object, ExternalStream=lambda *where: where))
    assert cupy_stream(old, 7, 1) == (7, 1)
