"""The one decode loop: rows that bring new tokens, one forward pass for all of them, one token back for each.

A mode says what its rows bring next; everything else (passes, sampling, ending, streaming, counting) is here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from transformers import StoppingCriteriaList

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.forward import ForwardPasses
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.resampling.replay import Replayer
from hf_parallel.generation.resampling.verification import SpeculativeDecoder
from hf_parallel.generation.rows import Group, Part, PassInputs, Row
from hf_parallel.generation.sampling import Sampler, TokenTable
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.kernels import to_device
from hf_parallel.kernels.linear import linear_layers
from hf_parallel.models.attention import block_attention_enabled

PREFILL_CHUNK = 4096
"""New tokens per forward pass of a prefill, unless `prefill_chunk_size` says otherwise."""

RUNNING_AHEAD = ("cuda",)
"""Kinds of devices that compute while the host goes on, so that a step may begin before its tokens have been read."""


R = TypeVar("R", bound=Row)


class DecodeLoop(ForwardPasses):
    """Runs a model over a block cache for one call of `generate`.

    Parameters
    ----------
    call : GenerationCall
    cache : BlockCache
    table : TokenTable
        Rows of the batch, prompts included.
    criteria : StoppingCriteriaList, optional
        Those of the call unless given.
    seed
        Source of each row's randomness, see `ParallelConfig`.
    stats : GenerationStats, optional
        Where to count; new unless given.
    stream : bool
        Whether new tokens go to the caller's streamer.

    Attributes
    ----------
    recall : Replayer, optional
        Remembers the logits of the rows, if a mode has set it.
    """

    def __init__(
        self,
        call: GenerationCall,
        cache: BlockCache,
        table: TokenTable,
        criteria: StoppingCriteriaList | None = None,
        seed: Any = None,
        stats: GenerationStats | None = None,
        stream: bool = True,
    ) -> None:
        super().__init__(call, cache, GenerationStats() if stats is None else stats)
        self.table = table
        self.streamer = call.streamer if stream and hasattr(call.streamer, "put") else None
        self.sampler = Sampler(call, table, call.stopping_criteria if criteria is None else criteria, seed)
        self.replayer: Replayer | None = None
        self._room = call.generation_config.prefill_chunk_size or PREFILL_CHUNK

    @contextmanager
    def running(self) -> Iterator[None]:
        """Switch block attention on, and what else makes passes fast, for the time of a call."""
        with block_attention_enabled(self.call.model, self.cache), linear_layers(self.call.model):
            yield
        self.stats.kv_bytes = self.cache.kv_bytes
        self.stats.reserved_bytes = self.cache.arena.reserved_bytes
        self.stats.graph_bytes = self.graphs.num_bytes if self.graphs is not None else 0

    def prefill(self, brought: Sequence[tuple[Segment, Sequence[int]]]) -> torch.Tensor:
        """Compute given tokens, in chunks that bound the memory of a pass.

        Parameters
        ----------
        brought : sequence of (Segment, tokens)
            Such that no segment sees a later one.

        Returns
        -------
        torch.Tensor
            `[len(brought), vocabulary]`: the logits behind each segment's last token.
        """
        began = time.perf_counter()
        room = self._room
        logits: list[torch.Tensor] = []
        chunk: list[tuple[Segment, Sequence[int]]] = []
        ends: list[int] = []  # places in the chunk at which a segment ends
        free = room

        def flush() -> None:
            nonlocal chunk, ends, free
            out = self.forward(chunk, ends)
            logits.append(out if self.graphs is None else out.clone())  # the next one may be written over it
            chunk, ends, free = [], [], room

        for segment, tokens in brought:
            while len(tokens) > free:
                if free:
                    chunk.append((Segment(segment.view, free, segment.write), tokens[:free]))
                    tokens = tokens[free:]
                flush()
            chunk.append((Segment(segment.view, len(tokens), segment.write), tokens))
            ends.append(len(chunk) - 1)
            free -= len(tokens)
        if chunk:
            flush()
        self.stats.prefilled_tokens += sum(segment.num_tokens for segment, _ in brought)
        self.stats.prefill_seconds += time.perf_counter() - began
        return torch.cat(logits)

    def decode(
        self,
        rows: Sequence[Row],
        logits: torch.Tensor | None,
        advance: Callable[[Any, int, bool], bool] | None = None,
        settle: Callable[[], None] | None = None,
        follow: Callable[[Sequence[Row]], Sequence[Row]] | None = None,
    ) -> None:
        """Generate until no row is active.

        Parameters
        ----------
        rows : sequence of Row
            Ascending by index.
        logits : [len(rows), vocabulary], optional
            What follows each row's prompt; none of rows that `step` has left out. None: it is yet to be computed, from
            what the rows have pending.
        advance : callable (row, token, ended) -> bool, optional
            Told each row's new token and whether a criterion ended it; sets `row.pending` and says whether the row
            goes on. Default: a row brings its token to the next pass until it has ended. Such a step may begin
            before the host knows the tokens.
        settle : callable, optional
            Called after every forward pass, to move blocks.
        follow : callable (rows) -> rows, optional
            Told the rows that go on, it says which rows bring tokens to the next pass, ascending by index: others may
            take their place.
        """
        began, prefilling = time.perf_counter(), self.stats.prefill_seconds
        active = list(rows)
        plain = advance is None and settle is None and follow is None
        trials = self._trials() if plain else None
        while active:
            ahead: list[torch.Tensor] = []
            before = active
            if logits is not None:
                going = self.take(active, logits, advance, ahead if plain and self.replayer is None else None)
                active = going if follow is None else list(follow(going))
            if trials is not None:
                active = trials.take(active)
            if ahead:
                logits = self._take_back(ahead[0], before, active)
            elif active:
                logits = self.step(active, settle)
        self.stats.decode_seconds += time.perf_counter() - began - (self.stats.prefill_seconds - prefilling)

    def take(
        self,
        rows: Sequence[R],
        logits: torch.Tensor,
        advance: Callable[[Any, int, bool], bool] | None = None,
        ahead: list[torch.Tensor] | None = None,
    ) -> list[R]:
        """Choose the next token of each row and `give` it; `logits` as of `step`.

        With a list `ahead` the next step begins before the tokens have been read, if it can: its logits are put there.
        """
        indices = [row.index for row in rows]
        if self.replayer is not None:
            tokens, ended = self.replayer.choose(indices, logits)
        else:
            drawn = self.sampler.draw(indices, logits)
            fetched = self.sampler.fetch(*drawn)  # queued before the next step, or it would arrive behind it
            if ahead is not None and self._runs_ahead(rows):
                ahead.append(self._step_ahead(rows, drawn[0]))
            tokens, ended = self.sampler.read(fetched)
        return self.give(rows, tokens, ended, advance)

    def give(
        self,
        rows: Sequence[R],
        tokens: Sequence[int],
        ended: Sequence[bool],
        advance: Callable[[Any, int, bool], bool] | None = None,
    ) -> list[R]:
        """Give rows the tokens of a pass, see `decode`; returns those that go on."""
        self.call.record.passes += 1
        going = self._hand_out(rows, tokens, ended, advance or _advance)
        return [row for row in going if row.wanted()]

    def replay(self, rows: Sequence[R], advance: Callable[[Any, int, bool], bool] | None = None) -> list[R]:
        """Let rows take tokens as long as `recall` knows what follows, before anything of theirs is computed.

        Parameters
        ----------
        rows : sequence of Row
            Ascending by index.
        advance : callable, optional
            As in `decode`.

        Returns
        -------
        list of Row
            Those that go on.
        """
        if self.replayer is None:
            return list(rows)
        began, of = time.perf_counter(), {row.index: row for row in rows}

        def take(indices: Sequence[int], tokens: Sequence[int], ended: Sequence[bool]) -> list[int]:
            going = self._hand_out([of[index] for index in indices], tokens, ended, advance or _advance)
            return [row.index for row in going]

        going = [of[index] for index in self.replayer.replay(list(of), take)]
        self.stats.decode_seconds += time.perf_counter() - began
        return going

    def _hand_out(
        self,
        rows: Sequence[R],
        tokens: Sequence[int],
        ended: Sequence[bool],
        advance: Callable[[Any, int, bool], bool],
    ) -> list[R]:
        """Give rows their new tokens, and show them; returns the rows that go on."""
        self.stats.decoded_tokens += len(tokens)
        self.stream([row.index for row in rows], tokens)
        return [row for row, token, end in zip(rows, tokens, ended, strict=True) if advance(row, token, end)]

    def step(self, rows: Sequence[Row], settle: Callable[[], None] | None = None) -> torch.Tensor:
        """One forward pass over what the rows have pending.

        Groups of which `recall` knows what follows are left out, and what they bring is kept; it is computed in the
        forward pass in which something of theirs has to be, if that ever comes.

        Returns
        -------
        torch.Tensor
            `[n, vocabulary]`: the logits of the n rows that were not left out.
        """
        parts = [Part.of(group, list(members)) for group, members in groupby(rows, key=lambda row: row.group)]
        computed = [part for part in parts if not self._leaves_out(part)]
        logits = self._compute(computed) if computed else torch.empty(0, 0, device=self.device)
        if settle is not None:
            settle()
        return logits

    def _trials(self) -> SpeculativeDecoder | None:
        """What computes drafts, if there are to be any."""
        if self.replayer is None or (drafts := self.replayer.drafts()) is None:
            return None
        hand_out = partial(self._hand_out, advance=_advance)
        return SpeculativeDecoder(
            drafts, self.call, self.replayer, self.cache, self.stats, self._left, self.forward, hand_out
        )

    def _left(self, row: Row) -> int:
        """Tokens that a row may still take."""
        return self.call.max_length - self.table.lengths[row.index]

    def _leaves_out(self, part: Part) -> bool:
        """Whether it is remembered what follows a part, which is kept for later then."""
        if self.replayer is None or part.group is None:
            return False
        names = part.group.visit(part.brought, part.ends)
        known = self.replayer.arrive([row.index for row in part.rows], names)
        if known:
            part.group.backlog.append(part.brought)
        return known

    def _compute(self, parts: Sequence[Part]) -> torch.Tensor:
        """Compute parts of a pass, and first what their groups have left; returns the logits of all their rows."""
        groups = [part.group for part in parts if part.group is not None]
        self._read(groups)
        backlog = [brought for group in groups for brought in group.backlog]
        brought: PassInputs = []
        ends: list[int] = []
        for part in parts:
            ends += [len(brought) + end for end in part.ends]
            brought += part.brought
        logits = self._catch_up([*backlog, brought], ends) if backlog else self.forward(brought, ends)
        self.stats.prefilled_tokens += sum(part.given for part in parts)
        for group in groups:
            group.backlog.clear()
        return logits

    def catch_up(self, groups: Sequence[Group]) -> None:
        """Compute what groups have left."""
        backlog = [brought for group in groups for brought in group.backlog]
        if backlog:
            self._read(groups)
            self._catch_up(backlog, [])
            self.stats.prefilled_tokens += sum(len(tokens) for _, tokens in backlog[-1])
        for group in groups:
            group.backlog.clear()

    def _read(self, groups: Sequence[Group]) -> None:
        """Compute what groups need before anything that their rows bring."""
        unread = {segment.view[-1]: (segment, tokens) for group in groups for segment, tokens in group.unread()}
        if unread:
            self.prefill(list(unread.values()))

    def _catch_up(self, passes: Sequence[PassInputs], ends: Sequence[int]) -> torch.Tensor:
        """Compute passes that follow each other, in as few forward passes as fit; returns the last one's logits."""
        began = time.perf_counter()
        run: list[PassInputs] = []
        free = self._room
        for brought in passes:
            size = sum(len(tokens) for _, tokens in brought)
            if run and size > free:
                self._run_all(run, [len(run[-1]) - 1])
                run, free = [], self._room
            run.append(brought)
            free -= size
        logits = self._run_all(run, ends)
        self.stats.prefilled_tokens += sum(len(tokens) for brought in passes[:-1] for _, tokens in brought)
        self.stats.prefill_seconds += time.perf_counter() - began
        return logits

    def _run_all(self, passes: Sequence[PassInputs], ends: Sequence[int]) -> torch.Tensor:
        """One forward pass over passes that follow each other; returns the logits at `ends`, segments of the last."""
        ids = self.packed([part for brought in passes for part in brought])
        first = sum(len(brought) for brought in passes[:-1])
        segments = [[segment for segment, _ in brought] for brought in passes]
        return self.run(segments, ids, [first + end for end in ends])

    def _runs_ahead(self, rows: Sequence[Row]) -> bool:
        """Whether the next step may begin before its tokens are known here: nothing asks for them but the model."""
        more = any(self._left(row) > 0 for row in rows)
        return self.device.type in RUNNING_AHEAD and more and self.sampler.stays_on_device

    def _step_ahead(self, rows: Sequence[Row], tokens: torch.Tensor) -> torch.Tensor:
        """The next step of all rows, those included that `tokens` will turn out to have ended."""
        return self.run([[Segment(row.view, 1) for row in rows]], tokens, range(len(rows)))

    def _take_back(self, logits: torch.Tensor, rows: Sequence[Row], going: Sequence[Row]) -> torch.Tensor:
        """Forget what rows that had ended brought to a step; returns the logits of those that go on."""
        if len(going) == len(rows):
            return logits
        stay = {row.index for row in going}
        for row in rows:
            if row.index not in stay:
                self.cache.truncate(row.view[-1], row.view[-1].length - 1)
        kept = [i for i, row in enumerate(rows) if row.index in stay]
        return logits.index_select(0, to_device(kept, logits.device))

    def stream(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Give the new tokens of `rows` to the caller's streamer, as `generate` does; other rows show padding."""
        if self.streamer is None:
            return
        shown = torch.full((len(self.table.lengths),), self.table.pad_token_id)
        shown[list(rows)] = torch.tensor(tokens)
        self.streamer.put(shown)

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Add tokens to a row that were not sampled, such as a header; a streamer of one row gets them too."""
        self.table.extend(row, tokens)
        if self.streamer is not None and len(self.table.lengths) == 1 and not hasattr(self.streamer, "write_row"):
            self.streamer.put(torch.tensor(tokens))

    def output(self, cls: type[ParallelOutput] = ParallelOutput, count: int | None = None, **more: Any) -> Any:
        """What `generate` returns: the sequences, or with `return_dict_in_generate` a `cls` that holds them.

        Those of the table's first `count` rows, if some were only of use on the way.
        """
        if self.call.streamer is not None:
            self.call.streamer.end()
        if not self.call.generation_config.return_dict_in_generate:
            return self.table.padded(count)
        return self.result(cls, count, **more)

    def result(self, cls: type[ParallelOutput], count: int | None = None, **more: Any) -> Any:
        """As `output`, but as things stand now: nobody is told that all is written."""
        record = self.call.record
        record.lengths = list(self.table.lengths[:count])
        if self.replayer is not None:
            record.came_from(self.replayer.origins)
        scores, logits = self.sampler.scores, self.sampler.logits
        return cls(
            sequences=self.table.padded(count),  # type: ignore[arg-type]
            scores=None if scores is None else tuple(scores),  # type: ignore[arg-type]
            logits=None if logits is None else tuple(logits),  # type: ignore[arg-type]
            past_key_values=self.cache,
            stats=self.stats,
            record=record,
            **more,
        )


def _advance(row: Row, token: int, ended: bool) -> bool:
    row.pending = [token]
    return not ended
