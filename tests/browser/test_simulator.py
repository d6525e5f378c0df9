"""The simulator in Chromium: each control, and every number it shows against `trace`."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from simulated import expected_trace

from browser.chromium import address

HEAD_DIM_V = 4


def same(shown, x):
    """Whether the text in `data-value` is this number, to the bit."""
    got = float(shown)
    return (math.isnan(got) and math.isnan(x)) or (got == x and math.copysign(1, got) == math.copysign(1, x))


def short(x):
    """Write a number as the page does."""
    if math.isnan(x):
        return "NaN"
    if math.isinf(x):
        return "−∞" if x < 0 else "∞"
    if x == int(x) and abs(x) < 1e4:
        return str(int(x)).replace("-", "−")
    if 1e-3 <= abs(x) < 1e4:
        digits = max(0, 2 - math.floor(math.log10(abs(x))))
        for more in (digits, max(digits - 1, 0)):  # 0.9999 rounds up to one digit more
            text = f"{x:.{more}f}"
            if len(text.replace("-", "").replace(".", "").lstrip("0")) <= 3:
                break
    else:
        mantissa, _, power = f"{x:.1e}".partition("e")
        text = f"{mantissa}e{int(power)}"
    return text.replace("-", "−")


def check_state(shown, state, exact, row, tolerance, *, combination=False):
    """Compare what is shown of one row's state with a step or combination of `trace`."""
    m = (state.m if combination else state.m_after)[row]
    assert same(shown["m"], m) and shown["text"]["m"] == short(m)
    assert same(shown["l"], state.l[row]) and shown["text"]["l"] == short(state.l[row])
    if combination:
        assert shown["alpha"] is None
    else:
        assert same(shown["alpha"], state.alpha[row]) and shown["text"]["alpha"] == short(state.alpha[row])
        assert shown["belowOne"] == (state.alpha[row] < 1)
    difference = np.abs(state.out[row] - exact[row])
    assert same(shown["error"], difference.max())
    assert all(same(*pair) for pair in zip(shown["out"], state.out[row].tolist(), strict=True))
    arrived = difference <= tolerance
    assert shown["arrived"] == [str(bool(x)).lower() for x in arrived]
    nan = np.isnan(state.out[row])
    assert shown["ticks"] == ["✓" if a else "NaN" if n else "" for a, n in zip(arrived, nan, strict=True)]
    assert [dot is None for dot in shown["dots"]] == nan.tolist()
    assert ("l" in shown["nan"]) == bool(np.isnan(state.l[row]))


def check_cells(shown, trace, row, parts):
    """Compare the cells of one query; `parts` are (lo, hi, step or None, whether it is done)."""
    for lo, hi, step, done in parts:
        for key in range(lo, hi):
            score = next(s.scores[row, key - s.key_lo] for s in trace.steps if s.key_lo <= key < s.key_hi)
            inside = step is not None and not done and step.key_lo <= key < step.key_hi
            before = done or (step is not None and key < step.key_lo)
            state = "current" if inside else "done" if before else "later"
            cell = shown["cells"][key]
            assert cell["state"] == ("masked" if np.isneginf(score) else state)
            assert same(cell["value"], score) if inside else cell["value"] is None
            if inside:
                text = "−∞" if np.isneginf(score) else f"{score:.2f}".replace("-", "−")
                assert cell["text"] == text


def check_tiles(blank, site, view, num_keys, tile, causal, masked):
    """Step through a view of tiles to its end and compare everything with `trace`."""
    _, page = site
    flags = {"causal": causal, "masked": masked}
    args = (page.inputs, page.data, view, num_keys, tile)
    trace = expected_trace(*args, **flags)
    unguarded = expected_trace(*args, **flags, guard=False) if masked else None
    blank.open(address=address(view, num_keys, tile, causal, masked, query=2))
    num_rows, tolerance = len(page.inputs.q), 1e-14 * np.abs(page.inputs.v).max()
    check_start(blank.snapshot(), num_rows, num_keys, len(trace.steps))
    rescaled = 0
    for number, step in enumerate(trace.steps, 1):
        blank.run("document.getElementById('step').click()")
        shown = blank.snapshot()
        rescaled += step.rescaled
        assert (shown["step"], shown["steps"]) == (number, len(trace.steps))
        for row in range(num_rows):
            check_cells(shown["rows"][row], trace, row, [(0, num_keys, step, False)])
            assert len(shown["states"][row]) == 1 + masked
            check_state(shown["states"][row][0], step, trace.exact, row, tolerance)
            if masked:
                check_state(shown["states"][row][1], unguarded.steps[number - 1], trace.exact, row, tolerance)
        meters = shown["meters"]
        assert meters["inMemory"] == str(step.scores.size)
        assert f"naive attention would hold {num_rows * num_keys}" in meters["memoryText"]
        assert meters["rescaled"] == str(rescaled)
        assert same(meters["error"], step.error)
        assert f"keys {step.key_lo} to {step.key_hi - 1}." in shown["narration"] or step.scores.shape[1] == 1
        check_closeup(shown["closeup"], [t for t in (trace, unguarded) if t], number, row=2)
        if view == "pages":
            check_pages(shown["pages"], page.data, step, num_keys)
    assert blank.run("return document.getElementById('step').disabled")


def check_start(shown, num_rows, num_keys, num_steps):
    """Nothing is loaded before the first step."""
    assert (shown["step"], shown["steps"]) == (0, num_steps)
    assert {cell["state"] for row in shown["rows"] for cell in row["cells"]} <= {"later", "masked"}
    assert len(shown["rows"]) == num_rows and all(len(row["cells"]) == num_keys for row in shown["rows"])
    assert all(row["lines"] == [None] for row in shown["rows"])
    assert shown["meters"]["inMemory"] == shown["meters"]["rescaled"] == "0"
    for states in shown["states"]:
        for state in states:
            assert (state["m"], state["l"], state["alpha"]) == ("-inf", "0", "")
            assert set(state["out"]) == {""} and set(state["ticks"]) == {""}


def check_closeup(columns, traces, number, row):
    """Compare the query in numbers: m, alpha and l before and after, o, out, exact."""
    assert len(columns) == len(traces)
    for shown, trace in zip(columns, traces, strict=True):
        step = trace.steps[number - 1]
        l_before = trace.steps[number - 2].l[row] if number > 1 else 0.0
        want = [step.m_before[row], step.m_after[row], step.alpha[row], l_before, step.l[row]]
        assert all(same(*pair) for pair in zip(shown["figures"], map(float, want), strict=True))
        for name, values in (("o", step.o[row]), ("out", step.out[row]), ("exact", trace.exact[row])):
            assert all(same(*pair) for pair in zip(shown[name], values.tolist(), strict=True))


def check_pages(shown, data, step, num_keys):
    """Compare the pool: which page holds which keys, and which pages this step reads."""
    assert shown["read"] == " ".join(map(str, step.pages))
    assert shown["marked"] == sorted(step.pages)
    for logical, physical in enumerate(data["blockTable"]):
        for place in range(data["pageSize"]):
            key = logical * data["pageSize"] + place
            inside = step.key_lo <= key < step.key_hi
            state = "current" if inside else "done" if key < step.key_lo else "later"
            assert shown["slots"][physical][place] == ([key, state] if key < num_keys else None)
    free = set(range(data["numPages"])) - set(data["blockTable"])
    assert free and all(shown["slots"][page] == [None] * data["pageSize"] for page in free)


# --- every number ---


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("view", "num_keys", "tile"), [("tiles", 16, 4), ("tiles", 3, 1), ("tiles", 9, 9), ("pages", 15, 3)]
)
def test_every_step_shows_the_trace(blank, site, view, num_keys, tile, causal, masked):
    check_tiles(blank, site, view, num_keys, tile, causal, masked)


@pytest.mark.parametrize("tile", range(1, 14))
def test_every_tile_size(blank, site, tile):
    check_tiles(blank, site, "tiles", 13, tile, causal=True, masked=False)


@pytest.mark.parametrize(("num_keys", "tile"), [(16, 2), (13, 1), (3, 1), (1, 1)])
@pytest.mark.parametrize(("causal", "masked"), [(False, False), (True, True)])
def test_flash_decoding(blank, site, num_keys, tile, causal, masked):
    """Workers step at the same time; then the states are merged one by one along the tree."""
    _, page = site
    args, flags = (page.inputs, page.data, "decoding", num_keys, tile), {"causal": causal, "masked": masked}
    traces = [expected_trace(*args, **flags, guard=guard) for guard in ((True, False) if masked else (True,))]
    trace, row, tolerance = traces[0], 1, 1e-14 * np.abs(page.inputs.v).max()
    workers = [list(steps) for _, steps in itertools.groupby(trace.steps, lambda step: step.split)]
    num_tiles = max(map(len, workers))
    blank.open(address=address("decoding", num_keys, tile, causal, masked, query=row))
    for frame in range(1, num_tiles + len(trace.combinations) + 1):
        blank.press("\ue014")  # right arrow
        shown = blank.snapshot()
        assert shown["steps"] == num_tiles + len(trace.combinations)
        assert len(shown["cards"]) == len(workers) + len(trace.combinations)
        parts = []
        for split, steps in enumerate(workers):
            done = frame > len(steps)
            step = steps[min(frame, len(steps)) - 1]
            parts.append((steps[0].key_lo, steps[-1].key_hi, step, done))
            card = shown["cards"][split]
            assert card["active"] != done and card["title"] == f"Worker {'ABCD'[split]}"
            for state, one in zip(card["states"], traces, strict=True):
                same_step = next(s for s in one.steps if (s.split, s.tile) == (step.split, step.tile))
                check_state(state, same_step, trace.exact, row, tolerance)
        for i, cells in enumerate(shown["rows"]):
            check_cells(cells, trace, i, parts)
        for i in range(len(trace.combinations)):
            card = shown["cards"][len(workers) + i]
            assert card["pending"] == (frame - num_tiles <= i)
            for state, one in zip(card["states"], traces, strict=True):
                if not card["pending"]:
                    check_state(state, one.combinations[i], trace.exact, row, tolerance, combination=True)
        in_memory = sum(s[frame - 1].scores.size for s in workers if frame <= len(s))
        assert shown["meters"]["inMemory"] == str(in_memory)
    assert same(shown["meters"]["error"], trace.error)
    titles = [card["title"] for card in shown["cards"]]
    if len(workers) == 4:
        assert titles[4:] == ["A + B", "C + D", "A + B + C + D: the answer"]


def test_nan_beside_the_guarded_recurrence(blank, site):
    blank.open(address=address("tiles", 16, 4, masked=True, step=1))
    first = blank.snapshot()
    assert "q2 and q3 computed e^(−∞ − (−∞)), which is NaN" in first["narration"]
    assert [row[1]["text"]["alpha"] for row in first["states"]] == ["0", "0", "NaN", "NaN"]
    blank.press("\ue010")  # End
    last = blank.snapshot()
    for row, states in enumerate(last["states"]):
        assert states[0]["ticks"] == ["✓"] * HEAD_DIM_V
        assert states[1]["ticks"] == (["✓"] if row < 2 else ["NaN"]) * HEAD_DIM_V
    assert "stay NaN for good" in last["narration"]


def test_positions_follow_the_numbers(blank, site):
    """Heights of bars and places of dots are in the order of what they stand for."""
    _, page = site
    blank.open(address=address("tiles", 16, 16, step=1))
    trace = expected_trace(page.inputs, page.data, "tiles", 16, 16)
    shown = blank.snapshot()
    heights = [float(bar.rstrip("%")) for row in shown["rows"] for bar in row["bars"]]
    np.testing.assert_array_equal(np.argsort(heights), np.argsort(trace.steps[0].scores.ravel()))
    for row, cells in enumerate(shown["rows"]):  # the line of m touches the highest bar
        assert cells["lines"] == [cells["bars"][int(np.argmax(trace.steps[0].scores[row]))]]
    targets = [float(x.rstrip("%")) for states in shown["states"] for x in states[0]["targets"]]
    np.testing.assert_array_equal(np.argsort(targets), np.argsort(trace.exact.ravel()))
