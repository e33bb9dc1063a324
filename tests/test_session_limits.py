"""HogwildSession: what fails leaves it as it was, what has no sense is refused, others may use model and session."""

from __future__ import annotations

import copy
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import dense
import pytest
import tiny
import torch
from talks import begin, scripted, state
from transformers import LogitsProcessor, TextStreamer
from workers import TOKENIZER, small_model

import hf_parallel
from hf_parallel import HogwildSession
from hf_parallel.cache.arena import Arena
from hf_parallel.cache.hogwild import HogwildCache
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.modes.hogwild.worker import Worker
from hf_parallel.models.cuda_graph import DecodeGraphs

pytestmark = pytest.mark.usefixtures("one_thread")


# What fails


class Fails:
    """Stands in for a method: works so many times, then raises."""

    def __init__(self, method: Callable[..., Any], times: int, late: bool = False) -> None:
        self.method, self.times, self.late = method, times, late

    def __get__(self, instance: Any, owner: Any) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.times -= 1
            if self.times < 0 and not self.late:
                raise MemoryError("out of memory")
            result = self.method(instance, *given, **named)
            if self.times < 0:
                raise KeyboardInterrupt
            return result

        return call


@pytest.mark.parametrize(
    ("owner", "name", "times"),
    [
        (Arena, "write", 0),
        (Arena, "write", 1),
        (DecodeLoop, "run", 0),
        (DecodeLoop, "take", 0),
        (Worker, "advance", 1),
        (HogwildCache, "end_step", 0),
    ],
)
@pytest.mark.parametrize(("passes", "late"), [(0, False), (6, True)])
def test_a_step_that_fails_leaves_the_session_as_it_was(
    owner: Any, name: str, times: int, late: bool, passes: int
) -> None:
    session, quiet = begin(), begin()
    session.run(passes)
    session.inject("common", "Hello.")
    session.inject("Bob", "You!")
    before = state(session)
    for _ in range(4):  # in one of them a step ends
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, Fails(getattr(owner, name), times, late))
            try:
                session.step()
            except (MemoryError, KeyboardInterrupt):
                assert state(session) == before
        before = state(session)
    session.run(11 - session.passes)
    quiet.run(passes)
    quiet.inject("common", "Hello.")
    quiet.inject("Bob", "You!")
    quiet.run(11 - passes)
    assert state(session)[:-1] == state(quiet)[:-1]


def test_helpers_that_fail_leave_the_session_as_it_was() -> None:
    class Breaks(LogitsProcessor):
        keeps_rows = False
        broken = False

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if self.broken:
                raise RuntimeError("broken")
            return scores

        def put(self, value: Any) -> None:
            if self.broken:
                raise RuntimeError("broken")

        write_row = end = lambda *given: None

    for helper in ({"logits_processor": [Breaks()]}, {"streamer": Breaks()}):
        (breaks,) = helper.get("logits_processor") or [helper["streamer"]]
        session, quiet = begin(**helper), begin()
        session.run(5)
        before, breaks.broken = state(session), True
        with pytest.raises(RuntimeError, match="broken"):
            session.step()
        assert state(session) == before
        breaks.broken = False
        session.run(10)
        quiet.run(15)
        assert state(session) == state(quiet)


def test_a_change_that_fails_leaves_the_session_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    session = begin(num_workers=2)
    session.run(12)
    before = state(session)
    changes: list[tuple[Any, str, Callable[[], Any]]] = [
        (Arena, "copy", lambda: session.forget(0)),
        (Arena, "allocate", lambda: session.forget(0)),
        (HogwildCache, "forget_step", lambda: session.forget(0)),
        (HogwildCache, "add_step", lambda: session.inject("common", "Hi.")),
        (DecodeLoop, "extend", lambda: session.inject("Alice", "Hi.")),
        (DecodeLoop, "extend", lambda: session.add_worker()),
        (HogwildCache, "add_worker", lambda: session.add_worker()),
        (HogwildCache, "remove_worker", lambda: session.remove_worker("Bob")),
    ]
    for owner, name, change in changes:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, Fails(getattr(owner, name), 0))
            with pytest.raises(MemoryError):
                change()
        assert state(session) == before
    copies = iter([1])
    copy = Arena.copy

    def second_fails(*given: Any) -> None:
        if next(copies, None) is None:
            raise MemoryError("out of memory")
        copy(*given)

    with monkeypatch.context() as patch:
        patch.setattr(Arena, "copy", second_fails)
        with pytest.raises(MemoryError):
            session.forget(0)
    assert state(session) == before
    quiet = begin(num_workers=2)
    quiet.run(20)
    session.run(8)
    assert state(session) == state(quiet)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.inject("Zoe", "Hi."), "no worker 'Zoe', only"),
        (lambda s: s.inject(0, "Hi."), "no worker 0"),
        (lambda s: s.inject("Alice", ""), "text must be a non-empty string, got ''"),
        (lambda s: s.inject("Alice", 3), "text must be a non-empty string, got 3"),
        (lambda s: s.forget(99), "step must be one of the"),
        (lambda s: s.forget(-1), "step must be one of the"),
        (lambda s: s.forget("Alice 1"), "step must be one of the"),
        (lambda s: s.forget(True), "step must be one of the"),
        (lambda s: s.add_worker("Alice"), "name must be none of"),
        (lambda s: s.add_worker("common"), "name must be none of"),
        (lambda s: s.add_worker(""), "not empty, got ''"),
        (lambda s: s.add_worker(5), "got 5"),
        (lambda s: s.remove_worker("Zoe"), "no worker 'Zoe'"),
        (lambda s: s.run(-1), "passes must be an int of at least 0"),
        (lambda s: s.run(1.5), "passes must be an int of at least 0"),
    ],
)
def test_changes_without_sense_are_refused(change: Callable[[HogwildSession], Any], said: str) -> None:
    session = begin()
    session.run(6)
    before = state(session)
    with pytest.raises(ValueError, match=said):
        change(session)
    assert state(session) == before


def test_a_layout_without_a_history_says_so() -> None:
    session = begin(layout="contiguous")
    session.run(12)
    with pytest.raises(ValueError, match="has no history"):
        session.inject("common", "Hi.")
    with pytest.raises(ValueError, match="has no history"):
        session.forget(0)


def test_nobody_comes_who_could_write_nothing() -> None:
    session = begin(max_new_tokens=5)
    session.run(4)
    session.add_worker()
    session.run()
    before = state(session)
    with pytest.raises(ValueError, match="no pass is left for a worker: max_new_tokens=5 is spent"):
        session.add_worker()
    assert state(session) == before
    assert session.step() == {}


def test_a_worker_that_has_ended_is_told_nothing() -> None:
    session = scripted("A" + chr(tiny.EOS), "Uno", eos_token_id=tiny.EOS)
    session.run(3)
    with pytest.raises(ValueError, match="Alice writes no more"):
        session.inject("Alice", "Hi.")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"logits_cache": hf_parallel.LogitsCache()}, "logits_cache must be None in a session"),
        ({"max_time": 5.0}, "max_time must be None"),
        ({"seed": torch.Generator()}, "seed must be an int"),
        ({"num_return_sequences": 2}, "a session has one prompt"),
        ({"worker_names": ["Ann", "common"]}, "worker_names must not hold 'common'"),
        ({"generation_mode": "pdos"}, "generation_mode 'hogwild', got 'pdos'"),
        ({"num_workers": 0}, "num_workers must be an int of at least 1"),
        ({"colour": 3}, "no setting 'colour'"),
        ({"num_beams": 2}, "num_beams"),
        ({"streamer": TextStreamer(TOKENIZER)}, "streamer must be a ParallelStreamer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_settings_that_a_session_cannot_honour_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        begin(**settings)
    begin().step()


@pytest.mark.parametrize(
    ("prompt", "error", "said"),
    [
        (torch.tensor([5, 6, 7]), ValueError, r"input_ids must have the shape \[rows, length\], got \[3\]"),
        (torch.tensor([[0.5]]), ValueError, "input_ids must hold token ids"),
        ({"input_ids": [[5, 6]]}, TypeError, "input_ids must be a torch.Tensor, got list"),
        ({"tokens": torch.tensor([[5]])}, ValueError, r"prompt must hold input_ids, got \['tokens'\]"),
        (torch.tensor([[5], [6]]), ValueError, "a session has one prompt"),
        (None, ValueError, "task must be a non-empty string or a chat"),
        ("", ValueError, "task must be a non-empty string or a chat"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_prompt_is_refused(prompt: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        HogwildSession(small_model(), TOKENIZER, prompt)


def test_a_streamer_of_one_row_allows_one_worker() -> None:
    session = begin(num_workers=1, streamer=TextStreamer(TOKENIZER))
    with pytest.raises(ValueError, match="streamer must be a ParallelStreamer"):
        session.add_worker()


def test_weights_that_change_are_noticed() -> None:
    model = hf_parallel.enable(dense.in_float64(tiny.build("llama")))
    session = begin(model)
    session.step()
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    with pytest.raises(ValueError, match="weights of the model have changed"):
        session.step()


def test_a_model_that_was_moved_is_noticed() -> None:
    model = copy.deepcopy(small_model())
    session, quiet = begin(model), begin()
    session.run(3)
    before = state(session)
    model.to(torch.float64)
    with pytest.raises(ValueError, match=r"on cpu in torch.float32 when .* began, now it is on cpu in torch.float64"):
        session.step()
    assert state(session) == before
    model.to(torch.float32)
    session.run(5)
    quiet.run(8)
    assert state(session) == state(quiet)


def test_a_session_waits_for_its_model_to_be_enabled_again() -> None:
    model = copy.deepcopy(small_model())
    session, quiet = begin(model), begin()
    session.run(3)
    before = state(session)
    hf_parallel.disable(model)
    for use in (session.step, session.finish):
        with pytest.raises(RuntimeError, match=r"not enabled any more: hf_parallel\.enable\(model\)"):
            use()
    assert state(session) == before
    hf_parallel.enable(model)
    session.run(5)
    quiet.run(8)
    assert state(session) == state(quiet)


# Around it


def test_a_closed_session_gives_its_memory_back_and_does_nothing() -> None:
    ended = []

    class Listener:
        put = write_row = lambda *given: None

        def end(self) -> None:
            ended.append(True)

    with begin(streamer=Listener()) as session:
        session.run(3)
        session._run.loop.graphs = DecodeGraphs(session._run.run.cache)
        graphs = weakref.ref(session._run.loop.graphs)
    assert ended == [True]
    assert graphs() is None
    assert not session._run.run.cache.blocks
    for change in (session.step, session.add_worker, session.finish, lambda: session.inject("Alice", "Hi.")):
        with pytest.raises(RuntimeError, match="has been closed"):
            change()
    session.close()
    assert ended == [True]


def test_a_finished_session_can_be_looked_at() -> None:
    session = begin(finisher_tokens=4)
    session.run(6)
    session.add_worker()
    session.remove_worker("Alice")
    out = session.finish()
    assert session.output().conclusions == out.conclusions != [""]
    assert "So \\boxed{" in out.conclusions[0]
    with pytest.raises(RuntimeError, match="has been finished"):
        session.step()


def test_a_task_and_a_chat_are_wrapped_as_the_mode_wraps_them(embedded: tuple[Any, Any]) -> None:
    model, tokenizer = embedded
    config = hf_parallel.HogwildConfig(num_workers=2)
    expected = hf_parallel.hogwild_prompt("Name a river.", tokenizer, config)["input_ids"]
    session = HogwildSession(model, tokenizer, "Name a river.", num_workers=2)
    assert torch.equal(session._call.input_ids, expected)
    hf_parallel.disable(model)


def test_others_may_talk_to_a_session_that_runs() -> None:
    """They get their turn between two passes."""
    session = begin(max_new_tokens=200)
    done = threading.Event()

    def talk() -> None:
        for number in range(5):
            session.inject("common", f"Remark {number}.")
        session.add_worker("Zoe")
        done.set()

    other = threading.Thread(target=talk)
    other.start()
    session.run(60)
    assert done.wait(timeout=60)
    other.join()
    told = [step.text for step in session.history if step.name == "common"]
    assert told == [f"Remark {number}.a" for number in range(5)]
    session.run(5)
    assert "Zoe" in session.texts


def test_others_do_not_wait_for_more_than_a_pass_or_two() -> None:
    session = begin(max_new_tokens=5000)
    over, waited = threading.Event(), []

    def talk() -> None:
        for _ in range(10):
            time.sleep(0.004)  # so that it asks while a step is taken
            asked = session.passes
            session.inject("common", "Hm.")
            waited.append(session.passes - asked)
        over.set()

    other = threading.Thread(target=talk)
    other.start()
    while not over.is_set():
        session.run(5)
    other.join()
    assert sorted(waited)[7] <= 2


def test_a_step_cannot_be_entered_again() -> None:
    class Nosy:
        session: HogwildSession

        def put(self, value: Any) -> None:
            if value.ndim == 1:
                self.session.inject("Alice", "Me, too.")

        write_row = end = lambda *given: None

    nosy = Nosy()
    nosy.session = session = begin(streamer=nosy)
    with pytest.raises(RuntimeError, match="called again from a processor or a streamer"):
        session.step()
    assert session.passes == 0
