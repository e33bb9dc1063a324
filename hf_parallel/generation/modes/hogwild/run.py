"""HogwildRun: one call of the mode, from the prompts to the final answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import replace
from typing import ClassVar

import torch
from transformers import (
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria
from transformers.utils import logging

from hf_parallel.cache import Segment
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.caller import name_prompts, warn_caller
from hf_parallel.generation.config import Generated
from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.prefill import count_cached, insert_prompts
from hf_parallel.generation.decoding.replay.config import replaying
from hf_parallel.generation.decoding.rows import PassInputs, Row
from hf_parallel.generation.decoding.wants import Steps, Wait
from hf_parallel.generation.modes.final_answers import describe_pattern
from hf_parallel.generation.modes.hogwild.cache import HogwildCache
from hf_parallel.generation.modes.hogwild.drafts import WorkerDrafts
from hf_parallel.generation.modes.hogwild.group import FinisherRow, WorkerGroup
from hf_parallel.generation.modes.hogwild.output import HogwildOutput, join_steps
from hf_parallel.generation.modes.hogwild.settings import HogwildSettings
from hf_parallel.generation.modes.hogwild.speech import hear, show_result
from hf_parallel.generation.modes.hogwild.worker import Worker
from hf_parallel.generation.modes.stages import check_vocabulary
from hf_parallel.generation.sampling.processors import MinLengthProcessor, PerPromptProcessor
from hf_parallel.generation.sampling.token_table import TokenTable
from hf_parallel.generation.settings import Arguments
from hf_parallel.models.intercept.attention import UnsupportedModelError

TABLE_CAPACITY = 1024
"""Largest initial capacity of the token table, in new tokens per worker. The table grows on demand."""

POLL_SECONDS = 0.1
"""Time after which a run whose workers all wait for results looks whether `max_time` has passed."""

PREAMBLE = 256
"""Tokens of a chat template that may precede the collaboration prompt."""

YES_NO = ("yes", "no")
"""Answers to the `control_prompt`, compared by their first tokens."""

_LENGTH_PROCESSORS = (
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
"""Processors of Transformers that depend only on the length of a row."""


logger = logging.get_logger(__name__)


def _words(text: str) -> str:
    """Return a text without whitespace, which tokenizers may change."""
    return "".join(text.split())


class HogwildRun:
    """Groups of workers, one per prompt, and their decode loop. `workers` are in the order of the rows."""

    outlives_call: ClassVar[bool] = False
    """Whether the cache is used by later calls, between which weights may change."""

    def __init__(self, config: HogwildSettings, call: GenerationCall) -> None:
        needed = (*map(config.step_prefix_of, config.names), config.finisher_prompt)
        texts = (*config.headers, config.separator, config.redundancy_prompt, *(config.openings or ()))
        check_vocabulary(call, texts, needed)
        if config.control_prompt:
            check_vocabulary(call, (config.control_prompt,), needed=YES_NO)
        if call.capabilities.rotary is None:
            raise UnsupportedModelError(f"hogwild rotates keys: {call.capabilities.why_no_rotation}")
        if call.past_key_values is not None:
            raise ValueError("hogwild creates its own cache; past_key_values cannot be given")
        self.config = config
        self.cache = call.new_cache(HogwildCache, call.capabilities.rotary)
        call.begin_cache(self.cache, self.outlives_call)
        self.workers: list[Worker] = []
        may_pause = bool(config.control_prompt or config.tools)
        call = _adapt_processors(call, None if may_pause else self.workers)
        capacity = min(2 * call.max_new_tokens, TABLE_CAPACITY)
        table = TokenTable(call.input_ids.repeat_interleave(config.num_workers, dim=0), call.pad_token_id, capacity)
        # The budget is counted in forward passes; a length in tokens would count step prefixes too.
        criteria = StoppingCriteriaList(c for c in call.stopping_criteria if not isinstance(c, MaxLengthCriteria))
        self.loop = DecodeLoop(call, self.cache, table, criteria, config.seed)
        self.groups: list[WorkerGroup] = []
        self.drafts: WorkerDrafts | None = None

    def begin(self) -> Steps[None]:
        """Create the workers, after the prompts."""
        config = self.config
        call = self.loop.call
        leaves = yield from insert_prompts(call, self.cache)
        count_cached(self.loop, leaves)
        self.cache.nodes_to_prefill()  # allocates their blocks, which are filled when a group is first computed
        for index, leaf in enumerate(leaves):
            group = WorkerGroup(config, self.loop, self.cache, index, leaf)
            self.groups.append(group)
            for number, name in enumerate(config.names):
                self.workers.append(Worker(group, len(self.workers), number, name))
            group.check_positions()
        self._warn_other_prompts()

    def generate(self) -> Steps[Generated]:
        """Let the workers write until all have stopped. Return what `model.generate` returns."""
        yield from self.begin()
        if self.config.draft_tokens and not self.loop.call.host.runs_ahead:
            self.drafts = WorkerDrafts(self.loop, self.config.draft_tokens)
        with self.loop.running(), replaying(self.loop, self.config):
            rows = yield from self.schedule(self.workers)
            logits = yield from self._prefill(self.loop, rows)
            yield from self.loop.decode(rows, logits, Worker.advance, self.move_ended_steps, self.schedule)
            yield from self.finish()
        output = self.loop.output(HogwildOutput, **self.fields())
        self.warn_unanswered()
        return output

    def schedule(self, active: Sequence[Worker]) -> Steps[list[Worker]]:
        """Return the workers of the next pass.

        With a `control_prompt` the first worker of a group thinks, and the others write when the thoughts suffice
        (AsyncReasoning, arXiv 2512.10931; `solve` in async_reasoning/solver.py of yandex-research/AsyncReasoning).
        """
        if self.config.tools:
            active = yield from self._with_results()
        if active:
            for words in self.loop.call.host.take_words():
                hear(words, self.workers, self.loop.call.record.passes)
        if not self.config.control_prompt:
            if self.drafts is not None:
                active = yield from self.drafts.verify(active)
                if self.config.tools:
                    active = yield from self._with_results()
            return list(active)
        asked: list[Worker] = []
        for first in range(0, len(self.workers), self.config.num_workers):
            thinker, *writers = self.workers[first : first + self.config.num_workers]
            if all(writer.stopped for writer in writers):
                thinker.stop(finished=False)
            if any(writer.ends_paragraph for writer in writers):
                thinker.group.others_write = False
            if thinker.stopped:
                thinker.group.others_write = True
            else:
                is_due = thinker.num_passes and thinker.num_passes % self.config.control_interval == 0
                if thinker.ends_paragraph or is_due:
                    asked.append(thinker)
        if asked:
            answers = yield from self.ask(asked)
            for thinker, answer in zip(asked, answers, strict=True):
                thinker.group.others_write = answer
        rows = [worker for worker in self.workers if not worker.stopped and worker.is_active()]
        return [worker for worker in rows if worker.number == 0 or worker.group.others_write]

    def _with_results(self) -> Steps[list[Worker]]:
        """Give results of tools to the workers that wait for them. Return those that write, once there are any."""
        host = self.loop.call.host
        while True:
            running = [worker for worker in self.workers if not worker.stopped and worker.is_active()]
            for worker in running:
                if worker.call is not None and not worker.is_waiting:
                    show_result(worker, self.loop.call.record.passes)
            writing = [worker for worker in running if not worker.is_waiting]
            waiting = [worker.call.result for worker in running if worker.call is not None]
            if writing or not waiting:
                return writing
            if any(worker.group.timed_out() for worker in running):
                return []
            if host.is_shared:
                yield Wait()
            else:
                wait(waiting, POLL_SECONDS, FIRST_COMPLETED)

    def ask(self, thinkers: Sequence[Worker]) -> Steps[list[bool]]:
        """Return whether the model answers the `control_prompt` after the text of each worker by yes rather than no.

        Source: `check_if_should_continue_writing` in the same file. As there, the worker's last token is not seen.
        """
        inputs: PassInputs = []
        for worker in thinkers:
            view = [*worker.current_view(), worker.group.question]
            tokens = worker.group.control
            inputs.append((Segment(view, len(tokens)), tokens))
        yes, no = (thinkers[0].group.encode(text)[0] for text in YES_NO)
        log = self.cache.log
        self.cache.log = None  # the question is no text of a worker
        try:
            logits = yield from self.loop.runner.prefill(inputs)
        finally:
            self.cache.log = log
            for thinker in thinkers:
                self.cache.pool.truncate(thinker.group.question, 0)
        return (logits[:, yes] > logits[:, no]).tolist()

    def finish(self) -> Steps[None]:
        """Stop all workers; early finishers answer where no worker has (appendix C)."""
        for worker in self.workers:
            worker.stop(finished=False)
        config = self.config
        unanswered = [group for group in self.groups if group.answer is None]
        if unanswered and config.finisher_tokens and config.finisher_prompt and config.answer_pattern:
            yield from self._run_finishers(unanswered)

    def warn_unanswered(self) -> None:
        """Warn if no text matches an `answer_pattern` that was given: the default one does not fit every task."""
        missing = [group.answer is None for group in self.groups]
        pattern = self.config.answer_pattern
        if any(missing) and pattern and "answer_pattern" in self.config.given():
            texts = f"no text of the workers or of the early finisher of {name_prompts(missing)}"
            warn_caller(f"{texts} matches {describe_pattern(pattern)}")

    def _run_finishers(self, unanswered: Sequence[WorkerGroup]) -> Steps[None]:
        config = self.config
        loop = self.loop
        call = loop.call
        rngs = loop.sampler.rngs
        finishers = [FinisherRow(group) for group in unanswered]
        table = TokenTable(call.input_ids, call.pad_token_id, config.finisher_tokens + len(finishers[0].pending))
        # A finisher continues the random numbers of the first worker of its prompt.
        seed = None
        if rngs is not None:
            seed = [rngs[group.index * config.num_workers] for group in self.groups]
        reader = DecodeLoop(call, self.cache, table, loop.sampler.criteria, seed, stream=False)
        for finisher in finishers:
            table.extend(finisher.index, finisher.pending)
        with replaying(reader, config):
            logits = yield from self._prefill(reader, finishers)
            yield from reader.decode(finishers, logits, FinisherRow.advance, self.move_ended_steps)

    def _warn_other_prompts(self) -> None:
        """Warn if a prompt does not contain the rules of these workers."""
        tokenizer = self.loop.call.tokenizer
        config = self.config
        encoded = encode(tokenizer, config.prompt.rules() or " ")
        rules = _words(tokenizer.decode(encoded, skip_special_tokens=True))
        for prompt in map(self.loop.call.token_ids, self.loop.call.prompts):
            head = tokenizer.decode(prompt[: 2 * len(encoded) + PREAMBLE].tolist(), skip_special_tokens=True)
            if rules not in _words(head):
                logger.warning_once(
                    "the workers of hogwild have no rules, as the prompt does not contain the collaboration_prompt for "
                    f"{', '.join(config.names)}: build it with hogwild_prompt(task, tokenizer), with the settings that "
                    "generate has"
                )

    def move_ended_steps(self) -> None:
        """Move steps that have ended into the histories."""
        for group in self.groups:
            group.move_ended_steps()

    def fields(self) -> Arguments:
        """Return the current values of the fields of `HogwildOutput`."""
        history = []
        for group in self.groups:
            steps = list(group.history)
            for worker in self.workers:
                if worker.group is group and not worker.stopped:
                    steps.append(worker.current_step())
            history.append(steps)
        return {
            "history": history,
            "texts": [worker.text for worker in self.workers],
            "transcripts": [join_steps(steps) for steps in history],
            "answers": [group.answer for group in self.groups],
            "conclusions": [group.conclusion for group in self.groups],
            "names": [self.config.names for _ in self.groups],
        }

    def _prefill(self, loop: DecodeLoop, rows: Sequence[Row]) -> Steps[torch.Tensor]:
        """Run the first forward pass, over prompts and inserted tokens; its seconds count as prefill."""
        began = time.perf_counter()
        prefill_seconds = loop.stats.prefill_seconds
        logits = yield from loop.step(rows, self.move_ended_steps)
        loop.stats.prefill_seconds = prefill_seconds + time.perf_counter() - began
        return logits


class _PassCountingProcessor(LogitsProcessor):
    """Calls a processor with rows whose length counts prompt and generated tokens, but not inserted ones."""

    keeps_rows = False

    def __init__(self, processor: LogitsProcessor, prompt_length: int, workers: Sequence[Worker]) -> None:
        self.processor = processor
        self.prompt_length = prompt_length
        self.workers = workers

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[rows, vocabulary]`."""
        length = self.prompt_length + max(worker.num_passes for worker in self.workers)  # active ones have the most
        return self.processor(input_ids[:, :1].expand(-1, length), scores)


def _adapt_processors(call: GenerationCall, workers: Sequence[Worker] | None) -> GenerationCall:
    """Return a call whose length limits count decode passes, and whose `prefix_allowed_tokens_fn` gets prompt indices.

    `workers` is read at each pass. None: they may pause, and their lengths are counted in tokens.
    """
    length = call.input_ids.shape[1]
    processors = LogitsProcessorList()
    for processor in call.logits_processor:
        if isinstance(processor, _LENGTH_PROCESSORS) and workers is not None:
            processor = _PassCountingProcessor(MinLengthProcessor.convert(processor), length, workers)
        elif isinstance(processor, PrefixConstrainedLogitsProcessor):
            processor = PerPromptProcessor(processor, call.num_rows)
        processors.append(processor)
    return replace(call, logits_processor=processors)
