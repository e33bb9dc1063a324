"""Settings of the modes: which source goes before which, how they are stored, and how a mode is added."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import build, make_prompts
from transformers import AutoModelForCausalLM, GenerationConfig

import hf_parallel
from hf_parallel import HogwildConfig, LogitsCache, ParallelConfig, SharedPrefixConfig
from hf_parallel.generation import MODES
from hf_parallel.generation.config import make_config

IDS = make_prompts([5])[0][None]

ECHO = '''"""`generation_mode="echo"`: the prompt, again and again."""

from dataclasses import dataclass
from typing import Any, ClassVar

from hf_parallel import ParallelConfig


@dataclass
class EchoConfig(ParallelConfig):
    """Repeats the prompt.

    Parameters
    ----------
    times : int
    reverse : bool
    """

    mode: ClassVar[str] = "echo"

    times: int = 2
    reverse: bool = False

    def validate(self) -> None:
        super().validate()
        if self.times < 1:
            raise ValueError(f"times must be at least 1, got {self.times}")

    def run(self, call: Any) -> Any:
        ids = call.input_ids.flip(1) if self.reverse else call.input_ids
        return ids.repeat(1, self.times)
'''
"""A mode in one file, as somebody else would write it."""

SHARED: dict[str, Any] = {
    "seed": 5,
    "cuda_graph": False,
    "keep_completions": False,
    "replay": "hotspot",
    "prefetch": True,
    "draft_tokens": 4,
}
EVERY_SETTING: dict[str, dict[str, Any]] = {
    "hogwild": {
        "seed": [1, 2, 3],
        "cuda_graph": False,
        "replay": "hotspot",
        "prefetch": False,
        "num_workers": 3,
        "layout": "interleaved",
        "worker_names": ["Ann", "Ben", "Cy"],
        "history_header": "history\n",
        "others_header": "others\n",
        "own_header": "own\n",
        "step_gap": "\n",
        "step_prefix": "{name}: ",
        "separator": "\n",
        "sentence_ends": [".", "。"],
        "code_fence": "~~~",
        "redundancy_prompt": "Again? ",
        "redundancy_interval": 7,
        "answer_pattern": "= (\\d+)",
        "stop_on_answer": "all",
        "finisher_prompt": "So ",
        "finisher_tokens": 5,
        "collaboration_prompt": "{names} work.",
    },
    "shared_prefix": {**SHARED, "levels": [[5, 6], [7], [8, 9]]},
    "resample": {**SHARED, "levels": [[5, 6], [7]]},
    "pdos": {
        "seed": 7,
        "cuda_graph": False,
        "branch_marker": "@@",
        "title_end": "=",
        "ellipsis": "...",
        "terminator": "@@%",
        "min_branches": 3,
        "max_branches": 9,
        "min_title_tokens": 2,
        "max_title_tokens": 11,
        "join": "rotate",
        "parallel_hint": False,
        "fill_in": False,
        "max_blocks": 2,
        "branch_max_new_tokens": 12,
        "branch_stops": ["\n"],
        "branch_separator": "\n\n",
        "opening": "So\n@@",
        "format_prompt": "Use {branch_marker}, {title_end}, {ellipsis} and {terminator}.",
    },
    "self_consistency": {
        "seed": [1, 2, 3],
        "cuda_graph": False,
        "replay": "hotspot",
        "prefetch": True,
        "num_answers": 3,
        "vote": "final",
        "answer_pattern": "= (\\d+)",
        "answer_header": "({number}) ",
        "conclusion_prompt": "So ",
        "conclusion_tokens": 5,
    },
    "skeleton_of_thought": {
        "seed": [1, 2, 3],
        "cuda_graph": False,
        "replay": "hotspot",
        "prefetch": True,
        "outline_prompt": "Outline:\n",
        "outline_start": "* ",
        "point_pattern": "\\* (.+)",
        "min_points": 3,
        "max_points": 5,
        "point_prompt": "{skeleton}\nNow {number}: ",
        "point_heading": "{point}:\n",
        "point_end": "\n\n",
        "point_gap": "\n",
        "point_workers": 2,
        "conclusion_prompt": "So ",
        "outline_tokens": 9,
        "point_tokens": 8,
        "conclusion_tokens": 7,
    },
}
"""Each mode's settings, none of them as by default."""


@pytest.fixture
def model() -> Any:
    return hf_parallel.enable(copy.deepcopy(build("llama")))


@pytest.fixture
def echo(tmp_path: Path) -> Iterator[type[ParallelConfig]]:
    """The mode `echo`, imported from a file of its own; forgotten when the test is over."""
    path = tmp_path / "echo.py"
    path.write_text(ECHO, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("echo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.EchoConfig
    del MODES["echo"]


def repeated(times: int) -> torch.Tensor:
    return IDS.repeat(1, times)


# Adding a mode


def test_a_mode_is_added_by_one_file(echo: type[ParallelConfig], model: Any) -> None:
    assert MODES["echo"] is echo
    assert torch.equal(model.generate(IDS, generation_mode="echo", max_new_tokens=4), repeated(2))
    assert torch.equal(model.generate(IDS, generation_mode="echo", max_new_tokens=4, reverse=True), repeated(2).flip(1))
    with pytest.raises(ValueError, match="times must be at least 1, got 0"):
        model.generate(IDS, generation_mode="echo", max_new_tokens=4, times=0)
    with pytest.raises(ValueError, match="'echo' has no setting 'time' .* did you mean 'times'"):
        model.generate(IDS, generation_mode="echo", max_new_tokens=4, time=3)


def test_an_added_mode_has_what_generate_does_before_it(echo: type[ParallelConfig], model: Any) -> None:
    with pytest.raises(ValueError, match="num_beams"):
        model.generate(IDS, generation_mode="echo", num_beams=2)
    sampled = model.generate(IDS, generation_mode="echo", max_new_tokens=4, do_sample=True, num_return_sequences=3)
    assert torch.equal(sampled, repeated(2).expand(3, -1))


def test_a_config_without_a_name_is_no_mode() -> None:
    before = dict(MODES)

    @dataclasses.dataclass
    class Shared(ParallelConfig):
        """What several modes have in common."""

    assert before == MODES
    with pytest.raises(NotImplementedError):
        Shared().run(None)  # type: ignore[arg-type]


# Precedence


@pytest.mark.parametrize(
    ("keyword", "given", "in_call", "in_model", "expected"),
    [
        (None, None, None, None, 2),
        (None, None, None, 7, 7),
        (None, None, 6, 7, 6),
        (None, 5, 6, 7, 5),
        (4, 5, 6, 7, 4),
        (4, None, 6, None, 4),
        (None, 5, None, 7, 5),
        (2, 5, 6, 7, 2),
        (None, 2, 6, 7, 2),
        (None, None, 2, 7, 2),
    ],
)
@pytest.mark.parametrize("as_object", [True, False])
def test_keyword_goes_before_parallel_config_before_generation_config(
    keyword: int | None,
    given: int | None,
    in_call: int | None,
    in_model: int | None,
    expected: int,
    as_object: bool,
    echo: type[ParallelConfig],
    model: Any,
) -> None:
    """Also where what goes before is what the default would be (2)."""
    make = echo if as_object else dict
    arguments: dict[str, Any] = {"generation_mode": "echo"}
    if keyword is not None:
        arguments["times"] = keyword
    if given is not None:
        arguments["parallel_config"] = make(times=given)
    arguments["generation_config"] = GenerationConfig(max_new_tokens=4)
    if in_call is not None:
        arguments["generation_config"].parallel_config = make(times=in_call)
    if in_model is not None:
        model.generation_config.parallel_config = make(times=in_model)
    assert torch.equal(model.generate(IDS, **arguments), repeated(expected))


def test_settings_of_several_sources_are_joined(echo: type[ParallelConfig], model: Any) -> None:
    model.generation_config.parallel_config = {"times": 3, "reverse": False}
    out = model.generate(IDS, max_new_tokens=4, parallel_config=echo(reverse=True))
    assert torch.equal(out, repeated(3).flip(1))


def test_mode_is_taken_from_keyword_then_object_then_generation_configs(echo: type[ParallelConfig], model: Any) -> None:
    plain = model.generate(IDS, max_new_tokens=4, do_sample=False)
    model.generation_config.generation_mode = "shared_prefix"
    model.generation_config.do_sample = False
    named = GenerationConfig(max_new_tokens=4, do_sample=False)
    named.generation_mode = "echo"
    assert torch.equal(model.generate(IDS, max_new_tokens=4), plain)
    assert torch.equal(model.generate(IDS, generation_config=named), repeated(2))
    assert torch.equal(model.generate(IDS, max_new_tokens=4, parallel_config=echo(times=3)), repeated(3))
    assert torch.equal(model.generate(IDS, generation_config=named, generation_mode="shared_prefix"), plain)
    assert torch.equal(model.generate(IDS, generation_config=named, generation_mode=None), plain)


@pytest.mark.parametrize("where", ["call", "model"])
def test_a_setting_beside_parallel_config_is_not_ignored(where: str, echo: type[ParallelConfig], model: Any) -> None:
    config = GenerationConfig(max_new_tokens=4) if where == "call" else model.generation_config
    config.times = 3
    with pytest.raises(ValueError, match="times is in generation_config itself"):
        model.generate(IDS, generation_mode="echo", generation_config=config if where == "call" else None)
    assert model.generate(IDS, generation_mode="shared_prefix", max_new_tokens=4).shape[1] == IDS.shape[1] + 4


def test_a_cache_of_the_usual_kind_may_be_asked_for(model: Any) -> None:
    model.generation_config.cache_implementation = "dynamic"
    plain = model.generate(IDS, max_new_tokens=4, do_sample=False)
    mode = {"generation_mode": "shared_prefix"}
    assert torch.equal(model.generate(IDS, max_new_tokens=4, do_sample=False, **mode), plain)


def test_tokens_are_returned_as_generate_returns_them(model: Any) -> None:
    out = model.generate(IDS.int(), max_new_tokens=4, generation_mode="shared_prefix")
    assert out.dtype == model.generate(IDS.int(), max_new_tokens=4).dtype == torch.int64


def test_stored_settings_serve_only_the_mode_that_they_were_stored_for(echo: type[ParallelConfig], model: Any) -> None:
    model.generation_config.generation_mode = "hogwild"
    model.generation_config.parallel_config = {"num_workers": 3}
    assert torch.equal(model.generate(IDS, max_new_tokens=4, generation_mode="echo"), repeated(2))


def test_a_call_leaves_the_callers_config_alone(model: Any) -> None:
    config = SharedPrefixConfig(levels=[[5, 6], [7], [8]], seed=3)
    before = copy.deepcopy(vars(config))
    for _ in range(2):
        model.generate(parallel_config=config, max_new_tokens=3, do_sample=True)
    assert vars(config) == before


# Storing


def test_examples_name_every_setting_of_every_mode() -> None:
    for mode, settings in EVERY_SETTING.items():
        assert set(settings) == set(MODES[mode].fields()) - set(MODES[mode].not_stored)
        defaults = MODES[mode]()
        assert all(getattr(defaults, name) != value for name, value in settings.items())
    assert set(EVERY_SETTING) == set(MODES)


@pytest.mark.parametrize("mode", EVERY_SETTING)
def test_every_setting_is_documented(mode: str) -> None:
    documented = "\n".join(cls.__doc__ or "" for cls in MODES[mode].__mro__)
    assert [name for name in MODES[mode].fields() if name not in documented] == []


@pytest.mark.parametrize("mode", EVERY_SETTING)
def test_to_dict_and_back(mode: str) -> None:
    cls, settings = MODES[mode], EVERY_SETTING[mode]
    config = cls(**settings)
    assert config.to_dict() == settings
    assert cls(**config.to_dict()) == config
    assert cls(**json.loads(json.dumps(config.to_dict()))) == config
    assert cls().to_dict() == {}


def test_to_dict_holds_what_was_given_and_what_was_changed() -> None:
    config = HogwildConfig(num_workers=2)
    assert config.to_dict() == {"num_workers": 2}, "given, though it is the default"
    config.layout = "contiguous"
    assert config.to_dict() == {"num_workers": 2, "layout": "contiguous"}
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert twin.to_dict() == config.to_dict()
    assert (
        dataclasses.replace(config, num_workers=3).to_dict().items()
        >= {"num_workers": 3, "layout": "contiguous"}.items()
    )


def test_what_lives_in_this_process_is_passed_on_but_not_stored(tmp_path: Path) -> None:
    cache = LogitsCache()
    config = SharedPrefixConfig(logits_cache=cache, seed=3)
    assert make_config("shared_prefix", config).logits_cache is cache  # type: ignore[attr-defined]
    assert copy.deepcopy(config).logits_cache is copy.copy(cache) is cache
    assert config.to_dict() == {"seed": 3}
    stored = GenerationConfig(max_new_tokens=9)
    stored.parallel_config = config.to_dict()
    stored.save_pretrained(tmp_path)


@pytest.mark.parametrize("as_object", [True, False])
@pytest.mark.parametrize("mode", EVERY_SETTING)
def test_settings_travel_in_generation_config_json(mode: str, as_object: bool, tmp_path: Path) -> None:
    config = MODES[mode](**EVERY_SETTING[mode])
    stored = GenerationConfig(max_new_tokens=9)
    stored.generation_mode = mode
    stored.parallel_config = config if as_object else config.to_dict()
    stored.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert loaded.generation_mode == mode
    assert make_config(mode, loaded.parallel_config) == config


def test_a_saved_model_brings_its_mode_and_settings(echo: type[ParallelConfig], model: Any, tmp_path: Path) -> None:
    """Under code that calls plain `generate`; a process that does not enable the model sees none of it."""
    plain = model.generate(IDS, max_new_tokens=4, do_sample=False)
    model.generation_config.generation_mode = "echo"
    model.generation_config.parallel_config = echo(times=3)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__name__ == type(model).__name__
    assert torch.equal(loaded.generate(IDS, max_new_tokens=4, do_sample=False), plain)
    assert torch.equal(hf_parallel.enable(loaded).generate(IDS, max_new_tokens=4), repeated(3))
