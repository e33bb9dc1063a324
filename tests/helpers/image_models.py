"""Tiny random models that read images, and prompts with random images for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from tiny import VOCAB_SIZE
from transformers import PreTrainedModel

IMAGE, BEGIN, END = VOCAB_SIZE - 9, VOCAB_SIZE - 7, VOCAB_SIZE - 6
"""Placeholder of image tokens, and tokens around an image."""
TEXT = {
    **{
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    **{"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
VISION = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 16, "patch_size": 4},
}
QWEN_VISION = {
    **{"depth": 2, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 24},
    **{"patch_size": 4, "in_channels": 3},
}
SPECIAL = {
    "image_token_id": IMAGE,
    "video_token_id": VOCAB_SIZE - 8,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}

Inputs = dict[str, torch.Tensor]


def _mrope(**more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], **more}}


QWEN3_5 = {
    **_mrope(mrope_interleaved=True, partial_rotary_factor=1.0),
    **{"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "linear_conv_kernel_dim": 3},
}


def _grid(rng: torch.Generator) -> tuple[Inputs, int]:
    height, width = (2 * int(torch.randint(1, 4, (), generator=rng)) for _ in range(2))
    patches = torch.randn(height * width, 3 * 2 * 4 * 4, generator=rng)
    return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, height, width]])}, height * width // 4


def _square(tokens: int) -> Callable[[torch.Generator], tuple[Inputs, int]]:
    return lambda rng: ({"pixel_values": torch.randn(1, 3, 16, 16, generator=rng)}, tokens)


def _padded(rng: torch.Generator) -> tuple[Inputs, int]:
    pixels = torch.randn(1, 1, 3, 16, 16, generator=rng)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, 1, 16, 16, dtype=torch.bool)}, 4


def _sized(rng: torch.Generator) -> tuple[Inputs, int]:
    height, width = 8 * int(torch.randint(1, 3, (), generator=rng)), 16
    pixels = torch.zeros(1, 3, 16, 16)
    pixels[:, :, :height, :width] = torch.randn(1, 3, height, width, generator=rng)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}, height * width // 64


def _patches(rng: torch.Generator) -> tuple[Inputs, int]:
    height, width = (2 * int(torch.randint(1, 3, (), generator=rng)) for _ in range(2))
    mask = (torch.arange(16) < height * width).long()[None]
    pixels = torch.randn(1, 16, 3 * 4 * 4, generator=rng) * mask[..., None]
    shapes = torch.tensor([[height, width]])
    return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}, height * width // 4


def _one_view(rng: torch.Generator) -> tuple[Inputs, int]:
    pixels = torch.randn(1, 2, 3, 16, 16, generator=rng)
    return {"pixel_values": pixels, "image_sizes": torch.tensor([[16, 16]])}, 16 + 16 + 4


def _numbered(rng: torch.Generator) -> tuple[Inputs, int]:
    height, width = (2 * int(torch.randint(1, 3, (), generator=rng)) for _ in range(2))
    places = torch.full((1, 16, 2), -1)
    places[0, : height * width] = torch.cartesian_prod(torch.arange(height), torch.arange(width)).flip(-1)
    pixels = torch.rand(1, 16, 3 * 4 * 4, generator=rng) * (places[..., :1] >= 0)
    return {"pixel_values": pixels, "image_position_ids": places}, height * width // 4


@dataclass(frozen=True)
class Family:
    """`config()` of a tiny model of the class, and `draw(rng)`: the inputs of a random image, and its tokens."""

    model: str
    config: Callable[[], Any]
    draw: Callable[[torch.Generator], tuple[Inputs, int]]
    types: str = ""  # argument that marks placeholders


def _config(name: str, **settings: Any) -> Callable[[], Any]:
    return lambda: getattr(transformers, name)(**settings)


FAMILIES = {
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        _config(
            "Qwen2_5_VLConfig",
            text_config=TEXT | _mrope(),
            vision_config=QWEN_VISION | {"window_size": 16, "fullatt_block_indexes": [1]},
            **SPECIAL,
        ),
        _grid,
        "mm_token_type_ids",
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        _config(
            "Qwen3VLConfig",
            text_config=TEXT | _mrope(mrope_interleaved=True),
            vision_config=QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
            **SPECIAL,
        ),
        _grid,
        "mm_token_type_ids",
    ),
    "qwen3_5": Family(
        "Qwen3_5ForConditionalGeneration",
        _config(
            "Qwen3_5Config",
            text_config=TEXT | QWEN3_5,
            vision_config=QWEN_VISION | {"num_position_embeddings": 16},
            **SPECIAL,
        ),
        _grid,
        "mm_token_type_ids",
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5MoeForConditionalGeneration",
        _config(
            "Qwen3_5MoeConfig",
            text_config=TEXT
            | QWEN3_5
            | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
            | {"shared_expert_intermediate_size": 16},
            vision_config=QWEN_VISION | {"num_position_embeddings": 16},
            **SPECIAL,
        ),
        _grid,
        "mm_token_type_ids",
    ),
    "gemma3": Family(
        "Gemma3ForConditionalGeneration",
        _config(
            "Gemma3Config",
            text_config=TEXT
            | {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            vision_config=VISION,
            image_token_index=IMAGE,
            mm_tokens_per_image=4,
        ),
        _square(4),
        "token_type_ids",
    ),
    "gemma4": Family(
        "Gemma4ForConditionalGeneration",
        _config(
            "Gemma4Config",
            text_config=TEXT
            | {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
            | {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}
            | {"global_head_dim": 16, "sliding_window": 16, "use_bidirectional_attention": "vision"},
            vision_config={**VISION, "head_dim": 8, "num_key_value_heads": 2, "pooling_kernel_size": 2},
            image_token_id=IMAGE,
            video_token_id=VOCAB_SIZE - 8,
            audio_token_id=VOCAB_SIZE - 5,
        ),
        _numbered,
        "mm_token_type_ids",
    ),
    "llama4": Family(
        "Llama4ForConditionalGeneration",
        _config(
            "Llama4Config",
            text_config=TEXT
            | {"num_hidden_layers": 4, "intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 16}
            | {"no_rope_layers": [1, 1, 1, 0], "attn_temperature_tuning": True, "floor_scale": 4},
            vision_config=VISION
            | {"intermediate_size": 64, "vision_output_dim": 24, "projector_input_dim": 24, "projector_output_dim": 24},
            image_token_index=IMAGE,
        ),
        _square(4),
    ),
    "glm4v": Family(
        "Glm4vForConditionalGeneration",
        _config(
            "Glm4vConfig",
            text_config=TEXT | _mrope(),
            vision_config=QWEN_VISION | {"image_size": 16},
            image_token_id=IMAGE,
            video_token_id=VOCAB_SIZE - 8,
            image_start_token_id=BEGIN,
            image_end_token_id=END,
        ),
        _grid,
        "mm_token_type_ids",
    ),
    "smolvlm": Family(
        "SmolVLMForConditionalGeneration",
        _config(
            "SmolVLMConfig",
            text_config=TEXT | {"model_type": "llama"},
            vision_config=VISION,
            image_token_id=IMAGE,
            scale_factor=2,
        ),
        _padded,
    ),
    "internvl": Family(
        "InternVLForConditionalGeneration",
        _config(
            "InternVLConfig",
            text_config=TEXT | {"model_type": "qwen2"},
            vision_config=VISION | {"image_size": (16, 16), "patch_size": (4, 4)},
            image_token_id=IMAGE,
            image_seq_length=4,
        ),
        _square(4),
    ),
    "mistral3": Family(
        "Mistral3ForConditionalGeneration",
        _config(
            "Mistral3Config",
            text_config=TEXT | {"model_type": "mistral", "sliding_window": None},
            vision_config=VISION | {"model_type": "pixtral", "head_dim": 8},
            image_token_index=IMAGE,
        ),
        _sized,
    ),
    "lfm2_vl": Family(
        "Lfm2VlForConditionalGeneration",
        _config(
            "Lfm2VlConfig",
            text_config=TEXT
            | {
                "model_type": "lfm2",
                "layer_types": ["conv", "full_attention", "conv"],
                "block_auto_adjust_ff_dim": False,
            },
            vision_config={**VISION, "model_type": "siglip2_vision_model", "num_patches": 16},
            image_token_id=IMAGE,
            projector_hidden_size=24,
        ),
        _patches,
    ),
    "llava_onevision": Family(
        "LlavaOnevisionForConditionalGeneration",
        _config(
            "LlavaOnevisionConfig",
            text_config=TEXT | {"model_type": "qwen2"},
            vision_config=VISION | {"model_type": "siglip_vision_model"},
            image_token_index=IMAGE,
            video_token_index=VOCAB_SIZE - 8,
            image_grid_pinpoints=[[16, 16]],
            vision_feature_select_strategy="full",
        ),
        _one_view,
    ),
}


BROKEN = {("llama4", "5.24.0")}
"""Families that versions of Transformers cannot run: there, the output of Llama 4's text model lacks a field."""


def build_image_model(name: str, dtype: torch.dtype = torch.float32, tokenizer: Any = None) -> PreTrainedModel:
    """Return a tiny random model, for a tokenizer with an `image_token` if there is one; skip the test without one."""
    if (name, transformers.__version__) in BROKEN:
        pytest.skip(f"Transformers {transformers.__version__} alone fails in the forward pass of {name} with images")
    torch.manual_seed(0)
    family = FAMILIES[name]
    config = family.config()
    if tokenizer is not None:
        config.image_token_id, config.text_config.vocab_size = tokenizer.image_token_id, len(tokenizer)
        config.text_config.vocab_size_per_layer_input = len(tokenizer)
        if name == "gemma4":
            config.text_config.sliding_window = 128  # an image of its processor has up to 70 tokens
    model: PreTrainedModel = getattr(transformers, family.model)(config)
    model.set_experts_implementation("eager")  # others take no float64
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if part.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.mul_(0.25)  # else each token attends to one other token
            parameter.mul_(2).add_(0.02 * torch.randn_like(parameter))  # else the greedy token often repeats
    return model.eval().to(dtype)


def image_prompts(name: str, rows: Sequence[Sequence[int]], seed: int = 0) -> Inputs:
    """Return the inputs of `generate` for prompts with the images of these numbers, each between random text.

    Prompts with the same seed begin with the same text, and equal numbers are equal images.
    """
    family = FAMILIES[name]
    drawn = {number: family.draw(torch.Generator().manual_seed(number)) for row in rows for number in row}
    ids, own = [], []
    for row in rows:
        rng = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, 90, (3,), generator=rng).tolist()
        for number in row:
            tokens += [BEGIN, *[IMAGE] * drawn[number][1], END]
            tokens += torch.randint(3, 90, (2,), generator=rng).tolist()
        ids.append(tokens)
        own.append([drawn[number][0] for number in row])
    longest = max(map(len, ids))
    input_ids = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    inputs = {"input_ids": input_ids, "attention_mask": mask}
    if family.types:
        inputs[family.types] = (input_ids == IMAGE).long()
    if not any(own):
        return inputs
    names = next(one for row in own for one in row)
    if family.draw is not _padded:
        return inputs | {name: torch.cat([one[name] for row in own for one in row]) for name in names}
    most = max(map(len, own))
    for name in names:  # `[prompts, images, ...]`, padded with zeros
        shape = next(one for row in own for one in row)[name].shape[2:]
        padded = torch.zeros(len(rows), most, *shape, dtype=names[name].dtype)
        for index, row in enumerate(own):
            for place, one in enumerate(row):
                padded[index, place] = one[name][0, 0]
        inputs[name] = padded
    return inputs
