"""SearchSettings: the settings of `search`, their checks, and what follows from them; documented in `SearchConfig`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hf_parallel.generation.arguments import check_tokenizer_given
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import ParallelConfig
from hf_parallel.generation.modes.candidates.candidate import Scorer, resolve_scorer
from hf_parallel.generation.modes.candidates.ratings import (
    GroupConfidence,
    MeanLogProb,
    ModelRating,
    Rating,
    ScorerRating,
)
from hf_parallel.generation.modes.candidates.run import num_returned
from hf_parallel.generation.modes.final_answers import BOXED, check_pattern
from hf_parallel.generation.modes.search.output import SearchOutput
from hf_parallel.generation.settings import NOT_REMOTE, NOT_STORED, Arguments
from hf_parallel.generation.validation import check_choice, check_int, check_text

INTERVAL = 32
"""Default of `interval` without a `boundary`."""


@dataclass
class SearchSettings(ParallelConfig[SearchOutput]):
    """See `SearchConfig`."""

    width: int = 8
    interval: int | None = None
    boundary: str | None = None
    warmup: int = 0
    select: str = "top"
    keep: int | None = None
    selection_temperature: float = 1.0
    score: str = "log_prob"
    confidence_window: int = 64
    scorer: Scorer | str | None = field(default=None, metadata=NOT_STORED)
    scorer_model: Any = field(default=None, metadata=NOT_STORED)
    stop_on: str | None = None
    consensus: float = 0.75
    probe_prompt: str = "\n\nThe final answer is \\boxed{"
    probe_tokens: int = 16
    choose: str = "best"
    answer_pattern: str = field(default=BOXED, metadata=NOT_REMOTE)

    def validate(self) -> None:
        """Check every setting; see `ParallelConfig.validate`."""
        super().validate()
        check_int("width", self.width, at_least=1)
        if self.interval is not None:
            check_int("interval", self.interval, at_least=1)
        if self.boundary is not None:
            check_text("boundary", self.boundary)
            if not self.boundary:
                raise ValueError("boundary must be a non-empty text or None, got ''")
        check_int("warmup", self.warmup, at_least=0)
        check_choice("select", self.select, ("top", "systematic", "tournament"))
        if self.keep is not None:
            check_int("keep", self.keep, at_least=1)
            if self.keep > self.width:
                raise ValueError(f"keep must be at most width={self.width}, got {self.keep}")
            if self.select == "systematic":
                raise ValueError(f"keep={self.keep} needs select='top' or 'tournament', got select='systematic'")
        _check_number("selection_temperature", self.selection_temperature)
        check_choice("score", self.score, ("log_prob", "confidence"))
        check_int("confidence_window", self.confidence_window, at_least=1)
        if self.scorer is not None:
            resolve_scorer(self.scorer)
            if self.scorer_model is not None:
                raise ValueError("scorer and scorer_model were both given: pass one of them")
        for name in ("scorer", "scorer_model"):
            if getattr(self, name) is not None and self.score != "log_prob":
                raise ValueError(f"score={self.score!r} and {name} were both given: pass one of them")
        if self.stop_on is not None:
            check_choice("stop_on", self.stop_on, ("consensus",))
        _check_number("consensus", self.consensus)
        if not 0.5 < self.consensus <= 1:
            raise ValueError(f"consensus must be more than 0.5 and at most 1, got {self.consensus!r}")
        check_text("probe_prompt", self.probe_prompt)
        check_int("probe_tokens", self.probe_tokens, at_least=1)
        check_choice("choose", self.choose, ("best", "vote"))
        check_pattern("answer_pattern", self.answer_pattern)
        if not self.answer_pattern and (self.stop_on is not None or self.choose == "vote"):
            raise ValueError("answer_pattern must not be empty for stop_on='consensus' and choose='vote'")

    def prepare(self, kwargs: Arguments) -> None:
        """Check the tokenizer."""
        check_tokenizer_given(kwargs, self.mode)

    def make_rating(self) -> Rating:
        """Return how candidates are scored."""
        if self.scorer_model is not None:
            return ModelRating(self.scorer_model)
        if self.scorer is not None:
            return ScorerRating(resolve_scorer(self.scorer))
        return GroupConfidence(self.confidence_window) if self.score == "confidence" else MeanLogProb()

    @property
    def num_kept(self) -> int:
        """Number of candidates that a selection keeps, for `top` and `tournament`."""
        if self.keep is not None:
            return self.keep
        if self.select == "top":
            return -(-self.width // 4)
        return max(1, self.width - max(1, self.width // 16))

    @property
    def chosen_interval(self) -> int | None:
        """Tokens between two selections; None: a boundary alone ends them."""
        if self.interval is None and self.boundary is None:
            return INTERVAL
        return self.interval

    @property
    def max_rows_per_prompt(self) -> int:
        """Number of candidates of a prompt at any time."""
        return self.width

    def max_kv_tokens(self, call: GenerationCall) -> int:
        """See `ParallelConfig.max_kv_tokens`. Probes are held until the selection ends."""
        prompts = call.num_rows // num_returned(call)
        of_candidate = call.max_new_tokens
        if self.stop_on is not None:
            of_candidate += call.count_tokens(self.probe_prompt) + self.probe_tokens
        return call.prompt_tokens + prompts * self.width * of_candidate

    def max_states(self, call: GenerationCall) -> int:
        """See `ParallelConfig.max_states`. A fork leaves a state in the tree, and a probe has one of its own."""
        return super().max_states(call) + 2 * call.num_rows * self.width


def _check_number(name: str, value: Any) -> None:
    """Raise `ValueError` unless a value is a positive finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive number, got {value!r}")
