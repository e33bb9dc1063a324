"""Writes `docs/architectures.md` and the table in the README: what each architecture can do, asked of a tiny model.

`python tests/architecture_table.py` writes both, `tests/test_architectures.py` compares them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tiny
from tiny import ARCHITECTURES, REFUSED, Architecture
from transformers import PreTrainedModel

from hf_parallel.kernels import RotarySpec
from hf_parallel.models.attention import Capabilities, UnsupportedModelError, capabilities

ROOT = Path(__file__).parent.parent
PAGE, README = ROOT / "docs" / "architectures.md", ROOT / "README.md"
BEGIN, END = "<!-- architectures -->\n", "<!-- /architectures -->"
TEXT = """\
# Architectures

What `hf_parallel.enable` finds out about a model, shown for {works} configurations that the tests run and
{refused} that it refuses. It does not know architectures by name: it reads what a model does off a few forward passes,
so a model that is not listed may well work, and one that cannot raises `UnsupportedModelError` with the reason.

- **shared_prefix** needs keys and values of all tokens in a cache, behind Transformers' attention interface. Tested:
  greedy output equals `generate`'s token for token.
- **hogwild** also turns queries to other positions, which needs rotary embeddings (RoPE) whose frequencies stay as they
  are.
- **RoPE**: the pairs of dimensions that turn together (`half-split` as in Llama, `interleaved` as in GLM), how many of
  a head's dimensions turn where not all do, layers without RoPE, how the frequencies are scaled.
- **Attention**: a sliding window (in all layers or in some), soft-capped scores, attention sinks. All are honoured.

This page is made by `python tests/architecture_table.py`; a test compares it with what the models do.

{table}
"""


def make_page() -> str:
    """The text of the page."""
    return TEXT.format(works=len(ARCHITECTURES), refused=len(REFUSED), table=make_table())


def make_readme() -> str:
    """The README with the table of today between its marks."""
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}{make_table()}\n{END}{rest.split(END)[1]}"


def make_table() -> str:
    """The table of all architectures, those that work first."""
    rows = [row_of(architecture) for architecture in (*ARCHITECTURES.values(), *REFUSED.values())]
    rows.sort(key=lambda row: (row[1] == "no", row[0]))
    heads = ("architecture", "shared_prefix", "hogwild", "RoPE", "attention", "why not")
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def row_of(architecture: Architecture) -> Sequence[str]:
    """Cells of one architecture."""
    model, name = tiny.build(architecture.name), f"`{architecture.name}`"
    try:
        found = capabilities(model)
    except UnsupportedModelError as error:
        return name, "no", "no", "", "", _reason(model, str(error))
    turns = "yes" if found.rotary is not None else "no"
    reason = _reason(model, found.why_no_rotation)
    if found.max_length is not None:
        reason += "; shared_prefix serves rows up to that length"
    return name, "yes", turns, _rope(model, found), _attention(model, architecture), reason


def _reason(model: PreTrainedModel, why: str) -> str:
    """A reason without the name of the class, whose row it stands in."""
    return why.removeprefix(type(model).__name__).removeprefix("'s").strip()


def _rope(model: PreTrainedModel, found: Capabilities) -> str:
    if found.rotary is None:
        return ""
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    specs = {spec: None for spec in found.rotary.values() if spec is not None}
    parts = [f"{len(specs)} tables"] if len(specs) > 1 else []
    parts += dict.fromkeys(_one_table(spec, head_dim) for spec in specs)
    kinds = _scalings(config)
    parts += [kind for kind in kinds if kind != "default"]
    without = [str(layer) for layer, spec in found.rotary.items() if spec is None]
    if without:
        parts.append(f"none in layers {', '.join(without)}")
    return ", ".join(parts)


def _one_table(spec: RotarySpec, head_dim: int) -> str:
    style = "interleaved" if spec.interleaved else "half-split"
    return style if spec.rotary_dim == head_dim else f"{style} {spec.rotary_dim} of {head_dim}"


def _scalings(config: object) -> list[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
    return sorted({str(p.get("rope_type", "default")) for p in nested})


def _attention(model: PreTrainedModel, architecture: Architecture) -> str:
    parts = []
    if architecture.sliding_window:
        kinds = set(getattr(model.config, "layer_types", None) or [])
        parts.append("window in some layers" if "full_attention" in kinds else "window")
    if getattr(model.config, "attn_logit_softcapping", None):
        parts.append("soft-capping")
    if any("sinks" in name for name, _ in model.named_parameters()):
        parts.append("sinks")
    return ", ".join(parts)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(make_page(), encoding="utf-8")
    README.write_text(make_readme(), encoding="utf-8")
    print(f"wrote {PAGE} and {README}")
