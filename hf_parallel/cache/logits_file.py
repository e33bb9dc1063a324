"""Arrays and metadata of a saved `LogitsCache`, and the checks of a file that is loaded."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from hf_parallel.cache.images import FIRST_ID
from hf_parallel.cache.logits_trie import CachedLogits, TrieNode
from hf_parallel.files import MAX_NUMBER


def to_arrays(root: TrieNode) -> dict[str, torch.Tensor]:
    """Convert the nodes below a root to arrays, parents first; `places` holds each node's index in `values`, or -1."""
    nodes = [root]
    for node in nodes:
        nodes.extend(node.children.values())
    numbers: dict[TrieNode | None, int] = {node: number for number, node in enumerate(nodes)}
    del nodes[0]
    known = [node.logits for node in nodes if node.logits is not None]
    has = np.array([node.logits is not None for node in nodes], dtype=bool)
    arrays = {
        "tokens": torch.tensor([node.token for node in nodes], dtype=torch.int64),
        "parents": torch.tensor([numbers[node.parent] for node in nodes], dtype=torch.int64),
        "used": torch.tensor([node.last_used for node in nodes], dtype=torch.int64),
        "places": torch.from_numpy(np.where(has, has.cumsum() - 1, -1)),
        "vocabulary": torch.tensor(known[0].vocabulary if known else 0),
        "rest": torch.tensor([logits.log_tail for logits in known], dtype=torch.float64),
    }
    if known:
        arrays["values"] = pad_sequence([logits.values for logits in known], True, -torch.inf)
        if known[0].ids is not None:
            arrays["ids"] = pad_sequence([logits.ids for logits in known if logits.ids is not None], True)
    return arrays


def logits_at(arrays: dict[str, torch.Tensor], index: int) -> CachedLogits:
    """Return the logits at an index of `values`."""
    values, ids = arrays["values"][index].clone(), None
    if "ids" in arrays:
        kept = values > -torch.inf  # the rest of the row is padding
        values, ids = values[kept], arrays["ids"][index][kept]
    return CachedLogits(values, ids, int(arrays["vocabulary"]), float(arrays["rest"][index]))


def digest_of(metadata: dict[str, str], tensors: dict[str, torch.Tensor]) -> str:
    """Return the digest of a file's content."""
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def read_metadata(content: bytes) -> dict[str, str]:
    """Return the metadata of a safetensors file: JSON after the length of the header, 8 bytes."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    return metadata if isinstance(metadata, dict) else {}


def read_keys(text: str) -> list[str]:
    """Return the keys of the models, from JSON."""
    keys = json.loads(text)
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys) or len(set(keys)) < len(keys):
        raise ValueError(f"its keys must be different strings, got {text:.80}")
    return keys


def check_arrays(arrays: dict[str, torch.Tensor], top_k: int | None) -> None:
    """Raise `ValueError` unless the arrays are consistent, so that a forged file fails here and not in a call."""
    count, vocabulary, ids = len(arrays["tokens"]), int(arrays["vocabulary"]), arrays.get("ids")
    parents, places, rest = arrays["parents"], arrays["places"], arrays["rest"]
    values = arrays["values"] if "values" in arrays else torch.empty(0, vocabulary)
    kept = vocabulary if top_k is None else min(top_k, vocabulary)
    types = dict.fromkeys(("tokens", "parents", "used", "places", "vocabulary"), torch.int64)
    types |= {} if ids is None else {"ids": torch.int32}
    _require("dtypes", *(arrays[name].dtype == type_ for name, type_ in types.items()))
    _require("dtypes", rest.is_floating_point(), values.is_floating_point())
    _require("lengths", *(arrays[name].shape == (count,) for name in ("parents", "used", "places")))
    # Keys of Hogwild! states are negative, see `RowGroup.advance`.
    known = (arrays["tokens"] < vocabulary) | (arrays["tokens"] >= FIRST_ID)
    _require("tokens", known.all(), (arrays["used"] >= 0).all())
    _require("times of use", (arrays["used"] <= MAX_NUMBER).all())
    _require("parents", (parents >= 0).all(), (parents <= torch.arange(count)).all())
    _require("nodes", len(set(zip(parents.tolist(), arrays["tokens"].tolist(), strict=True))) == count)
    _require("places", (places >= -1).all(), (places < len(values)).all())
    _require("shapes", values.ndim == 2, rest.shape == values.shape[:1], (ids is None) == (kept == vocabulary))
    _require("logits", not values.isnan().any(), not (values == torch.inf).any())
    has_any = (values > -torch.inf).any(1)  # only a tie of the highest of `top_k` logits keeps none
    if ids is None:
        _require("logits", values.shape[1] == vocabulary, has_any.all())
        return
    _require("shapes", ids.shape == values.shape, values.shape[1] <= kept)
    _require("logits", torch.where(has_any, rest < 0, rest == 0).all(), (ids >= 0).all(), (ids < vocabulary).all())
    different = ids.long().where(values > -torch.inf, -1 - torch.arange(ids.shape[1])).sort().values  # padding, too
    _require("logits", (different.diff() != 0).all())


def _require(name: str, *conditions: object) -> None:
    if not all(conditions):
        raise ValueError(f"its {name} are not those of a saved cache")
