"""SearchRun: one call of `search`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_parallel.cache.tree import Node
from hf_parallel.detokenizer import visible_text
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import Generated
from hf_parallel.generation.decoding.rows import Row
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.modes.candidates.run import CandidateRun, Contest, num_returned
from hf_parallel.generation.modes.final_answers import find_answer, majority, normal_form
from hf_parallel.generation.modes.search.output import DROPPED, ENDED, RETURNED, SearchBranch, SearchOutput
from hf_parallel.generation.modes.search.probes import Probe, probe
from hf_parallel.generation.modes.search.selection import best, systematic
from hf_parallel.generation.modes.search.settings import SearchSettings
from hf_parallel.generation.sampling.rng import mix

CONSENSUS = "consensus"
"""End reason of candidates whose search has ended because enough probes agree."""


class SearchRun(CandidateRun):
    """One call: at every selection, losers are dropped and winners are forked."""

    def __init__(self, config: SearchSettings, call: GenerationCall) -> None:
        self.config = config
        returned = num_returned(call)
        if returned > 1 and config.stop_on is not None:
            raise ValueError(f"stop_on={config.stop_on!r} ends with one answer: num_return_sequences must be 1")
        if returned > config.width:
            raise ValueError(f"num_return_sequences must be at most width={config.width}, got {returned}")
        if config.select != "systematic" and returned > config.num_kept:
            raise ValueError(
                f"num_return_sequences must be at most keep={config.num_kept}, the candidates that a selection keeps, "
                f"got {returned}"
            )
        if config.width > 1 and not call.generation_config.do_sample:
            raise ValueError(f"width={config.width} greedy candidates would be equal: give do_sample=True")
        super().__init__(call, config.width, config.make_rating(), config.seed)
        self.parents: dict[Row, tuple[Row, int]] = {}
        """The parent of each fork, and the number of new tokens that it has from it."""
        self.places: dict[Row, int] = {}
        """Places of candidates that have ended, after a selection; those that generate have one each."""
        self.history: dict[Row, list[tuple[int, float]]] = {}
        """Scores of each candidate; see `SearchBranch.scores`."""
        self.num_selections: dict[Contest, int] = {}
        self._begins: dict[Row, tuple[int, int]] = {}
        """Numbers of new tokens and of characters that a candidate had after the last selection."""

    # Selections

    def has_reached_selection(self, row: Row) -> bool:
        config = self.config
        num_tokens = self.num_tokens(row)
        if num_tokens <= config.warmup:
            if num_tokens == config.warmup:
                self._begin_part(row)
            return False
        first_token, first_character = self._begins.get(row, (config.warmup, 0))
        interval = config.chosen_interval
        if interval is not None and num_tokens - first_token >= interval:
            return True
        if config.boundary is None:
            return False
        return self.loop.text_of(row).find(config.boundary, first_character) >= 0

    def _begin_part(self, row: Row) -> None:
        """Let intervals and boundaries count from a candidate's present end."""
        self._begins[row] = self.num_tokens(row), len(self.loop.text_of(row))

    def select(self, contest: Contest) -> Steps[None]:
        racing = list(contest.racing)
        self.score(racing)
        self.num_selections[contest] = self.num_selections.get(contest, 0) + 1
        if self.config.stop_on is not None:
            has_ended = yield from self._ask(contest)
            if has_ended:
                return
        copies = self._copies(contest)
        losers = [row for row, count in zip(racing, copies, strict=True) if not count]
        for row, count in zip(racing, copies, strict=True):
            if row in contest.ended:
                self.places[row] = count
            elif count > 1:
                self._fork(contest, row, count - 1)
        for row in losers:
            self._drop(contest, row, DROPPED)
        self._release(losers)
        for row in contest.running:
            self._begin_part(row)

    def _copies(self, contest: Contest) -> list[int]:
        """Return how many places each candidate gets."""
        config = self.config
        scores = [self.scores[row] for row in contest.racing]
        if config.select == "systematic":
            held = self._places(contest.racing)
            return systematic(scores, held, config.width, config.selection_temperature, self._uniform(contest))
        kept = best(scores, config.num_kept, config.num_kept)
        # A candidate that has ended keeps its place. It is not forked, so the other places go to those that generate.
        copies = [0] * len(scores)
        generating: list[int] = []
        places = config.width
        for index, (row, is_kept) in enumerate(zip(contest.racing, kept, strict=True)):
            if is_kept and row in contest.ended:
                copies[index] = 1
                places -= 1
            elif is_kept:
                generating.append(index)
        of_generating = best([scores[index] for index in generating], len(generating), places)
        for index, count in zip(generating, of_generating, strict=True):
            copies[index] = count
        return copies

    def _places(self, rows: Sequence[Row]) -> list[int]:
        """Return how many places each of the rows holds, each of which has a vote."""
        return [self.places.get(row, 1) for row in rows]

    def _uniform(self, contest: Contest) -> float:
        """Return a random number between 0 and 1 for a selection of a contest, by the seed of its first candidate."""
        seed = self.config.seed
        if seed is None:
            return torch.rand(()).item()
        number = self.contests.index(contest)
        of_contest = seed[number * self.config.width] if isinstance(seed, Sequence) else mix(int(seed), number)
        bits = mix(int(of_contest), -self.num_selections[contest])
        return (bits % 2**53) / 2**53

    def _drop(self, contest: Contest, row: Row, reason: str) -> None:
        """End a candidate, or give up one that has ended, and free its own block."""
        contest.racing.remove(row)
        self.places[row] = 0
        if row in contest.ended:
            row.dropped = True
            self.call.record.end_reasons[row.output_row] = reason
            self.cache.pool.free(row.view[-1])
        else:
            self.loop.drop(row, reason)

    def _fork(self, contest: Contest, row: Row, count: int) -> None:
        forks = self.loop.fork(row, count)
        for fork in forks:
            contest.rows.append(fork)
            contest.racing.append(fork)
            self.contest_of[fork] = contest
            self.parents[fork] = row, self.num_tokens(row)

    def _release(self, losers: Sequence[Row]) -> None:
        """Free keys and values that dropped candidates alone have used."""
        used: set[Node] = set()
        for row in self.contest_of:
            if not row.dropped and row.leaf is not None:
                used.update(row.leaf.path)
        unused: dict[Node, int] = {}  # with their depths
        for row in losers:
            assert row.leaf is not None, "candidates follow a leaf of the tree"
            for depth, node in enumerate(row.leaf.path):
                if node not in used:
                    unused[node] = depth
        self.cache.release(sorted(unused, key=lambda node: -unused[node]))

    # Consensus

    def _ask(self, contest: Contest) -> Steps[bool]:
        """Probe the candidates of a contest. Return whether enough agree, so that its search has ended."""
        config = self.config
        running = contest.running
        probes = yield from probe(self.loop, running, config.probe_prompt, config.probe_tokens, config.answer_pattern)
        answers: list[str | None] = []
        for row in contest.racing:
            answer = probes[row].answer if row in probes else self.final_answer(row)
            answers.append(None if answer is None else normal_form(answer))
        places = self._places(contest.racing)
        _, votes = majority(answers, places)
        if max(votes.values(), default=0) < config.consensus * sum(places):
            return False
        winner = max(votes, key=votes.__getitem__)
        agreeing = [row for row, answer in zip(contest.racing, answers, strict=True) if answer == winner]
        agreeing.sort(key=self.rank)
        chosen = next((row for row in agreeing if row in contest.ended or self._has_room(row, probes[row])), None)
        if chosen is None:
            return False
        for row in running:
            if row is chosen:
                self._conclude(contest, row, probes[row])
            else:
                self._drop(contest, row, CONSENSUS)
        self._release([row for row in running if row.dropped])
        return True

    def _has_room(self, row: Row, answer: Probe) -> bool:
        return self.num_tokens(row) + len(answer.tokens) <= self.call.max_new_tokens

    def _conclude(self, contest: Contest, row: Row, answer: Probe) -> None:
        """End a candidate with its probe and the answer in it."""
        row.pending = [*row.pending, *answer.tokens]
        self.loop.extend(row.index, answer.tokens)
        text = visible_text(self.call.tokenizer, answer.tokens, self.call.hidden_tokens)
        self.call.show(row.output_row, text, "inject")
        self.call.show(row.output_row, "", "end")
        self.call.record.end_reasons[row.output_row] = CONSENSUS
        contest.ended.add(row)

    # The end

    def final_answer(self, row: Row) -> str | None:
        """Return the final answer in the text of a candidate."""
        return find_answer(self.config.answer_pattern, self.text(row))

    def score(self, rows: Sequence[Row]) -> None:
        super().score(rows)
        for row in rows:
            scores = self.history.setdefault(row, [])
            entry = self.num_tokens(row), self.scores[row]
            if not scores or scores[-1][0] != entry[0]:
                scores.append(entry)

    def output(self) -> Generated:
        returned: list[Row] = []
        votes_of: list[dict[str, float]] = []
        for contest in self.contests:
            ranked, votes = self._ranked(contest)
            # A candidate that holds several places is returned that often if there are too few others.
            repeated = []
            for row, places in zip(ranked, self._places(ranked), strict=True):
                repeated += [row] * (places - 1)
            returned += [*ranked, *repeated][: self.num_returned]
            votes_of += [votes] * self.num_returned
        trees = [self._tree(contest, set(returned)) for contest in self.contests]
        contests = [self.contest_of[row] for row in returned]
        return self.loop.output(  # type: ignore[no-any-return]
            SearchOutput,
            returned,
            trees=[trees[self.contests.index(contest)] for contest in contests],
            chosen=[contest.rows.index(row) for row, contest in zip(returned, contests, strict=True)],
            ratings=[self.scores[row] for row in returned],
            answers=[self.final_answer(row) for row in returned],
            votes=votes_of,
            num_selections=[self.num_selections.get(contest, 0) for contest in contests],
        )

    def _ranked(self, contest: Contest) -> tuple[list[Row], dict[str, float]]:
        """Return the candidates that were not dropped, best first, and the votes for their final answers."""
        ranked = sorted(contest.racing, key=self.rank)
        forms: list[str | None] = []
        for row in ranked:
            answer = self.final_answer(row)
            forms.append(None if answer is None else normal_form(answer))
        _, votes = majority(forms, self._places(ranked))
        if self.config.choose == "vote" and votes:
            winner = max(votes, key=votes.__getitem__)
            order = sorted(range(len(ranked)), key=lambda index: forms[index] != winner)
            ranked = [ranked[index] for index in order]
        return ranked, votes

    def _tree(self, contest: Contest, returned: set[Row]) -> list[SearchBranch]:
        branches = []
        for row in contest.rows:
            parent, begin = self.parents.get(row, (None, 0))
            tokens = self.loop.new_tokens(row)
            outcome = DROPPED if row not in contest.racing else ENDED
            branches.append(
                SearchBranch(
                    None if parent is None else contest.rows.index(parent),
                    begin,
                    len(tokens),
                    visible_text(self.call.tokenizer, tokens[begin:], self.call.hidden_tokens),
                    self.history.get(row, []),
                    self.places.get(row, 1),
                    RETURNED if row in returned else outcome,
                )
            )
        return branches
