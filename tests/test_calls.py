"""Calls of the package's functions per decode step: what a step costs the host does not depend on the machine.

Linear layers, norms and rotary embeddings are not counted, as a model calls them itself.

The ceilings are a little above what was counted. A higher count is a hop that somebody has added; lower the ceiling
where a change saves calls.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from ascii_tokenizer import AsciiTokenizer
from held_engine import first_step_held
from transformers import LlamaConfig, LlamaForCausalLM

import hf_parallel
from hf_parallel.engine import Engine
from hf_parallel.kernels import native

pytestmark = pytest.mark.usefixtures("one_thread")

PACKAGE = str(Path(hf_parallel.__file__).parent)
LAYERS = str(Path(PACKAGE, "models", "cpu"))
KERNELS = {kernel.__code__ for kernel in (native.activate, native.linear, native.rms_norm, native.rotate_heads)}
SHORT, LONG = 8, 72
"""New tokens of the two calls that are compared."""
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "min_new_tokens": 0}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=4096,
        pad_token_id=0,
        eos_token_id=None,
    )
    return hf_parallel.enable(LlamaForCausalLM(config).eval())


@contextmanager
def counted() -> Iterator[Counter[CodeType]]:
    """Count calls of the package's functions in this thread, and in all that start in this context."""
    counts: Counter[CodeType] = Counter()

    def on_event(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        if not code.co_filename.startswith(LAYERS) and code not in KERNELS:
            counts[code] += 1

    before = sys.getprofile()
    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        yield counts
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def rows_of_a_prompt(model: Any, length: int) -> None:
    ids = torch.arange(1, 25)[None].expand(4, -1)
    model.generate(ids, generation_mode="shared_prefix", max_new_tokens=length, **GREEDY)


def two_workers(model: Any, length: int) -> None:
    ids = torch.tensor([AsciiTokenizer()("Two workers write about one question. ")["input_ids"]])
    settings = {"tokenizer": AsciiTokenizer(), "num_workers": 2, "suppress_tokens": [ord("\n")]}  # no step ends
    model.generate(ids, generation_mode="hogwild", max_new_tokens=length, **settings, **GREEDY)


def requests_of_an_engine(model: Any, length: int) -> None:
    """Run 16 requests of different prompts, which are all there at the first step."""
    with Engine(model) as engine:
        prompts = [[1 + number, *range(20, 20 + number)] for number in range(16)]
        with first_step_held():
            handles = [engine.submit(prompt, max_new_tokens=length, **GREEDY) for prompt in prompts]
        for handle in handles:
            handle.result(600)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("run", "most"), [(rows_of_a_prompt, 56), (requests_of_an_engine, 133), (two_workers, 134)])
def test_a_step_makes_few_calls(model: Any, run: Callable[[Any, int], None], most: int) -> None:
    run(model, LONG)  # compiles kernels, fills caches and records a program
    found = []
    for length in (SHORT, LONG):
        with counted() as counts:
            run(model, length)
        found.append(counts)
    more = found[1] - found[0]
    per_step = sum(more.values()) / (LONG - SHORT)
    common = {code.co_qualname: count / (LONG - SHORT) for code, count in more.most_common(20)}  # type: ignore[attr-defined]
    assert per_step <= most, common
