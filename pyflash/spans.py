"""Builders of ``spans=``: which stretch of keys each query row sees, in time and memory of O(rows + keys).

Each returns ``(lo, hi)``: the row sees keys ``lo <= j < hi``, within whatever else the call says (causal,
window, lengths). Nothing here computes attention, and no kernel knows these names.

>>> import numpy as np, pyflash
>>> q = np.ones((1, 6, 2, 8), np.float32)
>>> spans = pyflash.spans.chunked(6, 6, 4)
>>> pyflash.flash_attention(q, q, q, causal=True, spans=spans).shape
(1, 6, 2, 8)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import _checks
from ._checks import MAX_POSITION
from ._description import Array
from ._errors import invalid

__all__ = ["chunked", "documents", "left_padding", "prefix_lm"]

_Number = int | Array

_ID_AXES = {1: "(seqlen,)", 2: "(batch, seqlen)"}


def chunked(
    seqlen_q: _Number, seqlen_kv: _Number, chunk: _Number, *, q_offset: _Number | None = None
) -> tuple[Array, Array]:
    """Return the spans of chunked local attention: a row sees the keys of its own chunk of positions.

    Row ``i`` at position ``p = i + offset`` sees keys ``p // chunk * chunk <= j < (p // chunk + 1) * chunk``;
    with ``causal=True``, as Llama 4 has it in three layers of four, those of them up to ``p``.

    Parameters
    ----------
    seqlen_q : int or (batch,) int32 or int64 ndarray
        Query rows of each sequence. An array means packed queries.
    seqlen_kv : int or (batch,) int32 or int64 ndarray
        Keys of each sequence: the valid ones, where the call has ``seq_lens``.
    chunk : int or (batch,) int32 or int64 ndarray
        Positions of a chunk, at least 1.
    q_offset : int or (batch,) int32 or int64 ndarray, optional
        Position of row 0 of each sequence, as the call has it. Default ``seqlen_kv - seqlen_q``.

    Returns
    -------
    lo, hi : int64 ndarray
        ``(seqlen_q,)`` if every argument is a number, ``(batch, seqlen_q)`` if one is an array,
        ``(total_q,)`` if `seqlen_q` is.

    Raises
    ------
    InvalidArgument
        An argument has a wrong type, shape or value; the message names it.

    References
    ----------
    Meta AI, "The Llama 4 herd", 2025: layers with chunked attention between global ones.

    Examples
    --------
    >>> import pyflash
    >>> lo, hi = pyflash.spans.chunked(6, 6, 4)
    >>> lo.tolist(), hi.tolist()
    ([0, 0, 0, 0, 4, 4], [4, 4, 4, 4, 6, 6])
    """
    rows = _rows(seqlen_q, seqlen_kv, q_offset, chunk=(chunk, 1))
    lo = rows.position // rows.extra * rows.extra
    return rows.cut(lo, lo + rows.extra)


def prefix_lm(
    seqlen_q: _Number, seqlen_kv: _Number, prefix_len: _Number, *, q_offset: _Number | None = None
) -> tuple[Array, Array]:
    """Return the spans of a prefix language model: all rows see the prefix, the rest is causal.

    Row ``i`` at position ``p = i + offset`` sees keys ``j < max(prefix_len, p + 1)``: inside the prefix
    attention goes both ways. The span holds the causal border already, so the call that gets it must have
    ``causal=False``; with ``causal=True`` the rows of the prefix would not see what comes after them.

    Parameters
    ----------
    seqlen_q : int or (batch,) int32 or int64 ndarray
        Query rows of each sequence. An array means packed queries.
    seqlen_kv : int or (batch,) int32 or int64 ndarray
        Keys of each sequence: the valid ones, where the call has ``seq_lens``.
    prefix_len : int or (batch,) int32 or int64 ndarray
        Keys of the prefix, at least 0; it may be longer than the keys that are there so far.
    q_offset : int or (batch,) int32 or int64 ndarray, optional
        Position of row 0 of each sequence, as the call has it. Default ``seqlen_kv - seqlen_q``.

    Returns
    -------
    lo, hi : int64 ndarray
        Shaped as by `chunked`.

    Raises
    ------
    InvalidArgument
        An argument has a wrong type, shape or value; the message names it.

    References
    ----------
    Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer",
    2020, section 3.2.1.

    Examples
    --------
    >>> import pyflash
    >>> lo, hi = pyflash.spans.prefix_lm(5, 5, 3)
    >>> lo.tolist(), hi.tolist()
    ([0, 0, 0, 0, 0], [3, 3, 3, 4, 5])
    """
    rows = _rows(seqlen_q, seqlen_kv, q_offset, prefix_len=(prefix_len, 0))
    return rows.cut(np.zeros_like(rows.position), np.maximum(rows.extra, rows.position + 1))


def left_padding(num_padding: _Number, seqlen_q: _Number, seqlen_kv: _Number) -> tuple[Array, Array]:
    """Return the spans of sequences that are padded on the left: no row sees the padding.

    Every row sees keys ``num_padding <= j < seqlen_kv``. With ``causal=True`` rows that are padding
    themselves see nothing, and their output is 0. (Padding on the right is ``seq_lens``.)

    Parameters
    ----------
    num_padding : int or (batch,) int32 or int64 ndarray
        Keys in front of each sequence that are padding, from 0 to `seqlen_kv`. Of lengths it is
        ``seqlen_kv - lengths``, of a 0/1 attention mask ``seqlen_kv - mask.sum(axis=1)``.
    seqlen_q : int or (batch,) int32 or int64 ndarray
        Query rows of each sequence. An array means packed queries.
    seqlen_kv : int or (batch,) int32 or int64 ndarray
        Keys of each sequence, its padding included.

    Returns
    -------
    lo, hi : int64 ndarray
        Shaped as by `chunked`.

    Raises
    ------
    InvalidArgument
        An argument has a wrong type, shape or value; the message names it.

    Examples
    --------
    >>> import numpy as np, pyflash
    >>> lo, hi = pyflash.spans.left_padding(np.array([0, 2]), 3, 5)
    >>> lo.tolist(), hi.tolist()
    ([[0, 0, 0], [2, 2, 2]], [[5, 5, 5], [5, 5, 5]])
    """
    rows = _rows(seqlen_q, seqlen_kv, None, num_padding=(num_padding, 0))
    too_many = np.flatnonzero(rows.extra_of > rows.keys_of)
    if too_many.size:
        b = int(too_many[0])
        place = f"num_padding[{b}]" if isinstance(num_padding, np.ndarray) else "num_padding"
        raise invalid(
            place, int(rows.extra_of[b]), f"0 to {int(rows.keys_of[b])}: the padding is part of the keys"
        )
    return rows.cut(rows.extra, rows.keys)


def documents(segment_ids_q: Array, segment_ids_kv: Array) -> tuple[Array, Array]:
    """Return the spans of documents that share a sequence: a row sees the keys with its own segment id.

    Parameters
    ----------
    segment_ids_q : (batch, seqlen_q) or (seqlen_q,) int32 or int64 ndarray
        The document of each query row; any integers that do not fall along a sequence.
    segment_ids_kv : (batch, seqlen_kv) or (seqlen_kv,) int32 or int64 ndarray
        The document of each key, sorted likewise; as many axes as `segment_ids_q`.

    Returns
    -------
    lo, hi : int64 ndarray
        Shaped like `segment_ids_q`. A row whose document has no key sees nothing.

    Raises
    ------
    InvalidArgument
        An argument has a wrong type, shape or dtype, or its ids are not sorted: the keys of a document
        are then no stretch of the sequence, and the call needs a ``mask``.

    References
    ----------
    Krell, Kosec, Perez, Fitzgibbon, "Efficient Sequence Packing without Cross-contamination", 2021,
    section 3.2.

    Examples
    --------
    >>> import numpy as np, pyflash
    >>> ids = np.array([0, 0, 0, 1, 1])
    >>> lo, hi = pyflash.spans.documents(ids, ids)
    >>> lo.tolist(), hi.tolist()
    ([0, 0, 0, 3, 3], [3, 3, 3, 5, 5])
    """
    ids_q = _sorted_ids("segment_ids_q", segment_ids_q)
    ids_kv = _sorted_ids("segment_ids_kv", segment_ids_kv)
    if ids_kv.ndim != ids_q.ndim or ids_kv.shape[:-1] != ids_q.shape[:-1]:
        want = f"shape {(*ids_q.shape[:-1], 'seqlen_kv')}".replace("'", "")
        raise invalid("segment_ids_kv", f"shape {ids_kv.shape}", f"{want}, beside segment_ids_q")
    lo, hi = np.empty(ids_q.shape, np.int64), np.empty(ids_q.shape, np.int64)
    for b in np.ndindex(ids_q.shape[:-1]):
        lo[b], hi[b] = _places(ids_q[b], ids_kv[b])
    return lo, hi


def _sorted_ids(name: str, ids: Any) -> Array:
    array = _checks.plain_array(name, ids, _ID_AXES)
    array = _checks.index_array(name, array, (None,) * array.ndim, _ID_AXES[array.ndim])
    falls = np.argwhere(array[..., 1:] < array[..., :-1])
    if falls.size:
        before = tuple(int(x) for x in falls[0])
        here = (*before[:-1], before[-1] + 1)
        raise invalid(
            f"{name}[{', '.join(map(str, here))}]",
            f"{int(array[here])} behind {int(array[before])}",
            "ids that do not fall along a sequence; documents in any other order are no spans but a mask: "
            "mask=(segment_ids_q[..., :, None] == segment_ids_kv[..., None, :]), with an axis for heads",
        )
    return array


def _places(needles: Array, hay: Array) -> tuple[Array, Array]:
    """Return how many of `hay` are less than, and how many at most, each needle; both arrays sorted.

    The stable sort of two sorted runs is one merge, linear in their length, which a binary search for
    each needle would not be. The place of a needle among all is the hay before it and its own number.
    """
    own = np.arange(needles.size)
    order = np.argsort(np.concatenate([needles, hay]), kind="stable")  # equals: needles first
    lo = np.flatnonzero(order < needles.size) - own
    order = np.argsort(np.concatenate([hay, needles]), kind="stable")  # equals: hay first
    hi = np.flatnonzero(order >= hay.size) - own
    return lo, hi


class _Rows(NamedTuple):
    """The rows of a call, and a parameter of their sequences; arrays broadcast to the result's shape."""

    position: Array  # of each row, in the shape of the result
    keys: Array
    extra: Array
    keys_of: Array  # (batch,) or (1,): the same of each sequence
    extra_of: Array

    def cut(self, lo: Array, hi: Array) -> tuple[Array, Array]:
        """Return a span in its final shape, cut to the keys that there are."""
        shape, keys = self.position.shape, self.keys
        lo, hi = (np.clip(np.broadcast_to(x, shape), 0, keys) for x in (lo, hi))
        return lo, hi


def _rows(
    seqlen_q: _Number, seqlen_kv: _Number, q_offset: _Number | None, **parameter: tuple[_Number, int]
) -> _Rows:
    """Check the arguments of a builder: the lengths, the offset, and one parameter with its least value."""
    ((name, (value, least)),) = parameter.items()
    given: dict[str, tuple[Any, int]] = {"seqlen_q": (seqlen_q, 0), "seqlen_kv": (seqlen_kv, 0)}
    given[name] = (value, least)
    if q_offset is not None:
        given["q_offset"] = (q_offset, -MAX_POSITION)
    batches = {n: x.shape[0] for n, (x, _) in given.items() if isinstance(x, np.ndarray) and x.ndim == 1}
    first, batch = next(iter(batches.items()), ("", 1))
    numbers = {n: _per_sequence(n, x, low, batch, first) for n, (x, low) in given.items()}
    lengths, keys = numbers["seqlen_q"], numbers["seqlen_kv"]
    offset = numbers.get("q_offset", keys - lengths)
    if isinstance(seqlen_q, np.ndarray):
        start = np.repeat(np.cumsum(lengths) - lengths, lengths)
        row = np.arange(start.size) - start
        offset, keys_of_rows, extra = (np.repeat(x, lengths) for x in (offset, keys, numbers[name]))
    else:
        row = np.arange(int(seqlen_q))
        shape = (batch, 1) if batches else (1,)
        offset, keys_of_rows, extra = (x.reshape(shape) for x in (offset, keys, numbers[name]))
    return _Rows(row + offset, keys_of_rows, extra, keys, numbers[name])


def _per_sequence(name: str, value: Any, low: int, batch: int, first: str) -> Array:
    """Return a number of each sequence as int64 of shape (batch,)."""
    if not isinstance(value, np.ndarray):
        return np.full(batch, _checks.integer(name, value, low, MAX_POSITION), np.int64)
    meaning = "(batch,)" if name == first or not first else f"(batch,) = ({batch},), as {first} has it"
    array = _checks.index_array(name, value, (batch,), meaning)
    _checks.index_range(name, array, low, MAX_POSITION, "an integer of each sequence")
    return array.astype(np.int64)
