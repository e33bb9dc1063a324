"""Exactness of Hogwild!: the logits of a worker equal those of one sequence with all keys rotated to their positions.

The reference is `dense.py`, which has no blocks, and the layouts written as plain lists.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import dense
import pytest
import tiny
import torch
from dense import DenseOracle, Piece
from transformers import LogitsProcessor, PreTrainedModel
from workers import SETTINGS, Recording, check_against

import hf_parallel
from hf_parallel.cache import Block, Segment
from hf_parallel.cache.hogwild import LAYOUTS, HogwildCache
from hf_parallel.models.attention import block_attention_enabled
from hf_parallel.models.capabilities import probe_capabilities

EVERY_SETTING: dict[str, Any] = {
    "seed": [1, 2, 3],
    "cuda_graph": False,
    "compile": False,
    "replay": "hotspot",
    "prefetch": False,
    "num_workers": 3,
    "layout": "interleaved",
    "worker_names": ["Ann", "Ben", "Cy"],
    "history_header": "history\n",
    "others_header": "others\n",
    "own_header": "own\n",
    "step_gap": "\n",
    "step_prefix": "{name}: ",
    "separator": "\n",
    "sentence_ends": [".", "。"],
    "code_fence": "~~~",
    "redundancy_prompt": "Again? ",
    "redundancy_interval": 7,
    "answer_pattern": "= (\\d+)",
    "stop_on_answer": "all",
    "finisher_prompt": "So ",
    "finisher_tokens": 5,
    "collaboration_prompt": "{names} work.",
    "task_prompt": "Task: {task}",
}
"""A value other than the default for each setting that can be stored."""
SMALL_CALL: dict[str, Any] = {
    "num_workers": 3,
    "collaboration_prompt": "{names} talk.",
    "redundancy_interval": 9,
    "finisher_tokens": 4,
}
"""Arguments of a short call with a tiny model."""

HEADERS = (5, 4, 3, 2)  # tokens of the history header, the others header, the own header and the gap


pytestmark = pytest.mark.usefixtures("one_thread")


# The cache under a model


class Ours:
    """The blocks of one prompt, and passes over them."""

    def __init__(self, model: PreTrainedModel, layout: str, num_workers: int) -> None:
        self.model, self.found = model, probe_capabilities(model)
        self.cache = HogwildCache(self.found.rotary)
        self.space = self.cache.new_workspace(layout, [self.cache.pool.new_block()], num_workers, HEADERS)

    @torch.no_grad()
    def forward(self, inputs: Sequence[tuple[Sequence[Block], Sequence[int]]]) -> torch.Tensor:
        forward = self.cache.prepare([Segment(view, len(tokens)) for view, tokens in inputs])
        with block_attention_enabled(self.model, self.cache):
            logits = self.model(
                input_ids=torch.tensor([[token for _, tokens in inputs for token in tokens]]),
                position_ids=forward.position_ids[None],
                past_key_values=self.cache,
                **({"block_cache": self.cache} if self.found.keyword else {}),
            ).logits[0]
        self.cache.commit()
        return logits


class Pages:
    """The layouts of the paper (section 3.2, appendix A) as lists."""

    def __init__(self, layout: str, num_workers: int) -> None:
        self.layout = layout
        self.prompt: Piece = []
        self.history_header, self.others_header, self.own_header, self.gap = [], [], [], []
        self.history: list[Piece] = []
        self.workers: list[Piece] = [[] for _ in range(num_workers)]

    def common(self, steps: int | None = None) -> list[Piece]:
        if self.layout == "contiguous":
            return [self.prompt]
        return [self.prompt, self.history_header, *self.history[:steps]]

    def view(self, worker: int) -> list[Piece]:
        view = self.common()
        others = [step for i, step in enumerate(self.workers) if i != worker]
        if self.layout != "interleaved" and others:
            view += [self.others_header, others[0]]
            for step in others[1:]:
                view += [self.gap, step]
        return [*view, self.own_header, self.workers[worker]]

    def end_step(self, worker: int) -> None:
        self.history.append(self.workers[worker])
        self.workers[worker] = []


def random_passes(model: PreTrainedModel, layout: str, num_workers: int, passes: int) -> Iterator[tuple[Any, Any]]:
    """Yield our logits and the oracle's for every token of random passes, in which steps end now and then."""
    rng = random.Random(f"{layout}{num_workers}")
    ours, pages = Ours(model, layout, num_workers), Pages(layout, num_workers)
    oracle = DenseOracle(model, ours.found.rotary)
    space = ours.space

    def some(n: int) -> list[int]:
        return [rng.randrange(tiny.EOS + 1, tiny.VOCAB_SIZE) for _ in range(n)]

    def both(inputs: list[tuple[list[Block], list[Piece], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            ours.forward([(view, tokens) for view, _, tokens in inputs]),
            oracle.forward([(pieces, tokens) for _, pieces, tokens in inputs]),
        )

    yield both([(space.prompt, [pages.prompt], some(19))])
    headers: list[tuple[Block, Piece, list[int]]] = [
        (space.history_header, pages.history_header, some(HEADERS[0])),
        (space.others_header, pages.others_header, some(HEADERS[1])),
        (space.own_header, pages.own_header, some(HEADERS[2])),
        (space.gap, pages.gap, some(HEADERS[3])),
    ]
    yield both([([*space.prompt, block], [pages.prompt, piece], tokens) for block, piece, tokens in headers])
    pending: list[tuple[Block, int, list[int]]] = []
    for _ in range(passes):
        late = [(space.view_of(block), pages.common(step), tokens) for block, step, tokens in pending]
        own = [(space.view(w), pages.view(w), some(rng.choice([1, 1, 1, 2, 6, 20]))) for w in range(num_workers)]
        yield both([*late, *own])
        ours.cache.move_ended(space)
        pending = []
        for worker in range(num_workers):
            if layout != "contiguous" and rng.random() < 0.4:
                block = space.workers[worker]
                ours.cache.end_step(space, worker)
                pages.end_step(worker)
                pending.append((block, len(pages.history), some(rng.choice([1, 3]))))
    if layout != "contiguous":
        assert len(pages.history) > 3, "too few steps moved"


@pytest.mark.parametrize("num_workers", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_the_dense_oracle(layout: str, num_workers: int) -> None:
    model = dense.in_float64(tiny.build("starcoder2"), num_layers=2)
    for found, expected in random_passes(model, layout, num_workers, passes=10):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["phi", "gpt_neox", "stablelm", "llama"])
def test_logits_equal_the_dense_oracle_on_other_models(name: str) -> None:
    """Partial rotary, parallel residuals, a model that drops keyword arguments, RMSNorm."""
    model = dense.in_float64(tiny.build(name))
    for found, expected in random_passes(model, "combined", 3, passes=10):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


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
}


@pytest.mark.parametrize("name", VARIANTS)
def test_float32_logits_equal_the_dense_oracle(name: str) -> None:
    model, furthest = tiny.build(name), 0.0
    for found, expected in random_passes(model, "combined", 3, passes=10):
        furthest = max(furthest, ((found - expected).abs().max() / expected.std()).item())
    assert furthest < 1e-3


# The mode


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
