"""Calls of the NumPy functions that a user gives for scores and masks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ._description import Array, CFunction, UserFunction
from ._errors import invalid
from ._layout import Pairs


def ask(name: str, function: UserFunction, pairs: Pairs, *score: Array, kinds: str, expected: str) -> Array:
    """Return what a user's function says of pairs, an array that broadcasts to ``(rows, keys)``.

    Parameters
    ----------
    name : str
        Name of the option, for messages.
    function : callable
        Is called as ``function(*score, batch, head, query, key)``, all arrays that broadcast
        against each other to ``(rows, keys)``.
    pairs : Pairs
        What it is asked about.
    *score : ndarray of float64, shape (rows, keys)
        Nothing, or the scores; it may write to them.
    kinds : str
        Kinds of NumPy dtypes that it may return.
    expected : str
        The same in words.

    Raises
    ------
    InvalidArgument
        It returned another type, or a shape that doesn't broadcast.
    """
    assert not isinstance(function, (CFunction, str))  # the checks have seen to it
    batch = np.full((1, 1), pairs.sequence.number, np.int64)
    result: Array = np.asarray(function(*score, batch, pairs.head, pairs.query, pairs.key))
    if result.dtype.kind not in kinds or not _broadcasts(result.shape, pairs.shape):
        found = f"a function that returns shape {result.shape} and dtype {result.dtype}"
        raise invalid(name, found, f"{expected} that broadcasts to (rows, keys) = {pairs.shape}")
    return result


def _broadcasts(shape: tuple[Any, ...], target: tuple[int, int]) -> bool:
    """Return whether an array of `shape` can be seen as one of shape `target`."""
    if len(shape) > len(target):
        return False
    return all(n in (1, m) for n, m in zip(reversed(shape), reversed(target), strict=False))
