"""Finisher: a row that reads all that the workers wrote and completes an answer (Hogwild! Inference, appendix C)."""

from __future__ import annotations

from hf_parallel.cache import Segment
from hf_parallel.detokenizer import IncrementalDetokenizer
from hf_parallel.generation.modes.hogwild.group import WorkerGroup
from hf_parallel.generation.rows import PassInputs, Row


class Finisher(Row):
    """Early finisher of one group, which continues `finisher_prompt`. All its workers have stopped."""

    def __init__(self, group: WorkerGroup) -> None:
        super().__init__(group.index, (), group.encode(group.config.finisher_prompt))
        self._group, self._block = group, group.cache.new_block()
        self._text = IncrementalDetokenizer(group.call.tokenizer)
        group.inserted_tokens += len(self.pending)

    @property
    def group(self) -> WorkerGroup:
        """The workers whose text it reads."""
        return self._group

    def segments(self) -> PassInputs:
        """Return the group's pending writes and the finisher's own tokens."""
        own = Segment([*self.group.space.full_view(), self._block], len(self.pending))
        return [*self.group.pending_segments(), (own, self.pending)]

    def advance(self, token: int, ended: bool) -> bool:
        """Append a generated token; `ended`: a stopping criterion is met. Return whether to generate another one."""
        group, config = self.group, self.group.config
        if token not in group.call.eos_token_ids:
            self._text.add([token])
        group.conclusion = config.finisher_prompt + self._text.text
        self.pending = [token]
        answered = group.find_answer(group.conclusion)
        return not (ended or answered or len(self._text.tokens) >= config.finisher_tokens)
