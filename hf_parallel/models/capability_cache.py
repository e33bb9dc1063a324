"""Saved capabilities of the embedded model.

Probing takes as long as several decode steps. Only a model just loaded by `load_embedded_model` may use the saved
result: any other model may have been modified and must be probed.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from hf_parallel.files import cache_folder, write_atomically
from hf_parallel.kernels import RotarySpec
from hf_parallel.models import attention, capabilities
from hf_parallel.models.capabilities import Capabilities, probe_capabilities


def embedded_capabilities(model: PreTrainedModel) -> Capabilities:
    """Return the capabilities of a model that `load_embedded_model` has just returned; probe it once per version.

    The saved file is keyed by the model's config and dtype, the versions of torch and transformers, and the source of
    the probing code.
    """
    path = _path(model)
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, TypeError):  # missing or damaged
        found = probe_capabilities(model)
    with suppress(OSError):  # the next process probes again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, to_json(found))
    return found


def to_json(found: Capabilities) -> str:
    """Serialize capabilities to JSON; equal rotary embeddings are stored once."""
    rotary = {} if found.rotary is None else found.rotary
    specs = list(dict.fromkeys(rotary.values()))
    fields = {
        "keyword": found.keyword,
        "specs": [None if spec is None else [spec.inv_freq, spec.interleaved] for spec in specs],
        "layers": None if found.rotary is None else [[layer, specs.index(spec)] for layer, spec in rotary.items()],
        "why_no_rotation": found.why_no_rotation,
        "max_length": found.max_length,
    }
    return json.dumps(fields)


def from_json(text: str) -> Capabilities:
    """Deserialize the output of `to_json`.

    Raises
    ------
    ValueError, LookupError, TypeError
        If `text` is anything else.
    """
    fields = json.loads(text)
    specs = [None if spec is None else RotarySpec(tuple(spec[0]), spec[1]) for spec in fields["specs"]]
    rotary = None if fields["layers"] is None else {layer: specs[index] for layer, index in fields["layers"]}
    return Capabilities(fields["keyword"], rotary, fields["why_no_rotation"], fields["max_length"])


def _path(model: PreTrainedModel) -> Path:
    code = [Path(module.__file__).read_text(encoding="utf-8") for module in (attention, capabilities)]
    known = (code, torch.__version__, transformers.__version__, str(model.dtype), model.config.to_json_string())
    return cache_folder() / f"capabilities-{hashlib.sha256(repr(known).encode()).hexdigest()[:16]}.json"
