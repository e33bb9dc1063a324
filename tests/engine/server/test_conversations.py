"""Conversations: the prompt is that of the model's chat template, or the error says what is wrong."""

from __future__ import annotations

import json
import random
import re
import string
from collections import Counter
from itertools import permutations
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from chat_templates import TEMPLATES  # noqa: E402
from serving import MODEL, check_error, small_model  # noqa: E402

from hf_parallel.engine import Engine  # noqa: E402
from hf_parallel.engine.server.errors import api_error  # noqa: E402
from hf_parallel.engine.server.limits import Limits  # noqa: E402
from hf_parallel.engine.server.openai.replies import Reply, ReplySpec, ToolCall  # noqa: E402
from hf_parallel.engine.server.openai.reply_formats import reply_format  # noqa: E402
from hf_parallel.engine.server.openai.responses_api import ResponseBody  # noqa: E402
from hf_parallel.engine.server.openai.schema import ChatBody, read_body  # noqa: E402
from hf_parallel.engine.server.openai.tokenization import TokenizeBody  # noqa: E402
from hf_parallel.engine.server.openai.tool_messages import ToolMessages  # noqa: E402
from hf_parallel.engine.server.openai.translator import Translator  # noqa: E402

READS_TOOLS = {"Llama 3", "Qwen 3", "Mistral"}
WRITES_CALLS = {*READS_TOOLS, "DeepSeek V3.1"}
WORDS = ("Oslo", "Köln", "数", "a b", "<think>x</think>y", "</tool_call>", "ARGUMENTS", "{x}", "line\nbreak", " space ")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 3)))


def content(rng: random.Random) -> Any:
    if rng.random() < 0.2:
        parts: list[Any] = [{"type": "text", "text": text(rng)} for _ in range(rng.randint(1, 2))]
        return [*parts, IMAGE] if rng.random() < 0.1 else parts
    return text(rng)


def called(rng: random.Random, most: int) -> list[dict[str, Any]]:
    """Return a message of the assistant with calls, and messages with their results."""
    calls, results = [], []
    for _ in range(rng.randint(1, most)):
        name = "".join(rng.choices(string.ascii_letters + string.digits, k=9))
        name = f"call_{name}" if rng.random() < 0.1 else name
        arguments = rng.choice(["", "{}", json.dumps({"city": text(rng), "days": [1, {"x": None}]})])
        function = {"name": rng.choice(["weather", "get_ARGUMENTS"]), "arguments": arguments}
        calls.append({"id": name, "type": "function", "function": function})
        results.append({"role": "tool", "tool_call_id": name, "content": content(rng)})
        if rng.random() < 0.3:
            results[-1]["name"] = function["name"]
    said = rng.choice([None, "", text(rng)])
    return [{"role": "assistant", "content": said, "tool_calls": calls}, *results]


def conversation(rng: random.Random) -> dict[str, Any]:
    """Return the body of a chat."""
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.4:
        messages.append({"role": rng.choice(["system", "developer"]), "content": content(rng)})
    most = rng.choice([1, 1, 3])
    for _ in range(rng.randint(1, 3)):
        messages.append({"role": "user", "content": content(rng)})
        if rng.random() < 0.4:
            messages += called(rng, most)
        if rng.random() < 0.9:
            messages.append({"role": "assistant", "content": text(rng)})
            if rng.random() < 0.3:
                messages[-1]["reasoning_content"] = text(rng)
    if rng.random() < 0.7 and messages[-1]["role"] == "assistant":
        messages.append({"role": "user", "content": content(rng)})
    for message in messages:
        if message["role"] in ("user", "assistant") and rng.random() < 0.2:
            message["name"] = rng.choice(["Anna", "Bo"])
    if rng.random() < 0.05:
        messages[rng.randrange(len(messages))]["role"] = "critic"
    if rng.random() < 0.05:
        messages = [message for message in messages if message["role"] != "tool"]
    body = {"model": MODEL, "messages": messages, "max_tokens": 1}
    if rng.random() < 0.4:
        body["tools"] = [{"type": "function", "function": {"name": "weather", "description": text(rng)}}]
    return body


def as_template(message: dict[str, Any], family: str) -> dict[str, Any]:
    """Return a message as the documentation of a template says."""
    message = json.loads(json.dumps(message))
    message["role"] = {"developer": "system"}.get(message["role"], message["role"])
    if not isinstance(message["content"], str):
        message["content"] = "".join(part["text"] for part in message["content"] or ())
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"] or "{}")
        is_text = family == "DeepSeek V3.1"
        call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False) if is_text else arguments
    return message


def compare(translator: Translator, family: str, body: dict[str, Any]) -> str:
    """Check the prompt of a conversation against `apply_chat_template`. Return what it was compared with."""
    tokenizer, messages, tools = translator.engine.tokenizer, body["messages"], body.get("tools")
    parsed = read_body(ChatBody, json.dumps(body).encode())
    prompt, refused = None, None
    try:
        prompt = translator.translate(parsed, parsed.prompts, "messages").prompt["input_ids"][0].tolist()
    except Exception as error:
        refused = api_error(error)
        if refused is None:
            raise
    assert refused is None or (refused.status == 400 and "messages" in str(refused)), refused
    if any(IMAGE in message["content"] for message in messages if isinstance(message["content"], list)):
        assert prompt is None
        return "image"
    if "tool_calls" in messages[-1]:
        assert prompt is None
        return "no results"
    has_calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
    if (not has_calls or family in WRITES_CALLS) and (not tools or family in READS_TOOLS):
        continues = messages[-1]["role"] == "assistant"
        try:
            expected = tokenizer.apply_chat_template(
                [as_template(message, family) for message in messages],
                tools=tools,
                **{"continue_final_message" if continues else "add_generation_prompt": True},
            )["input_ids"]
        except Exception:
            expected = None
        assert prompt == expected
        return "template" if expected else "error of the template"
    if prompt is None:
        return "error"
    check_written(tokenizer.decode(prompt), messages, tools or [], family in WRITES_CALLS)
    return "text"


def check_written(prompt: str, messages: list[dict[str, Any]], tools: list[Any], is_native: bool) -> None:
    """Check that tools, calls and results are in a prompt, in order; `is_native`: the template writes the calls."""
    place, end_think = 0, "</think>" if is_native else r"<\/think>"
    before, after = ("", "") if is_native else ("<tool_response>\n", "\n</tool_response>")
    for tool in tools:
        assert f'"name": "{tool["function"]["name"]}"' in prompt
    for message in messages:
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"] or "{}")
            for part in (call["function"]["name"], json.dumps(arguments, ensure_ascii=False)):
                place = prompt.index(part.replace("</think>", end_think), place) + len(part)
        if message["role"] == "tool":
            said = as_template(message, "")["content"]
            place = prompt.index(f"{before}{said}{after}", place)


def check(seeds: range) -> Counter[str]:
    model, tokenizer = small_model()
    found: Counter[str] = Counter()
    with Engine(model, tokenizer) as engine:
        for family, template in TEMPLATES.items():
            tokenizer.chat_template = template
            translator = Translator(engine, Limits(tokens=None))
            translator.prompts.max_tokens = 1 << 20  # the random model's context is short
            for seed in seeds:
                try:
                    found[compare(translator, family, conversation(random.Random(seed)))] += 1
                except BaseException as error:
                    raise AssertionError(f"{family}, seed {seed}") from error
    return found


def test_the_prompt_of_a_conversation_is_that_of_the_template_or_the_error_is_clear() -> None:
    found = check(range(20))
    assert found["template"] > sum(found.values()) / 3, found


@pytest.mark.slow
def test_the_prompts_of_many_conversations_are_those_of_the_templates() -> None:
    found = check(range(1000, 1300))
    assert found["template"] > sum(found.values()) / 3, found
    print(found)


@pytest.mark.parametrize("family", [family for family in TEMPLATES if family in WRITES_CALLS])
def test_a_call_of_the_server_has_an_id_for_the_next_turn(family: str) -> None:
    """Mistral's templates raise an error for ids that are not nine letters or digits."""
    model, tokenizer = small_model()
    tokenizer.chat_template = TEMPLATES[family]
    call = ToolCall(0, "weather", '{"city": "Oslo"}')
    assert call.id.isascii()
    assert call.id.isalnum()
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "tool_calls": [call.to_dict()]}]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "Snow."})
    with Engine(model, tokenizer) as engine:
        found = compare(Translator(engine, Limits()), family, {"model": MODEL, "messages": with_content(messages)})
    assert found == "template"


def test_results_in_any_order_follow_their_calls() -> None:
    """Many templates write no ids: the model reads the first result as that of the first call."""
    templates = {family: template for family, template in TEMPLATES.items() if family != "Llama 3"}  # takes one call
    model, tokenizer = small_model()
    cities, results = ("Oslo", "Roma", "Bari"), []
    calls = [ToolCall(place, "weather", json.dumps({"city": city})).to_dict() for place, city in enumerate(cities)]
    for call, city in zip(calls, cities, strict=True):
        results.append({"role": "tool", "tool_call_id": call["id"], "content": f"{city}: snow"})
    asked = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    items: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
    items += [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]
    prompts: dict[str, set[tuple[int, ...]]] = {}
    with Engine(model, tokenizer) as engine:
        for family, template in templates.items():
            tokenizer.chat_template = template
            translator = Translator(engine, Limits(tokens=None))
            translator.prompts.max_tokens = 1 << 20
            prompts[family] = set()
            for order in permutations(results):
                outputs = [
                    {"type": "function_call_output", "call_id": result["tool_call_id"], "output": result["content"]}
                    for result in order
                ]
                for body in (
                    ChatBody(model=MODEL, messages=[*asked, *order], max_tokens=1),
                    ResponseBody(model=MODEL, input=[*items, *outputs], max_output_tokens=1),
                ):
                    (prompt,) = translator.translate(body, body.prompts, body.prompt_field).prompt["input_ids"].tolist()
                    prompts[family].add(tuple(prompt))
                tokenized = TokenizeBody.model_validate({"messages": [*asked, *order]}).answer(translator)
                prompts[family].add(tuple(tokenized["tokens"]))
        (written,) = prompts["Qwen 3"]
        text = tokenizer.decode(written)
    assert sorted(cities, key=lambda city: text.index(f"{city}: snow")) == [*cities]
    assert {family: len(found) for family, found in prompts.items()} == dict.fromkeys(templates, 1)


def test_a_result_of_no_call_is_named(server: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    called = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "2", "content": "Snow."}
    output = {"type": "function_call_output", "call_id": "2", "output": "Snow."}
    for path, body in (
        ("/v1/chat/completions", {"messages": [*called, result]}),
        ("/v1/chat/completions", {"messages": [called[0], {**result, "tool_call_id": "1"}, *called[1:], result]}),
        ("/v1/responses", {"input": [called[0], output]}),
    ):
        error = check_error(server.post(path, **body), 400)
        assert re.search("there is no call before its result '[12]'", error["message"])
        assert error["param"] == [*body][0]
    assert server.chat(messages=[*called, {**result, "tool_call_id": "1"}], max_tokens=1)["choices"]
    without_ids = [{"role": "assistant", "tool_calls": [{"function": call["function"]}] * 2}]
    two = [{"role": "tool", "content": text} for text in ("a", "b")]
    assert server.chat(messages=[called[0], *without_ids, *two], max_tokens=1)["choices"]


def with_content(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"content": None, **message} for message in messages]


@pytest.mark.parametrize("family", [family for family in TEMPLATES if family not in READS_TOOLS])
def test_tools_are_described_in_the_format_in_which_calls_are_read(family: str) -> None:
    _, tokenizer = small_model()
    tokenizer.chat_template = TEMPLATES[family]
    form = reply_format(tokenizer)
    tools = [{"type": "function", "function": {"name": "function", "parameters": {}}}]
    (system, _), _ = ToolMessages.of(tokenizer, form).apply([{"role": "user", "content": "Hello"}], tools, {})
    example = system["content"].rpartition("arguments like this:\n")[2]
    assert [call.name for call in Reply(ReplySpec(form, tools), "").add(example, ends=True).calls] == ["function"]


def test_names_and_calls_of_responses_reach_the_template() -> None:
    said = [{"role": "assistant", "content": text, "name": "Bo"} for text in "AB"]
    assert ResponseBody(model=MODEL, input=said).conversation == said  # two texts are two messages
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": ""}
    called = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    output = {"type": "function_call_output", "call_id": "1", "output": "x"}
    assert ResponseBody(model=MODEL, input=[said[0], call, output]).conversation == [
        {**said[0], "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "x"},
    ]
