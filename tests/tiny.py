"""Tiny randomly initialised models of every architecture that the tests speak of, and prompts for them.

Built from config classes alone: no network, no files, no tokenizer. Knows transformers and torch, nothing of
hf_parallel. Weights are drawn wide (see `_draw_weights`), so that greedy output varies along the sequence, hangs on
the far past, and wins by margins far above float32 noise. `tests/test_tiny.py` checks that.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import cache

import torch
from architectures import (
    ARCHITECTURES,
    BOS,
    EOS,
    MAX_POSITIONS,
    NUM_LAYERS,
    PAD,
    REFUSED,
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
    "NUM_LAYERS",
    "PAD",
    "REFUSED",
    "SLIDING_WINDOW",
    "VOCAB_SIZE",
    "Architecture",
    "build",
    "left_pad",
    "make_prompts",
]


def build(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Build a tiny model, or return the one built before with the same arguments.

    The model is shared by all tests of a process: put back what you change on it (attention implementation, mixin,
    weights), or deep-copy it first. Another `dtype` holds the same weights, rounded.

    Parameters
    ----------
    name : str
        A key of `ARCHITECTURES` or `REFUSED`.
    seed : int
        Draws other weights. Only seed 0 in float32 is checked by `tests/test_tiny.py`.
    dtype : torch.dtype
        Of the parameters; rotary frequencies stay float32, as `from_pretrained` leaves them.

    Returns
    -------
    PreTrainedModel
        In eval mode, on the CPU.

    Raises
    ------
    KeyError
        If there is no such architecture.
    """
    return _build(name, seed, dtype)


def make_prompts(lengths: Sequence[int], *, seed: int = 0) -> list[torch.Tensor]:
    """Draw prompts of ordinary tokens, none of them pad, bos or eos.

    Parameters
    ----------
    lengths : sequence of int
        Length of each prompt, in tokens.
    seed : int
        Draws other prompts.

    Returns
    -------
    list of torch.Tensor
        One int64 tensor of shape `[length]` for each length.
    """
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(EOS + 1, VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def left_pad(prompts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Put prompts of different lengths into one batch.

    Parameters
    ----------
    prompts : sequence of torch.Tensor
        int64, each of shape `[length]`.

    Returns
    -------
    input_ids, attention_mask : torch.Tensor
        int64, both `[len(prompts), longest]`.
    """
    longest = max(len(prompt) for prompt in prompts)
    input_ids = torch.full((len(prompts), longest), PAD)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, longest - len(prompt) :] = prompt
        attention_mask[row, longest - len(prompt) :] = 1
    return input_ids, attention_mask


@cache
def _build(name: str, seed: int, dtype: torch.dtype) -> PreTrainedModel:
    architecture = ARCHITECTURES[name] if name in ARCHITECTURES else REFUSED[name]
    config = architecture.config()
    auto_class = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model: PreTrainedModel = auto_class.from_config(
        config, dtype=dtype, attn_implementation=architecture.attn_implementation
    )
    _draw_weights(model, architecture, seed)
    return model.eval()


@torch.no_grad()
def _draw_weights(model: PreTrainedModel, architecture: Architecture, seed: int) -> None:
    """Draw every parameter anew, from a stream of its own, so that no draw hangs on the order of parameters.

    A matrix gets a standard deviation of `1 / sqrt(hidden_size)`, which keeps the size of what passes through;
    query and key projections (or the norms that follow them) `attention_gain` times as much, which makes attention
    choose; the language-model head `head_gain` times, which sets the margins. Norm weights, biases and other vectors
    move off the constant where they start. Pad, bos and eos are hardly ever the best token: pass the `eos_token_id`
    of a token that a row does produce to see it stop.

    A tied head would favour the token just read, whose embedding is still in the residual stream. Signs drawn for
    the weights of the last norm take that away.
    """
    unit = model.config.hidden_size**-0.5
    head = model.get_output_embeddings()
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{architecture.seed + seed}:{name}".encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        start = parameter.float().flatten()[0]  # of a norm weight: 1, or 0 where the norm itself adds the 1
        if "sinks" in name:
            drawn = architecture.attention_gain**2 + noise
        elif _is_last_norm(name) and model.config.tie_word_embeddings:
            drawn = start - 1 + architecture.head_gain * unit / architecture.embedding_std * noise
        elif any(part in name for part in _QUERY_KEY_NORMS) and name.endswith("weight"):
            drawn = start - 1 + architecture.attention_gain + 0.2 * noise
        elif parameter.ndim == 1 or name.endswith("_bias"):
            drawn = (start if name.endswith("weight") else 0.0) + 0.2 * noise
        elif id(parameter) in embeddings:
            drawn = architecture.embedding_std * noise
        elif parameter is head.weight:
            drawn = architecture.head_gain * unit * noise
        elif any(part in name for part in _QUERY_KEY_PROJECTIONS):
            drawn = architecture.attention_gain * unit * noise
        else:
            drawn = unit * noise
        if parameter is head.weight:
            drawn[[PAD, BOS, EOS]] *= 0.1
        parameter.copy_(drawn)


_QUERY_KEY_PROJECTIONS = ("q_proj", "k_proj", "qkv_proj", "query_key_value", "c_attn")
_QUERY_KEY_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")


def _is_last_norm(name: str) -> bool:
    inside_a_layer = any(part.isdigit() for part in name.split("."))
    return name.endswith(("norm.weight", "norm_f.weight", "ln_f.weight")) and not inside_a_layer
