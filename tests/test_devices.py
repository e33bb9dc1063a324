"""Modes, pages and examples on another device than the CPU, for which `pretended_device` stands in."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from mode_cases import BUILT_IN, small_call
from pages import EXECUTABLE, ROOT, name_of, random_stand_in, run_on
from pretended_device import DEVICE, PretendedDevice, raises
from workers import TOKENIZER

import hf_parallel

TRAINER = ROOT / "docs" / "training.md"
"""`Trainer` uses the devices of the machine."""

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_stand_in_raises_the_errors_of_a_device() -> None:
    weight = torch.nn.Linear(3, 3)
    host = torch.ones(3)
    with PretendedDevice() as device:
        device.hold(weight)
        there = host.to(DEVICE)
        assert (host.device, there.device, there.cpu().device) == (torch.device("cpu"), DEVICE, torch.device("cpu"))
        assert weight(there).device == torch.ones(3, device=there.device).device == there.new_zeros(2).device == DEVICE
        assert [part.device for part in there] == [DEVICE] * 3
        assert raises(lambda: weight(host))
        assert raises(lambda: there + torch.arange(3))
        assert raises(lambda: host[torch.tensor([0], device=DEVICE)])
        assert raises(lambda: there.numpy())
        assert raises(lambda: torch.cat((there, host)))
        assert torch.equal((there[torch.tensor([0, 1])] * torch.tensor(2.0)).cpu(), torch.tensor([2.0, 2.0]))
        host.copy_(there + 1)
        assert host.device != DEVICE
    assert host.tolist() == [2.0] * 3


@pytest.mark.parametrize("mode", BUILT_IN)
def test_a_mode_runs_on_another_device_and_has_the_same_tokens(mode: str) -> None:
    call = {"tokenizer": TOKENIZER, "return_dict_in_generate": True, "seed": 3, **small_call(mode)}
    model, ids = copy.deepcopy(tiny.build("llama")), tiny.make_prompts([9], seed=1)[0][None]
    expected = hf_parallel.enable(copy.deepcopy(model)).generate(ids, **copy.deepcopy(call))  # type: ignore[operator]
    with PretendedDevice() as device:
        out = hf_parallel.enable(device.hold(model)).generate(ids, **call)
        assert out.sequences.device == DEVICE
        found = out.sequences.cpu()
    assert torch.equal(found, expected.sequences)


@pytest.mark.parametrize("cache", [hf_parallel.SharedPrefixCache], ids=lambda cache: cache.__name__)
@pytest.mark.parametrize("mode", ["shared_prefix", "resample"])
def test_a_cache_made_without_a_device_takes_that_of_the_model(mode: str, cache: Any) -> None:
    model, ids = copy.deepcopy(tiny.build("llama")), tiny.make_prompts([9], seed=1)[0][None]
    with PretendedDevice() as device:
        hf_parallel.enable(device.hold(model))
        kept, settings = cache(), small_call(mode)
        for _ in range(2):
            model.generate(ids, past_key_values=kept, **settings)  # type: ignore[operator]
        assert kept.device == DEVICE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", [path for path in EXECUTABLE if path != TRAINER], ids=name_of)
def test_code_of_pages_and_examples_runs_on_another_device(
    path: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, tokenizer = random_stand_in(folder)
    with PretendedDevice() as device:
        run_on(path, (device.hold(model), tokenizer))
