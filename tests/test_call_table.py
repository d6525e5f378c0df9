"""The table of calls that were made before changes no result and no refusal."""

from __future__ import annotations

import os
import random
import threading

import numpy as np
import pytest
from calls import normal, numpy_dtype

import pyflash
from pyflash import _call_table
from pyflash._errors import PyflashError

F4 = np.float32


comes_again = _call_table.comes_again


@pytest.fixture(autouse=True)
def empty_table(monkeypatch):
    """An empty table, into which calls come the first time already."""
    monkeypatch.setattr(_call_table, "comes_again", lambda key: True)
    _call_table.clear()
    yield
    _call_table.clear()


def outcome(function, *arguments, **options):
    """What a call gives: the bytes of its results, or the words of its exception."""
    try:
        result = function(*arguments, **options)
    except (PyflashError, TypeError) as error:
        return type(error), str(error)
    arrays = result if isinstance(result, tuple) else (result,)
    return [(x.shape, x.dtype, x.strides, x.tobytes()) for x in arrays]


@pytest.fixture
def hits(monkeypatch):
    """The entries that calls of this test have found."""
    found = []

    def find(key):
        if (known := _call_table._table.get(key)) is not None:
            found.append(known)
        return known

    monkeypatch.setattr(_call_table, "_find", find)
    return found


def both_ways(function, *arguments, **options):
    """The outcome with whatever the table holds, which is that with an empty one too."""
    warm = outcome(function, *arguments, **options)
    kept = dict(_call_table._table)
    _call_table.clear()
    assert outcome(function, *arguments, **options) == warm
    _call_table._table.update(kept)
    return warm


def dense(seed=0, dtype=F4):
    return [
        normal(seed + i, shape).astype(dtype) for i, shape in enumerate([(1, 1, 2, 8), *[(1, 16, 2, 8)] * 2])
    ]


def random_array(draw, shape, dtype):
    """An array of this shape in one of many forms, some of which are refused."""
    array = normal(draw.randrange(1000), shape).astype(dtype)
    form = draw.randrange(24)
    if form == 0:  # negative strides
        return array[:, ::-1]
    if form == 1:  # zero strides
        return np.broadcast_to(array[:1, :1], shape)
    if form == 2:  # other axes first
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, 2)), 2, 1)
    if form == 3:  # unaligned
        raw = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(shape)
        raw[...] = array
        return raw
    if form == 4:
        array.flags.writeable = False
    elif form == 5 and dtype == F4:
        return np.ma.masked_array(array, array > 0)
    elif form == 6 and dtype == F4:
        return array.astype(array.dtype.newbyteorder())
    elif form == 8:
        return np.asfortranarray(array)
    elif form == 7:
        return array.view(np.memmap) if draw.randrange(2) else array.tolist()
    return array


VALUES = {
    "causal": [True, False, 1, 1.0, np.True_, "top_left"],
    "window": [None, (1, 2), (True, 2), (1.0, 2), [1, 2], (1, None), (-1, -1), (np.int64(1), 2)],
    "scale": [None, 1, 1.0, True, 0.0, -0.0, float("nan"), np.float32(1), "1"],
    "softcap": [None, 0, 0.0, -0.0, False, 2.0, -1.0],
    "return_lse": [True, False, 1, np.False_],
    "num_threads": [None, 1, True, 1.0, 2],
    "q_offset": [0, 3, True, 3.0, np.int32(3)],
    "out_dtype": [None, "float16", np.float64, np.dtype("f2"), "float", 3],
    "k_scale": [None, 2, 2.0, True, float("inf")],
    "num_splits": [1, 2, True, 0],
    "spans": [(0, 9), (0, True), (3, 2.0)],
    "sink_tokens": [0, 1, True],
    "family": ["prefill", "decode", "neither"],
    "batch_invariant": [False, True, 0],
    "max_seqlen_q": [1, 0],
    "nonsense": [1],
}


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_do_not_depend_on_the_table(c_backend, hits, seed):
    draw = random.Random(seed)
    answered = 0
    for _ in range(500):
        dtype = draw.choice([F4, F4, F4, np.float16, numpy_dtype("bfloat16"), np.float64])
        keys = draw.choice([4, 4, 5])
        q = random_array(draw, (1, draw.choice([1, 1, 3]), 2, 8), dtype)
        k, v = (random_array(draw, (1, keys, 2, 8), dtype) for _ in range(2))
        options = {
            name: draw.choice(VALUES[name]) for name in draw.sample(list(VALUES), draw.choice([0, 0, 1, 2]))
        }
        if draw.randrange(4) == 0:
            options["layout"] = draw.choice(["bshd", "bhsd", "sbhd", ["bshd"], None])
        if draw.randrange(3) == 0:
            options["out"] = draw.choice([q, v, random_array(draw, np.shape(q), dtype), np.zeros(3)])
            if (
                isinstance(options["out"], np.ndarray)
                and options["out"].flags.writeable
                and draw.randrange(2)
            ):
                options["out"] = options["out"].copy()
        answered += isinstance(
            both_ways(pyflash.flash_attention, q, k, v, **options, **c_backend.kwargs), list
        )
    assert answered > 100 and len(hits) > 20


def random_index(draw, good, bad):
    array = np.array(draw.choice([good, good, bad]), draw.choice([np.int32, np.int64]))
    form = draw.randrange(5)
    if form == 0:
        return np.repeat(array, 2, axis=-1)[..., ::2]
    if form == 1:
        raw = np.zeros(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
        raw[...] = array
        return raw
    if form == 2:  # unaligned, and with strides that a copy has not
        raw = np.zeros(2 * array.nbytes + 1, np.uint8)[1:].view(array.dtype)
        raw = raw.reshape(*array.shape[:-1], -1)[..., ::2]
        raw[...] = array
        return raw
    return array


@pytest.mark.parametrize("seed", range(3))
def test_contents_of_index_arrays_are_checked_every_time(c_backend, hits, seed):
    draw = random.Random(seed)
    q, k, v = normal(1, (5, 2, 8)), normal(2, (7, 2, 8)), normal(3, (7, 2, 8))
    pages = normal(4, (6, 4, 2, 8))
    refused = 0
    for _ in range(200):
        bad = draw.choice([[0, 6, 5], [1, 2, 5], [0, 2, 4], [0, 9, 5], [0, -1, 5]])
        cu_q = random_index(draw, [0, draw.randrange(6), 5], bad)
        cu_kv = random_index(draw, [0, draw.randrange(8), 7], [0, 8, 7])
        results = [both_ways(pyflash.flash_attention_varlen, q, k, v, cu_q, cu_kv, **c_backend.kwargs)]
        table = random_index(
            draw, [[5, 1, -1], [0, 2, 3]], draw.choice([[[5, -1, 1], [0, 2, 3]], [[5, 6, 1], [0, 2, 3]]])
        )
        lens = random_index(
            draw, [draw.randrange(9), draw.randrange(13)], draw.choice([[8, 13], [-1, 3], [9, 9]])
        )
        one = q[:2]
        results += [
            both_ways(
                pyflash.paged_attention, one, pages, pages, table, lens, return_lse=True, **c_backend.kwargs
            )
        ]
        lens = random_index(draw, [draw.randrange(8)], [8])
        results += [
            both_ways(pyflash.flash_attention, q[None], k[None], v[None], seq_lens=lens, **c_backend.kwargs)
        ]
        refused += sum(isinstance(result, tuple) for result in results)
    assert 50 < refused < 500 and len(hits) > 100


def remembered() -> int:
    return len(_call_table._table)


def test_a_call_is_remembered_and_answers_for_other_arrays(c_backend):
    first, second = dense(1), dense(7)
    want = pyflash.flash_attention(*second, **c_backend.kwargs)
    _call_table.clear()
    pyflash.flash_attention(*first, **c_backend.kwargs)
    assert remembered() == 1
    for x in first:
        x[...] = np.nan
    del first
    assert pyflash.flash_attention(*second, **c_backend.kwargs).tobytes() == want.tobytes()
    assert remembered() == 1


def test_a_call_is_remembered_when_it_comes_again(c_backend, hits, monkeypatch):
    monkeypatch.setattr(_call_table, "comes_again", comes_again)
    q, k, v = dense()
    for length in range(1, 17):  # a cache that grows: no length comes twice
        pyflash.flash_attention(q, k[:, :length], v[:, :length], **c_backend.kwargs)
    assert remembered() == 0
    for count in (1, 1, 1):
        pyflash.flash_attention(q, k, v, **c_backend.kwargs)
        assert remembered() == count
    assert len(hits) == 2
    for i in range(3 * _call_table.CAPACITY):
        pyflash.flash_attention(q, k, v, scale=1.0 + i, **c_backend.kwargs)
        assert len(_call_table._once) <= _call_table.CAPACITY


def test_the_table_is_bounded(c_backend):
    q, k, v = dense()
    for i in range(3 * _call_table.CAPACITY):
        pyflash.flash_attention(q, k, v, scale=1.0 + i, **c_backend.kwargs)
        assert 1 <= remembered() <= _call_table.CAPACITY


def test_a_flag_that_changes(c_backend):
    q, k, v = dense()
    out = np.empty_like(q)
    for _ in range(2):
        assert pyflash.flash_attention(q, k, v, out=out, **c_backend.kwargs) is out
    out.flags.writeable = False
    before = out.copy()
    q += 1
    with pytest.raises(
        pyflash.InvalidArgument, match=r"^out: found a read-only array, expected a writable array$"
    ):
        pyflash.flash_attention(q, k, v, out=out, **c_backend.kwargs)
    assert out.tobytes() == before.tobytes()
    q.flags.writeable = k.flags.writeable = False
    out.flags.writeable = True
    assert pyflash.flash_attention(q, k, v, out=out, **c_backend.kwargs) is out


def test_an_output_that_overlaps_only_the_second_time(c_backend):
    memory = normal(3, (100, 8))
    place = lambda i, n: memory[i : i + n].reshape(1, n, 1, 8)  # noqa: E731
    q, k, v = place(0, 2), place(10, 16), place(40, 16)
    pyflash.flash_attention(q, k, v, out=place(2, 2), **c_backend.kwargs)
    before = memory.copy()
    for start, name in ((0, "q"), (1, "q"), (9, "k"), (25, "k"), (39, "v"), (55, "v")):
        words = f"^out: found memory that it shares with {name}, expected memory of its own$"
        with pytest.raises(pyflash.InvalidArgument, match=words):
            pyflash.flash_attention(q, k, v, out=place(start, 2), **c_backend.kwargs)
    assert memory.tobytes() == before.tobytes()
    for start in (2, 8, 26, 38, 56):
        pyflash.flash_attention(q, k, v, out=place(start, 2), **c_backend.kwargs)
    assert remembered() == 1


def test_outputs_that_lie_between_the_inputs_elements(c_backend):
    """Ranges of bytes that meet do not say that elements do: the full check decides."""
    memory = normal(5, (1, 4, 3, 8))
    q, out = memory[:, :, :1], memory[:, :, 1:2]
    _, k, v = dense()
    k = v = k[:, :, :1]
    want = pyflash.flash_attention(q.copy(), k, v, **c_backend.kwargs)
    for _ in range(3):
        assert pyflash.flash_attention(q, k, v, out=out, **c_backend.kwargs).tobytes() == want.tobytes()


def test_the_environment_may_change_between_two_calls(monkeypatch):
    q, k, v = dense()
    for name in ("PYFLASH_BACKEND", "PYFLASH_ISA", "PYFLASH_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if pyflash.available_backends()["c"]:
        pytest.skip("needs the C backend")
    want = pyflash.flash_attention(q, k, v).tobytes()
    for name, bad in (("PYFLASH_BACKEND", "nobody"), ("PYFLASH_ISA", "z80"), ("PYFLASH_NUM_THREADS", "0")):
        with monkeypatch.context() as patch:
            patch.setenv(name, bad)
            with pytest.raises(pyflash.PyflashError, match=bad):
                pyflash.flash_attention(q, k, v)
        assert pyflash.flash_attention(q, k, v).tobytes() == want
    monkeypatch.setenv("PYFLASH_ISA", "scalar")
    assert (
        pyflash.flash_attention(q, k, v).tobytes() == pyflash.flash_attention(q, k, v, isa="scalar").tobytes()
    )
    monkeypatch.delenv("PYFLASH_ISA")
    by_numpy = pyflash.flash_attention(q, k, v, backend="numpy").tobytes()
    monkeypatch.setattr(pyflash._reference.BACKEND.__class__, "attention", seen := Seen())
    with pyflash.use_backend("numpy"):
        pyflash.flash_attention(q, k, v)
    monkeypatch.setenv("PYFLASH_BACKEND", "numpy")
    pyflash.flash_attention(q, k, v)
    assert seen.calls == 2 and len(by_numpy) == len(want)
    monkeypatch.delenv("PYFLASH_BACKEND")
    assert pyflash.flash_attention(q, k, v).tobytes() == want


class Seen:
    """Counts calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, args, *, again: object = None) -> None:
        self.calls += 1


def test_another_mapping_of_the_environment(monkeypatch):
    q, k, v = dense()
    pyflash.flash_attention(q, k, v)
    monkeypatch.setattr(os, "environ", {**os.environ, "PYFLASH_BACKEND": "nobody"})
    with pytest.raises(pyflash.InvalidArgument, match="nobody"):
        pyflash.flash_attention(q, k, v)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_starts_with_an_empty_table(c_backend):
    q, k, v = dense()
    pyflash.flash_attention(q, k, v, **c_backend.kwargs)
    child = os.fork()
    if child == 0:
        os._exit(remembered())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and remembered() == 1


def test_threads_share_entries(c_backend):
    calls = [dense(10 * i) for i in range(8)]
    want = [pyflash.flash_attention(*call, **c_backend.kwargs).tobytes() for call in calls]
    wrong = []

    def work(i: int) -> None:
        q, k, v = calls[i]
        out = np.empty_like(q)
        for turn in range(300):
            if turn % 50 == 0:
                _call_table.clear()
            if pyflash.flash_attention(q, k, v, out=out, **c_backend.kwargs).tobytes() != want[i]:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_numbers_that_were_made_into_arrays_stay(c_backend):
    """Offsets, scales and spans given as numbers are read again by a remembered call."""
    q, k, v = dense()
    options = {"causal": "top_left", "k_scale": 2.0, "v_scale": 3.0, "spans": (0, 5), **c_backend.kwargs}
    want = pyflash.flash_attention(q, k, v, **options).tobytes()
    for _ in range(20):
        [np.full(n, 7, np.int64) for n in range(1, 40)]  # takes what was freed
        assert pyflash.flash_attention(q, k, v, **options).tobytes() == want
    assert remembered() == 1


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_arrays_of_any_strides_are_found_again(c_backend, hits, layout, dtype):
    """Contiguous as the caller has them, as a kernel sees them, and neither."""
    arrays = [normal(i, (2, 3, 3, 8)).astype(numpy_dtype(dtype)) for i in range(3)]
    want = pyflash.flash_attention(*arrays, layout=layout, **c_backend.kwargs)
    swapped = [np.swapaxes(np.swapaxes(x, 1, 2).copy(), 1, 2) for x in arrays]
    mixed = [x[::-1].copy()[::-1] for x in arrays]
    fortran = [np.asfortranarray(x) for x in arrays]
    for given in (arrays, swapped, mixed, fortran):
        for _ in range(2):
            got = pyflash.flash_attention(*given, layout=layout, **c_backend.kwargs)
            assert got.tobytes() == want.tobytes()
    assert len(hits) >= 4
