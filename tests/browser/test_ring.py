"""The view of the ring in Chromium: its controls, and all that it shows against what ranks did."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from simulated import Page

from browser.chromium import ring_address as address
from browser.test_controls import DOWN, END, HOME, LEFT, RIGHT, UP, settings
from browser.test_simulator import same
from pyflash import simulate

SNAPSHOT = Path(__file__).with_name("ring_snapshot.js").read_text(encoding="utf-8")


def snapshot(browser):
    return browser.run(SNAPSHOT)


def pair_state(ring, query, key, step):
    """What a pair is in a step (from 0): by what the ranks held and computed."""
    rank = next(r for r, one in enumerate(ring.ranks) if query in one.positions)
    row = ring.ranks[rank].positions.index(query)
    for s, one in enumerate(ring.ranks[rank].steps):
        if key in one.held:
            seen = one.seen[row] >> one.held.index(key) & 1
            if s == step:
                return "now" if seen else "skipped"
            return "hidden" if not seen else "done" if s < step else "later"
    return "hidden"


def check_map(shown, ring, step, causal):
    length = len(ring.exact)
    want = [[pair_state(ring, query, key, step) for key in range(length)] for query in range(length)]
    assert shown["pairs"] == want
    if causal:
        assert not {"now", "done", "later"} & {
            want[i][j] for i in range(length) for j in range(i + 1, length)
        }
    for query, (label, states) in enumerate(zip(shown["labels"], want, strict=True)):
        assert label.startswith(f"Query {query} on rank {shown['owners'][query]}. ")
        now = [str(key) for key, state in enumerate(states) if state == "now"]
        assert (f"computed in this step: key{'s' if len(now) > 1 else ''} {' '.join(now)}" in label) == bool(
            now
        )


def check_ranks(shown, ring, step):
    """Compare the cards: tokens in each place, the call, what is computed, skipped and sent."""
    size = len(ring.ranks)
    for rank, (card, mine) in enumerate(zip(shown["ranks"], ring.ranks, strict=True)):
        own = [[token, rank] for token in mine.positions]
        assert card["owner"] == rank and card["places"]["queries"]["tokens"] == own
        places = {"own": ("idle", own), "0": ("idle", []), "1": ("idle", [])}
        if 0 <= step < size:
            for at, state in ((step, "used"), (step + 1, "coming")):
                one = mine.steps[at] if at < size else None
                if one and one.held:
                    held = [[token, one.origin] for token in one.held]
                    places["own" if one.buffer < 0 else str(one.buffer)] = (state, held)
            one = mine.steps[step]
            assert (card["pairs"], card["skipped"]) == (str(one.pairs), str(one.skipped))
            assert card["idle"] == (one.pairs == 0)
            if one.call:
                begin, end, first, last = one.call
                assert card["call"] == f"q[{begin}:{end}] × k[{first}:{last}], {one.mask or 'no mask'}"
            following = (rank + 1) % size
            gone = len(ring.ranks[following].steps[step + 1].held) if step + 1 < size else 0
            plural = "" if gone == 1 else "s"
            sent = f"→ rank {following}: {gone} token{plural}, {one.bytes} B" if gone else "sends nothing"
            assert (card["sent"], card["sends"]) == (sent, gone > 0)
        for name, (state, tokens) in places.items():
            assert card["places"][name] == {"state": state, "tokens": tokens}


def check_states(shown, ring, step):
    """Compare the states of every query: those there are, their numbers, which are new."""
    size = len(ring.ranks)
    for rank in ring.ranks:
        last = step == size
        there = [len(rank.known) - 1] if last else rank.steps[step].known if step >= 0 else []
        made = there if last else rank.steps[step].made if step >= 0 else []
        for row, query in enumerate(rank.positions):
            cells = {(state["lo"], state["hi"]): state for state in shown["kept"][query]}
            covered = set()
            for at in there:
                known = rank.known[at]
                state = cells.pop((known.lo, known.hi))
                assert same(state["m"], known.m[row]) and same(state["l"], known.l[row])
                assert state["fresh"] == (at in made)
                assert state["kind"] == (
                    "result" if last else "merged" if known.hi - known.lo > 1 else "single"
                )
                assert state["tick"] == ("✓" if last else None)
                covered |= set(range(known.lo, known.hi))
            for (lo, _), state in cells.items():
                at = next(s for s, one in enumerate(rank.steps) if one.origin == lo)
                assert state["kind"] == ("nothing" if at <= step else "waiting")
            assert {lo for lo, _ in cells} == set(range(size)) - covered


def check_table(shown, ring, step, query):
    """Compare the chosen query in numbers, states that were used up in this step included."""
    rank = next(one for one in ring.ranks if query in one.positions)
    row, size = rank.positions.index(query), len(ring.ranks)
    if step == size:
        there, made = [], [len(rank.known) - 1]
    else:
        made = rank.steps[step].made if step >= 0 else []
        there = [at for at in (rank.steps[step].known if step >= 0 else []) if at not in made]
    lines = shown["table"][: len(there) + len(made)]
    for line, at in zip(lines, [*there, *made], strict=True):
        known = rank.known[at]
        want = [known.m[row], known.l[row], known.lse[row], *known.out[row]]
        assert all(same(*pair) for pair in zip(line["values"], want, strict=True))
        assert line["made"] == (at in made)
        over = " + ".join(map(str, range(known.lo, known.hi)))
        assert line["title"].startswith("all keys" if step == size else "keys of rank") and (
            step == size or over in line["title"]
        )
    exact = shown["table"][len(lines)]
    assert all(same(*pair) for pair in zip(exact["values"], ring.exact[query], strict=True))
    if step == size:
        assert shown["table"][-1]["ticks"] == ["✓"] * len(ring.exact[query])


def check_meters(shown, ring, step):
    size = len(ring.ranks)
    within = 0 <= step < size
    for rank, mine in enumerate(ring.ranks):
        now, every = (shown["loads"][name][rank] for name in ("now", "all"))
        assert now["count"] == (str(mine.steps[step].pairs) if within else "–")
        assert every["count"] == str(mine.pairs)
        kinds = ["now" if s == step else "done" if s < step else "later" for s in range(size)]
        assert [kind for kind, _ in every["parts"]] == kinds
        longest = max(one.pairs for one in ring.ranks)
        widths = [float(width.rstrip("%")) for _, width in every["parts"]]
        np.testing.assert_allclose(widths, [100 * one.pairs / longest for one in mine.steps], atol=1e-3)
    bytes_so_far = ring.bytes[min(step, size - 1)] if step >= 0 else 0
    assert shown["bytes"] == str(bytes_so_far)
    assert shown["texts"][2].startswith(
        f"{ring.bytesOfStep[step] if within else 0} in this step; {ring.bytes[-1]} in all."
    )
    assert f"{ring.allPairs} pairs in all" in shown["texts"][1]
    assert ("the same for all" in shown["texts"][1]) == (ring.allUnevenness == 1)
    assert same(shown["error"], ring.error) if step == size else shown["error"] == ""


SCHEDULES = ("contiguous", "zigzag", "stripe")
#: The normal run has all of one shape, and of each other shape another schedule.
RINGS = [
    pytest.param(size, length, schedule, causal, marks=[] if usual else pytest.mark.long)
    for size, length in ((4, 16), (2, 12), (3, 16), (4, 8))
    for schedule, causal in itertools.product(SCHEDULES, (False, True))
    for usual in [(size, length) == (4, 16) or (causal and schedule == SCHEDULES[size - 2])]
]


@pytest.mark.parametrize(("size", "length", "schedule", "causal"), RINGS)
def test_every_step_shows_what_ranks_did(blank, site, size, length, schedule, causal):
    _, page = site
    ring = page.ring(length, size, schedule, causal)
    query = 5
    blank.open(address=address(size, schedule, length, causal, query=query))
    owner = {token: rank for rank, one in enumerate(ring.ranks) for token in one.positions}
    for frame in range(size + 2):
        if frame:
            blank.press(RIGHT)
        shown = snapshot(blank)
        assert (shown["step"], shown["steps"]) == (frame, size + 1)
        assert shown["heads"] == shown["owners"] == [owner[token] for token in range(length)]
        assert shown["chosen"] == [query] and shown["others"] == []
        check_map(shown, ring, frame - 1, causal)
        check_ranks(shown, ring, frame - 1)
        check_states(shown, ring, frame - 1)
        check_table(shown, ring, frame - 1, query)
        check_meters(shown, ring, frame - 1)
    assert "The last merge" in shown["narration"]


def test_contiguous_leaves_ranks_idle_and_zigzag_does_not(blank):
    blank.open(address=address(4, "contiguous", 16, True, step=4))
    shown = snapshot(blank)
    assert [rank["idle"] for rank in shown["ranks"]] == [True, True, True, False]
    assert "Ranks 0, 1 and 2 see none of these keys, and have nothing to do." in shown["narration"]
    assert shown["ranks"][0]["call"] == "no keys came"
    blank.press("s", "s")  # stripe, zigzag
    shown = snapshot(blank)
    assert settings(blank)["schedule"] == "zigzag" and shown["step"] == 4  # the same step, to compare
    assert [rank["idle"] for rank in shown["ranks"]] == [False] * 4
    assert "All have the same work, 8 pairs." in shown["narration"]


# --- controls ---


def test_controls_of_the_ring_and_of_others(browser):
    def visible():
        return browser.run(
            "return [...document.querySelectorAll('[data-control]')].filter((e) => e.offsetParent)"
            ".map((e) => e.dataset.control)"
        )

    assert visible() == ["tile", "keys", "causal", "masked"]
    browser.click("#view-ring")
    assert visible() == ["ranks", "schedule", "tokens", "causal"]
    assert settings(browser) == {
        "view": "ring", "ranks": 4, "schedule": "zigzag", "tokens": 16, "causal": 0, "step": 0, "query": 0,
    }  # fmt: skip
    assert "press C" in browser.find("#narration").text
    browser.click("#view-tiles")
    assert visible() == ["tile", "keys", "causal", "masked"]
    assert snapshot(browser)["others"] == ["legend", "meters", "closeup"]


def test_choices_by_pointer(browser):
    browser.click("#view-ring")
    for name, value in (
        ("ranks", 3),
        ("schedule", "stripe"),
        ("tokens", 12),
        ("ranks", 2),
        ("schedule", "contiguous"),
    ):
        browser.click(f"label[for={name}-{value}]")
        assert settings(browser)[name] == value
        assert browser.run("return document.querySelector(`#${arguments[0]} :checked`).value", name) == str(
            value
        )
    assert len(snapshot(browser)["ranks"]) == 2 and len(snapshot(browser)["pairs"]) == 12
    assert browser.find("#schedule-note").text == "one stretch each"


def test_shortcuts(browser):
    for keys, wanted in (
        ("4", {"view": "ring"}),
        (RIGHT, {"step": 1}),
        (END, {"step": 5}),
        (LEFT, {"step": 4}),
        ("c", {"causal": 1, "step": 4}),
        ("s", {"schedule": "contiguous", "step": 4}),
        (HOME, {"step": 0}),
        (DOWN * 20, {"query": 15}),
        (UP, {"query": 14}),
        ("[[[", {"ranks": 2}),
        ("]", {"ranks": 3}),
        ("-", {"tokens": 12, "query": 11}),
        ("+", {"tokens": 16}),
        ("m", {"tokens": 16}),
        ("ss", {"schedule": "zigzag"}),
        ("1", {"view": "tiles", "masked": 0, "causal": 1, "query": 3}),
        ("s", {"view": "tiles"}),
    ):
        browser.press(*keys)
        assert settings(browser).items() >= wanted.items(), keys


def test_arrows_in_a_choice_choose(browser):
    browser.press("4")
    browser.press(LEFT, on="#ranks-4")
    assert (settings(browser)["ranks"], settings(browser)["step"]) == (3, 0)
    browser.press("c", on="#ranks-3")
    assert settings(browser)["causal"] == 1


def test_who_looks_at_the_end_stays_there(browser):
    browser.press("4", END, "[")
    assert (settings(browser)["ranks"], settings(browser)["step"]) == (3, 4)
    browser.press(LEFT, "[")
    assert (settings(browser)["ranks"], settings(browser)["step"]) == (2, 0)


def test_address_is_kept_and_bounded(blank):
    wanted = {
        "view": "ring",
        "ranks": 3,
        "schedule": "stripe",
        "tokens": 8,
        "causal": 1,
        "step": 2,
        "query": 7,
    }
    blank.open(address=address(3, "stripe", 8, True, step=2, query=7))
    assert settings(blank) == wanted
    blank.driver.refresh()
    assert settings(blank) == wanted
    blank.open(address="#view=ring&ranks=9&schedule=none&tokens=11&step=50&query=99")
    bounded = {"ranks": 4, "schedule": "zigzag", "tokens": 16, "causal": 0, "step": 5, "query": 15}
    assert settings(blank) == {"view": "ring", **bounded}


def test_play(blank):
    blank.open(address=address(2, "zigzag", 8, True))
    blank.run("document.getElementById('speed').value = '4'")
    blank.press(" ", on="#stage")
    blank.wait_for(lambda shown: shown["step"] == 3)
    blank.wait_for(lambda _: blank.find("#play").get_attribute("aria-label") == "Play")


def test_a_pair_is_read_and_a_query_chosen(blank):
    blank.open(address=address(4, "zigzag", 16, True, step=2))
    blank.click(".pair-row[data-query='5'] .pair[data-key='3']")
    readout = blank.find(".readout")
    assert readout.text == "q5 on rank 2, key 3 of rank 1: computed in this step (step 2)"
    assert snapshot(blank)["chosen"] == [5] and settings(blank)["query"] == 5
    blank.click(".pair-row[data-query='5'] .pair[data-key='12']")
    assert readout.text == "q5 on rank 2, key 12 of rank 1: skipped in this step: a later key (step 2)"
    blank.click(".kept-row .query[data-query='9']")
    assert snapshot(blank)["chosen"] == [9]


def test_touch(blank):
    blank.open(width=360, height=740, touch=True, address=address(4, "zigzag", 16, True))
    blank.swipe(".pair-cells[data-query='7']", -120)
    assert snapshot(blank)["step"] == 1
    blank.swipe(".pair-cells[data-query='7']", 120)
    assert snapshot(blank)["step"] == 0
    blank.tap(".kept-row .query[data-query='3']")
    blank.wait_for(lambda _: snapshot(blank)["chosen"] == [3])
    blank.tap("label[for=ranks-2]")
    blank.wait_for(lambda _: settings(blank)["ranks"] == 2)


# --- sizes, names ---


OUTSIDE = """
const names = ".token, .kept-state b, button, .rank p, .load-count";
return [...document.querySelectorAll(`#view :is(${names})`)].filter((e) => {
  const b = e.getBoundingClientRect();
  const p = (e.closest(".kept-state") ?? e.parentElement).getBoundingClientRect();
  return b.width && (b.left < p.left - 1.5 || b.right > Math.min(p.right + 1.5, innerWidth + 0.5));
}).map((e) => e.outerHTML)"""
SMALL = """
const touched = document.querySelectorAll("#stage :is(button, select, .choice label, .switch)");
return [...touched].filter((e) => e.offsetParent).map((e) => [e.outerHTML, e.getBoundingClientRect()])
  .filter(([, box]) => Math.min(box.width, box.height) < 35).map(([text]) => text)"""
TOPS = """
const tops = (rows) => [...document.querySelectorAll(rows)].map((row) => row.getBoundingClientRect().top);
return [tops(".pair-row[data-query]"), tops(".kept-row[data-query]")]"""


def check_sizes(browser, width, size, tokens):
    """Nothing sticks out or is cut off, what is touched is large enough, and stepping moves no rank."""
    touch = width < 1100
    where = address(size, "contiguous", tokens, True)
    browser.open(browser.home, width=width, height=740, touch=touch, address=where)
    heights = set()
    for _ in range(size + 2):
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.run(OUTSIDE) == []
        heights.add(browser.run("return document.querySelector('.ranks').getBoundingClientRect().height"))
        browser.press(RIGHT)
    assert len(heights) == 1
    assert browser.run(SMALL) == [] or not touch
    if width > (1024 if tokens <= 16 else 1216):  # a query's pairs and states are in one line
        np.testing.assert_allclose(*browser.run(TOPS), atol=0.5)


#: On either side of each border at which the page is laid out in another way.
WIDTHS = (320, 481, 768, 1025, 1217, 1400)
EVERY_SIZE = [
    # The most ranks need the most room: fewer are in the normal run on the smallest screen alone.
    pytest.param(width, size, marks=[] if size == 4 or width == WIDTHS[0] else pytest.mark.long)
    for size in (2, 3, 4)
    for width in WIDTHS
]


@pytest.mark.parametrize(("width", "size"), EVERY_SIZE)
def test_sizes(blank, width, size):
    check_sizes(blank, width, size, 16)


def test_everything_has_a_name(blank):
    blank.open(address=address(3, "zigzag", 16, True, step=2))
    tree = blank.cdp("Accessibility.getFullAXTree")["nodes"]
    need = {"button", "slider", "switch", "tab", "tabpanel", "combobox", "radio", "image", "group", "region"}
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node["ignored"] and node["role"]["value"] in need
    ]
    assert {role for role, _ in named} >= need
    assert [role for role, name in named if not name.strip()] == []
    names = " ".join(name for _, name in named)
    assert "Who has which tokens" in names and "States of query 3, on rank 1" in names
    assert re.search(r"Query 5 on rank 1\. computed in this step: keys 0 1 2;", names)


@pytest.mark.parametrize(("queries", "keys", "width"), [(8, 24, 8), (3, 2, 1)])
def test_other_arrays(browser, tmp_path, queries, keys, width):
    """The most that a page takes, on a small screen, and so few tokens that ranks have none."""
    rng = np.random.default_rng(2)
    shapes = ((queries, 3), (keys, 3), (keys, width))
    inputs = simulate.Inputs(*map(rng.standard_normal, shapes), "x")
    path = tmp_path / "page.html"
    path.write_text(simulate.page(inputs), encoding="utf-8")
    page = Page(path.read_text(encoding="utf-8"), inputs)
    browser.open(path, width=320, height=740, address=address(4, "zigzag", keys, True, step=2, query=1))
    ring = page.ring(keys, 4, "zigzag", True)
    for step in (1, 2, 3, 4):
        shown = snapshot(browser)
        assert shown["step"] == step + 1
        for check in (check_ranks, check_states, check_meters):
            check(shown, ring, step)
        check_table(shown, ring, step, 1)
        browser.press(RIGHT)
    browser.home = path
    for screen in (320, 1024, 1217) if keys > 8 else (320,):
        check_sizes(browser, screen, 4, keys)
    assert "In the ring every key has a query: these, in turn." in browser.find("#source").text
