"""Engine, submit and RequestHandle: what docs/engine.md promises, besides tokens and scheduling."""

from __future__ import annotations

import asyncio
import copy
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Any

import pytest
import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from mode_cases import BUILT_IN, small_call
from transformers import LogitsProcessor, LogitsProcessorList

import hf_parallel
from hf_parallel.engine import Engine, EngineStats, KVBudgetError, RequestCancelledError
from hf_parallel.engine.replicas import replicas

TOKENIZER: Any = AsciiTokenizer()
PROMPT = "Once upon a time"
IDS: list[int] = TOKENIZER(PROMPT)["input_ids"]
NEW = 6
LONG = 400
"""New tokens of a request that does not end during a test."""


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_parallel.enable(copy.deepcopy(tiny.build("llama")))


@pytest.fixture(scope="module")
def engine(model: Any) -> Iterator[Engine]:
    with Engine(model, TOKENIZER) as engine:
        yield engine


def twin() -> Any:
    """Return a model that no other engine owns."""
    return copy.deepcopy(tiny.build("llama"))


def expected(new_tokens: int = NEW) -> list[int]:
    """Return the new tokens of plain greedy `generate`."""
    ids = torch.tensor([IDS])
    sequences = tiny.build("llama").generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens
    )
    return sequences[0, len(IDS) :].tolist()


class Gate(LogitsProcessor):
    """Holds its request, and with it the engine, until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.reached.set()
        assert self.opened.wait(600)
        return scores


class Failing(LogitsProcessor):
    """Raises an error at a given length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] >= self.length:
            raise ArithmeticError("the processor has failed")
        return scores


def failing(after: int) -> LogitsProcessorList:
    return LogitsProcessorList([Failing(len(IDS) + after)])


# Prompts

PROMPTS: dict[str, Any] = {
    "text": PROMPT,
    "ids": IDS,
    "tuple": tuple(IDS),
    "rows of ids": [IDS],
    "tensor": torch.tensor(IDS),
    "rows of a tensor": torch.tensor([IDS]),
    "int32": torch.tensor(IDS, dtype=torch.int32),
    "array": torch.tensor(IDS).numpy(),
    "mapping": {"input_ids": torch.tensor([IDS]), "attention_mask": torch.ones(1, len(IDS), dtype=torch.int64)},
    "mapping without a mask": {"input_ids": torch.tensor([IDS])},
    "padded mapping": {
        "input_ids": torch.tensor([[tiny.PAD, *IDS]]),
        "attention_mask": torch.tensor([[0] + [1] * len(IDS)]),
    },
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_each_kind_of_prompt_gives_the_tokens_of_generate(engine: Engine, kind: str) -> None:
    assert list(engine.submit(PROMPTS[kind], max_new_tokens=NEW)) == expected()


def test_a_chat_is_a_prompt(embedded: tuple[Any, Any]) -> None:
    model, tokenizer = embedded
    chat = [{"role": "user", "content": "Hello"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    with Engine(model, tokenizer) as engine:
        sequences = engine.submit(chat, max_new_tokens=2).result().sequences
    assert sequences[0, :-2].tolist() == ids


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "None": (None, "prompt.*NoneType"),
    "a number": (5, "prompt.*ids"),
    "an object": (object(), "prompt.*object"),
    "no ids": ([], "prompt.*ids"),
    "no rows": (torch.zeros(0, 4, dtype=torch.int64), r"prompt.*\[0, 4\]"),
    "floats": ([1.0, 2.0], "prompt.*float"),
    "bools": (torch.tensor([True, False]), "ids.*bool"),
    "texts": (["one", "two"], "list of 2 texts.*each"),
    "ragged rows": ([[5, 6], [7]], "prompt.*list"),
    "three dimensions": (torch.zeros(1, 2, 3, dtype=torch.int64), r"prompt.*\[1, 2, 3\]"),
    "an id beyond the vocabulary": ([5, tiny.VOCAB_SIZE], f"{tiny.VOCAB_SIZE}"),
    "a negative id": ([5, -1], "-1"),
    "a mapping without ids": ({"attention_mask": torch.ones(1, 3)}, "input_ids"),
    "an empty mapping": ({}, "input_ids"),
    "a mapping of lists": ({"input_ids": [5, 6]}, "input_ids"),
    "a mapping with an unknown entry": ({"input_ids": torch.tensor([[5]]), "speed": torch.tensor([9])}, "speed"),
    "a mask of another shape": ({"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 3)}, "mask"),
    "a message that is text": ([{"role": "user", "content": "Hello"}, "text"], "chat of messages.*'text'"),
    "a message without a role": ([{"content": "Hello"}], "role"),
}


@pytest.mark.parametrize("kind", BAD_PROMPTS)
def test_a_bad_prompt_raises_a_value_error_at_submission(engine: Engine, kind: str) -> None:
    prompt, message = BAD_PROMPTS[kind]
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, max_new_tokens=NEW)


BAD_SETTINGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "an unknown mode": ({"generation_mode": "magic"}, ValueError, "magic"),
    "a setting of another mode": ({"generation_mode": "shared_prefix", "num_workers": 2}, ValueError, "num_workers"),
    "an unknown setting": ({"speed": 9}, ValueError, "speed"),
    "no new tokens": ({"max_new_tokens": 0}, ValueError, "max_new_tokens"),
    "beams": ({"num_beams": 2}, ValueError, "beam"),
    "a cache": ({"past_key_values": hf_parallel.SharedPrefixCache()}, ValueError, "past_key_values"),
    "a priority that is text": ({"priority": "high"}, ValueError, "priority.*'high'"),
    "a priority that is a bool": ({"priority": True}, ValueError, "priority.*True"),
    "a submitter that cannot be hashed": ({"submitter": ("me", [])}, ValueError, r"submitter.*'me'"),
    "a config without a mode": ({"parallel_config": {"num_workers": 2}}, ValueError, "generation_mode"),
    "a number of answers": ({"n": 2}, ValueError, "'n'.*did you mean 'num_return_sequences'"),
    "a generation config that is a dict": ({"generation_config": {"top_k": 3}}, TypeError, "GenerationConfig.*dict"),
    "a seed that is text": ({"seed": "one"}, ValueError, "seed.*one"),
}


@pytest.mark.parametrize("kind", BAD_SETTINGS)
def test_a_bad_setting_raises_at_submission(engine: Engine, kind: str) -> None:
    settings, error, message = BAD_SETTINGS[kind]
    with pytest.raises(error, match=message):
        engine.submit(PROMPT, **{"max_new_tokens": NEW, **settings})


def test_a_request_may_have_a_tokenizer_of_its_own() -> None:
    with Engine(twin()) as engine:
        assert list(engine.submit(PROMPT, tokenizer=TOKENIZER, max_new_tokens=NEW)) == expected()


def test_every_bad_submission_leaves_the_engine_idle(engine: Engine) -> None:
    with pytest.raises(ValueError, match="ids"):
        engine.submit([])
    assert (engine.stats.running, engine.stats.waiting) == (0, 0)


# Handles


def test_for_and_async_for_yield_the_tokens_of_the_output(engine: Engine) -> None:
    handle = engine.submit(PROMPT, max_new_tokens=NEW)

    async def read() -> list[int]:
        return [token async for token in handle]

    assert list(handle) == asyncio.run(read()) == expected()
    assert handle.result().sequences[0, len(IDS) :].tolist() == expected()


def test_tokens_arrive_before_the_request_ends() -> None:
    gate = Gate()
    with Engine(twin(), TOKENIZER) as engine:
        handle = engine.submit(PROMPT, max_new_tokens=LONG)
        first = next(iter(handle))
        ended = handle.done
        held = engine.submit(PROMPT, max_new_tokens=1, logits_processor=LogitsProcessorList([gate]))
        gate.opened.set()
        held.result(600)
        handle.cancel()
    assert (first, ended) == (expected()[0], False)


def test_a_token_names_its_row(engine: Engine) -> None:
    handle = engine.submit(PROMPT, num_return_sequences=3, do_sample=True, seed=0, max_new_tokens=NEW)
    rows: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for token in handle:
        rows[token.row].append(token)
    assert [*rows.values()] == handle.result().sequences[:, len(IDS) :].tolist()


def test_texts_yields_the_text_of_the_tokens(engine: Engine) -> None:
    handle = engine.submit(PROMPT, max_new_tokens=NEW)

    async def read() -> str:
        return "".join([text async for _, text, _ in handle.texts_async()])

    text = TOKENIZER.decode(expected())
    assert "".join(piece for _, piece, _ in handle.texts()) == asyncio.run(read()) == text


@pytest.mark.parametrize("mode", BUILT_IN)
def test_texts_yields_text_in_every_mode(engine: Engine, mode: str) -> None:
    settings = {name: value for name, value in small_call(mode).items() if name != "generation_mode"}
    handle = engine.submit(torch.tensor([IDS]), mode, **settings)
    assert "".join(text for _, text, _ in handle.texts())
    assert handle.result().stats.decoded_tokens > 0


def test_several_readers_get_all_tokens(engine: Engine) -> None:
    handle = engine.submit(PROMPT, max_new_tokens=NEW)
    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(list, [handle] * 4)] == [expected()] * 4


def test_result_waits_no_longer_than_its_timeout(engine: Engine) -> None:
    gate = Gate()
    handle = engine.submit(PROMPT, max_new_tokens=1, logits_processor=LogitsProcessorList([gate]))
    with pytest.raises(TimeoutError, match=r"0\.01 seconds"):
        handle.result(timeout=0.01)
    gate.opened.set()
    assert handle.result(timeout=600).sequences.shape[1] == len(IDS) + 1


def test_the_output_belongs_to_the_caller(engine: Engine) -> None:
    output = engine.submit(PROMPT, max_new_tokens=NEW).result()
    assert output.past_key_values is None
    assert "past_key_values" not in output
    assert pickle.loads(pickle.dumps(output)).sequences.equal(output.sequences)


def test_times_are_in_order(engine: Engine) -> None:
    handle = engine.submit(PROMPT, max_new_tokens=NEW)
    handle.result()
    times = handle.times
    assert times.submitted <= times.started <= times.first_token <= times.ended  # type: ignore[operator]


# Cancelling


@pytest.mark.parametrize("started", [True, False])
def test_a_cancelled_request_raises_where_it_is_read(started: bool) -> None:
    with Engine(twin(), TOKENIZER) as engine:
        if not started:
            gate = Gate()
            engine.submit(PROMPT, max_new_tokens=1, logits_processor=LogitsProcessorList([gate]))
            gate.reached.wait(600)
        handle = engine.submit(PROMPT, max_new_tokens=LONG)
        if started:
            next(iter(handle))
        handle.cancel()
        if not started:
            gate.opened.set()
        with pytest.raises(CancelledError):
            handle.result(600)
        with pytest.raises(RequestCancelledError, match="cancelled"):
            list(handle)
        assert isinstance(handle.error, RequestCancelledError)
        engine.submit(PROMPT, max_new_tokens=1).result()
        assert engine.stats.cancelled == 1


def test_cancelling_what_has_ended_does_nothing(engine: Engine) -> None:
    handle = engine.submit(PROMPT, max_new_tokens=NEW)
    output = handle.result()
    handle.cancel()
    assert handle.result() is output
    assert handle.error is None


# Errors


def test_an_error_is_raised_after_the_tokens_before_it(engine: Engine) -> None:
    handle = engine.submit(PROMPT, max_new_tokens=NEW, logits_processor=failing(after=3))
    tokens = []
    with pytest.raises(ArithmeticError, match="has failed"):  # noqa: PT012
        for token in handle:
            tokens.append(token)  # noqa: PERF402
    assert tokens == expected()[:3]
    for read in (handle.result, lambda: list(handle.texts()), lambda: asyncio.run(handle.result_async())):
        with pytest.raises(ArithmeticError, match="has failed"):  # noqa: PT012
            read()
    assert isinstance(handle.error, ArithmeticError)


def test_prefixes_stay_cached_when_a_request_with_them_fails_or_is_cancelled() -> None:
    with Engine(twin(), TOKENIZER) as engine:
        engine.submit(PROMPT, max_new_tokens=NEW).result()
        held = engine.stats.kv_bytes
        with pytest.raises(ArithmeticError):
            engine.submit(PROMPT, max_new_tokens=NEW, logits_processor=failing(after=1)).result()
        cancelled = engine.submit(PROMPT, max_new_tokens=LONG)
        next(iter(cancelled))
        cancelled.cancel()
        with pytest.raises(RequestCancelledError):
            cancelled.result()
        assert engine.stats.kv_bytes == held > 0


# Engines


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_kv_bytes": 0}, "max_kv_bytes.*0"),
        ({"max_kv_bytes": "1GB"}, "max_kv_bytes.*1GB"),
        ({"max_rows": 0}, "max_rows.*0"),
        ({"max_waiting": -1}, "max_waiting.*-1"),
        ({"max_batch_tokens": 1.5}, "max_batch_tokens.*1.5"),
        ({"policy": 3}, "policy must have a method priority.*int"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_bad_setting_of_an_engine_raises(model: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(model, TOKENIZER, **settings)


def test_a_budget_of_less_than_a_token_raises_when_the_engine_opens() -> None:
    with pytest.raises(ValueError, match="max_kv_bytes=10 .* one token needs"), Engine(twin(), max_kv_bytes=10):
        pass


def test_an_engine_accepts_requests_only_while_it_is_open() -> None:
    engine = Engine(twin(), TOKENIZER)
    with pytest.raises(RuntimeError, match="not open"):
        engine.submit(PROMPT)
    with engine:
        handle = engine.submit(PROMPT, max_new_tokens=NEW)
    assert handle.done, "leaving the body waits for its requests"
    with pytest.raises(RuntimeError, match="not open"):
        engine.submit(PROMPT)
    with pytest.raises(RuntimeError, match="only once"), engine:
        pass


def test_two_engines_of_one_model_raise() -> None:
    model = twin()
    with (
        Engine(model, TOKENIZER),
        pytest.raises(RuntimeError, match="an open Engine holds this model"),
        Engine(model, TOKENIZER),
    ):
        pass


def test_the_model_is_the_callers_again_after_the_engine() -> None:
    model = twin()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Engine(model, TOKENIZER) as engine:
        engine.submit(PROMPT, max_new_tokens=2).result()
    assert all(before[name].equal(tensor) for name, tensor in model.state_dict().items())
    with Engine(model, TOKENIZER) as engine:
        assert list(engine.submit(PROMPT, max_new_tokens=NEW)) == expected()


def test_a_request_that_cannot_fit_raises_at_submission() -> None:
    model = twin()
    with Engine(model, TOKENIZER) as engine:
        engine.submit(PROMPT, max_new_tokens=2).result()
        token = engine.stats.kv_bytes // (len(IDS) + 1)
    with Engine(model, TOKENIZER, max_kv_bytes=64 * token) as engine:
        with pytest.raises(KVBudgetError, match=rf"max_kv_bytes={64 * token}.*64 tokens.*{len(IDS)} of the prompt"):
            engine.submit(PROMPT, num_return_sequences=4, do_sample=True, max_new_tokens=20)
        assert list(engine.submit(PROMPT, max_new_tokens=NEW)) == expected()


def test_an_engine_uses_the_tokenizer_that_enable_was_given() -> None:
    model = hf_parallel.enable(twin(), tokenizer=TOKENIZER)
    with Engine(model) as engine:
        assert list(engine.submit(PROMPT, max_new_tokens=NEW)) == expected()


def test_replicas_without_ray_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "hf_parallel.engine.prompt_router", raising=False)
    with pytest.raises(ImportError, match=r"hf_parallel\[ray\]"):
        replicas(lambda: (None, None))


# Statistics


def test_stats_count_the_work_of_all_requests() -> None:
    with Engine(twin(), TOKENIZER) as engine:
        idle = engine.stats
        engine.submit(PROMPT, max_new_tokens=NEW).result()
        engine.submit(PROMPT + " there", max_new_tokens=NEW).result()
        with pytest.raises(ArithmeticError):
            engine.submit(PROMPT, max_new_tokens=NEW, logits_processor=failing(after=1)).result()
        stats = engine.stats
    assert isinstance(stats, EngineStats)
    assert (idle.running, idle.waiting, idle.kv_bytes, idle.finished) == (0, 0, 0, 0)
    assert (stats.running, stats.waiting) == (0, 0)
    assert (stats.finished, stats.failed, stats.cancelled) == (2, 1, 0)
    assert stats.decoded_tokens >= 2 * NEW
    assert stats.reused_tokens >= len(IDS) - 1
    assert stats.prefilled_tokens + stats.reused_tokens >= 3 * len(IDS) - 3
    assert 0 < stats.kv_bytes <= stats.reserved_bytes
    assert 0 < stats.overhead_seconds < stats.step_seconds
    assert stats.to_dict()["steps"] == stats.steps > 0


def test_stats_show_what_runs_and_what_waits() -> None:
    gate = Gate()
    with Engine(twin(), TOKENIZER, max_rows=1) as engine:
        engine.submit(PROMPT, max_new_tokens=1, logits_processor=LogitsProcessorList([gate]))
        gate.reached.wait(600)
        others = [engine.submit(PROMPT, max_new_tokens=1) for _ in range(3)]
        assert (engine.stats.running, engine.stats.waiting) == (1, 3)
        gate.opened.set()
        for handle in others:
            handle.result()


def test_masks_of_token_ids_are_those_of_generate() -> None:
    model = hf_parallel.enable(twin())
    ids = torch.tensor([[0, 0, *IDS], [*IDS, 5, 7]])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    settings = {"generation_mode": "shared_prefix", "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(ids, attention_mask=mask, **settings)
    with Engine(model, TOKENIZER) as engine:
        assert torch.equal(engine.submit(ids, attention_mask=mask, **settings).result(600).sequences, expected)
        for prompt, given in (("Hi", {"attention_mask": mask}), (ids, {"input_ids": ids}), (ids, {"inputs": ids})):
            with pytest.raises(ValueError, match=f"{[*given][0]}"):
                engine.submit(prompt, **given, **settings)
        with pytest.raises(ValueError, match="attention_mask"):
            engine.submit(ids, attention_mask=mask[:, :3], **settings)
