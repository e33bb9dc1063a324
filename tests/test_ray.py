"""`examples/ray_replicas.py` on a local cluster of Ray: two replicas, and the router of the example (`make compat`)."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from paths import ROOT

pytest.importorskip("ray.serve", reason="Ray is not installed")
sys.path.append(str(ROOT / "examples"))

import ray  # noqa: E402
from pages import random_stand_in  # noqa: E402
from ray import serve  # noqa: E402
from ray_replicas import PrefixRouter, Replica, hashes  # noqa: E402

SYSTEMS = ["Answer in one short sentence. " * 8, "Answer like a pirate. " * 8]


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    _, tokenizer = random_stand_in(folder)
    tokenizer.save_pretrained(folder)
    environment = {"env_vars": {"PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}", "OMP_NUM_THREADS": "1"}}
    ray.init(num_cpus=3, include_dashboard=False, runtime_env=environment)
    try:
        serve.start(proxy_location="Disabled")  # no HTTP
        yield serve.run(Replica.bind(str(folder), max_kv_bytes=2**24), route_prefix=None)
    finally:
        serve.shutdown()
        ray.shutdown()


def test_two_replicas_answer_and_prefixes_find_their_replica(replicas: Any) -> None:
    reused = []
    for question in ("Why is the sky blue?", "What is a prime number?", "Who are you?"):
        for system in SYSTEMS:
            prompt = f"{system}\n{question}"
            output = replicas.generate.remote(prompt, max_new_tokens=3, do_sample=False).result()
            reused.append(output.stats.reused_tokens)
    assert not any(reused[:2])
    assert all(tokens > 100 for tokens in reused[2:])  # of system prompts of 176 characters and more


def test_a_text_is_streamed(replicas: Any) -> None:
    stream = replicas.options(stream=True).stream.remote("The sea is", max_new_tokens=4, do_sample=False)
    assert [row for row, _, _ in stream]


@dataclass(frozen=True)
class Named:
    """A replica."""

    replica_id: str


class Queues:
    """Lengths of queues, as the router of Ray caches them."""

    def __init__(self, lengths: dict[str, int]) -> None:
        self.lengths = lengths

    def get(self, replica_id: str) -> int | None:
        return self.lengths.get(replica_id)


@pytest.mark.parametrize(("length", "chosen"), [(0, "a"), (4, "a"), (5, "b")])
def test_a_prefix_goes_to_its_replica_unless_that_is_too_busy(length: int, chosen: str, monkeypatch: Any) -> None:
    router = object.__new__(PrefixRouter)
    router.initialize_state()
    monkeypatch.setattr(PrefixRouter, "replica_queue_len_cache", Queues({"a": length}), raising=False)
    replicas = [Named("b"), Named("a")]
    request = SimpleNamespace(args=["x" * 200], kwargs={})
    router.on_request_routed(request, "a", None)
    ranked = asyncio.run(router.choose_replicas(replicas, request))
    assert ranked[0][0].replica_id == chosen


def test_hashes_of_prefixes() -> None:
    assert hashes("a" * 63) == []
    assert hashes("a" * 130)[:1] == hashes("a" * 64)
    assert hashes("a" * 64 + "b" * 64)[0] == hashes("a" * 128)[0]
    assert hashes("a" * 64 + "b" * 64)[1] != hashes("a" * 128)[1]
