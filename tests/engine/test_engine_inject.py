"""Texts for requests that run: they get the tokens of a session that got the same texts after the same passes."""

from __future__ import annotations

import copy
import random
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

import pytest
import talks
import tiny
from engine_requests import assert_nothing_is_held
from held_engine import first_step_held
from talks import PROMPT, TALK, Said
from workers import TOKENIZER

import hf_parallel
from hf_parallel.engine import Engine, KVBudgetError, NotRunningError, RequestCancelledError, RequestHandle
from hf_parallel.generation.modes.hogwild.cache import LAYOUTS

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
WAIT = 600
SPOKEN: dict[str, Any] = TALK | {"max_new_tokens": 30, "finisher_tokens": 3}


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_parallel.enable(copy.deepcopy(tiny.build("llama")), batch_invariant=True)


def in_session(model: Any, settings: dict[str, Any], texts: list[Said]) -> Any:
    """Return the output of a session with the prompt that gets the texts after the same passes."""
    settings = {name: value for name, value in settings.items() if name != "draft_tokens"}  # which change no token
    return talks.in_session(model, TOKENIZER, PROMPT, settings, texts)


def say_at_random(handle: RequestHandle, rng: random.Random, names: list[str], count: int) -> list[Said]:
    """Say texts while a request runs; return those that were read, in the order in which they were said."""
    said = []
    for _ in range(count):
        to = rng.choice(["all", "all", 0, names[-1]])
        text = rng.choice(["It rains.", "Hm?", "Look: "])
        tokens = iter(handle)
        for _ in range(rng.randrange(1, 40)):
            next(tokens, None)
        try:
            said.append((handle.inject(text, to), to, text))
        except NotRunningError:
            break
    wait([heard for heard, _, _ in said], WAIT)
    return [(heard.result(), to, text) for heard, to, text in said if heard.exception() is None]


def check_same(out: Any, expected: Any) -> None:
    assert out.sequences.tolist() == expected.sequences.tolist()
    assert out.history == expected.history
    assert out.texts == expected.texts


@pytest.mark.parametrize("mode", ["hogwild", "async_reasoning"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_for_a_request_are_those_of_a_session(model: Any, layout: str, mode: str) -> None:
    if mode == "async_reasoning" and layout == "interleaved":
        return
    settings = SPOKEN | {"layout": layout, "generation_mode": mode}
    rng = random.Random(layout)
    names = ["Alice", "Bob"] if mode == "hogwild" else ["Thinker", "Writer"]
    texts: list[Said] = []
    with Engine(model, TOKENIZER) as engine:
        handle = engine.submit(PROMPT, **settings)
        texts = say_at_random(handle, rng, names, 6)
        out = handle.result(WAIT)
        with pytest.raises(NotRunningError, match="the request has ended"):
            handle.inject("Hello?")
    assert texts
    check_same(out, in_session(model, settings, texts))


def test_texts_before_the_first_pass_are_read_in_it(model: Any) -> None:
    settings = SPOKEN | {"generation_mode": "hogwild"}
    with Engine(model, TOKENIZER) as engine:
        with first_step_held():
            handle = engine.submit(PROMPT, **settings)
            heard = handle.inject("It rains.", 1)
        out = handle.result(WAIT)
    assert heard.result() == 0
    check_same(out, in_session(model, settings, [(0, 1, "It rains.")]))


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_preempted_request_reads_the_same_texts_at_the_same_places(
    model: Any, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preempted at every step."""
    settings = SPOKEN | {"generation_mode": "hogwild", "num_workers": 3, "draft_tokens": drafts}
    run_step = Engine._step

    def preempt(engine: Engine) -> None:
        for request in list(engine._scheduler.running):
            if request.has_started and not request.preempted and request.needs_pass:
                engine._scheduler.preempt(request)
        for _ in range(40):  # its keys and values are computed again, then one pass
            before = sum(request.num_tokens for request in engine._scheduler.running)
            run_step(engine)
            if not engine._scheduler.is_busy or sum(r.num_tokens for r in engine._scheduler.running) != before:
                return

    monkeypatch.setattr(Engine, "_step", preempt)
    with Engine(model, TOKENIZER, max_kv_bytes=2**24) as engine:
        handle = engine.submit(PROMPT, **settings)
        texts = say_at_random(handle, random.Random(1), ["Alice", "Bob", "Carol"], 5)
        out = handle.result(WAIT)
        assert engine.stats.preemptions > 4
    assert texts
    check_same(out, in_session(model, settings, texts))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_random_texts_and_cancellations_in_a_small_memory(model: Any, seed: int) -> None:
    """Every request that ends has the tokens of a session, and nothing is held at the end."""
    rng = random.Random(seed)
    ended = []
    with Engine(model, TOKENIZER, max_kv_bytes=2**18) as engine:
        running: list[tuple[RequestHandle, dict[str, Any], list[tuple[Future[int], str | int]]]] = []
        for _ in range(6):
            settings = SPOKEN | {
                "generation_mode": "hogwild",
                "layout": rng.choice(LAYOUTS),
                "seed": rng.randrange(99),
                "max_new_tokens": rng.randrange(5, 20),
            }
            running.append((engine.submit(PROMPT, **settings), settings, []))
        while any(not handle.done for handle, _, _ in running):
            handle, _, said = rng.choice(running)
            if rng.random() < 0.02:
                handle.cancel()
            to = rng.choice(["all", "Alice", 1])
            if len(said) < 4:
                with suppress(NotRunningError, KVBudgetError):
                    said.append((handle.inject("Now.", to), to))
            wait([heard for heard, _ in said], 0.1)
        for handle, settings, said in running:
            with suppress(RequestCancelledError):
                ended.append((handle.result(WAIT), settings, said))
        assert_nothing_is_held(engine)
    assert ended
    for out, settings, said in ended:
        texts = [(heard.result(), to, "Now.") for heard, to in said if heard.exception(WAIT) is None]
        check_same(out, in_session(model, settings, texts))


def test_invalid_texts_raise_and_leave_nothing(model: Any) -> None:
    settings = SPOKEN | {"generation_mode": "hogwild"}
    with Engine(model, TOKENIZER, max_kv_bytes=2**18) as engine:
        handle = engine.submit(PROMPT, **settings)
        for arguments, said in [
            (("",), "text must be a non-empty string, got ''"),
            (("\ud800",), "text must be text without lone surrogates"),
            ((3,), "text must be a non-empty string, got 3"),
            (("Hm.", "Zoe"), r"to must be 'all', one of \['Alice', 'Bob'\] or a number from 0 to 1, got 'Zoe'"),
            (("Hm.", 2), "to must be 'all'"),
            (("Hm.", True), "to must be 'all'"),
        ]:
            with pytest.raises(ValueError, match=said):
                handle.inject(*arguments)
        with pytest.raises(KVBudgetError, match="max_kv_bytes"):
            handle.inject("Hm. " * 2000)
        other = engine.submit(PROMPT, max_new_tokens=50)
        with pytest.raises(ValueError, match="generation_mode must be one whose rows read texts"):
            other.inject("Hm.")
        out = handle.result(WAIT)
    check_same(out, in_session(model, settings, []))


def test_a_text_to_a_request_that_ends_first_is_an_error(model: Any) -> None:
    with Engine(model, TOKENIZER, max_rows=2) as engine:
        engine.submit(PROMPT, generation_mode="hogwild", **SPOKEN)
        handle = engine.submit(PROMPT, generation_mode="hogwild", **SPOKEN)  # waits for the first one
        heard = handle.inject("It rains.")
        handle.cancel()
        with pytest.raises(NotRunningError, match="the request has ended"):
            heard.result(WAIT)


def test_a_text_that_leaves_no_positions_is_an_error(model: Any) -> None:
    with Engine(model, TOKENIZER) as engine:
        handle = engine.submit(PROMPT, generation_mode="hogwild", **SPOKEN)
        heard = handle.inject("Hm. " * 2000)
        with pytest.raises(ValueError, match="text may have at most the .* tokens that the model's positions leave"):
            heard.result(WAIT)
