"""A tiny Llama with one layer, for benchmarks that run many forward passes."""

from __future__ import annotations

import copy
from typing import Any

import tiny
import torch
from transformers import LlamaForCausalLM


def build(**changes: Any) -> LlamaForCausalLM:
    """Return a model with the config of `tiny.build("llama")`, changed, one layer and fixed random weights."""
    config = copy.deepcopy(tiny.build("llama").config)
    config.update({"num_hidden_layers": 1, **changes})
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()
