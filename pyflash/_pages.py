"""Which sequence holds which pages: the bookkeeping of `pyflash.PagedKVCache`, without any keys.

Pages are handed out from a free list and counted: a page that several sequences share is free
again when the last of them lets go of it. A growth is first planned, which changes nothing, then
taken, and at the end either committed or given back; the sequence keeps its old pages until then.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ._errors import InvalidArgument, OutOfPages, invalid


class Entry:
    """One sequence: its pages in order, how many tokens they hold, whether it is being extended.

    Pages are an array of C's int, not a list: every step makes a table of them, and a long sequence has many.
    """

    __slots__ = ("length", "open", "pages")

    def __init__(self, pages: array[int], length: int) -> None:
        self.pages = pages
        self.length = length
        self.open = False


class Growth(NamedTuple):
    """How one sequence gets room for more tokens."""

    seq: int
    pages: array[int]  # all pages after the growth
    length: int  # tokens after the growth
    taken: list[int]  # the pages among them that are new
    copied: tuple[int, int] | None  # (shared page, private copy) of a last page that is partly filled


class PageTable:
    """Pages and sequences of one cache.

    Parameters
    ----------
    num_pages, page_size : int
        Number of pages, and tokens per page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.references = [0] * num_pages
        # A stack, lowest page on top: a page that was just given back is the one still in cache.
        self.free_pages = list(range(num_pages - 1, -1, -1))
        self.entries: dict[int, Entry] = {}
        self._next_seq = 0  # never reused, so that the number of a freed sequence stays invalid

    def add(self, pages: Iterable[int], length: int) -> int:
        """Return the number of a new sequence that holds `pages`, shared with whoever has them."""
        seq = self._next_seq
        self._next_seq += 1
        entry = self.entries[seq] = Entry(array("i", pages), length)
        self._hold(entry.pages)
        return seq

    def find(self, seq: int, argument: str = "seq") -> Entry:
        """Return a sequence that is neither freed, unknown nor being extended (InvalidArgument)."""
        entry = self.entries.get(seq)
        if entry is None:
            raise invalid(argument, f"{seq}, which was freed or never existed", "a sequence of this cache")
        if entry.open:
            raise InvalidArgument(
                f"{argument}: found {seq}, which is being extended, expected the `with` block of its "
                "reserve() to have ended"
            )
        return entry

    def num_pages_for(self, length: int) -> int:
        """Return how many pages hold `length` tokens."""
        return -(-length // self.page_size)

    def shorten(self, entry: Entry, length: int) -> None:
        """Give back the pages past the first `length` tokens."""
        keep = self.num_pages_for(length)
        dropped = entry.pages[keep:]
        entry.pages, entry.length = entry.pages[:keep], length
        self._release(dropped)

    def remove(self, seq: int) -> None:
        """Forget a sequence and give back its pages."""
        self._release(self.entries.pop(seq).pages)

    def take(self, seqs: Sequence[int], num_tokens: Sequence[int]) -> list[Growth]:
        """Take the pages that let each sequence grow; all of them or, by OutOfPages, none."""
        copied = self._must_copy(seqs, num_tokens)
        needed = sum(copied)
        for seq, count in zip(seqs, num_tokens, strict=True):
            entry = self.entries[seq]
            needed += self.num_pages_for(entry.length + count) - len(entry.pages)
        if needed > len(self.free_pages):
            raise OutOfPages(
                f"reserve: {sum(num_tokens)} tokens of {len(seqs)} sequences need {needed} new pages of "
                f"{self.page_size} tokens, {len(self.free_pages)} of {len(self.references)} are free; "
                "nothing was changed"
            )
        return [
            self._grow(seq, count, copy) for seq, count, copy in zip(seqs, num_tokens, copied, strict=True)
        ]

    def commit(self, growths: Iterable[Growth]) -> None:
        """Make the sequences as long as they were grown."""
        for growth in growths:
            entry = self.entries[growth.seq]
            entry.pages, entry.length, entry.open = growth.pages, growth.length, False
            if growth.copied:
                self._release([growth.copied[0]])

    def cancel(self, growths: Iterable[Growth]) -> None:
        """Give back what was taken: the sequences are as they were."""
        for growth in growths:
            self.entries[growth.seq].open = False
            self._release(growth.taken)

    def _must_copy(self, seqs: Sequence[int], num_tokens: Sequence[int]) -> list[bool]:
        """Return for each sequence whether new tokens would fall into a page that others share.

        Of several sequences that share one page and all move away from it in this request, the last
        keeps it. That must be the longest: should the request be cancelled, what it wrote lies behind
        the tokens of the others.
        """
        copied = [False] * len(seqs)
        leaving: Counter[int] = Counter()
        for i in sorted(range(len(seqs)), key=lambda i: self.entries[seqs[i]].length):
            entry = self.entries[seqs[i]]
            if num_tokens[i] and entry.length % self.page_size:
                page = entry.pages[-1]
                copied[i] = self.references[page] - leaving[page] > 1
                leaving[page] += copied[i]
        return copied

    def _grow(self, seq: int, num_tokens: int, copy: bool) -> Growth:
        entry = self.entries[seq]
        length = entry.length + num_tokens
        kept = entry.pages[:-1] if copy else entry.pages
        taken = [self.free_pages.pop() for _ in range(self.num_pages_for(length) - len(kept))]
        self._hold(taken)
        entry.open = True
        return Growth(
            seq, kept + array("i", taken), length, taken, (entry.pages[-1], taken[0]) if copy else None
        )

    def _hold(self, pages: Iterable[int]) -> None:
        for page in pages:
            self.references[page] += 1

    def _release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self.references[page] -= 1
            if not self.references[page]:
                self.free_pages.append(page)
