"""`enable(model)`: the `generation_mode` argument of `generate`, for one model.

The model's class is replaced by a subclass whose `generate` looks for a mode, lets transformers prepare the call
(configs, processors, criteria, padding, streamers), and hands the prepared call to the mode instead of `_sample`.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from hf_parallel.generation import arguments
from hf_parallel.generation.call import GenerationCall, make_call
from hf_parallel.generation.config import ParallelConfig, check_setting_names, make_config
from hf_parallel.generation.registry import MODES
from hf_parallel.generation.streaming import report_errors
from hf_parallel.models.capabilities import Capabilities, probe_capabilities
from hf_parallel.transcript.record import Record

_POSITIONAL = ("inputs", "generation_config")  # arguments of `generate` that may be positional in a mode
_CLAIM_LOCK = threading.Lock()


class ParallelGenerationMixin:
    """`generate` with a `generation_mode`. `hf_parallel.enable` adds it to a model's class."""

    _parallel_capabilities: Capabilities
    _parallel_config: ParallelConfig | None = None
    _parallel_thread: int | None = None

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, in parallel if a mode is named.

        Parameters
        ----------
        *args, **kwargs
            Arguments of `transformers.GenerationMixin.generate`, settings of the mode, and

            generation_mode : str, optional
                Name of the mode. None: plain generation, whatever `generation_config` says. Default:
                `generation_config.generation_mode`, or plain generation.
            parallel_config : ParallelConfig or dict, optional
                The mode's settings in one object. Keyword arguments override it, it overrides
                `generation_config.parallel_config`.

        Raises
        ------
        ValueError
            For unknown or contradictory settings, and for arguments that the mode does not support.
        """
        with report_errors(kwargs.get("streamer")):
            self._check_free()
            for name, value in zip(_POSITIONAL, args, strict=False):
                if name in kwargs:
                    raise TypeError(f"generate() got {name} both by position and by name")
                kwargs[name] = value
            args = args[len(_POSITIONAL) :]
            config = take_parallel_config(self.generation_config, kwargs)  # type: ignore[attr-defined]
            if config is None:
                return self._generate(kwargs, args)
            if args:
                raise ValueError("with a generation_mode, pass arguments after generation_config by name")
            with self.prepared_call(config, kwargs) as call:
                return config.make_run(call).generate()

    @contextmanager
    def prepared_call(self, config: ParallelConfig, kwargs: dict[str, Any]) -> Iterator[GenerationCall]:
        """Let transformers prepare a call, and hold the model while the context is open; `kwargs` is modified."""
        with torch.no_grad(), _cpu_as_default():
            prepared = config.prepare(kwargs)
            self._check_arguments(config, kwargs)
            with self.claimed(config):
                call = self._generate(kwargs, ())
                yield dataclasses.replace(call, prepared=prepared)

    @contextmanager
    def claimed(self, config: ParallelConfig) -> Iterator[None]:
        """Hold the model for one call of a mode. Raise `RuntimeError` if another call holds it."""
        with _CLAIM_LOCK:
            self._check_free()
            self._parallel_config, self._parallel_thread = config, threading.get_ident()
        try:
            yield
        finally:
            del self._parallel_config, self._parallel_thread

    def _check_free(self) -> None:
        if self._parallel_config is not None:
            raise RuntimeError(
                "this model is already generating in parallel: generate was called again from a processor, a streamer "
                "or another thread"
            )

    def _generate(self, kwargs: dict[str, Any], args: tuple[Any, ...]) -> Any:
        positional = [kwargs.pop(name, None) for name in _POSITIONAL]
        return super().generate(*positional, *args, **kwargs)  # type: ignore[misc]

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
        """Return the prepared call of the mode that holds the model; without one, sample as transformers does."""
        config = self._parallel_config
        if config is None or self._parallel_thread != threading.get_ident():  # plain `generate`, maybe beside a mode
            return super()._sample(  # type: ignore[misc]
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
            )
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
        )

    def _check_arguments(self, config: ParallelConfig, kwargs: dict[str, Any]) -> None:
        """Raise an error for invalid or unsupported arguments, before anything is prepared."""
        arguments.check_supported_arguments(config.mode, kwargs)
        arguments.check_inputs(kwargs)
        arguments.check_objects(kwargs)
        settings = set(vars(GenerationConfig()))
        known = settings | set(GenerationConfig().to_dict())
        known |= set(inspect.signature(super().generate).parameters)  # type: ignore[misc]
        known |= set(inspect.signature(self.forward).parameters)  # type: ignore[attr-defined]
        known |= {"input_ids", "attention_mask", "position_ids", "past_key_values", "tokenizer", "assistant_tokenizer"}
        check_setting_names(type(config), kwargs, known)
        given = kwargs.get("generation_config")
        for stored in (given, self.generation_config):  # type: ignore[attr-defined]
            arguments.check_values({} if stored is None else vars(stored))
        arguments.check_values(kwargs)
        overrides = {name: value for name, value in kwargs.items() if name in settings}
        prepared, _ = self._prepare_generation_config(given, **overrides)  # type: ignore[attr-defined]
        arguments.check_supported_settings(config.mode, prepared)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save the model with the mode of `generation_config`; raise `ValueError` if a setting cannot be stored."""
        keep_mode(self.generation_config)  # type: ignore[attr-defined]
        return super().save_pretrained(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain model and enable again: the subclass exists in this process only."""
        return _restore, (_plain_class(type(self)),), self.__dict__


def take_parallel_config(own: GenerationConfig, kwargs: dict[str, Any]) -> ParallelConfig | None:
    """Remove the mode and its settings from the arguments of `generate` and return them as a config.

    `own` is the model's config. Return None if no mode is named, or if `custom_generate` is to receive all arguments.
    """
    given = kwargs.get("generation_config")
    arguments.check_generation_config(given)
    if kwargs.get("custom_generate") is not None and "generation_mode" not in kwargs:
        return None
    stored: list[Any] = [source for source in (given, own) if source is not None]
    config = kwargs.pop("parallel_config", None)
    if "generation_mode" in kwargs:
        mode = kwargs.pop("generation_mode")
    elif isinstance(config, ParallelConfig):
        mode = config.mode
    else:
        mode = next((m for m in (getattr(source, "generation_mode", None) for source in stored) if m is not None), None)
    if mode is None:
        if config is not None:
            raise ValueError("parallel_config was given without a generation_mode")
        return None
    fields = MODES[mode].fields() if isinstance(mode, str) and mode in MODES else ()
    settings = {name: kwargs.pop(name) for name in fields if name in kwargs}
    for name in fields:
        if any(hasattr(source, name) for source in stored):
            raise ValueError(f"{name} is in generation_config itself; put it in generation_config.parallel_config")
    saved = [
        source.parallel_config
        for source in stored
        if getattr(source, "parallel_config", None) and getattr(source, "generation_mode", mode) in (mode, None)
    ]
    return make_config(mode, settings, config, *saved)


def keep_mode(config: Any) -> None:
    """Make a `GenerationConfig` save the mode that it names; raise `ValueError` if a setting cannot be stored."""
    if getattr(config, "generation_mode", None) is None:
        return
    make_config(config.generation_mode, getattr(config, "parallel_config", None)).stored()
    config._from_model_config = False  # otherwise transformers drops attributes that it does not define


def enable(model: PreTrainedModel, known: Capabilities | None = None) -> PreTrainedModel:
    """Give one model the `generation_mode` argument.

    Probes with short forward passes how block attention can serve the model. Idempotent; nothing global is changed.
    `disable` reverts it.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder-only model with a language modelling head. For PEFT, pass the base model.
    known : Capabilities, optional
        Result of an earlier probe of this model, which is not probed then.

    Returns
    -------
    PreTrainedModel
        The same object.

    Raises
    ------
    TypeError, ValueError
        If `model` is not a `PreTrainedModel`, or its weights are on the meta device.
    UnsupportedModelError
        If block attention cannot serve the model, with the reason.
    """
    if isinstance(model, ParallelGenerationMixin):
        return model
    if isinstance(model, PreTrainedModel) and model.device.type == "meta":
        raise ValueError(f"{type(model).__name__} is on the meta device: load its weights first")
    with _cpu_as_default():
        found = probe_capabilities(model) if known is None else known
    model.__class__ = _enabled_class(type(model))  # type: ignore[arg-type]
    model._parallel_capabilities = found  # type: ignore[assignment]
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Revert `enable`. Leave a model that is not enabled unchanged. Return the same object.

    Raises
    ------
    TypeError
        If `model` is not a `PreTrainedModel`.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {type(model).__name__}")
    if isinstance(model, ParallelGenerationMixin):
        model.__class__ = _plain_class(type(model))
        del model._parallel_capabilities
    return model


def _cpu_as_default() -> AbstractContextManager[Any]:
    """Create tensors without a device on the CPU, whatever default device the caller has set."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


@cache
def _enabled_class(plain: type) -> type:
    """Return the subclass of a model's class, under the same name: `save_pretrained` writes it."""
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    return type(plain.__name__, (ParallelGenerationMixin, plain), names)


def _plain_class(enabled: type) -> type:
    return enabled.__bases__[1]


def _restore(plain: type) -> Any:
    cls = _enabled_class(plain)
    return cls.__new__(cls)  # type: ignore[call-overload]
