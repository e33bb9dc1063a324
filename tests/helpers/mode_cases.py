"""Values of each mode for tests that hold for all modes. The test module of a mode, `test_<mode>.py`, provides them."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import hf_parallel
from hf_parallel.generation import MODES

BUILT_IN = sorted(name for name, cls in MODES.items() if cls.__module__.startswith("hf_parallel."))
"""Modes of the package, without those that tests define."""


def every_setting(mode: str) -> dict[str, Any]:
    """Return a value other than the default for each setting of a mode that can be stored."""
    return copy.deepcopy(import_module(f"test_{mode}").EVERY_SETTING)


def small_call(mode: str) -> dict[str, Any]:
    """Return arguments of `generate` for a short call of a mode with a tiny model; a tokenizer is not included."""
    required = {
        name: eval(code, {"hf_parallel": hf_parallel}) for name, code in MODES[mode].traits.example_arguments.items()
    }
    return {"generation_mode": mode, "max_new_tokens": 12, **required, **import_module(f"test_{mode}").SMALL_CALL}


def small_config(mode: str) -> hf_parallel.ParallelConfig:
    """Return the config of a mode's small call."""
    return MODES[mode](**{name: value for name, value in small_call(mode).items() if name in MODES[mode].fields()})
