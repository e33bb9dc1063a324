"""`generation_mode="shared_prefix"`: many completions over shared prompts (Hydragen, section 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hf_parallel.cache.tree import Node
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import Generated, ModeTraits
from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.prefill import (
    SUFFIX_CAPACITY,
    defer_last_tokens,
    initial_capacity,
    insert,
    insert_prompt,
    prefill_leaves,
    prefix_cache_of,
)
from hf_parallel.generation.decoding.replay.config import ReplayConfig, replaying
from hf_parallel.generation.decoding.rows import Row
from hf_parallel.generation.decoding.scoring import score_prompts
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.modes.beam_search import BeamSearchRun
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.sampling.token_table import TokenTable
from hf_parallel.generation.validation import check_bool, check_int


@dataclass
class SharedPrefixConfig(ReplayConfig[ParallelOutput]):
    """Completions whose prompts share prefixes, found in `input_ids`. The output equals `generate`'s.

    Parameters
    ----------
    keep_completions : bool
        Whether the cache keeps the completions after the call, so that later calls can continue them. With
        `num_beams`, only the prompts are kept.
    draft_tokens : int, optional
        With a `logits_cache`, the maximum number of draft tokens that a row verifies per forward pass (speculative
        decoding by n-gram lookup in the prompt and in its earlier samples). Does not change samples, and is skipped
        where it is not expected to save time. 0: no drafts. Default: 15 where the model runs on the CPU, else 0.
    """

    mode: ClassVar[str] = "shared_prefix"
    traits = ModeTraits(keeps_states=True, rows_continue_prompts=True, searches_beams=True)

    keep_completions: bool = True
    draft_tokens: int | None = None

    def validate(self) -> None:
        super().validate()
        check_bool("keep_completions", self.keep_completions)
        if self.draft_tokens is not None:
            check_int("draft_tokens", self.draft_tokens, at_least=0)

    def check_beams(self) -> None:
        if self.logits_cache is not None:
            raise ValueError("logits_cache is not supported with num_beams: a beam search samples no rows to replay")

    def max_states(self, call: GenerationCall) -> int:
        """As in other modes; with `num_beams`, also one of each beam that several beams continue."""
        forked = call.num_rows // 2 if (call.generation_config.num_beams or 1) > 1 else 0
        return super().max_states(call) + forked

    def make_run(self, call: GenerationCall) -> SharedPrefixRun | BeamSearchRun:
        if (call.generation_config.num_beams or 1) > 1:
            return BeamSearchRun(call, self.seed)
        return SharedPrefixRun(self, call)


class SharedPrefixRun:
    """One call of the mode: prefills the tree of prompts once, then decodes all rows over it."""

    def __init__(self, config: SharedPrefixConfig, call: GenerationCall) -> None:
        self.config = config
        self.call = call
        self.cache = prefix_cache_of(call)
        table = TokenTable(call.input_ids, call.pad_token_id, min(call.max_new_tokens, SUFFIX_CAPACITY))
        self.loop = DecodeLoop(call, self.cache, table, seed=config.seed)

    def generate(self) -> Steps[Generated]:
        """Generate. Return a tensor `int64 [rows, length]` or a `ParallelOutput`."""
        prompts = self.call.logits_keys
        with self.loop.running(), replaying(self.loop, self.config, prompts, self.config.draft_tokens):
            all_rows = [Row(index, ()) for index in range(self.call.num_rows)]
            yield from score_prompts(self.loop, self.cache)
            rows = yield from self.loop.replay(all_rows, may_wait=True)
            if rows:
                yield from self._decode(rows)
        self.loop.record_truncated()
        return self.loop.output()

    def _decode(self, rows: Sequence[Row]) -> Steps[None]:
        """Prefill prompts and replayed tokens of rows, then decode."""
        call = self.call
        table = self.loop.table
        cache = self.cache
        begins = [table.lengths[row.index] for row in rows]
        replayed = []
        for row, begin in zip(rows, begins, strict=True):
            replayed.append(table.ids[row.index, call.input_ids.shape[1] : begin])
        leaves: list[Node] = []
        for row, tokens in zip(rows, replayed, strict=True):
            leaf = yield from insert_prompt(cache, call.prompts[row.index], call.gaps[row.index])
            if len(tokens):
                leaf = yield from insert(cache, tokens.cpu().numpy(), root=leaf)
            leaves.append(leaf)
        logits = None
        parents = None
        if all(map(len, replayed)):
            parents = defer_last_tokens(self.loop, cache, leaves)
        if parents is not None:
            leaves = parents
            begins = [begin - 1 for begin in begins]
            for row, tokens in zip(rows, replayed, strict=True):
                row.pending = tokens[-1:].tolist()
        else:
            logits = yield from prefill_leaves(self.loop, cache, leaves)
        capacity = initial_capacity(call.max_length - min(begins) - 1, len(rows))
        self.loop.start(rows, leaves, capacity)
        if self.config.keep_completions:
            for row, leaf in zip(rows, leaves, strict=True):
                row.leaf = leaf
        yield from self.loop.decode(rows, logits)
        self.loop.keep(rows)
