"""Interfaces serve a model whose layers keep states like any other: the texts and scores of plain `generate`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import hybrids
import pytest
import tiny
import torch
from serving import served
from small_tokenizers import make
from tensor_parallel_rank import sequences
from transformers import AutoModelForCausalLM, pipeline
from transformers.utils import logging

import hf_parallel.pipelines
from hf_parallel.agents import Chat, Runtime, agent
from hf_parallel.engine import Engine
from hf_parallel.hub import export

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


def test_the_pipeline_generates_what_generate_does(served_model: tuple[Any, Any]) -> None:
    model, tokenizer = served_model
    results = pipeline("parallel-text-generation", model=model, tokenizer=tokenizer)(
        QUESTIONS, generation_mode="shared_prefix", return_tensors=True, batch_size=2, **GREEDY
    )
    prompts = [tokenizer(text, return_tensors="pt")["input_ids"] for text in QUESTIONS]
    expected = [model.generate(prompt, **GREEDY)[0].tolist() for prompt in prompts]
    assert [record["generated_token_ids"] for (record,) in results] == expected


def test_lm_eval_scores_equal_those_of_hf(served_model: tuple[Any, Any]) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from hf_parallel.evaluation.lm_eval import ParallelLM

    model, tokenizer = served_model
    pairs = [("Oslo or Rome? Answer:", " Oslo"), ("Oslo or Rome? Answer:", " Rome it is"), ("Oslo", " or Rome")]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    expected = HFLM(model, tokenizer=tokenizer, batch_size=1).loglikelihood(requests, disable_tqdm=True)
    found = ParallelLM(model, tokenizer=tokenizer).loglikelihood(requests, disable_tqdm=True)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in expected]
    assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], rel=1e-5)


def test_a_repository_runs_its_mode(served_model: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = copy.deepcopy(served_model[0]), served_model[1]
    model.generation_config.generation_mode = "shared_prefix"
    ids = tokenizer(QUESTIONS[1], return_tensors="pt")["input_ids"]
    loaded = AutoModelForCausalLM.from_pretrained(export(model, tmp_path, tokenizer=tokenizer))
    custom = {"custom_generate": str(tmp_path), "trust_remote_code": True, "return_dict_in_generate": True}
    out = loaded.generate(ids, **custom, **GREEDY)
    assert out.stats.state_bytes > 0
    assert torch.equal(out.sequences, served_model[0].generate(ids, **GREEDY))


def test_a_model_with_a_layer_on_disk_generates_the_same_tokens(tmp_path: Path) -> None:
    model = copy.deepcopy(tiny.build("lfm2"))
    model.save_pretrained(tmp_path / "model")
    places = {f"model.{name}": "cpu" for name, _ in model.model.named_children()} | {"lm_head": "cpu"}
    del places["model.layers"]
    places |= {f"model.layers.{number}": "cpu" for number in range(1, 4)} | {"model.layers.0": "disk"}
    load = {"dtype": torch.float32, "device_map": places, "offload_folder": tmp_path / "disk"}
    offloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model", **load)
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    modes = ["shared_prefix", "self_consistency"]
    assert sequences(offloaded, modes) == sequences(model, modes)


@pytest.mark.parametrize("name", ["mamba2", "lfm2"])
def test_states_of_other_adapters_or_weights_are_not_continued(name: str) -> None:
    model, kept = hf_parallel.enable(copy.deepcopy(tiny.build(name))), hf_parallel.SharedPrefixCache()
    call = {"generation_mode": "shared_prefix", "past_key_values": kept, **GREEDY}
    ids, layer = torch.tensor([[5, 6, 7, 8]]), model.get_input_embeddings()
    layer.active_adapters, layer.merged_adapters = ["one"], []  # as a layer of PEFT has them
    model.generate(ids, **call)
    layer.active_adapters = ["two"]
    with pytest.raises(ValueError, match="before the model's weights changed"):
        model.generate(ids, **call)
    layer.active_adapters = ["one"]
    model.generate(ids, **call)
    with torch.no_grad():
        next(model.parameters()).mul_(1.01)
    with pytest.raises(ValueError, match="before the model's weights changed"):
        model.generate(ids, **call)


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
