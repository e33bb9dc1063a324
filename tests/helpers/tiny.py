"""Tiny randomly initialized models of every tested architecture, and prompts for them.

Built from config classes, without network, files, tokenizer or hf_parallel. Weights have a large variance (see
`draw_weights`), so that greedy output varies along the sequence, depends on distant tokens, and has margins far above
float32 rounding errors.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import hybrids
import mapping
import torch
from architectures import (
    ARCHITECTURES,
    BOS,
    EOS,
    MAX_POSITIONS,
    PAD,
    REFUSED,
    REPRESENTATIVE,
    SLIDING_WINDOW,
    VOCAB_SIZE,
    Architecture,
)
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

__all__ = [
    "ARCHITECTURES",
    "BOS",
    "EOS",
    "MAX_POSITIONS",
    "PAD",
    "REFUSED",
    "REPRESENTATIVE",
    "SLIDING_WINDOW",
    "VOCAB_SIZE",
    "Architecture",
    "build",
    "built_models",
    "clear_cache",
    "draw_weights",
    "each",
    "left_pad",
    "make_prompts",
]

_built: dict[tuple[str, int, torch.dtype], PreTrainedModel] = {}


def build(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a tiny model, or return the one built earlier with the same arguments.

    The model is shared by all tests of a process: undo changes (attention implementation, mixin, weights), or deep-copy
    it first. Another `dtype` has the same weights, rounded; rotary frequencies stay float32, as in `from_pretrained`.
    `name`: a key of `ARCHITECTURES`, `REFUSED` or `hybrids.ARCHITECTURES`, or one of `mapping.NAMES`.
    """
    if (name, seed, dtype) not in _built:
        _built[name, seed, dtype] = _build(name, seed, dtype)
    return _built[name, seed, dtype]


def each(names: Iterable[str] = ARCHITECTURES) -> list[Any]:
    """Return parameters of a test that runs on every architecture: all but the representative ones are slow."""
    import pytest  # scripts build models without it

    return [pytest.param(name, marks=[] if name in REPRESENTATIVE else pytest.mark.slow) for name in names]


def make_prompts(lengths: Sequence[int], *, seed: int = 0) -> list[torch.Tensor]:
    """Return random prompts of these lengths without pad, bos and eos tokens: int64, each `[length]`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(EOS + 1, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def left_pad(prompts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad prompts to one batch: `input_ids` and `attention_mask`, int64 `[len(prompts), longest]`."""
    longest = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), longest), PAD)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = prompt
        attention_mask[row, longest - len(prompt) :] = 1
    return input_ids, attention_mask


def clear_cache() -> None:
    """Forget the models built so far."""
    _built.clear()


def built_models() -> list[PreTrainedModel]:
    """Return the models built so far."""
    return list(_built.values())


def architecture_of(name: str) -> Architecture:
    """Return the tested architecture of a name, or one that `mapping.small_config` makes."""
    tested = {**ARCHITECTURES, **REFUSED, **hybrids.ARCHITECTURES}
    if name not in tested and name not in mapping.NAMES:
        raise KeyError(name)
    config = partial(mapping.small_config, name)
    other = Architecture(name, config, attn_implementation=None, embedding_std=0.1, slow_states=True)
    return tested.get(name, other)


def _build(name: str, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    architecture = architecture_of(name)
    config = architecture.config()
    is_seq2seq = config.is_encoder_decoder and name not in mapping.NAMES
    auto_class = AutoModelForSeq2SeqLM if is_seq2seq else AutoModelForCausalLM
    model: PreTrainedModel = auto_class.from_config(
        config, dtype=dtype, attn_implementation=architecture.attn_implementation
    )
    draw_weights(model, architecture, seed)
    return model.eval()


@torch.no_grad()
def draw_weights(model: PreTrainedModel, architecture: Architecture, seed: int) -> None:
    """Initialize every parameter from a generator of its own, so that values do not depend on the parameters' order.

    Matrices have a standard deviation of `1 / sqrt(hidden_size)`, which preserves the scale of activations. For query
    and key projections (or the norms after them) it is multiplied by `attention_gain`, which makes attention selective,
    and for the language-model head by `head_gain`, which determines the margins. Noise is added to norm weights, biases
    and other vectors. Pad, bos and eos are almost never generated: to test stopping, pass a generated token as
    `eos_token_id`.

    With `slow_states`, states decay slowly, so that logits depend on the beginning of a prompt, too. A tied head would
    favor the last token, whose embedding is still in the residual stream. Random signs of the last norm's weights
    prevent that.
    """
    unit = getattr(model.config.get_text_config(decoder=True), "hidden_size", 64) ** -0.5
    head = getattr(model.get_output_embeddings(), "weight", None)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{architecture.seed + seed}:{name}".encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        start = parameter.float().flatten()[0]  # of a norm weight: 1, or 0 where the norm itself adds the 1
        if "sinks" in name:
            drawn = architecture.attention_gain**2 + noise
        elif _is_last_norm(name) and getattr(model.config, "tie_word_embeddings", False):
            drawn = start - 1 + architecture.head_gain * unit / architecture.embedding_std * noise
        elif any(part in name for part in _QUERY_KEY_NORMS) and name.endswith("weight"):
            drawn = start - 1 + architecture.attention_gain + 0.2 * noise
        elif architecture.slow_states and name.endswith(_DECAYS):
            drawn = noise - 5
        elif parameter.ndim == 1 or name.endswith("_bias"):
            drawn = (start if name.endswith("weight") else 0.0) + 0.2 * noise
        elif id(parameter) in embeddings:
            drawn = architecture.embedding_std * noise
        elif parameter is head:
            drawn = architecture.head_gain * unit * noise
        elif any(part in name for part in _QUERY_KEY_PROJECTIONS):
            drawn = architecture.attention_gain * unit * noise
        else:
            drawn = unit * noise
        if parameter is head:
            drawn[[PAD, BOS, EOS]] *= 0.1
        parameter.copy_(drawn)


_QUERY_KEY_PROJECTIONS = ("q_proj", "k_proj", "qkv_proj", "query_key_value", "c_attn", "self.query", "self.key")
_DECAYS = ("A_log", "recurrent_param", "time_decay")
"""Parameters of layers with states: the logarithm of the rate at which a state decays, or what it is computed from."""
_QUERY_KEY_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")


def _is_last_norm(name: str) -> bool:
    inside_a_layer = any(part.isdigit() for part in name.split("."))
    return name.endswith(("norm.weight", "norm_f.weight", "ln_f.weight")) and not inside_a_layer
