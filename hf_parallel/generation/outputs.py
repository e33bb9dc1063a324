"""ParallelOutput: the base class of the modes' outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_parallel.generation.stats import GenerationStats
from hf_parallel.transcript.record import Record
from hf_parallel.transcript.transcribable import Transcribable


@dataclass
class ParallelOutput(Transcribable, GenerateDecoderOnlyOutput):
    """Output of a mode: `GenerateDecoderOnlyOutput` with the cost of the call and its transcript.

    Attributes
    ----------
    past_key_values : BlockCache
        The cache of the call.
    log_probs : float32 [rows, new tokens]
        Log-softmax of the model's unprocessed logits for each token of `sequences` after the prompts, at the time when
        the token was sampled: without processors, temperature and the like. NaN where no token was sampled: after the
        end of a row, and for tokens that the mode inserted. `record.sampled_log_probs` has those of all rows of the
        mode, and those of the distributions that were sampled.
    """

    item_names: ClassVar[Mapping[str, str]] = {}
    """Names of the texts in `to_records`, by the field that has one text for each answer."""

    log_probs: torch.Tensor | None = None
    stats: GenerationStats | None = None
    """Cost of the call."""
    record: Record | None = None
    """Record of the call, from which `to_dict` and `to_html` make the transcript."""

    def to_records(self) -> list[dict[str, Any]]:
        """Return the mode's own fields and `stats` as plain data: one dictionary per answer.

        An answer is a row, or all rows of a prompt in modes that merge them (`ParallelConfig.merges_rows`). A field
        that is a list is split: the i-th answer contains its i-th item. Single texts get a singular name: the answer
        has an `answer` from the field `answers`.
        """
        fields = {name: getattr(self, name) for name in self._own_fields()}
        count = len(self.sequences)
        if self.record is not None and self.record.config.merges_rows:
            count = len(fields["transcripts"])
            fields = {self.record.config.rows_name: grouped(fields.pop("texts"), count), **fields}
        items = [{n: v[i] if isinstance(v, list) else v for n, v in fields.items()} for i in range(count)]
        return [
            {self._item_name(name, value): _plain(value) for name, value in {**item, "stats": self.stats}.items()}
            for item in items
        ]

    def answer_texts(self, tokenizer: Any) -> list[str]:
        """Return the text of each answer, decoded without special tokens, or merged by the mode."""
        assert self.record is not None
        if self.record.config.merges_rows:
            return list(self.transcripts)  # type: ignore[attr-defined]
        ends = self.record.lengths or [self.sequences.shape[1]] * len(self.sequences)
        new = [row[self.record.begin : end] for row, end in zip(self.sequences, ends, strict=True)]
        return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in new]

    @classmethod
    def _own_fields(cls) -> list[str]:
        """Return the fields and properties that a subclass adds to `ParallelOutput`."""
        common = {field.name for field in dataclasses.fields(ParallelOutput)}
        fields = [field.name for field in dataclasses.fields(cls) if field.name not in common]
        return fields + [name for name, value in vars(cls).items() if isinstance(value, property)]

    def _item_name(self, name: str, value: Any) -> str:
        return self.item_names.get(name, name) if value is None or isinstance(value, str) else name


def grouped(items: list[Any], count: int) -> list[list[Any]]:
    """Return the items in `count` consecutive groups of equal length."""
    size = len(items) // count
    return [items[i * size : (i + 1) * size] for i in range(count)]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
