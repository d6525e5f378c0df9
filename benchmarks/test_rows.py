"""Every workload on every library, one benchmark each: ``make bench ARGS="-k decode"``; on a GPU as well.

The measuring is that of `pyflash bench`. Libraries have to be timed in turn, which pytest-benchmark cannot do
across tests. So the first test of a group has the whole group measured, and each hands pytest-benchmark its
times by a clock of ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyflash.bench import _cli, _results
from pyflash.bench._limits import fraction
from pyflash.bench._process import Row
from pyflash.bench._session import Session
from pyflash.bench._workloads import WORKLOADS

RESULTS = Path(__file__).parent / "results"


class Clock:
    """A clock that stands still until it is told how much time has passed."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


CLOCK = Clock()


class Measured:
    """The rows of the selected tests, measured group by group when they are asked for."""

    def __init__(self, session: Session, selected: set[tuple[str, str]]) -> None:
        self.session, self._selected = session, selected
        self.rows: dict[tuple[str, str], Row] = {}
        self.times: dict[tuple[str, str], list[float]] = {}

    def row(self, workload: str, library: str) -> Row:
        if (workload, library) not in self.rows:
            names = {name for name, _ in self._selected}
            of_group = WORKLOADS[workload].group
            group = self.session.group(
                [w for w in WORKLOADS.values() if w.group == of_group and w.name in names]
            )
            group.measure()
            self.rows |= group.rows
            self.times |= {key: list(chain.from_iterable(times)) for key, times in group.times.items()}
        return self.rows[workload, library]


def libraries(options: SimpleNamespace) -> list[_cli.Library]:
    return _cli.libraries(options.backends, options.peers, options.peers_from, options.also)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    found = libraries(metafunc.config.option)
    pairs = [(w.name, library.name) for w in WORKLOADS.values() for library in found if library.takes(w)]
    metafunc.parametrize(("workload", "library"), pairs, ids=["-".join(pair) for pair in pairs])


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> Iterator[Measured]:
    options = request.config.option
    items = [item.callspec.params for item in request.session.items]
    selected = {(params["workload"], params["library"]) for params in items}
    wanted = {library for _, library in selected}
    session = Session(
        [library for library in libraries(options) if library.name in wanted],
        options.isa,
        _cli.threads_of(options.threads)[0],
        options.seconds,
        options.turn,
        options.rotate,
        _results.own_commit() if options.commit is None else options.commit,
    )
    measured = Measured(session, selected)
    yield measured
    runs = [session.finished(measured.rows, session.measure_limits())]
    session.close()
    header = session.header()
    _results.save(options.results or RESULTS / _results.default_name(header, runs), header, runs)


@pytest.mark.benchmark(timer=CLOCK)
def test_row(request: pytest.FixtureRequest, measured: Measured, workload: str, library: str) -> None:
    row = measured.row(workload, library)
    if "unsupported" in row:
        pytest.skip(row["unsupported"])
    assert "error" in row, row.get("failed") or f"the answer is wrong: {row}"
    if "growth_bytes" in row:
        return
    benchmark = request.getfixturevalue("benchmark")
    benchmark.group = workload
    benchmark.extra_info.update({name: row[name] for name in ("error", "ratio", "base_ratio") if name in row})
    on_device = measured.session.info[library]["on_device"]
    part = fraction(WORKLOADS[workload], row["median"], measured.session.before, on_device)
    benchmark.extra_info["of_limit"] = part
    times = measured.times[workload, library]
    left = iter(times)
    benchmark.pedantic(lambda: CLOCK.advance(next(left)), rounds=len(times))
