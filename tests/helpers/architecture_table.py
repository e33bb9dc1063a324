"""Writes `docs/architectures.md` from probes of small models: `python tests/helpers/architecture_table.py`."""

from __future__ import annotations

from collections.abc import Sequence

import hybrids
import mapping
import tiny
import transformers
from paths import ROOT
from tiny import ARCHITECTURES, REFUSED, Architecture
from transformers import PreTrainedConfig, PreTrainedModel

from hf_parallel.kernels import RotarySpec
from hf_parallel.models.intercept.attention import UnsupportedModelError
from hf_parallel.models.probing.capabilities import Capabilities, probe_capabilities
from hf_parallel.models.probing.rotary import rope_types

PAGE = ROOT / "docs" / "architectures.md"
TEXT = """\
# Architectures

What `hf_parallel.enable` finds in a small random model of each of the {names} names in the causal language mapping of
Transformers {version}, and of some RoPE variants: {works} are supported, {refused} are not, and {unbuilt} cannot be
built or cannot generate with Transformers alone. Probing does not depend on names: it runs a few forward passes and
compares queries and logits. Models that are not listed may work. Unsupported models raise `UnsupportedModelError` with
the reason.

- **shared_prefix** needs keys and values, or states, in a cache. Tested: greedy output equals `generate`'s token for
  token.
- **hogwild** also rotates queries to other positions, which needs rotary embeddings (RoPE) with constant frequencies.
- **RoPE**: which dimensions form a rotated pair (`half-split` as in Llama, `interleaved` as in GLM), the number of
  rotated dimensions of a head if not all are, layers without RoPE, and the scaling of the frequencies.
- **States**: layers with linear attention, an SSM or a short convolution, which keep a state instead of keys, or beside
  them. A state belongs to one order of tokens, so that hogwild and pdos with `join="rotate"` do not work.
- **Attention**: a sliding window (in all layers or some), chunks, soft-capped scores, attention sinks, layers that read
  the keys of earlier ones, latents (MLA: the cache holds a latent per token, from which keys and values of all heads
  are expanded). All are supported. `own`: the model's own attention runs, as block attention cannot replace it. It
  reads copies of the rows' keys and values, made for one layer at a time, so that a step takes as long as in a batch
  of `generate`. Keys are still stored once, and prompts computed once.

Encoders such as BERT are built as decoders (`is_decoder=True`). `bert-encoder` is the other kind.

`python tests/helpers/architecture_table.py` writes this page, and a test compares it with the models.

{table}

This page does not probe prompts with images: [images](images.md#model-types) has a table of the models that read them.
"""
_UNBUILT = "transformers fails"
_ORDER = ("yes", "no", _UNBUILT)


def names() -> list[str]:
    """Return the names of the rows: those of the mapping, and tested ones that it lacks."""
    return sorted({*mapping.NAMES, *ARCHITECTURES, *REFUSED, *hybrids.ARCHITECTURES})


def make_page() -> str:
    """Return the text of the page."""
    rows = sorted(map(row_of, names()), key=lambda row: (_ORDER.index(row[1]), row[0]))
    heads = ("architecture", "shared_prefix", "hogwild", "RoPE", "attention", "states", "why not")
    works, refused, unbuilt = (sum(row[1] == kind for row in rows) for kind in _ORDER)
    return TEXT.format(
        names=len(mapping.NAMES),
        version=transformers.__version__,
        works=works,
        refused=refused,
        unbuilt=unbuilt,
        table="\n".join(map(line, (heads, ["---"] * len(heads), *rows))),
    )


def line(cells: Sequence[str]) -> str:
    """Return a line of the table."""
    return f"| {' | '.join(cells)} |"


def row_of(name: str) -> Sequence[str]:
    """Return the cells of one architecture."""
    title = f"`{name}`"
    if error := stock_error(name):
        return title, _UNBUILT, "", "", "", "", error
    model = tiny.build(name)
    try:
        found = probe_capabilities(model)
    except UnsupportedModelError as refusal:
        return title, "no", "no", "", "", "", _reason(model, str(refusal))
    turns = "yes" if found.rotary is not None else "no"
    reason = _reason(model, found.why_no_rotation)
    if found.max_length is not None:
        reason += "; shared_prefix serves rows up to that length"
    attention = _attention(model, tiny.architecture_of(name), found)
    return title, "yes", turns, _rope(model, found), attention, _states(found), reason


def stock_error(name: str) -> str:
    """Return the error with which Transformers fails to build a model or to generate two tokens; "" if it does not."""
    try:
        model = tiny.build(name)
        if not model.config.is_encoder_decoder:
            model.generate(tiny.make_prompts([5])[0][None], max_new_tokens=2, do_sample=False)
    except ImportError as error:  # which library is named depends on the others that are installed
        return f"needs a library: {str(error).split()[0]}"
    except Exception as error:
        lines = " ".join(str(error).split())
        return f"{type(error).__name__}: {lines[:150]}{'...' if len(lines) > 150 else ''}".replace("|", "/")
    return ""


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
    config = config.get_text_config(decoder=True).per_layer_config[layer]
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _attention(model: PreTrainedModel, architecture: Architecture, found: Capabilities) -> str:
    if found.dense:
        return "own"
    parts = ["latents"] if getattr(model.config, "kv_lora_rank", None) else []
    config = model.config.get_text_config(decoder=True)
    chunked = any(read.chunk for read in found.reads.values())
    if architecture.sliding_window or (found.has_window and not chunked):
        kinds = set(getattr(config, "layer_types", None) or [])
        parts.append("window in some layers" if "full_attention" in kinds else "window")
    if chunked:
        parts.append("chunks")
    if sharing := [str(layer) for layer, read in found.reads.items() if read.source != layer]:
        parts.append(f"keys of earlier layers in layers {', '.join(sharing)}")
    if getattr(config, "attn_logit_softcapping", None):
        parts.append("soft-capping")
    if any("sinks" in name for name, _ in model.named_parameters()):
        parts.append("sinks")
    return ", ".join(parts)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(make_page(), encoding="utf-8")
    print(f"wrote {PAGE}")
