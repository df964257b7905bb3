"""A headless Chromium, spoken to over a pipe by its DevTools protocol: no driver and no package is needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # refused to root, as whom CI runs
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--autoplay-policy=no-user-gesture-required",
)
# The browser reads from 3 and writes to 4; either may be the other's number here.
AS_3_AND_4 = """
import fcntl, os, sys
for number, given in zip((3, 4), [fcntl.fcntl(int(text), fcntl.F_DUPFD, 10) for text in sys.argv[1:3]]):
    os.dup2(given, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Chromium:
    """One page. `messages` are those that it printed on its console, such as what its own rules have refused."""

    def __init__(self, profile: Path):
        reading, its_output = os.pipe()
        its_input, writing = os.pipe()
        started = [sys.executable, "-c", AS_3_AND_4, str(its_input), str(its_output), PROGRAM]
        self._process = subprocess.Popen(
            [*started, *OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            pass_fds=(its_input, its_output),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(its_input)
        os.close(its_output)
        self._from, self._to = os.fdopen(reading, "rb"), os.fdopen(writing, "wb")
        self._number, self._session, self._rest = 0, None, b""
        self.messages: list[str] = []

    def __enter__(self) -> Chromium:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._session = None
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")  # so that nothing of it still writes into its folder
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._from.close()
        self._to.close()

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self._process.pid)

    def call(self, method: str, **parameters: Any) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (answer := self._read()).get("id") != self._number:
            self._heard(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def _read(self) -> dict:
        while b"\0" not in self._rest:
            data = os.read(self._from.fileno(), 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _heard(self, event: dict) -> None:
        if event.get("method") == "Log.entryAdded":
            self.messages.append(event["params"]["entry"]["text"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.messages.append(event["params"]["exceptionDetails"]["text"])

    def go(self, address: str, *, width: int = 1280, scheme: str = "light", media: str = "") -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.call("Page.navigate", url=address)

    def wait(self, condition: str, seconds: float = 20.0) -> None:
        """Until an expression in the page is true."""
        until = time.monotonic() + seconds
        while not self.value(f"Boolean({condition})"):
            assert time.monotonic() < until, f"it stays false: {condition}"
            time.sleep(0.05)

    def open(self, page: Path, *, width: int = 1280, scheme: str = "light", media: str = "") -> None:
        """scheme: light or dark. media: `print`, or as on a screen."""
        self.go(page.absolute().as_uri(), width=width, scheme=scheme, media=media)
        loaded = "new Promise(done => document.readyState == 'complete' ? done(1) : addEventListener('load', done))"
        while self.value("location.protocol") != "file:":
            pass
        self.value(f"{loaded}.then(() => true)")

    def value(self, script: str) -> Any:
        """Of an expression in the page; a promise is waited for."""
        told = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def screenshot(self, path: Path, *, top: int = 0, height: int = 0) -> None:
        """The whole page, or `height` pixels of it from `top` on."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": top, "width": size["width"], "height": height or size["height"], "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
