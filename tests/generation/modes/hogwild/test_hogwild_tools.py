"""Workers with tools: a step that ends with a call waits for its result, while the others write on."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
import torch
from talks import scripted
from workers import SETTINGS as SHORT
from workers import TOKENIZER, Recording, Scripted, encode, small_model, write

from hf_parallel import HogwildSession
from hf_parallel.engine import Engine
from hf_parallel.generation.modes.hogwild.cache import LAYOUTS

SETTINGS: dict[str, Any] = {"call_tags": ["<c>", "</c>"], "tool_result": "{name} for {worker}: {result}"}


def call(name: str, **arguments: object) -> str:
    return f"<c>{json.dumps({'name': name, 'arguments': arguments})}</c>"


class Writes:
    """Forces rows to write scripts, one letter whenever the row is sampled. Gets the scores of all rows."""

    def __init__(self, *scripts: str) -> None:
        self.left = [encode(script) for script in scripts]
        self.rows: list[list[int]] = []
        self.session: HogwildSession | None = None

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        assert self.session is not None
        scores = scores.clone().fill_(-100.0)
        for name in self.session.writing:
            row = self.session.names.index(name)
            script = self.left[row]
            scores[row, script.pop(0) if script else ord("x")] = 100.0
        return scores


def begin(*scripts: str, **settings: Any) -> HogwildSession:
    writes = Writes(*scripts)
    session = scripted(*scripts, **SETTINGS, **settings)
    session._run.loop.sampler.processors[:] = [writes]
    writes.session = session
    return session


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_worker_waits_for_its_result_while_the_other_writes(layout: str) -> None:
    release = threading.Event()
    received: list[Any] = []

    def add(a: int, b: int) -> int:
        received.append((a, b))
        release.wait(60)
        return a + b

    recording = Recording()
    script = f"So {call('add', a=2, b=3)}"
    session = begin(script, "u" * 200, layout=layout, tools=[add], max_new_tokens=400)
    session.run(len(script))
    assert session.writing == ["Bob"]
    session.run(5)
    assert session.writing == ["Bob"]
    assert received == [(2, 3)]
    assert session.texts["Bob"].endswith("u" * (len(script) + 5))
    release.set()
    session._run.workers[0].call.result.result(60)  # type: ignore[union-attr]
    session.step()
    assert session.writing == ["Alice", "Bob"]
    session.step()
    seen = recording.passes[-1].seen
    result = "add for Alice: 5\n\n"
    assert f"Alice 1: {script}\n\n" in seen[-2]
    assert result in seen[-2]
    if layout != "contiguous":
        assert all(result in text for text in seen[-2:])
        assert [step.text for step in session.history] == [f"Alice 1: {script}\n\n", result]
    session.run(3)
    assert session.texts["Alice"].endswith("xxx")


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (call("fails", n=1), "fails for Alice: error: ZeroDivisionError: division by zero"),
        (call("other"), "other for Alice: error: the tools are fails, wait; there is no other"),
        (call("fails", m=1), "fails for Alice: error: TypeError: "),
        ("<c>[1]</c>", "? for Alice: error: a call is a JSON object"),
        ("<c>{</c>", "? for Alice: error: the call is not valid JSON"),
        (call("wait", n=[1, "a"]), 'wait for Alice: [1, "a"]'),
    ],
)
def test_a_call_that_fails_has_an_error_as_its_result(text: str, result: str) -> None:
    def fails(n: int) -> float:
        return n / 0

    async def wait(n: object) -> object:
        return n

    session = begin(text, "", tools=[fails, wait])
    session.run(len(text))
    while session._run.workers[0].call is not None:
        session.step()
    assert session.history[1].text.startswith(result)


def test_when_all_wait_the_run_waits_in_a_call_and_in_an_engine() -> None:
    script = call("now")

    def now() -> str:
        time.sleep(0.05)
        return "noon"

    given: dict[str, Any] = {"tools": [now], "redundancy_prompt": "", **SETTINGS}
    out = write(script, script, max_new_tokens=len(script) + 3, **given)
    settings = {name: value for name, value in SHORT.items() if name != "tokenizer"} | given
    with Engine(small_model(), TOKENIZER) as engine:
        output = engine.submit(
            torch.tensor([encode("P")]),
            generation_mode="hogwild",
            logits_processor=[Scripted([script, script])],
            do_sample=False,
            finisher_tokens=0,
            max_new_tokens=len(script) + 3,
            return_dict_in_generate=True,
            **settings,
        ).result(60)
    for result in (out, output):
        texts = [step.text for step in result.history[0]]
        assert {"now for Alice: noon\n\n", "now for Bob: noon\n\n"} <= {*texts}
        assert all(text.endswith("xxx") for text in result.texts)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tools": [3]}, "tools must be functions of different names"),
        ({"tools": [print, print]}, "tools must be functions of different names"),
        ({"tools": [print], "generation_mode": "async_reasoning"}, "tools must be None with a control_prompt"),
        ({"call_tags": ["a"]}, "call_tags must be the texts that open and close a call"),
        ({"tool_result": "{other}"}, "tool_result may hold"),
    ],
)
def test_invalid_tools_raise(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scripted("A", "B", **settings)
