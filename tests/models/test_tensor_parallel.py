"""Tensor and pipeline parallelism of transformers: two processes that hold a part of the model generate as one does."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
from pathlib import Path

import pytest
import tiny
from forkserver import start_ranks, wait
from tensor_parallel_rank import fail_on_rank, generate_on_rank, random_requests, sequences
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

import hf_parallel

SIZES = {field.name for field in dataclasses.fields(DistributedConfig)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tp_size" if "tp_size" in SIZES else "tp_plan", "pp_size"])
def test_two_ranks_generate_the_tokens_of_one_process_alone_and_in_an_engine(tmp_path: Path, kind: str) -> None:
    if kind != "tp_plan" and kind not in SIZES:
        pytest.skip(f"this version of transformers has no {kind}")
    model = copy.deepcopy(tiny.build("llama"))
    expected = sequences(model)
    model.save_pretrained(tmp_path / "model")
    wait(start_ranks(2, generate_on_rank, str(tmp_path / "model"), str(tmp_path), kind), 300)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first["sequences"] == second["sequences"] == expected
    assert first["unseeded"] == second["unseeded"]
    assert first["unseeded"][0] != first["unseeded"][1]
    for case, found in zip(random_requests(random.Random(1)), first["requests"], strict=True):
        assert found is None or found == case.alone(model)
    assert first["requests"].count(None) < 6
    assert first["preemptions"]
    assert "the (first) process that opened it" in second["error"]


@pytest.mark.slow
@pytest.mark.skipif("tp_size" not in SIZES, reason="this version of transformers has no tp_size")
@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_pass_of_one_rank_ends_the_engines_of_all(tmp_path: Path, failing: int) -> None:
    tiny.build("llama").save_pretrained(tmp_path / "model")
    wait(start_ranks(2, fail_on_rank, str(tmp_path / "model"), str(tmp_path), failing), 300)
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert "the engine has stopped" in first
    assert "a pass failed in one of the processes that compute the model" in first
    assert "a fault" in second if failing else "Connection closed by peer" in second


@pytest.mark.parametrize(("kv_heads", "size"), [(1, 2), (2, 4)])
def test_more_ranks_than_key_value_heads_raise(kv_heads: int, size: int) -> None:
    config = copy.deepcopy(tiny.build("llama").config)
    config.num_key_value_heads = kv_heads
    model = LlamaForCausalLM(config)
    model._tp_size = size  # as after loading by that many ranks
    with pytest.raises(ValueError, match=f"has {kv_heads} key-value heads, which tp_size={size} does not divide"):
        hf_parallel.enable(model)
