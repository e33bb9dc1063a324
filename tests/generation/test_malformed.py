"""Malformed calls raise typed, readable errors or work, and leave the model unchanged.

The calls are data: arguments of `generate` in `malformed_cases.py`, modes and settings in `malformed_settings.py`,
caches, callbacks and models in `malformed_objects.py`. Interrupts of a running call are tested here.
"""

from __future__ import annotations

import copy
import gc
import inspect
import logging
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import malformed_cases
import malformed_objects
import malformed_settings
import pytest
import torch
import transformers
from malformed_cases import BATCH, DEFAULTS, MASK, ONE, PROMPTS, TOKENIZER, Case
from malformed_objects import OwnError
from tiny import build, left_pad, make_prompts
from torch import nn

import hf_parallel
from hf_parallel import HogwildConfig, SharedPrefixCache, SharedPrefixConfig

CASES = [*malformed_cases.CASES, *malformed_settings.CASES, *malformed_objects.CASES]
READABLE = (ValueError, TypeError, ImportError)
"""Errors that malformed calls may raise; `RuntimeError` only if the call itself is valid."""
PACKAGES = [str(Path(module.__file__).parent) for module in (hf_parallel, transformers)]
GREEDY = {"input_ids": BATCH, "attention_mask": MASK, "max_new_tokens": 4, "do_sample": False}
AFTERWARDS = {**GREEDY, "max_new_tokens": 2, "generation_mode": "shared_prefix"}
"""The call after each case: one pass over the prompts, one over keys and values."""

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:transformers.*"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


@dataclass
class Bench:
    """An enabled model, a plain one with the same weights, and their initial state."""

    model: Any
    plain: Any
    before: dict[str, Any]
    tokens: torch.Tensor
    logits: torch.Tensor


def logits(model: Any) -> torch.Tensor:
    """Return the logits of a plain forward pass."""
    with torch.no_grad():
        return model(BATCH, attention_mask=MASK).logits


def describe(model: Any) -> dict[str, Any]:
    """Return the state that no call may change."""
    return {
        "class": type(model),
        "attributes": sorted(vars(model)),
        "attention": model.config._attn_implementation,
        "generation_config": model.generation_config.to_dict(),
        "training": [module.training for module in model.modules()],
        "hooks": [len(module._forward_pre_hooks) for module in model.modules()],
        "weights": [(p.data_ptr(), p.dtype, p.requires_grad) for p in model.parameters()],
        "grad": torch.is_grad_enabled(),
    }


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """Suppress warnings about intended errors, and use one thread for the small models."""
    level, threads = transformers.logging.get_verbosity(), torch.get_num_threads()
    transformers.logging.set_verbosity(logging.CRITICAL)
    torch.set_num_threads(1)
    yield
    transformers.logging.set_verbosity(level)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def one_bench() -> list[Bench]:
    """The bench that all cases share: no case may affect the next."""
    return []


@pytest.fixture
def bench(one_bench: list[Bench]) -> Iterator[Bench]:
    if not one_bench:
        plain = copy.deepcopy(build("llama"))
        model = hf_parallel.enable(copy.deepcopy(plain))
        tokens = plain.generate(**GREEDY)[:, : BATCH.shape[1] + 2]
        one_bench.append(Bench(model, plain, describe(model), tokens, logits(plain)))
    bench = one_bench[0]
    try:
        yield bench
        assert_unharmed(bench)
    except BaseException:
        one_bench.clear()  # the next case creates a new one
        raise


def assert_unharmed(bench: Bench) -> None:
    """Assert that state, plain logits and greedy output with shared prefixes are unchanged."""
    assert describe(bench.model) == bench.before
    assert torch.equal(logits(bench.model), bench.logits)
    assert torch.equal(bench.model.generate(**AFTERWARDS), bench.tokens)
    assert describe(bench.model) == bench.before


def assert_readable(error: BaseException, case: Case) -> None:
    """Assert that an error is typed, names its cause, and is raised by a check, not inside torch or NumPy."""
    assert case.says.lower() in str(error).lower(), f"{case.says!r} is not in: {error}"
    if isinstance(error, OwnError | KeyboardInterrupt):
        return  # of the caller's code
    meant = (*READABLE, RuntimeError) if case.error is RuntimeError else READABLE
    assert isinstance(error, meant)
    assert not isinstance(error, UnicodeError | NotImplementedError)
    place = raised_in(error.__traceback__)
    assert any(place.startswith(package) for package in PACKAGES), f"raised in {place}: {error}"


def raised_in(traceback: TracebackType | None) -> str:
    """Return the file of the innermost frame."""
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback.tb_frame.f_code.co_filename


def test_there_are_at_least_200_different_calls() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 200


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_malformed_call_raises_a_readable_error_or_works(case: Case, bench: Bench) -> None:
    if case.error is not None:
        with pytest.raises(case.error) as caught:
            case.call(bench.model)
        assert_readable(caught.value, case)
        return
    torch.manual_seed(0)
    output = case.call(bench.model)
    if case.like is not None:
        torch.manual_seed(0)
        assert torch.equal(output, bench.plain.generate(**case.like))
    elif isinstance(output, torch.Tensor):
        assert output.shape[0] >= 1
        assert output.shape[1] > ONE.shape[1]


@contextmanager
def failing(module: nn.Module, at: int, error: BaseException) -> Iterator[None]:
    """Raise in the `at`-th call of a module's forward, counted from 1, which must take place."""
    count = 0

    def raise_in_time(*args: Any) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise error

    handle = module.register_forward_pre_hook(raise_in_time)
    try:
        yield
    finally:
        handle.remove()
    assert count >= at, f"there were only {count} passes"


INTERRUPTS: dict[str, Callable[[], BaseException]] = {
    "interrupt": lambda: KeyboardInterrupt("stop"),
    "exit": lambda: SystemExit(3),
    "layer out of memory": lambda: RuntimeError("out of memory"),
}
PLACES: dict[str, Callable[[Any], nn.Module]] = {
    "before the first layer": lambda model: model.model.layers[0],
    "in the last layer": lambda model: model.model.layers[-1].mlp,
    "after the layers": lambda model: model.lm_head,
}


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        *(("interrupt", place) for place in PLACES),
        ("exit", "in the last layer"),
        ("layer out of memory", "in the last layer"),
    ],
)
@pytest.mark.parametrize(
    ("mode", "at"), [*(("shared_prefix", n) for n in (1, 2, 4)), *(("hogwild", n) for n in (1, 2, 3, 5, 6))]
)
def test_interrupt_in_a_forward_pass_is_raised_and_changes_nothing(
    mode: str, at: int, kind: str, place: str, bench: Bench
) -> None:
    error = INTERRUPTS[kind]()
    with pytest.raises(type(error)) as caught, failing(PLACES[place](bench.model), at, error):
        bench.model.generate(**DEFAULTS[mode])
    assert caught.value is error


@pytest.mark.parametrize("mode", ["shared_prefix", "hogwild"])
def test_failed_call_keeps_no_cache_alive(mode: str, bench: Bench) -> None:
    caches = []

    def record(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        caches.append(weakref.ref(kwargs["past_key_values"]))

    handle = bench.model.register_forward_hook(record, with_kwargs=True)
    try:
        with failing(bench.model.lm_head, 3, OwnError()):
            bench.model.generate(**DEFAULTS[mode])
    except OwnError:
        pass  # unlike `pytest.raises`, keeps no traceback
    handle.remove()
    gc.collect()
    assert caches
    assert all(cache() is None for cache in caches)


def growing_calls() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return two calls: two prompts; then prompts that continue them, and new ones with a shared prefix."""
    tails = make_prompts([9, 9, 20, 3, 5], seed=1)
    starts = [*PROMPTS, tails[2], tails[2]]
    ids, mask = left_pad([torch.cat(pair) for pair in zip(starts, [*tails[:2], *tails[3:]], strict=True)])
    return GREEDY, {**GREEDY, "input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("place", ["before the first layer", "after the layers"])
@pytest.mark.parametrize("at", [1, 3, 4, 6, 7, 9])
def test_kept_cache_survives_an_interrupt(at: int, place: str, bench: Bench) -> None:
    """During prefill (six passes) and decoding."""
    short, long = growing_calls()
    cache = SharedPrefixCache()
    kept = {"generation_mode": "shared_prefix", "past_key_values": cache, "prefill_chunk_size": 8}
    bench.model.generate(**short, **kept)
    before = cache.kv_bytes
    with pytest.raises(KeyboardInterrupt), failing(PLACES[place](bench.model), at, KeyboardInterrupt()):
        bench.model.generate(**long, **kept)
    assert {node.block for node in cache.tree.nodes()} == cache.pool.blocks, "blocks without a node"
    assert cache.kv_bytes >= before, "cached tokens were lost"
    output = bench.model.generate(**short, **kept, return_dict_in_generate=True)
    assert output.stats.prefilled_tokens == len(PROMPTS), "only the last token of each prompt is computed again"
    for arguments in (short, long, short, long):
        assert torch.equal(bench.model.generate(**arguments, **kept), bench.plain.generate(**arguments))


class Calls:
    """Counts calls of the package's functions, and raises KeyboardInterrupt in the `at`-th one."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.count = at, 0

    def __enter__(self) -> Calls:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *args: Any) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        # Errors raised in a generator during garbage collection are lost.
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGES[0]) and not code.co_flags & inspect.CO_GENERATOR:
            self.count += 1
            if self.count == self.at:
                sys.setprofile(None)
                raise KeyboardInterrupt


@pytest.fixture(scope="module")
def number_of_calls() -> int:
    """Calls of the package's functions in a run."""
    model = hf_parallel.enable(copy.deepcopy(build("llama")))
    _, long = growing_calls()
    with Calls() as calls:
        model.generate(**long, generation_mode="shared_prefix")
    return calls.count


@pytest.mark.parametrize("share", range(40))
def test_interrupt_in_any_function_leaves_model_and_kept_cache_intact(
    share: int, number_of_calls: int, bench: Bench
) -> None:
    """Like a signal, which may arrive between any two lines: at 40 places spread over a run."""
    short, long = growing_calls()
    kept = {"generation_mode": "shared_prefix", "past_key_values": SharedPrefixCache()}
    bench.model.generate(**short, **kept)
    with pytest.raises(KeyboardInterrupt), Calls(at=1 + share * number_of_calls // 40):
        bench.model.generate(**long, **kept)
    for arguments in (short, long):
        assert torch.equal(bench.model.generate(**arguments, **kept), bench.plain.generate(**arguments))


@pytest.mark.parametrize("at", [1, 2, 3])
def test_interrupted_enable_leaves_the_model_plain(at: int) -> None:
    model = copy.deepcopy(build("llama"))
    before = describe(model)
    with pytest.raises(KeyboardInterrupt), failing(model.model.layers[1], at, KeyboardInterrupt()):
        hf_parallel.enable(model)
    assert describe(model) == before
    assert torch.equal(model.generate(**GREEDY), build("llama").generate(**GREEDY))


def test_interrupted_hogwild_call_does_not_affect_the_next(bench: Bench) -> None:
    with pytest.raises(KeyboardInterrupt), failing(bench.model.lm_head, 4, KeyboardInterrupt()):
        bench.model.generate(**{**DEFAULTS["hogwild"], "num_workers": 3})
    again = [bench.model.generate(**DEFAULTS["hogwild"]) for _ in range(2)]
    assert torch.equal(*again)


def test_unknown_backend_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_PARALLEL_BACKEND", "magic")
    with pytest.raises(ValueError, match="HF_PARALLEL_BACKEND.*magic"):
        bench.model.generate(**DEFAULTS["shared_prefix"])
    monkeypatch.undo()
    assert "HF_PARALLEL_BACKEND" not in os.environ


class _NoTokens:
    """A tokenizer that returns no tokens."""

    def __call__(self, text: str, **kwargs: Any) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(1, 0).long(), "attention_mask": torch.zeros(1, 0).long()}

    def decode(self, tokens: Any, **kwargs: Any) -> str:
        return ""


CHAT_TOKENIZER = copy.deepcopy(TOKENIZER)
CHAT_TOKENIZER.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("arguments", "settings", "says"),
    [
        (("", TOKENIZER), {}, "task"),
        (("  \n", TOKENIZER), {}, "task"),
        ((None, TOKENIZER), {}, "task"),
        ((["a task"], TOKENIZER), {}, "task"),
        (("a task", None), {}, "tokenizer"),
        (("a task", "gpt2"), {}, "tokenizer"),
        (("a task\ud800", TOKENIZER), {}, "task must be text without lone surrogates"),
        (([{"role": "user", "content": "a\ud800"}], CHAT_TOKENIZER), {}, "task must be text without lone surrogates"),
        (("a task", lambda text, **kwargs: {"input_ids": []}), {}, "tokenizer"),
        (("a task", _NoTokens()), {}, "tokenizer must return input_ids and attention_mask"),
        (("a task", TOKENIZER, {"num_workers": 2}), {}, "HogwildConfig"),
        (("a task", TOKENIZER, SharedPrefixConfig()), {}, "HogwildConfig"),
        (("a task", TOKENIZER, HogwildConfig()), {"num_workers": 3}, "num_workers"),
        (("a task", TOKENIZER), {"num_workers": 0}, "num_workers"),
        (("a task", TOKENIZER), {"num_wokers": 2}, "num_wokers"),
    ],
)
def test_malformed_hogwild_prompt_raises_a_readable_error(arguments: tuple, settings: dict, says: str) -> None:
    with pytest.raises(READABLE, match=says):
        hf_parallel.hogwild_prompt(*arguments, **settings)
