"""Calls with arrays of a GPU library that come again: launches that were prepared, with other places.

The contents of the second call's arrays never count for the third: all of them are other arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import CUDA_IS_EMULATED

import pyflash
from pyflash import _args, _device_calls

pytestmark = pytest.mark.skipif(not CUDA_IS_EMULATED, reason="arrays of the emulator are asked for places")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library of arrays of the emulator; what it says of an array is asked the short way too."""
    from emulated_arrays import EmulatedArray, EmulatedKind

    kind = EmulatedKind()
    library = _device_calls.Library(
        layout=lambda x: (x.shape, x.memory.strides, x.dtype),
        place=lambda x: x.memory.ctypes.data,
        device=lambda x: x.device,
        stream=kind.stream,
        new=lambda shape, dtype, device: kind.new(shape, np.dtype(dtype), device),
    )
    monkeypatch.setitem(_device_calls._libraries, EmulatedArray, library)
    _device_calls.clear()
    yield kind
    _device_calls.clear()


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls that were checked from the start."""
    found: list[str] = []
    check = _args.dense

    def counted(*arrays: Any, **options: Any) -> Any:
        if options["backend"] == "cuda":
            found.append("cuda")
        return check(*arrays, **options)

    monkeypatch.setattr(_args, "dense", counted)
    return found


def there(cuda: Any, x: np.ndarray) -> Any:
    array = cuda.new(x.shape, x.dtype, 0)
    array.memory[...] = x
    return array


def arrays(cuda: Any, seed: int, seqlen_q: int = 1, seqlen_kv: int = 700) -> tuple[list[Any], np.ndarray]:
    """Return q, k and v on the device, and the answer."""
    rng = np.random.default_rng(seed)
    shapes = (1, seqlen_q, 4, 64), (1, seqlen_kv, 2, 64), (1, seqlen_kv, 2, 64)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return [there(cuda, x) for x in (q, k, v)], pyflash.flash_attention(q, k, v, backend="c")


def assert_right(out: Any, expected: np.ndarray) -> None:
    np.testing.assert_allclose(out.get(), expected, atol=1e-5)


def test_other_arrays_of_the_same_layout(cuda, checked):
    for seed in range(5):
        given, expected = arrays(cuda, seed)
        assert_right(pyflash.flash_attention(*given, backend="cuda"), expected)
    assert len(checked) == 2  # it is remembered once it comes again


def test_with_a_workspace(cuda, checked):
    given, expected = arrays(cuda, 0)
    needed = pyflash.explain(*given, backend="cuda", num_splits=3).workspace_bytes
    assert needed
    checked.clear()
    for seed in range(5):
        given, expected = arrays(cuda, seed)
        room = there(cuda, np.full(needed, 255, np.uint8))
        out = there(cuda, np.full(expected.shape, np.nan, np.float32))
        options = dict(backend="cuda", num_splits=3, workspace=room, out=out)
        assert pyflash.flash_attention(*given, **options) is out
        assert_right(out, expected)
        assert not np.array_equal(room.get(), np.full(needed, 255)), "the workspace was not used"
    assert len(checked) == 2
    room = there(cuda, np.zeros(needed - 1, np.uint8))
    with pytest.raises(
        pyflash.InvalidArgument, match=f"workspace: found {needed - 1} bytes, expected at least"
    ):
        pyflash.flash_attention(*given, backend="cuda", num_splits=3, workspace=room, out=out)


@pytest.mark.parametrize("other", ["out", "k"])
def test_a_workspace_that_overlaps_is_refused_again(cuda, checked, other):
    given, expected = arrays(cuda, 0)
    needed = pyflash.explain(*given, backend="cuda", num_splits=3).workspace_bytes
    out = there(cuda, np.zeros(expected.shape, np.float32))
    for _ in range(3):
        room = there(cuda, np.zeros(needed, np.uint8))
        pyflash.flash_attention(*given, backend="cuda", num_splits=3, workspace=room, out=out)
    # The same layouts, so that the call is known; but the workspace begins where another array lies.
    both = cuda.new((max(needed, given[1].memory.nbytes),), np.dtype(np.uint8), 0)
    both.memory[...] = 0
    room = both[:needed]
    if other == "out":
        out = type(out)(both.memory[: out.memory.nbytes].view(np.float32).reshape(out.shape), 0)
    else:
        given[1] = type(out)(
            both.memory[: given[1].memory.nbytes].view(np.float32).reshape(given[1].shape), 0
        )
    with pytest.raises(pyflash.InvalidArgument, match="workspace"):
        pyflash.flash_attention(*given, backend="cuda", num_splits=3, workspace=room, out=out)


def options_of(name: str, rng: np.random.Generator) -> dict[str, Any]:
    """Return an option that is an array, for two queries on 70 keys, eight heads."""
    if name in ("k_scale", "v_scale"):
        return {name: rng.uniform(0.5, 2, (2, 70, 2)).astype(np.float32)}
    if name == "alibi_slopes":
        return {name: rng.uniform(0, 0.1, 8).astype(np.float32)}
    if name == "sinks":
        return {name: rng.standard_normal(8).astype(np.float32)}
    if name == "bias":
        return {name: rng.standard_normal((2, 8, 2, 70)).astype(np.float32)}
    if name == "mask":
        return {name: rng.random((2, 1, 2, 70)) < 0.8}
    if name == "tree":
        return {name: np.array([[-1, 0], [-1, -1]], np.int32)[:: rng.choice([-1, 1])].copy()}
    if name == "q_offset":
        return {name: rng.integers(20, 68, 2), "causal": True}
    lo = np.sort(rng.integers(0, 30, (2, 2)), axis=1)
    return {"spans": (lo, lo + 40)}


@pytest.mark.parametrize(
    "name",
    ["k_scale", "v_scale", "alibi_slopes", "sinks", "bias", "mask", "tree", "q_offset", "spans"],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=["float32", "float16"])
def test_options_that_are_arrays(cuda, checked, name, dtype):
    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(moved, value))
        return there(cuda, value) if isinstance(value, np.ndarray) else value

    for seed in range(4):
        rng = np.random.default_rng(seed)
        given = [rng.standard_normal((2, n, h, 64)).astype(dtype) for n, h in ((2, 8), (70, 2), (70, 2))]
        options = options_of(name, rng)
        expected, lse = pyflash.flash_attention(*given, **options, return_lse=True, backend="c")
        placed = {key: moved(value) for key, value in options.items()}
        out = pyflash.flash_attention(*map(moved, given), **placed, return_lse=True, backend="cuda")
        tolerance = 1e-5 if dtype is np.float32 else 2e-3
        np.testing.assert_allclose(out[0].get(), expected, atol=tolerance)
        np.testing.assert_allclose(out[1].get(), lse, atol=tolerance)
    assert len(checked) == 2


def test_options_of_the_host_are_checked_each_time(cuda, checked):
    for _ in range(4):
        given, _ = arrays(cuda, 0)
        pyflash.flash_attention(*given, sinks=np.zeros(4, np.float32), backend="cuda")
    assert len(checked) == 4


def test_copies_do_not_go_into_a_graph(cuda, checked, monkeypatch):
    """They live as long as the call is remembered, a graph may live longer."""
    from emulator import Device

    given, _ = arrays(cuda, 0)
    for _ in range(3):
        pyflash.flash_attention(*given, k_scale=0.5, backend="cuda")
    assert len(checked) == 2
    monkeypatch.setattr(Device, "is_capturing", lambda *_: True)
    with pytest.raises(pyflash.UnsupportedError, match="captured"):
        pyflash.flash_attention(*given, k_scale=0.5, backend="cuda")


@pytest.mark.parametrize("known", [False, True])
def test_each_captured_call_takes_memory_of_its_own(cuda, checked, monkeypatch, known):
    """For the states of its splits: a graph runs all of its calls, as often as it is replayed."""
    from emulator import Device

    calls = [arrays(cuda, seed) for seed in range(2)]
    for given, _ in calls * 2 if known else ():
        pyflash.flash_attention(*given, backend="cuda")
    needed = pyflash.explain(*calls[0][0], backend="cuda").workspace_bytes
    taken: list[tuple[int, Any]] = []
    allocate = Device.allocate

    def counted(self: Device, num_bytes: int, stream: int = 0) -> Any:
        taken.append((num_bytes, allocate(self, num_bytes, stream)))
        return taken[-1][1]

    before = len(checked)
    monkeypatch.setattr(Device, "allocate", counted)
    monkeypatch.setattr(Device, "is_capturing", lambda *_: True)
    for given, expected in calls:
        assert_right(pyflash.flash_attention(*given, backend="cuda"), expected)
    assert len(checked) == before + (0 if known else 2)
    assert needed and [num_bytes for num_bytes, _ in taken] == [needed] * 2
    assert taken[0][1].address != taken[1][1].address


def test_a_tuple_is_no_array(cuda, checked):
    """It is refused, also where the array in it makes a call that is known."""
    given, _ = arrays(cuda, 0)
    sinks = there(cuda, np.zeros(4, np.float32))
    for _ in range(3):
        pyflash.flash_attention(*given, sinks=sinks, backend="cuda")
    with pytest.raises(pyflash.InvalidArgument, match="sinks"):
        pyflash.flash_attention(*given, sinks=(sinks,), backend="cuda")
