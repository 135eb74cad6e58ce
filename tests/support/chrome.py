"""A page in a headless Chromium, driven by the DevTools protocol over two pipes: no port, no package."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions")
TIMEOUT_S = 60.0


class Page:
    """A page; use it as a context manager.

    Args:
        path: The HTML file, or the URL of a page on this machine.
        profile: An empty folder for the browser's profile.
        width: Width of the window in pixels.

    Attributes:
        errors: Exceptions, console errors and refused connections so far.
    """

    def __init__(self, path: Path | str, profile: Path, width: int = 1280) -> None:
        self.path, self.profile, self.width = path, profile, width
        self.errors: list[str] = []

    def __enter__(self) -> Page:
        """Start the browser, open the page and wait until it is drawn."""
        assert PROGRAM is not None
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self.out, self.inp, self.buffer, self.number = ours_out, ours_in, b"", 0

        def pipes() -> None:  # the protocol reads from 3 and writes to 4
            kept = os.dup(theirs_in), os.dup(theirs_out)
            os.dup2(kept[0], 3)
            os.dup2(kept[1], 4)

        window = f"--window-size={self.width},900"
        self.browser = subprocess.Popen(
            [PROGRAM, *OPTIONS, window, f"--user-data-dir={self.profile}", "--remote-debugging-pipe"],
            preexec_fn=pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")
        address = self.path if isinstance(self.path, str) else self.path.resolve().as_uri()
        self.call("Page.navigate", url=address)
        deadline = time.monotonic() + TIMEOUT_S
        while self("document.documentElement?.dataset.ready") != "true" and not self.errors:
            assert time.monotonic() < deadline, "the page was not drawn"
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        """End the browser."""
        self.session = None
        try:
            self.call("Browser.close")
        finally:
            os.close(self.out)
            os.close(self.inp)
            self.browser.wait(10)

    def __call__(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        said = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer["error"]
                return dict(answer["result"])
            self._heard(answer.get("method", ""), answer.get("params", {}))

    def move(self, x: float, y: float) -> None:
        """Move the pointer to (x, y)."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str) -> None:
        """Press a key, as the keyboard does."""
        code = {"Enter": 13, "Tab": 9, " ": 32}[key]
        more = {"key": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **more, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **more)

    def _heard(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        if event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(str(params["args"]))
        if event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(str(params["entry"]))

    def _read(self) -> dict[str, Any]:
        answers = select.poll()  # unlike `select`, for file descriptors above 1023 as well
        answers.register(self.inp, select.POLLIN)
        while b"\0" not in self.buffer:
            assert answers.poll(1000 * TIMEOUT_S), "the browser does not answer"
            self.buffer += os.read(self.inp, 1 << 16)
        text, self.buffer = self.buffer.split(b"\0", 1)
        return dict(json.loads(text))
