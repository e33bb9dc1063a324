"""`enable(model)`: the `generation_mode` argument of `generate`, for one model.

The model's class is exchanged for a subclass of it whose `generate` looks for a mode, lets transformers prepare the
call as ever (configs, processors, criteria, padding, streamers), and takes over where sampling would begin.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ..attention import Capabilities, capabilities
from .call import make_call
from .config import MODES, ParallelConfig, make_config

_ARGUMENTS = ("inputs", "generation_config")
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
    "cache_implementation": (None,),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "use_cache": (None, True),
    "token_healing": (None, False),
}
"""Settings of `generate` that no mode can honour, with the values at which they ask for nothing."""


class ParallelGenerationMixin:
    """`generate` with a `generation_mode`. `hf_parallel.enable` mixes it into a model's class."""

    _parallel_capabilities: Capabilities
    _parallel_config: ParallelConfig | None = None

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
        kwargs.update(zip(_ARGUMENTS, args[:2], strict=False))
        args = args[2:]
        config = self._take_parallel_config(kwargs)
        if config is None:
            return self._generate(kwargs, args)
        if args or kwargs.get("custom_generate") is not None:
            raise ValueError("with a generation_mode, arguments behind generation_config are given by name")
        config.prepare(kwargs)
        self._refuse(config, kwargs)
        self._parallel_config = config
        try:
            return self._generate(kwargs, ())
        finally:
            self._parallel_config = None

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
        if config is None:
            return super()._sample(  # type: ignore[misc]
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, **model_kwargs
            )
        call = make_call(
            self,  # type: ignore[arg-type]
            self._parallel_capabilities,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            streamer,
            {**model_kwargs, "synced_gpus": synced_gpus},
        )
        return config.run(call)

    def _take_parallel_config(self, kwargs: dict[str, Any]) -> ParallelConfig | None:
        """Take the mode and its settings out of the arguments of `generate`."""
        given = kwargs.get("generation_config")
        if given is not None and not isinstance(given, GenerationConfig):
            raise TypeError(f"generation_config must be a GenerationConfig, got {type(given).__name__}")
        stored = [c for c in (given, self.generation_config) if c is not None]  # type: ignore[attr-defined]
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
        saved = [
            c.parallel_config
            for c in stored
            if getattr(c, "parallel_config", None) and getattr(c, "generation_mode", mode) in (mode, None)
        ]
        return make_config(mode, settings, object_given, *saved)

    def _refuse(self, config: ParallelConfig, kwargs: dict[str, Any]) -> None:
        """Refuse arguments that cannot be honoured, before anything is prepared."""
        mode = config.mode
        for name in ("assistant_model", "negative_prompt_ids", "inputs_embeds", "encoder_outputs", "synced_gpus"):
            if kwargs.get(name) is not None and kwargs[name] is not False:
                raise ValueError(f"{name} cannot be honoured by generation_mode={mode!r}")
        _check_ids(kwargs.get("inputs"), "inputs")
        _check_ids(kwargs.get("input_ids"), "input_ids")
        known = set(GenerationConfig().to_dict()) | set(vars(GenerationConfig()))
        known |= set(inspect.signature(super().generate).parameters)  # type: ignore[misc]
        known |= {"input_ids", "attention_mask", "position_ids", "past_key_values", "tokenizer", "assistant_tokenizer"}
        known |= set(inspect.signature(self.forward).parameters)  # type: ignore[attr-defined]
        for name in kwargs:
            if name not in known:
                raise ValueError(f"{mode!r} has no setting {name!r} (got {kwargs[name]!r}); it has {config.fields()}")
        settings = {k: v for k, v in kwargs.items() if k in set(vars(GenerationConfig()))}
        prepared, _ = self._prepare_generation_config(kwargs.get("generation_config"), **settings)  # type: ignore[attr-defined]
        for name, harmless in _REFUSED.items():
            value = getattr(prepared, name, None)
            if value not in harmless:
                raise ValueError(f"{name}={value!r} cannot be honoured by generation_mode={mode!r}; allowed: {harmless}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the plain model and enable again: the subclass lives in this process only."""
        return _restore, (_plain_class(type(self)),), self.__dict__


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Give one model the `generation_mode` argument.

    Finds out what block attention can do with the model by running it on one token. Idempotent; nothing global is
    changed. `disable` undoes it.

    Parameters
    ----------
    model : PreTrainedModel
        A decoder-only model with a language modelling head. A PEFT model's base model may be given.

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
    """
    if isinstance(model, ParallelGenerationMixin):
        return model
    found = capabilities(model)
    plain = type(model)
    model.__class__ = _enabled_class(plain)
    model._parallel_capabilities = found  # type: ignore[assignment]
    return model


def disable(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `enable`; does nothing to a model that is not enabled. Returns the same object."""
    if isinstance(model, ParallelGenerationMixin):
        model.__class__ = _plain_class(type(model))
        del model._parallel_capabilities
    return model


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
    return cls.__new__(cls)


def _check_ids(ids: Any, name: str) -> None:
    """Raise unless `ids`, if given, are token ids `[rows, length]`."""
    if ids is None:
        return
    if not isinstance(ids, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor of token ids, got {type(ids).__name__}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must hold token ids (int64), got {ids.dtype}")
    if ids.ndim != 2:
        raise ValueError(f"{name} must have the shape [rows, length], got {list(ids.shape)}")
    if 0 in ids.shape:
        raise ValueError(f"{name} must hold at least one token per row, got the shape {list(ids.shape)}")
