"""Sampling, processors, criteria, streamers and outputs are `generate`'s own in `shared_prefix` too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from stateful import Alternate, EndRow, FollowOthers
from transformers import (
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

import hf_parallel
from hf_parallel import ParallelOutput
from hf_parallel.generation.sampling.processors import MinLengthProcessor
from hf_parallel.models.probing.signature import CACHE

NEW = 16
DRAWS = 2000
CHOICES = 6  # top_k of the distribution tests
ROOT, TAIL, OTHER, LONE = tiny.make_prompts([20, 6, 9, 8], seed=8)
ROWS = [torch.cat((ROOT, TAIL)), torch.cat((ROOT, OTHER)), torch.cat((ROOT, TAIL)), LONE]
INPUT_IDS, ATTENTION_MASK = tiny.left_pad(ROWS)
WIDTH = INPUT_IDS.shape[1]


def run(model: PreTrainedModel, mode: str | None, global_seed: int = 0, **settings: Any) -> Any:
    """One call over the batch, plain or in a mode, from the same global seed; `settings` may hold makers of objects."""
    made = {name: value() if isinstance(value, Make) else value for name, value in settings.items()}
    defaults = {"input_ids": INPUT_IDS, "attention_mask": ATTENTION_MASK, "max_new_tokens": NEW, "do_sample": False}
    torch.manual_seed(global_seed)
    return model.generate(generation_mode=mode, **(defaults | made))  # type: ignore[operator]


class Make:
    """A processor or the like that keeps state: made anew for each call."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __call__(self) -> Any:
        return self.make()


def both(model: PreTrainedModel, **settings: Any) -> tuple[Any, Any]:
    return run(model, None, **settings), run(model, "shared_prefix", **settings)


def some_token(model: PreTrainedModel, row: int, step: int) -> int:
    """A token that a row does write, greedily."""
    return int(run(model, None)[row, WIDTH + step])


# The same tokens from the same seed


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe"])
def test_same_global_seed_gives_the_same_tokens(name: str) -> None:
    model = hf_parallel.enable(tiny.build(name))
    settings = {"do_sample": True, "num_return_sequences": 4, "temperature": 1.3, "eos_token_id": None}
    model.generation_config.eos_token_id = None
    try:
        plain, ours = both(model, **settings)
    finally:
        model.generation_config.eos_token_id = tiny.EOS
        hf_parallel.disable(model)
    assert torch.equal(plain, ours)
    assert len({tuple(row) for row in plain[:4].tolist()}) == 4  # completions of one prompt, all different


# The same distribution


@torch.no_grad()
def two_token_probabilities(model: PreTrainedModel, prompt: torch.Tensor) -> dict[tuple[int, int], float]:
    """Probability of each continuation by two tokens among the `CHOICES` best at each step, by definition."""

    def choices(row: torch.Tensor) -> list[tuple[int, float]]:
        best = model(row[None]).logits[0, -1].double().topk(CHOICES)
        return list(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))

    return {
        (first, second): p * q
        for first, p in choices(prompt)
        for second, q in choices(torch.cat((prompt, torch.tensor([first]))))
    }


def p_value(drawn: torch.Tensor, probabilities: dict[tuple[int, int], float]) -> float:
    """Chi-square test that pairs `[draws, 2]` come from a distribution; rare pairs are counted together."""
    counts = dict.fromkeys(probabilities, 0)
    for pair in drawn.tolist():
        counts[tuple(pair)] += 1  # a KeyError: drew what cannot be drawn
    common = [pair for pair, p in probabilities.items() if p * len(drawn) >= 10]
    observed = torch.tensor([counts[pair] for pair in common] + [0.0]).double()
    expected = torch.tensor([probabilities[pair] * len(drawn) for pair in common] + [0.0]).double()
    observed[-1], expected[-1] = len(drawn) - observed.sum(), len(drawn) - expected.sum()
    statistic = ((observed - expected) ** 2 / expected.clamp(min=1e-9)).sum()
    return float(torch.special.gammaincc(torch.tensor(len(common) / 2).double(), statistic / 2))


def draw_pairs(model: PreTrainedModel, **settings: Any) -> torch.Tensor:
    settings = {"num_return_sequences": DRAWS, "max_new_tokens": 2, "top_k": CHOICES, "do_sample": True} | settings
    return run(model, "shared_prefix", input_ids=ROWS[0][None], attention_mask=None, **settings)[:, -2:]


@pytest.mark.parametrize("seeded", [{}, {"seed": 11}], ids=["global generator", "one per row"])
def test_sampled_tokens_have_the_models_distribution(model: PreTrainedModel, seeded: dict[str, int]) -> None:
    probabilities = two_token_probabilities(model, ROWS[0])
    assert max(probabilities.values()) < 0.5
    assert p_value(draw_pairs(model, **seeded), probabilities) > 1e-3
    assert p_value(draw_pairs(model, temperature=1.25, **seeded), probabilities) < 1e-6  # the test can fail


# A row's own randomness


def test_seeded_row_does_not_depend_on_its_batch(model: PreTrainedModel) -> None:
    settings = {"do_sample": True, "temperature": 1.5, "seed": 7}
    everything = run(model, "shared_prefix", 0, **settings)
    for last in (1, 2, 3):
        ids, mask = tiny.left_pad(ROWS[:last])
        some = run(model, "shared_prefix", 1, input_ids=ids, attention_mask=mask, **settings)
        assert torch.equal(some[:, ids.shape[1] :], everything[:last, WIDTH:])
    end = int(everything[0, WIDTH + 2])
    ended = run(model, "shared_prefix", 2, eos_token_id=end, **settings)
    for row in range(4):
        written = everything[row, WIDTH:].tolist()
        written = written[: written.index(end) + 1 if end in written else NEW]
        assert ended[row, WIDTH : WIDTH + len(written)].tolist() == written
    assert not torch.equal(run(model, "shared_prefix", do_sample=True, temperature=1.5, seed=8), everything)


def test_seeds_of_rows_are_honored(model: PreTrainedModel) -> None:
    settings = {"do_sample": True, "temperature": 1.5}
    by_seed = run(model, "shared_prefix", seed=[3, 4, 3, 5], **settings)
    assert torch.equal(by_seed[0], by_seed[2])  # twins with one seed
    other = run(model, "shared_prefix", seed=[3, 4, 3, 6], **settings)
    assert torch.equal(other[:3], by_seed[:3])
    assert not torch.equal(other[3], by_seed[3])
    run(model, "shared_prefix", global_seed=3, seed=1, **settings)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), after)  # the global generator is left alone


# Processors


PROCESSED: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, _: list(range(10 + 20 * row, 30 + 20 * row))},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.8},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "stateful": {"logits_processor": Make(lambda: LogitsProcessorList([Alternate()]))},
    "across rows": {"logits_processor": Make(lambda: LogitsProcessorList([FollowOthers()]))},
}


@pytest.mark.parametrize("name", PROCESSED)
def test_processor_sees_the_batch_when_rows_have_ended(model: PreTrainedModel, name: str) -> None:
    settings = PROCESSED[name]
    ends = [int(run(model, None, **settings)[0, WIDTH + 2])]
    plain, ours = both(model, eos_token_id=ends, **settings)
    assert torch.equal(plain, ours)
    assert (plain[:, WIDTH:] == tiny.PAD).any(dim=1).sum() not in (0, len(ROWS))


@pytest.mark.parametrize("ends", [[5], [5, 90, 5], [90, 10**6, -1], [10**6]], ids=str)
@pytest.mark.parametrize("length", [1, 11, 12, 40])
def test_ends_come_later_as_by_the_processors_of_transformers(ends: list[int], length: int) -> None:
    ids, scores = torch.zeros(2, length, dtype=torch.long), torch.randn(2, tiny.VOCAB_SIZE)
    before, least = scores.clone(), MinLengthProcessor(12, torch.tensor(ends))
    for theirs in (MinLengthLogitsProcessor(12, ends), MinNewTokensLengthLogitsProcessor(8, 4, ends)):
        assert torch.equal(least(ids, scores), theirs(ids, scores))
    assert torch.equal(scores, before), "the caller's own"


# Criteria


class EndWhenSure(StoppingCriteria):
    """Looks at the scores of the last step, as they are when `output_scores` is set."""

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> torch.BoolTensor:
        assert isinstance(scores, tuple)
        return scores[-1].softmax(dim=-1).amax(dim=-1) > 0.5  # type: ignore[return-value]


@pytest.mark.parametrize("criterion", [EndRow, EndWhenSure])
def test_criterion_acts_as_under_generate(model: PreTrainedModel, criterion: type[StoppingCriteria]) -> None:
    plain, ours = both(
        model,
        stopping_criteria=Make(lambda: StoppingCriteriaList([criterion()])),
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert torch.equal(plain.sequences, ours.sequences)
    assert (plain.sequences[:, WIDTH:] == tiny.PAD).any()


# Streamers


class Recorder(BaseStreamer):
    """Everything that a streamer is told."""

    def __init__(self) -> None:
        self.told: list[list[int] | str] = []

    def put(self, value: torch.Tensor) -> None:
        self.told.append(value.flatten().tolist())

    def end(self) -> None:
        self.told.append("end")


def test_streamer_is_told_what_generate_tells_it(model: PreTrainedModel) -> None:
    told = []
    for mode in (None, "shared_prefix"):
        recorder = Recorder()
        run(model, mode, streamer=recorder, eos_token_id=some_token(model, 0, 2))
        told.append(recorder.told)
    assert told[0] == told[1]
    assert told[0][-1] == "end"


# What is returned


def test_output_is_generates_own_and_stats(model: PreTrainedModel) -> None:
    plain, ours = both(model, return_dict_in_generate=True)
    assert isinstance(ours, ParallelOutput)
    assert isinstance(ours, type(plain))
    assert set(ours.keys()) == {"sequences", CACHE, "log_probs", "stats", "record"}
    assert set(plain.keys()) == {"sequences", CACHE}
    assert ours.to_tuple()[:2] == (ours.sequences, ours.past_key_values)
    assert ours.stats.prefill_seconds > 0
    assert ours.stats.decode_seconds > ours.stats.plan_seconds > 0
    assert ours.stats.to_dict()["decoded_tokens"] == len(ROWS) * NEW
    tensor = run(model, "shared_prefix")
    assert torch.equal(tensor, ours.sequences)
    assert tensor.dtype == torch.int64
