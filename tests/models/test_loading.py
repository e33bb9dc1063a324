"""Loading models by name."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tiny
import torch
from hub_server import running_hub

import hf_parallel
from hf_parallel.models.loading import load as loading
from hf_parallel.models.loading import load_model


def test_errors_of_a_reachable_hub_are_those_of_from_pretrained(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def from_pretrained(name: str) -> None:
        loaded.append(name)
        raise OSError("error of the Hub")

    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", from_pretrained)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with running_hub() as hub:
        hub.repositories["somebody/adapter"] = [{"adapter_config.json": b"{}"}]
        monkeypatch.setattr(loading, "hf_hub_url", lambda name, file: f"{hub.endpoint}/{name}/resolve/main/{file}")
        for name in ("nobody/nothing", "somebody/adapter"):
            with pytest.raises(OSError, match="error of the Hub"):
                load_model(name)
    assert loaded == ["nobody/nothing", "somebody/adapter"]


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, torch.float32), (None, torch.bfloat16)])
def test_a_folder_is_loaded_without_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None, expected: torch.dtype
) -> None:
    tiny.build("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", lambda name: name)
    monkeypatch.setattr(loading, "get_hf_file_metadata", lambda url: pytest.fail("the Hub was requested"))
    model, tokenizer = load_model(str(tmp_path), dtype)
    assert (model.dtype, model.training, tokenizer) == (expected, False, str(tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (False, "name .*folder: this folder must contain config.json or adapter_config.json"),
        (True, "the tokenizer of '.*folder' cannot be loaded: "),
    ],
)
def test_a_folder_without_a_model_or_tokenizer_is_named(tmp_path: Path, config: bool, message: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    if config:
        tiny.build("llama").config.save_pretrained(folder)
    with pytest.raises(ValueError, match=message):
        load_model(str(folder))


@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_a_quantized_model_gives_its_own_tokens_in_a_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    pytest.importorskip("torchao")
    from torchao.core.config import config_to_dict
    from torchao.quantization import Int8WeightOnlyConfig

    tiny.build("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", lambda name: name)
    weights = {"quant_method": "torchao", "quant_type": {"default": config_to_dict(Int8WeightOnlyConfig())}}
    model: Any = load_model(str(tmp_path), device=device, weights=weights)[0]
    model.save_pretrained(tmp_path / "quantized")
    saved: Any = load_model(str(tmp_path / "quantized"), device=device)[0]  # needs no option
    ids = torch.stack(tiny.make_prompts([9, 9], seed=1))
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids, **given)
    for quantized in (model, saved):
        assert type(quantized.model.layers[0].self_attn.q_proj.weight).__module__.startswith("torchao")
        found = hf_parallel.enable(quantized).generate(ids, generation_mode="shared_prefix", **given)
        assert torch.equal(found, plain)


def test_a_model_is_placed_by_accelerate_and_bad_weights_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.build("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", lambda name: name)
    assert load_model(str(tmp_path), device="auto")[0].device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    with pytest.raises(ValueError, match="nope"):
        load_model(str(tmp_path), weights={"quant_method": "nope"})
    given = {"bitsandbytes": {"load_in_4bit": True}, "gptq": {"bits": 4}, "quanto": {"weights": "int8"}}
    for method, package in (("bitsandbytes", "bitsandbytes"), ("gptq", "optimum"), ("quanto", "optimum-quanto")):
        if find_spec(package.partition("-")[0]) is None:
            with pytest.raises(ImportError, match=f"pip install .*{package}"):
                load_model(str(tmp_path), weights={"quant_method": method, **given[method]})
    with pytest.raises(
        ValueError, match="weights must be 'packed', 'packed_int8', a quantization config or None, got 'int8'"
    ):
        load_model(str(tmp_path), weights="int8")
    with pytest.raises(ValueError, match="the demo model takes no .*device='auto'"):
        load_model(None, device="auto")
