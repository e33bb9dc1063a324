"""SharedPrefixGRPOTrainer: TRL's GRPOTrainer with a loss that computes each prompt once.

Rollouts need nothing from here: `generation_kwargs={"generation_mode": "shared_prefix"}` of an enabled model.
"""

from __future__ import annotations

from typing import Any

import torch
from trl import GRPOTrainer

from hf_parallel.training.tree import token_statistics


class SharedPrefixLossMixin:
    """Computes the log-probabilities of a batch as a tree, in trainers with TRL's interface.

    Rows of one prompt should be in one batch: `per_device_train_batch_size` a multiple of `num_generations`.
    """

    temperature: float
    accelerator: Any

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **inputs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        """Return log-probabilities and entropies `[rows, logits_to_keep]`; see `trl.GRPOTrainer`. 0 for padding."""
        if compute_aux_loss or any(value is not None for value in inputs.values()):
            given = sorted(name for name, value in inputs.items() if value is not None) or ["the auxiliary loss of MoE"]
            raise ValueError(f"{type(self).__name__} computes text models only, got {given}")
        mask = attention_mask.bool().cpu()
        rows = [ids[kept] for ids, kept in zip(input_ids.cpu(), mask, strict=True)]
        lengths = mask[:, -logits_to_keep:].sum(1).tolist()
        prompts = [row[: len(row) - n].tolist() for row, n in zip(rows, lengths, strict=True)]
        completions = [row[len(row) - n :].tolist() for row, n in zip(rows, lengths, strict=True)]
        config = self.accelerator.unwrap_model(model).config
        with self.accelerator.autocast():
            found = token_statistics(model, config, prompts, completions, self.temperature, compute_entropy)
        places = mask[:, -logits_to_keep:].to(input_ids.device)
        spread = [
            None if values is None else values.new_zeros(places.shape).masked_scatter(places, values)
            for values in (found.log_probs, found.entropies)
        ]
        return spread[0], spread[1], None  # type: ignore[return-value]


class SharedPrefixGRPOTrainer(SharedPrefixLossMixin, GRPOTrainer):
    """TRL's `GRPOTrainer` whose loss computes each prompt of a batch once (Hydragen, applied to training).

    Losses and gradients are those of `GRPOTrainer`. Rollouts share the prompt, too, if the model is enabled and
    `generation_kwargs={"generation_mode": "shared_prefix"}`.
    """
