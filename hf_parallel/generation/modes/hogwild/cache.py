"""`HogwildCache`: KV cache that the workers of a prompt share (Hogwild! Inference, sections 3.1, 3.2 and appendix A).

Prompts are a tree of shared prefixes; each problem adds a `Workspace`. All its blocks are stored from the position that
follows the prompt. A worker sees most of them at other positions, so its queries are rotated for these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_parallel.cache.pool import Block
from hf_parallel.cache.shared_prefix import SharedPrefixCache

STEP_CAPACITY = 256
"""Initial capacity of a step in tokens. Attention reads steps of equal capacity in one batched call."""

LAYOUTS = ("contiguous", "interleaved", "combined")
"""See `Workspace.view`."""


@dataclass(eq=False)
class Workspace:
    """Blocks of one problem. Headers and `gap` hold the text between the other blocks, or are empty.

    Plans merge the results of blocks in the order of `base`, then of age. Other requests may divide a prompt into
    younger blocks, so the workers' blocks have a later base: their results come after all of the prompt's in any case.
    """

    layout: str  # one of `LAYOUTS`
    prompt: list[Block]  # root to leaf
    workers: list[Block]  # each worker's current step
    history: Block  # ended steps in the order in which they ended
    history_header: Block
    others_header: Block
    own_headers: list[Block]  # one for all workers, or one each
    gap: Block  # between the current steps of other workers
    base: int  # position after the prompt, from which all other blocks are stored
    pending_steps: list[Block] = field(default_factory=list)  # ended steps not yet moved into `history`
    step_workers: list[int] = field(default_factory=list)  # worker of each ended step; -1: written by no worker
    replaced: dict[Block, Block] = field(default_factory=dict)  # by pending step whose tokens are computed again
    views: dict[int, list[Block]] = field(default_factory=dict)  # by worker; cleared when the blocks change

    @property
    def shared_view(self) -> list[Block]:
        """Blocks that all workers see first: the prompt and, unless the layout is `contiguous`, the history."""
        if self.layout == "contiguous":
            return list(self.prompt)
        return [*self.prompt, self.history_header, self.history, *self.pending_steps]

    @property
    def headers(self) -> list[Block]:
        """Texts between the parts, in reading order."""
        return [self.history_header, self.others_header, *self.own_headers, self.gap]

    def view(self, worker: int) -> list[Block]:
        """Return the blocks that a worker sees, its own step last; the same list until a step ends, moves or goes.

        `contiguous`: prompt, other workers' steps, own step. `interleaved`: prompt, history, own step; without the
        other workers' current steps. `combined`: prompt, history, other workers' current steps, own step.
        """
        view = self.views.get(worker)
        if view is None:
            other_steps = []
            if self.layout != "interleaved":
                other_steps = [block for number, block in enumerate(self.workers) if number != worker]
            own_header = self.own_headers[worker % len(self.own_headers)]
            view = [*self.shared_view, *self._others(other_steps), own_header, self.workers[worker]]
            self.views[worker] = view
        return view

    def view_of(self, block: Block) -> list[Block]:
        """Return the blocks that tokens appended to `block` see, `block` last.

        An ended step sees the history before it; a header sees the prompt and the headers before it.
        """
        if block in self.pending_steps:
            num_later = len(self.pending_steps) - self.pending_steps.index(block) - 1
            shared_view = self.shared_view
            return shared_view[: len(shared_view) - num_later]
        if block in self.own_headers:
            return [*self.prompt, self.history_header, self.others_header, block]
        if block in self.headers:
            return [*self.prompt, *self.headers[: self.headers.index(block) + 1]]
        return self.view(self.workers.index(block))

    def full_view(self) -> list[Block]:
        """Return the shared view followed by every worker's current step, whatever the layout."""
        *first_workers, last_worker = self.workers
        return [*self.shared_view, *self._others(first_workers), self.own_headers[-1], last_worker]

    def block_name(self, block: Block) -> str:
        """Return a name of a block that does not change when other blocks are moved."""
        if block in self.workers:
            return f"worker {self.workers.index(block)}"
        if block in self.pending_steps:
            num_moved = len(self.step_workers) - len(self.pending_steps)
            return f"step {num_moved + self.pending_steps.index(block)}"
        if block in self.headers:
            return f"header {self.headers.index(block)}"
        return "reader"

    def _others(self, steps: Sequence[Block]) -> list[Block]:
        """Return other workers' steps, after `others_header` and separated by `gap`."""
        between = [block for step in steps for block in (self.gap, step)][1:]
        return [self.others_header, *between] if between else []


class HogwildCache(SharedPrefixCache):
    """Prompts, histories, headers and current steps of a batch of problems."""

    def new_workspace(
        self, layout: str, prompt: list[Block], num_workers: int, header_lengths: Sequence[int], base: int = 0
    ) -> Workspace:
        """Allocate the blocks of a problem; `header_lengths` are the lengths of `Workspace.headers`.

        `base` is the position after the prompt. With 0, last bits change when another request divides the prompt.
        """
        # Equal capacity: headers are read in one call.
        headers = self.pool.new_blocks(len(header_lengths), max(header_lengths), base)
        workers = self.pool.new_blocks(num_workers, STEP_CAPACITY, base)
        history = self.pool.new_block(base=base)
        history_header, others_header, *own_headers, gap = headers
        return Workspace(layout, prompt, workers, history, history_header, others_header, own_headers, gap, base)

    def add_step(self, space: Workspace, num_tokens: int) -> Block:
        """Append an empty step, which no worker writes, to the history. Return its block."""
        block = self.pool.new_block(num_tokens, space.base)
        space.views.clear()
        space.pending_steps.append(block)
        space.step_workers.append(-1)
        return block

    def end_step(self, space: Workspace, worker: int, num_again: int = 0) -> Block:
        """Append a worker's current step to the history and start a new one. Return the block of the ended step.

        `num_again`: the length of an empty block that takes its place, in which its tokens are recomputed.
        """
        step = space.workers[worker]
        block = self.pool.new_block(STEP_CAPACITY, space.base)
        if num_again:
            again = self.pool.new_block(num_again, space.base)
            space.replaced[again] = step
            step = again
        space.views.clear()
        space.pending_steps.append(step)
        space.step_workers.append(worker)
        space.workers[worker] = block
        return step

    def move_ended(self, space: Workspace, count: int | None = None) -> None:
        """Move the first `count` pending steps (default: all) into the history block, with keys rotated."""
        for _ in range(len(space.pending_steps) if count is None else count):
            step, *pending = space.pending_steps
            if step in space.replaced:
                self.pool.free(space.replaced.pop(step))
            self.pool.move(step, space.history)
            space.views.clear()
            space.pending_steps = pending
            self.pool.free(step)
