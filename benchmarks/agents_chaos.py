"""Runs a hundred agents at once on a tiny model, in which much goes wrong: `python -m benchmarks.agents_chaos`.

Tools fail and take too long, agents raise errors and are cancelled, all at random from a seed. Counted are agents that
are lost (neither finished, failed nor cancelled), answers that differ from those of a second run without failures of
the engine, and requests that the engine still holds afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_parallel import load_embedded_model
from hf_parallel.agents import (
    AgentCancelledError,
    AgentError,
    Chat,
    Runtime,
    ToolError,
    agent,
    cancel,
    gather,
    next,
    resume,
    rng,
    spawn,
    tool,
)
from hf_parallel.engine import Engine

GEN: dict[str, Any] = {"do_sample": True, "temperature": 1.0}


async def unreliable(seed: int) -> int:
    """Fail, take too long or return, by the seed."""
    drawn = random.Random(seed)
    await asyncio.sleep(drawn.random() / 50)
    if drawn.random() < 0.3:
        raise OSError("the tool has failed")
    if drawn.random() < 0.1:
        await asyncio.sleep(60)
    return seed


@agent
async def helper(number: int) -> Any:
    """Answer questions until it fails."""
    chat = Chat(system=f"You are helper {number % 3}.", **GEN)
    question = "Begin."
    while True:
        chat.user(question)
        question = yield await chat.gen(max_new_tokens=1 + number % 7)
        if rng().random() < 0.05:
            raise RuntimeError("the helper has failed")


@agent
async def worker(number: int) -> Any:
    """Use tools and a helper, as its number says, and return what it got."""
    chat = Chat(system=f"You are worker {number % 5}.", **GEN).user("Think.")
    handle = spawn(helper, number)
    found: list[Any] = [await chat.gen(max_new_tokens=2 + number % 11)]
    for turn in range(1 + number % 3):
        try:
            found.append(await tool(unreliable, 10 * number + turn, timeout=0.5, retries=1))
        except ToolError:
            found.append("tool")
        try:
            found.append(await next(handle))
            await resume(handle, "Go on.")
        except AgentError:
            found.append("helper")
            break
    left, right = chat.user("Compare.").fork(2)
    found += await gather(left.gen(max_new_tokens=4), right.gen(max_new_tokens=4))
    if number % 10 == 7:
        raise ValueError(f"worker {number} fails")
    yield found


@agent
async def crowd(agents: int, seed: int) -> Any:
    """Start all workers, cancel some, and return what has become of each."""
    drawn = random.Random(seed)
    handles = [spawn(worker, number) for number in range(agents)]
    cancelled = drawn.sample(range(agents), agents // 10)
    await tool(asyncio.sleep, drawn.random() / 5)
    for number in cancelled:
        cancel(handles[number])
    results: list[Any] = []
    for handle in handles:
        try:
            results.append(await next(handle))
        except AgentCancelledError:
            results.append("cancelled")
        except AgentError as error:
            results.append(f"failed: {error}")
    yield results


def requests_left(engine: Engine, seconds: float = 5.0) -> int:
    """Return the number of requests that the engine still has, after time for those that were cancelled to end."""
    ends = time.monotonic() + seconds
    while (left := engine.stats.running + engine.stats.waiting) and time.monotonic() < ends:
        time.sleep(0.01)
    return left


def run_rounds(engine: Engine, agents: int, rounds: int, seed: int, minutes: float = 0.0) -> dict[str, Any]:
    """Run rounds until both limits are reached, and return counts."""
    counts: Counter[str] = Counter()
    ends = time.monotonic() + 60 * minutes
    expected: list[Any] | None = None
    number = 0
    while number < rounds or time.monotonic() < ends:
        results = Runtime(engine, seed=seed).run(crowd, agents, number).value
        counts["started"] += agents
        for index, result in enumerate(results):
            kind = "finished" if isinstance(result, list) else str(result).partition(":")[0]
            counts[kind if kind in ("finished", "failed", "cancelled") else "lost"] += 1
            if expected is not None and isinstance(result, list) and isinstance(expected[index], list):
                counts["wrong"] += result != expected[index]
                counts["compared"] += 1
        counts["lost"] += agents - len(results)
        if expected is None:
            expected = results
        number += 1
        counts["left"] += requests_left(engine)
    return {
        **{name: counts[name] for name in ("started", "finished", "failed", "cancelled", "lost", "compared", "wrong")},
        "rounds": number,
        "left": counts["left"],
        "kv_bytes": engine.stats.kv_bytes,
    }


def main() -> int:
    """Run the rounds; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--agents", type=int, default=100)
    options = parser.parse_args()
    tokenizer = load_embedded_model()[1]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config).eval()
    with Engine(model, tokenizer, max_rows=32) as engine:
        report = run_rounds(engine, options.agents, 1, 0, options.minutes)
    print(json.dumps(report, indent=1))
    return int(bool(report["lost"] or report["wrong"] or report["left"]))


if __name__ == "__main__":
    sys.exit(main())
