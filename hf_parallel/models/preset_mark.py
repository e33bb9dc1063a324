"""The mark of a model whose modes have presets: a name on its generation config and its tokenizer."""

from __future__ import annotations

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

PRESET_MARK = "parallel_preset"
"""Name of the entry; it is saved and copied with its objects."""


def mark_preset(name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a model and its tokenizer the presets of a name."""
    tokenizer.init_kwargs[PRESET_MARK] = name
    setattr(model.generation_config, PRESET_MARK, name)


def marked_preset(marked: GenerationConfig | PreTrainedTokenizerBase) -> object:
    """Return the entry of a generation config or a tokenizer; None without one. A file may hold any value."""
    return getattr(marked, PRESET_MARK, None) or getattr(marked, "init_kwargs", {}).get(PRESET_MARK)
