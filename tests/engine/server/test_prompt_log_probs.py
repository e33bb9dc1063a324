"""`echo` with `logprobs`, and `prompt_logprobs`: scores of prompts, of which the server computes shared tokens once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")

from serving import MODEL, Served, check_error, served, small_model  # noqa: E402

import hf_parallel  # noqa: E402
from hf_parallel.engine import Engine  # noqa: E402
from hf_parallel.evaluation.scoring import loglikelihoods  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SHARED = list(range(40, 70))
CONTEXTS = [[*SHARED, 80 + number, 30] for number in range(3)]
CHOICES = [[50], [51, 52, 53], [51, 54]]
ROWS = [(context, choice) for context in CONTEXTS for choice in CHOICES]
UNIQUE = len(SHARED) + 3 * (2 + 5)
"""Distinct prefixes of the rows; two choices begin alike."""


@pytest.fixture(scope="module")
def expected() -> list[tuple[float, bool]]:
    """What the backend of lm-eval computes."""
    model: Any = hf_parallel.enable(small_model()[0])
    return loglikelihoods(model, *zip(*ROWS, strict=True))


def scores(choices: Any, end: int | None) -> list[tuple[float, bool]]:
    """Read answers as lm-eval does."""
    found = []
    for choice, (context, _) in zip(choices, ROWS, strict=True):
        logged = choice["logprobs"]
        own = logged["token_logprobs"][len(context) : end]
        best = [max(top.values()) for top in logged["top_logprobs"][len(context) : end]]
        found.append((sum(own), own == best))
    return found


def check(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-4)


@pytest.mark.parametrize("new_tokens", [0, 1])
def test_scores_of_continuations_equal_log_likelihoods_and_cost_their_prefix_once(
    server: Served, client: Any, expected: list[tuple[float, bool]], new_tokens: int
) -> None:
    for _ in range(2):  # what was scored before is not in the way
        before = server.engine.stats
        answer = client.completions.create(
            model=MODEL, prompt=[a + b for a, b in ROWS], max_tokens=new_tokens, echo=True, logprobs=1, temperature=0
        )
        assert server.engine.stats.prefilled_tokens - before.prefilled_tokens == UNIQUE
        assert server.engine.stats.kv_bytes == before.kv_bytes
        check(scores([choice.model_dump() for choice in answer.choices], -1 if new_tokens else None), expected)
        assert answer.usage.prompt_tokens == sum(len(a + b) for a, b in ROWS)
        assert answer.usage.completion_tokens == new_tokens * len(ROWS)


@pytest.mark.slow
def test_scores_are_the_same_when_requests_are_preempted(expected: list[tuple[float, bool]]) -> None:
    with Engine(*small_model()) as engine:
        engine.submit([5] * 63, max_new_tokens=1, do_sample=False).result()
        token_bytes = engine.stats.kv_bytes // 63
    with (
        Engine(*small_model(), max_kv_bytes=token_bytes * 420, max_batch_tokens=16) as engine,
        served(engine) as server,
    ):

        def ask(number: int) -> Any:
            if number % 2:
                return server.chat(max_tokens=60, text="x" * number)["choices"]
            given = {"prompt": [a + b for a, b in ROWS], "max_tokens": 30, "echo": True, "logprobs": 0}
            return server.post("/v1/completions", temperature=0, **given).json()["choices"]

        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(ask, range(6)))
        assert engine.stats.preemptions
        assert answers[1::2] == [ask(number) for number in (1, 3, 5)]
    for choices in answers[::2]:
        found = [
            sum(c["logprobs"]["token_logprobs"][len(a) : len(a + b)]) for c, (a, b) in zip(choices, ROWS, strict=True)
        ]
        assert found == pytest.approx([value for value, _ in expected], abs=1e-4)


def test_echo_is_the_prompt_and_offsets_count_its_characters(server: Served, client: Any) -> None:
    plain = client.completions.create(model=MODEL, prompt="Which city?", max_tokens=5, temperature=0)
    given = {"model": MODEL, "prompt": "Which city?", "max_tokens": 5, "temperature": 0, "echo": True, "logprobs": 2}
    answer = client.completions.create(**given)
    (choice,) = answer.choices
    assert choice.text == "Which city?" + plain.choices[0].text
    logged = choice.logprobs
    assert logged.token_logprobs[0] is logged.top_logprobs[0] is None
    assert len(logged.tokens) == answer.usage.total_tokens
    length = answer.usage.prompt_tokens
    assert "".join(logged.tokens[:length]) == "Which city?"
    assert logged.text_offset[: length + 1] == [len("".join(logged.tokens[:end])) for end in range(length + 1)]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**given, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == choice.text
    values = [value for chunk in chunks if chunk.logprobs for value in chunk.logprobs.token_logprobs]
    assert values == logged.token_logprobs
    many = client.completions.create(model=MODEL, prompt=["a", "bc"], max_tokens=2, n=2, seed=1, echo=True, logprobs=0)
    assert [one.text[: 1 + one.index // 2] for one in many.choices] == ["a", "a", "bc", "bc"]


def test_prompt_logprobs_are_those_of_vllm(server: Served) -> None:
    answer = server.chat(prompt_logprobs=3, max_tokens=2)
    found = answer["prompt_logprobs"]
    assert found[0] is None
    assert len(found) == answer["usage"]["prompt_tokens"]
    tokenizer, model = server.engine.tokenizer, small_model()[0]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], add_generation_prompt=True)
    ids = torch.tensor([chat["input_ids"]])
    logits = model(ids).logits[0, :-1].log_softmax(-1).detach()
    for entries, own, row in zip(found[1:], ids[0, 1:].tolist(), logits, strict=True):
        assert entries[str(own)]["logprob"] == pytest.approx(float(row[own]), abs=1e-4)
        for token, entry in entries.items():
            assert entry["rank"] == int((row > row[int(token)]).sum()) + 1
        assert sorted(entry["rank"] for entry in entries.values())[:3] == [1, 2, 3]
    completed = server.post("/v1/completions", prompt=["ab", "a"], prompt_logprobs=0, max_tokens=1).json()
    assert [len(choice["prompt_logprobs"]) for choice in completed["choices"]] == [2, 1]
    assert all(choice["logprobs"] is None for choice in completed["choices"])


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("prompt_logprobs", {"prompt_logprobs": 1, "generation_mode": "hogwild"}),
        ("echo", {"echo": True, "generation_mode": "hogwild"}),
        ("echo", {"echo": 1}),
    ],
)
def test_invalid_combinations_are_rejected(server: Served, field: str, body: dict[str, Any]) -> None:
    assert check_error(server.post("/v1/completions", prompt="a", **body), 400)["param"] == field
