"""A model whose next token depends on the position alone, so that it writes a given text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def writing_model(tokenizer: Any, script: Sequence[int], begin: int, positions: int = 256) -> GPT2LMHeadModel:
    """Return a GPT-2 that writes `script` after a prompt of `begin` tokens, and the token 3 from then on."""
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=positions,
        n_embd=positions,
        n_layer=1,
        n_head=4,
        n_inner=8,
        tie_word_embeddings=False,
        **tokens,
    )
    model = GPT2LMHeadModel(config).eval()
    layer = model.transformer.h[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        for norm in (model.transformer.ln_f, layer.ln_1, layer.ln_2):
            norm.weight.fill_(1)
        model.transformer.wpe.weight.copy_(torch.eye(positions))
        model.lm_head.weight[3] = 1.0
        for index, token in enumerate(script):
            model.lm_head.weight[token, begin - 1 + index] = 2.0
    return model
