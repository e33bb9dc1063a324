"""`generation_mode="hogwild"`: workers that think together over one shared KV cache (Hogwild! Inference).

This file is the mode's settings and its run; what a worker does with a token is in `worker.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

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
    TextStreamer,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_parallel.cache.hogwild import LAYOUTS, HogwildCache
from hf_parallel.detokenizer import IncrementalDetokenizer
from hf_parallel.generation.arguments import check_tokenizer_given
from hf_parallel.generation.call import GenerationCall, PerPromptProcessor
from hf_parallel.generation.config import (
    Preset,
    RowPlace,
    check_choice,
    check_int,
    check_template,
    check_text,
    check_texts,
)
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.modes.final_answers import BOXED, check_pattern, find_answer
from hf_parallel.generation.modes.hogwild.presets import EMBEDDED_PRESET
from hf_parallel.generation.modes.hogwild.worker import Problem, Step, Worker
from hf_parallel.generation.modes.stages import check_vocabulary
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.resampling.config import ReplayConfig, replaying
from hf_parallel.generation.rows import Row
from hf_parallel.generation.sampling import MinLengthProcessor, TokenTable
from hf_parallel.models.attention import UnsupportedModelError
from hf_parallel.transcript.sections import TranscriptStyle

COMMON = "common"
"""Name of the history that all workers see."""
NAMES = ("Alice", "Bob", "Carol", "Dave", "Erin", "Frank", "Grace", "Heidi")
"""Names of the first workers."""
TABLE_ROOM = 1024
"""Tokens that the text of a worker has room for at first; it grows beyond."""
_COUNTING = (
    ExponentialDecayLengthPenalty,
    ForcedEOSTokenLogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
)
"""Processors of Transformers that look at how long a row is, and at nothing else of it."""


def default_name(number: int) -> str:
    """Default name of a worker."""
    return NAMES[number] if number < len(NAMES) else f"Worker {number + 1}"


@dataclass
class HogwildConfig(ReplayConfig):
    r"""Workers over one shared memory. `max_new_tokens` counts forward passes: every worker gets one token in each.

    Parameters
    ----------
    num_workers : int
        Workers per prompt.
    layout : str
        `combined` (finished steps in a common history, unfinished ones seen as they are written), `interleaved`
        (only finished steps are seen) or `contiguous` (no history; every worker keeps one growing text).
    worker_names : list of str, optional
        Default: Alice, Bob, Carol, ...
    history_header, others_header, own_header, step_gap : str
        Texts before the history, before the others' unfinished steps, before a worker's own step, and between the
        steps of two others. Empty: none.
    step_prefix : str
        What every step begins with; `{name}` and `{step}` are filled in.
    separator : str
        Ends a step when it follows one of `sentence_ends` outside a code block.
    sentence_ends : list of str
        What a sentence may end with.
    code_fence : str
        Marks code blocks; empty: they are not told apart.
    redundancy_prompt : str
        Begins the next step after every `redundancy_interval` generated tokens of a problem. Empty: never.
    redundancy_interval : int
        See `redundancy_prompt`.
    answer_pattern : str
        Regular expression of a final answer; its first group, if it has one, is the answer. Empty: none is looked for.
    stop_on_answer : str
        `any`: a problem ends when one worker has answered; `all`: a worker ends when it has; `never`.
    finisher_prompt : str
        If the budget ends without an answer, a reader of all that was written goes on from here.
    finisher_tokens : int
        Tokens that it gets. 0: there is no such reader.
    collaboration_prompt : str
        System prompt of `hogwild_prompt`; `{names}` and `{count}` are filled in.

    Notes
    -----
    What all workers of a problem write is read together, so that it may use up the model's positions
    (`max_position_embeddings`) long before `max_new_tokens` is over. Then they stop, which is logged once, and the
    finisher still has room. Only where prompt and `max_new_tokens` alone are more than the model has, workers go on
    behind its last position, as `generate` does.

    `prefix_allowed_tokens_fn` is told the number of the problem, whichever worker it is asked for.

    With a `logits_cache` a problem replays for as long as it is remembered what follows for all workers that still
    write. Its passes are computed when it leaves what is remembered, all of them in one forward pass.
    """

    mode: ClassVar[str] = "hogwild"
    streams_text: ClassVar[bool] = True
    merges_rows: ClassVar[bool] = True
    rows_name: ClassVar[str] = "workers"
    presets: ClassVar[Mapping[str, Preset]] = {"embedded": EMBEDDED_PRESET}

    num_workers: int = 2
    layout: str = "combined"
    worker_names: Sequence[str] | None = None
    history_header: str = "\n\n### Finished steps of everyone\n\n"
    others_header: str = "\n\n### What the others are writing right now (unfinished)\n\n"
    own_header: str = "\n\n### What I am writing right now\n\n"
    step_gap: str = "\n\n"
    step_prefix: str = "**{name} [{step}]:**"
    separator: str = "\n\n"
    sentence_ends: Sequence[str] = (".", "!", "?", '."', '!"', '?"', ".)", "\\]", "$$", "。", "！", "？")
    code_fence: str = "```"
    redundancy_prompt: str = "Let me check: is somebody else already doing what I am doing (yes/no)?"
    redundancy_interval: int = 1024
    answer_pattern: str = BOXED
    stop_on_answer: str = "any"
    finisher_prompt: str = "\n\nTime is up. From everything written so far, the final answer is \\boxed{"
    finisher_tokens: int = 16
    collaboration_prompt: str = (
        "{count} assistants, {names}, work on the task below at the same time and write into one shared notebook. "
        "Everyone sees at once what the others write, also steps that are not finished yet. A step is one short "
        "paragraph and begins with the name of its author. Talk to each other: split the work at the start, say what "
        "you are going to do, use and check each other's results, and change your plan when somebody else was faster. "
        "Never repeat what is being done already. Whoever is sure of the final answer writes it inside \\boxed{{}}."
    )

    def validate(self) -> None:
        """Check every setting; see `ParallelConfig.validate`."""
        super().validate()
        if self.prefetch:
            raise ValueError("prefetch must be None or False for hogwild, whose workers wait for each other, got True")
        check_int("num_workers", self.num_workers, at_least=1)
        check_choice("layout", self.layout, LAYOUTS)
        for name in ("history_header", "others_header", "own_header", "step_gap", "code_fence"):
            check_text(name, getattr(self, name))
        for name in ("redundancy_prompt", "finisher_prompt"):
            check_text(name, getattr(self, name))
        if not isinstance(self.separator, str) or not self.separator:
            raise ValueError(f"separator must be a non-empty string, got {self.separator!r}")
        check_texts("sentence_ends", self.sentence_ends)
        check_pattern("answer_pattern", self.answer_pattern)
        check_int("redundancy_interval", self.redundancy_interval, at_least=1)
        check_int("finisher_tokens", self.finisher_tokens, at_least=0)
        check_choice("stop_on_answer", self.stop_on_answer, ("any", "all", "never"))
        if self.worker_names is not None:
            check_texts("worker_names", self.worker_names)
            if len(self.worker_names) != self.num_workers or len(set(self.worker_names)) != self.num_workers:
                raise ValueError(f"worker_names must be {self.num_workers} different names, got {self.worker_names!r}")
        for worker in self.names:
            check_template("step_prefix", self.step_prefix, name=worker, step=1)
        if not self.step_prefix:
            raise ValueError("step_prefix must not be empty: a worker's first token follows from it")
        check_template("collaboration_prompt", self.collaboration_prompt, names="Alice, Bob", count=self.num_workers)

    @property
    def names(self) -> list[str]:
        """Names of the workers."""
        if self.worker_names is not None:
            return list(self.worker_names)
        return [default_name(i) for i in range(self.num_workers)]

    @property
    def late_prefixes(self) -> list[str]:
        """What a late step of each worker begins with, as long as it gets and with every digit."""
        return [self.step_prefix.format(name=name, step=1234567890) for name in self.names]

    @property
    def rows_per_prompt(self) -> int:
        """The number of workers."""
        return self.num_workers

    def place(self, row: int, num_prompts: int) -> RowPlace:
        """See `ParallelConfig.place`. Row -1 is the history that all workers see; a session may add workers."""
        if row < 0:
            return RowPlace(0, row, None)
        return RowPlace(0, row, row) if num_prompts == 1 else super().place(row, num_prompts)

    def row_name(self, index: int) -> str:
        """Name of a worker."""
        if index < 0:
            return COMMON
        return self.names[index] if index < self.num_workers else default_name(index)

    def step_text(self, index: int, step: int, text: str) -> str:
        """The text of a step without its `step_prefix`."""
        return text.removeprefix(self.step_prefix.format(name=self.row_name(index), step=step))

    @property
    def transcript_style(self) -> TranscriptStyle:
        """Workers see each other's steps, all of them or finished ones only."""
        past = "" if self.layout == "contiguous" else "history"
        return TranscriptStyle("step", COMMON, "ended" if self.layout == "interleaved" else "live", "step", past)

    def system_prompt(self) -> str:
        """The `collaboration_prompt` with the workers' names."""
        return self.collaboration_prompt.format(names=", ".join(self.names), count=self.num_workers)

    def run(self, call: GenerationCall) -> Any:
        """Prefill problems and headers, let the workers write, ask for an answer where none came."""
        run = self.open(call)
        loop, settle = run.loop, partial(_settle, run.problems)
        with loop.running(), replaying(loop, self):
            logits = _begin(loop, run.workers, settle)
            loop.decode(run.workers, logits, Worker.advance, settle)
            run.finish()
        output = loop.output(HogwildOutput, **run.told())
        if isinstance(output, torch.Tensor):
            run.cache.reset()
        return output

    def open(self, call: GenerationCall) -> HogwildRun:
        """Make the problems of a call and their workers; nothing is computed yet."""
        self._check_call(call)
        cache = HogwildCache(call.capabilities.rotary, device=call.input_ids.device)
        cache.claim(call.model)
        workers: list[Worker] = []
        call = _for_workers(call, workers)
        room = min(2 * call.max_new_tokens, TABLE_ROOM)
        table = TokenTable(call.input_ids.repeat_interleave(self.num_workers, dim=0), call.pad_token_id, room)
        # The budget is counted in forward passes; a length in tokens would count headers too.
        criteria = StoppingCriteriaList(c for c in call.stopping_criteria if not isinstance(c, MaxLengthCriteria))
        loop = DecodeLoop(call, cache, table, criteria, self.seed)
        leaves = [cache.insert(prompt) for prompt in call.prompts]
        cache.unfilled()  # gives them their blocks; a problem's prompt is computed when something of it has to be
        problems = [Problem(self, call, loop, cache, i, leaf) for i, leaf in enumerate(leaves)]
        workers += [worker for problem in problems for worker in problem.workers]
        return HogwildRun(self, cache, loop, problems, workers)

    def prepare(self, kwargs: dict[str, Any]) -> None:
        """Look whether the tokenizer is there and works, before anything is prepared."""
        check_tokenizer_given(kwargs, self.mode, "reads text to find the ends of steps")
        streamer = kwargs.get("streamer")
        if isinstance(streamer, TextStreamer) and self.num_workers > 1:
            name = type(streamer).__name__
            raise ValueError(
                f"streamer must be a ParallelStreamer where {self.num_workers} workers write, got a {name}"
            )

    def _check_call(self, call: GenerationCall) -> None:
        headers = (self.history_header, self.others_header, self.own_header, self.step_gap)
        texts = (*headers, *self.late_prefixes, self.separator, self.redundancy_prompt, self.finisher_prompt)
        check_vocabulary(call, texts)
        if call.capabilities.rotary is None:
            raise UnsupportedModelError(f"hogwild turns keys to other positions: {call.capabilities.why_no_rotation}")
        if call.past_key_values is not None:
            raise ValueError("hogwild makes its own cache; past_key_values cannot be given")

    def conclude(self, loop: DecodeLoop, problems: Sequence[Problem]) -> None:
        """Let a reader of everything answer the problems that have no answer (appendix C, early finisher)."""
        unanswered = [p for p in problems if p.answer is None]
        if not (self.finisher_tokens and self.finisher_prompt and self.answer_pattern and unanswered):
            return
        tokens = problems[0].encode(self.finisher_prompt)
        call = loop.call
        table = TokenTable(call.input_ids, call.pad_token_id, self.finisher_tokens + len(tokens))
        noise = loop.sampler.noise  # a reader goes on where the randomness of its problem's first worker ended
        seed = None if noise is None else [noise[problem.workers[0].index] for problem in problems]
        reader = DecodeLoop(call, loop.cache, table, loop.sampler.criteria, seed, stats=loop.stats, stream=False)
        rows = [p.finisher(tokens) for p in unanswered]
        for row in rows:
            table.extend(row.index, tokens)
        texts = {row.index: IncrementalDetokenizer(call.tokenizer) for row in rows}

        def advance(row: Row, token: int, ended: bool) -> bool:
            problem, text = problems[row.index], texts[row.index]
            if token not in call.eos_token_ids:
                text.add([token])
            problem.conclusion = self.finisher_prompt + text.text
            problem.answer = self.find_answer(problem.conclusion)
            row.pending = [token]
            return not ended and problem.answer is None and len(text.tokens) < self.finisher_tokens

        settle = partial(_settle, problems)
        with replaying(reader, self):
            reader.decode(rows, _begin(reader, rows, settle), advance, settle)

    def find_answer(self, text: str) -> str | None:
        """The last final answer in a text, or None."""
        return find_answer(self.answer_pattern, text)


@dataclass(eq=False)
class HogwildRun:
    """Problems, their workers, and the loop in which they write: what the mode and a session have in common."""

    config: HogwildConfig
    cache: HogwildCache
    loop: DecodeLoop
    problems: list[Problem]
    workers: list[Worker]

    def finish(self) -> None:
        """Let all workers leave, and ask for an answer where none came."""
        for worker in self.workers:
            worker.leave(finished=False)
        self.config.conclude(self.loop, self.problems)

    def told(self) -> dict[str, Any]:
        """What a `HogwildOutput` says of the workers, as things stand."""
        history = [
            [*problem.history, *(problem.step_of(worker) for worker in problem.workers if not worker.left)]
            for problem in self.problems
        ]
        return {
            "history": history,
            "texts": [worker.text for worker in self.workers],
            "transcripts": [transcript(steps) for steps in history],
            "answers": [problem.answer for problem in self.problems],
            "conclusions": [problem.conclusion for problem in self.problems],
            "names": [[worker.name for worker in problem.workers] for problem in self.problems],
        }


def transcript(steps: Sequence[Step]) -> str:
    """The text of steps, in their order."""
    return "\n\n".join(step.text.rstrip() for step in steps)


class _CountingPasses(LogitsProcessor):
    """Asks a processor as if rows held their prompts and what workers generated, but no headers and prefixes."""

    keeps_rows = False

    def __init__(self, processor: LogitsProcessor, prompt_length: int, workers: Sequence[Worker]) -> None:
        self.processor, self.prompt_length, self.workers = processor, prompt_length, workers

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[rows, vocabulary]`; a worker that has left has been there for fewer passes."""
        length = self.prompt_length + max(worker.passes for worker in self.workers)
        return self.processor(input_ids[:, :1].expand(-1, length), scores)


def _for_workers(call: GenerationCall, workers: Sequence[Worker]) -> GenerationCall:
    """Let limits on the length count forward passes, as `max_new_tokens` does, and tell workers by their problem."""
    length, processors = call.input_ids.shape[1], LogitsProcessorList()
    for processor in call.logits_processor:
        if isinstance(processor, _COUNTING):
            processor = _CountingPasses(MinLengthProcessor.replacing(processor), length, workers)
        elif isinstance(processor, PrefixConstrainedLogitsProcessor):
            processor = PerPromptProcessor(processor, call.num_rows)
        processors.append(processor)
    return replace(call, logits_processor=processors)


def _begin(loop: DecodeLoop, rows: Sequence[Row], settle: Callable[[], None]) -> torch.Tensor:
    """The forward pass over what rows are given, which is prefill."""
    began, before = time.perf_counter(), loop.stats.prefill_seconds
    logits = loop.step(rows, settle)
    loop.stats.prefill_seconds = before + time.perf_counter() - began
    return logits


def _settle(problems: Sequence[Problem]) -> None:
    for problem in problems:
        problem.settle()


@dataclass
class HogwildOutput(ParallelOutput):
    """What the workers wrote.

    Attributes
    ----------
    sequences : int64 [batch * num_workers, length]
        Prompt and own text of every worker, headers of its steps included.
    history : list per problem of list of Step
        Finished steps in the order in which they ended, then what was unfinished at the end.
    texts : list of str
        Each worker's own text, `batch * num_workers` of them.
    transcripts : list of str
        Per problem all steps in the order in which they ended.
    answers : list of str or None
        Per problem the final answer.
    conclusions : list of str
        Per problem what the early finisher wrote, its prompt included; empty where it was not needed.
    names : list per problem of list of str
        The workers in the order in which they came, those that a session has removed included.
    scores, logits : tuple of [batch * num_workers, vocabulary], optional
        One per token that a worker generated; `sequences` hold headers too, so the two do not stand side by side.
    """

    history: list[list[Step]] | None = None
    texts: list[str] | None = None
    transcripts: list[str] | None = None
    answers: list[str | None] | None = None
    conclusions: list[str] | None = None
    names: list[list[str]] | None = None

    def columns(self, prompt: int) -> list[str]:
        """The names of the workers."""
        return list((self.names or ())[prompt])

    def notes(self, prompt: int) -> list[tuple[str, str]]:
        """The answer, and what the early finisher wrote."""
        found = (("Answer", self.answers), ("Written by a reader of everything", self.conclusions))
        return [(label, told[prompt] or "") for label, told in found if told and told[prompt]]
