"""Streamers: those of transformers hear all of one row in every mode, ours hear every row, from another thread too."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from typing import Any

import pytest
import tiny
import torch
from stories import answer, tell
from transformers import LogitsProcessor, TextIteratorStreamer, TextStreamer
from workers import SETTINGS, TOKENIZER, small_model, write

import hf_parallel
from hf_parallel import ParallelIteratorStreamer, ParallelStreamer

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = tiny.make_prompts([9], seed=4)[0][None]
SAMPLED: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "seed": 3, "return_dict_in_generate": True}
STORY = "Now. ####A:......\n####B:......\n####%%%%"
EOS = tiny.EOS
MODES: dict[str, dict[str, Any]] = {
    "shared_prefix": {},
    "resample": {"logits_cache": hf_parallel.LogitsCache()},
    "hogwild": {**SETTINGS, "num_workers": 1, "separator": "a", "sequence_bias": [[[ord("a")], 6.0]]},
    "pdos": {"tokenizer": TOKENIZER, "parallel_hint": False},
    "self_consistency": {"tokenizer": TOKENIZER, "num_answers": 3, "answer_pattern": "."},
    "skeleton_of_thought": {
        "tokenizer": TOKENIZER,
        "outline_prompt": "O:",
        "point_prompt": "Q:",
        "point_heading": "",
        "point_gap": "|",
        "conclusion_prompt": "=",
        "outline_tokens": 4,
        "point_tokens": 3,
    },
}
"""Every mode, with settings under which the tiny model, which writes letters at random, has something to say."""


class Listener:
    def __init__(self) -> None:
        self.put = self.end = lambda *given: None
        self.heard: list[tuple[int, str, str]] = []

    def write_row(self, row: int, text: str, event: str) -> None:
        self.heard.append((row, text, event))


def test_every_mode_is_tried() -> None:
    assert set(MODES) == set(hf_parallel.generation.MODES)


@pytest.mark.parametrize("mode", MODES)
def test_a_text_streamer_hears_all_that_one_row_is(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompt, headers, and what was generated."""
    streamer = TextStreamer(TOKENIZER)
    out = small_model().generate(PROMPT, generation_mode=mode, streamer=streamer, **SAMPLED, **MODES[mode])
    assert capsys.readouterr().out == TOKENIZER.decode(out.sequences[0].tolist()) + "\n"
    assert out.sequences.shape[1] > PROMPT.shape[1] + 5


@pytest.mark.parametrize("mode", MODES)
def test_a_text_iterator_streamer_hears_it_in_another_thread(mode: str) -> None:
    streamer, result = TextIteratorStreamer(TOKENIZER, skip_prompt=True, timeout=60), {}

    def generate() -> None:
        settings = {**SAMPLED, **MODES[mode]}
        result["out"] = small_model().generate(PROMPT, generation_mode=mode, streamer=streamer, **settings)

    thread = threading.Thread(target=generate)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == TOKENIZER.decode(result["out"].sequences[0, PROMPT.shape[1] :].tolist())


def test_a_single_worker_streams_the_prefixes_of_its_steps(capsys: pytest.CaptureFixture[str]) -> None:
    write("One.\n\nTwo.", streamer=TextStreamer(TOKENIZER, skip_prompt=True))
    assert capsys.readouterr().out == "Alice 1: One.\n\nAlice 2: Two.\n"


def test_a_text_streamer_hears_the_joined_branches(capsys: pytest.CaptureFixture[str]) -> None:
    out = tell(
        [STORY + "So.", EOS], branches=["one####", "two####"], streamer=TextStreamer(TOKENIZER, skip_prompt=True)
    )
    text = TOKENIZER.decode(answer(out))
    assert "A:one" in text
    assert capsys.readouterr().out == text + "\n"


# Many rows


def test_the_iterator_is_a_parallel_streamer() -> None:
    assert isinstance(ParallelIteratorStreamer(), ParallelStreamer)


def test_the_iterator_tells_what_a_listener_hears_in_order() -> None:
    listener, streamer = Listener(), ParallelIteratorStreamer(timeout=60)
    write("One.\n\nTwo.", "Uno.", streamer=listener)
    thread = threading.Thread(target=lambda: write("One.\n\nTwo.", "Uno.", streamer=streamer))
    thread.start()
    heard = [(row, text, event) for row, text, event in streamer]
    thread.join()
    assert heard == listener.heard
    assert {row for row, _, _ in heard} == {0, 1}
    assert "".join(text for row, text, event in heard if row == 0 and event == "token") == "One.\n\nTwo."


def test_texts_come_while_they_are_written() -> None:
    """The first can be read before the call has ended."""
    streamer, read = ParallelIteratorStreamer(timeout=60), threading.Event()

    class Waits(torch.nn.Module):
        keeps_rows = False

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 3:
                assert read.wait(timeout=60)
            return scores

    settings = {**SETTINGS, "max_new_tokens": 6, "logits_processor": [Waits()], "streamer": streamer}
    thread = threading.Thread(
        target=lambda: small_model().generate(PROMPT, generation_mode="hogwild", **settings), daemon=True
    )
    thread.start()
    kinds = [next(streamer).event for _ in range(4)]
    assert kinds == ["begin", "begin", "token", "token"]
    read.set()
    assert len(list(streamer)) > 4
    thread.join()


def test_branches_come_by_the_iterator_too() -> None:
    streamer = ParallelIteratorStreamer(timeout=60)
    out = tell([STORY, EOS], branches=["one####", "two####"], streamer=streamer)
    texts: dict[int, str] = defaultdict(str)
    for row, text, event in streamer:
        texts[row] += text if event in ("begin", "token") else ""
    assert texts[0] == STORY
    assert (texts[1], texts[2]) == ("####A:one####", "####B:two####")
    assert out.branch_texts == [[["one", "two"]]]


def test_the_iterator_waits_no_longer_than_it_should() -> None:
    streamer = ParallelIteratorStreamer(timeout=0.01)
    with pytest.raises(queue.Empty):
        next(streamer)


def test_the_iterator_serves_one_call_after_another() -> None:
    streamer = ParallelIteratorStreamer(timeout=60)
    for _ in range(2):
        write("One.", "Uno.", streamer=streamer)
        assert [piece.text for piece in streamer if piece.event == "begin"] == ["Alice 1: ", "Bob 1: "]


class Breaks(LogitsProcessor):
    """Fails at the third token."""

    keeps_rows = False

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("the third token")
        return scores


def assert_raised_here(streamer: ParallelIteratorStreamer, error: type[Exception], says: str, **settings: Any) -> None:
    """What `generate` raises in a thread of its own ends the iteration, which raises it too."""

    def fail() -> None:
        with pytest.raises(error, match=says):
            small_model().generate(PROMPT, streamer=streamer, **settings)

    thread = threading.Thread(target=fail)
    thread.start()
    with pytest.raises(error, match=says):
        list(streamer)
    thread.join()


@pytest.mark.parametrize("mode", MODES)
def test_the_iterator_raises_what_ends_the_call(mode: str) -> None:
    streamer = ParallelIteratorStreamer(timeout=60)
    settings = {**SAMPLED, **MODES[mode], "generation_mode": mode, "logits_processor": [Breaks()]}
    assert_raised_here(streamer, RuntimeError, "the third token", **settings)
    write("One.", "Uno.", streamer=streamer)
    assert [piece.text for piece in streamer if piece.event == "begin"] == ["Alice 1: ", "Bob 1: "]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"generation_mode": "hogwild", "num_workers": 0}, "num_workers must be"),
        ({"generation_mode": "hogwild"}, "tokenizer"),
        ({"generation_mode": "magic"}, "generation_mode must be"),
        ({"num_workers": 2}, "num_workers"),
    ],
)
def test_the_iterator_raises_what_is_wrong_with_the_arguments(settings: dict[str, Any], says: str) -> None:
    assert_raised_here(ParallelIteratorStreamer(timeout=60), ValueError, says, **settings)


@pytest.mark.parametrize("timeout", [0, -1, True, "soon", float("nan")])
def test_a_timeout_without_sense_is_refused(timeout: Any) -> None:
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        ParallelIteratorStreamer(timeout)
