"""Random requests for an engine: arguments of `submit`, and their expected tokens, computed by `generate` alone."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from mode_cases import small_call
from test_fork_join import random_call
from test_search import random_search
from transformers import PreTrainedModel

from hf_parallel import LogitsCache
from hf_parallel.engine import Engine, KVBudgetError, RequestCancelledError, RequestHandle

TOKENIZER: Any = AsciiTokenizer()
MODES = ("hogwild", "pdos", "resample", "self_consistency", "shared_prefix", "skeleton_of_thought", None)
STATE_MODES = MODES[1:]  # those that work on layers with states


@dataclass
class Case:
    """A request: its prompt, mode and settings."""

    prompt: torch.Tensor
    mode: str | None
    settings: dict[str, Any] = field(default_factory=dict)

    def output_alone(self, model: PreTrainedModel) -> Any:
        """Return the output of `generate` for the request alone."""
        mode = self.mode or "shared_prefix"
        arguments = {"tokenizer": TOKENIZER, "generation_mode": mode, "return_dict_in_generate": True, **self.arguments}
        return model.generate(self.prompt, attention_mask=torch.ones_like(self.prompt), **arguments)

    def alone(self, model: PreTrainedModel) -> list[list[int]]:
        """Return its sequences."""
        return self.output_alone(model).sequences.tolist()

    def beside(self, model: PreTrainedModel) -> list[list[int]]:
        """Return the sequences of plain `generate`, for a request without a mode, while an engine holds the model."""
        assert self.mode is None
        return model.generate(self.prompt, attention_mask=torch.ones_like(self.prompt), **self.settings).tolist()

    @property
    def arguments(self) -> dict[str, Any]:
        """Settings, with a new logits cache if there is one."""
        return {**self.settings, **({"logits_cache": LogitsCache()} if "logits_cache" in self.settings else {})}


def random_case(rng: random.Random, prefixes: list[torch.Tensor], modes: Sequence[str | None] = MODES) -> Case:
    """Return a random request. Its prompt begins with one of `prefixes`, int64 `[length]`."""
    text = torch.randint(32, 126, (rng.randint(1, 12),), generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    prefix = rng.choice(prefixes)
    prompt = torch.cat((prefix[: rng.randint(0, len(prefix))], text))[None]
    return case_of(prompt, rng, modes)


def case_of(prompt: torch.Tensor, rng: random.Random, modes: Sequence[str | None] = MODES) -> Case:
    """Return a request with a prompt, int64 `[1, length]`, and a random mode and settings."""
    mode = rng.choice(modes)
    settings = {} if mode is None else {k: v for k, v in small_call(mode).items() if k != "generation_mode"}
    if mode == "fork_join":
        settings = {**random_call(rng), "pad_token_id": tiny.PAD}
    if mode == "search":
        settings = random_search(rng)
    settings["max_new_tokens"] = min(settings.get("max_new_tokens", 12), 60) + rng.randint(0, 8)
    if rng.random() < 0.5 or mode == "search":
        settings |= {"do_sample": True, "seed": rng.randrange(1000), "top_k": 0, "temperature": rng.choice([0.7, 1.0])}
    if mode in (None, "shared_prefix") and rng.random() < 0.5:
        settings |= {"num_return_sequences": rng.randint(2, 4), "do_sample": True, "seed": rng.randrange(1000)}
    if modes is STATE_MODES and mode == "pdos":
        settings["join"] = "reencode"
    if mode == "hogwild":
        settings["redundancy_prompt"] = "Seen?"  # an engine refuses requests that may have many long ones
    if rng.random() < 0.2:
        settings["repetition_penalty"] = 1.2
    return Case(prompt, mode, settings)


def random_prefixes(rng: random.Random, count: int, length: int) -> list[torch.Tensor]:
    """Return random prefixes of prompts, int64 `[length]`."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return [torch.randint(32, 126, (length,), generator=generator) for _ in range(count)]


def nested_prompts(rng: random.Random, count: int, scale: int = 1) -> list[list[int]]:
    """Return prompts, many of which are prefixes of each other, or leave each other after any token.

    They are short, or `scale` times as long.
    """
    prompts = [[32 + rng.randrange(90) for _ in range(scale * rng.randint(4, 7))]]
    while len(prompts) < count:
        other = rng.choice(prompts)
        end = [32 + rng.randrange(3) for _ in range(scale * rng.choice([0, 1, 1, 2]))]
        prompts.append(other[: rng.randint(2, len(other))] + end)
    return prompts


def submit_all(engine: Engine, cases: list[Case], rng: random.Random) -> list[RequestHandle | None]:
    """Submit requests from four threads; cancel some. None: the request alone exceeds the budget."""
    handles: list[RequestHandle | None] = [None] * len(cases)
    delays = [rng.random() for _ in cases]

    def submit(first: int) -> None:
        for i in range(first, len(cases), 4):
            try:
                handle = handles[i] = engine.submit(
                    cases[i].prompt, cases[i].mode, submitter=first, cache_salt=str(i % 2), **cases[i].arguments
                )
            except KVBudgetError:
                continue
            if delays[i] < 0.1:
                time.sleep(delays[i] / 10)
                handle.cancel()
            elif delays[i] > 0.7:
                time.sleep(delays[i] / 50)

    threads = [threading.Thread(target=submit, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return handles


# Faults

WAIT = 600
"""Seconds after which a request counts as stuck."""


class InjectedError(Exception):
    """The error that a request's own code raises."""


@dataclass
class Fault:
    """What goes wrong with a request: it is `cancelled`, its own code `raises`, or its caller waits too `briefly`."""

    kind: str | None
    delay: float = 0.0  # seconds until it is canceled
    calls: int = 0  # of its processor until it raises

    @classmethod
    def random(cls, rng: random.Random) -> Fault:
        kind = rng.choice([None, None, None, "cancelled", "raises", "briefly"])
        return cls(kind, delay=rng.choice([0.0, 0.002, 0.02]), calls=rng.randrange(4))

    def processors(self) -> list[Any]:
        """Return the logits processors of the request, which change nothing."""
        left = itertools.count(self.calls, -1)

        def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if next(left) <= 0:
                raise InjectedError
            return scores

        return [process] if self.kind == "raises" else []


def needed_bytes(model: PreTrainedModel, cases: Sequence[Case], **limits: Any) -> int:
    """Return the smallest budget of an engine with these limits that accepts all requests."""
    with Engine(model, TOKENIZER) as engine:
        least = engine._storage.arena.bytes_per_token + engine._storage.pool.states.bytes_per_slot
    needed = [least]
    with Engine(model, TOKENIZER, max_kv_bytes=least, **limits) as engine:
        for case in cases:
            try:
                engine.submit(case.prompt, case.mode, **case.arguments).cancel()
            except KVBudgetError as error:
                needed.append(int(str(error).partition("may need ")[2].split()[0]))
    return max(needed)


def run_with_faults(
    model: PreTrainedModel,
    rng: random.Random,
    count: int,
    modes: Sequence[str | None],
    same_bits: bool = False,
    simple: float = 0.5,
) -> Counter[str]:
    """Run random requests with faults at once, whose prompts are prefixes of each other; return how many ended how.

    With probability `simple`, all are completions, whatever `modes` says: requests of other modes may need much more
    memory than others at the same budget.

    Each that ends well has the tokens that it gets alone, and with `same_bits` the bits of their log-probabilities. The
    engine's limits are random; its budget holds the largest request, or not much more, so that others are preempted.
    Raises `AssertionError` for wrong tokens, and `TimeoutError` for a request that is stuck.
    """
    prompts = nested_prompts(rng, count, scale=rng.choice([1, 4]))
    if rng.random() < simple:
        modes = (None, "shared_prefix")
    cases = [case_of(torch.tensor([prompt]), rng, modes) for prompt in prompts]
    cases += rng.choices(cases, k=count // 4)  # the same again
    faults = [Fault.random(rng) for _ in cases]
    factor = rng.choice([None, 1.0, 1.0, 1.3, 2.0])
    limits: dict[str, Any] = {
        "max_batch_tokens": rng.choice([8, 64]),
        "max_rows": rng.choice([4, 64]),
        "state_interval": rng.choice([3, 16, 2048]),
    }
    if factor is not None:
        limits["max_kv_bytes"] = int(factor * needed_bytes(model, cases, **limits))
    ends: Counter[str] = Counter()
    alone: dict[int, Any] = {}
    outputs: list[Any] = []
    with Engine(model, TOKENIZER, **limits) as engine:
        handles = [
            engine.submit(case.prompt, case.mode, logits_processor=fault.processors(), **case.arguments)
            for case, fault in zip(cases, faults, strict=True)
        ]
        for handle, fault in zip(handles, faults, strict=True):
            if fault.kind == "cancelled":
                time.sleep(fault.delay)
                handle.cancel()
        for case, handle, fault in zip(cases, handles, faults, strict=True):
            outputs.append(None)
            try:
                if fault.kind == "briefly":
                    with suppress(TimeoutError):
                        handle.result(0.001)
                outputs[-1] = handle.result(WAIT)
                ends["ended"] += 1
                ends[f"ended {case.mode}"] += 1
            except RequestCancelledError:
                assert fault.kind == "cancelled"
                ends["cancelled"] += 1
            except InjectedError:
                ends["raised"] += 1
            except KVBudgetError:
                assert case.mode == "hogwild"  # workers may write more than a request reserves
                ends["budget"] += 1
        ends["preemptions"] += engine.stats.preemptions
        assert_nothing_is_held(engine)
    for case, output in zip(cases, outputs, strict=True):
        if output is not None:
            if id(case) not in alone:
                alone[id(case)] = case.output_alone(model)
            expected = alone[id(case)]
            assert torch.equal(output.sequences, expected.sequences), (case, limits)
            (_, values), (_, of_call) = output.record.sampled_log_probs(), expected.record.sampled_log_probs()
            if same_bits:
                np.testing.assert_array_equal(values, of_call, str((case, limits)))
                ends["log-probabilities"] += len(values)
    return ends


def clear_hooks(model: Any) -> None:
    """Remove all hooks of a model."""
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()


def wait_until_idle(engine: Engine, seconds: float = 600) -> None:
    """Wait until the engine has counted the end of all its requests."""
    until = time.monotonic() + seconds
    while (stats := engine.stats).running or stats.waiting:
        assert time.monotonic() < until, f"requests have not ended: {stats}"
        time.sleep(0.001)


def assert_nothing_is_held(engine: Engine) -> None:
    """Assert that an idle engine holds keys and values of complete cached prefixes only."""
    wait_until_idle(engine)
    storage = engine._storage
    tree = storage.tree
    nodes = list(tree.nodes())
    assert not tree.pins
    assert not tree.computing
    assert all(any(root.children.values()) for root in tree.roots.values() if root is not tree.root)
    assert storage.pool.blocks == {node.block for node in nodes}
    assert all(len(node.tokens) == node.block.length > 0 for node in nodes)
    for layer in storage.arena.layers.values():
        assert all(tensor.isfinite().all() for node in nodes for tensor in layer.read(node.block.tokens))
    sizes = [storage.arena, storage.arena.quantized]
    held = sum(len(node.tokens) * sizes[node.block.extent.is_quantized].bytes_per_token for node in nodes)
    assert engine.stats.kv_bytes == held
    states = storage.pool.states
    kept = [node.block.state for node in nodes if node.block.has_state]
    assert len(kept) == len(set(kept)) == states.num_used
    assert not states.in_use or states.are_finite(kept).all()
