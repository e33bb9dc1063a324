"""Nodes of the logits trie, with cached logits and sampling probabilities of the next token, and their saved arrays."""

from __future__ import annotations

import hashlib
import json
import weakref
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from hf_parallel.cache.logits_key import are_steps
from hf_parallel.files import MAX_NUMBER

NODE_BYTES = 400
"""Bytes of a node besides its logits: the object and its entry in the parent's dictionary."""

TENSOR_BYTES = 800
"""Bytes of a tensor besides its values: its Python and C++ objects, and their allocations."""


@dataclass(frozen=True, eq=False)
class CachedLogits:
    """Logits of one node, all of them or the highest.

    Kept logits are strictly higher than dropped ones, so a tie may leave fewer than `top_k`.
    """

    values: torch.Tensor  # [vocabulary] or [top_k], in the model's dtype
    ids: torch.Tensor | None  # int32 [top_k]: tokens of `values`; None if all logits are kept
    vocabulary: int
    log_tail: float  # log of the total probability of the dropped tokens at temperature 1; -inf if none was dropped

    @classmethod
    def from_logits(cls, logits: torch.Tensor, top_k: int | None) -> CachedLogits:
        """Copy logits `[vocabulary]` to the CPU, all of them or the `top_k` highest."""
        size = len(logits)
        if top_k is None or top_k >= size:
            return cls(logits.detach().to("cpu", copy=True), None, size, -np.inf)
        values, ids = logits.topk(top_k + 1)
        higher = values > values[-1]
        values = values[higher]
        ids = ids[higher]
        wide = logits.double()
        tail = wide.index_fill(0, ids, -torch.inf)
        log_tail = tail.logsumexp(0) - wide.logsumexp(0)
        return cls(values.cpu(), ids.to("cpu", torch.int32), size, float(log_tail))

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return _num_bytes(self.values) + (0 if self.ids is None else _num_bytes(self.ids))

    def covers(self, count: int, log_tail: float) -> bool:
        """Return whether all logits are kept, or at least `count` of them with a log tail of at most `log_tail`."""
        return self.ids is None or (len(self.ids) >= count and self.log_tail <= log_tail)

    @cached_property
    def log_total(self) -> float:
        """Log of the sum of the exponentials of all logits."""
        of_values = self.values.double().logsumexp(-1)
        log_share = np.log(-np.expm1(self.log_tail))  # of the values, among all logits
        return float(of_values - log_share)

    def log_prob(self, token: int) -> float:
        """Return the log-probability of a token; NaN if its logit was dropped."""
        if self.ids is None:
            logits = self.values[token : token + 1]
        else:
            logits = self.values[self.ids == token]
        if not len(logits):
            return np.nan
        return float(logits[0]) - self.log_total

    def to_dense(self) -> torch.Tensor:
        """Return logits `[vocabulary]`. Dropped tokens share their total probability equally.

        In float32 if any were dropped, as the model's dtype may be too coarse for the small probabilities.
        """
        if self.ids is None:
            return self.values
        if not len(self.ids):
            return torch.zeros(self.vocabulary)
        ids = self.ids.long()
        values = self.values.double()
        each = self.log_total + self.log_tail - np.log(self.vocabulary - len(ids))
        dense = torch.full((self.vocabulary,), each, dtype=torch.float64)
        dense[ids] = values
        return dense.float()


@dataclass(frozen=True, eq=False)
class CachedDistribution:
    """Sparse probabilities of the next token under certain sampling settings."""

    settings: str  # sampling settings that the probabilities were computed with
    ids: torch.Tensor  # int32 [n], ascending
    probs: torch.Tensor  # float32 [n]; all other tokens have probability 0

    @classmethod
    def from_probs(cls, probs: torch.Tensor, settings: str) -> CachedDistribution | None:
        """Convert probabilities `float32 [vocabulary]`, or return None if that saves less than 3/4 of the memory."""
        ids = probs.nonzero()[:, 0]
        if 2 * len(ids) > len(probs) // 4:
            return None
        return cls(settings, ids.to("cpu", torch.int32), probs[ids].cpu())

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        return _num_bytes(self.ids) + _num_bytes(self.probs)

    def fill(self, out: torch.Tensor) -> None:
        """Write the probabilities into `out`, zeros `[vocabulary]`."""
        ids = self.ids.to(out.device, torch.int64)
        out[ids] = self.probs.to(out.device)


@dataclass(eq=False)
class TrieNode:
    """The key of the parent, followed by `token`."""

    token: int  # or another step of a `LogitsKey`
    parent_ref: weakref.ref[TrieNode] | None  # weak: a trie without reference cycles is freed at once
    children: dict[int, TrieNode] = field(default_factory=dict)
    logits: CachedLogits | None = None  # of the next token
    distribution: CachedDistribution | None = None  # of the next token, under the latest sampling settings
    uncertainty: float | None = None  # score of a replay policy
    last_used: int = 0
    pins: int = 0  # number of cursors; a pinned node is not evicted
    alive: bool = True  # False once evicted or cleared
    queued: bool = False  # whether in the eviction queue

    @property
    def parent(self) -> TrieNode | None:
        """The node of the sequence without its last token; None for a root."""
        return None if self.parent_ref is None else self.parent_ref()

    @property
    def num_bytes(self) -> int:
        """Memory in bytes."""
        num_bytes = NODE_BYTES
        if self.logits is not None:
            num_bytes += self.logits.num_bytes
        if self.distribution is not None:
            num_bytes += self.distribution.num_bytes
        return num_bytes

    def delete(self) -> None:
        """Free the tensors, even if the node is referenced elsewhere; a pinned node keeps them."""
        self.alive = False
        if not self.pins:
            self.logits = None
            self.distribution = None


def _num_bytes(tensor: torch.Tensor) -> int:
    return TENSOR_BYTES + tensor.nbytes


def to_arrays(root: TrieNode) -> dict[str, torch.Tensor]:
    """Convert the nodes below a root to arrays, parents first; `places` holds each node's index in `values`, or -1."""
    nodes = [root]
    for node in nodes:
        nodes.extend(node.children.values())
    numbers: dict[TrieNode | None, int] = {node: number for number, node in enumerate(nodes)}
    del nodes[0]
    cached: list[CachedLogits] = []
    places = []
    for node in nodes:
        places.append(-1 if node.logits is None else len(cached))
        if node.logits is not None:
            cached.append(node.logits)
    arrays = {
        "tokens": torch.tensor([node.token for node in nodes], dtype=torch.int64),
        "parents": torch.tensor([numbers[node.parent] for node in nodes], dtype=torch.int64),
        "used": torch.tensor([node.last_used for node in nodes], dtype=torch.int64),
        "places": torch.tensor(places, dtype=torch.int64),
        "vocabulary": torch.tensor(cached[0].vocabulary if cached else 0),
        "rest": torch.tensor([logits.log_tail for logits in cached], dtype=torch.float64),
    }
    if cached:
        arrays["values"] = pad_sequence([logits.values for logits in cached], True, -torch.inf)
        if cached[0].ids is not None:
            ids = [logits.ids for logits in cached if logits.ids is not None]
            arrays["ids"] = pad_sequence(ids, True)
    return arrays


def logits_at(arrays: dict[str, torch.Tensor], index: int) -> CachedLogits:
    """Return the logits at an index of `values`."""
    values = arrays["values"][index].clone()
    ids = None
    if "ids" in arrays:
        is_logit = values > -torch.inf  # the rest of the row is padding
        values = values[is_logit]
        ids = arrays["ids"][index][is_logit]
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
    is_texts = isinstance(keys, list) and all(isinstance(key, str) for key in keys)
    if not is_texts or len(set(keys)) < len(keys):
        raise ValueError(f"its keys must be different strings, got {text:.80}")
    return keys


def check_arrays(arrays: dict[str, torch.Tensor], top_k: int | None) -> None:
    """Raise `ValueError` unless the arrays are consistent, so that a forged file fails here and not in a call."""
    count = len(arrays["tokens"])
    vocabulary = int(arrays["vocabulary"])
    tokens = arrays["tokens"]
    parents = arrays["parents"]
    used = arrays["used"]
    places = arrays["places"]
    log_tails = arrays["rest"]
    ids = arrays.get("ids")
    values = arrays["values"] if "values" in arrays else torch.empty(0, vocabulary)
    most = vocabulary if top_k is None else min(top_k, vocabulary)  # logits of a node
    for name in ("tokens", "parents", "used", "places", "vocabulary"):
        _require("dtypes", arrays[name].dtype == torch.int64)
    if ids is not None:
        _require("dtypes", ids.dtype == torch.int32)
    _require("dtypes", log_tails.is_floating_point(), values.is_floating_point())
    _require("lengths", parents.shape == (count,), used.shape == (count,), places.shape == (count,))
    _require("tokens", are_steps(tokens, vocabulary).all(), (used >= 0).all())
    _require("times of use", (used <= MAX_NUMBER).all())
    _require("parents", (parents >= 0).all(), (parents <= torch.arange(count)).all())
    edges = set(zip(parents.tolist(), tokens.tolist(), strict=True))
    _require("nodes", len(edges) == count)
    _require("places", (places >= -1).all(), (places < len(values)).all())
    _require("shapes", values.ndim == 2, log_tails.shape == values.shape[:1])
    _require("shapes", (ids is None) == (most == vocabulary))
    _require("logits", not values.isnan().any(), not (values == torch.inf).any())
    has_any = (values > -torch.inf).any(1)  # only a tie of the highest of `top_k` logits keeps none
    if ids is None:
        _require("logits", values.shape[1] == vocabulary, has_any.all())
        return
    _require("shapes", ids.shape == values.shape, values.shape[1] <= most)
    is_tail = torch.where(has_any, log_tails < 0, log_tails == 0)
    _require("logits", is_tail.all(), (ids >= 0).all(), (ids < vocabulary).all())
    padding_ids = -1 - torch.arange(ids.shape[1])  # also different from each other
    different = ids.long().where(values > -torch.inf, padding_ids).sort().values
    _require("logits", (different.diff() != 0).all())


def _require(name: str, *conditions: object) -> None:
    if not all(conditions):
        raise ValueError(f"its {name} are not those of a saved cache")
