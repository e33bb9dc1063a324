"""ForkJoinRun: one call of the fork_join mode.

A model that was trained to think in parallel opens a fork by a tag. The text that it continues then pauses, and its
paths are written at the same time, each a row of the batch that sees the text before the fork and itself. When all of
them have ended they are joined, and the text goes on after them. Paths may fork, too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_parallel.cache import Segment
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.generation.call import GenerationCall, vocabulary_size
from hf_parallel.generation.caller import warn_sequential
from hf_parallel.generation.config import Generated
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.modes.fork_join.lanes import Answer, Lane
from hf_parallel.generation.modes.fork_join.output import Fork, ForkJoinOutput
from hf_parallel.generation.modes.fork_join.settings import ForkJoinSettings
from hf_parallel.generation.modes.pdos.rows import aligned, answer_log_probs
from hf_parallel.generation.modes.pdos.token_text import Token, encode_exactly, get_vocabulary, ids, slice_tokens
from hf_parallel.generation.prefill import initial_capacity, prefill_leaves
from hf_parallel.generation.rows import Row
from hf_parallel.generation.streaming import FinalTokens
from hf_parallel.generation.token_table import TokenTable
from hf_parallel.models.attention import UnsupportedModelError


class ForkJoinRun:
    """One call of the mode."""

    def __init__(self, config: ForkJoinSettings, call: GenerationCall) -> None:
        if call.past_key_values is not None:
            raise ValueError("fork_join makes its own cache; past_key_values cannot be given")
        self.config, self.call, self.dialect = config, call, config.format
        if reason := _why_not(call, self.dialect.positions):
            raise UnsupportedModelError(f"positions={self.dialect.positions!r} {reason}: 'reencode' works")
        vocabulary = get_vocabulary(call.tokenizer, vocabulary_size(call.model))
        self.vocabulary = vocabulary.without_text(call.eos_token_ids)
        self.known: dict[str, list[Token]] = {}
        for text in (self.dialect.fork_text, *self.dialect.branch, self.dialect.joined_text):
            self._tokens(text)
        self.opening = self._tokens(config.opening) if config.opening else []
        if len(self.opening) >= call.max_new_tokens:
            raise ValueError(
                f"opening must be shorter than the {call.max_new_tokens} new tokens, got {config.opening!r}"
            )
        self.closing = self._tokens(self.dialect.branch[1] + self.dialect.gap)
        self.cache = call.new_cache(SharedPrefixCache, call.capabilities.rotary)
        call.claim_cache(self.cache)
        # The budget counts the joined answer, whose length MaxLengthCriteria cannot check.
        criteria = StoppingCriteriaList(c for c in call.stopping_criteria if not isinstance(c, MaxLengthCriteria))
        self.capacity = initial_capacity(call.max_new_tokens, call.num_rows)
        table = TokenTable(call.input_ids, call.pad_token_id, self.capacity)
        self.loop = DecodeLoop(call, self.cache, table, criteria, config.seed, stream=False)
        streamer = call.streamer if hasattr(call.streamer, "put") else None
        self.stream = FinalTokens(streamer, call.num_rows, call.pad_token_id)
        self.num_streamed = [0] * call.num_rows
        self.roots: list[Lane] = []

    def generate(self) -> Generated:
        """Generate. Return a tensor `int64 [batch, length]` or a `ForkJoinOutput`."""
        call, cache, loop = self.call, self.cache, self.loop
        with loop.running():
            leaves = list(map(cache.insert_prompt, call.prompts, call.gaps))
            logits = prefill_leaves(loop, cache, leaves)
            blocks = cache.pool.new_blocks(len(leaves), self.capacity)
            for index, (leaf, block) in enumerate(zip(leaves, blocks, strict=True)):
                block.base = leaf.next_position
                answer = Answer(index, call.max_new_tokens)
                self.roots.append(Lane(answer, index, [*leaf.view, block]))
                self.roots[-1].table_from = loop.table.lengths[index]
            rows = self.roots
            if self.opening:
                rows, logits = self._prefill_opening()
            loop.decode(rows, logits, self._on_token, schedule=self._schedule)
        sampler, answers = loop.sampler, [root.tokens for root in self.roots]
        sampler.scores, sampler.logits = (aligned(kept, answers) for kept in (sampler.scores, sampler.logits))
        fallback = [root.answer.fallback for root in self.roots]
        output = loop.output(
            ForkJoinOutput,
            self.roots,
            forks=[root.forks for root in self.roots],
            transcripts=[self._transcript(root) for root in self.roots],
            critical_path=[root.steps for root in self.roots],
            fallback=fallback,
            log_probs=answer_log_probs(sampler, answers),
        )
        warn_sequential(
            [
                None if root.forks else reason or f"the model has not written {self.dialect.fork_text!r}"
                for root, reason in zip(self.roots, fallback, strict=True)
            ]
        )
        return output

    def _prefill_opening(self) -> tuple[list[Lane], torch.Tensor]:
        """Start every answer with the opening, which may fork. Return the active rows and the logits that follow."""
        began = time.perf_counter()
        for root in self.roots:
            root.append(self.opening)
            root.pending = ids(self.opening)
            root.answer.left -= len(self.opening)
            self.loop.table.extend(root.index, root.pending)
            self._show(root, root.text)
            if not (end := _find(root, self.dialect.fork_text, 0)) or not self._fork(root, end):
                self.loop.stats.prefilled_tokens += len(self.opening)
        rows = self._schedule(self.roots)
        logits = self.loop.step(rows)
        self.loop.stats.prefill_seconds += time.perf_counter() - began
        return rows, logits

    # Callbacks of the decode loop

    def _on_token(self, lane: Lane, token: int, ended: bool) -> bool:
        text = self.vocabulary.texts[token]
        lane.append([Token(token, text, lane.num_samples, lane.index)])
        lane.num_samples, lane.steps = lane.num_samples + 1, lane.steps + 1
        lane.answer.left -= 1
        lane.pending = [token]
        self._show(lane, text)
        known = len(lane.text) - len(text)
        limit = self.config.path_max_new_tokens
        if ended:
            self._end(lane, "eos" if token in self.call.eos_token_ids else "criterion")
        elif lane.parent is not None and (end := _find(lane, self.dialect.branch[1], known)):
            self._end(lane, "tag", end)
        elif (end := _find(lane, self.dialect.fork_text, known)) and self._fork(lane, end):
            return False
        elif lane.parent is not None and limit is not None and lane.num_samples - lane.parent.num_samples >= limit:
            self._end(lane, "budget")
        return not lane.ended_by

    def _schedule(self, active: Sequence[Row]) -> list[Lane]:
        """Join forks whose paths have ended. Return the rows of the next pass, ascending by index."""
        rows: list[Lane] = []
        for root in self.roots:
            self._join_ended(root)
            while len(writing := root.writing()) > max(root.answer.left, 0):
                for lane in writing[max(root.answer.left, 0) :]:
                    self._end(lane, "budget")
                self._join_ended(root)
            rows += writing
            if root in writing or root.ended_by:
                self.stream.put(root.index, ids(root.tokens[self.num_streamed[root.index] :]))
                self.num_streamed[root.index] = len(root.tokens)
        self.stream.flush()
        return sorted(rows, key=lambda row: row.index)

    def _join_ended(self, lane: Lane) -> None:
        """Join the forks of a lane whose paths have all ended, from the inside out."""
        for path in lane.paths:
            self._join_ended(path)
        if lane.paths and not any(path.writing() for path in lane.paths):
            self._join(lane)

    # Forks

    def _fork(self, lane: Lane, end: int) -> bool:
        """Start the paths of a region whose fork tag ends at byte `end` of a lane's text; False: it stays text."""
        before = lane.text[:end].decode(errors="replace")
        begin = before.rfind(self.dialect.region[0])
        if begin < 0:
            return False
        answer, numbers = lane.answer, self.dialect.numbers(before[begin:], self.config.paths)
        openings = [self._tokens(self.dialect.first_text(number)[1]) for number in numbers]
        gap = self.dialect.first_text("")[0]
        inserted = len(gap) + sum(map(len, openings)) + len(self._tokens(self.dialect.joined_text))
        cost = inserted + len(numbers) * len(self.closing)
        split = lane.max_split(end)
        running = len(self.roots[answer.output_row].writing()) - 1
        if reason := self._why_not(lane, len(numbers), running, cost + split):
            answer.fallback = reason
            return False
        self._cut(lane, end, gap)
        answer.left -= cost - len(gap)
        tail = ids(lane.uncached)
        answer.writes.add(lane.block, tail)
        capacity = initial_capacity(max(answer.left // len(numbers), 1), len(numbers))
        blocks = self.cache.pool.new_blocks(len(numbers), capacity, lane.position)
        rows = self.loop.sampler.fork(lane.index, len(numbers))
        for row, block, number, opening in zip(rows, blocks, numbers, openings, strict=True):
            answer.num_paths += 1
            path = Lane(answer, row, [*lane.view, block], opening, lane)
            path.number, path.num_samples = number, lane.num_samples
            path.output_row = answer.output_row + answer.num_paths * self.call.num_rows
            lane.paths.append(path)
            path.table_from = self.loop.table.lengths[row]
            self.loop.table.extend(row, ids(opening))
            self._show(path, path.text, "begin")
        self.loop.stats.prefilled_tokens += len(tail) - 1 + sum(map(len, openings))
        return True

    def _why_not(self, lane: Lane, count: int, running: int, cost: int) -> str:
        """Return why a lane may not fork; empty if it may."""
        if lane.parent is not None and not self.dialect.is_nested:
            return "a path may not fork in this dialect"
        if lane.depth >= self.config.max_depth:
            return f"a fork would be deeper than max_depth={self.config.max_depth}"
        if not count:
            return "the region announces no path"
        if running + count > self.config.max_paths:
            return f"{running + count} paths at once are more than max_paths={self.config.max_paths}"
        return "the budget is too small for the paths" if cost + running + count > lane.answer.left else ""

    def _end(self, lane: Lane, cause: str, end: int | None = None) -> None:
        """End a lane. A path gets its closing tag if it has none, and the gap after it; cut its text at byte `end`."""
        lane.ended_by = cause
        if cause == "budget":
            self.call.record.truncated.add(lane.output_row)
        if lane.parent is not None:
            if cause == "eos":
                lane.replace(lane.tokens[lane.text_from : -1])
            closing = "" if end else self.dialect.branch[1]
            writing = len(self.roots[lane.answer.output_row].writing())
            if end is None or lane.max_split(end) > lane.answer.left - writing:  # what follows the tag stays
                end = len(lane.text)
            self._cut(lane, end, closing + self.dialect.gap)
            lane.answer.left += len(self.closing)  # tokens that were reserved
        self._show(lane, b"", "end")

    def _cut(self, lane: Lane, end: int, following: str) -> None:
        """Cut the text of a lane at byte `end`, and append a text, unless that follows already. Both count."""
        rest, more = lane.text[end:], following.encode()
        length = len(lane.tokens)
        if rest:
            kept = end + len(more) if rest.startswith(more) else end
            more = b"" if rest.startswith(more) else more
            lane.replace(slice_tokens(lane.tokens[lane.text_from :], self.vocabulary, 0, kept))
        if more:
            lane.append(self._tokens(more.decode()))
        lane.answer.left -= len(lane.tokens) - length
        self.loop.table.truncate(lane.index, lane.table_from)
        self.loop.table.extend(lane.index, ids(lane.tokens[lane.text_from :]))

    def _join(self, lane: Lane) -> None:
        """Join the paths of a lane: with their keys and values, or as tokens that are computed again."""
        paths, start, pool = lane.paths, len(lane.tokens), self.cache.pool
        joined = self._tokens(self.dialect.joined_text)
        base = lane.position
        kept, pending = paths, joined
        if self.dialect.positions == "reencode":  # the first path has followed the lane's text
            kept, pending = paths[:1], [*chain.from_iterable(path.tokens for path in paths[1:]), *joined]
            lane.answer.free(pool, [block for path in paths[1:] for block in path.own_blocks(lane)])
        advances = [path.position - base for path in kept]
        longest = max(advances) if self.dialect.positions == "depth" else sum(advances)
        for path, advance in zip(kept, advances, strict=True):
            lane.answer.writes.add(path.block, ids(path.uncached))
            if self.dialect.positions == "depth":
                path.block.shift -= advance if path is not kept[-1] else advance - longest
        lane.forks.append(
            Fork(start, start + sum(len(path.tokens) for path in paths), [path.record() for path in paths])
        )
        text = [*chain.from_iterable(path.tokens for path in paths), *joined]
        lane.tokens = lane.tokens + text
        lane.steps += max(path.steps for path in paths)
        lane.paths = []
        self.loop.table.extend(lane.index, ids(text))
        lane.table_from = self.loop.table.lengths[lane.index]
        lane.continue_in(
            [block for path in kept for block in path.own_blocks(lane)], pool.new_block(base=base + longest), pending
        )
        lane.decoder.reset()
        self._show(lane, b"".join(token.text for token in text), "join")
        self.loop.stats.prefilled_tokens += len(pending)
        self._prefill(lane)

    def _prefill(self, lane: Lane) -> None:
        """Compute pending tokens in chunks, so that the next pass is not larger than one of a prefill."""
        began, size = time.perf_counter(), self.loop.runner.chunk_size
        while len(lane.pending) > size:
            chunk, lane.pending = lane.pending[:size], lane.pending[size:]
            inputs = [*lane.answer.writes.take(), (Segment(lane.view, size), chunk)]
            self.loop.runner.forward(inputs, ends=[len(inputs) - 1])
        self.loop.stats.prefill_seconds += time.perf_counter() - began

    def _tokens(self, text: str) -> list[Token]:
        """Return the tokens of a text of the dialect. Raises `ValueError` if there are none."""
        if text not in self.known:
            found = encode_exactly(self.call.tokenizer, self.vocabulary, text)
            if found is None:
                raise ValueError(f"the tokenizer cannot encode {text!r} of the dialect")
            self.known[text] = [Token(token, self.vocabulary.texts[token]) for token in found]
        return self.known[text]

    def _show(self, lane: Lane, text: bytes, event: str = "token") -> None:
        self.call.show(lane.output_row, lane.decoder.decode(text, event != "token"), event)

    def _transcript(self, root: Lane) -> str:
        kept = [token for token in ids(root.tokens) if token not in self.call.eos_token_ids]
        return self.call.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _why_not(call: GenerationCall, positions: str) -> str:
    """Return why a model cannot place paths in this way; empty if it can."""
    name, found = type(call.model).__name__, call.capabilities
    if positions == "overlap" and found.rotary is None:
        return f"moves paths to other positions ({found.why_no_rotation})"
    if positions == "depth" and found.has_window:
        return f"lets paths share positions, but the sliding windows of {name} count tokens"
    if positions == "depth" and found.dense:
        return f"lets paths share positions, but {name} counts tokens in its own attention"
    return ""


def _find(lane: Lane, tag: str, known: int) -> int:
    """Return the end of a tag in the text of a lane that is complete only after `known` bytes; 0: there is none."""
    at = lane.text.find(tag.encode(), max(known - len(tag.encode()) + 1, 0))
    return at + len(tag.encode()) if at >= 0 else 0
