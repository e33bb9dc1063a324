"""Whether the logits of a model have the same bits in every schedule, and otherwise which module breaks it.

Kernels of this package do not let a token's result depend on its neighbors. The rest of a model's code may: it is
found by computing the same tokens in two schedules, never by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from hf_parallel.cache import Block, Segment
from hf_parallel.cache.placement import cpu_as_default
from hf_parallel.cache.shared_prefix import SharedPrefixCache
from hf_parallel.generation.enabled import Claim, enabled
from hf_parallel.models.cpu.elementwise import fast_layers
from hf_parallel.models.decode.cached_model import CachedModel
from hf_parallel.models.intercept.modules import gradient_checkpointing_disabled

SHARED = 75  # tokens of the prefix: more than a tile of keys, and it ends inside one
OWN = 60  # tokens of each row after it
CHUNKS = (1, 40, 34)
ROWS = 3

_Traces = dict[str, list[tuple[torch.Tensor | None, torch.Tensor]]]
"""Input and output of each module, by name in the order in which they ended, of each pass: `[tokens, ...]`."""


def schedule_dependence(model: Any) -> str:
    """Return what in an enabled model makes a token's bits depend on the schedule; empty if nothing was found.

    Computes a few hundred random tokens twice: a row alone in one pass, and the same row with its prefix in chunks,
    which other rows read, too, in chunks and steps of other sizes.
    """
    limit = enabled(model).capabilities.num_positions
    if limit is not None and limit < SHARED + OWN:
        return f"its {limit} positions: {SHARED + OWN} are needed to compare schedules"
    size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    prefix, *suffixes = torch.randint(size, (SHARED + ROWS * OWN,), generator=generator).split([SHARED, *[OWN] * ROWS])
    alone, of_alone = _compute(model, [torch.cat((prefix, suffixes[0]))], _alone)
    shared, of_shared = _compute(model, [prefix, *suffixes], _shared)
    if torch.equal(alone, shared):
        return ""
    mixers = enabled(model).capabilities.mixers
    if mixers:
        return (
            f"the states of {mixers[0].name}, whose code computes a chunk of tokens in another order than single ones"
        )
    for name, passes in of_alone.items():
        before = _joined(passes, 1)
        after = _joined(of_shared.get(name, ()), 1)
        if before is None or after is None or before.shape != after.shape or torch.equal(before, after):
            continue
        inputs = _joined(passes, 0)
        shared_inputs = _joined(of_shared[name], 0)
        if inputs is not None and shared_inputs is not None and not torch.equal(inputs, shared_inputs):
            return f"what is computed between the modules before {name} and {name}"
        return f"{name} ({type(model.get_submodule(name)).__name__})"
    return "the logits"


_Passes = Iterator[tuple[list[Segment], list[tuple[int, int, int]]]]
"""Segments of a pass, and (text, first token, end) of each."""


def _alone(cache: SharedPrefixCache) -> _Passes:
    total = SHARED + OWN
    yield [Segment([cache.pool.new_block(total)], total)], [(0, 0, total)]


def _shared(cache: SharedPrefixCache) -> _Passes:
    trunk = cache.pool.new_block(SHARED)
    first = 0
    for count in CHUNKS:
        yield [Segment([trunk], count)], [(0, first, first + count)]
        first += count
    branches: Sequence[Block] = cache.pool.new_blocks(ROWS, OWN, base=SHARED)
    first = 0
    for count in (17, 1, 1, OWN - 19):
        segments = [Segment([trunk, branch], count) for branch in branches]
        yield segments, [(1 + row, first, first + count) for row in range(ROWS)]
        first += count


def _compute(
    model: Any, texts: Sequence[torch.Tensor], passes: Callable[[SharedPrefixCache], _Passes]
) -> tuple[torch.Tensor, _Traces]:
    """Return the logits of the first row's tokens, and its traces."""
    claim = Claim()
    cache = SharedPrefixCache()
    logits: list[torch.Tensor] = []
    traces: _Traces = {}
    try:
        with ExitStack() as stack:
            for context in (torch.no_grad(), cpu_as_default(), model.claimed(claim)):
                stack.enter_context(context)
            for context in (fast_layers(model), gradient_checkpointing_disabled(model)):
                stack.enter_context(context)
            cache.begin_call(model, claim, kept=False)
            cached_model = CachedModel(model, enabled(model).capabilities, cache, cuda_graph=False, compile=False)
            for segments, parts in passes(cache):
                forward = cache.prepare(segments)
                ids = torch.cat([texts[text][first:end] for text, first, end in parts]).to(cached_model.device)
                _, first, end = parts[0]  # of the row that both schedules have
                with _recorded(model, len(ids), end - first, traces):
                    logits.append(cached_model.logits(forward, ids, list(range(len(ids))))[: end - first])
                cache.commit()
    finally:
        claim.active = False
    return torch.cat(logits), traces


@contextmanager
def _recorded(model: nn.Module, num_tokens: int, count: int, traces: _Traces) -> Iterator[None]:
    """Record the first `count` tokens of the inputs and outputs of all modules in a pass of `num_tokens`."""
    handles = []

    def by_token(value: Any) -> torch.Tensor | None:
        if isinstance(value, tuple) and value:
            value = value[0]
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            return None
        if value.shape[:2] == (1, num_tokens):
            value = value[0]
        return value[:count].clone() if value.shape[0] == num_tokens else None

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            result = by_token(output)
            if result is not None:
                traces.setdefault(name, []).append((by_token(args), result))

        return hook

    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_hook(hook_of(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _joined(passes: Sequence[tuple[torch.Tensor | None, torch.Tensor]], which: int) -> torch.Tensor | None:
    """Return the inputs (0) or outputs (1) of all passes, one after the other; None if one has none."""
    parts = [trace[which] for trace in passes]
    shapes = {None if part is None else part.shape[1:] for part in parts}
    if len(shapes) != 1 or None in shapes:
        return None
    return torch.cat(parts)  # type: ignore[arg-type]
