"""Cutting whole arrays into the shards of ranks, and putting shards together again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from .._arrays import on_host
from .._checks import AN_ARRAY, MAX_POSITION, describe, index_array, index_range, integer, prefix_sums
from .._description import Array
from .._errors import invalid
from ._schedules import Layout, even_lengths, layout


def shard(
    x: Any,
    rank: int,
    size: int,
    *,
    schedule: str = "zigzag",
    axis: int = -3,
    cu_seqlens: Any = None,
    lengths: Any = None,
) -> Any:
    """Return the part of a whole array that a rank holds.

    Parameters
    ----------
    x : ndarray
        An array with tokens on one axis: queries, keys, token numbers, positions.
    rank, size : int
        Which of how many ranks.
    schedule : {"zigzag", "contiguous", "stripe"}
        contiguous: ranks hold one stretch each, in their order. zigzag: two stretches, one counted from the
        beginning and one from the end, so that early and late positions meet on every rank. stripe: every
        `size`-th position, from `rank` on.
    axis : int, default -3
        The axis of tokens: -3 for ``(..., seqlen, heads, width)``, -1 for a log-sum-exp or token numbers.
    cu_seqlens : (batch + 1,) int32 or int64 ndarray, optional
        Prefix sums of packed sequences. Each of them is cut.
    lengths : (size,) or (size, batch) int32 or int64 ndarray, optional
        Tokens of each rank (of each sequence). Default: as equal as can be, earlier ranks having one more.
        A zigzag rank's first stretch is the longer one, by one token, if they differ.

    Returns
    -------
    shard : ndarray
        Tokens in rising order of position; a view where they lie evenly, else a copy.
    cu_seqlens : int64 ndarray
        Only with `cu_seqlens`: those of the shard.

    Raises
    ------
    InvalidArgument
        An argument is wrong; the message names it.

    Examples
    --------
    >>> import numpy as np
    >>> from pyflash.distributed import shard
    >>> [shard(np.arange(8), rank, 2, axis=0).tolist() for rank in (0, 1)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    axis = _axis("x", x, axis)
    where = _layout(int(x.shape[axis]), size, schedule, cu_seqlens, lengths)
    rank = integer("rank", rank, 0, where.size - 1)
    start, count = where.pieces(rank)
    first = np.cumsum(where.totals) - where.totals
    begins = [int(n) for n in (start + first[:, np.newaxis]).reshape(-1)]
    before: tuple[Any, ...] = (slice(None),) * axis
    parts = [
        x[before + (slice(begin, begin + (num - 1) * where.step + 1, where.step),)]  # noqa: RUF005
        for begin, num in zip(begins, count.reshape(-1).tolist(), strict=True)
        if num
    ]
    cut = _joined(parts or [x[before + (slice(0, 0),)]], axis)  # noqa: RUF005
    return cut if cu_seqlens is None else (cut, where.borders(rank))


def unshard(
    shards: Sequence[Any],
    *,
    schedule: str = "zigzag",
    axis: int = -3,
    cu_seqlens: Sequence[Any] | None = None,
) -> Any:
    """Return the whole array whose shards are given, those of all ranks in their order.

    Parameters
    ----------
    shards : sequence of ndarray
        What `shard` returns for each rank, or results of the same tokens. On MPI ``comm.allgather(x)``
        gathers them.
    schedule, axis
        As in `shard`.
    cu_seqlens : sequence of (batch + 1,) int32 or int64 ndarray, optional
        Prefix sums of each shard of packed sequences.

    Returns
    -------
    x : ndarray
        A new array.
    cu_seqlens : int64 ndarray
        Only with `cu_seqlens`: those of the whole.

    Raises
    ------
    InvalidArgument
        An argument is wrong; the message names it.

    Examples
    --------
    >>> import numpy as np
    >>> from pyflash.distributed import unshard
    >>> unshard([np.array([0, 1, 6, 7]), np.array([2, 3, 4, 5])], axis=0).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    shards = _alike(shards, axis)
    axis = _axis("shards[0]", shards[0], axis)
    if cu_seqlens is None:
        lengths = np.array([[int(x.shape[axis])] for x in shards], np.int64)
    else:
        borders = [on_host(cu) for cu in _sequence("cu_seqlens", cu_seqlens)]
        if len(borders) != len(shards):
            raise invalid("cu_seqlens", f"those of {len(borders)} ranks", f"of {len(shards)}, as shards")
        for rank, (cu, x) in enumerate(zip(borders, shards, strict=True)):
            name = f"cu_seqlens[{rank}]"
            num_sequences = len(borders[0]) - 1 if rank else None
            prefix_sums(name, cu, num_sequences, int(x.shape[axis]), lambda _, array: array)
        lengths = np.array([np.diff(cu) for cu in borders], np.int64)
    where = layout(schedule, lengths, "shards")
    gathered = _joined(list(shards), axis)
    order = where.order()
    whole = rows_at(gathered, order, axis)
    return whole if cu_seqlens is None else (whole, np.concatenate([[0], np.cumsum(where.totals)]))


def positions(
    seqlen: int | Any, rank: int, size: int, *, schedule: str = "zigzag", lengths: Any = None
) -> Array:
    """Return the position of each token that a rank holds, for what depends on it, such as rotary embedding.

    Parameters
    ----------
    seqlen : int or (batch,) int32 or int64 ndarray
        Tokens of the whole sequence, or of each packed one.
    rank, size, schedule, lengths
        As in `shard`.

    Returns
    -------
    ndarray of int64
        In the order of the rank's tokens.

    Raises
    ------
    InvalidArgument
        An argument is wrong; the message names it.

    Examples
    --------
    >>> from pyflash.distributed import positions
    >>> positions(8, 1, 2, schedule="stripe").tolist()
    [1, 3, 5, 7]
    """
    if getattr(seqlen, "shape", ()):
        totals = index_array("seqlen", on_host(seqlen), (None,), "(batch,)").astype(np.int64)
        index_range("seqlen", totals, 0, MAX_POSITION, "a length")
    else:
        totals = np.array([integer("seqlen", seqlen, 0, MAX_POSITION)])
    where = _layout(int(totals.sum()), size, schedule, np.concatenate([[0], np.cumsum(totals)]), lengths)
    return where.positions(integer("rank", rank, 0, where.size - 1))


def _axis(name: str, x: Any, axis: int) -> int:
    """Return an axis of an array, counted from the front."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise invalid(name, describe(x), AN_ARRAY)
    shape = tuple(x.shape)
    if not -len(shape) <= integer("axis", axis) < len(shape):
        raise invalid("axis", axis, f"an axis of arrays of shape {shape}")
    return axis % len(shape)


def _sequence(name: str, given: Any) -> list[Any]:
    try:
        return list(given)
    except TypeError:
        raise invalid(name, describe(given), "a sequence with one for each rank") from None


def _library(x: Any) -> str:
    """Return the name of the library an array is of; classes of the caller's own are NumPy's."""
    return "numpy" if isinstance(x, np.ndarray) else type(x).__module__.partition(".")[0]


def _alike(shards: Any, axis: int) -> list[Any]:
    """Return shards that are arrays of one library and, but for the tokens, of one shape."""
    found = _sequence("shards", shards)
    if not found:
        raise invalid("shards", "none", "those of all ranks")
    first = None
    for rank, x in enumerate(found):
        name = f"shards[{rank}]"
        at = _axis(name, x, axis)
        shape = (*x.shape[:at], "tokens", *x.shape[at + 1 :])
        first = first or (_library(x), shape)
        if (_library(x), shape) != first:
            expected = f"an array of {first[0]} of shape {first[1]}, like shards[0]"
            raise invalid(name, f"one of {_library(x)} of shape {tuple(x.shape)}", expected)
    return found


def _layout(total: int, size: int, schedule: str, cu_seqlens: Any, lengths: Any) -> Layout:
    size = integer("size", size, 1)
    totals = np.array([total], np.int64)
    if cu_seqlens is not None:
        cu = on_host(cu_seqlens)
        prefix_sums("cu_seqlens", cu, None, total, lambda _, array: array)
        totals = np.diff(cu).astype(np.int64)
    if lengths is None:
        return layout(schedule, even_lengths(totals, size))
    given = on_host(lengths)
    if cu_seqlens is None and getattr(given, "ndim", 0) == 1:
        given = given[:, np.newaxis]
    given = index_array("lengths", given, (size, len(totals)), f"({size}, {len(totals)}): ranks, sequences")
    if (given < 0).any() or (given.sum(axis=0) != totals).any():
        found = f"{given.sum(axis=0).tolist()} tokens over all ranks, the least {given.min(initial=0)}"
        raise invalid("lengths", found, f"{totals.tolist()}, the lengths of the sequences, and none negative")
    return layout(schedule, given.astype(np.int64))


def _joined(parts: list[Any], axis: int) -> Any:
    """Return parts one behind the other, as an array of their library."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], np.ndarray):  # also of a class of the caller's own
        return np.concatenate(parts, axis)
    library = sys.modules[type(parts[0]).__module__.partition(".")[0]]
    join = getattr(library, "concatenate", None) or library.cat
    return join(parts, axis)


def rows_at(x: Any, numbers: Array, axis: int = 0) -> Any:
    """Return a new array of some tokens of an axis, in the order of their numbers."""
    index: Any = numbers
    if not isinstance(x, np.ndarray):
        library = sys.modules[type(x).__module__.partition(".")[0]]
        where = dict(device=x.device) if library.__name__ == "torch" else {}
        index = library.asarray(numbers, **where)
    before: tuple[Any, ...] = (slice(None),) * (axis % len(x.shape))
    return x[before + (index,)]  # noqa: RUF005
