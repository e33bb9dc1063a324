"""HogwildSession: finished steps that are forgotten, replaced or inserted, with keys computed again or kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import dense
import pytest
import tiny
from talks import begin, logits_during, scripted, state
from workers import Recording, check_against, small_model

import hf_parallel
from hf_parallel import HogwildSession
from hf_parallel.cache.arena import Arena
from hf_parallel.cache.pool import Pool
from hf_parallel.generation.decoding.runner import Runner
from hf_parallel.generation.modes.hogwild.cache import LAYOUTS
from hf_parallel.generation.modes.hogwild.edits import KEYS
from hf_parallel.models.probing.capabilities import probe_capabilities


def edit_at_random(session: HogwildSession, rng: random.Random, keys: str) -> str:
    """Edit a finished step. Return the kind of the edit."""
    kind = rng.choice(["forget", "replace", "insert"])
    number = rng.randrange(len(session.history))
    step = session.history[number]
    if kind == "forget":
        session.forget(rng.choice([number, step]), keys=keys)
    elif kind == "replace":
        session.replace(number, rng.choice(["No: ", "It is five."]), keys=keys)
    else:
        to = step.name if session.config.layout == "contiguous" else "common"
        session.inject(to, rng.choice(["First: ", "!"]), at=step, keys=keys)
    return kind


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("num_workers", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2))])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_the_dense_oracle_after_any_edits(layout: str, num_workers: int, keys: str) -> None:
    """Under a sliding window. The memory holds the tokens that the history lists."""
    model = dense.in_float64(tiny.build("starcoder2"), num_layers=2)
    oracle = dense.DenseOracle(model, probe_capabilities(model).rotary)
    session = begin(hf_parallel.enable(model), layout=layout, num_workers=num_workers, max_new_tokens=500)
    recording = Recording(model)
    rng = random.Random(f"{layout}{num_workers}{keys}")
    done = []
    while len(done) < 9:
        session.run(rng.choice([1, 2, 5]))
        if session.writing and rng.random() < 0.3:
            session.inject(rng.choice(session.writing), "Hm? ")
        if session.history:
            done.append(edit_at_random(session, rng, keys))
    session.run(3)
    assert check_against(oracle, recording.passes) < 1e-9
    assert set(done) == {"forget", "replace", "insert"}
    seen = recording.passes[-1].seen
    for step in session.history:
        assert step.text in session.transcript
        if layout != "contiguous":
            assert all(step.text in text for text in seen[-num_workers:]) or step.forward_pass >= session.passes - 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_workers_see_the_edited_text(layout: str) -> None:
    recording = Recording()
    session = scripted("A.\n\nB.\n\nCC", "U.\n\nV.\n\nWW", layout=layout)
    session.run(9)
    first = next(step for step in session.history if step.name == "Alice")
    session.replace(first, "Z.", keys="keep")
    second = next(step for step in session.history if step.name == "Bob")
    session.inject("Bob" if layout == "contiguous" else "common", "Hm.", at=second)
    last = [step for step in session.history if step.name == "Bob"][-1]
    session.forget(last)
    session.step()
    alice = "Alice 1: Z.\n\n"
    alice_2 = "Alice 2: B.\n\n"
    current = "Alice 3: C", "Bob 3: W"
    bob = "Hm.\n\nBob 1: U.\n\n"
    expected = {
        "combined": f"P[DONE]{alice}{bob}{alice_2}[OTHERS]{current[1]}[ME]{current[0]}",
        "interleaved": f"P[DONE]{alice}{bob}{alice_2}[ME]{current[0]}",
        "contiguous": f"P[OTHERS]{bob}{current[1]}[ME]{alice}{alice_2}{current[0]}",
    }
    assert recording.passes[-1].seen[0] == expected[layout]
    assert session.texts["Alice"] == "Alice 1: A.\n\nAlice 2: B.\n\nAlice 3: CC"  # what was written
    assert "Z." in session.output().transcripts[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_encoding_again_removes_what_later_text_knows(layout: str) -> None:
    """Kept keys are those that passes before the edit computed; encoded again, none of them is seen."""
    for keys in KEYS:
        recording = Recording()
        session = scripted("A.\n\nB.\n\nCC", "U.\n\nV.\n\nWW", layout=layout)
        session.run(9)
        before = sum(one.num_tokens for one in recording.passes)
        session.forget(0, keys=keys)
        edited = sum(one.num_tokens for one in recording.passes)
        session.step()
        places = [place for place in recording.passes[-1].segments[0].places if place < edited]
        num_headers = len("P[OTHERS][ME]" if layout == "contiguous" else "P[DONE][OTHERS][ME]")
        if keys == "keep":
            assert max(places) < before
        else:
            assert sum(place < before for place in places) <= num_headers < len(places)


@pytest.mark.parametrize("layout", ["combined", "interleaved"])
def test_a_forgotten_step_might_never_have_been_written(layout: str) -> None:
    """If steps are encoded again where they end, and end together."""
    model = hf_parallel.enable(dense.in_float64(tiny.build("llama"), num_layers=2))
    found = {}
    for keys in (None, *KEYS):
        session = scripted("A.\n\nBB", "U.\n\nVV", layout=layout, step_move="reencode", model=model)
        if keys is not None:
            session.inject("common", "Two and two is five.")
        session.run(5)
        if keys is not None:
            session.forget(0, keys=keys)
        (found[keys],) = logits_during(model, session.step)
    never = found[None][0, -2:]
    assert (found["reencode"][0, -2:] - never).abs().max() < 1e-9
    assert (found["keep"][0, -2:] - never).abs().max() > 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("owner", "name"), [(Arena, "write"), (Arena, "copy"), (Pool, "new_blocks"), (Runner, "compute")]
)
def test_an_edit_that_fails_leaves_the_session_unchanged(layout: str, owner: Any, name: str) -> None:
    changes: list[Callable[[HogwildSession], None]] = [
        lambda session: session.forget(0),
        lambda session: session.replace(0, "Q.", keys="keep"),
    ]
    for change in changes:
        session, undisturbed = (scripted("A.\n\nB.\n\nCC", "U.\n\nV.\n\nWW", layout=layout) for _ in range(2))
        session.run(9)
        undisturbed.run(9)
        session.forget(1, keys="keep")  # computes what is pending
        undisturbed.forget(1, keys="keep")
        before = state(session)
        method = getattr(owner, name)
        for calls in range(4):
            left = [calls]

            def fails(*given: Any, left: list[int] = left, method: Any = method, **named: Any) -> Any:
                left[0] -= 1
                if left[0] < 0:
                    raise MemoryError("out of memory")
                return method(*given, **named)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, name, fails)
                try:
                    change(session)
                except MemoryError:
                    assert state(session) == before
                else:
                    break
        else:
            change(session)
        change(undisturbed)
        session.run(2)
        undisturbed.run(2)
        assert session.texts == undisturbed.texts
        assert session.history == undisturbed.history


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.forget(99), "step must be one of the 2 steps of the history, or its index, got 99"),
        (lambda s: s.forget(True), "step must be one of"),
        (lambda s: s.forget(0, keys="drop"), "keys must be one of"),
        (lambda s: s.replace(0, ""), "text must be a non-empty string"),
        (lambda s: s.replace(0, "\ud800"), "text must be text without lone surrogates"),
        (lambda s: s.inject("Alice", "Hm.", at=0), "to must be 'common' before a step in the history, got 'Alice'"),
        (lambda s: s.inject("common", "Hm.", at=-1), "at must be one of the 2 steps"),
    ],
)
def test_invalid_edits_raise(change: Callable[[HogwildSession], Any], said: str) -> None:
    session = scripted("A.\n\nB", "U.\n\nV")
    session.run(6)
    before = state(session)
    with pytest.raises(ValueError, match=said):
        change(session)
    assert state(session) == before


def test_a_step_of_a_thinker_that_has_stopped_can_be_replaced() -> None:
    """Texts that are not split into steps are one step when they end."""
    session = begin(
        small_model(), generation_mode="async_reasoning", max_new_tokens=6, separator="\n\n", sentence_ends=["."]
    )
    session.inject("common", "Hello.")
    session.run()
    session.forget(0)
    assert session.history == []
    assert not session.writing
