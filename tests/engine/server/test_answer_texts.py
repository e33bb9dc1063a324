"""Texts of answers: without the tokens that end them and without special tokens, and cut at stop texts.

Stop texts are searched in the text that the client sees.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import small_tokenizers
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

pytest.importorskip("fastapi")
openai = pytest.importorskip("openai")

from position_model import writing_model  # noqa: E402
from serving import MODEL, check_error, served  # noqa: E402

from hf_parallel.engine import Engine  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

TURN = "<end_of_turn>"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
CHAT = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request: Any) -> Any:
    """A tokenizer with special tokens that are not in `all_special_ids`."""
    made = copy.deepcopy(small_tokenizers.make(request.param))
    names = [TURN, "[TOOL_CALLS]"]
    made.backend_tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    made.chat_template = TEMPLATE
    return made


@contextmanager
def writing(tokenizer: Any, script: list[int], prompt: Any, tools: Any = None, **settings: Any) -> Iterator[Any]:
    """Yield a client of a server whose model writes a script after a prompt, a text or a chat with tools."""
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(prompt, tools=tools, add_generation_prompt=True, tokenize=False)
    model = writing_model(tokenizer, script, len(encode(tokenizer, prompt)))
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    with Engine(model, tokenizer) as engine, served(engine) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


@pytest.mark.parametrize("kind", ["call", "JSON", "text"])
def test_the_token_that_ends_a_turn_is_no_part_of_its_answer(kind: str, tokenizer: Any) -> None:
    """Of whole and streamed answers, an answer in JSON, and a call of a tool."""
    if kind == "JSON" and "{" not in tokenizer.get_vocab():
        pytest.skip("the tokenizer has no token of a brace")
    text = {"text": "An ten", "JSON": '{"a":1}', "call": '[TOOL_CALLS][{"name": "now", "arguments": {}}]'}[kind]
    more: dict[str, Any] = {"JSON": {"response_format": {"type": "json_object"}}, "call": {"tools": TOOLS}}.get(
        kind, {}
    )
    if kind == "call":
        tokenizer.chat_template += "{% if tools %}{{ tools | tojson }}{% endif %}{# [TOOL_CALLS] #}"
    end = tokenizer.convert_tokens_to_ids(TURN)
    script = [*encode(tokenizer, text), end]
    arguments = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 60, **more}
    ends = [tokenizer.eos_token_id, end]
    with writing(tokenizer, script, CHAT, more.get("tools"), eos_token_id=ends) as client:
        answer = client.chat.completions.create(**arguments)
        chunks = list(client.chat.completions.create(**arguments, stream=True))
    message = answer.choices[0].message
    deltas = [chunk.choices[0].delta for chunk in chunks]
    if kind == "call":
        assert [call.function.name for call in message.tool_calls] == ["now"]
        assert message.content is None
        assert [call.function.name for delta in deltas for call in delta.tool_calls or ()] == ["now"]
    else:
        expected = tokenizer.decode(script, skip_special_tokens=True)
        assert message.content == expected
        assert "".join(delta.content or "" for delta in deltas) == expected


@pytest.mark.parametrize(
    ("texts", "stop"),
    [
        (("An ", TURN, "ten, then end it"), "end"),
        (("An", TURN, "ten<x"), "<"),
        (("foo", TURN, "bar and so on"), None),
        (("😀😀😀😀😀😀😀😀 An. And",), "An."),
        (("An 😀😀🦊😀😀😀",), "🦊"),
        (("An ", TURN, "ten"), TURN),
    ],
)
def test_an_answer_ends_at_the_stop_text_that_the_client_sees(
    texts: tuple[str, ...], stop: str | None, tokenizer: Any
) -> None:
    """At the token that completes it, whatever hidden tokens and bytes come before; a stop may name a special token."""
    script = [token for text in texts for token in encode(tokenizer, text)]
    prompt = encode(tokenizer, "the")
    begin = len(tokenizer.decode(prompt))
    stop = (
        stop or tokenizer.decode(prompt + script, skip_special_tokens=True)[begin + 1 :][:5]
    )  # around the special one
    wholes = [prompt + script[:end] for end in range(len(script) + 1)]  # the answer continues the prompt
    prefixes = [tokenizer.decode(whole, skip_special_tokens=stop != TURN)[begin:] for whole in wholes]
    used = next(end for end, prefix in enumerate(prefixes) if stop in prefix)
    arguments = {"model": MODEL, "prompt": "the", "temperature": 0, "max_tokens": 100, "stop": [stop]}
    with writing(tokenizer, script, "the") as client:
        answer = client.completions.create(**arguments)
        streamed = list(client.completions.create(**arguments, stream=True))
    assert answer.choices[0].text == prefixes[used][: prefixes[used].index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == used
    assert "".join(chunk.choices[0].text for chunk in streamed) == answer.choices[0].text


@pytest.mark.parametrize("tokenizer", ["byte_level"], indirect=True)
def test_an_answer_in_json_ends_though_the_generation_config_names_no_end(tokenizer: Any) -> None:
    """By the tokenizer's token; if it has none either, the error says so."""
    script = [*encode(tokenizer, '{"a":1}'), tokenizer.eos_token_id]
    body = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 60}
    body["response_format"] = {"type": "json_object"}
    with writing(tokenizer, script, CHAT, eos_token_id=None) as client:
        answer = client.chat.completions.create(**body)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.content == tokenizer.decode(script, skip_special_tokens=True)
        assert answer.usage.completion_tokens == len(script)
    tokenizer.eos_token = None
    with (
        writing(tokenizer, script, CHAT, eos_token_id=None) as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        client.chat.completions.create(**body)
    assert "needs a token that ends the answer" in check_error(caught.value.response, 400)["message"]


def test_an_empty_text_is_a_prompt_where_the_tokenizer_begins_texts_with_a_token() -> None:
    tokenizer = copy.deepcopy(small_tokenizers.make("sentencepiece"))
    begin = tokenizer.bos_token
    pair = begin, tokenizer.convert_tokens_to_ids(begin)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=[pair])
    script = encode(tokenizer, "hello world")
    with Engine(writing_model(tokenizer, script, 1), tokenizer) as engine, served(engine) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)
        answer = client.completions.create(model=MODEL, prompt="", max_tokens=len(script), temperature=0)
    assert answer.choices[0].text == "hello world"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 1


@pytest.mark.parametrize("tokenizer", ["byte_level"], indirect=True)
def test_a_choice_without_a_token_has_an_empty_list_of_log_probabilities(tokenizer: Any) -> None:
    """Its first token ends it, or is a stop text."""
    script = encode(tokenizer, "ten")
    stop = tokenizer.decode(script[:1])
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    with writing(tokenizer, script, CHAT) as client:
        settings = {"model": MODEL, "temperature": 0, "max_tokens": 20, "stop": stop}
        chat = client.chat.completions.create(messages=CHAT, logprobs=True, top_logprobs=2, **settings).choices[0]
        text = client.completions.create(prompt=prompt, logprobs=2, **settings).choices[0]
        silent = client.completions.create(prompt=prompt, **settings).choices[0]
    assert (chat.message.content, chat.logprobs.content) == ("", [])
    assert (text.text, text.logprobs.tokens, text.logprobs.token_logprobs) == ("", [], [])
    assert silent.logprobs is None
    with writing(tokenizer, [tokenizer.eos_token_id], CHAT) as client:
        text = client.completions.create(model=MODEL, prompt=prompt, temperature=0, logprobs=1).choices[0]
    assert (text.text, len(text.logprobs.tokens)) == ("", 1)
