"""Pages in a browser, if one is installed, with scripts that write what they measure into the title."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def launch(profile: Path, path: Path, what: str = "--dump-dom") -> str:
    """Open a file in a browser with a profile folder, and return its DOM after its script has run."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed (Debian: apt-get install chromium), so no page was opened")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",  # scripts read frames
        f"--user-data-dir={profile}",
        "--window-size=1280,900",
    ]
    command = [str(CHROMIUM), *options, what, path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True).stdout


def title(dom: str) -> str:
    """Return the title of a page, where scripts write what they measure."""
    found = re.search(r"<title>(.*?)</title>", dom)
    assert found is not None
    return html.unescape(found[1])
