"""`hf-parallel demo`: other tokens, interrupts, and the clock of the benchmarks."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
from consoles import a_pipe, printed

import hf_parallel
from benchmarks.measure import StepClock, dense_bytes, long_prompt
from hf_parallel.cli import demo
from hf_parallel.cli.main import main

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_the_quick_demo_gets_the_tokens_of_generate(monkeypatch: pytest.MonkeyPatch, embedded: tuple[Any, Any]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(demo, "load_model", lambda name: embedded)
    with redirect_stdout(io.StringIO()) as out:
        assert main(["demo", "--quick", "--max-new-tokens", "22"]) == 0
    shown = out.getvalue()
    assert "22 passes, 44 tokens" in shown
    assert "same tokens: yes" in shown
    assert "\x1b" not in shown
    lines = [line.strip() for line in shown.splitlines()]
    sampled = [line for line in lines[lines.index("Sampled, 4 of 4 completions:") :] if line.startswith("- ")]
    assert len(sampled) == 4
    assert len(set(sampled)) > 1


def test_a_demo_with_other_tokens_says_so(monkeypatch: pytest.MonkeyPatch, embedded: tuple[Any, Any]) -> None:
    model, tokenizer = embedded
    outputs = iter([torch.full((2, 12), 20), torch.full((2, 12), 21)])
    monkeypatch.setattr(demo, "measure", lambda *arguments, **settings: (next(outputs), 1.0))
    console = a_pipe()
    hf_parallel.enable(model)
    try:
        demo.show_shared_prefix(console, model, tokenizer, 0, length=10, rows=2, new=2)
    finally:
        hf_parallel.disable(model)
    assert "same tokens: NO" in printed(console)


def test_the_first_interrupt_skips_the_workers_and_the_second_exits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], embedded: tuple[Any, Any]
) -> None:
    def interrupted(*arguments: Any, **settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "load_model", lambda name: embedded)
    monkeypatch.setattr(demo, "show_workers", interrupted)
    monkeypatch.setattr(demo, "show_shared_prefix", interrupted)
    assert main(["demo"]) == 130
    assert "on to the second part" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--max-new-tokens", "0"], ["--task", " "], ["--model", "/nowhere"]])
def test_invalid_options_of_the_demo_raise(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert main(["demo", *arguments]) == 2
    assert re.search(arguments[0] if arguments[0] != "--model" else "/nowhere", capsys.readouterr().err)


def test_the_clock_records_the_prompt_and_every_token(embedded: tuple[Any, Any]) -> None:
    model, tokenizer = embedded
    counts: list[int] = []
    clock = StepClock(counts.append)
    prompt = long_prompt(tokenizer, 8)
    given = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(prompt, streamer=clock, **given)
    assert prompt.shape == (1, 8)
    assert counts == [1, 2, 3]
    assert clock.seconds == pytest.approx(clock.prefill_seconds + sum(clock.step_seconds))
    per_token = model.config.num_hidden_layers * 2 * model.config.num_key_value_heads * model.config.head_dim * 4
    assert dense_bytes(output.past_key_values) == (8 + 2) * per_token
