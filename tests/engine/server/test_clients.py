"""Clients of other projects get and stream the server's answers, and call tools, where they are installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from serving import MODEL, Served, served, small_model
from test_server import events

from hf_parallel.engine import Engine

httpx = pytest.importorskip("httpx2")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
SETTINGS = {"temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    model, tokenizer = small_model()
    model.config.max_position_embeddings = 2**14  # agents have long instructions
    with Engine(model, tokenizer) as engine, served(engine, api_keys=["key"]) as running:
        yield running


def smolagents(url: str) -> tuple[str, str]:
    library = pytest.importorskip("smolagents")
    model = library.OpenAIModel(model_id=MODEL, api_base=url, api_key="key", **SETTINGS)
    chat = [library.ChatMessage(one["role"], [{"type": "text", "text": one["content"]}]) for one in CHAT]
    return model.generate(chat).content, "".join(delta.content or "" for delta in model.generate_stream(chat))


def langchain(url: str) -> tuple[str, str]:
    library = pytest.importorskip("langchain_openai")
    model = library.ChatOpenAI(model=MODEL, base_url=url, api_key="key", **SETTINGS)
    return model.invoke(CHAT).content, "".join(chunk.content for chunk in model.stream(CHAT))


def litellm(url: str) -> tuple[str, str]:
    library = pytest.importorskip("litellm")
    given = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "key", "messages": CHAT, **SETTINGS}
    chunks = library.completion(**given, stream=True, stream_options={"include_usage": True})
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    return library.completion(**given).choices[0].message.content, streamed


def open_webui(url: str) -> tuple[str, str]:
    """Send requests of the shape that Open WebUI sends: models, an answer for a title, and a streamed chat."""
    headers = {"Authorization": "Bearer key", "X-OpenWebUI-User-Name": "User"}
    model = httpx.get(f"{url}/models", headers=headers).json()["data"][0]["id"]
    body: dict[str, Any] = {"model": model, "messages": CHAT, "stream": False, "temperature": 0}
    title = httpx.post(f"{url}/chat/completions", json=body | {"max_completion_tokens": 12}, headers=headers).json()
    body |= {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 12}
    with httpx.stream("POST", f"{url}/chat/completions", json=body, headers=headers) as response:
        *chunks, usage, done = events(response)
    assert usage["usage"]["completion_tokens"] <= 12
    assert done == "[DONE]"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    return title["choices"][0]["message"]["content"], text


@pytest.mark.parametrize("client", [smolagents, langchain, litellm, open_webui])
def test_a_client_gets_and_streams_the_answer(server: Served, client: Callable[[str], tuple[str, str]]) -> None:
    headers = {"Authorization": "Bearer key"}
    response = server.post("/v1/chat/completions", headers, messages=CHAT, **SETTINGS).json()
    answer = response["choices"][0]["message"]["content"]
    assert answer
    assert client(f"{server.url}/v1") == (answer, answer)


# Tools: a call that the model has to write, and its result in the next request

CITIES = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Weather of a city.", "parameters": CITIES}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "weather"}}
RESULT = "Snow falls."
Calls = list[tuple[str, dict[str, str]]]


def smolagents_tools(url: str) -> tuple[Calls, str]:
    """Run a `ToolCallingAgent`, whose steps must call the tool. Return its calls and its last messages."""
    library = pytest.importorskip("smolagents")

    class Weather(library.Tool):  # type: ignore[name-defined,misc]
        name, description, output_type = "weather", FUNCTION["description"], "string"
        inputs = {"city": {"type": "string", "description": "A city.", "enum": ["Rome", "Oslo"]}}  # noqa: RUF012

        def forward(self, city: str) -> str:
            return RESULT

    model = library.OpenAIModel(MODEL, url, api_key="key", temperature=0, max_tokens=100, tool_choice=NAMED)
    agent = library.ToolCallingAgent([Weather()], model, max_steps=2, verbosity_level=0)
    steps = [step for step in agent.run("How is the weather?", stream=True) if isinstance(step, library.ActionStep)]
    calls = [(call.name, call.arguments) for step in steps for call in step.tool_calls or ()]
    assert [step.observations for step in steps[:1]] == [RESULT]
    return calls, str(steps[1].model_input_messages)


def langchain_tools(url: str) -> tuple[Calls, str]:
    library = pytest.importorskip("langchain_openai")
    from langchain_core.messages import ToolMessage

    plain = library.ChatOpenAI(model=MODEL, base_url=url, api_key="key", temperature=0, max_tokens=100)
    model = plain.bind_tools([TOOL], tool_choice="weather")
    message, streamed = model.invoke(CHAT), None
    for chunk in model.stream(CHAT):
        streamed = chunk if streamed is None else streamed + chunk
    calls = [(call["name"], call["args"]) for one in (message, streamed) for call in one.tool_calls]
    again = [*CHAT, message, ToolMessage(RESULT, tool_call_id=message.tool_calls[0]["id"])]
    assert plain.invoke(again).usage_metadata["input_tokens"] > plain.invoke(CHAT).usage_metadata["input_tokens"]
    return calls, str(again)


def litellm_tools(url: str) -> tuple[Calls, str]:
    library = pytest.importorskip("litellm")
    given = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "key", "temperature": 0, "max_tokens": 100}
    given |= {"tools": [TOOL], "tool_choice": NAMED}
    message = library.completion(messages=CHAT, **given).choices[0].message
    whole = library.stream_chunk_builder(list(library.completion(messages=CHAT, **given, stream=True)))
    found = [*message.tool_calls, *whole.choices[0].message.tool_calls]
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in found]
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}
    again = [*CHAT, message.model_dump(), result]
    assert library.completion(messages=again, **{**given, "tool_choice": "none"}).choices[0].finish_reason
    return calls, str(again)


@pytest.mark.parametrize("client", [smolagents_tools, langchain_tools, litellm_tools])
def test_a_client_reads_calls_and_sends_back_their_results(
    server: Served, client: Callable[[str], tuple[Calls, str]]
) -> None:
    pytest.importorskip("llguidance")
    calls, messages = client(f"{server.url}/v1")
    assert len(calls) >= 2
    assert all(name == "weather" and arguments["city"] in ("Rome", "Oslo") for name, arguments in calls)
    assert RESULT in messages


def test_best_of_n_as_optillm_requests_it(server: Served) -> None:
    """Several answers in one request, then a request that rates each of them."""
    headers = {"Authorization": "Bearer key"}
    body = {"messages": CHAT, "max_tokens": 16, "n": 3, "temperature": 1}
    answers = [one["message"] for one in server.post("/v1/chat/completions", headers, **body).json()["choices"]]
    assert len({answer["content"] for answer in answers}) == 3
    for answer in answers:
        rules = {"role": "system", "content": "Rate the response from 0 to 10."}
        ask = {"role": "user", "content": "Rate the above response:"}
        rated = {"messages": [*CHAT, rules, answer, ask], "max_tokens": 8, "n": 1, "temperature": 0.1}
        response = server.post("/v1/chat/completions", headers, **rated).json()
        assert response["choices"][0]["message"]["content"]
        assert response["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_long_chat_as_aider_sends_it_reads_each_turn_from_the_cache(server: Served) -> None:
    """Examples, files and the chat so far come again with each streamed request."""
    headers, chat = {"Authorization": "Bearer key"}, [*CHAT, {"role": "assistant", "content": "Ok."}]
    chat.append({"role": "user", "content": "These are the files:\n" + "def f(x):\n    return x\n" * 40})
    chat.append({"role": "assistant", "content": "Ok, any changes I propose will be to those files."})
    before = 0
    for turn in range(4):
        chat.append({"role": "user", "content": f"Change {turn}."})
        body = {"model": MODEL, "messages": chat, "temperature": 0, "stream": True, "max_tokens": 12}
        body["stream_options"] = {"include_usage": True}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, headers=headers) as response:
            *chunks, last, _ = events(response)
        chat.append(
            {"role": "assistant", "content": "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)}
        )
        usage = last["usage"]
        assert turn == 0 or usage["prompt_tokens_details"]["cached_tokens"] >= before
        before = usage["prompt_tokens"]
