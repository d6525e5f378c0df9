"""The CUDA backend, installed as ``pyflash.gpu``; importing it needs neither CuPy nor a GPU.

Relative imports only: ``import gpu`` in the repository would make a second copy.
"""

from __future__ import annotations

from .._description import Backend
from ._backend import CudaBackend, report

__all__ = ["BACKEND", "report"]

BACKEND: Backend = CudaBackend()
