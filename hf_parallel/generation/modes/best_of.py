"""`generation_mode="best_of"`: several completions of each prompt, ranked by a score, best first.

Best of n: Stiennon et al., Learning to summarize from human feedback, 2020; Cobbe et al., Training Verifiers to Solve
Math Word Problems, 2021. Pruning during generation: Sun et al., Fast Best-of-N Decoding via Speculative Rejection,
2024 (arXiv 2410.20290).
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

from hf_parallel.cache.tree import Node
from hf_parallel.detokenizer import visible_text
from hf_parallel.generation.arguments import check_tokenizer_given
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import Generated, ModeRows, ModeTraits, ParallelConfig
from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.prefill import initial_capacity, insert_prompt, prefill_leaves, prefix_cache_of
from hf_parallel.generation.decoding.rows import Row
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.outputs import ALWAYS, ParallelOutput
from hf_parallel.generation.sampling.token_table import TokenTable
from hf_parallel.generation.settings import NOT_STORED, Arguments
from hf_parallel.generation.validation import check_int
from hf_parallel.transcript.sections import TranscriptStyle

PRUNED = "pruned"
"""End reason of a dropped candidate."""


@dataclass(frozen=True)
class Candidate:
    """A finished or unfinished completion, the argument of a scorer; see `BestOfConfig`."""

    prompt: str
    text: str
    """New text without special tokens."""
    tokens: list[int]
    """New tokens, including an end-of-sequence token."""
    mean_log_prob: float
    """Mean log-probability of the tokens under the model."""
    is_complete: bool
    """Whether it has ended."""


Scorer: TypeAlias = Callable[[Candidate], float]


class BestOfRows(ModeRows["BestOfConfig"]):
    """All candidates, returned or not."""

    style = TranscriptStyle("candidate")

    @property
    def drawn_per_prompt(self) -> int:
        return self.config.num_candidates

    def name(self, index: int) -> str:
        return f"Candidate {index + 1}"


@dataclass
class BestOfConfig(ParallelConfig["BestOfOutput"]):
    """Several completions of each prompt, of which the `num_return_sequences` best are returned, best first.

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
        rows=BestOfRows,
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
        prompts = call.num_rows // _num_returned(call)
        return call.prompt_tokens + prompts * self.num_candidates * call.max_new_tokens


class BestOfRun:
    """One call: all candidates decode together, and every `prune_every` tokens the worst are dropped."""

    def __init__(self, config: BestOfConfig, call: GenerationCall) -> None:
        self.config = config
        self.call = call
        self.cache = prefix_cache_of(call)
        n = config.num_candidates
        self.num_returned = _num_returned(call)
        if self.num_returned > n:
            raise ValueError(f"num_return_sequences must be at most num_candidates={n}, got {self.num_returned}")
        if n > 1 and not call.generation_config.do_sample:
            raise ValueError(f"num_candidates={n} greedy completions would be equal: give do_sample=True")
        self.scorer = None if config.scorer is None else resolve_scorer(config.scorer)
        ids = call.input_ids[:: self.num_returned].repeat_interleave(n, dim=0)
        table = TokenTable(ids, call.pad_token_id, call.max_new_tokens)
        self.loop = DecodeLoop(call, self.cache, table, seed=config.seed, stream=False, log_probs=True)
        self.num_tokens = 0  # of each active row

    def generate(self) -> Steps[Generated]:
        """Return a tensor `int64 [rows, length]` or a `BestOfOutput`."""
        n = self.config.num_candidates
        call = self.call
        with self.loop.running():
            leaves: list[Node] = []
            for index in range(0, call.num_rows, self.num_returned):
                leaf = yield from insert_prompt(self.cache, call.prompts[index], call.gaps[index])
                leaves += [leaf] * n
            logits = yield from prefill_leaves(self.loop, self.cache, leaves)
            self.rows = [Row(index, (), leaf=leaf) for index, leaf in enumerate(leaves)]
            self.loop.start(self.rows, leaves, initial_capacity(call.max_new_tokens, len(leaves)))
            self.groups = [self.rows[start : start + n] for start in range(0, len(self.rows), n)]
            for row in self.rows:  # `transformers` repeats prompts, and rows are numbered after the first of each
                prompt = row.index // n
                row.output_row = row.index + prompt * n * (self.num_returned - 1)
            self.racing = list(self.groups)
            self.ended: set[Row] = set()
            self.final: set[Row] = set()  # ended, and scored since
            self.scores: dict[Row, float] = {}
            yield from self.loop.decode(self.rows, logits, self._on_token, schedule=self._schedule)
            self.loop.keep(self.rows)
        self.loop.record_truncated(self.rows)
        self._score([row for row in self.rows if not row.dropped])
        return self._output()

    def _on_token(self, row: Row, token: int, ended: bool) -> bool:
        row.pending = [token]
        self.loop.show(row, token, ended)
        if ended:
            self.ended.add(row)
        return not ended

    def _schedule(self, active: Sequence[Row]) -> Sequence[Row]:
        self.num_tokens += 1
        if active and self.config.prune_every is not None and self.num_tokens % self.config.prune_every == 0:
            self._prune()
        return active

    def _prune(self) -> None:
        """Drop the rows of each group that rank below those that continue."""
        sizes: list[int] = []
        for group in self.racing:
            size = math.ceil(self.config.keep * len(group))
            sizes.append(max(self.num_returned, size))
        contested: list[Row] = []
        for group, size in zip(self.racing, sizes, strict=True):
            if len(group) > size:
                contested += group
        self._score(contested)
        for index, size in enumerate(sizes):
            if len(self.racing[index]) <= size:
                continue
            ranked = sorted(self.racing[index], key=self._rank)
            self.racing[index] = ranked[:size]
            for row in ranked[size:]:
                if row not in self.ended:
                    self.loop.drop(row, PRUNED)

    def _rank(self, row: Row) -> tuple[bool, float, int]:
        return row.dropped, -self.scores[row], row.index

    def _score(self, rows: Sequence[Row]) -> None:
        """Set the scores of rows. Raises `TypeError` or `ValueError` if the scorer does not return a number."""
        new = [row for row in rows if row not in self.final]
        if not new:
            return
        self.final |= self.ended.intersection(new)
        means = self.loop.log_probs(new).nanmean(dim=1).tolist()
        for row, mean in zip(new, means, strict=True):
            self.scores[row] = mean if self.scorer is None else self._ask(self.scorer, row, mean)

    def _ask(self, scorer: Scorer, row: Row, mean: float) -> float:
        """Return the score that the caller's scorer gives a row with this mean log-probability."""
        prompt_row = row.index // self.config.num_candidates * self.num_returned
        prompt_ids = self.call.token_ids(self.call.prompts[prompt_row]).tolist()
        candidate = Candidate(
            self.call.tokenizer.decode(prompt_ids),
            self._text(row),
            self.loop.new_tokens(row),
            mean,
            row in self.ended,
        )
        result = scorer(candidate)
        try:
            score = float("text" if isinstance(result, str) else result)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"scorer must return a number, got {result!r} for {candidate.text!r}") from error
        if math.isnan(score):
            raise ValueError(f"scorer must return a number, got nan for {candidate.text!r}")
        return score

    def _text(self, row: Row) -> str:
        return visible_text(self.call.tokenizer, self.loop.new_tokens(row), self.call.hidden_tokens)

    def _output(self) -> Generated:
        """Return the best rows of each prompt, with the candidates of their prompts."""
        n = self.config.num_candidates
        ranked_groups = [sorted(group, key=self._rank) for group in self.groups]
        best: list[Row] = []
        for ranked in ranked_groups:
            best += ranked[: self.num_returned]
        texts = []
        ratings = []
        order = []
        pruned = []
        for row in best:
            prompt = row.index // n
            group = self.groups[prompt]
            texts.append([self._text(candidate) for candidate in group])
            ratings.append([self.scores[candidate] for candidate in group])
            order.append([candidate.index % n for candidate in ranked_groups[prompt]])
            pruned.append([candidate.index % n for candidate in group if candidate.dropped])
        return self.loop.output(
            BestOfOutput,
            best,
            texts=texts,
            ratings=ratings,
            order=order,
            pruned=pruned,
            chosen=[row.index % n for row in best],
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


def resolve_scorer(scorer: object) -> Scorer:
    """Return a scorer, given as a function or as `"module:function"`; raise `ValueError` for anything else."""
    function = scorer
    if isinstance(scorer, str):
        try:
            function = pkgutil.resolve_name(scorer) if scorer.count(":") == 1 else None
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"scorer={scorer!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"scorer must be callable, or 'module:function', got {scorer!r}")
    return function


def _num_returned(call: GenerationCall) -> int:
    return int(call.generation_config.num_return_sequences or 1)
