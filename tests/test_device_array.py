"""`DeviceArray`: all of NumPy that is layout, and a TypeError for whatever touches an element."""

from __future__ import annotations

import numpy as np
import pytest
from calls import bits, numpy_dtype
from fake_cuda import FakeArray, FakeCuda, read

from pyflash import _checks
from pyflash._array_kinds import CUPY, TORCH, Foreign, OfInterface
from pyflash._device_array import DeviceArray, over_device

F4 = np.float32


@pytest.fixture
def cuda():
    return FakeCuda()


@pytest.fixture
def seen(cuda):
    """An array of 2 x 3 x 4 numbers on the GPU, as the checks see it."""
    return cuda.see("x", FakeArray(np.arange(24, dtype=F4).reshape(2, 3, 4)))


VIEWS = {
    "slice": lambda x: x[1:, ::-1, None, 1],
    "integer": lambda x: x[-1],
    "ellipsis": lambda x: x[..., np.int64(2)],
    "transpose": lambda x: x.transpose(2, 0, 1),
    "T": lambda x: x.T,
    "swapaxes": lambda x: np.swapaxes(x, 0, 2),
    "swapaxes method": lambda x: x.swapaxes(-3, -2),
    "moveaxis": lambda x: np.moveaxis(x, 0, -1),
    "expand_dims": lambda x: np.expand_dims(x, (0, 2)),
    "squeeze": lambda x: x[:1].squeeze(0),
    "broadcast": lambda x: np.broadcast_to(x, (5, 2, 3, 4)),
    "type": lambda x: x.view(np.int32),
    "wider type": lambda x: x.view(np.float64),
    "reshape": lambda x: x.reshape(6, 4),
    "reshape to what fits": lambda x: x.reshape((2, -1)),
    "reshape strided": lambda x: x[:, ::2].reshape(2, 1, 2, 4),
    "diagonal": lambda x: x.diagonal(),
    "empty": lambda x: x[:, 1:1],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_have_the_layout_of_numpy(seen, name):
    view, want = VIEWS[name](seen), VIEWS[name](read(seen))
    assert type(view) is DeviceArray
    assert (view.shape, view.strides, view.dtype) == (want.shape, want.strides, want.dtype)
    assert not view.size or view.address == want.__array_interface__["data"][0]
    assert (view.kind, view.owner, view.device) == (seen.kind, seen.owner, 0)
    assert not view.is_whole and seen.is_whole and seen[:].is_whole


READS = {
    "item": lambda x: x[0, 0, 0].item(),
    "element": lambda x: x[0, 1, 2],
    "item method": lambda x: x.item(0),
    "tolist": lambda x: x.tolist(),
    "tobytes": lambda x: x.tobytes(),
    "copy": lambda x: x.copy(),
    "numpy.copy": np.copy,
    "astype": lambda x: x.astype(np.float64),
    "sum": lambda x: x.sum(),
    "numpy.sum": np.sum,
    "max": lambda x: x.max(initial=0),
    "add": lambda x: x + 1,
    "radd": lambda x: np.ones(4, F4) + x,
    "iadd": lambda x: x.__iadd__(1),
    "equal": lambda x: x == 0,
    "less": lambda x: x < 0,
    "matmul": lambda x: x @ x,
    "bool": bool,
    "float": lambda x: float(x[:1, :1, :1].reshape(())),
    "index": lambda x: range(x[:1, :1, :1].reshape(())),
    "iteration": list,
    "in": lambda x: 1 in x,
    "mask": lambda x: x[np.ones((2, 3, 4), bool)],
    "fancy": lambda x: x[[0, 1]],
    "fancy with an array": lambda x: x[np.array([0])],
    "True": lambda x: x[True],
    "setitem": lambda x: x.__setitem__(0, 1),
    "fill": lambda x: x.fill(0),
    "sort": lambda x: x.sort(),
    "flat": lambda x: x.flat,
    "data": lambda x: x.data,
    "ravel": lambda x: x.ravel(),
    "reshape that copies": lambda x: x.T.reshape(24),
    "diff": np.diff,
    "isfinite": np.isfinite,
    "argwhere": np.argwhere,
    "concatenate": lambda x: np.concatenate([x, x]),
    "array_equal": lambda x: np.array_equal(x, x),
    "numpy.copyto": lambda x: np.copyto(x, 0),
    "pickle": lambda x: x.__reduce_ex__(4),
    "dlpack": lambda x: x.__dlpack__(),
    "take": lambda x: x.take(0),
    "out": lambda x: np.add(np.zeros((2, 3, 4), F4), 1, out=x),
}


@pytest.mark.parametrize("name", READS)
def test_what_touches_elements_is_refused(seen, name):
    with pytest.raises(TypeError, match=r"would touch the elements of an array of shape .* on GPU 0"):
        READS[name](seen)


def test_what_can_be_said_of_an_array_without_reading_it(seen):
    assert repr(seen) == f"{seen}" == "<DeviceArray on GPU 0: shape (2, 3, 4), dtype float32>"
    assert len(seen) == 2 and seen.nbytes == 96
    assert np.may_share_memory(seen, seen[1]) and np.shares_memory(seen[0], seen)
    assert not np.shares_memory(seen[0], seen[1])
    assert _checks.may_overlap(seen[:, 1:], seen[1]) and not _checks.may_overlap(seen[0], seen[1])
    assert _checks.overlaps_itself(np.broadcast_to(seen, (2, 2, 3, 4)))
    assert _checks.describe(seen) == "an array of shape (2, 3, 4) and dtype float32"


def test_arrays_of_nothing_and_of_types_that_numpy_does_not_have(cuda):
    for dtype in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"):
        x = np.ones((3, 2), numpy_dtype(dtype))
        view = cuda.see("x", FakeArray(x[:, ::-1]))
        assert view.dtype == x.dtype and view.strides == x[:, ::-1].strides
        assert np.array_equal(bits(read(view)), bits(x))
    nothing = over_device(0, (0, 4), None, np.dtype(F4), kind=cuda, owner=None, device=1)
    assert nothing.shape == (0, 4) and nothing[:, 1:].shape == (0, 3) and nothing.device == 1


# --- libraries for GPUs, on memory of the host: without a GPU they can describe it, and tensors compute ---


def described(x, kind, owner=None):
    """An array of NumPy as if it lay on a GPU."""
    address = x.__array_interface__["data"][0]
    owner = x if owner is None else owner
    return over_device(address, x.shape, x.strides, x.dtype, kind=kind, owner=owner, device=0)


PARTS = {
    "row": np.s_[1],
    "columns": np.s_[:, 1::2],
    "broadcast": np.s_[:, None, 2:],
    "nothing": np.s_[:, 4:],
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "int64"])
def test_tensors_over_parts_of_a_tensor(dtype, part):
    torch = pytest.importorskip("torch")
    x = np.arange(24).reshape(4, 6).astype(numpy_dtype(dtype))
    tensor = TORCH._from_numpy(x)[:, 1:5]  # not the beginning of its storage
    whole = described(x[:, 1:5], TORCH, tensor)
    assert TORCH.give_back(whole) is tensor and TORCH.give_back(whole[:]) is tensor
    view, want = whole[PARTS[part]], x[:, 1:5][PARTS[part]]
    got = TORCH.give_back(view)
    assert isinstance(got, torch.Tensor) and got.dtype == tensor.dtype and tuple(got.shape) == want.shape
    assert np.array_equal(bits(read(view)), bits(want))
    as_integers = TORCH.native(view.view(f"i{x.itemsize}"))
    assert np.array_equal(as_integers.numpy(), np.ascontiguousarray(want).view(f"i{x.itemsize}"))
    if got.numel():
        as_integers[...] = 0
        assert not bits(want).any()


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "int64"])
def test_cupy_arrays_over_parts_of_an_array(dtype, part):
    cupy = pytest.importorskip("cupy")
    x = np.zeros((4, 6), numpy_dtype(dtype))
    owner = CUPY.native(described(x, OfInterface(x, None)))  # over somebody's memory
    assert (owner.shape, owner.strides, owner.dtype) == (x.shape, x.strides, x.dtype)
    assert owner.data.ptr == x.__array_interface__["data"][0]
    whole = CUPY.see("x", owner)
    assert type(whole) is DeviceArray and whole.kind is CUPY and whole.device == 0
    assert CUPY.give_back(whole) is owner and CUPY.give_back(whole[:, :]) is owner
    view, want = whole[PARTS[part]], x[PARTS[part]]
    got = CUPY.give_back(view)
    assert isinstance(got, cupy.ndarray) and got.dtype == x.dtype
    assert (got.shape, got.strides) == (want.shape, want.strides)
    assert got.data.ptr == want.__array_interface__["data"][0]
    assert got.data.mem is owner.data.mem


def test_results_for_a_library_that_nobody_knows():
    pytest.importorskip("cupy")

    class Library:
        class Array(np.ndarray):
            def __array_namespace__(self):
                return Library

        @staticmethod
        def from_dlpack(x):
            return "taken", x

    x = np.zeros((4, 6), F4).view(Library.Array)
    kind = Foreign(x)
    whole = described(x, kind)
    assert kind.give_back(whole) is x
    taken, part = kind.give_back(whole[1:])
    assert taken == "taken" and part.shape == (3, 6)
    new = kind.wrap(kind.native(described(np.zeros(3, F4), kind)))
    assert kind.give_back(new)[0] == "taken"
