"""Trunks and branches: what a row of the pdos mode does with a token (PDOS, section 3).

A trunk writes an answer token by token and reads along. When a block closes it rests, its branches write in its place,
and it goes on behind them.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from contextlib import suppress

from hf_parallel.cache import Block, Segment
from hf_parallel.cache.tree_branch import Tree
from hf_parallel.generation.decode import PREFILL_CHUNK
from hf_parallel.generation.modes.pdos.blocks import (
    BRANCHES,
    CONTINUATION,
    SKELETON,
    Branch,
    ParallelBlock,
    Run,
    Token,
    ids,
)
from hf_parallel.generation.modes.pdos.parser import BROKEN, DONE, OUTSIDE, Skeleton
from hf_parallel.generation.modes.pdos.token_text import WHITESPACE
from hf_parallel.generation.rows import Row


class TrunkRow(Row):
    """One answer: its sequential text, and the blocks in it.

    Attributes
    ----------
    tokens : list of Token
        The answer so far: joined blocks, and behind them what the reader has read.
    reader : Skeleton
    draws : int
        Tokens that it has chosen.
    branches : list of BranchRow
        Those of the block that is being written; the trunk rests meanwhile.
    left : int
        Tokens that the branches may still get in all.
    fallback : str, optional
        Why the answer is decoded sequentially from some point on.
    """

    def __init__(self, run: Run, index: int, tree: Tree) -> None:
        super().__init__(index, tree.view)
        self.run, self.tree = run, tree
        self.tokens: list[Token] = []
        self.blocks: list[ParallelBlock] = []
        self.branches: list[BranchRow] = []
        self.reader = Skeleton(run.config)
        self.draws = 0
        self.left = 0
        self.fallback: str | None = None
        self.finished = False
        self.stage = SKELETON
        self._read_from = 0  # token at which the reader began
        self._skeleton = ""
        self._terminator: list[Token] = []
        self._owed: list[tuple[Block, list[int]]] = []  # tokens whose keys and values the next pass must compute
        self._final = 0  # tokens that a streamer has been given
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def reading(self) -> bool:
        """Whether the trunk still looks for blocks."""
        limit = self.run.config.max_blocks
        return self.fallback is None and (limit is None or len(self.blocks) < limit)

    @property
    def budget(self) -> int:
        """Tokens that the answer may still get."""
        return self.run.call.max_new_tokens - len(self.tokens)

    @property
    def is_writing(self) -> bool:
        """Whether the trunk itself is writing, and still looks for blocks."""
        return self.reading and not self.branches

    def rows(self) -> Sequence[TrunkRow | BranchRow]:
        """Who brings tokens to the next pass: the trunk, or its branches as far as the budget goes."""
        if self.branches:
            writing = [branch for branch in self.branches if not branch.ended_by]
            for branch in writing[self.left :]:
                branch.end("budget")
            if writing[: self.left]:
                return writing[: self.left]
            self._join()
        return [] if self.finished else [self]

    def segments(self) -> list[tuple[Segment, list[int]]]:
        """What branches that are being joined still owe, then the trunk's own tokens."""
        return [*self.owed_segments(), (Segment(self.tree.view, len(self.pending)), self.pending)]

    def owed_segments(self) -> list[tuple[Segment, list[int]]]:
        """What is owed, for the next forward pass; taken by whoever asks first."""
        owed, self._owed = self._owed, []
        views = [self.tree.view if block is self.tree.trunk else self.tree.branch_view(block) for block, _ in owed]
        return [(Segment(view, len(tokens)), tokens) for view, (_, tokens) in zip(views, owed, strict=True)]

    def begin(self) -> None:
        """Begin the answer with its opening; a block that closes in it lets its branches write at once."""
        run = self.run
        self.tokens, self.pending = list(run.opening), ids(run.opening)
        run.loop.table.extend(self.index, self.pending)
        self._read(run.read(self.tokens))
        if not self._branch():
            run.loop.stats.prefilled_tokens += len(self.pending)

    def advance(self, token: int, ended: bool) -> bool:
        """Take a new token; says whether the trunk goes on itself."""
        self.tokens.append(Token(token, self.draws, self.index))
        self.draws += 1
        self.pending = [token]
        self._read(self.run.text(token), ended)
        if not ended and self._branch():
            return False
        if ended or not self.budget:
            self._finish("answer" if ended else "budget")
        else:
            self.run.loop.stats.prefilled_tokens += len(self.pending) - 1
        self._release()
        return not self.finished

    def _read(self, text: bytes, ended: bool = False) -> None:
        """Look for a block in what the trunk has written, and go on in it if the answer has not ended."""
        self._show(text)
        if self.reading:
            self.reader.feed(text)
            if self.reader.is_open:
                self.stage = SKELETON
                if not ended:
                    self._fill_in()
            if self.reader.phase == BROKEN:
                self.fallback = self.reader.broken

    def _fill_in(self) -> None:
        """Put in the text that is forced, if the budget has room for it."""
        run = self.run
        if not (run.config.parallel_hint and run.config.fill_in):
            return
        separator = run.read(run.separator)
        text = self.reader.forced(b"" if separator.strip(WHITESPACE) else separator)
        tokens = run.spell(text) or []
        if len(tokens) < self.budget:
            self.tokens += tokens
            self.pending = self.pending + ids(tokens)
            run.loop.table.extend(self.index, ids(tokens))
            self.reader.feed(text)
            self._show(text)

    def _finish(self, what: str) -> None:
        if self.reading and (self.reader.is_open or self.reader.phase == DONE):
            self.fallback = f"the {what} ended inside a block"
        self.finished = True
        self._show(b"", "end")

    def _branch(self) -> bool:
        """If a block has closed, let its branches write; False: none has, or there is no room for them."""
        if not self.reading or self.reader.phase != DONE:
            return False
        run, reader, block = self.run, self.reader, self.tokens[self._read_from :]
        borders = [run.widen(block, *piece) for piece in reader.pieces]
        closed_from, _ = run.widen(block, reader.closed_from, reader.closed_from)
        try:
            head = run.cut(block, 0, borders[0][0])
            prefixes = [run.cut(block, *piece) for piece in borders]
            terminator = run.cut(block, closed_from)
        except ValueError as error:
            self.fallback = str(error)
            return False
        trunk = self.tokens[: self._read_from] + head
        count = len(prefixes)
        needed = len(trunk) + sum(map(len, prefixes)) + count * len(run.separator) + len(terminator)
        if needed + count > run.call.max_new_tokens:
            self.fallback = "the budget leaves no room for the branches"
            return False
        same = self._read_from + sum(token is whole for token, whole in zip(head, block, strict=False))
        self.left = run.call.max_new_tokens - needed
        self._skeleton = run.read(block)[borders[0][0] :].decode(errors="replace")
        self._terminator = terminator
        self._grow(trunk, min(same, self.tree.trunk.length), prefixes)
        return True

    def _grow(self, trunk: list[Token], held: int, prefixes: list[list[Token]]) -> None:
        """Make the rows of the branches; of the trunk's tokens the first `held` have their keys and values."""
        run, table = self.run, self.run.loop.table
        computed = set(map(id, self.tokens[: self.tree.trunk.length]))
        self.tokens = trunk
        tail = ids(trunk[held:])
        self._owed = [(self.tree.trunk, tail)] if tail else []
        room = (self.left + sum(map(len, prefixes))) // len(prefixes)
        run.cache.branch(self.tree, held, len(prefixes), len(tail), room)
        self._rewrite(held, tail)
        numbers = run.loop.sampler.fork(self.index, len(prefixes))
        for row, block, prefix, title in zip(numbers, self.tree.branches, prefixes, self.reader.titles, strict=True):
            table.extend(row, ids(prefix))
            self.branches.append(BranchRow(self, row, block, title, prefix))
        run.loop.stats.prefilled_tokens += len(tail) + sum(map(len, prefixes))
        again = [token for prefix in prefixes for token in prefix if id(token) in computed]
        run.stages[BRANCHES].computed_again += len(again)

    def _join(self) -> None:
        """Go on behind the branches: those kept are joined as they are held, the others are read as plain text."""
        run, branches = self.run, self.branches
        kept = branches if run.config.join == "rotate" else branches[:1]
        read = [token for branch in branches[len(kept) :] for token in branch.joined()]
        joined = [token for branch in branches for token in branch.joined()] + self._terminator
        start, end = len(self.tokens), len(self.tokens) + len(joined)
        self.blocks.append(ParallelBlock(self._skeleton, start, end, [branch.record() for branch in branches]))
        self._rewrite(start, ids(joined))
        self.tokens = self.tokens + joined
        self.branches, self.stage = [], CONTINUATION
        self.reader, self._read_from = Skeleton(run.config), len(self.tokens)
        self._decoder.reset()
        self._show(run.read(joined), "join")
        if not self.budget:
            self._finish("budget")
        else:
            self._owed = [(branch.block, ids(branch.unheld())) for branch in kept if branch.unheld()]
            self.pending = ids(read + self._terminator)
            self._count(kept, branches[len(kept) :])
            for branch in kept:
                run.cache.truncate(branch.block, branch.held)
            run.cache.join(self.tree, len(kept), sum(len(tokens) for _, tokens in self._owed))
            self._compute_ahead()
        self._release()

    def _count(self, kept: Sequence[BranchRow], others: Sequence[BranchRow]) -> None:
        """Count what a join computes that was not generated just now, and what it computes again."""
        new = [token for branch in kept for token in branch.unheld()]
        new += [token for branch in others for token in branch.joined()]
        first_time = sum(token.draw >= 0 for branch in (*kept, *others) for token in branch.unheld())
        self.run.loop.stats.prefilled_tokens += len(new) + len(self._terminator) - first_time
        self.run.stages[CONTINUATION].computed_again += sum(branch.held for branch in others)

    def _compute_ahead(self) -> None:
        """Bring so much of what was joined that the next pass is not larger than one of a prefill."""
        loop, stage = self.run.loop, self.run.stages[self.stage]
        room = loop.call.generation_config.prefill_chunk_size or PREFILL_CHUNK
        while len(self.pending) > room:
            chunk, self.pending = self.pending[:room], self.pending[room:]
            brought = [*self.owed_segments(), (Segment(self.tree.view, room), chunk)]
            loop.forward(brought, [len(brought) - 1])
            stage.forward_passes += 1

    def _rewrite(self, start: int, tokens: list[int]) -> None:
        """Show processors and criteria other tokens of the answer from `start` on."""
        table = self.run.loop.table
        table.truncate(self.index, self.run.call.input_ids.shape[1] + start)
        table.extend(self.index, tokens)

    def _show(self, text: bytes, event: str = "token") -> None:
        self.run.call.show(self.index, self._decoder.decode(text, event != "token"), event)

    def _release(self) -> None:
        """Give a streamer the tokens that will not change any more."""
        undecided = self.reading and (self.reader.phase != OUTSIDE or self.reader.matched)
        if self.finished or not undecided:
            self.run.stream.put(self.index, ids(self.tokens[self._final :]))
            self._final = len(self.tokens)


class BranchRow(Row):
    """One branch of a block: it sees the trunk and itself.

    Attributes
    ----------
    tokens : list of Token
        What it has generated.
    kept : list of Token
        As much of it as is joined.
    ended_by : str
        See `Branch`; empty while the branch is being written.
    """

    stage = BRANCHES

    def __init__(self, trunk: TrunkRow, index: int, block: Block, title: str, prefix: list[Token]) -> None:
        super().__init__(index, trunk.tree.branch_view(block), ids(prefix))
        self.trunk, self.block, self.title, self.prefix = trunk, block, title, prefix
        self.draws = trunk.draws
        self.tokens: list[Token] = []
        self.kept: list[Token] = []
        self.ended_by = ""
        self._text = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._shown_as = trunk.index + trunk.run.call.num_rows * (len(trunk.branches) + 1)
        self._show(trunk.run.read(prefix), "begin")

    @property
    def held(self) -> int:
        """Tokens of what is joined whose keys and values the branch's block holds."""
        whole = next((i for i, token in enumerate(self.kept) if token.draw < 0), len(self.kept))
        return min(self.block.length, len(self.prefix) + whole)

    def segments(self) -> list[tuple[Segment, list[int]]]:
        """What the trunk owes, if no other branch brings it, then the branch's own tokens."""
        return [*self.trunk.owed_segments(), (Segment(self.view, len(self.pending)), self.pending)]

    def advance(self, token: int, ended: bool) -> bool:
        """Take a new token; says whether the branch goes on."""
        run = self.trunk.run
        self.tokens.append(Token(token, self.draws, self.index))
        self.draws += 1
        self.pending = [token]
        self.trunk.left -= 1
        text = run.text(token)
        self._text += text
        self._show(text)
        place, why = self._find_end(len(self._text) - len(text))
        limit = run.config.branch_max_new_tokens
        if not why and ended:
            why = "eos" if token in run.call.eos_token_ids else "criterion"
        elif not why and limit and len(self.tokens) >= limit:
            why = "budget"
        if why:
            self.end(why, place)
        return not why

    def end(self, why: str, place: int | None = None) -> None:
        """Write no more; only the bytes before `place` are joined."""
        self.ended_by = why
        self.kept = self.tokens[:-1] if why == "eos" else self.tokens
        if place is not None:
            with suppress(ValueError):  # what cannot be spelled is in the answer whole
                self.kept = self.trunk.run.cut(self.tokens, 0, place)
        self._show(b"", "end")

    def joined(self) -> list[Token]:
        """The branch as it stands in the answer: title, text, and a separator if it does not end in one."""
        run = self.trunk.run
        separated = run.read(self.kept).endswith(run.read(run.separator))
        return self.prefix + self.kept + ([] if separated else run.separator)

    def unheld(self) -> list[Token]:
        """Those of its tokens whose keys and values are not held."""
        return self.joined()[self.held :]

    def record(self) -> Branch:
        """What the branch wrote."""
        text = self.trunk.run.read(self.kept).decode(errors="replace")
        return Branch(self.title, ids(self.prefix), text, ids(self.tokens), self.ended_by)

    def _find_end(self, known: int) -> tuple[int | None, str]:
        """Where the text ends and what ends it, if the bytes from `known` on complete it; a stop needs text before."""
        config = self.trunk.run.config
        ends = [(marker.encode(), 0, "marker") for marker in (config.branch_marker, config.terminator)]
        ends += [(stop.encode(), len(stop.encode()), "stop") for stop in config.branch_stops]
        found = []
        for end, length, why in ends:
            place = self._text.find(end, max(known - len(end) + 1, 0))
            while why == "stop" and place >= 0 and not self._text[:place].strip(WHITESPACE):
                place = self._text.find(end, place + 1)
            if place >= 0:
                found.append((place + length, why))
        return min(found, default=(None, ""))

    def _show(self, text: bytes, event: str = "token") -> None:
        self.trunk.run.call.show(self._shown_as, self._decoder.decode(text, event != "token"), event)
