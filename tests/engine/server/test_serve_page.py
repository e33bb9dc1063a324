"""The shell blocks of `docs/serve.md`: the server that the page starts answers the requests that the page sends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pages
import pytest

SHELL = pages.blocks(pages.SERVE, "sh")
PAGE_URL = "http://127.0.0.1:8000"


def command_of_page() -> list[str]:
    """Return the first command of the page that starts a server, without its port."""
    line = next(line for block in SHELL for line in block.splitlines() if line.startswith("hf-parallel serve"))
    return re.sub(r" --port \d+", "", line).split()[1:]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the page's server on a free port, in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "hf_parallel", *command_of_page(), "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        try:
            yield wait_for(f"http://127.0.0.1:{port}", process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until a server answers, and return its address."""
    end = time.monotonic() + 600
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            urlopen(f"{url}/health", timeout=10).close()
        except (URLError, OSError):
            time.sleep(0.2)
        else:
            return url
    raise TimeoutError(log.read_text())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("block", [block for block in SHELL if block.startswith("curl")])
def test_a_request_of_the_page_is_answered(url: str, block: str) -> None:
    command = block.replace(PAGE_URL, url).replace("curl ", "curl --silent --show-error --fail-with-body ", 1)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout)
    assert answer["model"] == "SmolLM2-135M-Instruct"
    assert answer.get("choices") or answer.get("scores")


def test_lm_eval_names_the_model_as_the_server_does() -> None:
    """A server of a model of the Hub names it by its whole id."""
    text = pages.SERVE.read_text() + (pages.SERVE.parent / "serve_api.md").read_text()
    served = re.findall(r"hf-parallel serve .*?--model (\S+)", text)
    named = re.findall(r"--model_args model=([^,]+),", text)
    assert named
    assert all("/" in name for name in [*served, *named])
