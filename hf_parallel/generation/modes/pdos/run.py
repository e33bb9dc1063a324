"""PDOSRun: one call of the pdos mode (PDOS, section 3).

A trunk generates an answer and parses it. When a block closes, the trunk pauses and the branches of the block decode in
parallel. When all of them have ended, they are joined and the trunk continues after them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeAlias

import torch
from transformers import LogitsProcessor, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_parallel.cache import Segment
from hf_parallel.cache.tree_branch import Tree, TreeBranchCache
from hf_parallel.generation.call import GenerationCall, vocabulary_size
from hf_parallel.generation.caller import warn_sequential
from hf_parallel.generation.config import Generated
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.modes.pdos.format_processor import force, get_block_mask
from hf_parallel.generation.modes.pdos.output import (
    BRANCHES,
    CONTINUATION,
    SKELETON,
    STAGES,
    Branch,
    ParallelBlock,
    PDOSOutput,
    StageStats,
)
from hf_parallel.generation.modes.pdos.parser import BROKEN, DONE, OUTSIDE, SkeletonParser
from hf_parallel.generation.modes.pdos.rows import BranchRow, TrunkRow, aligned, answer_log_probs
from hf_parallel.generation.modes.pdos.settings import PDOSSettings
from hf_parallel.generation.modes.pdos.token_text import (
    WHITESPACE,
    Token,
    encode_exactly,
    get_vocabulary,
    ids,
    slice_tokens,
    text_of,
    tokens_of,
    widen_span,
)
from hf_parallel.generation.prefill import prefill_leaves
from hf_parallel.generation.rows import Row
from hf_parallel.generation.streaming import FinalTokens
from hf_parallel.generation.token_table import TokenTable
from hf_parallel.models.attention import UnsupportedModelError

PDOSRow: TypeAlias = TrunkRow | BranchRow
TRUNK_CAPACITY = 512
"""Initial capacity of an answer, in tokens."""
_BATCH_DEPENDENT = {
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
}
"""Processors that index the prompts of a call by row, with the arguments of `generate` that create them."""


class PDOSRun:
    """One call of the mode."""

    def __init__(self, config: PDOSSettings, call: GenerationCall) -> None:
        if call.past_key_values is not None:
            raise ValueError("pdos makes its own cache; past_key_values cannot be given")
        if config.join == "rotate" and call.capabilities.rotary is None:
            reason = call.capabilities.why_no_rotation
            raise UnsupportedModelError(f"join='rotate' rotates keys to other positions ({reason}): use 'reencode'")
        for processor in call.logits_processor:
            if name := _BATCH_DEPENDENT.get(type(processor).__name__):
                raise ValueError(f"{name} cannot be honoured by pdos: branches are rows of the batch, but not prompts")
        vocabulary = get_vocabulary(call.tokenizer, vocabulary_size(call.model))
        given = "titles" if config.titles else "opening"
        texts = {**config.markers, "branch_separator": config.branch_separator, given: config.beginning}
        for name, text in texts.items():
            if vocabulary.encode(text.encode()) is None:
                raise ValueError(f"{name} must be text that the tokenizer can encode, got {text!r}")
        opening = encode_exactly(call.tokenizer, vocabulary, config.beginning) or ()
        if len(opening) >= call.max_new_tokens:
            raise ValueError(
                f"{given} must be shorter than the {call.max_new_tokens} new tokens, got {config.beginning!r}"
            )
        self.config, self.call = config, call
        self.vocabulary = vocabulary.without_text(call.eos_token_ids)
        self.opening = [Token(token, self.vocabulary.texts[token]) for token in opening]
        self.separator = tokens_of(config.branch_separator.encode(), self.vocabulary)
        self.ends = [(marker.encode(), 0, "marker") for marker in (config.branch_marker, config.terminator)]
        self.ends += [(stop.encode(), len(stop.encode()), "stop") for stop in config.branch_stops]
        self.cache = call.new_cache(TreeBranchCache, call.capabilities.rotary)
        call.claim_cache(self.cache)
        # The budget counts the joined answer, whose length MaxLengthCriteria cannot check.
        criteria = StoppingCriteriaList(c for c in call.stopping_criteria if not isinstance(c, MaxLengthCriteria))
        table = TokenTable(call.input_ids, call.pad_token_id, min(call.max_new_tokens, TRUNK_CAPACITY))
        self.loop = DecodeLoop(call, self.cache, table, criteria, config.seed, stream=False)
        streamer = call.streamer if hasattr(call.streamer, "put") else None
        self.stream = FinalTokens(streamer, call.num_rows, call.pad_token_id)
        self.stages = {name: StageStats() for name in STAGES}
        self.trunks: list[TrunkRow] = []
        banned = [call.pad_token_id, *call.eos_token_ids]
        self.mask = get_block_mask(config, vocabulary, banned) if config.parallel_hint else None

    def generate(self) -> Generated:
        """Generate. Return a tensor `int64 [batch, length]` or a `PDOSOutput`."""
        call, cache, loop = self.call, self.cache, self.loop
        with loop.running():
            leaves = list(map(cache.insert_prompt, call.prompts, call.gaps))
            starts = [leaf.next_position for leaf in leaves]
            capacity = min(call.max_new_tokens, TRUNK_CAPACITY)
            spare = cache.pool.new_block(
                capacity * call.num_rows
            )  # for branches, so that storage need not grow for them
            blocks = cache.new_trunks(starts, capacity)
            logits = prefill_leaves(loop, cache, leaves)
            cache.pool.free(spare)
            for index, (leaf, block) in enumerate(zip(leaves, blocks, strict=True)):
                self.trunks.append(TrunkRow(index, Tree(leaf.view, block), self.config))
            for processor in call.logits_processor:
                if isinstance(processor, TrunkFormatProcessor):
                    processor.run = self
            rows: Sequence[PDOSRow] = self.trunks
            if self.opening:
                rows, logits = self._prefill_opening()
            self._pass_stages, self._pass_began = [row.stage for row in rows], time.perf_counter()
            self._pass_tokens = Counter(self._pass_stages)
            loop.decode(rows, logits, self._on_token, self._move_joined, self._schedule)
        sampler, trunks = loop.sampler, self.trunks
        answers = [trunk.tokens for trunk in trunks]
        sampler.scores, sampler.logits = (aligned(kept, answers) for kept in (sampler.scores, sampler.logits))
        output = loop.output(
            PDOSOutput,
            trunks,
            blocks=[trunk.blocks for trunk in trunks],
            transcripts=[self._transcript(trunk) for trunk in trunks],
            fallback=[trunk.fallback for trunk in trunks],
            stages=self.stages,
            log_probs=answer_log_probs(sampler, answers),
        )
        none = "the model opened no block; pass titles=[...]"
        warn_sequential([None if trunk.blocks else trunk.fallback or none for trunk in trunks])
        return output

    def _prefill_opening(self) -> tuple[list[PDOSRow], torch.Tensor]:
        """Start every answer with the opening. Return the active rows and the logits that follow."""
        began = time.perf_counter()
        for trunk in self.trunks:
            trunk.tokens, trunk.pending = list(self.opening), ids(self.opening)
            self.loop.table.extend(trunk.index, trunk.pending)
            self._parse(trunk, text_of(trunk.tokens))
            if not self._open_branches(trunk):
                self.loop.stats.prefilled_tokens += len(trunk.pending)
        rows = self._active_rows()
        logits = self.loop.step(rows)
        self.loop.stats.prefill_seconds += time.perf_counter() - began
        return rows, logits

    # Callbacks of the decode loop

    def _on_token(self, row: PDOSRow, token: int, ended: bool) -> bool:
        row.tokens.append(Token(token, self.vocabulary.texts[token], row.num_samples, row.index))
        row.num_samples += 1
        row.pending = [token]
        if isinstance(row, BranchRow):
            return self._extend_branch(row, token, ended)
        return self._extend_trunk(row, token, ended)

    def _move_joined(self) -> None:
        for trunk in self.trunks:
            if not self._may_open(trunk):
                self.cache.move_joined(trunk.tree)

    def _schedule(self, active: Sequence[Row]) -> list[PDOSRow]:
        """Return the rows of the next pass, and count the cost of the last one."""
        now, total = time.perf_counter(), self._pass_tokens.total()
        for stage, count in self._pass_tokens.items():
            self.stages[stage].seconds += (now - self._pass_began) * count / total
        for stage in self._pass_stages:
            self.stages[stage].decoded_tokens += 1
        self._pass_began = now
        rows = self._active_rows()
        self.stream.flush()
        self._pass_stages, self._pass_tokens = [row.stage for row in rows], Counter()
        for row in rows:
            self._pass_tokens[row.stage] += len(row.pending)
        for stage in self._pass_tokens:
            self.stages[stage].forward_passes += 1
        return rows

    def _active_rows(self) -> list[PDOSRow]:
        """Return the rows of the next pass, ascending by index: of each answer its trunk or its branches."""
        rows: list[PDOSRow] = []
        for trunk in self.trunks:
            active = [branch for branch in trunk.branches if not branch.ended_by]
            for branch in active[trunk.branch_budget :]:
                self._end_branch(branch, "budget")
            active = active[: trunk.branch_budget]
            if trunk.branches and not active:
                self._join(trunk)
            if self.cache.pool.states.in_use and self._may_open(trunk) and not (active or trunk.tree.joining):
                self.cache.detach(trunk.tree)
            rows += active or ([] if trunk.finished else [trunk])
        return sorted(rows, key=lambda row: row.index)

    # Sequential text

    def _extend_trunk(self, trunk: TrunkRow, token: int, ended: bool) -> bool:
        """Parse a new token of a trunk. Return whether the trunk itself is still active."""
        self._parse(trunk, trunk.tokens[-1].text, ended)
        if not ended and self._open_branches(trunk):
            return False
        if ended or not self._budget(trunk):
            self._finish(trunk, "answer" if ended else "budget")
        else:
            self.loop.stats.prefilled_tokens += len(trunk.pending) - 1
        self._release(trunk)
        return not trunk.finished

    def _parse(self, trunk: TrunkRow, text: bytes, ended: bool = False) -> None:
        """Parse text of a trunk, and append the text that is forced after it."""
        self._show(trunk, text)
        if not self._is_parsing(trunk):
            return
        trunk.parser.feed(text)
        if trunk.parser.is_open:
            trunk.stage = SKELETON
            if self.config.parallel_hint and self.config.fill_in and not ended:
                self._fill_in(trunk)
        if trunk.parser.phase == BROKEN:
            trunk.fallback = trunk.parser.error

    def _fill_in(self, trunk: TrunkRow) -> None:
        separator = text_of(self.separator)
        text = trunk.parser.forced(b"" if separator.strip(WHITESPACE) else separator)
        try:
            tokens = tokens_of(text, self.vocabulary)
        except ValueError:  # generate the text instead
            return
        if len(tokens) < self._budget(trunk):
            trunk.tokens += tokens
            trunk.pending = trunk.pending + ids(tokens)
            self.loop.table.extend(trunk.index, ids(tokens))
            trunk.parser.feed(text)
            self._show(trunk, text)

    def _finish(self, trunk: TrunkRow, cause: str) -> None:
        if self._is_parsing(trunk) and (trunk.parser.is_open or trunk.parser.phase == DONE):
            trunk.fallback = f"the {cause} ended inside a block"
        trunk.finished = True
        if cause == "budget":
            self.call.record.truncated.add(trunk.output_row)
        self._show(trunk, b"", "end")

    def _is_parsing(self, trunk: TrunkRow) -> bool:
        """Whether further blocks of an answer are recognized."""
        limit = self.config.max_blocks
        return trunk.fallback is None and (limit is None or len(trunk.blocks) < limit)

    def _may_open(self, trunk: TrunkRow) -> bool:
        """Whether the last tokens of an answer may belong to a block, whose branches would replace them."""
        return self._is_parsing(trunk) and (trunk.parser.phase != OUTSIDE or len(trunk.parser.matched) > 0)

    def _budget(self, trunk: TrunkRow) -> int:
        return self.call.max_new_tokens - len(trunk.tokens)

    def force_format(self, scores: torch.Tensor) -> torch.Tensor:
        """Forbid tokens that would break an open block, in scores `[rows, vocabulary]` of sampled rows or of all."""
        rows = self.loop.sampler.processors.rows
        masks: list[torch.Tensor | None] = []
        for row in rows if len(scores) == len(rows) else range(len(scores)):
            trunk = self.trunks[row] if row < len(self.trunks) else None
            if self.mask is None or trunk is None or trunk.branches or not self._is_parsing(trunk):
                masks.append(None)
            else:
                masks.append(self.mask.allowed(trunk.parser))
        return force(scores, masks)

    # Branches

    def _open_branches(self, trunk: TrunkRow) -> bool:
        """Start the branches of a closed block. False: none has closed, or they cannot start (see `fallback`)."""
        if not self._is_parsing(trunk) or trunk.parser.phase != DONE:
            return False
        parser, vocabulary, block = trunk.parser, self.vocabulary, trunk.tokens[trunk.parsed_from :]
        spans = [widen_span(block, *span) for span in parser.spans]
        end, _ = widen_span(block, parser.terminator_start, parser.terminator_start)
        try:
            head = slice_tokens(block, vocabulary, 0, spans[0][0])
            prefixes = [slice_tokens(block, vocabulary, *span) for span in spans]
            trunk.terminator = slice_tokens(block, vocabulary, end)
        except ValueError as error:
            trunk.fallback = str(error)
            return False
        tokens, count = trunk.tokens[: trunk.parsed_from] + head, len(prefixes)
        joined = len(tokens) + sum(map(len, prefixes)) + count * len(self.separator) + len(trunk.terminator)
        if joined + count > self.call.max_new_tokens:
            trunk.fallback = "the budget is too small for the branches"
            return False
        trunk.branch_budget = self.call.max_new_tokens - joined
        trunk.skeleton = text_of(block)[spans[0][0] :].decode(errors="replace")
        unchanged = trunk.parsed_from + sum(new is old for new, old in zip(head, block, strict=False))
        cached = min(unchanged, trunk.tree.trunk.length)
        if not self.cache.pool.continues(trunk.tree.trunk, cached):
            cached = 0
        self._add_branches(trunk, tokens, cached, prefixes)
        return True

    def _add_branches(self, trunk: TrunkRow, tokens: list[Token], cached: int, prefixes: list[list[Token]]) -> None:
        """Cut a trunk back to `tokens` and add branches; the first `cached` tokens have keys and values."""
        num_computed = sum(block.length for block in (trunk.tree.trunk, *trunk.tree.joining))
        computed = set(map(id, trunk.tokens[:num_computed]))
        trunk.tokens, tail = tokens, ids(tokens[cached:])
        trunk.writes.add(trunk.tree.trunk, tail)
        num_tokens = sum(map(len, prefixes))
        length = (trunk.branch_budget + num_tokens) // len(prefixes)
        self.cache.branch(trunk.tree, cached, len(prefixes), len(tail), length)
        self._replace_tokens(trunk, cached, tail)
        rows = self.loop.sampler.fork(trunk.index, len(prefixes))
        branches = zip(rows, trunk.tree.branches, trunk.parser.titles, prefixes, strict=True)
        for number, (row, block, title, prefix) in enumerate(branches, start=1):
            self.loop.table.extend(row, ids(prefix))
            output_row = trunk.index + number * self.call.num_rows
            trunk.branches.append(BranchRow(trunk, row, output_row, block, title, prefix))
            self._show(trunk.branches[-1], text_of(prefix), "begin")
        self.loop.stats.prefilled_tokens += len(tail) + num_tokens
        again = sum(id(token) in computed for written in (tokens[cached:], *prefixes) for token in written)
        self.stages[BRANCHES].computed_again += again

    def _extend_branch(self, branch: BranchRow, token: int, ended: bool) -> bool:
        """Look for the end of a branch in a new token. Return whether the branch is still active."""
        branch.trunk.branch_budget -= 1
        text = branch.tokens[-1].text
        branch.text += text
        self._show(branch, text)
        length, cause = branch.find_end(self.ends, len(branch.text) - len(text))
        limit = self.config.branch_max_new_tokens
        if not cause and ended:
            cause = "eos" if token in self.call.eos_token_ids else "criterion"
        elif not cause and limit and len(branch.tokens) >= limit:
            cause = "budget"
        if cause:
            self._end_branch(branch, cause, length)
        return not cause

    def _end_branch(self, branch: BranchRow, cause: str, length: int | None = None) -> None:
        """End a branch, and cut its text to `length` bytes."""
        branch.ended_by = cause
        if cause == "budget":
            self.call.record.truncated.add(branch.output_row)
        branch.kept = branch.tokens[:-1] if cause == "eos" else branch.tokens
        if length is not None:
            with suppress(ValueError):  # a part that cannot be encoded stays whole
                cut = slice_tokens(branch.tokens, self.vocabulary, 0, length)
                more = max(len(cut) - len(branch.tokens), 0)  # a part of a token may be several
                others = sum(not other.ended_by for other in branch.trunk.branches)
                if more <= max(branch.trunk.branch_budget - others, 0):
                    branch.trunk.branch_budget -= more
                    branch.kept = cut
        separated = text_of(branch.kept).endswith(text_of(self.separator))
        branch.joined = branch.prefix + branch.kept + ([] if separated else self.separator)
        self._show(branch, b"", "end")

    # Joining

    def _join(self, trunk: TrunkRow) -> None:
        """Join the branches: some with their keys and values, the others as tokens, which are prefilled again."""
        branches, start = trunk.branches, len(trunk.tokens)
        kept = branches
        if self.config.join == "reencode":  # the first one has followed the trunk, unless its state was cut off
            kept = [one for one in branches[:1] if self.cache.pool.continues(one.block, one.num_cached)]
        reencoded = [token for branch in branches[len(kept) :] for token in branch.joined] + trunk.terminator
        joined = [token for branch in branches for token in branch.joined] + trunk.terminator
        records = [self._record(branch) for branch in branches]
        trunk.blocks.append(ParallelBlock(trunk.skeleton, start, start + len(joined), records))
        self._replace_tokens(trunk, start, ids(joined))
        trunk.tokens = trunk.tokens + joined
        trunk.branches, trunk.stage = [], CONTINUATION
        trunk.parser, trunk.parsed_from = SkeletonParser(self.config), len(trunk.tokens)
        trunk.decoder.reset()
        self._show(trunk, text_of(joined), "join")
        if self._budget(trunk) <= 0:
            self._finish(trunk, "budget")
        else:
            sampled_last = sum(token.draw >= 0 for branch in branches for token in branch.uncached)
            for branch in kept:
                trunk.writes.add(branch.block, ids(branch.uncached))
                self.cache.pool.truncate(branch.block, branch.num_cached)
            trunk.pending = ids(reencoded)
            num_pending = sum(len(tokens) for _, tokens in trunk.writes.pending)
            self.loop.stats.prefilled_tokens += num_pending + len(reencoded) - sampled_last
            self.stages[CONTINUATION].computed_again += sum(branch.num_cached for branch in branches[len(kept) :])
            self.cache.join(trunk.tree, len(kept), num_pending)
            self._prefill_joined(trunk)
        self._release(trunk)

    def _prefill_joined(self, trunk: TrunkRow) -> None:
        """Compute pending tokens in chunks, so that the next pass is not larger than one of a prefill."""
        size = self.loop.runner.chunk_size
        while len(trunk.pending) > size:
            chunk, trunk.pending = trunk.pending[:size], trunk.pending[size:]
            inputs = [*trunk.writes.take(), (Segment(trunk.tree.view, size), chunk)]
            self.loop.runner.forward(inputs, ends=[len(inputs) - 1])
            self.stages[CONTINUATION].forward_passes += 1

    def _record(self, branch: BranchRow) -> Branch:
        text = text_of(branch.kept).decode(errors="replace")
        return Branch(branch.title, ids(branch.prefix), text, ids(branch.tokens), branch.ended_by)

    # Output

    def _replace_tokens(self, trunk: TrunkRow, start: int, tokens: list[int]) -> None:
        """Replace the tokens of an answer from `start` on, as processors and criteria see them."""
        table = self.loop.table
        table.truncate(trunk.index, self.call.input_ids.shape[1] + start)
        table.extend(trunk.index, tokens)

    def _show(self, row: PDOSRow, text: bytes, event: str = "token") -> None:
        self.call.show(row.output_row, row.decoder.decode(text, event != "token"), event)

    def _release(self, trunk: TrunkRow) -> None:
        """Pass tokens that will not change any more to the streamer."""
        if trunk.finished or not self._may_open(trunk):
            self.stream.put(trunk.index, ids(trunk.tokens[trunk.num_streamed :]))
            trunk.num_streamed = len(trunk.tokens)

    def _transcript(self, trunk: TrunkRow) -> str:
        kept = [token for token in ids(trunk.tokens) if token not in self.call.eos_token_ids]
        return self.call.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class TrunkFormatProcessor(LogitsProcessor):
    """Forces blocks that the trunks of a run open to be well-formed."""

    keeps_rows = False
    run: PDOSRun

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See `PDOSRun.force_format`."""
        return self.run.force_format(scores)
