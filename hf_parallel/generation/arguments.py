"""Checks of the arguments of `generate` in a mode: types, ranges and what no mode supports.

transformers checks some arguments where it uses them and others nowhere. These checks run before anything is prepared;
each error names the argument, its value and what is allowed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from numbers import Real
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import nn
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation import BaseWatermarkingConfig, GenerationMode

from hf_parallel.cache import BlockCache
from hf_parallel.cache.logits import LogitsCache
from hf_parallel.cache.placement import all_modules
from hf_parallel.detokenizer import check_tokenizer
from hf_parallel.generation.registry import MODES
from hf_parallel.generation.sampling.log_probs import TopLogProbs
from hf_parallel.generation.settings import Arguments
from hf_parallel.generation.validation import check_int, check_text, is_int
from hf_parallel.models.intercept.attention import UnsupportedModelError
from hf_parallel.models.intercept.modules import InstalledCall
from hf_parallel.models.probing.capabilities import Capabilities
from hf_parallel.models.probing.signature import CACHE

_UNSUPPORTED_ARGUMENTS = (
    "adapter_names",
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
"""Arguments of `generate` that no mode supports."""
_RETURNED = ("output_attentions", "output_hidden_states")
"""Settings without effect unless `return_dict_in_generate` is set."""
_SUPPORTED_INPUTS = (
    *("input_ids", "attention_mask", "position_ids", "past_key_values", CACHE, "use_cache", "logits_to_keep"),
    *_RETURNED,
)
"""Arguments of `model.forward` that a mode honors or does not need, or that `check_supported_settings` has checked."""
_UNSUPPORTED_SETTINGS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("dola_layers", "constraints", "force_words_ids", "compile_config"), (None,)),
    **dict.fromkeys(("prompt_lookup_num_tokens", "assistant_early_exit"), (None,)),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "token_healing", "use_mtp"), (None, False)),
    **dict.fromkeys(("num_beam_groups", "guidance_scale"), (None, 1)),
    "penalty_alpha": (None, 0),
    "cache_implementation": (None, "dynamic", "static", "sliding_window", "hybrid", "hybrid_chunked"),
}
"""Settings of `GenerationConfig` that no mode supports, with the values that disable them or change no token."""
_NO_BEAMS: dict[str, tuple[object, ...]] = {"num_beams": (None, 1)}
"""The same of modes that search no beams."""
_PLAINLY = "; model.generate(..., generation_mode=None) runs plain generate"
_SUPPORTED_STRATEGIES = (
    *(GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
    *(GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE),
)
"""Decoding strategies of `generate` that call `_sample` or `_beam_search`, where a mode takes over."""
_MINIMUM = {
    **dict.fromkeys(("max_new_tokens", "max_length", "num_return_sequences", "prefill_chunk_size"), 1),
    "num_beams": 1,
    **dict.fromkeys(("min_new_tokens", "min_length", "no_repeat_ngram_size", "top_k"), 0),
    "encoder_no_repeat_ngram_size": 0,
}
"""Integer settings with their least allowed value."""
_NUMBERS = ("temperature", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "max_time")
_PENALTIES = ("repetition_penalty", "length_penalty")
_BOOLS = ("do_sample", "return_dict_in_generate", "output_scores", "output_logits")


def _is_number(value: object) -> bool:
    return isinstance(value, Real)


def _are_tokens(value: object) -> bool:
    is_array = isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.integer)
    return is_array or _is_int_tensor(value) or (isinstance(value, list | tuple) and all(map(is_int, value)))


_TYPES: tuple[tuple[Sequence[str], Callable[[object], bool], str], ...] = (
    ((*_NUMBERS, *_PENALTIES), lambda value: _is_number(value) and not isinstance(value, bool), "a number"),
    (_BOOLS, lambda value: isinstance(value, bool | int | np.bool_) and value in (0, 1), "True or False"),
    (
        ("bos_token_id", "pad_token_id", "forced_bos_token_id"),
        lambda value: is_int(value) or (_is_int_tensor(value) and value.numel() == 1),
        "a token id",
    ),
    (
        ("eos_token_id", "forced_eos_token_id", "decoder_start_token_id"),
        lambda value: is_int(value) or _are_tokens(value),
        "a token id or a list of them",
    ),
    (("suppress_tokens", "begin_suppress_tokens"), _are_tokens, "a list of token ids"),
    (
        ("exponential_decay_length_penalty",),
        lambda value: isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value)),
        "a pair (index of the first penalized token, factor)",
    ),
    (
        ("watermarking_config",),
        lambda value: isinstance(value, BaseWatermarkingConfig | Mapping),
        "a WatermarkingConfig, a SynthIDTextWatermarkingConfig or a dict",
    ),
    (
        ("stop_strings",),
        lambda value: all(isinstance(text, str) for text in (value if isinstance(value, list | tuple) else [value])),
        "a string or a list of strings",
    ),
)
"""Settings, a check of their values, and what the values must be."""


OTHER_ARGUMENTS = frozenset(
    {"input_ids", "attention_mask", "position_ids", "past_key_values", CACHE, "tokenizer", "assistant_tokenizer"}
)
"""Arguments of `generate` that are neither settings nor named in its signature."""


GENERATION_SETTINGS = tuple(name for name in vars(GenerationConfig()) if not name.startswith("_"))
"""Names of the settings of `generate`."""


@cache
def setting_names() -> frozenset[str]:
    """Return the names in a saved `GenerationConfig`: the settings, and entries such as `transformers_version`."""
    config = GenerationConfig()
    return frozenset(vars(config)) | frozenset(config.to_dict())


def check_supported_arguments(title: str, kwargs: Arguments) -> None:
    """Raise `ValueError` for an argument of `generate` that no mode supports."""
    for name in _UNSUPPORTED_ARGUMENTS:
        value = kwargs.get(name)
        is_off = value is None or value is False
        if name == "logits_to_keep":
            is_off = is_off or (is_int(value) and value == 0)
        if not is_off:
            raise ValueError(f"{name} is not supported by {title}{_PLAINLY}")


def check_uses_cache(title: str, kwargs: Arguments, own: GenerationConfig) -> None:
    """Raise `ValueError` if a call asks for generation without a cache; `own` is the model's config, a saved default.

    Files of trained models often have `use_cache=False`, which training sets.
    """
    config = kwargs.get("generation_config")
    is_asked = config is not None and config.use_cache is False and own.use_cache is not False
    if kwargs.get("use_cache", True) is False or is_asked:
        raise ValueError(f"use_cache=False is not supported by {title}, whose rows share a cache{_PLAINLY}")


def check_keeps_states(config: Any, model: object, capabilities: Capabilities) -> None:
    """Raise `UnsupportedModelError` if layers keep states and rows of the mode see more than one sequence in order."""
    mixers = capabilities.mixers
    if mixers and not config.traits.keeps_states:
        works = ", ".join(sorted(name for name, mode in MODES.items() if mode.traits.keeps_states))
        raise UnsupportedModelError(
            f"{config.mode} gives rows more than one sequence in order, but {type(model).__name__} keeps a state in "
            f"{mixers[0].name}: modes that work are {works}"
        )


def check_not_compiled(model: nn.Module) -> None:
    """Raise `UnsupportedModelError` if a model or a part was compiled in place: its graph cannot read blocks."""
    for module in all_modules(model):
        forward = vars(module).get("forward")
        compiled = hasattr(forward, "_torchdynamo_orig_callable") and not hasattr(forward, "_torchdynamo_disable")
        installed = module._compiled_call_impl
        if (installed is not None and not isinstance(installed, InstalledCall)) or compiled:
            name = next(name for name, other in model.named_modules() if other is module)
            part = f"its module {name!r} was" if name else "the model was"
            raise UnsupportedModelError(
                f"generation modes run uncompiled models, but {part} compiled in place: load it again, and use "
                "torch.compile(model), whose modes run the model inside, or compile=True in calls of modes"
            )


def check_computes_itself(model: nn.Module) -> None:
    """Raise `ValueError` for a copy of a model whose `forward` computes the model that it was copied from.

    Libraries replace `forward` on one model by a function that holds the earlier one, such as TRL's trainers. A deep
    copy of the model has the same function.
    """
    forward = vars(model).get("forward")
    function = getattr(forward, "__func__", forward)
    for cell in getattr(function, "__closure__", None) or ():
        owner = getattr(cell.cell_contents, "__self__", None)
        if isinstance(owner, PreTrainedModel) and all(owner is not module for module in model.modules()):
            raise ValueError(
                "this model is a copy, and its forward() computes the model that it was copied from, where a library "
                "such as TRL has replaced forward(): save and load the model instead, or copy it before training"
            )


def check_prepares_own_inputs(model: PreTrainedModel) -> None:
    """Raise `ValueError` if the model's function that prepares inputs was replaced, as by PEFT's prompt tuning."""
    method = getattr(model, "prepare_inputs_for_generation", None)
    function = getattr(type(model), "prepare_inputs_for_generation", None)
    if _plain_function(method) is not _plain_function(function):
        raise ValueError(
            "generation modes do not call prepare_inputs_for_generation, but this model's was replaced by "
            f"{getattr(method, '__qualname__', method)} (PEFT's prompt tuning adds its virtual tokens there)"
        )


def _plain_function(method: Any) -> Any:
    method = inspect.unwrap(method) if method is not None else None  # a wrapper made by `functools.wraps`
    return getattr(method, "__func__", method)


def check_no_adapter_names(title: str, model: nn.Module) -> None:
    """Raise `ValueError` if PEFT passes an adapter per row to the layers: the rows of a mode share forward passes."""
    for module in all_modules(model):
        for hook in module._forward_pre_hooks.values():  # PEFT passes them by a `functools.partial`
            for name in ("adapter_names", "alora_offsets"):
                value = getattr(hook, "keywords", {}).get(name)
                if value is not None:
                    raise ValueError(
                        f"{name}={value!r} is not supported by {title}, use one adapter for all rows "
                        f"(set_adapter); a call that raised may have left it in the layers' forward_pre_hooks"
                    )


def check_model_inputs(title: str, inputs: Mapping[str, object], why_no_images: str = "") -> None:
    """Raise `ValueError` for arguments of `model.forward` that no mode supports, such as audio."""
    unknown = []
    for name, value in inputs.items():
        is_empty = value is None or value is False or (isinstance(value, dict) and not value)
        if name not in _SUPPORTED_INPUTS and not is_empty:
            unknown.append(name)
    if unknown:
        allowed = "token ids, images and settings"
        if why_no_images:
            allowed = f"token ids and settings only ({why_no_images})"
        raise ValueError(f"{sorted(unknown)} are not supported by {title}: pass {allowed}")


def check_tokens(config: GenerationConfig, vocabulary: int, prompt_length: int) -> None:
    """Raise `ValueError` for tokens outside the vocabulary that transformers would force."""
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        value = getattr(config, name, None)
        if value is None or (name == "forced_bos_token_id" and prompt_length > 1):
            continue  # it is forced after a prompt of one token only
        tokens = torch.as_tensor(value).flatten().tolist()
        if not all(0 <= token < vocabulary for token in tokens):
            raise ValueError(f"{name} must be token ids below {vocabulary}, the size of the vocabulary, got {value!r}")


def check_supported_settings(title: str, config: GenerationConfig, searches_beams: bool = False) -> None:
    """Raise `ValueError` for a setting, or a decoding strategy, that the mode does not support."""
    unsupported = _UNSUPPORTED_SETTINGS if searches_beams else _UNSUPPORTED_SETTINGS | _NO_BEAMS
    for name, harmless in unsupported.items():
        value = getattr(config, name, None)
        if value not in harmless and (config.return_dict_in_generate or name not in _RETURNED):
            allowed = " or ".join(map(repr, harmless))
            otherwise = _modes_with_beams() if name in _NO_BEAMS else _PLAINLY
            raise ValueError(f"{name}={value!r} is not supported by {title}; allowed: {allowed}{otherwise}")
    strategy = config.get_generation_mode()
    if strategy not in _SUPPORTED_STRATEGIES:
        raise ValueError(f"these settings select {strategy.value}, which {title} does not support{_PLAINLY}")


def _modes_with_beams() -> str:
    """Return which modes search beams, for a message."""
    names = [repr(name) for name, config in MODES.items() if config.traits.searches_beams]
    return f"; of the modes, {' and '.join(names)} {'search' if len(names) > 1 else 'searches'} beams"


def check_beams(title: str, config: GenerationConfig, kwargs: Arguments) -> None:
    """Raise `ValueError` for arguments of a call that no beam search of a mode supports."""
    if kwargs.get("streamer") is not None:
        raise ValueError(
            f"streamer is not supported by {title} with num_beams={config.num_beams}: which tokens are returned is "
            "known at the end"
        )
    if any(isinstance(processor, TopLogProbs) for processor in kwargs.get("logits_processor") or ()):
        raise ValueError(f"TopLogProbs is not supported with num_beams={config.num_beams}: rows are chosen at the end")
    if config.low_memory:
        raise ValueError(f"low_memory={config.low_memory!r} is not supported with num_beams; allowed: None or False")
    if config.diversity_penalty:
        raise ValueError(
            f"diversity_penalty={config.diversity_penalty!r} is not supported with num_beams: it belongs to groups of "
            "beams; allowed: None or 0"
        )


def check_inputs(kwargs: Arguments) -> None:
    """Check the tensors of a call: token ids `[rows, length]`, and a mask and positions of matching shape."""
    _check_ids(kwargs.get("inputs"), "inputs")
    _check_ids(kwargs.get("input_ids"), "input_ids")
    ids = kwargs["inputs"] if kwargs.get("inputs") is not None else kwargs.get("input_ids")
    mask = kwargs.get("attention_mask")
    positions = kwargs.get("position_ids")
    if mask is not None:
        _check_tensor(mask, "attention_mask")
        if ids is None:
            raise ValueError("attention_mask was given without input_ids")
        if mask.shape != ids.shape:
            expected = list(ids.shape)
            raise ValueError(f"attention_mask must have the shape of input_ids {expected}, got {list(mask.shape)}")
        if not ((mask == 0) | (mask == 1)).all():
            raise ValueError("attention_mask must hold 0 and 1 only: 0 marks padding")
    if positions is not None:
        _check_tensor(positions, "position_ids")
        shape = (1, 1) if ids is None else tuple(ids.shape)
        if tuple(positions.shape) not in (shape, (1, shape[1])) or positions.is_floating_point():
            got = f"{positions.dtype} {list(positions.shape)}"
            raise ValueError(f"position_ids must be integers of the shape {list(shape)}, got {got}")


def move_padding_left(kwargs: Arguments) -> None:
    """Move padding at the end of prompts to their beginning, where a prompt's next token does not follow padding."""
    mask = kwargs.get("attention_mask")
    if mask is None or mask[:, -1].all():
        return
    length = mask.shape[1]
    padding = mask.flip(1).long().argmax(1)  # masked tokens at the end of each row; 0 if all are masked
    source = (torch.arange(length, device=mask.device) - padding[:, None]) % length
    for name in ("inputs", "input_ids", "attention_mask", "position_ids"):
        value = kwargs.get(name)
        if value is not None:
            kwargs[name] = value.expand(mask.shape).gather(1, source.to(value.device))


def name_cache(kwargs: Arguments) -> None:
    """Give the argument `past_key_values` the name that Transformers has for it; `kwargs` is modified.

    Raises `ValueError` if the call has caches under both names.
    """
    cache = kwargs.pop("past_key_values", None)
    if cache is None:
        return
    if kwargs.get(CACHE) is not None:
        raise ValueError(f"past_key_values and {CACHE} are names of the same argument: pass one of them")
    kwargs[CACHE] = cache


def check_no_logits_cache(kwargs: Mapping[str, object]) -> None:
    """Raise `ValueError` for a `LogitsCache` in the place of a cache of keys and values, with or without a mode."""
    for name in ("past_key_values", CACHE):
        if isinstance(kwargs.get(name), LogitsCache):
            raise ValueError(
                f"{name} must be a cache of keys and values: pass a LogitsCache as logits_cache=, in a generation_mode"
            )


def check_objects(kwargs: Arguments) -> None:
    """Check the objects of a call: streamer, logits processors, stopping criteria and cache."""
    streamer = kwargs.get("streamer")
    if streamer is not None and not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise TypeError(f"streamer must have the methods put() and end(), got {type(streamer).__name__}")
    for name in ("logits_processor", "stopping_criteria"):
        items = kwargs.get(name)
        if items is None:
            continue
        if not isinstance(items, list | tuple) or not all(map(callable, items)):
            raise TypeError(f"{name} must be a list of callables, got {items!r}")
    function = kwargs.get("prefix_allowed_tokens_fn")
    if function is not None and not callable(function):
        raise TypeError(f"prefix_allowed_tokens_fn must be a function, got {function!r}")
    cache = kwargs.get(CACHE)
    empty = isinstance(cache, DynamicCache) and not cache.get_seq_length()
    if cache is not None and not empty and not isinstance(cache, BlockCache):
        got = _kind(cache)
        raise ValueError(f"past_key_values must be a cache of hf_parallel, such as SharedPrefixCache, got {got}")


def check_values(values: Mapping[str, object]) -> None:
    """Check the values of `GenerationConfig` settings; None is always allowed."""
    values = {name: value for name, value in values.items() if value is not None}
    for name in _MINIMUM.keys() & values.keys():
        check_int(name, values[name], at_least=_MINIMUM[name])
    for names, is_valid, description in _TYPES:
        for name in values.keys() & set(names):
            if not is_valid(values[name]):
                raise ValueError(f"{name} must be {description}, got {values[name]!r}")


def check_generation_config(config: object) -> None:
    """Raise `TypeError` unless `config` is a `GenerationConfig` or None."""
    if config is not None and not isinstance(config, GenerationConfig):
        raise TypeError(f"generation_config must be a GenerationConfig, got {_kind(config)}")


def check_tokenizer_given(kwargs: Arguments, mode: str, purpose: str = "reads the generated text") -> None:
    """Raise `ValueError` unless the arguments of `generate` hold a tokenizer; `purpose`: why the mode needs it."""
    tokenizer = kwargs.get("tokenizer")
    if tokenizer is None:
        raise ValueError(f"{mode} {purpose}: pass generate(..., tokenizer=tokenizer) or enable(model, tokenizer=...)")
    tokens = encode(tokenizer, "1")
    if not tokens:
        raise ValueError(f"tokenizer must return at least one token for '1', got none from {tokenizer!r}")
    if not isinstance(tokenizer.decode(tokens), str):
        raise ValueError(f"tokenizer must be a tokenizer whose decode() returns a string, got {tokenizer!r}")


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text without special tokens.

    Raises `ValueError` if `tokenizer` is not a tokenizer, or if the text has lone surrogates.
    """
    check_tokenizer(tokenizer)
    check_text("text", text)
    encoded = tokenizer(text, add_special_tokens=False)
    tokens = encoded["input_ids"] if isinstance(encoded, Mapping) else None
    if not isinstance(tokens, Sequence) or not all(map(is_int, tokens)):
        raise ValueError(f"tokenizer must return input_ids, a list of ints, for a text; got {encoded!r} for {text!r}")
    return list(tokens)


def _check_ids(ids: torch.Tensor | None, name: str) -> None:
    if ids is None:
        return
    _check_tensor(ids, name)
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must hold token ids (int64), got {ids.dtype}")
    if ids.ndim != 2:
        raise ValueError(f"{name} must have the shape [rows, length], got {list(ids.shape)}")
    if 0 in ids.shape:
        raise ValueError(f"{name} must hold at least one token per row, got the shape {list(ids.shape)}")


def _check_tensor(value: object, name: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.is_meta:
        raise ValueError(f"{name} is on the meta device and holds no values")
    if value.layout is not torch.strided:
        raise ValueError(f"{name} must be a dense tensor, got a sparse one ({value.layout})")


def _is_int_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and not value.is_floating_point() and not value.is_complex()


def _kind(value: object) -> str:
    return f"{value.__name__} itself" if isinstance(value, type) else type(value).__name__


def check_stored(mode: object, settings: object) -> Any:
    """Return settings of a generation config; raise `ValueError` for text where a setting cannot be stored.

    A file must not name code that a call would run.
    """
    if not isinstance(settings, Mapping) or not isinstance(mode, str) or mode not in MODES:
        return settings
    for name in MODES[mode].not_stored():
        if isinstance(settings.get(name), str):
            raise ValueError(f"{name}={settings[name]!r} cannot come from a generation config: pass it to generate")
    return settings
