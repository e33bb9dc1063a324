"""Images in the prompts of packed examples: each is computed once, with gradients, by the model's own vision tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import PretrainedConfig

from hf_parallel.cache.images import Image, ImageSpan, ImageTable, is_image
from hf_parallel.generation.image_prompts import take_images
from hf_parallel.models.images import TOKEN_TYPES, image_arguments, image_inputs
from hf_parallel.training.attention import require_enabled
from hf_parallel.training.example import ParallelExample
from hf_parallel.training.masks import Mask
from hf_parallel.training.states import previous_tokens

OF_TOKENS = ("input_ids", "attention_mask", *TOKEN_TYPES)
"""Inputs `[prompts, length]`."""


def read_prompts(model: Any, inputs: Mapping[str, Any]) -> tuple[list[list[int]], list[Image]]:
    """Return prompts whose image tokens have the ids of `Image.ids`, and the images; `inputs` are a processor's."""
    arguments: dict[str, Any] = {}
    for name, value in inputs.items():
        if value is not None:
            arguments[name] = value.to(model.device) if hasattr(value, "to") else value
    unknown = arguments.keys() - {*OF_TOKENS} - image_inputs(model)
    if unknown:
        raise ValueError(f"{sorted(unknown)} are not supported in the loss: pass token ids and images only")
    input_ids = arguments["input_ids"]
    attention_mask = arguments.setdefault("attention_mask", torch.ones_like(input_ids))
    masks = attention_mask.bool().cpu()
    if arguments.keys() - {*OF_TOKENS}:
        require_enabled(model)
        arguments["position_ids"] = model._prepare_position_ids_for_generation(input_ids, dict(arguments))
        take_images(model, arguments, ImageTable())
    rows = arguments.get("prompt_ids", arguments["input_ids"]).cpu()
    prompts = [row[mask].tolist() for row, mask in zip(rows, masks, strict=True)]
    return prompts, arguments.get("images", [])


def add_images(
    batch: Mapping[str, torch.Tensor],
    masks: Mapping[str, Mask],
    examples: Sequence[ParallelExample],
    images: Sequence[Image],
    config: PretrainedConfig,
) -> dict[str, Any]:
    """Return a batch of `tree_batch` with placeholders, features and positions of images; change their masks."""
    table = ImageTable()
    table.add(images)
    spans = [list(table.spans(example.input_ids)) for example in examples]
    ids = batch["input_ids"]
    positions = batch["position_ids"]
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None)
    if any(image.corrections is not None for image in images):
        positions = positions.repeat(3, 1, 1)
    for row, (example, of_example) in enumerate(zip(examples, spans, strict=True)):
        shifts = _position_shifts(example, of_example)
        positions[..., row, : len(example)] += torch.tensor(shifts, device=ids.device)
        for span in of_example:
            tokens = slice(span.at, span.end)
            if span.image.corrections is not None:
                corrections = span.image.corrections[:, span.first : span.stop]
                positions[:, row, tokens] += corrections.to(ids.device)
            bidirectional = {kinds[layer] if kinds else "" for layer in span.image.bidirectional_layers}
            for kind, mask in masks.items():
                if kind not in bidirectional:
                    continue
                if isinstance(mask, BlockMask):
                    raise ValueError("image tokens that see each other need sdpa or eager attention in the loss")
                mask[row, 0, tokens, tokens] = mask.dtype == torch.bool
    features = image_arguments([span for of_example in spans for span in of_example])
    ids = ids.masked_fill(is_image(ids), config.image_token_id)
    return {"input_ids": ids, "position_ids": positions, **features}


def _position_shifts(example: ParallelExample, spans: Sequence[ImageSpan]) -> list[int]:
    """Return by how much the images before each token in its row move its position."""
    shifts = [0] * len(example)
    shift_after = {span.end - 1: span.image.shift for span in spans if span.image.shift}
    if not shift_after:
        return shifts
    for token, previous in enumerate(previous_tokens(example).tolist()):
        if previous >= 0:
            shifts[token] = shifts[previous] + shift_after.get(previous, 0)
    return shifts
