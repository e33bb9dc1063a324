"""Outputs of all modes: short representations, copies, and pickles."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from typing import Any

import pytest
import tiny
import torch
from mode_cases import BUILT_IN, small_call
from workers import TOKENIZER

import hf_parallel
from hf_parallel import HogwildOutput
from hf_parallel.models.probing.signature import CACHE

pytestmark = [pytest.mark.filterwarnings("ignore")]

NOT_SAVED = {CACHE, "scores", "logits", "attentions", "hidden_states", "record"}


@pytest.fixture(scope="module")
def outputs() -> dict[str, Any]:
    """Outputs of two prompts, by mode."""
    model = hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
    ids = torch.stack(tiny.make_prompts([9, 9], seed=1))
    found = {}
    for mode in BUILT_IN:
        call = {"tokenizer": TOKENIZER, "return_dict_in_generate": True, "seed": 3} | small_call(mode)
        try:
            found[mode] = model.generate(ids, output_logits=True, **call)
        except ValueError as error:
            assert "output_logits" in str(error)  # noqa: PT017 (the mode refuses them)
            found[mode] = model.generate(ids, **call)
    return found


def shown(output: Any) -> dict[str, Any]:
    """Return all that an output holds and derives, as JSON shows it, except its logits and its cache."""
    fields = {f.name: getattr(output, f.name) for f in dataclasses.fields(output) if f.name not in NOT_SAVED}
    tensors = {name: value.tolist() for name, value in fields.items() if isinstance(value, torch.Tensor)}
    plain = {name: value for name, value in fields.items() if name not in tensors}
    derived = {"dict": output.to_dict(TOKENIZER), "texts": output.answer_texts(TOKENIZER), "all": output.to_records()}
    return json.loads(json.dumps([tensors, plain, derived], default=dataclasses.asdict))


@pytest.mark.parametrize("mode", BUILT_IN)
def test_pickles_and_deep_copies_hold_no_cache(outputs: dict[str, Any], mode: str) -> None:
    out = outputs[mode]
    data = pickle.dumps(out)
    for twin in (pickle.loads(data), copy.deepcopy(out)):
        assert type(twin) is type(out)
        assert twin.past_key_values is None
        assert list(twin.keys()) == [name for name in out.keys() if name != CACHE]  # noqa: SIM118
        assert shown(twin) == shown(out)
        assert (twin.logits is None) == (out.logits is None)
    cells = sum(tensor.numel() for tensor in (out.sequences, *(out.logits or ())))
    assert len(data) < 8 * cells + 40_000


def test_representations_are_short(outputs: dict[str, Any]) -> None:
    for mode, out in outputs.items():
        assert repr(out).startswith(f"{type(out).__name__}(generation_mode={mode!r}, sequences=[")
        assert len(repr(out)) < 120
    empty = HogwildOutput(sequences=torch.zeros(2, 5, dtype=torch.int64))
    assert repr(empty) == "HogwildOutput(generation_mode=None, sequences=[2, 5], tokens=0, passes=0)"


@pytest.mark.parametrize(
    ("mode", "is_one_answer"),
    [("best_of", False), ("hogwild", True), ("self_consistency", False), ("shared_prefix", False), ("pdos", True)],
)
def test_pages_compare_only_parts_of_one_answer_with_sequential_decoding(
    outputs: dict[str, Any], mode: str, is_one_answer: bool
) -> None:
    page = outputs[mode].to_html(TOKENIZER)
    assert ("of sequential decoding" in page) == is_one_answer
    assert ("tokens per pass, in " in page) != is_one_answer
