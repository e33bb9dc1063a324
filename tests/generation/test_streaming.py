"""Streamers: those of transformers receive one row in every mode, those of this package all rows."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
import tiny
import torch
from mode_cases import BUILT_IN, small_call, small_config
from transformers import LogitsProcessor, TextStreamer
from workers import SETTINGS, TOKENIZER, Listener, small_model, write

from hf_parallel import ParallelIteratorStreamer

PROMPT = tiny.make_prompts([9], seed=4)[0][None]
SAMPLED: dict[str, Any] = {"do_sample": True, "seed": 3, "return_dict_in_generate": True, "tokenizer": TOKENIZER}
EOS = tiny.EOS
ONE_ROW = [small_call(mode) for mode in BUILT_IN if small_config(mode).rows_per_prompt == 1]
ONE_ROW.append({**small_call("hogwild"), "num_workers": 1})
"""Calls that generate one row. transformers' streamers support no more."""
one_row = pytest.mark.parametrize("call", ONE_ROW, ids=lambda call: call["generation_mode"])


@one_row
def test_a_text_streamer_receives_the_whole_row(call: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Prompt, headers and generated text."""
    out = small_model().generate(PROMPT, streamer=TextStreamer(TOKENIZER), **call | SAMPLED)
    assert capsys.readouterr().out == TOKENIZER.decode(out.sequences[0].tolist()) + "\n"
    assert out.sequences.shape[1] > PROMPT.shape[1] + 5


# Many rows


def test_the_iterator_yields_what_a_streamer_receives_in_order() -> None:
    listener, streamer = Listener(), ParallelIteratorStreamer(timeout=600)
    write("One.\n\nTwo.", "Uno.", streamer=listener)
    thread = threading.Thread(target=lambda: write("One.\n\nTwo.", "Uno.", streamer=streamer))
    thread.start()
    received = [tuple(item) for item in streamer]
    thread.join()
    assert received == listener.written
    assert {row for row, _, _ in received} == {0, 1}
    assert "".join(text for row, text, event in received if row == 0 and event == "token") == "One.\n\nTwo."


def test_text_arrives_before_the_call_ends() -> None:
    streamer, read = ParallelIteratorStreamer(timeout=600), threading.Event()

    class Waits(torch.nn.Module):
        keeps_rows = False

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 3:
                assert read.wait(timeout=600)
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


def test_the_iterator_raises_after_its_timeout() -> None:
    streamer = ParallelIteratorStreamer(timeout=0.01)
    with pytest.raises(queue.Empty):
        next(streamer)


class Breaks(LogitsProcessor):
    """Raises at the third token."""

    keeps_rows = False

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("the third token")
        return scores


def assert_iteration_raises(
    streamer: ParallelIteratorStreamer, error: type[Exception], says: str, **settings: Any
) -> None:
    """`generate` raises in its own thread, and the iteration raises the same error."""

    def fail() -> None:
        with pytest.raises(error, match=says):
            small_model().generate(PROMPT, streamer=streamer, **settings)

    thread = threading.Thread(target=fail)
    thread.start()
    with pytest.raises(error, match=says):
        list(streamer)
    thread.join()


@pytest.mark.parametrize("mode", BUILT_IN)
def test_the_iterator_raises_the_error_of_the_call(mode: str) -> None:
    streamer = ParallelIteratorStreamer(timeout=600)
    settings = {**small_call(mode), **SAMPLED, "logits_processor": [Breaks()]}
    assert_iteration_raises(streamer, RuntimeError, "the third token", **settings)
    write("One.", "Uno.", streamer=streamer)
    assert [item.text for item in streamer if item.event == "begin"] == ["Alice 1: ", "Bob 1: "]
