"""Settings of the modes: precedence of their sources, storage, and registration of new modes."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from mode_cases import BUILT_IN, every_setting
from tiny import build, left_pad, make_prompts
from transformers import AutoModelForCausalLM, GenerationConfig

import hf_parallel
from hf_parallel import LogitsCache, ParallelConfig, SharedPrefixConfig
from hf_parallel.generation import MODES
from hf_parallel.generation.call import GenerationCall
from hf_parallel.generation.config import ModeTraits, make_config
from hf_parallel.generation.decoding.loop import DecodeLoop
from hf_parallel.generation.decoding.prefill import insert_prompts, prefill_leaves, prefix_cache_of
from hf_parallel.generation.decoding.wants import Steps
from hf_parallel.generation.presets import Preset
from hf_parallel.generation.sampling.token_table import TokenTable

IDS = make_prompts([5])[0][None]


@pytest.fixture
def model() -> Any:
    return hf_parallel.enable(copy.deepcopy(build("llama")))


@pytest.fixture
def echo() -> Iterator[type[ParallelConfig]]:
    """Config class of a mode that repeats the prompt, unregistered after the test."""

    @dataclasses.dataclass
    class EchoConfig(ParallelConfig):
        mode: ClassVar[str] = "echo"

        times: int = 2
        reverse: bool = False

        def validate(self) -> None:
            super().validate()
            if self.times < 1:
                raise ValueError(f"times must be at least 1, got {self.times}")

        def make_run(self, call: Any) -> Any:
            ids = call.input_ids.flip(1) if self.reverse else call.input_ids

            def generate() -> Steps[torch.Tensor]:
                yield from ()
                return ids.repeat(1, self.times)

            return SimpleNamespace(generate=generate)

    yield EchoConfig
    del MODES["echo"]


def repeated(times: int) -> torch.Tensor:
    return IDS.repeat(1, times)


# Adding a mode


def test_defining_a_config_registers_its_mode(echo: type[ParallelConfig], model: Any) -> None:
    assert MODES["echo"] is echo
    assert torch.equal(model.generate(IDS, generation_mode="echo", max_new_tokens=4), repeated(2))
    assert torch.equal(model.generate(IDS, generation_mode="echo", max_new_tokens=4, reverse=True), repeated(2).flip(1))
    with pytest.raises(ValueError, match="times must be at least 1, got 0"):
        model.generate(IDS, generation_mode="echo", max_new_tokens=4, times=0)
    with pytest.raises(ValueError, match="'echo' has no setting 'time' .* did you mean 'times'"):
        model.generate(IDS, generation_mode="echo", max_new_tokens=4, time=3)


@pytest.mark.parametrize("wrap", [lambda steps: steps, list], ids=["leaves", "list of leaves"])
def test_a_mode_that_inserts_prompts_without_yield_from_raises(
    wrap: Any, echo: type[ParallelConfig], model: Any
) -> None:
    def generate(call: GenerationCall) -> Steps[None]:
        cache = prefix_cache_of(call)
        leaves: Any = insert_prompts(call, cache)
        loop = DecodeLoop(call, cache, TokenTable(call.input_ids, call.pad_token_id, call.max_new_tokens))
        yield from prefill_leaves(loop, cache, wrap(leaves))

    echo.make_run = lambda self, call: SimpleNamespace(generate=lambda: generate(call))  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="leaves must be nodes .* got a Prefix: .* with `yield from`"):
        model.generate(IDS, generation_mode="echo", max_new_tokens=4)


# Precedence


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ((7,), 7),
        ((7, 6), 6),
        ((7, 6, 5), 5),
        ((7, 6, 5, 4), 4),
        ((7, 6, 5, 2), 2),
    ],
)
def test_keyword_overrides_parallel_config_overrides_generation_config_overrides_the_model(
    sources: tuple[int, ...], expected: int, echo: type[ParallelConfig], model: Any
) -> None:
    """Also with the default value (2)."""
    for make in (echo, dict):
        own, stored = copy.deepcopy(model), GenerationConfig(max_new_tokens=4)
        arguments: dict[str, Any] = {"generation_mode": "echo", "generation_config": stored}
        for level, times in enumerate(sources):
            if level < 2:
                (own.generation_config, stored)[level].parallel_config = make(times=times)
            else:
                arguments |= {"parallel_config": make(times=times)} if level == 2 else {"times": times}
        assert torch.equal(own.generate(IDS, **arguments), repeated(expected))


@pytest.fixture
def marked(echo: type[ParallelConfig], model: Any) -> Any:
    """A model with a preset of `echo`."""
    sampling = {"do_sample": True, "temperature": 0.5, "no_repeat_ngram_size": 2}
    echo.traits = ModeTraits(presets={"small": Preset({"times": 5, "reverse": True}, sampling)})
    model.generation_config.parallel_preset = "small"
    return model


def test_every_source_overrides_the_preset(echo: type[ParallelConfig], marked: Any) -> None:
    arguments: dict[str, Any] = {"generation_mode": "echo", "max_new_tokens": 4}
    assert torch.equal(marked.generate(IDS, **arguments), repeated(5).flip(1))
    for given in ({"times": 2}, {"parallel_config": echo(times=2)}):
        assert torch.equal(marked.generate(IDS, **arguments, **given), repeated(2).flip(1))
    marked.generation_config.parallel_config = {"times": 2}
    assert torch.equal(marked.generate(IDS, **arguments), repeated(2).flip(1))


PAPERS = [mode for mode in BUILT_IN if "paper" in MODES[mode].traits.presets]


@pytest.mark.parametrize("mode", PAPERS)
def test_a_named_preset_is_stored_by_its_name_and_given_settings_override_it(mode: str, tmp_path: Path) -> None:
    values = MODES[mode].traits.presets["paper"].settings
    config = MODES[mode](preset="paper")
    assert values
    assert {name: getattr(config, name) for name in values} == values
    config.save_pretrained(tmp_path)
    loaded = ParallelConfig.from_pretrained(tmp_path)
    assert loaded == config
    assert loaded.to_dict() == {"preset": "paper"}
    for name in values:
        default = getattr(MODES[mode](), name)
        for given in (MODES[mode](**{name: default}), {name: default}):
            changed = make_config(mode, {"preset": "paper"}, given)
            assert getattr(changed, name) == default
            assert {other: getattr(changed, other) for other in values if other != name} == {
                other: value for other, value in values.items() if other != name
            }


def test_a_named_preset_replaces_that_of_the_model_and_an_unknown_one_raises(
    echo: type[ParallelConfig], marked: Any
) -> None:
    """The named one also overrides how the model's generation config samples, which that of the model does not."""
    presets = {**echo.traits.presets, "paper": Preset({"times": 3}, {"do_sample": False, "max_new_tokens": 6})}
    echo.traits = ModeTraits(presets=presets)
    marked.generation_config.do_sample = True
    seen: list[Any] = []
    run = echo.make_run
    echo.make_run = lambda self, call: (seen.append(call.generation_config.do_sample), run(self, call))[1]  # type: ignore[method-assign]
    arguments: dict[str, Any] = {"generation_mode": "echo", "max_new_tokens": 4}
    assert torch.equal(marked.generate(IDS, **arguments, preset="paper"), repeated(3))
    assert torch.equal(marked.generate(IDS, **arguments, preset="paper", do_sample=True, times=4), repeated(4))
    assert torch.equal(marked.generate(IDS, **arguments, preset=None), repeated(2))
    assert torch.equal(marked.generate(IDS, **arguments), repeated(5).flip(1))
    assert seen == [False, True, True, True]
    for name in ("papers", ["paper"]):
        with pytest.raises(ValueError, match=r"preset must be 'small' or 'paper' or None for 'echo', got"):
            marked.generate(IDS, **arguments, preset=name)
    with pytest.raises(ValueError, match="preset must be None for 'shared_prefix', got 'paper'; .*hogwild"):
        marked.generate(IDS, generation_mode="shared_prefix", preset="paper")


def test_a_copied_a_saved_and_an_exported_model_keep_their_preset(
    echo: type[ParallelConfig], marked: Any, tmp_path: Path
) -> None:
    marked.generation_config._from_model_config = False  # as after loading a generation_config.json
    marked.save_pretrained(tmp_path / "saved")
    loaded = hf_parallel.enable(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))
    for other in (copy.deepcopy(marked), pickle.loads(pickle.dumps(marked)), loaded):
        assert torch.equal(other.generate(IDS, max_new_tokens=4, generation_mode="echo"), repeated(5).flip(1))
    marked.generation_config.generation_mode = "echo"
    hf_parallel.hub.export(marked, tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", trust_remote_code=True)
    assert torch.equal(exported.generate(IDS, max_new_tokens=4), repeated(5).flip(1))


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


@pytest.mark.parametrize("both_sides", [False, True])
def test_padding_on_the_right_is_moved_to_the_left(model: Any, both_sides: bool) -> None:
    model.generation_config.generation_mode = "shared_prefix"
    prompts = make_prompts([9, 5])
    ids, mask = left_pad(prompts)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=4, repetition_penalty=1.5)
    shift = -2 if both_sides else -4
    right, right_mask = (torch.stack((matrix[0], matrix[1].roll(shift))) for matrix in (ids, mask))
    out = model.generate(right, attention_mask=right_mask, max_new_tokens=4, repetition_penalty=1.5)
    assert torch.equal(out, expected)


# Storing


@pytest.mark.parametrize("mode", BUILT_IN)
def test_every_setting_has_a_value_other_than_its_default(mode: str) -> None:
    settings, defaults = every_setting(mode), MODES[mode]()
    excluded = {"step_move", "preset"} | ({"draft_tokens"} if "control_prompt" in settings else set())
    assert set(settings) == set(MODES[mode].fields()) - set(MODES[mode].not_stored()) - excluded
    assert all(getattr(defaults, name) != value for name, value in settings.items())


def test_objects_of_the_process_are_passed_on_but_not_stored(tmp_path: Path) -> None:
    cache = LogitsCache()
    config = SharedPrefixConfig(logits_cache=cache, seed=3)
    assert make_config("shared_prefix", config).logits_cache is cache  # type: ignore[attr-defined]
    assert copy.deepcopy(config).logits_cache is copy.copy(cache) is cache
    assert config.to_dict() == {"seed": 3}
    stored = GenerationConfig(max_new_tokens=9)
    stored.parallel_config = config.to_dict()
    stored.save_pretrained(tmp_path)


@pytest.mark.parametrize("as_object", [True, False])
@pytest.mark.parametrize("mode", BUILT_IN)
def test_settings_are_restored_from_generation_config_json(mode: str, as_object: bool, tmp_path: Path) -> None:
    config = MODES[mode](**every_setting(mode))
    assert config.to_dict() == every_setting(mode)
    assert MODES[mode]().to_dict() == {}
    stored = GenerationConfig(max_new_tokens=9)
    stored.generation_mode = mode
    stored.parallel_config = config if as_object else config.to_dict()
    stored.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert loaded.generation_mode == mode
    assert make_config(mode, loaded.parallel_config) == config


# Errors about settings say what was meant

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"parallel_config": hf_parallel.HogwildConfig}, "got the class HogwildConfig; did you mean HogwildConfig()"),
    ({"generation_mode": hf_parallel.HogwildConfig}, "got the class HogwildConfig; did you mean 'hogwild'"),
    (
        {"generation_mode": "hogwild", "parallel_config": hf_parallel.HogwildConfig},
        "got the class HogwildConfig; did you mean HogwildConfig()",
    ),
    ({"parallel_config": {"step_gap": "|"}}, "step_gap can be of hogwild or async_reasoning, so pass generation_mode="),
    ({"parallel_config": {"generation_mode": "pdos", "join": "rotate"}}, "pass generation_mode='pdos' as an argument"),
    ({"parallel_config": {"num_worker": 2}}, "did you mean 'num_workers'"),
    ({"generation_mode": "fork_join", "dialect": "multivers"}, "'multivers'; did you mean 'multiverse'"),
    (
        {"generation_mode": "fork_join", "dialect": {"region": ["a", "b"], "brunch": ["c", "d"]}},
        "no 'brunch'; did you mean 'branch'",
    ),
    ({"generation_mode": "hogwild", "layout": "interleave"}, "'interleave'; did you mean 'interleaved'"),
]
"""Arguments of `generate`, and what the error says."""


def test_errors_name_what_was_probably_meant(model: Any) -> None:
    for arguments, says in MISTAKES:
        with pytest.raises(ValueError, match=re.escape(says)):
            model.generate(IDS, max_new_tokens=3, **arguments)


def test_a_call_without_a_cache_raises_and_a_saved_default_does_not(model: Any) -> None:
    call = {"generation_mode": "shared_prefix", "max_new_tokens": 3, "do_sample": False}
    for arguments in ({"use_cache": False}, {"generation_config": GenerationConfig(use_cache=False)}):
        with pytest.raises(ValueError, match="use_cache=False is not supported"):
            model.generate(IDS, **call, **arguments)
    expected = model.generate(IDS, **call, use_cache=True)
    model.generation_config.use_cache = False  # as in files of trained models
    assert model.generate(IDS, **call).equal(expected)


@pytest.mark.parametrize(
    ("arguments", "compiles"),
    [({}, None), ({"disable_compile": True}, False), ({"disable_compile": True, "compile": True}, True)],
)
def test_disable_compile_is_the_default_of_compile(
    model: Any, arguments: dict[str, Any], compiles: bool | None
) -> None:
    config = SharedPrefixConfig(compile=arguments.pop("compile", None))
    with model.prepared_call(config, {"inputs": IDS, "max_new_tokens": 3, **arguments}) as call:
        assert call.host._compile is compiles
