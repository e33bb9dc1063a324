"""Tensor and pipeline parallelism of transformers: two processes that hold a part of the model generate as one does."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
import tiny
from forkserver import start_ranks, wait
from serving import small_model
from tensor_parallel_rank import crowd, fail_on_rank, generate_on_rank, random_requests, sequences
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

import hf_parallel
from hf_parallel.cli.main import main
from hf_parallel.models.loading import load_model

RESULTS = "results.rank0.jsonl"
COSTS = {"seconds", "kv_bytes"}
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
    num_compared = len(first["requests"]) - first["requests"].count(None)
    assert num_compared >= 4, "requests that were neither refused nor canceled"
    assert first["crowd"] == [case.alone(model) for case in crowd()]
    assert first["preemptions"], "the crowd does not fit into the budget"
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


def without_costs(results: str) -> list[dict[str, Any]]:
    """Return the results of a file, without its header, their times, and the bytes that one process holds."""
    _, *lines = results.splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in COSTS} for line in lines]


@pytest.mark.slow
@pytest.mark.skipif("tp_size" not in SIZES, reason="this version of transformers has no tp_size")
def test_commands_over_two_ranks_write_what_one_process_writes(tmp_path: Path) -> None:
    for one in small_model():
        one.save_pretrained(tmp_path / "model")
    command = ["--model", str(tmp_path / "model"), "--device"]
    solve = ["evaluate", "--task", "arithmetic", "--count=3", "--mode=none", "--mode=hogwild", "--budgets=6,12", "-o"]
    answer = ["generate", "Hello", "--sample", "--max-new-tokens=8", "--seed=1", "-o"]
    for device, size in (("cpu", 1), ("tp", 2), ("tp", 2)):  # the last one resumes
        folder = tmp_path / device
        wait(start_ranks(size, main, [*solve, str(folder), *command, device]), 300)
        wait(start_ranks(size, main, [*answer, f"{folder}/run.json", *command, device]), 300)
    results, runs = ([(tmp_path / one / name).read_text() for one in ("cpu", "tp")] for name in (RESULTS, "run.json"))
    alone, shared = (without_costs(text) for text in results)
    assert alone == shared
    assert not (tmp_path / "tp" / "results.rank1.jsonl").exists()
    first, second = (json.loads(text)["sections"] for text in runs)
    assert first == second


@pytest.mark.slow
@pytest.mark.skipif("tp_size" not in SIZES, reason="this version of transformers has no tp_size")
def test_a_server_of_two_ranks_answers_and_both_end_at_a_signal(tmp_path: Path) -> None:
    model, tokenizer = small_model()
    for one in (model, tokenizer):
        one.save_pretrained(tmp_path / "small")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["serve", "--model", str(tmp_path / "small"), "--device=tp", f"--port={port}", "--max-kv-bytes=4M"]
    ranks = start_ranks(2, main, options)
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + 300
    while time.monotonic() < until:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                break
        except httpx.TransportError:
            time.sleep(0.2)
    body = {"model": "small", "prompt": "Hello", "temperature": 0, "max_tokens": 12}
    text = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()["choices"][0]["text"]
    for rank in reversed(ranks):
        os.kill(rank.pid or 0, signal.SIGTERM)
    wait(ranks, 300)
    ids = tokenizer("Hello", return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert text == tokenizer.decode(expected, skip_special_tokens=True)


def test_a_model_of_several_processes_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ValueError, match="device='tp' needs several processes, started by torchrun"):
        load_model("some/model", device="tp")
