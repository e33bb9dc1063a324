"""A tiny Llama with one layer, for benchmarks that run many forward passes."""

from __future__ import annotations

import copy

import tiny
import torch
from transformers import LlamaForCausalLM


def build() -> LlamaForCausalLM:
    """Return a model with the config of `tiny.build("llama")`, one layer and fixed random weights."""
    config = copy.deepcopy(tiny.build("llama").config)
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()
