"""What all ranks agree on before and after work: arguments that match, and errors that all of them raise.

A rank that fails by itself would leave the others waiting for its messages. So a failure is kept, told to all
in a collective, and raised everywhere, in the same words.
"""

from __future__ import annotations

import builtins
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np

from .. import _errors
from .._arrays import on_host
from .._errors import PyflashError, invalid
from ._communicator import Communicator

_Result = TypeVar("_Result")


class RankFailed(PyflashError, RuntimeError):
    """A rank failed with an exception of another library; the message has its name and words."""


class Failure(NamedTuple):
    """An exception as it is told to other ranks."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Return what is told of an exception."""
        try:
            words = str(error)
        except Exception:  # others wait for what is told, and an exception may fail at that too
            words = "an exception without words"
        return cls(type(error).__name__, words)

    def exception(self, rank: int) -> Exception:
        """Return what every rank raises: of the same class where that is Python's or pyflash's own."""
        known = getattr(_errors, self.kind, None) or getattr(builtins, self.kind, None)
        message = f"{self.message} (on rank {rank})"
        if isinstance(known, type) and issubclass(known, Exception):
            try:
                return known(message)
            except TypeError:  # a UnicodeDecodeError has five arguments
                pass
        return RankFailed(f"{self.kind}: {message}")


def attempt(work: Callable[[], _Result]) -> tuple[_Result | None, Exception | None]:
    """Return what a function returns, or the exception it raises."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def raise_first(failures: list[Failure | None], rank: int, mine: Exception | None) -> None:
    """Raise the failure of the first rank that has one, on every rank the same."""
    for at, failure in enumerate(failures):
        if failure is not None:
            raise failure.exception(at) from (mine if at == rank else None)


def exchange(comm: Communicator, value: Any, error: Exception | None) -> list[Any]:
    """Gather a value of each rank, or raise the first failure on all of them. One collective."""
    told = comm.allgather((value, None if error is None else Failure.of(error)))
    raise_first([failure for _, failure in told], comm.rank, error)
    return [value for value, _ in told]


def check_same(facts: list[dict[str, Any]]) -> None:
    """Refuse arguments that differ between ranks; `facts` has those of each rank, by their names."""
    for name, first in facts[0].items():
        for rank, other in enumerate(facts):
            if other[name] != first:
                found = f"{first} on rank 0 and {other[name]} on rank {rank}"
                raise invalid(name, found, "the same everywhere")


def fact_of(x: Any) -> Any:
    """Return what is compared of a small argument: a number itself, an array's shape and a digest."""
    if isinstance(x, np.generic):  # a number, which ranks may also give as Python's
        x = x.item()
    if x is None or isinstance(x, (bool, int, float, str, tuple)):
        return x
    array = np.ascontiguousarray(on_host(x))
    digest = hashlib.sha256(array.tobytes()).hexdigest()[:8]
    return f"an array of shape {array.shape} and dtype {array.dtype} ({digest})"
