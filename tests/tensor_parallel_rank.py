"""One rank of a tensor-parallel run, for `test_tensor_parallel.py`: generates in all modes and writes the sequences."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from ascii_tokenizer import AsciiTokenizer
from mode_cases import BUILT_IN, small_call
from transformers import AutoModelForCausalLM

import hf_parallel
from hf_parallel.engine import Engine

PROMPT = torch.tensor([AsciiTokenizer()("Once upon a time")["input_ids"]])


def sequences(model: Any) -> dict[str, list[list[int]]]:
    """Return what each mode generates."""
    hf_parallel.enable(model)
    found = {}
    for mode in BUILT_IN:
        arguments = {"seed": 1, **small_call(mode), "tokenizer": AsciiTokenizer()}
        out = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **arguments)
        found[mode] = out.tolist()
    return found


def main(path: str, results: str) -> None:
    """Load the model in shards and write the sequences and the engine's error to a file of this rank."""
    model = AutoModelForCausalLM.from_pretrained(path, tp_plan="auto", dtype=torch.float32)
    query = model.model.layers[0].self_attn.q_proj.weight
    found: dict[str, Any] = {"shard": list(query.to_local().shape), "sequences": sequences(model)}
    try:
        Engine(model)
    except ValueError as error:
        found["engine"] = str(error)
    rank = torch.distributed.get_rank()
    (Path(results) / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
