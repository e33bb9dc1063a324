"""Texts that a mode asks for, each over a prompt of its own, and the final answers that they hold.

Modes of several stages (self-consistency, Skeleton-of-Thought) are made of `Stage`: its prompts go into one tree of
shared prefixes, and its texts get their tokens in the same forward passes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import numpy as np
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_parallel.cache import Segment
from hf_parallel.cache.shared_prefix import Node, SharedPrefixCache
from hf_parallel.detokenizer import IncrementalDetokenizer
from hf_parallel.generation.arguments import encode
from hf_parallel.generation.call import GenerationCall, vocabulary_size
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.outputs import ParallelOutput
from hf_parallel.generation.prefill import SUFFIX_ROOM, first_room, prefill_leaves
from hf_parallel.generation.resampling.config import ReplayConfig, replaying
from hf_parallel.generation.rows import Row
from hf_parallel.generation.sampling import TokenTable
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.models.attention import UnsupportedModelError

_FROM_THE_PROMPT = (
    "min_length",
    "min_new_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "begin_suppress_tokens",
    "watermarking_config",
)
"""Settings of `generate` that are bound to the prompts it was given."""


# Texts


@dataclass(eq=False)
class TextRequest:
    """A text that is asked for.

    Parameters
    ----------
    prompt : int64 [length]
        What its row reads first.
    max_new_tokens : int
    text : IncrementalDetokenizer
        What has been written so far, without a token of `eos_token_id`.
    row : int
        Number of its row for a streamer.
    opening : str
        End of the prompt that belongs to the text; a streamer is told it first.
    until : callable (str) -> bool, optional
        Asked after each token whether the text is complete.
    """

    prompt: np.ndarray
    max_new_tokens: int
    text: IncrementalDetokenizer
    row: int
    opening: str = ""
    until: Callable[[str], bool] | None = None
    tokens: list[int] = field(default_factory=list)  # all that were generated
    cut: bool = False  # whether the budget ended it

    def take(self, token: int, is_eos: bool, ended: bool) -> tuple[str, bool]:
        """Append a token; returns the text that it added, and whether the passage goes on."""
        self.tokens.append(token)
        added = "" if is_eos else self.text.add([token])
        complete = ended or (self.until is not None and self.until(self.text.text))
        self.cut = not complete and len(self.tokens) >= self.max_new_tokens
        return added, not (complete or self.cut)


class Stage:
    """Passages that are written at the same time, each over its own prompt.

    Parameters
    ----------
    config : ReplayConfig
        Of the mode: whether logits are remembered.
    call : GenerationCall
    cache : SharedPrefixCache
        Reads the prompts and keeps what is written.
    groups : sequence of sequence of TextRequest
        At least one passage in all.
    workers : int, optional
        Passages of a group that are written at a time; when one has ended the next begins. Default: all of them.
    input_ids : int64 [passages, length], optional
        Prompts as processors see them. Default: the passages' own, left-padded.
    seed
        Source of each passage's randomness, see `ParallelConfig`.
    stats : GenerationStats, optional
        Where to count; new unless given.
    """

    def __init__(
        self,
        config: ReplayConfig,
        call: GenerationCall,
        cache: SharedPrefixCache,
        groups: Sequence[Sequence[TextRequest]],
        workers: int | None = None,
        input_ids: torch.Tensor | None = None,
        seed: Any = None,
        stats: GenerationStats | None = None,
    ) -> None:
        self.config, self.call, self.cache, self.workers = config, call, cache, workers
        self.passages = [passage for group in groups for passage in group]
        _check_lengths(call, self.passages)
        longest = max(passage.max_new_tokens for passage in self.passages)
        at_once = sum(min(len(group), workers or len(group)) for group in groups)
        self.room = first_room(longest - 1, at_once)
        ids = _left_padded(call, self.passages) if input_ids is None else input_ids
        # Budgets are counted per passage: prompts have other lengths than the call's.
        criteria = StoppingCriteriaList(c for c in call.stopping_criteria if not isinstance(c, MaxLengthCriteria))
        table = TokenTable(ids, call.pad_token_id, min(longest, SUFFIX_ROOM))
        padding = torch.tensor([ids.shape[1] - len(passage.prompt) for passage in self.passages])
        self.loop = DecodeLoop(_with_padding(call, padding), cache, table, criteria, seed, stats, stream=False)
        number = count()
        self._waiting = [
            deque(Writer(next(number), (), passage=passage, queue=i) for passage in group)
            for i, group in enumerate(groups)
        ]

    def run(self) -> DecodeLoop:
        """Read all prompts, write all passages; returns the loop, with its table and scores."""
        everyone = [writer for waiting in self._waiting for writer in waiting]
        with self.loop.running(), replaying(self.loop, self.config, [passage.prompt for passage in self.passages]):
            going = self.loop.replay(everyone, self._advance)
            self._waiting = [deque(writer for writer in waiting if writer in going) for waiting in self._waiting]
            if going:
                self._write(going)
        if self.loop.replayer is not None:
            rows = {writer.index: writer.passage.row for writer in everyone}
            self.call.record.came_from(self.loop.replayer.origins, rows)
        return self.loop

    def _write(self, writers: Sequence[Writer]) -> None:
        """Read the prompts of writers, with what they have replayed, and let them write on."""
        for writer in writers:
            writer.leaf = self.cache.insert(writer.read)
        logits = prefill_leaves(self.loop, self.cache, [writer.leaf for writer in writers])
        try:
            first = self._begin([0] * len(self._waiting))
            places = [place for place, writer in enumerate(writers) if writer in first]
            self.loop.decode(first, logits[places], self._advance, follow=self._follow)
            self._keep(writers)
        except BaseException:
            self._drop()
            raise

    def _begin(self, busy: Sequence[int]) -> list[Writer]:
        """Let those begin that wait in groups in which so few are `busy` that there is room for more."""
        begun: list[Writer] = []
        for waiting, writing in zip(self._waiting, busy, strict=True):
            room = len(waiting) if self.workers is None else min(self.workers - writing, len(waiting))
            begun += [waiting.popleft() for _ in range(room)]
        for writer, block in zip(begun, self.cache.new_blocks(len(begun), self.room), strict=True):
            block.base = len(writer.read)
            writer.view, writer.pending = [*self.cache.view(writer.leaf), block], writer.read[-1:].tolist()
        return begun

    def _advance(self, writer: Writer, token: int, ended: bool) -> bool:
        """Hand a writer its token; says whether its passage goes on."""
        passage = writer.passage
        if not passage.tokens:
            self._show(passage, passage.opening, "begin")
        added, going = passage.take(token, token in self.call.eos_token_ids, ended)
        writer.pending, writer.asks_again = [token], False
        self._show(passage, added, "token")
        if not going:
            self._show(passage, "", "end")
        return going

    def _follow(self, going: Sequence[Any]) -> Sequence[Any]:
        """Those that go on, and those that take the place of others that have ended."""
        if not any(self._waiting):
            return going
        begun = self._begin([sum(writer.queue == queue for writer in going) for queue in range(len(self._waiting))])
        for writer in begun:
            writer.asks_again = True
        self.loop.stats.prefilled_tokens += len(begun)
        return sorted([*going, *begun], key=lambda writer: writer.index)

    def _show(self, passage: TextRequest, text: str, event: str) -> None:
        """Tell a streamer of parallel text what a row wrote: `begin`, `token` or `end`."""
        self.call.show(passage.row, text, event)

    def _keep(self, writers: Sequence[Writer]) -> None:
        """Make what was written part of the tree; the last token of a passage has not been read."""
        for writer in writers:
            block = writer.view[-1]
            if block.length:
                written = writer.passage.tokens[block.base - len(writer.passage.prompt) :]
                self.cache.attach(writer.leaf, np.array(written), block)
            else:
                self.cache.free(block)

    def _drop(self) -> None:
        """Free what is not part of the tree, after a run that did not come to its end."""
        for block in self.cache.blocks - {node.block for node in self.cache.nodes()}:
            self.cache.free(block)


@dataclass(eq=False)
class Writer(Row):
    """The row of a passage; it waits in `queue` until it may begin, then `asks_again` for what follows its prompt."""

    passage: TextRequest = field(default=None, repr=False)  # type: ignore[assignment]
    queue: int = 0
    leaf: Node = field(default=None, repr=False)  # type: ignore[assignment]
    asks_again: bool = False

    @property
    def read(self) -> np.ndarray:
        """The prompt and all that was written, int64."""
        return np.concatenate((self.passage.prompt, np.array(self.passage.tokens, np.int64)))

    def segments(self) -> list[tuple[Segment, list[int]]]:
        """A new token; for one that begins while others write, the last token that it has, whose keys are held."""
        if not self.asks_again:
            return super().segments()
        return [(Segment(self.view[:-1], 1, write=False), self.pending)]


def _left_padded(call: GenerationCall, passages: Sequence[TextRequest]) -> torch.Tensor:
    """The prompts as one matrix `int64 [passages, longest]`."""
    longest = max(len(passage.prompt) for passage in passages)
    ids = call.input_ids.new_full((len(passages), longest), call.pad_token_id)
    for row, passage in enumerate(passages):
        ids[row, longest - len(passage.prompt) :] = torch.from_numpy(passage.prompt)
    return ids


def _with_padding(call: GenerationCall, padding: torch.Tensor) -> GenerationCall:
    """The call for other prompts: a repetition penalty overlooks the padding of these, `int64 [passages]`."""
    processors = LogitsProcessorList()
    for processor in call.logits_processor:
        plain = type(processor) is RepetitionPenaltyLogitsProcessor
        if plain and not isinstance(processor.prompt_ignore_length, int):
            processor = RepetitionPenaltyLogitsProcessor(processor.penalty, padding)
        processors.append(processor)
    return replace(call, logits_processor=processors)


def _check_lengths(call: GenerationCall, passages: Sequence[TextRequest]) -> None:
    longest = max(len(passage.prompt) + passage.max_new_tokens for passage in passages)
    if call.capabilities.max_length is not None and longest > call.capabilities.max_length:
        raise UnsupportedModelError(
            f"{type(call.model).__name__} changes its RoPE frequencies behind {call.capabilities.max_length} tokens, "
            f"which keys held already cannot follow; a text, all that it follows from and its budget may have that "
            f"many, got {longest}"
        )


# A call of a mode that has stages


def check_vocabulary(call: GenerationCall, texts: Sequence[str]) -> None:
    """Raise a `ValueError` unless the model can read the tokens of a mode's own texts."""
    vocabulary = vocabulary_size(call.model)
    for text in texts:
        if text and max(encode(call.tokenizer, text), default=0) >= vocabulary:
            raise ValueError(f"tokenizer gives tokens outside the model's vocabulary of {vocabulary} for {text!r}")


def refuse_what_counts_from_the_prompt(call: GenerationCall, mode: str) -> None:
    """Raise a `ValueError` for settings that texts over other prompts than the call's own cannot honour."""
    for name in _FROM_THE_PROMPT:
        value = getattr(call.generation_config, name, None)
        if value not in (None, 0):
            raise ValueError(f"{name}={value!r} cannot be honoured by {mode}: its texts follow from prompts of its own")


def give_back(
    call: GenerationCall,
    cache: SharedPrefixCache,
    answers: Sequence[Sequence[int]],
    stats: GenerationStats,
    cls: type[ParallelOutput],
    /,
    **more: Any,
) -> Any:
    """What `generate` returns: each prompt of the call with its answer's tokens; or a `cls` that holds them.

    A streamer is given the answers here, a token of each prompt at a time, as `generate` would: they are final now.
    """
    table = TokenTable(call.input_ids, call.pad_token_id, max(map(len, answers)))
    for row, tokens in enumerate(answers):
        table.extend(row, tokens)
    if hasattr(call.streamer, "put"):
        for tokens in table.padded()[:, call.input_ids.shape[1] :].T:
            call.streamer.put(tokens.cpu())
    output = DecodeLoop(call, cache, table, stats=stats, stream=False).output(cls, **more)
    if call.past_key_values is None and isinstance(output, torch.Tensor):
        cache.reset()
    return output
