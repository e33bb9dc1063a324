"""The embedded model: loading, conversion (once, atomically), and errors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from forked import exit_status
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel.models.loading import embedded as embedded_module
from hf_parallel.models.loading.embedded import load_embedded_model


class TinyConversion:
    """Replaces the conversion: writes a tiny random model and counts its calls."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.calls = 0

    def __call__(self, gguf_file: Path, folder: Path) -> None:
        self.calls += 1
        config = LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
        LlamaForCausalLM(config).save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


@pytest.fixture
def tiny_conversion(embedded, monkeypatch):
    conversion = TinyConversion(embedded[1])
    monkeypatch.setattr(embedded_module, "_convert", conversion)
    return conversion


# Loading


def test_model_answers_a_question_through_its_chat_template(embedded):
    model, tokenizer = embedded
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=10, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])


# Conversion


def test_second_load_does_not_convert(tiny_conversion, tmp_path, capsys):
    load_embedded_model(cache_dir=tmp_path)
    assert capsys.readouterr().err.count("\n") == 1
    load_embedded_model(cache_dir=tmp_path)
    assert capsys.readouterr().err == ""
    assert tiny_conversion.calls == 1


def test_damaged_weights_name_the_folder_to_delete(tiny_conversion, tmp_path):
    load_embedded_model(cache_dir=tmp_path)
    weights = next(tmp_path.glob("*/model.safetensors"))
    os.truncate(weights, weights.stat().st_size // 2)
    with pytest.raises(RuntimeError, match="Delete the folder .*format2"):
        load_embedded_model(cache_dir=tmp_path)


def test_a_killed_conversion_leaves_no_folder_and_the_next_one_succeeds(tiny_conversion, monkeypatch, tmp_path):
    def killed(gguf_file: Path, folder: Path) -> None:
        (folder / "weights").write_bytes(b"01234")
        os._exit(9)

    with monkeypatch.context() as patch:
        patch.setattr(embedded_module, "_convert", killed)
        assert exit_status(lambda: load_embedded_model(cache_dir=tmp_path)) == 9
    load_embedded_model(cache_dir=tmp_path)
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1
