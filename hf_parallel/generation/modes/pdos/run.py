"""PDOSRun: one call of the pdos mode (PDOS, section 3), whose answers announce their branches by a skeleton."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor

from hf_parallel.generation.call import GenerationCall, vocabulary_size
from hf_parallel.generation.modes.branches.lanes import Lane, Plan
from hf_parallel.generation.modes.branches.output import SKELETON
from hf_parallel.generation.modes.branches.run import BranchRun
from hf_parallel.generation.modes.branches.token_text import (
    WHITESPACE,
    get_vocabulary,
    ids,
    slice_tokens,
    text_of,
    tokens_of,
    widen_span,
)
from hf_parallel.generation.modes.pdos.format_processor import force, get_block_mask
from hf_parallel.generation.modes.pdos.output import Branch, ParallelBlock, PDOSOutput
from hf_parallel.generation.modes.pdos.parser import BROKEN, DONE, OUTSIDE, SkeletonParser
from hf_parallel.generation.modes.pdos.settings import PDOSSettings


class PDOSRun(BranchRun):
    """One call of the mode."""

    none = "the model opened no block; pass titles=[...]"

    def __init__(self, config: PDOSSettings, call: GenerationCall) -> None:
        self.config = config
        ends = [(marker.encode(), 0, "marker") for marker in (config.branch_marker, config.terminator)]
        ends += [(stop.encode(), len(stop.encode()), "stop") for stop in config.branch_stops]
        opening = config.beginning, "titles" if config.titles else "opening"
        super().__init__(config, call, ends, config.branch_separator, config.branch_max_new_tokens, *opening)
        for name, text in config.markers.items():
            self.tokens(text, name)
        vocabulary = get_vocabulary(call.tokenizer, vocabulary_size(call.model))
        banned = [call.pad_token_id, *call.eos_token_ids]
        self.mask = get_block_mask(config, vocabulary, banned) if config.parallel_hint else None
        for processor in call.logits_processor:
            if isinstance(processor, TrunkFormatProcessor):
                processor.run = self

    def new_reader(self) -> SkeletonParser:
        """See `BranchRun.new_reader`."""
        return SkeletonParser(self.config)

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
        if len(tokens) < lane.answer.left:
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

    def force_format(self, scores: torch.Tensor) -> torch.Tensor:
        """Forbid tokens that would break an open block, in scores `[rows, vocabulary]` of sampled rows or of all."""
        rows = self.loop.sampler.processors.rows
        masks: list[torch.Tensor | None] = []
        for row in rows if len(scores) == len(rows) else range(len(scores)):
            lane = self.roots[row] if row < len(self.roots) else None
            if self.mask is None or lane is None or lane.paths or not self._is_parsing(lane):
                masks.append(None)
            else:
                masks.append(self.mask.allowed(lane.reader))
        return force(scores, masks)

    def find_fork(self, lane: Lane, known: int) -> Plan | None:
        """See `BranchRun.find_fork`. The branches of a closed block replace its skeleton."""
        if lane.parent is not None or not self._is_parsing(lane) or lane.reader.phase != DONE:
            return None
        parser, vocabulary, block = lane.reader, self.vocabulary, lane.own
        spans = [widen_span(block, *span) for span in parser.spans]
        end, _ = widen_span(block, parser.terminator_start, parser.terminator_start)
        head = slice_tokens(block, vocabulary, 0, spans[0][0])
        prefixes = [slice_tokens(block, vocabulary, *span) for span in spans]
        source = lane.text[spans[0][0] :].decode(errors="replace")
        lane.answer.num_paths = 0  # branches are numbered in each block
        paths = list(zip(parser.titles, prefixes, strict=True))
        return Plan(head, paths, slice_tokens(block, vocabulary, end), source)

    def path_end(self, text: bytes, end: int, cause: str) -> tuple[int, str]:
        """See `BranchRun.path_end`."""
        separator = self.config.branch_separator
        return end, "" if text[:end].endswith(separator.encode()) else separator

    def record(self, lane: Lane, start: int, end: int) -> ParallelBlock:
        """See `BranchRun.record`."""
        assert lane.plan is not None, "the lane has forked"
        return ParallelBlock(lane.plan.source, start, end + len(lane.plan.joined), list(map(_record, lane.paths)))

    def output(self, **fields: Any) -> tuple[type[PDOSOutput], dict[str, Any]]:
        """See `BranchRun.output`."""
        return PDOSOutput, {"blocks": [root.forks for root in self.roots], **fields}


class TrunkFormatProcessor(LogitsProcessor):
    """Forces blocks that the trunks of a run open to be well-formed."""

    keeps_rows = False
    run: PDOSRun

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `PDOSRun.force_format`."""
        return self.run.force_format(scores)


def _record(path: Lane) -> Branch:
    text = path.kept[len(text_of(path.opening)) :].decode(errors="replace")
    return Branch(path.name, ids(path.opening), text, path.sampled, path.ended_by)
