"""Run: a mode and its settings in a sweep. Finisher: asks every mode for its final answer in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hf_parallel.evaluation.tasks.base import Problem
from hf_parallel.generation.arguments import GENERATION_SETTINGS
from hf_parallel.generation.config import ParallelConfig, check_setting_names, make_config
from hf_parallel.generation.modes import BOXED, NO_MODE, HogwildConfig
from hf_parallel.generation.prompts import check_template_kwargs
from hf_parallel.generation.registry import MODES
from hf_parallel.generation.validation import check_int, check_text, json_error

RESERVED = (
    *("seed", "max_new_tokens", "max_length", "num_return_sequences", "return_dict_in_generate"),
    *("streamer", "tokenizer", "parallel_config", "generation_mode"),
)
"""Settings that the sweep chooses."""
TEMPLATE = "chat_template_kwargs"
INSTRUCTION = "instruction"
"""Settings for the prompt: see `build_prompt` and `Run`."""
DRAFT = Path(__file__).with_name("chain_of_draft.txt").read_text(encoding="utf-8")
INSTRUCTIONS = {"chain_of_draft": DRAFT} | {name: text for name in MODES if (text := make_config(name).prompt.rules())}
"""Instructions by name: Chain of Draft (Xu et al., 2025), in our own words, and the rules of modes that have some."""
ANSWERS_ITSELF = {"finisher_tokens": 0}
"""Settings that disable a mode's own early finisher: the same finisher follows all modes."""


@dataclass(frozen=True)
class Run:
    """A mode and its settings, one entry of a sweep.

    Parameters
    ----------
    mode : str, optional
        Default: plain `generate`, as with "none".
    settings : mapping
        JSON-serializable settings of the mode and of `generate`; `chat_template_kwargs`: see `build_prompt`.
        `instruction`: text that follows the task, or its name in `INSTRUCTIONS`.

    Raises
    ------
    ValueError
        For an unknown mode, unknown or invalid settings, and settings that the sweep chooses (`RESERVED`).
    """

    mode: str | None = None
    settings: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode == NO_MODE:
            object.__setattr__(self, "mode", None)
        cls = None if self.mode is None else type(make_config(self.mode))
        for name, value in self.settings.items():
            if name in RESERVED:
                raise ValueError(f"{name}={value!r} cannot be given: a sweep chooses {', '.join(RESERVED)} itself")
            reason = json_error(value)
            if reason:
                raise ValueError(f"{name}={value!r} cannot be stored in the results: {reason}")
        check_setting_names(cls, self.settings, (*GENERATION_SETTINGS, TEMPLATE, INSTRUCTION))
        check_template_kwargs(self.settings.get(TEMPLATE))
        self.task("")
        if cls is not None and cls.traits.needs_logits_cache:
            raise ValueError(f"{self.mode} cannot be swept: a logits cache makes samples of a problem depend on order")
        self.config()

    def config(self, answer_pattern: str | None = None) -> ParallelConfig | None:
        """Return the config of the mode, for problems with this pattern of a final answer; None without a mode."""
        if self.mode is None:
            return None
        fields = type(make_config(self.mode)).fields()
        chosen = {**ANSWERS_ITSELF, **({} if answer_pattern is None else {"answer_pattern": answer_pattern})}
        return make_config(
            self.mode,
            {name: value for name, value in self.settings.items() if name in fields},
            {name: value for name, value in chosen.items() if name in fields},
        )

    def generation(self) -> dict[str, object]:
        """Return the settings of `generate`."""
        config = self.config()
        excluded = {TEMPLATE, INSTRUCTION}
        if config is not None:
            excluded.update(config.fields())
        return {name: value for name, value in self.settings.items() if name not in excluded}

    def task(self, prompt: str) -> str:
        """Return the prompt of a problem, followed by the instruction."""
        check_text(INSTRUCTION, self.settings.get(INSTRUCTION, ""))
        setting = str(self.settings.get(INSTRUCTION, ""))
        text = INSTRUCTIONS.get(setting, setting)
        if len(text.split()) == 1:
            raise ValueError(f"instruction must be several words or one of {', '.join(INSTRUCTIONS)}, got {setting!r}")
        return f"{prompt}\n\n{text}" if text else prompt


@dataclass(frozen=True)
class Finisher:
    """Early finisher: asks for the final answer after the text so far.

    Parameters
    ----------
    tokens : int, optional
        Maximum number of tokens of its answer, which do not count toward the budget. 0: no finisher. The paper uses 16
        for a number, 64 for a formula and 1024 for a program. Default: the problem's `finisher_tokens`.
    prompt : str, optional
        Text that its answer continues. Default: the problem's `finisher_prompt`, or a text for its `answer_pattern`.
    preset : str, optional
        Preset of `hogwild` with the text for answers in boxes: "paper" has the sentence of the paper.
    """

    tokens: int | None = None
    prompt: str | None = None
    preset: str | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None:
            check_int("the finisher's tokens", self.tokens, at_least=0)
        if self.prompt is not None:
            check_text("prompt", self.prompt)
        HogwildConfig(preset=self.preset)  # checks it

    def tokens_for(self, problem: Problem) -> int:
        """Return the maximum number of tokens of the answer to a problem."""
        return problem.finisher_tokens if self.tokens is None else self.tokens

    def prompt_for(self, problem: Problem) -> str:
        """Return the text that the answer to a problem continues; empty without a finisher."""
        if not self.tokens_for(problem):
            return ""
        if self.prompt is not None or problem.finisher_prompt:
            return self.prompt or problem.finisher_prompt
        if not problem.answer_pattern:
            return ""
        if problem.answer_pattern == BOXED:
            return HogwildConfig(preset=self.preset).finisher_prompt
        hurry = HogwildConfig.finisher_prompt.partition(", the")[0]
        return hurry + ", I now give the final answer, in the form that is asked for:\n\n"


def check_sweep(
    problems: Sequence[Problem],
    runs: Sequence[Run],
    budgets: Sequence[int],
    generation: Mapping[str, object],
    seed: int,
    samples: int,
    concurrent: int,
) -> None:
    """Raise `ValueError` for invalid arguments of `sweep`."""
    arguments: dict[str, Sequence[object]] = {"problems": problems, "runs": runs, "budgets": budgets}
    for name, values in arguments.items():
        if not values:
            raise ValueError(f"{name} must not be empty")
    check_int("samples", samples, at_least=1)
    check_int("concurrent", concurrent, at_least=1)
    check_int("a budget", min(budgets), at_least=1)
    check_int("seed", seed, at_least=0)
    Run(None, generation)  # checks the names
    patterns = {problem.answer_pattern for problem in problems}
    for run in runs:
        configs = [run.config(pattern) for pattern in patterns]
        if {**generation, **run.settings}.get("do_sample") is not False:
            continue
        equal = ""
        if samples > 1:
            equal = "samples of a problem"
        elif any(map(_votes, configs)):
            equal = "answers that vote"
        if equal:
            raise ValueError(f"{equal} would be equal with greedy decoding (do_sample=False): {run}")


def _votes(config: ParallelConfig | None) -> bool:
    """Whether the rows of a mode are several answers to a problem, which vote."""
    return config is not None and config.rows.vote and config.max_rows_per_prompt > 1
