"""Streamers: those of transformers receive one row in every mode, those of this package all rows."""

from __future__ import annotations

import queue
import threading
from typing import Any

import pytest
import small_tokenizers
import tiny
import torch
from mode_cases import BUILT_IN, small_call, small_config
from transformers import LogitsProcessor, TextStreamer
from workers import SETTINGS, TOKENIZER, Listener, small_model, write

import hf_parallel
from hf_parallel import LogitsCache, ParallelIteratorStreamer

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


@pytest.mark.parametrize("mode", ["shared_prefix", "resample"])
def test_modes_of_tokens_stream_the_texts_of_their_rows(mode: str) -> None:
    """Rows of two prompts end at different steps; the second call of `resample` replays the first one's tokens."""
    tokenizer = small_tokenizers.make("sentencepiece")
    model = hf_parallel.enable(small_tokenizers.small_llama(tokenizer))
    ids = tokenizer(["Oslo", "Rome"], return_tensors="pt", padding=True, padding_side="left").input_ids
    ends = list(range(100, 140))  # some bytes
    settings = {**SAMPLED, "tokenizer": tokenizer, "num_return_sequences": 3, "max_new_tokens": 12}
    settings |= {"eos_token_id": ends, "logits_cache": LogitsCache(), "generation_mode": mode}
    for _ in range(2):
        streamer = ParallelIteratorStreamer(timeout=600)
        output = model.generate(ids, streamer=streamer, **settings)
        received = list(streamer)
        for row, text in enumerate(output.answer_texts(tokenizer)):
            events = [(one.text, one.event) for one in received if one.row == row]
            assert events[0] == ("", "begin")
            assert events[-1] == ("", "end")
            assert [event for _, event in events[1:-1]] == ["token"] * (len(events) - 2)
            assert len(events) - 2 == output.record.lengths[row] - ids.shape[1]
            assert "".join(text for text, _ in events) == text
        assert len(set(output.record.lengths)) > 1
        assert output.record.events == []


def test_an_iterator_that_would_yield_nothing_raises() -> None:
    assert_iteration_raises(ParallelIteratorStreamer(), ValueError, "pass generate", generation_mode="shared_prefix")
    assert_iteration_raises(ParallelIteratorStreamer(), ValueError, "pass generation_mode", generation_mode=None)


@pytest.mark.parametrize("mode", ["shared_prefix", "hogwild"])
def test_a_streamer_of_one_row_raises_and_names_those_of_many(mode: str) -> None:
    settings = {**small_call(mode), "tokenizer": TOKENIZER, "streamer": TextStreamer(TOKENIZER)}
    with pytest.raises(ValueError, match=r"ConsoleStreamer\(tokenizer\).*got a TextStreamer"):
        small_model().generate(torch.cat((PROMPT, PROMPT)), **settings)


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
