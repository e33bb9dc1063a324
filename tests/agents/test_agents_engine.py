"""Agents on an engine: the same completions as alone, shared prefixes, and nothing left when much goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_requests import wait_until_idle
from serving import small_model

from hf_parallel.agents import (
    Chat,
    Runtime,
    agent,
    gather,
    leap,
    pacore,
)
from hf_parallel.engine import ContributionPolicy, Engine, LeastRecentlyUsed

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    model, tokenizer = small_model()
    with Engine(model, tokenizer, max_rows=32) as engine:
        yield engine


SAMPLED: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.0}


@agent
async def talk(topic: str) -> Any:
    chat = Chat(system="Tell me.", **SAMPLED)
    chat.user(topic)
    first = await chat.gen()
    left, right = chat.user("More.").fork(2)
    texts = await gather(left.gen(), right.gen())
    yield first, texts, chat.messages


def test_seeds_make_runs_equal_with_and_without_the_logits_cache(engine: Engine) -> None:
    runtime = Runtime(engine, seed=3)
    first = runtime.run(talk, "birds")
    again = runtime.run(talk, "birds")
    assert again.stats.reused_tokens <= again.stats.prompt_tokens
    assert again.value == first.value
    assert again.stats.replayed_tokens > 0
    assert Runtime(engine, seed=3, logits_cache=False).run(talk, "birds").value == first.value
    assert Runtime(engine, seed=4).run(talk, "birds").value != first.value
    left, right = first.value[1]
    assert left != right


@pytest.mark.parametrize(
    ("mode", "settings"),
    [("shared_prefix", {}), ("self_consistency", {"do_sample": True}), ("hogwild", {"num_workers": 2})],
)
def test_a_completion_may_use_a_mode(engine: Engine, mode: str, settings: dict[str, Any]) -> None:
    @agent
    async def uses() -> Any:
        chat = Chat()
        chat.user("What?")
        text = await chat.gen(generation_mode=mode, max_new_tokens=8, **settings)
        yield text == chat.messages[-1]["content"]

    assert Runtime(engine).run(uses).value is True


def test_paths_that_read_messages_share_what_their_conversations_have_in_common(engine: Engine) -> None:
    @agent
    async def talk() -> Any:
        given: dict[str, Any] = {"do_sample": True, "max_new_tokens": 12}
        chat = Chat("Rules. " * 20, **given).user("Q")
        paths = await leap(chat, paths=3, interval=4, exchanges=2, summary_max_new_tokens=3)
        yield await pacore(chat, (3, 2)), [len(path.messages) for path in paths]

    runs = [Runtime(engine, seed=1).run(talk) for _ in range(2)]
    assert runs[0].value == runs[1].value
    stats = runs[0].stats
    assert stats.completions >= 6 + 3
    assert stats.reused_tokens > stats.prompt_tokens / 2


def test_several_samples_are_one_request_with_the_same_texts_each_time(engine: Engine) -> None:
    @agent
    async def asks() -> Any:
        chat = Chat(**SAMPLED).user("q")
        texts = await chat.sample(3)
        return [*texts, await chat.gen()], chat.messages

    wait_until_idle(engine)  # a request of an earlier test is counted after its result has arrived
    requests = engine.stats.finished
    first = Runtime(engine).run(asks)
    texts, messages = first.value
    wait_until_idle(engine)
    assert engine.stats.finished - requests == 2
    assert len(set(texts)) == 4
    assert [message["content"] for message in messages] == ["q", texts[3]]
    assert first.stats.completions == 4
    assert [event.data["text"] for event in first.trace.events if event.kind == "gen"] == [
        "\n\n".join(texts[:3]),
        texts[3],
    ]
    assert Runtime(engine, logits_cache=False).run(asks).value == first.value


def test_an_engine_without_a_policy_gets_one_that_knows_the_agents() -> None:
    model, tokenizer = small_model()
    with Engine(model, tokenizer) as engine:
        runtime = Runtime(engine)
        policy = engine.policy
        assert isinstance(policy, ContributionPolicy)
        trace = runtime.run(talk, "birds").trace
        assert {member.agent for uses in policy.uses.values() for member in uses.users} == {"talk"}
        assert Runtime(engine).model.engine.policy is policy  # the second runtime shares it
    assert not [event for event in trace.events if event.kind == "scores"]  # one turn is no round
    with Engine(model, tokenizer, policy=LeastRecentlyUsed()) as engine:
        Runtime(engine)
        assert isinstance(engine.policy, LeastRecentlyUsed)
