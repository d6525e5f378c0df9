"""The order in which the states of ranks are merged: a fixed tree over rank numbers.

The tree is that of `pyflash.merge_states`, ((0, 1), (2, 3)) and so on, an odd one passing up. Two states are
merged as soon as both are there, whichever came first, so that few of them wait at a time: at most
``2 log2(size)``, the new one included, in the order in which the ring brings them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

_State = TypeVar("_State")


class RankTree(Generic[_State]):
    """States of ranks, merged two by two; None is the state of rows that have seen nothing.

    Parameters
    ----------
    size : int
        The number of ranks.
    merge : function
        Makes one state of two, the left one first.
    """

    def __init__(self, size: int, merge: Callable[[_State, _State], _State]) -> None:
        self._counts = [size]
        while self._counts[-1] > 1:
            self._counts.append((self._counts[-1] + 1) // 2)
        self._merge = merge
        self._waiting: dict[tuple[int, int], _State | None] = {}
        self._last: list[_State | None] | None = None

    def add(self, rank: int, state: _State | None) -> None:
        """Take in the state of a rank, which is the last time if all others came before."""
        level, index = 0, rank
        while level < len(self._counts) - 1:
            other = index ^ 1
            if other < self._counts[level]:
                if (level, other) not in self._waiting:
                    self._waiting[level, index] = state
                    return
                sibling = self._waiting.pop((level, other))
                pair = [state, sibling] if index < other else [sibling, state]
                if level == len(self._counts) - 2:
                    self._last = pair
                    return
                state = self._joined(*pair)
            level, index = level + 1, index // 2
        self._last = [state]

    def _joined(self, left: _State | None, right: _State | None) -> _State | None:
        if left is None or right is None:
            return right if left is None else left
        return self._merge(left, right)

    def rest(self) -> list[_State]:
        """Return the one or two states below the root, which the caller merges and finishes in one go."""
        assert self._last is not None, "a rank has not been added"
        return [state for state in self._last if state is not None]
