"""`generation_mode="skeleton_of_thought"`: an outline, its points in parallel, a conclusion (Ning et al., 2024).

A baseline for modes whose rows see each other: here, points do not see each other, and only the conclusion sees all of
them. The conclusion follows Hogwild! Inference, section 4.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import regex

from hf_parallel.generation.arguments import check_tokenizer_given, encode
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.caller import warn_sequential
from hf_parallel.generation.config import Generated, ModeRows, ModeTraits, RowPlace
from hf_parallel.generation.decoding.replay.config import ReplayConfig
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.modes.final_answers import check_pattern, find_matches
from hf_parallel.generation.modes.stages import (
    CompletionRow,
    StagedRun,
    check_no_prompt_relative_settings,
    check_vocabulary,
)
from hf_parallel.generation.outputs import ALWAYS, ParallelOutput
from hf_parallel.generation.presets import PRESETS
from hf_parallel.generation.sampling.rng import RowRNG, make_rngs
from hf_parallel.generation.settings import NOT_REMOTE, Arguments
from hf_parallel.generation.validation import check_int, check_template, check_text
from hf_parallel.transcript.sections import TranscriptStyle

POINT_LENGTH = 1000
"""Number of characters of an outline's line to search for a point."""
_FIELD = re.compile(r"\{\w+[^{}]*\}")
_OWN_FIELD = re.compile(r"\{(?:number|point)\b")
"""Field of a template, and field that differs between points."""


class SkeletonRows(ModeRows["SkeletonOfThoughtConfig"]):
    """Points, which do not see each other, and a row for outline and conclusion."""

    style = TranscriptStyle("point", "outline and conclusion", is_one_answer=True)

    def place(self, row: int, num_prompts: int) -> RowPlace:
        """See `ModeRows.place`. Index 0 is outline and conclusion, which span the columns of all points."""
        index, prompt = divmod(row, num_prompts)
        return RowPlace(prompt, index, index - 1 if index else None)

    def name(self, index: int) -> str:
        return f"Point {index}" if index else "Outline"

    def step_name(self, index: int, step: int, text: str) -> str:
        if step == 1:
            return self.name(index)
        return "Conclusion" if text else "Answer"


@dataclass
class SkeletonOfThoughtConfig(ReplayConfig["SkeletonOfThoughtOutput"]):
    r"""An outline whose points are generated in parallel. `max_new_tokens` is the budget of each part.

    The outline continues the prompt and `outline_prompt`. Each point continues the prompt, `point_prompt` and
    `point_heading`. The conclusion continues the prompt, all headings and points, and `conclusion_prompt`. The answer
    is everything after the prompt. If the outline has fewer than `min_points` points, the answer is generated without
    an outline, as by plain `generate`, and `fallback` in the output says why.

    Parameters
    ----------
    outline_prompt : str
        Text that asks for an outline.
    outline_start : str
        Beginning of the outline.
    point_pattern : str
        Regular expression of a line with a point, which is the first group.
    min_points, max_points : int
        Limits of the number of points. Repeated points and points beyond the maximum are dropped.
    point_prompt : str
        Text that asks for one point; `{skeleton}` (all points, numbered), `{number}` and `{point}` are filled in.
    point_heading : str
        Beginning of a point, after `point_prompt` and in the answer; `{number}` and `{point}` are filled in.
    point_end : str
        Text that ends a point, unless only whitespace precedes it. Empty: points end as in plain `generate`.
    point_gap : str
        Text between points and before the conclusion. If a point ends with a part of it, only the rest is added.
    conclusion_prompt : str
        Text that asks for the conclusion or begins it.
    outline_tokens, point_tokens, conclusion_tokens : int, optional
        Token budgets of the outline, of each point and of the conclusion. Default: `max_new_tokens`, also the budget of
        an answer without an outline. `conclusion_tokens=0`: no conclusion.

    Notes
    -----
    A `ParallelStreamer` receives outline and conclusion of prompt `p` as row `p`, and point `k` (counted from 1) as row
    `p + k * batch`. `put` receives the returned tokens once they are known.
    """

    mode: ClassVar[str] = "skeleton_of_thought"
    traits = ModeTraits(
        rows=SkeletonRows,
        keeps_states=True,
        streams_text=True,
        streams_tokens="at_end",
        presets=PRESETS["skeleton_of_thought"],
    )

    outline_prompt: str = (
        "\n\nThe answer has several parts. Here is a list of their names, one short name in each line, without any "
        "details:\n\n"
    )
    outline_start: str = "1."
    point_pattern: str = field(default=r"\s*\d+[.):]\s*\**([^\s*].*?)[\s:*]*$", metadata=NOT_REMOTE)
    min_points: int = 2
    max_points: int = 10
    point_prompt: str = (
        "\n\nThe answer has these points:\n\n{skeleton}\n\nNow one of them in two or three sentences, and none of the "
        "others.\n\n"
    )
    point_heading: str = "{number}. {point}:"
    point_end: str = "\n"
    point_gap: str = "\n\n"
    conclusion_prompt: str = "All points taken together:"
    outline_tokens: int | None = None
    point_tokens: int | None = None
    conclusion_tokens: int | None = None

    def validate(self) -> None:
        super().validate()
        for name in ("outline_prompt", "outline_start", "point_end", "point_gap", "conclusion_prompt"):
            check_text(name, getattr(self, name))
        check_template("point_prompt", self.point_prompt, skeleton="1. a", number=1, point="a")
        check_template("point_heading", self.point_heading, number=1, point="a")
        check_pattern("point_pattern", self.point_pattern)
        if not regex.compile(self.point_pattern).groups:
            raise ValueError(f"point_pattern must have a group, which is the point, got {self.point_pattern!r}")
        check_int("min_points", self.min_points, at_least=1)
        check_int("max_points", self.max_points, at_least=self.min_points)
        for name, least in (("outline_tokens", 1), ("point_tokens", 1), ("conclusion_tokens", 0)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=least)

    def prepare(self, kwargs: Arguments) -> None:
        """Check that a tokenizer is given, and no `prefix_allowed_tokens_fn`."""
        check_tokenizer_given(kwargs, self.mode)
        if kwargs.get("prefix_allowed_tokens_fn") is not None:
            raise ValueError(f"prefix_allowed_tokens_fn cannot be honored by {self.mode}: its rows are not prompts")

    def make_run(self, call: GenerationCall) -> SkeletonRun:
        return SkeletonRun(self, call)

    @property
    def max_rows_per_prompt(self) -> int:
        return self.max_points

    def max_states(self, call: GenerationCall) -> int:
        """See `ParallelConfig.max_states`. Outline, points and conclusion are prompts of a row each."""
        return call.num_rows * 4 * (self.max_points + 2)

    def max_kv_tokens(self, call: GenerationCall) -> int:
        """See `ParallelConfig.max_kv_tokens`. The conclusion reads all points again."""
        count = call.count_tokens
        new = call.max_new_tokens
        n = self.max_points
        outline = new if self.outline_tokens is None else self.outline_tokens
        point = new if self.point_tokens is None else self.point_tokens
        conclusion = new if self.conclusion_tokens is None else self.conclusion_tokens
        titles = count(self.outline_start) + outline  # of all points together
        numbers = "".join(f"{number}. \n" for number in range(1, n + 1))
        skeleton = count(numbers) + titles

        def fixed(text: str) -> int:
            return count(_FIELD.sub("", text))

        template = self.point_prompt + self.point_heading
        shared = _OWN_FIELD.split(template)[0]  # stored once
        per_point = template[len(shared) :]
        parts = fixed(shared) + shared.count("{skeleton") * skeleton
        parts += per_point.count("{point") * titles + n * point
        # 4: a number, a token that is not shared
        parts += n * (fixed(per_point) + 4 + per_point.count("{skeleton") * skeleton)
        if conclusion:
            headings = n * (fixed(self.point_heading) + 3 + count(self.point_gap))
            headings += titles * self.point_heading.count("{point")
            parts += headings + n * point + count(self.conclusion_prompt) + conclusion
        begin = count(self.outline_prompt + self.outline_start)
        return call.prompt_tokens + call.num_rows * (begin + outline + max(parts, new))

    def read_points(self, outline: str, truncated: bool = False) -> list[str]:
        """Return the points of an outline, ignoring the last line of a truncated one."""
        lines = outline.split("\n")
        if truncated:
            lines.pop()
        points = dict.fromkeys(filter(None, map(self._point, lines)))
        return list(points)[: self.max_points]

    def outline_ends(self, outline: str) -> bool:
        """Return whether an outline is complete: it has `max_points` points, repeats one, or a paragraph follows."""
        points: list[str] = []
        blank = False
        for line in outline.split("\n")[:-1]:
            point = self._point(line)
            if point in points or (points and not point and blank and line[:1].isalpha()):
                return True
            points += [point] if point else []
            blank = not line.strip()
        return len(points) >= self.max_points

    def _point(self, line: str) -> str:
        """Return the point in a line of an outline, or an empty string."""
        matches = find_matches(self.point_pattern, line[:POINT_LENGTH])
        if not matches or matches[0].start() != 0:
            return ""
        return (matches[0].group(1) or "").strip()


class SkeletonRun(StagedRun):
    """One call of the mode: a stage of all outlines, one of all points, and one of all conclusions."""

    def __init__(self, config: SkeletonOfThoughtConfig, call: GenerationCall) -> None:
        self.config = config
        generation_config = call.generation_config
        check_no_prompt_relative_settings(call, config.mode)
        for name in ("output_scores", "output_logits"):
            if generation_config.return_dict_in_generate and getattr(generation_config, name):
                raise ValueError(f"{name} cannot be honored by {config.mode}: an answer is generated by several rows")
        point = config.point_prompt.format(skeleton="1. a", number=1, point="a")
        heading = config.point_heading.format(number=1, point="a")
        texts = [config.outline_prompt + config.outline_start, point + heading, config.point_gap]
        check_vocabulary(call, [*texts, config.conclusion_prompt])
        super().__init__(config, call)
        rngs = make_rngs(config.seed, call.num_rows)
        self.answers = []
        for row in range(call.num_rows):
            rng = None if rngs is None else rngs[row]
            self.answers.append(SkeletonAnswer(self, row, rng))

    def generate(self) -> Steps[Generated]:
        """Generate. Return a tensor `int64 [batch, length]` or a `SkeletonOfThoughtOutput`."""
        answers = self.answers
        outlines = [answer.outline for answer in self.answers]
        yield from self._run_stage([[outline] for outline in outlines])
        yield from self._run_stage([answer.point_rows() for answer in answers])
        yield from self._run_stage([answer.conclusion_rows() for answer in answers])
        lasts = [answer.add_last() for answer in answers]
        fallback = [answer.fallback for answer in answers]
        output = self.output(
            SkeletonOfThoughtOutput,
            [answer.tokens for answer in answers],
            [answer.log_probs for answer in answers],
            texts=[answer.text for answer in answers],
            outlines=[outline.prefix + outline.text for outline in outlines],
            points=[answer.points for answer in answers],
            conclusions=["" if row is None else row.prefix + row.text for row in lasts],
            fallback=fallback,
        )
        warn_sequential(fallback)
        return output

    def _run_stage(self, groups: Sequence[Sequence[CompletionRow]]) -> Steps[None]:
        """Generate the rows of each answer, which continue the RNG of the answer."""
        if any(groups):
            rngs: list[RowRNG] = []
            for answer, rows in zip(self.answers, groups, strict=True):
                if answer.rng is not None:
                    answer.rng.skip()  # so that two stages have different random numbers
                    rngs += answer.rng.fork(len(rows))
            yield from self.run_stage([row for rows in groups for row in rows], seed=rngs or None)


class SkeletonAnswer:
    """Answer to one prompt: its text and tokens so far, and their log-probabilities (NaN: not sampled)."""

    def __init__(self, run: SkeletonRun, prompt: int, rng: RowRNG | None) -> None:
        self.run = run
        self.config = run.config
        self.prompt = prompt
        self.rng = rng
        self.fallback: str | None = None
        self.points: list[SkeletonPoint] = []
        self.text = ""
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self._rows: list[CompletionRow] = []  # of the points
        self._last: CompletionRow | None = None  # the conclusion, or an answer without outline
        config = self.config
        start = self.config.outline_start
        suffix = self._encode(config.outline_prompt + start)
        self.outline = self._completion(0, suffix, config.outline_tokens, start, self._outline_ends)

    def point_rows(self) -> list[CompletionRow]:
        """Return a row for each point of the outline, or one for the whole answer if there are too few."""
        config = self.config
        outline = self.outline
        titles = config.read_points(outline.prefix + outline.text, outline.truncated)
        if len(titles) < config.min_points:
            self.fallback = f"the outline has {len(titles)} of at least {config.min_points} points"
            self._last = self._completion(0, [], None)
            return [self._last]
        skeleton = "\n".join(f"{number}. {title}" for number, title in enumerate(titles, start=1))
        for number, title in enumerate(titles, start=1):
            heading = config.point_heading.format(number=number, point=title)
            prompt = config.point_prompt.format(skeleton=skeleton, number=number, point=title) + heading
            row = self._completion(number, self._encode(prompt), config.point_tokens, heading, self._point_ends)
            self._rows.append(row)
            self.points.append(SkeletonPoint(number, title, "", row.tokens, row.prompt.tolist()))
        return self._rows

    def conclusion_rows(self) -> list[CompletionRow]:
        """Add the points to the answer. Return the row of the conclusion, if any."""
        config = self.config
        if self.fallback is not None:
            return []
        for point, row in zip(self.points, self._rows, strict=True):
            point.text = row.text
            self._add(row.prefix)
            sampled = zip(row.tokens, row.log_probs, strict=True)
            log_probs = [value for token, value in sampled if token not in row.detokenizer.hidden]
            self._add(row.text, row.detokenizer.visible, log_probs)
            if config.conclusion_tokens != 0 or row is not self._rows[-1]:
                self._add(_missing_end(row.text, config.point_gap))
        if config.conclusion_tokens == 0:
            return []
        self._add(config.conclusion_prompt)
        self._last = self._completion(0, self.tokens, config.conclusion_tokens, config.conclusion_prompt)
        return [self._last]

    def add_last(self) -> CompletionRow | None:
        """Add the conclusion, or the answer without an outline, to the answer. Return the conclusion, if any."""
        if self._last is not None:
            self._add(self._last.text, self._last.tokens, self._last.log_probs)
        return self._last if self.fallback is None else None

    def _add(self, text: str, tokens: Sequence[int] | None = None, log_probs: Sequence[float] = ()) -> None:
        """Append a text; without `tokens` one that was not sampled."""
        if tokens is None:
            tokens = self._encode(text)
        self.text += text
        self.tokens += tokens
        self.log_probs += log_probs[: len(tokens)] or [math.nan] * len(tokens)

    def _outline_ends(self, text: str) -> bool:
        return self.config.outline_ends(self.config.outline_start + text)

    def _point_ends(self, text: str) -> bool:
        return bool(self.config.point_end) and self.config.point_end in text.lstrip()

    def _encode(self, text: str) -> list[int]:
        return encode(self.run.call.tokenizer, text) if text else []

    def _completion(self, point: int, *arguments: Any) -> CompletionRow:
        """Return a row for a point, or for another text if `point` is 0; see `StagedRun.completion`."""
        number = self.prompt + point * self.run.call.num_rows
        return self.run.completion(self.prompt, number, *arguments)


def _missing_end(text: str, end: str) -> str:
    """Return the rest of `end` that a text lacks, which may end within it."""
    for size in range(len(end), 0, -1):
        if text.endswith(end[:size]):
            return end[size:]
    return end


@dataclass
class SkeletonPoint:
    """A point of an outline and its text.

    `prompt` has all tokens before the point, `tokens` the generated ones, including an end-of-sequence token.
    """

    number: int
    title: str
    text: str
    tokens: list[int]
    prompt: list[int]


@dataclass
class SkeletonOfThoughtOutput(ParallelOutput):
    """Texts of all stages.

    Attributes
    ----------
    sequences : int64 [batch, length]
        Each prompt with its answer: headings, points and conclusion.
    """

    item_names: ClassVar[Mapping[str, str]] = {"texts": "text", "outlines": "outline", "conclusions": "conclusion"}

    texts: list[str] = ALWAYS
    """The answers."""
    outlines: list[str] = ALWAYS
    """Per prompt the outline, `outline_start` included."""
    points: list[list[SkeletonPoint]] = ALWAYS
    """Per prompt the points; empty without an outline."""
    conclusions: list[str] = ALWAYS
    """Per prompt the conclusion, `conclusion_prompt` included; empty if there is none."""
    fallback: list[str | None] = ALWAYS
    """Per prompt why the answer has no outline, or None if it has one."""

    def notes(self, prompt: int) -> list[tuple[str, str]]:
        texts = {"Answer": self.texts[prompt], "Without an outline": self.fallback[prompt]}
        return [(label, text) for label, text in texts.items() if text]
