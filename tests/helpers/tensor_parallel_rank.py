"""One rank of a parallel model, for `test_tensor_parallel.py`: what it generates by itself and with an engine."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from engine_requests import MODES, Case, assert_nothing_is_held, random_case, random_prefixes, submit_all
from mode_cases import BUILT_IN, small_call
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_parallel
from hf_parallel.engine import Engine, KVBudgetError, RequestCancelledError

PROMPT = torch.tensor([AsciiTokenizer()("Once upon a time")["input_ids"]])
MAX_KV_BYTES = 60_000


def sequences(model: Any, modes: Sequence[str] = BUILT_IN) -> dict[str, list[list[int]]]:
    """Return what each mode generates."""
    hf_parallel.enable(model)
    found = {}
    for mode in modes:
        arguments = {"seed": 1, **small_call(mode), "tokenizer": AsciiTokenizer()}
        out = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **arguments)
        found[mode] = out.tolist()
    return found


def random_requests(rng: random.Random) -> list[Case]:
    """Return requests in all modes."""
    prefixes = random_prefixes(rng, 4, 40)
    return [random_case(rng, prefixes, (*MODES, "fork_join")) for _ in range(12)]


def crowd() -> list[Case]:
    """Return requests that together need more keys and values than `MAX_KV_BYTES`, whatever their order."""
    prompts = [torch.arange(first, first + 40)[None] for first in (32, 42, 52, 62)]
    return [Case(prompt, "shared_prefix", {"max_new_tokens": 60, "pad_token_id": tiny.PAD}) for prompt in prompts]


def load_part(path: str, kind: str) -> Any:
    """Load this rank's part of a model.

    `kind` is the size of `DistributedConfig` that is 2, or `tp_plan`, which Transformers had before.
    """
    if kind == "tp_plan":
        parallel: dict[str, Any] = {"tp_plan": "auto"}
    else:
        parallel = {"distributed_config": DistributedConfig(**{kind: 2})}
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **parallel)


def generate_on_rank(path: str, results: str, kind: str) -> None:
    """Write the sequences of all modes, and those of requests of an engine, to a file of the rank."""
    model = load_part(path, kind)
    torch.manual_seed(torch.distributed.get_rank())
    found: dict[str, Any] = {"sequences": sequences(model)}
    sampled = {"generation_mode": "shared_prefix", "do_sample": True, "max_new_tokens": 12}
    found["unseeded"] = [model.generate(PROMPT, **sampled).tolist() for _ in range(2)]
    rank, rng = torch.distributed.get_rank(), random.Random(1)
    requests = random_requests(rng)
    with Engine(model, AsciiTokenizer(), max_kv_bytes=MAX_KV_BYTES, max_batch_tokens=64) as engine:
        if engine.leads:
            found["requests"] = [None for _ in requests]
            for index, handle in enumerate(submit_all(engine, requests, rng)):
                if handle is not None:
                    with suppress(RequestCancelledError, KVBudgetError):
                        found["requests"][index] = handle.result(600).sequences.tolist()
            together = [engine.prepare(case.prompt, case.mode, **case.arguments) for case in crowd()]
            found["crowd"] = [handle.result(600).sequences.tolist() for handle in engine.submit_together(together)]
            found["preemptions"] = engine.stats.preemptions
            assert_nothing_is_held(engine)
        else:
            try:
                engine.submit(PROMPT)
            except RuntimeError as error:
                found["error"] = str(error)
    (Path(results) / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def fail_on_rank(path: str, results: str, failing: int) -> None:
    """Write the errors of an engine whose model fails in a pass of one rank."""
    model, passes = load_part(path, "tp_size"), 0

    def fail(*_: object) -> None:
        nonlocal passes
        passes += 1
        if passes == 5:
            raise ZeroDivisionError("a fault")

    rank = torch.distributed.get_rank()
    try:
        with Engine(model) as engine:
            if rank == failing:
                model.model.layers[1].mlp.register_forward_pre_hook(fail)
            if engine.leads:
                engine.submit(PROMPT, max_new_tokens=30).result(600)
    except RuntimeError as error:
        (Path(results) / f"{rank}.txt").write_text(f"{error!r} {error.__cause__!r}")
    except ZeroDivisionError as error:
        (Path(results) / f"{rank}.txt").write_text(repr(error))
