"""The page, and a browser with it open."""

from __future__ import annotations

import pytest
from simulated import Page

from browser.chromium import Browser, require
from pyflash import simulate


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The default page, and its arrays."""
    require()
    inputs = simulate.random_inputs(0)
    path = tmp_path_factory.mktemp("site") / "simulator page.html"
    path.write_text(simulate.page(inputs), encoding="utf-8")
    return path, Page(path.read_text(encoding="utf-8"), inputs)


@pytest.fixture(scope="session")
def chromium():
    require()
    browser = Browser()
    yield browser
    browser.driver.quit()


@pytest.fixture
def blank(chromium, site):
    """A browser in which the test opens the page. At the end: not a word on the console, no request."""
    path, _ = site
    chromium.home = path
    chromium.forget()
    yield chromium
    chromium.look_at_logs()
    assert chromium.complaints == []
    requested = {url.partition("#")[0] for url in chromium.requests}
    assert path.as_uri() in requested
    assert {url for url in requested if not url.startswith(path.parent.parent.as_uri())} <= {"data:,"}


@pytest.fixture
def browser(blank):
    """A browser with the page open as it comes up."""
    blank.open()
    return blank
