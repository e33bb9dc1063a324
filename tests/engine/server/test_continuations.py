"""Continuations: an answer to an open text has the space before its first word, whatever the tokenizer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")

from serving import TEMPLATE, Served, served  # noqa: E402
from small_tokenizers import make, small_llama  # noqa: E402

from hf_parallel.detokenizer import IncrementalDetokenizer  # noqa: E402
from hf_parallel.engine import Engine  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=["sentencepiece", "byte_level"])
def speaking(request: Any) -> Iterator[tuple[Served, dict[str, Any]]]:
    """A server, and settings with which it answers with a word that has a space before it."""
    tokenizer = copy.deepcopy(make(request.param))
    tokenizer.chat_template = TEMPLATE
    word = min(token for name, token in tokenizer.get_vocab().items() if name[0] in "▁Ġ" and name[1:].isalpha())
    torch.manual_seed(0)
    with Engine(small_llama(tokenizer), tokenizer) as engine, served(engine) as running:
        yield running, {"logit_bias": {str(word): 100}, "max_tokens": 3, "temperature": 0}


def test_a_continued_text_has_the_space_before_its_first_word(speaking: tuple[Served, dict[str, Any]]) -> None:
    server, settings = speaking
    tokenizer = server.engine.tokenizer
    (word,) = map(int, settings["logit_bias"])
    ids = tokenizer("The city of")["input_ids"]
    expected = tokenizer.decode([*ids, word, word, word])[len(tokenizer.decode(ids)) :]
    assert expected.startswith(" ")
    for prompt in ("The city of", ids):
        choice = server.post("/v1/completions", prompt=prompt, logprobs=0, **settings).json()["choices"][0]
        assert choice["text"] == expected
        assert "".join(choice["logprobs"]["tokens"]) == expected
    echoed = server.post("/v1/completions", prompt="The city of", echo=True, **settings).json()["choices"][0]
    assert echoed["text"] == "The city of" + expected
    ask = {"role": "user", "content": "Name a city."}
    begun = [ask, {"role": "assistant", "content": "The city of"}]
    assert server.chat(messages=begun, **settings)["choices"][0]["message"]["content"] == expected
    responded = {**settings, "max_output_tokens": settings["max_tokens"]}
    del responded["max_tokens"]
    response = server.post("/v1/responses", input=begun, **responded).json()
    assert response["output"][0]["content"][0]["text"] == expected
    alone = tokenizer.decode([word, word, word])
    assert server.chat(messages=[ask], **settings)["choices"][0]["message"]["content"] == alone
    stopped = server.post("/v1/completions", prompt="The city of", stop=expected[:2], **settings).json()
    assert stopped["choices"][0]["text"] == ""
    assert stopped["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("kind", ["sentencepiece", "byte_level", "wordpiece"])
def test_the_text_of_a_continuation_is_what_the_whole_text_adds(kind: str) -> None:
    tokenizer = make(kind)
    ids = tokenizer("Let us look at Tom, Oslo or Rome 😀😀 10:30", add_special_tokens=False)["input_ids"]
    for cut in range(1, len(ids)):
        begun, whole = (tokenizer.decode(tokens, clean_up_tokenization_spaces=False) for tokens in (ids[:cut], ids))
        if "\ufffd" in begun:
            continue
        text = IncrementalDetokenizer(tokenizer, (), ids[:cut])
        assert "".join(text.add([token]) for token in ids[cut:]) + text.flush() == whole[len(begun) :]
        assert (text.text, text.tokens) == (whole[len(begun) :], ids[cut:])
    end = tokenizer.eos_token_id
    anew = IncrementalDetokenizer(tokenizer, {end}, [*ids, end])
    assert anew.add(ids[:4]) + anew.flush() == tokenizer.decode(ids[:4], clean_up_tokenization_spaces=False)
