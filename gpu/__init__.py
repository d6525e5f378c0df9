"""The CUDA backend, so far only its name: it says why it cannot be used, and refuses every call.

Installed as ``pyflash.gpu``, hence relative imports only: ``import gpu`` in the repository would
make a second copy. Importing this module needs neither CuPy nor a GPU.
"""

from __future__ import annotations

import importlib.util
from typing import NoReturn

from .._description import Backend
from .._errors import BackendUnavailable
from .._version import __version__


class _Cuda:
    name = "cuda"

    def unavailable(self) -> str:
        """Return what is missing; in this version there always is something."""
        reason = f"pyflash {__version__} has no CUDA kernels yet"
        if importlib.util.find_spec("cupy") is None:
            reason += (
                "; those to come need CuPy, which is not installed: "
                "pip install 'pyflash-attention[cuda13]', or [cuda12] for an older driver"
            )
        return reason

    def _refuse(self, args: object) -> NoReturn:
        """Raise BackendUnavailable: whoever comes here did not ask `unavailable` first."""
        raise BackendUnavailable(f"backend: 'cuda' is not available: {self.unavailable()}")

    attention = merge_states = append_kv = explain = _refuse


BACKEND: Backend = _Cuda()
