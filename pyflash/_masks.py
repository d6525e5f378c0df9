"""The registry of masks: each says, as a predicate of positions, which keys a query row may see.

The kernels know a mask as a span, the first and the last key that a row sees, and derive from it
which tiles to skip. The predicates here are deliberately not that: they are the definition
itself, written a second time and independently, and a property test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ._description import UNLIMITED, Array, AttentionArgs


class Mask(NamedTuple):
    """One kind of mask.

    ``sees(args, row, key)`` gets the positions of query rows, ``i + offset`` as ``(rows, 1)``,
    and of keys, ``j`` as ``(1, keys)``, both int64 and counted from the start of the sequence's
    keys. It returns bool that broadcasts to ``(rows, keys)``. Masks combine by `and`.
    """

    name: str
    applies: Callable[[AttentionArgs], bool]
    sees: Callable[[AttentionArgs, Array, Array], Array]


def _causal(args: AttentionArgs, row: Array, key: Array) -> Array:
    visible: Array = key <= row
    return visible


def _window(args: AttentionArgs, row: Array, key: Array) -> Array:
    left, right = args.window
    visible = np.ones((1, 1), dtype=bool)
    if left != UNLIMITED:
        visible = visible & (key >= row - left)
    if right != UNLIMITED:
        visible = visible & (key <= row + right)
    return visible


#: Every mask kind there is; a new one is a predicate and a line here.
MASKS = (
    Mask("causal", lambda args: args.causal, _causal),
    Mask("window", lambda args: args.window != (UNLIMITED, UNLIMITED), _window),
)


def visible_keys(args: AttentionArgs, row: Array, key: Array) -> Array:
    """Return which keys each row may see, by all masks of the call together.

    Parameters
    ----------
    args : AttentionArgs
        The call; says which masks apply.
    row : ndarray of int64, shape (rows,)
        Positions ``i + offset`` of query rows.
    key : ndarray of int64, shape (keys,)
        Positions ``j`` of keys. All are keys of the sequence: what lies past its length has no
        position and is never asked about.

    Returns
    -------
    ndarray of bool, shape (rows, keys)
        A new, writable array.
    """
    visible = np.ones((row.size, key.size), dtype=bool)
    for mask in MASKS:
        if mask.applies(args):
            visible &= mask.sees(args, row[:, np.newaxis], key[np.newaxis, :])
    return visible
