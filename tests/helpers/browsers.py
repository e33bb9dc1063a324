"""Pages in a browser, if one is installed, with scripts that write what they measure into the title."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def command(profile: Path, *arguments: str) -> list[str]:
    """Return the command of a browser with a profile folder; skip the test if none is installed."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium), so no page was opened")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}", "--window-size=1280,900"]
    return [str(CHROMIUM), *options, *arguments]


def launch(profile: Path, path: Path, what: str = "--dump-dom") -> str:
    """Open a file in a browser with a profile folder, and return its DOM after its script has run."""
    files = "--allow-file-access-from-files"  # scripts read frames
    run = command(profile, files, what, path.as_uri())
    return subprocess.run(run, capture_output=True, text=True, timeout=1800, check=True).stdout


class Tab:
    """A page that a test clicks and types on, over the pipe of Chromium's DevTools protocol."""

    def __init__(self, profile: Path, url: str, width: int = 1280) -> None:
        theirs, self._write = os.pipe()
        self._read, answers = os.pipe()
        quiet = ("--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update")
        run = command(profile, "--remote-debugging-pipe", *quiet, "--disable-sync")
        pipes = f'exec 3<&{theirs} 4>&{answers}; exec "$@"'  # the descriptors that Chromium expects
        with open(profile / "log", "wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", pipes, "bash", *run], pass_fds=(theirs, answers), stderr=log
            )
        os.close(theirs)
        os.close(answers)
        self._buffer, self._count, self._session = b"", 0, {}
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Page.navigate", url=url)

    def send(self, method: str, **params: Any) -> Any:
        """Return the result of a command."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params, **self._session}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._buffer:
                self._buffer += (data := os.read(self._read, 1 << 16))
                assert data, "the browser has ended"
            line, _, self._buffer = self._buffer.partition(b"\0")
            if (answer := json.loads(line)).get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def value(self, script: str) -> Any:
        """Return the value of a JavaScript expression."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, script: str, seconds: float = 600) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < end, script
            time.sleep(0.02)

    def click(self, selector: str) -> None:
        """Click the middle of an element."""
        box = f"document.querySelector({json.dumps(selector)})"
        scroll = f"{box}.scrollIntoView({{block: 'center'}})"
        x, y = self.value(f"{scroll}, (b => [b.x + b.width / 2, b.y + b.height / 2])({box}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Replace the text of a field, and leave the field."""
        self.click(selector)
        self.value("document.activeElement.select()")
        self.send("Input.insertText", text=text)
        self.value("document.activeElement.blur()")

    def close(self) -> None:
        """End the browser."""
        self.send("Browser.close")
        self._process.wait(600)
        os.close(self._read)
        os.close(self._write)


def title(dom: str) -> str:
    """Return the title of a page, where scripts write what they measure."""
    found = re.search(r"<title>(.*?)</title>", dom)
    assert found is not None
    return html.unescape(found[1])
