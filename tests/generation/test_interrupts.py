"""Ctrl-C at any function entry or return of a C function: the next calls work, plain and in a mode."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import one_layer
import pytest
import tiny
import torch
from workers import SETTINGS

import hf_parallel
from hf_parallel import HogwildSession, SharedPrefixCache

# interrupted in a generator's end
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

IDS = tiny.make_prompts([9], seed=4)[0][None]
FILES = ("mixin.py", "attention.py", "linear.py", "contextlib.py", "session.py", "prefill.py", "decode.py", "runner.py")
"""Files whose code holds the model, exchanges parts of it, or releases them."""


Place = tuple[str, int, str]
"""File, line and kind of an event in `FILES`."""


def profiled(
    function: Callable[[], Any], at: tuple[Place, int] | None = None, files: Sequence[str] = FILES
) -> Counter[Place]:
    """Call a function and count the places where a Ctrl-C can be raised; at the given occurrence of one it is."""
    seen: Counter[Place] = Counter()
    names: dict[str, str | None] = {}  # of paths; most events are in other files, so they must be cheap

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event not in ("call", "c_return"):
            return
        path = frame.f_code.co_filename
        if path not in names:
            name = path.rsplit("/", 1)[-1]
            names[path] = name if name in files else None
        file = names[path]
        if file is not None:
            place = (file, frame.f_lineno, event)
            seen[place] += 1
            if at == (place, seen[place]):
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
        torch.set_grad_enabled(True)  # an interrupted `torch.no_grad()` may leave gradients off
    return seen


@pytest.fixture(params=[15, pytest.param(1, marks=pytest.mark.slow)])
def chosen(request: pytest.FixtureRequest) -> Callable[[Counter[Place]], list[tuple[Place, int]]]:
    """First and last occurrence of each place, or of every fifteenth one."""
    return lambda seen: sorted({(p, at) for p, count in seen.items() for at in (1, count)})[:: request.param]


def generate(model: Any, **settings: Any) -> torch.Tensor:
    return model.generate(IDS, **{"max_new_tokens": 2, "do_sample": False, **settings})


def assert_plain(model: Any, expected: torch.Tensor, at: tuple[Place, int]) -> None:
    """Assert that plain `generate` returns the first token that it should."""
    assert torch.equal(generate(model, max_new_tokens=1), expected[:, :-1]), at


def test_any_interrupt_leaves_the_model_and_its_cache_usable(chosen: Any) -> None:
    model = hf_parallel.enable(one_layer.build())
    expected = generate(model)
    cache = SharedPrefixCache()

    def call() -> None:
        generate(model, generation_mode="shared_prefix", past_key_values=cache)

    call()
    for at in chosen(profiled(call)):
        kept = []  # a traceback that is kept, as by an interactive interpreter
        try:
            profiled(call, at)
        except KeyboardInterrupt as error:
            kept.append(error)
        assert model.config._attn_implementation == "sdpa", at
        assert_plain(model, expected, at)
        assert torch.equal(generate(model, generation_mode="shared_prefix", past_key_values=cache), expected), at
    hf_parallel.disable(model)
    assert type(model.config) is type(tiny.build("llama").config)
    assert torch.equal(generate(model), expected)


def test_any_interrupt_of_a_session_leaves_the_model_usable(chosen: Any) -> None:
    model = hf_parallel.enable(one_layer.build())
    plain = generate(model)
    first = HogwildSession(model, prompt=IDS, **SETTINGS)
    for at in chosen(profiled(lambda: _step(first))):
        session = HogwildSession(model, prompt=IDS, **SETTINGS)
        kept = []
        try:
            profiled(lambda session=session: _step(session), at)  # type: ignore[misc]
        except KeyboardInterrupt as error:
            kept.append(error)
        assert_plain(model, plain, at)
        assert torch.equal(generate(model, generation_mode="shared_prefix"), plain), at


def _step(session: HogwildSession) -> None:
    session.run(2)
