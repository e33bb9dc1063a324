"""Images from transformers' own processors, built from their settings: tokens equal `generate`'s, and pages show them.

The image processors are those for Pillow. SmolVLM's processor needs another package, so that of Idefics3, from which it
is derived, serves its model.
"""

from __future__ import annotations

import base64
import importlib
import io
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from image_models import build_image_model
from small_tokenizers import byte_level
from transformers import PreTrainedTokenizerFast, ProcessorMixin

import hf_parallel

Picture = pytest.importorskip("PIL.Image")

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
QWEN = {"size": {"shortest_edge": 64, "longest_edge": 1024}, "patch_size": 4}
GEMMA = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
IDEFICS = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
TOKENS = {"image_token": "<img>", "video_token": "<video>"}
GEMMA_TOKENS = TOKENS | {"boi_token": "<boi>", "eoi_token": "<eoi>", "audio_token": "<audio>"}
IDEFICS_TOKENS = {
    **{"image_token": "<image>", "fake_image_token": "<fake_token_around_image>"},
    **{"global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"},
}
PROCESSORS: dict[str, tuple[str, str, dict[str, Any], dict[str, str], dict[str, int]]] = {
    "qwen2_5_vl": ("Qwen2_5_VL", "qwen2_vl.Qwen2VL", QWEN, TOKENS, {}),
    "gemma4": ("Gemma4", "gemma4.Gemma4", GEMMA, GEMMA_TOKENS | {"boa_token": "<boa>", "eoa_token": "<eoa>"}, {}),
    "smolvlm": ("Idefics3", "idefics3.Idefics3", IDEFICS, IDEFICS_TOKENS, {"image_seq_len": 4}),
}
"""By family: names of the processor and of its image processor, settings, special tokens, and more settings."""


def load(name: str) -> tuple[Any, Any]:
    """Return an enabled tiny model and a processor for it."""
    of_texts, of_images, settings, tokens, more = PROCESSORS[name]
    module, prefix = of_images.split(".")
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "padding_side": "left"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), **names, extra_special_tokens=tokens)
    module = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    images = getattr(module, f"{prefix}ImageProcessorPil")(**settings)
    parts = {"image_processor": images, "tokenizer": tokenizer}
    parts |= {"feature_extractor": None, "video_processor": None} if name == "gemma4" else {}
    with mock.patch.object(ProcessorMixin, "check_argument_for_proper_class"):  # that of videos needs torchvision
        processor = getattr(transformers, f"{of_texts}Processor")(**parts, **more)
    return hf_parallel.enable(build_image_model(name, torch.float64, tokenizer)), processor


def draw(upper: int, size: tuple[int, int] = (32, 24)) -> Any:
    """Return an image that is red, green or blue in its upper half, black on the left and blue on the right below."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    pixels[: size[1] // 2, :, upper] = 200
    pixels[size[1] // 2 :, size[0] // 2 :, 2] = 220
    return Picture.fromarray(pixels)


def inputs_of(processor: Any, rows: list[list[Any]]) -> dict[str, Any]:
    """Return what a processor makes of prompts with images between texts."""
    texts = ["What is" + f" {processor.image_token} and" * len(row) + " this?" for row in rows]
    inputs = processor(text=texts, images=rows, return_tensors="pt", padding=True)
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


@pytest.mark.parametrize("name", PROCESSORS)
def test_tokens_equal_generate_and_the_page_shows_the_images(name: str) -> None:
    model, processor = load(name)
    rows = [[draw(0)], [draw(1), draw(0)], [draw(1)]]
    inputs = inputs_of(processor, rows)
    sampled = GREEDY | {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "seed": 0}
    found = model.generate(**inputs, **sampled, generation_mode="shared_prefix", return_dict_in_generate=True)
    for index, row in enumerate(rows):
        expected = model.generate(**inputs_of(processor, [row]), **GREEDY)[0, -8:]
        assert all(torch.equal(tokens[-8:], expected) for tokens in found.sequences[2 * index : 2 * index + 2])
    sections = found.to_dict(processor.tokenizer)["sections"]
    assert len(sections) == len(rows), "the first and the last prompt have one text, and different images"
    page = found.to_html(processor.tokenizer)
    for section, row in zip(sections, rows, strict=True):
        url = section["images"][-1]
        assert f'<img src="{url}"' in page
        assert len(url) < 20_000
        thumbnail = Picture.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,"))))
        assert max(thumbnail.size) <= 64
        colors = np.asarray(thumbnail.resize((4, 4)).convert("RGB")).astype(int)
        upper = int(np.asarray(row[-1])[0, 0].argmax())
        assert colors[0, 0, upper] - colors[3, 0, upper] > 100
        assert colors[3, 3, 2] - colors[0, 0, 2] > 100
