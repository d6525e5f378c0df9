"""The fixture `backend`: every test that takes it runs on every backend and instruction set there is.

Which ones those are is a test of its own, in `test_backends`, that is skipped with the reason for each
one that is missing: one skip a backend instead of thousands.

With ``PYFLASH_TEST_EMULATED_CUDA=1`` the kernels of the backend "cuda" run on the CPU where there is no GPU,
much slower; without, `pyflash` is as its users have it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

import pyflash


def _emulate_cuda() -> bool:
    """Put the emulator in the place of a GPU that is not there, for this process."""
    import emulated_arrays
    import emulator

    from pyflash.gpu import _device

    if _device.platform.unavailable() is None:
        return False
    _device.platform = emulator.Platform()
    emulated_arrays.install()
    if (reason := _device.platform.unavailable()) is not None:
        raise pytest.UsageError(f"PYFLASH_TEST_EMULATED_CUDA: {reason}")
    return True


#: Whether the backend "cuda" runs on the CPU. Other processes import this file to have it so.
CUDA_IS_EMULATED = os.environ.get("PYFLASH_TEST_EMULATED_CUDA", "0") != "0" and _emulate_cuda()

#: Test id -> what picks the backend in a call. A backend that is not here is not tested.
BACKENDS: dict[str, dict[str, Any]] = {
    "numpy": {"backend": "numpy"},
    "c[scalar]": {"backend": "c", "isa": "scalar"},
    "c[avx2]": {"backend": "c", "isa": "avx2"},
    "c[avx512]": {"backend": "c", "isa": "avx512"},
    "c[amx]": {"backend": "c", "isa": "amx"},
    "c[neon]": {"backend": "c", "isa": "neon"},
    "cuda": {"backend": "cuda"},
}


@dataclasses.dataclass(frozen=True)
class TestedBackend:
    """A backend under test: `kwargs` go to the public functions as they are."""

    __test__ = False

    id: str
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The name that ``backend=`` takes."""
        return self.kwargs["backend"]

    @property
    def has_threads(self) -> bool:
        """Whether the backend takes ``num_threads=``."""
        return self.name == "c"

    @property
    def is_emulated(self) -> bool:
        """Whether its kernels run in the emulator: slowly, and only in processes that import this file."""
        return self.name == "cuda" and CUDA_IS_EMULATED

    @property
    def reproducible(self) -> TestedBackend:
        """The same where bits depend on nothing but the row, its keys and the options: on CUDA by request."""
        if self.name != "cuda":
            return self
        return TestedBackend(self.id, {**self.kwargs, "batch_invariant": True})

    @contextlib.contextmanager
    def chosen(self) -> Iterator[str]:
        """Choose backend and instruction set for functions that take no ``isa=``; the backend's name."""
        isa = self.kwargs.get("isa")
        with mock.patch.dict(os.environ, {"PYFLASH_ISA": isa} if isa else {}):
            yield self.name

    def missing(self) -> str | None:
        """Why the backend cannot be tested here."""
        return _missing(self.name, self.kwargs.get("isa"))


@functools.cache
def _missing(name: str, isa: str | None) -> str | None:
    reason = pyflash.available_backends()[name]
    if reason is None and isa is not None and isa not in pyflash.available_isas():
        reason = f"instruction set {isa} is not available, only {', '.join(pyflash.available_isas())}"
    return reason


def available() -> list[TestedBackend]:
    """Every backend and instruction set that can be tested here."""
    backends = [TestedBackend(name, kwargs) for name, kwargs in BACKENDS.items()]
    return [backend for backend in backends if backend.missing() is None]


def on_host() -> list[TestedBackend]:
    """Those of them that compile nothing for a call."""
    return [backend for backend in available() if backend.name != "cuda"]


def on_cuda() -> list[TestedBackend]:
    """The backend "cuda" if it can be tested here: it compiles a kernel for about every random call."""
    return [backend for backend in available() if backend.name == "cuda"]


@pytest.fixture(params=available(), ids=lambda backend: backend.id)
def backend(request: pytest.FixtureRequest) -> TestedBackend:
    """Each backend and instruction set in turn."""
    return request.param


@pytest.fixture(params=[b for b in available() if b.name == "c"], ids=lambda backend: backend.id)
def c_backend(request: pytest.FixtureRequest) -> TestedBackend:
    """Each instruction set of the C backend in turn, for what only C has: threads, work space."""
    return request.param


@pytest.fixture(params=sorted({backend.name for backend in available()}))
def any_isa(request: pytest.FixtureRequest) -> TestedBackend:
    """Each backend in turn with its own choice of instruction set, for what does not depend on that."""
    return TestedBackend(request.param, {"backend": request.param})
