"""One rank of a parallel model, for `test_tensor_parallel.py`: generates in all modes and writes the sequences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ascii_tokenizer import AsciiTokenizer
from mode_cases import BUILT_IN, small_call
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_parallel
from hf_parallel.engine import Engine

PROMPT = torch.tensor([AsciiTokenizer()("Once upon a time")["input_ids"]])


def sequences(model: Any, modes: Sequence[str] = BUILT_IN) -> dict[str, list[list[int]]]:
    """Return what each mode generates."""
    hf_parallel.enable(model)
    found = {}
    for mode in modes:
        arguments = {"seed": 1, **small_call(mode), "tokenizer": AsciiTokenizer()}
        out = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **arguments)
        found[mode] = out.tolist()
    return found


def generate_on_rank(path: str, results: str, kind: str) -> None:
    """Load this rank's part of a model and write the sequences and errors to a file of the rank.

    `kind` is the size of `DistributedConfig` that is 2, or `tp_plan`, which Transformers had before.
    """
    if kind == "tp_plan":
        parallel: dict[str, Any] = {"tp_plan": "auto"}
    else:
        parallel = {"distributed_config": DistributedConfig(**{kind: 2})}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **parallel)
    torch.manual_seed(torch.distributed.get_rank())
    found: dict[str, Any] = {}
    try:
        found["sequences"] = sequences(model)
        sampled = {"generation_mode": "shared_prefix", "do_sample": True, "max_new_tokens": 12}
        found["unseeded"] = [model.generate(PROMPT, **sampled).tolist() for _ in range(2)]
        Engine(model)
    except ValueError as error:
        found["error"] = str(error)
    rank = torch.distributed.get_rank()
    (Path(results) / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
