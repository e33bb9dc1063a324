"""`LogitsCache`: the logits trie as users create, save and load it (Hive, section 6 and algorithm 1)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from hf_parallel.cache.cached_logits import CachedLogits
from hf_parallel.cache.logits_trie import LogitsTrie, TrieNode
from hf_parallel.files import atomic_file, warn_on_other_version

_FORMAT = "hf_parallel.LogitsCache/1"


class LogitsCache(LogitsTrie):
    """Logits by the token sequences that they follow, for any number of models, within a budget of host memory.

    Parameters
    ----------
    max_bytes : int
        Budget of all nodes together. The least recently used leaf is evicted first.
    top_k : int, optional
        Keep only this many of the highest logits per node, and the total probability of the others. Sampling is exact
        for settings that need no more (greedy, a smaller `top_k`, a `top_p` that they cover); other settings raise
        `ValueError`. Default: all logits.

    Attributes
    ----------
    hits, misses : int
        Number of lookups that found sufficient logits, and of those that did not.
    num_bytes : int
        Memory of all nodes.

    Notes
    -----
    Thread-safe. Source: Hive, section 6 and algorithm 1.
    """

    def __init__(self, max_bytes: int = 1 << 30, top_k: int | None = None) -> None:
        for name, value in (("max_bytes", max_bytes), ("top_k", top_k)):
            optional = value is None and name == "top_k"
            if not optional and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a positive int{' or None' * (name == 'top_k')}, got {value!r}")
        super().__init__(max_bytes, top_k)

    def __copy__(self) -> LogitsCache:
        return self  # `generate` copies settings; copies share the cache

    def __deepcopy__(self, memo: dict[int, Any]) -> LogitsCache:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a LogitsCache cannot be pickled: save(path) writes it, LogitsCache.load(path) reads it")

    def __repr__(self) -> str:
        return f"LogitsCache({len(self)} nodes, {self.num_bytes} of {self.max_bytes} bytes)"

    def save(self, path: str | Path) -> None:
        """Write all nodes to a safetensors file, atomically."""
        with self._lock:
            roots = enumerate(self._roots.values())
            tensors = {f"{i}.{name}": tensor for i, root in roots for name, tensor in _to_arrays(root).items()}
            metadata = {"format": _FORMAT, "transformers": transformers.__version__}
            metadata |= {"keys": json.dumps(list(self._roots)), "top_k": json.dumps(self.top_k)}
        with atomic_file(Path(path)) as temporary:
            save_file(tensors, temporary, metadata)

    @classmethod
    def load(cls, path: str | Path, max_bytes: int = 1 << 30) -> LogitsCache:
        """Read a file written by `save`. Nodes beyond `max_bytes` are evicted, the least recently used first.

        Logs a warning if the file was saved under another version of transformers.

        Raises
        ------
        ValueError
            If the file is not that of a LogitsCache, or is damaged.
        IsADirectoryError
            If `path` is a folder.
        """
        if Path(path).is_dir():
            raise IsADirectoryError(f"{path} is a folder, where a file that `LogitsCache.save` wrote is needed")
        cache = cls(max_bytes)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise ValueError(f"its format is {metadata.get('format')!r}")
                warn_on_other_version(path, metadata["transformers"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            cache.top_k = cls(max_bytes, json.loads(metadata["top_k"])).top_k
            for number, key in enumerate(json.loads(metadata["keys"])):
                arrays = {name.split(".")[1]: t for name, t in tensors.items() if name.startswith(f"{number}.")}
                _check(arrays)
                cache._restore(key, arrays)
            cache._evict(0)
        except (SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a readable LogitsCache: {error}") from error
        return cache

    def _restore(self, key: str, arrays: dict[str, torch.Tensor]) -> None:
        """Restore the nodes of one model with their times of last use."""
        nodes = [self._root(key)]
        rows = zip(*(arrays[name].tolist() for name in ("tokens", "parents", "used", "places")), strict=True)
        for token, parent, used, index in rows:
            node = self._child(nodes[parent], token)
            nodes.append(node)
            node.last_used, self._clock = used, max(self._clock, used)
            if index >= 0:
                node.logits = _logits_at(arrays, index)
                self.num_bytes += node.logits.num_bytes
        for node in nodes[1:]:
            self._enqueue(node)


def _to_arrays(root: TrieNode) -> dict[str, torch.Tensor]:
    """Convert the nodes below a root to arrays, parents first; `places` holds each node's index in `values`, or -1."""
    nodes: list[TrieNode] = [root]
    numbers: dict[int, int] = {id(root): 0}
    for node in nodes:
        for child in node.children.values():
            numbers[id(child)] = len(nodes)
            nodes.append(child)
    known = [node.logits for node in nodes[1:] if node.logits is not None]
    has = np.array([node.logits is not None for node in nodes[1:]], dtype=bool)
    arrays = {
        "tokens": torch.tensor([node.token for node in nodes[1:]], dtype=torch.int64),
        "parents": torch.tensor([numbers[id(node.parent)] for node in nodes[1:]], dtype=torch.int64),
        "used": torch.tensor([node.last_used for node in nodes[1:]], dtype=torch.int64),
        "places": torch.from_numpy(np.where(has, has.cumsum() - 1, -1)),
        "vocabulary": torch.tensor(known[0].vocabulary if known else 0),
        "rest": torch.tensor([logits.log_tail for logits in known], dtype=torch.float64),
    }
    if known:
        arrays["values"] = pad_sequence([logits.values for logits in known], True, -torch.inf)
        if known[0].ids is not None:
            arrays["ids"] = pad_sequence([logits.ids for logits in known if logits.ids is not None], True)
    return arrays


def _logits_at(arrays: dict[str, torch.Tensor], index: int) -> CachedLogits:
    """Return the logits at one row of `values`."""
    values, ids = arrays["values"][index].clone(), None
    if "ids" in arrays:
        kept = values > -torch.inf  # the rest of the row is padding
        values, ids = values[kept], arrays["ids"][index][kept]
    return CachedLogits(values, ids, int(arrays["vocabulary"]), float(arrays["rest"][index]))


def _check(arrays: dict[str, torch.Tensor]) -> None:
    """Raise `ValueError` unless the arrays are consistent."""
    parents, places, rest = arrays["parents"], arrays["places"], arrays["rest"]
    values = arrays["values"] if "values" in arrays else torch.empty(0, int(arrays["vocabulary"]))
    ids, vocabulary, count = arrays.get("ids"), int(arrays["vocabulary"]), len(arrays["tokens"])
    if any(arrays[name].shape != (count,) for name in ("parents", "used", "places")):
        raise ValueError("its arrays are of unequal length")
    if ((parents < 0) | (parents > torch.arange(count))).any():
        raise ValueError("a node comes before its parent")
    if len(set(zip(parents.tolist(), arrays["tokens"].tolist(), strict=True))) < count:
        raise ValueError("a node occurs twice")
    if values.ndim != 2 or rest.shape != values.shape[:1] or ((places < -1) | (places >= len(values))).any():
        raise ValueError("nodes and logits do not match")
    if values.shape[1] != vocabulary if ids is None else ids.shape != values.shape:
        raise ValueError("logits and vocabulary do not match")
    if ids is not None and ((ids < 0) | (ids >= vocabulary)).any():
        raise ValueError("tokens are outside the vocabulary")
