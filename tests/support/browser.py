"""A real browser for the tests of pages: Chromium without a window, driven through its DevTools pipe.

It reads commands from its descriptor 3 and answers on 4, JSON ended by a zero byte, so that nothing but the
browser itself is needed. `GSHARE_TEST_BROWSER` names another one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
#: A first start on two busy cores has been seen to take 20 s.
SECONDS = 120.0
#: Moves two descriptors to 3 and 4, wherever they are, and becomes the browser.
_START = """
import os, sys
reading, writing = (os.dup(int(text)) for text in sys.argv[1:3])
while reading < 5: reading = os.dup(reading)
while writing < 5: writing = os.dup(writing)
os.dup2(reading, 3)
os.dup2(writing, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    named = os.environ.get("GSHARE_TEST_BROWSER")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One page. `requests` are the addresses that it asked for, `complaints` what its console was told."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self._process, self._to, self._back = process, to, back
        self._buffer = b""
        self._last = 0
        self._session = ""
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._loaded = 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def open(self, path: Path) -> None:
        """Returns when it is loaded, scripts included."""
        before = self._loaded
        self.requests.clear()
        self.complaints.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        deadline = time.monotonic() + SECONDS
        while self._loaded == before:
            self._take(deadline)

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression, by value."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def point(self, selector: str, *, click: bool = False) -> None:
        """Move the mouse to the middle of the first such element, which is scrolled to; and click there."""
        x, y = self.value(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            "one.scrollIntoView({block: 'center', inline: 'center'});"
            "const box = one.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        kinds = ["mouseMoved", "mousePressed", "mouseReleased"] if click else ["mouseMoved"]
        for kind in kinds:
            button = "none" if kind == "mouseMoved" else "left"
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=1)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while True:
            reply = self._take(deadline)
            if reply.get("id") == self._last:
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]

    def _take(self, deadline: float) -> dict[str, Any]:
        """The next message; events are noted on the way."""
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._back], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._back, 1 << 16)
            assert data, f"the browser has ended ({self._process.poll()})"
            self._buffer += data
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(text)
        parameters = message.get("params", {})
        if message.get("method") == "Page.loadEventFired":
            self._loaded += 1
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif message.get("method") == "Log.entryAdded":
            self.complaints.append(parameters["entry"]["text"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        return message


@contextlib.contextmanager
def browser_page(browser: str, directory: Path) -> Iterator[Page]:
    """`directory` is for its profile. The browser and all that it started ends with the block."""
    to_browser, to = os.pipe()
    back, from_browser = os.pipe()
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += ["--remote-debugging-pipe", "--window-size=1200,900", f"--user-data-dir={directory}"]
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(to_browser), str(from_browser), browser, *flags, "about:blank"],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(directory)},
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        page = Page(process, to, back)
        yield page
        page._session = ""
        page.call("Browser.close")
        process.wait(30)
    finally:
        process.kill()
        process.wait()
        os.close(to)
        os.close(back)
