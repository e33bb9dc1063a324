"""Prompts with images: tokens equal `generate`'s of the prompt alone, and each image is encoded once."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from dense import DenseOracle
from image_models import FAMILIES, IMAGE, Inputs, build_image_model, image_prompts
from tiny import VOCAB_SIZE, build, left_pad, make_prompts
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel
from workers import SETTINGS, WORDY, Recording, check_against

import hf_parallel
from hf_parallel import LogitsCache, SharedPrefixCache
from hf_parallel.engine import Engine

ROWS = [[1], [2], [1], [3, 1], []]
GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
MODELS: dict[str, PreTrainedModel] = {}

every_family = pytest.mark.parametrize("name", FAMILIES)


def model_of(name: str) -> PreTrainedModel:
    """Return an enabled model in float64, in which logits of two ways to compute them agree closely."""
    if name not in MODELS:
        MODELS[name] = hf_parallel.enable(build_image_model(name).double())
    return MODELS[name]


def prompts(name: str, rows: list[list[int]], seed: int = 0) -> Inputs:
    inputs = image_prompts(name, rows, seed)
    return {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}


def alone(name: str, row: list[int], **settings: Any) -> torch.Tensor:
    """Return the new tokens of stock `generate` for one prompt without padding."""
    inputs = prompts(name, [row])
    tokens: torch.Tensor = model_of(name).generate(**inputs, **GREEDY | settings)[0, inputs["input_ids"].shape[1] :]
    return tokens


def vision_tower(model: PreTrainedModel) -> nn.Module:
    names = ("visual", "vision_tower", "vision_model")
    return next(module for name, module in model.named_modules() if name.split(".")[-1] in names)


class Calls:
    """Counts the calls of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.count = 0
        self._hook = module.register_forward_hook(self._add)

    def _add(self, *args: object) -> None:
        self.count += 1

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *args: object) -> None:
        self._hook.remove()


@every_family
@pytest.mark.parametrize("chunk", [1, 3, None])
def test_tokens_and_logits_equal_generate_of_each_prompt_alone(name: str, chunk: int | None) -> None:
    model, settings = model_of(name), GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    mode: dict[str, Any] = {"generation_mode": "shared_prefix", "prefill_chunk_size": chunk}
    found = model.generate(**prompts(name, ROWS), **settings, **mode)
    for index, row in enumerate(ROWS):
        expected = model.generate(**prompts(name, [row]), **settings)
        assert torch.equal(found.sequences[index, -6:], expected.sequences[0, -6:]), row
        pairs = zip(found.logits, expected.logits, strict=True)
        assert all(torch.allclose(ours[index], theirs[0], atol=1e-5) for ours, theirs in pairs), row


@every_family
def test_logits_of_the_models_of_the_tests_depend_on_the_first_image(name: str) -> None:
    model = model_of(name)
    with torch.no_grad():
        logits, changed = (model(**prompts(name, [row])).logits[0, -1] for row in ([1, 2], [3, 2]))
    assert (logits - changed).abs().max() > 0.05 * logits.std()


@every_family
def test_random_calls_equal_generate(name: str) -> None:
    rng = random.Random(0)
    model, cache, logits = model_of(name), SharedPrefixCache(), LogitsCache()
    for seed in range(4):
        rows = [[rng.randint(1, 3) for _ in range(rng.randrange(3))] for _ in range(rng.randint(1, 3))]
        eos, count = rng.choice((None, rng.sample(range(1, VOCAB_SIZE), 12))), rng.choice((1, 2))
        inputs = prompts(name, rows)
        settings = {"prefill_chunk_size": rng.choice((2, 5, None)), "eos_token_id": eos, "seed": seed}
        settings |= {"do_sample": True, "top_k": 1, "num_return_sequences": count}
        more: dict[str, Any] = rng.choice(({"past_key_values": cache}, {"logits_cache": logits, "draft_tokens": 3}, {}))
        mode = "resample" if seed == 3 else "shared_prefix"
        more = {"logits_cache": logits} if mode == "resample" else more
        found = model.generate(**inputs, **GREEDY | settings, **more, generation_mode=mode)
        rows = [row for row in rows for _ in range(count)]
        for row, tokens in zip(rows, found[:, inputs["input_ids"].shape[1] :], strict=True):
            expected = alone(name, row, eos_token_id=eos)
            assert torch.equal(tokens[: len(expected)], expected), (row, settings)
            assert not tokens[len(expected) :].any()


@pytest.mark.parametrize("name", ["qwen3_vl", "smolvlm"])
def test_each_image_is_encoded_once_for_all_answers(name: str) -> None:
    model = model_of(name)
    settings = GREEDY | {"do_sample": True, "generation_mode": "shared_prefix", "seed": 0}
    model._parallel.images.clear()  # type: ignore[union-attr]  # those of earlier calls that are still in memory
    with Calls(vision_tower(model)) as calls:
        model.generate(**prompts(name, [[1], [2, 1]]), **settings, num_return_sequences=8)
    assert calls.count == 2


def test_kept_caches_tell_images_apart() -> None:
    model, cache = model_of("qwen3_vl"), SharedPrefixCache()
    settings = GREEDY | {"generation_mode": "shared_prefix", "past_key_values": cache, "return_dict_in_generate": True}
    for row in ([1], [2], [1]):
        found = model.generate(**prompts("qwen3_vl", [row]), **settings)
        assert torch.equal(found.sequences[0, -6:], alone("qwen3_vl", row))
    assert found.stats.prefilled_tokens <= 1 < found.stats.cached_tokens


SEES_LATER = {"gemma3": ("sliding_attention", "full_attention"), "gemma4": ("sliding_attention",)}
"""Types of layers in which image tokens see later ones of their image, by type of model."""


class ImageOracle(DenseOracle):
    """Dense oracle for one prompt with images, whose features are those that the recorded passes have received."""

    def __init__(self, model: PreTrainedModel, inputs: Inputs, features: list[dict[str, Any]]) -> None:
        super().__init__(model, model._parallel.capabilities.rotary)  # type: ignore[arg-type]
        ids = inputs["input_ids"]
        self.features = iter(features)
        found = model._prepare_position_ids_for_generation(ids, dict(inputs))  # the model's own rule
        self.of_prompt = found[-3:] if found.ndim == 3 else found
        self.shift = int(self.of_prompt.max()) + 1 - ids.shape[1]

    def sees_later(self, layer: int, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        kinds = SEES_LATER.get(self.model.config.model_type)
        if kinds is None or self.model.config.get_text_config().layer_types[layer] not in kinds:
            return super().sees_later(layer, query, key)
        is_image = torch.tensor(self.tokens) == IMAGE
        number = (is_image & ~is_image.roll(1)).cumsum(0)  # of the last image that has begun
        return is_image[query] & is_image[key] & (number[query] == number[key])

    def arguments(self, first: int) -> dict[str, Any]:
        positions = super().arguments(first)["position_ids"]
        if self.of_prompt.ndim == 3:
            positions = positions.expand(3, 1, -1).clone()
            of_prompt = self.of_prompt[..., first:]
            positions[..., : of_prompt.shape[-1]] = of_prompt
        return {"position_ids": positions, **next(self.features)}


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl", "smolvlm", "gemma3", "gemma4", "glm4v", "llama4"])
def test_workers_see_images_as_in_the_dense_oracle(name: str) -> None:
    model, inputs = model_of(name), prompts(name, [[3, 1]])
    features: list[dict[str, Any]] = []

    def keep(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        features.append({key: value for key, value in kwargs.items() if key == "mm_encoder_outputs"})

    recording, hook = Recording(model), model.register_forward_pre_hook(keep, with_kwargs=True)
    settings = {**GREEDY, **SETTINGS, **WORDY, "max_new_tokens": 40, "num_workers": 2}
    model.generate(**inputs, **settings, generation_mode="hogwild")
    hook.remove()
    assert check_against(ImageOracle(model, inputs, features), recording.passes) < 1e-4
    assert recording.moved


def test_requests_of_an_engine_share_images() -> None:
    for name in ("qwen3_vl", "gemma3"):
        model, rows = model_of(name), [[1], [2], [1, 3], [1], [], [3, 1]] * 2
        expected = [alone(name, row) for row in rows]
        model._parallel.images.clear()  # type: ignore[union-attr]
        with Calls(vision_tower(model)) as calls, Engine(model, max_kv_bytes=64 * 768) as engine:
            handles, images = [], []
            for row in rows:
                handles.append(engine.submit(prompts(name, [row]), "shared_prefix", **GREEDY))
                images += model._parallel.images.values()  # type: ignore[union-attr]  # as if requests were long
            found = [handle.result().sequences[0, -6:] for handle in handles]
            assert engine.stats.preemptions or engine.stats.evicted_tokens
        assert all(map(torch.equal, found, expected))
        assert calls.count == 3


def test_invalid_images_raise() -> None:
    model, inputs = model_of("qwen3_vl"), prompts("qwen3_vl", [[1]])
    call = GREEDY | {"generation_mode": "shared_prefix"}
    text = {key: inputs[key] for key in ("input_ids", "attention_mask")}
    many = text["input_ids"].index_fill(1, torch.tensor([0]), IMAGE)
    for wrong, says in (
        (inputs | {"input_ids": many}, "placeholder"),
        (inputs | {"pixel_values": inputs["pixel_values"][1:]}, "patches"),
        (inputs | {"pixel_values": [1.0]}, "pixel_values"),
        (text | {"image_grid_thw": inputs["image_grid_thw"]}, "pixel_values"),
        (inputs | {"input_ids": text["input_ids"].index_fill(1, torch.tensor([0]), 2**62 + 1)}, "vocabulary"),
        (inputs | {"pixel_values_videos": inputs["pixel_values"]}, "pixel_values_videos"),
    ):
        with pytest.raises((ValueError, TypeError), match=says):
            model.generate(**wrong, **call)
        if wrong["input_ids"] is not None:
            with Engine(model) as engine:
                with pytest.raises((ValueError, TypeError), match=says):
                    engine.submit(wrong, "shared_prefix", **GREEDY)
                found = engine.submit(inputs, "shared_prefix", **GREEDY).result()
            assert torch.equal(found.sequences[0, -6:], alone("qwen3_vl", [1]))
    plain = hf_parallel.enable(copy.deepcopy(build("llama")))
    with pytest.raises(ValueError, match="mm_token_type_ids"):
        plain.generate(**inputs, **call)
    assert torch.equal(model.generate(**inputs, **call)[0, -6:], alone("qwen3_vl", [1]))


class OwnOrder(LlamaForCausalLM):
    """A model whose `generate` takes its first arguments in an order of its own, as Janus's does."""

    def generate(
        self, inputs: Any = None, attention_mask: Any = None, logits_processor: Any = None, **kwargs: Any
    ) -> Any:
        given = {"attention_mask": attention_mask, "logits_processor": logits_processor}
        return super().generate(inputs, **{name: value for name, value in given.items() if value is not None}, **kwargs)


def test_a_class_keeps_the_order_of_arguments_of_its_generate() -> None:
    plain = build("llama")
    model = OwnOrder(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    ids, mask = left_pad(make_prompts([9, 6]))
    expected = plain.generate(ids, attention_mask=mask, **GREEDY)
    hf_parallel.enable(model)
    for mode in ({}, {"generation_mode": "shared_prefix"}):
        assert torch.equal(model.generate(ids, mask, **GREEDY, **mode), expected)
        assert torch.equal(model.generate(inputs=ids, attention_mask=mask, **GREEDY, **mode), expected)
    with pytest.raises(TypeError, match="attention_mask both by position and by name"):
        model.generate(ids, mask, attention_mask=mask)
