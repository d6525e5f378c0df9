"""Which keys come and go in each step of a ring; found out once for calls that are alike, as layers are."""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np

from .._description import Array
from . import _ranges
from ._arguments import Arguments
from ._schedules import Layout
from ._visible import Rows, messages


class Message(NamedTuple):
    """What comes of one rank's keys, and in stretches of how many tokens."""

    ranges: Array
    stretches: Array


class Route(NamedTuple):
    """One rank's part of a ring: what its rows see, and for each step what it sends and what comes."""

    rows: Rows
    outgoing: list[Array]  # stretches of what is held
    incoming: list[Message]
    calls: dict[tuple[int, bool], Any]  # of kernels, kept by `_step`: by the rank of the keys; with slopes
    layouts: tuple[Layout, Layout]


def route_of(rank: int, rows: Rows, needs: list[list[Array]], layouts: tuple[Layout, Layout]) -> Route:
    """Return the route of a rank; `needs` has, for each rank, the tokens of each origin that it sees."""
    size = len(needs)
    num_tokens: list[int] = layouts[1].lengths.sum(axis=1).tolist()

    @functools.cache
    def on_the_way(origin: int) -> list[Array]:
        sent = messages(needs, origin)
        return [_ranges.pair(0, num_tokens[origin]), *sent[1:], _ranges.EMPTY]

    route = Route(rows, [], [], {}, layouts)
    for step in range(size):  # the keys of rank - step are here, and those of the rank before it come
        here, coming = on_the_way((rank - step) % size), on_the_way((rank - step - 1) % size)
        route.outgoing.append(_ranges.runs(here[step + 1], here[step]))
        stretches = _ranges.runs(coming[step + 1], coming[step])
        route.incoming.append(Message(coming[step + 1], np.diff(stretches).reshape(-1)))
    return route


#: A route has some numbers for each row, and layers are alike: only few are kept.
_MOST = 8
_lock = threading.Lock()
_kept: OrderedDict[tuple[int, bytes], tuple[bytes, Route]] = OrderedDict()


def key_of(call: Arguments) -> bytes | None:
    """Return what a rank's route depends on, as far as the rank knows; None for spans of its own."""
    mask, offset = call.mask, call.q_offset
    if mask.spans is not None:
        return None
    facts = (
        *(mask.causal, mask.window, call.schedule, call.lengths_q, call.lengths_kv),
        None if offset is None else (offset.shape, offset.tobytes()),
    )
    return hashlib.sha256(repr(facts).encode()).digest()


def recall(rank: int, key: bytes | None) -> tuple[bytes, Route | None]:
    """Return the keys that all ranks had in the last call with this one, and the route that followed."""
    return (b"", None) if key is None else _kept.get((rank, key), (b"", None))


def remember(rank: int, key: bytes | None, keys: bytes, route: Route) -> None:
    """Keep a route, for a call in which all ranks have these keys again."""
    if key is None:
        return
    with _lock:  # ranks may be threads
        _kept.pop((rank, key), None)
        _kept[rank, key] = (keys, route)
        while len(_kept) > _MOST:
            _kept.popitem(last=False)
