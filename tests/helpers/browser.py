"""Chromium without a window, led by its DevTools protocol through a pipe, which takes no package at all."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
PATIENCE = 60  # seconds
KEYS = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Enter": 13, "Escape": 27, "End": 35}


class Page:
    """One tab. events: unsolicited messages from the browser, such as requests and console output."""

    def __init__(self, orders: int, news: int) -> None:
        self._orders, self._news = orders, news
        self._rest, self._asked = b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = next(each for each in self.send("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> Any:
        """The result of a command of the protocol."""
        self._asked += 1
        session = {"sessionId": self._session} if self._session else {}
        order = {"id": self._asked, "method": method, "params": params} | session
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._receive(deadline - time.monotonic(), method)
            if answer.get("id") == self._asked:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _receive(self, seconds: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._news], [], [], max(seconds, 0))
            assert ready, f"the browser did not answer {method} in time"
            part = os.read(self._news, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(line)
        return found

    def go(self, url: str) -> None:
        self.send("Page.navigate", url=url)

    def run(self, expression: str) -> Any:
        """The value of an expression in the page; of a promise, what it comes to."""
        told = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, f"{expression}: {told['exceptionDetails']}"
        return told["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait for an expression to be true."""
        wait = f"""new Promise((yes, no) => {{
            const end = performance.now() + {PATIENCE - 10} * 1000;
            const look = () => ({condition}) ? yes() : performance.now() > end ? no('never') : setTimeout(look, 10);
            look();
        }})"""
        for _ in range(20):  # a page that is being left takes the promise with it
            try:
                return self.run(wait)
            except AssertionError as error:
                if "context" not in str(error).lower() and "navigated" not in str(error):
                    raise AssertionError(f"{condition} never came true: {error}") from None
        raise AssertionError(f"{condition} never came true")

    def click(self, selector: str, times: int = 1) -> None:
        """Click on the first element of a CSS selector, as a mouse does."""
        x, y = self.place(selector)
        for kind in ("mouseMoved", *("mousePressed", "mouseReleased") * times):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        x, y = self.place(selector)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def place(self, selector: str) -> list[float]:
        """The middle of an element's first box, scrolled into sight."""
        found: list[float] = self.run(f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{ block: 'center' }});
            const box = element.getClientRects()[0];
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")
        return found

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        event = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def resize(self, width: int, height: int, *, scale: float = 1, phone: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """light or dark."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def complaints(self) -> list[str]:
        """Errors and warnings on the console, and exceptions that nothing caught."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """The address of every request."""
        sent = (event for event in self.events if event.get("method") == "Network.requestWillBeSent")
        return [event["params"]["request"]["url"] for event in sent]


@contextmanager
def open_page(profile: Path) -> Iterator[Page]:
    """A tab of a browser that is there for as long as the context. profile: an empty folder."""
    assert CHROMIUM is not None
    theirs, orders = os.pipe()
    news, ours = os.pipe()
    # The browser reads its orders from descriptor 3 and writes to 4.
    lead = ["bash", "-c", f'exec "$@" 3<&{theirs} 4>&{ours}', "bash"]
    command = [*lead, CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        command, pass_fds=(theirs, ours), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    os.close(theirs)
    os.close(ours)
    try:
        yield Page(orders, news)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(orders)
        os.close(news)
