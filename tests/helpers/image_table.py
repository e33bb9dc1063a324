"""Writes the table of `docs/images.md` from small models: `python tests/helpers/image_table.py`.

A model counts as working if a mode's tokens and logits equal those of `generate` for each prompt alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import mapping
import torch
import transformers
from architecture_table import line
from mapping import BEGIN, END, IMAGE
from paths import ROOT
from tiny import Architecture, draw_weights
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

import hf_parallel
from hf_parallel.models.images import image_encoder
from hf_parallel.models.intercept.attention import UnsupportedModelError

PAGE = ROOT / "docs" / "images.md"
BEGINS, ENDS = "<!-- families -->\n", "<!-- end of families -->\n"
"""Lines of the page around the generated part."""
TEXT = """
A small random model of each of the {names} names in the image-text mapping of Transformers {version}, and of
`phi4_multimodal`, was tried: {works} work, {refused} do not, and {unbuilt} cannot be built or cannot generate from
images with Transformers alone.

{table}
"""
CLASSES: dict[str, str] = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
FLOAT32 = ("inkling2", "inkling2_loop")
"""Models whose code mixes float32 with float64."""
OTHERS = {"phi4_multimodal": "Phi4MultimodalForCausalLM"}
"""Models that read images and are missing in the mapping."""
SIDE, PATCH = 16, 4  # of images and patches, in pixels
ROWS = [[1], [2, 1], [1, 3]]
"""Numbers of the images in the prompts of a batch."""
NEW_TOKENS = 6
GREEDY: dict[str, Any] = {
    "max_new_tokens": NEW_TOKENS,
    "min_new_tokens": NEW_TOKENS,
    "do_sample": False,
    "pad_token_id": 0,
    "return_dict_in_generate": True,
    "output_logits": True,
}
_UNBUILT = "transformers fails"
_ORDER = ("yes", "no", _UNBUILT)

Inputs = dict[str, torch.Tensor]


def names() -> list[str]:
    """Return the names of the rows."""
    return sorted({*mapping.IMAGE_NAMES, *OTHERS})


def make_part() -> str:
    """Return the generated part of the page."""
    rows = sorted(map(row_of, names()), key=lambda row: (_ORDER.index(row[1]), row[0]))
    heads = ("model type", "images", "positions", "layers in which the tokens of an image see each other", "why not")
    works, refused, unbuilt = (sum(row[1] == kind for row in rows) for kind in _ORDER)
    return TEXT.format(
        names=len(mapping.IMAGE_NAMES),
        version=transformers.__version__,
        works=works,
        refused=refused,
        unbuilt=unbuilt,
        table="\n".join(map(line, (heads, ["---"] * len(heads), *rows))),
    )


def row_of(name: str) -> Sequence[str]:
    """Return the cells of one model type. Raises `AssertionError` if a mode computes something else than `generate`."""
    title = f"`{name}`"
    try:
        model = build(name)
    except Exception as error:
        return title, _UNBUILT, "", "", _described(error)
    try:
        hf_parallel.enable(model)
    except UnsupportedModelError as refusal:
        return title, "no", "", "", _reason(model, str(refusal))
    capabilities = model._parallel.capabilities  # type: ignore[union-attr]
    if capabilities.why_no_images:
        return title, "no", "", "", _reason(model, capabilities.why_no_images)
    try:
        alone = [prompts(name, model, [row]) for row in ROWS]
        expected = [model.generate(**inputs, **GREEDY) for inputs in alone]
    except Exception as error:
        return title, _UNBUILT, "", "", _described(error)
    try:
        for chunk in (None, 5):
            batch = prompts(name, model, ROWS)
            found = model.generate(**batch, **GREEDY, generation_mode="shared_prefix", prefill_chunk_size=chunk)
            _check(name, found, expected)
    except UnsupportedModelError as refusal:
        return title, "no", "", "", _reason(model, str(refusal))
    positions = model._prepare_position_ids_for_generation(alone[0]["input_ids"], dict(alone[0]))
    axes = "three axes" if positions is not None and positions.ndim == 3 else ""
    ahead = ", ".join(map(str, capabilities.bidirectional_layers))
    return title, "yes", axes, ahead, ""


def _check(name: str, found: Any, expected: Sequence[Any]) -> None:
    """Raise `AssertionError` unless tokens and logits of a batch equal those of each prompt alone."""
    for index, one in enumerate(expected):
        assert torch.equal(found.sequences[index, -NEW_TOKENS:], one.sequences[0, -NEW_TOKENS:]), name
        for ours, theirs in zip(found.logits, one.logits, strict=True):
            torch.testing.assert_close(ours[index], theirs[0], rtol=1e-4, atol=1e-4)


def _described(error: Exception) -> str:
    if isinstance(error, ImportError):  # which library is named depends on the others that are installed
        return f"needs a library: {str(error).split()[0]}"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:150]}{'...' if len(text) > 150 else ''}".replace("|", "/")


def _reason(model: PreTrainedModel, why: str) -> str:
    """Return a reason without the name of the class at its beginning."""
    return why.removeprefix(type(model).__name__).removeprefix("'s").strip()


def build(name: str) -> PreTrainedModel:
    """Return a small random model, in float64."""
    torch.manual_seed(0)
    model: PreTrainedModel = getattr(transformers, {**CLASSES, **OTHERS}[name])(mapping.small_image_config(name))
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # others take no float64
    draw_weights(model, Architecture(name, lambda: model.config, embedding_std=0.1), seed=0)
    return model.eval().to(torch.float32 if name in FLOAT32 else torch.float64)


def prompts(name: str, model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Inputs:
    """Return the inputs of `generate` for prompts with the images of these numbers, each between random text."""
    images = {number: draw(name, model, number) for row in rows for number in row}
    counts = {number: _num_tokens(model, image) for number, image in images.items()}
    ids = []
    for row in rows:
        rng = torch.Generator().manual_seed(0)
        tokens = torch.randint(20, 90, (3,), generator=rng).tolist()
        for number in row:
            tokens += [BEGIN, *[IMAGE] * counts[number], END]
            tokens += torch.randint(20, 90, (2,), generator=rng).tolist()
        ids.append(tokens)
    longest = max(map(len, ids))
    input_ids = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    accepted = inspect.signature(model.forward).parameters
    for types in ("mm_token_type_ids", "token_type_ids"):
        if types in accepted:
            inputs[types] = (input_ids == IMAGE).long()
    return inputs | _joined([[images[number] for number in row] for row in rows])


def _joined(rows: Sequence[Sequence[Inputs]]) -> Inputs:
    """Return the images of prompts as a processor does."""
    flat = [image for row in rows for image in row]
    if "pixel_attention_mask" in flat[0] and flat[0]["pixel_values"].ndim == 5:
        return {key: _padded([[image[key][0, 0] for image in row] for row in rows]) for key in flat[0]}
    side_by_side = {"pixel_values"} if "target_sizes" in flat[0] else ()
    return {key: torch.cat([image[key] for image in flat], -1 if key in side_by_side else 0) for key in flat[0]}


def _padded(rows: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Return tensors of rows as `[rows, most, ...]`, padded with zeros."""
    most = max(map(len, rows))
    first = rows[0][0]
    return torch.stack([torch.stack([*row, *[torch.zeros_like(first)] * (most - len(row))]) for row in rows])


def _num_tokens(model: PreTrainedModel, image: Inputs) -> int:
    """Return the number of features of an image."""
    filled = {key: value for key, value in image.items() if len(value)}  # without tiles if it has none
    output = image_encoder(model)(**filled, return_dict=True)  # type: ignore[misc]
    found = (output.get("pooler_output"), output.get("last_hidden_state"))
    features = next((one for one in found if one is not None), None)
    if features is None:  # those of deeper layers only, `(layer, features)`
        features = output.deepstack_features[0][1]
    parts = [features] if isinstance(features, torch.Tensor) else features
    return sum(part.flatten(0, -2).shape[0] for part in parts)


def draw(name: str, model: PreTrainedModel, number: int) -> Inputs:
    """Return the inputs of a random image, in the layout that the model's processor has."""
    rng = torch.Generator().manual_seed(number)
    accepted = inspect.signature(image_encoder(model)).parameters  # type: ignore[arg-type]
    layout = LAYOUTS.get(name) or next(draw for argument, draw in BY_ARGUMENT.items() if argument in accepted)
    image = layout(model, rng)
    return {key: value.to(model.dtype) if value.is_floating_point() else value for key, value in image.items()}


def _random(rng: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=rng)


def _grid(rng: torch.Generator, unit: int = 2) -> tuple[int, int]:
    """Return a random height and width in patches."""
    height, width = (unit * int(torch.randint(1, 4, (), generator=rng)) for _ in range(2))
    return height, width


def _patches(model: PreTrainedModel, rng: torch.Generator) -> Inputs:
    height, width = _grid(rng)
    vision = model.config.vision_config
    frames = getattr(vision, "temporal_patch_size", None) or getattr(vision, "patch_temporal", 1)
    pixels = _random(rng, height * width, 3 * frames * PATCH**2)
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, height, width]])}


def _square_patches(model: PreTrainedModel, rng: torch.Generator) -> Inputs:
    image = _patches(model, rng)
    return {**image, "pixel_values": image["pixel_values"].view(-1, 3, PATCH, PATCH)}


def _patches_without_time(model: PreTrainedModel, rng: torch.Generator) -> Inputs:
    height, width = _grid(rng)
    pixels = _random(rng, height * width, 3 * PATCH**2)
    return {"pixel_values": pixels, "image_grid_hw": torch.tensor([[height, width]])}


def _merged_patches(model: PreTrainedModel, rng: torch.Generator) -> Inputs:
    return {**_patches(model, rng), "image_merge_sizes": torch.tensor([2])}


def _side_by_side(model: PreTrainedModel, rng: torch.Generator) -> Inputs:
    height, width = _grid(rng, 4)
    sizes = torch.tensor([[height, width]], dtype=torch.int32)
    return {"pixel_values": _random(rng, 1, 3, PATCH, height * width * PATCH), "target_sizes": sizes}


def _padded_patches(model: PreTrainedModel, rng: torch.Generator) -> Inputs:
    height, width = (2 * int(torch.randint(1, 3, (), generator=rng)) for _ in range(2))
    mask = (torch.arange(16) < height * width).long()[None]
    pixels = _random(rng, 1, 16, 3 * PATCH**2) * mask[..., None]
    return {"pixel_values": pixels, "spatial_shapes": torch.tensor([[height, width]]), "pixel_attention_mask": mask}


def _placed_patches(model: PreTrainedModel, rng: torch.Generator) -> Inputs:
    height, width = (2 * int(torch.randint(1, 3, (), generator=rng)) for _ in range(2))
    places = torch.full((1, 16, 2), -1)
    places[0, : height * width] = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(-1)
    pixels = torch.rand(1, 16, 3 * PATCH**2, generator=rng) * (places[..., :1] >= 0)
    return {"pixel_values": pixels, "image_position_ids": places}


def _in_rows(model: PreTrainedModel, rng: torch.Generator) -> Inputs:
    pixels = _random(rng, 1, 1, 3, SIDE, SIDE)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, 1, SIDE, SIDE, dtype=torch.bool)}


def _tiles_in_rows(model: PreTrainedModel, rng: torch.Generator) -> Inputs:
    pixels = _random(rng, 1, 1, 3, SIDE, SIDE)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool)}


def _square(model: PreTrainedModel, rng: torch.Generator) -> Inputs:
    return {"pixel_values": _random(rng, 1, 3, SIDE, SIDE)}


def _masked(model: PreTrainedModel, rng: torch.Generator) -> Inputs:
    return {**_square(model, rng), "pixel_mask": torch.ones(1, SIDE, SIDE, dtype=torch.long)}


def _sized(model: PreTrainedModel, rng: torch.Generator) -> Inputs:
    return {**_square(model, rng), "image_sizes": torch.tensor([[SIDE, SIDE]])}


def _views(model: PreTrainedModel, rng: torch.Generator) -> Inputs:
    return {"pixel_values": _random(rng, 1, 2, 3, SIDE, SIDE), "image_sizes": torch.tensor([[SIDE, SIDE]])}


def _two_resolutions(model: PreTrainedModel, rng: torch.Generator) -> Inputs:
    return {**_square(model, rng), "high_res_pixel_values": _random(rng, 1, 3, SIDE, SIDE)}


def _tiles(model: PreTrainedModel, rng: torch.Generator) -> Inputs:
    """Return an image with up to two tiles in a row beside it."""
    count = rng.initial_seed() % 3
    return {
        **_square(model, rng),
        "pixel_values_local": _random(rng, count, 3, SIDE, SIDE),
        "num_local_patches": torch.tensor([count]),
    }


def _lines(model: PreTrainedModel, rng: torch.Generator) -> Inputs:
    return {"pixel_values": _random(rng, 1, 6, 3 * model.config.patch_size**2)}


Draw = Callable[[PreTrainedModel, torch.Generator], Inputs]
LAYOUTS: dict[str, Draw] = {
    "fuyu": _lines,
    "granite4_vision": _views,
    "granite_docling": _tiles_in_rows,
    "kimi_k25": _square_patches,
    "llava": _square,
    "llava_next": _views,
    "llava_next_video": _views,
    "llava_onevision": _views,
    "paddleocr_vl": _square_patches,
    "vipllava": _square,
}
"""Layouts of single model types."""
BY_ARGUMENT: dict[str, Draw] = {
    "image_merge_sizes": _merged_patches,
    "image_grid_thw": _patches,
    "image_grid_hw": _patches_without_time,
    "target_sizes": _side_by_side,
    "spatial_shapes": _padded_patches,
    "image_position_ids": _placed_patches,
    "pixel_attention_mask": _in_rows,
    "high_res_pixel_values": _two_resolutions,
    "pixel_values_local": _tiles,
    "pixel_mask": _masked,
    "image_sizes": _sized,
    "pixel_values": _square,
}
"""Layouts by an argument of the function that encodes images; the first that it takes."""


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGINS)
    _, _, after = rest.partition(ENDS)
    PAGE.write_text(f"{before}{BEGINS}{make_part()}\n{ENDS}{after}", encoding="utf-8")
    print(f"wrote {PAGE}")
