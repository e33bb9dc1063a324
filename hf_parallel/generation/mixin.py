"""`enable(model)`: the `generation_mode` argument of `generate`, for one model.

The model's class is replaced by a subclass whose `generate` looks for a mode, lets transformers prepare the call
(configs, processors, criteria, padding, streamers), and hands the prepared call to the mode instead of `_sample` or
`_beam_search`.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.utils import logging

from hf_parallel.cache.placement import cpu_as_default, execution_device
from hf_parallel.detokenizer import check_tokenizer
from hf_parallel.generation import arguments
from hf_parallel.generation.call import GenerationCall, make_call, vocabulary_size
from hf_parallel.generation.config import ParallelConfig, check_has_mode, check_setting_names, make_config
from hf_parallel.generation.enabled import BUSY, Claim, Enabled, preparation
from hf_parallel.generation.image_prompts import take_images
from hf_parallel.generation.presets import add_preset, marked_preset
from hf_parallel.generation.registry import MODES
from hf_parallel.generation.same_bits import schedule_dependence
from hf_parallel.generation.settings import Arguments
from hf_parallel.generation.streaming import check_streamer, report_errors
from hf_parallel.models.decode.compiled import forget
from hf_parallel.models.images import image_inputs
from hf_parallel.models.intercept.attention import UnsupportedModelError
from hf_parallel.models.intercept.classes import namesake, plain_class
from hf_parallel.models.intercept.mixers import unwrap_mixers
from hf_parallel.models.intercept.modules import remove_hooks
from hf_parallel.models.probing.capabilities import probe_capabilities
from hf_parallel.models.probing.signature import parameters_of
from hf_parallel.models.ranks import common_seed, num_ranks
from hf_parallel.transcript.record import Record

_Model = TypeVar("_Model", bound=nn.Module)

_logger: Any = logging.get_logger(__name__)
_POSITIONAL = ("inputs", "generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")
"""Arguments of transformers' `generate` that may be positional in a mode."""
_CLAIM_LOCK = threading.Lock()
_ENABLE_LOCK = threading.RLock()


class ParallelGenerationMixin:
    """`generate` with a `generation_mode`. `hf_parallel.enable` adds it to a model's class."""

    _parallel: Enabled

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, in parallel if a mode is named.

        Parameters
        ----------
        *args, **kwargs
            Arguments of `transformers.GenerationMixin.generate`, settings of the mode, and

            generation_mode : str, optional
                Name of the mode. None: plain `generate`, whatever `generation_config` says. Default:
                `generation_config.generation_mode`, or plain `generate`.
            parallel_config : ParallelConfig or dict, optional
                The mode's settings in one object. Precedence: keyword arguments, `parallel_config`,
                `generation_config.parallel_config`, the setting `preset`.

            A mode uses the tokenizer given to `enable` if `tokenizer` is not passed.

        Raises
        ------
        ValueError
            For unknown or contradictory settings, and for arguments that the mode does not support.
        """
        with report_errors(kwargs.get("streamer")):
            names = _positional(super().generate)  # type: ignore[misc]
            for name, value in zip(names, args, strict=False):
                if name in kwargs:
                    raise TypeError(f"generate() got {name} both by position and by name")
                kwargs[name] = value
            args = args[len(names) :]
            arguments.check_no_logits_cache(kwargs)
            config = take_parallel_config(self.generation_config, kwargs)  # type: ignore[attr-defined]
            if config is None:
                if self._prepares():
                    raise RuntimeError(BUSY)
                return self._call_transformers(kwargs, args)
            if args:
                raise ValueError(f"with a generation_mode, pass arguments after {names[-1]} by name")
            if config.seed is None and num_ranks(self) > 1:  # the ranks sample the same tokens
                config = copy.copy(config)
                config.seed = common_seed(self)
            claim = Claim()
            try:
                with self.prepared_call(config, kwargs, claim) as call:
                    return call.drive(config.make_run(call).generate())
            finally:
                claim.active = False

    @contextmanager
    def prepared_call(
        self, config: ParallelConfig, kwargs: Arguments, claim: Claim | None = None
    ) -> Iterator[GenerationCall]:
        """Let transformers prepare a call, and hold the model while the context is open; `kwargs` is modified."""
        claim = claim or Claim()
        with torch.no_grad(), cpu_as_default():
            self._check_call(config, kwargs)
            with self.claimed(claim):
                yield self._prepare_call(config, kwargs, claim)

    def prepare_call(self, config: ParallelConfig, kwargs: Arguments, claim: Claim) -> GenerationCall:
        """Let transformers prepare a call of a model that `claim` holds; `kwargs` is modified."""
        with torch.no_grad(), cpu_as_default():
            self._check_call(config, kwargs)
            return self._prepare_call(config, kwargs, claim)

    def _check_call(self, config: ParallelConfig, kwargs: Arguments) -> None:
        """Complete and check the arguments of a call."""
        arguments.name_cache(kwargs)
        if kwargs.get("tokenizer") is None and self._parallel.tokenizer is not None:
            kwargs["tokenizer"] = self._parallel.tokenizer
        model_config: GenerationConfig = self.generation_config  # type: ignore[attr-defined]
        is_named = config.preset != marked_preset(config.mode, model_config).get("preset")
        add_preset(config.chosen_preset, None if is_named else model_config, kwargs)
        arguments.check_keeps_states(config, self, self._parallel.capabilities)
        config.prepare(kwargs)
        self._check_arguments(config, kwargs)
        arguments.move_padding_left(kwargs)

    def _prepare_call(self, config: ParallelConfig, kwargs: Arguments, claim: Claim) -> GenerationCall:
        outer = preparation.calls
        try:
            preparation.calls = *outer, (self, config, claim)
            call = self._call_transformers(kwargs, ())
        finally:
            preparation.calls = outer
        begin_call = getattr(call.streamer, "begin_call", None)
        if callable(begin_call):
            begin_call(call)
        return call

    @contextmanager
    def claimed(self, claim: Claim) -> Iterator[None]:
        """Hold the model for one call of a mode. Raise `RuntimeError` while another call or an engine holds it."""
        try:
            with _CLAIM_LOCK:
                other = self._active_claim()
                if other is not None:
                    raise RuntimeError(other.busy)
                claim.active = True
                self._parallel.claim = claim
            yield
        finally:
            claim.active = False

    def _prepares(self) -> bool:
        """Return whether this thread is preparing a call of a mode of this model."""
        return any(model is self for model, *_ in preparation.calls)

    def _active_claim(self) -> Claim | None:
        claim = self._parallel.claim
        is_held = claim is not None and claim.active and claim.process == os.getpid()  # not after a fork
        return claim if is_held else None

    def _call_transformers(self, kwargs: Arguments, args: tuple[object, ...]) -> Any:
        """Call `generate` of transformers; in a thread that prepares a call, it ends in `_sample` or `_beam_search`."""
        if not args:
            return super().generate(**kwargs)  # type: ignore[misc]
        positional = [kwargs.pop(name) for name in _positional(super().generate)]  # type: ignore[misc]
        return super().generate(*positional, *args, **kwargs)  # type: ignore[misc]

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: object = None,
        **model_kwargs: object,
    ) -> object:
        """Return the prepared call if a mode prepares one in this thread; otherwise sample as transformers does."""
        if not preparation.calls or preparation.calls[-1][0] is not self:
            return super()._sample(  # type: ignore[misc]
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
            )
        return self._make_call(
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs
        )

    def _beam_search(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        **model_kwargs: object,
    ) -> object:
        """As `_sample`, for calls with `num_beams`; `input_ids` has a row for each beam."""
        if not preparation.calls or preparation.calls[-1][0] is not self:
            return super()._beam_search(  # type: ignore[misc]
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, **model_kwargs
            )
        return self._make_call(
            input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, None, model_kwargs
        )

    def _make_call(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool,
        streamer: object,
        model_kwargs: dict[str, Any],
    ) -> GenerationCall:
        """Return the call that this thread prepares."""
        *_, (_, config, claim) = preparation.calls
        return make_call(
            self,
            input_ids,
            {**model_kwargs, "synced_gpus": synced_gpus},
            Record(config, config.to_dict()),
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=streamer,
            cuda_graph=config.cuda_graph,
            compile=False if config.compile is None and generation_config.disable_compile else config.compile,
            claim=claim,
        )

    def _prepare_generation_config(
        self, generation_config: GenerationConfig | None, **kwargs: Any
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """In a mode, prepare equal settings once."""
        if self._prepares():
            return self._prepare_settings(generation_config, kwargs)
        return super()._prepare_generation_config(generation_config, **kwargs)  # type: ignore[misc,no-any-return]

    def _prepare_settings(
        self, generation_config: GenerationConfig | None, kwargs: Arguments
    ) -> tuple[GenerationConfig, dict[str, Any]]:
        """Return the generation config of a call, and its arguments that are no settings."""
        prepare = super()._prepare_generation_config  # type: ignore[misc]
        return self._parallel.prepared.prepare(self, generation_config, kwargs, prepare)  # type: ignore[arg-type]

    def _prepare_cache_for_generation(self, *args: object, **kwargs: object) -> None:
        """Leave the cache to the mode if one is being prepared, whatever `cache_implementation` says."""
        if not self._prepares():
            super()._prepare_cache_for_generation(*args, **kwargs)  # type: ignore[misc]

    def _prepare_multimodal_encoder_kwargs_for_generation(self, model_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Leave images to `take_images` in a mode."""
        encode: Any = super()._prepare_multimodal_encoder_kwargs_for_generation  # type: ignore[misc]
        return model_kwargs if self._prepares() else encode(model_kwargs)

    def _expand_inputs_for_generation(self, *args: object, **kwargs: object) -> object:
        """In a mode, replace images by their features before the rows of `num_return_sequences` are made."""
        if self._prepares():
            take_images(self, kwargs, cache=getattr(preparation.calls[-1][1], "logits_cache", None))
        return super()._expand_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]

    def _supports_logits_to_keep(self) -> bool:
        """As transformers, without inspecting `forward` in each call."""
        return "logits_to_keep" in parameters_of(self.forward)  # type: ignore[attr-defined]

    def _supports_mm_encoder_outputs(self) -> bool:
        """As transformers, without inspecting `forward` in each call."""
        return "mm_encoder_outputs" in parameters_of(self.forward)  # type: ignore[attr-defined]

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        """Do nothing in a mode, which has checked its arguments (`_check_arguments`)."""
        if not self._prepares():
            super()._validate_model_kwargs(model_kwargs)  # type: ignore[misc]

    def _check_arguments(self, config: ParallelConfig, kwargs: Arguments) -> None:
        """Raise an error for invalid or unsupported arguments, before anything is prepared."""
        arguments.check_supported_arguments(config.title, kwargs)
        arguments.check_uses_cache(config.title, kwargs, self.generation_config)  # type: ignore[attr-defined]
        arguments.check_not_compiled(self)  # type: ignore[arg-type]
        arguments.check_computes_itself(self)  # type: ignore[arg-type]
        arguments.check_prepares_own_inputs(self)  # type: ignore[arg-type]
        arguments.check_no_adapter_names(config.title, self)  # type: ignore[arg-type]
        arguments.check_inputs(kwargs)
        arguments.check_objects(kwargs)
        settings = arguments.setting_names()
        images = image_inputs(self)  # type: ignore[arg-type]
        inputs = parameters_of(self.forward).keys() - images  # type: ignore[attr-defined]
        model_inputs = {name: value for name, value in kwargs.items() if name in inputs - settings}
        arguments.check_model_inputs(config.title, model_inputs, self._parallel.capabilities.why_no_images)
        names = {*settings, *arguments.OTHER_ARGUMENTS, *inputs, *images, *config.fields()}
        names |= parameters_of(super().generate).keys()  # type: ignore[misc]
        check_setting_names(None if config.is_implicit else type(config), kwargs, names)
        generation_config = kwargs.get("generation_config")
        for source in (generation_config, self.generation_config):  # type: ignore[attr-defined]
            arguments.check_values({} if source is None else vars(source))
        arguments.check_values(kwargs)
        overrides = {name: value for name, value in kwargs.items() if name in settings}
        prepared, _ = self._prepare_settings(generation_config, overrides)
        arguments.check_supported_settings(config.title, prepared, config.traits.searches_beams)
        if (prepared.num_beams or 1) > 1:
            arguments.check_beams(config.title, prepared, kwargs)
            config.check_beams()
        ids = kwargs["inputs"] if kwargs.get("inputs") is not None else kwargs.get("input_ids")
        prompts, length = (1, 1) if ids is None else ids.shape
        arguments.check_tokens(prepared, vocabulary_size(self), length)  # type: ignore[arg-type]
        rows = prompts * (prepared.num_return_sequences or 1) * config.rows_per_prompt
        check_streamer(kwargs.get("streamer"), rows)

    def save_pretrained(self, *args: object, **kwargs: object) -> object:
        """Save the model with the mode of `generation_config`; raise `ValueError` if a setting cannot be stored."""
        keep_mode(self.generation_config)  # type: ignore[attr-defined]
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: object) -> Any:
        """Pickle as the plain model and enable again: the subclass exists in this process only."""
        return _restore, (plain_class(type(self)),), self.__dict__


def _positional(generate: Any) -> Sequence[str]:
    """Return the first arguments of a model's `generate`, whose order is its own in some classes (Janus)."""
    names = []
    for name, parameter in parameters_of(generate).items():
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            names.append(name)
    return names[: len(_POSITIONAL)] or _POSITIONAL  # the latter for `generate(*args, **kwargs)`


def take_parallel_config(own: GenerationConfig, kwargs: Arguments) -> ParallelConfig | None:
    """Remove the mode and its settings from the arguments of `generate` and return them as a config.

    `own` is the model's config. Return None if no mode is named, if the model drafts tokens for another one, or if
    `custom_generate` is to receive all arguments.
    """
    generation_config = kwargs.get("generation_config")
    arguments.check_generation_config(generation_config)
    # A draft model of assisted generation, which reads its scores, has no mode of its own.
    is_draft_model = generation_config is not None and generation_config.is_assistant
    is_custom = kwargs.get("custom_generate") is not None
    if (is_custom or is_draft_model) and "generation_mode" not in kwargs:
        return None
    sources = [source for source in (generation_config, own) if source is not None]
    config = kwargs.pop("parallel_config", None)
    mode = None
    if "generation_mode" in kwargs:
        mode = kwargs.pop("generation_mode")
    elif isinstance(config, ParallelConfig):
        mode = config.mode
    else:
        for source in sources:
            mode = getattr(source, "generation_mode", None)
            if mode is not None:
                break
    if mode is None:
        check_has_mode(config)
        return None
    settings = {name: kwargs.pop(name) for name in _fields(mode) if name in kwargs}
    stored: list[Any] = []
    for source in sources:
        if getattr(source, "generation_mode", mode) in (mode, None):
            stored += _stored_settings(source, mode)
    return make_config(mode, settings, config, *stored, marked_preset(mode, own))


def _fields(mode: object) -> Sequence[str]:
    return MODES[mode].fields() if isinstance(mode, str) and mode in MODES else ()


def _stored_settings(config: GenerationConfig, mode: object) -> tuple[Any, Any]:
    """Return the settings that stand beside the mode in a `GenerationConfig`, and its `parallel_config`."""
    beside = {name: getattr(config, name) for name in _fields(mode) if hasattr(config, name)}
    return arguments.check_stored(mode, beside), arguments.check_stored(mode, getattr(config, "parallel_config", None))


def keep_mode(config: GenerationConfig) -> None:
    """Make a `GenerationConfig` save the mode that it names; raise `ValueError` if a setting cannot be stored."""
    mode = getattr(config, "generation_mode", None)
    if mode is None:
        return
    make_config(mode, *_stored_settings(config, mode)).stored()
    config._from_model_config = False  # otherwise transformers drops attributes that it does not define


def enable(model: _Model, tokenizer: PreTrainedTokenizerBase | None = None, batch_invariant: bool = False) -> _Model:
    """Give one model the `generation_mode` argument.

    Probes with short forward passes how block attention can serve the model. Idempotent; nothing global is changed.
    `disable` reverts it.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder-only model with a language modeling head, also if PEFT or `torch.compile` wraps it.
    tokenizer : PreTrainedTokenizerBase, optional
        The tokenizer of modes that read or write text, for code that cannot pass `tokenizer` to `generate`. The one
        passed to a call overrides it. Default: unchanged, at first none.
    batch_invariant : bool
        Raise an error unless the logits of a token have the same bits in every schedule (docs/exactness.md), which is
        probed with a few hundred tokens. On a CPU, most models have the same bits without this argument; with it,
        latent attention (DeepSeek-V2) does not expand latents in long passes, which is slower, and `compile=True` is an
        error. On a GPU, other, slower kernels compute attention, products and sums, without CUDA graphs.

    Returns
    -------
    PreTrainedModel
        The same object.

    Raises
    ------
    TypeError, ValueError
        If `model` is not a `PreTrainedModel`, its weights are on the meta device and no hook of accelerate loads them,
        a method such as `generate` was replaced on this object, or `tokenizer` is not a tokenizer; with
        `batch_invariant`, if Triton's kernels do not support the model on this GPU.
    UnsupportedModelError
        If block attention cannot serve the model, or it was compiled in place, with the reason; with `batch_invariant`,
        if bits depend on the schedule, with the module whose results differ.
    """
    if tokenizer is not None:
        check_tokenizer(tokenizer)
    inner: Any = unwrap(model)
    if isinstance(inner, PreTrainedModel):
        execution_device(inner)
    was_enabled = isinstance(inner, ParallelGenerationMixin)
    with _ENABLE_LOCK:
        if not isinstance(inner, ParallelGenerationMixin):
            _check_unchanged(inner)
            with cpu_as_default():
                inner._parallel = Enabled(probe_capabilities(inner))
            inner.__class__ = _enabled_class(type(inner))  # type: ignore[arg-type] # types are hashable
            mode = getattr(inner.generation_config, "generation_mode", None)
            if mode:
                _logger.warning_once(
                    f"generate uses generation_mode={mode!r}, which the model's generation_config names"
                )
    if tokenizer is not None:
        inner._parallel.tokenizer = tokenizer
    if batch_invariant:
        before = inner._parallel.capabilities
        inner._parallel.capabilities = replace(before, batch_invariant=True)
        reason: str | None = None
        try:
            reason = schedule_dependence(inner)
        finally:
            if reason != "":  # or an error
                inner._parallel.capabilities = before
                if not was_enabled:
                    disable(model)
        if reason:
            raise UnsupportedModelError(
                f"the last bits of the logits of this {type(inner).__name__} depend on the batch, because of {reason}: "
                "enable it without batch_invariant=True"
            )
    return model


def _check_unchanged(model: object) -> None:
    """Raise `ValueError` if a model was compiled in place, or its attributes hide methods of the mixin."""
    if not isinstance(model, PreTrainedModel):
        return
    arguments.check_not_compiled(model)
    hidden = vars(model).keys() & (vars(ParallelGenerationMixin).keys() - {"save_pretrained"})
    generate = vars(model).get("generate")
    if isinstance(generate, partial) and generate.keywords.get("model") is model:
        hidden -= {"generate"}  # that of a repository with `custom_generate`, which enables the model itself
    if hidden:
        name = min(hidden)
        raise ValueError(
            f"this {type(model).__name__} has its own {name} (model.{name} = ...), which would hide that of generation "
            f"modes: enable it after `del model.{name}`"
        )


def is_enabled(model: object) -> bool:
    """Return whether `model.generate` accepts modes. Other models ignore modes in their configs."""
    return isinstance(unwrap(model), ParallelGenerationMixin)


def disable(model: _Model) -> _Model:
    """Revert `enable`. Leave a model that is not enabled unchanged. Return the same object.

    Raises
    ------
    TypeError
        If `model` is not a `PreTrainedModel` or a wrapper of one.
    RuntimeError
        While a call of a mode or an engine uses the model.
    """
    inner: Any = unwrap(model)
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(inner).__name__}")
    if isinstance(inner, ParallelGenerationMixin):
        claim = inner._active_claim()
        if claim is not None:
            raise RuntimeError(claim.busy)
        inner.__class__ = plain_class(type(inner))
        forget(inner)
        unwrap_mixers(inner)
        remove_hooks(inner)
        if inner._parallel.attention_before is not None:
            inner.set_attn_implementation(inner._parallel.attention_before)
        del inner._parallel
    return model


def unwrap(model: Any) -> Any:
    """Return the model inside wrappers of PEFT and `torch.compile`, which forward `generate` to it."""
    while isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        elif callable(getattr(model, "get_base_model", None)):
            model = model.get_base_model()  # type: ignore[operator]
        else:
            break
    return model


@cache
def _enabled_class(plain: type) -> type:
    """Return the subclass of a model's class, under the same name: `save_pretrained` writes it."""
    return namesake(plain, ParallelGenerationMixin)  # type: ignore[no-any-return]


def _restore(plain: type) -> object:
    cls = _enabled_class(plain)
    return cls.__new__(cls)  # type: ignore[call-overload]
