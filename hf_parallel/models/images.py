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
    reason = why_no_images(model)
    if reason:
        return (), reason
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    sections = rope.get("mrope_section")
    if sections and len(sections) != 3:
        return (), f"{type(model).__name__} has positions on {len(sections)} axes, and images can have three"
    types = [name for name in TOKEN_TYPES if name in parameters_of(model.forward)]
    if not types:
        return (), ""
    if _bidirectional_layers(model, types, [1, 0, 1]):
        return (), f"{type(model).__name__} lets the tokens of an image see those of later images"
    return _bidirectional_layers(model, types, [1, 1]), ""


def _bidirectional_layers(model: PreTrainedModel, types: Collection[str], marks: list[int]) -> tuple[int, ...]:
    """Return the layers in which the first of some tokens, which `types` mark as those of images, sees the last one."""
    token_types = torch.tensor([marks], device=execution_device(model))
    input_ids = torch.ones_like(token_types)
    position_ids = torch.arange(len(marks), device=token_types.device)[None]
    marked = dict.fromkeys(types, token_types)
    recorder = AttentionRecorder(later=len(marks) - 1)
    with block_attention_enabled(model, recorder):
        model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **marked)
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
    rows, columns = np.nonzero(ids == model.config.image_token_id)  # of the placeholders, row by row
    has_axes = positions is not None and positions.ndim == 3
    num_tokens = 0  # of all images so far
    images: list[Image] = []
    for encoder_inputs in _split(inputs, "pixel_attention_mask" in image_inputs(model)):
        key = _key(encoder_inputs, salt)
        image = known.get(key) or _compute(model, key, encoder_inputs, bidirectional_layers)
        placeholders = slice(num_tokens, num_tokens + image.num_tokens)
        row = rows[placeholders]
        column = columns[placeholders]
        if len(row) == image.num_tokens and row[0] == row[-1]:
            if has_axes and image.corrections is None:
                of_row = positions[-3:, row[0]].cpu()  # type: ignore[index]
                image = _placed(model, image, of_row[:, column])
            known.add([image])
            ids[row, column] = image.ids
        num_tokens += image.num_tokens
        images.append(image)
    if num_tokens != len(rows) or (ids == model.config.image_token_id).any():
        raise ValueError(
            f"images have {[image.num_tokens for image in images]} tokens, but input_ids have "
            f"{(input_ids == model.config.image_token_id).sum(1).tolist()} of the placeholder "
            f"{model.config.image_token_id} in their rows"
        )
    are_tokens = not is_image(input_ids).any()  # other ids raise an error later
    if has_axes and are_tokens:
        _check_positions(model, ids, positions[-3:].cpu(), mask, known)  # type: ignore[index]
    return torch.from_numpy(ids).to(input_ids.device), images


def _check_positions(
    model: PreTrainedModel, ids: np.ndarray, positions: torch.Tensor, mask: torch.Tensor | None, known: ImageTable
) -> None:
    """Raise `UnsupportedModelError` unless text tokens count on from the one before, and after an image by its shift.

    `positions`: `[3, prompts, length]`.
    """
    for row, row_ids in enumerate(ids):
        is_token = np.ones(len(row_ids), bool) if mask is None else mask[row].bool().cpu().numpy()
        tokens = row_ids[is_token]
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
    parts_by_kind: list[list[torch.Tensor]] = [[] for _ in spans[0].image.features]
    for span in spans:
        for parts, whole in zip(parts_by_kind, span.image.features, strict=True):
            parts.append(whole[span.first : span.stop])
    features = [torch.cat(parts) for parts in parts_by_kind]
    layout: Layout = spans[0].image.layout
    outputs: dict[str, Any] = {}
    if layout.name:
        pooled = features.pop(0)
        while pooled.ndim < layout.ndim:
            pooled = pooled[None]
        outputs[layout.name] = [pooled] if layout.is_list else pooled
    if layout.layers is not None:
        deepstack: list[Any] = []
        for layer, added in zip(layout.layers, features, strict=True):
            deepstack.append([added] if layer is None else (layer, [added]))
        outputs["deepstack_features"] = deepstack
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
    for image_tensors in _split_tensors(tensors, is_padded):
        yield {**image_tensors, **settings}


def _split_tensors(inputs: Mapping[str, torch.Tensor], is_padded: bool) -> Iterator[dict[str, torch.Tensor]]:
    pixels = inputs["pixel_values"]
    grids = next((value for name, value in inputs.items() if name.startswith("image_grid_")), None)
    sizes = inputs.get("target_sizes")
    if grids is not None:  # patches of all images, `[patches, ...]`
        yield from _with_patches(inputs, _split_patches(pixels, grids.prod(-1), 0))
    elif sizes is not None:  # patches of all images side by side, `[1, 3, side, patches * side]` (MiniCPM-V)
        yield from _with_patches(inputs, _split_patches(pixels, sizes.prod(-1) * pixels.shape[2], -1))
    elif is_padded and pixels.ndim == 5:
        for row, column in pixels.flatten(2).any(-1).nonzero().tolist():
            image: dict[str, torch.Tensor] = {}
            for name, value in inputs.items():
                of_row = value[row : row + 1]
                image[name] = of_row[:, column : column + 1] if value.ndim > 1 else of_row
            yield image
    else:
        yield from _split_batch(inputs)


def _with_patches(
    inputs: Mapping[str, torch.Tensor], patches: Sequence[torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the patches of each image, with its part of the other inputs."""
    for index, pixels in enumerate(patches):
        image = {name: value[index : index + 1] for name, value in inputs.items()}
        image["pixel_values"] = pixels
        yield image


def _split_batch(inputs: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the images of inputs `[images, ...]`."""
    per_image = dict(inputs)
    tiles: Sequence[torch.Tensor] = ()  # of each image, for a model that takes `num_local_patches` beside a thumbnail
    if "pixel_values_local" in inputs:
        tiles = _split_patches(per_image.pop("pixel_values_local"), inputs["num_local_patches"], 0)
    counts = inputs.get("batch_num_images")
    if counts is not None:
        per_image["batch_num_images"] = counts.repeat_interleave(counts)
    for index in range(len(inputs["pixel_values"])):
        image = {name: value[index : index + 1] for name, value in per_image.items()}
        if tiles and len(tiles[index]):
            image["pixel_values_local"] = tiles[index]
        yield image


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
    arguments = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}
    output = encode(**arguments, return_dict=True)
    features: list[torch.Tensor] = []
    name = next((name for name in ("pooler_output", "last_hidden_state") if output.get(name) is not None), "")
    is_list = False
    ndim = 2
    if name:
        pooled = output[name]
        is_list = not isinstance(pooled, torch.Tensor)
        ndim = pooled[0].ndim if is_list else pooled.ndim
        features.append(_joined(pooled))
    layers, deep = _deepstack(output)
    features += [_joined(added) for added in deep]
    num_tokens = len(features[0])
    if num_tokens > MAX_TOKENS:
        raise ValueError(f"an image may have at most {MAX_TOKENS} tokens, got {num_tokens}")
    window = getattr(model.config.get_text_config(decoder=True), "sliding_window", None)
    if bidirectional_layers and window and num_tokens > window:
        raise UnsupportedModelError(
            f"{type(model).__name__} has a sliding window of {window}, less than the {num_tokens} image tokens"
        )
    layout = Layout(type(output), name, is_list, ndim, layers)
    thumbnail = _thumbnail(inputs, model.config)
    return Image(key, tuple(features), layout, bidirectional_layers=bidirectional_layers, thumbnail=thumbnail)


def _deepstack(output: Mapping[str, Any]) -> tuple[tuple[int | None, ...] | None, Sequence[Any]]:
    """Return the layers, if the model names them, and the features of an image that deeper layers add."""
    deep = output.get("deepstack_features")
    if deep is None:
        return None, ()
    has_layers = bool(deep) and isinstance(deep[0][0], int)
    if not has_layers:
        return (None,) * len(deep), deep
    return tuple(layer for layer, _ in deep), [features for _, features in deep]


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
    darkest = picture.min()
    contrast = (picture.max() - darkest).clamp(min=1e-6)
    picture = 255 * (picture - darkest) / contrast
    image = Picture.fromarray(picture.byte().permute(1, 2, 0).numpy())
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    content = io.BytesIO()
    image.save(content, "PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"


def _picture(inputs: Mapping[str, Any], config: PreTrainedConfig) -> torch.Tensor:
    """Return the pixels of an image, `[3, height, width]`, from the layouts of transformers' processors."""
    pixels = inputs["pixel_values"].detach().cpu()
    if "target_sizes" in inputs:  # patches side by side, `[1, 3, side, patches * side]`
        height, width = inputs["target_sizes"][0].tolist()
        side = pixels.shape[2]
        patches = pixels.view(3, side, height, width, side)
        return patches.permute(0, 2, 1, 3, 4).reshape(3, height * side, width * side)
    if pixels.ndim >= 4:  # `[..., 3, height, width]`; of several views, the first one shows all
        return pixels.flatten(0, -4)[0].expand(3, -1, -1)
    if pixels.ndim == 2:
        return _picture_of_squares(pixels, _by_last_dimension(inputs, 3), config.vision_config)
    return _picture_of_rows(pixels, _by_last_dimension(inputs, 2), config.vision_config.patch_size)


def _by_last_dimension(inputs: Mapping[str, Any], size: int) -> torch.Tensor:
    """Return the first row of the input beside the pixels whose last dimension has a size. Raise `LookupError`."""
    tensors = [value for value in inputs.values() if value is not inputs["pixel_values"] and value.shape[-1] == size]
    row: torch.Tensor = tensors[-1][0]
    return row


def _picture_of_squares(pixels: torch.Tensor, grid: torch.Tensor, vision: Any) -> torch.Tensor:
    """Return a picture whose patches `[3, frames, side, side]` are in squares that become one token.

    `grid`: frames, height and width in patches.
    """
    _, height, width = grid.tolist()
    side = vision.patch_size
    square = vision.spatial_merge_size
    frames = pixels.view(height // square, width // square, square, square, 3, -1, side, side)
    patches = frames[..., 0, :, :]
    return patches.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, height * side, width * side)


def _picture_of_rows(pixels: torch.Tensor, layout: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Return a picture whose patches `[side, side, 3]` are row by row.

    `layout`: the size in patches (LFM2-VL), or the place of each patch as column and row (Gemma 4).
    """
    if layout.ndim == 1:
        height, width = layout.tolist()
    else:
        width, height = (layout.amax(0) + 1).tolist()
    patches = pixels[0, : height * width].view(height, width, patch_size, patch_size, 3)
    side = patches.shape[2]
    return patches.permute(4, 0, 2, 1, 3).reshape(3, height * side, width * side)


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
