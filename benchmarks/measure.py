"""Measurements: a clock for the steps of `generate`, timing in rounds, prompts, and methods of transformers.

Each round runs every method once, so that machine noise affects all of them.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache, ContinuousBatchingConfig, DynamicCache, GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from hf_parallel.progress import progress_bar

PAGE = 256
"""Tokens of a page of continuous batching. Requests share the pages of equal prefixes."""
GUESTS = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Ida")
TOWNS = ("Rome", "Oslo", "Lima", "Cairo", "Kyoto")
LIKED = ("the garden", "the quiet rooms", "the breakfast", "the view of the lake", "the old library")
QUESTION = "...\n\nIn short, our guests like"


class StepClock(BaseStreamer):
    """Streamer that records when `generate` passes it the prompt and each token; works with any mode and with none.

    Streamers receive tokens in host memory, so each interval covers a complete decode step, on a GPU too.
    `on_step` is called after each step with the number of tokens that each row has generated so far.
    """

    def __init__(self, on_step: Callable[[int], None] = lambda count: None) -> None:
        self.times: list[float] = []  # seconds
        self._on_step = on_step

    @property
    def prefill_seconds(self) -> float:
        """Time from the prompt to the first token."""
        return self.times[1] - self.times[0]

    @property
    def step_seconds(self) -> list[float]:
        """Seconds per token after the first."""
        return [after - before for before, after in zip(self.times[1:], self.times[2:], strict=False)]

    def put(self, value: torch.Tensor) -> None:
        """Record the time."""
        self.times.append(time.perf_counter())
        if len(self.times) > 1:
            self._on_step(len(self.times) - 1)

    def write_row(self, row: int, text: str, event: str) -> None:
        """Ignore text. Without this method, `put` may also receive inserted tokens, such as step prefixes."""

    def end(self) -> None:
        """Ignore the end."""


def long_prompt(tokenizer: PreTrainedTokenizerBase, length: int) -> torch.Tensor:
    """Return a prompt `int64 [1, length]`: the guest book of a fictional hotel and the beginning of a remark on it."""
    draw = random.Random(0)
    lines = [
        f"{draw.choice(GUESTS)} came from {draw.choice(TOWNS)}, stayed {draw.randint(2, 9)} nights and liked "
        f"{draw.choice(LIKED)}."
        for _ in range(length // 8 + 1)
    ]
    book, question = (tokenizer(text)["input_ids"] for text in ("\n".join(lines), QUESTION))
    return torch.tensor([(book[: max(length - len(question), 0)] + question)[-length:]])


def dense_bytes(cache: Cache) -> int:
    """Return the bytes of keys and values in a cache of transformers, such as `DynamicCache`."""
    states = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in states if isinstance(tensor, torch.Tensor))


Way = Callable[[StepClock], object]
"""Calls `generate` with the clock as its streamer."""


def tail(steps: Sequence[float]) -> dict[str, float]:
    """Return the 10% and 90% percentiles of steps, in seconds."""
    low, high = (
        torch.tensor(steps, dtype=torch.float64).quantile(torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
    )
    return {"step_seconds_p10": low, "step_seconds_p90": high}


@dataclass
class Times:
    """Seconds of one method: the prefill of each round, and the steps of each round."""

    prefill: list[float] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)

    @property
    def step(self) -> float:
        """Median of all steps, in seconds."""
        return statistics.median(second for steps in self.steps for second in steps)

    @property
    def rounded_steps(self) -> list[list[float]]:
        """Steps rounded to microseconds, for a report."""
        return [[round(second, 6) for second in steps] for steps in self.steps]


def run_rounds(ways: Mapping[str, Way], rounds: int) -> dict[str, Times]:
    """Run every method once as a warm-up, then `rounds` times."""
    times = {name: Times() for name in ways}
    each = [(number, name, way) for number in range(rounds + 1) for name, way in ways.items()]
    bar = progress_bar(each, what=f"{rounds} rounds of {', '.join(ways)}, and a warm-up", unit="calls")
    for number, name, way in bar:
        clock = StepClock()
        way(clock)
        if number:
            times[name].prefill.append(clock.prefill_seconds)
            times[name].steps.append(clock.step_seconds)
    return times


def prefill_ratio(ours: Times, other: Times) -> float:
    """Return the median over the rounds of the ratio of prefill seconds."""
    return statistics.median(a / b for a, b in zip(ours.prefill, other.prefill, strict=True))


def step_ratio(ours: Times, other: Times) -> float:
    """Return the median over the rounds of the ratio of median steps."""
    pairs = zip(ours.steps, other.steps, strict=True)
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in pairs)


class PrefilledCache:
    """KV cache of a prompt without its last token, copied for each row: the remedy that transformers documents.

    Attributes
    ----------
    copying : list of float
        Seconds of each copy.
    """

    def __init__(self, model: Any, ids: torch.Tensor) -> None:
        self.copying: list[float] = []
        self.sequences = ids
        self.kv_bytes = 0
        self._row = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :-1], past_key_values=self._row, use_cache=True, logits_to_keep=1)

    def repeated(self, rows: int) -> DynamicCache:
        """Return a copy for `rows` rows."""
        began = time.perf_counter()
        cache = copy.deepcopy(self._row)
        cache.batch_repeat_interleave(rows)
        self.copying.append(time.perf_counter() - began)
        return cache


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and its result."""
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def generate_batch(model: Any, prompts: Sequence[list[int]], new_tokens: int, rows: int = 1, **settings: Any) -> Any:
    """Return the finished requests: `rows` per prompt, with exactly `new_tokens` tokens each.

    Raises
    ------
    RuntimeError
        If a request fails.
    """
    pages = rows * sum(-(-(len(prompt) + new_tokens) // PAGE) + 1 for prompt in prompts)
    size = "page_size" if hasattr(ContinuousBatchingConfig, "page_size") else "block_size"  # in transformers 5.17.0
    sizes: dict[str, Any] = {size: PAGE, "num_blocks": pages, "max_batch_tokens": max(PAGE, *map(len, prompts))}
    batching = ContinuousBatchingConfig(**sizes)
    if model.device.type == "cpu":
        batching.use_cuda_graph, batching.use_async_batching = False, False
    config = GenerationConfig(max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0, **settings)
    config.num_return_sequences = rows  # its constructor rejects this without sampling
    done = model.generate_batch(
        prompts,
        generation_config=config,
        continuous_batching_config=batching,
        record_timestamps=True,
        progress_bar=False,
    )
    requests = list(done.values())
    errors = [request.error for request in requests if request.error]
    if errors or len(requests) != rows * len(prompts):
        raise RuntimeError(errors[0] if errors else f"{len(requests)} of {rows * len(prompts)} requests came back")
    return requests
