"""Models of known shapes with random weights, and the prompts and tokenizer to run them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3_5TextConfig, Qwen3Config

import hf_parallel
from hf_parallel.cache import BlockCache
from hf_parallel.models import attention

PAD = 0
"""Padding token of finished rows."""

_NO_ENDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
# Llama's original 4096 positions are fewer than the longest prefix; the number does not affect the cost.
_LONG: dict[str, Any] = {"max_position_embeddings": 40960, **_NO_ENDS}
_TOY: dict[str, Any] = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, **_NO_ENDS}
_TOY |= {"num_attention_heads": 1, "num_key_value_heads": 1}
_HYBRID = _TOY | {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
_HYBRID |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
_WIDE: dict[str, Any] = {"hidden_size": 4096, "num_attention_heads": 32, **_LONG}
CONFIGS = {
    "Qwen3-8B": Qwen3Config(
        vocab_size=151936,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_key_value_heads=8,
        head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **_WIDE,
    ),
    "Llama-2-7B": LlamaConfig(
        vocab_size=32000, intermediate_size=11008, num_hidden_layers=32, num_key_value_heads=32, **_WIDE
    ),
    "Qwen3.5-9B": Qwen3_5TextConfig(**_NO_ENDS),  # its sizes are the defaults
    "toy hybrid": Qwen3_5TextConfig(layer_types=["linear_attention", "full_attention"], num_hidden_layers=2, **_HYBRID),
    "toy": Qwen3Config(num_hidden_layers=1, max_position_embeddings=2048, **_TOY),
}
"""Configurations by name, without EOS token, so that all rows have the maximum length."""


@dataclass(eq=False)
class Models:
    """Builds models on demand and keeps them; all of them fit on a large GPU."""

    device: torch.device
    dtype: torch.dtype
    _built: dict[str, PreTrainedModel] = field(default_factory=dict)

    def get(self, name: str) -> Any:
        """Return the enabled model."""
        if name not in self._built:
            with self.device:
                model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=self.dtype).eval()
            self._built[name] = hf_parallel.enable(model)
        return self._built[name]


def weight_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of weights that a decode step reads: all but the input embeddings."""
    embeddings: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    total = sum(parameter.nbytes for parameter in model.parameters())
    return total if embeddings.weight is head.weight else total - embeddings.weight.nbytes


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Return the bytes of keys and values per token over all layers."""
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * model.dtype.itemsize


def head_dim(config: Any) -> int:
    """Return the width of a head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def draw_prompt(model: PreTrainedModel, rows: int, length: int) -> torch.Tensor:
    """Return one random prompt for all rows, `int64 [rows, length]`, without the padding token."""
    return torch.randint(PAD + 1, model.config.vocab_size, (1, length), device=model.device).repeat(rows, 1)


def hogwild_settings(model: PreTrainedModel, workers: int) -> dict[str, Any]:
    """Return settings of `hogwild` without a final answer; short texts for the toy model, which is interpreted."""
    settings: dict[str, Any] = {"generation_mode": "hogwild", "tokenizer": ByteTokenizer(), "num_workers": workers}
    if model.config.hidden_size == CONFIGS["toy"].hidden_size:
        settings |= {"history_header": "H", "others_header": "O", "own_header": "M", "step_prefix": "{step}"}
    return settings | {"answer_pattern": "", "finisher_tokens": 0}


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
