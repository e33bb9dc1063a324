"""Failures of an engine's requests: each ends the request that caused it and no other, and nothing is held after it."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import tiny
import torch
from engine_requests import (
    TOKENIZER,
    Case,
    assert_nothing_is_held,
    clear_hooks,
    wait_until_idle,
)
from mode_cases import small_call

from hf_parallel.cache.arena import Arena
from hf_parallel.engine import Engine, RequestCancelledError
from hf_parallel.generation import MODES
from hf_parallel.generation.decoding.prefill import insert_prompts
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.modes.shared_prefix import SharedPrefixConfig, SharedPrefixRun

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore:nothing was generated")]

MARK = tiny.PAD
"""A token that only the failing request has in its prompt or generates."""
SYSTEM = torch.randint(32, 126, (40,), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def others(shared_model: Any) -> list[tuple[Case, list[list[int]]]]:
    """Requests of all modes with a common prefix, and their tokens."""
    rng = random.Random(3)
    cases = [Case(torch.cat((SYSTEM, prompt[0]))[None], mode, settings) for prompt, mode, settings in _others(rng)]
    return [(case, case.alone(shared_model)) for case in cases]


def _others(rng: random.Random) -> Iterator[tuple[torch.Tensor, str | None, dict[str, Any]]]:
    for mode in (None, "hogwild", "shared_prefix"):
        settings = {} if mode is None else {k: v for k, v in small_call(mode).items() if k != "generation_mode"}
        if mode == "shared_prefix":
            settings |= {"num_return_sequences": 3, "do_sample": True, "seed": 4}
        text = torch.randint(32, 126, (1, 9), generator=torch.Generator().manual_seed(rng.randrange(100)))
        yield text, mode, settings | {"max_new_tokens": 10}


# Faults


class InjectedError(Exception):
    """The error that a test injects."""


def marked(*, at: int = -1) -> torch.Tensor:
    """Return the prompt of the failing request, which shares its prefix with the others."""
    text = torch.randint(32, 126, (30,), generator=torch.Generator().manual_seed(7))
    text[at] = MARK
    return torch.cat((SYSTEM, text))[None]


def raising(after: int, error: type[BaseException] = InjectedError) -> Callable[..., Any]:
    """Return a processor, criterion or method of a streamer that raises in its call number `after`."""
    calls = itertools.count()

    def call(*args: Any) -> Any:
        if next(calls) >= after:
            raise error("injected")
        return args[-1]

    return call


class Criterion:
    def __init__(self, after: int) -> None:
        self.check = raising(after)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.check(scores)
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Streamer:
    """Ignores everything, except that the given methods raise."""

    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.errors: list[BaseException] = []
        vars(self).update(methods)

    def put(self, value: Any) -> None: ...

    def write_row(self, row: int, text: str, event: str) -> None: ...

    def end(self) -> None: ...

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)


def marks() -> Callable[..., torch.Tensor]:
    """Return a processor that lets nothing but `MARK` be generated, from the fourth token on."""
    calls = itertools.count()

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if next(calls) >= 3:
            scores = torch.full_like(scores, -torch.inf)
            scores[:, MARK] = 0
        return scores

    return process


def poison_logits(model: Any, value: float) -> None:
    """Replace the logits after `MARK`."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        ids, keep = kwargs["input_ids"][0], kwargs.get("logits_to_keep", 0)
        if isinstance(keep, torch.Tensor):
            ids = ids[keep]
        output.logits[0, ids == MARK] = value

    model.register_forward_hook(hook, with_kwargs=True)


def poison_keys(model: Any, projection: str, layer: int, value: float = float("nan")) -> None:
    """Replace the keys or values of `MARK` in one layer."""
    ids: list[torch.Tensor] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids[:] = [kwargs["input_ids"][0]]

    def hook(module: Any, args: Any, output: torch.Tensor) -> None:
        output[0, ids[0] == MARK] = value

    model.register_forward_pre_hook(note, with_kwargs=True)
    getattr(model.model.layers[layer].self_attn, projection).register_forward_hook(hook)


def run_out_of_memory(model: Any, condition: Callable[[torch.Tensor], bool]) -> None:
    """Raise an out-of-memory error in forward passes whose tokens fulfill a condition."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if condition(kwargs["input_ids"][0]):
            raise torch.OutOfMemoryError("injected")

    model.register_forward_pre_hook(hook, with_kwargs=True)


def has_mark(ids: torch.Tensor) -> bool:
    """Return whether tokens include `MARK`."""
    return bool((ids == MARK).any())


@dataclass
class BrokenConfig(SharedPrefixConfig):
    """A mode that fails before its first pass."""

    mode: ClassVar[str] = "broken"

    def make_run(self, call: Any) -> SharedPrefixRun:
        return BrokenRun(self, call)


class BrokenRun(SharedPrefixRun):
    """Fails after it has inserted its prompts."""

    def generate(self) -> Steps[Any]:
        yield from insert_prompts(self.call, self.cache)
        raise InjectedError("injected")


class StubbornRun(SharedPrefixRun):
    """Catches every error and continues."""

    def generate(self) -> Steps[Any]:
        while True:
            try:
                return (yield from super().generate())
            except BaseException:
                continue


class StubbornConfig(SharedPrefixConfig):
    """A mode that catches every error and continues."""

    mode: ClassVar[str] = "stubborn"

    def make_run(self, call: Any) -> SharedPrefixRun:
        return StubbornRun(self, call)


@pytest.fixture(autouse=True)
def _modes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "broken", BrokenConfig)
    monkeypatch.setitem(MODES, "stubborn", StubbornConfig)


DECODED = {"prompt": SYSTEM[None], "decoded": True}
NAN = float("nan")
NOT_FINITE = (RuntimeError, "the model's logits are not finite")
OUT_OF_MEMORY = (torch.OutOfMemoryError, "injected")
INJECTED = (InjectedError, "injected")
HOGWILD = {"generation_mode": "hogwild", "num_workers": 2, "collaboration_prompt": "{names} talk."}
FAULTS: dict[str, tuple[Callable[[Any], Any], tuple[type[BaseException], str]]] = {
    "processor": (lambda _: {"logits_processor": [raising(3)]}, INJECTED),
    "processor that ends a generator": (
        lambda _: {"logits_processor": [raising(2, GeneratorExit)]},
        (GeneratorExit, "injected"),
    ),
    "Ctrl-C": (lambda _: {"logits_processor": [raising(2, KeyboardInterrupt)]}, (KeyboardInterrupt, "injected")),
    "criterion": (lambda _: {"stopping_criteria": [Criterion(3)]}, INJECTED),
    "streamer: put": (lambda _: {"streamer": Streamer(put=raising(3))}, INJECTED),
    "streamer: put and fail": (lambda _: {"streamer": Streamer(put=raising(3), fail=raising(0))}, INJECTED),
    "streamer: write_row": (lambda _: {"streamer": Streamer(write_row=raising(3)), **HOGWILD}, INJECTED),
    "make_run": (lambda _: {"generation_mode": "broken"}, INJECTED),
    "nan logits": (lambda model: poison_logits(model, NAN), NOT_FINITE),
    "nan values while decoding": (lambda model: poison_keys(model, "v_proj", -1) or DECODED, NOT_FINITE),
    "nan values amid the prompt": (
        lambda model: poison_keys(model, "v_proj", -1) or {"prompt": marked(at=2)},
        NOT_FINITE,
    ),
    "out of memory": (lambda model: run_out_of_memory(model, has_mark), OUT_OF_MEMORY),
    "out of memory while decoding": (lambda model: run_out_of_memory(model, has_mark) or DECODED, OUT_OF_MEMORY),
}
"""By name: a function that prepares a model to fail and returns settings of the request, its error and the message."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_its_request_and_no_other(model: Any, others: Any, name: str) -> None:
    prepare, (error, message) = FAULTS[name]
    chunk = 16 if [*FAULTS].index(name) % 2 else None
    with Engine(model, TOKENIZER, max_batch_tokens=chunk) as engine:
        settings = {"max_new_tokens": 20, **(prepare(model) or {})}
        prompt = settings.pop("prompt", marked())
        if settings.pop("decoded", False):
            settings["logits_processor"] = [marks()]
        before = [engine.submit(case.prompt, case.mode, **case.arguments) for case, _ in others[:2]]
        failing = engine.submit(prompt, **settings)
        after = [engine.submit(case.prompt, case.mode, **case.arguments) for case, _ in others[2:]]
        with pytest.raises(error, match=message) as raised:
            failing.result(600)
        assert failing.done
        assert failing.error is raised.value
        for handle, (_, tokens) in zip(before + after, others, strict=True):
            assert handle.result(600).sequences.tolist() == tokens
        assert_nothing_is_held(engine)
        for layer in engine._storage.arena.layers.values():  # kernels may read unused memory with weight 0
            assert layer.keys.isfinite().all()
            assert layer.values.isfinite().all()
        assert (engine.stats.failed, engine.stats.finished) == (1, len(others))
        clear_hooks(model)
        again = Case(prompt, None, {"max_new_tokens": 4})
        assert engine.submit(prompt, max_new_tokens=4).result(600).sequences.tolist() == again.beside(model)


@pytest.fixture(scope="module")
def largest_pass(shared_model: Any, others: Any) -> int:
    """The largest number of tokens in a pass of one of the requests alone."""
    sizes = []
    hook = shared_model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    for case, _ in others:
        case.alone(shared_model)
    hook.remove()
    return max(sizes)


def test_an_engine_goes_on_where_the_cache_cannot_grow(
    model: Any, others: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow, attempts = Arena.grow, itertools.count()

    def fail_sometimes(arena: Arena) -> None:
        if next(attempts) % 3 == 2:
            raise torch.OutOfMemoryError("injected")
        grow(arena)

    monkeypatch.setattr(Arena, "grow", fail_sometimes)
    with Engine(model, TOKENIZER) as engine:
        handles = [engine.submit(case.prompt, case.mode, **case.arguments) for case, _ in others]
        for handle, (_, tokens) in zip(handles, others, strict=True):
            try:
                assert handle.result(600).sequences.tolist() == tokens
            except torch.OutOfMemoryError:  # alone with the engine, there is no other request to preempt
                continue
        assert_nothing_is_held(engine)
    assert next(attempts) > 3


def test_requests_too_large_for_memory_together_run_one_after_another(
    model: Any, others: Any, largest_pass: int
) -> None:
    run_out_of_memory(model, lambda ids: len(ids) > largest_pass)
    with Engine(model, TOKENIZER, max_batch_tokens=500) as engine:
        handles = [engine.submit(case.prompt, case.mode, **case.arguments) for case, _ in others]
        too_large = engine.submit(torch.full((1, largest_pass + 10), 33), max_new_tokens=2)
        for handle, (_, tokens) in zip(handles, others, strict=True):
            assert handle.result(600).sequences.tolist() == tokens
        with pytest.raises(torch.OutOfMemoryError):
            too_large.result(600)
        assert_nothing_is_held(engine)


def test_a_mode_that_catches_every_error_is_ended(model: Any, others: Any) -> None:
    with Engine(model, TOKENIZER) as engine:
        handles = [engine.submit(case.prompt, case.mode, **case.arguments) for case, _ in others]
        stubborn = engine.submit(SYSTEM, "stubborn", max_new_tokens=400)
        failing = engine.submit(SYSTEM[:9], "stubborn", logits_processor=[raising(2)])
        next(iter(stubborn))
        for handle in (stubborn, failing):
            handle.cancel()
            with pytest.raises((CancelledError, InjectedError)):  # it may fail before it is canceled
                handle.result(600)
        for handle, (_, tokens) in zip(handles, others, strict=True):
            assert handle.result(600).sequences.tolist() == tokens
        assert_nothing_is_held(engine)


@pytest.mark.parametrize("what", ["result", "tokens", "asyncio", "mode"])
def test_code_of_a_request_that_would_wait_for_its_own_engine_raises(model: Any, others: Any, what: str) -> None:
    case, tokens = others[0]
    inner: list[Any] = []

    def wait(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if what == "mode":
            model.generate(case.prompt, generation_mode="shared_prefix")
        inner.append(engine.submit(case.prompt, case.mode, **case.arguments))
        if what == "asyncio":
            asyncio.run(inner[0].result_async())
        elif what == "result":
            inner[0].result()
        else:
            list(inner[0])
        return scores

    match = "open Engine holds this model" if what == "mode" else "cannot wait for another request of its engine"
    with Engine(model, TOKENIZER) as engine:
        with pytest.raises(RuntimeError, match=match):
            engine.submit(case.prompt, logits_processor=[wait]).result(600)
        for handle in inner:
            assert handle.result(600).sequences.tolist() == tokens
        assert_nothing_is_held(engine)


# Cancellation


def cancelled(handle: Any) -> None:
    handle.cancel()
    with pytest.raises(CancelledError):
        handle.result(600)
    with pytest.raises(RequestCancelledError, match="canceled"):
        list(handle)
    assert isinstance(handle.error, RequestCancelledError)


def test_cancellation_at_every_stage(model: Any, others: Any) -> None:
    """Queued, prefilling, waiting for another request's prefix, decoding, finished."""
    case, tokens = others[0]
    entered, go = threading.Event(), threading.Event()

    def block(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        entered.set()
        assert go.wait(600)
        return scores

    long = torch.randint(32, 126, (200,), generator=torch.Generator().manual_seed(1))
    with Engine(model, TOKENIZER, max_batch_tokens=32, max_rows=4) as engine:
        bystander = engine.submit(case.prompt, case.mode, **case.arguments)
        blocking = engine.submit(case.prompt[0, :9], max_new_tokens=3, logits_processor=[block])
        assert entered.wait(600)
        prefilling = engine.submit(long, max_new_tokens=100)
        waiting = engine.submit(torch.cat((long[:150], long[:3])), max_new_tokens=3)
        queued = [engine.submit(case.prompt, max_new_tokens=3) for _ in range(8)]
        go.set()
        cancelled(queued[3])
        assert not prefilling.times.first_token
        cancelled(waiting)
        cancelled(prefilling)
        assert not prefilling.times.first_token
        blocking.result(600)
        decoding = engine.submit(case.prompt, max_new_tokens=400)
        next(iter(decoding))
        assert not decoding.done
        cancelled(decoding)
        finished = bystander.result(600)
        bystander.cancel()
        assert bystander.result() is finished
        assert bystander.error is None
        assert finished.sequences.tolist() == tokens
        for handle in (*queued[:3], *queued[4:]):
            assert handle.result(600).sequences.tolist() == [tokens[0][: case.prompt.shape[1] + 3]]
        assert_nothing_is_held(engine)
        assert engine.stats.cancelled == 4


# Callers


def test_a_request_whose_handle_was_dropped_ends(model: Any, others: Any) -> None:
    case, tokens = others[0]
    ended = threading.Event()
    streamer = Streamer(end=ended.set)
    with Engine(model, TOKENIZER) as engine:
        handle = engine.submit(case.prompt, case.mode, **case.arguments, streamer=streamer)
        dropped = weakref.ref(handle), weakref.ref(streamer)
        del handle, streamer
        gc.collect()
        assert ended.wait(600)
        wait_until_idle(engine)
        until = time.monotonic() + 600
        while any(one() is not None for one in dropped) and time.monotonic() < until:
            gc.collect()
            time.sleep(0.01)
        assert [one() for one in dropped] == [None, None]
        assert engine.submit(case.prompt, case.mode, **case.arguments).result(600).sequences.tolist() == tokens
        assert_nothing_is_held(engine)
