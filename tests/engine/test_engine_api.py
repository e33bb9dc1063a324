"""Engine, submit and RequestHandle: what docs/engine.md promises, besides tokens and scheduling."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from ascii_tokenizer import AsciiTokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList

import hf_parallel
from hf_parallel.engine import Engine, EngineStats

TOKENIZER: Any = AsciiTokenizer()
PROMPT = "Once upon a time"
IDS: list[int] = TOKENIZER(PROMPT)["input_ids"]
NEW = 6


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


def expected() -> list[int]:
    """Return the new tokens of plain greedy `generate`."""
    ids = torch.tensor([IDS])
    sequences = tiny.build("llama").generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW
    )
    return sequences[0, len(IDS) :].tolist()


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
    "tensor": torch.tensor(IDS),
    "rows of a tensor": torch.tensor([IDS]),
    "array": torch.tensor(IDS).numpy(),
    "mapping": {"input_ids": torch.tensor([IDS]), "attention_mask": torch.ones(1, len(IDS), dtype=torch.int64)},
    "padded mapping": {
        "input_ids": torch.tensor([[tiny.PAD, *IDS]]),
        "attention_mask": torch.tensor([[0] + [1] * len(IDS)]),
    },
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_each_kind_of_prompt_gives_the_tokens_of_generate(engine: Engine, kind: str) -> None:
    assert list(engine.submit(PROMPTS[kind], max_new_tokens=NEW)) == expected()


IDS_IN_VOCABULARY = st.integers(0, tiny.VOCAB_SIZE - 1)
BAD_PROMPTS = st.one_of(
    st.sampled_from([None, 5, object(), [], {}, [[5, 6], [7]], [{"content": "Hello"}], [{"role": "user"}, "text"]]),
    st.lists(st.floats() | st.booleans() | st.text(), min_size=1),
    st.lists(IDS_IN_VOCABULARY).map(lambda ids: [*ids, tiny.VOCAB_SIZE]),
    st.lists(IDS_IN_VOCABULARY).map(lambda ids: [-1, *ids]),
    st.sampled_from([(0, 4), (1, 2, 3), (1, 0)]).map(lambda shape: torch.zeros(shape, dtype=torch.int64)),
    st.sampled_from([torch.bool, torch.float32]).map(lambda dtype: torch.ones(3, dtype=dtype)),
    st.sampled_from(
        [
            {"attention_mask": torch.ones(1, 3)},
            {"input_ids": [5, 6]},
            {"input_ids": torch.tensor([[5]]), "speed": torch.tensor([9])},
            {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 3)},
        ]
    ),
)


@settings(max_examples=60, deadline=None)
@given(prompt=BAD_PROMPTS)
def test_a_malformed_prompt_raises_at_submission(engine: Engine, prompt: Any) -> None:
    with pytest.raises(ValueError, match="prompt|ids|mask|role|speed|text"):
        engine.submit(prompt, max_new_tokens=NEW)
    assert (engine.stats.running, engine.stats.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "at least one message or token id"), ((), "at least one message"), (3, "text, a chat, or token ids")],
)
def test_a_prompt_of_nothing_says_what_is_missing(engine: Engine, prompt: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, max_new_tokens=NEW)


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"generation_mode": "magic"}, "magic"),
    ({"generation_mode": "shared_prefix", "num_workers": 2}, "num_workers"),
    ({"speed": 9}, "speed"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"past_key_values": hf_parallel.SharedPrefixCache()}, "past_key_values"),
    ({"priority": "high"}, "priority.*'high'"),
    ({"submitter": ("me", [])}, r"submitter.*'me'"),
    ({"parallel_config": {"num_workers": 2}}, "generation_mode"),
    ({"n": 2}, "'n'.*did you mean 'num_return_sequences'"),
    ({"seed": "one"}, "seed.*one"),
]


def test_a_bad_setting_raises_at_submission(engine: Engine) -> None:
    for bad, message in BAD_SETTINGS:
        with pytest.raises((ValueError, TypeError), match=message):
            engine.submit(PROMPT, **{"max_new_tokens": NEW, **bad})


def test_the_tokenizer_is_that_of_the_request_or_of_enable() -> None:
    with Engine(twin()) as engine:
        assert list(engine.submit(PROMPT, tokenizer=TOKENIZER, max_new_tokens=NEW)) == expected()
    with Engine(hf_parallel.enable(twin(), tokenizer=TOKENIZER)) as engine:
        assert list(engine.submit(PROMPT, max_new_tokens=NEW)) == expected()


# Handles


def test_for_and_async_for_yield_the_tokens_and_texts_of_the_output(engine: Engine) -> None:
    handle = engine.submit(PROMPT, max_new_tokens=NEW)

    async def read() -> tuple[list[int], str]:
        return [token async for token in handle], "".join([text async for _, text, _ in handle.texts_async()])

    read_here = list(handle), "".join(text for _, text, _ in handle.texts())
    assert read_here == asyncio.run(read()) == (expected(), TOKENIZER.decode(expected()))
    assert handle.result().sequences[0, len(IDS) :].tolist() == expected()
    times = handle.times
    assert times.submitted <= times.started <= times.first_token <= times.ended  # type: ignore[operator]


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


# Engines


def test_a_bad_setting_of_an_engine_raises(model: Any) -> None:
    for name, value in [
        *(("max_kv_bytes", 0), ("max_kv_bytes", "1GB"), ("max_rows", 0)),
        *(("max_waiting", -1), ("max_batch_tokens", 1.5), ("policy", 3)),
    ]:
        with pytest.raises(ValueError, match=f"{name} must.*{value if name != 'policy' else 'int'}"):
            Engine(model, TOKENIZER, **{name: value})
    with pytest.raises(ValueError, match="max_kv_bytes=10 .* one token needs"), Engine(twin(), max_kv_bytes=10):
        pass


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
