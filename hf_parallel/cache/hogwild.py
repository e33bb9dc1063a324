"""HogwildCache: several workers over one memory (Hogwild! Inference, sections 3.1, 3.2 and appendix A).

Prompts are a tree of shared prefixes; on it stands one `Workspace` per problem. All blocks but the prompts' are
stored from position 0, so that a worker's queries are turned for every block but its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_parallel.cache.layout import Block
from hf_parallel.cache.shared_prefix import SharedPrefixCache

STEP_ROOM = 256
"""Tokens that a step has room for at first; equal extents let the workers' steps be read in one call."""

LAYOUTS = ("contiguous", "interleaved", "combined")
"""Who sees what: see `Workspace.view`."""


@dataclass(eq=False)
class Workspace:
    """The blocks of one problem.

    Attributes
    ----------
    prompt : list of Block
        The problem, root to leaf.
    workers : list of Block
        The step that each worker is writing.
    history : Block
        Finished steps, in the order in which they ended.
    closing : list of Block
        Steps that have ended but lack their last tokens' keys; they stand at the end of the history already.
    ended : list of int
        Whose step each finished one was, in the order in which they ended; -1 for what no worker wrote.
    steps : list of int
        Tokens of each step that the history holds.
    removed : set of int
        Workers that are there no longer.
    history_header, others_header, own_header, gap : Block
        Texts between the parts; an empty block is no text. `gap` stands between the steps of others.
    """

    layout: str
    prompt: list[Block]
    workers: list[Block]
    history: Block
    history_header: Block
    others_header: Block
    own_header: Block
    gap: Block
    closing: list[Block] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    removed: set[int] = field(default_factory=set)

    @property
    def unfinished(self) -> dict[int, Block]:
        """The step that each worker is writing who is still there."""
        return {i: block for i, block in enumerate(self.workers) if i not in self.removed}

    @property
    def common(self) -> list[Block]:
        """What all workers see in the same order: the prompt and, but for `contiguous`, the history."""
        if self.layout == "contiguous":
            return list(self.prompt)
        return [*self.prompt, self.history_header, self.history, *self.closing]

    @property
    def headers(self) -> list[Block]:
        """Texts between the parts, in the order in which they are read."""
        return [self.history_header, self.others_header, self.own_header, self.gap]

    def view(self, worker: int) -> list[Block]:
        """Blocks that a worker sees, its own step last.

        `contiguous`: prompt, other workers, own. `interleaved`: prompt, history, own; the others' unfinished steps
        are not seen. `combined`: prompt, history, the others' unfinished steps, own.
        """
        others = [] if self.layout == "interleaved" else [b for i, b in self.unfinished.items() if i != worker]
        return [*self.common, *self._unfinished(others), self.own_header, self.workers[worker]]

    def view_of(self, block: Block) -> list[Block]:
        """What the last tokens of a block see, `block` last.

        A step that has ended sees the history up to it, a header the prompt and the headers before it.
        """
        if block in self.closing:
            last = len(self.common) - len(self.closing) + self.closing.index(block)
            return self.common[: last + 1]
        if block in self.headers:
            return [*self.prompt, *self.headers[: self.headers.index(block) + 1]]
        return self.view(self.workers.index(block))

    def everything(self) -> list[Block]:
        """All that any worker wrote, as the last worker would read it, whatever the layout."""
        steps = list(self.unfinished.values())
        return [*self.common, *self._unfinished(steps[:-1]), self.own_header, *steps[-1:]]

    def name_of(self, block: Block) -> str:
        """A name that a block's tokens keep wherever they are moved: of a worker's step, an ended step, or a header."""
        if block in self.workers:
            return f"worker {self.workers.index(block)}"
        if block in self.closing:
            return f"step {len(self.ended) - len(self.closing) + self.closing.index(block)}"
        return f"header {self.headers.index(block)}" if block in self.headers else "reader"

    def _unfinished(self, steps: Sequence[Block]) -> list[Block]:
        between = [block for step in steps for block in (self.gap, step)][1:]
        return [self.others_header, *between] if between else []


class HogwildCache(SharedPrefixCache):
    """Prompts, histories, headers and workers' steps of a batch of problems."""

    def new_workspace(
        self, layout: str, prompt: list[Block], num_workers: int, header_lengths: Sequence[int]
    ) -> Workspace:
        """Make the blocks of a problem.

        Parameters
        ----------
        layout : str
            One of `LAYOUTS`.
        prompt : list of Block
            Blocks of the problem.
        num_workers : int
        header_lengths : sequence of int
            Room for the history header, the others' header, the own header and the gap, in tokens.
        """
        headers = self.new_blocks(len(header_lengths), max(header_lengths))  # of one size: read in one call
        workers = self.new_blocks(num_workers, STEP_ROOM)
        history_header, others_header, own_header, gap = headers
        history = self.new_block()
        return Workspace(layout, prompt, workers, history, history_header, others_header, own_header, gap)

    def add_worker(self, space: Workspace) -> None:
        """Give a problem one worker more, behind those that it has."""
        space.workers.append(self.new_block(STEP_ROOM))

    def remove_worker(self, space: Workspace, worker: int) -> None:
        """Forget what a worker is writing; its finished steps stay."""
        space.removed.add(worker)
        self.free(space.workers[worker])

    def add_step(self, space: Workspace, num_tokens: int) -> Block:
        """Put a step that no worker wrote at the end of the history; returns its block, which is to be filled."""
        block = self.new_block(num_tokens)
        space.closing.append(block)
        space.ended.append(-1)
        return block

    def forget_step(self, space: Workspace, number: int) -> None:
        """Forget a finished step, counted from the first that is left; those behind it move up, keys turned.

        The history is copied, and nothing has changed if that fails. What anybody wrote while they saw the step stays
        as it is.
        """
        if number < len(space.steps):
            start = sum(space.steps[:number])
            self._cut(space.history, start, start + space.steps[number])
            del space.steps[number]
        else:
            self.free(space.closing.pop(number - len(space.steps)))
        del space.ended[number]

    def _cut(self, block: Block, start: int, stop: int) -> None:
        """Forget the tokens `start <= j < stop` of a block."""
        kept = self.new_block(block.length - (stop - start), block.base)
        try:
            old, new, behind = block.extent, kept.extent, block.length - stop
            self.arena.copy(old, block.first, new, 0, start)
            self.arena.copy(old, block.first + stop, new, start, behind, start - stop, self.rotary)
        except BaseException:
            self.free(kept)
            raise
        block.extent, kept.extent = kept.extent, block.extent
        block.first, block.length = 0, block.length - (stop - start)
        self.free(kept)

    def end_step(self, space: Workspace, worker: int) -> None:
        """Put a worker's step at the end of the history and give it an empty one."""
        space.closing.append(space.workers[worker])
        space.ended.append(worker)
        space.workers[worker] = self.new_block(STEP_ROOM)

    def settle(self, space: Workspace, count: int | None = None) -> None:
        """Move the first `count` ended steps (default: all) into the history, keys turned to their places there."""
        for _ in range(len(space.closing) if count is None else count):
            block = space.closing[0]
            length = block.length
            self.move(block, space.history)
            self.free(space.closing.pop(0))
            space.steps.append(length)
