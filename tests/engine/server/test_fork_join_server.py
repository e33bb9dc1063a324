"""fork_join over HTTP: the answer and each of its paths stream under their names."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from test_server import CHAT, served, small_model, stream

from hf_parallel.engine import Engine

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]

PLAN = "<Parallel>\n<Goal>\n<Outline>\n1: Cats\n</Outline>\n<Outline>\n2: Dogs\n</Outline>\n</Goal>"
BRACKETS = {"region": ["[", "]"], "branch": ["(", ")"]}
CALLS = {"call": ["[", "]"], "separator": "|", "joined": "{text}.", "around": ["<", ">"]}
SETTINGS = {
    "name": {"opening": PLAN},
    "object": {"dialect": BRACKETS, "opening": "["},
    "calls": {"dialect": CALLS, "opening": "[Cats|Dogs]"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_request_over_http_streams_the_answer_and_each_path_under_its_name(settings: dict[str, Any]) -> None:
    settings = settings | {
        "generation_mode": "fork_join",
        "path_max_new_tokens": 6,
        "max_tokens": 150,
        "temperature": 0,
    }
    with Engine(*small_model()) as engine, served(engine) as server:
        whole = server.chat(**settings)
        several = server.chat(**settings | {"n": 3, "temperature": 1})
        body = {"messages": CHAT, "stream_options": {"include_usage": True}}
        *chunks, usage, _ = stream(server, **body, **settings)
    (choice,) = whole["choices"]
    assert len(several["choices"]) == 3
    assert all(one["mode_output"]["forks"] for one in several["choices"])
    rows, content, events = defaultdict(str), "", set()
    for chunk in chunks:
        for part in chunk["choices"]:
            content += part["delta"].get("content", "")
            rows[part.get("row")] += part["delta"].get("row_content", "")
            events.add((part.get("row"), part["delta"].get("row_event")))
    paths = choice["mode_output"]["forks"][0]["paths"]
    assert content == rows["Answer"] == choice["message"]["content"] == choice["mode_output"]["transcript"]
    assert [rows[f"Path {path['index']}"] for path in paths] == [path["text"] for path in paths]
    assert {("Answer", "join"), ("Path 1", "begin"), ("Path 1", "end"), ("Path 2", None)} <= events
    generated = whole["usage"]["completion_tokens"]
    assert generated == usage["usage"]["completion_tokens"]
    assert generated == choice["mode_output"]["critical_path"] + 6  # both paths are written at the same time
