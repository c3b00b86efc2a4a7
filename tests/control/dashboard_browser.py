# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium for the tests of the dashboard: Debian's packages `chromium` and `chromium-driver`, driven by Selenium."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
MISSING = "no Chromium here: apt-get install --no-install-recommends chromium chromium-driver"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WAIT_S = 60.0
"""For what never comes if something is wrong."""


class Page:
    """One tab."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Load a page."""
        self.driver.get(url)

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body returns in the page."""
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        """The first element, waited for."""
        self.wait(lambda: self.all(selector), f"{selector} is not there")
        return self.all(selector)[0]

    def all(self, selector: str) -> list[WebElement]:
        """Every element."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """The text of the first element, hidden or not; empty if there is none."""
        return str(self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector))

    def row(self, session_id: str) -> WebElement:
        """A session's row, waited for."""
        script = "return [...document.querySelectorAll('.row')].find((row) => row.dataset.session === arguments[0])"
        self.wait(lambda: self.run(script, session_id), f"no row of {session_id!r}")
        element: WebElement = self.run(script, session_id)
        return element

    def wait(self, holds: Callable[[], Any], message: str, timeout_s: float = WAIT_S) -> None:
        """Wait until something holds."""
        WebDriverWait(self.driver, timeout_s, poll_frequency=0.1).until(lambda _: holds(), message)

    def wait_for_text(self, selector: str, part: str) -> str:
        """Wait until an element shows `part`; returns its text."""
        self.wait(lambda: part in self.text(selector), f"{selector} does not show {part!r}")
        return self.text(selector)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the viewport in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """Prefer `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def complaints(self) -> list[str]:
        """What the console says of scripts, markup and policy since it was asked last; failed requests are left out."""
        entries = self.driver.get_log("browser")
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE" and entry.get("source") != "network"]


@contextmanager
def open_browser(profile: Path) -> Iterator[Page]:
    """A browser of its own, with a new profile."""
    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,800"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    try:
        driver.set_page_load_timeout(30)
        yield Page(driver)
    finally:
        driver.quit()
