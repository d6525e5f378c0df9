"""The CUDA backend, so far only its name: it says why it cannot be used, and refuses every call.

Installed as ``pyflash.gpu``, hence relative imports only: ``import gpu`` in the repository would
make a second copy. Importing this module needs neither CuPy nor a GPU.
"""

from __future__ import annotations

from typing import NoReturn

from .._description import Backend
from .._errors import BackendUnavailable
from .._version import __version__


class _Cuda:
    name = "cuda"

    def unavailable(self) -> str:
        """Return why the backend cannot be used; in this version nothing that is installed helps."""
        return f"pyflash {__version__} has no CUDA kernels yet"

    def _refuse(self, args: object, *, again: object = None) -> NoReturn:
        """Raise BackendUnavailable: whoever comes here did not ask `unavailable` first."""
        raise BackendUnavailable(f"backend: 'cuda' is not available: {self.unavailable()}")

    attention = attention_stats = merge_states = append_kv = explain = _refuse


BACKEND: Backend = _Cuda()
