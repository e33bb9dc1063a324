"""Counts calls of this package's functions per decode step: `python -m benchmarks.calls --help`.

A model of two tiny layers generates with short and with long answers under `sys.setprofile`; the difference is what the
further decode steps cost. Counts do not depend on the machine. Seconds are those outside of `model.forward`.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import hf_parallel
from hf_parallel.engine import Engine

PACKAGE = str(Path(hf_parallel.__file__).parent)
SHORT, LONG = 8, 72
"""New tokens of the two calls that are compared."""


class BytesTokenizer:
    """Tokenizer of one token per byte, enough for the texts of hogwild."""

    eos_token_id = bos_token_id = pad_token_id = 0
    all_special_ids = (0,)
    all_special_tokens = ("\0",)
    chat_template = None
    vocab_size = 256

    def __call__(self, text: str, **kwargs: Any) -> dict[str, Any]:
        """Return `input_ids`."""
        return {"input_ids": list(text.encode())}

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def decode(self, ids: Any, **kwargs: Any) -> str:
        """Return the text of bytes."""
        return bytes(int(one) for one in ids).decode(errors="replace")

    def __len__(self) -> int:
        return self.vocab_size


def tiny_model() -> Any:
    """Return a Llama of two layers with random weights, enabled."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=4096, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return hf_parallel.enable(LlamaForCausalLM(config).eval())


@contextmanager
def counted() -> Iterator[Counter[CodeType]]:
    """Count the calls of the package's functions in all threads that start in this context, and in this thread."""
    counts: Counter[CodeType] = Counter()

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            counts[frame.f_code] += 1

    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        yield counts
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def shared_prefix(model: Any) -> Callable[[int], None]:
    """Return a call of four greedy completions of one prompt, given their length."""
    ids = torch.arange(1, 25)[None].expand(4, -1)
    return lambda length: model.generate(ids, generation_mode="shared_prefix", max_new_tokens=length, do_sample=False)


def hogwild(model: Any) -> Callable[[int], None]:
    """Return a call of two greedy workers, given the length of their steps."""
    ids, tokenizer = torch.tensor([list(b"Two workers write about one question. ")]), BytesTokenizer()
    settings = {"generation_mode": "hogwild", "tokenizer": tokenizer, "num_workers": 2, "do_sample": False}
    settings |= {"suppress_tokens": [ord("\n")]}  # no step ends
    return lambda length: model.generate(ids, max_new_tokens=length, **settings)


def engine(model: Any) -> Callable[[int], None]:
    """Return 16 greedy requests of different prompts to an engine, given the length of their completions."""

    def run(length: int) -> None:
        with Engine(model) as opened:
            prompts = [[1 + i, *range(20, 20 + i)] for i in range(16)]
            handles = [opened.submit(prompt, max_new_tokens=length, do_sample=False) for prompt in prompts]
            for handle in handles:
                handle.result()

    return run


WORKLOADS = {"shared_prefix": shared_prefix, "hogwild": hogwild, "engine": engine}


def measure(model: Any, run: Callable[[int], None], rounds: int) -> dict[str, Any]:
    """Return calls, files and microseconds per decode step of a workload."""
    found = []
    run(SHORT)  # compiles kernels and fills caches
    for length in (SHORT, LONG):
        with counted() as counts:
            run(length)
        found.append(counts)
    steps = LONG - SHORT
    calls = Counter({code: count for code, count in (found[1] - found[0]).items() if count >= steps // 2})
    short, long = (min(_host_seconds(model, run, length) for _ in range(rounds)) for length in (SHORT, LONG))
    by_function: Counter[str] = Counter()
    for code, count in calls.items():
        by_function[f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}"] += count  # type: ignore[attr-defined]
    return {
        "calls": round(sum((found[1] - found[0]).values()) / steps, 1),
        "files": len({code.co_filename for code in calls}),
        "host_microseconds": round((long - short) / steps * 1e6),
        "functions": {name: round(count / steps, 2) for name, count in by_function.most_common()},
    }


def _host_seconds(model: Any, run: Callable[[int], None], length: int) -> float:
    """Return the seconds of a run outside of the model's forward passes."""
    inside = 0.0
    forward = model.forward

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        began = time.perf_counter()
        try:
            return forward(*args, **kwargs)
        finally:
            inside += time.perf_counter() - began

    timed.__signature__ = __import__("inspect").signature(forward)  # type: ignore[attr-defined]
    model.forward = timed
    try:
        began = time.perf_counter()
        run(length)
        return time.perf_counter() - began - inside
    finally:
        del model.forward


def main() -> None:
    """Print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=5, help="runs of which the fastest is timed")
    parser.add_argument("--functions", action="store_true", help="list the calls of each function")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = tiny_model()
    results = {
        name: measure(model, make(model), options.rounds)
        for name, make in WORKLOADS.items()
        if options.only in (None, name)
    }
    if options.json:
        print(json.dumps(results, indent=1))
        return
    for name, result in results.items():
        print(f"{name}: {result['calls']} calls in {result['files']} files, {result['host_microseconds']} us per step")
        if options.functions:
            print("\n".join(f"{count:8} {function}" for function, count in result["functions"].items()))


if __name__ == "__main__":
    main()
