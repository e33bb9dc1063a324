"""Outputs of all modes: short representations, copies, pickles, and JSON files."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mode_cases import BUILT_IN, small_call
from workers import TOKENIZER

import hf_parallel
from hf_parallel import HogwildOutput, ParallelOutput
from hf_parallel.cache import BlockCache

pytestmark = [pytest.mark.filterwarnings("ignore")]

NOT_SAVED = {"past_key_values", "scores", "logits", "attentions", "hidden_states", "record"}


@pytest.fixture(scope="module")
def outputs() -> dict[str, Any]:
    """Outputs of two prompts, by mode."""
    model = hf_parallel.enable(copy.deepcopy(tiny.build("llama")))
    ids = torch.stack(tiny.make_prompts([9, 9], seed=1))
    call = {"tokenizer": TOKENIZER, "return_dict_in_generate": True, "seed": 3, "output_logits": True}
    without_logits = {"tokenizer": TOKENIZER, "return_dict_in_generate": True, "seed": 3}
    return {
        mode: model.generate(ids, **(without_logits if mode == "skeleton_of_thought" else call) | small_call(mode))
        for mode in BUILT_IN
    }


def shown(output: Any) -> dict[str, Any]:
    """Return all that an output holds and derives, as JSON shows it, except its logits and its cache."""
    fields = {f.name: getattr(output, f.name) for f in dataclasses.fields(output) if f.name not in NOT_SAVED}
    tensors = {name: value.tolist() for name, value in fields.items() if isinstance(value, torch.Tensor)}
    plain = {name: value for name, value in fields.items() if name not in tensors}
    derived = {"dict": output.to_dict(TOKENIZER), "texts": output.answer_texts(TOKENIZER), "all": output.to_records()}
    return json.loads(json.dumps([tensors, plain, derived], default=dataclasses.asdict))


@pytest.mark.parametrize("mode", BUILT_IN)
def test_a_saved_output_is_loaded_as_it_was(outputs: dict[str, Any], mode: str, tmp_path: Path) -> None:
    out = outputs[mode]
    out.save(tmp_path / "out.json")
    json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)  # JSON has no NaN
    loaded = ParallelOutput.load(tmp_path / "out.json")
    assert type(loaded) is type(out)
    assert shown(loaded) == shown(out)
    assert loaded.sequences.dtype == torch.int64
    assert torch.equal(loaded[0], loaded.sequences)
    assert set(loaded.keys()) == set(out.keys()) - {"past_key_values", "logits"}
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "out.json").read_text()


@pytest.mark.parametrize("mode", BUILT_IN)
def test_pickles_and_deep_copies_hold_no_cache(outputs: dict[str, Any], mode: str) -> None:
    out = outputs[mode]
    data = pickle.dumps(out)
    for twin in (pickle.loads(data), copy.deepcopy(out)):
        assert type(twin) is type(out)
        assert twin.past_key_values is None
        assert list(twin.keys()) == [name for name in out.keys() if name != "past_key_values"]  # noqa: SIM118
        assert shown(twin) == shown(out)
        assert (twin.logits is None) == (out.logits is None)
    cells = sum(tensor.numel() for tensor in (out.sequences, *(out.logits or ())))
    assert len(data) < 8 * cells + 40_000


@pytest.mark.parametrize("mode", BUILT_IN)
def test_a_copy_shares_what_the_output_holds(outputs: dict[str, Any], mode: str) -> None:
    out = outputs[mode]
    for twin in (copy.copy(out), dataclasses.replace(out)):
        assert isinstance(twin.past_key_values, BlockCache)
        assert all(a is b for a, b in zip(twin.to_tuple(), out.to_tuple(), strict=True))
    changed = dataclasses.replace(out, stats=None)
    assert changed.stats is None
    assert out.stats is not None


@settings(max_examples=12)
@given(st.recursive(st.text(max_size=300) | st.integers(), lambda x: st.lists(x, max_size=300), max_leaves=500))
def test_representations_are_bounded_and_escaped_whatever_a_field_holds(value: Any) -> None:
    out = HogwildOutput(
        sequences=torch.zeros(1000, 5000, dtype=torch.int64),
        history=value,
        texts=["<script>\x07" * 99] * 1000,
        transcripts=["<b>&" * 10**5],
        names=[value] * 50,
    )
    assert len(repr(out)) < 1000
    html = out._repr_html_()
    assert len(html) < 4000
    assert "<script" not in html
    assert "<b>" not in html
    assert "\x07" not in html


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all parts of a JSON value."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from places(item, (*path, name))


VALUES = st.sampled_from([None, True, -1, 0, 3, 10**40, 0.5, "", "x", "nan", [], [[]], [-1], {}, {"a": 1}, "hogwild"])


@pytest.mark.parametrize("mode", ["shared_prefix", "hogwild", "self_consistency", "pdos"])
def test_damaged_files_raise_value_errors_or_load_an_output_that_works(
    outputs: dict[str, Any], mode: str, tmp_path: Path
) -> None:
    outputs[mode].save(tmp_path / "out.json")
    text = (tmp_path / "out.json").read_text()
    content = json.loads(text)
    # Keys near the root are rare among all paths, and matter most.
    by_depth = sorted(places(content), key=len)
    found = st.sampled_from(by_depth[:60]) | st.sampled_from(by_depth)

    @settings(max_examples=60)
    @given(found, VALUES, st.booleans())
    def check(path: tuple[Any, ...], value: Any, deletes: bool) -> None:
        damaged = copy.deepcopy(content)
        *outer, last = path
        holder = damaged
        for name in outer:
            holder = holder[name]
        if deletes:
            del holder[last]
        else:
            holder[last] = value
        (tmp_path / "damaged.json").write_text(json.dumps(damaged))
        try:
            loaded = ParallelOutput.load(tmp_path / "damaged.json")
        except ValueError as error:
            if "damaged.json" not in str(error):
                raise
            return
        repr(loaded)
        shown(loaded)
        loaded.to_html(TOKENIZER)

    check()


def test_a_file_of_another_kind_or_class_raises(outputs: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    outputs["pdos"].save(path)
    with pytest.raises(ValueError, match="holds a 'PDOSOutput', which is none of HogwildOutput"):
        HogwildOutput.load(path)
    for text, message in (
        ("[]", "is not a saved output"),
        (path.read_text().replace('"version": 1', '"version": 2'), "has version 2, but only version 1"),
        (path.read_text()[:-9], "is not JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            ParallelOutput.load(path)
    with pytest.raises(ValueError, match="no record"):
        ParallelOutput(sequences=torch.zeros(1, 1)).save(path)


def test_settings_that_name_code_are_not_used(outputs: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    outputs["hogwild"].save(path)
    content = json.loads(path.read_text())
    content["run"]["settings"]["answer_pattern"] = "(a+)+b"
    path.write_text(json.dumps(content))
    loaded = ParallelOutput.load(path)
    assert loaded.record.config.answer_pattern == hf_parallel.BOXED
    assert loaded.record.settings["answer_pattern"] == "(a+)+b"
