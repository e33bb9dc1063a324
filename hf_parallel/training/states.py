"""Layers with a state over trees of rows: every branch starts from the state at the end of its trunk.

Such a layer (`models/intercept/mixers.py`) reads a row token by token, whatever the attention mask says. Here it
computes the rows of a packed example level by level: the trunks first, then all branches of a level as a batch, from
the states of their trunks, which are tensors with gradients. Everything else of the model stays on packed tokens.

A layer that cannot continue from a state in one call, or not with gradients, computes whole rows, which is exact too.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from transformers import PreTrainedModel

from hf_parallel.generation.enabled import enabled
from hf_parallel.generation.mixin import is_enabled, unwrap
from hf_parallel.models.intercept.attention import UnsupportedModelError
from hf_parallel.models.intercept.mixers import Mixer, MixerStates, mixers_wrapped
from hf_parallel.models.intercept.modules import gradient_checkpointing_disabled
from hf_parallel.models.probing.mixers import supported_mixers
from hf_parallel.training.example import ParallelExample

SHORTEST = 8
"""A shorter trunk is computed again in each of its branches, as a call costs more than its tokens."""
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}
"""Relative difference to whole rows up to which a layer continues from a state; 0.1 in half precision."""
_CHECKPOINTING = ("_gradient_checkpointing_func", "checkpoint_fn")
WHOLE_ROWS = float("inf")
PADDING = -2
_mixers: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Mixer, ...]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class _Behavior:
    """What calls of a layer over `PROBE` have shown."""

    continues: bool
    """Whether it computes some of its tokens from states as it computes them in whole rows."""
    is_per_token: tuple[bool, ...]
    """By output, whether it has a value for each token. Others are states, which have no place among packed tokens."""


_behaviors: weakref.WeakKeyDictionary[nn.Module, dict[torch.dtype, _Behavior]] = weakref.WeakKeyDictionary()


def mixers_of(model: PreTrainedModel) -> tuple[Mixer, ...]:
    """Return `supported_mixers` of a model, which are found once."""
    if model not in _mixers:
        with gradient_checkpointing_disabled(model):
            _mixers[model] = supported_mixers(model)
    return _mixers[model]


@contextmanager
def states_branched(model: PreTrainedModel, examples: Sequence[ParallelExample]) -> Iterator[None]:
    """Compute layers with a state over a padded batch of examples.

    Raises `UnsupportedModelError` if rows are mixed, or the model was enabled with its own attention.
    """
    model = unwrap(model)
    if is_enabled(model):
        capabilities = enabled(model).capabilities
        if capabilities.dense:
            reason = capabilities.why_no_rotation
            raise UnsupportedModelError(f"packed rows cannot be trained over this model: {reason}")
    mixers = mixers_of(model) if examples else ()
    if not mixers:
        yield
        return
    try:
        rows = RowTree.of(examples)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers with a state ({mixers[0].name}), which read each row as one sequence "
            f"of tokens, but {error}"
        ) from None

    def call(mixer: Mixer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return MixerPass(mixer, module, args, kwargs).over(rows)

    @contextmanager
    def along_the_tree() -> Iterator[None]:
        with (
            mixers_wrapped(model, mixers, call),
            torch.compiler.set_stance("force_eager"),
        ):  # compiled code has no calls
            yield

    with along_the_tree(), checkpoints_wrapped(model, along_the_tree):
        yield


@contextmanager
def checkpoints_wrapped(model: nn.Module, context: Callable[[], Any]) -> Iterator[None]:
    """Run what gradient checkpointing computes again in the same context as the first time."""

    def wrapped(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
        def run(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            def in_context(*inputs: Any, **named_inputs: Any) -> Any:
                with context():
                    return function(*inputs, **named_inputs)

            return checkpoint(in_context, *args, **kwargs)

        return run

    checkpoints = []
    for module in model.modules():
        attributes = vars(module)
        for name in _CHECKPOINTING:
            if name in attributes:
                checkpoints.append((attributes, name, attributes[name]))
    try:
        for attributes, name, checkpoint in checkpoints:
            attributes[name] = wrapped(checkpoint)
        yield
    finally:
        for attributes, name, checkpoint in checkpoints:
            attributes[name] = checkpoint


@dataclass(frozen=True, eq=False)
class _SequenceBatch:
    """Sequences that a layer computes as one batch."""

    tokens: torch.Tensor  # int64 [N, L], indices of tokens of the flat batch, padded on the right
    parents: torch.Tensor | None  # int64 [N], the states of the level before that they continue from
    is_continued: bool


@dataclass(frozen=True, eq=False)
class _TreeSchedule:
    """Calls by level of the tree, and where their results go."""

    levels: list[list[_SequenceBatch]]
    source: torch.Tensor  # int64 [tokens], place of each token of the batch in the results of all calls


class RowTree:
    """Tokens of a flat batch as rows that share their beginnings: `previous` is the token before each; -1: none."""

    def __init__(self, previous: np.ndarray) -> None:
        self.previous = previous
        self._schedules: dict[tuple[float, torch.device], _TreeSchedule] = {}

    @classmethod
    def of(cls, examples: Sequence[ParallelExample]) -> RowTree:
        """Return the rows of a padded batch. Raises `ValueError`, see `previous_tokens`."""
        length = max(map(len, examples))
        previous = np.full((len(examples), length), PADDING)
        for row, example in enumerate(examples):
            in_example = previous_tokens(example)
            in_batch = in_example + row * length
            previous[row, : len(example)] = np.where(in_example < 0, -1, in_batch)
        return cls(previous.ravel())

    @cached_property
    def _nodes(self) -> list[tuple[list[int], int]]:
        """Maximal sequences that no row leaves, each with the one before it."""
        children = np.bincount(self.previous[self.previous >= 0], minlength=len(self.previous)).tolist()
        nodes: list[tuple[list[int], int]] = []
        node_of: list[int] = []
        for token, previous in enumerate(self.previous.tolist()):
            if previous == PADDING:
                node_of.append(PADDING)
            elif previous >= 0 and children[previous] == 1:
                node = node_of[previous]
                tokens, _ = nodes[node]
                tokens.append(token)
                node_of.append(node)
            else:
                parent = node_of[previous] if previous >= 0 else -1
                node_of.append(len(nodes))
                nodes.append(([token], parent))
        return nodes

    def schedule(self, shortest: float, device: torch.device) -> _TreeSchedule:
        """Return the calls if trunks shorter than `shortest` are computed again in each branch."""
        key = (shortest, device)
        if key not in self._schedules:
            self._schedules[key] = self._make_schedule(shortest, device)
        return self._schedules[key]

    def _make_schedule(self, shortest: float, device: torch.device) -> _TreeSchedule:
        trunks = {parent for _, parent in self._nodes}
        ends: list[tuple[list[int], int, int]] = []  # of nodes: tokens to compute again, trunk to continue, level
        batches: dict[tuple[int, bool, int], list[tuple[int, list[int], int]]] = {}
        for node, (of_node, parent) in enumerate(self._nodes):
            again: list[int] = []
            trunk = -1
            level = 0
            if parent >= 0:
                again, trunk, level = ends[parent]
            tokens = again + of_node
            is_last = node not in trunks
            if not is_last and len(tokens) < shortest:
                ends.append((tokens, trunk, level))
                continue
            ends.append(([], node, level + 1))
            size = len(tokens).bit_length() if is_last else len(tokens)  # padding never enters a state
            batches.setdefault((level, is_last, size), []).append((node, tokens, trunk))
        levels: list[list[_SequenceBatch]] = []
        source = np.zeros(len(self.previous), np.int64)
        begin = 0  # of the next sequence in the joined results
        number: dict[int, int] = {}  # of trunks, among those of their level
        for (level, is_last, _), members in sorted(batches.items()):
            if len(levels) == level:
                levels.append([])
                count = 0
            # For one token and a state, many layers take a path without gradients.
            length = 2 if level else 1
            for _, tokens, _ in members:
                length = max(length, len(tokens))
            table = []
            for _, tokens, _ in members:
                padding = tokens[-1:] * (length - len(tokens))
                table.append(tokens + padding)
            parents = None
            if level:
                parents = torch.tensor([number[trunk] for _, _, trunk in members], device=device)
            rows = torch.tensor(table, device=device)
            levels[level].append(_SequenceBatch(rows, parents, not is_last))
            for node, tokens, _ in members:
                source[tokens] = begin + np.arange(len(tokens))
                begin += length
                if not is_last:
                    number[node] = count
                    count += 1
        return _TreeSchedule(levels, torch.from_numpy(source).to(device))


PROBE = RowTree(np.array([-1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 7, 12, 4]))
"""A trunk of five tokens and one of three, with branches of four, two and one."""


def previous_tokens(example: ParallelExample) -> np.ndarray:
    """Return the previous token of each token in its row, or -1. Raises `ValueError` if tokens form no such rows."""
    contents = np.split(example.block_tokens, np.cumsum(example.block_lengths)[:-1])
    views = _past_views(example)
    previous = np.arange(-1, len(example) - 1)
    firsts = np.cumsum(example.segment_lengths) - example.segment_lengths
    for first, view in zip(firsts.tolist(), views, strict=True):
        previous[first] = -1
        if view:
            block, stop = view[-1]
            previous[first] = contents[block][stop - 1]
    followed = []  # tokens at the beginning of each block that follow each other
    for content in contents:
        breaks = np.flatnonzero(previous[content[1:]] != content[:-1])
        followed.append(1 + int(breaks[0]) if len(breaks) else len(content))
    for view in views:
        last = -1
        for block, stop in view:
            if previous[contents[block][0]] != last or stop > followed[block]:
                raise ValueError("this example has tokens that move, or that see tokens of other workers or branches")
            last = int(contents[block][stop - 1])
    if (previous >= np.arange(len(previous))).any():
        raise ValueError("this example has tokens that were computed before the tokens that they follow")
    return previous


def _past_views(example: ParallelExample) -> list[list[tuple[int, int]]]:
    """Return for each segment the blocks before its first token, in order, and how many of their tokens it sees."""
    blocks = example.view_blocks.tolist()
    starts = example.view_starts.tolist()
    stops = example.view_stops.tolist()
    views = []
    begin = 0
    for length, position in zip(example.view_lengths.tolist(), example.segment_positions.tolist(), strict=True):
        seen = []
        for index in range(begin, begin + length):
            start = starts[index]
            seen.append((start, blocks[index], min(stops[index], position - start)))
        begin += length
        views.append([(block, stop) for _, block, stop in sorted(seen) if stop > 0])
    return views


class MixerPass:
    """One call of a layer over a padded batch of packed tokens."""

    def __init__(self, mixer: Mixer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._mixer = mixer
        self._module = module
        names = list(inspect.signature(module.forward).parameters)
        named = dict(zip(names, args, strict=False)) | kwargs
        hidden_states = named.pop(names[0])
        arguments = {names[0]: hidden_states}  # the hidden states first
        for name, value in named.items():
            if name != mixer.argument:
                # A mask is one of padding, which rows do not have.
                arguments[name] = None if name.endswith("mask") else value
        self._shape = hidden_states.shape[:2]  # rows of the batch, tokens
        leaves, self._spec = tree_flatten(arguments)
        self._leaves = [_Flat.of(leaf, self._shape) for leaf in leaves]

    def over(self, rows: RowTree) -> Any:
        """Return the result for the rows of the batch, as the layer would compute each of them."""
        behaviors = _behaviors.setdefault(self._module, {})
        dtype = self._leaves[0].value.dtype
        if dtype not in behaviors:
            if torch.is_inference_mode_enabled():
                raise RuntimeError("layers that keep a state need torch.no_grad() here, not torch.inference_mode()")
            hidden = saved_tensors_hooks(lambda x: x, lambda x: x)  # from gradient checkpointing
            with torch.enable_grad(), hidden:
                behaviors[dtype] = self._probe()
        behavior = behaviors[dtype]
        shortest = SHORTEST if behavior.continues else WHOLE_ROWS
        results = self.compute(rows, shortest, is_per_token=behavior.is_per_token)
        return tree_map(lambda x: x if x is None else x.view(*self._shape, *x.shape[1:]), results)

    def _probe(self) -> _Behavior:
        """Compute `PROBE` in whole rows and from states. Its calls have several lengths, so that outputs are told."""
        device = self._leaves[0].value.device
        index = torch.arange(len(PROBE.previous), device=device) % self._shape.numel()
        hidden, *leaves = [_Flat(leaf[index], leaf.is_per_token) for leaf in self._leaves]
        hidden = _Flat(hidden.value.detach().requires_grad_(), True)
        whole = self.compute(PROBE, WHOLE_ROWS, [hidden, *leaves])
        is_per_token = tuple(output is not None for output in tree_leaves(whole))
        expected = _with_gradient(whole, hidden.value)
        try:
            continued = self.compute(PROBE, 2, [hidden, *leaves], is_per_token)
            results = _with_gradient(continued, hidden.value)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            return _Behavior(continues=False, is_per_token=is_per_token)
        is_close = all(map(_is_close, results, expected))
        return _Behavior(continues=is_close, is_per_token=is_per_token)

    def compute(
        self,
        rows: RowTree,
        shortest: float,
        leaves: Sequence[_Flat] | None = None,
        is_per_token: Sequence[bool] | None = None,
    ) -> Any:
        """Return the results of all tokens, `[tokens, ...]`, and None for other outputs.

        `shortest` as in `RowTree.schedule`; `is_per_token` as in `_Behavior`, by default what the shapes of all calls
        say.
        """
        leaves = self._leaves if leaves is None else leaves
        schedule = rows.schedule(shortest, leaves[0].value.device)
        outputs: list[list[Any]] = []  # of each call
        shapes: list[torch.Size] = []  # of the tokens of each call
        states: list[MixerStates] = []  # of the continued calls of a level
        for level in schedule.levels:
            previous = states
            states = []
            for call in level:
                state = MixerStates(in_place=False)
                if call.parents is not None:
                    conv = _take([of_call.conv for of_call in previous], call.parents)
                    recurrent = _take([of_call.recurrent for of_call in previous], call.parents)
                    state = MixerStates(conv, recurrent, in_place=False)
                arguments = tree_unflatten([leaf[call.tokens] for leaf in leaves], self._spec)
                arguments[self._mixer.argument] = None if shortest == WHOLE_ROWS else state
                output, spec = tree_flatten(self._module._call_impl(**arguments))
                outputs.append(output)
                shapes.append(call.tokens.shape)
                if call.is_continued:
                    states.append(state)
        columns = list(zip(*outputs, strict=True))
        if is_per_token is None:
            is_per_token = [_are_per_token(column, shapes) for column in columns]
        joined: list[torch.Tensor | None] = []
        for column, is_joined in zip(columns, is_per_token, strict=True):
            if is_joined:
                outputs_in_order = torch.cat([output.flatten(0, 1) for output in column])
                joined.append(outputs_in_order[schedule.source])
            else:
                joined.append(None)
        return tree_unflatten(joined, spec)


@dataclass(frozen=True, eq=False)
class _Flat:
    """An argument of a layer: `[tokens, ...]` if it has a value for each token of the batch."""

    value: Any
    is_per_token: bool

    @classmethod
    def of(cls, value: Any, shape: torch.Size) -> _Flat:
        """Return an argument `[rows, tokens, ...]`, or `[1, tokens, ...]`, without the dimension of rows."""
        is_per_token = isinstance(value, torch.Tensor) and value.shape[:2] in (shape, (1, shape[1]))
        if not is_per_token:
            return cls(value, False)
        expanded = value.expand(*shape, *value.shape[2:])
        return cls(expanded.flatten(0, 1), True)

    def __getitem__(self, tokens: Any) -> Any:
        return self.value[tokens] if self.is_per_token else self.value


def _is_close(result: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = TOLERANCE.get(expected.dtype, 0.1)
    return bool((result - expected).norm() <= tolerance * expected.norm())


def _take(states: Sequence[dict[int, torch.Tensor]], rows: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return rows of the states of several calls."""
    taken = {}
    for index in states[0]:
        joined = torch.cat([state[index] for state in states])
        taken[index] = joined.index_select(0, rows)
    return taken


def _are_per_token(outputs: Sequence[Any], shapes: Sequence[torch.Size]) -> bool:
    """Return whether an output of several calls, each with a shape of its tokens, has a value for each token."""
    pairs = zip(outputs, shapes, strict=True)
    return all(isinstance(output, torch.Tensor) and output.shape[:2] == shape for output, shape in pairs)


def _with_gradient(results: Any, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Return results of all tokens, and the gradient of a function of them."""
    outputs = [x for x in tree_leaves(results) if x is not None]
    sums = [output.float().square().sum() for output in outputs]
    return [*outputs, *torch.autograd.grad(sums, [hidden])]
