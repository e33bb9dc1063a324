"""Runner: forward passes of a call over the inputs of its rows, in chunks and with passes that replay has skipped.

PassAhead: a decode pass, queued before the sampled tokens are read on the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from hf_parallel.cache import BlockCache, Segment
from hf_parallel.cache.batch import find_images
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.decoding.replay.replay import Replayer
from hf_parallel.generation.decoding.rows import PassInputs, Row, RowGroup, collect_inputs
from hf_parallel.generation.decoding.wants import Pass, Steps, Wait
from hf_parallel.generation.sampling.parts import Part
from hf_parallel.generation.sampling.sampler import NextTokens, SamplingTask
from hf_parallel.kernels import to_device


class Runner:
    """Runs the passes of a call over one of its caches, and counts them in the call's `stats`."""

    def __init__(self, call: GenerationCall, cache: BlockCache) -> None:
        self.cache = cache
        self.stats = call.stats
        self._host = call.host
        self.device = call.input_ids.device
        self.placeholder = call.placeholder
        self.chunk_size = call.host.prefill_chunk(call.generation_config.prefill_chunk_size)
        """Maximum number of new tokens in a pass of a prefill."""
        self.sampled: tuple[list[int], Part] = [], Part(torch.empty(0, dtype=torch.int64))
        """Tokens that `DecodeLoop.sample` got last, which often are the next inputs: on the host, and on the device."""

    def step(
        self, rows: Sequence[Row], replayer: Replayer | None = None, sampling: SamplingTask | None = None
    ) -> Steps[NextTokens]:
        """Run one forward pass over the inputs of rows, which all belong to groups or none does.

        Backlogs of the groups are computed as well. The inputs of a group whose next logits are all cached join its
        backlog instead. Return the logits `[n, vocabulary]` of the n other rows, or with `sampling` what was sampled
        from them; see `Pass`.
        """
        logits: NextTokens
        if not rows or rows[0].group is None:
            inputs, ends = collect_inputs(rows)
            logits = yield self._packed([inputs], ends, sampling)
            self.stats.forward_passes += 1
            return logits
        groups: dict[RowGroup, list[Row]] = {}
        for row in rows:
            assert row.group is not None
            groups.setdefault(row.group, []).append(row)
        inputs = []
        ends = []
        computed: list[RowGroup] = []
        inserted = 0
        for group, members in groups.items():
            of_group, ends_of_group = collect_inputs(members)
            num_inserted = group.inserted_tokens
            group.inserted_tokens = 0
            if replayer is not None:
                steps = group.advance(of_group, ends_of_group)
                if replayer.skip_pass([row.index for row in members], steps):
                    group.backlog.append(of_group)
                    continue
            computed.append(group)
            inserted += num_inserted
            ends += [len(inputs) + end for end in ends_of_group]
            inputs += of_group
        if not ends:
            if self._host.turn_is_over:
                yield Wait()
            return torch.empty(0, 0, device=self.device)
        backlog: list[PassInputs] = []
        unfilled: PassInputs = []
        for group in computed:
            unfilled += group.unfilled_prompt()
            backlog += group.backlog
        if unfilled:
            yield from self._prefill_prompts(unfilled)
        if backlog:
            logits = yield from self.catch_up([*backlog, inputs], ends)
            for group in computed:
                group.backlog.clear()
        else:
            logits = yield self._packed([inputs], ends, sampling)
            self.stats.forward_passes += 1
        self.stats.prefilled_tokens += inserted
        return logits

    def prefill(self, inputs: PassInputs) -> Steps[torch.Tensor]:
        """Compute segments, none of which attends to a later one, in chunks that bound the memory of a pass.

        Return the logits after each segment, `[len(inputs), vocabulary]`.
        """
        began = time.perf_counter()
        logits: list[torch.Tensor] = []
        chunk: PassInputs = []
        ends: list[int] = []  # indices in the chunk of parts that complete a segment
        free = self.chunk_size
        for segment, tokens in inputs:
            while len(tokens) > free:
                images = self.cache.pool.images
                size = images.cut(tokens, max(free, 0)) if chunk else images.chunk(tokens, free)
                if size == len(tokens):
                    break
                if size:
                    chunk.append((Segment(segment.view, size, segment.write), tokens[:size]))
                    tokens = tokens[size:]
                of_chunk = yield from self.forward(chunk, ends=ends)
                logits.append(of_chunk.clone())  # the next pass may overwrite it
                chunk = []
                ends = []
                free = self.chunk_size
            chunk.append((Segment(segment.view, len(tokens), segment.write), tokens))
            ends.append(len(chunk) - 1)
            free -= len(tokens)
        if chunk:
            logits.append((yield from self.forward(chunk, ends=ends)))
        self.stats.prefilled_tokens += sum(segment.num_tokens for segment, _ in inputs)
        self.stats.prefill_seconds += time.perf_counter() - began
        return torch.cat(logits)

    def forward(self, *passes: PassInputs, ends: Sequence[int] | None = None) -> Steps[torch.Tensor]:
        """Run one forward pass over the inputs of one pass, or of several consecutive ones.

        Return the logits `[len(ends), vocabulary]` after segments of the last pass (None: after all tokens).
        """
        if ends is not None and len(passes) > 1:
            first = sum(len(inputs) for inputs in passes[:-1])
            ends = [first + end for end in ends]
        logits = yield from self.compute(self._packed(passes, ends))
        assert isinstance(logits, torch.Tensor), "nothing was asked to be sampled"
        return logits

    def compute(self, want: Pass) -> Steps[NextTokens]:
        """Run one forward pass, and count it."""
        logits: NextTokens = yield want
        self.stats.forward_passes += 1
        return logits

    def _packed(
        self, passes: Sequence[PassInputs], ends: Sequence[int] | None, sampling: SamplingTask | None = None
    ) -> Pass:
        """Return passes with their tokens on the device."""
        tokens: list[int] = []
        segments: list[list[Segment]] = []
        images = self.cache.pool.images
        has_images = len(images) > 0
        for inputs in passes:
            of_pass: list[Segment] = []
            for segment, segment_tokens in inputs:
                if has_images:
                    segment, segment_tokens = find_images(  # noqa: PLW2901
                        segment, segment_tokens, images, self.placeholder
                    )
                of_pass.append(segment)
                tokens += segment_tokens
            segments.append(of_pass)
        sampled_tokens, ids = self.sampled
        if tokens != sampled_tokens:
            ids = Part(to_device(tokens, self.device))
        return Pass(self.cache, segments, ids, ends, sampling)

    def _prefill_prompts(self, unfilled: PassInputs) -> Steps[None]:
        """Compute the prompts of groups, each segment once: groups that share a prompt name the same ones."""
        of_blocks = {segment.view[-1]: (segment, tokens) for segment, tokens in unfilled}
        yield from self.prefill(list(of_blocks.values()))

    def catch_up(self, passes: Sequence[PassInputs], ends: Sequence[int]) -> Steps[torch.Tensor]:
        """Compute consecutive passes in as few forward passes as the chunk size allows; return logits of the last.

        Tokens of all passes but the last are counted as prefilled.
        """
        began = time.perf_counter()
        chunk: list[PassInputs] = []
        free = self.chunk_size
        for inputs in passes:
            size = sum(len(tokens) for _, tokens in inputs)
            if chunk and size > free:
                yield from self.forward(*chunk, ends=[len(chunk[-1]) - 1])
                chunk = []
                free = self.chunk_size
            chunk.append(inputs)
            free -= size
        logits = yield from self.forward(*chunk, ends=ends)
        for inputs in passes[:-1]:
            self.stats.prefilled_tokens += sum(len(tokens) for _, tokens in inputs)
        self.stats.prefill_seconds += time.perf_counter() - began
        return logits


class PassAhead:
    """A decode pass that appends one token to each row, `ids`, on the device, and nothing else.

    The cache does not hold its tokens until `confirm` finds that these are the inputs of the next pass: a token may
    have ended a row, or changed what rows attend to.
    """

    def __init__(self, runner: Runner, rows: Sequence[Row], ids: Part) -> None:
        self._runner = runner
        self._rows = rows
        self._ids = ids
        self._cache = runner.cache
        self._segments = [Segment(row.current_view(), 1) for row in rows]

    def queue(self) -> Steps[None]:
        """Queue the pass."""
        log = self._cache.log
        self._cache.log = None  # `confirm` records the pass
        wanted = Pass(self._cache, [self._segments], self._ids, range(len(self._rows)))
        logits = yield from self._runner.compute(wanted)
        assert isinstance(logits, torch.Tensor), "nothing was asked to be sampled"
        self._cache.log = log
        self._logits = logits
        self._step = self._cache.take_back()

    def confirm(self, rows: Sequence[Row], tokens: Sequence[int]) -> torch.Tensor | None:
        """Return the logits `[len(rows), vocabulary]` if this is the next pass of `rows`; else None: it is void.

        `tokens` are those of the pass, read from the device. Rows may have ended, provided that no other row attends to
        their tokens, and that the pass is not logged: a log holds all tokens of a pass.
        """
        index_of = {row: index for index, row in enumerate(self._rows)}
        indices = [index_of.get(row, -1) for row in rows]
        if not indices or not all(self._holds(index, tokens) for index in indices):
            return None
        is_whole = len(indices) == len(self._rows)
        if not is_whole:
            if self._cache.log is not None:
                return None
            ended = set(range(len(self._rows))).difference(indices)
            ended_blocks = {self._segments[index].view[-1] for index in ended}
            for index in indices:
                if not ended_blocks.isdisjoint(self._segments[index].view):
                    return None
        self._cache.put_back(self._step, indices)
        for index in indices:
            self._rows[index].last_segment = self._segments[index]
        if self._cache.log is not None:
            self._cache.log.add_pass([self._segments], self._step, self._ids.tensor)
        if is_whole:
            return self._logits
        return self._logits.index_select(0, to_device(indices, self._logits.device))

    def _holds(self, place: int, tokens: Sequence[int]) -> bool:
        return place >= 0 and self._rows[place].continues(self._segments[place], tokens[place])
