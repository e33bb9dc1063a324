"""The progress bar: its last state has the numbers of the call, and it closes however the call ends."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from ascii_tokenizer import AsciiTokenizer
from mode_cases import BUILT_IN, small_call
from transformers.utils import logging

from hf_parallel.engine import Engine

PROMPT = tiny.make_prompts([9], seed=4)[0][None]


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Return the bars of all later calls, which write to a buffer each."""
    made: list[Any] = []
    plain = logging.tqdm

    def tqdm(**settings: Any) -> Any:
        made.append(plain(**settings, file=io.StringIO(), ncols=200, leave=True))
        return made[-1]

    monkeypatch.setattr(logging, "tqdm", tqdm)
    return made


def last_state(bar: Any) -> str:
    return bar.fp.getvalue().rstrip().rpartition("\r")[2]


def check(bars: list[Any], record: Any, stats: Any) -> None:
    (bar,) = bars
    assert bar.disable, "it is closed"
    assert bar.n == record.passes
    found = re.search(r"(\d+) rows, (\d+) tokens", last_state(bar))
    assert found is not None
    assert int(found[2]) == stats.decoded_tokens
    bars.clear()


@pytest.mark.parametrize("mode", BUILT_IN)
def test_the_last_state_has_the_passes_and_tokens_of_the_call(mode: str, model: Any, bars: list[Any]) -> None:
    call = {**small_call(mode), "tokenizer": AsciiTokenizer(), "return_dict_in_generate": True}
    for shown in (False, True):
        given = {**copy.deepcopy(call), "progress": shown}
        out = model.generate(PROMPT, **given)
        assert bool(bars) is shown
    check(bars, out.record, out.stats)
    with Engine(model, AsciiTokenizer()) as engine:
        given = {name: value for name, value in copy.deepcopy(call).items() if name != "generation_mode"}
        handle = engine.submit(PROMPT, mode, progress=True, **given)
        check(bars, handle.result().record, handle.stats)
