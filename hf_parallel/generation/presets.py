"""Presets: defaults of a mode for one model, by the name with which the model is marked."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

from transformers import GenerationConfig, PreTrainedTokenizerBase

from hf_parallel.generation.registry import MODES
from hf_parallel.generation.settings import Arguments
from hf_parallel.generation.validation import check_text
from hf_parallel.models.embedded import PRESET_MARK


@dataclass(frozen=True)
class Preset:
    """Defaults of a mode for one model: settings of the mode, and settings of `generate`."""

    settings: Arguments = field(default_factory=dict)
    generation: Arguments = field(default_factory=dict)


SAMPLING: Arguments = {
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "no_repeat_ngram_size": 5,
}
"""Settings of `generate` for a small model, which repeats itself under greedy decoding."""
SAMPLING_ONLY = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings of `generate` that have an effect only with `do_sample=True`."""


def preset_of(mode: object, marked: GenerationConfig | PreTrainedTokenizerBase) -> Preset:
    """Return the preset of a mode for a model that is marked with its name; an empty one without a mark.

    `marked` is the model's generation config or its tokenizer. Raises `ValueError` if the mark is not a string.
    """
    name = getattr(marked, PRESET_MARK, None) or getattr(marked, "init_kwargs", {}).get(PRESET_MARK)
    if name is None or not isinstance(mode, str) or mode not in MODES:
        return Preset()
    check_text(PRESET_MARK, name)
    preset: Preset = MODES[mode].traits.presets.get(name, Preset())
    return preset


def add_preset(mode: str, own: GenerationConfig, kwargs: Arguments) -> None:
    """Add the preset's settings of `generate` that neither the arguments nor a generation config gives."""
    config = kwargs.get("generation_config")
    known = {name: v for c in (own, config) if c is not None for name, v in vars(c).items() if v is not None} | kwargs
    missing = {name: value for name, value in preset_of(mode, own).generation.items() if name not in known}
    if not {**missing, **known}.get("do_sample"):
        missing = {name: value for name, value in missing.items() if name not in SAMPLING_ONLY}
    if config is None:
        kwargs |= missing
    elif missing:
        kwargs["generation_config"] = copy.deepcopy(config)
        kwargs["generation_config"].update(**missing)
