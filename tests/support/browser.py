"""Chromium without a window, driven through a pipe by the DevTools protocol."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
_TIMEOUT_S = 200.0
_FLAGS = (
    *("--headless", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions", "--mute-audio"),
)


class Browser:
    """One page of a browser."""

    def __init__(self, requests: int, events: int) -> None:
        self._requests, self._events = requests, events
        self._numbers = itertools.count(1)
        self._unread = b""
        self._session: str | None = None
        self.messages: list[str] = []
        """Errors and warnings of the page: of its markup, its scripts, its policy and its requests."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime"):
            self._call(f"{domain}.enable")

    def open(self, url: str, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a page and wait until it is shown. A page that reloads itself does so no more."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        failed = self._call("Page.navigate", url=url).get("errorText")
        assert not failed, f"{url}: {failed}"
        self._wait_for("Page.loadEventFired")
        self._call("Page.stopLoading")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        picture = self._call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(picture["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        request: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            request["sessionId"] = self._session
        os.write(self._requests, json.dumps(request).encode() + b"\0")
        while (event := self._read()).get("id") != number:
            self._note(event)
        assert "error" not in event, f"{method}: {event['error']}"
        return event["result"]

    def _wait_for(self, method: str) -> None:
        while (event := self._read()).get("method") != method:
            self._note(event)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] in ("warning", "error"):
            self.messages.append(event["params"]["entry"]["text"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.messages.append(str(event["params"]["exceptionDetails"]))

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._events], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._events, 1 << 20)
            assert data, "the browser has ended"
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\0")
        return json.loads(line)


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Yield a browser with an empty profile."""
    assert CHROMIUM is not None
    sandbox = ["--no-sandbox"] if os.getuid() == 0 else []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, contextlib.ExitStack() as stack:
        pipes = [*os.pipe(), *os.pipe()]
        stack.callback(lambda: [os.close(end) for end in pipes])
        theirs_in, requests, events, theirs_out = pipes
        # Chromium reads requests from descriptor 3 and writes events to descriptor 4.
        shell = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", CHROMIUM, *_FLAGS, *sandbox, f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            yield Browser(requests, events)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its helpers too
            process.wait()
