"""What all tests share: no network, a fixed seed, the embedded model loaded once, GPU tests skipped without a GPU."""

from __future__ import annotations

import copy
import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # transformers reads it when it is imported

import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy as np
import pytest
import torch
from hub_server import Hub, constants, running_hub

import hf_parallel

for _name in hf_parallel.__all__:  # all modules, before a test patches a name that others import
    getattr(hf_parallel, _name)

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase


torch.set_num_threads(1)  # more only slow models of a test's size down, eightfold where the cores are shared
_checks = list(hypothesis.HealthCheck)  # no test depends on the speed of the machine
hypothesis.settings.register_profile("fixed", deadline=None, suppress_health_check=_checks, derandomize=True)
hypothesis.settings.register_profile("free", deadline=None, suppress_health_check=_checks, print_blob=True)
hypothesis.settings.load_profile("fixed")  # `make test-all` passes `--hypothesis-profile free`


QUICK_CASES = 2
"""Cases of a test in `make test` without `-k`; `make test-all` runs the others."""


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark all but a few cases of each test as slow, and begin with long files, so that processes end together."""
    cases = defaultdict(list)
    for item in [] if config.getoption("keyword") else items:  # who names tests wants them all
        if not item.get_closest_marker("slow"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for same in cases.values():
        quick = {number * len(same) // QUICK_CASES for number in range(QUICK_CASES)}
        for number, item in enumerate(same):
            if len(same) > QUICK_CASES and number not in quick:
                item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: -item.path.stat().st_size)


def pytest_collection() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    """Leave all objects of imports and collection, which stay, out of later garbage collections."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Extension modules report objects that are left at the end of the process."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _surroundings() -> Iterator[None]:
    """Each test begins with the same seeds and leaves gradients as it found them."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    assert torch.is_grad_enabled()


@pytest.fixture(scope="module", autouse=True)
def _plain_models() -> Iterator[None]:
    """Each file begins with plain models, also after one that left a shared model enabled."""
    yield
    shared = sys.modules["tiny"].built_models() if "tiny" in sys.modules else []
    for model in (*shared, *_embedded):
        hf_parallel.disable(model)


_embedded: list[Any] = []
"""The embedded model, once it is loaded."""


@pytest.fixture(scope="module")
def one_thread() -> None:
    """One thread, as everywhere."""


@pytest.fixture(scope="session")
def embedded() -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The embedded model and its tokenizer, float32 on the CPU; the first use on a machine converts it."""
    model, tokenizer = hf_parallel.load_embedded_model()
    _embedded.append(model)
    return model, tokenizer


@pytest.fixture(scope="module")
def shared_model() -> Any:
    """A tiny Llama for the requests of engines."""
    import tiny

    return hf_parallel.enable(copy.deepcopy(tiny.build("llama")))


@pytest.fixture
def model(shared_model: Any) -> Iterator[Any]:
    """The same, without hooks of earlier tests."""
    from engine_requests import clear_hooks

    yield shared_model
    clear_hooks(shared_model)


@pytest.fixture(scope="module")
def token_bytes(shared_model: Any) -> int:
    """Bytes of the keys and values of one of its tokens."""
    from hf_parallel.engine import Engine

    with Engine(shared_model) as engine:
        return engine._storage.arena.bytes_per_token


@pytest.fixture
def local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub on this machine, which huggingface_hub uses in this process."""
    with running_hub() as hub:
        for name, value in constants(hub, tmp_path / "hub").items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setenv("HF_TOKEN", "hf_none")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield hub
