"""The demo: its workers, and the comparison with plain `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_parallel
from examples import demo

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_the_quick_demo_gets_the_tokens_of_generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], embedded: tuple[Any, Any]
) -> None:
    monkeypatch.setattr(demo, "load_model", lambda name: embedded)
    demo.main(["--quick", "--max-new-tokens", "22"])
    shown = capsys.readouterr().out
    assert "22 passes, 44 tokens" in shown
    assert "same tokens: yes" in shown
    lines = [line.strip() for line in shown.splitlines()]
    sampled = [line for line in lines[lines.index("Sampled, 4 of 4 completions:") :] if line.startswith("- ")]
    assert len(sampled) == 4
    assert len(set(sampled)) > 1


def test_a_demo_with_other_tokens_says_so(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    embedded: tuple[Any, Any],
) -> None:
    model, tokenizer = embedded
    monkeypatch.setattr(tokenizer, "model_max_length", 64)
    monkeypatch.setattr(tokenizer, "deprecation_warnings", {})  # it warns about long texts once
    outputs = iter([torch.full((2, 12), 20), torch.full((2, 12), 21)])
    monkeypatch.setattr(demo, "measure", lambda *arguments, **settings: (next(outputs), 1.0))
    hf_parallel.enable(model)
    try:
        demo.show_shared_prefix(model, tokenizer, 0, length=10, rows=2, new=2)
    finally:
        hf_parallel.disable(model)
    assert "same tokens: NO" in capsys.readouterr().out
    assert "sequence length" not in caplog.text
