"""Sessions of `pyflash bench` for its tests: tiny workloads, and limits that take no time to measure."""

from __future__ import annotations

from pyflash.bench import _session
from pyflash.bench._libraries import Library
from pyflash.bench._workloads import WORKLOADS

SMALL = WORKLOADS["tiny-float32"]._replace(num_heads=4, num_kv_heads=2, seqlen_kv=48)
C = Library("c", "pyflash", option="c")


class FixedLimits:
    """Limits without the seconds that measuring them takes."""

    def __init__(self, isa, cpus):
        pass

    def measure(self, num_threads):
        return {"float32": 1e9, "float64": 5e8, "read": 1e9}


def new_session(*libraries, **how):
    options = {"isa": None, "threads": 1, "seconds": 0.0, "turn": 0.0, "rotate": 0.0, "of_commit": ""}
    return _session.Session(list(libraries), **options | how)


def measured(session, *workloads):
    group = session.group(list(workloads))
    group.measure()
    return group
