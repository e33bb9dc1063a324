"""Requests of an engine sample together, whatever their settings, and get the tokens that each would get alone."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_parallel.engine import engine as engine_module  # noqa: E402
from hf_parallel.generation.sampling.log_probs import TopLogProbs  # noqa: E402
from hf_parallel.generation.sampling.parts import Part  # noqa: E402
from hf_parallel.generation.sampling.row_processors import RowProcessors  # noqa: E402
from hf_parallel.generation.sampling.sampler import Sampler, SamplingBatch, SamplingTask, sample_together  # noqa: E402
from hf_parallel.generation.sampling.token_table import TokenTable  # noqa: E402

VOCABULARY = 300
EOS = torch.tensor([2, 5])


def takes_lengths() -> bool:
    """Whether a repetition penalty ignores a number of tokens per row; in transformers 5.17.0 one for all."""
    try:
        RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=torch.tensor([0]))
    except ValueError:
        return False
    return True


IGNORES_BY_ROW = takes_lengths()


def random_processors(rng: random.Random, prompts: torch.Tensor) -> list[LogitsProcessor]:
    """Return processors in the order of `generate`."""
    found: list[LogitsProcessor] = []
    if rng.random() < 0.5:
        lengths = [rng.randrange(prompts.shape[1]) for _ in prompts]
        some = torch.tensor(lengths) if IGNORES_BY_ROW else lengths[0]
        ignored: Any = some if rng.random() < 0.5 else None
        found.append(RepetitionPenaltyLogitsProcessor(rng.choice([0.8, 1.3]), prompt_ignore_length=ignored))
    if rng.random() < 0.5:
        found.append(MinLengthLogitsProcessor(rng.randint(1, 20), EOS))
    if rng.random() < 0.5:
        found.append(TemperatureLogitsWarper(rng.choice([0.3, 0.7, 1.7])))
    if rng.random() < 0.5:
        found.append(TopKLogitsWarper(rng.choice([1, 3, 50, 1000])))
    if rng.random() < 0.5:
        found.append(TopPLogitsWarper(rng.choice([0.2, 0.9, 1.0])))
    if rng.random() < 0.5:
        found.append(MinPLogitsWarper(rng.choice([0.0, 0.05, 0.5])))
    if rng.random() < 0.1:
        found.append(TypicalLogitsWarper(0.5))  # has no stage: the call samples by itself
    return found


def random_sampler(rng: random.Random, do_sample: bool) -> Sampler:
    length, count = rng.randint(1, 12), rng.choice([1, 1, 3])
    prompts = torch.tensor([[rng.randrange(VOCABULARY) for _ in range(length)] for _ in range(count)])
    config = GenerationConfig(do_sample=do_sample, return_dict_in_generate=True)
    config.output_scores, config.output_logits = rng.random() < 0.4, rng.random() < 0.4
    processors = LogitsProcessorList(random_processors(rng, prompts))
    criteria = StoppingCriteriaList([EosTokenCriteria(EOS), MaxLengthCriteria(length + rng.randint(1, 4))])
    seed = rng.randrange(100)
    sampler: Any = Sampler(config, processors, criteria, TokenTable(prompts, 0, 8), seed)
    sampler.given = processors
    if count > 1 and rng.random() < 0.5:  # rows of unequal length
        sampler.append([0], [rng.randrange(VOCABULARY)])
    return sampler


def stock_distribution(sampler: Any, rows: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Return what the processors of Transformers make of the logits of each row."""
    found = []
    for row, scores in zip(rows, logits[:, None], strict=True):
        for processor in copy.deepcopy(sampler.given):
            if isinstance(ignored := getattr(processor, "prompt_ignore_length", None), torch.Tensor):
                processor.prompt_ignore_length = ignored[row : row + 1]
            scores = processor(sampler.table.ids[row : row + 1, : sampler.table.lengths[row]], scores)
        found.append(scores)
    scores = torch.cat(found)
    return scores.softmax(dim=-1) if sampler.do_sample else scores


@pytest.mark.parametrize("seed", range(40))
def test_calls_that_sample_together_get_the_tokens_and_scores_of_each_alone(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    count = rng.randint(2, 7)
    drawing = (1, count // 2, count, 0)[seed // 10]  # the others are greedy
    samplers = [random_sampler(rng, do_sample=index < drawing) for index in rng.sample(range(count), count)]
    alone = copy.deepcopy(samplers)
    for _ in range(3):
        tasks, given, expected = [], [], []
        for together, by_itself in zip(samplers, alone, strict=True):
            rows = sorted(rng.sample(range(together.num_rows), rng.randint(1, together.num_rows)))
            logits = 3 * torch.randn(len(rows), VOCABULARY, generator=generator)
            logits = (2 * logits).round() / 2 if rng.random() < 0.5 else logits  # with ties
            has_log_probs = seed % 4 > 0  # without them, one operation may filter and draw
            together.returns_log_probs = by_itself.returns_log_probs = has_log_probs
            top = [TopLogProbs(3)] if has_log_probs and rng.random() < 0.5 else []
            together.top_log_probs = by_itself.top_log_probs = top
            tasks.append(SamplingTask(together, rows))
            given.append(logits)
            processed = copy.deepcopy(by_itself).distribution(rows, logits.clone())
            stock = stock_distribution(by_itself, rows, logits)
            # Sorted, as the sort of Transformers' top-p may keep any of equal scores.
            torch.testing.assert_close(processed.sort().values, stock.sort().values, rtol=1e-5, atol=1e-7)
            expected += SamplingBatch([SamplingTask(by_itself, rows)]).sample([Part(logits.clone())])
        results = sample_together(tasks, [Part(logits) for logits in given])
        for task, logits, found, one in zip(tasks, given, results, expected, strict=True):
            assert not isinstance(found, Exception)
            assert found.read() == one.read()
            assert torch.equal(found.tokens.tensor, one.tokens.tensor)
            if not has_log_probs:
                continue
            assert (found.log_probs.model - one.log_probs.model).abs().max() < 1e-5
            assert (found.log_probs.sampling - one.log_probs.sampling).abs().max() < 1e-5
            model = logits.log_softmax(-1)
            torch.testing.assert_close(found.log_probs.model, model.gather(1, found.tokens.tensor[:, None])[:, 0])
            assert (found.log_probs.top is None) == (not task.sampler.top_log_probs)
            if found.log_probs.top is not None:
                values, ids = found.log_probs.top
                torch.testing.assert_close(values, model.topk(3).values)
                torch.testing.assert_close(values, model.gather(1, ids))
            assert task.sampler.table.lengths == alone[samplers.index(task.sampler)].table.lengths
    for together, by_itself in zip(samplers, alone, strict=True):
        assert torch.equal(together.table.ids, by_itself.table.ids)
        for name in ("scores", "logits"):
            kept, others = getattr(together, name), getattr(by_itself, name)
            assert (kept is None) == (others is None)
            assert all(torch.equal(a, b) for a, b in zip(kept or (), others or (), strict=True))


def test_rows_that_cannot_be_drawn_fail_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    samplers = [random_sampler(random.Random(seed), True) for seed in range(3)]
    for sampler in samplers:
        sampler.processors, sampler.do_sample = RowProcessors([], sampler.table), True
    logits = [torch.zeros(sampler.num_rows, VOCABULARY) for sampler in samplers]
    logits[1][:] = -torch.inf
    tasks = [SamplingTask(sampler, range(sampler.num_rows)) for sampler in samplers]
    results = sample_together(tasks, list(map(Part, logits)))
    assert [isinstance(result, Exception) for result in results] == [False, True, False]
    assert engine_module.sample_together is sample_together
