"""The documentation as a reader has it: opened from files, without a network, on a phone and on a desk.

It is what `make docs` has built. Without it tests are skipped, or fail with ``PYFLASH_TEST_SITE=1``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from browser.chromium import Browser, require

SITE = Path(__file__).resolve().parents[2] / "build" / "site"
PHONE, DESK = 390, 1400

#: What is wider than the page although nothing lets it scroll by itself.
TOO_WIDE = """
const width = document.documentElement.clientWidth;
return document.documentElement.scrollWidth <= width ? [] :
    [...document.querySelectorAll("article *")]
        .filter((e) => e.getBoundingClientRect().right > width + 1)
        .map((e) => e.outerHTML.slice(0, 200)).slice(0, 3);
"""
#: Texts of pictures that are drawn outside of them.
CUT_OFF = """
return [...document.querySelectorAll(".picture svg")].flatMap((svg) => {
    const frame = svg.getBoundingClientRect();
    return [...svg.querySelectorAll("text")].filter((text) => {
        const box = text.getBoundingClientRect();
        return box.left < frame.left - 2 || box.right > frame.right + 2;
    }).map((text) => text.textContent);
});
"""


@pytest.fixture(scope="module")
def pages():
    if not (SITE / "index.html").exists():
        if os.environ.get("PYFLASH_TEST_SITE", "0") != "0":
            pytest.fail(f"{SITE} is not there")
        pytest.skip("the documentation is not built: make docs")
    # What a server gives out instead of a page is for servers; the simulator has tests of its own.
    return sorted(set(SITE.rglob("*.html")) - {SITE / "404.html", SITE / "simulator" / "page.html"})


@pytest.fixture(scope="module")
def reader(pages):
    require()
    browser = Browser()
    browser.home = SITE / "index.html"
    yield browser
    browser.driver.quit()


def check_logs(reader):
    """Nothing was said on the console, and nothing was asked of a network."""
    reader.look_at_logs()
    assert reader.complaints == []
    assert {url for url in reader.requests if not url.startswith((SITE.as_uri(), "data:", "blob:"))} == set()


def test_pages(reader, pages):
    """Nothing is wider than the page or cut off, whatever its width."""
    reader.forget()
    for page in pages:
        reader.open(page, width=DESK, dark=True)
        for width in (DESK, PHONE):
            reader.cdp(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=900,
                deviceScaleFactor=1,
                mobile=False,
            )
            assert reader.run(TOO_WIDE) == [], (page.name, width)
            assert reader.run(CUT_OFF) == [], (page.name, width)
    check_logs(reader)


def test_scheme_of_the_system(reader):
    colours = set()
    for dark in (True, False):
        reader.open(dark=dark)
        colours.add(reader.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2


def test_search(reader):
    """It runs in a worker, which browsers do not start from a file: docs/assets/iframe-worker.js."""
    reader.forget()
    reader.open()
    field = reader.find("input.md-search__input")
    reader.run("arguments[0].focus()", field)
    field.send_keys("sinks")
    end = time.monotonic() + 20
    while not (found := reader.driver.find_elements("css selector", ".md-search-result__link")):
        assert time.monotonic() < end, "no result"
        time.sleep(0.1)
    assert any("recipes.html" in link.get_attribute("href") for link in found)
    check_logs(reader)
