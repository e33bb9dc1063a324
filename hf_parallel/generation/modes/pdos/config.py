"""`generation_mode="pdos"`: independent parts of one answer written side by side (Parallel Decoding in One Sequence).

This file is the mode's settings and its run; what a row does with a token is in `branches.py`, the format of a block
in `skeleton.py`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteriaList,
    SynthIDTextWatermarkLogitsProcessor,
)
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_parallel.cache.tree_branch import Tree, TreeBranchCache
from hf_parallel.generation.arguments import check_tokenizer_given
from hf_parallel.generation.call import GenerationCall, vocabulary_size
from hf_parallel.generation.config import (
    ParallelConfig,
    RowPlace,
    check_bool,
    check_choice,
    check_int,
    check_template,
    check_text,
)
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.modes.pdos.blocks import ParallelBlock, Run, StageStats, Token
from hf_parallel.generation.modes.pdos.branches import BranchRow, TrunkRow
from hf_parallel.generation.modes.pdos.format_processor import force, mask_of
from hf_parallel.generation.modes.pdos.parser import BlockFormat, check_unicode
from hf_parallel.generation.modes.pdos.token_text import tokens_of, vocabulary_of
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.prefill import prefill_leaves
from hf_parallel.generation.rows import Row
from hf_parallel.generation.sampling import TokenTable
from hf_parallel.generation.streaming import FinalTokens
from hf_parallel.models.attention import UnsupportedModelError
from hf_parallel.transcript.sections import TranscriptStyle

TRUNK_ROOM = 512
"""Tokens that an answer has room for at first; it grows beyond."""
_OF_PROMPTS = {
    EncoderNoRepeatNGramLogitsProcessor: "encoder_no_repeat_ngram_size",
    EncoderRepetitionPenaltyLogitsProcessor: "encoder_repetition_penalty",
    PrefixConstrainedLogitsProcessor: "prefix_allowed_tokens_fn",
    SynthIDTextWatermarkLogitsProcessor: "watermarking_config",
}
"""Processors that know the rows of a call by their numbers, with the arguments that make them."""


@dataclass
class PDOSConfig(BlockFormat, ParallelConfig):
    """Answers whose independent parts are written side by side.

    `max_new_tokens` counts the tokens of the answer that comes back, branches joined; while a skeleton is written its
    own tokens count. Branches share what is left of it: each pass every branch takes one, and where there are too few
    the later ones end.

    Parameters
    ----------
    branch_marker, title_end, ellipsis, terminator : str
        See `BlockFormat`; so are the bounds of branches and titles.
    join : str
        `reencode` (joined branches are read anew, each then sees those before it; the paper's) or `rotate` (keys and
        values of the branches are turned to their final places, nothing is computed again).
    parallel_hint : bool
        Whether `pdos_prompt` asks for blocks, and logits processors force the format once a block has opened. Without,
        nothing is forced, and an answer without a well-formed block is what `generate` gives.
    fill_in : bool
        Whether text that is forced is put in as soon as it is known, all at once, instead of being generated token by
        token: ellipses with a `branch_separator` behind them, branch markers, the last terminator.
    max_blocks : int, optional
        Blocks of an answer; what comes after the last one is sequential. Default: any number.
    branch_max_new_tokens : int, optional
        Tokens that a branch may generate. Default: as many as the answer may have.
    branch_stops : list of str
        Texts that end a branch besides the branch marker, the terminator and an end-of-text token, such as a line end.
        They stay in the answer. One with only whitespace before it ends nothing.
    branch_separator : str
        Put behind each branch that does not end with it. Empty: nothing is.
    opening : str
        What every answer begins with, such as `"I check each of them.\n####"`: for models that do not open a block on
        their own. Its tokens are given, and count as the answer's. Branches of a block that it holds write at once.
    format_prompt : str
        What `pdos_prompt` tells the model; `{branch_marker}`, `{title_end}`, `{ellipsis}` and `{terminator}` are
        filled in.
    """

    mode: ClassVar[str] = "pdos"
    streams_text: ClassVar[bool] = True
    streams_tokens: ClassVar[str] = "when_final"

    join: str = "reencode"
    parallel_hint: bool = True
    fill_in: bool = True
    max_blocks: int | None = None
    branch_max_new_tokens: int | None = None
    branch_stops: Sequence[str] = ()
    branch_separator: str = "\n"
    opening: str = ""
    format_prompt: str = (
        "Often an answer has parts that can be worked out without each other: items to check one after the other, "
        "aspects to look at, separate questions. Write such parts as one block. Each part is a line that begins with "
        "{branch_marker}, followed by a short title of its own and {title_end}. Behind the last part write "
        "{terminator}, and only then say what follows from the parts.\n\n"
        "First example. Task: Which of the three parcels, A of 4 kg, B of 9 kg and C of 6 kg, may be sent as a small "
        "parcel of at most 5 kg?\n"
        "Answer: I check each parcel.\n"
        "{branch_marker}Parcel A{title_end}{ellipsis}\n"
        "{branch_marker}Parcel B{title_end}{ellipsis}\n"
        "{branch_marker}Parcel C{title_end}{ellipsis}\n"
        "{terminator}\n"
        "So only parcel A may be sent as a small parcel.\n\n"
        "Second example. Task: Should our town build a tram line? Think of cost, noise and travel time.\n"
        "Answer: There are three aspects.\n"
        "{branch_marker}Cost{title_end}{ellipsis}\n"
        "{branch_marker}Noise{title_end}{ellipsis}\n"
        "{branch_marker}Travel time{title_end}{ellipsis}\n"
        "{terminator}\n"
        "All in all, the line is worth its cost.\n\n"
        "Third example. Task: Letters 1 and 2 are given above. Which of them says when the shop opens?\n"
        "Answer: I read both letters.\n"
        "{branch_marker}Letter 1{title_end}{ellipsis}\n"
        "{branch_marker}Letter 2{title_end}{ellipsis}\n"
        "{terminator}\n"
        "It is letter 2: the shop opens at nine.\n\n"
        "In these examples {ellipsis} stands for text that was left out. Where {ellipsis} follows a title, the part "
        "is written by somebody else: go on with the next title at once. Where nothing follows it, write the whole "
        "part, and no dots. Use titles that fit the task, leave no part out, and begin no other line with "
        "{branch_marker}."
    )

    def validate(self) -> None:
        """Check every setting; see `ParallelConfig.validate`."""
        ParallelConfig.validate(self)
        BlockFormat.validate(self)
        check_choice("join", self.join, ("reencode", "rotate"))
        check_bool("parallel_hint", self.parallel_hint)
        check_bool("fill_in", self.fill_in)
        for name in ("max_blocks", "branch_max_new_tokens"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), at_least=1)
        stops = self.branch_stops
        if not isinstance(stops, list | tuple) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(f"branch_stops must be a list of non-empty strings, got {stops!r}")
        for name in ("branch_separator", "opening"):
            check_text(name, getattr(self, name))
            check_unicode(name, getattr(self, name))
        for stop in stops:
            check_unicode("branch_stops", stop)
        check_template("format_prompt", self.format_prompt, **self.markers)

    def prepare(self, kwargs: dict[str, Any]) -> None:
        """Look whether the tokenizer works, and put the format behind the caller's own logits processors."""
        check_tokenizer_given(kwargs, self.mode, "reads text to find blocks and branches")
        self._forcing = _Forcing()
        given = kwargs.get("logits_processor")
        if self.parallel_hint and (given is None or isinstance(given, list | tuple)):
            kwargs["logits_processor"] = LogitsProcessorList([*(given or ()), self._forcing])

    def place(self, row: int, num_prompts: int) -> RowPlace:
        """See `ParallelConfig.place`. Index 0 is the trunk, which spans all branches."""
        index, prompt = divmod(row, num_prompts)
        return RowPlace(prompt, index, index - 1 if index else None)

    def row_name(self, index: int) -> str:
        """Name of the trunk or of a branch."""
        return f"Branch {index}" if index else "Answer"

    @property
    def transcript_style(self) -> TranscriptStyle:
        """Branches see the trunk and themselves."""
        return TranscriptStyle("branch", "trunk")

    def system_prompt(self) -> str:
        """The `format_prompt` with the markers; empty without `parallel_hint`."""
        return self.format_prompt.format(**self.markers) if self.parallel_hint else ""

    def run(self, call: GenerationCall) -> Any:
        """Write skeletons, let their branches write, join them, go on."""
        run = self._make_run(call)
        loop, cache = run.loop, run.cache
        with loop.running():
            leaves = [cache.insert(prompt) for prompt in call.prompts]
            starts = [leaf.start + len(leaf.tokens) for leaf in leaves]
            room = min(call.max_new_tokens, TRUNK_ROOM)
            spare = cache.new_block(room * call.num_rows)  # for branches: else storage would grow by half for them
            blocks = cache.new_trunks(starts, room)
            logits = prefill_leaves(loop, cache, leaves)
            cache.free(spare)
            trees = [Tree(cache.view(leaf), block) for leaf, block in zip(leaves, blocks, strict=True)]
            trunks = [TrunkRow(run, index, tree) for index, tree in enumerate(trees)]
            if self.parallel_hint:
                self._forcing.begin(run, trunks)
            rows: Sequence[TrunkRow | BranchRow] = trunks
            if self.opening:
                rows, logits = self._open(run, trunks)
            loop.decode(rows, logits, _advance, partial(_settle, run, trunks), _Turn(run, trunks, rows).follow)
        sampler = loop.sampler
        sampler.scores, sampler.logits = (_aligned(kept, trunks) for kept in (sampler.scores, sampler.logits))
        output = loop.output(
            PDOSOutput,
            call.num_rows,
            blocks=[trunk.blocks for trunk in trunks],
            transcripts=[run.transcript(trunk.tokens) for trunk in trunks],
            fallback=[trunk.fallback for trunk in trunks],
            stages=run.stages,
        )
        if isinstance(output, torch.Tensor):
            cache.reset()
        return output

    @staticmethod
    def _open(run: Run, trunks: Sequence[TrunkRow]) -> tuple[list[TrunkRow | BranchRow], torch.Tensor]:
        """Let every answer begin with the opening; returns the rows that go on, and what follows in each."""
        began = time.perf_counter()
        for trunk in trunks:
            trunk.begin()
        rows = _writing(trunks)
        logits = run.loop.step(rows)
        run.loop.stats.prefill_seconds += time.perf_counter() - began
        return rows, logits

    def _make_run(self, call: GenerationCall) -> Run:
        """Check what the mode needs, and make what its rows share."""
        if call.past_key_values is not None:
            raise ValueError("pdos makes its own cache; past_key_values cannot be given")
        if self.join == "rotate" and call.capabilities.rotary is None:
            why = call.capabilities.why_no_rotation
            raise UnsupportedModelError(f"join='rotate' turns keys to other positions: {why}")
        for processor in call.logits_processor:
            if type(processor) in _OF_PROMPTS:
                name = _OF_PROMPTS[type(processor)]
                raise ValueError(f"{name} cannot be honoured by pdos: branches are rows of the batch, but no prompts")
        vocabulary = vocabulary_of(call.tokenizer, vocabulary_size(call.model))
        texts = {**self.markers, "branch_separator": self.branch_separator, "opening": self.opening}
        for name, text in texts.items():
            if vocabulary.spell(text.encode()) is None:
                raise ValueError(f"{name} must be text that the tokenizer can spell, got {text!r}")
        opening = [Token(token) for token in tokens_of(call.tokenizer, vocabulary, self.opening) or ()]
        if len(opening) >= call.max_new_tokens:
            raise ValueError(f"opening must leave room in the {call.max_new_tokens} new tokens, got {self.opening!r}")
        cache = TreeBranchCache(call.capabilities.rotary, device=call.input_ids.device)
        cache.claim(call.model)
        # The budget is that of the joined answer, which no row's length shows.
        criteria = StoppingCriteriaList(c for c in call.stopping_criteria if not isinstance(c, MaxLengthCriteria))
        table = TokenTable(call.input_ids, call.pad_token_id, min(call.max_new_tokens, TRUNK_ROOM))
        loop = DecodeLoop(call, cache, table, criteria, self.seed, stream=False)
        streamer = call.streamer if hasattr(call.streamer, "put") else None
        stream = FinalTokens(streamer, call.num_rows, call.pad_token_id)
        separator = [Token(token) for token in vocabulary.spell(self.branch_separator.encode()) or ()]
        return Run(self, call, loop, cache, vocabulary, stream, separator, opening)


class _Forcing(LogitsProcessor):
    """Holds the trunks of a run to the format of the blocks that they have opened."""

    keeps_rows = False

    def begin(self, run: Run, trunks: Sequence[TrunkRow]) -> None:
        """Say whose scores will come."""
        self.sampler, self.trunks = run.loop.sampler, trunks
        self.mask = mask_of(run.config, run.vocabulary, [run.call.pad_token_id, *run.call.eos_token_ids])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores `[rows, vocabulary]` of the rows being chosen for, or of all."""
        rows = self.sampler.rows if len(scores) == len(self.sampler.rows) else range(len(scores))
        return force(scores, [self._allowed(row) for row in rows])

    def _allowed(self, row: int) -> torch.Tensor | None:
        trunk = self.trunks[row] if row < len(self.trunks) else None
        return self.mask.allowed(trunk.reader) if trunk is not None and trunk.is_writing else None


class _Turn:
    """Says whose turn it is, pass by pass, and counts what the stages of the pass before cost."""

    def __init__(self, run: Run, trunks: Sequence[TrunkRow], rows: Sequence[TrunkRow | BranchRow]) -> None:
        self.run, self.trunks = run, trunks
        self._writing = [row.stage for row in rows]
        self._brought = Counter(self._writing)
        self._began = time.perf_counter()

    def follow(self, going: Sequence[Row]) -> list[TrunkRow | BranchRow]:
        """The rows of the next pass: of each prompt its trunk or its branches."""
        self._count()
        rows = _writing(self.trunks)
        self.run.stream.flush()
        self._writing = [row.stage for row in rows]
        self._brought = Counter()
        for row in rows:
            self._brought[row.stage] += len(row.pending)
        for stage in self._brought:
            self.run.stages[stage].forward_passes += 1
        return rows

    def _count(self) -> None:
        now, total = time.perf_counter(), self._brought.total()
        for stage, brought in self._brought.items():
            self.run.stages[stage].seconds += (now - self._began) * brought / total
        for stage in self._writing:
            self.run.stages[stage].decoded_tokens += 1
        self._began = now


def _writing(trunks: Sequence[TrunkRow]) -> list[TrunkRow | BranchRow]:
    """The rows that bring tokens to the next pass, ascending by index."""
    return sorted((row for trunk in trunks for row in trunk.rows()), key=lambda row: row.index)


def _advance(row: TrunkRow | BranchRow, token: int, ended: bool) -> bool:
    return row.advance(token, ended)


def _settle(run: Run, trunks: Sequence[TrunkRow]) -> None:
    for trunk in trunks:
        run.cache.settle(trunk.tree)


def _aligned(kept: list[torch.Tensor] | None, trunks: Sequence[TrunkRow]) -> list[torch.Tensor] | None:
    """What was kept of each draw, put where the answers have the tokens; zeros for tokens that were given."""
    if kept is None:
        return None
    aligned = []
    for place in range(max(len(trunk.tokens) for trunk in trunks)):
        row = kept[0].new_zeros(len(trunks), kept[0].shape[-1])
        for trunk in trunks:
            token = trunk.tokens[place] if place < len(trunk.tokens) else Token(-1)
            if token.draw >= 0:
                row[trunk.index] = kept[token.draw][token.row]
        aligned.append(row)
    return aligned


@dataclass
class PDOSOutput(ParallelOutput):
    """Answers, and how they came about.

    Attributes
    ----------
    sequences : int64 [batch, length]
        Prompt and answer, branches joined.
    scores, logits : tuple of [batch, vocabulary], optional
        For each token of the answer those that it was chosen by, in a skeleton, a branch or behind them; zeros where
        it was not chosen but given.
    blocks : list per prompt of list of ParallelBlock
    transcripts : list of str
        The answers as text.
    fallback : list of str or None
        Per prompt why it was decoded sequentially from some point on; None where it was not.
    stages : dict of str to StageStats
        What `skeleton`, `branches` and `continuation` cost.
    """

    blocks: list[list[ParallelBlock]] | None = None
    transcripts: list[str] | None = None
    fallback: list[str | None] | None = None
    stages: dict[str, StageStats] | None = None

    @property
    def skeletons(self) -> list[list[str]]:
        """Per prompt and block the skeleton as it was generated."""
        return [[block.skeleton for block in blocks] for blocks in self.blocks or ()]

    @property
    def titles(self) -> list[list[list[str]]]:
        """Per prompt and block the titles of its branches."""
        return [[[branch.title for branch in block.branches] for block in blocks] for blocks in self.blocks or ()]

    @property
    def branch_texts(self) -> list[list[list[str]]]:
        """Per prompt and block what its branches wrote."""
        return [[[branch.text for branch in block.branches] for block in blocks] for blocks in self.blocks or ()]

    def columns(self, prompt: int) -> list[str]:
        """The titles of the branches, where one block has them all."""
        titles = self.titles[prompt]
        return titles[0] if len(titles) == 1 else []

    def notes(self, prompt: int) -> list[tuple[str, str]]:
        """The joined answer, and why it was decoded sequentially from some point on."""
        told = (("Joined answer", self.transcripts), ("Decoded sequentially", self.fallback))
        return [(label, of[prompt] or "") for label, of in told if of and of[prompt]]
