"""`generation_mode="pdos"`: independent parts of one answer decoded in parallel (Parallel Decoding in One Sequence)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from hf_parallel.generation.call import GenerationCall, vocabulary_size
from hf_parallel.generation.config import ModePrompt, ModeTraits
from hf_parallel.generation.dialects import SkeletonDialect
from hf_parallel.generation.modes.branches.lanes import Lane, OpenFork, Records
from hf_parallel.generation.modes.branches.output import SKELETON
from hf_parallel.generation.modes.branches.run import BranchRun
from hf_parallel.generation.modes.branches.settings import BranchRows, BranchSettings
from hf_parallel.generation.modes.branches.token_text import (
    WHITESPACE,
    get_vocabulary,
    ids,
    slice_tokens,
    text_of,
    tokens_of,
    widen_span,
)
from hf_parallel.generation.modes.pdos.format_processor import get_block_mask
from hf_parallel.generation.modes.pdos.output import Branch, ParallelBlock, PDOSOutput
from hf_parallel.generation.modes.pdos.parser import BROKEN, DONE, OUTSIDE, BlockFormat, SkeletonParser
from hf_parallel.generation.presets import PRESETS
from hf_parallel.generation.prompts import Chat, build_prompt
from hf_parallel.generation.validation import (
    check_bool,
    check_choice,
    check_int,
    check_template,
    check_text,
    check_texts,
)
from hf_parallel.transcript.sections import TranscriptStyle

FORMAT_PROMPT = Path(__file__).with_name("format_prompt.txt").read_text(encoding="utf-8").rstrip("\n")


class PDOSRows(BranchRows["PDOSConfig"]):
    """The trunk and its branches."""

    style = TranscriptStyle("branch", "trunk", is_one_answer=True)


class PDOSPrompt(ModePrompt["PDOSConfig"]):
    """Instructions to write blocks. Branches start in the answer: without `after`, there is no reasoning before it."""

    @property
    def thinking(self) -> bool | None:  # type: ignore[override]
        """See `ModePrompt`."""
        return False if self.config.after is None else None

    @property
    def rules_last(self) -> bool:  # type: ignore[override]
        """See `ModePrompt`."""
        return self.config.hint_last

    def rules(self) -> str:
        """Return the `format_prompt` with the markers; empty without `parallel_hint`."""
        config = self.config
        return config.format_prompt.format(**config.markers) if config.parallel_hint else ""


@dataclass
class PDOSConfig(BlockFormat, BranchSettings[PDOSOutput]):
    r"""Answers whose independent parts are generated in parallel.

    `max_new_tokens` is the budget of the returned answer, branches joined; a skeleton counts until its branches start.
    The branches of a block share the rest of the budget: each pass takes one token per branch, and if too few are left,
    later branches end. With a `logits_cache`, an answer is replayed while logits are cached for all of its branches.

    Parameters
    ----------
    branch_marker, title_end, ellipsis, terminator : str
        See `BlockFormat`, also for the bounds of branches and titles.
    join : str
        `reencode`: joined branches are prefilled again, so each attends to the branches before it (as in the paper).
        `rotate`: keys of the branches are rotated to their final positions instead.
    parallel_hint : bool
        Whether `pdos_prompt` asks for blocks, and logits processors force the format once a block has opened. If False,
        nothing is forced, and `generate` returns the same answer unless it contains a well-formed block.
    hint_last : bool
        Whether `pdos_prompt` appends the `format_prompt` to the task, as in the paper, or to the system message.
    fill_in : bool
        Whether forced text (ellipses followed by a `branch_separator`, branch markers, the terminator) is appended at
        once as soon as it is determined, instead of being generated.
    max_blocks : int, optional
        Maximum number of blocks; text after the last one is sequential. Default: any number.
    branch_max_new_tokens : int, optional
        Token budget of each branch. Default: the answer's.
    branch_stops : list of str
        Texts that end a branch, such as a newline. The branch marker, the terminator and an end-of-sequence token do
        so too. Stops stay in the answer. A stop with only whitespace before it is ignored.
    branch_separator : str
        Appended to each branch that does not end with it. Empty: nothing is appended.
    after : str or compiled regular expression, optional
        Text that ends the thinking of a reasoning model, such as `"</think>"`. Until then, nothing is
        read as a block or forced; then `opening` follows. If the prompt ends with it, there is no thinking. A regular
        expression ends the thinking with the first token after which it matches. Default: answers have no thinking.
    thinking_max_new_tokens : int, optional
        Maximum number of thinking tokens, which also count toward `max_new_tokens`. After them, the text `after` is
        inserted. Default: no limit.
    opening : str
        First text of every answer, such as `"I check each of them.\n####"`, for models that do not open a block. Counts
        as part of the answer. If it contains a whole block, its branches start at once.
    titles : list of str
        Titles of the parts of every answer, for models that do not write them. The answer begins with `opening` and a
        block of these titles, whose branches start at once. Default: the model writes the titles.
    format_prompt : str
        Instructions of `pdos_prompt`; `{branch_marker}`, `{title_end}`, `{ellipsis}` and `{terminator}` are filled in.
    """

    mode: ClassVar[str] = "pdos"
    traits = ModeTraits(
        rows=PDOSRows,
        rows_setting="max_branches",
        prompt=PDOSPrompt,
        keeps_states=True,
        streams_text=True,
        streams_tokens="when_final",
        dialect=lambda config: config.format,
        presets=PRESETS["pdos"],
    )

    join: str = "reencode"
    parallel_hint: bool = True
    hint_last: bool = False
    fill_in: bool = True
    max_blocks: int | None = None
    branch_max_new_tokens: int | None = None
    branch_stops: Sequence[str] = ()
    branch_separator: str = "\n"
    titles: Sequence[str] = ()
    format_prompt: str = FORMAT_PROMPT

    def __post_init__(self) -> None:
        BranchSettings.__post_init__(self)  # that of `BlockFormat` knows no preset

    def validate(self) -> None:
        BranchSettings.validate(self)
        BlockFormat.validate(self)
        check_choice("join", self.join, ("reencode", "rotate"))
        check_bool("parallel_hint", self.parallel_hint)
        check_bool("hint_last", self.hint_last)
        check_bool("fill_in", self.fill_in)
        for name in ("max_blocks", "branch_max_new_tokens"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=1)
        check_texts("branch_stops", self.branch_stops)
        check_text("branch_separator", self.branch_separator)
        check_texts("titles", self.titles)
        self._check_block()
        check_template("format_prompt", self.format_prompt, **self.markers)

    def _check_block(self) -> None:
        """Raise `ValueError` unless the titles, if there are any, form a block."""
        parser = SkeletonParser(self)
        text = self.beginning.encode()
        parser.feed(text)
        complete = parser.phase == DONE and parser.offset == len(text)
        if self.titles and not (complete and parser.titles == tuple(self.titles)):
            why = parser.error or f"with opening={self.opening!r}, the titles would be {list(parser.titles)}"
            raise ValueError(f"titles must form one block after opening, got {self.titles!r}: {why}")

    @property
    def beginning(self) -> str:
        """First text of every answer: `opening`, and the block of `titles`, each on a line of its own."""
        if not self.titles:
            return self.opening
        gap = "\n" if self.opening and not self.opening[-1].isspace() else ""
        text = self.opening + gap
        for title in self.titles:
            text += f"{self.branch_marker}{title}{self.title_end}{self.ellipsis}\n"
        return text + self.terminator

    @property
    def format(self) -> SkeletonDialect:
        """The dialect."""
        return SkeletonDialect(**self.markers, join=self.join, branch_separator=self.branch_separator)

    @property
    def positions(self) -> str:
        """See `BranchSettings.positions`."""
        return self.format.positions

    @property
    def positions_setting(self) -> str:
        """See `BranchSettings.positions_setting`."""
        return f"join={self.join!r}"

    @property
    def max_rows_per_prompt(self) -> int:
        """Maximum number of branches at the same time."""
        return self.max_branches

    @property
    def forces_format(self) -> bool:
        """Whether processors force the format once a block has opened."""
        return self.parallel_hint

    def make_run(self, call: GenerationCall) -> PDOSRun:
        return PDOSRun(self, call, BlockRecords())


def pdos_prompt(
    task: str | Chat, tokenizer: PreTrainedTokenizerBase, config: PDOSConfig | None = None, **settings: Any
) -> dict[str, torch.Tensor]:
    """Wrap a task with instructions to write independent parts as a parallel block (PDOS, section 3, appendix A).

    The instructions, with three examples, precede the task; with `parallel_hint=False` there are none. If the chat
    template has the variable `enable_thinking`, it is False by default, since branches start in the answer. Parameters,
    `chat_template_kwargs` included, return value and errors: see `build_prompt`.
    """
    return build_prompt(PDOSConfig, task, tokenizer, config, **settings)


class PDOSRun(BranchRun):
    """One call of the mode, or of another mode for text in its format."""

    none = "the model opened no block; pass titles=[...]"

    def __init__(self, config: PDOSConfig, call: GenerationCall, records: Records) -> None:
        self.config: PDOSConfig
        ends = [(marker.encode(), 0, "marker") for marker in (config.branch_marker, config.terminator)]
        ends += [(stop.encode(), len(stop.encode()), "stop") for stop in config.branch_stops]
        super().__init__(
            config,
            call,
            records,
            ends,
            config.branch_separator,
            config.branch_max_new_tokens,
            opening=config.beginning,
            opening_name="titles" if config.titles else "opening",
        )
        for name, text in config.markers.items():
            self.tokens(text, name)
        vocabulary = get_vocabulary(call.tokenizer, vocabulary_size(call.model))
        banned = [call.pad_token_id, *call.eos_token_ids]
        self.mask = get_block_mask(config, vocabulary, banned) if config.parallel_hint else None

    def new_reader(self, offset: int = 0) -> SkeletonParser:
        """See `BranchRun.new_reader`."""
        parser = SkeletonParser(self.config)
        parser.offset = offset
        return parser

    def read(self, lane: Lane, text: bytes, ended: bool) -> None:
        """Parse text of an answer, and append the text that is forced after it."""
        if lane.parent is not None or not self._is_parsing(lane):
            return
        lane.reader.feed(text)
        if lane.reader.is_open:
            lane.stage = SKELETON
            if self.config.parallel_hint and self.config.fill_in and not ended:
                self._fill_in(lane)
        if lane.reader.phase == BROKEN:
            lane.answer.fallback = lane.reader.error

    def _fill_in(self, lane: Lane) -> None:
        separator = self.config.branch_separator.encode()
        text = lane.reader.forced(b"" if separator.strip(WHITESPACE) else separator)
        try:
            tokens = tokens_of(text, self.vocabulary)
        except ValueError:  # generate the text instead
            return
        if tokens and len(tokens) < lane.answer.left:
            self.insert(lane, tokens)
            lane.reader.feed(text)

    def end_answer(self, lane: Lane, cause: str) -> None:
        """See `BranchRun.end_answer`."""
        if self._is_parsing(lane) and (lane.reader.is_open or lane.reader.phase == DONE):
            lane.answer.fallback = f"the {'budget' if cause == 'budget' else 'answer'} ended inside a block"

    def _is_parsing(self, lane: Lane) -> bool:
        """Whether further blocks of an answer are recognized."""
        limit = self.config.max_blocks
        return lane.answer.fallback is None and (limit is None or len(lane.forks) < limit)

    def may_change(self, lane: Lane) -> bool:
        """See `BranchRun.may_change`."""
        return self._is_parsing(lane) and (lane.reader.phase != OUTSIDE or len(lane.reader.matched) > 0)

    def allowed(self, lane: Lane) -> torch.Tensor | None:
        """See `BranchRun.allowed`."""
        if self.mask is None or lane.paths or not self._is_parsing(lane):
            return None
        return self.mask.allowed(lane.reader)

    def find_fork(self, lane: Lane, known: int) -> OpenFork | None:
        """See `BranchRun.find_fork`. The branches of a closed block replace its skeleton."""
        if lane.parent is not None or not self._is_parsing(lane) or lane.reader.phase != DONE:
            return None
        parser = lane.reader
        vocabulary = self.vocabulary
        block = lane.own
        spans = [widen_span(block, *span) for span in parser.spans]
        end, _ = widen_span(block, parser.terminator_start, parser.terminator_start)
        head = slice_tokens(block, vocabulary, 0, spans[0][0])
        prefixes = [slice_tokens(block, vocabulary, *span) for span in spans]
        source = lane.text[spans[0][0] :].decode(errors="replace")
        paths = list(zip(parser.titles, prefixes, strict=True))
        return OpenFork(head, paths, slice_tokens(block, vocabulary, end), source)

    def path_end(self, text: bytes, end: int, cause: str) -> tuple[int, str]:
        """See `BranchRun.path_end`."""
        separator = self.config.branch_separator
        return end, "" if text[:end].endswith(separator.encode()) else separator


class BlockRecords(Records):
    """Parallel blocks of the answers."""

    def record(self, lane: Lane, start: int, end: int) -> ParallelBlock:
        """See `Records.record`."""
        assert lane.open_fork is not None, "the lane has forked"
        lane.answer.num_paths = 0  # branches are numbered in each block
        return ParallelBlock(
            lane.open_fork.source, start, end + len(lane.open_fork.joined), list(map(_record, lane.paths))
        )

    def output(self, roots: Sequence[Lane]) -> tuple[type[PDOSOutput], dict[str, Any]]:
        """See `Records.output`."""
        return PDOSOutput, {"blocks": [root.forks for root in roots]}


def _record(path: Lane) -> Branch:
    text = path.kept[len(text_of(path.opening)) :].decode(errors="replace")
    return Branch(path.name, ids(path.opening), text, path.sampled, path.ended_by)
