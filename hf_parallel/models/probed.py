"""Enables the embedded model, whose capabilities are found out once and kept in the cache folder.

Finding them out takes as long as several tokens. A model that somebody may have changed is always asked anew, so this
serves only a model that has just been loaded from the package.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from hf_parallel.files import cache_folder, write_whole
from hf_parallel.kernels.rope import RotarySpec
from hf_parallel.models import attention
from hf_parallel.models.attention import Capabilities, capabilities


def embedded_capabilities(model: PreTrainedModel) -> Capabilities:
    """Return the capabilities of the model that `load_embedded_model` has just returned, probed once per version.

    The saved file is keyed by the model's config and dtype, by the versions of torch and transformers, and by the code
    that probes.
    """
    path = _path(model)
    try:
        return read(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, LookupError, TypeError):  # missing or damaged
        found = capabilities(model)
    with suppress(OSError):  # it can be probed again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, write(found))
    return found


def write(found: Capabilities) -> str:
    """Capabilities as JSON."""
    rotary = {} if found.rotary is None else found.rotary
    specs = list(dict.fromkeys(rotary.values()))
    told = {
        "keyword": found.keyword,
        "specs": [None if spec is None else [spec.inv_freq, spec.interleaved] for spec in specs],
        "layers": None if found.rotary is None else [[layer, specs.index(spec)] for layer, spec in rotary.items()],
        "why_no_rotation": found.why_no_rotation,
        "max_length": found.max_length,
    }
    return json.dumps(told)


def read(text: str) -> Capabilities:
    """The capabilities that `write` wrote.

    Raises
    ------
    ValueError, LookupError, TypeError
        For anything else.
    """
    told = json.loads(text)
    specs = [None if spec is None else RotarySpec(tuple(spec[0]), spec[1]) for spec in told["specs"]]
    rotary = None if told["layers"] is None else {layer: specs[index] for layer, index in told["layers"]}
    return Capabilities(told["keyword"], rotary, told["why_no_rotation"], told["max_length"])


def _path(model: PreTrainedModel) -> Path:
    code = Path(attention.__file__).read_text(encoding="utf-8")
    known = (code, torch.__version__, transformers.__version__, str(model.dtype), model.config.to_json_string())
    return cache_folder() / f"capabilities-{hashlib.sha256(repr(known).encode()).hexdigest()[:16]}.json"
