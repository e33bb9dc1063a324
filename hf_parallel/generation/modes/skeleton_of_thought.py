"""`generation_mode="skeleton_of_thought"`: an outline, its points at the same time, a conclusion (Ning et al., 2024).

As a baseline for modes whose rows see each other: here no point sees another one until all are written. With a limited
number of workers and with a conclusion as in Hogwild! Inference, section 4.1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from hf_parallel.detokenizer import IncrementalDetokenizer
from hf_parallel.generation.arguments import check_tokenizer_given, encode
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import RowPlace, check_int, check_template, check_text
from hf_parallel.generation.modes.final_answers import check_pattern
from hf_parallel.generation.modes.stages import (
    Stage,
    TextRequest,
    check_vocabulary,
    give_back,
    refuse_what_counts_from_the_prompt,
)
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.prefill import tree_of
from hf_parallel.generation.resampling.config import ReplayConfig
from hf_parallel.generation.rng import RowRNG, make_rngs
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.transcript.sections import TranscriptStyle


@dataclass
class SkeletonOfThoughtConfig(ReplayConfig):
    r"""An outline whose points are written at the same time. `max_new_tokens` is the budget of each text, not of all.

    The model writes an outline behind the prompt and `outline_prompt`; each point behind the prompt, `point_prompt` and
    `point_heading`; a conclusion behind the prompt, all headings and points, and `conclusion_prompt`. The answer is
    what stands behind the prompt in the end. An outline of fewer than `min_points` points is put aside: the model
    answers the prompt as it would have without this mode, and the output says so.

    Parameters
    ----------
    outline_prompt : str
        Asks for an outline.
    outline_start : str
        Begins it.
    point_pattern : str
        Regular expression of a line of the outline that is a point; its first group is the point.
    min_points, max_points : int
        Fewer are no outline; more are left out. A point that is named twice counts once.
    point_prompt : str
        Asks for one point; `{skeleton}` (all points, numbered), `{number}` and `{point}` are filled in.
    point_heading : str
        Begins the point, there and in the answer; `{number}` and `{point}` are filled in.
    point_end : str
        Ends a point where it follows on some text. Empty: nothing does but what ends every text.
    point_gap : str
        Behind each point in the answer, as far as it does not end so; without a conclusion, not behind the last.
    point_workers : int, optional
        Rows that write the points of a prompt; one whose point has ended takes the next. Default: one for each point.
    conclusion_prompt : str
        Asks for the conclusion, or begins it.
    outline_tokens, point_tokens, conclusion_tokens : int, optional
        Tokens that an outline, each point and the conclusion may have; default: `max_new_tokens`, as has an answer
        without outline. `conclusion_tokens=0`: there is no conclusion.

    Notes
    -----
    A `ParallelStreamer` hears outline and conclusion of prompt `p` as row `p`, and point `k` (from 1 on) as row
    `p + k * batch`. `put` gets the tokens that are returned, when they are known.
    """

    mode: ClassVar[str] = "skeleton_of_thought"
    streams_text: ClassVar[bool] = True
    streams_tokens: ClassVar[str] = "at_end"

    outline_prompt: str = (
        "\n\nThe answer has several parts. Here is a list of their names, one short name in each line, without any "
        "details:\n\n"
    )
    outline_start: str = "1."
    point_pattern: str = r"\s*\d+[.):]\s*\**([^\s*].*?)[\s:*]*$"
    min_points: int = 2
    max_points: int = 10
    point_prompt: str = (
        "\n\nThe answer has these points:\n\n{skeleton}\n\nNow one of them in two or three sentences, and none of the "
        "others.\n\n"
    )
    point_heading: str = "{number}. {point}:"
    point_end: str = "\n"
    point_gap: str = "\n\n"
    point_workers: int | None = None
    conclusion_prompt: str = "All points taken together:"
    outline_tokens: int | None = None
    point_tokens: int | None = None
    conclusion_tokens: int | None = None

    def validate(self) -> None:
        """Check every setting; see `ParallelConfig.validate`."""
        super().validate()
        for name in ("outline_prompt", "outline_start", "point_end", "point_gap", "conclusion_prompt"):
            check_text(name, getattr(self, name))
        check_template("point_prompt", self.point_prompt, skeleton="1. a", number=1, point="a")
        check_template("point_heading", self.point_heading, number=1, point="a")
        check_pattern("point_pattern", self.point_pattern)
        if not re.compile(self.point_pattern).groups:
            raise ValueError(f"point_pattern must have a group, which is the point, got {self.point_pattern!r}")
        check_int("min_points", self.min_points, at_least=1)
        check_int("max_points", self.max_points, at_least=self.min_points)
        for name, least in (("point_workers", 1), ("outline_tokens", 1), ("point_tokens", 1), ("conclusion_tokens", 0)):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=least)

    def prepare(self, kwargs: dict[str, Any]) -> None:
        """Look whether the tokenizer is there and works, before anything is prepared."""
        check_tokenizer_given(kwargs, self.mode)
        if kwargs.get("prefix_allowed_tokens_fn") is not None:
            raise ValueError(f"prefix_allowed_tokens_fn cannot be honoured by {self.mode}: its rows are no prompts")

    def place(self, row: int, num_prompts: int) -> RowPlace:
        """See `ParallelConfig.place`. Index 0 is outline and conclusion, which span all points."""
        index, prompt = divmod(row, num_prompts)
        return RowPlace(prompt, index, index - 1 if index else None)

    def row_name(self, index: int) -> str:
        """Name of the outline or of a point."""
        return f"Point {index}" if index else "Outline"

    @property
    def transcript_style(self) -> TranscriptStyle:
        """Points do not see each other."""
        return TranscriptStyle("point", "outline and conclusion")

    def run(self, call: GenerationCall) -> Any:
        """Write all outlines, then all points, then all conclusions."""
        self._check_call(call)
        cache, stats = tree_of(call), GenerationStats()
        noise = make_rngs(self.seed, call.num_rows)
        drafts = [Draft(self, call, row, None if noise is None else noise[row]) for row in range(call.num_rows)]
        stages = ((Draft.begin, None), (Draft.go_on, self.point_workers), (Draft.conclude, None))
        for asked, workers in stages:
            groups = [asked(draft) for draft in drafts]
            if any(groups):
                seeds = [seed for draft, group in zip(drafts, groups, strict=True) for seed in draft.seeds(group)]
                Stage(self, call, cache, groups, workers, seed=seeds or None, stats=stats).run()
        return give_back(
            call,
            cache,
            [draft.tokens for draft in drafts],
            stats,
            SkeletonOfThoughtOutput,
            texts=[draft.text for draft in drafts],
            outlines=[draft.outline.opening + draft.outline.text.text for draft in drafts],
            points=[draft.points for draft in drafts],
            conclusions=[draft.conclusion for draft in drafts],
            fallback=[draft.fallback for draft in drafts],
        )

    def read_points(self, outline: str, cut: bool = False) -> list[str]:
        """The points of an outline; if it was cut off, its last line is none."""
        lines = outline.split("\n")
        points = filter(None, map(self._point, lines[:-1] if cut else lines))
        return list(dict.fromkeys(points))[: self.max_points]

    def outline_ends(self, outline: str) -> bool:
        """Whether an outline is complete.

        It is when it has all points that it may, when it names one again, or when a paragraph follows.
        """
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
        """The point that a line of an outline is, or nothing."""
        match = re.match(self.point_pattern, line)
        return (match.group(1) or "").strip() if match else ""

    def _check_call(self, call: GenerationCall) -> None:
        given = call.generation_config
        refuse_what_counts_from_the_prompt(call, self.mode)
        for name in ("output_scores", "output_logits"):
            if given.return_dict_in_generate and getattr(given, name):
                raise ValueError(f"{name} cannot be honoured by {self.mode}: one answer is written by several rows")
        names = {"skeleton": "1. a", "number": 1, "point": "a"}
        asks = (self.point_prompt.format(**names), self.point_heading.format(number=1, point="a"))
        check_vocabulary(
            call, [self.outline_prompt + self.outline_start, "".join(asks), self.point_gap, self.conclusion_prompt]
        )


class Draft:
    """The answer to one prompt, as it comes about: `begin`, `go_on` and `conclude` say what is to be written next."""

    def __init__(self, config: SkeletonOfThoughtConfig, call: GenerationCall, row: int, noise: RowRNG | None) -> None:
        self.config, self.call, self.row, self.noise = config, call, row, noise
        self.fallback: str | None = None
        self.titles: list[str] = []
        self.pieces: list[tuple[str, list[int]]] = []  # texts of the answer, with their tokens
        self.written: list[TextRequest] = []  # the points
        self.last: TextRequest | None = None  # the conclusion, or an answer without an outline

    def begin(self) -> list[TextRequest]:
        """The outline."""
        config = self.config

        def complete(text: str) -> bool:
            return config.outline_ends(config.outline_start + text)

        asks = self._encode(config.outline_prompt + config.outline_start)
        self.outline = self._passage(0, asks, config.outline_tokens, config.outline_start, complete)
        return [self.outline]

    def go_on(self) -> list[TextRequest]:
        """The points of the outline, or a whole answer where there are none."""
        config, outline = self.config, self.outline
        self.titles = config.read_points(outline.opening + outline.text.text, outline.cut)
        if len(self.titles) < config.min_points:
            count, self.titles = len(self.titles), []
            self.fallback = f"the outline has {count} of at least {config.min_points} points"
            self.last = self._passage(0, [], None)
            return [self.last]
        skeleton = "\n".join(f"{number}. {title}" for number, title in enumerate(self.titles, start=1))
        for number, title in enumerate(self.titles, start=1):
            heading = self._heading(number)
            asks = self._encode(config.point_prompt.format(skeleton=skeleton, number=number, point=title) + heading)
            self.written.append(self._passage(number, asks, config.point_tokens, heading, self._point_ends))
        return self.written

    def conclude(self) -> list[TextRequest]:
        """The conclusion, if there is to be one."""
        config = self.config
        if self.fallback is not None:
            return []
        concluding = config.conclusion_tokens != 0
        for number, passage in enumerate(self.written, start=1):
            self._append(self._heading(number))
            self.pieces.append((passage.text.text, passage.text.tokens))
            if concluding or number < len(self.written):
                self._append(_missing(passage.text.text, config.point_gap))
        if not concluding:
            return []
        self._append(config.conclusion_prompt)
        read = [token for _, tokens in self.pieces for token in tokens]
        self.last = self._passage(0, read, config.conclusion_tokens, config.conclusion_prompt)
        return [self.last]

    @property
    def tokens(self) -> list[int]:
        """The answer."""
        last = [] if self.last is None else self.last.tokens
        return [token for _, tokens in self.pieces for token in tokens] + last

    @property
    def text(self) -> str:
        """The answer, as text."""
        return "".join(text for text, _ in self.pieces) + ("" if self.last is None else self.last.text.text)

    @property
    def conclusion(self) -> str:
        """What the model wrote in the end, its prompt included; empty without a conclusion."""
        if self.last is None or self.fallback is not None:
            return ""
        return self.last.opening + self.last.text.text

    @property
    def points(self) -> list[SkeletonPoint]:
        """The points with what was written about them."""
        return [
            SkeletonPoint(number, title, passage.text.text, list(passage.tokens), passage.prompt.tolist())
            for number, (title, passage) in enumerate(zip(self.titles, self.written, strict=True), start=1)
        ]

    def seeds(self, passages: Sequence[TextRequest]) -> list[RowRNG]:
        """A source of randomness for each passage: what one draws does not hang on others, nor on workers."""
        if self.noise is None:
            return []
        self.noise.skip()  # or a stage would draw what the one before it drew
        return self.noise.fork(len(passages))

    def _heading(self, number: int) -> str:
        return self.config.point_heading.format(number=number, point=self.titles[number - 1])

    def _point_ends(self, text: str) -> bool:
        return bool(self.config.point_end) and self.config.point_end in text.lstrip()

    def _append(self, text: str) -> None:
        self.pieces.append((text, self._encode(text)))

    def _encode(self, text: str) -> list[int]:
        return encode(self.call.tokenizer, text) if text else []

    def _passage(
        self,
        point: int,
        asks: list[int],
        limit: int | None,
        opening: str = "",
        until: Callable[[str], bool] | None = None,
    ) -> TextRequest:
        """What is asked for behind the prompt: a point, or with `point=0` any other text."""
        call = self.call
        prompt = np.concatenate((call.prompts[self.row], np.array(asks, np.int64)))
        budget = call.max_new_tokens if limit is None else limit
        row = self.row + point * call.num_rows
        return TextRequest(prompt, budget, IncrementalDetokenizer(call.tokenizer), row, opening, until)


def _missing(text: str, end: str) -> str:
    """What a text lacks to end with `end`."""
    return next(end[i:] for i in range(len(end), -1, -1) if text.endswith(end[:i]))


@dataclass
class SkeletonPoint:
    """A point of an outline and what was written about it.

    `prompt` are all tokens before those of the point, `tokens` all that were generated, one that ended it included.
    """

    number: int
    title: str
    text: str
    tokens: list[int]
    prompt: list[int]


@dataclass
class SkeletonOfThoughtOutput(ParallelOutput):
    """What was written, stage by stage.

    Attributes
    ----------
    sequences : int64 [batch, length]
        Each prompt with its answer: headings, points and conclusion.
    texts : list of str
        The answers.
    outlines : list of str
        Per prompt the outline, `outline_start` included.
    points : list of list of SkeletonPoint
        Per prompt; none where the answer was written without an outline.
    conclusions : list of str
        Per prompt what the model wrote in the end, `conclusion_prompt` included; empty where there was none.
    fallback : list of (str or None)
        Per prompt why the answer was written without an outline, as `generate` would have; None: it was not.
    """

    texts: list[str] | None = None
    outlines: list[str] | None = None
    points: list[list[SkeletonPoint]] | None = None
    conclusions: list[str] | None = None
    fallback: list[str | None] | None = None

    def notes(self, prompt: int) -> list[tuple[str, str]]:
        """The answer, and why it has no points."""
        found = (("Answer", (self.texts or ())[prompt]), ("Without an outline", (self.fallback or ())[prompt]))
        return [(label, text) for label, text in found if text]
