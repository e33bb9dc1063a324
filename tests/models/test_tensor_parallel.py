"""Tensor and pipeline parallelism of transformers: two processes that hold a part of the model generate as one does."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from forkserver import start_ranks, wait
from tensor_parallel_rank import generate_on_rank, sequences
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

import hf_parallel

SIZES = {field.name for field in dataclasses.fields(DistributedConfig)}


def ranks(model: Any, kind: str, folder: Path) -> list[dict[str, Any]]:
    """Return what two ranks of a model have written."""
    model.save_pretrained(folder / "model")
    wait(start_ranks(2, generate_on_rank, str(folder / "model"), str(folder), kind), 300)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tp_size" if "tp_size" in SIZES else "tp_plan", "pp_size"])
def test_two_ranks_generate_the_tokens_of_one_process_in_all_modes(tmp_path: Path, kind: str) -> None:
    if kind != "tp_plan" and kind not in SIZES:
        pytest.skip(f"this version of transformers has no {kind}")
    expected = sequences(copy.deepcopy(tiny.build("llama")))
    first, second = ranks(tiny.build("llama"), kind, tmp_path)
    assert first == second
    assert first["sequences"] == expected
    assert first["unseeded"][0] != first["unseeded"][1]
    assert "an engine cannot use a model that 2 processes compute" in first["error"]


@pytest.mark.parametrize(("kv_heads", "size"), [(1, 2), (2, 4)])
def test_more_ranks_than_key_value_heads_raise(kv_heads: int, size: int) -> None:
    config = copy.deepcopy(tiny.build("llama").config)
    config.num_key_value_heads = kv_heads
    model = LlamaForCausalLM(config)
    model._tp_size = size  # as after loading by that many ranks
    with pytest.raises(ValueError, match=f"has {kv_heads} key-value heads, which tp_size={size} does not divide"):
        hf_parallel.enable(model)
