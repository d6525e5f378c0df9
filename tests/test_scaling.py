"""The model of `pyflash.distributed.scaling`: its counts are those of the code, its times those measured."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from threads import ThreadCommunicator, on_ranks

import pyflash
from pyflash.distributed import (
    _ring,
    context_parallel_decode,
    head_parallel_attention,
    ring_attention,
    scaling,
    shard,
)
from pyflash.distributed._schedules import SCHEDULES
from pyflash.distributed._states import States
from pyflash.distributed.scaling import Hardware, Link, Workload

SIZES = (1, 2, 3, 4, 8)
LENGTH = 8  # tokens of a rank

#: Free messages, merges, copies and steps; a pair takes a second.
FREE = Hardware(flops=1.0, merge=math.inf, copy=math.inf, read=1.0, near=Link(math.inf))


class Counting(ThreadCommunicator):
    """What each call of `start` sends, what is gathered, what is made."""

    def __init__(self, shared, rank):
        super().__init__(shared, rank)
        self.steps, self.messages, self.gathered, self.made = [], [], [], []

    def start(self, sends, receives, after=None):
        self.steps.append(sum(x.nbytes for x, _ in sends))
        self.messages.append(sum(x.nbytes > 0 for x, _ in sends))
        return super().start(sends, receives, after)

    def start_allgather(self, mine, everyone):
        self.gathered.append(mine.nbytes)
        return super().start_allgather(mine, everyone)

    def empty(self, shape, dtype, like):
        array = super().empty(shape, dtype, like)
        self.made.append(array.nbytes)
        return array


def arrays(length, *, heads=4, kv_heads=2, batch=1):
    rng = np.random.default_rng(7)
    return [rng.standard_normal((batch, length, n, 8), dtype=np.float32) for n in (heads, kv_heads, kv_heads)]


def workload(length, *, heads=4, kv_heads=2, batch=1, causal=True):
    return Workload(length, heads, kv_heads, 8, itemsize=4, causal=causal, batch=batch)


def counted(function, size, schedule, *, length=LENGTH, causal=True, **shape):
    """The communicators of a call, one for each rank, with what they counted."""
    whole = arrays(length * size, **shape)

    def work(comm):
        mine = Counting(comm.shared, comm.rank)
        parts = [shard(x, comm.rank, size, schedule=schedule) for x in whole]
        function(*parts, comm=mine, schedule=schedule, causal=causal, num_threads=1)
        return mine

    return on_ranks(size, work)


# --- counts ---


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
def test_ring_sends_what_the_model_says(size, schedule, causal):
    call = workload(LENGTH * size, causal=causal, batch=2)
    ranks = counted(ring_attention, size, schedule, causal=causal, batch=2)
    for step in range(size):
        tokens = scaling.tokens_sent(call, size, step, schedule)
        assert [rank.steps[step] for rank in ranks] == (tokens * call.kv_bytes).tolist()
        assert [rank.messages[step] for rank in ranks] == (2 * (tokens > 0)).tolist()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
def test_ring_computes_and_merges_what_the_model_says(size, schedule, causal, monkeypatch):
    attend, merged, finish = _ring.Steps.attend, States.merged, States.finish
    pairs, merges = np.zeros((size, size)), np.zeros(size)

    def attending(self, held):
        lo, hi = self._spans(held)
        pairs[(self._rank - held.rank) % size, self._rank] = (hi - lo).sum()
        return attend(self, held)

    def merging(self, left, right):
        merges[self._comm.rank] += 1
        return merged(self, left, right)

    def finishing(self, states):
        merges[self._comm.rank] += len(states) - 1
        return finish(self, states)

    monkeypatch.setattr(_ring.Steps, "attend", attending)
    monkeypatch.setattr(States, "merged", merging)
    monkeypatch.setattr(States, "finish", finishing)
    counted(ring_attention, size, schedule, causal=causal)
    call = workload(LENGTH * size, causal=causal)
    model = [scaling.pairs(call, size, step, schedule) for step in range(size)]
    np.testing.assert_array_equal(model, pairs)
    assert np.sum(model) == call.pairs

    hardware = dataclasses.replace(FREE, merge=9.0 * call.state_bytes * LENGTH)  # a merge takes a second
    steps = scaling.ring_steps(hardware, call, size, schedule)
    np.testing.assert_array_equal(sum(step.merge for step in steps), merges)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 8), (8, 2), (4, 4), (6, 3)])
@pytest.mark.parametrize("size", SIZES)
def test_head_parallel_sends_what_the_model_says(size, heads, kv_heads):
    ranks = counted(head_parallel_attention, size, "contiguous", heads=heads, kv_heads=kv_heads)
    call = workload(LENGTH * size, heads=heads, kv_heads=kv_heads)
    there, back = scaling.head_parallel_bytes(call, size)
    assert [rank.steps for rank in ranks] == np.stack([there[0], back[0]], axis=1).tolist()
    received = ranks[0].shared.bytes_sent.sum(axis=0)
    np.testing.assert_array_equal(received, there[1] + back[1])


def test_decode_gathers_what_the_model_says():
    """Beside what says whether all is well."""
    _, k, v = arrays(24, batch=3)
    q = arrays(2, batch=3)[0]

    def work(comm):
        mine = Counting(comm.shared, comm.rank)
        parts = [shard(x, comm.rank, comm.size, schedule="contiguous") for x in (k, v)]
        context_parallel_decode(q, *parts, comm=mine, causal=False)
        return mine.gathered

    call = workload(24, batch=3)
    hardware = dataclasses.replace(FREE, read=math.inf, near=Link(1.0))
    for (state,) in on_ranks(3, work):
        assert scaling.decode(hardware, call, 3, rows=2).exposed == 2 * state  # of two other ranks


@pytest.mark.parametrize("size", [2, 4, 8])
def test_memory_is_what_the_model_says(size, monkeypatch):
    monkeypatch.setattr("pyflash.distributed._states._BLOCK", 1)
    monkeypatch.setattr("pyflash.distributed._states._PARTS", 1 << 20)
    call = workload(1024 * size)
    most = max(sum(rank.made) for rank in counted(ring_attention, size, "zigzag", length=1024))
    result = call.q_bytes * 1024  # the last merge makes it, and no communicator
    assert most + result == pytest.approx(scaling.memory_bytes(call, size), rel=0.06)


# --- measured points ---

FILES = sorted((Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "ring").glob("*.json"))

#: How far from a measured time a predicted one may be.
TOLERANCE = 0.05


def measured(kind):
    found = []
    for path in FILES:
        content = json.loads(path.read_text(encoding="utf-8"))
        for number, run in enumerate(content.get(kind, ())):
            found.append(pytest.param(content, run, id=f"{path.stem}-{kind}-{number}"))
    return found


@pytest.mark.parametrize(("content", "run"), measured("prefill"))
def test_prefill_is_predicted(content, run):
    """One process and its messages alone say what several ranks take."""
    hardware, call = scaling.hardware_of(content, run), scaling.workload_of(run)
    assert scaling.alone(hardware, call) == pytest.approx(run.get("busy_seconds", run["alone_seconds"]))
    assert run["seconds"]
    for name, seconds in run["seconds"].items():
        if name == "heads":
            found = scaling.head_parallel(hardware, call, run["ranks"])
        else:
            found = scaling.ring(hardware, call, run["ranks"], name)
        assert found.seconds == pytest.approx(seconds, rel=TOLERANCE), name


@pytest.mark.parametrize(("content", "run"), measured("decode"))
def test_decode_is_predicted(content, run):
    hardware = scaling.hardware_of(content)
    found = scaling.decode(hardware, scaling.workload_of(run), run["ranks"], run.get("rows", 1))
    assert found.seconds == pytest.approx(run["seconds"], rel=TOLERANCE)


def test_files_of_points_say_where_they_come_from():
    assert "cpu-2" in {path.stem for path in FILES}
    for path in FILES:
        content = json.loads(path.read_text(encoding="utf-8"))
        assert content["engine"] in ("MPI", "NCCL")
        assert all(content[name] for name in ("machine", "date", "commit", "prefill")), path


def test_points_without_messages_are_refused():
    run = dict(
        ranks=2, batch=1, tokens=64, heads=4, kv_heads=4, head_dim=8, dtype="float32", alone_seconds=1.0
    )
    with pytest.raises(pyflash.InvalidArgument, match="no messages_seconds"):
        scaling.hardware_of(dict(engine="MPI", prefill=[run]))


# --- limits ---


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_rank_is_one_process(schedule):
    call = workload(96)
    hardware = dataclasses.replace(FREE, near=Link(1.0, 1.0), merge=1.0, copy=1.0)
    for found in (
        scaling.ring(hardware, call, 1, schedule),
        scaling.head_parallel(hardware, call, 1),
        scaling.decode(hardware, call, 1),
    ):
        assert found.seconds == found.alone and found.efficiency == 1
        assert found.exposed == found.merge == found.overhead == found.transfer == 0


@pytest.mark.parametrize("size", [2, 4, 16])
def test_where_all_else_is_free_balance_is_all(size):
    call, every = workload(64 * size), workload(64 * size, causal=False)
    for schedule in SCHEDULES:
        assert scaling.ring(FREE, every, size, schedule).efficiency == pytest.approx(1)
    assert scaling.ring(FREE, call, size, "zigzag").efficiency == pytest.approx(1, rel=0.02)
    assert scaling.ring(FREE, call, size, "stripe").efficiency == pytest.approx(1, rel=0.02)
    # The last rank computes size - 1/2 of size^2 / 2 squares of two ranks' tokens.
    last = (size - 0.5) / size**2 * 2
    assert scaling.ring(FREE, call, size, "contiguous").speedup == pytest.approx(1 / last, rel=0.02)
    assert scaling.head_parallel(FREE, workload(64, heads=16, kv_heads=4), size).efficiency == pytest.approx(
        1
    )


def test_more_ranks_than_heads_have_nothing_to_do():
    call = workload(64, heads=8, kv_heads=2)
    assert [scaling.head_parallel(FREE, call, n).speedup for n in (4, 8, 16, 64)] == [4, 8, 8, 8]


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("size", [2, 5, 8])
def test_a_ring_of_equal_steps_in_closed_form(size, overlaps):
    """All steps but the last, which sends nothing, take the longer one of work and message, or both."""
    call = workload(32 * size, causal=False)
    shard_bytes = 32 * call.kv_bytes
    work = scaling.alone(FREE, call) / size**2
    for share in (0.25, 1.0, 4.0):
        link = Link(2 * shard_bytes / (work * share), work * share / 2)
        found = scaling.ring(dataclasses.replace(FREE, near=link, overlaps=overlaps), call, size)
        step = max(work, work * share) if overlaps else work + work * share
        assert found.seconds == pytest.approx((size - 1) * step + work)
        assert found.transfer == pytest.approx((size - 1) * work * share)


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_balanced_rings_in_closed_form(causal, overlaps):
    for size, share in itertools.product((1, 2, 8, 64, 256), (256, 2048, 4096, 16384)):
        call = Workload(share * size, 32, 8, 128, causal=causal)
        for step_seconds in (0.0, scaling.H200.step_seconds):
            hardware = dataclasses.replace(scaling.H200, step_seconds=step_seconds, overlaps=overlaps)
            found = scaling.balanced_seconds(hardware, call, size)
            # The first rank's messages are half as long in zigzag: of two ranks that is every second one.
            assert found == pytest.approx(
                scaling.ring(hardware, call, size).seconds, rel=0.02 if size > 2 else 0.2
            )


@pytest.mark.parametrize("causal", [True, False])
def test_messages_are_hidden_from_the_threshold_on(causal):
    hardware = Hardware(flops=1e9, merge=1e9, copy=1e9, read=1e9, near=Link(1e6, 1e-3))
    threshold = scaling.hidden_from(hardware, workload(1, causal=causal))
    assert 100 < threshold < 10000
    for factor, hidden in ((1.02, True), (0.98, False)):
        call = workload(8 * round(threshold * factor), causal=causal)
        # The first step merges nothing, and under a causal mask a rank has halves of the first one's keys.
        exposed = np.array([step.exposed for step in scaling.ring_steps(hardware, call, 8)])[2:-1]
        assert (exposed.max() == pytest.approx(0, abs=1e-9)) == hidden


def test_threshold_as_a_rule_of_thumb():
    hardware = dataclasses.replace(FREE, flops=3e14, near=Link(5e10))
    call = Workload(1, heads=32, kv_heads=8, head_dim=128)
    assert scaling.hidden_from(hardware, call) == pytest.approx(3e14 * 2 / (4 * 5e10))
    assert scaling.hidden_from(hardware, dataclasses.replace(call, causal=False)) == pytest.approx(1500)


def test_slow_links_between_hosts_set_the_pace():
    call = workload(16 * 64, causal=False)
    near, far = Link(1e9), Link(1.0)
    two_hosts = dataclasses.replace(FREE, near=near, far=far, ranks_per_host=8)
    slow = dataclasses.replace(FREE, near=far)
    assert scaling.ring(two_hosts, call, 16).seconds == pytest.approx(
        scaling.ring(slow, call, 16).seconds, rel=0.01
    )
    assert scaling.ring(two_hosts, call, 8) == scaling.ring(dataclasses.replace(FREE, near=near), call, 8)
    found = scaling.head_parallel(two_hosts, call, 16)
    there, back = scaling.head_parallel_bytes(call, 16).max(axis=(1, 2))
    assert found.exposed == pytest.approx(
        (there + back) * 8 / 15
    )  # half of all ranks, one's own host left out


@pytest.mark.parametrize("schedule", [*SCHEDULES, "heads", "decode"])
def test_faster_is_never_slower(schedule):
    call = Workload(1 << 18, 32, 8, 128)
    functions = dict(heads=scaling.head_parallel, decode=scaling.decode)

    def seconds(**faster):
        hardware = dataclasses.replace(scaling.H200, **faster)
        if schedule in functions:
            return functions[schedule](hardware, call, 32).seconds
        return scaling.ring(hardware, call, 32, schedule).seconds

    base = scaling.H200
    for name in ("flops", "merge", "copy", "read"):
        assert seconds(**{name: 2 * getattr(base, name)}) <= seconds()
    for name in ("step_seconds", "decode_seconds"):
        assert seconds(**{name: 0.0}) <= seconds()
    for name in ("near", "far"):
        link = getattr(base, name)
        assert seconds(**{name: Link(2 * link.bytes_per_second, link.latency / 2)}) <= seconds()
    assert seconds(overlaps=False) >= seconds()


def test_a_prediction_is_the_sum_of_its_parts():
    call = Workload(1 << 17, 32, 8, 128)
    for hardware, size in itertools.product((scaling.H200, FREE), (2, 8, 64)):
        for found in (
            *(scaling.ring(hardware, call, size, schedule) for schedule in SCHEDULES),
            scaling.head_parallel(hardware, call, size),
            scaling.decode(hardware, call, size),
        ):
            parts = found.compute + found.merge + found.overhead + found.exposed
            assert found.seconds == pytest.approx(parts)
            assert (
                found.efficiency == pytest.approx(found.alone / size / found.seconds)
                and found.efficiency <= 1
            )


def test_the_best_number_of_ranks_for_decoding():
    call = Workload(1 << 20, 32, 8, 128)
    hardware = dataclasses.replace(scaling.H200, far=None, near=Link(50e9), ranks_per_host=None)
    best = scaling.best_decode_ranks(hardware, call)
    times = [scaling.decode(hardware, call, size).seconds for size in range(1, 200)]
    assert int(np.argmin(times)) + 1 == pytest.approx(best, abs=1)


def test_wrong_arguments():
    call = workload(64)
    for work, message in (
        (lambda: scaling.ring(FREE, call, 2, "zig"), "schedule: found 'zig'"),
        (lambda: scaling.ring(FREE, call, 0), "ranks: found 0"),
        (lambda: scaling.ring(FREE, call, -1), "ranks: found -1"),
        (lambda: scaling.ring(FREE, call, 1.5), "ranks: found 1.5"),
        (lambda: scaling.decode(FREE, call, 2, 0), "rows: found 0"),
        (lambda: scaling.best_decode_ranks(FREE, call, 0), "rows: found 0"),
        (lambda: scaling.pairs(call, 2, 2), "step: found 2"),
        (lambda: scaling.head_parallel(FREE, call, 0), "ranks: found 0"),
        (lambda: scaling.decode(FREE, call, -1), "ranks: found -1"),
        (lambda: scaling.memory_bytes(call, 2, "tree"), "function: found 'tree'"),
        (lambda: workload(0), "tokens: found 0"),
        (lambda: workload(8, heads=5), "heads: found 5, expected a multiple of kv_heads, which is 2"),
        (lambda: Link(0.0), "bytes_per_second: found 0.0"),
        (lambda: dataclasses.replace(FREE, flops=-1.0), "flops: found -1.0"),
        (lambda: dataclasses.replace(FREE, ranks_per_host=0), "ranks_per_host: found 0"),
    ):
        with pytest.raises(pyflash.InvalidArgument, match=message):
            work()
