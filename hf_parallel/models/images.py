"""Features of images in prompts, which a model's own vision tower computes once per image.

A forward pass over image tokens gives the model placeholder tokens and these features (`mm_encoder_outputs`), so that
what it does with them, such as adding some in deeper layers, is its own business.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from hf_parallel.cache.images import KEY_BITS, MAX_TOKENS, Image, ImageSpan, ImageTable, is_image
from hf_parallel.cache.placement import execution_device
from hf_parallel.models.intercept.attention import AttentionRecorder, UnsupportedModelError, block_attention_enabled
from hf_parallel.models.probing.signature import parameters_of

THUMBNAIL = 64
"""Larger side of a thumbnail, in pixels."""
FEATURES = "mm_encoder_outputs"
"""Argument of `model.forward` that holds the features of images."""
TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")
"""Arguments of `generate` that mark the placeholders, as the token ids do."""


class Layout(NamedTuple):
    """How a model packs the features of images in the output of its encoder."""

    output: type
    name: str  # field of the features that replace placeholders; empty if there are only those of deeper layers
    is_list: bool  # of one tensor per image
    ndim: int  # number of dimensions of a tensor, the last two of which are tokens and features
    layers: tuple[int | None, ...] | None  # of the features that deeper layers add (deepstack), if the model names them


def image_encoder(model: PreTrainedModel) -> Callable[..., Any] | None:
    """Return the method that computes the features of images, which `generate` looks up in the same place."""
    encode: Callable[..., Any] | None = getattr(model.base_model, "get_image_features", None)
    return encode


def image_inputs(model: PreTrainedModel) -> frozenset[str]:
    """Return the names of the arguments of `generate` that describe images; none if the model takes no images."""
    encode = image_encoder(model)
    if encode is None or FEATURES not in parameters_of(model.forward):
        return frozenset()
    names = {name for name in parameters_of(encode) if not name.startswith("vision_")} - {"kwargs"}
    return frozenset(names.union(TOKEN_TYPES))


def why_no_images(model: PreTrainedModel) -> str:
    """Return why prompts cannot have images, as far as the class of a model shows it; empty if they can."""
    if image_inputs(model):
        return ""
    return f"{type(model).__name__}'s forward takes no features of images ({FEATURES})"


def probe_images(model: PreTrainedModel) -> tuple[tuple[int, ...], str]:
    """Return the layers whose attention mask lets image tokens see later ones of their image, and why no images work.

    The reason is empty if prompts may have images.
    """
    if reason := why_no_images(model):
        return (), reason
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    if (sections := rope.get("mrope_section")) and len(sections) != 3:
        return (), f"{type(model).__name__} has positions on {len(sections)} axes, and images can have three"
    types = [name for name in TOKEN_TYPES if name in parameters_of(model.forward)]
    if not types:
        return (), ""
    if _bidirectional_layers(model, types, [1, 0, 1]):
        return (), f"{type(model).__name__} lets the tokens of an image see those of later images"
    return _bidirectional_layers(model, types, [1, 1]), ""


def _bidirectional_layers(model: PreTrainedModel, types: Collection[str], marks: list[int]) -> tuple[int, ...]:
    """Return the layers in which the first of some tokens, which `types` mark as those of images, sees the last one."""
    marked = torch.tensor([marks], device=execution_device(model))
    ones = torch.ones_like(marked)
    recorder = AttentionRecorder(later=len(marks) - 1)
    with block_attention_enabled(model, recorder):
        model(input_ids=ones, position_ids=ones.cumsum(-1) - 1, use_cache=False, **dict.fromkeys(types, marked))
    return tuple(sorted(recorder.ahead))


def read_images(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor | None,
    inputs: Mapping[str, Any],
    known: ImageTable,
    bidirectional_layers: Collection[int],
    salt: bytes,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[Image]]:
    """Return `input_ids` int64 `[prompts, length]` with the ids of image tokens, and the images, those not `known` new.

    `positions` are those of the model, and `mask` is 0 for padding. Raises `ValueError` if the prompts do not have one
    placeholder for each feature vector, and `UnsupportedModelError` if images change the positions of text otherwise
    than by a shift of what follows.
    """
    ids = input_ids.cpu().numpy().copy()
    rows, columns = np.nonzero(ids == model.config.image_token_id)  # row by row
    taken, images = 0, list[Image]()
    for own in _split(inputs, "pixel_attention_mask" in image_inputs(model)):
        image = known.get(key := _key(own, salt)) or _compute(model, key, own, bidirectional_layers)
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
    are_tokens = not is_image(input_ids).any()  # other ids raise an error later
    if positions is not None and positions.ndim == 3 and are_tokens:
        _check_positions(model, ids, positions[-3:].cpu(), mask, known)
    return torch.from_numpy(ids).to(input_ids.device), images


def _check_positions(
    model: PreTrainedModel, ids: np.ndarray, positions: torch.Tensor, mask: torch.Tensor | None, known: ImageTable
) -> None:
    """Raise `UnsupportedModelError` unless text tokens count on from the one before, and after an image by its shift.

    `positions`: `[3, prompts, length]`.
    """
    for row, own in enumerate(ids):
        is_token = np.ones(len(own), bool) if mask is None else mask[row].bool().cpu().numpy()
        tokens = own[is_token]
        expected = torch.arange(len(tokens)).repeat(3, 1)
        for span in known.spans(tokens):
            if span.image.corrections is not None:
                expected[:, span.at : span.end] += span.image.corrections[:, span.first : span.stop]
            if span.stop == span.image.num_tokens:
                expected[:, span.end :] += span.image.shift
        if (positions[:, row, is_token] != expected).any():
            raise UnsupportedModelError(
                f"{type(model).__name__} has positions of text around images that do not count on from the token before"
            )


def image_arguments(spans: Sequence[ImageSpan]) -> dict[str, Any]:
    """Return the arguments of `model.forward` with the features of the image tokens of a pass."""
    if not spans:
        return {}
    parts = [[features[span.first : span.stop] for features in span.image.features] for span in spans]
    features = [torch.cat(of_spans) for of_spans in zip(*parts, strict=True)]
    layout: Layout = spans[0].image.layout
    outputs: dict[str, Any] = {}
    if layout.name:
        pooled = features.pop(0)
        pooled = pooled.reshape(*[1] * (layout.ndim - 2), *pooled.shape)
        outputs[layout.name] = [pooled] if layout.is_list else pooled
    if layout.layers is not None:
        deep = zip(layout.layers, features, strict=True)
        outputs["deepstack_features"] = [[one] if layer is None else (layer, [one]) for layer, one in deep]
    return {FEATURES: {"image": layout.output(**outputs)}}


def _split(inputs: Mapping[str, Any], is_padded: bool) -> Iterator[dict[str, Any]]:
    """Yield the inputs of each image: a part of each tensor, and the settings that hold for all images.

    `is_padded`: pixels of five dimensions are `[prompts, images, ...]`, padded with images of zeros.
    """
    settings = {name: value for name, value in inputs.items() if isinstance(value, str | int | float)}
    tensors = {name: value for name, value in inputs.items() if name not in settings}
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    for own in _split_tensors(tensors, is_padded):
        yield {**own, **settings}


def _split_tensors(inputs: Mapping[str, torch.Tensor], is_padded: bool) -> Iterator[dict[str, torch.Tensor]]:
    pixels = inputs["pixel_values"]
    grids = next((value for name, value in inputs.items() if name.startswith("image_grid_")), None)
    sizes = inputs.get("target_sizes")
    if grids is not None:  # patches of all images, `[patches, ...]`
        parts = _split_patches(pixels, grids.prod(-1), 0)
        for i, part in enumerate(parts):
            yield {name: part if value is pixels else value[i : i + 1] for name, value in inputs.items()}
    elif sizes is not None:  # patches of all images side by side, `[1, 3, side, patches * side]` (MiniCPM-V)
        parts = _split_patches(pixels, sizes.prod(-1) * pixels.shape[2], -1)
        for i, part in enumerate(parts):
            yield {name: part if value is pixels else value[i : i + 1] for name, value in inputs.items()}
    elif is_padded and pixels.ndim == 5:
        for row, column in pixels.flatten(2).any(-1).nonzero().tolist():
            of_row = {name: value[row : row + 1] for name, value in inputs.items()}
            yield {name: x[:, column : column + 1] if x.ndim > 1 else x for name, x in of_row.items()}
    else:
        per_image = dict(inputs)
        tiles: Sequence[
            torch.Tensor
        ] = ()  # of each image, for a model that takes `num_local_patches` beside a thumbnail
        if "pixel_values_local" in inputs:
            tiles = _split_patches(per_image.pop("pixel_values_local"), inputs["num_local_patches"], 0)
        if (counts := inputs.get("batch_num_images")) is not None:
            per_image["batch_num_images"] = counts.repeat_interleave(counts)
        for i in range(len(pixels)):
            own = {name: value[i : i + 1] for name, value in per_image.items()}
            yield own if not tiles or not len(tiles[i]) else {**own, "pixel_values_local": tiles[i]}


def _split_patches(pixels: torch.Tensor, counts: torch.Tensor, dim: int) -> Sequence[torch.Tensor]:
    """Return the pixels of each image, which has a number of places on a dimension of `pixels`."""
    numbers = counts.tolist()
    if sum(numbers) != pixels.shape[dim]:
        raise ValueError(f"pixel_values have {pixels.shape[dim]} patches, but the grids of the images {numbers}")
    return pixels.split(numbers, dim)


def _key(inputs: Mapping[str, Any], salt: bytes) -> int:
    digest = hashlib.blake2b(key=salt, digest_size=8)
    for name, value in sorted(inputs.items()):
        if not isinstance(value, torch.Tensor):
            digest.update(f"{name} {value!r} ".encode())
            continue
        digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "big") >> (64 - KEY_BITS)


def _compute(model: Any, key: int, inputs: Mapping[str, Any], bidirectional_layers: Collection[int]) -> Image:
    """Run the vision tower on one image."""
    device = execution_device(model)
    encode: Any = image_encoder(model)
    moved = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    output = encode(**moved, return_dict=True)
    deep = output.get("deepstack_features")
    layers = None
    if deep is not None:
        has_layers = bool(deep) and isinstance(deep[0][0], int)
        layers = tuple(layer for layer, _ in deep) if has_layers else (None,) * len(deep)
        deep = [features for _, features in deep] if has_layers else deep
    name = next((name for name in ("pooler_output", "last_hidden_state") if output.get(name) is not None), "")
    pooled = [output[name]] if name else []
    features = tuple(_joined(one) for one in (*pooled, *(deep or ())))
    if len(features[0]) > MAX_TOKENS:
        raise ValueError(f"an image may have at most {MAX_TOKENS} tokens, got {len(features[0])}")
    window = getattr(model.config.get_text_config(decoder=True), "sliding_window", None)
    if bidirectional_layers and window and len(features[0]) > window:
        raise UnsupportedModelError(
            f"{type(model).__name__} has a sliding window of {window}, less than the {len(features[0])} image tokens"
        )
    is_list = bool(pooled) and not isinstance(pooled[0], torch.Tensor)
    ndim = (pooled[0][0] if is_list else pooled[0]).ndim if pooled else 2
    layout = Layout(type(output), name, is_list, ndim, layers)
    thumbnail = _thumbnail(inputs, model.config)
    return Image(key, features, layout, bidirectional_layers=bidirectional_layers, thumbnail=thumbnail)


def _joined(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return features as one tensor `[tokens, hidden]`."""
    joined = features if isinstance(features, torch.Tensor) else torch.cat(tuple(features))
    return joined.flatten(0, -2)


def _thumbnail(inputs: Mapping[str, Any], config: PreTrainedConfig) -> str:
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


def _picture(inputs: Mapping[str, Any], config: PreTrainedConfig) -> torch.Tensor:
    """Return the pixels of an image, `[3, height, width]`, from the layouts of transformers' processors."""
    pixels = inputs["pixel_values"].detach().cpu()
    if "target_sizes" in inputs:  # patches side by side, `[1, 3, side, patches * side]`
        height, width = inputs["target_sizes"][0].tolist()
        side = pixels.shape[2]
        parts = pixels.view(3, side, height, width, side)
        return parts.permute(0, 2, 1, 3, 4).reshape(3, height * side, width * side)
    if pixels.ndim >= 4:  # `[..., 3, height, width]`; of several views, the first one shows all
        return pixels.flatten(0, -4)[0].expand(3, -1, -1)
    vision, others = (
        config.vision_config,
        {x.shape[-1]: x[0] for x in inputs.values() if x is not inputs["pixel_values"]},
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
    """Return an image with its positions, whole numbers `[3, tokens]` in a prompt; those of Qwen's omni are floats."""
    if (positions != positions.round()).any():
        raise UnsupportedModelError(f"{type(model).__name__} has images at fractions of positions")
    positions = positions.long()
    corrections = positions - positions[:, :1] - torch.arange(image.num_tokens)
    if (positions[:, 0] != positions[0, 0]).any():
        raise UnsupportedModelError(f"{type(model).__name__} begins an image at different positions on its axes")
    shift = int(positions.max() - positions[0, 0]) + 1 - image.num_tokens
    return dataclasses.replace(image, corrections=corrections, shift=shift)
