"""Host work of a decode step: requests of an engine beside rows of one call, on a model of two small layers.

Milliseconds of CPU time of one thread per decode step: a long call less one of a single token, by the steps between.
Each round measures a call, then an engine. A time is the median of all rounds; the ratio is that of each round, and its
median is reported.
Prompts are equal (rows share all of their prompt) or different. `--cases demo` measures the demo model with packed
weights instead, whose requests each have a long prompt that is cached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import hf_parallel
from hf_parallel.engine import Engine
from hf_parallel.models.decode.cached_model import PREFILL_CHUNK
from hf_parallel.progress import progress_bar

SIZES: dict[str, Any] = {
    "cases": "equal,different",
    "prompt": 64,
    "new_tokens": 129,
    "rounds": 4,
    "rows": "1,16,64,256",
}
SIZES |= {"demo_prompt": 512, "demo_new_tokens": 17, "demo_rows": 64}
QUICK: dict[str, Any] = {"prompt": 8, "new_tokens": 5, "rounds": 1, "rows": "1,4"}
QUICK |= {"demo_prompt": 8, "demo_new_tokens": 3, "demo_rows": 2}
VOCABULARY = 256
SAMPLING: dict[str, Any] = {"do_sample": True, "eos_token_id": -1, "pad_token_id": 0}
"""Settings of all calls, which end by their length."""
DEMO = "demo_64"
TARGETS = (
    *(
        (f"{kind}_{rows}", "at most", 1.5, f"step of {rows} requests by step of a call of {rows} rows, {kind} prompts")
        for kind in ("equal", "different")
        for rows in (16, 64, 256)
    ),
    (DEMO, "at most", 1.2, "the same of the demo model with packed weights, 64 rows of 512 tokens of prompt each"),
)
Seconds = Callable[[int], float]
"""CPU seconds of a call, or of requests, of so many new tokens."""


def load(options: Any) -> tuple[Any, Any]:
    """Return a Llama of two layers with random weights, without a tokenizer."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
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
    limited = {name for name, *_ in TARGETS}
    for kind in sizes.cases.split(","):
        for rows in [sizes.demo_rows] if kind == "demo" else map(int, sizes.rows.split(",")):
            if kind == "demo":
                measured = measure_demo(rows, sizes)
            else:
                prompts = make_prompts(kind, rows, sizes.prompt)
                ways = {
                    "call_ms": lambda length, prompts=prompts: in_call(model, prompts, length),
                    "engine_ms": lambda length, prompts=prompts: in_engine(model, prompts, length),
                }
                measured = measure(ways, rows, sizes.new_tokens, sizes.rounds)
            cases.append({"prompts": kind, "rows": rows, **measured})
            if f"{kind}_{rows}" in limited:
                ratios[f"{kind}_{rows}"] = measured["ratio"]
            times = f"call {measured['call_ms']:.2f} ms, engine {measured['engine_ms']:.2f} ms"
            print(f"{kind} prompts, {rows} rows: {times}, ratio {measured['ratio']:.2f}")
    return {"cases": cases, "ratios": ratios}


def make_prompts(kind: str, rows: int, length: int) -> torch.Tensor:
    """Return prompts, int64 `[rows, length]`: one for all rows, or one for each."""
    generator = torch.Generator().manual_seed(0)
    count = 1 if kind == "equal" else rows
    return torch.randint(1, VOCABULARY, (count, length), generator=generator).expand(rows, -1)


def measure(ways: Mapping[str, Seconds], rows: int, new_tokens: int, rounds: int) -> dict[str, float]:
    """Return the milliseconds of a decode step in a call and in an engine, and the `ratio` of engine to call."""
    of_rounds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in progress_bar(range(rounds), what=f"{rows} rows", unit="rounds"):
        for name, seconds in ways.items():
            short = seconds(1)
            of_rounds[name].append(1e3 * (seconds(new_tokens) - short) / (new_tokens - 1))
    pairs = zip(of_rounds["engine_ms"], of_rounds["call_ms"], strict=True)
    ratio = median(engine / call for engine, call in pairs)
    return {name: median(values) for name, values in of_rounds.items()} | {"ratio": ratio}


def measure_demo(rows: int, sizes: Any) -> dict[str, float]:
    """Return the result of `measure` for the demo model. Call and engine have all prompts in their caches."""
    caller, served = (
        hf_parallel.enable(hf_parallel.load_embedded_model(weights="packed_int8", preset=False)[0]) for _ in range(2)
    )
    prompts = make_prompts("different", rows, sizes.demo_prompt)
    settings = {"keep_completions": False}
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(served, max_rows=rows))
        cache = hf_parallel.SharedPrefixCache()
        ways: dict[str, Seconds] = {
            "call_ms": lambda length: in_call(caller, prompts, length, past_key_values=cache, **settings),
            "engine_ms": lambda length: of_requests(engine, prompts, length, **settings),
        }
        for seconds in ways.values():
            seconds(1)
        return measure(ways, rows, sizes.demo_new_tokens, sizes.rounds)


def in_call(model: Any, prompts: torch.Tensor, length: int, **settings: Any) -> float:
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
        **settings,
    )
    return time.process_time() - began


def in_engine(model: Any, prompts: torch.Tensor, length: int) -> float:
    """Return the CPU seconds of an engine that serves a request for each prompt, in chunks as large as a call's."""
    with Engine(model, max_rows=len(prompts), max_batch_tokens=PREFILL_CHUNK) as engine:
        return of_requests(engine, prompts, length)


def of_requests(engine: Engine, prompts: torch.Tensor, length: int, **settings: Any) -> float:
    """Return the CPU seconds of a request for each prompt, submitted at once."""
    began = time.process_time()
    requests = [
        engine.prepare(prompt[None], max_new_tokens=length, seed=number, **SAMPLING, **settings)
        for number, prompt in enumerate(prompts)
    ]
    for handle in engine.submit_together(requests):
        handle.result()
    return time.process_time() - began
