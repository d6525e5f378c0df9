"""Reads the page of `pyflash simulate` back, apart from what wrote it, and compares it with `trace`."""

from __future__ import annotations

import base64
import json
import re
from types import SimpleNamespace
from typing import Any

import numpy as np

import pyflash


def expected_trace(inputs, data, view, num_keys, tile, *, causal=False, masked=False, guard=True):
    """Call `trace` for one position of the page's controls, put together without the page's own code."""
    q, k, v = inputs.q, inputs.k[:num_keys], inputs.v[:num_keys]
    options: dict[str, Any] = {"tile": tile, "causal": causal, "guard": guard}
    if masked:
        lo = [0] * (len(q) // 2) + [tile] * (len(q) - len(q) // 2)
        options["spans"] = (np.array(lo), num_keys)
    if view == "decoding":
        options["num_splits"] = 4
    if view == "pages":
        size, table = data["pageSize"], np.array(data["blockTable"])
        pools = []
        for rows in (k, v):
            pool = np.full((data["numPages"], size, rows.shape[1]), np.nan, rows.dtype)
            for place, row in enumerate(rows):
                pool[table[place // size], place % size] = row
            pools.append(pool)
        k, v = pools
        options.update(block_table=table, seq_lens=num_keys)
    return pyflash.trace(q, k, v, **options)


class Page:
    """The text of a page and the data in it."""

    def __init__(self, text, inputs):
        self.text, self.inputs = text, inputs
        (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
        self.data = json.loads(embedded)
        self.numbers = np.frombuffer(base64.b64decode(self.data["numbers"]), "<f8")

    def check(self, view, num_keys, tile, causal, masked, guard):
        """Compare one trace bit for bit and return its name in the page."""
        flags = [*(["causal"] if causal else []), *(["masked"] if masked else [])]
        name = "/".join([view, str(num_keys), str(tile), *flags, "guarded" if guard else "unguarded"])
        got = self.data["traces"][self.data["runs"][name]]
        want = expected_trace(
            self.inputs, self.data, view, num_keys, tile, causal=causal, masked=masked, guard=guard
        )
        scores = np.full((len(self.inputs.q), num_keys), np.nan)
        for step in want.steps:
            scores[:, step.key_lo : step.key_hi] = step.scores
        self._equal(got["scores"], scores)
        self._equal(got["exact"], want.exact)
        assert len(got["steps"]) == len(want.steps)
        for (split, lo, hi, rescaled, error, rows), step in zip(got["steps"], want.steps, strict=True):
            assert (split, lo, hi, rescaled) == (step.split, step.key_lo, step.key_hi, step.rescaled)
            self._equal(error, step.error)
            self._check_rows(rows, want, step, step.m_after, step.alpha)
        for (*ends, error, rows), merge in zip(got["combinations"], want.combinations, strict=True):
            assert ends == [*merge.left, *merge.right]
            self._equal(error, merge.error)
            self._check_rows(rows, want, merge, merge.m, None)
        self._check_m_before(want)
        return name

    def ring(self, length, size, schedule, causal):
        """One ring of the page, its numbers as arrays."""
        flags = ["causal"] if causal else []
        rings = self.data["rings"]
        run = rings["runs"]["/".join([str(length), str(size), schedule, *flags])]
        place, width = rings["exact"]["/".join([str(length), *flags])], self.data["headDimV"]
        exact = self.numbers[place : place + length * width].reshape(length, width)
        ranks = [self._rank(rank, width) for rank in run["ranks"]]
        return SimpleNamespace(**{**run, "error": self.numbers[run["error"]], "exact": exact, "ranks": ranks})

    def _rank(self, rank, width):
        names = ("origin", "held", "buffer", "call", "mask", "seen")
        names += ("pairs", "skipped", "bytes", "made", "known")
        known = []
        for lo, hi, places in rank["known"]:
            rows = np.array([self.numbers[at : at + 3 + width] for at in places]).reshape(-1, 3 + width)
            m, l, lse, out = rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3:]
            known.append(SimpleNamespace(lo=lo, hi=hi, m=m, l=l, lse=lse, out=out))
        return SimpleNamespace(
            positions=rank["positions"],
            pairs=rank["pairs"],
            known=known,
            steps=[SimpleNamespace(**dict(zip(names, step, strict=True))) for step in rank["steps"]],
            result=[(self.numbers[at], int(self.numbers[at + 1])) for at in rank["result"]],
        )

    def _check_rows(self, places, want, state, m, alpha):
        tolerance = self.data["tolerance"] * float(np.abs(self.inputs.v).max())
        for i, place in enumerate(places):
            difference = np.abs(state.out[i] - want.exact[i])
            bits = sum(2**column for column, d in enumerate(difference) if d <= tolerance)
            more = [] if alpha is None else [alpha[i]]
            self._equal(place, [difference.max(), bits, m[i], state.l[i], *state.o[i], *state.out[i], *more])

    @staticmethod
    def _check_m_before(want):
        """The page takes m before a step from the step before it in the same split."""
        before = {}
        for step in want.steps:
            expected = before.get(step.split, np.full_like(step.m_before, -np.inf))
            np.testing.assert_array_equal(step.m_before, expected)
            before[step.split] = step.m_after

    def _equal(self, place, want):
        """Compare bits, NaN included, but for its sign, which means nothing."""
        want = np.ravel(np.asarray(want, np.float64))
        got = self.numbers[place : place + want.size]
        nan = np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got), nan)
        np.testing.assert_array_equal(got[~nan].view(np.int64), want[~nan].view(np.int64))
