"""The registry of element types: which exist, how they are stored, what they are computed in.

The codes are those of ``c_src/shared/dtypes.def``; a test holds the two files together.
bfloat16 arrays come from the package ``ml_dtypes``, which is needed only to make one.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np


class DType(NamedTuple):
    """One element type that a query, key, value or output may have."""

    name: str
    code: int
    itemsize: int
    compute: str  # the type in which scores and sums are computed
    epsilon: float  # distance from 1 to the next larger number


DTYPES = (
    DType("float64", 0, 8, "float64", 2.0**-52),
    DType("float32", 1, 4, "float32", 2.0**-23),
    DType("float16", 2, 2, "float32", 2.0**-10),
    DType("bfloat16", 3, 2, "float32", 2.0**-7),
)
BY_NAME = {dtype.name: dtype for dtype in DTYPES}
NAMES = ", ".join(BY_NAME)

_FROM_NUMPY: dict[Any, DType] = {np.dtype(d.name): d for d in DTYPES if d.name != "bfloat16"}


def lookup(dtype: np.dtype[Any]) -> DType | None:
    """Return the registry row of a NumPy dtype in native byte order, None if there is none."""
    found = _FROM_NUMPY.get(dtype)
    if found is None and dtype.name == "bfloat16" and dtype.itemsize == 2:
        found = BY_NAME["bfloat16"]
    return found


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a registry name; bfloat16 needs ``ml_dtypes`` (ImportError)."""
    if name != "bfloat16":
        return np.dtype(name)
    if "ml_dtypes" not in sys.modules:
        __import__("ml_dtypes")
    bfloat16: np.dtype[Any] = np.dtype(sys.modules["ml_dtypes"].bfloat16)
    return bfloat16
