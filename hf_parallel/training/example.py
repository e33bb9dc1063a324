"""ParallelExample: one parallel text as integers, with what each token saw when it was computed (docs/training.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.config import ParallelConfig
from hf_parallel.generation.dialects import AnyDialect
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.prompts import Chat, apply_template
from hf_parallel.training.dialects import get_dialect, lay_out


@dataclass(eq=False)
class ParallelExample:
    """Tokens in blocks, and the view of each: integers only, O(tokens x blocks of a view) of them.

    Each token was computed once, as part of a segment: consecutive tokens of one row, with the blocks that the row saw.
    A query at position `p` of its view sees a block that starts there at `start` up to the block's length and up to
    itself: keys `j < min(length, p - start + 1)`. A token that moved is in several blocks.

    All arrays are int64: `T` tokens, `B` blocks of `K` tokens in all, `S` segments whose views have `V` blocks in all,
    `N` targets.

    Attributes
    ----------
    input_ids, position_ids : [T]
        Tokens, and the positions to which the model rotates their queries and keys.
    block_lengths, block_tokens : [B], [K]
        Tokens of each block, and the indices of these tokens, one block after the other.
    segment_lengths, segment_positions : [S]
        Tokens of each segment, in the order of `input_ids`, and the position of its first token in its view.
    view_lengths : [S]
        Number of blocks that a segment sees.
    view_blocks, view_starts, view_stops : [V]
        These blocks, one segment after the other; where they start in the view; how many of their tokens exist.
    target_queries, target_ids, target_rows : [N]
        Index of the token whose logits predict a generated token; the generated token; the row that generated it.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    block_lengths: np.ndarray
    block_tokens: np.ndarray
    segment_lengths: np.ndarray
    segment_positions: np.ndarray
    view_lengths: np.ndarray
    view_blocks: np.ndarray
    view_starts: np.ndarray
    view_stops: np.ndarray
    target_queries: np.ndarray
    target_ids: np.ndarray
    target_rows: np.ndarray

    def __post_init__(self) -> None:
        num_tokens = len(self)
        num_segments = len(self.segment_lengths)
        num_view_blocks = len(self.view_blocks)
        num_targets = len(self.target_queries)
        sizes = {
            "input_ids": self.segment_lengths.sum(),
            "position_ids": num_tokens,
            "block_tokens": self.block_lengths.sum(),
            "segment_positions": num_segments,
            "view_lengths": num_segments,
            "view_blocks": self.view_lengths.sum(),
            "view_starts": num_view_blocks,
            "view_stops": num_view_blocks,
            "target_ids": num_targets,
            "target_rows": num_targets,
        }
        for name, size in sizes.items():
            length = len(getattr(self, name))
            if length != size:
                raise ValueError(f"{name} must have {size} integers, got {length}: was it truncated?")
        limits = {
            "block_tokens": num_tokens,
            "view_blocks": len(self.block_lengths),
            "target_queries": num_tokens,
        }
        for name, values in vars(self).items():
            if not len(values):
                continue
            limit = limits.get(name, 2**63 - 1)
            least = int(values.min())
            most = int(values.max())
            if least < 0 or most >= limit:
                raise ValueError(f"{name} must be between 0 and {limit - 1}, got {least if least < 0 else most}")
        if (self.view_stops > self.block_lengths[self.view_blocks]).any():
            raise ValueError("view_stops must be at most the lengths of the blocks in view_blocks")

    def __len__(self) -> int:
        return len(self.input_ids)

    @classmethod
    def from_output(cls, output: ParallelOutput) -> ParallelExample:
        """Return the tokens of a run, in the order in which they were computed.

        Parameters
        ----------
        output : ParallelOutput
            Return value of `generate(..., generation_mode=..., return_dict_in_generate=True)`, or of a session.

        Raises
        ------
        ValueError
            If the run has no complete trace, because parts of it were in a cache that it was given, if a sliding
            window counted masked tokens inside its prompts, or if its prompts have images.
        """
        record = getattr(output, "record", None)
        if record is None:
            got = type(output).__name__
            raise ValueError(f"output must come from a mode with return_dict_in_generate=True, got {got}")
        if record.images:
            raise ValueError("examples have no images, but output's prompts have: use tree_logprobs")
        if record.has_gaps:
            raise ValueError(
                "output must come from prompts without masked tokens inside, as the model has a sliding window"
            )
        if record.config.traits.rows_continue_prompts:
            rows = zip(output.sequences.tolist(), record.lengths, strict=True)
            prompts = [prompt.tolist() for prompt in record.prompts]
            return cls.from_tree(prompts, [row[record.begin : length] for row, length in rows])
        if record.pass_log is None or getattr(record.config, "logits_cache", None) is not None:
            raise ValueError(
                f"a run of {record.mode} can be traced only without past_key_values and logits_cache, which hold parts "
                "of it"
            )
        frozen = record.pass_log.freeze()
        rows, queries, ids = np.array(frozen.samples, np.int64).reshape(-1, 3).T
        return cls._from_segments(
            frozen.input_ids, frozen.position_ids, frozen.contents, frozen.segments, queries, ids, rows
        )

    @classmethod
    def from_tree(cls, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]) -> ParallelExample:
        """Return completions of prompts as a tree, in which every shared prefix is computed once.

        Parameters
        ----------
        prompts, completions : sequences of token ids
            One prompt per completion. Targets are all tokens of the completions, in order.

        Raises
        ------
        ValueError
            If there is no completion, not one prompt per completion, or an empty prompt.
        """
        if not completions or len(prompts) != len(completions):
            raise ValueError(f"each completion needs a prompt, got {len(prompts)} and {len(completions)} completions")
        prompts = [as_ids(prompt) for prompt in prompts]
        completions = [as_ids(completion) for completion in completions]
        if not all(prompts):
            raise ValueError("prompts must have at least one token, from whose logits the first token is sampled")
        cache = SharedPrefixCache()
        leaves = []
        for prompt, completion in zip(prompts, completions, strict=True):
            tokens = np.array([*prompt, *completion], np.int64)
            leaves.append(cache.insert(tokens[: max(1, len(tokens) - 1)]))
        nodes = list(cache.tree.nodes())
        number = {node: index for index, node in enumerate(nodes)}
        contents = []  # tokens of the example in each node
        segments = []
        begin = 0
        for node in nodes:
            length = len(node.tokens)
            view = [(number[part], part.start, len(part.tokens)) for part in node.path]
            segments.append((begin, length, node.start, view))
            contents.append(range(begin, begin + length))
            begin += length
        targets: list[tuple[int, int, int]] = []
        for row, (prompt, completion, leaf) in enumerate(zip(prompts, completions, leaves, strict=True)):
            path: list[int] = []
            for node in leaf.path:
                path += contents[number[node]]
            queries = path[len(prompt) - 1 :][: len(completion)]
            targets += zip(queries, completion, [row] * len(completion), strict=True)
        return cls._from_segments(
            np.concatenate([node.tokens for node in nodes]),
            np.concatenate([node.start + np.arange(len(node.tokens)) for node in nodes]),
            contents,
            segments,
            *np.array(targets, np.int64).reshape(-1, 3).T,
        )

    @classmethod
    def from_text(
        cls,
        text: str,
        tokenizer: PreTrainedTokenizerBase,
        dialect: str | AnyDialect | ParallelConfig,
        prompt: str | Chat | Iterable[int] = (),
        train_on_forced: bool = False,
    ) -> ParallelExample:
        """Return an annotated text as the mode or the paper of its dialect would compute it.

        Targets are all tokens that the model generates: not the prompt, and not what is forced (the ellipses of a
        skeleton, the opening of a branch, and the first token after its region).

        Parameters
        ----------
        text : str
            The whole answer, branches joined.
        tokenizer : PreTrainedTokenizerBase
        dialect : str, Dialect, SkeletonDialect or ParallelConfig
            `apar`, `pdos`, `multiverse`, `npr`, `parallel_r1`, `threadweaver`, a format, or the settings of `pdos`
            or `fork_join`.
        prompt : str, list of chat messages, or 1-D token ids
            A string gets the beginning-of-sequence token, if the tokenizer adds one.
        train_on_forced : bool
            The openings of branches are targets too, of the token before the region's branches.

        Raises
        ------
        ValueError
            For an unknown dialect, a tokenizer that cannot encode its tags, tags that are not balanced (with the line
            and the tag), or neither text nor prompt.
        """
        prompt_ids = _encode_prompt(tokenizer, prompt)
        layout = lay_out(text, tokenizer, get_dialect(dialect), prompt_ids, train_on_forced)
        targets = np.array(layout.targets, np.int64).reshape(-1, 3)
        return cls._from_segments(
            np.array(layout.input_ids), np.array(layout.position_ids), layout.contents, layout.segments, *targets.T
        )

    @classmethod
    def _from_segments(
        cls,
        input_ids: np.ndarray,
        position_ids: np.ndarray,
        contents: Sequence[Sequence[int]],
        segments: Sequence[tuple[int, int, int, Sequence[tuple[int, int, int]]]],
        *targets: np.ndarray,
    ) -> ParallelExample:
        """Return an example of blocks and segments: first token, number of tokens, position, and view of each."""
        block_lengths = [len(content) for content in contents]
        block_tokens = [token for content in contents for token in content]
        segment_lengths = []
        segment_positions = []
        view_lengths = []
        seen_blocks: list[tuple[int, int, int]] = []
        for _, length, position, view in segments:
            segment_lengths.append(length)
            segment_positions.append(position)
            view_lengths.append(len(view))
            seen_blocks += view
        blocks, starts, stops = np.array(seen_blocks, np.int64).reshape(-1, 3).T
        target_queries, target_ids, target_rows = targets
        integers = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "block_lengths": block_lengths,
            "block_tokens": block_tokens,
            "segment_lengths": segment_lengths,
            "segment_positions": segment_positions,
            "view_lengths": view_lengths,
            "view_blocks": blocks,
            "view_starts": starts,
            "view_stops": stops,
            "target_queries": target_queries,
            "target_ids": target_ids,
            "target_rows": target_rows,
        }
        return cls(**{name: np.asarray(values, np.int64) for name, values in integers.items()})

    def with_one_target_each(self) -> ParallelExample:
        """Return an example in which no token has more than one target.

        A token with several targets, such as the last one of a prompt with several completions, is followed by copies
        that are queries only: no token sees their keys.
        """
        order = np.argsort(self.target_queries, kind="stable")
        queries = self.target_queries[order]
        extra = order[1:][queries[1:] == queries[:-1]]  # targets after the first one of their token
        if not len(extra):
            return self
        segment_of = self._segment_of()
        firsts = np.cumsum(self.segment_lengths) - self.segment_lengths
        copied = self.target_queries[extra]
        segments = segment_of[copied]
        positions = self.segment_positions[segments] + copied - firsts[segments]
        ends = np.cumsum(self.view_lengths)
        by_segment = np.split(np.arange(len(self.view_blocks)), ends[:-1])
        blocks = np.concatenate([by_segment[segment] for segment in segments])
        targets = self.target_queries.copy()
        targets[extra] = len(self) + np.arange(len(extra))
        return replace(
            self,
            input_ids=np.append(self.input_ids, self.input_ids[copied]),
            position_ids=np.append(self.position_ids, self.position_ids[copied]),
            segment_lengths=np.append(self.segment_lengths, np.ones_like(copied)),
            segment_positions=np.append(self.segment_positions, positions),
            view_lengths=np.append(self.view_lengths, self.view_lengths[segments]),
            view_blocks=np.append(self.view_blocks, self.view_blocks[blocks]),
            view_starts=np.append(self.view_starts, self.view_starts[blocks]),
            view_stops=np.append(self.view_stops, self.view_stops[blocks]),
            target_queries=targets,
        )

    def _segment_of(self) -> np.ndarray:
        """Return the segment of each token."""
        return np.repeat(np.arange(len(self.segment_lengths)), self.segment_lengths)

    def of_rows(self, rows: Sequence[int]) -> ParallelExample:
        """Return the part that the targets of these rows depend on, such as those of one prompt of a batch."""
        is_target = np.isin(self.target_rows, rows)
        segment_of = self._segment_of()
        seen_by = np.repeat(np.arange(len(self.view_lengths)), self.view_lengths)  # segment of each view block
        firsts = np.cumsum(self.block_lengths) - self.block_lengths
        in_block = np.arange(len(self.block_tokens)) - np.repeat(firsts, self.block_lengths)
        is_needed = np.zeros(len(self.segment_lengths), bool)  # segments
        is_needed[segment_of[self.target_queries[is_target]]] = True
        while True:
            is_view = is_needed[seen_by]
            stops = np.zeros_like(self.block_lengths)
            np.maximum.at(stops, self.view_blocks[is_view], self.view_stops[is_view])
            is_seen = in_block < np.repeat(stops, self.block_lengths)
            num_needed = is_needed.sum()
            is_needed[segment_of[self.block_tokens[is_seen]]] = True
            if is_needed.sum() == num_needed:
                break
        is_token = is_needed[segment_of]
        # New numbers of the tokens and of the blocks.
        token = np.cumsum(is_token) - 1
        block = np.cumsum(stops > 0) - 1
        return ParallelExample(
            input_ids=self.input_ids[is_token],
            position_ids=self.position_ids[is_token],
            block_lengths=stops[stops > 0],
            block_tokens=token[self.block_tokens[is_seen]],
            segment_lengths=self.segment_lengths[is_needed],
            segment_positions=self.segment_positions[is_needed],
            view_lengths=self.view_lengths[is_needed],
            view_blocks=block[self.view_blocks[is_view]],
            view_starts=self.view_starts[is_view],
            view_stops=self.view_stops[is_view],
            target_queries=token[self.target_queries[is_target]],
            target_ids=self.target_ids[is_target],
            target_rows=self.target_rows[is_target],
        )

    @classmethod
    def pack(cls, examples: Sequence[ParallelExample]) -> ParallelExample:
        """Return several examples as one, in which no token sees those of another; rows are numbered anew.

        Raises `ValueError` if there is none.
        """
        if not examples:
            raise ValueError("examples must not be empty")
        tokens = list(map(len, examples))
        sizes = {
            "block_tokens": tokens,
            "target_queries": tokens,
            "view_blocks": [len(example.block_lengths) for example in examples],
            "target_rows": [1 + int(example.target_rows.max(initial=-1)) for example in examples],
        }
        packed = {}
        for name in (field.name for field in fields(cls)):
            columns = [getattr(example, name) for example in examples]
            if name in sizes:
                firsts = np.cumsum([0, *sizes[name]])
                columns = [column + first for column, first in zip(columns, firsts, strict=False)]
            packed[name] = np.concatenate(columns)
        return cls(**packed)

    @classmethod
    def features(cls) -> object:
        """Return the `datasets.Features` of `to_dict()`."""
        from datasets import Features, List, Value

        return Features({field.name: List(Value("int64")) for field in fields(cls)})

    def to_dict(self) -> dict[str, list[int]]:
        """Return the arrays as lists, for a `datasets.Dataset`."""
        return {field.name: getattr(self, field.name).tolist() for field in fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Sequence[int]]) -> ParallelExample:
        """Return the example of `to_dict`. Raises `ValueError` if it is incomplete."""
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in values]
        if missing:
            raise ValueError(f"an example needs the fields {missing}, got {sorted(values)}")
        return cls(**{name: np.asarray(values[name], np.int64) for name in names})


def as_ids(tokens: Iterable[int]) -> list[int]:
    """Return token ids as a list. Raises `ValueError` unless they are a 1-D tensor, array or list of integers."""
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.cpu()
    ids = np.asarray(tokens)
    if ids.ndim != 1 or not (ids.dtype.kind in "iu" or len(ids) == 0):
        got = f"text, {tokens!r}" if isinstance(tokens, str) else f"shape {ids.shape}"
        raise ValueError(f"prompts and completions must be 1-D tensors or lists of token ids, got {got}")
    return ids.tolist()


def padded_tokens(examples: Sequence[ParallelExample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens and positions of examples, padded on the right with zeros: int64 `[examples, longest]` each."""
    shape = (len(examples), max(map(len, examples)))
    input_ids = torch.zeros(shape, dtype=torch.int64)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    for row, example in enumerate(examples):
        input_ids[row, : len(example)] = torch.from_numpy(example.input_ids)
        position_ids[row, : len(example)] = torch.from_numpy(example.position_ids)
    return input_ids, position_ids


def _encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | Chat | Iterable[int]) -> list[int]:
    """Return the tokens of a prompt. A text gets the beginning-of-sequence token, if the tokenizer adds one."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        prompt = apply_template(prompt, tokenizer, add_generation_prompt=True)
    if not isinstance(prompt, str):
        return as_ids(prompt)  # type: ignore[arg-type]
    tokens = encode(tokenizer, prompt)
    bos = [tokenizer.bos_token_id]
    adds_bos = tokenizer(prompt)["input_ids"][:1] == bos
    if adds_bos and tokens[:1] != bos:
        return bos + tokens
    return tokens
