"""How each library is called: one module a library, loaded in the library's own process.

``prepare(workload, arrays, threads, option)`` returns a `Call`, or raises `Unsupported`. Inputs have been
converted to what the library takes before the call is timed. `option` picks one of several calls of a
module: the backend of pyflash, the kernel of PyTorch. These files run where pyflash may not be installed, and
must not import it, `pyflash` and `cuda` apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from .._workloads import Array


class Unsupported(Exception):
    """The library has no such call, or none that ends in time; the text says what is missing."""


class Call(NamedTuple):
    """A call that is ready to be timed."""

    run: Callable[[], Any]
    #: The answer of the last run, ``(batch, heads, seqlen, head_dim)`` in any order that reshapes to it.
    result: Callable[[], Array]
    #: What the reader of a number should know: the operator, the kernel, the work space.
    notes: Mapping[str, Any] = MappingProxyType({})
    #: Whether the timed call allocates its output.
    allocates_output: bool = False
    #: Whether quantised keys were quantised again, to the library's own type.
    requantised: bool = False
    #: Seconds per call, measured for about so many seconds: where the clock of the host is the wrong one.
    turn: Callable[[float], list[float]] | None = None
    #: Answers on other copies of the inputs, which have to be right too.
    also: tuple[Callable[[], Array], ...] = ()
