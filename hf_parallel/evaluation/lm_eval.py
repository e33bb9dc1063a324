"""Backend `hf-parallel` of EleutherAI's lm-evaluation-harness (extra `eval`).

`HFLM` loads the model, encodes and truncates. Log-likelihoods are computed over a tree of all requests (`scoring.py`).
Any mode generates texts, by default `shared_prefix`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteriaList

from hf_parallel.cache.logits import LogitsCache
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.evaluation.scoring import loglikelihoods
from hf_parallel.generation import ParallelOutput, enable
from hf_parallel.generation.config import ParallelConfig, check_setting_names, make_config
from hf_parallel.generation.modes import PLAIN_MODE
from hf_parallel.generation.registry import MODES
from hf_parallel.generation.rng import mix
from hf_parallel.generation.stats import GenerationStats
from hf_parallel.generation.stop_texts import StopTexts
from hf_parallel.generation.validation import check_int, is_int, suggestion
from hf_parallel.models.attention import UnsupportedModelError
from hf_parallel.models.cached_model import PREFILL_CHUNK

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(f"the backend needs the extra eval: pip install 'hf_parallel[eval]' ({error})") from error

NAME = "hf-parallel"
"""Name of the backend, for `--model`."""
AUTO_CONTEXTS = 64
"""Contexts per call for `batch_size="auto"` without a `max_batch_size`."""
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
        Settings of `generation_mode`, which `gen_kwargs` override, and arguments of `HFLM`. `batch_size` is the number
        of contexts per call, each with all of its repeats.

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
        cls = MODES[_known_mode(generation_mode)]
        self.max_batch_tokens, self.generation_mode = max_batch_tokens, generation_mode
        self.settings = {name: kwargs.pop(name) for name in [*kwargs] if name in {*cls.fields()} - _OWN_ARGUMENTS}
        make_config(generation_mode, self.settings)  # checks them before the model is loaded
        self.stats = GenerationStats()
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
        rows = [(context + continuation)[-(self.max_length + 1) :] for _, context, continuation in requests]
        lengths = [len(continuation) for _, _, continuation in requests]
        if lengths and max(lengths) > self.max_length:
            raise ValueError(f"a continuation has {max(lengths)} tokens, more than max_length={self.max_length}")
        bar = tqdm(total=len(rows), disable=disable_tqdm or self.rank != 0, desc="Running loglikelihood requests")

        def add(index: int, score: tuple[float, bool]) -> None:
            if (key := requests[index][0]) is not None:
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
        """Return a text for each request.

        Requests with equal `gen_kwargs` are generated together. Equal requests share their whole prompt and, without
        sampling, their text. In modes with one row per request, a sampled text depends only on the seed and the index
        of its request.
        """
        texts = [""] * len(requests)
        drawn = int(torch.randint(2**31, ()))  # lm-eval seeds the generator
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True, default=repr), []).append(index)
        with tqdm(
            total=len(requests), disable=disable_tqdm or self.rank != 0, desc="Running generate_until requests"
        ) as bar:
            for indices in groups.values():
                call = _Generation(self, requests[indices[0]].args[1], drawn)
                by_context: dict[str, list[int]] = {}
                for index in indices:
                    by_context.setdefault(requests[index].args[0], []).append(index)
                contexts = sorted(by_context)  # neighbours share their beginnings
                for start in range(0, len(contexts), self._contexts_per_call):
                    of_call = {context: by_context[context] for context in contexts[start:][: self._contexts_per_call]}
                    for index, text in call.run(of_call).items():
                        texts[index] = text
                        self.cache_hook.add_partial("generate_until", requests[index].args, text)
                        bar.update(1)
        return texts

    @property
    def _contexts_per_call(self) -> int:
        return int(self.max_batch_size or AUTO_CONTEXTS) if self.batch_size == "auto" else int(self.batch_size)

    def _autocast(self) -> torch.autocast:
        """Return an autocast context for `mixed_precision_dtype`, if given."""
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)


class _Generation:
    """Requests with equal `gen_kwargs`: mode, settings, stop texts, and the cache of the prompts."""

    def __init__(self, lm: ParallelLM, gen_kwargs: object, drawn: int) -> None:
        if not isinstance(gen_kwargs, dict):
            raise ValueError(f"gen_kwargs must be a dict, got {gen_kwargs!r}")
        self.lm = lm
        kwargs: dict[str, Any] = {**normalize_gen_kwargs(gen_kwargs, lm.max_gen_toks)}
        mode = _known_mode(kwargs.pop("generation_mode", lm.generation_mode))
        settings = {name: kwargs.pop(name) for name in MODES[mode].fields() if name in kwargs}
        if mode == lm.generation_mode:
            settings = lm.settings | settings
        if MODES[mode].traits.needs_logits_cache:
            settings.setdefault("logits_cache", LogitsCache())
        self.config: ParallelConfig = make_config(mode, settings)
        eos = lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)
        self.stops = handle_stop_sequences(kwargs.pop("until"), eos=eos)
        self.new_tokens: int = kwargs.pop("max_gen_toks")
        if not kwargs["do_sample"]:
            kwargs.pop("temperature", None)
        if "max_length" in kwargs:
            raise ValueError("max_length is not supported in gen_kwargs: give max_gen_toks")
        self.kwargs, self.seed = kwargs, drawn if self.config.seed is None else self.config.seed
        self.cache = SharedPrefixCache() if self.config.traits.rows_continue_prompts else None
        if self.config.traits.merges_rows and is_int(lm.think_end_token):
            raise ValueError(f"think_end_token must be a text with generation_mode={mode!r}, got {lm.think_end_token}")
        if self.new_tokens >= lm.max_length:
            raise ValueError(f"max_gen_toks must be less than max_length={lm.max_length}, got {self.new_tokens}")

    def run(self, contexts: dict[str, list[int]]) -> dict[int, str]:
        """Generate a text for each request; `contexts` maps contexts to indices of requests."""
        lm = self.lm
        rows = [
            (context, index)
            for context, indices in contexts.items()
            for index in (indices if self.kwargs["do_sample"] else indices[:1])
        ]
        ids, mask = lm.tok_batch_encode(
            [context for context, _ in rows],
            left_truncate_len=lm.max_length - self.new_tokens,
            truncation=lm.truncation,
        )
        if self.cache is not None:  # keep the prefix shared with the last call
            self.cache.tree.retain(ids[0][mask[0].bool()].numpy())
        output = self._generate(ids.to(lm.device), mask.to(lm.device), [index for _, index in rows])
        assert output.stats is not None
        lm.stats.add(output.stats)
        texts = dict(zip((index for _, index in rows), self._texts(output, ids.shape[1]), strict=True))
        return {index: texts.get(index, texts[indices[0]]) for indices in contexts.values() for index in indices}

    def _generate(self, ids: torch.Tensor, mask: torch.Tensor, indices: list[int]) -> ParallelOutput:
        seed = self.seed
        if self.kwargs["do_sample"] and self.config.traits.rows_continue_prompts and is_int(seed):
            seed = [mix(seed, index * self.lm.world_size + self.lm.rank) for index in indices]
        criteria = [] if self.config.traits.merges_rows else [StopTexts(self.lm.tokenizer, self.stops, ids.shape[1])]
        with self.lm._autocast():
            return self.lm.model.generate(
                ids,
                attention_mask=mask,
                parallel_config=self.config,
                generation_mode=self.config.mode,
                seed=seed,
                tokenizer=self.lm.tokenizer,
                max_length=ids.shape[1] + self.new_tokens,
                stopping_criteria=StoppingCriteriaList(criteria),
                pad_token_id=self.lm.tokenizer.pad_token_id,
                past_key_values=self.cache,
                return_dict_in_generate=True,
                **self.kwargs,
            )

    def _texts(self, output: ParallelOutput, begin: int) -> list[str]:
        """Return the text of each answer, from the end of the thinking to the first stop text."""
        thinking = self.lm.think_end_token
        if self.config.traits.merges_rows:
            texts = output.answer_texts(self.lm.tokenizer)
        else:
            assert output.record is not None
            ends = output.record.lengths
            rows = [row[begin:end].tolist() for row, end in zip(output.sequences, ends, strict=True)]  # type: ignore[arg-type]
            if is_int(thinking):
                rows = [row[len(row) - row[::-1].index(thinking) :] if thinking in row else row for row in rows]
            texts = [self.lm.tok_decode(row) for row in rows]
            texts = [text.lstrip() for text in texts] if is_int(thinking) else texts
        marker = thinking if isinstance(thinking, str) else None
        return [postprocess_generated_text(text, self.stops, marker) for text in texts]


def _known_mode(mode: object) -> str:
    if not isinstance(mode, str) or mode not in MODES:
        raise ValueError(f"generation_mode must be one of {sorted(MODES)}, got {mode!r}{suggestion(mode, MODES)}")
    return mode
