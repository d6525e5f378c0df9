"""`PagedKVCache`: the keys and values of many sequences in pages of one pool per layer.

It owns the two arrays and lets sequences grow, branch, shrink and end; which page belongs to whom
is kept by ``_pages``, the writing is `pyflash.append_kv`, the reading `pyflash.paged_attention`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from . import _arrays, _backends, _checks, _dtypes
from ._description import Array
from ._device_kind import bits
from ._errors import InvalidArgument, invalid
from ._pages import PageTable
from ._reservation import Reservation, Sequences, sequence_list, table_of

_QUANTISED = tuple(row.name for row in _dtypes.QUANTISED)


class PagedKVCache:
    """Keys and values of sequences that grow, branch and end, in pages of a fixed pool.

    A sequence is a number, given by `add_sequence` or `fork`. It holds whole pages; all layers use
    the same page numbers, so a sequence has one block table, whatever the number of layers.

    New tokens go in by `append` (all layers in one call) or, where a model computes layer after
    layer, by `reserve`, which makes room once and then takes the keys of each layer in turn. Either
    way a sequence grows by complete tokens or, when anything fails, not at all.

    Parameters
    ----------
    num_pages : int
        Pages in the pool; each holds `page_size` tokens of one sequence in every layer. Memory is
        touched page by page, so a generous pool costs little until it is used.
    page_size : int
        Tokens per page. Any positive number; 16 to 64 waste little and keep tables short.
    num_kv_heads, head_dim : int
        Heads of the keys and values, and width of a key.
    head_dim_v : int, optional
        Width of a value; by default that of a key.
    num_layers : int, default 1
        Layers of the model; each has its own keys and values in the same pages.
    dtype : str or numpy.dtype, default "float32"
        "float64", "float32", "float16" or "bfloat16" (the last needs ``ml_dtypes``); or quantised:
        "int8", "int4", "float8_e4m3fn" or "float8_e5m2", with a scale per token and head that is
        chosen when they are appended. Without `options` attention would take the codes for numbers.
    cache_layout : {"nhd", "hnd"}, default "nhd"
        Order of the axes of `k_cache` and `v_cache` behind the layer: ``(num_pages, page_size,
        num_kv_heads, head_dim)`` or ``(num_pages, num_kv_heads, page_size, head_dim)``. To be
        passed on to `pyflash.paged_attention`.
    backend : str, optional
        Backend that writes the keys, as in `pyflash.append_kv`; by default the one in use. With "cuda"
        pools, tables and lengths lie on the GPU, with all others in host memory.

    Attributes
    ----------
    k_cache, v_cache : numpy.ndarray
        The pools, ``(num_layers, num_pages, ...)``; ``k_cache[layer]`` is what
        `pyflash.paged_attention` takes. Treat them as read-only. Those of float8 and int4 are uint8,
        the latter ``head_dim / 2`` wide. With ``backend="cuda"`` they are CuPy arrays on the device that
        is current when the cache is made.
    kv_dtype : str or None
        What `pyflash.paged_attention` has to be told about pools of uint8.
    k_scale, v_scale : numpy.ndarray or None
        float32 scales of a quantised cache, shaped as the pools without their last axis.

    Raises
    ------
    InvalidArgument
        A size that is not a positive integer, an unknown dtype, layout or backend.
    BackendUnavailable
        The backend cannot run here.

    Notes
    -----
    Sharing is by reference counts. `fork` copies no key; the first new token that falls into a
    partly filled page that others hold too moves its sequence to a private copy of that page.
    An object must not be used by several threads at once.

    References
    ----------
    Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP 2023, section 4.

    Examples
    --------
    >>> import numpy as np, pyflash
    >>> cache = pyflash.PagedKVCache(8, 4, num_kv_heads=2, head_dim=16)
    >>> keys = np.ones((5, 2, 16), np.float32)
    >>> a = cache.add_sequence()
    >>> cache.append(a, keys, keys)
    >>> b = cache.fork(a)
    >>> cache.num_free_pages
    6
    >>> cache.append(b, keys[:1], keys[:1])  # a shares the second page no longer
    >>> cache.block_table([a, b]).tolist(), cache.seq_lens([a, b]).tolist()
    ([[0, 1], [0, 2]], [5, 6])
    >>> q = np.ones((2, 4, 16), np.float32)
    >>> out = pyflash.paged_attention(
    ...     q, cache.k_cache[0], cache.v_cache[0], cache.block_table([a, b]), cache.seq_lens([a, b]),
    ...     **cache.options(0))
    >>> out.shape
    (2, 4, 16)
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        num_layers: int = 1,
        dtype: str | np.dtype[Any] | type[Any] = "float32",
        cache_layout: str = "nhd",
        backend: str | None = None,
    ) -> None:
        self.num_pages: int = _checks.integer("num_pages", num_pages, 1)
        self.page_size: int = _checks.integer("page_size", page_size, 1)
        self.num_layers: int = _checks.integer("num_layers", num_layers, 1)
        self.cache_layout: str = _checks.choice("cache_layout", cache_layout, ("nhd", "hnd"))
        if backend is not None or _backends.chosen_name(None) == "cuda":
            backend = _backends.resolve(backend).name  # pools on a GPU stay with their backend
        self.backend = backend
        #: What makes the arrays, None for NumPy.
        self._kind: _arrays.DeviceKind | None = None
        if backend == "cuda":
            self._kind, self._device = _arrays.own_kind, _arrays.own_kind.current_device()
        num_kv_heads = _checks.integer("num_kv_heads", num_kv_heads, 1)
        stored, self._dtype_name = _stored_as(dtype)
        short_names = {full: name for name, full in _dtypes.OF_BYTES.items()}
        self.kv_dtype: str | None = short_names.get(self._dtype_name)
        per_item = _dtypes.BY_NAME[self._dtype_name].per_item
        widths = []
        if head_dim_v is None:
            head_dim_v = head_dim
        for name, width in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
            whole, rest = divmod(_checks.integer(name, width, 1), per_item)
            if rest:
                raise invalid(name, width, f"a multiple of {per_item} for {self._dtype_name}")
            widths.append(whole)
        self.k_cache: Any
        self.v_cache: Any
        self.k_cache, self.v_cache = (self._pool(num_kv_heads, width, stored) for width in widths)
        self.k_scale: Any = None
        self.v_scale: Any = None
        if self._dtype_name in _QUANTISED:
            float32 = np.dtype(np.float32)
            self.k_scale, self.v_scale = (self._pool(num_kv_heads, 1, float32)[..., 0] for _ in range(2))
        self._pages = PageTable(self.num_pages, self.page_size)

    def __repr__(self) -> str:
        return (
            f"<PagedKVCache: {len(self._pages.entries)} sequences, {self.num_free_pages} of "
            f"{self.num_pages} pages of {self.page_size} tokens free, {self.num_layers} layers, "
            f"{self._dtype_name}>"
        )

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence and no open `reserve` holds."""
        return len(self._pages.free_pages)

    def add_sequence(self) -> int:
        """Return the number of a new, empty sequence. It holds no page yet."""
        return self._pages.add([], 0)

    def fork(self, seq: int, *, length: int | None = None) -> int:
        """Return a new sequence that starts as `seq` does, in the same pages.

        Parameters
        ----------
        seq : int
            The sequence to branch from; it stays as it is.
        length : int, optional
            Take only its first `length` tokens; by default all.

        Raises
        ------
        InvalidArgument
            Unknown, freed or open sequence, or a length outside ``0 .. its length``.
        """
        entry = self._pages.find(_checks.integer("seq", seq))
        length = entry.length if length is None else _checks.integer("length", length, 0, entry.length)
        return self._pages.add(entry.pages[: self._pages.num_pages_for(length)], length)

    def trim(self, seq: int, length: int) -> None:
        """Drop the tokens of `seq` past the first `length`, and the pages that held only those.

        Raises
        ------
        InvalidArgument
            Unknown, freed or open sequence, or a length outside ``0 .. its length``.
        """
        entry = self._pages.find(_checks.integer("seq", seq))
        self._pages.shorten(entry, _checks.integer("length", length, 0, entry.length))

    def free(self, seq: int) -> None:
        """Forget `seq`; its pages that no other sequence shares become free.

        Raises
        ------
        InvalidArgument
            Unknown, already freed or open sequence.
        """
        seq = _checks.integer("seq", seq)
        self._pages.find(seq)
        self._pages.remove(seq)

    def block_table(self, seqs: Sequences) -> Array:
        """Return the pages of sequences.

        Parameters
        ----------
        seqs : int or iterable of int
            The sequences, in the order of the rows.

        Returns
        -------
        numpy.ndarray
            ``(batch, max_pages)`` int32, as wide as the longest row; unused entries are -1. Of a cache
            on a GPU an array there.
        """
        table = table_of([self._pages.find(seq, "seqs").pages for seq in sequence_list(seqs)])
        placed: Array = self.placed(table)[0]
        return placed

    def seq_lens(self, seqs: Sequences) -> Array:
        """Return the lengths of sequences, ``(batch,)`` int32; of a cache on a GPU an array there."""
        lengths = [self._pages.find(seq, "seqs").length for seq in sequence_list(seqs)]
        placed: Array = self.placed(np.array(lengths, np.int32))[0]
        return placed

    def placed(self, *arrays: Array) -> list[Any]:
        """Return NumPy arrays where the pools are: as they are, or copied to the GPU, all in one transfer.

        Parameters
        ----------
        *arrays : numpy.ndarray
            For example queries, which `pyflash.paged_attention` takes only where keys and values are.

        Returns
        -------
        list of array
            In their order.
        """
        if self._kind is None:
            return list(arrays)
        return self._kind.uploaded(arrays, self._device)

    def reserve(self, seqs: Sequences, num_tokens: int | Iterable[int]) -> Reservation:
        """Make room for new tokens, whose keys and values then come layer by layer.

        Parameters
        ----------
        seqs : int or iterable of int
            Sequences that grow, each at most once.
        num_tokens : int or iterable of int
            New tokens of each; one number counts for all.

        Returns
        -------
        Reservation
            For a ``with`` statement. Inside the block the sequences are `Reservation.seq_lens` long
            for the attention of this step, and locked for everything else. When the block ends, all
            layers must have been written, and the sequences have grown; after an exception they are
            as before.

        Raises
        ------
        OutOfPages
            On entering the block: not enough free pages. Nothing was changed.
        InvalidArgument
            On entering: an unknown, freed, repeated or open sequence, a negative count. On leaving:
            a layer was not written.

        Examples
        --------
        >>> import numpy as np, pyflash
        >>> cache = pyflash.PagedKVCache(8, 4, num_kv_heads=1, head_dim=8, num_layers=2)
        >>> seqs = [cache.add_sequence(), cache.add_sequence()]
        >>> with cache.reserve(seqs, [3, 1]) as step:  # a prompt of 3 and one of 1, packed
        ...     for layer in range(2):
        ...         q = k = v = np.ones((4, 1, 8), np.float32)
        ...         k_cache, v_cache = step.append(layer, k, v)
        ...         out = pyflash.paged_attention(q, k_cache, v_cache, step.block_table, step.seq_lens,
        ...                                       cu_seqlens_q=step.cu_seqlens, causal=True,
        ...                                       **cache.options(layer))
        >>> cache.seq_lens(seqs).tolist()
        [3, 1]
        """
        return Reservation(self, seqs, num_tokens)

    def append(
        self,
        seqs: Sequences,
        k: Array,
        v: Array,
        *,
        num_tokens: int | Iterable[int] | None = None,
        cos: Array | None = None,
        sin: Array | None = None,
        interleaved: bool = False,
    ) -> None:
        """Append tokens whose keys and values of all layers are at hand.

        Parameters
        ----------
        seqs : int or iterable of int
            Sequences that grow, each at most once.
        k, v : numpy.ndarray
            ``(num_layers, total, num_kv_heads, head_dim)``, the tokens of the sequences one after
            another; a cache of one layer also takes them without the first axis.
        num_tokens : int or iterable of int, optional
            New tokens of each sequence, with the sum `total`; by default all have equally many.
        cos, sin, interleaved
            Rotation of the keys, as in `Reservation.append`.

        Raises
        ------
        OutOfPages
            Not enough free pages. Nothing was changed.
        InvalidArgument
            As in `reserve`, or wrong shapes. No sequence has grown.
        """
        seqs = sequence_list(seqs)
        k, v = (self._with_layers(name, array) for name, array in (("k", k), ("v", v)))
        if num_tokens is None:
            num_tokens, rest = divmod(k.shape[1], max(len(seqs), 1))
            if rest:
                raise invalid(
                    "k", f"{k.shape[1]} tokens for {len(seqs)} sequences", "as many for each, or num_tokens"
                )
        with self.reserve(seqs, num_tokens) as step:
            for layer in range(self.num_layers):
                step.append(layer, k[layer], v[layer], cos=cos, sin=sin, interleaved=interleaved)

    def _with_layers(self, name: str, array: Array) -> Array:
        if not hasattr(array, "shape"):
            raise invalid(name, type(array).__name__, "a numpy.ndarray")
        if array.ndim == 3 and self.num_layers == 1:
            return array[np.newaxis]
        if array.ndim != 4 or array.shape[0] != self.num_layers:
            raise invalid(
                name,
                f"shape {array.shape}",
                f"({self.num_layers}, total, num_kv_heads, head_dim): all layers",
            )
        return array

    def options(self, layer: int) -> dict[str, Any]:
        """Return the keywords that `pyflash.paged_attention` needs beside the pools of a layer.

        Parameters
        ----------
        layer : int
            Layer of the model.

        Returns
        -------
        dict
            ``cache_layout`` and, of a quantised cache, ``k_scale``, ``v_scale`` and ``kv_dtype``.

        Examples
        --------
        >>> import pyflash
        >>> cache = pyflash.PagedKVCache(8, 4, num_kv_heads=2, head_dim=16, dtype="int4")
        >>> sorted(cache.options(0)), cache.k_cache.shape, cache.k_scale.shape
        (['cache_layout', 'k_scale', 'kv_dtype', 'v_scale'], (1, 8, 4, 2, 8), (1, 8, 4, 2))
        """
        layer = _checks.integer("layer", layer, 0, self.num_layers - 1)
        return {"cache_layout": self.cache_layout, **self._storage(layer)}

    def _storage(self, layer: int) -> dict[str, Any]:
        """Return what reading and writing a layer of a quantised cache needs."""
        if self.k_scale is None or self.v_scale is None:
            return {}
        return {"k_scale": self.k_scale[layer], "v_scale": self.v_scale[layer], "kv_dtype": self.kv_dtype}

    def _tokens(self, array: Any) -> Any:
        """Return an array of new tokens where the pools are: NumPy's are copied to a GPU."""
        if self._kind is None or not isinstance(array, np.ndarray):
            return array
        return self._kind.uploaded((array,), self._device)[0]

    def _pool(self, num_kv_heads: int, width: int, dtype: np.dtype[Any]) -> Any:
        """Return zeros, which on the host the operating system hands out on first touch."""
        shape = (self.num_layers, self.num_pages, self.page_size, num_kv_heads, width)
        if self.cache_layout == "hnd":
            shape = (self.num_layers, self.num_pages, num_kv_heads, self.page_size, width)
        if self._kind is not None:
            pool = self._kind.empty(shape, dtype, self._device)
            self._kind.fill(bits(pool), 0)
            return self._kind.give_back(pool)
        try:
            return np.zeros(shape, dtype)
        except ValueError:  # more than an address can reach
            raise invalid("num_pages", f"a pool of shape {shape}", "one that fits into memory") from None

    def _copy_page(self, source: int, target: int, num_tokens: int) -> None:
        for pool in (self.k_cache, self.v_cache, self.k_scale, self.v_scale):
            if pool is None:
                continue
            pool = _arrays.see("pool", pool)
            by_token = pool.swapaxes(2, 3) if self.cache_layout == "hnd" else pool
            _arrays.assign(by_token[:, target, :num_tokens], by_token[:, source, :num_tokens])


def _stored_as(dtype: Any) -> tuple[np.dtype[Any], str]:
    """Return the type of the arrays of a cache, and the name of what they hold."""
    name = dtype if isinstance(dtype, str) else getattr(dtype, "__name__", str(dtype))
    if name in _QUANTISED:
        return np.dtype(np.int8 if name == "int8" else np.uint8), name
    try:
        found = _checks.dtype_named("dtype", dtype)
    except InvalidArgument:
        raise invalid("dtype", _checks.describe(dtype), f"one of {_dtypes.STORED_NAMES}") from None
    return found, found.name
