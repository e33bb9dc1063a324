"""Presets: named defaults of a mode, of a paper or for one model, which is marked with the name."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerBase

from hf_parallel.generation.registry import MODES
from hf_parallel.generation.settings import Arguments
from hf_parallel.generation.validation import check_text
from hf_parallel.models.loading.embedded import PRESET_MARK


@dataclass(frozen=True)
class Preset:
    """Defaults of a mode: settings of the mode, and settings of `generate`."""

    settings: Arguments = field(default_factory=dict)
    generation: Arguments = field(default_factory=dict)


PRESETS: dict[str, dict[str, Preset]] = {
    mode: {name: Preset(**preset) for name, preset in of_mode.items()}
    for mode, of_mode in json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")).items()
}
"""Presets of built-in modes, by mode and name. `paper` has the prompts and settings of the mode's paper; only sentences
that are part of its method are quoted. `embedded` is for a model of 135 million parameters, which follows an example
dialogue better than headings and rules, and repeats itself under greedy decoding.
"""
SAMPLING_ONLY = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings of `generate` that have an effect only with `do_sample=True`."""


def marked_preset(mode: object, marked: GenerationConfig | PreTrainedTokenizerBase) -> Arguments:
    """Return the setting `preset` of a mode for a model that is marked with its name; empty if the mode has none.

    `marked` is the model's generation config or its tokenizer. Raises `ValueError` if the mark is not a string.
    """
    name = getattr(marked, PRESET_MARK, None) or getattr(marked, "init_kwargs", {}).get(PRESET_MARK)
    if name is None or not isinstance(mode, str) or mode not in MODES:
        return {}
    check_text(PRESET_MARK, name)
    return {"preset": name} if name in MODES[mode].traits.presets else {}


def add_preset(preset: Preset, own: GenerationConfig | None, kwargs: Arguments) -> None:
    """Add the preset's settings of `generate` that neither the arguments nor a generation config gives.

    `own` is the model's generation config, or None if it does not override the preset, which the caller has named.
    """
    config = kwargs.get("generation_config")
    settings: Arguments = {}
    for source in (own, config):
        if source is not None:
            settings |= {name: value for name, value in vars(source).items() if value is not None}
    settings |= kwargs
    missing = {name: value for name, value in preset.generation.items() if name not in settings}
    if not {**missing, **settings}.get("do_sample"):
        missing = {name: value for name, value in missing.items() if name not in SAMPLING_ONLY}
    if config is None:
        kwargs |= missing
    elif missing:
        kwargs["generation_config"] = copy.deepcopy(config)
        kwargs["generation_config"].update(**missing)
