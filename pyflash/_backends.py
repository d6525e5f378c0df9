"""The backends by name, and which of them a call uses.

An explicit ``backend=`` wins over `use_backend`, which wins over the environment variable
``PYFLASH_BACKEND``; otherwise the arrays decide ("auto"). There is no fallback from one backend
to another: what cannot run says why.
"""

from __future__ import annotations

import contextvars
import importlib
import os
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from . import _arrays, _checks
from ._description import Backend
from ._errors import BackendUnavailable

#: Module of each backend, which offers it as ``BACKEND``. Imported when first asked for.
MODULES = {"numpy": "._reference", "c": "._c", "cuda": ".gpu"}
AUTO = "auto"

_SOURCE_FOLDER = (
    f"pyflash was imported from a source folder, {Path(__file__).parent}, in which it has not been built; "
    "run Python from another folder, or install with pip install -e ."
)

_current: contextvars.ContextVar[str | None] = contextvars.ContextVar("pyflash_backend", default=None)
_loaded: dict[str, Backend] = {}

#: The name that `use_backend` has set in this context, None without.
in_context = _current.get


def load(name: str) -> Backend:
    """Return a backend by name, available or not."""
    backend = _loaded.get(name)
    if backend is None:
        try:
            module = importlib.import_module(MODULES[name], __package__)
        except ModuleNotFoundError as error:
            if error.name != f"{__package__}{MODULES[name]}":
                raise
            return _Absent(name)
        backend = _loaded[name] = module.BACKEND
    return backend


class _Absent:
    """Stands for a backend whose module is not there: the sources were imported, not an installation."""

    def __init__(self, name: str) -> None:
        self.name = name

    def unavailable(self) -> str:
        return _SOURCE_FOLDER

    def _refuse(self, args: object, *, again: object = None) -> NoReturn:
        raise BackendUnavailable(f"backend: {self.name!r} is not available: {self.unavailable()}")

    attention = attention_stats = merge_states = append_kv = check = explain = _refuse


def chosen_name(name: object) -> str:
    """Return the name that ``backend=name`` stands for: itself or the default, which may be "auto"."""
    if name is None:
        name = _current.get() or os.environ.get("PYFLASH_BACKEND") or AUTO
    chosen: str = _checks.choice("backend", name, (*MODULES, AUTO))
    return chosen


def resolve(name: object, array: object = None) -> Backend:
    """Return the backend that a call with ``backend=name`` on an array uses, or raise BackendUnavailable."""
    name = chosen_name(name)
    if name == AUTO:
        name = "cuda" if _arrays.is_on_device(array) else "c"
    backend = load(name)
    reason = backend.unavailable()
    if reason is not None:
        raise BackendUnavailable(f"backend: {name!r} is not available: {reason}")
    return backend


def available_backends() -> dict[str, str | None]:
    """Return every backend by name with the reason why it cannot be used, None where it can.

    Returns
    -------
    dict of str to (str or None)
        For example ``{"numpy": None, "c": None, "cuda": "CUDA finds no GPU: ..."}``.
    """
    return {name: load(name).unavailable() for name in MODULES}


class use_backend:  # noqa: N801 - used like a function
    """Set the default backend of this context, for good or as a context manager.

    Parameters
    ----------
    name : {"auto", "numpy", "c", "cuda"}
        The backend that calls without ``backend=`` use from now on in this thread or task.

    Raises
    ------
    InvalidArgument
        The name is none of these.
    BackendUnavailable
        The backend cannot run here.

    Examples
    --------
    >>> import pyflash
    >>> with pyflash.use_backend("numpy"):
    ...     pass  # calls in here use the NumPy reference
    """

    def __init__(self, name: str) -> None:
        resolve(_checks.choice("name", name, (*MODULES, AUTO)))
        self._name = name
        self._token: contextvars.Token[str | None] | None = _current.set(name)

    def __enter__(self) -> None:
        if self._token is None:  # a second block with the same object
            self._token = _current.set(self._name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._token is not None:
            _current.reset(self._token)
        self._token = None
