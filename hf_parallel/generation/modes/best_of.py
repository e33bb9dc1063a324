"""`generation_mode="best_of"`: several completions of each prompt, ranked by a score, best first.

Best of n: Stiennon et al., Learning to summarize from human feedback, 2020; Cobbe et al., Training Verifiers to Solve
Math Word Problems, 2021. Pruning during generation: Sun et al., Fast Best-of-N Decoding via Speculative Rejection,
2024 (arXiv 2410.20290).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from hf_parallel.generation.arguments import check_tokenizer_given
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import Generated, ModeTraits, ParallelConfig
from hf_parallel.generation.decoding.rows import Row
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.modes.candidates.candidate import Scorer, resolve_scorer
from hf_parallel.generation.modes.candidates.ratings import MeanLogProb, ScorerRating
from hf_parallel.generation.modes.candidates.rows import CandidateRows
from hf_parallel.generation.modes.candidates.run import CandidateRun, Contest, num_returned
from hf_parallel.generation.outputs import ALWAYS, ParallelOutput
from hf_parallel.generation.settings import NOT_STORED, Arguments
from hf_parallel.generation.validation import check_int

PRUNED = "pruned"
"""End reason of a dropped candidate."""


@dataclass
class BestOfConfig(ParallelConfig["BestOfOutput"]):
    """Several completions of each prompt. The `num_return_sequences` best are returned, best first.

    Parameters
    ----------
    num_candidates : int
        Completions per prompt. More than one require `do_sample=True`.
    scorer : callable or str, optional
        Function from a `Candidate` to a number, the larger the better, or its name `"module:function"`. Default:
        `mean_log_prob`. It is not stored, and generation configs and servers cannot set it.
    prune_every : int, optional
        Drop the worst candidates of each prompt after every `prune_every` tokens. Default: never.
    keep : float
        Fraction of a prompt's candidates that each pruning keeps, between 0 and 1, rounded up, but at least
        `num_return_sequences`. Finished candidates compete too.

    Notes
    -----
    A `ParallelStreamer` receives candidate `k` of prompt `p` as row `p * num_candidates + k`. `put` receives the
    returned tokens once they are known.
    """

    mode: ClassVar[str] = "best_of"
    traits = ModeTraits(
        rows=CandidateRows,
        keeps_states=True,
        streams_text=True,
        streams_tokens="at_end",
        example_arguments={"do_sample": "True"},
    )

    num_candidates: int = 4
    scorer: Scorer | str | None = field(default=None, metadata=NOT_STORED)
    prune_every: int | None = None
    keep: float = 0.5

    def validate(self) -> None:
        super().validate()
        check_int("num_candidates", self.num_candidates, at_least=1)
        if self.scorer is not None:
            resolve_scorer(self.scorer)
        if self.prune_every is not None:
            check_int("prune_every", self.prune_every, at_least=1)
        is_number = isinstance(self.keep, int | float) and not isinstance(self.keep, bool)
        if not is_number or not 0 < self.keep < 1:
            raise ValueError(f"keep must be a number between 0 and 1, both excluded, got {self.keep!r}")

    def prepare(self, kwargs: Arguments) -> None:
        check_tokenizer_given(kwargs, self.mode)

    def make_run(self, call: GenerationCall) -> BestOfRun:
        return BestOfRun(self, call)

    @property
    def max_rows_per_prompt(self) -> int:
        return self.num_candidates

    def max_kv_tokens(self, call: GenerationCall) -> int:
        prompts = call.num_rows // num_returned(call)
        return call.prompt_tokens + prompts * self.num_candidates * call.max_new_tokens


class BestOfRun(CandidateRun):
    """One call: every `prune_every` tokens the worst candidates are dropped."""

    def __init__(self, config: BestOfConfig, call: GenerationCall) -> None:
        self.config = config
        n = config.num_candidates
        if num_returned(call) > n:
            raise ValueError(f"num_return_sequences must be at most num_candidates={n}, got {num_returned(call)}")
        if n > 1 and not call.generation_config.do_sample:
            raise ValueError(f"num_candidates={n} greedy completions would be equal: give do_sample=True")
        rating = MeanLogProb() if config.scorer is None else ScorerRating(resolve_scorer(config.scorer))
        super().__init__(call, n, rating, config.seed)

    def has_reached_selection(self, row: Row) -> bool:
        every = self.config.prune_every
        return every is not None and self.num_tokens(row) % every == 0

    def select(self, contest: Contest) -> Steps[None]:
        """Drop the candidates that rank below those that continue."""
        yield from ()  # it runs no pass
        size = max(self.num_returned, math.ceil(self.config.keep * len(contest.racing)))
        if len(contest.racing) <= size:
            return
        self.score(contest.racing)
        ranked = sorted(contest.racing, key=self.rank)
        contest.racing = ranked[:size]
        for row in ranked[size:]:
            if row not in contest.ended:
                self.loop.drop(row, PRUNED)

    def output(self) -> Generated:
        """Return the best rows of each prompt, with the candidates of their prompts."""
        best: list[Row] = []
        texts: list[list[str]] = []
        ratings: list[list[float]] = []
        order: list[list[int]] = []
        pruned: list[list[int]] = []
        chosen: list[int] = []
        for contest in self.contests:
            index_of = {row: index for index, row in enumerate(contest.rows)}
            ranked = sorted(contest.rows, key=self.rank)
            of_prompt = [self.text(row) for row in contest.rows]
            for row in ranked[: self.num_returned]:
                best.append(row)
                chosen.append(index_of[row])
                texts.append(list(of_prompt))
                ratings.append([self.scores[candidate] for candidate in contest.rows])
                order.append([index_of[candidate] for candidate in ranked])
                pruned.append([index_of[candidate] for candidate in contest.rows if candidate.dropped])
        return self.loop.output(  # type: ignore[no-any-return]
            BestOfOutput, best, texts=texts, ratings=ratings, order=order, pruned=pruned, chosen=chosen
        )


@dataclass
class BestOfOutput(ParallelOutput):
    """The best completions of each prompt, and the scores of all.

    Attributes
    ----------
    sequences : int64 [batch * num_return_sequences, length]
        Each prompt with its best completions, best first.
    """

    texts: list[list[str]] = ALWAYS
    """Per row the texts of all candidates of its prompt, in drawing order, as in the other fields."""
    ratings: list[list[float]] = ALWAYS
    """Per row the scores of all candidates of its prompt; a pruned candidate has its last score."""
    order: list[list[int]] = ALWAYS
    """Per row the indices of the candidates of its prompt, best first, pruned ones last."""
    pruned: list[list[int]] = ALWAYS
    """Per row the indices of the pruned candidates of its prompt."""
    chosen: list[int] = ALWAYS
    """Per row the index of its candidate."""

    def notes(self, prompt: int) -> list[tuple[str, str]]:
        ratings = self.ratings[prompt]
        scores = [f"candidate {index + 1}: {ratings[index]:.4g}" for index in self.order[prompt]]
        return [("Scores", ", ".join(scores))]
