"""`hf-parallel top`: a live view of a running server."""

from __future__ import annotations

import argparse
import json
import os
import time
import urllib.error
import urllib.request

from rich.console import Console
from rich.live import Live
from rich.table import Table

from hf_parallel.cli.serve import KEY_VARIABLE
from hf_parallel.files import JSONObject

TIMEOUT_SECONDS = 5
BAR_WIDTH = 24
_LATENCIES = {
    "queue": "queue",
    "time_to_first_token": "first token",
    "time_per_token": "per token",
    "request": "whole request",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="of the server (%(default)s)"
    )
    parser.add_argument("--interval", type=float, default=1.0, metavar="X", help="seconds between two updates (1)")
    parser.add_argument("--once", action="store_true", help="print the present state and exit")
    words = f"API key of the server (default: the variable {KEY_VARIABLE})"
    parser.add_argument("--api-key", metavar="KEY", help=words)
    parser.set_defaults(run=top)


def top(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if options.interval <= 0:
        raise ValueError(f"--interval must be above 0, got {options.interval}")
    key = options.api_key or os.environ.get(KEY_VARIABLE, "").partition(",")[0]
    console = Console()
    before, state = None, fetch(options.url, key)
    if options.once or not console.is_terminal:
        console.print(render(state, None))
        return 0
    with Live(render(state, None), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(options.interval)
            before, state = state, fetch(options.url, key)
            live.update(render(state, before), refresh=True)


def fetch(url: str, key: str = "") -> JSONObject:
    """Return the state of a server. Raise `ValueError` if it does not answer as one."""
    address = f"{url.rstrip('/').removesuffix('/v1')}/stats"
    if not address.startswith(("http://", "https://")):
        raise ValueError(f"the URL of a server begins with http:// or https://, got {url!r}")
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as response:
            state = json.load(response)
    except urllib.error.HTTPError as error:
        hint = "; pass --api-key" if error.code == 401 else ""
        raise ValueError(f"{address} answers with status {error.code}{hint}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{address} does not answer as `hf-parallel serve` does: {error}") from error
    if not isinstance(state, dict) or "engine" not in state:
        raise ValueError(f"{address} does not answer as `hf-parallel serve` does")
    return state


def render(state: JSONObject, before: JSONObject | None) -> Table:
    """Return a table of a server's state; `before` is an earlier one, for rates."""
    engine, limit = state["engine"], state["max_kv_bytes"]
    used = _megabytes(engine["kv_bytes"])
    if limit:
        filled = round(BAR_WIDTH * min(engine["kv_bytes"] / limit, 1))
        used = f"{'█' * filled}{'░' * (BAR_WIDTH - filled)} {used} of {_megabytes(limit)}"
    rows = {
        "up for": f"{state['seconds']:.0f} s",
        "requests": f"{engine['running']} running, {engine['waiting']} waiting",
        "ended": f"{engine['finished']} finished, {engine['failed']} failed, {engine['cancelled']} cancelled",
        "keys and values": used,
        "cached prompt tokens": f"{state['hit_rate']:.0%}",
        "generated": f"{engine['decoded_tokens']} tokens{_rate(state, before, 'decoded_tokens')}",
        "prefilled": f"{engine['prefilled_tokens']} tokens{_rate(state, before, 'prefilled_tokens')}",
        "memory pressure": f"{engine['evicted_tokens']} tokens evicted, {engine['preemptions']} preemptions",
    }
    if engine["steps"]:
        step, overhead = (1000 * engine[name] / engine["steps"] for name in ("step_seconds", "overhead_seconds"))
        rows["step"] = f"{step:.1f} ms, {overhead:.2f} ms of it outside the model"
    for name, words in _LATENCIES.items():
        found = state["latency"][name]
        if found is not None:
            rows[words] = f"{1000 * found['p50']:.0f} ms median, {1000 * found['p99']:.0f} ms p99"
    table = Table(title=state["model"], show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(min_width=48)
    for words, value in rows.items():
        table.add_row(words, value)
    return table


def _rate(state: JSONObject, before: JSONObject | None, name: str) -> str:
    if before is None or (seconds := state["seconds"] - before["seconds"]) <= 0:
        return ""
    return f", {(state['engine'][name] - before['engine'][name]) / seconds:.0f}/s"


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"
