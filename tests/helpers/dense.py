"""Dense oracle for Hogwild!: each row's past is concatenated, with every key rotated to its position in that row.

It uses token lists and true positions only. The model rotates a row's tokens to their true position in the row's view;
a key is rotated from the position at which it was written to its position in the view of the row that reads it. It
shares no code with the blocks, plans and caches of `hf_parallel`.
"""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Sequence
from typing import Any

import torch
from scenes import rotate_to
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from hf_parallel.kernels import RotarySpec

Piece = list[int]
"""Indices into the oracle's memory, in reading order. A view is a list of pieces; the row appends to the last one."""

_IMPLEMENTATION = "tests_dense"
_running: list[DenseOracle] = []


class _Positions(Cache):
    """A cache that keeps nothing, for layers that count their positions from its length."""

    def __init__(self, positions: torch.Tensor) -> None:
        super().__init__(layers=[])
        self.positions = positions

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        return 0 if layer_idx is None else self.positions - torch.arange(len(self.positions))

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0


class DenseOracle:
    """A model, whose attention is replaced while a pass runs: rows attend to pieces of one memory.

    `rotary`: rotary embedding of each layer.
    """

    def __init__(self, model: PreTrainedModel, rotary: dict[int, RotarySpec | None]) -> None:
        self.model, self.rotary = model, rotary
        self.tokens: list[int] = []
        self.positions: list[int] = []  # at which each token was written
        self.keys: dict[int, torch.Tensor] = {}  # per layer, [kv_heads, tokens, head_dim]
        self.values: dict[int, torch.Tensor] = {}
        self.shift = 0  # of the positions after a prompt, which has more or fewer positions than tokens
        self.rows: list[tuple[list[int], int]] = []  # visible tokens and number of new tokens of each row

    @torch.no_grad()
    def forward(self, inputs: Sequence[tuple[Sequence[Piece], Sequence[int]]]) -> torch.Tensor:
        """Append each row's tokens to the last piece of its view; returns the logits of all, `[T, vocabulary]`."""
        first = len(self.tokens)
        for view, tokens in inputs:
            view[-1].extend(range(len(self.tokens), len(self.tokens) + len(tokens)))
            self.tokens += tokens
        self.rows = [([index for piece in view for index in piece], len(tokens)) for view, tokens in inputs]
        self.positions += [p + self.shift for seen, n in self.rows for p in range(len(seen) - n, len(seen))]
        before = self.model.config._attn_implementation
        _running.append(self)
        try:
            self.model.set_attn_implementation(_IMPLEMENTATION)
            return self.model(
                input_ids=torch.tensor([self.tokens[first:]]),
                past_key_values=_Positions(torch.tensor(self.positions[first:])),
                **self.arguments(first),
            ).logits[0]
        finally:
            _running.pop()
            self.model.set_attn_implementation(before)

    def arguments(self, first: int) -> dict[str, Any]:
        """Return the other arguments of the model for the tokens from index `first` on."""
        return {"position_ids": torch.tensor([self.positions[first:]])}

    def sees_later(self, layer: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return whether a token sees another one even if that comes later, by their indices."""
        return torch.zeros(torch.broadcast_shapes(query.shape, key.shape), dtype=torch.bool)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        chunk: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """One layer: `[heads, T, head_dim]` queries against the visible tokens of each row."""
        self.keys[layer] = torch.cat((self.keys.get(layer, key[:, :0]), key), dim=1)
        self.values[layer] = torch.cat((self.values.get(layer, value[:, :0]), value), dim=1)
        positions = torch.tensor(self.positions)
        groups, out, offset = query.shape[0] // key.shape[0], [], 0
        for seen, n in self.rows:
            index, at = torch.tensor(seen), torch.arange(len(seen))
            k = rotate_to(
                self.keys[layer][:, index].double(), at + self.shift - positions[index], self.rotary[layer]
            ).to(key.dtype)
            k, v = (x.repeat_interleave(groups, dim=0) for x in (k, self.values[layer][:, index]))
            scores = query[:, offset : offset + n] @ k.mT * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            distance = at[-n:, None] - at
            later = self.sees_later(layer, index[-n:, None], index)
            hidden = ((distance < 0) & ~later) | (distance >= (window or len(seen)))
            if chunk is not None:
                hidden |= at // chunk != at[-n:, None] // chunk
            scores = scores.masked_fill(hidden, -math.inf)
            if sinks is not None:
                scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(-1, n, 1)), dim=-1)
            out.append(scores.softmax(-1)[..., : len(seen)] @ v)
            offset += n
        return torch.cat(out, dim=1)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    layer: Any = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    config: Any = module.config
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    chunk = config.attention_chunk_size if kinds[layer] == "chunked_attention" else None
    window = config.sliding_window if kinds[layer] == "" and hasattr(config, "sliding_window") else sliding_window
    out = _running[-1].attend(layer, query[0], key[0], value[0], scale, window, chunk, softcap, s_aux)
    return out.transpose(0, 1)[None], None


AttentionInterface.register(_IMPLEMENTATION, _attention)
AttentionMaskInterface.register(_IMPLEMENTATION, lambda *args, **kwargs: None)


def in_float64(model: PreTrainedModel, num_layers: int | None = None) -> PreTrainedModel:
    """Copy of a model, or of its first layers, that computes all in float64, including norms and rotary tables."""
    model = copy.deepcopy(model).double()
    if num_layers is not None:
        model.model.layers = model.model.layers[:num_layers]
        model.config.num_hidden_layers = num_layers
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = module.inv_freq.double()
            module.forward = types.MethodType(_rotary_tables, module)
        elif type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(_rms_norm, module)
    return model


def _rotary_tables(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = (position_ids[..., None] * self.inv_freq).repeat(1, 1, 2)
    return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def _rms_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
