"""The registry of score terms: what becomes of ``scale * (q . k)`` before the softmax, in order.

A term changes scores and hides nothing; what hides keys is a mask (`_masks`), a bias of -inf
included. Scores of hidden keys are computed like the others and then never looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ._description import Array, AttentionArgs
from ._layout import Pairs
from ._state import LOWEST
from ._user_functions import ask


class Term(NamedTuple):
    """One kind of term: ``apply(args, at, s)`` returns scores ``(rows, keys)``, for which it may use `s`."""

    name: str
    applies: Callable[[AttentionArgs], bool]
    apply: Callable[[AttentionArgs, Pairs, Array], Array]


def _softcap(args: AttentionArgs, at: Pairs, s: Array) -> Array:
    s /= args.softcap
    np.tanh(s, out=s)
    s *= args.softcap
    return s


def _score_mod(args: AttentionArgs, at: Pairs, s: Array) -> Array:
    assert args.score_mod is not None
    result = ask("score_mod", args.score_mod, at, s, kinds="fiu", expected="an array of real numbers")
    # A copy: the function may return what it was given or what it keeps.
    return np.array(np.broadcast_to(result, at.shape), dtype=np.float64)


def _alibi(args: AttentionArgs, at: Pairs, s: Array) -> Array:
    assert args.alibi_slopes is not None
    s -= args.alibi_slopes[at.sequence.number, at.head] * np.abs(at.query - at.key)
    return s


def _bias(args: AttentionArgs, at: Pairs, s: Array) -> Array:
    """Add the bias; a finite sum never becomes -inf, which would be a probability of 0."""
    assert args.bias is not None
    finite = np.isfinite(s)
    s += at.of(args.bias).astype(np.float64)
    np.maximum(s, LOWEST, out=s, where=finite)
    return s


#: Every term there is, in the order of the definition.
TERMS = (
    Term("softcap", lambda args: args.softcap != 0, _softcap),
    Term("score_mod", lambda args: args.score_mod is not None, _score_mod),
    Term("alibi_slopes", lambda args: args.alibi_slopes is not None, _alibi),
    Term("bias", lambda args: args.bias is not None, _bias),
)


def scores(args: AttentionArgs, at: Pairs, q: Array, k: Array) -> Array:
    """Return the final scores of pairs before any mask.

    Parameters
    ----------
    args : AttentionArgs
        The call; says which terms apply.
    at : Pairs
        Where the rows and keys are.
    q : ndarray, shape (rows, head_dim)
        Their queries.
    k : ndarray, shape (keys, head_dim)
        Their keys.

    Returns
    -------
    ndarray of float64, shape (rows, keys)
        A new array.
    """
    s: Array = q @ k.T
    s *= args.scale
    for term in TERMS:
        if term.applies(args):
            s = term.apply(args, at, s)
    return s
