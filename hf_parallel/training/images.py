"""Images in the prompts of packed examples: each is computed once, with gradients, by the model's own vision tower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import PretrainedConfig

from hf_parallel.cache.images import FIRST_ID, Image, ImageTable
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
    given = {name: x.to(model.device) if hasattr(x, "to") else x for name, x in inputs.items() if x is not None}
    if unknown := given.keys() - {*OF_TOKENS} - image_inputs(model):
        raise ValueError(f"{sorted(unknown)} are not supported in the loss: pass token ids and images only")
    mask = given.setdefault("attention_mask", torch.ones_like(given["input_ids"])).bool().cpu()
    if given.keys() - {*OF_TOKENS}:
        require_enabled(model)
        given["position_ids"] = model._prepare_position_ids_for_generation(given["input_ids"], dict(given))
        take_images(model, given, ImageTable())
    ids = given.get("prompt_ids", given["input_ids"]).cpu()
    return [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)], given.get("images", [])


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
    for row, (example, own) in enumerate(zip(examples, spans, strict=True)):
        ends = {span.end - 1: span.image.shift for span in own if span.image.shift}
        shifts = [0] * len(example)
        for token, before in enumerate(previous_tokens(example).tolist() if ends else ()):
            shifts[token] = shifts[before] + ends.get(before, 0) if before >= 0 else 0
        positions[..., row, : len(example)] += torch.tensor(shifts, device=ids.device)
        for span in own:
            corrections = span.image.corrections
            if corrections is not None:
                positions[:, row, span.at : span.end] += corrections[:, span.first : span.stop].to(ids.device)
            ahead = {kinds[layer] if kinds else "" for layer in span.image.ahead}
            for mask in (mask for kind, mask in masks.items() if kind in ahead):
                if isinstance(mask, BlockMask):
                    raise ValueError("image tokens that see each other need sdpa or eager attention in the loss")
                mask[row, 0, span.at : span.end, span.at : span.end] = mask.dtype == torch.bool
    features = image_arguments([span for own in spans for span in own])
    ids = ids.masked_fill(ids >= FIRST_ID, config.image_token_id)
    return {"input_ids": ids, "position_ids": positions, **features}
