"""Host work of a decode step: requests of an engine beside rows of one call, on a model of two small layers.

Milliseconds of CPU time of one thread per decode step: a long call less one of a single token, by the steps between.
Prompts are equal (rows share all of their prompt) or different.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_parallel
from hf_parallel.engine import Engine
from hf_parallel.models.decode.cached_model import PREFILL_CHUNK
from hf_parallel.progress import progress_bar

SIZES: dict[str, Any] = {"prompt": 64, "new_tokens": 129, "rounds": 4, "rows": "1,16,64,256"}
QUICK: dict[str, Any] = {"prompt": 8, "new_tokens": 5, "rounds": 1, "rows": "1,4"}
VOCABULARY = 256
SAMPLING: dict[str, Any] = {"do_sample": True, "eos_token_id": -1, "pad_token_id": 0}
"""Settings of all calls, which end by their length."""
TARGETS = tuple(
    (f"{kind}_{rows}", "at most", 1.5, f"step of {rows} requests by step of one call of {rows} rows, {kind} prompts")
    for kind in ("equal", "different")
    for rows in (16, 64, 256)
)


def load(options: Any) -> tuple[Any, Any]:
    """Return a Llama of two layers with random weights, without a tokenizer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=None,
    )
    return hf_parallel.enable(LlamaForCausalLM(config).eval()), None


def run(model: Any, tokenizer: Any, sizes: Any) -> dict[str, Any]:
    """Return the entries of the report."""
    cases: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    for kind in ("equal", "different"):
        for rows in map(int, sizes.rows.split(",")):
            prompts = make_prompts(kind, rows, sizes.prompt)
            found = measure(model, prompts, sizes)
            cases.append({"prompts": kind, "rows": rows, **found})
            if f"{kind}_{rows}" in {name for name, *_ in TARGETS}:
                ratios[f"{kind}_{rows}"] = found["engine_ms"] / found["call_ms"]
            print(f"{kind} prompts, {rows} rows: call {found['call_ms']:.2f} ms, engine {found['engine_ms']:.2f} ms")
    return {"cases": cases, "ratios": ratios}


def make_prompts(kind: str, rows: int, length: int) -> torch.Tensor:
    """Return prompts, int64 `[rows, length]`: one for all rows, or one for each."""
    generator = torch.Generator().manual_seed(0)
    count = 1 if kind == "equal" else rows
    return torch.randint(1, VOCABULARY, (count, length), generator=generator).expand(rows, -1)


def measure(model: Any, prompts: torch.Tensor, sizes: Any) -> dict[str, float]:
    """Return the milliseconds of a decode step: a long call less a short one, the least of several rounds of each."""
    ways: dict[str, Callable[[int], float]] = {
        "call_ms": lambda length: in_call(model, prompts, length),
        "engine_ms": lambda length: in_engine(model, prompts, length),
    }
    lengths = (1, sizes.new_tokens)
    least = {(name, length): float("inf") for name in ways for length in lengths}
    for _ in progress_bar(range(sizes.rounds), what=f"{len(prompts)} rows", unit="rounds"):
        for name, length in least:
            least[name, length] = min(least[name, length], ways[name](length))
    steps = sizes.new_tokens - 1
    return {name: 1e3 * (least[name, sizes.new_tokens] - least[name, 1]) / steps for name in ways}


def in_call(model: Any, prompts: torch.Tensor, length: int) -> float:
    """Return the CPU seconds of one call with a row for each prompt."""
    began = time.process_time()
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        generation_mode="shared_prefix",
        max_new_tokens=length,
        seed=0,
        return_dict_in_generate=True,
        **SAMPLING,
    )
    return time.process_time() - began


def in_engine(model: Any, prompts: torch.Tensor, length: int) -> float:
    """Return the CPU seconds of an engine that serves a request for each prompt, all at once."""
    with Engine(model, max_rows=len(prompts), max_batch_tokens=PREFILL_CHUNK) as engine:
        began = time.process_time()
        handles = [
            engine.submit(prompt[None], max_new_tokens=length, seed=number, **SAMPLING)
            for number, prompt in enumerate(prompts)
        ]
        for handle in handles:
            handle.result()
        return time.process_time() - began
