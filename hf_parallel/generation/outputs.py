"""ParallelOutput: the base class of the modes' outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.utils import GenerateDecoderOnlyOutput
from typing_extensions import Self

from hf_parallel.detokenizer import check_tokenizer, decode, visible_text
from hf_parallel.generation.settings import Arguments
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.models.probing.signature import CACHE
from hf_parallel.transcript.page import render
from hf_parallel.transcript.record import Record
from hf_parallel.transcript.sections import (
    Section,
    cards_by_prompt,
    column_names,
    completion_sections,
    separate_overlapping,
    transcript_dict,
)
from hf_parallel.transcript.tree import TreeNode, tree_cells

T = TypeVar("T")
ALWAYS: Any = None
"""Default of a field that the mode always sets, whose type thus excludes None; `ModelOutput` requires a default."""


@dataclass
class ParallelOutput(GenerateDecoderOnlyOutput):
    """Output of a mode: `GenerateDecoderOnlyOutput` with the cost of the call and its transcript.

    Pickles and deep copies hold neither the cache nor settings that exist in the running process only, such as a
    `LogitsCache`.

    Attributes
    ----------
    sequences : int64 [rows, length]
        Prompt and generated tokens of each row, padded.
    scores, logits : tuple of [rows, vocabulary], optional
        As those of `generate`, with `output_scores` and `output_logits`.
    past_key_values : BlockCache, optional
        The cache of the call; None in a pickle.
    log_probs : float32 [rows, new tokens]
        Log-softmax of the model's unprocessed logits for each token of `sequences` after the prompts, at the time when
        the token was sampled: without processors, temperature and the like. NaN where no token was sampled: after the
        end of a row, and for tokens that the mode inserted. So `output.log_probs.nansum(1)` is the log-probability of
        each row, and `nanmean(1)` the mean of its tokens. `record.sampled_log_probs` has the values of all rows of the
        mode, also under the distributions that were sampled.
    """

    item_names: ClassVar[Mapping[str, str]] = {}
    """Names of the texts in `to_records`, by the field that has one text for each answer."""

    log_probs: torch.Tensor = ALWAYS
    stats: GenerationStats = ALWAYS
    """Cost of the call."""
    record: Record = ALWAYS
    """Record of the call, from which `to_dict` and `to_html` make the transcript."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__repr__" not in vars(cls):
            cls.__repr__ = cls.__repr__  # type: ignore[method-assign] # otherwise `dataclass` would add one with all data

    def __repr__(self) -> str:
        mode = None if self.record is None else self.record.mode
        shape = None if self.sequences is None else list(self.sequences.shape)
        costs = self.stats or GenerationStats()
        cost = f"tokens={costs.decoded_tokens}, passes={costs.forward_passes}"
        return f"{type(self).__name__}(generation_mode={mode!r}, sequences={shape}, {cost})"

    def __copy__(self) -> Self:
        copied = dataclasses.replace(self)
        vars(copied).update(vars(self))
        return copied

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without the cache; see the class."""
        names = [field.name for field in dataclasses.fields(self)]
        values = {name: getattr(self, name) for name in names}
        values[CACHE] = None
        if self.record is not None and self.record.config is not None:
            config = self.record.config
            settings = {name: value for name, value in config.given().items() if name not in config.not_stored()}
            values["record"] = dataclasses.replace(self.record, config=type(config)(**settings))
        attributes = {name: value for name, value in vars(self).items() if name not in names}
        return partial(type(self), **values), (), attributes

    def to_dict(self, tokenizer: PreTrainedTokenizerBase | None = None) -> Arguments:
        """Return the transcript of the call as plain data: which row generated which text at which forward pass.

        It can be saved as JSON, which `hf-parallel view` reads. The model's `tokenizer` adds the text of the prompts.
        Raises `ValueError` if the output has no record, or if a mode that streams no text lacks the `tokenizer`.
        """
        if self.record is None:
            raise ValueError("this output has no record: only calls with a `generation_mode` have transcripts")
        if tokenizer is not None:
            check_tokenizer(tokenizer)
        return transcript_dict(self.record, self.stats, self._sections(self.record, tokenizer))

    def to_html(self, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
        """Return the transcript as a self-contained HTML page: one column per row, forward passes on the vertical axis.

        Parameters and errors: see `to_dict`. In a notebook: `IPython.display.HTML(output.to_html())`.
        """
        return render(self.to_dict(tokenizer))

    @property
    def log_probs_mask(self) -> torch.Tensor:
        """Mask of the tokens of `log_probs` that were sampled, bool `[rows, new tokens]`."""
        return ~self.log_probs.isnan()

    def columns(self, prompt: int) -> list[str]:
        """Return names for a prompt's leftmost columns. The other columns are named after their rows."""
        return []

    def ranking(self, prompt: int) -> tuple[list[int], list[int]]:
        """Return a prompt's columns as a page orders them, best first, and the chosen ones. Empty: unranked."""
        return [], []

    def notes(self, prompt: int) -> list[tuple[str, str]]:
        """Return further text about a prompt: pairs of heading and text."""
        return []

    def tree(self, prompt: int) -> TreeNode | None:
        """Return the tree of a prompt's rows, in modes whose rows fork."""
        return None

    def _sections(self, record: Record, tokenizer: PreTrainedTokenizerBase | None) -> list[Section]:
        if not record.events:
            if tokenizer is None:
                calls = "to_html(tokenizer) or to_dict(tokenizer)"
                raise ValueError(f"{record.mode} streams no text, so pass the tokenizer: {calls}")
            return completion_sections(record, self.sequences.tolist(), tokenizer)
        sections = []
        for prompt, cards in sorted(cards_by_prompt(record).items()):
            names = list(self.columns(prompt))
            names += column_names(record, prompt, cards)[len(names) :]
            separate_overlapping(cards, names, record.config.rows.style.spanning)
            tokens = record.prompts[prompt]
            text = None if tokenizer is None else decode(tokenizer, tokens.tolist())
            ranking, chosen = self.ranking(prompt)
            root = self.tree(prompt)
            section = Section(
                text,
                len(tokens),
                names,
                cards,
                notes=self.notes(prompt),
                ranking=ranking,
                chosen=chosen,
                images=record.images_of([prompt]),
                tree=None if root is None else tree_cells(root),
            )
            sections.append(section)
        return sections

    def to_records(self, log_probs: bool = False) -> list[Arguments]:
        """Return the mode's own fields and `stats` as plain data: one dictionary per answer.

        An answer is a row, or all rows of a prompt in modes that merge them (`ModeTraits.merges_rows`). A field
        that is a list is split: the i-th answer contains its i-th item. Single texts get a singular name: the answer
        has an `answer` from the field `answers`. With `log_probs`, an answer also has the log-probabilities of its new
        tokens, None for those that were not sampled; if rows are merged, a list of each row.
        """
        fields = {name: getattr(self, name) for name in self._own_fields()}
        count = len(self.sequences)
        if log_probs:
            fields["log_probs"] = self._log_probs_by_row()
        if self.record is not None and self.record.config.traits.merges_rows:
            count = len(fields["transcripts"])
            fields = {self.record.config.traits.rows_field: grouped(fields.pop("texts"), count), **fields}
            if log_probs:
                fields["log_probs"] = grouped(fields["log_probs"], count)
        fields["stats"] = self.stats
        records = []
        for index in range(count):
            record = {}
            for name, value in fields.items():
                item = value[index] if isinstance(value, list) else value
                record[self._item_name(name, item)] = _plain(item)
            records.append(record)
        return records

    def _log_probs_by_row(self) -> list[list[float | None]]:
        """Return the log-probabilities of the new tokens of each row, None for those that were not sampled."""
        log_probs = self.log_probs.tolist()
        masks = self.log_probs_mask.tolist()
        by_row = []
        for values, mask, end in zip(log_probs, masks, self.record.lengths, strict=True):
            sampled = [value if is_sampled else None for value, is_sampled in zip(values, mask, strict=True)]
            by_row.append(sampled[: end - self.record.begin])
        return by_row

    def answer_texts(self, tokenizer: PreTrainedTokenizerBase) -> list[str]:
        """Return the text of each answer, decoded without special and end tokens, or merged by the mode."""
        if self.record.config.traits.merges_rows:
            return list(self.transcripts)  # type: ignore[attr-defined]
        ends = self.record.lengths or [self.sequences.shape[1]] * len(self.sequences)
        hidden = self.record.hidden_tokens(tokenizer)
        texts = []
        for row, end in zip(self.sequences, ends, strict=True):
            new_tokens = row[self.record.begin : end].tolist()
            texts.append(visible_text(tokenizer, new_tokens, hidden))
        return texts

    @classmethod
    def _own_fields(cls) -> list[str]:
        """Return the fields and the properties that a subclass adds to `ParallelOutput`."""
        common = {field.name for field in dataclasses.fields(ParallelOutput)} | vars(ParallelOutput).keys()
        names = [field.name for field in dataclasses.fields(cls)]
        names += [name for name, value in vars(cls).items() if isinstance(value, property)]
        return [name for name in names if name not in common]

    def _item_name(self, name: str, value: object) -> str:
        return self.item_names.get(name, name) if value is None or isinstance(value, str) else name


def grouped(items: list[T], count: int) -> list[list[T]]:
    """Return the items in `count` consecutive groups of equal length."""
    size = len(items) // count
    return [items[i * size : (i + 1) * size] for i in range(count)]


def _plain(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
