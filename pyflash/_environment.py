"""The environment variables that calls depend on, all at once and fast enough for every call."""

from __future__ import annotations

import os
from typing import Any

NAMES = ("PYFLASH_BACKEND", "PYFLASH_ISA", "PYFLASH_NUM_THREADS")

# os.environ keeps its variables encoded in a dict; asked through its own methods, one that is not
# set costs an exception, and three of them as much as a whole small call.
_encode = getattr(os.environ, "encodekey", str)
_BACKEND, _ISA, _NUM_THREADS = (_encode(name) for name in NAMES)


def variables() -> tuple[Any, Any, Any]:
    """Return the values of `NAMES`, None for what is not set: to be compared, not to be read."""
    try:
        get = os.environ._data.get  # type: ignore[attr-defined]
    except AttributeError:  # another mapping, or another Python
        get = os.environ.get
        return get(NAMES[0]), get(NAMES[1]), get(NAMES[2])
    return get(_BACKEND), get(_ISA), get(_NUM_THREADS)
