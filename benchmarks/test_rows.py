"""Every workload on every library, one benchmark each: ``make bench ARGS="-k decode"``; on a GPU as well.

Libraries have to be timed in turn, which pytest-benchmark cannot do across tests. So the first test of a
group lets driver.py measure the whole group, and each hands pytest-benchmark its times by a clock of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import bench_gpu
import pytest
from bench import fraction, libraries
from driver import Row, Session, default_path, save
from workloads import WORKLOADS


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

    def __init__(self, run: Session, selected: set[tuple[str, str]]) -> None:
        self.run, self._selected = run, selected
        self.rows: dict[tuple[str, str], Row] = {}
        self.times: dict[tuple[str, str], list[float]] = {}

    def row(self, workload: str, library: str) -> Row:
        if (workload, library) not in self.rows:
            names = dict.fromkeys(name for name, _ in self._selected)
            group = WORKLOADS[workload].group
            measured = self.run.group([w for w in WORKLOADS.values() if w.group == group and w.name in names])
            self.rows |= measured.rows
            self.times |= {key: list(chain.from_iterable(times)) for key, times in measured.times.items()}
        return self.rows[workload, library]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function is test_gpu_row:
        pairs = [(name, library) for name in bench_gpu.WORKLOADS for library in bench_gpu.LIBRARIES]
        if reason := bench_gpu.missing():  # one skip for all
            pairs = [pytest.param("none", "none", marks=pytest.mark.skip(reason=reason), id="gpu")]
            metafunc.parametrize(("workload", "library"), pairs)
        else:
            metafunc.parametrize(("workload", "library"), pairs, ids=["-".join(pair) for pair in pairs])
        return
    found = libraries(metafunc.config.option)
    pairs = [
        (w.name, library.name)
        for w in WORKLOADS.values()
        for library in found
        if library.is_pyflash or not (w.alone or w.variant)
    ]
    metafunc.parametrize(("workload", "library"), pairs, ids=["-".join(pair) for pair in pairs])


def _selected(request: pytest.FixtureRequest, test: str) -> set[tuple[str, str]]:
    """The workloads and libraries of the tests that were picked."""
    items = [item for item in request.session.items if item.originalname == test]
    return {(item.callspec.params["workload"], item.callspec.params["library"]) for item in items}


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> Iterator[Measured]:
    options = request.config.option
    selected = _selected(request, "test_row")
    wanted = {library for _, library in selected}
    run = Session(
        [library for library in libraries(options) if library.name in wanted],
        options.isa,
        int(options.threads),
        options.seconds,
        options.turn,
        options.rotate,
        options.commit,
    )
    measured = Measured(run, selected)
    yield measured
    runs = [run.finished(measured.rows)]
    save(options.results or default_path(run.header(), runs), run.header(), runs)


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
    w = WORKLOADS[workload]
    benchmark.extra_info["of_limit"] = fraction(w, row["median"], measured.run.before)
    times = measured.times[workload, library]
    left = iter(times)
    benchmark.pedantic(lambda: CLOCK.advance(next(left)), rounds=len(times))


@pytest.fixture(scope="session")
def rows_on_gpu(request: pytest.FixtureRequest) -> Iterator[Callable[[str], dict[str, Row]]]:
    """The rows of a workload by library, measured together when the first of them is asked for."""
    options, selected = request.config.option, _selected(request, "test_gpu_row")
    bench = bench_gpu.Bench(options.seconds, options.turn)
    results: dict[str, dict[str, Row]] = {}

    def rows(workload: str) -> dict[str, Row]:
        if workload not in results:
            wanted = tuple(name for name in bench_gpu.LIBRARIES if (workload, name) in selected)
            results[workload] = bench.rows(bench_gpu.WORKLOADS[workload], wanted)
        return results[workload]

    yield rows
    bench.limits.append(bench.measure_limits())
    bench_gpu.save(bench_gpu.DEFAULT_RESULTS, bench.header(options.commit), bench.limits, results)


@pytest.mark.benchmark(timer=CLOCK)
def test_gpu_row(request: pytest.FixtureRequest, workload: str, library: str) -> None:
    row = request.getfixturevalue("rows_on_gpu")(workload)[library]
    if "unsupported" in row:
        pytest.skip(row["unsupported"])
    assert "median" in row, row.get("failed") or f"the answer is wrong: {row}"
    benchmark = request.getfixturevalue("benchmark")
    benchmark.group = workload
    benchmark.extra_info.update({name: x for name, x in row.items() if name != "times"})
    left = iter(row["times"])
    benchmark.pedantic(lambda: CLOCK.advance(next(left)), rounds=len(row["times"]))
