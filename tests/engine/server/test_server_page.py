"""The page of the server: what it holds, and what a user sees who clicks through it."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import Tab
from test_server import served, small_model

from hf_parallel.engine import Engine
from hf_parallel.generation import MODES

httpx = pytest.importorskip("httpx2")
pytestmark = pytest.mark.usefixtures("one_thread")
KEY = "a secret"
MARKUP = "<img src=x onerror=\"document.title = 'run'\"><script>document.title = 'run'</script>"
WRITING = "[...document.querySelectorAll('.writing')].filter(card => card.querySelector('p').textContent.length > 40)"
ERROR = "document.getElementById('error').textContent"
STATUS = "document.getElementById('status').textContent"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    model, tokenizer = small_model()
    # A run lasts until the test has seen it.
    model.config.max_position_embeddings = 2**14
    model.lm_head.weight.data[tokenizer.eos_token_id] = 0
    model.register_forward_pre_hook(lambda *_: time.sleep(0.01))
    with Engine(model, tokenizer) as engine, served(engine, api_keys=[KEY]) as server:
        yield server.url


@pytest.fixture
def tab(url: str, tmp_path: Path) -> Iterator[Callable[..., Tab]]:
    opened: list[Tab] = []

    def open_tab(width: int) -> Tab:
        opened.append(Tab(tmp_path, f"{url}/", width))
        opened[-1].wait_for("document.getElementById('model')?.textContent === 'not connected'")
        assert opened[-1].value(ERROR) == "", "an error before anything was typed"
        opened[-1].type("#key", KEY)
        opened[-1].wait_for("document.getElementById('model').textContent === 'small'")
        return opened[-1]

    yield open_tab
    for one in opened:
        one.close()


def test_the_page_is_open_without_a_key_and_describes_every_setting(url: str) -> None:
    response = httpx.get(url)
    assert response.status_code == 200
    assert KEY not in response.text
    assert "unsafe" not in (policy := response.headers["content-security-policy"])
    assert policy.count("'sha256-") == 2
    (schema,) = re.findall(r'<script type="application/json" id="schema">(.*?)</script>', response.text, re.DOTALL)
    modes = {mode["name"]: mode for mode in json.loads(schema)["modes"]}
    assert set(modes) == {name for name, cls in MODES.items() if not cls.traits.needs_logits_cache}
    for name, mode in modes.items():
        settings = [setting["name"] for setting in mode["settings"]]
        assert settings == [n for n in MODES[name].fields() if n in settings]
        assert not {"seed", *MODES[name].not_remote()} & {*settings}
        if MODES[name].__module__.startswith("hf_parallel."):
            assert [setting["name"] for setting in mode["settings"] if not setting["about"]] == []


@pytest.mark.parametrize(("settings", "answers"), [({"n": 2}, 2), ({"generation_mode": "hogwild"}, 1)])
def test_the_last_choice_holds_the_transcript_of_the_run(url: str, settings: dict[str, Any], answers: int) -> None:
    body = {"model": "small", "messages": [{"role": "user", "content": MARKUP}], "max_tokens": 8, "seed": 1, **settings}
    send = functools.partial(httpx.post, f"{url}/v1/chat/completions", headers={"Authorization": f"Bearer {KEY}"})
    *others, last = send(json=body | {"transcript": True}).json()["choices"]
    assert (len(others), [other.get("transcript") for other in others]) == (answers - 1, [None] * (answers - 1))
    assert last["transcript"].startswith("<!DOCTYPE html>")
    assert "Content-Security-Policy" in last["transcript"]
    assert MARKUP not in last["transcript"]
    assert all("transcript" not in choice for choice in send(json=body).json()["choices"])


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_workers_are_seen_writing_at_the_same_time_until_the_run_is_stopped(tab: Any, width: int) -> None:
    page = tab(width)
    page.type("#prompt", MARKUP)
    page.type("#max_tokens", "4000")
    page.type("#temperature", "0")
    page.value("document.getElementById('mode').value = 'hogwild', chooseMode()")
    page.click("#more summary")
    page.type("[name=step_prefix]", f"{{name}} {MARKUP}")
    page.click("#run")
    boxes = f"boxes = {WRITING}.map(card => card.getBoundingClientRect())"
    page.wait_for(f"({boxes}).length === 2 && {STATUS} === 'Alice and Bob are writing'")
    left, right = page.value("boxes.map(box => [box.x, box.y])")
    assert left[0] < right[0]
    assert left[1] == right[1]
    assert page.value("document.documentElement.scrollWidth") <= width
    page.click("#stop")
    page.wait_for(f"{STATUS} === 'Stopped' && !document.querySelector('.writing')")
    page.type("#max_tokens", "20")
    page.click("#run")
    page.wait_for(f"{STATUS}.startsWith('Finished: ')")
    assert "tokens of the prompt stored once" in page.value("document.getElementById('numbers').textContent")
    assert MARKUP in page.value("document.getElementById('rows').textContent")
    link = "document.getElementById('transcript')"
    assert page.value(f"[{link}.hidden, {link}.href.split(':')[0], {link}.download]") == [
        False,
        "blob",
        "transcript.html",
    ]
    assert page.value("document.querySelectorAll('#rows img, #rows script').length") == 0
    assert page.value("document.title") == "hf_parallel"


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_running_workers_can_be_spoken_to(tab: Any, width: int) -> None:
    page = tab(width)
    hidden = "document.getElementById('say').hidden"
    rows = "document.getElementById('rows').textContent"
    page.type("#max_tokens", "4000")
    page.type("#temperature", "0")
    page.value("document.getElementById('mode').value = 'hogwild', chooseMode()")
    assert page.value(hidden)
    page.click("#run")
    page.wait_for(f"!{hidden} && document.getElementById('to').options.length === 3")
    page.type("#words", f"It rains. {MARKUP}")
    page.click("#send")
    page.wait_for(f"{rows}.includes('It rains.') && document.getElementById('words').value === ''")
    page.value("document.getElementById('to').value = 'Bob', 0")
    page.type("#words", "Only for Bob.")
    page.click("#send")
    bob = "[...document.querySelectorAll('.card')].find(card => card.querySelector('h3').firstChild.data === 'Bob')"
    page.wait_for(f"{bob}.textContent.includes('Only for Bob.')")
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value("document.querySelectorAll('#rows img, #rows script').length") == 0
    assert page.value(STATUS) == "Alice and Bob are writing"
    assert page.value(ERROR) == ""
    page.click("#stop")
    page.wait_for(f"{STATUS} === 'Stopped' && {hidden}")


CARDS = "[...document.querySelectorAll('.card')]"
NAMES = f"{CARDS}.map(card => card.querySelector('h3').firstChild.data)"
READY = "!document.getElementById('run').disabled"


def card(name: str) -> str:
    """Return an expression for the card with a name."""
    return f"{CARDS}.find(card => card.querySelector('h3').firstChild.data === {json.dumps(name)})"


def click_fork(page: Tab, name: str, number: int, message: str = "") -> None:
    """Open the line of an answer, fill it and send it."""
    page.value(f"document.getElementById('here')?.removeAttribute('id'), {card(name)}.id = 'here', 0")
    assert page.value("document.querySelector('#here .line').hidden")
    page.click("#here .fork")
    page.type("#here .line [type=number]", str(number))
    page.type("#here .line input", message)
    page.click("#here .line button")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_answers_are_forked_while_they_are_written_and_afterwards_and_so_are_forks(tab: Any, width: int) -> None:
    page = tab(width)
    page.value("document.getElementById('mode').value = '', chooseMode()")
    page.type("#prompt", "A day in Rome. " * 20)
    page.type("#max_tokens", "4000")
    page.click("#run")
    page.wait_for(f"({WRITING}).length === 1")
    click_fork(page, "Answer 1", 2)
    page.wait_for(f"({WRITING}).length === 3")
    assert sorted(page.value(NAMES)) == ["Answer 1", "Answer 1.1", "Answer 1.2"]
    assert page.value(STATUS) == "Answer 1, Answer 1.1 and Answer 1.2 are writing"
    page.click("#stop")
    page.wait_for(f"{STATUS} === 'Stopped' && {READY} && !document.querySelector('.writing')")
    assert page.value(f"{CARDS}.every(card => card.querySelector('.fork').hidden)"), "what was stopped is not kept"

    page.type("#max_tokens", "20")
    page.type("#n", "2")
    page.click("#run")
    page.wait_for(f"{STATUS}.startsWith('Finished: ') && {READY}")
    assert sorted(page.value(NAMES)) == ["Answer 1", "Answer 2"]
    click_fork(page, "Answer 2", 2, MARKUP)
    page.wait_for(f"{CARDS}.length === 4 && {STATUS}.startsWith('Finished: ') && {READY}")
    assert f"Message: {MARKUP}" in page.value("document.querySelector('.forks').textContent")
    for name in ("Answer 2.1", "Answer 2.2"):
        text = page.value(f"{card(name)}.textContent")
        assert "continues Answer 2" in text
        written, cached, prompt = map(
            int, re.findall(r"(\d+) tokens?; (\d+) of (\d+) tokens of its prompt were cached", text)[0]
        )
        assert 0 < written <= 20
        assert prompt / 2 < cached <= prompt
    assert "tokens of the prompts of these forks were cached" in page.value(
        "document.getElementById('numbers').textContent"
    )
    click_fork(page, "Answer 2.1", 1)
    page.wait_for(f"{CARDS}.length === 5 && {STATUS}.startsWith('Finished: ') && {READY}")
    assert "continues Answer 2.1" in page.value(f"{card('Answer 2.1.1')}.textContent")
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value("document.querySelectorAll('#rows img, #rows script').length") == 0
    assert page.value("document.title") == "hf_parallel"
    assert page.value(ERROR) == ""


@pytest.mark.slow
def test_a_running_mode_that_combines_rows_shows_why_it_cannot_be_forked_yet(tab: Any) -> None:
    page = tab(1280)
    page.value("document.getElementById('mode').value = 'hogwild', chooseMode()")
    page.type("#max_tokens", "4000")
    page.click("#run")
    page.wait_for(f"({WRITING}).length === 2")
    page.click(".answer .fork")
    page.type(".answer .line input", "And then?")
    page.click(".answer .line button")
    page.wait_for(f"{ERROR}.includes('can be forked at its end once it has ended')")
    assert page.value("document.querySelector('.line input').value") == "And then?"
    assert page.value("document.querySelectorAll('.forks > *').length") == 0
    page.wait_for(f"{STATUS} === 'Alice and Bob are writing'")
    page.click("#stop")
    page.wait_for(READY)
    page.type("#max_tokens", "20")
    page.click("#run")
    page.wait_for(f"{STATUS}.startsWith('Finished: ') && {READY}")
    page.click(".result .fork")
    page.type(".result .line input", "And then?")
    page.click(".result .line button")
    page.wait_for(f"document.querySelector('.forks .result') && {STATUS}.startsWith('Finished: ') && {READY}")
    assert page.value("document.querySelector('.forks h2').textContent") == "Answer 1.1 continues Answer 1"
    assert page.value(ERROR) == ""


@pytest.mark.slow
def test_a_wrong_key_is_an_error_and_a_missing_one_is_not(tab: Any) -> None:
    page = tab(1280)
    page.type("#key", "wrong")
    page.value("connect(), 0")
    page.wait_for(f"{ERROR}.startsWith('a valid API key is required')")
    assert page.value("document.getElementById('model').textContent") == "not connected"


@pytest.mark.slow
def test_text_of_the_model_is_never_markup(tab: Any) -> None:
    page = tab(1280)
    call = {"index": 0, "function": {"name": MARKUP, "arguments": MARKUP}}
    deltas: list[dict[str, Any]] = [
        {"row": MARKUP, "delta": {"row_content": MARKUP, "row_event": "begin"}},
        {"row": MARKUP, "delta": {"row_content": MARKUP, "reasoning_content": MARKUP, "tool_calls": [call]}},
        {"row": MARKUP, "delta": {"row_content": MARKUP, "row_event": "inject"}},
        {"row": "Alice", "delta": {"row_event": "join", "row_content": MARKUP}},
        {
            "delta": {"content": MARKUP},
            "finish_reason": "stop",
            "mode_output": {"found": [MARKUP], "votes": {MARKUP: 1}},
        },
    ]
    events = [json.dumps({"choices": [{"index": 0, **delta}]}) for delta in deltas]
    body = "".join(f"data: {event}\n\n" for event in [*events, json.dumps({"error": {"message": MARKUP}})])
    page.value(f"window.fetch = async () => new Response({json.dumps(body)}), 0")
    page.click("#run")
    page.wait_for("document.getElementById('error').textContent !== ''")
    assert page.value("document.querySelector('main').textContent").count(MARKUP) >= 9
    assert page.value("document.querySelectorAll('main img, main script').length") == 0
    assert page.value("document.title") == "hf_parallel"
