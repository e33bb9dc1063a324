"""Models of known shapes with random weights, and the prompts and tokenizer to run them."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import hf_parallel
from hf_parallel import PDOSConfig
from hf_parallel.cache import BlockCache
from hf_parallel.models.intercept import attention

PAD = 0
"""Padding token of finished rows."""
ORDINARY = 150_000
"""Prompts have only tokens below: Qwen's marks of images are above."""

_NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SHAPES = json.loads(Path(__file__).with_name("shapes.json").read_text(encoding="utf-8"))
# Llama's original 4096 positions are fewer than the longest prefix; the number does not affect the cost.
CONFIGS: dict[str, Any] = {name: AutoConfig.for_model(**shape, **_NO_ENDS) for name, shape in _SHAPES.items()}
"""Configurations by name, without EOS token, so that all rows have the maximum length."""


@dataclass(eq=False)
class Models:
    """Builds models on demand and keeps them: two of 8 billion parameters, or a larger one alone, fit on a GPU."""

    device: torch.device
    dtype: torch.dtype
    _built: dict[str, PreTrainedModel] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """Return the enabled model."""
        if name not in self._built:
            self._built[name] = self.new(name)
        return self._built[name]

    def new(self, name: str) -> Any:
        """Return an enabled model that is not kept."""
        config = CONFIGS[name]
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        with self.device:
            return hf_parallel.enable(auto.from_config(config, dtype=self.dtype).eval())

    def alone(self, name: str) -> Any:
        """Return the enabled model after releasing all others."""
        self._built = {kept: model for kept, model in self._built.items() if kept == name}
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return self.get(name)


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a decode step reads: all but the input embeddings."""
    embeddings: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    total = sum(parameter.nbytes for parameter in model.parameters())
    return total if embeddings.weight is head.weight else total - embeddings.weight.nbytes


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Return the bytes of keys and values, or of latents, per token over all layers that keep them."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    layers = sum(kind != "linear_attention" for kind in kinds)
    if rank := getattr(config, "kv_lora_rank", None):
        return layers * (rank + config.qk_rope_head_dim) * model.dtype.itemsize
    return 2 * layers * config.num_key_value_heads * head_dim(config) * model.dtype.itemsize


def head_dim(config: Any) -> int:
    """Return the width of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def draw_prompt(model: PreTrainedModel, rows: int, length: int) -> torch.Tensor:
    """Return one random prompt for all rows, `int64 [rows, length]`, without the padding token and marks of images."""
    end = min(model.config.get_text_config().vocab_size, ORDINARY)
    return torch.randint(PAD + 1, end, (1, length), device=model.device).repeat(rows, 1)


def hogwild_settings(model: PreTrainedModel, workers: int) -> dict[str, Any]:
    """Return settings of `hogwild` without a final answer; short texts for the toy model, which is interpreted."""
    settings: dict[str, Any] = {"generation_mode": "hogwild", "tokenizer": TOKENIZER, "num_workers": workers}
    if model.config.hidden_size == CONFIGS["toy"].hidden_size:
        settings |= {"history_header": "H", "others_header": "O", "own_header": "M", "step_prefix": "{step}"}
    return settings | {"answer_pattern": "", "finisher_tokens": 0}


def pdos_settings(branches: int, length: int) -> dict[str, Any]:
    """Return settings of `pdos`: branches of this length from given titles, and a conclusion of four tokens."""
    config = PDOSConfig(
        titles=[chr(ord("A") + index) for index in range(branches)],
        max_branches=branches,
        max_blocks=1,
        branch_max_new_tokens=length,
        parallel_hint=False,
        compile=True,
    )
    joined = branches * (len("####A:\n") + length) + len(config.terminator)  # a character is a token
    tokens = max(joined, len(config.beginning)) + 4
    return {"parallel_config": config, "tokenizer": TOKENIZER, "max_new_tokens": tokens}


@contextmanager
def attention_skipped() -> Iterator[list[int]]:
    """Let block attention copy its queries, in compiled layers, too; yield the list of their numbers, one per call."""
    calls: list[int] = []

    def skipped(cache: BlockCache, query: torch.Tensor, *_: Any) -> torch.Tensor:
        calls.append(query.shape[2])
        return query.transpose(1, 2).clone()  # the output of a compiled layer's operation may not be its input

    with patch.object(attention, "attend_blocks", skipped):
        yield calls


class ByteTokenizer:
    """Minimal tokenizer for Hogwild!: a token is a byte of UTF-8; bytes beyond ASCII decode to `x`."""

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        """Return the tokens of a text."""
        return {"input_ids": list(text.encode())}

    def decode(self, tokens: Sequence[int], **kwargs: Any) -> str:
        """Return the text of tokens."""
        return "".join(chr(token) if token < 128 else "x" for token in tokens)


TOKENIZER = ByteTokenizer()
"""One for all calls, which keep what they derive from it."""
