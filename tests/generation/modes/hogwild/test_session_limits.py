"""HogwildSession: failures leave it unchanged, invalid arguments raise, other threads may use model and session."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from talks import begin, state
from transformers import TextStreamer
from workers import TOKENIZER, Listener, small_model

import hf_parallel
from hf_parallel import HogwildSession
from hf_parallel.cache.arena import Arena
from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.runner import Runner
from hf_parallel.generation.modes.hogwild.cache import HogwildCache
from hf_parallel.generation.modes.hogwild.worker import Worker

# Failures


class Fails:
    """Replaces a method: works `times` times, then raises, before or (`late`) after its work."""

    def __init__(self, method: Callable[..., Any], times: int, late: bool = False) -> None:
        self.method, self.times, self.late = method, times, late

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        own = () if instance is None else (instance,)

        def call(*given: Any, **named: Any) -> Any:
            self.times -= 1
            if self.times < 0 and not self.late:
                raise MemoryError("out of memory")
            result = self.method(*own, *given, **named)
            if self.times < 0:
                raise KeyboardInterrupt
            return result

        return call


@pytest.mark.parametrize(
    ("owner", "name", "times"),
    [
        (Arena, "write", 0),
        (Arena, "write", 1),
        (Runner, "compute", 0),
        (DecodeLoop, "sample", 0),
        (Worker, "advance", 1),
        (HogwildCache, "end_step", 0),
    ],
)
@pytest.mark.parametrize(("passes", "late"), [(0, False), (6, True)])
def test_a_step_that_fails_leaves_the_session_unchanged(
    owner: Any, name: str, times: int, late: bool, passes: int
) -> None:
    session, undisturbed = begin(), begin()
    session.run(passes)
    session.inject("common", "Hello.")
    session.inject("Bob", "You!")
    before = state(session)
    for _ in range(4):  # a step ends in one of them
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, Fails(getattr(owner, name), times, late))
            try:
                session.step()
            except (MemoryError, KeyboardInterrupt):
                assert state(session) == before
        before = state(session)
    session.run(11 - session.passes)
    undisturbed.run(passes)
    undisturbed.inject("common", "Hello.")
    undisturbed.inject("Bob", "You!")
    undisturbed.run(11 - passes)
    assert state(session)[:-1] == state(undisturbed)[:-1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.inject("Zoe", "Hi."), "to must be 'common' or one of .* got 'Zoe'"),
        (lambda s: s.inject("Alice", ""), "text must be a non-empty string, got ''"),
        (lambda s: s.inject("common", "\ud800"), "text must be text without lone surrogates"),
        (lambda s: s.run(-1), "passes must be an int of at least 0"),
    ],
)
def test_invalid_changes_raise(change: Callable[[HogwildSession], Any], said: str) -> None:
    session = begin()
    session.run(6)
    before = state(session)
    with pytest.raises(ValueError, match=said):
        change(session)
    assert state(session) == before


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"logits_cache": hf_parallel.LogitsCache()}, "logits_cache must be None in a session"),
        ({"max_time": 5.0}, "max_time must be None"),
        ({"seed": torch.Generator()}, "seed must be an int"),
        ({"num_return_sequences": 2}, "a session has one prompt"),
        ({"worker_names": ["Ann", "common"]}, "worker_names must not contain 'common'"),
        ({"generation_mode": "pdos"}, "generation_mode 'hogwild' or 'async_reasoning', got 'pdos'"),
        ({"streamer": TextStreamer(TOKENIZER)}, "streamer must be a ParallelStreamer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_settings_raise(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        begin(**settings)
    begin().step()


def test_a_changed_model_raises_until_it_is_changed_back() -> None:
    model = copy.deepcopy(small_model())
    session, undisturbed = begin(model), begin()
    session.run(3)
    before = state(session)
    model.lm_head.weight.data[5, 3] += 1.0
    with pytest.raises(ValueError, match="weights of the model have changed"):
        session.step()
    model.lm_head.weight.data.copy_(small_model().lm_head.weight)
    model.to(torch.float64)
    with pytest.raises(ValueError, match=r"on cpu in torch.float32 when .* began, now it is on cpu in torch.float64"):
        session.step()
    model.to(torch.float32)
    hf_parallel.disable(model)
    for use in (session.step, session.finish):
        with pytest.raises(RuntimeError, match=r"not enabled any more: call hf_parallel\.enable\(model\)"):
            use()
    hf_parallel.enable(model)
    assert state(session) == before
    session.run(5)
    undisturbed.run(8)
    assert state(session) == state(undisturbed)


# Life cycle


def test_a_closed_session_frees_its_memory_and_rejects_calls() -> None:
    listener = Listener()
    with begin(streamer=listener) as session:
        session.run(3)
    assert listener.ended == 1
    assert not session.output().past_key_values.pool.blocks
    for change in (session.step, session.finish, lambda: session.inject("Alice", "Hi.")):
        with pytest.raises(RuntimeError, match="has been closed"):
            change()
    session.close()
    assert listener.ended == 1


def test_a_finished_session_can_be_read() -> None:
    session = begin(finisher_tokens=4)
    session.run(6)
    out = session.finish()
    assert session.output().conclusions == out.conclusions != [""]
    assert "So \\boxed{" in out.conclusions[0]
    with pytest.raises(RuntimeError, match="has been finished"):
        session.step()


def test_a_session_cannot_be_called_from_its_own_step() -> None:
    class Reentrant:
        session: HogwildSession

        def put(self, value: Any) -> None:
            if value.ndim == 1:
                self.session.inject("Alice", "Me, too.")

        write_row = end = lambda *given: None

    reentrant = Reentrant()
    reentrant.session = session = begin(streamer=reentrant)
    with pytest.raises(RuntimeError, match="called again from a processor or a streamer"):
        session.step()
    assert session.passes == 0
