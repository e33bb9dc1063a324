"""Settings of hogwild and async_reasoning for small models."""

from __future__ import annotations

import json
from pathlib import Path

from hf_parallel.generation.presets import SAMPLING, Preset

_DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
EMBEDDED_PRESET = Preset(_DATA["hogwild"], SAMPLING)
"""For a model of 135 million parameters, which follows an example dialogue better than headings and rules."""
EMBEDDED_THINKER = Preset(_DATA["async_reasoning"], SAMPLING)
"""The same for `async_reasoning`."""
