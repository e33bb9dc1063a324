"""CallRun: one call of a mode in which a path reads a prompt of its own, and returns text.

A path is a row of the batch that sees its prompt and itself. Prompts are prefixes in the tree of the cache, so what
several of them have in common is computed once. What a path returns is appended to the text that called it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_parallel.cache import Block, Segment, View
from hf_parallel.cache.logits_key import LogitsKey
from hf_parallel.cache.tree import Node
from hf_parallel.detokenizer import decode
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.call_dialects import CallDialect, CallMessage, Returned, Tag
from hf_parallel.generation.decoding.prefill import insert
from hf_parallel.generation.decoding.rows import PassInputs
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.modes.branches.lanes import Answer, Lane, Records
from hf_parallel.generation.modes.branches.output import BRANCHES, CONTINUATION
from hf_parallel.generation.modes.branches.run import BranchRun
from hf_parallel.generation.modes.branches.settings import BranchSettings
from hf_parallel.generation.modes.branches.token_text import Token, encode_exactly, ids, slice_tokens, text_of
from hf_parallel.generation.modes.stages import check_no_prompt_relative_settings
from hf_parallel.generation.prompts import Message, apply_template

CANCELLED = "cancelled"
"""What has ended a path whose text is no longer needed."""


class CallLane(Lane):
    """A path with a prompt of its own, whose last token is its first: the row computes it in its first pass."""

    def __init__(
        self, answer: Answer, index: int, view: View, parent: Lane, message: CallMessage, prompt: list[int]
    ) -> None:
        super().__init__(answer, index, view, [Token(prompt[-1], b"")], parent)
        self.name = message.number
        self.message = message
        self.prompt = prompt
        self.steps = parent.steps
        self.before = LogitsKey(tuple(prompt[:-1]))
        self.node: Node | None = None  # of the prompt but its last token; None: not computed yet
        self.call_start = 0  # byte at which the call begins in the text that made it
        self.result: str | None = None

    def own_blocks(self) -> list[Block]:
        """See `Lane.own_blocks`."""
        return [self.block]


class CallRun(BranchRun):
    """One call of such a mode, for a `CallDialect`. `records` make a record of each call and of its paths."""

    def __init__(
        self,
        config: BranchSettings,
        dialect: CallDialect,
        call: GenerationCall,
        records: CallRecords,
        limit: int | None,
        max_paths: int,
        max_depth: int,
    ) -> None:
        check_no_prompt_relative_settings(call, config.mode)
        closing = dialect.returned[1].encode()
        ends = [(closing, len(closing), "tag")] if closing else []
        self.dialect = dialect
        self.max_paths = max_paths
        self.max_depth = max_depth
        self.none = f"the model has not written {dialect.fork_text!r}"
        super().__init__(config, call, records, ends, "", limit, config.opening)
        self.records: CallRecords = records
        for text in dialect.tags:
            self.tokens(text, "tags of the dialect")

    def new_reader(self, offset: int = 0) -> int:
        """See `BranchRun.new_reader`. A reader is the byte up to which calls have been read."""
        return offset

    def may_change(self, lane: Lane) -> bool:
        """See `BranchRun.may_change`. A call may be replaced by what its paths return."""
        if self.dialect.keeps_call or lane.thinking is not None:
            return False
        return bool(lane.awaited) or self.dialect.opens_at(lane.text, lane.reader) < len(lane.text)

    # Calls in a text

    def _fork(self, lane: Lane, known: int) -> bool:
        """Start the paths of calls in the last tokens of a lane. Return whether the lane waits for any."""
        while (tag := self.dialect.find(lane.text, lane.reader, known)) is not None:
            if tag.kind == "misspelled":
                kept = slice_tokens(lane.own, self.vocabulary, 0, tag.start)
                self._replace_own(lane, [*kept, *self.tokens(self.dialect.call[0])])
                known = len(lane.text)
                continue
            known = tag.end
            reason = self._wait(lane, tag) if tag.kind == "wait" else self._call(lane, tag)
            if reason:
                lane.answer.fallback = reason
            if lane.awaited:
                self._replace_own(lane, slice_tokens(lane.own, self.vocabulary, 0, tag.end))
                return True
        return False

    def _replace_own(self, lane: Lane, tokens: Sequence[Token]) -> None:
        """Replace the tokens of a lane, which count in the budget."""
        lane.answer.left += len(lane.own) - len(tokens)
        self._replace(lane, tokens)

    def _wait(self, lane: Lane, tag: Tag) -> str:
        """Wait for a path. Return why not; empty if it does."""
        lane.awaited = [path for path in lane.calls if path.name == tag.number]
        return "" if lane.awaited else f"the model waits for path {tag.number}, which does not run"

    def _call(self, lane: Lane, tag: Tag) -> str:
        """Start the paths of a call. Return why not; empty if it does, or if the tag closes nothing."""
        dialect = self.dialect
        first_number = 1 + sum(len(fork.paths) for fork in lane.forks)
        found = dialect.messages(lane.text[: tag.end], tag, first_number)
        if found is None or found[0] < lane.reader:
            return ""
        start, messages = found
        reason = self._why_not(lane, messages)
        if reason:
            return reason
        seen = self._prompt_text(lane) + lane.text.decode(errors="replace")
        try:
            prompts = [self._encode(lane, dialect.prompt_of(message, seen)) for message in messages]
        except ValueError as error:
            return str(error)
        answer = lane.answer
        left = answer.left - sum(map(len, prompts))
        if left < len(messages) + len(self.roots[answer.output_row].writing()):
            return "the budget is too small for the paths"
        answer.left = left
        paths = [self._start(lane, message, prompt) for message, prompt in zip(messages, prompts, strict=True)]
        for path in paths:
            path.call_start = start
        place = _length(lane) - len(lane.own) + len(slice_tokens(lane.own, self.vocabulary, 0, tag.end))
        lane.forks.append(self.records.called(paths, place))
        lane.reader = tag.end
        if not dialect.wait:
            lane.awaited = list(paths)
        return ""

    def _why_not(self, lane: Lane, messages: Sequence[CallMessage]) -> str:
        """Return why a lane may not call; empty if it may."""
        if lane.path is not None and not self.dialect.is_nested:
            return "a path may not call in this dialect"
        if lane.depth >= self.max_depth:
            return f"a call would be deeper than max_depth={self.max_depth}"
        if not messages:
            return "the call has no message"
        numbers = [message.number for message in messages]
        if self.dialect.wait and any(path.number in numbers for fork in lane.forks for path in fork.paths):
            return f"there is already a path {numbers[0]}"
        root = self.roots[lane.answer.output_row]
        running = sum(isinstance(other, CallLane) for other in _with_calls(root) if not other.ended_by)
        at_once = running + len(messages)
        if at_once > self.max_paths:
            return f"{at_once} paths at once are more than max_paths={self.max_paths}"
        return ""

    def _prompt_text(self, lane: Lane) -> str:
        """Return the text that a lane has seen before its format: its prompt and its thinking."""
        if isinstance(lane, CallLane):
            return decode(self.call.tokenizer, lane.prompt, skip_special_tokens=True)
        tokens = self.call.token_ids(self.call.prompts[lane.index]).tolist()
        texts = self._all_texts.texts
        prompt = b"".join(self.vocabulary.texts[token] for token in tokens if 0 <= token < len(texts))
        return (prompt + lane.thought).decode(errors="replace")

    def _encode(self, lane: Lane, prompt: str) -> list[int]:
        """Return the tokens of the prompt of a path."""
        dialect = self.dialect
        tokenizer = self.call.tokenizer
        if dialect.is_chat and getattr(tokenizer, "chat_template", None):
            chat: list[Message] = [{"role": "user", "content": prompt}]
            if dialect.system:
                chat.insert(0, {"role": "system", "content": dialect.system})
            return encode(tokenizer, apply_template(chat, tokenizer, add_generation_prompt=True))
        tokens = encode(tokenizer, "\n\n".join(filter(None, (dialect.system, prompt))))
        root = self.roots[lane.answer.output_row]
        first = int(self.call.prompts[root.index][0])
        if first == getattr(tokenizer, "bos_token_id", None) is not None:
            tokens = [first, *tokens]
        if not tokens:
            raise ValueError("the prompt of a path is empty")
        return tokens

    def _start(self, lane: Lane, message: CallMessage, prompt: list[int]) -> CallLane:
        """Start a path after a prompt."""
        answer = lane.answer
        (row,) = self.loop.sampler.fork(lane.index, 1)
        table = self.loop.table
        table.truncate(row, 0)
        padding = max(table.begin - len(prompt), 0)
        table.extend(row, [self.call.pad_token_id] * padding + prompt)
        (block,) = self.cache.pool.new_blocks(1, min(answer.left, 64), len(prompt) - 1)
        path = CallLane(answer, row, [block], lane, message, prompt)
        path.reader = self.new_reader()
        answer.num_paths += 1
        path.output_row = answer.output_row + answer.num_paths * self.call.num_rows
        lane.calls.append(path)
        self.show(path, b"", "begin")
        return path

    # Prompts of paths

    def _begin_pass(self, rows: Sequence[Lane], is_decoding: bool = True) -> Steps[None]:
        starting = [row for row in rows if isinstance(row, CallLane) and row.node is None]
        if starting:
            yield from self._fill()
            yield from self._compute_prompts(starting)
        yield from super()._begin_pass(rows, is_decoding)

    def _compute_prompts(self, paths: Sequence[CallLane]) -> Steps[None]:
        """Compute the prompts of paths, all but the last token of each, as prefixes that they share."""
        for path in paths:
            path.node = self.cache.root
            if len(path.prompt) > 1:
                path.node = yield from insert(self.cache, np.array(path.prompt[:-1], np.int64))
        nodes = self.cache.nodes_to_prefill()
        inputs: PassInputs = [(Segment(node.view, len(node.uncached)), node.uncached.tolist()) for node in nodes]
        if inputs:
            yield from self.loop.runner.prefill(inputs)
        for root in self.roots:
            for lane in _with_calls(root):
                node = lane.node if isinstance(lane, CallLane) else self.prompt_nodes[lane.index]
                if node is not None and not lane.ended_by:
                    lane.see(node.view)

    # Results

    def _join_ended(self, lane: Lane) -> None:
        """Append what paths have returned to the lanes that wait for them, from the inside out."""
        for path in lane.calls:
            self._join_ended(path)
        if lane.awaited and not lane.ended_by and all(path.ended_by for path in lane.awaited):
            self._join(lane)

    def _join(self, lane: Lane) -> None:
        """Append what the awaited paths have returned, or replace the call by it."""
        paths = [path for path in lane.awaited if isinstance(path, CallLane)]
        returned = [Returned(path.message, path.result) for path in paths]
        lane.awaited = []
        lane.calls = [path for path in lane.calls if path not in paths]
        lane.steps = max(lane.steps, *(path.steps for path in paths))
        lane.stage = CONTINUATION if lane.parent is None else BRANCHES
        text = self.dialect.joined_text(returned)
        tokens = self._tokens_of(text)
        if tokens is None:
            self._end(lane, "budget")
            lane.answer.fallback = f"the tokenizer cannot encode what the paths return, {text!r}"
            return
        own = lane.own
        kept = own
        if not self.dialect.keeps_call:
            kept = slice_tokens(own, self.vocabulary, 0, paths[0].call_start)
        others = len(self.roots[lane.answer.output_row].writing()) - 1
        if len(tokens) - (len(own) - len(kept)) >= lane.answer.left - others:
            self._end(lane, "budget")
            lane.answer.fallback = "the budget is too small for what the paths return"
            return
        if kept is not own:
            self._replace_own(lane, kept)
        start = _length(lane)
        lane.append(tokens)
        lane.context = None
        lane.answer.left -= len(tokens)
        lane.reader = len(lane.text)
        self.loop.table.extend(lane.index, ids(tokens))
        self.show(lane, text_of(tokens), "join")
        self.records.joined(paths[0], start, _length(lane))

    def _tokens_of(self, text: str) -> list[Token] | None:
        """Return the tokens of a text that paths return, or None if there are none."""
        vocabulary = self._all_texts
        tokens = encode(self.call.tokenizer, text)
        is_known = all(0 <= token < len(vocabulary) for token in tokens)
        if not is_known or vocabulary.decode(tokens) != text.encode():
            fewest = encode_exactly(self.call.tokenizer, vocabulary, text)  # slow for a long text
            if fewest is None:
                return None
            tokens = fewest
        return [Token(token, self.vocabulary.texts[token]) for token in tokens]

    # Ends

    def _on_token(self, lane: Lane, token: int, ended: bool) -> bool:
        if lane.ended_by:  # by the end of the text that has called it, in this pass
            return False
        return super()._on_token(lane, token, ended)

    def _end(self, lane: Lane, cause: str, end: int | None = None) -> None:
        if lane.ended_by:
            return
        super()._end(lane, cause, end)
        for path in lane.calls:  # nothing will read what they return
            if not path.ended_by:
                self._end(path, CANCELLED)
        if isinstance(lane, CallLane):
            lane.answer.free(self.cache.pool, lane.own_blocks())
            self._release(lane)

    def _end_path(self, path: Lane, cause: str, end: int) -> None:
        assert isinstance(path, CallLane), "all paths are calls"
        first, *written = path.own
        text = written[:-1] if cause == "eos" else written
        try:
            kept = slice_tokens(text, self.vocabulary, 0, end)
        except ValueError:  # what follows the end stays
            kept = text
        path.answer.left += len(written) - len(kept)
        self._replace(path, [first, *kept])
        path.result = None
        if cause != CANCELLED:
            path.result = self.dialect.result(text_of(kept).decode(errors="replace"))
        self.records.ended(path)

    def _release(self, path: CallLane) -> None:
        """Give up the prompt of a path that has ended, but not what others read."""
        if path.node is None:
            return
        used: set[Node] = set()
        for root in self.roots:
            used.update(self.prompt_nodes[root.index].path)
            for lane in _with_calls(root):
                if isinstance(lane, CallLane) and not lane.ended_by and lane.node is not None:
                    used.update(lane.node.path)
        self.cache.release([node for node in reversed(path.node.path) if node not in used])


def _length(lane: Lane) -> int:
    """Return the number of tokens of a lane's text, without the last token of its prompt."""
    return len(lane.tokens) - isinstance(lane, CallLane)


def _with_calls(lane: Lane) -> list[Lane]:
    """Return a lane and all paths that it has called."""
    lanes = [lane]
    for path in lane.calls:
        lanes += _with_calls(path)
    return lanes


class CallRecords(Records):
    """Records of calls, which change while their paths are written."""

    def called(self, paths: Sequence[CallLane], place: int) -> Any:
        """Return the record of a call, with paths that begin now. Its text ends at token `place` of the lane."""
        raise NotImplementedError

    def joined(self, path: CallLane, start: int, end: int) -> None:
        """Receive the slice of the tokens that stand for the paths of the call of `path`."""
        raise NotImplementedError

    def ended(self, path: CallLane) -> None:
        """Receive a path that has ended. Paths end once."""
        raise NotImplementedError
