"""Agents on an engine: the same completions as alone, shared prefixes, and nothing left when much goes wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_requests import wait_until_idle
from serving import small_model

from hf_parallel.agents import (
    AgentCancelledError,
    AgentError,
    Chat,
    ContributionPolicy,
    Runtime,
    ToolError,
    agent,
    cancel,
    gather,
    next,
    resume,
    rng,
    spawn,
    tool,
)
from hf_parallel.agents.drawing import render
from hf_parallel.engine import Engine
from hf_parallel.generation import MODES

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


def test_conversations_reuse_the_keys_and_values_of_what_they_share(engine: Engine) -> None:
    @agent
    async def many() -> Any:
        handles = [spawn(talk, "fish") for _ in range(4)]
        yield [await next(handle) for handle in handles]

    stats = Runtime(engine, logits_cache=False).run(many).stats
    assert stats.completions == 12
    assert stats.agents == 5
    assert stats.reused_tokens > stats.prompt_tokens / 2
    assert stats.passes < stats.tokens


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


def test_the_trace_holds_the_size_of_the_cache_and_the_scores_of_the_agents() -> None:
    @agent
    async def several() -> Any:
        for other in (talk, listener, talk):
            await next(spawn(other, "fish"))
        yield

    listener = agent(name="listener")(talk.function)
    model, tokenizer = small_model()
    with Engine(model, tokenizer, policy=ContributionPolicy(round_turns=2)) as engine:
        trace = Runtime(engine).run(several).trace
        assert engine.stats.kv_bytes == [event for event in trace.events if event.kind == "kv"][-1].data["bytes"]
    scores = [event.data["scores"] for event in trace.events if event.kind == "scores"]
    assert set(scores[-1]) == {"talk", "listener"}
    assert "<html" in render(trace)


def test_an_error_of_a_request_names_no_mode_that_nobody_chose(engine: Engine) -> None:
    for name, value in (("max_new_tokens", 0), ("assistant_model", object())):

        @agent
        async def wrong(settings: dict[str, Any]) -> Any:
            yield await Chat().user("q").gen(**settings)

        for cached in (True, False):
            with pytest.raises(AgentError, match=name) as raised:
                Runtime(engine, logits_cache=cached).run(wrong, {name: value})
            assert not any(f"{mode!r}" in str(raised.value) for mode in MODES)


async def unreliable(seed: int) -> int:
    drawn = random.Random(seed)
    await asyncio.sleep(drawn.random() / 50)
    if drawn.random() < 0.3:
        raise OSError("the tool has failed")
    if drawn.random() < 0.1:
        await asyncio.Event().wait()
    return seed


@agent
async def helper(number: int) -> Any:
    """Answer questions until it fails."""
    chat = Chat(system=f"You are helper {number % 3}.", do_sample=True)
    question = "Begin."
    while True:
        chat.user(question)
        question = yield await chat.gen(max_new_tokens=1 + number % 7)
        if rng().random() < 0.2:
            raise RuntimeError("the helper has failed")


@agent
async def worker(number: int) -> Any:
    """Use tools and a helper, as its number says, and return what it got."""
    chat = Chat(system=f"You are worker {number % 5}.", do_sample=True).user("Think.")
    handle = spawn(helper, number)
    found: list[Any] = [await chat.gen(max_new_tokens=2 + number % 11)]
    for turn in range(1 + number % 3):
        try:
            found.append(await tool(unreliable, 10 * number + turn, timeout=10))
        except ToolError:
            found.append("tool")
        try:
            found.append(await next(handle))
            await resume(handle, "Go on.")
        except AgentError:
            found.append("helper")
            break
    if number % 10 == 7:
        raise ValueError(f"worker {number} fails")
    yield found


@agent
async def crowd(agents: int) -> Any:
    """Start all workers, cancel some, and return what has become of each."""
    handles = [spawn(worker, number) for number in range(agents)]
    await tool(asyncio.sleep, 0.02)
    for handle in handles[::9]:
        cancel(handle)
    results: list[Any] = []
    for handle in handles:
        try:
            results.append(await next(handle))
        except (AgentCancelledError, AgentError) as error:
            results.append(type(error))
    yield results


@pytest.mark.slow
def test_nothing_is_lost_or_left_when_agents_fail_time_out_and_are_cancelled() -> None:
    model, tokenizer = small_model()
    with Engine(model, tokenizer, max_rows=32, max_waiting=64) as engine:
        first, second = (Runtime(engine).run(crowd, 40).value for _ in range(2))
        wait_until_idle(engine)
    assert {AgentError, AgentCancelledError} < {type(one) if isinstance(one, list) else one for one in first}
    assert all(one == two for one, two in zip(first, second, strict=True) if list is type(one) is type(two))


def test_runs_are_reproducible_where_the_generation_config_samples() -> None:
    @agent
    async def asks() -> Any:
        return await Chat().user("Hello").gen(max_new_tokens=8)

    model, tokenizer = small_model()
    model.generation_config.do_sample = True
    with Engine(model, tokenizer) as engine:
        values = [Runtime(engine, seed=seed, logits_cache=False).run(asks).value for seed in (0, 0, 1, 2)]
    assert values[0] == values[1]
    assert len(set(values)) > 1


def test_several_samples_are_one_request_with_the_same_texts_each_time(engine: Engine, tmp_path: Path) -> None:
    @agent
    async def asks() -> Any:
        chat = Chat(**SAMPLED).user("q")
        texts = await chat.sample(3)
        return [*texts, await chat.gen()], chat.messages

    requests = engine.stats.finished
    first = Runtime(engine).run(asks, record=tmp_path / "run.jsonl")
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
    assert Runtime().run(asks, record=tmp_path / "run.jsonl").value == first.value


def test_the_number_of_samples_is_checked(engine: Engine) -> None:
    @agent
    async def asks(n: Any, **settings: Any) -> Any:
        return await Chat(**settings, **SAMPLED).user("q").sample(n)

    for n in (0, 1.5, "2"):
        with pytest.raises(AgentError, match="n must be"):
            Runtime(engine).run(asks, n)
    with pytest.raises(AgentError, match="num_return_sequences=3 differs from n=2"):
        Runtime(engine).run(asks, 2, num_return_sequences=3)


def test_a_recording_of_other_weights_raises(tmp_path: Path) -> None:
    model, tokenizer = small_model()
    path = tmp_path / "run.jsonl"
    with Engine(model, tokenizer) as engine:
        first = Runtime(engine).run(talk, "birds", record=path)
        assert Runtime(engine).run(talk, "birds", record=path).stats.replayed_completions == 3
        model.get_output_embeddings().weight.data[5, 3] += 1
        with pytest.raises(ValueError, match=r"run\.jsonl was recorded with another model, or with other weights"):
            Runtime(engine).run(talk, "birds", record=path)
        lines = path.read_text().splitlines(keepends=True)
        path.write_text('{"format": "hf_parallel agents recording 1", "seed": 0}\n' + "".join(lines[1:]))
        assert Runtime(engine).run(talk, "birds", record=path).value == first.value  # of an older version
