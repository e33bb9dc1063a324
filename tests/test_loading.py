"""Models by their names, as the commands, the demo and the benchmarks take them."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest
import tiny
import torch
from hub_server import running_hub

from hf_parallel.models import loading
from hf_parallel.models.loading import load_model


@pytest.mark.parametrize("network", [False, True])
def test_a_model_that_is_nowhere_is_said_at_once(monkeypatch: pytest.MonkeyPatch, network: bool) -> None:
    """Offline, and where nobody listens; `from_pretrained` is not asked, which would try for a minute."""
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", lambda name: pytest.fail("it was loaded"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", not network)
    monkeypatch.setattr(loading, "hf_hub_url", lambda *names: "http://127.0.0.1:9/config.json")
    with pytest.raises(ValueError, match="there is no folder 'nobody/nothing', nothing of it is in the Hub's cache"):
        load_model("nobody/nothing")


def test_a_hub_that_answers_has_its_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def from_pretrained(name: str) -> None:
        asked.append(name)
        raise OSError("what the Hub says")

    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", from_pretrained)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with running_hub() as hub:
        hub.repositories["somebody/adapter"] = [{"adapter_config.json": b"{}"}]
        monkeypatch.setattr(loading, "hf_hub_url", lambda name, file: f"{hub.endpoint}/{name}/resolve/main/{file}")
        for name in ("nobody/nothing", "somebody/adapter"):
            with pytest.raises(OSError, match="what the Hub says"):
                load_model(name)
    assert asked == ["nobody/nothing", "somebody/adapter"]


@pytest.mark.parametrize(("asked", "given"), [(torch.float32, torch.float32), (None, torch.bfloat16)])
def test_a_folder_is_loaded_without_asking_anybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: torch.dtype | None, given: torch.dtype
) -> None:
    tiny.build("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", lambda name: name)
    monkeypatch.setattr(loading, "_check_hub", lambda name: pytest.fail("the Hub was asked"))
    model, tokenizer = load_model(str(tmp_path), asked)
    assert (model.dtype, model.training, tokenizer) == (given, False, str(tmp_path))
