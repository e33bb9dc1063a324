"""Edits of what workers remember: steps that are removed, replaced or inserted (Hogwild! Inference, section 5).

An edit replaces tokens of one block: of the history, or of a worker whose steps do not move. It computes copies of the
blocks that change, and puts them into the place of these at the end, so that an edit that fails changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

from hf_parallel.cache import Block, Segment
from hf_parallel.generation.decoding.rows import PassInputs
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.modes.hogwild.cache import STEP_CAPACITY
from hf_parallel.generation.modes.hogwild.group import WorkerGroup
from hf_parallel.generation.modes.hogwild.output import Step
from hf_parallel.generation.modes.hogwild.worker import Worker

KEYS = ("reencode", "keep")
"""What happens to the keys of the text that follows an edit: they are computed again, or only rotated."""


class Feed(NamedTuple):
    """Tokens that a pass has appended to the block of a worker."""

    number: int  # of the pass; passes that come later have larger ones
    worker: int
    block: Block
    num_tokens: int


@dataclass(frozen=True)
class Splice:
    """Tokens `start <= j < stop` of a worker's text, or of the history (None), and the tokens that replace them."""

    worker: int | None
    start: int
    stop: int
    tokens: list[int]

    def apply(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens of the text after the edit."""
        return [*tokens[: self.start], *self.tokens, *tokens[self.stop :]]

    def feeds(self, feeds: Sequence[Feed]) -> list[Feed]:
        """Return the feeds of the worker's block after the edit; the new tokens belong to that of the first one."""
        after = []
        end = 0
        for feed in feeds:
            begin = end
            end = begin + feed.num_tokens
            removed = max(0, min(end, self.stop) - max(begin, self.start))
            added = len(self.tokens) if begin <= self.start < end else 0
            if feed.num_tokens - removed + added:
                after.append(feed._replace(num_tokens=feed.num_tokens - removed + added))
        return after


def locate(group: WorkerGroup, step: Step) -> Splice:
    """Return the removal of a finished step."""
    if group.config.has_steps or step.worker < 0:
        ends = [0, *accumulate(map(len, group.step_tokens))]
        index = next(index for index, other in enumerate(group.in_history) if other is step)
        return Splice(None, ends[index], ends[index + 1], [])
    start = 0
    for other in group.history:
        if other is step:
            break
        if other.worker == step.worker:
            start += len(other.tokens)
    return Splice(step.worker, start, start + len(step.tokens), [])


def text_tokens(group: WorkerGroup, worker: Worker) -> list[int]:
    """Return the tokens of a worker's block, and those that follow in the next pass."""
    tokens: list[int] = []
    for step in group.history:
        has_moved = group.config.has_steps and step.forward_pass is not None
        if step.worker == worker.number and not has_moved:
            tokens += step.tokens
    if not worker.stopped:  # else its last step is in the history, finished or not
        tokens += worker.current.tokens
    return tokens


class Editor:
    """Carries out edits of a group. `feeds` tell in which passes its blocks were computed."""

    def __init__(self, group: WorkerGroup, workers: Sequence[Worker], feeds: list[Feed]) -> None:
        self.group = group
        self.workers = workers
        self.space = group.space
        self.pool = group.cache.pool
        self.runner = group.loop.runner
        self.feeds = [feed for feed in feeds if feed.block is self.space.workers[feed.worker]]

    def apply(self, splice: Splice, keys: str) -> Steps[list[Block]]:
        """Compute the blocks after an edit, and use them. Return those that nobody sees any more.

        All ended steps are in the history, and nothing is pending but the tokens of workers that write.
        """
        self._texts = [text_tokens(self.group, worker) for worker in self.workers]
        old = [self.space.history, *self.space.workers]
        if keys == "keep":
            yield from self._keep(splice)
        else:
            yield from self._reencode(splice)
        if splice.worker is not None:
            worker = self.workers[splice.worker]
            num_computed = old[1 + splice.worker].length
            if not worker.stopped and splice.stop > num_computed:
                worker.pending = worker.pending[splice.stop - num_computed :]
        self.group.num_tokens += len(splice.tokens) - (splice.stop - splice.start)
        used = {self.space.history, *self.space.workers}
        return [block for block in old if block not in used]

    def _keep(self, splice: Splice) -> Steps[None]:
        """Compute the new tokens alone. The keys of what follows are rotated to their new positions."""
        block = self.space.history if splice.worker is None else self.space.workers[splice.worker]
        edited = self.pool.copy(block, len(splice.tokens))
        tail = None
        if splice.stop < edited.length:
            tail = self.pool.split(edited, splice.stop) if splice.stop else edited
        if tail is edited:
            edited = self.pool.new_block(tail.length + len(splice.tokens), block.base)
        else:
            self.pool.truncate(edited, min(splice.start, edited.length))
        self._use(splice.worker, edited)
        if splice.tokens:
            yield from self.runner.prefill([(Segment(self._view(splice.worker), len(splice.tokens)), splice.tokens)])
        if tail is not None:
            self.pool.move(tail, edited)
            self.pool.free(tail)
        if splice.worker is not None:
            self._replace_feeds(splice)

    def _reencode(self, splice: Splice) -> Steps[None]:
        """Compute all that follows again: the later steps of the history, and what workers wrote in later passes."""
        if splice.worker is None:
            first = -1
            later = splice.apply([token for tokens in self.group.step_tokens for token in tokens])[splice.start :]
            self._use(None, self.pool.copy(self.space.history, len(later), splice.start))
        else:
            later = []
            ends = accumulate(feed.num_tokens for feed in self.feeds if feed.worker == splice.worker)
            own = [feed for feed in self.feeds if feed.worker == splice.worker]
            first = next(feed.number for feed, end in zip(own, ends, strict=True) if splice.start < end)
            self._texts[splice.worker] = splice.apply(self._texts[splice.worker])
        positions = [0] * len(self.workers)
        for feed in self.feeds:
            if feed.number < first:
                positions[feed.worker] += feed.num_tokens
        if splice.worker is not None:
            self._replace_feeds(splice)
        for number, block in enumerate(list(self.space.workers)):
            if positions[number] < block.length:
                self._use(number, self.pool.copy(block, STEP_CAPACITY, positions[number]))
        if later:
            yield from self.runner.prefill([(Segment(self._view(None), len(later)), later)])
        passes = self._passes(first, positions)
        if passes:
            yield from self.runner.catch_up(passes, [len(passes[-1]) - 1])
            self.group.loop.stats.prefilled_tokens += sum(len(tokens) for _, tokens in passes[-1])

    def _passes(self, first: int, positions: list[int]) -> list[PassInputs]:
        """Return the inputs of the passes from number `first` on; `positions` are the lengths of the blocks before."""
        passes = []
        for _, feeds in groupby((feed for feed in self.feeds if feed.number >= first), lambda feed: feed.number):
            inputs: PassInputs = []
            for feed in feeds:
                begin = positions[feed.worker]
                positions[feed.worker] = begin + feed.num_tokens
                tokens = self._texts[feed.worker][begin : begin + feed.num_tokens]
                inputs.append((Segment(self._view(feed.worker), feed.num_tokens), tokens))
            passes.append(inputs)
        return passes

    def _view(self, worker: int | None) -> list[Block]:
        space = self.space
        if worker is None:
            return [*space.prompt, space.history_header, space.history]
        return space.view(worker)

    def _use(self, worker: int | None, block: Block) -> None:
        """Put a block into the place of the history, or of a worker's text."""
        self.space.views = {}
        if worker is None:
            self.space.history = block
            return
        self.space.workers = [block if number == worker else old for number, old in enumerate(self.space.workers)]
        self.feeds = [feed._replace(block=block) if feed.worker == worker else feed for feed in self.feeds]

    def _replace_feeds(self, splice: Splice) -> None:
        own = splice.feeds([feed for feed in self.feeds if feed.worker == splice.worker])
        others = [feed for feed in self.feeds if feed.worker != splice.worker]
        self.feeds = sorted([*others, *own], key=lambda feed: (feed.number, feed.worker))
