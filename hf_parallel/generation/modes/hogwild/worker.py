"""Worker: a row that generates one reasoning step after another (Hogwild! Inference, sections 3.2, 3.3, appendix C)."""

from __future__ import annotations

from collections.abc import Sequence

from hf_parallel.cache import View
from hf_parallel.generation.decoding.rows import PendingWrites, Row
from hf_parallel.generation.modes.hogwild.group import WorkerGroup
from hf_parallel.generation.modes.hogwild.output import Step
from hf_parallel.generation.modes.hogwild.tools import WorkerCall, call_in
from hf_parallel.generation.prompts import END_THINK


class Worker(Row):
    """Worker `number` of a group. Each of its steps has a block of its own, except in the `contiguous` layout."""

    group: WorkerGroup
    writes: PendingWrites

    def __init__(self, group: WorkerGroup, index: int, number: int, name: str) -> None:
        super().__init__(index, (), group=group, writes=group.writes)
        self.number = number
        self.name = name
        self.num_passes = 0
        self.text = ""  # of all its steps
        self.answered = False
        self.stopped = False
        self.call: WorkerCall | None = None  # whose result it waits for
        self._step = 0
        self._num_prefix_tokens = 0
        self._begin_step()

    def current_view(self) -> View:
        return self.group.space.view(self.number)

    def tokens_left(self) -> int:
        return self.group.max_passes - self.num_passes

    def is_active(self) -> bool:
        """Return whether no answer stops the worker; another worker may have answered in the same pass."""
        rule = self.group.config.stop_on_answer
        if rule == "any":
            return self.group.answer is None
        return rule != "all" or not self.answered

    @property
    def ends_paragraph(self) -> bool:
        """Whether the generated text of the current step ends with the separator."""
        return self._generated.endswith(self.group.config.separator)

    def advance(self, token: int, ended: bool) -> bool:
        """Append a generated token; `ended`: a stopping criterion is met. Return whether the worker continues."""
        group = self.group
        config = self.group.config
        self.num_passes += 1
        group.num_generated += 1
        is_eos = token in group.call.eos_token_ids
        added = "" if is_eos else self._write([token], "token")
        self._generated += added
        self.answered = self.answered or group.find_answer(self._generated)
        self.pending = [] if is_eos else [token]
        if config.control_prompt and not self.number and END_THINK in self._generated:
            ended = True
            self.pending = []  # the headers of the others say that the thoughts have ended
        complete = not config.control_prompt and ends_step(
            self._generated, added, config.separator, config.sentence_ends, config.code_fence
        )
        answer_stops = not self.is_active()
        call = call_in(self._generated, added, config.call_tags) if config.tools else None
        complete = complete or call is not None
        if ended or answer_stops or self.num_passes >= group.max_passes or group.is_full():
            if not (ended or complete or answer_stops):
                group.call.record.truncated.add(self.index)
            ended = is_eos or (ended and not group.timed_out())  # a step that `max_time` ends is unfinished
            self.stop(finished=ended or complete or (answer_stops and self.answered))
            return False
        if call is not None and not self.current.text.endswith(config.separator):
            self.insert(group.encode(config.separator))
        if complete:
            self._end_step()
        if call is not None:
            self.call = WorkerCall(call, config.tools or ())
        return True

    @property
    def is_waiting(self) -> bool:
        """Whether the worker waits for the result of a call."""
        return self.call is not None and not self.call.result.done()

    def insert(self, tokens: Sequence[int], event: str = "inject") -> None:
        """Append given tokens, which were not generated, to the current step; `event` as in `ParallelStreamer`."""
        self.pending = [*self.pending, *tokens]
        self._write(tokens, event)
        self.group.inserted_tokens += len(tokens)
        self.group.loop.extend(self.index, tokens)

    def on_new_line(self, text: str) -> str:
        """Return a text with the whitespace before it that separates it from the text of the current step."""
        written = self.current.text
        if len(self.current.tokens) > self._num_prefix_tokens:
            if written.endswith("\n") or text.startswith("\n"):
                return text
            return "\n" + text.lstrip(" ")
        if written[-1:].isspace() or text[0].isspace():
            return text
        return f" {text}"

    def stop(self, finished: bool) -> None:
        """Stop the worker. A finished step joins the history; an unfinished one stays visible in the worker's block."""
        if self.stopped:
            return
        group = self.group
        self.stopped = True
        self._record(finished)
        self.group.call.show(self.index, "", "end")
        if finished and group.config.has_steps:
            separator = group.config.separator
            self._join_history([] if self.current.text.endswith(separator) else group.encode(separator))
        else:
            group.writes.add(group.space.workers[self.number], self.pending)

    def current_step(self, finished: bool = False) -> Step:
        """Return a copy of the worker's current step."""
        ended = self.num_passes if finished else None
        return Step(self.number, self.name, self._step, self.current.text, list(self.current.tokens), ended)

    def _begin_step(self, pending: Sequence[int] = ()) -> None:
        """Write the prefix of the next step; `pending` tokens come before it in the same block."""
        group = self.group
        self._step += 1
        prefix = group.config.step_prefix_of(self.name, self._step) + group.redundancy_prompt()
        if self._step == 1 and group.config.openings is not None:
            prefix += group.config.openings[self.number]
        self.current = group.call.new_text()
        self._generated = ""
        self.pending = list(pending)
        self.insert(group.encode(prefix), "begin")
        self._num_prefix_tokens = len(self.current.tokens)

    def _end_step(self) -> None:
        """Move the step to the history. The next pass computes the KV of its last token."""
        self._record(finished=True)
        if self.group.config.has_steps:
            self._join_history()
            self.pending = []
        self._begin_step(self.pending)

    def _join_history(self, end: Sequence[int] = ()) -> None:
        """Append the step and the tokens `end` to the history. The next pass computes the tokens that it lacks."""
        group = self.group
        tokens = [*self.current.tokens, *end]
        group.step_tokens.append(tokens)
        if group.config.step_move == "reencode":
            block = group.cache.end_step(group.space, self.number, len(tokens))
        else:
            tokens = [*self.pending, *end]
            block = group.cache.end_step(group.space, self.number, 0)
        group.inserted_tokens += len(tokens) - len(self.pending)
        group.writes.add(block, tokens)

    def _record(self, finished: bool) -> None:
        self.group.history.append(self.current_step(finished))
        if finished:
            self.group.call.show(self.index, "", "step")

    def _write(self, tokens: Sequence[int], event: str) -> str:
        added = self.current.add(tokens)
        self.text += added
        self.group.num_tokens += len(tokens)
        self.group.call.show(self.index, added, event)
        return added


def ends_step(text: str, added: str, separator: str, sentence_ends: Sequence[str], code_fence: str) -> bool:
    """Return whether the text `added` by a token completes a reasoning step (Hogwild! Inference, appendix C).

    `text` is the whole text of the step. The step ends where a separator follows one of `sentence_ends` outside a code
    block. The separator may begin in an earlier token, and may be followed by other text of this one.
    """
    if not added:
        return False
    earliest = len(text) - len(added) - len(separator) + 1
    start = text.find(separator, max(earliest, 0))
    while start >= 0:
        step = text[:start]
        is_in_code = bool(code_fence) and step.count(code_fence) % 2 == 1
        if not is_in_code and step.rstrip().endswith(tuple(sentence_ends)):
            return True
        start = text.find(separator, start + 1)
    return False
