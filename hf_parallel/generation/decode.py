"""The one decode loop: rows that bring new tokens, one forward pass for all of them, one token back for each.

A mode says what its rows bring next; everything else (passes, sampling, ending, streaming, counting) is here.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import StoppingCriteriaList

from ..attention import block_attention_enabled
from ..cache import BlockCache, ForwardPass, Segment, View
from .call import GenerationCall
from .graph import DecodeGraphs
from .outputs import GenerationStats, ParallelOutput
from .recall import Recall
from .sampling import Sampler, TokenTable

PREFILL_CHUNK = 4096
"""New tokens per forward pass of a prefill, unless `prefill_chunk_size` says otherwise."""

RUNNING_AHEAD = ("cuda",)
"""Kinds of devices that compute while the host goes on, so that a step may begin before its tokens have been read."""


@dataclass(eq=False)
class Row:
    """One sequence that is being written.

    `index` is its place in the batch, `view` the blocks that it sees, `pending` the tokens that it brings to the
    next forward pass.
    """

    index: int
    view: View
    pending: list[int] = field(default_factory=list)

    def segments(self) -> list[tuple[Segment, list[int]]]:
        """What the row brings to the next pass, with the tokens; its next token follows from the last of them."""
        return [(Segment(self.view, len(self.pending)), self.pending)]

    def wanted(self) -> bool:
        """Whether the row should go on; asked when all rows have taken their tokens."""
        return True


class DecodeLoop:
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
    recall : Recall, optional
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
        self.call, self.cache, self.table = call, cache, table
        self.stats = GenerationStats() if stats is None else stats
        self.streamer = call.streamer if stream and hasattr(call.streamer, "put") else None
        self.sampler = Sampler(call, table, call.stopping_criteria if criteria is None else criteria, seed)
        self.recall: Recall | None = None
        self._keyword: dict[str, Any] = {"block_cache": cache} if call.capabilities.keyword else {}
        self.device = table.ids.device
        captures = call.cuda_graph and DecodeGraphs.serve(call.model, self.device)
        self.graphs = DecodeGraphs(self._forward, cache) if captures else None
        self._keeps = "logits_to_keep" in inspect.signature(call.model.forward).parameters

    @contextmanager
    def running(self) -> Iterator[None]:
        """Switch block attention on, for the time of a call."""
        with block_attention_enabled(self.call.model, self.cache):
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
        room = self.call.generation_config.prefill_chunk_size or PREFILL_CHUNK
        logits: list[torch.Tensor] = []
        chunk: list[tuple[Segment, Sequence[int]]] = []
        ends: list[int] = []  # places in the chunk at which a segment ends
        free = room

        def flush() -> None:
            nonlocal chunk, ends, free
            out = self.forward(chunk, ends)
            logits.append(out)
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
        logits: torch.Tensor,
        advance: Callable[[Any, int, bool], bool] | None = None,
        settle: Callable[[], None] | None = None,
        follow: Callable[[Sequence[Row]], Sequence[Row]] | None = None,
    ) -> None:
        """Generate until no row is active.

        Parameters
        ----------
        rows : sequence of Row
            Ascending by index.
        logits : [len(rows), vocabulary]
            What follows each row's prompt.
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
        began = time.perf_counter()
        active = list(rows)
        plain = advance is None and settle is None and follow is None and self.recall is None
        move = advance or _advance
        while active:
            indices = [row.index for row in active]
            if self.recall is not None:
                self.recall.remember(indices, logits)
            drawn = self.sampler.draw(indices, logits)
            ahead = self._step_ahead(active, drawn[0]) if plain and self._runs_ahead(active) else None
            tokens, ended = self.sampler.read(*drawn)
            self.stats.decoded_tokens += len(tokens)
            self.stream(indices, tokens)
            if self.recall is not None:
                self.recall.follow(indices, tokens)
            going = [row for row, t, end in zip(active, tokens, ended, strict=True) if move(row, t, end)]
            before, active = active, [row for row in going if row.wanted()]
            active = active if follow is None else list(follow(active))
            if ahead is not None:
                logits = self._take_back(ahead, before, active)
            elif active:
                logits = self.step(active, settle)
        self.stats.decode_seconds += time.perf_counter() - began

    def step(self, rows: Sequence[Row], settle: Callable[[], None] | None = None) -> torch.Tensor:
        """One forward pass over what the rows have pending; returns logits `[len(rows), vocabulary]`."""
        brought: list[tuple[Segment, Sequence[int]]] = []
        ends = []
        for row in rows:
            brought += row.segments()
            ends.append(len(brought) - 1)
        logits = self.forward(brought, ends)
        if settle is not None:
            settle()
        return logits

    def _runs_ahead(self, rows: Sequence[Row]) -> bool:
        """Whether the next step may begin before its tokens are known here: nothing asks for them but the model."""
        more = any(self.table.lengths[row.index] < self.call.max_length for row in rows)
        return self.device.type in RUNNING_AHEAD and more and self.sampler.stays_on_device

    def _step_ahead(self, rows: Sequence[Row], tokens: torch.Tensor) -> torch.Tensor:
        """The next step of all rows, those included that `tokens` will turn out to have ended."""
        return self._run([Segment(row.view, 1) for row in rows], tokens, range(len(rows)))

    def _take_back(self, logits: torch.Tensor, rows: Sequence[Row], going: Sequence[Row]) -> torch.Tensor:
        """Forget what rows that had ended brought to a step; returns the logits of those that go on."""
        if len(going) == len(rows):
            return logits
        stay = {row.index for row in going}
        for row in rows:
            if row.index not in stay:
                self.cache.truncate(row.view[-1], row.view[-1].length - 1)
        return logits[[i for i, row in enumerate(rows) if row.index in stay]]

    def forward(self, brought: Sequence[tuple[Segment, Sequence[int]]], ends: Sequence[int]) -> torch.Tensor:
        """One forward pass.

        Parameters
        ----------
        brought : sequence of (Segment, tokens)
        ends : sequence of int
            Segments whose last token's logits are wanted.

        Returns
        -------
        torch.Tensor
            `[len(ends), vocabulary]`.
        """
        ids = _to_device([token for _, tokens in brought for token in tokens], self.device)
        return self._run([segment for segment, _ in brought], ids, ends)

    def _run(self, segments: Sequence[Segment], ids: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
        """One forward pass over packed tokens `ids`, `int64 [T]` on the device."""
        began = time.perf_counter()
        try:
            forward = self.cache.prepare(segments)
            keep = None if len(ends) == len(ids) else [forward.last_tokens[end] for end in ends]
            self.stats.plan_seconds += time.perf_counter() - began
            logits = self._logits(forward, ids, keep)
        except BaseException:
            self.cache.rollback()
            raise
        self.cache.commit()
        self.stats.forward_passes += 1
        return logits

    def _logits(self, forward: ForwardPass, ids: torch.Tensor, keep: list[int] | None) -> torch.Tensor:
        """Logits of the tokens at `keep` (None: of all)."""
        if self.graphs is not None and keep is None and forward.is_decode_step:
            return self.graphs.logits(forward, ids)
        return self._forward(ids, forward.position_ids, None if keep is None else _to_device(keep, self.device))

    def _forward(self, ids: torch.Tensor, position_ids: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """Run the model over packed tokens of the prepared pass, `int64 [T]`."""
        arguments = self._keyword if keep is None or not self._keeps else {**self._keyword, "logits_to_keep": keep}
        output = self.call.model(
            input_ids=ids[None],
            position_ids=position_ids[None],
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
            **arguments,
        )
        return output.logits[0] if self._keeps or keep is None else output.logits[0].index_select(0, keep)

    def stream(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Give the new tokens of `rows` to the caller's streamer, as `generate` does; other rows show padding."""
        if self.streamer is None:
            return
        shown = torch.full((len(self.table.lengths),), self.call.pad_token_id)
        shown[list(rows)] = torch.tensor(tokens)
        self.streamer.put(shown)

    def output(self, cls: type[ParallelOutput] = ParallelOutput, count: int | None = None, **more: Any) -> Any:
        """What `generate` returns: the sequences, or with `return_dict_in_generate` a `cls` that holds them.

        Those of the table's first `count` rows, if some were only of use on the way.
        """
        if self.call.streamer is not None:
            self.call.streamer.end()
        sequences = self.table.padded(count)
        if not self.call.generation_config.return_dict_in_generate:
            return sequences
        scores, logits = self.sampler.scores, self.sampler.logits
        return cls(
            sequences=sequences,  # type: ignore[arg-type]
            scores=None if scores is None else tuple(scores),  # type: ignore[arg-type]
            logits=None if logits is None else tuple(logits),  # type: ignore[arg-type]
            past_key_values=self.cache,
            stats=self.stats,
            **more,
        )


def _advance(row: Row, token: int, ended: bool) -> bool:
    row.pending = [token]
    return not ended


def _to_device(numbers: list[int], device: torch.device) -> torch.Tensor:
    """Integers as `int64 [n]` on a device, without waiting for what it is doing."""
    tensor = torch.tensor(numbers, dtype=torch.long)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
