"""How each library is called: one module a peer, loaded in the peer's own environment.

``prepare(workload, arrays, threads)`` returns a `Call`, or raises `Unsupported`. Inputs have been converted
to what the library takes before the call is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np


class Unsupported(Exception):
    """The library has no such call; the text says what is missing."""


class Call(NamedTuple):
    """A call that is ready to be timed."""

    run: Callable[[], Any]
    #: The answer of the last run, ``(batch, heads, seqlen, head_dim)`` in any order that reshapes to it.
    result: Callable[[], np.ndarray]
    #: What the reader of a number should know: the operator, the kernel, the work space.
    notes: Mapping[str, Any] = MappingProxyType({})
    #: Whether the timed call allocates its output.
    allocates_output: bool = False
    #: Whether quantised keys were quantised again, to the library's own type.
    requantised: bool = False
