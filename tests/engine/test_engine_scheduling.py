"""An engine serves all requests: fairness between submitters, priorities, a bounded queue, and a budget of memory."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import Any

import pytest
import torch
from engine_requests import TOKENIZER, Case, assert_nothing_is_held, random_case, random_prefixes

from hf_parallel.engine import ContributionPolicy, Engine, LeastRecentlyUsed, QueueFullError
from hf_parallel.engine.scheduler import HEAD_START

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:nothing was generated")]


def prompt(seed: int, length: int = 12) -> torch.Tensor:
    return torch.randint(32, 126, (length,), generator=torch.Generator().manual_seed(seed))


class Gate:
    """A request that holds the engine's thread until all others are submitted, and the order in which those end."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.order = engine, []
        self._entered, self._open = threading.Event(), threading.Event()
        self._first = engine.submit(prompt(99, 3), max_new_tokens=1, logits_processor=[self._wait])
        assert self._entered.wait(600)

    def _wait(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self._entered.set()
        assert self._open.wait(600)
        return scores

    def submit(self, name: str, ids: torch.Tensor, **settings: Any) -> Any:
        """Submit a request whose name is appended to `order` when it begins to generate, and when it ends."""
        calls = itertools.count()

        def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if next(calls) == 0:
                self.order.append(name)
            return scores

        return self.engine.submit(ids, logits_processor=[note], **settings)

    def open(self) -> None:
        self._open.set()


# Fairness


def test_submitters_share_the_engine_equally(model: Any) -> None:
    """Whatever the number and the size of their requests."""
    with Engine(model, max_rows=2) as engine:
        gate = Gate(engine)
        handles = [gate.submit("small", prompt(i, 6), max_new_tokens=5, submitter="small") for i in range(30)]
        handles += [gate.submit("large", prompt(i, 50), max_new_tokens=5, submitter="large") for i in range(6)]
        gate.open()
        for handle in handles:
            handle.result(600)
    begun = Counter(gate.order[:15])
    assert 1 <= begun["large"] <= 5
    last_large = len(gate.order) - gate.order[::-1].index("large")
    assert last_large > 22  # the small requests have not waited for the large ones
    assert gate.order.index("large") < 4


def test_low_priorities_are_preempted_first(model: Any, token_bytes: int) -> None:
    with Engine(model, max_kv_bytes=token_bytes * 150) as engine:
        gate = Gate(engine)
        handles = {
            priority: gate.submit(str(priority), prompt(priority, 10), max_new_tokens=80, priority=priority)
            for priority in (1, 3, 2)
        }
        preempted: set[int] = set()
        model.register_forward_pre_hook(
            lambda module, args: preempted.update(r.priority for r in list(engine._scheduler.running) if r.preempted)
        )
        gate.open()
        for handle in handles.values():
            handle.result(600)
        assert engine.stats.preemptions
    assert 1 in preempted
    assert 3 not in preempted


# Contribution


class Contributions(LeastRecentlyUsed):
    """Requests of the agent "hot" contribute 1, others nothing."""

    def contribution(self, request: Any) -> float:
        return float(request.hints.agent_id == "hot")


def hints(agent: str) -> dict[str, str]:
    return {"agent_id": agent}


def test_requests_that_contribute_more_are_admitted_first(model: Any) -> None:
    """Not before a higher priority, and not before more than `HEAD_START` earlier ones: every request has its turn."""
    with Engine(model, max_rows=1, policy=Contributions()) as engine:
        gate = Gate(engine)
        handles = [gate.submit("cold", prompt(0), max_new_tokens=1, agent_hints=hints("cold"))]
        for index in range(HEAD_START + 4):
            handles.append(gate.submit("hot", prompt(index % 3), max_new_tokens=1, agent_hints=hints("hot")))
        handles.append(gate.submit("urgent", prompt(1), max_new_tokens=1, agent_hints=hints("cold"), priority=1))
        gate.open()
        for handle in handles:
            handle.result(600)
    assert gate.order[0] == "urgent"
    assert HEAD_START - 1 <= gate.order.index("cold") - 1 <= HEAD_START
    assert Counter(gate.order) == {"urgent": 1, "cold": 1, "hot": HEAD_START + 4}


def test_requests_that_contribute_less_are_preempted_first(model: Any, token_bytes: int) -> None:
    """Among those of the submitter whose turn it is: no agent takes memory from another submitter."""
    with Engine(model, max_kv_bytes=token_bytes * 240, policy=Contributions()) as engine:
        gate = Gate(engine)
        handles = [
            gate.submit(name, prompt(number, 10), max_new_tokens=70, submitter=name[0], agent_hints=hints(name[1:]))
            for number, name in enumerate(("bcold", "acold", "ahot", "ahot"))
        ]
        preempted: list[tuple[Any, str]] = []
        model.register_forward_pre_hook(
            lambda module, args: preempted.extend(
                (r.number, r.hints.agent_id) for r in list(engine._scheduler.running) if r.preempted
            )
        )
        gate.open()
        for handle in handles:
            handle.result(600)
        assert engine.stats.preemptions
    assert preempted[0] == (2, "cold")
    assert (1, "cold") not in preempted


# Prefill and decode


def test_a_large_prompt_does_not_delay_decoding(model: Any) -> None:
    """Each step of a prefill also decodes all other requests."""
    with Engine(model, max_batch_tokens=16) as engine:
        decoding = engine.submit(prompt(1), max_new_tokens=60)
        tokens = iter(decoding)
        next(tokens)
        steps = engine.stats.steps
        large = engine.submit(prompt(2, 400), max_new_tokens=1)
        decoding.result(600)
        assert engine.stats.steps - steps <= 62
        assert large.times.started < decoding.times.ended
        large.result(600)


def test_decoding_does_not_delay_a_large_prompt(model: Any) -> None:
    """Each step prefills a part of a prompt, even if the rows that decode take up the tokens of a step."""
    decoded: list[float] = []  # times of the first row's tokens, in the engine's thread

    def note(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        decoded.append(time.perf_counter())
        return scores

    with Engine(model, max_batch_tokens=16) as engine:
        gate = Gate(engine)
        decoding = [engine.submit(prompt(0), max_new_tokens=120, logits_processor=[note])]
        decoding += [engine.submit(prompt(i), max_new_tokens=120) for i in range(1, 20)]
        gate.open()
        for handle in decoding:
            next(iter(handle))
        large = engine.submit(prompt(50, 320), max_new_tokens=1)
        for handle in (large, *decoding):
            handle.result(600)
        began, ended = large.times.started, large.times.ended
        assert sum(began <= at <= ended for at in decoded) <= 320 / 16 + 4
        assert ended < min(handle.times.ended for handle in decoding)


# Queue and budget


def test_a_full_queue_raises_and_serves_those_in_it(model: Any) -> None:
    with Engine(model, max_rows=1, max_waiting=3) as engine:
        gate = Gate(engine)
        handles = [engine.submit(prompt(i), max_new_tokens=2) for i in range(3)]
        with pytest.raises(QueueFullError, match=r"3 requests wait already \(max_waiting\)"):
            engine.submit(prompt(9), max_new_tokens=2)
        assert (engine.stats.running, engine.stats.waiting) == (1, 3)
        handles.pop().cancel()
        gate.open()
        for handle in handles:
            handle.result(600)
        engine.submit(prompt(9), max_new_tokens=2).result(600)


def watch(model: Any, engine: Engine) -> None:
    """Check in each forward pass that storage is within the budget, and as large as the statistics say."""

    def check(module: Any, args: Any) -> None:
        layers = engine._storage.arena.layers.values()
        stored = sum(t.untyped_storage().nbytes() for layer in layers for t in (layer.keys, layer.values))
        assert engine.stats.reserved_bytes == stored <= engine._storage.max_bytes
        assert engine.stats.kv_bytes <= stored

    model.register_forward_pre_hook(check)


def test_random_requests_end_within_the_budget_under_a_policy(model: Any, token_bytes: int) -> None:
    """With random agents, priorities, submitters, arrivals and cancellations; none waits for ever."""
    rng, policy = random.Random(0), ContributionPolicy()
    prefixes = random_prefixes(rng, 3, 40)
    cases = [random_case(rng, prefixes) for _ in range(14)]
    expected = [case.alone(model) for case in cases]
    settings = {"max_kv_bytes": token_bytes * 500, "max_batch_tokens": rng.choice([16, 64]), "policy": policy}
    with Engine(model, TOKENIZER, **settings) as engine:
        watch(model, engine)
        handles = []
        for case in cases:
            given = {"priority": rng.randint(0, 2), "submitter": rng.randint(0, 3)}
            given["agent_hints"] = {"workflow_id": str(rng.randint(0, 1)), "agent_id": str(rng.randint(0, 2))}
            handles.append(engine.submit(case.prompt, case.mode, **given, **case.arguments))
            if rng.random() < 0.3:
                with suppress(CancelledError):
                    next(iter(rng.choice(handles)), None)
            if rng.random() < 0.2:
                rng.choice(handles).cancel()
        for handle, tokens in zip(handles, expected, strict=True):
            try:
                assert handle.result(600).sequences.tolist() == tokens
            except CancelledError:
                continue
        assert_nothing_is_held(engine)
        assert engine.stats.failed == 0
    assert not policy._calls
    assert not policy.running


def test_requests_that_compute_prefixes_for_each_other_end(model: Any) -> None:
    """The first waits for the third's prompt after it has begun with its own first one, for which the second waits."""
    x, y, z = (prompt(seed, 20) for seed in (1, 2, 3))
    alone = {}
    for name, rows in {"a": [x, z, y], "b": [y, x], "c": [z]}.items():
        alone[name] = Case(torch.stack(rows), None, {"max_new_tokens": 4})
    expected = {name: case.alone(model) for name, case in alone.items()}
    for order in itertools.permutations(alone):
        with Engine(model, max_batch_tokens=8) as engine:
            gate = Gate(engine)
            handles = {name: engine.submit(alone[name].prompt, max_new_tokens=4) for name in order}
            gate.open()
            for name, handle in handles.items():
                assert handle.result(600).sequences.tolist() == expected[name]
            assert_nothing_is_held(engine)
