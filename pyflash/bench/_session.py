"""One run: libraries, threads, an instruction set, and the limits of the machine before and after."""

from __future__ import annotations

import datetime
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from .. import _c
from .._errors import PyflashError, invalid
from ._engine import Group, Key, Progress
from ._libraries import Library
from ._limits import Limits, agree
from ._process import Ended, Process, Row
from ._results import commit, machine, smi
from ._workloads import Workload

TURN_SECONDS, DEVICE_TURN_SECONDS = 0.05, 0.01


class NotLoaded(PyflashError):
    """A library is not where it was said or found to be, or does not work there."""


class Session:
    """What is measured with, until `finished`."""

    def __init__(
        self,
        libraries: list[Library],
        isa: str | None,
        threads: int,
        seconds: float,
        turn: float | None,
        rotate: float,
        of_commit: str,
        optional: Collection[str] = (),
    ) -> None:
        """Ask every library what it is; those of `optional` that cannot be loaded are left out."""
        self.threads, self._commit = threads, of_commit
        self.seconds, self._turn, self._rotate_bytes = seconds, turn, rotate * 2**20
        self._cpus = cpus()
        if not 1 <= threads <= len(self._cpus):
            raise invalid("--threads", threads, f"from 1 to {len(self._cpus)}, the CPUs of this process")
        self._of_device: dict[str, Process] = {}  # kept: to start one again takes seconds
        self.isa = _c.choose_isa(isa)[0]
        self.info: dict[str, Row] = {}
        self.left_out: list[str] = []
        for library in libraries:
            try:
                self.info[library.name] = self._ask_info(library)
            except NotLoaded as error:
                if library.name not in optional:
                    raise
                self.left_out.append(str(error))
        self.libraries = [library for library in libraries if library.name in self.info]
        self._probes = Limits(self.isa, self._cpus)
        self.before: dict[str, float] = self.measure_limits()

    def _ask_info(self, library: Library) -> Row:
        process = None
        try:
            process = self.start(library)
            found = process.ask("info", module=library.module, imported=library.imported)
        except (Ended, OSError) as error:
            found = {"failed": str(error)}
        finally:
            if process is not None:
                self.stop(process)
        if "failed" in found:
            raise NotLoaded(f"{library.name} cannot be loaded by {library.python}: {found['failed']}")
        file = found.pop("file")
        if library.path:
            # Where the folder lacks it, Python goes on to what is installed.
            if Path(library.path).resolve() not in Path(file).resolve().parents:
                where = f"{library.imported} was imported from {file or 'nowhere'}"
                raise NotLoaded(f"{library.name}: {where}, which is not in {library.path}")
            found["commit"] = commit(library.path)
        if library.is_pyflash:
            found["backend"] = "cuda" if library.on_device else library.option
            found["version"] = found.pop("pyflash", found["version"])
        return found | {"held": library.held_to(self.isa), "on_device": library.on_device}

    def measure_limits(self) -> dict[str, float]:
        """Return what the machine, and a GPU that is compared on, can do at this moment."""
        found = self._probes.measure(self.threads)
        device = next((library for library in self.libraries if library.on_device), None)
        if device is not None:
            found |= self.start(device).ask("limits", module=device.module)
        if "failed" in found:
            raise PyflashError(f"the limits of the GPU cannot be measured: {found['failed']}")
        return found

    def start(self, library: Library) -> Process:
        """Start a library's process on the first CPUs; one that computes on a GPU may run already."""
        if library.process in self._of_device:
            return self._of_device[library.process]
        isas = self.info.get(library.name, {}).get("isas", [self.isa])
        # An older build may lack the instruction set; it then takes its best.
        process = Process(library, self.isa if self.isa in isas else "", self._cpus[: self.threads])
        if library.on_device:
            self._of_device[library.process] = process
        return process

    def stop(self, process: Process) -> None:
        """End a process after a group; one that computes on a GPU only lets go of its memory."""
        if process in self._of_device.values():
            try:
                process.ask("forget", module="cuda")
            except Ended:
                self.lost(process)
        else:
            process.end()

    def lost(self, process: Process) -> None:
        """Remove a process that has ended by itself."""
        process.end()
        self._of_device = {name: p for name, p in self._of_device.items() if p is not process}

    def close(self) -> None:
        """End what still runs."""
        for process in self._of_device.values():
            process.end()
        self._of_device.clear()

    def turn_seconds(self, library: Library) -> float:
        """Return how long a turn is; on a GPU it may be shorter, as there are no threads to wake."""
        if self._turn is not None:
            return self._turn
        return DEVICE_TURN_SECONDS if library.on_device else TURN_SECONDS

    def copies(self, w: Workload, library: Library) -> int:
        """Return how many sets of inputs a decode rotates through, so that no cache keeps them.

        On a GPU the call itself sees to that.
        """
        if w.seqlen_q > 16 or w.memory or library.on_device or not self._rotate_bytes:
            return 1
        return max(1, -int(-self._rotate_bytes // w.kv_bytes))

    def group(self, workloads: list[Workload], progress: Progress = lambda part, text: None) -> Group:
        """Return workloads of one group, to be measured."""
        return Group(self, workloads, progress)

    def clocks(self) -> dict[str, str]:
        """Return how fast and hot a GPU that is compared on has become, nothing without one."""
        if not any(library.on_device for library in self.libraries):
            return {}
        return smi("clocks.sm", "power.draw", "temperature.gpu")

    def finished(self, rows: dict[Key, Row], after: dict[str, float] | None) -> Row:
        """Return the record of the run; `after` are the limits measured once more, None while it goes on."""
        nested: dict[str, dict[str, Row]] = {}
        for (workload, library), row in rows.items():
            nested.setdefault(workload, {})[library] = row
        found: dict[str, Any] = {"before": self.before}
        # A run that was not finished does not count where others do.
        found |= {"after": after, "agree": agree(self.before, after)} if after else {"agree": False}
        return {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="minutes"),
            "threads": self.threads,
            "limits": found,
            "rows": nested,
        }

    def header(self) -> Row:
        """Return what all runs of a file have in common."""
        device = next((info for info in self.info.values() if "gpu" in info), {})
        return {
            "machine": machine() | {name: device[name] for name in ("gpu", "sms") if name in device},
            **(
                {"gpu": smi("driver_version", "clocks.max.sm", "clocks.max.memory", "power.limit")}
                if device
                else {}
            ),
            "commit": self._commit,
            "isa": self.isa,
            "libraries": self.info,
            "first": self.libraries[0].name,
            "settings": {
                "seconds": self.seconds,
                "turn_seconds": self.turn_seconds(self.libraries[0]),
                "rotate_mib": self._rotate_bytes / 2**20,
                "OMP_PROC_BIND": "true",
            },
        }


def cpus() -> list[int]:
    """Return the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
