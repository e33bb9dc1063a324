"""ForkJoinRun: one call of the fork_join mode, in which the model opens a fork by a tag."""

from __future__ import annotations

from typing import Any

from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.modes.branches.lanes import Lane, Plan
from hf_parallel.generation.modes.branches.run import BranchRun
from hf_parallel.generation.modes.branches.token_text import ids, slice_tokens, text_of
from hf_parallel.generation.modes.fork_join.output import Fork, ForkJoinOutput, Path
from hf_parallel.generation.modes.fork_join.settings import ForkJoinSettings


class ForkJoinRun(BranchRun):
    """One call of the mode."""

    def __init__(self, config: ForkJoinSettings, call: GenerationCall) -> None:
        self.config, self.dialect = config, config.format
        self.none = f"the model has not written {self.dialect.fork_text!r}"
        tag = self.dialect.branch[1].encode()
        closing = self.dialect.branch[1] + self.dialect.gap
        limit = config.path_max_new_tokens
        super().__init__(config, call, [(tag, len(tag), "tag")], closing, limit, config.opening)
        for text in (self.dialect.fork_text, *self.dialect.branch, self.dialect.joined_text):
            self.tokens(text, "tags of the dialect")

    def find_fork(self, lane: Lane, known: int) -> Plan | None:
        """See `BranchRun.find_fork`."""
        tag = self.dialect.fork_text.encode()
        at = lane.text.find(tag, max(known - len(tag) + 1, 0))
        end = at + len(tag)
        before = lane.text[:end].decode(errors="replace")
        begin = before.rfind(self.dialect.region[0])
        if at < 0 or begin < 0:
            return None
        numbers = self.dialect.numbers(before[begin:], self.config.paths)
        if reason := self._why_not(lane, len(numbers)):
            lane.answer.fallback = reason
            return None
        gap = self.dialect.first_text("")[0]
        if lane.text[end:].startswith(gap.encode()):
            end, gap = end + len(gap.encode()), ""
        head = slice_tokens(lane.own, self.vocabulary, 0, end) + self.tokens(gap)
        paths = [(number, self.tokens(self.dialect.first_text(number)[1])) for number in numbers]
        return Plan(head, paths, self.tokens(self.dialect.joined_text))

    def _why_not(self, lane: Lane, count: int) -> str:
        """Return why a lane may not fork; empty if it may."""
        if lane.parent is not None and not self.dialect.is_nested:
            return "a path may not fork in this dialect"
        if lane.depth >= self.config.max_depth:
            return f"a fork would be deeper than max_depth={self.config.max_depth}"
        if not count:
            return "the region announces no path"
        at_once = len(self.roots[lane.answer.output_row].writing()) - 1 + count
        if at_once > self.config.max_paths:
            return f"{at_once} paths at once are more than max_paths={self.config.max_paths}"
        return ""

    def path_end(self, text: bytes, end: int, cause: str) -> tuple[int, str]:
        """See `BranchRun.path_end`. A path without its closing tag gets it, and each the gap after it."""
        following = ("" if cause == "tag" else self.dialect.branch[1]) + self.dialect.gap
        if text[end:].startswith(following.encode()):
            return end + len(following.encode()), ""
        return end, following

    def record(self, lane: Lane, start: int, end: int) -> Fork:
        """See `BranchRun.record`."""
        return Fork(start, end, [self._path(path) for path in lane.paths])

    def output(self, **fields: Any) -> tuple[type[ForkJoinOutput], dict[str, Any]]:
        """See `BranchRun.output`."""
        forks, steps = [root.forks for root in self.roots], [root.steps for root in self.roots]
        return ForkJoinOutput, {"forks": forks, "critical_path": steps, **fields}

    def _path(self, path: Lane) -> Path:
        text, index = text_of(path.tokens).decode(errors="replace"), path.output_row // self.call.num_rows
        return Path(path.name, index, text, ids(path.tokens), path.ended_by, path.forks)
