"""Chromium without a window, driven by Playwright."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE = 50  # seconds


class Page:
    """One tab. requests: the address of each. complaints: errors and warnings on the console, and exceptions that
    nothing caught.
    """

    def __init__(self, tab: Any) -> None:
        self._tab, self._devtools = tab, tab.context.new_cdp_session(tab)
        self.requests: list[str] = []
        self.complaints: list[str] = []
        tab.on("request", lambda request: self.requests.append(request.url))
        tab.on("pageerror", lambda error: self.complaints.append(str(error)))
        tab.on("console", self._listen)

    def _listen(self, message: Any) -> None:
        if message.type in ("error", "warning", "assert"):
            self.complaints.append(message.text)

    def forget(self) -> None:
        self.requests, self.complaints = [], []

    def go(self, url: str) -> None:
        self._tab.goto(url, wait_until="commit")

    def send(self, method: str, **params: Any) -> Any:
        """The result of a command of the DevTools protocol."""
        return self._devtools.send(method, params)

    def run(self, expression: str) -> Any:
        """The value of an expression in the page; of a promise, what it comes to."""
        # Playwright's own evaluation calls eval, which the explorer's content policy forbids.
        told = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, f"{expression}: {told['exceptionDetails']}"
        return told["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait for an expression to be true."""
        end = time.monotonic() + PATIENCE
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, f"{condition} never came true"
            time.sleep(0.01)

    def click(self, selector: str, times: int = 1) -> None:
        self._tab.locator(selector).first.click(click_count=times)

    def hover(self, selector: str) -> None:
        self._tab.locator(selector).first.hover()

    def type(self, text: str) -> None:
        self._tab.keyboard.insert_text(text)

    def press(self, key: str) -> None:
        self._tab.keyboard.press(key)

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """light or dark."""
        self._tab.emulate_media(color_scheme=scheme)


@contextmanager
def open_page() -> Iterator[Page]:
    """A tab of a browser that is there for as long as the context."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=False)
        yield Page(browser.new_context(no_viewport=True).new_page())
        browser.close()
