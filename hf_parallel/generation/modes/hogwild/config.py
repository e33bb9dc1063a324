"""`generation_mode="hogwild"`: workers that generate concurrently over one KV cache (Hogwild! Inference)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase, TextStreamer

from hf_parallel.cache.hogwild import LAYOUTS
from hf_parallel.generation.arguments import check_tokenizer_given
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import ModePrompt, ModeRows, ModeTraits, RowPlace
from hf_parallel.generation.modes.final_answers import BOXED, check_pattern
from hf_parallel.generation.modes.hogwild.output import COMMON, HogwildOutput
from hf_parallel.generation.modes.hogwild.presets import EMBEDDED_PRESET
from hf_parallel.generation.modes.hogwild.run import HogwildRun
from hf_parallel.generation.prompts import Chat, build_prompt
from hf_parallel.generation.replay.config import ReplayConfig
from hf_parallel.generation.settings import NOT_REMOTE, Arguments
from hf_parallel.generation.validation import check_choice, check_int, check_template, check_text, check_texts
from hf_parallel.models.capabilities import max_positions
from hf_parallel.transcript.sections import TranscriptStyle

NAMES = ("Alice", "Bob", "Carol", "Dave", "Erin", "Frank", "Grace", "Heidi")
"""Default names of the first workers."""
MAX_WORKERS = 1000
"""Limit of `num_workers` that holds its checks below a second."""
LATE_STEP = 1234567890
"""Step number for checks of step prefixes: it has every digit, and more digits than any step of a call."""


def default_name(index: int) -> str:
    """Return the default name of a worker."""
    return NAMES[index] if index < len(NAMES) else f"Worker {index + 1}"


class _Names(list[str]):
    """Names in a template: `{names}` lists them, `{names[i]}` is one of them for any `i`."""

    def __format__(self, spec: str) -> str:
        return format(", ".join(self), spec)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index % len(self))


class HogwildRows(ModeRows["HogwildConfig"]):
    """Workers. Row -1 is the common history; a session may have more rows than `num_workers`."""

    def place(self, row: int, num_prompts: int) -> RowPlace:
        """See `ModeRows.place`."""
        if row < 0:
            return RowPlace(0, row, None)
        return RowPlace(0, row, row) if num_prompts == 1 else super().place(row, num_prompts)

    def name(self, index: int) -> str:
        """Return the name of a worker."""
        if index < 0:
            return COMMON
        return self.config.names[index] if index < self.config.num_workers else default_name(index)

    def step_text(self, index: int, step: int, text: str) -> str:
        """Return the text of a step without its `step_prefix`; a worker that joined a session may have any name."""
        if index < self.config.num_workers:
            return text.removeprefix(self.config.step_prefix_of(self.name(index), step))
        prefix = re.escape(self.config.step_prefix_of("\0", step)).replace("\0", "[^\n]*?")
        found = re.match(prefix, text)
        return text[found.end() :] if found else text

    @property
    def style(self) -> TranscriptStyle:  # type: ignore[override]
        """Columns of steps; a worker sees all steps of the others, or finished ones only."""
        layout = self.config.layout
        past = "" if layout == "contiguous" else "history"
        return TranscriptStyle("step", COMMON, "ended" if layout == "interleaved" else "live", "step", past)


class HogwildPrompt(ModePrompt["HogwildConfig"]):
    """Rules of the collaboration. Workers think in the open."""

    thinking = True

    def rules(self) -> str:
        """Return `collaboration_prompt` with the names of the workers."""
        return self.config.collaboration_prompt.format(**self.config.prompt_fields())

    def task_text(self, task: str) -> str:
        """Return `task_prompt` with the task."""
        return self.config.task_prompt.format(task=task)


@dataclass
class HogwildConfig(ReplayConfig[HogwildOutput]):
    r"""Workers over one shared KV cache. `max_new_tokens` counts forward passes, each of which adds a token per worker.

    Parameters
    ----------
    num_workers : int
        Workers per prompt.
    layout : str
        `combined` (finished steps in a common history, unfinished ones visible while they are written), `interleaved`
        (only finished steps are visible) or `contiguous` (no history; each worker has one growing text).
    worker_names : list of str, optional
        Default: Alice, Bob, Carol, ...
    history_header : str
        Text before the history. Empty: none, as for the next three.
    others_header : str
        Text before the unfinished steps of the others.
    own_header : str
        Text before a worker's own step.
    step_gap : str
        Text between the steps of two others.
    step_prefix : str
        Beginning of every step; may contain `{name}` and `{step}`.
    separator : str
        Ends a step when it follows one of `sentence_ends` outside a code block.
    sentence_ends : list of str
        Possible ends of a sentence.
    code_fence : str
        Marks code blocks. Empty: code blocks are not recognised.
    redundancy_prompt : str
        Follows the next `step_prefix` after every `redundancy_interval` tokens of a prompt's workers. Empty: never.
    redundancy_interval : int
        See `redundancy_prompt`.
    answer_pattern : str
        Regular expression of a final answer; its first group, if any, is the answer. Empty: nothing is searched for.
    stop_on_answer : str
        `any`: all workers of a prompt stop when one has answered; `all`: each stops when it has answered; `never`.
    finisher_prompt : str
        If all workers stop without an answer, an early finisher reads all steps and continues this text.
    finisher_tokens : int
        Token budget of the early finisher. 0: there is none.
    collaboration_prompt : str
        System prompt of `hogwild_prompt`; may contain `{names}`, `{count}`, and the names of single workers as
        `{names[0]}`, `{names[1]}`, ..., which start over after the last worker.
    task_prompt : str
        Text of a task that is a string in `hogwild_prompt`; contains `{task}`.

    Notes
    -----
    All workers of a prompt share the model's positions (`max_position_embeddings`) and may use them up before
    `max_new_tokens` is reached. Then they stop, with one warning in the log, early enough for the finisher. Only if
    the prompt and `max_new_tokens` alone exceed the positions do workers continue beyond the last one, as `generate`
    does.

    `prefix_allowed_tokens_fn` receives the index of the prompt, the same for all its workers.

    With a `logits_cache`, a prompt is replayed while logits are cached for all of its active workers. At the first
    miss the skipped passes are computed in one forward pass.
    """

    mode: ClassVar[str] = "hogwild"
    traits = ModeTraits(
        rows=HogwildRows,
        prompt=HogwildPrompt,
        streams_text=True,
        merges_rows=True,
        rows_field="workers",
        presets={"embedded": EMBEDDED_PRESET},
    )

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
    answer_pattern: str = field(default=BOXED, metadata=NOT_REMOTE)
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
    task_prompt: str = "{task}"

    def validate(self) -> None:
        """Check every setting; see `ParallelConfig.validate`."""
        super().validate()
        if self.prefetch:
            raise ValueError("prefetch must be None or False for hogwild, whose workers decode in lockstep, got True")
        check_int("num_workers", self.num_workers, at_least=1)
        if self.num_workers > MAX_WORKERS:
            raise ValueError(f"num_workers must be at most {MAX_WORKERS}, got {self.num_workers!r}")
        check_choice("layout", self.layout, LAYOUTS)
        headers = ("history_header", "others_header", "own_header", "step_gap")
        for name in (*headers, "code_fence", "redundancy_prompt", "finisher_prompt"):
            check_text(name, getattr(self, name))
        check_text("separator", self.separator)
        if not self.separator:
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
            raise ValueError("step_prefix must not be empty: the first token of a step is predicted from it")
        check_template("collaboration_prompt", self.collaboration_prompt, **self.prompt_fields())
        check_template("task_prompt", self.task_prompt, task="")
        if "{task}" not in self.task_prompt:
            raise ValueError(f"task_prompt must contain {{task}}, got {self.task_prompt!r}")

    @property
    def names(self) -> list[str]:
        """Names of the workers."""
        if self.worker_names is not None:
            return list(self.worker_names)
        return [default_name(i) for i in range(self.num_workers)]

    def step_prefix_of(self, name: str, step: int = LATE_STEP) -> str:
        """Return the prefix of a worker's step, by default the longest one."""
        return self.step_prefix.format(name=name, step=step)

    @property
    def rows_per_prompt(self) -> int:
        """The number of workers."""
        return self.num_workers

    def max_kv_tokens(self, call: GenerationCall) -> int:
        """See `ParallelConfig.max_kv_tokens`. Assumes that no step is shorter than its `step_prefix`.

        A step is copied when it ends, with which a worker holds at most twice the tokens that it has generated, and two
        prefixes. No group exceeds the model's positions, unless prompt and `max_new_tokens` alone do.
        """
        count, new = call.count_tokens, call.max_new_tokens
        prefix = max(count(self.step_prefix_of(name, new)) for name in self.names)
        headers = (self.history_header, self.others_header, self.own_header, self.step_gap)
        steps = self.num_workers * (new // max(prefix, 1))  # after the first ones
        checks = min(steps, self.num_workers * new // self.redundancy_interval)
        workers = self.num_workers * (2 * (new + prefix) + count(self.separator))
        inserted = sum(map(count, headers)) + checks * count(self.redundancy_prompt) + count(self.finisher_prompt)
        group = inserted + workers + self.finisher_tokens
        positions = max_positions(call.model.config)
        longest = max(map(len, call.prompts)) + new
        if positions is not None and longest <= positions:
            group = min(group, positions + new + prefix)
        return call.prompt_tokens + call.num_rows * group

    def prompt_fields(self) -> dict[str, object]:
        """Return the fields of `collaboration_prompt`."""
        return {"names": _Names(self.names), "count": self.num_workers}

    def prepare(self, kwargs: Arguments) -> None:
        """Check the tokenizer and the streamer before `generate` prepares the call."""
        check_tokenizer_given(kwargs, self.mode, "reads text to find the ends of steps")
        streamer = kwargs.get("streamer")
        if isinstance(streamer, TextStreamer) and self.num_workers > 1:
            name = type(streamer).__name__
            raise ValueError(f"streamer must be a ParallelStreamer for {self.num_workers} workers, got a {name}")

    def make_run(self, call: GenerationCall) -> HogwildRun:
        """Return the run of a call."""
        return HogwildRun(self, call)


def hogwild_prompt(
    task: str | Chat, tokenizer: PreTrainedTokenizerBase, config: HogwildConfig | None = None, **settings: Any
) -> dict[str, torch.Tensor]:
    """Build the prompt of a task for several workers (Hogwild! Inference, section 3.3 and appendix C).

    The collaboration prompt precedes the task. If the chat template knows `<think>`, the prompt opens it, unless it
    ends with a block that is open or closed. Parameters, `chat_template_kwargs` included, and return value: see
    `build_prompt`.
    """
    return build_prompt(HogwildConfig, task, tokenizer, config, **settings)
