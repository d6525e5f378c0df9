"""How numbers are stored: from stored elements to the numbers they are, and back.

The 8-bit floats are told from their bits here, so that caches of plain bytes need no package of
types; arrays of ``ml_dtypes`` are looked at as the bytes that they are.
"""

from __future__ import annotations

import functools

import numpy as np

from ._description import Array

#: Name of an 8-bit float -> bits of its mantissa, its code of the largest finite number.
_FLOAT8 = {"float8_e4m3fn": (3, 0x7E), "float8_e5m2": (2, 0x7B)}
#: What NaN is stored as.
_FLOAT8_NAN = 0x7F
#: Name of an integer type -> its smallest and largest number.
_INTEGERS = {"int8": (-128, 127), "int4": (-8, 7)}


@functools.cache
def float8_values(name: str) -> Array:
    """Return the numbers of all 256 codes of an 8-bit float, float64.

    A code is a sign, an exponent and a mantissa as in IEEE 754. Above the largest finite number
    e4m3fn has one NaN and no infinity; e5m2 has the infinity and the NaN of IEEE 754.
    """
    mantissa_bits, largest = _FLOAT8[name]
    magnitude = np.arange(0x80)
    exponent, mantissa = np.divmod(magnitude, 2**mantissa_bits)
    bias = 2 ** (6 - mantissa_bits) - 1
    fraction = mantissa / 2**mantissa_bits + (exponent > 0)  # subnormal numbers have no leading 1
    values = np.ldexp(fraction, np.maximum(exponent, 1) - bias)
    values[largest + 1 :] = np.nan
    if name == "float8_e5m2":
        values[largest + 1] = np.inf
    table = np.concatenate([values, -values])
    table.flags.writeable = False
    return table


def decode(stored: Array, name: str) -> Array:
    """Return stored elements as a new float64 array; packed ones have a last axis twice as long.

    Parameters
    ----------
    stored : ndarray
        Elements as they lie in memory: of the type `name`, or the bytes of it.
    name : str
        Name of the stored type in the registry of `_dtypes`.
    """
    if name in _FLOAT8:
        return float8_values(name)[stored.view(np.uint8)]
    if name != "int4":
        return stored.astype(np.float64)
    codes = np.stack([stored & 0xF, stored >> 4], axis=-1)  # the even index is in the low half
    codes = codes.reshape(*stored.shape[:-1], 2 * stored.shape[-1])
    return (codes ^ 8).astype(np.float64) - 8.0  # two's complement of four bits


def encode(numbers: Array, name: str) -> Array:
    """Return numbers in the form in which a quantised type stores them.

    To nearest, ties to even, and saturated: what lies outside the range, infinities included,
    becomes the nearest end of it. NaN stays NaN where there is one, else it becomes 0.

    Parameters
    ----------
    numbers : ndarray of float32
        The last axis is even for int4.
    name : str
        Name of the stored type: an 8-bit float, int8 or int4.

    Returns
    -------
    ndarray
        uint8 codes; of int4 with a last axis half as long; int8 for int8.
    """
    if name in _FLOAT8:
        return _encode_float8(numbers, name)
    low, high = _INTEGERS[name]
    codes = np.clip(np.rint(np.where(np.isnan(numbers), 0, numbers)), low, high).astype(np.int8)
    if name == "int8":
        return codes
    nibbles = codes.view(np.uint8) & 0xF
    packed: Array = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return packed


def _encode_float8(numbers: Array, name: str) -> Array:
    _, largest = _FLOAT8[name]
    values = float8_values(name)[: largest + 1]  # rising, like their codes
    borders = (values[:-1] + values[1:]) / 2  # exact; a number on one of them is a tie
    magnitude = np.abs(numbers).astype(np.float64)
    below, above = np.searchsorted(borders, magnitude, "left"), np.searchsorted(borders, magnitude, "right")
    codes = np.where(below % 2 == 0, below, above)  # both are the same unless it is a tie
    codes = np.where(np.signbit(numbers), codes | 0x80, codes)
    return np.where(np.isnan(numbers), _FLOAT8_NAN, codes).astype(np.uint8)


def assignable(cache: Array, name: str) -> Array:
    """Return a view of a quantised cache to which what `encode` returns can be assigned."""
    return cache.view(np.uint8) if name in _FLOAT8 else cache
