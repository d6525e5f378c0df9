"""Which tokens the cache already holds, so that a prompt that begins like an earlier one starts there.

A handful of conversations is searched one after another. A server with thousands keeps them in a
radix tree (Zheng et al., "SGLang", 2024, section 3); what is shared and when would be the same.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._cache import PagedKVCache


class Match(NamedTuple):
    """A sequence that begins with tokens of an earlier one."""

    seq: int
    num_reused: int


class PrefixCache:
    """Sequences of a cache that are kept after use, with the tokens that they hold.

    Parameters
    ----------
    cache : PagedKVCache
        Where the sequences live. The kept ones belong to this object.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._kept: dict[int, list[int]] = {}  # seq -> its tokens; the least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def start(self, tokens: list[int]) -> Match:
        """Return a new sequence with the longest known beginning of `tokens`, sharing its pages.

        At least the last token is left to compute, since its logits are wanted.
        """
        best, length = None, 0
        for seq, known in self._kept.items():
            common = common_prefix(tokens[:-1], known)
            if common > length:
                best, length = seq, common
        if best is None:
            return Match(self._cache.add_sequence(), 0)
        self._kept[best] = self._kept.pop(best)
        return Match(self._cache.fork(best, length=length), length)

    def keep(self, seq: int, tokens: list[int]) -> None:
        """Keep a sequence that holds `tokens`; shorter ones that it contains are given up."""
        for other, known in list(self._kept.items()):
            if common_prefix(tokens, known) == len(known):
                self._free(other)
        self._kept[seq] = tokens

    def make_room(self) -> bool:
        """Give up the least recently used sequence; False if there is none."""
        if not self._kept:
            return False
        self._free(next(iter(self._kept)))
        return True

    def _free(self, seq: int) -> None:
        del self._kept[seq]
        self._cache.free(seq)


def common_prefix(a: list[int], b: list[int]) -> int:
    """Return how many tokens two lists have in common at their beginning."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(np.array(a[:length]) != np.array(b[:length]))
    return int(differ[0]) if differ.size else length
