"""Completions of one long prompt on a model whose layers keep states: the shape of Qwen3.5, with random weights.

The bound is the same batch over a prompt of 4 tokens. Transformers cannot repeat a hybrid's cache for more rows.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import hf_parallel

from . import shared_prefix
from .report import set_up

SIZES = shared_prefix.SIZES | {"generate_batch": 0, "prefilled_cache": 0}
QUICK, TARGETS = shared_prefix.QUICK, shared_prefix.TARGETS
run = shared_prefix.run
FEATURES: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1792, "num_hidden_layers": 16, "vocab_size": 49152}
"""100 million parameters. Three of four layers have linear attention, with heads of 128 dimensions."""
TOY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 300}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 128}
HEADS |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
NO_ENDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


def load(options: Any) -> tuple[Any, Any]:
    """Return the model of the options, or a random one."""
    if options.model:
        return set_up(options)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    torch.manual_seed(0)
    sizes = TOY if options.quick else FEATURES
    config = Qwen3_5TextConfig(**sizes, **HEADS, **NO_ENDS, tie_word_embeddings=True)
    model = hf_parallel.enable(Qwen3_5ForCausalLM(config).eval())
    options.model = f"random Qwen3.5 of {model.num_parameters() / 1e6:.0f} million parameters"
    return model, None
