"""Every control of the simulator in Chromium: pointer, keyboard, touch; themes, sizes, what is read aloud."""

from __future__ import annotations

import json
import re
from importlib import resources

import numpy as np
import pytest
from simulated import Page, expected_trace

from browser.chromium import address
from pyflash import simulate

RIGHT, LEFT, UP, DOWN, HOME, END, TAB = "\ue014", "\ue012", "\ue013", "\ue015", "\ue011", "\ue010", "\ue004"
VIEWS = ("tiles", "pages", "decoding")


def settings(browser):
    """The position of the controls, from the address, which a test below compares with the controls."""
    found = dict(pair.split("=") for pair in browser.run("return location.hash.slice(1)").split("&"))
    words = ("view", "schedule")
    return {name: value if name in words else int(value) for name, value in found.items()}


def shown_settings(browser):
    """The same from the controls themselves."""
    return browser.run("""
        return {
          view: document.querySelector("[role=tab][aria-selected=true]").dataset.view,
          keys: Number(document.getElementById("keys").value),
          tile: Number(document.getElementById("tile").value),
          causal: Number(document.getElementById("causal").checked),
          masked: Number(document.getElementById("masked").checked),
          step: Number(document.getElementById("scrub").value),
        }""")


# --- pointer ---


def test_opens_at_the_start(browser):
    shown = settings(browser)
    assert shown == {"view": "tiles", "keys": 16, "tile": 4, "causal": 0, "masked": 0, "step": 0, "query": 0}
    assert "Nothing is loaded yet" in browser.snapshot()["narration"]


def test_playback_buttons(browser):
    def enabled():
        names = ("first", "back", "play", "step", "last")
        return {name for name in names if browser.find(f"#{name}").is_enabled()}

    assert enabled() == {"play", "step", "last"}
    for button, step in (("step", 1), ("step", 2), ("back", 1), ("last", 4), ("back", 3), ("first", 0)):
        browser.click(f"#{button}")
        assert browser.snapshot()["step"] == step
        assert browser.find("#position").text == f"Step {step} of 4"
    browser.click("#last")
    assert enabled() == {"first", "back", "play"}


def test_play_and_pause(blank):
    browser = blank
    browser.open(address=address(tile=1))
    browser.run("document.getElementById('speed').value = '4'")
    browser.click("#play")
    assert browser.find("#play").get_attribute("aria-label") == "Pause"
    assert browser.find("#narration").get_attribute("aria-live") == "off"
    browser.wait_for(lambda shown: shown["step"] >= 1)
    browser.click("#play")
    paused = browser.snapshot()["step"]
    assert browser.find("#play").get_attribute("aria-label") == "Play"
    browser.run("return new Promise((done) => setTimeout(done, 900))")  # longer than two steps
    assert browser.snapshot()["step"] == paused < 16
    browser.click("#play")
    browser.wait_for(lambda shown: shown["step"] == 16)
    browser.wait_for(lambda _: browser.find("#play").get_attribute("aria-label") == "Play")
    browser.click("#play")  # from the end: once more from the start
    browser.wait_for(lambda shown: shown["step"] == 1)
    browser.click("#step")
    assert browser.find("#play").get_attribute("aria-label") == "Play"


def test_speed_is_a_speed(browser):
    """Two steps of 1.4 s each, divided by the speed."""

    def seconds(speed):
        browser.open()
        return browser.run(
            """
            document.getElementById("speed").value = arguments[0];
            const stage = document.getElementById("stage");
            const start = performance.now();
            document.getElementById("play").click();
            return new Promise((done) => {
              const there = () => stage.dataset.step === "2";
              const look = () => there() ? done(performance.now() - start) : setTimeout(look, 5);
              look();
            })""",
            speed,
        )

    slow, fast = seconds("2"), seconds("4")
    assert slow >= 1390 and fast >= 690  # a busy machine can only be late
    assert fast < slow


@pytest.mark.parametrize(("name", "low", "high"), [("tile", 1, 16), ("keys", 1, 16), ("scrub", 0, 4)])
def test_sliders(browser, name, low, high):
    """Moved as by a reader, with the arrows; their whole range is there."""
    browser.press(HOME, on=f"#{name}")
    assert shown_settings(browser)[name.replace("scrub", "step")] == low
    browser.press(RIGHT, on=f"#{name}")
    assert shown_settings(browser)[name.replace("scrub", "step")] == low + 1
    browser.press(END, on=f"#{name}")
    assert shown_settings(browser)[name.replace("scrub", "step")] == high
    assert {k: v for k, v in settings(browser).items() if k != "query"} == shown_settings(browser)


def test_fewer_keys_take_the_tile_along(browser):
    browser.press(END, on="#tile")
    browser.press(HOME, on="#keys")
    assert (settings(browser)["keys"], settings(browser)["tile"]) == (1, 1)
    assert browser.find("#tile").get_attribute("max") == "1"
    assert browser.find("#tile-note").text == "one tile: as naive attention"


@pytest.mark.parametrize("name", ["causal", "masked"])
def test_switches(browser, name):
    browser.click("#step")
    browser.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", f"#{name}")
    for value in (1, 0, 1):
        browser.find(f"label[for={name}]").click()
        assert settings(browser)[name] == shown_settings(browser)[name] == value
        assert settings(browser)["step"] == 1  # other masks, the same step
        assert (
            any(cell["state"] == "masked" for row in browser.snapshot()["rows"] for cell in row["cells"])
            == value
        )


def test_views(browser):
    for view in (*VIEWS, "tiles"):
        browser.click(f"#view-{view}")
        assert settings(browser)["view"] == shown_settings(browser)["view"] == view
        shown = browser.snapshot()
        assert bool(shown["cards"]) == (view == "decoding")
        assert (shown["pages"]["read"] is not None) == (view == "pages")
        assert bool(shown["closeup"]) == (view != "decoding")


def test_who_looks_at_the_end_stays_there(browser):
    browser.click("#last")
    browser.press("]")
    assert (settings(browser)["tile"], settings(browser)["step"]) == (5, 4)
    browser.press("2")
    browser.press("[", "[")
    assert (settings(browser)["tile"], settings(browser)["step"]) == (3, 6)
    browser.press(LEFT, "]")
    assert (settings(browser)["tile"], settings(browser)["step"]) == (4, 0)


def test_query_is_chosen(browser):
    browser.click(".query[data-query='3']")
    assert settings(browser)["query"] == 3
    assert "Query q3 in numbers" in browser.find("#closeup").text
    pressed = browser.run(
        "return [...document.querySelectorAll('.query')].map((b) => b.getAttribute('aria-pressed'))"
    )
    assert pressed == ["false", "false", "false", "true"]
    browser.click("#view-decoding")
    assert browser.find(".tree").get_attribute("aria-label") == "Workers and merges of query 3"


def test_a_score_is_read(browser, site):
    _, page = site
    trace = expected_trace(page.inputs, page.data, "tiles", 16, 4)
    browser.click("#step")
    browser.click(".strip[data-query='1'] [data-key='2']")
    score = trace.steps[0].scores[1, 2]
    words = browser.find(".readout").text
    assert words.startswith("q1, key 2: score ") and words.endswith("in memory")
    assert abs(float(re.search(r"score (\S+),", words)[1].replace("−", "-")) - score) < 0.005
    browser.click(".strip[data-query='1'] [data-key='9']")
    assert browser.find(".readout").text == "q1, key 9: not yet loaded"


def test_address_is_kept_and_bounded(blank):
    blank.open(address=address("pages", 11, 3, causal=True, masked=True, step=2, query=1))
    wanted = {"view": "pages", "keys": 11, "tile": 3, "causal": 1, "masked": 1, "step": 2, "query": 1}
    assert settings(blank) == wanted
    blank.driver.refresh()
    assert settings(blank) == wanted
    blank.open(address="#view=none&keys=99&tile=-4&step=50&query=x")
    shown = settings(blank)
    assert shown == {"view": "tiles", "keys": 16, "tile": 1, "causal": 0, "masked": 0, "step": 16, "query": 0}
    blank.run("location.hash = '#view=decoding&keys=8&tile=1'")
    blank.wait_for(lambda shown: bool(shown["cards"]))
    assert settings(blank)["keys"] == 8


# --- keyboard ---


def test_shortcuts(browser):
    for keys, wanted in (
        (RIGHT, {"step": 1}),
        (END, {"step": 4}),
        (LEFT, {"step": 3}),
        (HOME, {"step": 0}),
        (DOWN, {"query": 1}),
        (DOWN * 5, {"query": 3}),
        (UP, {"query": 2}),
        ("]", {"tile": 5}),
        ("[[", {"tile": 3}),
        ("-", {"keys": 15}),
        ("+", {"keys": 16}),
        ("c", {"causal": 1}),
        ("M", {"masked": 1}),
        ("2", {"view": "pages"}),
        ("3", {"view": "decoding"}),
        ("1", {"view": "tiles"}),
    ):
        browser.press(*keys)
        assert settings(browser).items() >= wanted.items(), keys


def test_space_plays(browser):
    browser.press(" ", on=None)
    assert browser.find("#play").get_attribute("aria-label") == "Pause"
    browser.press(" ", on=None)
    assert browser.find("#play").get_attribute("aria-label") == "Play"
    browser.run("scrollTo(0, document.documentElement.scrollHeight)")
    browser.press(" ", on=None)  # the simulator is out of sight
    assert browser.find("#play").get_attribute("aria-label") == "Play"
    browser.press(" ", on="#play")  # the button's own meaning of it, once
    assert browser.find("#play").get_attribute("aria-label") == "Pause"


def test_keys_of_a_control_stay_its_own(browser):
    browser.press(RIGHT, on="#tile")
    assert (settings(browser)["tile"], settings(browser)["step"]) == (5, 0)
    browser.press(DOWN, on="#speed")
    assert settings(browser)["query"] == 0
    browser.press("c", on="#quiz input")
    assert settings(browser)["causal"] == 0
    browser.press(END, on="#theme")  # scrolls: the focus is not in the simulator
    assert settings(browser)["step"] == 0


def test_tabs_by_arrows(browser):
    browser.press(RIGHT, on="#view-tiles")
    assert settings(browser)["view"] == "pages"
    browser.driver.switch_to.active_element.send_keys(RIGHT, RIGHT, RIGHT)
    assert settings(browser)["view"] == "tiles"
    browser.driver.switch_to.active_element.send_keys(END)
    assert settings(browser)["view"] == "ring"
    assert browser.driver.switch_to.active_element.get_attribute("id") == "view-ring"


def test_everything_is_reached_by_tab(browser):
    """The order of the page, each control once, and a focus that can be seen."""
    browser.run("document.activeElement.blur()")
    seen = []
    for _ in range(60):
        browser.driver.switch_to.active_element.send_keys(TAB)
        seen.append(
            browser.run("""
            const e = document.activeElement, style = getComputedStyle(e);
            const shows = (one) => one && getComputedStyle(one).outlineStyle !== "none";
            const ring = [e, e.nextElementSibling, e.closest("label")].some(shows);
            return [e.id || e.className || e.name, ring]""")
        )
        if seen[-1][0] == "question-6":
            break
    names = [name for name, _ in seen]
    wanted = [
        "theme",
        "view-tiles",
        "tile",
        "keys",
        "causal",
        "masked",
        "query",
        "step",
        "last",
        "scrub",
        "speed",
    ]
    assert [name for name in names if name in wanted and name != "query"] == [
        n for n in wanted if n != "query"
    ]
    assert names.count("query") == 4
    assert all(ring for _, ring in seen), [name for name, ring in seen if not ring]


# --- touch ---


def test_touch(blank):
    blank.open(width=360, height=740, touch=True)
    blank.swipe(".strip[data-query='1']", -120)
    assert blank.snapshot()["step"] == 1
    blank.swipe(".strip[data-query='1']", -120)
    blank.swipe(".strip[data-query='0']", 120)
    assert blank.snapshot()["step"] == 1
    blank.swipe(".strip[data-query='0']", 20)  # too short to be meant
    assert blank.snapshot()["step"] == 1
    blank.tap("#step")
    assert blank.wait_for(lambda shown: shown["step"] == 2)
    blank.tap(".strip[data-query='0'] [data-key='5']")
    blank.wait_for(lambda _: blank.find(".readout").text.startswith("q0, key 5: score"))


# --- light, dark, sizes, motion ---

COLOURS = """
const colour = (name) => {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color.match(/[\\d.]+/g).map(Number);
  probe.remove();
  return found;
};
return Object.fromEntries(arguments[0].map((name) => [name, colour(name)]));
"""


def contrast(a, b):
    """The ratio that WCAG defines, of two colours in sRGB."""

    def luminance(colour):
        channels = [c / 255 for c in colour[:3]]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    light, dark = sorted([luminance(a), luminance(b)], reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_contrast(blank, dark):
    """At least 4.5 for text on whatever it stands on, 3 for lines that mean something."""
    blank.open(dark=dark)
    text = ["ink", "muted", "accent", "m", "l", "warm", "good", "bad", *(f"worker-{i}" for i in range(4))]
    grounds = ["paper", "surface", "sunken"]
    pairs = [(one, ground) for one in text for ground in grounds]
    pairs += [("warm", "warm-soft"), ("good", "good-soft"), ("bad", "bad-soft"), ("ink", "bar")]
    pairs += [("on-accent", "accent"), ("ink", "good-soft"), ("ink", "bad-soft")]
    colours = blank.run(COLOURS, sorted({name for pair in pairs for name in pair} | {"strong-line"}))
    ratios = {pair: contrast(*(colours[name] for name in pair)) for pair in pairs}
    assert {pair: ratio for pair, ratio in ratios.items() if ratio < 4.5} == {}
    assert all(contrast(colours["strong-line"], colours[ground]) >= 3 for ground in grounds)


def test_theme(browser):
    def background():
        return browser.run("return getComputedStyle(document.body).backgroundColor")

    light = background()
    browser.open(dark=True)
    dark = background()
    assert light != dark
    assert browser.find("#theme").text == "Light"
    browser.click("#theme")
    assert background() == light and browser.find("#theme").text == "Dark"
    browser.driver.refresh()
    assert background() == light  # remembered, whatever the system says
    browser.press("t")
    assert background() == dark
    browser.run("localStorage.clear()")


@pytest.mark.parametrize("width", [320, 360, 768, 1024])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("masked", [False, True])
def test_small_screens(blank, view, width, masked):
    """Nothing sticks out, and what is touched is large enough."""
    blank.open(width=width, height=740, touch=True, address=address(view, 16, 3, masked=masked, step=3))
    wide, sizes = blank.run("""
        const box = (e) => [e.id || e.className, e.getBoundingClientRect()];
        const size = ([name, b]) => [name, b.width, b.height];
        const touched = document.querySelectorAll("button, select, label.switch, .quiz label");
        return [document.documentElement.scrollWidth,
                [...touched].filter((e) => e.offsetParent).map(box).map(size)]""")
    assert wide <= width
    assert [size for size in sizes if min(size[1:]) < 35] == []
    outside = blank.run("""
        const parts = document.querySelectorAll(".stat dd, .error-number, #stage button, .slot");
        return [...parts].filter((e) => {
          const b = e.getBoundingClientRect(); return b.width && (b.left < 0 || b.right > innerWidth + 0.5);
        }).map((e) => e.outerHTML)""")
    assert outside == []


def test_playback_stays_in_reach(blank):
    blank.open(width=360, height=640, touch=True)
    blank.run("document.querySelector('.strip').scrollIntoView()")
    bottom = blank.run("return document.querySelector('.transport').getBoundingClientRect().bottom")
    assert bottom <= 640


@pytest.mark.parametrize("reduced", [True, False])
def test_motion(blank, reduced):
    blank.open(reduced_motion=reduced)
    times = blank.run("""
        return [...document.querySelectorAll("*")].map((e) => getComputedStyle(e).transitionDuration)""")
    moving = {time for time in times for time in time.split(", ")} - {"0s"}
    assert bool(moving) != reduced


@pytest.mark.parametrize(("queries", "keys", "width"), [(8, 24, 8), (1, 1, 1), (3, 7, 2)])
def test_other_shapes(browser, tmp_path, queries, keys, width):
    """The most that a page takes, on a small screen, and the least."""
    rng = np.random.default_rng(2)
    shapes = ((queries, 3), (keys, 3), (keys, width))
    inputs = simulate.Inputs(*map(rng.standard_normal, shapes), "x")
    path = tmp_path / "page.html"
    path.write_text(simulate.page(inputs), encoding="utf-8")
    page = Page(path.read_text(encoding="utf-8"), inputs)
    browser.open(path, width=360, height=740)
    for view in VIEWS:
        browser.run("location.hash = arguments[0]", address(view, keys, 4, causal=True, masked=True, step=-1))
        shown = browser.wait_for(
            lambda _, view=view: settings(browser)["view"] == view and settings(browser)["causal"]
        )
        tile = min(4, keys if view != "decoding" else -(-keys // 4))
        trace = expected_trace(inputs, page.data, view, keys, tile, causal=True, masked=True)
        assert shown["step"] == shown["steps"] > 0
        assert float(shown["meters"]["error"]) == trace.error
        assert len(shown["rows"]) == queries and len(shown["rows"][0]["cells"]) == keys
        assert browser.run("return document.documentElement.scrollWidth") <= 360


# --- what is read aloud ---


@pytest.mark.parametrize("view", VIEWS)
def test_everything_has_a_name(blank, view):
    blank.open(address=address(view, 16, 4, masked=True, step=2))
    tree = blank.cdp("Accessibility.getFullAXTree")["nodes"]
    need = {"button", "slider", "switch", "tab", "tabpanel", "combobox", "radio", "image", "group", "region"}
    named = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node["ignored"] and node["role"]["value"] in need
    ]
    assert {role for role, _ in named} >= need - {"group"} - ({"region"} if view == "decoding" else set())
    assert [role for role, name in named if not name.strip()] == []
    names = " ".join(name for _, name in named)
    assert "Scores of query 0. key 0 done, no longer in memory" in names
    assert re.search(r"Output 0: \S+, exact \S+", names)
    assert blank.find("#narration").get_attribute("aria-live") == "polite"


# --- check yourself ---


def test_quiz(browser):
    questions = json.loads(
        (resources.files("pyflash.simulate") / "page" / "questions.json").read_text("utf-8")
    )
    items = browser.driver.find_elements("css selector", "#quiz > li")
    assert len(items) == len(questions) == 7
    for number, (item, question) in enumerate(zip(items, questions, strict=True), 1):
        assert question["question"] in item.find_element("css selector", "legend").text
        inputs = item.find_elements("css selector", "input")
        right = [bool(option.get("right")) for option in question["options"]]
        for i in (*(i for i, good in enumerate(right) if not good), right.index(True)):
            browser.run("arguments[0].scrollIntoView({block: 'center'})", inputs[i])
            inputs[i].click()
            why = item.find_element("css selector", ".why").text
            assert why == ("Yes. " if right[i] else "No. ") + question["options"][i]["why"]
        assert len(item.find_elements("css selector", "label.right")) == 1
        assert not item.find_elements("css selector", "label.wrong")
        left = f", {7 - number} to go" if number < 7 else ""
        assert browser.find("#score").text == f"{number} of 7 right{left}"
        item.find_element("css selector", ".show-me").click()
        show = question["show"]
        now = settings(browser)
        assert now.items() >= {name: value for name, value in show.items() if name != "step"}.items()
        steps = browser.snapshot()["steps"]
        assert now["step"] == (steps if show["step"] < 0 else show["step"]) <= steps
        top = browser.run("return document.getElementById('stage').getBoundingClientRect().top")
        assert 0 <= top < 200
