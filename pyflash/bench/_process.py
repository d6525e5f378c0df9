"""The process of libraries under test, seen from the one that measures."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ._libraries import Library

Row = dict[str, Any]
#: No call or turn of any workload takes nearly so long: a library that does hangs.
ANSWER_SECONDS = 600.0


class Ended(Exception):
    """A library's process ended by itself, or does not answer."""


class Process:
    """A process of `_server`, running only while it is asked something.

    One that computes on a GPU is not stopped: nothing of it spins, and it has to answer without delay.
    """

    def __init__(self, library: Library, isa: str, cpus: list[int]) -> None:
        self._stops = not library.on_device
        command = [
            library.python,
            str(Path(__file__).with_name("_server.py")),
            ",".join(map(str, cpus)),
            str(len(cpus)),
        ]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed with the process
        self._process = subprocess.Popen(
            command,
            env=library.environment(isa, len(cpus)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            bufsize=1,
        )

    def ask(self, do: str, **arguments: Any) -> Row:
        """Send a command and return the answer; the process is stopped again afterwards."""
        assert self._process.stdin and self._process.stdout
        if self._stops and self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            if not select.select([self._process.stdout], [], [], ANSWER_SECONDS)[0]:
                self._process.kill()
                raise Ended(f"no answer in {ANSWER_SECONDS:g} seconds")
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            status = self._process.wait()
            self._log.seek(0)
            said = self._log.read().strip().splitlines()
            raise Ended(f"the process ended: {said[-1] if said else f'exit status {status}'}")
        if self._stops:
            self._process.send_signal(signal.SIGSTOP)
        found: Row = json.loads(answer)
        return found

    def end(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
