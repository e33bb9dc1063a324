"""Interfaces serve a model whose layers keep states like any other: the texts and scores of plain `generate`."""

from __future__ import annotations

import copy
from typing import Any

import hybrids
import pytest
import tiny
import torch
from serving import served
from small_tokenizers import make
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import hf_parallel.pipelines
from hf_parallel.agents import Chat, Runtime, agent
from hf_parallel.engine import Engine

pytestmark = pytest.mark.usefixtures("one_thread")
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
QUESTIONS = ["Hello", "Oslo or Rome?"]
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def served_model() -> tuple[Any, Any]:
    """A model with states, and a tokenizer with a chat template."""
    tokenizer = copy.deepcopy(make("byte_level"))
    tokenizer.chat_template, tokenizer.padding_side = TEMPLATE, "left"
    architecture = hybrids.ARCHITECTURES["lfm2"]
    model = AutoModelForCausalLM.from_config(architecture.config(vocab_size=len(tokenizer)))  # type: ignore[call-arg]
    tiny.draw_weights(model, architecture, 0)
    return model.eval(), tokenizer


def answer(served_model: tuple[Any, Any], *texts: str) -> str:
    """Return the answer to a chat of these messages by plain `generate`."""
    model, tokenizer = served_model
    chat = [{"role": "user", "content": text} for text in texts]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**prompt, **GREEDY)
    return tokenizer.decode(ids[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_server_answers_as_generate(served_model: tuple[Any, Any]) -> None:
    with Engine(*served_model) as engine, served(engine) as server:
        for text in QUESTIONS:
            assert server.chat(text)["choices"][0]["message"]["content"] == answer(served_model, text)


def test_agents_fork_conversations(served_model: tuple[Any, Any]) -> None:
    @agent
    async def ask() -> Any:
        chat = Chat(**GREEDY).user(QUESTIONS[0])
        first = await chat.gen()
        yield first, [await branch.user(text).gen() for branch, text in zip(chat.fork(2), QUESTIONS, strict=True)]

    with Engine(*served_model) as engine:
        first, branches = Runtime(engine).run(ask).value
    assert first == answer(served_model, QUESTIONS[0])
    assert branches == [answer(served_model, QUESTIONS[0], first, text) for text in QUESTIONS]


def test_compiled_decode_runs_eagerly_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = hf_parallel.enable(copy.deepcopy(tiny.build("lfm2"))), torch.tensor([[5, 6, 7, 8]])
    call = {"generation_mode": "shared_prefix", "return_dict_in_generate": True, **GREEDY}
    logging.get_logger().warning_once.cache_clear()
    with caplog.at_level("WARNING"):
        outputs = [model.generate(ids, compile=compiles, **call) for compiles in (False, True, True)]
    assert caplog.text.count("decode steps of layers that keep a state run eagerly") == 1
    assert all(torch.equal(out.sequences, outputs[0].sequences) for out in outputs)
    assert all(out.stats.compiled_passes == 0 for out in outputs)


def test_states_under_tensor_parallelism_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny.build("lfm2"))
    monkeypatch.setattr(type(model), "tp_size", 2)
    with pytest.raises(hf_parallel.UnsupportedModelError, match=r"\.0\.conv, which tensor parallelism would divide"):
        hf_parallel.enable(model)
