"""A Hogwild! call as a whole: budgets, batches, outputs, costs and streaming."""

from __future__ import annotations

from typing import Any

import pytest
import small_tokenizers
import tiny
import torch
from workers import SETTINGS, TOKENIZER, WORDY, Listener, encode, small_model, write

import hf_parallel

EOS = tiny.EOS
STOP_BLANK, BLANKS = 4, 5


def generate(ids: torch.Tensor, **settings: Any) -> Any:
    """Generate the choices of the tiny model itself."""
    given = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True, **SETTINGS, **settings}
    return small_model().generate(ids, generation_mode="hogwild", **given)


# Outputs


@pytest.mark.parametrize("layout", ["combined", "interleaved", "contiguous"])
def test_outputs_contain_everything_that_was_written(layout: str) -> None:
    scripts = [["a", STOP_BLANK, "bb.\n\nc"], ["dddd.", BLANKS, "e"], ["ff", EOS]]
    out = write(*scripts, layout=layout, finisher="3}")
    prompt = encode("P")
    budget = max(len(encode(script)) for script in scripts)
    for worker, (script, row) in enumerate(zip(scripts, out.sequences.tolist(), strict=True)):
        own = [step for step in out.history[0] if step.worker == worker]
        assert [step.step for step in own] == list(range(1, len(own) + 1))
        assert all(step.text == TOKENIZER.decode(step.tokens) for step in own)
        tokens = [token for step in own for token in step.tokens]
        ended = [EOS] if EOS in script else []
        assert row == prompt + tokens + ended + [tiny.PAD] * (len(row) - len(prompt + tokens + ended))
        assert out.texts[worker] == "".join(step.text for step in own)
        generated = [t for step in own for t in step.tokens[len(f"{step.name} {step.step}: ") :]]
        wanted = [t for t in encode(script) if t != EOS]
        assert generated == (wanted if ended else (wanted + [ord("x")] * budget)[:budget])
    assert out.transcripts == ["\n\n".join(step.text.rstrip() for step in out.history[0])]


# Budgets and costs


@pytest.mark.parametrize("budget", [1, 2, 13])
def test_the_budget_counts_passes_and_not_inserted_tokens(budget: int) -> None:
    out = write("a.\n\nb.\n\nc.\n\nd", "hello world", max_new_tokens=budget)
    assert out.stats.decoded_tokens == 2 * budget
    assert out.stats.forward_passes == 2 + budget - 1  # prompt; headers and prefixes; one pass per token
    assert max(step.forward_pass or 0 for step in out.history[0]) <= budget


# Batches


def test_two_prompts_in_a_batch_give_the_text_of_each_alone() -> None:
    prompts = tiny.make_prompts([23, 11])
    ids, mask = tiny.left_pad(prompts)
    settings = {"num_workers": 3, "finisher_tokens": 4, **WORDY}
    both = generate(ids, attention_mask=mask, **settings)
    for index, prompt in enumerate(prompts):
        alone = generate(prompt[None], **settings)
        assert both.history[index] == alone.history[0]
        assert (both.answers[index], both.conclusions[index]) == (alone.answers[0], alone.conclusions[0])
        for worker in range(3):
            row = both.sequences[3 * index + worker, len(ids[0]) - len(prompt) :]
            expected = alone.sequences[worker]
            assert row[: len(expected)].tolist() == expected.tolist()[: len(row)]
    finished = [step for history in both.history for step in history if step.forward_pass]
    assert len(finished) > 6


# Streaming


def test_a_streamer_receives_everything_in_order() -> None:
    listener = Listener()
    out = write("a.\n\nb", ["c", EOS], streamer=listener, finisher="1}")
    assert isinstance(listener, hf_parallel.ParallelStreamer)
    assert listener.rows[0] == [
        ("Alice 1: ", "begin"),
        *((c, "token") for c in "a.\n\n"),
        ("", "step"),
        ("Alice 2: ", "begin"),
        ("b", "token"),
        ("", "end"),
    ]
    assert listener.rows[1] == [("Bob 1: ", "begin"), ("c", "token"), ("", "step"), ("", "end")]
    assert ["".join(text for text, _ in events) for events in listener.rows.values()] == out.texts
    prompt, *tokens = listener.tokens
    assert prompt == [encode("P")]
    assert tokens[:3] == [[ord("a"), ord("c")], [ord("."), EOS], [ord("\n"), tiny.PAD]]
    assert listener.ended == 1


def test_a_stop_string_ends_its_worker() -> None:
    tokenizer = small_tokenizers.make("split_marker")
    scripts = [tokenizer.encode(text) for text in ("we are done now and then", "no not yet and so on")]
    out = write(*scripts, tokenizer=tokenizer, stop_strings=["done"])
    assert out.history[0][0].forward_pass == len("we are done")
    assert out.texts[0].endswith("we are done")
    assert out.texts[1].endswith("no not yet and so onxxxx"[: len("no not yet and so on")])
