"""Drives headless Chromium over its DevTools pipe, with the standard library alone."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
HOW_TO_INSTALL = "needs Chromium: apt-get install -y chromium"
_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
_OPTIONS += ("--disable-quic", "--no-first-run", "--disable-background-networking")
_OPTIONS += ("--disable-component-update", "--disable-sync", "--disable-extensions")
_OPTIONS += ("--hide-scrollbars", "--remote-debugging-pipe")


class Browser:
    """One page in a headless browser. errors: messages of the console, exceptions, refused loads."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None, HOW_TO_INSTALL
        reads_commands, self._commands = os.pipe()
        self._answers, writes_answers = os.pipe()
        # The browser reads from descriptor 3 and writes to 4: duplicates above them stay apart.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in (reads_commands, writes_answers)]
        command = [CHROMIUM, *_OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            preexec_fn=lambda: [os.dup2(fd, place) for fd, place in zip(high, (3, 4), strict=True)],
            pass_fds=(3, 4),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for fd in (reads_commands, writes_answers, *high):
            os.close(fd)
        self._rest, self._number = b"", 0
        self._session: str | None = None
        self.errors: list[str] = []
        self._loaded = 0
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._commands)
        os.close(self._answers)
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def open(self, address: str, width: int = 1280, height: int = 900, dark: bool = False) -> float:
        """Open a page and return the milliseconds until its scripts had run."""
        self.errors.clear()
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        before = self._loaded
        self._send("Page.navigate", url=address)
        end = time.monotonic() + 60
        while self._loaded == before:
            assert time.monotonic() < end, f"{address} does not load"
            self._read(None)
        return self.evaluate("performance.timing.loadEventEnd - performance.timing.navigationStart")

    def evaluate(self, script: str) -> Any:
        """Run JavaScript and return its value, or that of its promise."""
        answer = self._send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_until(self, script: str, timeout: float = 20) -> None:
        end = time.monotonic() + timeout
        while not self.evaluate(script):
            assert time.monotonic() < end, f"not within {timeout} s: {script}"
            time.sleep(0.05)

    def mouse(self, kind: str, x: float, y: float, button: str = "left") -> None:
        """kind: mousePressed, mouseReleased or mouseMoved."""
        pressed = {"button": button, "buttons": 1, "clickCount": 1}
        self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def _send(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        return self._read(self._number)

    def _read(self, number: int | None) -> dict[str, Any]:
        """Read messages until the answer with `number`; None: read one message."""
        end = time.monotonic() + 60
        while True:
            while b"\0" in self._rest:
                text, _, self._rest = self._rest.partition(b"\0")
                message = json.loads(text)
                if "id" not in message:
                    self._note(message["method"], message.get("params", {}))
                    if number is None:
                        return {}
                elif message["id"] == number:
                    assert "error" not in message, message
                    return message["result"]
            left = end - time.monotonic()
            assert left > 0 and select.select([self._answers], [], [], left)[0], "no answer"
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser has ended"
            self._rest += part

    def _note(self, method: str, found: Mapping[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded += 1
        elif method == "Runtime.exceptionThrown":
            details = found["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning"):
            self.errors.append(str(found["args"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{found['entry']['text']} {found['entry'].get('url', '')}")
