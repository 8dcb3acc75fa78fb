"""A headless Chromium, spoken to over a pipe by the DevTools protocol: no driver is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Page", "browser", "find_browser"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-pipe",
)
WAIT_S = 60.0


def find_browser() -> str | None:
    """The path of a Chromium; None where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Page:
    """A page of a browser.

    Args:
        commands: the file descriptor that the browser reads.
        events: the one that it writes.
    """

    def __init__(self, commands: int, events: int) -> None:
        self._commands, self._events = commands, events
        self._number, self._rest, self._session = 0, b"", ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self.said: list[str] = []
        """Errors on the console."""
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.said.append(json.dumps(event["params"]["exceptionDetails"])[:2000])
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.said.append(event["params"]["entry"]["text"])

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + WAIT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._events], [], [], max(until - time.monotonic(), 0.0))
            piece = os.read(self._events, 1 << 20) if ready else b""
            if not piece:
                raise RuntimeError("browser: expected an answer, got none")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        read: dict[str, Any] = json.loads(message)
        return read

    def size(self, width: int, height: int, theme: str = "light") -> None:
        """Set the size of the window, in CSS pixels, and the theme of the system."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1}
        self._ask("Emulation.setDeviceMetricsOverride", **screen, mobile=width < 500)
        feature = {"name": "prefers-color-scheme", "value": theme}
        self._ask("Emulation.setEmulatedMedia", features=[feature])

    def open(self, address: str) -> None:
        """Go to an address."""
        self._ask("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """The value of an expression, or of its promise."""
        params = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        got = self._ask("Runtime.evaluate", expression=script, **params)
        if "exceptionDetails" in got:
            raise RuntimeError(f"{script}: {got['exceptionDetails']}")
        return got["result"].get("value")

    def until(self, script: str, seconds: float = WAIT_S) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            if time.monotonic() > end:
                shown = self.run("document.body.innerText")
                raise AssertionError(f"expected {script}, got {shown!r}")
            time.sleep(0.05)

    def type(self, text: str) -> None:
        """Type a text into the focused element."""
        self._ask("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key: Enter, Tab, Escape."""
        code = {"Enter": 13, "Tab": 9, "Escape": 27}[key]
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        self._ask("Input.dispatchKeyEvent", type="keyDown", **fields, **text)
        self._ask("Input.dispatchKeyEvent", type="keyUp", **fields)

    def picture(self, path: Path) -> None:
        """Write a screenshot as a PNG."""
        shot = self._ask("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a browser of its own.

    Args:
        folder: for the browser's files.
    """
    program = find_browser()
    assert program is not None
    its_input, commands = os.pipe()
    events, its_output = os.pipe()
    # The browser reads descriptor 3 and writes descriptor 4, which may be others here.
    far = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (its_input, its_output)]
    actions: list[tuple[Any, ...]] = [
        *[(os.POSIX_SPAWN_OPEN, each, os.devnull, os.O_RDWR, 0) for each in range(3)],
        (os.POSIX_SPAWN_DUP2, far[0], 3),
        (os.POSIX_SPAWN_DUP2, far[1], 4),
    ]
    command = [program, *OPTIONS, f"--user-data-dir={folder}"]
    process = os.posix_spawn(program, command, os.environ, file_actions=actions)
    for each in (its_input, its_output, *far):
        os.close(each)
    try:
        yield Page(commands, events)
    finally:
        os.close(commands)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(events)
