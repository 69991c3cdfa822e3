"""A headless Chromium over its DevTools pipe: no port, no socket library, nothing on the network.

The browser is a child process that reads commands from descriptor 3 and writes answers to 4, JSON ended by a zero byte.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE = 60.0
"""Seconds without an answer after which the browser is given up."""


def find() -> str | None:
    """Path of an installed Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in a headless browser; everything it logs and requests is kept."""

    def __init__(self, program: str, profile: Path) -> None:
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        # descriptors far from 3 and 4, so that the child's copies overwrite nothing
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_read, to_write)]
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        quiet = ["--no-first-run", "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND"]
        null = os.open(os.devnull, os.O_RDWR)
        moves = [(os.POSIX_SPAWN_DUP2, source, to) for source, to in ((ends[0], 3), (ends[1], 4))]
        moves += [(os.POSIX_SPAWN_DUP2, null, to) for to in (0, 1, 2)]
        command = [program, *flags, *quiet, f"--user-data-dir={profile}", "about:blank"]
        self.process = os.posix_spawn(program, command, os.environ, file_actions=moves, setpgroup=0)
        for end in (to_read, to_write, *ends, null):
            os.close(end)
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        page = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Page.setLifecycleEventsEnabled", enabled=True)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a DevTools method and wait for its answer; RuntimeError if it refuses."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def open(self, url: str, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page anew at a size and in a colour scheme, and wait until it has loaded."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        for address in ("about:blank", url):  # a mere change of the fragment would not load anew
            self.events.clear()
            loader = self.send("Page.navigate", url=address)["loaderId"]
            while not any(self._is_loaded(event, loader) for event in self.events):
                self.events.append(self._receive())

    def _is_loaded(self, event: dict[str, Any], loader: str) -> bool:
        about = event.get("params", {})
        named = event.get("method") == "Page.lifecycleEvent" and about.get("name") == "load"
        return named and about["loaderId"] == loader

    def run(self, script: str) -> Any:
        """Value of a JavaScript expression in the page; RuntimeError if it throws."""
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def press(self, key: str, code: int, modifiers: int = 0) -> None:
        """Press a key as a person would."""
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, modifiers=modifiers
            )

    def move_to(self, selector: str) -> None:
        """Move the mouse over the middle of an element."""
        x, y = self._middle(selector)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        """Press and release the left button over the middle of an element."""
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def _middle(self, selector: str) -> tuple[float, float]:
        look = "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
        middle = "[b.x + b.width / 2, b.y + b.height / 2]"
        x, y = self.run(f"(e => {{ {look} return {middle} }})(document.querySelector({json.dumps(selector)}))")
        return x, y

    def screenshot(self, path: Path, whole: bool = True) -> None:
        """Write a PNG of the page, or of what its window shows."""
        taken = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))

    def complaints(self) -> list[str]:
        """What the page logged, threw or was refused since it was opened."""
        self.run("1")  # events come before the answer of a later call
        loud = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
        return [json.dumps(event["params"]) for event in self.events if event.get("method") in loud]

    def requests(self) -> list[str]:
        """Addresses that the page asked for since it was opened, its own and data: aside."""
        asked = [e["params"]["request"]["url"] for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [url for url in asked if not url.startswith(("data:", "file:///", "about:"))]

    def close(self) -> None:
        """End the browser and all its processes."""
        os.killpg(self.process, signal.SIGKILL)
        os.waitpid(self.process, 0)
        os.close(self._to)
        os.close(self._from)

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            if not select.select([self._from], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"the browser gave no answer in {PATIENCE:.0f} s")
            some = os.read(self._from, 1 << 20)
            if not some:
                raise RuntimeError("the browser ended")
            self._buffer += some
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)
