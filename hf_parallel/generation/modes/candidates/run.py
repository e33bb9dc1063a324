"""CandidateRun: one call of a mode whose candidates decode together and compete at every boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from transformers import LogitsProcessorList

from hf_parallel.cache.tree import Node
from hf_parallel.detokenizer import visible_text
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import Generated
from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.prefill import initial_capacity, insert_prompt, prefill_leaves, prefix_cache_of
from hf_parallel.generation.decoding.rows import Row
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.modes.candidates.candidate import Candidate
from hf_parallel.generation.modes.candidates.ratings import Rating
from hf_parallel.generation.sampling.token_table import TokenTable


def num_returned(call: GenerationCall) -> int:
    """Return the number of candidates of each prompt that a call returns."""
    return int(call.generation_config.num_return_sequences or 1)


class Contest:
    """The candidates of one prompt."""

    def __init__(self, prompt_row: int, rows: Sequence[Row]) -> None:
        self.prompt_row = prompt_row
        """First row of the prompt in `input_ids`."""
        self.rows = list(rows)
        """All candidates, forks included, in the order in which they began."""
        self.racing = list(rows)
        """Candidates that may still be returned, ended ones included."""
        self.ended: set[Row] = set()
        self.paused: set[Row] = set()
        """Candidates that have reached the next selection, and wait until the others have."""

    @property
    def running(self) -> list[Row]:
        """Candidates that still generate, paused ones included."""
        return [row for row in self.racing if row not in self.ended]

    @property
    def is_due(self) -> bool:
        """Whether all candidates that still generate wait for a selection."""
        running = self.running
        return bool(running) and self.paused.issuperset(running)


class CandidateRun:
    """One call: all candidates decode together, and those of a prompt pause where the next selection is due.

    A mode implements `has_reached_selection`, `select` and `output`.
    """

    def __init__(self, call: GenerationCall, num_candidates: int, rating: Rating, seed: int | Sequence[int] | None):
        self.call = call
        self.cache = prefix_cache_of(call)
        self.num_candidates = num_candidates
        self.num_returned = num_returned(call)
        self.rating = rating
        ids = call.input_ids[:: self.num_returned].repeat_interleave(num_candidates, dim=0)
        table = TokenTable(ids, call.pad_token_id, call.max_new_tokens)
        if rating.collector is not None:
            processors = LogitsProcessorList([*call.logits_processor, rating.collector])
            call = replace(call, logits_processor=processors)
        self.loop = DecodeLoop(call, self.cache, table, seed=seed, stream=False, log_probs=True)
        self.contests: list[Contest] = []
        self.contest_of: dict[Row, Contest] = {}
        self.scores: dict[Row, float] = {}
        self._final: set[Row] = set()  # ended, and scored since

    # What a mode implements

    def has_reached_selection(self, row: Row) -> bool:
        """Return whether a candidate pauses after its last token, until its contest selects."""
        raise NotImplementedError

    def select(self, contest: Contest) -> Steps[None]:
        """Choose which candidates continue; all that still generate are paused."""
        raise NotImplementedError

    def output(self) -> Generated:
        """Return what `generate` returns, once all candidates have ended."""
        raise NotImplementedError

    # The run

    def generate(self) -> Steps[Generated]:
        """Return a tensor `int64 [rows, length]` or the mode's output."""
        call = self.call
        n = self.num_candidates
        with self.loop.running():
            leaves: list[Node] = []
            for index in range(0, call.num_rows, self.num_returned):
                leaf = yield from insert_prompt(self.cache, call.prompts[index], call.gaps[index])
                leaves += [leaf] * n
            logits = yield from prefill_leaves(self.loop, self.cache, leaves)
            rows = [Row(index, (), leaf=leaf) for index, leaf in enumerate(leaves)]
            self.loop.start(rows, leaves, initial_capacity(call.max_new_tokens, len(leaves)))
            for row in rows:  # `transformers` repeats prompts, and rows are numbered after the first of each
                prompt = row.index // n
                row.output_row = row.index + prompt * n * (self.num_returned - 1)
            for start in range(0, len(rows), n):
                contest = Contest(start // n * self.num_returned, rows[start : start + n])
                self.contests.append(contest)
                self.contest_of.update(dict.fromkeys(contest.rows, contest))
            yield from self.loop.decode(rows, logits, self._on_token, schedule=self._schedule)
            drawn = self.all_rows
            self.loop.keep(drawn)
        self.loop.record_truncated(drawn)
        self.score([row for row in drawn if not row.dropped])
        return self.output()

    @property
    def all_rows(self) -> list[Row]:
        """All candidates of all prompts, in the order of the table."""
        return sorted(self.contest_of, key=lambda row: row.index)

    def _on_token(self, row: Row, token: int, ended: bool) -> bool:
        row.pending = [token]
        self.loop.show(row, token, ended)
        contest = self.contest_of[row]
        if ended:
            contest.ended.add(row)
        elif self.has_reached_selection(row):
            contest.paused.add(row)
        return not ended

    def _schedule(self, active: Sequence[Row]) -> Steps[list[Row]]:
        if not any(contest.paused for contest in self.contests):
            return list(active)
        generating: list[Row] = []
        for contest in self.contests:
            if contest.is_due:
                yield from self.select(contest)
                contest.paused.clear()
            generating += [row for row in contest.running if row not in contest.paused]
        return sorted(generating, key=lambda row: row.index)

    # For modes

    def num_tokens(self, row: Row) -> int:
        """Return the number of new tokens of a candidate."""
        return self.loop.table.lengths[row.index] - self.loop.table.begin

    def text(self, row: Row) -> str:
        """Return the new text of a candidate, without special tokens."""
        return visible_text(self.call.tokenizer, self.loop.new_tokens(row), self.call.hidden_tokens)

    def prompt_tokens(self, row: Row) -> list[int]:
        """Return the token ids of a candidate's prompt."""
        prompt = self.call.prompts[self.contest_of[row].prompt_row]
        return self.call.token_ids(prompt).tolist()  # type: ignore[no-any-return]

    def candidate(self, row: Row, mean_log_prob: float) -> Candidate:
        """Return a candidate as scorers receive it."""
        return Candidate(
            self.call.tokenizer.decode(self.prompt_tokens(row)),
            self.text(row),
            self.loop.new_tokens(row),
            mean_log_prob,
            row in self.contest_of[row].ended,
        )

    def score(self, rows: Sequence[Row]) -> None:
        """Set the scores of candidates, unless they have ended and were scored since."""
        new = [row for row in rows if row not in self._final]
        if not new:
            return
        for row in new:
            if row in self.contest_of[row].ended:
                self._final.add(row)
        self.scores.update(zip(new, self.rating.rate(self, new), strict=True))

    def rank(self, row: Row) -> tuple[bool, float, int]:
        """Return a candidate's place among those of its prompt: the best score first, dropped ones last."""
        return row.dropped, -self.scores[row], row.index
