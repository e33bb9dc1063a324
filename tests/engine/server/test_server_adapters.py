"""LoRA adapters over HTTP: each is a model of its own for clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_server import CHAT, MODEL, command, generated, served, small_model, stream

from hf_parallel.cli.main import main
from hf_parallel.engine import Engine
from hf_parallel.models.loading.adapters import load_adapters

peft = pytest.importorskip("peft")
openai = pytest.importorskip("openai")
pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = ("formal", "sql-lora")


def saved_adapters(folder: Path, **settings: Any) -> dict[str, str]:
    """Save a random adapter of the small model for each name. Return their folders."""
    settings = {"target_modules": "all-linear", "init_lora_weights": False, "lora_alpha": 64, **settings}
    for seed, name in enumerate(NAMES):
        model, _ = small_model()
        torch.manual_seed(seed)
        lora = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
        peft.get_peft_model(model, lora).save_pretrained(folder / name)
    return {name: str(folder / name) for name in NAMES}


def expected(paths: dict[str, str]) -> dict[str, str]:
    """Return the answer of each model, by plain `generate` of a PEFT model."""
    answers = {MODEL: generated(small_model(), "Hello", 12)}
    for name, path in paths.items():
        model, tokenizer = small_model()
        answers[name] = generated((peft.PeftModel.from_pretrained(model, path), tokenizer), "Hello", 12)
    assert len({*answers.values()}) == 3
    return answers


def test_a_client_names_an_adapter_as_the_model(tmp_path: Path) -> None:
    paths = saved_adapters(tmp_path)
    answers = expected(paths)
    model, tokenizer = small_model()
    with Engine(load_adapters(model, paths), tokenizer) as engine, served(engine, adapters=paths) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        cards = {card.id: card for card in client.models.list()}
        assert [*cards] == [MODEL, *NAMES]
        assert [(card.root, card.parent) for card in cards.values()] == [
            (MODEL, None),
            *((paths[name], MODEL) for name in NAMES),
        ]
        assert client.models.retrieve(NAMES[1]).id == NAMES[1]
        for round_number in range(2):
            for name, text in answers.items():
                answer = client.chat.completions.create(model=name, messages=CHAT, temperature=0, max_tokens=12)
                assert (answer.model, answer.choices[0].message.content) == (name, text)
                assert bool(answer.usage.prompt_tokens_details.cached_tokens) == bool(round_number)
        chunks = stream(server, model=NAMES[0], messages=CHAT)
        assert {chunk["model"] for chunk in chunks[:-1]} == {NAMES[0]}
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks[:-1]) == answers[NAMES[0]]
        assert client.responses.create(model=NAMES[1], input="Hello", max_output_tokens=4).model == NAMES[1]
        with pytest.raises(openai.NotFoundError, match="must be one of .*'sql-lora'.*, got 'other'") as error:
            client.chat.completions.create(model="other", messages=CHAT)
        assert error.value.code == "model_not_found"


@pytest.mark.slow
def test_the_command_serves_adapters(tmp_path: Path) -> None:
    for part in small_model():
        part.save_pretrained(tmp_path / "tiny")
    paths = saved_adapters(tmp_path)
    answers = expected(paths)
    options = [f"--lora={name}={path}" for name, path in paths.items()]
    with command(tmp_path / "tiny", options=options) as (_, url):
        client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0)
        for name in ("tiny", *NAMES):
            answer = client.chat.completions.create(model=name, messages=CHAT, temperature=0, max_tokens=12)
            assert answer.choices[0].message.content == answers[MODEL if name == "tiny" else name]


def test_adapters_that_cannot_be_served_raise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for options in (["formal"], ["=a"], ["a=x", "a=y"], ["SmolLM2-135M-Instruct=x"]):
        assert main(["serve", *(f"--lora={option}" for option in options)]) == 2
        assert "--lora must be NAME=PATH" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    Path("loras").mkdir()
    assert main(["serve", "--lora=x=loras"]) == 2
    assert "--lora x: loras: this folder must contain adapter_config.json" in capsys.readouterr().err
    paths = saved_adapters(tmp_path, modules_to_save=["lm_head"])
    with pytest.raises(ValueError, match="modules_to_save"):
        load_adapters(small_model()[0], paths)
    with pytest.raises(ValueError, match="name must have no"):
        load_adapters(small_model()[0], {"v1.5": paths["formal"]})
    tuning = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    peft.get_peft_model(small_model()[0], tuning).save_pretrained(tmp_path / "tuned")
    with pytest.raises(ValueError, match="must be a LoRA adapter, got .*PROMPT_TUNING"):
        load_adapters(small_model()[0], {"tuned": str(tmp_path / "tuned")})
    lora = peft.get_peft_model(small_model()[0], peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    lora.save_pretrained(tmp_path / "embeddings", save_embedding_layers=True)
    with pytest.raises(ValueError, match="weights of LoRA only, got .*embed_tokens"):
        load_adapters(small_model()[0], {"embeddings": str(tmp_path / "embeddings")})
