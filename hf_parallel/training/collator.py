"""DataCollatorForParallel: batches of examples for `Trainer` and TRL's `SFTTrainer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_parallel.training.attention import LayoutBatch
from hf_parallel.training.example import ParallelExample

IGNORED = -100
"""Label of tokens without a target, as in Transformers."""


class DataCollatorForParallel:
    """Pads examples to one batch, for a model that `prepare_model` has prepared.

    Parameters
    ----------
    tokenizer : PreTrainedTokenizerBase
        Gives the padding token.

    Examples
    --------
    >>> model = hf_parallel.training.prepare_model(hf_parallel.enable(model))
    >>> trainer = Trainer(model, args, train_dataset=dataset, data_collator=DataCollatorForParallel(tokenizer))
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, features: Sequence[ParallelExample | dict[str, Any]]) -> dict[str, Any]:
        """Return the arguments of the model: `int64 [B, T]` each, and the layout.

        `labels` and `shift_labels` hold the target of each token at its own index, as its logits predict it.
        """
        examples = [
            (
                feature if isinstance(feature, ParallelExample) else ParallelExample.from_dict(feature)
            ).with_one_target_each()
            for feature in features
        ]
        longest = max(map(len, examples))
        pad = self.tokenizer.pad_token_id if self.tokenizer.pad_token_id is not None else 0
        batch = {
            name: torch.full((len(examples), longest), fill)
            for name, fill in (("input_ids", pad), ("position_ids", 0), ("attention_mask", 0), ("labels", IGNORED))
        }
        for row, example in enumerate(examples):
            batch["input_ids"][row, : len(example)] = torch.from_numpy(example.input_ids)
            batch["position_ids"][row, : len(example)] = torch.from_numpy(example.position_ids)
            batch["attention_mask"][row, : len(example)] = 1
            batch["labels"][row, torch.from_numpy(example.target_queries)] = torch.from_numpy(example.target_ids)
        return {**batch, "shift_labels": batch["labels"], "parallel_layout": LayoutBatch(examples)}
