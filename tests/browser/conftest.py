"""The page, and a browser with it open."""

from __future__ import annotations

import pytest
from simulated import Page

from browser.chromium import Browser, require
from pyflash import simulate


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The default page, and its arrays."""
    require()
    inputs = simulate.random_inputs(0)
    path = tmp_path_factory.mktemp("site") / "simulator page.html"
    path.write_text(simulate.page(inputs), encoding="utf-8")
    return path, Page(path.read_text(encoding="utf-8"), inputs)


@pytest.fixture(scope="module")
def chromium():
    require()
    browser = Browser()
    yield browser
    browser.driver.quit()


@pytest.fixture
def browser(chromium, site):
    """A browser with the page open. Afterwards: no word on the console, and nothing asked of a network."""
    path, _ = site
    chromium.home = path
    chromium.open(path)
    yield chromium
    chromium.look_at_logs()
    assert chromium.complaints == []
    assert chromium.requests and {url.partition("#")[0] for url in chromium.requests} <= {path.as_uri(), "data:,"}
