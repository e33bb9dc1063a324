"""Paths that read each other's messages: PaCoRe and LeaP by a scripted model."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

import pytest
from scripted_model import ScriptedModel

from hf_parallel.agents import AgentError, Chat, PeerPath, Runtime, agent, leap, pacore
from hf_parallel.agents.messages import LEAP_COMMENT, LEAP_NO_COMMENT, LEAP_SUMMARIES, LEAP_TRIGGERS, route, similarity


@agent
async def rounds(question: str, counts: Sequence[int], settings: dict[str, Any]) -> Any:
    chat = Chat("Be exact.", max_new_tokens=50).user(question)
    text = await pacore(chat, counts, **settings)
    assert chat.messages[-1] == {"role": "assistant", "content": text}
    yield text


# PaCoRe

LOW = """\
You are given a problem and a list of reference responses. Your job is to analyze these references and provide your \
own response.

Original Problem:
2+2?

Reference Responses:

Reference 1:
{}

Reference 2:
{}


Now, based on the original problem and reference responses above, please provide your own comprehensive solution.\
"""
"""What the template of the authors renders for two references."""


def test_the_answers_of_a_round_are_the_references_of_the_next_without_their_thinking() -> None:
    numbers = iter("12")

    def script(messages: Any, settings: Any, seed: int) -> str:
        if messages[-1]["content"] == "2+2?":
            number = next(numbers)
            return f"<think>long {number}</think>It is {number}."
        return "<think>So.</think>It is 4."

    model = ScriptedModel(script)
    assert Runtime(model).run(rounds, "2+2?", (2,), {"prompt": LOW_FIELDS}).value == "<think>So.</think>It is 4."
    first, second, last = model.calls
    assert first == second == [{"role": "system", "content": "Be exact."}, {"role": "user", "content": "2+2?"}]
    assert [message["role"] for message in last] == ["system", "user"]
    orders = (LOW.format("It is 1.", "It is 2."), LOW.format("It is 2.", "It is 1."))
    assert last[-1]["content"] in orders


LOW_FIELDS = LOW.replace("2+2?", "{question}").replace(
    "\nReference 1:\n{}\n\nReference 2:\n{}\n\n\nNow", "{references}\n\nNow"
)


def test_the_default_prompt_is_that_of_the_authors() -> None:
    model = ScriptedModel(lambda messages, settings, seed: "x")
    Runtime(model).run(rounds, "2+2?", (2,), {})
    assert model.calls[-1][-1]["content"] == LOW.format("x", "x")


def test_an_answer_begins_when_its_own_messages_are_there_and_the_last_reads_all() -> None:
    """One answer of the first round takes until the others have been read; with all messages, nothing would begin."""
    begun: list[str] = []
    later = asyncio.Event()
    numbers = iter(range(100))

    async def script(messages: Any, settings: Any, seed: int) -> str:
        content = messages[-1]["content"]
        if content == "Q":
            number = next(numbers)
            if number == 0:
                await later.wait()
            return f"answer {number}"
        read = re.findall(r"answer (\d+)", content)
        begun.append("".join(sorted(read)))
        if len(begun) == 2:
            later.set()
        return "answer " + "9".join(read)

    model = ScriptedModel(script)
    result = Runtime(model).run(rounds, "Q", (6, 3), {"reads": 2})
    assert sorted(begun[:2]) == ["23", "45"]
    assert begun[2] == "01"
    assert result.value.count("answer") == 1
    assert model.calls[-1][-1]["content"].count("Reference ") == 1 + 3
    assert result.stats.completions == 6 + 3 + 1


def test_rounds_are_reproducible_and_a_failure_ends_them() -> None:
    def script(messages: Any, settings: Any, seed: int) -> str:
        return f"{seed % 100} after {len(messages[-1]['content'])}"

    runs = []
    for _ in range(2):
        model = ScriptedModel(script)
        runs.append((Runtime(model, seed=3).run(rounds, "Q", (4, 2), {}).value, model.calls[-1]))
    assert runs[0] == runs[1]

    def fails(messages: Any, settings: Any, seed: int) -> str:
        raise OSError("gone")

    with pytest.raises(AgentError, match="gone"):
        Runtime(ScriptedModel(fails)).run(rounds, "Q", (3,), {})


# LeaP


@agent
async def peers(question: str, settings: dict[str, Any]) -> Any:
    chat = Chat(max_new_tokens=1000).user(question)
    yield await leap(chat, **settings)
    assert len(chat.messages) == 1


class Reasoner:
    """Writes a paragraph of `interval` words per segment, summaries with the path's name, and an answer."""

    def __init__(self, interval: int, segments: dict[str, int], slow: str = "") -> None:
        self.interval, self.segments, self.slow = interval, segments, slow
        self.names = iter(segments)
        self.later = asyncio.Event()
        self.finished: list[str] = []

    async def __call__(self, messages: Any, settings: Any, seed: int) -> str:
        text = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        name = text[0] if text else next(self.names)
        if settings.get("stop_strings"):
            if name == self.slow:
                await self.later.wait()
            return f" {name}{text.count('<summarize>')} is so </summarize> and more"
        done = text.count("<comment>")
        if done < self.segments[name]:
            words = [f"{name}.", *["word"] * (self.interval - 4), "kept\n\ncut", "cut", "cut"]
            return " ".join(words)
        self.finished.append(name)
        if len(self.finished) == 2:
            self.later.set()
        return f"</think> {name} ends"


def run_peers(reasoner: Reasoner, **settings: Any) -> list[PeerPath]:
    given = {"interval": reasoner.interval, "paths": len(reasoner.segments), **settings}
    return Runtime(ScriptedModel(reasoner)).run(peers, "Q", given).value


def test_paths_exchange_summaries_in_the_format_of_the_authors_and_continue_after_the_last_blank_line() -> None:
    trigger, begun = LEAP_TRIGGERS[0], LEAP_SUMMARIES[0]
    settings = {"exchanges": 2, "triggers": [trigger], "summaries": [begun]}
    first, second = run_peers(Reasoner(8, {"a": 2, "b": 1}), **settings)
    thought = "{}. word word word word kept\n\n"
    asked = f"{trigger} <summarize> {begun} "
    assert first.text == (
        f"{thought.format('a')}{asked}a1 is so </summarize>"
        f' <comment> Peer 1: "{begun} b1 is so" </comment>\n\n{LEAP_COMMENT}'
        f"{thought.format('a')}{asked}a2 is so </summarize>"
        f" <comment> No comments </comment>\n\n{LEAP_NO_COMMENT}"
        "</think> a ends"
    )
    assert second.text.endswith(f"{LEAP_COMMENT}</think> b ends")
    assert [message.text for message in first.messages] == [f"{begun} a1 is so", f"{begun} a2 is so"]
    assert [message.read for message in first.messages] == [[1], []]
    assert [message.read for message in second.messages] == [[0]]


def test_with_random_peers_a_path_does_not_wait_for_others() -> None:
    """The summary of d comes only after two paths have ended, which have not read it."""
    for seed in range(20):
        reasoner = Reasoner(6, dict.fromkeys("abcd", 1), slow="d")
        given = {"interval": 6, "paths": 4, "exchanges": 1, "peers": 1, "router": "random"}
        model = ScriptedModel(reasoner)
        task = asyncio.wait_for(_run(Runtime(model, seed=seed), given), 20)
        draws = _readers_of_d(seed)
        if len(draws) > 1:
            continue  # two paths read d, so that nobody could end
        paths = asyncio.run(task)
        assert reasoner.finished.index("d") >= 2
        assert [len(path.messages[0].read) for path in paths] == [1] * 4
        return
    raise AssertionError("some seed leaves d unread")


async def _run(runtime: Runtime, given: dict[str, Any]) -> list[PeerPath]:
    return await asyncio.to_thread(lambda: runtime.run(peers, "Q", given).value)


def _readers_of_d(seed: int) -> list[int]:
    """Return the paths that read d, found by a run in which nobody is slow."""
    reasoner = Reasoner(6, dict.fromkeys("abcd", 1))
    given = {"interval": 6, "paths": 4, "exchanges": 1, "peers": 1, "router": "random"}
    paths = Runtime(ScriptedModel(reasoner), seed=seed).run(peers, "Q", given).value
    return [index for index, path in enumerate(paths) if path.messages[0].read == [3]]


def test_a_path_that_ends_is_not_waited_for_and_the_budget_counts_summaries() -> None:
    def script(messages: Any, settings: Any, seed: int) -> str:
        if settings.get("stop_strings"):
            return " so </summ"
        if messages[-1]["role"] == "user":
            return next(texts)
        return "last words"

    texts = iter(["short", "one two three four five"])
    model = ScriptedModel(script)
    given = {"interval": 5, "paths": 2, "exchanges": 3, "max_new_tokens": 9}
    first, second = Runtime(model).run(peers, "Q", given).value
    assert (first.text, first.messages) == ("short", [])
    assert second.text.endswith(f"so </summarize> <comment> No comments </comment>\n\n{LEAP_NO_COMMENT}last words")
    assert second.tokens == 5 + 2 + 2
    assert [len(calls) for calls in model.calls] == [1, 1, 2, 2]


def test_a_trained_path_exchanges_where_it_begins_a_summary() -> None:
    def script(messages: Any, settings: Any, seed: int) -> str:
        if settings["stop_strings"][0] == "</summarize>":
            return " it is so </summarize>"
        assert settings["stop_strings"] == ["<summarize>"]
        if messages[-1]["role"] == "user":
            return "I think.\n\nNow <summarize>"
        return "I end"

    given = {"interval": 50, "paths": 2, "exchanges": 2, "starts_summary": True}
    for path in Runtime(ScriptedModel(script)).run(peers, "Q", given).value:
        assert path.text.startswith("I think.\n\n")
        assert path.text.count("<summarize>") == len(path.messages) == 1
        assert path.text.endswith(f"{LEAP_COMMENT}I end")


def test_routers_choose_by_similarity() -> None:
    others = {0: "abcd", 2: "abzz", 3: "zzzz", 5: "abcx"}
    assert route("abcd", others, 2, "dispersed") == [3, 2]
    assert route("abcd", others, 2, "clustered") == [0, 5]
    assert route("abcd", others, 2, "hybrid") == [3, 0]
    assert route("abcd", {0: "abcd"}, 2, "hybrid") == [0]
    assert route("abcd", {}, 2, "dispersed") == []


def test_similarity_is_that_of_the_longest_common_subsequence() -> None:
    def length(first: str, second: str) -> int:
        row = [0] * (len(second) + 1)
        for a in first:
            before = row
            row = [0]
            for index, b in enumerate(second):
                row.append(before[index] + 1 if a == b else max(before[index + 1], row[-1]))
        return row[-1]

    draw = random.Random(0)
    for _ in range(200):
        first, second = ("".join(draw.choices("abcd ", k=draw.randint(0, 40))) for _ in range(2))
        if first or second:
            assert similarity(first, second) == 2 * length(first, second) / (len(first) + len(second))
        assert similarity(first, second) >= SequenceMatcher(None, first, second, autojunk=False).ratio() - 1e-12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"paths": 0}, "paths must be"),
        ({"router": "nearest"}, "router must be one of"),
        ({"exchanges": -1}, "exchanges must be"),
        ({"triggers": []}, "triggers and summaries must hold"),
        ({"opening": 3}, "opening must be a string"),
    ],
)
def test_invalid_settings_of_leap_raise(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(AgentError, match=message):
        Runtime(ScriptedModel(lambda *given: "x")).run(peers, "Q", settings)


@pytest.mark.parametrize(
    ("counts", "settings", "message"),
    [
        ((), {}, "rounds must be a list"),
        ((2, 0), {}, r"rounds\[1\] must be an int of at least 1, got 0"),
        ((2,), {"prompt": "Say {question}"}, "prompt must hold {references}"),
        ((2,), {"reference": "{number}."}, "reference must hold {text}"),
        ((2,), {"reads": 0}, "reads must be"),
        ((2,), {"prompt": "{answer}"}, "prompt may hold"),
    ],
)
def test_invalid_settings_of_pacore_raise(counts: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(AgentError, match=message):
        Runtime(ScriptedModel(lambda *given: "x")).run(rounds, "Q", counts, settings)
