"""Replicas of an engine by Ray Serve, on a local Ray with two of them."""

from __future__ import annotations

import json
import os
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from pages import REPLICAS, blocks, name_of, run, small_scale, stand_in
from paths import PYTHONPATH

import hf_parallel

serve: Any = pytest.importorskip("ray.serve")
ray: Any = pytest.importorskip("ray")

from hf_parallel.engine.replicas import replicas  # noqa: E402

pytestmark = pytest.mark.slow

SYSTEM_PROMPTS = [letter * 60 for letter in "abcd"]
MAX_NEW_TOKENS = 6


def load() -> tuple[Any, Any]:
    return tiny.build("llama"), AsciiTokenizer()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    paths = os.pathsep.join((str(Path(__file__).parent), PYTHONPATH))
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )
    yield
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def handle(cluster: None) -> Any:
    return serve.run(replicas(load, num_replicas=2, max_kv_bytes=10**7), name="engines", route_prefix=None)


def alone(prompt: str, **settings: Any) -> list[list[int]]:
    """Return what `generate` returns for a prompt."""
    model, tokenizer = load()
    hf_parallel.enable(model)
    ids = torch.tensor([tokenizer(prompt)["input_ids"]])
    mode = settings.pop("generation_mode", "shared_prefix")
    sequences = model.generate(
        ids, attention_mask=torch.ones_like(ids), tokenizer=tokenizer, generation_mode=mode, **settings
    )
    return sequences.tolist()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def stats_of_both(handle: Any) -> list[dict[str, Any]]:
    """Return the engines' statistics. The router chooses a replica for each call."""
    found: dict[str, dict[str, Any]] = {}
    while len(found) < 2:
        stats = handle.stats.remote().result()
        found[stats["replica"]] = stats
    return list(found.values())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_sample": True, "seed": 3, "num_return_sequences": 3},
        {"generation_mode": "self_consistency", "num_answers": 2, "do_sample": True, "seed": 1},
    ],
    ids=["greedy", "seeded", "mode"],
)
def test_replicas_return_the_tokens_of_generate(handle: Any, settings: dict[str, Any]) -> None:
    settings = {"max_new_tokens": MAX_NEW_TOKENS, **settings}
    prompts = [f"{letter} is a letter" for letter in "abcd"]
    pending = [handle.generate.remote(prompt, **settings) for prompt in prompts]
    for prompt, response in zip(prompts, pending, strict=True):
        assert response.result().sequences.tolist() == alone(prompt, **settings)


def test_requests_with_one_system_prompt_reach_the_replica_that_holds_it(handle: Any) -> None:
    reused: dict[str, list[int]] = {prompt: [] for prompt in SYSTEM_PROMPTS}
    for turn in range(6):
        for prompt in SYSTEM_PROMPTS:
            output = handle.generate.remote(f"{prompt} question {turn}", max_new_tokens=MAX_NEW_TOKENS).result()
            reused[prompt].append(output.stats.reused_tokens)
    for prompt, counts in reused.items():
        assert counts[0] < len(prompt)
        assert min(counts[1:]) >= len(prompt)


def test_a_call_that_is_cancelled_ends_its_request(handle: Any) -> None:
    settings = {"num_return_sequences": 16, "do_sample": True, "max_new_tokens": 400}
    before = sum(stats["cancelled"] for stats in stats_of_both(handle))
    response = handle.generate.remote("a long text", **settings)
    while not any(stats["running"] for stats in stats_of_both(handle)):
        pass
    response.cancel()
    stream = handle.options(stream=True).stream.remote("a long text", **settings)
    next(iter(stream))
    stream.cancel()
    while any(stats["running"] for stats in stats_of_both(handle)):
        pass
    assert sum(stats["cancelled"] for stats in stats_of_both(handle)) == before + 2


def test_an_ingress_passes_http_requests_to_the_replicas_and_the_page_runs(
    cluster: None, embedded: tuple[Any, Any]
) -> None:
    """Last, as the page shuts Serve down."""
    with small_scale(stand_in(embedded)):
        application = run(blocks(REPLICAS, "python"), name_of(REPLICAS))["application"]
    serve.start(http_options={"host": "127.0.0.1", "port": (port := free_port())})
    serve.run(application, name="http")
    url = f"http://127.0.0.1:{port}/generate?prompt=The%20sea%20is"
    request = urllib.request.Request(url, method="POST")
    with urllib.request.urlopen(request, timeout=600) as response:
        (sequence,) = json.load(response)
    assert "The sea is" in embedded[1].decode(sequence)
    assert len(sequence) > 20
