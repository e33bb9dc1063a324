"""Drafts for workers: what followed the same words in the texts of the others and in the history.

Workers see each other's tokens of the same pass, so the next token of one depends on the tokens of all. A draft is
therefore several whole passes, which are computed as one; those up to the first token that a worker samples otherwise
are kept. Tokens are sampled pass by pass, as without drafts, so they are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_parallel.cache import Segment
from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.replay.drafts import NGRAMS
from hf_parallel.generation.decoding.rows import PassInputs, collect_inputs
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.modes.hogwild.group import WorkerGroup
from hf_parallel.generation.modes.hogwild.worker import Worker
from hf_parallel.kernels import to_device

MIN_NGRAM = 2
"""Least number of tokens after which a draft begins; shorter ones are seldom continued in the same way."""
FIRST_WORKER = 2
"""Index of the first worker among the texts of a group, after the prompt and the injected steps."""


class GroupText:
    """What the workers of a group have written, indexed by n-grams."""

    def __init__(self) -> None:
        self._texts: list[list[int]] = []
        self._next: dict[tuple[int, ...], int] = {}  # the token that followed an n-gram last

    def length(self, number: int) -> int:
        """Return the number of tokens of a text that are indexed."""
        return len(self._texts[number])

    def last_tokens(self, number: int) -> list[int]:
        """Return the end of a text, as long as the longest n-gram."""
        return self._texts[number][-NGRAMS[0] :]

    def add_text(self, tokens: Sequence[int]) -> None:
        """Add a text."""
        self._texts.append([])
        self.extend(len(self._texts) - 1, tokens)

    def extend(self, number: int, tokens: Sequence[int]) -> None:
        """Append tokens to a text."""
        text = self._texts[number]
        for token in tokens:
            for size in NGRAMS:
                if MIN_NGRAM <= size <= len(text):
                    self._next[tuple(text[-size:])] = token
            text.append(token)

    def propose(self, number: int, most: int) -> list[int]:
        """Return at most `most` tokens that followed the n-gram that ends a text, elsewhere or earlier in it."""
        tokens = self.last_tokens(number)
        draft: list[int] = []
        while len(draft) < most:
            sizes = (size for size in NGRAMS if MIN_NGRAM <= size <= len(tokens))
            known = (self._next.get(tuple(tokens[-size:])) for size in sizes)
            token = next((token for token in known if token is not None), None)
            if token is None:
                break
            draft.append(token)
            tokens.append(token)
        return draft


class WorkerDrafts:
    """Drafts for the workers of a run, of at most `most` passes each."""

    def __init__(self, loop: DecodeLoop, most: int) -> None:
        self._loop = loop
        self._most = most
        self._texts: dict[WorkerGroup, GroupText] = {}

    def verify(self, workers: Sequence[Worker]) -> Steps[list[Worker]]:
        """Compute drafts for as long as there are any. Return the workers of the next pass."""
        active = list(workers)
        while active and self._loop.call.record.passes:  # the first pass computes the prompt as well
            drafts = self._drafts(active)
            if not drafts:
                break
            active = yield from self._verify(active, drafts)
        return active

    def _drafts(self, workers: Sequence[Worker]) -> list[list[int]]:
        """Return the tokens of the passes after the next one, one of each worker; empty if one has none.

        Together they are no more than a prefill computes in a pass, as their logits are needed at the same time.
        """
        most = min(self._most, self._loop.runner.chunk_size // len(workers))
        proposals = []
        for worker in workers:
            room = min(most, worker.tokens_left() - 1)
            proposals.append(self._text_of(worker.group).propose(FIRST_WORKER + worker.number, room))
        return [list(tokens) for tokens in zip(*proposals, strict=False)]

    def _text_of(self, group: WorkerGroup) -> GroupText:
        """Return the texts of a group up to now: the prompt, injected steps, and the tokens of each worker."""
        table = self._loop.table
        begin = group.call.input_ids.shape[1]
        num_workers = group.config.num_workers
        texts = self._texts.get(group)
        if texts is None:
            texts = self._texts[group] = GroupText()
            for _ in range(FIRST_WORKER + num_workers):
                texts.add_text(())
            texts.extend(0, group.call.prompts[group.index].tolist())
        injected = [token for step in group.history if step.worker < 0 for token in step.tokens]
        texts.extend(1, injected[texts.length(1) :])
        for number in range(num_workers):
            row = group.index * num_workers + number
            known = begin + texts.length(FIRST_WORKER + number)
            texts.extend(FIRST_WORKER + number, table.ids[row, known : table.lengths[row]].tolist())
        return texts

    def _verify(self, workers: Sequence[Worker], drafts: Sequence[list[int]]) -> Steps[list[Worker]]:
        loop = self._loop
        stats = loop.stats
        groups = {worker.group: None for worker in workers}
        inputs, ends = collect_inputs(workers)
        for group in groups:
            stats.prefilled_tokens += group.inserted_tokens
            group.inserted_tokens = 0
        views = [worker.current_view() for worker in workers]
        blocks = [view[-1] for view in views]
        lengths = [block.length + len(worker.pending) for block, worker in zip(blocks, workers, strict=True)]
        passes: list[PassInputs] = [inputs]
        for tokens in drafts:
            passes.append([(Segment(view, 1), [token]) for view, token in zip(views, tokens, strict=True)])
        logits = yield from loop.runner.forward(*passes)
        counts = [segment.num_tokens for segment, _ in inputs]
        ends = [sum(counts[: end + 1]) - 1 for end in ends]
        first = sum(counts)
        active = list(workers)
        accepted = 0
        for step in range(len(passes)):
            if step:
                for worker, (segment, _) in zip(workers, passes[step], strict=True):
                    worker.last_segment = segment
                ends = list(range(first, first + len(workers)))
                first += len(workers)
            of_step = logits.index_select(0, to_device(ends, logits.device))
            active = yield from loop.sample(workers, of_step, Worker.advance)
            if step == len(drafts) or not self._continues(workers, active, views, drafts[step]):
                break
            accepted += 1
        for block, length in zip(blocks, lengths, strict=True):
            loop.cache.pool.truncate(block, length + accepted)
        stats.drafted_tokens += len(workers) * len(drafts)
        stats.accepted_tokens += len(workers) * accepted
        for group in groups:
            group.move_ended_steps()
        return [worker for worker in active if worker.is_active()]

    def _continues(
        self, workers: Sequence[Worker], active: Sequence[Worker], views: Sequence[object], tokens: Sequence[int]
    ) -> bool:
        """Return whether the tokens that were sampled are those of the draft, and nothing else has changed."""
        if len(active) < len(workers):
            return False
        for worker, view, token in zip(workers, views, tokens, strict=True):
            if worker.pending != [token] or worker.writes.pending or worker.current_view() is not view:
                return False
        return True
