"""Decode steps of a CPU as programs: they have the bits of the modules, in all modes, and end where modules change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from workers import TOKENIZER

import hf_parallel
from hf_parallel.cache import BlockCache
from hf_parallel.engine import Engine
from hf_parallel.generation.enabled import enabled
from hf_parallel.kernels import native
from hf_parallel.kernels.program import Program
from hf_parallel.models.cpu.elementwise import fast_layers
from hf_parallel.models.decode import program
from hf_parallel.models.decode.cached_model import CachedModel

pytestmark = [
    pytest.mark.skipif(not native.is_available(), reason="needs the C kernels"),
    pytest.mark.filterwarnings("ignore"),
]
QUICK = ("llama", "gemma3_text", "phi3", "qwen3")
HAVE_PROGRAMS = (
    *QUICK,
    *("ernie4_5", "exaone4", "gemma", "glm", "glm4", "granite", "granite_swa", "helium", "hunyuan_v1_dense"),
    *("llama-dynamic", "llama-linear", "llama-llama3", "llama-longrope", "llama-yarn"),
    *("mistral", "olmo2", "olmo3", "qwen2", "seed_oss", "smollm3"),
)
"""Models of `tiny.ARCHITECTURES` whose decode steps are programs. The others' modules compute them."""
SETTINGS = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": True, "seed": 1, "pad_token_id": tiny.PAD}


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows of the programs that have run. Models have a program from their second step on."""
    counts: list[int] = []
    run = Program.run

    def counted(self: Program, values: Any, tokens: int) -> bool:
        counts.append(tokens)
        return run(self, values, tokens)

    monkeypatch.setattr(program, "STEPS_BEFORE", 2)
    monkeypatch.setattr(Program, "run", counted)
    return counts


def new_model(name: str = "llama") -> Any:
    return hf_parallel.enable(copy.deepcopy(tiny.build(name)))


def logits_of(model: Any, mode: str = "shared_prefix", **settings: Any) -> torch.Tensor:
    """Logits of all tokens of a call with four rows, or workers, over two prompts."""
    prompts, mask = tiny.left_pad(tiny.make_prompts([40, 70], seed=2))
    given = {**SETTINGS, "num_return_sequences": 4, **settings}
    if mode == "hogwild":
        del given["num_return_sequences"]
    output = model.generate(
        prompts,
        attention_mask=mask,
        generation_mode=mode,
        output_logits=True,
        return_dict_in_generate=True,
        **given,
    )
    return torch.cat([logits.flatten() for logits in output.logits])


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HAVE_PROGRAMS]
)
def test_programs_have_the_bits_of_the_modules(name: str) -> None:
    """The steps that are compared have other numbers of rows than the recorded ones."""
    model = new_model(name)
    capabilities = enabled(model).capabilities
    with torch.no_grad(), fast_layers(model):
        made = CachedModel(model, capabilities, BlockCache(capabilities.rotary), cuda_graph=False).record_program()
        by_modules = CachedModel(model, capabilities, BlockCache(capabilities.rotary), cuda_graph=False, programs=False)
        steps = program.RandomSteps(model, by_modules)
        for rows in (1, 2, 7, 33):
            forward, ids, expected = steps.step(rows)
            workspace = torch.empty(made.bytes_per_token * rows, dtype=torch.uint8)
            assert torch.equal(made.run(steps.cache, forward, ids, workspace), expected)


@pytest.mark.parametrize(
    ("name", "mode", "settings"),
    [
        ("llama", "shared_prefix", {}),
        ("llama", "hogwild", {"num_workers": 3, "tokenizer": TOKENIZER}),
        ("gemma3_text", "shared_prefix", {"max_new_tokens": 30, "min_new_tokens": 30}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_calls_have_the_same_logits_with_and_without(
    runs: list[int], monkeypatch: pytest.MonkeyPatch, name: str, mode: str, settings: dict[str, Any]
) -> None:
    model = new_model(name)
    with_programs = [logits_of(model, mode, **settings) for _ in range(2)]
    assert len(runs) > 10
    monkeypatch.setattr("hf_parallel.models.decode.cached_model.supports", lambda *given: False)
    runs.clear()
    expected = logits_of(new_model(name), mode, **settings)
    assert not runs
    for logits in with_programs:
        assert torch.equal(logits, expected)


def test_hooks_are_called_in_each_step(runs: list[int]) -> None:
    model = new_model()
    logits_of(model)
    assert runs
    runs.clear()
    called = []
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *given: called.append(1))
    logits_of(model)
    assert len(called) >= 11
    assert not runs
    hook.remove()
    logits_of(model)
    assert runs


def test_settings_that_change_between_calls_are_seen(runs: list[int]) -> None:
    model = new_model()
    logits_of(model)
    assert runs
    model.model.layers[0].self_attn.scaling = 0.1
    assert torch.equal(logits_of(model), logits_of(hf_parallel.enable(copy.deepcopy(model))))


def replace_weight(model: Any) -> None:
    projection = model.model.layers[0].self_attn.q_proj
    projection.weight = nn.Parameter(projection.weight * 2)


def set_data(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.weight.data = model.model.layers[0].self_attn.q_proj.weight.data * 2


def scale_in_place(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)


def share_memory(model: Any) -> None:
    model.share_memory()


def remove_a_layer(model: Any) -> None:
    model.model.layers = model.model.layers[:1]


@pytest.mark.parametrize("change", [replace_weight, set_data, scale_in_place, share_memory, remove_a_layer])
def test_a_changed_model_computes_as_it_is(runs: list[int], change: Callable[[Any], None]) -> None:
    """Also where weights lie at other addresses, whose old ones hold nothing any more."""
    model = new_model()
    logits_of(model)
    assert runs
    change(model)
    assert torch.equal(logits_of(model), logits_of(hf_parallel.enable(copy.deepcopy(model))))


def test_a_model_that_changes_during_a_call_loses_its_program_after_some_steps(
    runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its steps read until then lives on."""
    monkeypatch.setattr(program, "MAX_DROPS", 1)
    model = new_model()
    logits_of(model)
    num_runs: list[int] = []

    class Changes:
        """Moves all weights at the fifth call."""

        def put(self, tokens: torch.Tensor) -> None:
            num_runs.append(len(runs))
            if len(num_runs) == 5:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()

        def end(self) -> None:
            pass

    (prompt,) = tiny.make_prompts([30])
    settings = {**SETTINGS, "max_new_tokens": 40, "min_new_tokens": 40}
    output = model.generate(prompt[None], generation_mode="shared_prefix", streamer=Changes(), **settings)
    assert num_runs[4] > num_runs[3], "steps were programs"
    assert num_runs[4 + program.SLICES] == num_runs[-1] < num_runs[4] + program.SLICES, "and then none"
    assert output.tolist() == model.generate(prompt[None], generation_mode="shared_prefix", **settings).tolist()


def test_an_engine_sees_weights_that_are_replaced(runs: list[int]) -> None:
    model = new_model()
    (prompt,) = tiny.make_prompts([30])
    settings = {**SETTINGS, "output_logits": True}
    with Engine(model) as engine:
        engine.submit(prompt[None], **settings).result(60)
        assert runs
        replace_weight(model)
        output = engine.submit(prompt[None], **settings).result(60)
    with Engine(hf_parallel.enable(copy.deepcopy(model))) as engine:
        expected = engine.submit(prompt[None], **settings).result(60)
    assert torch.equal(torch.cat(output.logits), torch.cat(expected.logits))


def test_steps_that_rotate_are_compared_after_others(runs: list[int]) -> None:
    """Workers, which see blocks at other positions, in an engine that has run rows which do not."""
    model = new_model()
    (prompt,) = tiny.make_prompts([30])
    settings = {**SETTINGS, "num_workers": 3, "tokenizer": TOKENIZER, "output_logits": True}
    expected = model.generate(prompt[None], generation_mode="hogwild", return_dict_in_generate=True, **settings)
    with Engine(model, TOKENIZER) as engine:
        engine.submit(prompt[None], "shared_prefix", **SETTINGS).result(60)
        runs.clear()
        del settings["tokenizer"]
        output = engine.submit(prompt[None], "hogwild", **settings).result(60)
    assert runs
    assert torch.equal(torch.cat(output.logits), torch.cat(expected.logits))


def test_programs_do_not_depend_on_defaults(runs: list[int]) -> None:
    model = new_model()
    expected = logits_of(model)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(logits_of(model), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    assert runs


def test_a_token_that_is_in_no_table_is_left_to_the_modules() -> None:
    model = new_model()
    capabilities = enabled(model).capabilities
    with torch.no_grad(), fast_layers(model):
        made = CachedModel(model, capabilities, BlockCache(capabilities.rotary), cuda_graph=False).record_program()
        by_modules = CachedModel(model, capabilities, BlockCache(capabilities.rotary), cuda_graph=False, programs=False)
        steps = program.RandomSteps(model, by_modules)
        forward, ids, _ = steps.step(2)
        workspace = torch.empty(made.bytes_per_token * 2, dtype=torch.uint8)
        ids[1] = model.config.vocab_size
        assert made.run(steps.cache, forward, ids, workspace) is None


def test_a_model_says_why_it_has_none(runs: list[int]) -> None:
    model = new_model("gemma2")  # whose logits are soft-capped
    logits_of(model)
    assert not runs
    assert program.why_no_program(model) == "aten.tanh.default cannot be part of a program"
    assert not program.why_no_program(new_model())
