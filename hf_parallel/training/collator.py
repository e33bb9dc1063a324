"""DataCollatorForParallel: batches of examples for `Trainer` and TRL's `SFTTrainer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedTokenizerBase

from hf_parallel.detokenizer import check_tokenizer
from hf_parallel.files import JSONObject
from hf_parallel.generation.config import ParallelConfig
from hf_parallel.generation.dialects import AnyDialect
from hf_parallel.generation.validation import check_int, check_text
from hf_parallel.training.attention import LayoutBatch
from hf_parallel.training.dialects import get_dialect
from hf_parallel.training.example import ParallelExample

IGNORED = -100
"""Label of tokens without a target, as in Transformers."""


class DataCollatorForParallel:
    """Batches parallel texts, for a model that `prepare_model` has prepared.

    Each feature is a `ParallelExample`, the dict of its `to_dict()`, or, with a dialect, a dict of texts: `prompt` and
    `completion` as in TRL's datasets, strings or chat messages, or `text` alone. The end-of-sequence token is appended
    to a text that does not end with it.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        Encodes texts and gives the padding token.
    dialect : str, Dialect or SkeletonDialect, optional
        Format of the texts, see `ParallelExample.from_text`.
    max_length : int, optional
        Number of tokens, of all branches or workers together, above which an example raises a `ValueError`. Whether the
        positions of an example fit is checked by the model.
    packing : bool
        Put several examples into one row of the batch, of at most `max_length` tokens, instead of padding each.
    train_on_forced : bool
        Of texts, the openings of branches are targets too.

    Raises
    ------
    ValueError
        For features that are none of these, texts that are malformed or a tokenizer that cannot encode the tags of the
        dialect, and examples that are too long: with the index of the feature in the batch.

    Examples
    --------
    >>> model = hf_parallel.training.prepare_model(hf_parallel.enable(model))
    >>> trainer = Trainer(model, args, train_dataset=dataset, data_collator=DataCollatorForParallel(tokenizer))
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        dialect: str | AnyDialect | ParallelConfig | None = None,
        *,
        max_length: int | None = None,
        packing: bool = False,
        train_on_forced: bool = False,
    ) -> None:
        check_tokenizer(tokenizer)
        if max_length is not None:
            check_int("max_length", max_length, 1)
        elif packing:
            raise ValueError("packing=True needs max_length, the number of tokens of a row")
        self.dialect = None if dialect is None else get_dialect(dialect)
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.train_on_forced = train_on_forced
        self._row_length = max_length if packing else None

    def __call__(
        self, features: Sequence[ParallelExample | Mapping[str, object]]
    ) -> dict[str, torch.Tensor | LayoutBatch]:
        """Return the arguments of the model: `int64 [B, T]` each, and the layout.

        `labels` and `shift_labels` hold the target of each token at its own index, as its logits predict it.
        """
        if not features:
            raise ValueError("features must have at least one example")
        examples = [self._example(index, feature) for index, feature in enumerate(features)]
        if self._row_length is not None:
            examples = [ParallelExample.pack(row) for row in _fill_rows(examples, self._row_length)]
        longest = max(map(len, examples))
        shape = (len(examples), longest)
        input_ids = torch.full(shape, self.tokenizer.pad_token_id or 0)
        position_ids = torch.full(shape, 0)
        attention_mask = torch.full(shape, 0)
        labels = torch.full(shape, IGNORED)
        for row, example in enumerate(examples):
            length = len(example)
            input_ids[row, :length] = torch.from_numpy(example.input_ids)
            position_ids[row, :length] = torch.from_numpy(example.position_ids)
            attention_mask[row, :length] = 1
            labels[row, torch.from_numpy(example.target_queries)] = torch.from_numpy(example.target_ids)
        return {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "attention_mask": attention_mask,
            "labels": labels,
            "shift_labels": labels,
            "past_key_values": LayoutBatch(examples),
        }

    def _example(self, index: int, feature: ParallelExample | Mapping[str, object]) -> ParallelExample:
        """Return the example of a feature of a batch, with one target per token."""
        try:
            example = feature if isinstance(feature, ParallelExample) else self._read(feature)
        except (TypeError, ValueError) as error:
            text = ""
            if isinstance(feature, Mapping):
                text = repr(feature.get("completion", feature.get("text")))[:60]
            context = f", in {text}" if text else ""
            raise ValueError(f"feature {index} of the batch: {error}{context}") from error
        example = example.with_one_target_each()
        if self.max_length is not None and len(example) > self.max_length:
            raise ValueError(f"feature {index} of the batch has {len(example)} tokens, max_length is {self.max_length}")
        return example

    def _read(self, feature: JSONObject) -> ParallelExample:
        if "view_blocks" in feature:
            return ParallelExample.from_dict(feature)
        key = "completion" if "completion" in feature else "text"
        if "input_ids" in feature:
            raise ValueError(
                f"it has only the columns {sorted(feature)}: set remove_unused_columns=False in the arguments of the "
                "trainer, and for SFTTrainer dataset_kwargs={'skip_prepare_dataset': True}"
            )
        if self.dialect is None or key not in feature:
            raise ValueError(
                "it must be a ParallelExample, its to_dict(), or, with a dialect, have text or prompt and completion; "
                f"got {type(feature).__name__} {sorted(feature)}, dialect={self.dialect!r}"
            )
        text = feature[key]
        if isinstance(text, list):
            if [message.get("role") for message in text] != ["assistant"]:
                raise ValueError(f"{key} must be a text or one message of the assistant, got {text!r}")
            text = text[0]["content"]
        check_text(key, text)
        eos_token = self.tokenizer.eos_token
        if eos_token and not text.endswith(eos_token):
            text += eos_token
        return ParallelExample.from_text(
            text, self.tokenizer, self.dialect, feature.get("prompt", ""), self.train_on_forced
        )


def _fill_rows(examples: Sequence[ParallelExample], length: int) -> list[list[ParallelExample]]:
    """Distribute examples over rows of at most `length` tokens: the longest first, each to the first row it fits."""
    rows: list[list[ParallelExample]] = []
    for example in sorted(examples, key=len, reverse=True):
        for row in rows:
            if sum(map(len, row)) + len(example) <= length:
                row.append(example)
                break
        else:
            rows.append([example])
    return rows
