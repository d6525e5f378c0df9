"""The algebra behind every kernel: the state ``(m, l, o)`` of a row that has seen some keys.

Three operations and no more: update a state with a tile of keys, merge the states of two
disjoint sets of keys, finish. Tiles, splits and sinks are all uses of these; the C kernels have their
like in ``c_src/kernels/state.h``. All numbers are float64. Nothing here knows a mask or
where a key lies, and NumPy's floating-point warnings are the caller's to silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import numpy as np

from ._description import Array

#: The floor under m in every subtraction. A row that has seen nothing has m = -inf, and -inf - -inf
#: is NaN; above the floor nothing changes, and at it exp(-inf - LOWEST) is the 0 that it has to be.
LOWEST = float(np.finfo(np.float64).min)

_Item = TypeVar("_Item")


class State(NamedTuple):
    """What is known of each row after some of its keys.

    With ``s`` the scores and ``v`` the values seen so far, per row::

        m = max(s)    l = sum(exp(s - m))    o = sum(exp(s - m) * v)

    A row that has seen nothing has ``m = -inf, l = 0, o = 0``, the neutral element of
    `state_merge`.
    """

    m: Array  # (...): the rows, of any shape
    l: Array  # (...)
    o: Array  # (..., head_dim_v)


def state_empty(num_rows: int, head_dim_v: int) -> State:
    """Return the state of rows that have seen no key."""
    return State(np.full(num_rows, -np.inf), np.zeros(num_rows), np.zeros((num_rows, head_dim_v)))


def rescaling(m_old: Array, m_new: Array, floor: float = LOWEST) -> Array:
    """Return alpha, which turns sums relative to `m_old` into sums relative to `m_new`."""
    alpha: Array = np.exp(np.maximum(m_old, floor) - np.maximum(m_new, floor))
    return alpha


def weighted_sum(p: Array, v: Array, visible: Array) -> Array:
    """Return ``p @ v`` over the visible keys only.

    p is 0 wherever a key is not visible, which removes a finite value but not a NaN or Inf:
    ``0 * NaN`` is NaN. So what is not finite is left out of the product, and added afterwards to
    the rows that do see it.

    Parameters
    ----------
    p : ndarray, shape (rows, keys)
        Weights, 0 where `visible` is False.
    v : ndarray, shape (keys, head_dim_v)
        Values.
    visible : ndarray of bool, shape (rows, keys)
        Which keys each row may see.

    Returns
    -------
    ndarray, shape (rows, head_dim_v)
    """
    finite = np.isfinite(v)
    if finite.all():
        product: Array = p @ v
        return product
    # Zeros in place, not fewer keys: rows that see nothing of this keep their order of summation.
    product = p @ np.where(finite, v, 0)
    for j in np.flatnonzero(~finite.all(axis=1)):
        rows = visible[:, j]
        product[rows] += p[rows, j, np.newaxis] * np.where(finite[j], 0, v[j])
    return product


def state_update(state: State, scores: Array, v: Array, visible: Array, *, floor: float = LOWEST) -> State:
    """Return the state after one more tile of keys.

    Parameters
    ----------
    state : State
        Of rows ``(rows,)``.
    scores : ndarray, shape (rows, keys)
        Final scores of at least one key. Where `visible` is False they are never looked at.
    v : ndarray, shape (keys, head_dim_v)
        Values of the tile.
    visible : ndarray of bool, shape (rows, keys)
        Which keys each row may see.
    floor : float, optional
        What m is held above in subtractions. Only a demonstration of what goes wrong without
        that passes anything but the default.

    Notes
    -----
    ``m' = max(m, max(s))``, ``alpha = exp(m - m')``, ``p = exp(s - m')``, ``l' = alpha l + sum(p)``,
    ``o' = alpha o + p v``. The tile's sums start from zero and are added once: a chain over all
    keys would round as often as there are keys, this rounds as often as there are tiles.
    """
    scores = np.where(visible, scores, -np.inf)
    m = np.maximum(state.m, scores.max(axis=-1))
    alpha = rescaling(state.m, m, floor)
    p = np.exp(scores - np.maximum(m, floor)[:, np.newaxis])
    return State(
        m, state.l * alpha + p.sum(axis=-1), state.o * alpha[:, np.newaxis] + weighted_sum(p, v, visible)
    )


def state_merge(a: State, b: State) -> State:
    """Return the state of the union of two disjoint sets of keys; an empty state is neutral."""
    m = np.maximum(a.m, b.m)
    alpha, beta = rescaling(a.m, m), rescaling(b.m, m)
    return State(m, a.l * alpha + b.l * beta, a.o * alpha[..., np.newaxis] + b.o * beta[..., np.newaxis])


def fold_tree(items: Iterable[_Item], merge: Callable[[_Item, _Item], _Item]) -> _Item:
    """Merge at least one item along the fixed binary tree of their indices.

    The tree is ((0, 1), (2, 3)), then pairs of pairs; an odd one passes up. It depends on the
    number of items alone, so the result doesn't depend on who computed which of them. Like the
    carries of a binary counter, this holds at most log2(items) + 1 of them at a time.
    """
    pending: list[_Item] = []
    for index, item in enumerate(items):
        carry = index
        while carry & 1:
            item = merge(pending.pop(), item)
            carry >>= 1
        pending.append(item)
    item = pending.pop()
    while pending:
        item = merge(pending.pop(), item)
    return item


def state_merge_tree(states: Iterable[State]) -> State:
    """Merge at least one state along the tree of `fold_tree`."""
    return fold_tree(states, state_merge)


def with_sinks(state: State, sinks: Array) -> State:
    """Return `state` with one more key per row, of score `sinks` and value zero.

    A sink of -inf changes nothing, +inf takes all the weight (it is held at the largest finite
    number, so that ``inf - inf`` does not arise), NaN shows.
    """
    m = np.broadcast_to(np.minimum(sinks, -LOWEST), state.m.shape)
    return state_merge(state, State(m, np.where(m == -np.inf, 0.0, 1.0), np.zeros_like(state.o)))


def state_finish(state: State, seen: Array) -> tuple[Array, Array]:
    """Return ``(out, lse)``: the weighted mean of the values, and the log-sum-exp of the scores.

    Parameters
    ----------
    state : State
        Of rows of any shape.
    seen : ndarray of bool, shape of the rows
        Rows with at least one visible key. The others give out their o, which is 0, and lse
        -inf. A row whose visible scores are all -inf is ``0 / 0``, NaN as in naive softmax, and
        its lse, the logarithm of an empty sum, is -inf: the state alone cannot tell the two apart.
    """
    out = np.where(seen[..., np.newaxis], state.o / state.l[..., np.newaxis], state.o)
    return out, state.m + np.log(state.l)
