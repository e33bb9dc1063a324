"""`generation_mode="shared_prefix"`: many completions over shared prompts (Hydragen, section 3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hf_parallel.cache.shared_prefix import Node, SharedPrefixCache
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import check_bool, check_int, is_int
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.prefill import SUFFIX_ROOM, first_room, prefill_leaves, step_back, tree_of
from hf_parallel.generation.resampling.config import ReplayConfig, replaying
from hf_parallel.generation.rows import Row
from hf_parallel.generation.sampling import TokenTable


@dataclass
class SharedPrefixConfig(ReplayConfig):
    """Completions that share what their prompts have in common. Output equals plain `generate`'s.

    Parameters
    ----------
    levels : nested list, optional
        The tree of prefixes, for who wants control: a node is `[tokens, child, child, ...]`, a leaf its tokens alone,
        tokens a list of ints, a 1-D tensor, or a string if a `tokenizer` is given. Several roots may be listed in a
        tuple. There is one row per leaf, depth first. Takes the place of `input_ids`. Default: shared prefixes of
        the rows of `input_ids` are found by themselves.
    keep_completions : bool
        Whether a cache that outlives the call holds the completions too, so that they can be continued.
    draft_tokens : int, optional
        With a `logits_cache`, tokens that a row may bring to a forward pass on trial, at most: where it writes again
        what the prompt has, or an earlier sample of it, what may follow there is computed along, and stays as far as
        it is drawn. It changes no sample, and is left where it does not pay. 0: none. Default: 15 where the model runs
        on the host, else 0.
    """

    mode: ClassVar[str] = "shared_prefix"

    levels: Any = None
    keep_completions: bool = True
    draft_tokens: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._paths: list[tuple[np.ndarray, ...]] = []

    def validate(self) -> None:
        """Check every setting; see `ParallelConfig.validate`."""
        super().validate()
        check_bool("keep_completions", self.keep_completions)
        if self.draft_tokens is not None:
            check_int("draft_tokens", self.draft_tokens, at_least=0)
        if self.levels is not None and not isinstance(self.levels, list | tuple):
            raise ValueError(f"levels must be a nested list, got {type(self.levels).__name__}")

    def prepare(self, kwargs: dict[str, Any]) -> None:
        """Turn `levels` into left-padded `input_ids`."""
        if self.levels is None:
            return
        for name in ("inputs", "input_ids", "attention_mask", "position_ids"):
            if kwargs.get(name) is not None:
                raise ValueError(f"give either {name} or levels, not both: levels hold all tokens of every row")
        if kwargs.get("num_return_sequences", 1) not in (None, 1):
            raise ValueError("with levels there is one row per leaf; repeat a leaf instead of num_return_sequences")
        try:
            self._paths = list(_leaf_paths(self.levels, kwargs.get("tokenizer")))
        except RecursionError as error:
            raise ValueError("levels is nested too deeply, or holds itself") from error
        rows = [np.concatenate(path) for path in self._paths]
        width = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, width - len(row) :] = torch.from_numpy(row)
            mask[i, width - len(row) :] = 1
        kwargs.update(input_ids=ids, attention_mask=mask)

    def run(self, call: GenerationCall) -> Any:
        """Prefill the tree once, then decode all rows over it."""
        if self._paths and call.num_rows != len(self._paths):
            raise ValueError("with levels there is one row per leaf, but generation_config has num_return_sequences")
        cache = tree_of(call)
        table = TokenTable(call.input_ids, call.pad_token_id, min(call.max_new_tokens, SUFFIX_ROOM))
        loop = DecodeLoop(call, cache, table, seed=self.seed)
        with loop.running(), replaying(loop, self, call.prompts, self.draft_tokens):
            self._decode(loop, cache)
        output = loop.output()
        if call.past_key_values is None and isinstance(output, torch.Tensor):
            cache.reset()
        return output

    def _leaves(self, call: GenerationCall, cache: SharedPrefixCache, rows: Sequence[int]) -> list[Node]:
        """The leaves of rows' prompts: found by what the prompts share, or as `levels` says."""
        if self.levels is None:
            return [cache.insert(call.prompts[row]) for row in rows]
        leaves = []
        for row in rows:
            node = cache.root
            for tokens in self._paths[row]:
                node = cache.insert(tokens, below=node)
            leaves.append(node)
        return leaves

    def _decode(self, loop: DecodeLoop, cache: SharedPrefixCache) -> None:
        """Replay what is remembered, prefill what is not held of the rows that go on, then decode."""
        call, table = loop.call, loop.table
        rows = loop.replay([Row(index, ()) for index in range(call.num_rows)])
        if not rows:
            return
        begins = [table.lengths[row.index] for row in rows]
        replayed = [
            table.ids[row.index, call.input_ids.shape[1] : begin] for row, begin in zip(rows, begins, strict=True)
        ]
        leaves = [
            cache.insert(tokens.cpu().numpy(), below=leaf) if len(tokens) else leaf
            for leaf, tokens in zip(self._leaves(call, cache, [row.index for row in rows]), replayed, strict=True)
        ]
        logits = None
        if all(len(tokens) for tokens in replayed) and (above := step_back(loop, cache, leaves)) is not None:
            leaves, begins = above, [begin - 1 for begin in begins]
            for row, tokens in zip(rows, replayed, strict=True):
                row.pending = tokens[-1:].tolist()
        else:
            logits = prefill_leaves(loop, cache, leaves)
        room = first_room(call.max_length - min(begins) - 1, len(rows))
        for row, leaf, block in zip(rows, leaves, cache.new_blocks(len(rows), room), strict=True):
            block.base = leaf.start + len(leaf.tokens)
            row.view = [*cache.view(leaf), block]
        ended = list(zip(rows, leaves, begins, strict=True))
        try:
            loop.decode(rows, logits)
            while ended:
                self._keep(loop, cache, *ended.pop())
        except BaseException:
            for row, _, _ in ended:
                cache.free(row.view[-1])
            raise

    def _keep(self, loop: DecodeLoop, cache: SharedPrefixCache, row: Row, leaf: Node, begin: int) -> None:
        """Make a completion part of the tree, or free it."""
        block = row.view[-1]
        if self.keep_completions and block.length:
            completion = loop.table.ids[row.index, begin : begin + block.length]
            cache.attach(leaf, completion.cpu().numpy(), block)
        else:
            cache.free(block)


def _leaf_paths(node: Any, tokenizer: Any, above: tuple[np.ndarray, ...] = ()) -> Iterator[tuple[np.ndarray, ...]]:
    """The runs of tokens from the root to each leaf of a nested list, depth first."""
    if isinstance(node, tuple):
        if not node:
            raise ValueError("levels must name at least one root, got an empty tuple")
        for root in node:
            yield from _leaf_paths(root, tokenizer, above)
        return
    is_leaf = not isinstance(node, list) or all(isinstance(item, int) for item in node)
    tokens, children = (node, []) if is_leaf else (node[0], node[1:])
    path = (*above, _as_tokens(tokens, tokenizer))
    if not children:
        yield path
    for child in children:
        yield from _leaf_paths(child, tokenizer, path)


def _as_tokens(tokens: Any, tokenizer: Any) -> np.ndarray:
    """One run of tokens of `levels`: ints, a tensor, or text."""
    given = tokens
    if isinstance(tokens, str):
        if tokenizer is None:
            raise ValueError(f"levels holds the text {tokens[:40]!r}: give the tokenizer= that encodes it")
        tokens = encode(tokenizer, tokens)
    elif isinstance(tokens, np.ndarray) or (isinstance(tokens, torch.Tensor) and not tokens.is_meta):
        tokens = tokens.tolist()
    if not isinstance(tokens, list) or not tokens or not all(is_int(t) and abs(t) < 2**63 for t in tokens):
        raise ValueError(f"a run of tokens in levels must be non-empty ints, a 1-D tensor or text, got {given!r}")
    return np.array(tokens, dtype=np.int64)
