"""Where arrays lie in memory: layouts, strides, alignment, read-only inputs, caller's outputs.

None of it may change a bit of the result.
"""

from __future__ import annotations

import numpy as np
import pytest
from calls import DTYPE_NAMES, assert_same_bits, dense, normal, once, result_shape, run
from oracle import Call, assert_matches

import pyflash


def reversed_axis(axis):
    """A view with a negative stride on one axis."""
    flip = (slice(None),) * axis + (slice(None, None, -1),)
    return lambda x: np.ascontiguousarray(x[flip])[flip]


def every_second(axis):
    """A view of every second element along one axis of a larger array full of NaN."""

    def place(x):
        shape = list(x.shape)
        shape[axis] *= 2
        buffer = np.full(shape, np.nan, x.dtype)
        view = buffer[(slice(None),) * axis + (slice(1, None, 2),)]
        view[...] = x
        return view

    return place


def inside(x):
    """A view into a larger array, with NaN on all sides and an odd start."""
    buffer = np.full([n + 3 for n in x.shape], np.nan, x.dtype)
    view = buffer[tuple(slice(1, n + 1) for n in x.shape)]
    view[...] = x
    return view


def unaligned(x):
    """A contiguous array that starts one item behind a 64-byte border."""
    buffer = np.full(x.size + 128, np.nan, x.dtype)
    start = (-buffer.ctypes.data // x.itemsize) % (64 // x.itemsize) + 1
    view = buffer[start : start + x.size].reshape(x.shape)
    view[...] = x
    return view


def between_items(x):
    """An array that starts one byte behind an item's own alignment."""
    buffer = np.zeros(x.nbytes + 1, np.uint8)
    view = np.ndarray(x.shape, x.dtype, buffer, 1)
    view[...] = x
    return view


def axes_in_order(*order):
    """An array whose axes lie in memory in another order."""
    return lambda x: np.ascontiguousarray(x.transpose(order)).transpose(np.argsort(order))


def read_only(x):
    """A read-only view."""
    view = x.copy()
    view.flags.writeable = False
    return view


#: name -> function that gives an equal array which lies differently in memory
PLACES = {
    "bhsd in memory": axes_in_order(0, 2, 1, 3),
    "sbhd in memory": axes_in_order(1, 0, 2, 3),
    "head_dim outermost": axes_in_order(3, 0, 1, 2),
    "head_dim before seqlen": axes_in_order(0, 2, 3, 1),
    "batch reversed": reversed_axis(0),
    "seqlen reversed": reversed_axis(1),
    "heads reversed": reversed_axis(2),
    "head_dim reversed": reversed_axis(3),
    "every second batch": every_second(0),
    "every second token": every_second(1),
    "every second head": every_second(2),
    "every second element": every_second(3),
    "inside a larger array": inside,
    "unaligned": unaligned,
    "not even aligned to its items": between_items,
    "read-only": read_only,
}


@once
def call_of(dtype: str, seqlen_q: int) -> Call:
    return dense(
        31,
        seqlen_q=seqlen_q,
        seqlen_kv=70,
        num_heads=4,
        num_kv_heads=2,
        head_dim=10,
        head_dim_v=12,
        dtype=dtype,
        causal=True,
    )


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("place", PLACES)
def test_inputs_anywhere_in_memory(backend, place, dtype):
    for seqlen_q in (1, 26):
        call = call_of(dtype, seqlen_q)
        want = run(call, backend)
        moved = {name: PLACES[place](array) for name, array in call.arrays.items()}
        assert_same_bits(run(call.of(**moved), backend), want, f"seqlen_q {seqlen_q}")
        for name, array in moved.items():
            assert_same_bits(
                run(call.of(**{name: array}), backend), want, f"seqlen_q {seqlen_q}, only {name}"
            )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("place", [name for name in PLACES if name != "read-only"])
def test_outputs_anywhere_in_memory(backend, place, dtype):
    for seqlen_q in (1, 26):
        call = call_of(dtype, seqlen_q)
        want = run(call, backend)
        out = PLACES[place](np.full(result_shape(call), np.nan, call.arrays["q"].dtype))
        assert_same_bits(run(call, backend, out=out), want)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("place", ["every second token", "every second element", "inside a larger array"])
def test_padding_of_an_output_is_left_alone(backend, place, dtype):
    for seqlen_q in (1, 26):
        call = call_of(dtype, seqlen_q)
        out = PLACES[place](np.zeros(result_shape(call), call.arrays["q"].dtype))
        buffer = out.base
        before = buffer.copy()
        run(call, backend, out=out)
        now = buffer.copy()
        out[...] = 0
        assert_same_bits(buffer, before, "around the output")
        assert np.isfinite(now.astype(np.float64)).sum() == out.size


@pytest.mark.parametrize("seqlen_q", [1, 26])
def test_broadcast_inputs(backend, seqlen_q):
    call = dense(32, batch=3, seqlen_q=seqlen_q, seqlen_kv=33, num_heads=4, head_dim=16)
    shared = {name: np.broadcast_to(x[:1, :, :1], x.shape) for name, x in call.arrays.items()}
    assert shared["k"].strides[0] == shared["k"].strides[2] == 0
    full = {name: np.ascontiguousarray(x) for name, x in shared.items()}
    assert_same_bits(run(call.of(**shared), backend), run(call.of(**full), backend))
    one_number = call.of(k=np.broadcast_to(np.float32(0.5), call.arrays["k"].shape))
    assert_matches(*run(one_number, backend), one_number)


@pytest.mark.parametrize("seqlen", [3, 30])
def test_one_array_for_q_k_and_v(backend, seqlen):
    x = normal(39, (2, seqlen, 3, 16))
    call = Call("flash_attention", {"q": x, "k": x, "v": x}, {"causal": True})
    assert_matches(*run(call, backend), call)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_one_buffer_for_q_k_and_v(backend, dtype):
    packed = normal(33, (2, 20, 3, 4, 16), dtype)
    arrays = {"q": packed[:, :, 0], "k": packed[:, :, 1], "v": packed[:, :, 2]}
    call = Call("flash_attention", arrays, {"causal": True})
    assert_matches(*run(call, backend), call)


@pytest.mark.parametrize("seqlen_q", [1, 26])
def test_values_are_a_part_of_the_keys(backend, seqlen_q):
    call = dense(34, seqlen_q=seqlen_q, seqlen_kv=50, num_heads=8, num_kv_heads=1, head_dim=40)
    call = call.of(v=call.arrays["k"][..., :32])
    assert_matches(*run(call, backend), call)
    assert_same_bits(run(call, backend), run(call.of(v=call.arrays["v"].copy()), backend))


@pytest.mark.parametrize("seqlen_q", [1, 26])
def test_an_output_between_the_queries(backend, seqlen_q):
    """One buffer holds a row of q, then a row of out: bounds overlap, elements do not."""
    call = dense(35, seqlen_q=seqlen_q, seqlen_kv=50, head_dim=8)
    buffer = np.full((*call.arrays["q"].shape[:-1], 16), np.nan, np.float32)
    buffer[..., :8] = call.arrays["q"]
    shared = call.of(q=buffer[..., :8])
    assert_same_bits(run(shared, backend, out=buffer[..., 8:]), run(call, backend))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seqlen_q", [1, 26])
def test_layout_bhsd(backend, dtype, seqlen_q):
    call = call_of(dtype, seqlen_q)
    want_out, want_lse = run(call, backend)
    swapped = Call(
        "flash_attention",
        {name: np.ascontiguousarray(x.swapaxes(1, 2)) for name, x in call.arrays.items()},
        {**call.options, "layout": "bhsd"},
    )
    out, lse = run(swapped, backend)
    assert_matches(out, lse, swapped)
    assert_same_bits((out.swapaxes(1, 2), lse), (want_out, want_lse))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("seqlen_q", [1, 26])
@pytest.mark.parametrize("options", [{}, {"seq_lens": np.array([41])}, {"q_offset": np.array([7])}], ids=str)
def test_fewer_axes(backend, seqlen_q, layout, options):
    call = dense(
        36, batch=1, seqlen_q=seqlen_q, seqlen_kv=50, num_heads=1, head_dim=16, causal=True, **options
    )
    out, lse = run(call, backend)
    for shape, index in (("3-D", 0), ("2-D", (0, slice(None), 0))):
        arrays = {name: x[index] for name, x in call.arrays.items()}
        if shape == "3-D" and layout == "bhsd":
            arrays = {name: x.swapaxes(0, 1) for name, x in arrays.items()}
        flat = Call("flash_attention", arrays, {**call.options, "layout": layout})
        flat_out, flat_lse = run(flat, backend)
        assert_matches(flat_out, flat_lse, flat)
        assert flat_lse.shape == ((1, seqlen_q) if shape == "3-D" else (seqlen_q,))
        assert_same_bits(flat_out.ravel(), out.ravel(), shape)
        assert_same_bits(flat_lse.ravel(), lse.ravel(), shape)


def test_results_are_contiguous_in_the_layout_asked_for(backend):
    call = dense(37, num_heads=4, seqlen_q=3)
    for layout in ("bshd", "bhsd"):
        options = {**backend.kwargs, "layout": layout, "return_lse": True}
        arrays = [x if layout == "bshd" else x.swapaxes(1, 2) for x in call.arrays.values()]
        out, lse = pyflash.flash_attention(*arrays, **options)
        assert out.flags.c_contiguous and lse.flags.c_contiguous and out.flags.owndata


@pytest.mark.parametrize("kind", [np.memmap, np.recarray])
def test_subclasses_of_arrays_are_plain_arrays(backend, kind, tmp_path):
    call = dense(38)
    if kind is np.memmap:
        q = np.memmap(tmp_path / "q", np.float32, "w+", shape=call.arrays["q"].shape)
        q[...] = call.arrays["q"]
    else:
        q = call.arrays["q"].view(np.recarray)
    assert_same_bits(run(call.of(q=q), backend), run(call, backend))
