"""A headless Chromium that opens pages, with its console messages and network requests."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which

import pytest

BROWSER, DRIVER = which("chromium"), which("chromedriver")
try:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.ui import WebDriverWait
except ModuleNotFoundError:
    webdriver = None

needs_browser = pytest.mark.skipif(
    not (BROWSER and DRIVER and webdriver),
    reason="needs a browser: `make browser`, or apt-get install chromium chromium-driver",
)

FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run"),
    *("disable-background-networking", "disable-component-update", "disable-sync"),
    "window-size=1400,1000",
)
HERE = ("file:", "data:", "blob:", "about:", "chrome:")
"""Prefixes of addresses that need no network."""


@contextmanager
def chromium(profile: Path) -> Iterator["Opened"]:
    """Yield a browser with its own profile."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"user-data-dir={profile}"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield Opened(driver)
    finally:
        driver.quit()


class Opened:
    """The browser, with the events of the page that is open."""

    def __init__(self, driver):
        self.driver = driver

    def open(self, path: Path) -> None:
        self.driver.get("about:blank")
        for log in ("browser", "performance"):
            self.driver.get_log(log)  # drop earlier pages' events
        self.driver.get(path.as_uri())
        # Some versions of the driver return while the blank page is still there.
        self.wait("location.protocol === 'file:' && document.readyState === 'complete'")

    def js(self, script: str, *arguments):
        return self.driver.execute_script(script, *arguments)

    def texts(self, selector: str) -> list[str]:
        return self.js(
            "return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector
        )

    def wait(self, script: str, seconds: float = 10.0):
        """Wait until an expression is true, and return its value."""
        return WebDriverWait(self.driver, seconds, 0.05).until(
            lambda _: self.js(f"return {script}")
        )

    def drawn(self) -> None:
        """Wait until changes of the page have been drawn."""
        self.driver.execute_async_script(
            "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
        )

    def console(self) -> list[str]:
        """Return the console's errors and warnings."""
        levels = ("SEVERE", "WARNING")
        return [e["message"] for e in self.driver.get_log("browser") if e["level"] in levels]

    def left_for(self) -> list[str]:
        """Return addresses outside this machine that the page requested."""
        events = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        requests = {
            event["params"]["requestId"]: event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        }
        stopped = {
            event["params"]["requestId"]
            for event in events
            if event["method"] == "Network.loadingFailed"
            and event["params"].get("blockedReason") == "csp"
        }
        here = [url for url in requests.values() if url.startswith("file:")]
        assert here, "the log does not see the page itself"
        return [
            url for key, url in requests.items() if key not in stopped and not url.startswith(HERE)
        ]
