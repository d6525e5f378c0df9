"""Memory that a call takes while a stream is captured, with a driver that has the rules of the real one.

What a GPU does with the graph is in test_cuda_device.py, and which calls take memory in test_cuda_repeats.py.
"""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from pyflash.gpu import _device

GLOBAL, THREAD_LOCAL, RELAXED = range(3)
STREAM = 77


class Driver:
    """The capture modes of threads; memory is refused as in a capture that was begun in some mode."""

    def __init__(self, begun_in: int | None) -> None:
        self.begun_in = begun_in
        self.here = threading.local()
        self.fails = self.out_of_memory = False
        self.taken: list[int] = []

    @property
    def mode(self) -> int:
        """The mode of this thread."""
        return getattr(self.here, "mode", GLOBAL)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        if self.fails:
            return 900
        mode = ctypes.cast(mode, ctypes.POINTER(ctypes.c_int))
        self.here.mode, mode[0] = mode[0], self.mode
        return 0

    def cuGetErrorString(self, status: int, text: Any) -> None:
        ctypes.cast(text, ctypes.POINTER(ctypes.c_char_p))[0] = b"not permitted"

    def alloc(self, num_bytes: int) -> Any:
        if self.begun_in not in (None, RELAXED) and self.mode != RELAXED:
            raise RuntimeError("the capture was ended by cudaMalloc")
        if self.out_of_memory:
            raise MemoryError
        self.taken.append(num_bytes)
        return SimpleNamespace(ptr=4096 * len(self.taken))


class Nothing:
    """A context manager without effect."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def device_on(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU of CuPy as far as it takes memory."""
    device = object.__new__(_device._CupyDevice)
    captures = driver.begun_in is not None
    runtime = SimpleNamespace(streamIsCapturing=lambda stream: captures and stream == STREAM)
    device._driver, device._runtime, device._captured = driver, runtime, {}
    device._cupy = SimpleNamespace(cuda=SimpleNamespace(alloc=driver.alloc))
    monkeypatch.setattr(_device._CupyDevice, "current", lambda _: Nothing())
    monkeypatch.setattr(_device._CupyDevice, "_stream", lambda *_: Nothing())
    return device


@pytest.mark.parametrize("before", [GLOBAL, THREAD_LOCAL, RELAXED])
@pytest.mark.parametrize("begun_in", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_memory_of_a_captured_call(monkeypatch, begun_in, before):
    """It can be taken as often as wanted, is kept for the graph, and the thread's mode is what it was."""
    driver = Driver(begun_in)
    driver.here.mode = before
    device = device_on(driver, monkeypatch)
    first, second = (device.allocate(num_bytes, STREAM) for num_bytes in (100, 200))
    assert driver.taken == [100, 200] and driver.mode == before
    assert first.address != second.address
    assert list(device._captured.values()) == [first, second]


@pytest.mark.parametrize("begun_in", [None, GLOBAL])
def test_memory_of_other_calls_is_not_kept(monkeypatch, begun_in):
    """Nor is the mode touched: what is on other streams is not part of the graph."""
    driver = Driver(begun_in)
    driver.here.mode, driver.fails = RELAXED, True
    device = device_on(driver, monkeypatch)
    for stream in (0, 1, STREAM if begun_in is None else STREAM + 1):
        device.allocate(100, stream)
    assert len(driver.taken) == 3 and not device._captured


def test_without_memory_the_mode_comes_back_too(monkeypatch):
    driver = Driver(GLOBAL)
    driver.out_of_memory = True
    device = device_on(driver, monkeypatch)
    with pytest.raises(MemoryError):
        device.allocate(100, STREAM)
    assert driver.mode == GLOBAL and not device._captured


def test_a_driver_that_refuses_says_so(monkeypatch):
    driver = Driver(GLOBAL)
    driver.fails = True
    device = device_on(driver, monkeypatch)
    with pytest.raises(RuntimeError, match=r"capture of a graph: not permitted \(900\)"):
        device.allocate(100, STREAM)
    assert not driver.taken
