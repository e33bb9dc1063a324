"""Images among the arguments of `generate`."""

from __future__ import annotations

from typing import Any

import torch

from hf_parallel.cache.images import SALT, ImageTable
from hf_parallel.cache.logits import LogitsCache
from hf_parallel.generation.enabled import enabled
from hf_parallel.generation.settings import Arguments
from hf_parallel.models.images import TOKEN_TYPES, image_inputs, read_images
from hf_parallel.models.intercept.attention import UnsupportedModelError


def take_images(
    model: Any, kwargs: Arguments, known: ImageTable | None = None, cache: LogitsCache | None = None
) -> None:
    """Replace the arguments that describe images by `images` and `prompt_ids`, which name their tokens.

    `kwargs` are `input_ids`, int64 `[prompts, length]`, and the arguments that transformers has prepared for them.
    Images that are not `known`, by default those of running calls, are computed. Their keys are those of the `cache`.
    """
    inputs = {name: kwargs.pop(name) for name in image_inputs(model) & kwargs.keys()}
    features = {name: value for name, value in inputs.items() if value is not None and name not in TOKEN_TYPES}
    if not features:
        return
    if "pixel_values" not in features:
        raise ValueError(f"{sorted(features)} describe images, but pixel_values are missing")
    capabilities = enabled(model).capabilities
    if capabilities.why_no_images:
        raise UnsupportedModelError(capabilities.why_no_images)
    input_ids: torch.Tensor = kwargs["input_ids"]
    if known is None:
        known = enabled(model).images
    salt = SALT if cache is None else cache.salt
    ids, images = read_images(
        model,
        input_ids,
        kwargs.get("position_ids"),
        features,
        known,
        bidirectional_layers=capabilities.bidirectional_layers,
        salt=salt,
        mask=kwargs.get("attention_mask"),
    )
    kwargs.update(prompt_ids=ids, images=images)
