"""RewardModel: a sequence classifier that scores many continuations of one prompt over a shared prefix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.generation.mixin import enable

HEAD = "score"
"""Name of the head of Transformers' decoder-only sequence classifiers."""


class RewardModel:
    """Scores token sequences. Tokens of shared prefixes are computed once, and not again in later calls.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder-only `...ForSequenceClassification` with one label, such as a reward model of TRL. Its reward of a
        sequence is the output at the last token. It reads the token ids of the policy, so both need one tokenizer.

    Raises
    ------
    ValueError
        If the model is no such classifier.
    UnsupportedModelError
        If block attention cannot serve it.
    """

    def __init__(self, model: Any) -> None:
        head = getattr(model, HEAD, None)
        if not isinstance(model, PreTrainedModel) or not isinstance(head, torch.nn.Module):
            raise ValueError(
                "a reward model must be a decoder-only ...ForSequenceClassification of transformers, got "
                f"{type(model).__name__}"
            )
        if model.config.num_labels != 1:
            raise ValueError(f"a reward model must have one label, got num_labels={model.config.num_labels}")
        self.model = model
        with torch.device("meta"):
            # The same layers, with the head of rewards in place of that of tokens.
            reader: Any = AutoModelForCausalLM.from_config(model.config)
        setattr(reader, reader.base_model_prefix, model.base_model)
        reader.set_output_embeddings(head)
        reader.generation_config = GenerationConfig()
        reader.train(model.training)
        self._reader = enable(reader)
        self._cache = SharedPrefixCache()

    def reset(self) -> None:
        """Forget the sequences that were scored."""
        self._cache.reset()

    @torch.no_grad()
    def rewards(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the reward of each sequence of token ids, none of them empty."""
        longest = max(map(len, sequences))
        ids = torch.zeros(len(sequences), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, sequence in enumerate(sequences):
            begin = longest - len(sequence)
            ids[row, begin:] = torch.tensor(list(sequence))
            mask[row, begin:] = 1
        device = self.model.device
        output = self._reader.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            generation_mode="shared_prefix",
            past_key_values=self._cache,
            max_new_tokens=1,
            pad_token_id=0,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return output.logits[0][:, 0].tolist()  # type: ignore[no-any-return]
