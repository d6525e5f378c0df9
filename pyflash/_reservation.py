"""`Reservation`: one step of growth of a `pyflash.PagedKVCache`, from making room to committing.

While it is open, the sequences keep their old pages and lengths in the cache and have the new ones
here, so that giving up means to return what was taken and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from . import _checks
from ._api_cache import append_kv
from ._description import Array
from ._errors import InvalidArgument, invalid
from ._pages import Growth

if TYPE_CHECKING:
    from ._cache import PagedKVCache

#: One sequence, or several of them.
Sequences = int | Iterable[int]


class StepArrays(NamedTuple):
    """The arrays of a `Reservation`, which says what they are."""

    block_table: Array
    seq_lens: Array
    cu_seqlens: Array
    positions: Array
    slots: Array


@final
class Reservation:
    """Room for the new tokens of some sequences; see `PagedKVCache.reserve`.

    All arrays are those of the sequences with their new tokens, in the form that
    `pyflash.paged_attention` takes, and read-only. Those of a cache on a GPU lie there too: they are
    copied once for all layers.

    Attributes
    ----------
    cache : PagedKVCache
        What grows.
    seqs : list of int
        The sequences, in the order of all rows.
    block_table : numpy.ndarray
        ``(batch, max_pages)`` int32; unused entries are -1.
    seq_lens : numpy.ndarray
        ``(batch,)`` int32, lengths with the new tokens.
    cu_seqlens : numpy.ndarray
        ``(batch + 1,)`` int32, borders of the sequences among the packed new tokens.
    positions : numpy.ndarray
        ``(total,)`` int64, position of each new token in its sequence: what a rotary embedding needs.
    slots : numpy.ndarray
        ``(total,)`` int64, ``page * page_size + place`` of each new token.
    max_seqlen_q : int
        New tokens of the sequence that has most: the bound that `pyflash.paged_attention` can be given
        where `cu_seqlens` lie on a GPU.
    host : StepArrays
        The same five arrays in host memory, under the same names.
    """

    cache: PagedKVCache
    seqs: list[int]
    block_table: Array
    seq_lens: Array
    cu_seqlens: Array
    positions: Array
    slots: Array
    max_seqlen_q: int
    host: StepArrays

    def __init__(self, cache: PagedKVCache, seqs: Sequences, num_tokens: int | Iterable[int]) -> None:
        self.cache = cache
        self._request = (seqs, num_tokens)
        self._growths: list[Growth] | None = None
        self._written: list[bool] = []

    def __enter__(self) -> Reservation:
        if self._written:
            raise InvalidArgument("reserve: found a reservation that was used before, expected a new one")
        self.seqs = sequence_list(self._request[0])
        num_tokens = self._counts(self._request[1])
        pages = self.cache._pages
        lengths = [pages.find(seq, "seqs").length for seq in self.seqs]
        growths = pages.take(self.seqs, num_tokens)
        try:
            for growth, length in zip(growths, lengths, strict=True):
                if growth.copied:
                    self.cache._copy_page(*growth.copied, length % pages.page_size)
            self._describe(growths, lengths, num_tokens)
        except BaseException:
            pages.cancel(growths)
            raise
        self._growths = growths
        self._written = [False] * self.cache.num_layers
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        growths, self._growths = self._growths, None
        if growths is None:
            return
        missing = [layer for layer, written in enumerate(self._written) if not written]
        if kind is None and not missing:
            self.cache._pages.commit(growths)
            return
        self.cache._pages.cancel(growths)
        if kind is None:
            raise invalid("reserve", f"no keys for the layers {missing}", "all layers appended in the block")

    def append(
        self,
        layer: int,
        k: Array,
        v: Array,
        *,
        cos: Array | None = None,
        sin: Array | None = None,
        interleaved: bool = False,
    ) -> tuple[Array, Array]:
        """Write the new keys and values of one layer.

        Parameters
        ----------
        layer : int
            Layer of the model; each exactly once, in any order.
        k, v : numpy.ndarray
            ``(total, num_kv_heads, head_dim)`` and ``(total, num_kv_heads, head_dim_v)``, packed in
            the order of `seqs`. NumPy arrays are copied to the GPU where the cache lies there.
        cos, sin : numpy.ndarray, optional
            ``(total, rotary_dim / 2)``, the rotation of each new token (so those of `positions`),
            applied to the keys before they are written.
        interleaved : bool, default False
            Rotate neighbouring pairs instead of the two halves.

        Returns
        -------
        k_cache, v_cache : numpy.ndarray
            The pools of this layer, with the new tokens in them.

        Raises
        ------
        InvalidArgument
            Outside the ``with`` block, a layer that does not exist or was written before, or arrays
            that `pyflash.append_kv` refuses. The layer counts as not written.
        """
        cache = self.cache
        if self._growths is None:
            raise InvalidArgument(
                "append: found no open reservation, expected `with cache.reserve(...) as step`"
            )
        layer = _checks.integer("layer", layer, 0, cache.num_layers - 1)
        if self._written[layer]:
            raise invalid("layer", f"{layer}, which was appended before", "each layer once")
        pools = cache.k_cache[layer], cache.v_cache[layer]
        k, v = cache._tokens(k), cache._tokens(v)
        append_kv(
            k,
            v,
            *pools,
            slots=self.slots,
            cos=cache._tokens(cos),
            sin=cache._tokens(sin),
            interleaved=interleaved,
            cache_layout=cache.cache_layout,
            backend=cache.backend,
            **cache._storage(layer),
        )
        self._written[layer] = True
        return pools

    def _counts(self, num_tokens: int | Iterable[int]) -> list[int]:
        """Return how many tokens each sequence gets, and refuse a sequence that comes twice."""
        if len(set(self.seqs)) != len(self.seqs):
            raise invalid("seqs", self.seqs, "each sequence at most once")
        counts = _integers("num_tokens", num_tokens, 0)
        if isinstance(counts, int):
            counts = [counts] * len(self.seqs)
        if len(counts) != len(self.seqs):
            raise invalid("num_tokens", f"{len(counts)} numbers", f"one or {len(self.seqs)}")
        return counts

    def _describe(self, growths: list[Growth], lengths: list[int], num_tokens: list[int]) -> None:
        page_size = self.cache.page_size
        block_table = table_of([growth.pages for growth in growths])
        seq_lens = np.array([growth.length for growth in growths], np.int32)
        cu_seqlens = np.zeros(len(growths) + 1, np.int32)
        np.cumsum(num_tokens, out=cu_seqlens[1:])
        row = np.repeat(np.arange(len(growths)), num_tokens)
        first = np.array(lengths, np.int64) - cu_seqlens[:-1]
        positions = first[row] + np.arange(row.size)
        page = block_table[row, positions // page_size].astype(np.int64)
        slots = page * page_size + positions % page_size
        self.host = StepArrays(block_table, seq_lens, cu_seqlens, positions, slots)
        for one in self.host:
            one.flags.writeable = False
        placed = self.cache.placed(*self.host)
        self.block_table, self.seq_lens, self.cu_seqlens, self.positions, self.slots = placed
        self.max_seqlen_q = max(num_tokens, default=0)


def table_of(rows: list[array[int]]) -> Array:
    table = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int32)
    for entries, pages in zip(table, rows, strict=True):
        entries[: len(pages)] = np.asarray(pages)
    return table


def sequence_list(seqs: Sequences) -> list[int]:
    found = _integers("seqs", seqs)
    return [found] if isinstance(found, int) else found


def _integers(name: str, value: int | Iterable[int], low: int | None = None) -> int | list[int]:
    """Return one checked integer or a list of them; a 0-d array, which calls itself iterable, is refused."""
    if isinstance(value, Iterable) and not (isinstance(value, np.ndarray) and value.ndim == 0):
        return [_checks.integer(name, one, low) for one in value]
    return _checks.integer(name, value, low)
