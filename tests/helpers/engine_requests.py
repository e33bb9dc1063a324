"""Random requests for an engine: arguments of `submit`, and their expected tokens, computed by `generate` alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from mode_cases import small_call
from test_fork_join import random_call
from transformers import PreTrainedModel

from hf_parallel import LogitsCache
from hf_parallel.engine import Engine, KVBudgetError, RequestHandle

TOKENIZER: Any = AsciiTokenizer()
MODES = ("hogwild", "pdos", "resample", "self_consistency", "shared_prefix", "skeleton_of_thought", None)
STATE_MODES = MODES[1:]  # those that work on layers with states


@dataclass
class Case:
    """A request: its prompt, mode and settings."""

    prompt: torch.Tensor
    mode: str | None
    settings: dict[str, Any] = field(default_factory=dict)

    def alone(self, model: PreTrainedModel) -> list[list[int]]:
        """Return the sequences that `generate` returns for the request alone."""
        mode = self.mode or "shared_prefix"
        arguments = {"tokenizer": TOKENIZER, "generation_mode": mode, **self.arguments}
        return model.generate(self.prompt, attention_mask=torch.ones_like(self.prompt), **arguments).tolist()

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
    mode = rng.choice(modes)
    text = torch.randint(32, 126, (rng.randint(1, 12),), generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    prefix = rng.choice(prefixes)
    prompt = torch.cat((prefix[: rng.randint(0, len(prefix))], text))[None]
    settings = {} if mode is None else {k: v for k, v in small_call(mode).items() if k != "generation_mode"}
    if mode == "fork_join":
        settings = {**random_call(rng), "pad_token_id": tiny.PAD}
    settings["max_new_tokens"] = min(settings.get("max_new_tokens", 12), 60) + rng.randint(0, 8)
    if rng.random() < 0.5:
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


def nested_prompts(rng: random.Random, count: int) -> list[list[int]]:
    """Return short prompts, many of which are prefixes of each other, or leave each other after any token."""
    prompts = [[32 + rng.randrange(90) for _ in range(rng.randint(4, 7))]]
    while len(prompts) < count:
        other = rng.choice(prompts)
        end = [32 + rng.randrange(3) for _ in range(rng.choice([0, 1, 1, 2]))]
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
    sizes = [storage.arena, storage.arena.compact]
    held = sum(len(node.tokens) * sizes[node.block.extent.is_compact].bytes_per_token for node in nodes)
    assert engine.stats.kv_bytes == held
    states = storage.pool.states
    kept = [node.block.state for node in nodes if node.block.has_state]
    assert len(kept) == (len(nodes) if states.in_use else 0) == len(set(kept)) == states.num_used
    assert not states.in_use or states.are_finite(kept).all()
