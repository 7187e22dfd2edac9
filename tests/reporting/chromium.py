"""A headless Chromium that opens a page from the disk, at any width, in any theme, and tells what it did there."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

DRAWN_SECONDS = 60.0


def missing() -> str | None:
    """What is not installed here; None where a browser can be started."""
    if _program() is None:
        return "no Chromium: apt-get install chromium"
    return None if shutil.which("chromedriver") else "no chromedriver: apt-get install chromium-driver"


def _program() -> str | None:
    return next(
        (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
    )


class Chromium:
    """One browser for many pages."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(_program())
        for flag in ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
            options.add_argument(flag)
        if os.geteuid() == 0:
            options.add_argument("--no-sandbox")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver: Any = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))

    def close(self) -> None:
        self.driver.quit()

    def open(self, page: Path, *, width: int = 1280, theme: str = "light", wait: bool = True) -> None:
        """Load a page and wait until its charts stand."""
        self.emulate(theme=theme)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.console()
        self.requests()
        self.driver.get(page.as_uri())
        end = time.monotonic() + DRAWN_SECONDS
        while wait and self.ask("return document.documentElement.dataset.charts") != "drawn":
            assert time.monotonic() < end, f"the charts of {page} were not drawn: {self.console()}"
            time.sleep(0.02)

    def emulate(self, *, theme: str = "light", medium: str = "screen") -> None:
        """Another theme or medium, without loading anything again."""
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": medium, "features": features})

    def ask(self, script: str, *arguments: Any) -> Any:
        """What a script in the page returns."""
        return self.driver.execute_script(script, *arguments)

    def console(self) -> list[str]:
        """Every message since the last call: errors, warnings, refusals of the content security policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The address of everything that was asked for since the last call."""
        events = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def hover(self, x: float, y: float) -> None:
        """Move the mouse to a place on the screen."""
        for step in (3, 0):
            event = {"type": "mouseMoved", "x": x - step, "y": y}
            self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)

    def without_scripts(self, off: bool) -> None:
        self.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": off})
