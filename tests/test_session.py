"""HogwildSession: the mode taken step by step, and what is put in and taken out on the way."""

from __future__ import annotations

import random

import dense
import pytest
import tiny
import torch
from talks import PROMPT, WORDY, begin, scripted, some_life, state
from test_hogwild import Replay
from transformers import GenerationConfig
from workers import TOKENIZER, Recording, _Reader, small_model

import hf_parallel
from hf_parallel import HogwildSession
from hf_parallel.cache import Block
from hf_parallel.cache.hogwild import LAYOUTS, HogwildCache
from hf_parallel.models.attention import capabilities

pytestmark = pytest.mark.usefixtures("one_thread")


class Recorded(Recording):
    """Knows of steps that are forgotten, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        cut = HogwildCache._cut

        def noted(cache: HogwildCache, block: Block, start: int, stop: int) -> None:
            self.events.append(lambda replay: replay.cut(block, start, stop))
            cut(cache, block, start, stop)

        monkeypatch.setattr(HogwildCache, "_cut", noted)

    def seen(self) -> list[str]:
        """All that each row of the last pass saw, what it brought last."""
        reader = Reader()
        for event in self.events:
            event(reader)
        return reader.passes[-1].seen


class Reader(_Reader):
    def cut(self, block: Block, start: int, stop: int) -> None:
        self.texts[block] = self.texts[block][:start] + self.texts[block][stop:]


class Oracle(Replay):
    """Plays what was recorded by the dense oracle."""

    def cut(self, block: Block, start: int, stop: int) -> None:
        del self.pieces[block][start:stop]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


# Steps


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_session_writes_what_the_mode_writes(layout: str, num_workers: int) -> None:
    settings = {**WORDY, "layout": layout, "num_workers": num_workers, "max_new_tokens": 20, "finisher_tokens": 3}
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


def test_a_step_says_what_each_worker_got() -> None:
    session = scripted("One.\n\nTwo", "Uno")
    assert [session.step() for _ in range(3)] == [{"Alice": a, "Bob": b} for a, b in zip("One", "Uno", strict=True)]
    assert session.run(3) == {"Alice": ".\n\nAlice 2: ", "Bob": "xxx"}
    assert session.texts == {"Alice": "Alice 1: One.\n\nAlice 2: ", "Bob": "Bob 1: Unoxxx"}
    assert [step.text for step in session.history] == ["Alice 1: One.\n\n"]
    assert session.transcript == "Alice 1: One.\n\nAlice 2:\n\nBob 1: Unoxxx"
    assert (session.passes, session.stats.forward_passes) == (6, 7)  # the prompt was read in one of its own


def test_a_run_ends_when_nobody_writes_any_more() -> None:
    session = scripted("ab\\boxed{3}", "uv", num_workers=2)
    session.run()
    assert (session.answer, session.writing, session.passes) == ("3", [], 11)
    assert session.names == ["Alice", "Bob"]
    assert session.step() == session.run(5) == {}
    assert session.run(0) == {}


def test_output_tells_how_things_stand_and_changes_nothing() -> None:
    session, quiet = begin(), begin()
    for _ in range(5):
        session.run(3)
        out = session.output()
        assert out.texts == list(session.texts.values())
        assert [step.forward_pass for step in out.history[0][-2:]] == [None, None]
        assert out.transcripts == [session.transcript]
    quiet.run(15)
    assert state(session) == state(quiet)


def test_the_model_is_free_between_steps() -> None:
    model, session, quiet = small_model(), begin(), begin()
    before = model.config._attn_implementation
    for _ in range(4):
        session.step()
        assert model.config._attn_implementation == before
        model.generate(PROMPT, generation_mode=None, max_new_tokens=2)
        model.generate(PROMPT, generation_mode="hogwild", tokenizer=TOKENIZER, **{**WORDY, "max_new_tokens": 2})
    quiet.run(4)
    assert session.texts == quiet.texts


def test_without_a_length_workers_have_the_models_positions() -> None:
    session = begin(max_new_tokens=None)
    assert session._call.max_new_tokens == tiny.MAX_POSITIONS - PROMPT.shape[1]
    config = GenerationConfig(do_sample=True)
    assert begin(max_new_tokens=None, generation_config=config)._call.max_new_tokens > 100
    assert config.max_new_tokens is None
    assert begin(max_new_tokens=None, max_length=30)._call.max_new_tokens == 7


def test_without_a_seed_pytorchs_decides() -> None:
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        session = begin(seed=None, temperature=1.0)
        session.run(10)
        texts.append(session.texts)
    assert texts[0] == texts[1] != texts[2]


# Against the dense oracle


@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_equal_the_dense_oracle_whatever_is_done(recorded: Recorded, layout: str, num_workers: int) -> None:
    """Under a sliding window; and a session that is loaded halfway goes on with the same logits."""
    model = hf_parallel.enable(dense.in_float64(tiny.build("starcoder2")))
    session = begin(model, layout=layout, num_workers=num_workers, max_new_tokens=500)
    some_life(session, random.Random(f"{layout}{num_workers}"), changes=14)
    oracle = Oracle(dense.DenseOracle(model, capabilities(model).rotary))
    for event in recorded.events:
        event(oracle)
    assert oracle.furthest < 1e-9
    assert oracle.moved > 3 or layout == "contiguous"
    assert {next(iter(event)) for event in session._run.journal} == (
        {"pass", "tell", "add", "remove"} | ({"forget"} if layout != "contiguous" else set())
    )


# What is put in


def test_a_worker_reads_what_it_is_told_behind_its_own_text(recorded: Recorded) -> None:
    session = scripted("One", "Uno")
    session.run(2)
    session.inject("Bob", " Sure? ")
    session.step()
    common = "P[DONE][OTHERS]"
    assert recorded.seen() == [
        f"{common}Bob 1: Un Sure? [ME]Alice 1: On",
        f"{common}Alice 1: On[ME]Bob 1: Un Sure? ",
    ]
    assert session.texts["Bob"] == "Bob 1: Un Sure? o"
    assert (2, 1, " Sure? ", "inject") in session.output().record.events
    session.inject("common", "Yes.")
    assert session.output().record.events[-2:] == [(3, -1, "Yes.\n\n", "inject"), (3, -1, "", "step")]


def test_what_all_are_told_is_a_step_of_the_history(recorded: Recorded) -> None:
    session = scripted("A.\n\nB", "U.\n\nV")
    session.run(2)
    session.inject("common", "It rains.")
    session.step()
    common = "P[DONE]It rains.\n\n"
    assert recorded.seen() == [
        common,
        f"{common}[OTHERS]Bob 1: U.[ME]Alice 1: A.",
        f"{common}[OTHERS]Alice 1: A.[ME]Bob 1: U.",
    ]
    session.run(2)
    common += "Alice 1: A.\n\nBob 1: U.\n\n"
    assert f"{common}[OTHERS]Bob 2: [ME]Alice 2: " in recorded.seen()
    assert [(step.worker, step.name, step.text, step.forward_pass) for step in session.history] == [
        (-1, "common", "It rains.\n\n", 2),
        (0, "Alice", "Alice 1: A.\n\n", 4),
        (1, "Bob", "Bob 1: U.\n\n", 4),
    ]


def test_workers_may_be_told_something_before_the_first_step(recorded: Recorded) -> None:
    session = scripted("A", "U")
    session.inject("common", "Hello.\n\n")
    session.inject("Alice", "I ")
    session.step()
    assert "P[DONE]Hello.\n\n[OTHERS]Bob 1: [ME]Alice 1: I " in recorded.seen()


def test_an_answer_that_somebody_tells_is_not_the_workers() -> None:
    session = scripted("One of us", "Uno", answer_pattern=r"\d", stop_on_answer="any")
    session.run(2)
    session.inject("Alice", " Is it 7? ")
    session.inject("common", "Or is it 8?")
    session.run(3)
    assert (session.answer, session.writing) == (None, ["Alice", "Bob"])


def test_what_a_worker_is_told_ends_no_step() -> None:
    session = scripted("One\n\n", "Uno")
    session.run(3)
    session.inject("Alice", " Stop.")
    session.run(2)
    assert session.texts["Alice"] == "Alice 1: One Stop.\n\n"


# What is forgotten


def test_a_forgotten_step_is_seen_no_more_and_what_came_after_it_moves_up(recorded: Recorded) -> None:
    session = scripted("A.\n\nB.\n\nC", "U.\n\nV.\n\nW")
    session.run(9)
    assert [step.text for step in session.history] == [
        f"{t}.\n\n" for t in ("Alice 1: A", "Bob 1: U", "Alice 2: B", "Bob 2: V")
    ]
    session.forget(session.history[1])
    session.step()
    steps = "Alice 1: A.\n\nAlice 2: B.\n\nBob 2: V.\n\n"
    assert recorded.seen()[0] == f"P[DONE]{steps}[OTHERS]Bob 3: W[ME]Alice 3: C"
    assert [step.text for step in session.history] == ["Alice 1: A.\n\n", "Alice 2: B.\n\n", "Bob 2: V.\n\n"]
    assert "Bob 1: U." in session.texts["Bob"]
    session.forget(0)
    session.forget(1)
    session.step()
    assert recorded.seen()[0] == "P[DONE]Alice 2: B.\n\n[OTHERS]Bob 3: Wx[ME]Alice 3: Cx"


def test_a_step_that_has_only_just_ended_may_be_forgotten(recorded: Recorded) -> None:
    """Its last token has not been read by then."""
    session = scripted("A.\n\nB", "Uno")
    session.run(4)
    blocks = len(session._run.run.cache.blocks)
    session.forget(0)
    assert len(session._run.run.cache.blocks) == blocks - 1
    session.step()
    assert recorded.seen() == ["P[DONE][OTHERS]Bob 1: Unox[ME]Alice 2: ", "P[DONE][OTHERS]Alice 2: [ME]Bob 1: Unox"]
    assert session.history == []


def test_what_all_were_told_may_be_forgotten(recorded: Recorded) -> None:
    session = scripted("One", "Uno")
    session.inject("common", "No.")
    session.inject("common", "Yes.")
    session.forget(0)
    session.run(2)
    session.inject("common", "Well.")
    session.step()
    assert recorded.seen()[1] == "P[DONE]Yes.\n\nWell.\n\n[OTHERS]Bob 1: Un[ME]Alice 1: On"
    session.forget(session.history[0])
    session.step()
    assert recorded.seen()[0] == "P[DONE]Well.\n\n[OTHERS]Bob 1: Uno[ME]Alice 1: One"


def test_a_forgotten_step_gives_its_memory_back() -> None:
    session = scripted("A.\n\nB.\n\nC", "U.\n\nV.\n\nW")
    session.run(9)
    session.step()
    tokens = sum(block.length for block in session._run.run.cache.blocks)
    session.forget(1)
    assert sum(block.length for block in session._run.run.cache.blocks) == tokens - len("Bob 1: U.\n\n")


# Who is there


def test_a_worker_that_comes_sees_all_and_is_seen(recorded: Recorded) -> None:
    session = scripted("A.\n\nB", "U", "V", num_workers=1)
    session.run(5)
    assert recorded.seen()[-1] == "P[DONE]Alice 1: A.\n\n[ME]Alice 2: "  # nobody else: no such header
    assert session.add_worker() == "Bob"
    session.step()
    common = "P[DONE]Alice 1: A.\n\n[OTHERS]"
    assert recorded.seen()[1:] == [f"{common}Bob 1: [ME]Alice 2: B", f"{common}Alice 2: B[ME]Bob 1: "]
    assert session.add_worker("Zoe") == "Zoe"
    session.step()
    assert recorded.seen()[-1] == f"{common}Alice 2: Bx|Bob 1: x[ME]Zoe 1: "
    assert session.names == session.writing == ["Alice", "Bob", "Zoe"]
    out = session.output()
    assert out.texts == list(session.texts.values())
    assert [TOKENIZER.decode(row.tolist()).rstrip("<pad>") for row in out.sequences] == [
        "PAlice 1: A.\n\nAlice 2: Bxx",
        "PBob 1: xx",
        "PZoe 1: x",
    ]


def test_a_worker_that_goes_takes_what_it_is_writing_along(recorded: Recorded) -> None:
    session = scripted("A.\n\nB", "U.\n\nV", "Yes")
    session.run(6)
    session.remove_worker("Bob")
    session.step()
    steps = "Alice 1: A.\n\nBob 1: U.\n\n"
    common = f"P[DONE]{steps}[OTHERS]"
    assert recorded.seen() == [f"{common}Carol 1: Yesxxx[ME]Alice 2: Bx", f"{common}Alice 2: Bx[ME]Carol 1: Yesxxx"]
    assert session.names == session.writing == ["Alice", "Carol"]
    assert [step.text for step in session.history] == ["Alice 1: A.\n\n", "Bob 1: U.\n\n"]
    assert session.output().texts[1] == "Bob 1: U.\n\nBob 2: Vx"
    assert (6, 1, "", "end") in session.output().record.events


def test_a_worker_that_has_ended_may_go_too(recorded: Recorded) -> None:
    session = scripted("A" + chr(tiny.EOS), "Uno", eos_token_id=tiny.EOS, stop_on_answer="never", layout="contiguous")
    session.run(3)
    assert (session.names, session.writing) == (["Alice", "Bob"], ["Bob"])
    session.remove_worker("Alice")
    session.step()
    assert recorded.seen() == ["P[ME]Bob 1: Uno"]
    assert session.output().history[0][0].name == "Alice"  # what was finished stays told


def test_a_worker_that_has_left_something_unread_may_go_too(recorded: Recorded) -> None:
    session = scripted("\\boxed{3}", "Unounouno", answer_pattern=r"boxed\{(\d)\}")
    session.run()
    assert (session.answer, session.writing) == ("3", [])
    session.remove_worker("Bob")
    session.add_worker()
    session.step()
    assert recorded.seen()[-1] == "P[DONE]Alice 1: \\boxed{3}\n\n[OTHERS][ME]Carol 1: "


def test_logits_of_those_who_came_later_stand_at_their_passes() -> None:
    session = begin(num_workers=2, output_logits=True)
    session.step()
    session.remove_worker("Bob")
    session.run(2)
    session.add_worker()
    session.run(2)
    logits = session.output().logits
    assert logits is not None
    assert [[bool(row.any()) for row in step] for step in logits] == [
        [True, True],
        [True, False],
        [True, False],
        [True, False, True],
        [True, False, True],
    ]


def test_a_name_may_be_had_again_when_its_worker_has_gone() -> None:
    session = scripted("One", "Uno")
    session.step()
    session.remove_worker("Bob")
    assert session.add_worker() == "Carol"
    assert session.add_worker("Bob") == "Bob"
    session.step()
    assert session.texts == {"Alice": "Alice 1: On", "Carol": "Carol 1: x", "Bob": "Bob 1: x"}
    for name in ("Alice", "Bob", "Carol"):
        session.remove_worker(name)
    assert session.step() == {}


def test_the_budget_of_passes_is_everyones() -> None:
    session = scripted("One.\n\n", "Uno", max_new_tokens=8, num_workers=1, separator="\n\n")
    session.run(3)
    session.add_worker()
    session.run()
    assert session.passes == 8
    assert session.history[0].forward_pass == 6
    assert session.texts["Bob"] == "Bob 1: " + "x" * 5


def test_limits_on_the_length_count_passes_for_those_who_came_later() -> None:
    session = begin(eos_token_id=[ord("e"), ord("a"), ord(".")], min_new_tokens=10, num_workers=1, max_new_tokens=60)
    session.run(5)
    session.add_worker()
    session.run(5)
    assert session.writing == ["Alice", "Bob"]
    session.run()
    assert session.passes < 60


def test_workers_that_come_draw_tokens_of_their_own() -> None:
    session = begin(num_workers=1, temperature=50.0)
    session.step()
    for name in ("Xa", "Xb", "Xc"):
        session.add_worker(name)
    session.run(12)
    written = [text[len("Xa 1: ") :][:6] for name, text in session.texts.items() if name != "Alice"]
    assert len(set(written)) == 3


def test_a_worker_that_went_before_it_finished_a_step_keeps_its_name() -> None:
    session = scripted("One", "Uno", worker_names=["Ann", "Ben"])
    session.add_worker("Zoe")
    session.step()
    session.remove_worker("Ben")
    session.remove_worker("Zoe")
    out = session.output()
    assert out.names == [["Ann", "Ben", "Zoe"]]
    assert out.to_dict()["sections"][0]["columns"] == ["Ann", "Ben", "Zoe"]


def test_a_transcript_tells_who_was_there_and_what_was_said_to_them() -> None:
    session = scripted("One", "Uno")
    session.run(2)
    session.inject("common", "It rains.")
    session.remove_worker("Bob")
    session.add_worker()
    session.inject("Alice", " Why? ")
    session.run(2)
    (section,) = session.output().to_dict()["sections"]
    assert section["columns"] == ["Alice", "Bob", "Carol", "common"]
    texts = [card["given"] + "".join(text for _, text, _ in card["pieces"]) for card in section["cards"]]
    assert texts == ["Alice 1: On Why? ex", "Bob 1: Un", "It rains.\n\n", "Carol 1: xx"]
    assert [card["column"] for card in section["cards"]] == [0, 1, 3, 2]
    assert "It rains." in session.output().to_html()
