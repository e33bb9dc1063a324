"""Limits of a Hogwild! run: what counts towards them, what they cut off, and what is counted as prefill."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from talks import SHORT, WORDY, begin, some_life
from transformers import LogitsProcessor
from workers import SETTINGS, TOKENIZER, encode, small_model

from hf_parallel import HogwildSession, LogitsCache
from hf_parallel.cache.hogwild import LAYOUTS
from hf_parallel.generation.decode import DecodeLoop
from hf_parallel.generation.modes.hogwild import worker
from hf_parallel.generation.modes.hogwild.worker import Problem

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = encode("P")
ENDS: dict[str, Any] = {"eos_token_id": tiny.EOS, "pad_token_id": tiny.PAD}


def generate(num_workers: int = 2, prompts: Sequence[Sequence[int]] = (PROMPT,), **settings: Any) -> Any:
    settings = {"max_new_tokens": 4, "finisher_tokens": 0, "do_sample": False, **SETTINGS, **settings}
    return small_model().generate(
        torch.tensor(prompts),
        generation_mode="hogwild",
        num_workers=num_workers,
        return_dict_in_generate=True,
        **settings,
    )


class Tired(LogitsProcessor):
    """Wants to end every row at once."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = torch.zeros_like(scores)
        wanted[:, tiny.EOS] = 1e4
        return scores + wanted


@pytest.mark.parametrize("limit", [{"min_new_tokens": 6}, {"min_length": len(PROMPT) + 6}], ids=["new", "length"])
@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_least_length_counts_what_workers_generate(limit: dict[str, int], num_workers: int) -> None:
    """Not the prefixes of their steps, nor the longest of them."""
    output = generate(num_workers, max_new_tokens=20, logits_processor=[Tired()], **ENDS, **limit)
    assert [step.forward_pass for step in output.history[0]] == [7] * num_workers


def test_an_end_is_forced_in_the_last_pass() -> None:
    sequences = generate(forced_eos_token_id=tiny.EOS, **ENDS).sequences
    for row, name in zip(sequences, ("Alice", "Bob"), strict=True):
        last = len(PROMPT) + len(f"{name} 1: ") + 4 - 1
        assert (row == tiny.EOS).nonzero().flatten().tolist() == [last]


def test_a_step_that_time_cuts_off_is_not_finished() -> None:
    output = generate(max_time=1e-9)
    assert [(len(step.tokens) > 0, step.forward_pass) for step in output.history[0]] == [(True, None)] * 2
    output = generate(logits_processor=[Tired()], max_time=1e-9, **ENDS)
    assert [step.forward_pass for step in output.history[0]] == [1, 1]  # these ended by themselves


def test_a_budget_that_only_time_ends_takes_no_memory_beforehand() -> None:
    output = generate(max_new_tokens=10**9, max_time=0.01)
    assert output.sequences.shape[1] < 1000


def test_every_forward_pass_is_in_the_seconds_of_prefill_or_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of the headers, and the one in which the finisher reads all that was written."""
    pause, run = 0.05, DecodeLoop.run

    def slow(*given: Any) -> torch.Tensor:
        time.sleep(pause)
        return run(*given)

    monkeypatch.setattr(DecodeLoop, "run", slow)
    stats = generate(finisher_tokens=2).stats
    assert stats.prefill_seconds >= 3 * pause
    assert stats.prefill_seconds + stats.decode_seconds >= stats.forward_passes * pause


# The model's positions


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each forward pass the most tokens that any of its segments sees."""
    seen: list[int] = []
    forward = DecodeLoop.forward

    def noted(loop: DecodeLoop, brought: Any, ends: Sequence[int]) -> torch.Tensor:
        logits = forward(loop, brought, ends)
        seen.append(max(sum(block.length for block in segment.view) for segment, _ in brought))
        return logits

    monkeypatch.setattr(DecodeLoop, "forward", noted)
    return seen


LONG = encode("P") * 250
TO_THE_END: dict[str, Any] = {**WORDY, "max_new_tokens": None, "max_length": tiny.MAX_POSITIONS, "finisher_tokens": 60}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_workers", [2, 5])
def test_workers_stop_where_the_models_positions_are_used_up(
    num_workers: int, layout: str, read: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Before: the finisher still reads all that they wrote."""
    worker._say_full.cache_clear()
    for _ in range(2):
        output = generate(num_workers, [LONG], layout=layout, **TO_THE_END)
        assert output.record.passes < tiny.MAX_POSITIONS - len(LONG)
        assert output.conclusions[0].startswith(SETTINGS["finisher_prompt"])
    assert tiny.MAX_POSITIONS - 150 < max(read) <= tiny.MAX_POSITIONS
    said = [record.getMessage() for record in caplog.records if record.name == worker.__name__]
    assert said == ["workers stop: what they have written together uses up the model's 512 positions"]


def test_workers_stop_in_a_replay_where_they_stopped() -> None:
    cache = LogitsCache()
    first, again = (generate(3, [LONG], logits_cache=cache, **TO_THE_END) for _ in range(2))
    assert first.texts == again.texts
    assert again.stats.replayed_tokens == again.stats.decoded_tokens


def test_a_session_without_a_length_ends_there_too(read: list[int]) -> None:
    with HogwildSession(small_model(), TOKENIZER, torch.tensor([LONG]), **WORDY) as session:
        session.run()
        assert session.writing == []
        assert session.passes < tiny.MAX_POSITIONS - len(LONG)
        session.finish()
    assert max(read) <= tiny.MAX_POSITIONS


def to_be_read(problem: Problem) -> int:
    """All that a problem holds, counted anew."""
    written = [step.tokens for step in problem.history]
    written += [one.current.tokens for one in problem.workers if not one.left]
    return sum(map(len, (problem.call.prompts[0], *problem.headers, *written)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_there_is_to_read_is_counted_whatever_happens(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps end, are told and are forgotten, workers come, go and leave; also where it is told again from a file."""
    session, path, counted = begin(layout=layout, max_new_tokens=60), tmp_path / "session", []
    is_full = Problem.is_full

    def noted(problem: Problem) -> bool:
        counted.append((problem.length, to_be_read(problem)))
        return is_full(problem)

    monkeypatch.setattr(Problem, "is_full", noted)
    some_life(session, random.Random(layout), changes=12)
    session.save(path)
    loaded = HogwildSession.load(path, small_model(), TOKENIZER)
    assert loaded._run.problem.length == session._run.problem.length
    for each in (session, loaded):
        each.remove_worker(each.writing[0])
        each.finish()
        problem = each._run.problem
        assert problem.length == to_be_read(problem)
    assert len(counted) > 50
    assert all(ours == true for ours, true in counted)


def test_who_asks_for_rows_beyond_the_models_positions_gets_them(read: list[int]) -> None:
    """As from `generate`."""
    output = generate(prompts=[LONG * 2], max_new_tokens=20)
    assert output.record.passes == 20
    assert max(read) > tiny.MAX_POSITIONS


def test_a_prompt_that_leaves_no_room_for_the_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves no room for 3 workers in the model's 512 positions"):
        generate(3, [encode("P") * 480], max_new_tokens=10)


# Tokens that are allowed


@pytest.mark.parametrize("num_workers", [1, 3])
def test_prefix_allowed_tokens_fn_is_told_which_problem_a_worker_is_at(num_workers: int) -> None:
    """And which one the finisher reads."""
    output = generate(
        num_workers,
        [encode("P"), encode("Q")],
        finisher_tokens=3,
        prefix_allowed_tokens_fn=lambda problem, ids: encode("pq"[problem]),
    )
    written = [text.split(": ")[1] for text in output.texts]
    assert written == ["pppp"] * num_workers + ["qqqq"] * num_workers
    assert output.conclusions == [SETTINGS["finisher_prompt"] + letter * 3 for letter in "pq"]


def test_workers_that_come_later_are_at_the_same_problem() -> None:
    settings = {**SHORT, "max_new_tokens": 9, "do_sample": False}
    session = HogwildSession(
        small_model(),
        TOKENIZER,
        torch.tensor([PROMPT]),
        prefix_allowed_tokens_fn=lambda problem, ids: encode("pq"[problem]),
        **settings,
    )
    session.run(2)
    session.add_worker()
    session.run(2)
    assert session.texts == {"Alice": "Alice 1: pppp", "Bob": "Bob 1: pppp", "Carol": "Carol 1: pp"}
