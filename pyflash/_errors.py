"""The exceptions of pyflash and the one way their messages are put together.

Every refusal names the argument, what was found and what was expected, in that order.
Each class also derives from the builtin a caller would expect, so that ``except ValueError``
works without importing anything from here.
"""

from __future__ import annotations


class PyflashError(Exception):
    """Base class of every exception that pyflash raises on purpose."""


class InvalidArgument(PyflashError, ValueError):
    """An argument has a wrong type, shape, value, stride or memory layout."""


class UnsupportedError(PyflashError, NotImplementedError):
    """The call means something, but the backend that was asked for cannot do it."""


class BackendUnavailable(PyflashError, RuntimeError):
    """The backend that was asked for cannot run on this machine or in this installation."""


class OutOfPages(PyflashError, MemoryError):
    """A page pool has fewer free pages than a request needs; nothing was changed."""


def invalid(argument: str, found: object, expected: str) -> InvalidArgument:
    """Return the error for a bad argument: its name, what was found, what was expected."""
    return InvalidArgument(f"{argument}: found {found}, expected {expected}")


def unsupported(argument: str, found: object, where: str, instead: str) -> UnsupportedError:
    """Return the error for something that `where` cannot do, and what would do it."""
    return UnsupportedError(f"{argument}: {found} is not supported by {where}; {instead}")
