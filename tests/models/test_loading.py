"""Loading models by name."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
import tiny
import torch
from hub_server import running_hub

from hf_parallel.models import loading
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
