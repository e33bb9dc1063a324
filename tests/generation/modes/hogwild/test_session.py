"""HogwildSession: steps, injected texts, removed steps, workers that join and leave."""

from __future__ import annotations

import random

import dense
import pytest
import tiny
import torch
from talks import PROMPT, TALK, begin, change_at_random, scripted
from transformers import GenerationConfig
from workers import TOKENIZER, Recording, check_against, small_model

import hf_parallel
from hf_parallel import HogwildSession
from hf_parallel.generation.modes.hogwild.cache import LAYOUTS
from hf_parallel.models.probing.capabilities import probe_capabilities


@pytest.fixture
def recorded() -> Recording:
    """The forward passes of the small model during a test."""
    return Recording()


# Steps


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_session_equals_a_call_of_the_mode(layout: str, num_workers: int) -> None:
    settings = {**TALK, "layout": layout, "num_workers": num_workers, "max_new_tokens": 20, "finisher_tokens": 3}
    expected = small_model().generate(
        PROMPT, generation_mode="hogwild", tokenizer=TOKENIZER, return_dict_in_generate=True, **settings
    )
    with HogwildSession(small_model(), TOKENIZER, PROMPT, **settings) as session:
        session.run(7)
        while session.step():
            pass
        out = session.finish()
    assert torch.equal(out.sequences, expected.sequences)
    for name in ("history", "texts", "transcripts", "answers", "conclusions"):
        assert getattr(out, name) == getattr(expected, name)
    for name in ("forward_passes", "prefilled_tokens", "decoded_tokens", "kv_bytes"):
        assert getattr(out.stats, name) == getattr(expected.stats, name)
    assert out.record.events == expected.record.events


def test_a_run_ends_when_all_workers_have_stopped() -> None:
    session = scripted("ab\\boxed{3}", "uv", num_workers=2)
    session.run()
    assert (session.answer, session.writing, session.passes) == ("3", [], 11)
    assert session.names == ["Alice", "Bob"]
    assert session.step() == session.run(5) == {}
    assert session.run(0) == {}


def test_without_a_length_workers_may_use_all_positions_of_the_model() -> None:
    config = GenerationConfig(do_sample=True)
    for given in ({}, {"generation_config": config}):
        session = begin(max_new_tokens=None, **given)
        session.run(30)
        assert (session.passes, session.writing) == (30, ["Alice", "Bob"])  # the default max_length is 20
    assert config.max_new_tokens is None
    short = begin(max_new_tokens=None, max_length=30)
    short.run()
    assert short.passes == 30 - PROMPT.shape[1]


# Against the dense oracle


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_the_dense_oracle_after_any_changes(layout: str, num_workers: int) -> None:
    """Under a sliding window."""
    model = dense.in_float64(tiny.build("starcoder2"), num_layers=2)
    oracle = dense.DenseOracle(model, probe_capabilities(model).rotary)
    session = begin(hf_parallel.enable(model), layout=layout, num_workers=num_workers, max_new_tokens=500)
    recording = Recording(model)
    done = change_at_random(session, random.Random(f"{layout}{num_workers}"), changes=9)
    assert check_against(oracle, recording.passes) < 1e-9
    assert recording.moved or layout == "contiguous"
    assert set(done) == {"inject"} | ({"inject common"} if layout != "contiguous" else set())


# Injected texts


def test_text_for_a_worker_starts_a_line_of_its_step(recorded: Recording) -> None:
    session = scripted("One", "Uno")
    session.run(2)
    session.inject("Bob", " Sure? ")
    session.step()
    common = "P[DONE][OTHERS]"
    assert recorded.passes[-1].seen == [
        f"{common}Bob 1: Un\nSure? [ME]Alice 1: On",
        f"{common}Alice 1: On[ME]Bob 1: Un\nSure? ",
    ]
    assert session.texts["Bob"] == "Bob 1: Un\nSure? o"
    assert (2, 1, "\nSure? ", "inject") in session.output().record.events


def test_text_for_all_becomes_a_step_of_the_history(recorded: Recording) -> None:
    session = scripted("A.\n\nB", "U.\n\nV")
    session.run(2)
    session.inject("common", "It rains.")
    session.step()
    common = "P[DONE]It rains.\n\n"
    assert recorded.passes[-1].seen == [
        common,
        f"{common}[OTHERS]Bob 1: U.[ME]Alice 1: A.",
        f"{common}[OTHERS]Alice 1: A.[ME]Bob 1: U.",
    ]
    session.run(2)
    common += "Alice 1: A.\n\nBob 1: U.\n\n"
    assert f"{common}[OTHERS]Bob 2: [ME]Alice 2: " in recorded.passes[-1].seen
    assert [(step.worker, step.name, step.text, step.forward_pass) for step in session.history] == [
        (-1, "common", "It rains.\n\n", 2),
        (0, "Alice", "Alice 1: A.\n\n", 4),
        (1, "Bob", "Bob 1: U.\n\n", 4),
    ]


@pytest.mark.parametrize(
    ("prefix", "written", "injected", "text"),
    [
        ("{name}: ", "", "So", "Alice: So"),
        ("{name}:", "", "So", "Alice: So"),
        ("{name}:", "", "\nSo", "Alice:\nSo"),
        ("{name}: ", "half a wo", "So", "Alice: half a wo\nSo"),
        ("{name}: ", "a line\n", "So", "Alice: a line\nSo"),
    ],
)
def test_an_injected_text_begins_a_line_or_a_step(prefix: str, written: str, injected: str, text: str) -> None:
    session = scripted(written or "x", "Uno", step_prefix=prefix)
    session.run(len(written))
    session.inject("Alice", injected)
    assert session.texts["Alice"] == text
