"""`enable(model)`: the `generation_mode` argument of `generate`, for one model.

The model's class is exchanged for a subclass of it whose `generate` looks for a mode, lets transformers prepare the
call as ever (configs, processors, criteria, padding, streamers), and takes over where sampling would begin.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMode

from hf_parallel.generation.arguments import check_generation_config, check_helpers, check_inputs, check_values
from hf_parallel.generation.call import GenerationCall, make_call
from hf_parallel.generation.config import ParallelConfig, make_config, unknown_setting
from hf_parallel.generation.registry import MODES
from hf_parallel.generation.streaming import report_errors
from hf_parallel.models.attention import Capabilities, capabilities
from hf_parallel.transcript.record import Record

_ARGUMENTS = ("inputs", "generation_config")
_REFUSED_ARGUMENTS = (
    "assistant_model",
    "custom_generate",
    "encoder_outputs",
    "inputs_embeds",
    "labels",
    "logits_to_keep",
    "negative_prompt_attention_mask",
    "negative_prompt_ids",
    "synced_gpus",
)
"""Arguments of `generate` that no mode can honour."""
_REFUSED: dict[str, Any] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "guidance_scale": (None, 1, 1.0),
    "cache_implementation": (None, "dynamic"),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "use_cache": (None, True),
    "token_healing": (None, False),
    "use_mtp": (None, False),
    "compile_config": (None,),
}
"""Settings of `generate` that no mode can honour, with the values at which they ask for nothing."""
_TAKEN_OVER = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
"""Ways of `generate` that lead to `_sample`, where a mode takes over."""
_CLAIMING = threading.Lock()
"""Held while a call looks whether a model is free and takes it."""


class ParallelGenerationMixin:
    """`generate` with a `generation_mode`. `hf_parallel.enable` mixes it into a model's class."""

    _parallel_capabilities: Capabilities
    _parallel_config: ParallelConfig | None = None
    _parallel_thread: int | None = None

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, in parallel if a mode is named.

        Parameters
        ----------
        *args, **kwargs
            Those of `transformers.GenerationMixin.generate`, the settings of the mode, and

            generation_mode : str, optional
                Name of the mode. Default: `generation_config.generation_mode`, or plain generation. None asks for
                plain generation whatever the config says.
            parallel_config : ParallelConfig or dict, optional
                The mode's settings in one object. Keyword arguments go before it, it goes before
                `generation_config.parallel_config`.

        Raises
        ------
        ValueError
            For unknown or contradictory settings, and for what the mode cannot honour.
        """
        with report_errors(kwargs.get("streamer")):
            self._check_free()
            for name, value in zip(_ARGUMENTS, args, strict=False):
                if name in kwargs:
                    raise TypeError(f"generate() got {name} both by position and by name")
                kwargs[name] = value
            args = args[len(_ARGUMENTS) :]
            config = self._take_parallel_config(kwargs)
            if config is None:
                return self._generate(kwargs, args)
            if args:
                raise ValueError("with a generation_mode, arguments behind generation_config are given by name")
            with self.prepared_call(config, kwargs) as call:
                return config.make_run(call).generate()

    @contextmanager
    def prepared_call(self, config: ParallelConfig, kwargs: dict[str, Any]) -> Iterator[GenerationCall]:
        """Let transformers prepare a call of a mode, and hold the model while the context is open.

        Parameters
        ----------
        config : ParallelConfig
        kwargs : dict
            The other arguments of `generate`, by name.
        """
        with torch.no_grad(), _host_as_default():
            prepared = config.prepare(kwargs)
            self._refuse(config, kwargs)
            with self.claimed(config):
                call = self._generate(kwargs, ())
                yield dataclasses.replace(call, prepared=prepared)

    def _check_free(self) -> None:
        if self._parallel_config is not None:
            raise RuntimeError(
                "this model is generating in parallel already: generate was called again from a processor, a streamer "
                "or another thread"
            )

    @contextmanager
    def claimed(self, config: ParallelConfig) -> Iterator[None]:
        """Hold the model for one call of a mode, which switches it to block attention for everybody."""
        with _CLAIMING:
            self._check_free()
            self._parallel_config, self._parallel_thread = config, threading.get_ident()
        try:
            yield
        finally:
            del self._parallel_config, self._parallel_thread

    def _generate(self, kwargs: dict[str, Any], args: tuple[Any, ...]) -> Any:
        first = [kwargs.pop(name, None) for name in _ARGUMENTS]
        return super().generate(*first, *args, **kwargs)  # type: ignore[misc]

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Decoding method that `generate` calls when all is prepared: the mode's, or transformers' own."""
        config = self._parallel_config
        if config is None or self._parallel_thread != threading.get_ident():  # plain `generate`, perhaps beside a mode
            return super()._sample(  # type: ignore[misc]
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
            )
        return make_call(
            self,  # type: ignore[arg-type]
            self._parallel_capabilities,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer,
            {**model_kwargs, "synced_gpus": synced_gpus},
            config.cuda_graph,
            Record(config, config.to_dict()),
        )

    def _take_parallel_config(self, kwargs: dict[str, Any]) -> ParallelConfig | None:
        return take_parallel_config(self.generation_config, kwargs)  # type: ignore[attr-defined]

    def _refuse(self, config: ParallelConfig, kwargs: dict[str, Any]) -> None:
        """Refuse arguments that cannot be honoured, before anything is prepared."""
        mode = config.mode
        for name in _REFUSED_ARGUMENTS:
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise ValueError(f"{name} cannot be honoured by generation_mode={mode!r}")
        check_inputs(kwargs)
        check_helpers(kwargs)
        known = set(GenerationConfig().to_dict()) | set(vars(GenerationConfig()))
        known |= set(inspect.signature(super().generate).parameters)  # type: ignore[misc]
        known |= {"input_ids", "attention_mask", "position_ids", "past_key_values", "tokenizer", "assistant_tokenizer"}
        known |= set(inspect.signature(self.forward).parameters)  # type: ignore[attr-defined]
        for name in kwargs:
            if name not in known:
                raise unknown_setting(type(config), name, kwargs[name], known)
        for stored in (kwargs.get("generation_config"), self.generation_config):  # type: ignore[attr-defined]
            check_values({} if stored is None else vars(stored))
        check_values(kwargs)
        settings = {k: v for k, v in kwargs.items() if k in set(vars(GenerationConfig()))}
        prepared, _ = self._prepare_generation_config(kwargs.get("generation_config"), **settings)  # type: ignore[attr-defined]
        for name, harmless in _REFUSED.items():
            value = getattr(prepared, name, None)
            if value not in harmless:
                allowed = " or ".join(map(repr, harmless))
                raise ValueError(f"{name}={value!r} cannot be honoured by generation_mode={mode!r}; allowed: {allowed}")
        if (asked := prepared.get_generation_mode()) not in _TAKEN_OVER:  # generate goes another way then
            raise ValueError(f"these settings ask for {asked.value}, which generation_mode={mode!r} cannot honour")

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save as ever; a mode that `generation_config` names is there again after `from_pretrained`.

        Raises
        ------
        ValueError
            For settings of the mode that cannot be stored; nothing is written then.
        """
        keep_mode(self.generation_config)  # type: ignore[attr-defined]
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain model and enable again: the subclass lives in this process only."""
        return _restore, (_plain_class(type(self)),), self.__dict__


def take_parallel_config(own: GenerationConfig, kwargs: dict[str, Any]) -> ParallelConfig | None:
    """Take the mode and its settings out of the arguments of `generate`.

    Parameters
    ----------
    own : GenerationConfig
        The model's.
    kwargs : dict
        Loses the mode and its settings.

    Returns
    -------
    ParallelConfig, optional
        None: no mode is asked for, or `custom_generate` is, which gets all arguments.

    Raises
    ------
    TypeError
        If `generation_config` is none.
    ValueError
        For an unknown mode, and for unknown or contradictory settings.
    """
    given = kwargs.get("generation_config")
    check_generation_config(given)
    if kwargs.get("custom_generate") is not None and "generation_mode" not in kwargs:
        return None
    stored: list[Any] = [c for c in (given, own) if c is not None]
    object_given = kwargs.pop("parallel_config", None)
    if "generation_mode" in kwargs:
        mode = kwargs.pop("generation_mode")
    elif isinstance(object_given, ParallelConfig):
        mode = object_given.mode
    else:
        mode = next((m for m in (getattr(c, "generation_mode", None) for c in stored) if m is not None), None)
    if mode is None:
        if object_given is not None:
            raise ValueError("parallel_config was given without a generation_mode")
        return None
    fields = MODES[mode].fields() if isinstance(mode, str) and mode in MODES else ()
    settings = {name: kwargs.pop(name) for name in fields if name in kwargs}
    for name in fields:
        if any(hasattr(config, name) for config in stored):
            raise ValueError(f"{name} is in generation_config itself; put it in generation_config.parallel_config")
    saved = [
        c.parallel_config
        for c in stored
        if getattr(c, "parallel_config", None) and getattr(c, "generation_mode", mode) in (mode, None)
    ]
    return make_config(mode, settings, object_given, *saved)


def keep_mode(config: Any) -> None:
    """See to it that a `GenerationConfig` that names a mode is saved with it.

    Raises
    ------
    ValueError
        For settings that cannot be stored.
    """
    if getattr(config, "generation_mode", None) is None:
        return
    make_config(config.generation_mode, getattr(config, "parallel_config", None)).stored()
    config._from_model_config = False  # a config that says so loses what transformers does not know


def enable(model: PreTrainedModel, known: Capabilities | None = None) -> PreTrainedModel:
    """Give one model the `generation_mode` argument.

    Finds out what block attention can do with the model by running it on a few tokens. Idempotent; nothing global is
    changed. `disable` undoes it.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder-only model with a language modelling head. A PEFT model's base model may be given.
    known : Capabilities, optional
        What block attention can do with just this model; it is not run then.

    Returns
    -------
    PreTrainedModel
        The same object.

    Raises
    ------
    TypeError
        If `model` is no `PreTrainedModel`.
    UnsupportedModelError
        If block attention cannot serve the model, with the reason.
    ValueError
        If the model's weights are on the meta device.
    """
    if isinstance(model, ParallelGenerationMixin):
        return model
    if isinstance(model, PreTrainedModel) and model.device.type == "meta":
        raise ValueError(f"{type(model).__name__} is on the meta device: load its weights first")
    with _host_as_default():
        found = capabilities(model) if known is None else known
    plain = type(model)
    model.__class__ = _enabled_class(plain)
    model._parallel_capabilities = found  # type: ignore[assignment]
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `enable`; does nothing to a model that is not enabled. Returns the same object.

    Raises
    ------
    TypeError
        If `model` is no `PreTrainedModel`.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    if isinstance(model, ParallelGenerationMixin):
        model.__class__ = _plain_class(type(model))
        del model._parallel_capabilities
    return model


def _host_as_default() -> AbstractContextManager[Any]:
    """Where tensors are made that name no device: here, whatever the caller has set."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


_enabled: dict[type, type] = {}


def _enabled_class(plain: type) -> type:
    """The subclass of a model's class that has the argument, under the same name (which `save_pretrained` writes)."""
    if plain not in _enabled:
        names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
        _enabled[plain] = type(plain.__name__, (ParallelGenerationMixin, plain), names)
    return _enabled[plain]


def _plain_class(enabled: type) -> type:
    return next(plain for plain, made in _enabled.items() if made is enabled)


def _restore(plain: type) -> Any:
    cls = _enabled_class(plain)
    return cls.__new__(cls)  # type: ignore[call-overload]
