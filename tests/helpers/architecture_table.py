"""Writes `docs/architectures.md` from probes of tiny models: `python tests/helpers/architecture_table.py`."""

from __future__ import annotations

from collections.abc import Sequence

import hybrids
import tiny
from paths import ROOT
from tiny import ARCHITECTURES, REFUSED, Architecture
from transformers import PreTrainedConfig, PreTrainedModel

from hf_parallel.kernels import RotarySpec
from hf_parallel.models.attention import UnsupportedModelError
from hf_parallel.models.capabilities import Capabilities, probe_capabilities
from hf_parallel.models.rotary import rope_types

PAGE = ROOT / "docs" / "architectures.md"
TEXT = """\
# Architectures

Capabilities that `hf_parallel.enable` finds in tiny models of {works} supported and {refused} unsupported
configurations. Probing does not depend on architecture names: it runs a few forward passes and compares queries and
logits. Models that are not listed may work. Unsupported models raise `UnsupportedModelError` with the reason.

- **shared_prefix** needs keys and values, or states, in a cache, and Transformers' attention interface. Tested:
  greedy output equals `generate`'s token for token.
- **hogwild** also rotates queries to other positions, which needs rotary embeddings (RoPE) with constant frequencies.
- **RoPE**: which dimensions form a rotated pair (`half-split` as in Llama, `interleaved` as in GLM), the number of
  rotated dimensions of a head if not all are, layers without RoPE, and the scaling of the frequencies.
- **States**: layers with linear attention, an SSM or a short convolution, which keep a state instead of keys, or beside
  them. A state belongs to one order of tokens, so that hogwild and pdos with `join="rotate"` do not work.
- **Attention**: a sliding window (in all layers or some), chunks, soft-capped scores, attention sinks, layers that read
  the keys of earlier ones, latents (MLA: the cache holds a latent per token, from which keys and values of all heads
  are expanded). All are supported.

`python tests/helpers/architecture_table.py` writes this page, and a test compares it with the models.

{table}
"""


def make_page() -> str:
    """Return the text of the page."""
    return TEXT.format(works=len(ARCHITECTURES) + len(hybrids.ARCHITECTURES), refused=len(REFUSED), table=make_table())


def make_table() -> str:
    """Return the table of all architectures, supported ones first."""
    every = (*ARCHITECTURES.values(), *REFUSED.values(), *hybrids.ARCHITECTURES.values())
    rows = [row_of(architecture) for architecture in every]
    rows.sort(key=lambda row: (row[1] == "no", row[0]))
    heads = ("architecture", "shared_prefix", "hogwild", "RoPE", "attention", "states", "why not")
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def row_of(architecture: Architecture) -> Sequence[str]:
    """Return the cells of one architecture."""
    model, name = tiny.build(architecture.name), f"`{architecture.name}`"
    try:
        found = probe_capabilities(model)
    except UnsupportedModelError as error:
        return name, "no", "no", "", "", "", _reason(model, str(error))
    turns = "yes" if found.rotary is not None else "no"
    reason = _reason(model, found.why_no_rotation)
    if found.max_length is not None:
        reason += "; shared_prefix serves rows up to that length"
    return name, "yes", turns, _rope(model, found), _attention(model, architecture, found), _states(found), reason


def _states(found: Capabilities) -> str:
    layers = sorted({mixer.layer_idx for mixer in found.mixers})
    return f"in layers {', '.join(map(str, layers))}" if layers else ""


def _reason(model: PreTrainedModel, why: str) -> str:
    """Return a reason without the name of the class."""
    return why.removeprefix(type(model).__name__).removeprefix("'s").strip()


def _rope(model: PreTrainedModel, found: Capabilities) -> str:
    if found.rotary is None:
        return ""
    specs = {spec: layer for layer, spec in found.rotary.items() if spec is not None}
    parts = [f"{len(specs)} tables"] if len(specs) > 1 else []
    parts += dict.fromkeys(_one_table(spec, _head_dim(model.config, layer)) for spec, layer in specs.items())
    parts += sorted(rope_types(model.config) - {"default"})
    without = [str(layer) for layer, spec in found.rotary.items() if spec is None]
    if without:
        parts.append(f"none in layers {', '.join(without)}")
    return ", ".join(parts)


def _one_table(spec: RotarySpec, head_dim: int) -> str:
    style = "interleaved" if spec.interleaved else "half-split"
    rotated = 2 * sum(frequency > 0 for frequency in spec.inv_freq)
    return style if rotated == head_dim else f"{style} {rotated} of {head_dim}"


def _head_dim(config: PreTrainedConfig, layer: int) -> int:
    config = config.per_layer_config[layer]
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _attention(model: PreTrainedModel, architecture: Architecture, found: Capabilities) -> str:
    parts = ["latents"] if getattr(model.config, "kv_lora_rank", None) else []
    if architecture.sliding_window:
        kinds = set(getattr(model.config, "layer_types", None) or [])
        parts.append("window in some layers" if "full_attention" in kinds else "window")
    if any(read.chunk for read in found.reads.values()):
        parts.append("chunks")
    if sharing := [str(layer) for layer, read in found.reads.items() if read.source != layer]:
        parts.append(f"keys of earlier layers in layers {', '.join(sharing)}")
    if getattr(model.config, "attn_logit_softcapping", None):
        parts.append("soft-capping")
    if any("sinks" in name for name, _ in model.named_parameters()):
        parts.append("sinks")
    return ", ".join(parts)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(make_page(), encoding="utf-8")
    print(f"wrote {PAGE}")
