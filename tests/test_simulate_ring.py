"""The rings of `pyflash simulate`: what the page holds is what `ring_attention` computes and sends.

Its ranks are threads; here the same calls are made between the ranks of ``threads.py``, and what there is to
count is counted again from positions.
"""

from __future__ import annotations

import functools
import itertools
import subprocess
import sys

import numpy as np
import pytest
import threads
from calls import assert_same_bits
from simulated import Page

import pyflash
from pyflash import simulate
from pyflash._state import fold_tree
from pyflash.distributed import Communicator, positions, ring_attention, shard
from pyflash.distributed._schedules import SCHEDULES, even_lengths, layout
from pyflash.distributed._visible import Mask, messages, visible
from pyflash.simulate import _ring
from pyflash.simulate._ranks import on_ranks
from pyflash.simulate._ring_data import RANKS, lengths

RINGS = list(itertools.product(RANKS, SCHEDULES, (False, True)))


@functools.cache
def page_of(kind):
    rng = np.random.default_rng(5)
    inputs = {
        "default": lambda: simulate.random_inputs(0),
        # of float16 and of odd shapes: shards are uneven
        "small": lambda: simulate.Inputs(
            *(rng.standard_normal(shape).astype(np.float16) for shape in ((3, 5), (7, 5), (7, 2))), "x"
        ),
        # most ranks have no tokens
        "one": lambda: simulate.Inputs(np.ones((1, 1)), np.ones((1, 1)), np.full((1, 1), 2.0), "x"),
    }[kind]()
    return Page(simulate.page(inputs), inputs)


def arrays_of(page, length):
    """The ring's arrays, in the type that it computes in."""
    q = page.inputs.prompt
    if q is None:
        q = np.concatenate([page.inputs.q] * length)
    return [x[:length].astype(np.float64) for x in (q, page.inputs.k, page.inputs.v)]


def every_ring(page):
    for length in page.data["rings"]["lengths"]:
        for size, schedule, causal in RINGS:
            yield length, size, schedule, causal, page.ring(length, size, schedule, causal)


kinds = pytest.mark.parametrize("kind", ["default", "small", "one"])


def test_every_ring_is_there():
    for kind, want in (("default", [8, 12, 16]), ("small", [7]), ("one", [1])):
        page = page_of(kind)
        assert page.data["rings"]["lengths"] == want == lengths(len(page.inputs.k))
        assert len(page.data["rings"]["runs"]) == len(want) * len(RINGS)
    assert lengths(24) == [8, 12, 24]


@kinds
def test_results_are_those_of_ring_attention(kind):
    """Bit for bit, and near the exact answer."""
    page = page_of(kind)
    for length, size, schedule, causal, ring in every_ring(page):
        arrays = arrays_of(page, length)

        def work(comm):
            parts = [shard(x, comm.rank, size, schedule=schedule, axis=0) for x in arrays]  # noqa: B023
            options = dict(schedule=schedule, causal=causal, num_threads=1)  # noqa: B023
            return ring_attention(*parts, comm=comm, return_lse=True, **options)

        exact = pyflash.trace(*arrays, tile=length, causal=causal).exact
        np.testing.assert_array_equal(ring.exact, exact)
        largest = 0.0
        for rank, (out, lse) in enumerate(threads.on_ranks(size, work)):
            mine = ring.ranks[rank]
            assert_same_bits((mine.known[-1].out, mine.known[-1].lse), (out, lse))
            errors = np.abs(out - exact[mine.positions])
            tolerance = page.data["tolerance"] * float(np.abs(page.inputs.v).max())
            for (error, bits), row in zip(mine.result, errors, strict=True):
                assert error == row.max()
                assert bits == sum(2**c for c, e in enumerate(row) if e <= tolerance) == 2 ** len(row) - 1
            largest = max(largest, errors.max(initial=0))
        assert ring.error == largest < 1e-14


@kinds
def test_positions_and_keys_that_go_round(kind):
    """In step s a rank has the keys of rank - s, of those that it or a rank behind it sees."""
    for length, size, schedule, causal, ring in every_ring(page_of(kind)):
        tokens = layout(schedule, even_lengths(np.array([length]), size))
        mask = Mask(causal, (None, None), None)
        rows = [visible(tokens, tokens, rank, mask, None) for rank in range(size)]
        needs = [[one.needs(tokens, origin) for origin in range(size)] for one in rows]
        for rank, mine in enumerate(ring.ranks):
            assert mine.positions == positions(length, rank, size, schedule=schedule).tolist()
            for s, step in enumerate(mine.steps):
                origin = (rank - s) % size
                theirs = tokens.positions(origin)
                came = [theirs] if s == 0 else [theirs[a:b] for a, b in messages(needs, origin)[s]]
                assert (step.origin, step.held) == (origin, np.concatenate([*came, []]).tolist())
                assert step.buffer == (-1 if s == 0 or not step.held else s % 2)


@kinds
def test_pairs_are_those_that_rows_see(kind):
    """Each pair once, in the step in which its key is there; counted from positions, and by `visible`."""
    for length, size, schedule, causal, ring in every_ring(page_of(kind)):
        tokens = layout(schedule, even_lengths(np.array([length]), size))
        pairs = np.zeros((size, size), int)
        for rank, mine in enumerate(ring.ranks):
            rows = visible(tokens, tokens, rank, Mask(causal, (None, None), None), None)
            for s, step in enumerate(mine.steps):
                seen = [[bool(bits >> at & 1) for at in range(len(step.held))] for bits in step.seen]
                assert seen == [[not causal or key <= query for key in step.held] for query in mine.positions]
                lo, hi = rows.on(tokens, step.origin)
                assert step.pairs == np.sum(seen) == (hi - lo).sum()
                assert step.skipped == len(step.held) * len(mine.positions) - step.pairs
                assert (step.call is None) == (step.pairs == 0)
                pairs[rank, s] = step.pairs
            assert mine.pairs == pairs[rank].sum()
        assert ring.pairs == pairs.sum(axis=0).tolist()
        assert ring.allPairs == pairs.sum() == (length * (length + 1) // 2 if causal else length**2)
        worst = [x.max() / x.mean() if x.any() else 1.0 for x in (*pairs.T, pairs.sum(axis=1))]
        assert [*ring.unevenness, ring.allUnevenness] == worst


def test_balance():
    """What the page is to show: zigzag and stripe share a causal mask out, contiguous does not."""
    page = page_of("default")
    for size, length in ((2, 16), (3, 12), (4, 16)):
        names = ("zigzag", "contiguous", "stripe")
        zigzag, contiguous, stripe = (page.ring(length, size, name, True) for name in names)
        assert zigzag.unevenness == [1.0] * size and zigzag.allUnevenness == 1.0
        assert 1 < stripe.allUnevenness < 1.2 < 1.4 < contiguous.allUnevenness
        assert all(page.ring(length, size, name, False).allUnevenness == 1.0 for name in SCHEDULES)
        # for causal zigzag calls without any mask, but where rows meet their own keys
        masks = {(s, step.mask) for rank in zigzag.ranks for s, step in enumerate(rank.steps)}
        assert masks == {(s, "" if s else "causal") for s in range(size)}


@kinds
def test_bytes_are_those_of_messages(kind):
    page = page_of(kind)
    for length, size, schedule, causal, ring in every_ring(page):
        arrays = arrays_of(page, length)
        shared = []

        def work(comm):
            shared.append(comm.shared)  # noqa: B023
            parts = [shard(x, comm.rank, size, schedule=schedule, axis=0) for x in arrays]  # noqa: B023
            ring_attention(*parts, comm=comm, schedule=schedule, causal=causal)  # noqa: B023

        threads.on_ranks(size, work)
        sent = np.array([[step.bytes for step in rank.steps] for rank in ring.ranks])
        np.testing.assert_array_equal(sent.sum(axis=1), shared[0].bytes_sent.sum(axis=1))
        assert ring.bytesOfStep == sent.sum(axis=0).tolist()
        assert ring.bytes == np.cumsum(ring.bytesOfStep).tolist()
        token = page.data["rings"]["bytesPerToken"]
        assert token == 8 * (page.inputs.k.shape[1] + page.inputs.v.shape[1])
        for rank, s in itertools.product(range(size), range(size - 1)):
            assert sent[rank, s] == token * len(ring.ranks[(rank + 1) % size].steps[s + 1].held)
        assert not sent[:, -1].any()


@kinds
def test_states_are_those_of_their_keys(kind):
    """m, l and the log-sum-exp of each state, against plain sums over the keys that it is about."""
    page = page_of(kind)
    for length, _, _, causal, ring in every_ring(page):
        q, k, v = arrays_of(page, length)
        scores = q @ k.T / np.sqrt(q.shape[1])
        scores[causal & np.triu(np.ones_like(scores, bool), 1)] = -np.inf
        for rank in ring.ranks:
            for known in rank.known:
                keys = [key for origin in range(known.lo, known.hi) for key in ring.ranks[origin].positions]
                with np.errstate(divide="ignore", invalid="ignore"):
                    s = scores[np.ix_(rank.positions, keys)]
                    m = s.max(axis=1, initial=-np.inf)
                    p = np.where(np.isneginf(s), 0.0, np.exp(s - m[:, np.newaxis]))
                    np.testing.assert_allclose(known.m, m, rtol=1e-14, atol=1e-15)
                    np.testing.assert_allclose(known.l, p.sum(axis=1), rtol=1e-14)
                    np.testing.assert_allclose(known.lse, known.m + np.log(known.l), rtol=1e-14, atol=1e-15)
                    out = np.where(
                        m[:, np.newaxis] > -np.inf, p @ v[keys] / p.sum(axis=1, keepdims=True), 0.0
                    )
                np.testing.assert_allclose(known.out, out, rtol=1e-13, atol=1e-14)


@kinds
def test_merges_are_along_the_tree_of_ranks(kind):
    """Every merge is that of two states there were, and all of them together are those of `fold_tree`."""
    for _, size, _, _, ring in every_ring(page_of(kind)):
        for rank in ring.ranks:
            leaves = {known.lo: known for known in rank.known[:-1] if known.hi == known.lo + 1}
            assert set(leaves) == {step.origin for step in rank.steps if step.pairs}
            there: dict[int, tuple[int, int]] = {}
            for step in rank.steps:
                for at in step.made:
                    lo, hi = rank.known[at].lo, rank.known[at].hi
                    used = [i for i, (a, b) in there.items() if lo <= a and b <= hi]
                    if hi > lo + 1:
                        left, right = sorted((rank.known[i] for i in used), key=lambda known: known.lo)
                        merged = pyflash.merge_states(*_stacked(left, right), backend=None)
                        assert_same_bits((rank.known[at].out, rank.known[at].lse), _unstacked(merged))
                        assert rank.known[at].m.tolist() == np.maximum(left.m, right.m).tolist()
                    for i in used:
                        del there[i]
                    there[at] = (lo, hi)
                assert step.known == sorted(there)
            if not leaves:
                continue
            parts = [leaves.get(origin) for origin in range(size)]
            want = fold_tree(parts, _merged)
            assert_same_bits((rank.known[-1].out, rank.known[-1].lse), (want.out, want.lse))


def _stacked(left, right):
    return (
        np.stack([left.out, right.out])[:, :, np.newaxis],
        np.stack([left.lse, right.lse])[:, np.newaxis],
    )


def _unstacked(merged):
    return merged[0][:, 0], merged[1][0]


def _merged(left, right):
    if left is None or right is None:
        return right if left is None else left
    out, lse = _unstacked(pyflash.merge_states(*_stacked(left, right)))
    return type(left)(out=out, lse=lse)


def test_queries_of_the_ring():
    """Random arrays have a query for each key; those of a file serve in turn."""
    inputs = simulate.random_inputs(3)
    assert inputs.queries_of_keys is inputs.prompt and inputs.prompt.shape == inputs.k.shape
    assert len({row.tobytes() for row in inputs.prompt}) == len(inputs.k)
    q, k, v = np.arange(6.0).reshape(3, 2), np.zeros((7, 2)), np.zeros((7, 1))
    np.testing.assert_array_equal(simulate.Inputs(q, k, v, "x").queries_of_keys[:, 0], [0, 2, 4, 0, 2, 4, 0])
    assert simulate.Inputs(q, k[:2], v[:2], "x").queries_of_keys.tolist() == q[:2].tolist()
    assert page_of("default").data["rings"]["ownQueries"] and not page_of("small").data["rings"]["ownQueries"]


def test_the_ring_costs_the_page_little():
    page = page_of("default")
    assert len(str(page.data["rings"])) < 120_000
    assert len(page.text) < 1_800_000


# --- ranks that are threads ---


def test_a_rank_that_fails_fails_all(monkeypatch):
    """Nobody waits for it: neither in a collective, nor for its messages, nor in the middle of the ring."""

    def early(comm):
        if comm.rank == 1:
            raise KeyError("early")
        return comm.allgather(0)

    def silent(comm):
        if comm.rank == 1:
            raise KeyError("silent")
        comm.start([], [(np.zeros(2), 1)]).wait()

    for work in (early, silent):
        with pytest.raises((KeyError, RuntimeError)):
            on_ranks(3, work)

    attend = _ring._RecordedSteps.attend

    def failing(self, held):
        if held.rank == 2:
            raise KeyError("in the middle")
        return attend(self, held)

    monkeypatch.setattr(_ring._RecordedSteps, "attend", failing)
    x = np.ones((8, 2))
    with pytest.raises(KeyError, match="in the middle"):
        _ring.record(x, x, x, size=3, schedule="zigzag", causal=True)


def test_the_communicator_does_what_one_has_to():
    def work(comm):
        assert isinstance(comm, Communicator)
        letters = comm.start_allgather_bytes(np.full(1, ord("a") + comm.rank, np.uint8)).wait()
        assert letters.tobytes() == b"abc" and letters.shape == (3, 1)
        everyone = np.zeros((3, 2))
        comm.start_allgather(np.full(2, comm.rank), everyone).wait()
        came = np.zeros(2)
        sent = np.full(2, 10.0 + comm.rank)
        transfer = comm.start([(sent, (comm.rank + 1) % 3)], [(came, (comm.rank - 1) % 3)])
        sent[:] = np.nan  # a message is what it was when it was started
        transfer.wait()
        return comm.allgather(comm.rank), everyone.tolist(), came.tolist(), comm.bytes_sent

    for rank, result in enumerate(on_ranks(3, work)):
        want = ([0, 1, 2], [[0, 0], [1, 1], [2, 2]], [10.0 + (rank - 1) % 3] * 2, [16])
        assert result == want


def test_no_mpi_is_needed(tmp_path):
    program = """
import sys
sys.modules["mpi4py"] = sys.modules["torch"] = None
from pyflash.__main__ import main
sys.exit(main(["simulate", "--no-open", "--npz", sys.argv[1], "--output", sys.argv[2]]))
"""
    rng = np.random.default_rng(1)
    shapes = {"q": (3, 4), "k": (5, 4), "v": (5, 2)}
    np.savez(tmp_path / "a.npz", **{name: rng.standard_normal(shape) for name, shape in shapes.items()})
    command = [sys.executable, "-W", "error", "-c", program, tmp_path / "a.npz", tmp_path / "p.html"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert '"5/4/zigzag/causal"' in (tmp_path / "p.html").read_text(encoding="utf-8")
