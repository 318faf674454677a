"""A headless browser for tests, driven by the devtools protocol over a pipe."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no chromium or google-chrome on PATH")
ANSWER_S = 30.0
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--remote-debugging-pipe",
)
PIPES = 'exec "$0" "$@" 3<&{} 4>&{}'  # the browser reads commands from 3 and answers on 4


class BrowserTab:
    """A page in a browser, of which scripts of the test can see everything."""

    def __init__(self, commands: int, answers: int) -> None:
        self.commands = commands
        self.answers = answers
        self.received = b""
        self.number = 0
        self.session: str | None = None
        self.messages: list[dict[str, Any]] = []
        """What the page logged, its errors among it."""

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the devtools protocol; return its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            found = self.next_message(deadline)
            if found.get("id") == self.number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]
            if found.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.messages.append(found["params"])
        raise TimeoutError(method)

    def next_message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self.received:
            if not select.select([self.answers], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            data = os.read(self.answers, 1 << 20)
            assert data, "the browser has ended"
            self.received += data
        message, _, self.received = self.received.partition(b"\0")
        return json.loads(message)

    def look(self, width: int, height: int = 800, scheme: str = "light") -> None:
        """Set the size of the page in CSS pixels, and its color scheme."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait_for(
            f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'"
        )

    def run(self, script: str) -> Any:
        """Evaluate a script in the page; return its value."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, script: str, seconds: float = 10.0) -> Any:
        """Evaluate a script until its value is true; return it."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"never true: {script}"
            time.sleep(0.05)
        return value

    def screenshot(self, path: Path, whole: bool = False) -> None:
        options = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            options["clip"] = {**size, "scale": 1}
        data = self.call("Page.captureScreenshot", **options)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def browser_tab(profile: Path) -> Iterator[BrowserTab]:
    """Start a browser with one page. profile: a folder for its files."""
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    bare = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    script = PIPES.format(read_commands, write_answers)
    process = subprocess.Popen(
        ["bash", "-c", script, str(PROGRAM), *OPTIONS, f"--user-data-dir={profile}"],
        env=bare,
        pass_fds=(read_commands, write_answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_commands)
    os.close(write_answers)
    try:
        tab = BrowserTab(commands, answers)
        tab.attach()
        yield tab
    finally:
        with contextlib.suppress(OSError):
            os.close(commands)  # the browser ends
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(answers)
