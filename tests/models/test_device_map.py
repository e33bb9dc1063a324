"""Models that accelerate spreads over CPU and disk generate the same tokens in all modes that need no cached logits."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import tiny
import torch
from mode_cases import BUILT_IN
from tensor_parallel_rank import sequences
from transformers import AutoModelForCausalLM

MODES = [mode for mode in BUILT_IN if mode != "resample"]
"""`LogitsCache` identifies a model by its weights, which are not there; see test_fingerprint.py."""
LAYERS = {
    "one layer on disk": {"model.layers.0": "disk", "model.layers.1": "cpu"},
    "all layers on disk": {"model.layers.0": "disk", "model.layers.1": "disk"},
}


@pytest.mark.parametrize("places", ["one layer on disk", pytest.param("all layers on disk", marks=pytest.mark.slow)])
def test_a_model_with_layers_on_disk_generates_the_same_tokens(tmp_path: Path, places: str) -> None:
    model = copy.deepcopy(tiny.build("llama"))
    model.save_pretrained(tmp_path / "model")
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model",
        dtype=torch.float32,
        device_map={**rest, **LAYERS[places]},
        offload_folder=tmp_path / "disk",
    )
    assert any(parameter.is_meta for parameter in offloaded.parameters())
    assert sequences(offloaded, MODES) == sequences(model, MODES)
