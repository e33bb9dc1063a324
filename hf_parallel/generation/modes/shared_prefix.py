"""`generation_mode="shared_prefix"`: many completions over shared prompts (Hydragen, section 3)."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from hf_parallel.cache.tree import Node
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.call import GenerationCall, with_gaps
from hf_parallel.generation.config import Generated, ModePrompt, ModeTraits
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.prefill import (
    SUFFIX_CAPACITY,
    defer_last_tokens,
    initial_capacity,
    prefill_leaves,
    prefix_cache_of,
)
from hf_parallel.generation.replay.config import ReplayConfig, replaying
from hf_parallel.generation.rows import Row
from hf_parallel.generation.settings import Arguments
from hf_parallel.generation.token_table import TokenTable
from hf_parallel.generation.validation import check_bool, check_int, check_text, is_int

Path: TypeAlias = tuple[np.ndarray, ...]
"""Tokens of the nodes from the root of a tree to a leaf, each int64 `[length]`."""

MAX_DEPTH = 256
"""Largest depth of the tree of `levels`."""


class LevelsPrompt(ModePrompt["SharedPrefixConfig"]):
    """Prompts of `input_ids` or of `levels`."""

    @property
    def replaces_input_ids(self) -> bool:
        """Whether `levels` hold the prompts."""
        return self.config.levels is not None


@dataclass
class SharedPrefixConfig(ReplayConfig[ParallelOutput]):
    """Completions whose prompts share prefixes. The output equals that of plain `generate`.

    Parameters
    ----------
    levels : nested list, optional
        An explicit tree of prefixes instead of `input_ids`: a node is `[tokens, child, child, ...]`, a leaf its tokens
        alone, at most 256 deep. Tokens are a list of ints, a 1-D tensor, or a string if a `tokenizer` is given. A tuple
        lists several roots. There is one row per leaf, depth first. Default: the shared prefixes of the rows of
        `input_ids`.
    keep_completions : bool
        Whether the cache keeps the completions after the call, so that later calls can continue them.
    draft_tokens : int, optional
        With a `logits_cache`, the maximum number of draft tokens that a row verifies per forward pass (speculative
        decoding by n-gram lookup in the prompt and in its earlier samples). Does not change samples, and is skipped
        where it is not expected to save time. 0: no drafts. Default: 15 where the model runs on the CPU, else 0.
    """

    mode: ClassVar[str] = "shared_prefix"
    traits = ModeTraits(prompt=LevelsPrompt, keeps_states=True, rows_continue_prompts=True)

    levels: Sequence[Any] | None = None
    keep_completions: bool = True
    draft_tokens: int | None = None

    def validate(self) -> None:
        """Check every setting; see `ParallelConfig.validate`."""
        super().validate()
        check_bool("keep_completions", self.keep_completions)
        if self.draft_tokens is not None:
            check_int("draft_tokens", self.draft_tokens, at_least=0)
        if self.levels is not None and not isinstance(self.levels, list | tuple):
            raise ValueError(f"levels must be a nested list, got {type(self.levels).__name__}")

    def prepare(self, kwargs: Arguments) -> None:
        """Replace `levels` by left-padded `input_ids`."""
        if self.levels is None:
            return
        for name in ("inputs", "input_ids", "attention_mask", "position_ids", "pixel_values"):
            if kwargs.get(name) is not None:
                raise ValueError(f"give either {name} or levels, not both: levels hold all tokens of every row")
        if kwargs.get("num_return_sequences", 1) not in (None, 1):
            raise ValueError("with levels there is one row per leaf; repeat a leaf instead of num_return_sequences")
        rows = [np.concatenate(path) for path in _leaf_paths(self.levels, kwargs.get("tokenizer"))]
        width = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = torch.from_numpy(row)
            mask[i, width - len(row) :] = 1
        kwargs.update(input_ids=ids, attention_mask=mask)

    def make_run(self, call: GenerationCall) -> SharedPrefixRun:
        """See `ParallelConfig.make_run`."""
        return SharedPrefixRun(self, call)


class SharedPrefixRun:
    """One call of the mode: prefills the tree of prompts once, then decodes all rows over it."""

    def __init__(self, config: SharedPrefixConfig, call: GenerationCall) -> None:
        self.paths = [] if config.levels is None else list(_leaf_paths(config.levels, call.tokenizer))
        if self.paths and call.num_rows != len(self.paths):
            raise ValueError("with levels there is one row per leaf, but generation_config has num_return_sequences")
        self.config, self.call, self.cache = config, call, prefix_cache_of(call)
        table = TokenTable(call.input_ids, call.pad_token_id, min(call.max_new_tokens, SUFFIX_CAPACITY))
        self.loop = DecodeLoop(call, self.cache, table, seed=config.seed)

    def generate(self) -> Generated:
        """Generate. Return a tensor `int64 [rows, length]` or a `ParallelOutput`."""
        prompts = [with_gaps(*prompt) for prompt in zip(self.call.prompts, self.call.gaps, strict=True)]
        with self.loop.running(), replaying(self.loop, self.config, prompts, self.config.draft_tokens):
            rows = self.loop.replay([Row(index, ()) for index in range(self.call.num_rows)], may_wait=True)
            if rows:
                self._decode(rows)
        self.loop.record_truncated()
        return self.loop.output()

    def _leaf(self, row: int) -> Node:
        """Insert a prompt into the cache, node by node if given as `levels`. Return its leaf."""
        if not self.paths:
            return self.cache.insert_prompt(self.call.prompts[row], self.call.gaps[row])
        node = self.cache.root
        for tokens in self.paths[row]:
            node = self.cache.insert(tokens, root=node)
        return node

    def _decode(self, rows: Sequence[Row]) -> None:
        """Prefill prompts and replayed tokens of rows, then decode."""
        call, table, cache = self.call, self.loop.table, self.cache
        begins = [table.lengths[row.index] for row in rows]
        replayed = [table.ids[row.index, call.input_ids.shape[1] : n] for row, n in zip(rows, begins, strict=True)]
        leaves = [self._leaf(row.index) for row in rows]
        for i, tokens in enumerate(replayed):
            if len(tokens):
                leaves[i] = cache.insert(tokens.cpu().numpy(), root=leaves[i])
        logits = None
        if all(map(len, replayed)) and (parents := defer_last_tokens(self.loop, cache, leaves)) is not None:
            leaves, begins = parents, [begin - 1 for begin in begins]
            for row, tokens in zip(rows, replayed, strict=True):
                row.pending = tokens[-1:].tolist()
        else:
            logits = prefill_leaves(self.loop, cache, leaves)
        capacity = initial_capacity(call.max_length - min(begins) - 1, len(rows))
        for row, leaf, block in zip(rows, leaves, cache.pool.new_blocks(len(rows), capacity), strict=True):
            block.base = leaf.next_position
            row.view = [*leaf.view, block]
        self.loop.decode(rows, logits)
        for row, leaf, begin in zip(rows, leaves, begins, strict=True):
            block = row.view[-1]
            if self.config.keep_completions:
                cache.add(leaf, table.ids[row.index, begin : begin + block.length].cpu().numpy(), block)
            else:
                cache.pool.free(block)


def _leaf_paths(node: Any, tokenizer: Any, parents: Path = (), depth: int = 1) -> Iterator[Path]:
    """Yield the path to each leaf of a nested list, depth first."""
    if depth > MAX_DEPTH:
        raise ValueError(f"levels must be nested at most {MAX_DEPTH} deep, got a deeper list or one that holds itself")
    if isinstance(node, tuple):
        if not node:
            raise ValueError("levels must name at least one root, got an empty tuple")
        for root in node:
            yield from _leaf_paths(root, tokenizer, parents, depth + 1)
        return
    is_leaf = not isinstance(node, list) or all(isinstance(item, int) for item in node)
    tokens, children = (node, []) if is_leaf else (node[0], node[1:])
    path = (*parents, _as_tokens(tokens, tokenizer))
    if not children:
        yield path
    for child in children:
        yield from _leaf_paths(child, tokenizer, path, depth + 1)


def _as_tokens(tokens: Any, tokenizer: Any) -> np.ndarray:
    given = tokens
    if isinstance(tokens, str):
        if tokenizer is None:
            raise ValueError(f"levels holds the text {tokens[:40]!r}: give the tokenizer= that encodes it")
        check_text("levels", tokens)
        tokens = encode(tokenizer, tokens)
    elif isinstance(tokens, np.ndarray) or (isinstance(tokens, torch.Tensor) and not tokens.is_meta):
        tokens = tokens.tolist()
    if not isinstance(tokens, list) or not tokens or not all(is_int(t) and abs(t) < 2**63 for t in tokens):
        raise ValueError(
            f"node tokens in levels must be a non-empty list of ints, 1-D tensor or text, got {reprlib.repr(given)}"
        )
    return np.array(tokens, dtype=np.int64)
