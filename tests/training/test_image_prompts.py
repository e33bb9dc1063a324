"""Prompts with images in training: values and gradients equal those of full rows, and each image is encoded once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from image_models import FAMILIES, IMAGE, build_image_model, image_prompts
from tiny_tokenizer import make_tokenizer
from torch import nn
from transformers import PreTrainedModel

import hf_parallel
from hf_parallel.training import ParallelExample, tree_logprobs

ROWS = [[1], [1], [2, 1], [], [2, 1]]
ANSWERS = [[11, 12, 13], [11, 14], [15], [16, 17], [15, 18, 19, 20]]
SHARED = {"generation_mode": "shared_prefix"}


def build(name: str) -> PreTrainedModel:
    return hf_parallel.enable(build_image_model(name))


def full_rows(model: PreTrainedModel, name: str) -> list[torch.Tensor]:
    """Return the log-probabilities of the answers, each computed as one row with its images."""
    found = []
    for row, answer in zip(ROWS, ANSWERS, strict=True):
        inputs, new = image_prompts(name, [row]), torch.tensor([answer])
        begin = inputs["input_ids"].shape[1]
        inputs["input_ids"] = torch.cat([inputs["input_ids"], new], 1)
        for other in {"attention_mask", "mm_token_type_ids", "token_type_ids"} & inputs.keys():
            value = torch.ones_like(new) if other == "attention_mask" else torch.zeros_like(new)
            inputs[other] = torch.cat([inputs[other], value], 1)
        logits = model(**inputs, use_cache=False).logits[0, begin - 1 : -1]
        found.append(logits.log_softmax(-1).gather(1, new.T)[:, 0])
    return found


def gradients(model: PreTrainedModel, log_probs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.cat(log_probs).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def encoded(model: nn.Module) -> list[int]:
    """Return a list that grows with each call of the vision tower."""
    calls: list[int] = []
    names = ("visual", "vision_tower", "vision_model")
    tower = next(module for name, module in model.named_modules() if name.split(".")[-1] in names)
    tower.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "llama4"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_trees_equal_full_rows(name: str, attention: str) -> None:
    model = build(name)
    model.set_attn_implementation({"text_config": attention})
    expected = full_rows(model, name)
    of_rows = gradients(model, expected)
    calls = encoded(model)
    found = tree_logprobs(model, image_prompts(name, ROWS), ANSWERS)
    assert len(calls) == 2
    torch.testing.assert_close(found, [row.detach() for row in expected], atol=1e-4, rtol=1e-4)
    of_tree = gradients(model, found)
    assert of_tree.keys() == of_rows.keys()
    assert any("vis" in name for name in of_tree)
    for parameter, gradient in of_rows.items():
        assert (of_tree[parameter] - gradient).norm() <= 1e-4 * max(1, gradient.norm()), parameter


def test_a_model_whose_masks_have_chunks_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"llama4_text has layers of the type \['chunked_attention'\]"):
        tree_logprobs(build("llama4"), image_prompts("llama4", ROWS), ANSWERS)


def test_images_that_cannot_be_computed_raise() -> None:
    inputs = image_prompts("qwen3_vl", [[1]])
    with pytest.raises(ValueError, match="is not enabled"):
        tree_logprobs(build_image_model("qwen3_vl"), inputs, ANSWERS[:1])
    model = build("qwen3_vl")
    with pytest.raises(ValueError, match="'pixel_values_videos'.* not supported in the loss"):
        tree_logprobs(model, {**inputs, "pixel_values_videos": inputs["pixel_values"]}, ANSWERS[:1])
    wrong = inputs["input_ids"].masked_fill(inputs["input_ids"] == IMAGE, 5)
    with pytest.raises(ValueError, match="of the placeholder"):
        tree_logprobs(model, {**inputs, "input_ids": wrong}, ANSWERS[:1])
    with pytest.raises(ValueError, match="pixel_values are missing"):
        tree_logprobs(model, {name: x for name, x in inputs.items() if name != "pixel_values"}, ANSWERS[:1])
    output = model.generate(**inputs, **SHARED, max_new_tokens=2, return_dict_in_generate=True)
    with pytest.raises(ValueError, match="examples have no images"):
        ParallelExample.from_output(output)
    gemma = build("gemma3")
    gemma.set_attn_implementation({"text_config": "flex_attention"})
    with pytest.raises(ValueError, match="need sdpa or eager"):
        tree_logprobs(gemma, image_prompts("gemma3", [[1]]), ANSWERS[:1])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "smolvlm"])
def test_trainers_share_images(name: str, tmp_path: Path) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from hf_parallel.training import SharedPrefixGRPOTrainer

    model = build(name)
    trainer = SharedPrefixGRPOTrainer(
        model=model,
        processing_class=make_tokenizer(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["say it"]}),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path),
            num_generations=4,
            per_device_train_batch_size=8,
            max_completion_length=5,
            use_cpu=True,
            bf16=False,
            report_to=[],
            gradient_checkpointing=False,
            generation_kwargs=SHARED,
        ),
    )
    calls = encoded(model)
    rows = [[1]] * 4 + [[2]] * 4  # TRL repeats prompts, and their images
    inputs = image_prompts(name, rows)
    fields = {key: x for key, x in inputs.items() if key not in ("input_ids", "attention_mask")}
    prompt_ids = [row[kept.bool()].tolist() for row, kept in zip(*list(inputs.values())[:2], strict=True)]
    completions, _ = trainer._generate_single_turn(prompt_ids, None, copy.copy(fields), 4)
    assert len(calls) == 2  # the images
    assert len({*map(tuple, completions)}) > 2

    length = max(map(len, completions))
    new = torch.tensor([row + [0] * (length - len(row)) for row in completions])
    kept = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in completions])
    arguments: dict[str, Any] = {
        "input_ids": torch.cat([inputs["input_ids"], new], 1),
        "attention_mask": torch.cat([inputs["attention_mask"], kept], 1),
        "logits_to_keep": length,
        "compute_entropy": True,
        "num_images": [1] * 8,
        **{key: torch.cat([x, torch.zeros_like(new)], 1) if "type" in key else x for key, x in fields.items()},
    }
    shared = trainer._get_per_token_logps_and_entropies(model, **arguments)
    assert len(calls) == 4
    stock = trl.GRPOTrainer._get_per_token_logps_and_entropies(trainer, model, **arguments)
    for mine, theirs in zip(shared[:2], stock[:2], strict=True):
        torch.testing.assert_close(mine * kept, theirs * kept, atol=1e-4, rtol=1e-4)
    found, expected = (gradients(model, [part[0][kept.bool()]]) for part in (shared, stock))
    for parameter, gradient in expected.items():
        assert (found[parameter] - gradient).norm() <= 1e-4 * max(1, gradient.norm()), parameter
