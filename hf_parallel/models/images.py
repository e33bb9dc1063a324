"""Features of images in prompts, which a model's own vision tower computes once per image.

A forward pass over image tokens gives the model placeholder tokens and these features (`mm_encoder_outputs`), so that
what it does with them, such as adding some in deeper layers, is its own business.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_parallel.cache.images import KEY_BITS, MAX_TOKENS, Image, ImageRun, ImageTable
from hf_parallel.cache.placement import execution_device
from hf_parallel.models.attention import AttentionRecorder, UnsupportedModelError, block_attention_enabled
from hf_parallel.models.signature import parameters_of, takes

THUMBNAIL = 64
"""Larger side of a thumbnail, in pixels."""
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments of `generate` that mark the placeholders, as the token ids do."""


def image_inputs(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the arguments of `generate` that describe images; none if the model takes no images."""
    compute = getattr(model, "get_image_features", None)
    if compute is None or not takes(model.forward, "mm_encoder_outputs"):
        return frozenset()
    names = {name for name in parameters_of(compute) if not name.startswith("vision_")} - {"kwargs"}
    return frozenset(names.union(TOKEN_TYPES))


def layers_ahead(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the layers whose attention mask lets image tokens see later tokens of their image."""
    types = [name for name in TOKEN_TYPES if name in parameters_of(model.forward)]
    if not types or not image_inputs(model):
        return ()
    recorder, two = AttentionRecorder(), torch.ones(1, 2, dtype=torch.int64, device=execution_device(model))
    with block_attention_enabled(model, recorder):
        model(input_ids=two, position_ids=two.cumsum(-1) - 1, use_cache=False, **dict.fromkeys(types, two))
    return tuple(sorted(recorder.ahead))


def read_images(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor | None,
    inputs: Mapping[str, Any],
    known: ImageTable,
    ahead: Collection[int],
    salt: bytes,
) -> tuple[torch.Tensor, list[Image]]:
    """Return `input_ids` int64 `[prompts, length]` with the ids of image tokens, and the images, those not `known` new.

    Raises `ValueError` if the prompts do not have one placeholder for each feature vector.
    """
    ids = input_ids.cpu().numpy().copy()
    rows, columns = np.nonzero(ids == model.config.image_token_id)  # row by row
    taken, images = 0, list[Image]()
    for own in _split(inputs):
        image = known.get(key := _key(own, salt)) or _compute(model, key, own, ahead)
        places = slice(taken, taken + image.num_tokens)
        row, column = rows[places], columns[places]
        if len(row) == image.num_tokens and row[0] == row[-1]:
            if positions is not None and positions.ndim == 3 and image.corrections is None:
                image = _placed(model, image, positions[-3:, row[0]].cpu()[:, column])
            known.add([image])
            ids[row, column] = image.ids
        taken += image.num_tokens
        images.append(image)
    if taken != len(rows) or (ids == model.config.image_token_id).any():
        raise ValueError(
            f"images have {[image.num_tokens for image in images]} tokens, but input_ids have "
            f"{(input_ids == model.config.image_token_id).sum(1).tolist()} of the placeholder "
            f"{model.config.image_token_id} in their rows"
        )
    return torch.from_numpy(ids).to(input_ids.device), images


def image_arguments(runs: Sequence[ImageRun]) -> dict[str, Any]:
    """Return the arguments of `model.forward` with the features of the image tokens of a pass."""
    if not runs:
        return {}
    parts = [[features[run.first : run.stop] for features in run.image.features] for run in runs]
    pooled, *deep = [torch.cat(features) for features in zip(*parts, strict=True)]
    output, name, is_list = runs[0].image.layout
    more = {"deepstack_features": [[features] for features in deep]} if deep else {}
    return {"mm_encoder_outputs": {"image": output(**{name: [pooled] if is_list else pooled}, **more)}}


def _split(inputs: Mapping[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the inputs of each image."""
    for name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    pixels = inputs["pixel_values"]
    patches = next((x.prod(-1).tolist() for x in inputs.values() if x.ndim == 2 and x.shape[1] == 3), None)
    if patches is not None:  # of all images in one sequence, with a grid `[images, 3]`
        if sum(patches) != len(pixels):
            raise ValueError(f"pixel_values have {len(pixels)} patches, but the grids of the images {patches}")
        for i, own in enumerate(pixels.split(patches)):
            yield {name: own if value is pixels else value[i : i + 1] for name, value in inputs.items()}
    elif pixels.ndim == 5 and "image_sizes" not in inputs:  # `[prompts, images, ...]`, padded with images of zeros
        for row, column in pixels.flatten(2).any(-1).nonzero().tolist():
            yield {name: value[row : row + 1, column : column + 1] for name, value in inputs.items()}
    else:
        counts = inputs.get("batch_num_images")
        more = {} if counts is None else {"batch_num_images": counts.repeat_interleave(counts)}
        for i in range(len(pixels)):
            yield {name: value[i : i + 1] for name, value in {**inputs, **more}.items()}


def _key(inputs: Mapping[str, torch.Tensor], salt: bytes) -> int:
    digest = hashlib.blake2b(key=salt, digest_size=8)
    for name, value in sorted(inputs.items()):
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "big") >> (64 - KEY_BITS)


def _compute(model: Any, key: int, inputs: Mapping[str, torch.Tensor], ahead: Collection[int]) -> Image:
    """Run the vision tower on one image."""
    device = execution_device(model)
    output = model.get_image_features(**{name: x.to(device) for name, x in inputs.items()}, return_dict=True)
    name = "last_hidden_state" if output.get("pooler_output") is None else "pooler_output"  # the former in Llama 4
    pooled, deep = output[name], output.get("deepstack_features") or ()
    features = tuple(_joined(one) for one in (pooled, *deep))
    if len(features[0]) > MAX_TOKENS:
        raise ValueError(f"an image may have at most {MAX_TOKENS} tokens, got {len(features[0])}")
    window = getattr(model.config.get_text_config(decoder=True), "sliding_window", None)
    if ahead and window and len(features[0]) > window:
        raise UnsupportedModelError(
            f"{type(model).__name__} has a sliding window of {window}, less than the {len(features[0])} image tokens"
        )
    layout = type(output), name, not isinstance(pooled, torch.Tensor)
    return Image(key, features, layout, ahead=ahead, thumbnail=_thumbnail(inputs, model.config))


def _joined(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return features as one tensor `[tokens, hidden]`."""
    joined = features if isinstance(features, torch.Tensor) else torch.cat(tuple(features))
    return joined.flatten(0, -2)


def _thumbnail(inputs: Mapping[str, torch.Tensor], config: PreTrainedConfig) -> str:
    """Return a `data:` URL of a small PNG of an image, with its contrast stretched; empty if its layout is unknown."""
    try:
        from PIL import Image as Picture

        picture = _picture(inputs, config).float()
    except (AttributeError, ImportError, LookupError, RuntimeError, TypeError):
        return ""
    picture = 255 * (picture - picture.min()) / (picture.max() - picture.min()).clamp(min=1e-6)
    image, content = Picture.fromarray(picture.byte().permute(1, 2, 0).numpy()), io.BytesIO()
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    image.save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def _picture(inputs: Mapping[str, torch.Tensor], config: PreTrainedConfig) -> torch.Tensor:
    """Return the pixels of an image, `[3, height, width]`, from the layouts of transformers' processors."""
    pixels = inputs["pixel_values"].detach().cpu()
    if pixels.ndim >= 4:  # `[..., 3, height, width]`; of several views, the first one shows all
        return pixels.flatten(0, -4)[0].expand(3, -1, -1)
    vision, others = (
        config.vision_config,
        {x.shape[-1]: x[0] for name, x in inputs.items() if x is not inputs["pixel_values"]},
    )
    if pixels.ndim == 2:  # patches `[3, frames, side, side]`, in squares that become one token
        (_, height, width), side, merged = others[3].tolist(), vision.patch_size, vision.spatial_merge_size
        parts = pixels.view(height // merged, width // merged, merged, merged, 3, -1, side, side)[..., 0, :, :]
        return parts.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, height * side, width * side)
    # patches `[side, side, 3]` of rows, with the size in patches (LFM2-VL) or the place of each patch (Gemma 4)
    height, width = others[2].tolist() if others[2].ndim == 1 else (others[2].amax(0) + 1).flip(0).tolist()
    parts = pixels[0, : height * width].view(height, width, vision.patch_size, vision.patch_size, 3)
    return parts.permute(4, 0, 2, 1, 3).reshape(3, height * parts.shape[2], width * parts.shape[2])


def _placed(model: PreTrainedModel, image: Image, positions: torch.Tensor) -> Image:
    """Return an image with its positions, int64 `[3, tokens]` in a prompt."""
    corrections = positions - positions[:, :1] - torch.arange(image.num_tokens)
    if (positions[:, 0] != positions[0, 0]).any():
        raise UnsupportedModelError(f"{type(model).__name__} begins an image at different positions on its axes")
    shift = int(positions.max() - positions[0, 0]) + 1 - image.num_tokens
    return dataclasses.replace(image, corrections=corrections, shift=shift)
