"""BranchRun: one call of a mode in which an answer has branches.

A row writes the text of an answer. Where the mode finds a fork in it, the row pauses, and its paths are written at the
same time, each a row of the batch that sees the text before the fork and itself. When all of them have ended, they are
joined and the row continues after them. Paths may fork, too.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_parallel.cache import Segment
from hf_parallel.cache.tree import Node
from hf_parallel.detokenizer import decode, hidden_tokens
from hf_parallel.generation.call import GenerationCall, vocabulary_size
from hf_parallel.generation.caller import warn_sequential
from hf_parallel.generation.config import Generated
from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.prefill import initial_capacity, insert_prompts, prefill_leaves
from hf_parallel.generation.decoding.replay.config import replaying
from hf_parallel.generation.decoding.rows import Row
from hf_parallel.generation.decoding.wants import Steps, Wait
from hf_parallel.generation.modes.branches.cache import TreeBranchCache
from hf_parallel.generation.modes.branches.forcing import FormatProcessor
from hf_parallel.generation.modes.branches.lanes import (
    Answer,
    Lane,
    OpenFork,
    Records,
    aligned,
    answer_log_probs,
)
from hf_parallel.generation.modes.branches.output import (
    BRANCHES,
    CONTINUATION,
    SKELETON,
    STAGES,
    THINKING,
    StageStats,
)
from hf_parallel.generation.modes.branches.settings import BranchSettings
from hf_parallel.generation.modes.branches.thinking import ThinkingEnd, describe_after
from hf_parallel.generation.modes.branches.token_text import (
    Token,
    encode_exactly,
    get_vocabulary,
    ids,
    slice_tokens,
    text_of,
)
from hf_parallel.generation.sampling.token_table import TokenTable
from hf_parallel.generation.streaming import FinalTokens


class BranchRun:
    """One call of such a mode. A subclass reads a format; `records` make the output of the mode.

    `ends`: what ends a path, see `Lane.find_end`. `closing`: the text that a path needs at most to end well.
    `opening`: first text of every answer, from the setting `opening_name`. `limit`: maximum number of tokens of a path.
    """

    none = ""
    """Why an answer without a fork has none, if the mode has not found a reason."""

    def __init__(
        self,
        config: BranchSettings,
        call: GenerationCall,
        records: Records,
        ends: Sequence[tuple[bytes, int, str]],
        closing: str,
        limit: int | None,
        opening: str,
        opening_name: str = "opening",
    ) -> None:
        if call.past_key_values is not None:
            raise ValueError(f"{config.mode} makes its own cache; past_key_values cannot be given")
        self.positions = config.positions
        config.check_call(call)
        for processor in call.logits_processor:
            if isinstance(processor, FormatProcessor):
                processor.run = self
        self.config: BranchSettings = config
        self.call = call
        self.records = records
        self.ends = ends
        self.limit = limit
        self._all_texts = get_vocabulary(call.tokenizer, vocabulary_size(call.model))
        self.vocabulary = self._all_texts.without_text(call.hidden_tokens)  # that the model writes
        self._known: dict[str, list[Token]] = {"": []}
        self.opening = self.tokens(opening, opening_name)
        self.opening_name = opening_name
        self.end_of_thinking: list[Token] = []  # inserted at the limit of the thinking
        if isinstance(config.after, str):
            self.end_of_thinking = self.tokens(config.after, "after")
        self.closing = self.tokens(closing)
        if len(self.opening) >= call.max_new_tokens:
            raise ValueError(
                f"{opening_name} must be shorter than the {call.max_new_tokens} new tokens, got {opening!r}"
            )
        self.cache = call.new_cache(TreeBranchCache, call.capabilities.rotary)
        call.begin_cache(self.cache)
        # The budget counts the joined answer, whose length MaxLengthCriteria cannot check.
        criteria = StoppingCriteriaList(c for c in call.stopping_criteria if not isinstance(c, MaxLengthCriteria))
        self.capacity = initial_capacity(call.max_new_tokens, call.num_rows)
        table = TokenTable(call.input_ids, call.pad_token_id, self.capacity)
        self.loop = DecodeLoop(call, self.cache, table, criteria, config.seed, stream=False)
        streamer = call.streamer if hasattr(call.streamer, "put") else None
        self.stream = FinalTokens(streamer, call.num_rows, call.pad_token_id)
        stages = STAGES if config.after is None else (THINKING, *STAGES)
        self.stages = {name: StageStats() for name in stages}
        self.roots: list[Lane] = []
        self.leaves: list[Node] = []  # of the prompts, if they are not computed yet
        self.prompt_nodes: list[Node] = []  # of all prompts

    # Hooks of a mode

    def find_fork(self, lane: Lane, known: int) -> OpenFork | None:
        """Return the fork at the end of a lane's text that is complete only after `known` bytes, or None.

        May raise `ValueError` if no tokens have its text, and set `lane.answer.fallback` if it stays text.
        """
        raise NotImplementedError

    def path_end(self, text: bytes, end: int, cause: str) -> tuple[int, str]:
        """Return how many bytes of a path's text are kept, at least `end`, and the text that follows them."""
        raise NotImplementedError

    def new_reader(self, offset: int = 0) -> Any:
        """Return what reads the text of a lane since its last fork, from the byte `offset` on, as `Lane.reader`."""

    def read(self, lane: Lane, text: bytes, ended: bool) -> None:
        """Read new text of a lane."""

    def allowed(self, lane: Lane) -> torch.Tensor | None:
        """Return a mask of the tokens that an answer may write next, bool `[vocabulary]` on the CPU; None: any.

        Called if the config `forces_format`.
        """

    def end_answer(self, lane: Lane, cause: str) -> None:
        """Receive an answer that has ended."""

    def may_change(self, lane: Lane) -> bool:
        """Return whether paths may replace the last tokens of an answer."""
        return False

    # The call

    def generate(self) -> Steps[Generated]:
        """Generate. Return a tensor `int64 [batch, length]` or the mode's output."""
        call = self.call
        cache = self.cache
        loop = self.loop
        with loop.running(), replaying(loop, self.config):
            self.leaves = yield from insert_prompts(call, cache)
            self.prompt_nodes = self.leaves
            cache.nodes_to_prefill()  # allocates blocks
            for index, view in enumerate(cache.new_answers(self.leaves, self.capacity)):
                root = Lane(Answer(index, call.max_new_tokens), index, view)
                root.before = call.logits_keys[index]
                root.reader = self.new_reader()
                self.roots.append(root)
            for root in self.roots:
                root.thinking = self._new_thinking(root)
                if root.thinking is None:
                    self._begin_format(root)
            rows = yield from self._replay(self._active_rows())
            logits = None
            if not all(row.pending for row in rows):
                logits = yield from self._fill()
            yield from self._begin_pass(rows, is_decoding=logits is None)
            yield from loop.decode(rows, logits, self._on_token, schedule=self._schedule)
            cache.discard_uncached()  # prompts, if all tokens were replayed
        if loop.replayer is not None:
            call.record.pass_log = None  # passes do not say after which token a replayed one was sampled
        sampler = loop.sampler
        answers = [root.tokens for root in self.roots]
        transcripts = [self._transcript(root) for root in self.roots]
        thinking = []
        for root, transcript in zip(self.roots, transcripts, strict=True):
            thinking.append(self._thinking_of(root, transcript))
        sampler.scores = aligned(sampler.scores, answers)
        sampler.logits = aligned(sampler.logits, answers)
        kind, records = self.records.output(self.roots)
        records = {"fallback": [root.answer.fallback for root in self.roots], **records}
        output = loop.output(
            kind,
            self.roots,
            transcripts=transcripts,
            thinking=thinking,
            thinking_tokens=[root.thought_tokens for root in self.roots],
            stages=self.stages,
            log_probs=answer_log_probs(sampler, answers),
            **records,
        )
        reasons = []
        for root, reason in zip(self.roots, records["fallback"], strict=True):
            reasons.append(None if root.forks else reason or self.none)
        warn_sequential(reasons)
        return output

    def _fill(self) -> Steps[torch.Tensor | None]:
        """Compute the prompts, unless that is done. Return the logits after each."""
        leaves = self.leaves
        self.leaves = []
        if not leaves:
            return None
        spare = self.cache.pool.new_block(self.capacity * len(leaves))  # so that storage need not grow for paths
        logits = yield from prefill_leaves(self.loop, self.cache, leaves)
        self.cache.pool.free(spare)
        return logits

    def tokens(self, text: str, name: str = "") -> list[Token]:
        """Return the tokens of a text of the format. Raises `ValueError` if there are none."""
        if text not in self._known:
            encoded = encode_exactly(self.call.tokenizer, self._all_texts, text)
            if encoded is None:
                raise ValueError(f"{name or 'the format'} must be text that the tokenizer can encode, got {text!r}")
            self._known[text] = [Token(token, self._all_texts.texts[token]) for token in encoded]
        return self._known[text]

    def insert(self, lane: Lane, tokens: Sequence[Token]) -> None:
        """Append tokens that are not sampled to a lane."""
        lane.append(tokens)
        lane.context = None
        lane.answer.left -= len(tokens)
        self.loop.table.extend(lane.index, ids(tokens))
        self.show(lane, text_of(tokens), "inject")

    def show(self, lane: Lane, text: bytes, event: str = "token") -> None:
        """Stream text of a lane."""
        self.call.show(lane.output_row, lane.decoder.decode(text, event != "token"), event)

    # Callbacks of the decode loop

    def _on_token(self, lane: Lane, token: int, ended: bool) -> bool:
        text = self.vocabulary.texts[token]
        lane.fresh = [Token(token, text, lane.num_samples, lane.index)]
        lane.append(lane.fresh)
        lane.num_samples = lane.num_samples + 1
        lane.steps = lane.steps + 1
        lane.answer.left -= 1
        self.show(lane, text)
        num_read = len(lane.text) - len(text)
        if lane.thinking is not None:
            return self._think(lane, token, ended)
        self.read(lane, text, ended)
        path = lane.path
        end = lane.find_end(self.ends, num_read) if path else None
        if end is not None:
            num_kept, cause = end
            self._end(lane, cause, num_kept)
        elif ended:
            self._end(lane, "eos" if token in self.call.eos_token_ids else "criterion")
        elif self._fork(lane, num_read):
            return False
        elif path and self.limit and lane.num_samples - path.num_inherited >= self.limit:
            self._end(lane, "budget")
        return not lane.ended_by

    # The thinking

    def _new_thinking(self, root: Lane) -> ThinkingEnd | None:
        """Return what finds the end of an answer's thinking; None if there is none, or the prompt has ended it."""
        after = self.config.after
        if after is None:
            return None
        tokens = self.call.token_ids(self.call.prompts[root.index]).tolist()
        texts = self._all_texts.texts
        prompt = b"".join(texts[token] for token in tokens if 0 <= token < len(texts))
        thinking = ThinkingEnd(after)
        if thinking.is_at_end_of(prompt.decode(errors="replace")):
            return None
        root.stage = THINKING
        return thinking

    def _think(self, lane: Lane, token: int, ended: bool) -> bool:
        """Look for the end of the thinking in its last token. Return whether the row goes on."""
        assert lane.thinking is not None, "the lane thinks"
        limit = self.config.thinking_max_new_tokens
        if ended:
            self._end(lane, "eos" if token in self.call.eos_token_ids else "criterion")
            return False
        num_after = lane.thinking.feed(self._all_texts.texts[token])
        is_limit = limit is not None and lane.num_samples >= limit
        if num_after is None and is_limit and len(self.end_of_thinking) < lane.answer.left:
            self.insert(lane, self.end_of_thinking)
            num_after = 0
        if num_after is None:
            return True
        if len(self.opening) >= lane.answer.left:
            lane.answer.fallback = f"after the thinking, the budget is too small for {self.opening_name}"
            return True
        shown = len(self.vocabulary.texts[token])  # a special token may have no text
        lane.begin_format(min(num_after, shown))
        self.call.show(lane.output_row, "", "step")
        return not self._begin_format(lane, min(num_after, shown))

    def _begin_format(self, root: Lane, num_after: int = 0) -> bool:
        """Begin what the mode reads in an answer: its last `num_after` bytes, and the opening. Return whether it
        forks."""
        root.stage = SKELETON
        root.reader = self.new_reader(len(root.text) - num_after)
        if num_after:
            self.read(root, root.text[-num_after:], False)
        if self.opening:
            self.insert(root, self.opening)
            self.read(root, text_of(self.opening), False)
        return self._fork(root, 0)

    def _schedule(self, active: Sequence[Row]) -> Steps[list[Lane]]:
        """Return the rows of the next pass, and count the cost of the last one."""
        now = time.perf_counter()
        total = self._pass_tokens.total()
        for stage, count in self._pass_tokens.items():
            self.stages[stage].seconds += (now - self._pass_began) * count / total
        for stage in self._pass_stages:
            self.stages[stage].decoded_tokens += 1
        rows = yield from self._replay(self._active_rows())
        yield from self._begin_pass(rows)
        return rows

    def _replay(self, rows: list[Lane]) -> Steps[list[Lane]]:
        """Append tokens that are sampled from cached logits, while all rows of an answer have them.

        Return the rows that need the model. They compute what was replayed in their next pass.
        """
        replayer = self.loop.replayer
        computing = set[int]()  # answers that need the model
        while replayer is not None:
            for row in rows:
                if row.context is None:
                    row.context = row.before.then(ids(row.own))
                    replayer.place(row.index, row.context)
            is_joint = replayer.sampler.is_stateful or not all(root.tokens for root in self.roots)
            answers: dict[int, list[int]] = {}
            for row in rows:
                number = 0 if is_joint else row.answer.output_row
                answers.setdefault(number, []).append(row.index)
            hits = set()
            for number, indices in answers.items():
                if number not in computing and replayer.lookup(indices):
                    hits.add(number)
            computing |= answers.keys() - hits
            if not hits:
                break
            sampled = rows if is_joint else [row for row in rows if row.answer.output_row in hits]
            tokens, ended, log_probs = replayer.sample([row.index for row in sampled])
            self.loop.append(sampled, tokens, ended, self._on_token, is_pass=False, log_probs=log_probs)
            rows = self._active_rows()
            if self.call.host.turn_is_over:
                yield Wait()
        self.stream.flush()
        return rows

    def _begin_pass(self, rows: Sequence[Lane], is_decoding: bool = True) -> Steps[None]:
        self._pass_began = time.perf_counter()
        self._pass_stages = [row.stage for row in rows]
        self._pass_tokens: Counter[str] = Counter()
        if rows:
            yield from self._fill()
        for row in rows:
            self._pass_tokens[row.stage] += max(len(row.pending), 1)
            self._count(row.uncached, row.fresh)
            yield from self._prefill(row)
        for stage in self._pass_tokens:
            self.stages[stage].forward_passes += is_decoding

    def _active_rows(self) -> list[Lane]:
        """Join forks whose paths have ended. Return the rows of the next pass, ascending by index."""
        rows: list[Lane] = []
        for root in self.roots:
            self._join_ended(root)
            writing = root.writing()
            left = max(root.answer.left, 0)
            while len(writing) > left:
                for lane in writing[left:]:
                    self._end(lane, "budget")
                self._join_ended(root)
                writing = root.writing()
                left = max(root.answer.left, 0)
            rows += writing
            if not root.paths:
                self._settle(root)
        return sorted(rows, key=lambda row: row.index)

    def _settle(self, root: Lane) -> None:
        """Stream tokens of an answer that will not change any more. Before others, keep the state."""
        if not root.ended_by and self.may_change(root):
            if self.cache.pool.states.in_use:
                root.detach(self.cache.pool)
            return
        self.stream.put(root.index, ids(root.tokens[root.num_streamed :]))
        root.num_streamed = len(root.tokens)
        if not root.ended_by:
            root.attach(self.cache.pool)

    def _prefill(self, lane: Lane) -> Steps[None]:
        """Compute pending tokens in chunks, so that the next pass is not larger than one of a prefill."""
        began = time.perf_counter()
        size = self.loop.runner.chunk_size
        while len(lane.pending) > size:
            chunk = lane.pending[:size]
            lane.pending = lane.pending[size:]
            inputs = [*lane.answer.writes.take(), (Segment(lane.view, size), chunk)]
            yield from self.loop.runner.forward(inputs, ends=[len(inputs) - 1])
            self.stages[lane.stage].forward_passes += 1
        self.loop.stats.prefill_seconds += time.perf_counter() - began

    def _count(self, tokens: Sequence[Token], fresh: Iterable[Token]) -> None:
        """Count tokens of the next pass as prefilled, except those that were just sampled."""
        num_fresh = sum(token in tokens for token in fresh)
        self.loop.stats.prefilled_tokens += len(tokens) - num_fresh

    # Forks

    def _fork(self, lane: Lane, known: int) -> bool:
        """Start the paths of a fork in the last tokens of a lane. False: there is none, or it stays text."""
        try:
            fork = self.find_fork(lane, known)
        except ValueError as error:
            lane.answer.fallback = str(error)
            fork = None
        if fork is None:
            return False
        answer = lane.answer
        count = len(fork.paths)
        inserted = sum(len(first) for _, first in fork.paths) + len(fork.joined)
        inserted += (count - fork.is_separate) * len(self.closing)
        left = answer.left + len(lane.own) - len(fork.head) - inserted
        if left < count + len(self.roots[answer.output_row].writing()) - 1:
            answer.fallback = "the budget is too small for the paths"
            return False
        answer.left = left
        num_computed = len(lane.tokens) - len(lane.uncached)
        computed = set(map(id, lane.tokens[:num_computed]))
        self._replace(lane, fork.head)
        tail = lane.uncached
        lane.open_fork = fork
        answer.write(lane, tail)
        self._count(tail, lane.fresh)
        views = self.cache.branch(lane.view, count, lane.position, left // count)
        rows = self.loop.sampler.fork(lane.index, count)
        for row, view, (name, first) in zip(rows, views, fork.paths, strict=True):
            path = Lane(answer, row, view, first, lane)
            path.before = lane.before.then(ids(lane.own)).branch(len(lane.paths))
            self.loop.table.extend(row, path.pending)
            if fork.is_separate and lane.paths:
                path.is_rest = True
                path.depth = lane.depth
                path.fresh = lane.fresh
                path.name = lane.name
                path.output_row = lane.output_row
            else:
                answer.num_paths += 1
                path.name = name
                path.output_row = answer.output_row + answer.num_paths * self.call.num_rows
                self.show(path, text_of(first[fork.is_separate :]), "begin")
            lane.paths.append(path)
        written = chain(tail, *(first for _, first in fork.paths))
        self.stages[BRANCHES].computed_again += sum(id(token) in computed for token in written)
        return True

    def _replace(self, lane: Lane, tokens: Sequence[Token]) -> None:
        """Replace the tokens of a lane since its last fork, as processors and criteria see them; stream what is new."""
        table = self.loop.table
        shown = lane.text
        start = table.lengths[lane.index] - len(lane.own)
        same = lane.replace(tokens, self.cache.pool)
        table.truncate(lane.index, start + same)
        table.extend(lane.index, ids(tokens[same:]))
        if len(lane.text) > len(shown) and lane.text.startswith(shown):
            self.show(lane, lane.text[len(shown) :], "inject")

    def _end(self, lane: Lane, cause: str, end: int | None = None) -> None:
        """End a lane, and cut the text of a path at byte `end`."""
        lane.ended_by = cause
        if cause == "budget":
            self.call.record.truncated.add(lane.output_row)
        if lane.thinking is not None:
            self._end_thinking(lane, cause)
        elif lane.path is None:
            self.end_answer(lane, cause)
        else:
            self._end_path(lane, cause, len(lane.text) if end is None else end)
        if self.positions == "separate":  # no text sees it
            lane.answer.free(self.cache.pool, lane.own_blocks())
        self.show(lane, b"", "end")

    def _end_thinking(self, root: Lane, cause: str) -> None:
        """Record that an answer has ended before its format began."""
        root.thought = root.text
        root.thought_tokens = len(root.tokens)
        if root.answer.fallback is None:
            assert self.config.after is not None, "the lane thinks"
            what = "budget" if cause == "budget" else "answer"
            root.answer.fallback = f"the {what} ended before {describe_after(self.config.after)}"

    def _end_path(self, path: Lane, cause: str, end: int) -> None:
        written = path.own
        answer = path.answer
        path.sampled = ids(written if path.forks else written[len(path.opening) :])
        without_eos = written[:-1] if cause == "eos" else written
        room = answer.left - len(self.roots[answer.output_row].writing()) + len(self.closing)
        for stop in (end, len(path.text)):  # what follows the end stays if it cannot be cut
            num_kept, following = self.path_end(path.text, stop, cause)
            try:
                tokens = slice_tokens(without_eos, self.vocabulary, 0, num_kept)
            except ValueError:
                continue
            tokens += self.tokens(following)
            if len(tokens) - len(written) <= room:
                break
        path.kept = path.text[:num_kept]
        answer.left += len(self.closing) + len(written) - len(tokens)
        self._replace(path, tokens)
        path.num_computed = len(path.tokens) - len(path.uncached)
        if self.positions == "reencode" and path.parent is not None and path is not path.parent.paths[0]:
            answer.free(self.cache.pool, path.own_blocks())

    def _join_ended(self, lane: Lane) -> None:
        """Join the forks of a lane whose paths have all ended, from the inside out."""
        for path in lane.paths:
            self._join_ended(path)
        if not lane.paths or any(path.writing() for path in lane.paths):
            return
        if self.positions == "separate":
            self._conclude(lane)
        else:
            self._join(lane)

    def _join(self, lane: Lane) -> None:
        """Join the paths of a lane: with their keys and values, or as tokens that are computed again."""
        fork = lane.open_fork
        paths = lane.paths
        start = len(lane.tokens)
        pool = self.cache.pool
        assert fork is not None, "the lane has forked"
        text = list(chain.from_iterable(path.tokens for path in paths))
        lane.forks.append(self.records.record(lane, start, start + len(text)))
        if self.positions == "reencode":  # the first path has followed the lane's text
            first, *later = paths
            if first.block.length:
                pool.forget_state(lane.block)
            view = list(first.view)
            block_from = start + first.block_from
            self.stages[CONTINUATION].computed_again += sum(path.num_computed for path in later)
            lane.before = lane.before.then(ids([*lane.own, *text, *fork.joined]))
            lane.fresh = [token for path in paths for token in path.fresh]
        else:
            view = self._placed(lane)
            block_from = start + len(text)
            branches = [path.before.then(ids(path.own)) for path in paths]
            joined = lane.before.join(ids(lane.own), branches, self.positions)
            lane.before = joined.then(ids(fork.joined))
            lane.fresh = []
        text += fork.joined
        lane.steps += max(path.steps for path in paths)
        lane.stage = CONTINUATION if lane.parent is None else BRANCHES
        lane.reader = self.new_reader()
        lane.continue_after(text, view, block_from)
        self.loop.table.extend(lane.index, ids(text))
        self.show(lane, text_of(text), "join")

    def _conclude(self, lane: Lane) -> None:
        """End a lane with the rest of its text, which follows the path that was written beside it."""
        path, remainder = lane.paths
        _, *inside = path.tokens  # the first token of both ends the text before them
        start = len(lane.tokens) + 1
        text = [path.tokens[0], *inside, *remainder.tokens[1:]]
        path.tokens = inside
        path.forks = self.records.moved(path.forks, -1)
        lane.forks.append(self.records.record(lane, start, start + len(inside)))
        lane.forks += self.records.moved(remainder.forks, start + len(inside) - 1)
        lane.steps += max(path.steps, remainder.steps)
        lane.answer.left += 1
        lane.continue_after(text, lane.view, start + len(text))
        lane.ended_by = remainder.ended_by
        self.loop.table.extend(lane.index, ids(text))
        lane.answer.free(self.cache.pool, lane.own_blocks())

    def _placed(self, lane: Lane) -> list[Any]:
        """Return the view of a lane that sees its paths where they are, or one after the other."""
        for path in lane.paths:
            lane.answer.write(path, path.uncached)
            self._count(path.uncached, path.fresh)
        branches = [(path.own_blocks(), path.position - lane.position) for path in lane.paths]
        return self.cache.join(lane.view, branches, lane.position, at_depth=self.positions == "depth")

    def _transcript(self, root: Lane) -> str:
        tokens = root.tokens[:-1] if root.ended_by == "eos" else root.tokens
        # Tokens that end rows were taken out, but may be tags of the format.
        hidden = hidden_tokens(self.call.tokenizer, (), self.config.format_texts)
        visible = [token for token in ids(tokens) if token not in hidden]
        return decode(self.call.tokenizer, visible, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _thinking_of(self, root: Lane, transcript: str) -> str | None:
        """Return the part of an answer's text before its format; None if there can be none."""
        if self.config.after is None:
            return None
        tokens = root.tokens[:-1] if root.ended_by == "eos" else root.tokens
        answer = text_of(tokens)[len(root.thought) :].decode(errors="replace")
        return transcript[: max(len(transcript) - len(answer), 0)]
