"""LogitsCache: what followed from token states that were visited before (Hive, section 6).

A trie over tokens in host memory. A state is a run of tokens from the prompt's first on; it holds the logits that the
model gave behind it. Hive keeps the one sequence that was decoded last; a trie keeps them all, so that a replay may
follow any continuation that was ever taken.
"""

from __future__ import annotations

import heapq
import json
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from hf_parallel.cache.cached_logits import CachedDistribution, CachedLogits
from hf_parallel.files import warn_of_version, whole_file

STATE_BYTES = 400
"""What a state costs beside its logits, in bytes: the object, and its place among its siblings."""

_FORMAT = "hf_parallel.LogitsCache/1"


@dataclass(eq=False)
class TrieNode:
    """A run of tokens: the one before it and one `token` more.

    `logits` are what followed, if known; `distribution` is what tokens are drawn from after them, and `uncertainty`
    what a replay policy makes of them. `taken_by` are the settings under which `token` was taken last, as those of a
    `CachedDistribution`. `used` is the time of the last visit, `pins` the rows that stand here.
    """

    token: int
    above: InitVar[TrieNode | None]
    children: dict[int, TrieNode] = field(default_factory=dict)
    logits: CachedLogits | None = None
    distribution: CachedDistribution | None = None
    uncertainty: float | None = None
    taken_by: str | None = None
    used: int = 0
    pins: int = 0
    alive: bool = True
    offered: bool = False

    def __post_init__(self, above: TrieNode | None) -> None:
        self._parent = None if above is None else weakref.ref(above)

    @property
    def parent(self) -> TrieNode | None:
        """The state that is one token shorter; it does not live for this one, so a cache that goes takes all along."""
        return None if self._parent is None else self._parent()

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes."""
        return STATE_BYTES + sum(kept.num_bytes for kept in (self.logits, self.distribution) if kept is not None)


class LogitsCache:
    """Logits by the tokens that they followed, for any number of models, within a budget of host memory.

    Parameters
    ----------
    max_bytes : int
        What all states may take together; the least recently used ones go first, ends of continuations before what
        leads to them.
    top_k : int, optional
        Keep only so many of the highest logits of a state, and the mass of the others. Exact for settings that need no
        more (greedy, a smaller `top_k`, a `top_p` that they cover); others are refused. Default: all of them.

    Attributes
    ----------
    hits, misses : int
        States that were asked for and had logits, or had none.

    Notes
    -----
    Safe to use from several threads. Source: Hive, section 6 and algorithm 1.
    """

    def __init__(self, max_bytes: int = 1 << 30, top_k: int | None = None) -> None:
        for name, value in (("max_bytes", max_bytes), ("top_k", top_k)):
            optional = value is None and name == "top_k"
            if not optional and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a positive int{' or None' * (name == 'top_k')}, got {value!r}")
        self.max_bytes, self.top_k = max_bytes, top_k
        self.hits = self.misses = 0
        self.num_bytes = 0
        self._roots: dict[str, TrieNode] = {}
        self._clock = 0
        self._leaves: list[tuple[int, int, TrieNode]] = []  # heap by use; entries may be out of date
        self._lock = threading.RLock()

    def __copy__(self) -> LogitsCache:
        """Itself: settings are copied by `generate`, and what they name is meant to be shared."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> LogitsCache:
        """Itself, as `__copy__`."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled, as threads may be using it.

        Raises
        ------
        TypeError
            That says what to do instead.
        """
        raise TypeError("a LogitsCache cannot be pickled: save(path) writes it, LogitsCache.load(path) reads it")

    def __len__(self) -> int:
        """States that have logits."""
        return sum(state.logits is not None for _, state in self._states())

    def __repr__(self) -> str:
        return f"LogitsCache({len(self)} states, {self.num_bytes} of {self.max_bytes} bytes)"

    # Walking

    @contextmanager
    def cursors(self) -> Iterator[Cursors]:
        """Open a set of cursors; the states that they stand on are not dropped until it is closed."""
        cursors = Cursors(self)
        try:
            yield cursors
        finally:
            cursors.close()

    def clear(self) -> None:
        """Forget all states; the counters stay. Calls that are running go on, and leave nothing here any more."""
        with self._lock:
            for _, state in list(self._states()):
                self._forget(state)
            self._roots, self._leaves, self.num_bytes = {}, [], 0

    def keep_last_path(self) -> None:
        """Forget all but the run of tokens that was visited last, of each model: what Hive's own cache holds.

        For who has little memory, and whose next samples follow the last one. Calls that are running go on, and leave
        nothing on states that were forgotten.
        """
        with self._lock:
            states = list(self._states())
            last: dict[str, TrieNode] = {}
            for key, state in states:
                if key not in last or state.used > last[key].used:
                    last[key] = state
            kept = set(last.values())
            for _, state in reversed(states):  # children before their parents
                state.children = {token: child for token, child in state.children.items() if child in kept}
                if state.children:
                    kept.add(state)
                elif state not in kept:
                    self.num_bytes -= state.num_bytes
                    self._forget(state)
            self._leaves = [entry for entry in self._leaves if entry[2].alive]
            heapq.heapify(self._leaves)
            for state in last.values():
                self._offer(state)

    def children(self, state: TrieNode) -> list[TrieNode]:
        """The states that are one token longer, as they are now."""
        with self._lock:
            return list(state.children.values())

    def taken_last(self, state: TrieNode) -> TrieNode | None:
        """The state that is one token longer and was visited last of those."""
        return max(self.children(state), key=lambda child: child.used, default=None)

    def _states(self) -> Iterator[tuple[str, TrieNode]]:
        """All states with the key of their model, parents first."""
        with self._lock:
            stack = [(key, root) for key, root in self._roots.items()]
            while stack:
                key, state = stack.pop()
                yield key, state
                stack.extend((key, child) for child in state.children.values())

    def _root(self, key: str) -> TrieNode:
        if key not in self._roots:
            self._roots[key] = TrieNode(-1, None)
        return self._roots[key]

    def _child(self, state: TrieNode, token: int) -> TrieNode:
        child = state.children.get(token)
        if child is None:
            child = state.children[token] = TrieNode(token, state, alive=state.alive)
            self.num_bytes += child.num_bytes if child.alive else 0
        return child

    @staticmethod
    def _forget(state: TrieNode) -> None:
        """Let go of what is kept at a state, whoever else still holds it; rows that stand there may go on."""
        state.alive = False
        if not state.pins:
            state.logits = state.distribution = None

    def _touch(self, state: TrieNode) -> None:
        self._clock += 1
        state.used = self._clock

    def _offer(self, state: TrieNode) -> None:
        """Note that a state may be dropped, if it is nobody's parent and nobody stands on it."""
        if state.alive and not (state.offered or state.children or state.pins) and state.parent is not None:
            state.offered = True
            heapq.heappush(self._leaves, (state.used, id(state), state))

    def _store(self, state: TrieNode, logits: torch.Tensor) -> bool:
        """Remember what follows a state, if there is or can be made room; returns whether it is known now."""
        if state.logits is not None:
            return True
        if not state.alive:
            return False
        remembered = CachedLogits.of(logits, self.top_k)
        self._make_room(remembered.num_bytes)
        if self.num_bytes + remembered.num_bytes > self.max_bytes:
            return False
        state.logits = remembered
        self.num_bytes += remembered.num_bytes
        return True

    def prepare(self, state: TrieNode, distribution: CachedDistribution) -> bool:
        """Keep a distribution beside a state's logits, instead of one that it had; returns False without room."""
        with self._lock:
            more = distribution.num_bytes - (0 if state.distribution is None else state.distribution.num_bytes)
            self._make_room(more)
            if not state.alive or state.logits is None or self.num_bytes + more > self.max_bytes:
                return False
            state.distribution = distribution
            self.num_bytes += more
            return True

    def _make_room(self, wanted: int) -> None:
        while self.num_bytes + wanted > self.max_bytes and self._leaves:
            used, _, state = heapq.heappop(self._leaves)
            state.offered = False
            if not state.alive or state.children or state.pins:
                continue  # offered again when that changes
            if state.used != used:
                self._offer(state)
                continue
            parent = state.parent
            assert parent is not None, "roots are never offered"
            self.num_bytes -= state.num_bytes
            self._forget(state)
            del parent.children[state.token]
            self._offer(parent)
            if parent.parent is None and not (parent.children or parent.pins):
                self._roots = {key: root for key, root in self._roots.items() if root is not parent}

    # Files

    def save(self, path: str | Path) -> None:
        """Write all states to a safetensors file, which appears whole or not at all."""
        with self._lock:
            tensors: dict[str, torch.Tensor] = {}
            keys = []
            for number, (key, root) in enumerate(self._roots.items()):
                tensors |= {f"{number}.{name}": tensor for name, tensor in _flatten(root).items()}
                keys.append(key)
            metadata = {"format": _FORMAT, "transformers": transformers.__version__}
            metadata |= {"keys": json.dumps(keys), "top_k": json.dumps(self.top_k)}
        with whole_file(Path(path)) as unfinished:
            save_file(tensors, unfinished, metadata)

    @classmethod
    def load(cls, path: str | Path, max_bytes: int = 1 << 30) -> LogitsCache:
        """Read what `save` wrote; if it is more than `max_bytes`, the states that were used least are left out.

        A file that was saved under another version of transformers, whose logits may differ in their last bits, gives a
        warning.

        Raises
        ------
        ValueError
            If the file is not one of a LogitsCache, or is damaged.
        IsADirectoryError
            If it is a folder.
        """
        if Path(path).is_dir():
            raise IsADirectoryError(f"{path} is a folder, where a file that `LogitsCache.save` wrote is needed")
        cache = cls(max_bytes)
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != _FORMAT:
                    raise ValueError(f"its format is {metadata.get('format')!r}")
                warn_of_version(path, metadata["transformers"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            cache.top_k = cls(max_bytes, json.loads(metadata["top_k"])).top_k
            for number, key in enumerate(json.loads(metadata["keys"])):
                arrays = {name.split(".")[1]: t for name, t in tensors.items() if name.startswith(f"{number}.")}
                _check(arrays)
                cache._graft(key, arrays)
            cache._make_room(0)
        except (SafetensorError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no LogitsCache that can be read: {error}") from error
        return cache

    def _graft(self, key: str, arrays: dict[str, torch.Tensor]) -> None:
        """Put the states of one model back, with the times at which they were used."""
        states = [self._root(key)]
        rows = zip(*(arrays[name].tolist() for name in ("tokens", "parents", "used", "places")), strict=True)
        for token, parent, used, place in rows:
            state = self._child(states[parent], token)
            states.append(state)
            state.used, self._clock = used, max(self._clock, used)
            if place >= 0:
                state.logits = _unflatten(arrays, place)
                self.num_bytes += state.logits.num_bytes
        for state in states[1:]:
            self._offer(state)


def _flatten(root: TrieNode) -> dict[str, torch.Tensor]:
    """The states below a root as arrays, parents first; `places` says which row of `values` is whose."""
    states: list[TrieNode] = [root]
    numbers: dict[int, int] = {id(root): 0}
    for state in states:
        for child in state.children.values():
            numbers[id(child)] = len(states)
            states.append(child)
    known = [state.logits for state in states[1:] if state.logits is not None]
    has = np.array([state.logits is not None for state in states[1:]], dtype=bool)
    arrays = {
        "tokens": torch.tensor([state.token for state in states[1:]], dtype=torch.int64),
        "parents": torch.tensor([numbers[id(state.parent)] for state in states[1:]], dtype=torch.int64),
        "used": torch.tensor([state.used for state in states[1:]], dtype=torch.int64),
        "places": torch.from_numpy(np.where(has, has.cumsum() - 1, -1)),
        "vocabulary": torch.tensor(known[0].vocabulary if known else 0),
        "rest": torch.tensor([logits.rest for logits in known], dtype=torch.float64),
    }
    if known:
        arrays["values"] = pad_sequence([logits.values for logits in known], True, -torch.inf)
        if known[0].ids is not None:
            arrays["ids"] = pad_sequence([logits.ids for logits in known if logits.ids is not None], True)
    return arrays


def _unflatten(arrays: dict[str, torch.Tensor], place: int) -> CachedLogits:
    """The logits at a row of `values`."""
    values, ids = arrays["values"][place].clone(), None
    if "ids" in arrays:
        kept = values > -torch.inf  # others fill the row
        values, ids = values[kept], arrays["ids"][place][kept]
    return CachedLogits(values, ids, int(arrays["vocabulary"]), float(arrays["rest"][place]))


def _check(arrays: dict[str, torch.Tensor]) -> None:
    """Raise a ValueError unless arrays are what `_flatten` makes."""
    parents, places, rest = arrays["parents"], arrays["places"], arrays["rest"]
    values = arrays["values"] if "values" in arrays else torch.empty(0, int(arrays["vocabulary"]))
    ids, vocabulary, count = arrays.get("ids"), int(arrays["vocabulary"]), len(arrays["tokens"])
    if any(arrays[name].shape != (count,) for name in ("parents", "used", "places")):
        raise ValueError("its arrays are of unequal length")
    if ((parents < 0) | (parents > torch.arange(count))).any():
        raise ValueError("a state comes before its parent")
    if len(set(zip(parents.tolist(), arrays["tokens"].tolist(), strict=True))) < count:
        raise ValueError("a state is there twice")
    if values.ndim != 2 or rest.shape != values.shape[:1] or ((places < -1) | (places >= len(values))).any():
        raise ValueError("states and logits do not match")
    if values.shape[1] != vocabulary if ids is None else ids.shape != values.shape:
        raise ValueError("logits and vocabulary do not match")
    if ids is not None and ((ids < 0) | (ids >= vocabulary)).any():
        raise ValueError("tokens are outside the vocabulary")


class Cursors:
    """Rows that walk through a `LogitsCache`, each standing on the state of the tokens that it has."""

    def __init__(self, cache: LogitsCache) -> None:
        self._cache = cache
        self._at: dict[Any, TrieNode] = {}

    def start(self, row: Any, key: str, tokens: Sequence[int]) -> None:
        """Put a row on the state of `tokens`, the prompt's; `key` names the model."""
        with self._cache._lock:
            state = self._cache._root(key)
            for token in tokens:
                state = self._cache._child(state, int(token))
            self._stand(row, state)

    def follow(self, row: Any, token: int) -> None:
        """Take a row on by one token."""
        with self._cache._lock:
            self._stand(row, self._cache._child(self._at[row], int(token)))

    def logits(self, row: Any) -> torch.Tensor | None:
        """What follows the row's tokens, `[vocabulary]`, if it is known. Counts as a hit or a miss."""
        remembered = self._at[row].logits if self.ask(row) else None
        return None if remembered is None else remembered.spread()

    def ask(self, row: Any, count: int = 0, rest: float = np.inf) -> bool:
        """Whether enough is known of what follows the row's tokens, see `CachedLogits.serves`. A hit or a miss."""
        with self._cache._lock:
            logits = self._at[row].logits
            known = logits is not None and logits.serves(count, rest)
            self._cache.hits += known
            self._cache.misses += not known
            return known

    def known(self, row: Any) -> bool:
        """Whether it is known what follows the row's tokens."""
        return self._at[row].logits is not None

    def remember(self, row: Any, logits: torch.Tensor) -> bool:
        """Keep what follows the row's tokens, `[vocabulary]`; returns False if there is no room."""
        with self._cache._lock:
            return self._cache._store(self._at[row], logits)

    def state(self, row: Any) -> TrieNode:
        """The state on which a row stands."""
        return self._at[row]

    def close(self) -> None:
        """Let go of all states."""
        with self._cache._lock:
            for row in list(self._at):
                self._leave(row)
            self._cache._make_room(0)

    def _stand(self, row: Any, state: TrieNode) -> None:
        state.pins += 1
        if row in self._at:
            self._leave(row)
        self._at[row] = state
        self._cache._touch(state)
        self._cache._make_room(0)

    def _leave(self, row: Any) -> None:
        state = self._at.pop(row)
        state.pins -= 1
        self._cache._offer(state)
