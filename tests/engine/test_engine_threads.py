"""An engine owns its model: other threads and engines, forks, and changes of the model while it is open."""

from __future__ import annotations

import asyncio
import copy
import math
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest
import tiny
import torch
from engine_requests import TOKENIZER, Case, assert_nothing_is_held, wait_until_idle
from forked import exit_status
from mode_cases import small_call

import hf_parallel
from hf_parallel.engine import Engine, WeightsChangedError
from hf_parallel.engine.storage import KVStorage

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = torch.randint(32, 126, (1, 40), generator=torch.Generator().manual_seed(5))
CASE = Case(PROMPT, None, {"max_new_tokens": 12})
HELD = "an open Engine holds this model"


@pytest.fixture
def model() -> Any:
    return hf_parallel.enable(copy.deepcopy(tiny.build("llama")))


def in_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


# Others that use the model


def test_a_mode_of_somebody_else_raises_by_name(model: Any) -> None:
    def mode() -> Any:
        return model.generate(PROMPT, generation_mode="shared_prefix", max_new_tokens=3)

    with Engine(model) as engine:
        running = engine.submit(PROMPT, max_new_tokens=100)
        for call in (
            mode,
            lambda: in_thread(mode),
            lambda: Engine(model).__enter__(),
            lambda: hf_parallel.disable(model),
        ):
            with pytest.raises(RuntimeError, match=HELD):
                call()
        assert running.result(600).sequences.shape[1] == 140
    assert mode().shape[1] == 43
    hf_parallel.disable(model)


def test_plain_calls_beside_an_engine_give_their_own_tokens(model: Any) -> None:
    with torch.no_grad():
        logits = model(PROMPT).logits
    expected = CASE.alone(model)
    with Engine(model, max_batch_tokens=16) as engine:
        handles = [engine.submit(PROMPT[:, i:], max_new_tokens=40) for i in range(6)]
        calls = 0
        while not all(handle.done for handle in handles) or calls < 3:
            with torch.no_grad():
                torch.testing.assert_close(model(PROMPT).logits, logits, rtol=1e-4, atol=1e-4)
            assert CASE.beside(model) == expected
            calls += 1
        assert engine.submit(PROMPT, **CASE.settings).result(600).sequences.tolist() == expected


# Many callers


def test_threads_and_coroutines_submit_at_once(model: Any) -> None:
    modes: list[str | None] = [None, "shared_prefix", None, "resample"]
    cases = []
    for index in range(16):
        mode = modes[index % 4]
        settings = {} if mode is None else {k: v for k, v in small_call(mode).items() if k != "generation_mode"}
        cases.append(Case(PROMPT[:, : 20 + index], mode, settings | {"max_new_tokens": 8}))
    expected = [case.alone(model) for case in cases]
    begin = threading.Barrier(17)

    def sync(case: Case) -> Any:
        begin.wait(600)
        return engine.submit(case.prompt, case.mode, **case.arguments).result(600).sequences.tolist()

    async def one(case: Case) -> Any:
        handle = engine.submit(case.prompt, case.mode, **case.arguments)
        streamed = [token async for token in handle]
        output = await handle.result_async()
        assert len(streamed) == handle.stats.decoded_tokens
        return output.sequences.tolist()

    async def all_of_them() -> list[Any]:
        begin.wait(600)
        return await asyncio.gather(*map(one, cases))

    with Engine(model, TOKENIZER) as engine, ThreadPoolExecutor(17) as pool:
        coroutines = pool.submit(lambda: asyncio.run(all_of_them()))
        outcomes = list(pool.map(sync, cases))
        assert coroutines.result() == expected
        assert outcomes == expected
        assert_nothing_is_held(engine)
        assert engine.stats.finished == 32


# The end


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_body_cancels_the_requests_of_an_engine(model: Any, error: type[BaseException]) -> None:
    handles: list[Any] = []

    def body() -> None:
        with Engine(model) as engine:
            handles.extend(engine.submit(PROMPT, max_new_tokens=300) for _ in range(3))
            raise error("in the body")

    with pytest.raises(error, match="in the body"):
        body()
    for handle in handles:
        with pytest.raises(CancelledError):
            handle.result(0)
    assert CASE.alone(model)


def test_an_engine_that_dies_fails_all_requests(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the engine itself, at any time, leaves no caller waiting."""
    with Engine(model) as engine:
        handles = [engine.submit(PROMPT, max_new_tokens=300) for _ in range(3)]
        next(iter(handles[0]))

        def broken() -> Any:
            raise OSError("injected")

        monkeypatch.setattr(engine._scheduler, "next_batch", broken)
        for handle in handles:
            with pytest.raises(RuntimeError, match="the engine has stopped") as raised:
                handle.result(600)
            assert isinstance(raised.value.__cause__, OSError)
        with pytest.raises(RuntimeError, match="the engine has stopped"):
            engine.submit(PROMPT)
    assert CASE.alone(model)


def test_in_a_fork_an_engine_raises_and_the_model_is_free(model: Any) -> None:
    expected = CASE.alone(model)
    with Engine(model) as engine:
        running = engine.submit(PROMPT, max_new_tokens=200)
        next(iter(running))

        def child() -> None:
            for call in (lambda: engine.submit(PROMPT), running.result, lambda: list(running.texts())):
                with pytest.raises(RuntimeError, match="not in a fork of it"):
                    call()
            engine.close()
            assert CASE.alone(model) == expected
            with Engine(model) as own:
                assert own.submit(PROMPT, **CASE.settings).result(600).sequences.tolist() == expected

        assert exit_status(child) == 0
        assert running.result(600).sequences.shape[1] == 240
        wait_until_idle(engine)


# Changes of the model


def _load(model: Any) -> None:
    model.load_state_dict({name: 0.5 * tensor for name, tensor in model.state_dict().items()})


def _scale_data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def _add_adapter(model: Any) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)


@pytest.mark.parametrize("change", [_load, _scale_data, _add_adapter])
@pytest.mark.parametrize("salt", [None, "salt"])
def test_no_keys_of_other_weights_are_used(model: Any, change: Callable[[Any], None], salt: str | None) -> None:
    """Prefixes are computed again with the new weights; requests that ran meanwhile raise."""
    changed = hf_parallel.enable(copy.deepcopy(hf_parallel.disable(copy.deepcopy(model))))
    change(changed)
    before, after = CASE.alone(model), CASE.alone(changed)
    assert before != after
    with Engine(model) as engine:
        assert engine.submit(PROMPT, cache_salt=salt, **CASE.settings).result(600).sequences.tolist() == before
        change(model)
        assert engine.submit(PROMPT, cache_salt=salt, **CASE.settings).result(600).sequences.tolist() == after
        assert engine.submit(PROMPT, cache_salt=salt, **CASE.settings).result(600).sequences.tolist() == after
        assert engine.stats.reused_tokens
        assert_nothing_is_held(engine)


class Block:
    """A logits processor that waits for `go` in each step, and sets `entered` before."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.go = threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.entered.set()
        assert self.go.wait(600)
        return scores

    def close(self) -> None:
        """Let the next step wait again."""
        self.entered.clear()
        self.go.clear()


@pytest.mark.parametrize("change", [_load, _scale_data])
def test_requests_during_which_the_weights_change_raise(
    model: Any, change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the latest when another one begins, if all weights may be read then, or the last one ends."""
    monkeypatch.setattr("hf_parallel.engine.storage.READ_SHARE", math.inf)
    changed = copy.deepcopy(model)
    for _ in range(2):
        change(changed)
    after = CASE.alone(changed)
    block = Block()
    with Engine(model) as engine:
        last = engine.submit(PROMPT, max_new_tokens=3, logits_processor=[block])
        assert block.entered.wait(600)
        change(model)
        block.go.set()
        with pytest.raises(WeightsChangedError, match="the model's weights changed while the request ran"):
            last.result(600)
        block.close()
        running = engine.submit(PROMPT, max_new_tokens=5, logits_processor=[block])
        assert block.entered.wait(600)
        change(model)
        new = engine.submit(PROMPT, **CASE.settings)
        block.go.set()
        with pytest.raises(WeightsChangedError):
            running.result(600)
        assert new.result(600).sequences.tolist() == after
        assert_nothing_is_held(engine)


def test_requests_that_begin_while_others_run_seldom_read_all_weights(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading takes longer than a decode step. A change that PyTorch does not count is noticed at the end."""
    monkeypatch.setattr("hf_parallel.engine.storage.READ_SHARE", 1e-12)
    reads = 0
    read_all = KVStorage.check_all_weights

    def counted(storage: KVStorage, model: Any) -> None:
        nonlocal reads
        reads += 1
        read_all(storage, model)

    monkeypatch.setattr(KVStorage, "check_all_weights", counted)
    block = Block()
    with Engine(model) as engine:
        first = engine.submit(PROMPT, max_new_tokens=12, logits_processor=[block])
        assert block.entered.wait(600)
        before = reads
        others = [engine.submit(PROMPT, max_new_tokens=count) for count in (2, 3, 4)]
        block.go.set()
        for handle in [*others, first]:
            handle.result(600)
        assert reads == before + 1, "as the last one ended"
        block.close()
        running = engine.submit(PROMPT, max_new_tokens=5, logits_processor=[block])
        assert block.entered.wait(600)
        _scale_data(model)
        block.go.set()
        with pytest.raises(WeightsChangedError):
            running.result(600)
