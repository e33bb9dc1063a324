"""Exactness of Hogwild!: the logits of a worker equal those of one sequence with all keys rotated to their positions.

The reference is `dense.py`, which has no blocks, and the layouts written as plain lists.
"""

from __future__ import annotations

import copy
from typing import Any

import dense
import pytest
import tiny
import torch
from dense import DenseOracle
from transformers import LogitsProcessor, PreTrainedModel
from workers import SETTINGS, TOKENIZER, Recording, check_against

import hf_parallel
from hf_parallel.generation.modes.hogwild.cache import LAYOUTS
from hf_parallel.models.probing.capabilities import probe_capabilities

EVERY_SETTING: dict[str, Any] = {
    "seed": [1, 2, 3],
    "cuda_graph": False,
    "compile": False,
    "cache_dtype": "int8",
    "replay": "hotspot",
    "prefetch": False,
    "num_workers": 3,
    "layout": "contiguous",
    "worker_names": ["Ann", "Ben", "Cy"],
    "history_header": "history\n",
    "others_header": "others\n",
    "own_header": "own\n",
    "own_headers": ["first\n", "second\n", "third\n"],
    "step_gap": "\n",
    "step_prefix": "{name}: ",
    "openings": ["A", "B", "C"],
    "separator": "\n",
    "sentence_ends": [".", "。"],
    "code_fence": "~~~",
    "redundancy_prompt": "Again? ",
    "redundancy_interval": 7,
    "call_tags": ["<call>", "</call>"],
    "tool_result": "{name} for {worker}: {result}",
    "control_prompt": "Enough? ",
    "control_interval": 5,
    "answer_pattern": "= (\\d+)",
    "stop_on_answer": "all",
    "finisher_prompt": "So ",
    "finisher_tokens": 5,
    "collaboration_prompt": "{names} work.",
    "task_prompt": "Task: {task}",
}
"""A value other than the default of each setting that can be stored, except those that exclude others."""
SMALL_CALL: dict[str, Any] = {
    "num_workers": 3,
    "collaboration_prompt": "{names} talk.",
    "redundancy_interval": 9,
    "finisher_tokens": 4,
}
"""Arguments of a short call with a tiny model."""

VARIANTS = {
    "llama-linear": "scaled RoPE",
    "llama-yarn": "scaled RoPE, scores scaled too",
    "llama-llama3": "scaled RoPE",
    "glm": "partial rotary, interleaved pairs",
    "cohere": "interleaved pairs",
    "smollm3": "layers without RoPE, sliding windows",
    "cohere2": "layers without RoPE, sliding windows",
    "olmo3": "two rotary tables",
    "gemma2": "soft-capping, sliding windows",
    "gemma3_text": "two rotary tables, sliding windows",
    "gpt_oss": "sinks, sliding windows, YaRN",
    "qwen3": "head_dim of its own, norms on queries and keys",
    "phi": "partial rotary, parallel residuals",
    "gpt_neox": "drops keyword arguments",
    "stablelm": "partial rotary",
    "gemma3n_text": "layers that share keys, sliding windows",
    "gemma4_text-e2b": "layers that share keys, heads of two sizes, some dimensions rotated",
    "gemma4_text-26b": "two numbers of KV heads, experts",
    "llama4_text": "chunks, layers without RoPE, interleaved pairs",
    "phimoe": "sliding windows of the mask",
    "ministral3": "queries scaled by their position",
    "mimo_v2_flash": "keys and values of different sizes, sinks, sliding windows",
    "llama": "plain RoPE",
}


BUSY: dict[str, Any] = {
    "max_new_tokens": 24,
    "redundancy_interval": 20,
    "redundancy_prompt": "Again? ",
    "finisher_tokens": 5,
    "suppress_tokens": [tiny.EOS],
}


class StepsEnd(LogitsProcessor):
    """Ends the steps of each worker at its own interval; other tokens are the choice of the model."""

    def __init__(self, token: int, every: int = 6) -> None:
        self.token, self.every, self.calls = token, every, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for row in range(len(scores)):
            if (self.calls + 3 * row) % (self.every + row) == 0:
                scores[row] = torch.nn.functional.one_hot(torch.tensor(self.token), scores.shape[1]).to(scores) * 100
        return scores


def generate(model: PreTrainedModel, prompts: torch.Tensor, **settings: Any) -> tuple[Recording, float, Any]:
    """Generate, and return the recorded passes, their distance from the dense oracle, and the output."""
    oracle = DenseOracle(model, probe_capabilities(model).rotary)
    recording = Recording(hf_parallel.enable(model))
    try:
        out = model.generate(
            prompts, generation_mode="hogwild", do_sample=False, return_dict_in_generate=True, **settings
        )
    finally:
        hf_parallel.disable(model)
    return recording, check_against(oracle, recording.passes), out


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_logits_of_the_mode_equal_the_dense_oracle(layout: str, num_workers: int) -> None:
    model = dense.in_float64(tiny.build("starcoder2"), num_layers=2)
    first, second = tiny.make_prompts([17, 9])
    ids, mask = tiny.left_pad([first, torch.cat((first[:5], second))])  # prompts with a common prefix
    recording, distance, out = generate(
        model,
        ids,
        attention_mask=mask,
        layout=layout,
        num_workers=num_workers,
        logits_processor=[StepsEnd(4)],
        **{**SETTINGS, **BUSY},
    )
    assert distance < 1e-9
    assert any(len({len(segment.tokens) for segment in one.segments}) > 1 for one in recording.passes), "ragged"
    finished = sum(step.forward_pass is not None for history in out.history for step in history)
    assert finished > 2 * num_workers
    assert (len(recording.moved) > 50) == (layout != "contiguous")  # a growing block moves its tokens, too


@pytest.mark.parametrize("layout", ["combined", "interleaved"])
def test_steps_that_are_computed_again_see_the_history_alone(layout: str) -> None:
    """The logits equal a dense recomputation in which a finished step is text after the steps before it."""
    model = dense.in_float64(tiny.build("starcoder2"), num_layers=2)
    settings = {**SETTINGS, **BUSY, "layout": layout, "num_workers": 3, "logits_processor": [StepsEnd(4)]}
    recording, distance, out = generate(model, tiny.make_prompts([17])[0][None], **settings, step_move="reencode")
    assert distance < 1e-9
    ended = [step.tokens for step in out.history[0] if step.forward_pass is not None]
    computed = {(*segment.tokens,): segment.seen for one in recording.passes for segment in one.segments}
    seen = TOKENIZER.decode(tiny.make_prompts([17])[0].tolist()) + SETTINGS["history_header"]
    assert len(ended) > 6
    for tokens in ended[:-3]:  # the last ones may end with the call
        seen += TOKENIZER.decode(tokens)
        assert computed[(*tokens,)] == seen


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_logits_equal_the_dense_oracle(name: str) -> None:
    settings = {**SETTINGS, **BUSY, "num_workers": 3, "logits_processor": [StepsEnd(4)]}
    recording, distance, _ = generate(tiny.build(name), tiny.make_prompts([17])[0][None], **settings)
    assert distance < 1e-3
    assert len(recording.moved) > 50


def test_queries_scaled_by_counted_positions_equal_the_dense_oracle() -> None:
    """Layers of Llama 4 without RoPE count positions from the length of the cache."""
    model = copy.deepcopy(tiny.build("llama4_text"))
    for layer in model.model.layers:
        layer.self_attn.attn_temperature_tuning, layer.self_attn.floor_scale = True, 4
    prompts = tiny.make_prompts([17, 30])
    plain = [model.generate(row[None], max_new_tokens=24, do_sample=False) for row in prompts]
    _, distance, _ = generate(model, prompts[0][None], **SETTINGS, **BUSY, num_workers=3)
    assert distance < 1e-3
    ids, mask = tiny.left_pad(prompts)
    settings = {"generation_mode": "shared_prefix", "do_sample": False, "max_new_tokens": 24}
    out = hf_parallel.enable(model).generate(ids, attention_mask=mask, **settings)
    assert all(torch.equal(row[-24:], alone[0, -24:]) for row, alone in zip(out, plain, strict=True))


@pytest.mark.slow
def test_the_embedded_model_generates_the_same_tokens_as_the_dense_oracle(embedded: tuple[Any, Any]) -> None:
    """12 greedy tokens of two workers, float32."""
    model, tokenizer = embedded
    rules = "You are {names} and share one notebook."
    prompt = hf_parallel.hogwild_prompt("Name three rivers.", tokenizer, collaboration_prompt=rules)
    separator = tokenizer("\n\n").input_ids[0]
    recording, distance, out = generate(
        model,
        prompt["input_ids"],
        tokenizer=tokenizer,
        max_new_tokens=12,
        sentence_ends=[" ", *"abcdefghijklmnopqrstuvwxyz.,:!?"],
        logits_processor=[StepsEnd(separator, every=4)],
        finisher_tokens=0,
        suppress_tokens=[tokenizer.eos_token_id],
    )
    assert out.stats.decoded_tokens == 2 * 12
    assert len(recording.moved) > 20
    assert distance < 1e-3
