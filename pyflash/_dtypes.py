"""The registry of element types: which exist, how they are stored, what they are computed in.

The codes are those of ``c_src/shared/dtypes.def``; a test holds the two files together.
bfloat16 and float8 arrays come from the package ``ml_dtypes``, which is needed only to make one.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np


class DType(NamedTuple):
    """One element type: of queries and outputs (`FLOATS`), or of stored keys and values only."""

    name: str
    code: int
    itemsize: int
    compute: str  # the type in which scores and sums are computed
    epsilon: float  # distance from 1 to the next larger number
    largest: float  # the largest finite number
    per_item: int = 1  # elements that one item of an array holds


#: Types of queries, outputs, biases; keys and values may have them too.
FLOATS = (
    DType("float64", 0, 8, "float64", 2.0**-52, float(np.finfo(np.float64).max)),
    DType("float32", 1, 4, "float32", 2.0**-23, float(np.finfo(np.float32).max)),
    DType("float16", 2, 2, "float32", 2.0**-10, 65504.0),
    DType("bfloat16", 3, 2, "float32", 2.0**-7, (2 - 2.0**-7) * 2.0**127),
)
#: Types that only stored keys and values have; their values come with scales.
QUANTISED = (
    DType("float8_e4m3fn", 4, 1, "float32", 2.0**-3, 448.0),
    DType("float8_e5m2", 5, 1, "float32", 2.0**-2, 57344.0),
    DType("int8", 6, 1, "float32", 1.0, 127.0),
    DType("int4", 7, 1, "float32", 1.0, 7.0, 2),
)
DTYPES = FLOATS + QUANTISED
BY_NAME = {dtype.name: dtype for dtype in DTYPES}
NAMES = ", ".join(dtype.name for dtype in FLOATS)
STORED_NAMES = ", ".join(BY_NAME)

#: What ``kv_dtype=`` says about arrays of bytes.
OF_BYTES = {"e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2", "int4": "int4"}

_OF_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_FROM_NUMPY: dict[Any, DType] = {np.dtype(d.name): d for d in FLOATS if d.name not in _OF_ML_DTYPES}


def lookup(dtype: np.dtype[Any]) -> DType | None:
    """Return the row of `FLOATS` of a NumPy dtype in native byte order, None if there is none."""
    found = _FROM_NUMPY.get(dtype)
    if found is None and dtype.name == "bfloat16" and dtype.itemsize == 2:
        found = BY_NAME["bfloat16"]
    return found


def lookup_stored(dtype: np.dtype[Any]) -> DType | None:
    """Return the registry row of the NumPy dtype of keys or values, None if it says nothing."""
    found = _FROM_NUMPY.get(dtype) or lookup(dtype)
    if found is None and dtype.itemsize == 1 and dtype.name in ("int8", "float8_e4m3fn", "float8_e5m2"):
        found = BY_NAME[dtype.name]
    return found


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a registry name; some need ``ml_dtypes`` (ImportError).

    int4 has none that packs two elements a byte: its arrays are uint8.
    """
    if name == "int4":
        return np.dtype(np.uint8)
    if name not in _OF_ML_DTYPES:
        return np.dtype(name)
    if "ml_dtypes" not in sys.modules:
        __import__("ml_dtypes")
    dtype: np.dtype[Any] = np.dtype(getattr(sys.modules["ml_dtypes"], name))
    return dtype
