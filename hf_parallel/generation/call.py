"""GenerationCall: one call of `model.generate`, prepared by transformers and checked, as a mode receives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.utils import logging

from hf_parallel.cache import BlockCache
from hf_parallel.cache.fingerprint import active_dropout
from hf_parallel.cache.images import Image, ImageTable, is_image
from hf_parallel.cache.logits_key import LogitsKey
from hf_parallel.cache.placement import execution_device
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.cache.tree import common_prefix
from hf_parallel.detokenizer import IncrementalDetokenizer
from hf_parallel.generation.arguments import check_model_inputs, encode
from hf_parallel.generation.decoding.host import C, Host, LocalHost, T
from hf_parallel.generation.decoding.wants import Steps, check_steps
from hf_parallel.generation.enabled import Claim, enabled
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.kernels import RotarySpec
from hf_parallel.models.probing.capabilities import Capabilities
from hf_parallel.models.probing.signature import CACHE
from hf_parallel.transcript.record import Record

_logger = logging.get_logger(__name__)


@dataclass(frozen=True, eq=False)
class GenerationCall:
    """A prepared call.

    `input_ids`, `int64 [rows, length]`, are the left-padded prompts, each repeated `num_return_sequences` times, or
    `num_beams` times if there are several;
    `prompts` (int64) the same without padding and other masked tokens. `gaps` has for each prompt the number of masked
    tokens before the token at an index inside it. `record` collects what the transcript shows, and `claim` is active
    until the call ends. `host` computes the call, `stats` are its cost. Other fields are arguments of `generate`,
    as transformers prepared them.
    """

    model: PreTrainedModel
    capabilities: Capabilities
    input_ids: torch.Tensor
    prompts: list[np.ndarray]
    gaps: list[dict[int, int]]
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    host: Host
    stats: GenerationStats
    streamer: Any = None
    tokenizer: Any = None
    past_key_values: BlockCache | None = None
    record: Record = field(default_factory=Record)
    claim: Claim | None = None
    images: Sequence[Image] = ()  # of the prompts, whose tokens have ids of their own in `prompts`

    @property
    def num_rows(self) -> int:
        """Rows of `input_ids`."""
        return self.input_ids.shape[0]

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a row, prompt and padding included."""
        return int(self.generation_config.max_length)

    @property
    def max_new_tokens(self) -> int:
        """Maximum number of new tokens of a row."""
        return self.max_length - self.input_ids.shape[1]

    @cached_property
    def prompt_tokens(self) -> int:
        """Number of distinct prompt tokens: prefixes that the prompts share count once."""
        prompts = [np.array(key.steps) for key in sorted(self.logits_keys)]
        count = 0
        previous = np.empty(0, np.int64)
        for prompt in prompts:
            count += len(prompt) - common_prefix(previous, prompt)
            previous = prompt
        return count

    @cached_property
    def logits_keys(self) -> list[LogitsKey]:
        """Key of each prompt in a `LogitsCache`."""
        return list(map(LogitsKey.of_prompt, self.prompts, self.gaps))

    @property
    def placeholder(self) -> int:
        """Token id of image tokens; -1 if the model has none."""
        token = getattr(self.model.config, "image_token_id", None)
        return -1 if token is None else token

    def token_ids(self, tokens: np.ndarray) -> np.ndarray:
        """Return tokens with the placeholder's id in place of those of image tokens."""
        return np.where(is_image(tokens), self.placeholder, tokens)

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the model, without its offloaded weights."""
        return self.host.fingerprint()

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text of the settings."""
        return len(encode(self.tokenizer, text)) if text else 0

    @property
    def is_logged(self) -> bool:
        """Whether the record logs the forward passes: it is returned, and `sequences` do not say all of them."""
        config = self.record.config
        if config is None or config.traits.rows_continue_prompts:
            return False
        if not self.generation_config.return_dict_in_generate:
            return False
        if self.past_key_values is not None or self.host.is_shared:  # the cache holds prefixes of other calls
            return False
        return not self.record.has_gaps and not self.record.images

    @cached_property
    def pad_token_id(self) -> int:
        """Padding token of rows that have ended."""
        pad = self.generation_config._pad_token_tensor  # type: ignore[attr-defined]
        return 0 if pad is None else int(pad)

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end a row."""
        eos = self.generation_config._eos_token_tensor  # type: ignore[attr-defined]
        return [] if eos is None else eos.flatten().tolist()

    @cached_property
    def hidden_tokens(self) -> frozenset[int]:
        """Tokens that the texts of its rows leave out: those that end a row, and special tokens."""
        return self.record.hidden_tokens(self.tokenizer)

    def new_text(self) -> IncrementalDetokenizer:
        """Return the empty text of a row, without hidden tokens."""
        return IncrementalDetokenizer(self.tokenizer, self.hidden_tokens)

    def drive(self, steps: Steps[T]) -> T:
        """Run to the end of a run of the call, which has the model to itself."""
        assert isinstance(self.host, LocalHost), "an engine drives the runs of its requests"
        return self.host.drive(check_steps(steps))

    def new_cache(self, cls: type[C], rotary: Mapping[int, RotarySpec | None] | None = None) -> C:
        """Return an empty cache for the call, which may share storage and prefixes with other calls."""
        cache = self.host.new_cache(cls, rotary)
        cache.pool.images.add(self.images)
        return cache

    def begin_cache(self, cache: SharedPrefixCache, is_kept: bool = False) -> None:
        """Start to use a `SharedPrefixCache`, which is kept if it was given, too.

        The weights of a new cache that is returned are recorded at the end of the call, after the first token.
        """
        cache.pool.images.add(self.images)
        dtype = None if self.record.config is None else self.record.config.cache_dtype
        is_kept |= self.past_key_values is not None
        self.host.begin_cache(cache, dtype, self.claim, self.fingerprint if is_kept else None)

    def show(self, row: int, text: str, event: str) -> None:
        """Record text of a row and stream it. Events as in `ParallelStreamer.write_row`."""
        self.record.write(row, text, event)
        self.host.add_text(row, text, event)
        write = getattr(self.streamer, "write_row", None)
        if write is not None:
            write(row, text, event)


def make_call(
    model: Any,
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    record: Record,
    *,
    cuda_graph: bool,
    compile: bool | None,  # noqa: A002 (the name of the setting)
    **prepared: Any,
) -> GenerationCall:
    """Check the arguments of a decoding method and return them as a `GenerationCall`; `model_kwargs` is modified.

    Raises `ValueError` for unsupported inputs, and for rows that may become too long.
    """
    capabilities: Capabilities = enabled(model).capabilities
    tokenizer = model_kwargs.pop("tokenizer", None)
    cache = model_kwargs.pop(CACHE, None)
    mask = model_kwargs.pop("attention_mask", None)
    positions = model_kwargs.pop("position_ids", None)
    prompt_ids = model_kwargs.pop("prompt_ids", input_ids)
    prepared["images"] = model_kwargs.pop("images", ())
    check_model_inputs(record.config.title, model_kwargs)
    if positions is not None and positions.ndim == 3:
        positions = positions[0] if len(positions) == 4 else None  # the others follow from the images
    texts, gaps = _unpad(input_ids, mask, positions)
    prompts = texts if prompt_ids is input_ids else _unpad(prompt_ids, mask, None)[0]
    if capabilities.mixers and any(gaps):
        row = next(row for row, gap in enumerate(gaps) if gap)
        raise ValueError(
            f"attention_mask masks tokens inside the prompt of row {row}, which {type(model).__name__} would read into "
            f"the state of {capabilities.mixers[0].name}: remove these tokens from the prompt"
        )
    vocabulary = vocabulary_size(model)
    for row, text in enumerate(texts):
        is_outside = (text < 0) | (text >= vocabulary)
        unknown = text[is_outside & (prompts[row] == text)]
        if len(unknown):
            raise ValueError(f"input_ids of row {row} hold {unknown[0]}, outside the vocabulary of {vocabulary}")
    new_tokens = int(prepared["generation_config"].max_length) - input_ids.shape[1]
    longest = max(len(prompt) for prompt in prompts) + new_tokens
    capabilities.check_length(model, longest)
    record.prompts = texts
    table = ImageTable()
    table.add(prepared["images"])
    if table:
        record.images = []
        for prompt in prompts:
            thumbnails = [span.image.thumbnail for span in table.spans(prompt) if not span.first]
            record.images.append(thumbnails)
    record.begin = input_ids.shape[1]
    record.has_gaps = capabilities.has_window and any(gaps)
    is_usable = isinstance(cache, BlockCache) and not has_dropout(model, "past_key_values")
    prepared["past_key_values"] = cache if is_usable else None  # else an empty DynamicCache
    ids = input_ids.to(execution_device(model), torch.int64)
    stats = GenerationStats()
    prepared["host"] = LocalHost(model, capabilities, stats, cuda_graph, compile, new_tokens)
    call = GenerationCall(
        model, capabilities, ids, prompts, gaps, tokenizer=tokenizer, record=record, stats=stats, **prepared
    )
    record.end_tokens = call.eos_token_ids
    return call


def has_dropout(model: PreTrainedModel, cache: str) -> bool:
    """Return whether dropout is active; then warn that a call does not use the cache, whose contents it would change.

    No later call would compute the same.
    """
    names = active_dropout(model)
    if names:
        _logger.warning_once(
            f"{cache} is neither read nor filled, as dropout is active in {names[0] or type(model).__name__} "
            f"({len(names)} modules): call model.eval() first"
        )
    return bool(names)


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of rows of a model's embedding."""
    default: int = model.config.get_text_config(decoder=True).vocab_size  # if it is on another rank
    return getattr(model.get_input_embeddings(), "num_embeddings", default)


def _unpad(
    input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None
) -> tuple[list[np.ndarray], list[dict[int, int]]]:
    """Return the rows without masked tokens, and the number of masked ones before a token that is not the first."""
    ids = input_ids.cpu().numpy()
    is_token = np.ones(ids.shape, dtype=bool)
    if mask is not None:
        is_token = mask.cpu().numpy().astype(bool)
    for row in range(len(ids)):
        if not is_token[row].any():
            raise ValueError(f"the prompt of row {row} is empty: attention_mask masks all of it")
        if not is_token[row, -1]:
            raise ValueError(f"row {row} is padded on the right; use tokenizer.padding_side = 'left'")
    if positions is not None:
        position_ids = positions.cpu().numpy()
        position_ids = position_ids[np.arange(len(ids)) % len(position_ids)]  # a single row applies to all rows
        if ((position_ids != is_token.cumsum(-1) - 1) & is_token).any():
            raise ValueError("custom position_ids are not supported: they must count the unmasked tokens from 0")
    prompts = []
    gaps = []
    for row_ids, row_is_token in zip(ids, is_token, strict=True):
        columns = np.flatnonzero(row_is_token)
        prompts.append(np.ascontiguousarray(row_ids[columns], dtype=np.int64))
        masked = np.diff(columns) - 1  # before each token but the first
        of_prompt: dict[int, int] = {}
        for index in np.flatnonzero(masked).tolist():
            of_prompt[index + 1] = int(masked[index])
        gaps.append(of_prompt)
    return prompts, gaps
