"""A limit on the tokens of reasoning holds for each row, with tools, streams and modes beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
pytest.importorskip("httpx2")

from serving import TEMPLATE, Served, check_error, served, small_model  # noqa: E402

from hf_parallel.engine import Engine  # noqa: E402
from hf_parallel.generation.sampling.processors import ThinkingBudget  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
HELLO = [{"role": "user", "content": "Hello <think> there"}]  # the mark of the user opens nothing


@pytest.fixture(scope="module")
def thinking() -> Iterator[Served]:
    torch.set_num_threads(1)
    model, tokenizer = small_model()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = TEMPLATE.replace(
        "{{ '<s>assistant\n' }}", "{{ '<s>assistant\n' + ('<think>\n' if open else '') }}"
    )
    model.resize_token_embeddings(len(tokenizer))
    # The random model writes neither mark by itself.
    with torch.no_grad():
        model.lm_head.weight[-2:] = 0
    with Engine(model, tokenizer) as engine, served(engine) as running:
        yield running


def reasoning_of(server: Served, **body: Any) -> list[tuple[str, str]]:
    choices = server.chat(messages=HELLO, max_tokens=24, **body)["choices"]
    return [(choice["message"].get("reasoning_content", ""), choice["message"]["content"]) for choice in choices]


def test_each_answer_ends_its_reasoning_within_the_budget(thinking: Served) -> None:
    opened = {"chat_template_kwargs": {"open": True}}
    ((free, _),) = reasoning_of(thinking, **opened)
    tokenizer = thinking.engine.tokenizer
    for budget in (1, 7):
        ((limited, content),) = reasoning_of(thinking, **opened, thinking_token_budget=budget)
        written = tokenizer(free, add_special_tokens=False)["input_ids"]
        assert free.startswith(limited.rstrip("�"))
        assert len(limited.encode()) < len(free.encode())
        assert len(written) > budget
        assert content
    sampled = {"n": 3, "temperature": 1.0, "seed": 1, **opened}
    for mode in ({}, {"generation_mode": "shared_prefix"}):
        found = reasoning_of(thinking, **sampled, **mode, thinking_token_budget=5)
        assert len({reasoning for reasoning, _ in found}) == 3
        assert all(content for _, content in found)
    assert [content for _, content in reasoning_of(thinking, **sampled)] == [""] * 3
    assert reasoning_of(thinking) == reasoning_of(thinking, thinking_token_budget=0)  # nothing opens reasoning


def test_rows_of_a_mode_have_a_budget_each(thinking: Served) -> None:
    body = {"chat_template_kwargs": {"open": True}, "generation_mode": "self_consistency", "num_answers": 3}
    choice = thinking.chat(messages=HELLO, max_tokens=16, temperature=1.0, seed=1, thinking_token_budget=4, **body)
    texts = choice["choices"][0]["mode_output"]["texts"]
    assert len(texts) == 3
    assert all(text.count("</think>") == 1 for text in texts), texts


def test_only_models_whose_reasoning_has_marks_have_a_budget(thinking: Served, server: Served) -> None:
    for one, budget in ((server, 5), (thinking, -1), (thinking, True)):
        error = check_error(one.post("/v1/chat/completions", messages=HELLO, thinking_token_budget=budget), 400)
        assert error["param"] == "thinking_token_budget"
    own = {"messages": HELLO, "thinking_token_budget": 5, "response_format": {"type": "json_object"}}
    assert check_error(thinking.post("/v1/chat/completions", **own), 400)["param"] == "thinking_token_budget"
    assert check_error(thinking.post("/v1/completions", prompt="a", thinking_token_budget=5), 400)["param"]


def expected(row: list[int], begin: list[int], end: int, known: int, budget: int) -> bool:
    """Whether a row has to end its reasoning, token by token."""
    opens, spent, thinks = 0, 0, False
    for place in range(1, len(row) + 1):
        opened = row[max(0, place - len(begin)) : place] == begin
        opens += opened
        spent += thinks and row[place - 1] != end  # a mark within the reasoning is one of its tokens
        thinks = row[place - 1] != end and (thinks or (opened and opens > known))
    return thinks and spent >= budget


@pytest.mark.parametrize("begin", [[1], [1, 2], [2, 1, 2]])
def test_the_end_is_forced_as_in_a_count_by_hand(begin: list[int]) -> None:
    rng, forced = random.Random(len(begin)), 0
    for _ in range(300):
        known, budget, length = rng.randint(0, 1), rng.randint(0, 4), rng.randint(1, 12)
        rows = [[rng.randint(0, 3) for _ in range(length)] for _ in range(3)]
        scores = torch.randn(3, 5)
        found = ThinkingBudget(budget, begin, 3, known)(torch.tensor(rows), scores)
        for row, before, after in zip(rows, scores, found, strict=True):
            if expected(row, begin, 3, known, budget):
                assert after.softmax(-1)[3] == 1
                forced += 1
            else:
                assert torch.equal(before, after)
    assert forced > 0


def test_a_row_cannot_begin_anew_with_its_budget() -> None:
    limit, scores = ThinkingBudget(3, [1], 2, 0), torch.zeros(1, 6)
    for row, is_over in (
        ([1, 5, 1, 5], True),
        ([1, 5, 5, 2, 1, 4], True),
        ([1, 5, 5, 2, 1], False),
        ([1, 5, 1], False),
    ):
        assert (limit(torch.tensor([row]), scores)[0, 5] == -torch.inf) == is_over, row


@pytest.mark.parametrize("mode", ["pdos", "fork_join"])
def test_a_format_begins_after_the_reasoning(thinking: Served, mode: str) -> None:
    """The reasoning ends by a limit of the mode, or by the budget of the server, and is no part of the content."""
    body: dict[str, Any] = {"generation_mode": mode, "after": "</think>", "opening": "So:", "temperature": 0}
    body |= (
        {"titles": ["A", "B"], "parallel_hint": False}
        if mode == "pdos"
        else {"dialect": "pdos", "force": True, "paths": 2}
    )
    opened = {"chat_template_kwargs": {"open": True}, "max_tokens": 150, "messages": HELLO}
    for limit in ("thinking_max_new_tokens", "thinking_token_budget"):
        (choice,) = thinking.chat(**opened, **body, **{limit: 5})["choices"]
        record, message = choice["mode_output"], choice["message"]
        assert record["thinking"].endswith("</think>")
        assert record["transcript"].startswith(record["thinking"] + "So:")
        assert message["reasoning_content"].strip() == record["thinking"].removesuffix("</think>").strip()
        assert message["content"].startswith("So:")
        assert record["thinking_tokens"] >= 5
    (choice,) = thinking.chat(**opened | {"max_tokens": 60}, **body)["choices"]
    assert choice["mode_output"]["fallback"] == "the budget ended before '</think>'"


def test_invalid_ends_of_the_reasoning_name_their_field(thinking: Served) -> None:
    for wrong in ({"after": ""}, {"after": 5}, {"after": ["</think>"]}, {"after": {"pattern": "a"}}):
        error = check_error(thinking.post("/v1/chat/completions", messages=HELLO, generation_mode="pdos", **wrong), 400)
        assert "after must be a text" in error["message"]
    wrong = {"thinking_max_new_tokens": 3}
    error = check_error(thinking.post("/v1/chat/completions", messages=HELLO, generation_mode="pdos", **wrong), 400)
    assert "thinking_max_new_tokens=3 needs after" in error["message"]
