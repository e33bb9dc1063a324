"""Backend `hf-parallel` of EleutherAI's lm-evaluation-harness (extra `eval`).

`HFLM` loads the model, encodes, truncates and makes batches. Log-likelihoods are computed over a tree of all requests
(`scoring.py`). Any mode generates texts, by default `shared_prefix`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import StoppingCriteriaList

from hf_parallel.cache.logits import LogitsCache
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.evaluation.scoring import loglikelihoods
from hf_parallel.generation import ParallelOutput, enable
from hf_parallel.generation.config import ParallelConfig, check_setting_names, make_config
from hf_parallel.generation.modes import PLAIN_MODE
from hf_parallel.generation.sampling.rng import mix
from hf_parallel.generation.sampling.stop_texts import StopTexts
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.generation.validation import check_int, is_int
from hf_parallel.models.decode.cached_model import PREFILL_CHUNK
from hf_parallel.models.intercept.attention import UnsupportedModelError
from hf_parallel.progress import progress_bar

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise ImportError(f"the backend needs lm-eval: pip install lm-eval ({error})") from error

NAME = "hf-parallel"
"""Name of the backend, for `--model`."""
_OWN_ARGUMENTS = frozenset(inspect.signature(HFLM.__init__).parameters)
"""Arguments of `HFLM`. A mode's setting of the same name does not replace them."""


@register_model(NAME)
class ParallelLM(HFLM):
    """A Transformers model whose requests share prefixes.

    Parameters
    ----------
    pretrained : str or PreTrainedModel
        As for `HFLM`. Required; None is what a command without `--model_args` passes.
    generation_mode : str
        Mode of requests that generate text, unless their `gen_kwargs` name another.
    max_batch_tokens : int
        Maximum number of tokens per forward pass for log-likelihoods; see `scoring.loglikelihoods`.
    **kwargs
        Settings of `generation_mode`, which `gen_kwargs` override, and arguments of `HFLM`. Repeats of a prompt
        are generated together as far as `batch_size` allows.

    Attributes
    ----------
    stats : GenerationStats
        Cost of all requests so far.

    Raises
    ------
    ValueError
        For an unknown mode, or unknown or invalid settings.
    UnsupportedModelError
        If block attention does not support the model. Says why.

    Examples
    --------
    >>> lm_eval.simple_evaluate("hf-parallel", {"pretrained": "Qwen/Qwen3-0.6B"}, tasks=["mmlu"], num_fewshot=5)
    """

    def __init__(
        self,
        pretrained: object = None,
        generation_mode: str = PLAIN_MODE,
        max_batch_tokens: int = PREFILL_CHUNK,
        **kwargs: Any,
    ) -> None:
        if pretrained is None:
            raise ValueError("pretrained must be a model id, folder or model: give --model_args pretrained=ID")
        check_int("max_batch_tokens", max_batch_tokens, at_least=1)
        cls = type(make_config(generation_mode))
        self.max_batch_tokens = max_batch_tokens
        self.generation_mode = generation_mode
        names = {*cls.fields()} - _OWN_ARGUMENTS
        self.settings = {name: kwargs.pop(name) for name in [*kwargs] if name in names}
        make_config(generation_mode, self.settings)  # checks them before the model is loaded
        self.stats = GenerationStats()
        self._prefixes = SharedPrefixCache()
        self._batches = 0
        if not isinstance(pretrained, str):  # `HFLM` would ignore other names
            check_setting_names(cls, kwargs, _OWN_ARGUMENTS)
        super().__init__(pretrained, **kwargs)
        try:
            enable(self.model, tokenizer=self.tokenizer)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"--model {NAME} cannot run this model, use --model hf: {error}") from error

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[object, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each request, and whether it is the greedy continuation."""
        # A request is (key, context, continuation), truncated on the left to `max_length`. Batch sizes have no effect.
        rows = []
        for _, context, continuation in requests:
            tokens = context + continuation
            rows.append(tokens[-(self.max_length + 1) :])
        lengths = [len(continuation) for _, _, continuation in requests]
        if lengths and max(lengths) > self.max_length:
            raise ValueError(f"a continuation has {max(lengths)} tokens, more than max_length={self.max_length}")
        is_hidden = disable_tqdm or self.rank != 0
        bar = progress_bar(total=len(rows), what="Scoring", unit="requests", is_hidden=is_hidden)

        def add(index: int, score: tuple[float, bool]) -> None:
            key, _, _ = requests[index]
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, score)
            bar.update(1)

        with bar, self._autocast():
            return loglikelihoods(
                self.model,
                [row[: len(row) - length] for row, length in zip(rows, lengths, strict=True)],
                [row[len(row) - length :] for row, length in zip(rows, lengths, strict=True)],
                max_batch_tokens=self.max_batch_tokens,
                softmax_dtype=self.softmax_dtype,
                stats=self.stats,
                on_scored=add,
            )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a text for each request. Prompts share prefixes within a batch and with the batch before."""
        self._batches = 0
        return super().generate_until(requests, disable_tqdm)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """Return prompts `int64 [rows, length]` with their answers; a mode that merges rows has a text for each."""
        kwargs = generation_kwargs
        tokenizer = self.tokenizer
        begin = context.shape[1]
        config = self._take_config(kwargs)
        if not kwargs.get("do_sample"):
            kwargs.pop("temperature", None)
        if is_int(config.seed):  # equal requests may be in several batches
            config = make_config(config.mode, {"seed": mix(config.seed, self._batches)}, config)
        self._batches += 1
        cache = None
        if config.traits.rows_continue_prompts:
            cache = self._prefixes
            mask = kwargs["attention_mask"][0].bool()
            tokens = context[0][mask]
            cache.tree.retain(tokens.cpu().numpy())
        merges = config.traits.merges_rows
        with self._autocast():
            output: ParallelOutput = self.model.generate(
                context,
                parallel_config=config,
                tokenizer=tokenizer,
                max_length=max_length,
                stopping_criteria=StoppingCriteriaList([] if merges else [StopTexts(tokenizer, stop)]),
                pad_token_id=tokenizer.pad_token_id,
                past_key_values=cache,
                return_dict_in_generate=True,
                **kwargs,
            )
        self.stats.add(output.stats)
        if not merges:  # `HFLM` decodes tokens, and leaves out those in `all_special_ids`
            hidden = list(output.record.hidden_tokens(tokenizer))
            new = output.sequences[:, begin:]
            new[torch.isin(new, new.new_tensor(hidden))] = tokenizer.pad_token_id
            return output.sequences  # type: ignore[return-value]
        answers = [self.tok_encode(text, add_special_tokens=False) for text in output.answer_texts(tokenizer)]
        rows = []
        for row, tokens in zip(context, answers, strict=True):
            rows.append(torch.cat((row, row.new_tensor(tokens))))
        return pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id)

    def _take_config(self, kwargs: dict[str, Any]) -> ParallelConfig:
        """Remove mode and settings from `gen_kwargs`, and return them as a config."""
        mode = kwargs.pop("generation_mode", self.generation_mode)
        cls = type(make_config(mode))
        settings = {name: kwargs.pop(name) for name in cls.fields() if name in kwargs}
        if mode == self.generation_mode:
            settings = self.settings | settings
        if cls.traits.needs_logits_cache:
            settings.setdefault("logits_cache", LogitsCache())
        return make_config(mode, settings)

    def _autocast(self) -> torch.autocast:
        """Return an autocast context for `mixed_precision_dtype`, if given."""
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)


if __name__ == "__main__":  # releases of lm-eval up to 0.4.13 do not load models of other packages
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
