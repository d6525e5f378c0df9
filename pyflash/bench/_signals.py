"""SIGTERM and SIGHUP end a run as Ctrl-C does: what was measured is kept, temporary inputs are removed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

#: Windows has no SIGHUP.
ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextlib.contextmanager
def as_interruption() -> Iterator[None]:
    """Let the first of these signals raise KeyboardInterrupt, and restore their handlers afterwards.

    The next ones would interrupt what the first one began: `timeout` sends its signal twice. One that is
    ignored stays so (nohup). Only the main thread can have handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    ours = [number for number, handler in before.items() if handler is signal.SIG_DFL]

    def interrupt(number: int, frame: object) -> None:
        for other in ours:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    try:
        for number in ours:
            signal.signal(number, interrupt)
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number])
