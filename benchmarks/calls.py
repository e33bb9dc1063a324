"""Calls of this package's functions per decode step.

A model of two tiny layers generates with short and with long answers under `sys.setprofile`; the difference is what the
further decode steps cost. Counts do not depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
import threading
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

from .gpu_parts.models import ByteTokenizer

PACKAGE = str(Path(hf_parallel.__file__).parent)
SHORT, LONG = 8, 72
"""New tokens of the two calls that are compared."""


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
    ids, tokenizer = torch.tensor([list(b"Two workers write about one question. ")]), ByteTokenizer()
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


def measure(run: Callable[[int], None]) -> tuple[float, dict[str, float]]:
    """Return the calls per decode step of a workload, in all and by function."""
    found = []
    run(SHORT)  # compiles kernels and fills caches
    for length in (SHORT, LONG):
        with counted() as counts:
            run(length)
        found.append(counts)
    more, steps = found[1] - found[0], LONG - SHORT
    by_function = {
        f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_qualname}": count / steps  # type: ignore[attr-defined]
        for code, count in more.most_common()
        if count >= steps // 2
    }
    return sum(more.values()) / steps, by_function


def main() -> int:
    """Print the counts; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks calls", description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", choices=WORKLOADS)
    parser.add_argument("--functions", action="store_true", help="list the calls of each function")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    model = tiny_model()
    for name, make in WORKLOADS.items():
        if options.only in (None, name):
            calls, functions = measure(make(model))
            print(f"{name}: {calls:.1f} calls per step")
            if options.functions:
                print("\n".join(f"{count:8.2f} {function}" for function, count in functions.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
