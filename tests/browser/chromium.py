"""Chromium with the page of `pyflash simulate` in it: what a reader does to it, and what it shows.

Debian's chromium and chromedriver are driven by selenium; where one of them is missing, tests are skipped,
or fail if ``PYFLASH_TEST_BROWSER=1`` says that they are there.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import time
from pathlib import Path

import pytest

#: Returns everything that the page shows: asking for it element by element would take minutes.
SNAPSHOT = Path(__file__).with_name("snapshot.js").read_text(encoding="utf-8")


def missing() -> str | None:
    """Say what is missing for a test in a browser, or return None."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return None if importlib.util.find_spec("selenium") else "selenium is not installed"


def require() -> None:
    """Skip a test where there is no browser; fail where there should be one."""
    if (reason := missing()) is not None:
        if os.environ.get("PYFLASH_TEST_BROWSER", "0") != "0":
            pytest.fail(reason)
        pytest.skip(f"{reason}: make test-browser")


class Browser:
    """One Chromium without a window."""

    def __init__(self):
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        # Root in a container has neither a sandbox nor much of /dev/shm.
        for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.home: Path | None = None  # the page under test
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def open(
        self, path=None, *, width=1280, height=1000, address="", dark=False, reduced_motion=True, touch=False
    ):
        """Open the page, by default `home`, on such a screen, with settings behind ``#`` in its address."""
        features = {
            "prefers-color-scheme": "dark" if dark else "light",
            "prefers-reduced-motion": "reduce" if reduced_motion else "no-preference",
        }
        media = [{"name": name, "value": value} for name, value in features.items()]
        self.cdp("Emulation.setEmulatedMedia", features=media)
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=touch,
        )
        self.cdp("Emulation.setTouchEmulationEnabled", enabled=touch)
        # The same page with other words behind # would not be loaded again.
        self.driver.get("about:blank")
        self.driver.get((path or self.home).as_uri() + address)

    def forget(self):
        """Begin a test: what other tests did counts no more."""
        self.look_at_logs()
        self.requests.clear()
        self.complaints.clear()

    def cdp(self, command, **parameters):
        """Ask Chromium for what WebDriver has no words for."""
        return self.driver.execute_cdp_cmd(command, parameters)

    def look_at_logs(self):
        """Take in what the page asked of the network and what the console says."""
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                self.requests += [] if url == "about:blank" else [url]
        self.complaints += [entry["message"] for entry in self.driver.get_log("browser")]

    def run(self, script, *arguments):
        """Run JavaScript in the page and return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def snapshot(self):
        """Return everything that the page shows."""
        return self.run(SNAPSHOT)

    def find(self, selector):
        """Return the one element of a CSS selector."""
        (element,) = self.driver.find_elements("css selector", selector)
        return element

    def click(self, selector):
        """Click on an element, brought into view first: the playback bar may lie over it."""
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def press(self, *keys, on="#stage"):
        """Press keys with the focus on an element, or on nothing (`on` is None)."""
        if on is None:
            self.run("document.activeElement.blur()")
            self.driver.switch_to.active_element.send_keys(*keys)
        else:
            self.run("document.querySelector(arguments[0]).focus()", on)
            self.driver.switch_to.active_element.send_keys(*keys)

    def swipe(self, selector, dx):
        """Draw a finger over an element."""
        box = self.run(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]",
            selector,
        )
        points = [{"x": box[0] + dx * (at / 4 - 0.5), "y": box[1] + at} for at in (0, 1, 2, 3, 4)]
        self.cdp("Input.dispatchTouchEvent", type="touchStart", touchPoints=points[:1])
        for point in (*points[1:], points[-1]):  # held at the end: what flings on swallows the next tap
            self.cdp("Input.dispatchTouchEvent", type="touchMove", touchPoints=[point])
            time.sleep(0.05)
        self.cdp("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def tap(self, selector):
        """Tap an element with a finger."""
        x, y = self.run(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]",
            selector,
        )
        self.cdp("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.cdp("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def wait_for(self, condition, seconds=10):
        """Wait until a function of the snapshot is true, and return that snapshot."""
        end = time.monotonic() + seconds
        while not condition(shown := self.snapshot()):
            assert time.monotonic() < end, "the page did not get there"
            time.sleep(0.05)
        return shown


def address(view="tiles", keys=16, tile=4, causal=False, masked=False, step=0, query=0):
    """Return what stands behind the page's address for these settings."""
    flags = f"causal={int(causal)}&masked={int(masked)}"
    return f"#view={view}&keys={keys}&tile={tile}&{flags}&step={step}&query={query}"


def ring_address(ranks=4, schedule="zigzag", tokens=16, causal=False, step=0, query=0):
    """Return the same for the view of the ring."""
    shares = f"ranks={ranks}&schedule={schedule}&tokens={tokens}"
    return f"#view=ring&{shares}&causal={int(causal)}&step={step}&query={query}"
