"""The registry of masks: each says, as a predicate of row and key, which keys a query row may see.

The kernels know most masks as a span, the first and the last key that a row sees, and derive from
it which tiles to skip. The predicates here are deliberately not that: they are the definition
itself, written a second time and independently, and a property test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ._description import UNLIMITED, Array, AttentionArgs
from ._layout import Pairs, RowBlock, pairs
from ._user_functions import ask


class Mask(NamedTuple):
    """One kind of mask.

    ``sees(args, at)`` returns bool that broadcasts to the ``(rows, keys)`` of the pairs `at`. Masks
    combine by `and`. Lengths are none of them: what lies past the length of a sequence has no
    position and is never asked about.
    """

    name: str
    applies: Callable[[AttentionArgs], bool]
    sees: Callable[[AttentionArgs, Pairs], Array]


def _causal(args: AttentionArgs, at: Pairs) -> Array:
    visible: Array = at.key <= at.query
    return visible


def _window(args: AttentionArgs, at: Pairs) -> Array:
    left, right = args.window
    visible = np.ones((1, 1), dtype=bool)
    if left != UNLIMITED:
        visible = visible & (at.key >= at.query - left)
    if right != UNLIMITED:
        visible = visible & (at.key <= at.query + right)
    return visible | (at.key < args.sink_tokens)


def _spans(args: AttentionArgs, at: Pairs) -> Array:
    assert args.spans is not None
    address = at.sequence.q_batch, at.sequence.q_start + at.row
    lo, hi = (bound[address] for bound in args.spans)
    visible: Array = (lo <= at.key) & (at.key < hi)
    return visible


def _mask(args: AttentionArgs, at: Pairs) -> Array:
    assert args.mask is not None
    return at.of(args.mask)


def _mask_mod(args: AttentionArgs, at: Pairs) -> Array:
    assert args.mask_mod is not None
    return ask("mask_mod", args.mask_mod, at, kinds="b", expected="a bool array")


def _tree(args: AttentionArgs, at: Pairs) -> Array:
    """Of the draft tokens, the last keys, a row that is one of them sees those of its own branch."""
    assert args.tree is not None
    sees_draft = args.tree[at.sequence.number]
    num_draft = len(sees_draft)
    first = at.sequence.seqlen_kv - num_draft
    row, key = at.query - first, at.key - first
    both_are_drafts = (row >= 0) & (row < num_draft) & (key >= 0)
    if not both_are_drafts.any():
        return ~both_are_drafts
    last = num_draft - 1  # the bounds matter only where one of the two is no draft token
    visible: Array = sees_draft[np.clip(row, 0, last), np.clip(key, 0, last)] | ~both_are_drafts
    return visible


def _bias(args: AttentionArgs, at: Pairs) -> Array:
    assert args.bias is not None
    visible: Array = at.of(args.bias) != -np.inf
    return visible


#: Every mask kind there is; a new one is a predicate and a line here.
MASKS = (
    Mask("causal", lambda args: args.causal, _causal),
    Mask("window", lambda args: args.window != (UNLIMITED, UNLIMITED), _window),
    Mask("spans", lambda args: args.spans is not None, _spans),
    Mask("mask", lambda args: args.mask is not None, _mask),
    Mask("mask_mod", lambda args: args.mask_mod is not None, _mask_mod),
    Mask("tree", lambda args: args.tree is not None, _tree),
    Mask("bias", lambda args: args.bias is not None, _bias),
)


def visible_keys(args: AttentionArgs, at: Pairs) -> Array:
    """Return which keys each row may see, by all masks of the call together.

    Parameters
    ----------
    args : AttentionArgs
        The call; says which masks apply.
    at : Pairs
        Rows and keys that are asked about.

    Returns
    -------
    ndarray of bool, shape (rows, keys)
        A new, writable array.
    """
    visible = np.ones(at.shape, dtype=bool)
    for mask in MASKS:
        if mask.applies(args):
            visible &= mask.sees(args, at)
    return visible


def key_tiles(
    args: AttentionArgs, block: RowBlock, lo: int, hi: int, tile: int
) -> Iterator[tuple[Pairs, Array]]:
    """Yield the pairs of each tile of keys that a row sees, and their visibility ``(rows, tile)``.

    The last tile of a split is as long as the others: it repeats its last key, invisibly. So the
    sums over a tile have one order, and a row's bits don't depend on how many keys follow those
    that it sees. Tiles that no row of the block sees would change nothing and are left out.
    """
    for start in range(lo, hi, tile):
        position = np.arange(start, start + tile)
        at = pairs(block, np.minimum(position, hi - 1))
        visible = visible_keys(args, at) & (position < hi)
        if visible.any():
            yield at, visible
