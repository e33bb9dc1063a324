"""Settings of hogwild, as its run, groups and workers read them. `HogwildConfig` describes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_parallel.generation.decoding.replay.config import ReplayConfig
from hf_parallel.generation.modes.final_answers import BOXED, check_pattern
from hf_parallel.generation.modes.hogwild.cache import LAYOUTS
from hf_parallel.generation.modes.hogwild.output import HogwildOutput
from hf_parallel.generation.modes.hogwild.tools import name_of
from hf_parallel.generation.settings import NOT_REMOTE, NOT_STORED
from hf_parallel.generation.validation import check_choice, check_int, check_template, check_text, check_texts

NAMES = ("Alice", "Bob", "Carol", "Dave", "Erin", "Frank", "Grace", "Heidi")
"""Default names of the first workers."""
MAX_WORKERS = 1000
"""Limit of `num_workers` that holds its checks below a second."""
LATE_STEP = 1234567890
"""Step number for checks of step prefixes: it has every digit, and more digits than any step of a call."""


class _Names(list[str]):
    """Names in a template: `{names}` lists them, `{names[i]}` is one of them for any `i`."""

    def __format__(self, spec: str) -> str:
        return format(", ".join(self), spec)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index % len(self))


@dataclass
class HogwildSettings(ReplayConfig[HogwildOutput]):
    """Settings of the workers: see `HogwildConfig`."""

    num_workers: int = 2
    layout: str = "combined"
    worker_names: Sequence[str] | None = None
    history_header: str = "\n\n### Finished steps of everyone\n\n"
    others_header: str = "\n\n### What the others are writing right now (unfinished)\n\n"
    own_header: str = "\n\n### What I am writing right now\n\n"
    own_headers: Sequence[str] | None = None
    step_gap: str = "\n\n"
    step_prefix: str = "**{name} [{step}]:**"
    separator: str = "\n\n"
    step_move: str = "rotate"
    openings: Sequence[str] | None = None
    sentence_ends: Sequence[str] = (".", "!", "?", '."', '!"', '?"', ".)", "\\]", "$$", "。", "！", "？")
    code_fence: str = "```"
    redundancy_prompt: str = "Let me check: is somebody else already doing what I am doing (yes/no)?"
    redundancy_interval: int = 1024
    tools: Sequence[Callable[..., Any]] | None = field(default=None, metadata=NOT_STORED)
    call_tags: Sequence[str] = ("<tool_call>", "</tool_call>")
    tool_result: str = "**{name}, called by {worker}:** {result}"
    draft_tokens: int = 0
    control_prompt: str = ""
    control_interval: int = 20
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
        super().validate()
        if self.prefetch:
            raise ValueError("prefetch must be None or False for hogwild, whose workers decode in lockstep, got True")
        for name in ("num_workers", "control_interval", "redundancy_interval"):
            check_int(name, getattr(self, name), at_least=1)
        if self.num_workers > MAX_WORKERS:
            raise ValueError(f"num_workers must be at most {MAX_WORKERS}, got {self.num_workers!r}")
        check_choice("layout", self.layout, LAYOUTS)
        headers = ("history_header", "others_header", "own_header", "step_gap")
        for name in (*headers, "code_fence", "redundancy_prompt", "control_prompt", "finisher_prompt", "separator"):
            check_text(name, getattr(self, name))
        for name, texts in (("own_headers", self.own_headers), ("openings", self.openings)):
            if texts is not None:
                check_texts(name, texts, may_be_empty=True)
                if len(texts) != self.num_workers:
                    raise ValueError(f"{name} must be {self.num_workers} texts, got {texts!r}")
        check_choice("step_move", self.step_move, ("rotate", "reencode"))
        settings = f"num_workers={self.num_workers}, layout={self.layout!r}, control_prompt={self.control_prompt!r}"
        if self.step_move != "rotate" and not self.has_steps:
            raise ValueError(f"step_move must be 'rotate' where no step moves, got {self.step_move!r} with {settings}")
        if self.control_prompt and (self.num_workers < 2 or self.layout == "interleaved"):
            raise ValueError(f"control_prompt needs two workers that see each other's unfinished text, got {settings}")
        if self.control_prompt and self.logits_cache is not None:
            raise ValueError("logits_cache must be None with a control_prompt, whose answers it does not hold")
        if self.tools is not None:
            if not all(map(callable, self.tools)) or len(set(map(name_of, self.tools))) != len(self.tools):
                raise ValueError(f"tools must be functions of different names, got {self.tools!r}")
            if self.control_prompt or self.logits_cache is not None:
                name = "control_prompt" if self.control_prompt else "logits_cache"
                raise ValueError(f"tools must be None with a {name}, got {self.tools!r}")
        check_int("draft_tokens", self.draft_tokens, at_least=0)
        if self.draft_tokens and (self.control_prompt or self.logits_cache is not None):
            name = "control_prompt" if self.control_prompt else "logits_cache"
            raise ValueError(f"draft_tokens must be 0 with a {name}, got {self.draft_tokens!r}")
        check_texts("call_tags", self.call_tags)
        if len(self.call_tags) != 2:
            raise ValueError(f"call_tags must be the texts that open and close a call, got {self.call_tags!r}")
        check_template("tool_result", self.tool_result, name="", worker="", result="")
        if not self.separator:
            raise ValueError(f"separator must be a non-empty string, got {self.separator!r}")
        check_texts("sentence_ends", self.sentence_ends)
        check_pattern("answer_pattern", self.answer_pattern)
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
        if self.worker_names:
            return list(self.worker_names)
        names = list(NAMES[: self.num_workers])
        names += [f"Worker {i + 1}" for i in range(len(names), self.num_workers)]
        return names

    @property
    def headers(self) -> list[str]:
        """Texts between the parts of a view: before the history, others' steps and own steps, and between others'."""
        return [self.history_header, self.others_header, *(self.own_headers or [self.own_header]), self.step_gap]

    @property
    def has_steps(self) -> bool:
        """Whether a finished step moves into the history; otherwise each worker has one growing text."""
        return self.layout != "contiguous" and not self.control_prompt

    def step_prefix_of(self, name: str, step: int = LATE_STEP) -> str:
        """Return the prefix of a worker's step, by default the longest one."""
        return self.step_prefix.format(name=name, step=step)

    @property
    def rows_per_prompt(self) -> int:
        return self.num_workers

    def prompt_fields(self) -> dict[str, object]:
        """Return the fields of `collaboration_prompt`."""
        return {"names": _Names(self.names), "count": self.num_workers}
