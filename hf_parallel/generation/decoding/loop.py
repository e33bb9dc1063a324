"""The decode loop: one forward pass for all rows, then one token for each, until no row is active.

A mode provides the input tokens of its rows; the loop runs forward passes, samples, checks stopping criteria, streams.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.nn import functional as F
from transformers import StoppingCriteriaList

from hf_parallel.cache.pass_log import PassLog
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.cache.tree import Node
from hf_parallel.detokenizer import IncrementalDetokenizer
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.decoding.replay.replay import Replayer
from hf_parallel.generation.decoding.rows import Row
from hf_parallel.generation.decoding.runner import PassAhead, Runner
from hf_parallel.generation.decoding.standing import Standing
from hf_parallel.generation.decoding.wants import Draw, Steps, Wait
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.sampling.log_probs import LogProbs
from hf_parallel.generation.sampling.sampler import NextTokens, Sampled, Sampler, SamplingTask
from hf_parallel.generation.sampling.token_table import TokenTable
from hf_parallel.generation.streaming import text_tokenizer
from hf_parallel.models.probing.signature import CACHE

VOID_COST = 8
"""Passes that must be kept for each void one. A void pass costs a whole pass; a kept one saves the time in which the
device would wait for the host, about a sixth of a pass of four rows of an 8B model on an H200."""
RETRY = 32
"""Decode passes between attempts to queue one ahead while more than that are void."""

R = TypeVar("R", bound=Row)
OnToken = Callable[[Any, int, bool], bool]
"""(row, token, ended) -> whether the row generates another token; sets `row.pending`."""
Schedule = Callable[[Sequence[Any]], "Sequence[Any] | Steps[Sequence[Any]]"]
"""(active rows) -> rows of the next pass, ascending by index. A generator may run passes of its own."""


class DecodeLoop:
    """Generates tokens for the rows of one call.

    `table` holds the tokens of the rows, `criteria` defaults to those of the call, and `stream` says whether the
    caller's streamer receives new tokens. `log_probs`: record log-probabilities, for the method. `replaying` sets the
    `replayer`, and `draft`, which appends several tokens per forward pass where it can.
    """

    def __init__(
        self,
        call: GenerationCall,
        cache: SharedPrefixCache,
        table: TokenTable,
        criteria: StoppingCriteriaList | None = None,
        seed: Any = None,
        stream: bool = True,
        log_probs: bool = False,
    ) -> None:
        self.call = call
        self.cache = cache
        self.table = table
        self._texts: dict[Row, IncrementalDetokenizer] = {}
        self._num_forks: Counter[int] = Counter()  # by prompt
        self._pass_log: PassLog | None = None
        if call.is_logged:
            call.record.pass_log = self._pass_log = call.record.pass_log or PassLog()
            cache.log_to(self._pass_log)
        self.stats = call.stats
        self.runner = Runner(call, cache)
        criteria = call.stopping_criteria if criteria is None else criteria
        self.sampler = Sampler(call.generation_config, call.logits_processor, criteria, table, seed)
        self.sampler.returns_log_probs |= log_probs
        self.streamer = call.streamer if stream and hasattr(call.streamer, "put") else None
        self._text_tokenizer = text_tokenizer(call) if self.streamer is not None else None
        self.replayer: Replayer | None = None
        self.draft: Callable[[Sequence[Any]], Steps[list[Any]]] | None = None
        self._num_kept = 0  # of the passes that were queued ahead
        self._num_void = 0
        self._state_interval = cache.tree.state_interval if call.capabilities.mixers else None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the host run the model, and record memory statistics at the end.

        Ends the call of a kept cache, however the context ends: blocks outside its tree are freed.
        """
        try:
            with self.call.host.running(self.cache):
                yield
        finally:
            if self.call.past_key_values is not None:
                try:
                    self.cache.end_call()
                except RuntimeError:  # out of memory: what cannot be checked is not kept
                    self.cache.reset()
        self.stats.kv_bytes = self.cache.kv_bytes
        self.stats.state_bytes = self.cache.state_bytes
        self.stats.reserved_bytes = self.cache.pool.arena.reserved_bytes

    def decode(
        self,
        rows: Sequence[Row],
        logits: torch.Tensor | None,
        on_token: OnToken | None = None,
        after_pass: Callable[[], None] | None = None,
        schedule: Schedule | None = None,
    ) -> Steps[None]:
        """Generate until no row is active. Rows are ascending by index.

        `logits`, as returned by `step`, are those of the rows' next tokens; None: they are computed from `row.pending`.
        The default `on_token` makes the token pending, until the row ends. `after_pass` is called after every pass.
        `schedule` receives the active rows and returns those of the next pass; it may `drop` rows and admit others.
        Before their next pass, rows with a `leaf` keep what is in `wanted_prefixes` of the host.
        """
        began = time.perf_counter()
        prefilling = self.stats.prefill_seconds
        active = list(rows)
        next_tokens: NextTokens | None = logits
        is_plain = on_token is None and after_pass is None and schedule is None
        runs_ahead = is_plain or not self.cache.pool.states.in_use  # states do not go back after a void pass
        may_stand = is_plain and self._may_stand(active)
        while active:
            ahead: PassAhead | None = None
            if next_tokens is not None:
                if runs_ahead and self.call.host.runs_ahead and self._can_overlap(active, next_tokens):
                    # Queues the copy of the tokens before the pass.
                    next_tokens = yield from self._sampled(active, next_tokens)
                    ahead = PassAhead(self.runner, active, next_tokens.tokens)
                    yield from ahead.queue()
                active = yield from self.sample(active, next_tokens, on_token)
                if schedule is not None:
                    scheduled = schedule(active)
                    if isinstance(scheduled, Generator):
                        scheduled = yield from scheduled
                    active = [row for row in scheduled if row.is_active()]
            if self.draft is not None and is_plain:
                active = yield from self.draft(active)
            if self.call.host.wanted_prefixes and ahead is None:  # else the next pass is queued
                self._keep_wanted(rows, self.call.host.wanted_prefixes)
            num_steps = self._steps_to_stand(active) if may_stand and active else 0
            if num_steps > 1:
                sink = self.call.host.sink
                standing = Standing(self.cache, self.sampler, active, num_steps, sink)
                try:
                    next_tokens = yield standing
                finally:
                    self._settle(standing)
                active = [row for row, ended in zip(active, standing.ended, strict=True) if not ended]
                continue
            next_tokens = None if ahead is None else self._confirmed(ahead, active)
            if next_tokens is None and active:
                if self._state_interval is not None:
                    self._keep_states(active, self._state_interval)
                sampling = None
                if self.replayer is None:
                    sampling = SamplingTask(self.sampler, [row.index for row in active])
                next_tokens = yield from self.runner.step(active, self.replayer, sampling)
            if after_pass is not None and next_tokens is not None:
                after_pass()
        self.stats.decode_seconds += time.perf_counter() - began - (self.stats.prefill_seconds - prefilling)

    def _may_stand(self, rows: Sequence[Row]) -> bool:
        """Whether nothing in the run needs to see each token of rows; see `Standing`."""
        is_watched = self.replayer is not None or self.draft is not None or self._pass_log is not None
        host = self.call.host
        if is_watched or self.streamer is not None or not host.allows_standing:
            return False
        if host.is_shared and not self.sampler.can_join:
            return False
        return self.sampler.can_stand and all(type(row) is Row for row in rows)

    def _steps_to_stand(self, rows: Sequence[Row]) -> int:
        """Return for how many tokens rows can stand; 0: they have no token that the next pass appends."""
        if any(len(row.pending) != 1 for row in rows):
            return 0
        steps = self.sampler.row_criteria.steps_left([row.index for row in rows])
        interval = self._state_interval
        if interval is not None:
            for row in rows:
                if row.leaf is not None:
                    steps = min(steps, interval - row.view[-1].length)
        return steps

    def _settle(self, standing: Standing) -> None:
        """Record what rows have got while they stood."""
        num_steps, log_probs = standing.settle()
        self.call.record.passes += num_steps
        self.stats.forward_passes += num_steps
        self.stats.decoded_tokens += num_steps * len(standing.rows)
        if num_steps and self.call.generation_config.return_dict_in_generate:
            self.call.record.log_probs.append((tuple(standing.output_rows) * num_steps, log_probs))

    def step(self, rows: Sequence[Row], after_pass: Callable[[], None] | None = None) -> Steps[torch.Tensor]:
        """Run one forward pass over the pending tokens of rows; see `Runner.step`."""
        logits = yield from self.runner.step(rows, self.replayer)
        assert isinstance(logits, torch.Tensor), "nothing was asked to be sampled"
        if after_pass is not None:
            after_pass()
        return logits

    def sample(self, rows: Sequence[R], next_tokens: NextTokens, on_token: OnToken | None = None) -> Steps[list[R]]:
        """Sample and append the next token of each row, given their logits, or what was sampled from them.

        Return the rows that stay active.
        """
        if self.replayer is not None and isinstance(next_tokens, torch.Tensor):
            tokens, ended, log_probs = self.replayer.sample([row.index for row in rows], next_tokens)
            return self.append(rows, tokens, ended, on_token, log_probs=log_probs)
        sampled = yield from self._sampled(rows, next_tokens)
        tokens, ended = sampled.read()
        self.runner.sampled = tokens, sampled.tokens
        return self.append(rows, tokens, ended, on_token, log_probs=sampled.log_probs)

    def append(
        self,
        rows: Sequence[R],
        tokens: Sequence[int],
        ended: Sequence[bool],
        on_token: OnToken | None = None,
        is_pass: bool = True,
        log_probs: LogProbs | None = None,
    ) -> list[R]:
        """Record and stream one token of each row, which the table has already. Return the rows that stay active.

        `is_pass`: count a decode pass. `log_probs` are recorded.
        """
        record = self.call.record
        record.passes += is_pass
        self.stats.decoded_tokens += len(tokens)
        indices = []
        output_rows = []
        for row in rows:
            indices.append(row.index)
            output_rows.append(row.output_row)
        if self.call.generation_config.return_dict_in_generate:
            record.log_probs.append((tuple(output_rows), log_probs))
        if log_probs is not None:
            self.sampler.add_drawn(indices, output_rows, log_probs)
        if self._pass_log is not None:
            for row, token in zip(rows, tokens, strict=True):
                self._pass_log.add_sample(row.output_row, token, row.last_segment, row.view)
        self.call.host.add_tokens(output_rows, tokens)
        if self._text_tokenizer is not None:
            for row, token, end in zip(rows, tokens, ended, strict=True):
                self.show(row, token, end)
        if self.streamer is not None:
            shown = torch.full((len(self.table.lengths),), self.table.pad_token_id)
            shown[indices] = torch.tensor(tokens)
            self.streamer.put(shown)
        active = []
        for row, token, end in zip(rows, tokens, ended, strict=True):  # no call per row by default
            if on_token is not None:
                if on_token(row, token, end):
                    active.append(row)
            else:
                row.pending = [token]
                if not end:
                    active.append(row)
        if self.replayer is not None and len(active) < len(rows):
            active_indices = {row.index for row in active}
            self.replayer.cursors.stop_computing([index for index in indices if index not in active_indices])
        return [row for row in active if row.is_active()]

    def start(self, rows: Sequence[Row], leaves: Sequence[Node], capacity: int) -> None:
        """Give each row a block of its own after its leaf, for `capacity` tokens."""
        blocks = self.cache.pool.new_blocks(len(rows), capacity)
        for row, leaf, block in zip(rows, leaves, blocks, strict=True):
            block.base = leaf.next_position
            row.view = [*leaf.view, block]

    def keep(self, rows: Sequence[Row]) -> None:
        """Attach the own blocks of rows to the tree of the cache, or free them if they have no `leaf`."""
        for row in rows:
            if row.leaf is not None and not row.dropped:
                block = row.view[-1]
                end = self.table.lengths[row.index] - len(row.pending)
                tokens = self.table.ids[row.index, end - block.length : end]
                row.leaf = self.cache.add(row.leaf, tokens.cpu().numpy(), block)
            elif not row.dropped:
                self.cache.pool.free(row.view[-1])

    def fork(self, row: R, count: int = 1) -> list[R]:
        """Return `count` new rows that continue a row of a `SharedPrefixCache`, which itself goes on.

        They have its tokens, with their log-probabilities, logits and text, and random numbers of their own. The keys
        and values that the row has computed are attached to the tree of the cache, where all of them see them; from the
        next pass on, each row writes to a block of its own. Pass the new rows to the next pass, as `schedule` does.
        """
        assert row.leaf is not None, "the row follows a leaf of the tree"
        self.keep([row])
        rows = self.call.record.config.rows
        prompt = rows.place(row.output_row, self.call.num_rows).prompt
        forks = []
        for index in self.sampler.fork(row.index, count):
            fork = copy.copy(row)
            fork.index = index
            fork.output_row = rows.fork(prompt, self._num_forks[prompt], self.call.num_rows)
            fork.pending = list(row.pending)
            fork.last_segment = None
            self._num_forks[prompt] += 1
            forks.append(fork)
        self.start([row, *forks], [row.leaf] * (1 + count), capacity=0)
        numbers = [fork.output_row for fork in forks]
        for collector in self.sampler.top_log_probs:
            collector.fork(row.output_row, numbers)
        self.call.host.fork(row.output_row, numbers)
        text = self._texts.get(row)
        if text is not None:
            for fork in forks:
                self._texts[fork] = text.fork()
                self.call.show(fork.output_row, text.text, "begin")
        return forks

    def _keep_states(self, rows: Sequence[Row], interval: int) -> None:
        """Keep own blocks of `interval` tokens, with the states at their ends. Their rows continue in new blocks."""
        for row in rows:
            if row.leaf is not None and row.view[-1].length >= interval:
                self.keep_block(row)

    def _keep_wanted(self, rows: Sequence[Row], wanted: dict[int, int]) -> None:
        """Keep the own blocks of rows that hold any of the new tokens which others want to continue."""
        for row in rows:
            num_wanted = wanted.get(row.output_row, 0)
            if not num_wanted or row.leaf is None or row.dropped:
                continue
            num_kept = self.table.lengths[row.index] - len(row.pending) - row.view[-1].length
            if num_wanted > num_kept - self.call.input_ids.shape[1]:
                self.keep_block(row)
        wanted.clear()

    def keep_block(self, row: Row) -> None:
        """Attach the own block of a row to the tree of the cache. The row continues in a new one."""
        self.keep([row])
        assert row.leaf is not None, "the row follows a leaf of the tree"
        block = self.cache.pool.new_block(base=row.leaf.next_position)
        row.view = [*row.leaf.view, block]

    def drop(self, row: Row, reason: str) -> None:
        """End a row before its next pass and free its own block. `reason` is recorded, as a word for transcripts."""
        row.dropped = True
        self.call.record.end_reasons[row.output_row] = reason
        self.cache.pool.free(row.view[-1])
        if self.replayer is not None:
            self.replayer.cursors.stop_computing([row.index])
        if row in self._texts:
            self._write(row.output_row, "", "end")

    def show(self, row: Row, token: int, ended: bool) -> None:
        """Stream the text that a token adds to a row. Transcripts show it, too, if the mode has `streams_text`."""
        text = self._texts.get(row)
        if text is None:
            tokenizer = self._text_tokenizer or self.call.tokenizer
            text = IncrementalDetokenizer(tokenizer, self.call.record.hidden_tokens(tokenizer))
            self._texts[row] = text
            self._write(row.output_row, "", "begin")
        added = text.add([token])
        if ended:
            added += text.flush()
        self._write(row.output_row, added, "token")
        if ended:
            self._record_if_truncated(row, token)
            self._write(row.output_row, "", "end")

    def text_of(self, row: Row) -> str:
        """Return the text that `show` has streamed of a row."""
        text = self._texts.get(row)
        return "" if text is None else text.text

    def _write(self, row: int, text: str, event: str) -> None:
        """Write text of a row: to its streamer alone if the mode streams tokens, of which the text is a rendering."""
        if self._text_tokenizer is None:
            self.call.show(row, text, event)
        else:
            self.call.streamer.write_row(row, text, event)

    def _record_if_truncated(self, row: Row, last: int) -> None:
        """Record a row that `max_length` ended, if it did, given its last token."""
        if self.table.lengths[row.index] >= self.call.max_length and last not in self.call.eos_token_ids:
            self.call.record.truncated.add(row.output_row)

    def replay(self, rows: Sequence[R], on_token: OnToken | None = None, may_wait: bool = False) -> Steps[list[R]]:
        """Append tokens sampled from cached logits, before any forward pass. Return rows that need the model.

        `may_wait`: the call waits while other calls compute the next logits of all its rows, which then
        are replayed. It must not hold what these calls could wait for.
        """
        if self.replayer is None:
            return list(rows)
        began = time.perf_counter()
        active = {row.index: row for row in rows}
        indices = list(active)
        host = self.call.host
        while True:
            indices = self.replayer.replayable(indices)
            while indices:
                replayed = [active.pop(index) for index in indices]
                tokens, ended, log_probs = self.replayer.sample(indices)
                continuing = self.append(replayed, tokens, ended, on_token, is_pass=False, log_probs=log_probs)
                indices = [row.index for row in continuing]
                active |= zip(indices, continuing, strict=True)
                if host.turn_is_over:
                    yield Wait()
                indices = self.replayer.replayable(indices)
            has_waited = False
            if host.is_shared and may_wait:
                has_waited = yield from self._wait_for_others(self.replayer, list(active))
            if not has_waited:
                break
            indices = list(active)
        if active:
            if host.is_shared:
                self.replayer.cursors.start_computing(active, host)
            self.replayer.start_prefetch()
        self.stats.decode_seconds += time.perf_counter() - began
        return [active[index] for index in sorted(active)]

    def _wait_for_others(self, replayer: Replayer, rows: Sequence[int]) -> Steps[bool]:
        """Wait while other calls compute the next logits of all rows. Return whether it has waited."""
        has_waited = False
        host = self.call.host
        while rows and all(replayer.is_computed_by_other(row, host) for row in rows):
            yield Wait()
            has_waited = True
        return has_waited

    def num_tokens_left(self, row: Row) -> int:
        """Return the number of tokens that may still be appended to a row."""
        left = row.tokens_left()
        if left is None:
            left = self.call.max_length - self.table.lengths[row.index]
        return left

    def _sampled(self, rows: Sequence[Row], next_tokens: NextTokens) -> Steps[Sampled]:
        """Return the next token of each row. The host may sample for several calls at once."""
        if isinstance(next_tokens, Sampled):
            return next_tokens
        sampled: Sampled = yield Draw(SamplingTask(self.sampler, [row.index for row in rows]), next_tokens)
        return sampled

    def _can_overlap(self, rows: Sequence[Row], next_tokens: NextTokens) -> bool:
        """Return whether the next pass may be queued before its tokens, `next_tokens`, have been copied to the CPU."""
        if self.replayer is not None:
            return False
        if self.call.streamer is not None and not self.call.record.passes:
            # The first decode pass may compile layers and capture a CUDA graph: the first token goes first.
            return False
        is_rarely_void = VOID_COST * self._num_void <= self._num_kept + VOID_COST
        if not is_rarely_void and self.call.record.passes % RETRY:
            return False
        num_unsampled = 0 if isinstance(next_tokens, Sampled) else 1
        return self.sampler.stays_on_device and any(self.num_tokens_left(row) > num_unsampled for row in rows)

    def _confirmed(self, ahead: PassAhead, rows: Sequence[Row]) -> torch.Tensor | None:
        """Return the logits of a pass that was queued ahead, unless it is void."""
        logits = ahead.confirm(rows, self.runner.sampled[0])
        if logits is not None:
            self._num_kept += 1
        elif rows:
            self._num_void += 1
        return logits

    def extend(self, row: int, tokens: Sequence[int]) -> None:
        """Append tokens that were not sampled, such as a header; in a call of one row, the streamer receives them."""
        self.table.extend(row, tokens)
        if self.streamer is not None and len(self.table.lengths) == 1 and not hasattr(self.streamer, "write_row"):
            self.streamer.put(torch.tensor(tokens))

    def new_tokens(self, row: Row) -> list[int]:
        """Return the tokens that follow a row's prompt in the table."""
        begin = self.call.input_ids.shape[1]
        end = self.table.lengths[row.index]
        return self.table.ids[row.index, begin:end].tolist()

    def record_truncated(self, rows: Sequence[Row] | None = None) -> None:
        """Record the rows that `max_length` ended; default: all rows of the table, which are those of the call."""
        lengths = self.table.lengths
        numbers = {row: row for row in range(len(lengths))}  # of the rows of the table, as streamers number them
        if rows is not None:
            numbers = {row.index: row.output_row for row in rows}
        full = [row for row in numbers if lengths[row] >= self.call.max_length]
        if not full:  # then the table may have fewer columns
            return
        last = self.table.ids[full, self.call.max_length - 1].tolist()
        cut = [row for row, token in zip(full, last, strict=True) if token not in self.call.eos_token_ids]
        self.call.record.truncated.update(numbers[row] for row in cut)

    def output(
        self, cls: type[ParallelOutput] = ParallelOutput, rows: Sequence[Row] | None = None, **fields: Any
    ) -> Any:
        """End the streamer and return the output of `generate` for `rows`, in this order (default: all of the table).

        A streamer of a mode that streams tokens `at_end` receives them now. Empties a cache that nobody receives.
        """
        call = self.call
        if rows is not None:  # before a streamer receives their tokens
            output_rows = [row.output_row for row in rows]
            is_whole = output_rows == list(range(len(rows)))
            call.record.returned = [] if is_whole else output_rows
        sequences = self.table.padded(None if rows is None else [row.index for row in rows])
        if call.record.config.traits.streams_tokens == "at_end" and hasattr(call.streamer, "put"):
            for column in sequences[:, call.input_ids.shape[1] :].T:
                call.streamer.put(column.cpu())
        if call.streamer is not None:
            call.streamer.end()
        if not call.generation_config.return_dict_in_generate:
            if call.past_key_values is None:
                self.cache.reset()
            return sequences
        return self.result(cls, rows, **fields)

    def result(self, cls: type[ParallelOutput], rows: Sequence[Row] | None = None, **fields: Any) -> Any:
        """Return a `cls` with the present state of the call."""
        record = self.call.record
        scores = self.sampler.scores
        logits = self.sampler.logits
        cache = None if self.call.host.is_shared else self.cache  # the storage of an engine is its own
        if self.call.past_key_values is None:
            self.cache.record_weights(self.call.model, self.call.fingerprint)
        indices: list[int] | None = None
        record.lengths = list(self.table.lengths)
        output_rows = list(range(len(record.lengths)))
        if rows is not None:
            indices = [row.index for row in rows]
            if indices:
                record.lengths = [self.table.lengths[index] for index in indices]
            output_rows = [row.output_row for row in rows]
        if self.replayer is not None:
            record.add_origins(self.replayer.origins)
        self._record_errors(output_rows, indices or output_rows)
        if indices is not None or self.sampler.forks:
            returned = range(len(record.lengths)) if indices is None else indices
            num_steps = max(record.lengths) - record.begin
            if scores:
                scores = self.sampler.of_rows(scores[:num_steps], returned)
            if logits:
                logits = self.sampler.of_rows(logits[:num_steps], returned)
        return cls(
            sequences=self.table.padded(indices),  # type: ignore[arg-type]
            scores=None if scores is None else tuple(scores),  # type: ignore[arg-type]
            logits=None if logits is None else tuple(logits),  # type: ignore[arg-type]
            stats=self.stats,
            record=record,
            **{CACHE: cache, "log_probs": self.log_probs(rows), **fields},
        )

    def _record_errors(self, output_rows: Sequence[int], indices: Sequence[int]) -> None:
        """Record the errors with which processors, such as a grammar, have ended rows."""
        record = self.call.record
        for processor in self.sampler.processors:
            if not hasattr(processor, "error_of"):
                continue
            for row, index, length in zip(output_rows, indices, record.lengths, strict=True):
                error = processor.error_of(self.table.ids[index, :length].tolist())
                if error is not None:
                    record.errors[row] = error

    def log_probs(self, rows: Sequence[Row] | None = None) -> torch.Tensor:
        """Return log-probabilities of the new tokens of rows (default: all) so far, float32 `[rows, longest]`.

        They are those of the model, and NaN for tokens that were not sampled; see `ParallelOutput.log_probs`.
        """
        indices = list(range(len(self.table.lengths)))
        if rows is not None:
            indices = [row.index for row in rows]
        longest = max(self.table.lengths[index] for index in indices)
        begin = self.call.record.begin
        values = self.sampler.log_probs_of_rows()[indices, begin:longest]
        padding = longest - begin - values.shape[1]
        return F.pad(values, (0, padding), value=torch.nan)
