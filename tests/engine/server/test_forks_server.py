"""Forks over HTTP: each equals its tokens in an empty cache, reads what is cached, and is its client's alone."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
httpx = pytest.importorskip("httpx2")
openai = pytest.importorskip("openai")

from engine_requests import assert_nothing_is_held, wait_until_idle  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from serving import MODEL, Served, check_error, served, small_model  # noqa: E402
from talks import Said, in_session  # noqa: E402
from test_malformed_bodies import VALUES, send  # noqa: E402

import hf_parallel  # noqa: E402
from hf_parallel.engine import Engine, RequestHandle  # noqa: E402
from hf_parallel.engine.server import Limits  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
RESPONSES, CHATS = "/v1/responses", "/v1/chat/completions"
KEYS = ("key", "other")


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    torch.set_num_threads(1)
    with Engine(*small_model()) as engine, served(engine, api_keys=KEYS) as running:
        yield running


@pytest.fixture
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)


def post(server: Served, path: str, key: str = "key", **body: Any) -> Any:
    return httpx.post(server.url + path, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=600)


def fork(server: Served, name: str, **body: Any) -> list[dict[str, Any]]:
    """Return the forks of a response or chat."""
    path = RESPONSES if name.startswith("resp_") else CHATS
    response = post(server, f"{path}/{name}/fork", **body)
    assert response.status_code == 200, response.text
    return response.json()["data"]


def text_of(response: dict[str, Any]) -> str:
    """Return the text of a response or chat as JSON."""
    if "choices" in response:
        return response["choices"][0]["message"]["content"]
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def cached_tokens(response: dict[str, Any]) -> tuple[int, int]:
    """Return the tokens of the prompt of a response or chat, and how many were cached."""
    usage = response["usage"]
    if "input_tokens" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def cold(engine_of: Any, prompt: list[int], **given: Any) -> str:
    """Return the answer to a prompt in an empty cache."""
    model, tokenizer = engine_of
    with Engine(model, tokenizer) as engine:
        output = engine.submit(prompt, **given).result(600)
        return tokenizer.decode(output.sequences[0, len(prompt) :], skip_special_tokens=True)


def test_three_repairs_of_one_conversation_pay_for_their_suffix(server: Served, client: Any) -> None:
    parent = client.responses.create(
        model=MODEL, instructions="Be brief.", input="Hello", max_output_tokens=20, temperature=0
    )
    prefix = parent.usage.input_tokens + parent.usage.output_tokens
    repairs = ["Check the sum.", "Use other words.", "Begin again."]
    before = server.engine.stats.prefilled_tokens
    children = fork(server, parent.id, children=[{"input": text} for text in repairs], max_output_tokens=6)
    computed = server.engine.stats.prefilled_tokens - before
    sizes = [cached_tokens(child) for child in children]
    assert all(cached >= prefix - 1 for _, cached in sizes)
    assert computed <= sum(total - prefix + 1 for total, _ in sizes)
    for text, child in zip(repairs, children, strict=True):
        # The template writes the turns of the assistant in one way, wherever they stand.
        conversation = f"<s>system\nBe brief.</s>\n<s>user\nHello</s>\n<s>assistant\n{parent.output_text}</s>\n"
        answer = client.completions.create(
            model=MODEL, prompt=f"{conversation}<s>user\n{text}</s>\n<s>assistant\n", max_tokens=6, temperature=0
        )
        if answer.usage.prompt_tokens == child["usage"]["input_tokens"]:  # the answer's text has the same tokens
            assert answer.choices[0].text == text_of(child)
        same = client.responses.create(
            model=MODEL, input=text, max_output_tokens=6, extra_body={"fork": {"id": parent.id}}
        )
        assert same.output_text == text_of(child)
        assert same.usage.input_tokens_details.cached_tokens >= prefix


@pytest.mark.parametrize("kind", ["response", "chat"])
def test_a_fork_after_a_token_equals_the_same_tokens_in_an_empty_cache(kind: str) -> None:
    model, tokenizer = small_model()
    settings: dict[str, Any] = {"temperature": 0}
    rendered = "<s>user\nHello</s>\n<s>assistant\n"
    suffix = "</s>\n<s>user\nMore</s>\n<s>assistant\n"
    prompt = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    with Engine(model, tokenizer) as engine:
        handle = engine.submit(prompt, max_new_tokens=20)
        handle.result(600)
        tokens = handle.row_tokens(0)
    expected = {}
    for at in (0, 7, len(tokens) - 1):
        ids = prompt + tokens[:at] + tokenizer(suffix, add_special_tokens=False)["input_ids"]
        expected[at] = cold((model, tokenizer), ids, max_new_tokens=9)
    with Engine(model, tokenizer) as engine, served(engine) as server:
        message = [{"role": "user", "content": "Hello"}]
        given = {"messages": message} if kind == "chat" else {"input": message}
        size = "max_tokens" if kind == "chat" else "max_output_tokens"
        path = CHATS if kind == "chat" else RESPONSES
        parent = post(server, path, model=MODEL, store=True, **{size: 20}, **given, **settings).json()
        for at, text in expected.items():
            more = [{"role": "user", "content": "More"}]
            (child,) = fork(server, parent["id"], at={"token": at}, **{size: 9}, **{[*given][0]: more})
            assert text_of(child) == text
            prompt_tokens, cached = cached_tokens(child)
            assert cached >= len(prompt) + at - 1
            # A fork is a response like others: it is forked, and continued by its conversation.
            (grandchild,) = fork(server, child["id"], **{size: 4}, store=True) if kind == "response" else ({},)
            if grandchild:
                assert cached_tokens(grandchild)[0] >= prompt_tokens
                again = post(
                    server, path, model=MODEL, input="x", previous_response_id=grandchild["id"], max_output_tokens=2
                )
                assert again.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_running_responses_are_forked_and_go_on(server: Served, client: Any, stream: bool) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    alone = client.chat.completions.create(**given, max_tokens=200).choices[0].message.content
    chunks = client.chat.completions.create(**given, max_tokens=200, stream=True)
    first = next(chunks)
    text = first.choices[0].delta.content
    for _ in range(20):
        text += next(chunks).choices[0].delta.content or ""
    children = [{"messages": [{"role": "user", "content": "Stop"}]}, {}]
    body: dict[str, Any] = {"children": children, "max_tokens": 5, "stream": stream}
    if not stream:
        forks = fork(server, first.id, **body)
        assert [len(one["choices"]) for one in forks] == [1, 1]
        assert all(cached >= total - 40 for total, cached in map(cached_tokens, forks))
    else:
        body["stream_options"] = {"include_usage": True}
        headers = {"Authorization": "Bearer key"}
        with httpx.stream("POST", f"{server.url}{CHATS}/{first.id}/fork", json=body, headers=headers) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert lines.pop() == "[DONE]"
        events = [json.loads(line) for line in lines]
        for number in range(2):
            own = [event for event in events if event["child"] == number]
            assert len({event["id"] for event in own}) == 1
            assert own[-1]["usage"]["completion_tokens"] <= 5
            assert own[-2]["choices"][0]["finish_reason"] in ("length", "stop")
    for chunk in chunks:
        text += chunk.choices[0].delta.content or ""
    assert text == alone
    # Without `store`, it is forgotten at its end.
    assert server.wait_until(lambda stats: not stats.running)
    time.sleep(0.1)
    check_error(post(server, f"{CHATS}/{first.id}/fork"), 404)


def test_streamed_forks_of_a_response_are_responses(server: Served, client: Any) -> None:
    parent = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8)
    body = {"n": 2, "stream": True, "max_output_tokens": 4, "seed": 5, "temperature": 0.7}
    headers = {"Authorization": "Bearer key"}
    with httpx.stream("POST", f"{server.url}{RESPONSES}/{parent.id}/fork", json=body, headers=headers) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    ends = [event["response"] for event in events if event["type"] in ("response.completed", "response.incomplete")]
    assert len(ends) == 2
    for end in ends:
        assert client.responses.retrieve(end["id"]).output_text == text_of(end)
    texts = {text_of(one) for one in fork(server, parent.id, n=2, max_output_tokens=4, seed=5, temperature=0.7)}
    assert texts == {text_of(end) for end in ends}


def test_forks_at_messages_render_the_conversation_again(server: Served, client: Any) -> None:
    parent = client.responses.create(model=MODEL, instructions="Be kind.", input="One", max_output_tokens=5)
    second = client.responses.create(model=MODEL, input="Two", previous_response_id=parent.id, max_output_tokens=5)
    for index, chat in [(0, ["One"]), (-1, ["One", parent.output_text, "Two", second.output_text])]:
        (child,) = fork(server, second.id, at={"message": index}, input="Three", max_output_tokens=5, temperature=0)
        roles = ["user", "assistant", "user", "assistant", "user"]
        texts = [*chat, "Three"]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        if index == 0:
            messages[1]["role"] = "user"
        answer = client.responses.create(model=MODEL, input=messages, max_output_tokens=5, temperature=0)
        assert text_of(child) == answer.output_text
        assert cached_tokens(child)[0] == answer.usage.input_tokens


def test_keys_see_their_own_responses_and_deleted_ones_are_gone(server: Served, client: Any) -> None:
    stored = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4, store=True
    )
    response = client.responses.create(model=MODEL, input="Hi", max_output_tokens=4)
    not_stored = client.responses.create(model=MODEL, input="Hi", max_output_tokens=4, store=False)
    leases = server.engine.stats.leases
    for path, name in ((CHATS, stored.id), (RESPONSES, response.id)):
        check_error(post(server, f"{path}/{name}/fork", key="other"), 404)
        other = CHATS if path == RESPONSES else RESPONSES
        check_error(post(server, f"{other}/{name}/fork"), 404)
        check_error(httpx.delete(f"{server.url}{path}/{name}", headers={"Authorization": "Bearer other"}), 404)
        fork(server, name, max_tokens=2) if path == CHATS else fork(server, name, max_output_tokens=2, store=False)
        assert httpx.delete(f"{server.url}{path}/{name}", headers={"Authorization": "Bearer key"}).status_code == 200
        check_error(post(server, f"{path}/{name}/fork"), 404)
    check_error(post(server, f"{RESPONSES}/{not_stored.id}/fork"), 404)
    assert server.wait_until(lambda stats: stats.leases == leases - 2, seconds=20)


def test_forks_of_one_request_are_limited_together() -> None:
    settings: dict[str, Any] = {"max_output_tokens": 2, "store": False}
    with Engine(*small_model()) as engine, served(engine, Limits(body_bytes=4000)) as server:
        parent = post(server, RESPONSES, model=MODEL, input="Hi", max_output_tokens=2).json()
        wait_until_idle(engine)
        finished = engine.stats.finished
        error = check_error(post(server, f"{RESPONSES}/{parent['id']}/fork", n=12, input="x " * 800, **settings), 400)
        assert error["param"] == "n"
        assert "together" in error["message"]
        wait_until_idle(engine)
        assert engine.stats.finished == finished
        assert len(fork(server, parent["id"], n=12, input="x " * 200, **settings)) == 12


def test_all_forks_of_a_request_begin_or_none() -> None:
    with Engine(*small_model(), max_waiting=4) as engine, served(engine, Limits(rows=6, log_probs=30)) as server:
        parent = post(server, RESPONSES, model=MODEL, input="Hi", max_output_tokens=2).json()
        wait_until_idle(engine)
        prepare = engine.prepare
        prepared = []

        def second_fails(*arguments: Any, **given: Any) -> Any:
            prepared.append(arguments)
            if len(prepared) == 2:
                raise ValueError("seed must be another")
            return prepare(*arguments, **given)

        path = f"{RESPONSES}/{parent['id']}/fork"
        engine.prepare = second_fails  # type: ignore[method-assign]
        check_error(post(server, path, n=2, input="x", max_output_tokens=2), 400)
        engine.prepare = prepare  # type: ignore[method-assign]
        several = {"generation_mode": "self_consistency", "num_answers": 4, "temperature": 1.0}
        fewer = [{"generation_mode": "self_consistency", "num_answers": 3}] * 2
        for body, status, field, words in [
            ({"n": 2, **several}, 400, "n", "6 rows together, these have 8"),
            ({"children": [{}, several, {}, {}]}, 400, "children", "6 rows together, these have 7"),
            ({"n": 5}, 429, None, "4 requests wait already"),
        ]:
            error = check_error(post(server, path, input="x", max_output_tokens=2, **body), status)
            assert error["param"] == field
            assert words in error["message"]
        assert server.wait_until(lambda stats: stats.leases == 1, seconds=20)
        assert engine.stats.finished == 1
        assert len(fork(server, parent["id"], children=fewer, input="x", max_output_tokens=2, temperature=1.0)) == 2
        chat: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        parent = post(server, CHATS, **chat, logprobs=True, top_logprobs=4, store=True).json()
        error = check_error(post(server, f"{CHATS}/{parent['id']}/fork", n=4), 400)
        assert error["param"] == "n"
        assert "at most 30 log-probabilities, tokens times alternatives, not 40" in error["message"]
        assert len(fork(server, parent["id"], n=3)) == 3


def hello(server: Served, number: int) -> str:
    """Return the id of a new response."""
    body = {"model": MODEL, "input": f"Hello {number}", "max_output_tokens": 4, "temperature": 0}
    return post(server, RESPONSES, **body).json()["id"]


def test_leases_end_by_number_bytes_time_and_under_pressure_and_forks_are_right_all_the_same() -> None:
    model, tokenizer = small_model()
    with Engine(model, tokenizer) as engine, served(engine, Limits(max_leases=3, lease_ttl=10)) as server:
        names = [hello(server, index) for index in range(5)]
        assert engine.stats.leases == 3
        answers = [text_of(fork(server, name, input="x", store=False, temperature=0)[0]) for name in names]
        assert server.wait_until(lambda stats: stats.leases == 0, seconds=60)
        token = engine._storage.arena.bytes_per_token
    limits = Limits(max_lease_bytes=70 * token)
    with Engine(model, tokenizer, max_kv_bytes=700 * token) as engine, served(engine, limits) as server:
        names = [hello(server, index) for index in range(5)]
        assert 0 < engine.stats.lease_bytes <= 70 * token
        assert 0 < engine.stats.leases < 5
        post(server, "/v1/completions", model=MODEL, prompt="a b c d e " * 60, max_tokens=4)
        post(server, "/v1/completions", model=MODEL, prompt="f g h i j " * 60, max_tokens=4)
        assert engine.stats.evicted_tokens
        assert engine.stats.preemptions == 0
        evicted = [text_of(fork(server, name, input="x", store=False, temperature=0)[0]) for name in names]
        assert evicted == answers
        wait_until_idle(engine)


FIELDS = ["at", "choice", "n", "children", "stream", "input", "instructions", "tools", "model", "seed", "unknown"]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(FIELDS), VALUES, st.sampled_from(["route", "child", "field"]))
def test_malformed_forks_are_errors_of_the_client(server: Served, name: str, value: Any, where: str) -> None:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer key"}
    if not hasattr(server, "parent"):
        server.parent = post(server, RESPONSES, model=MODEL, input="Hi", max_output_tokens=2).json()["id"]  # type: ignore[attr-defined]
    parent = server.parent  # type: ignore[attr-defined]
    path = f"{RESPONSES}/{parent}/fork"
    body: dict[str, Any] = {"max_output_tokens": 2, "store": False, name: value}
    if where == "child":
        body = {"store": False, "children": [{"max_output_tokens": 2, name: value}]}
    elif where == "field":
        path = RESPONSES
        body = {
            "model": MODEL,
            "input": "a",
            "max_output_tokens": 2,
            "store": False,
            "fork": {"id": parent, name: value},
        }
    status, error = send(server, json.dumps(body).encode(), path, headers=headers)
    assert status < 500, error
    if status >= 400 and status != 404:
        assert error["param"] is not None or "JSON" in error["message"] or "read" in error["message"], error


WORKERS: dict[str, Any] = {
    "generation_mode": "hogwild",
    "num_workers": 2,
    "collaboration_prompt": "{names} talk.",
    "redundancy_prompt": "",
    "finisher_tokens": 2,
}


@dataclass
class Sent:
    """A request of a server to its engine, and what clients said to its rows, in this order."""

    prompt: list[int]
    arguments: dict[str, Any]
    handle: RequestHandle
    said: list[tuple[Future[int], str | int, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def say(self, inject: Any, text: str, to: str | int) -> Future[int]:
        """Say a text, and record it."""
        with self.lock:
            heard = inject(text, to)
            self.said.append((heard, to, text))
        return heard

    def heard(self) -> list[Said]:
        """Return the texts that were read, each with the number of passes before it."""
        said = [(heard, to, text) for heard, to, text in self.said if heard.exception() is None]
        return [(heard.result(), to, text) for heard, to, text in said]

    @property
    def has_workers(self) -> bool:
        return self.arguments["parallel_config"].mode == "hogwild"

    def settings(self) -> dict[str, Any]:
        """Return the settings that its tokens depend on."""
        names = ("parallel_config", "max_new_tokens", "temperature", "do_sample", "top_k", "top_p")
        return {name: self.arguments[name] for name in names if name in self.arguments}

    def in_session(self, model: Any, tokenizer: Any) -> list[list[int]]:
        """Return the sequences of a session that gets the same texts."""
        settings = self.settings()
        config = settings.pop("parallel_config")
        settings |= {name: getattr(config, name) for name in config.fields()}
        return in_session(model, tokenizer, torch.tensor([self.prompt]), settings, self.heard()).sequences.tolist()


class Clients:
    """Clients of a server with two keys, which create, fork, speak to, cancel and delete responses at random."""

    def __init__(self, server: Served, seed: int) -> None:
        self.server = server
        self.seed = seed
        self.names: dict[str, list[str]] = {key: [] for key in KEYS}
        self.deleted: set[str] = set()
        self.errors: list[BaseException] = []
        self.requests: list[Sent] = []
        self._prepare = server.engine.prepare
        server.engine.prepare = self.prepare  # type: ignore[method-assign]

    def prepare(self, prompt: Any, **arguments: Any) -> Any:
        """Record what the server submits, and what is said to workers."""
        request = self._prepare(prompt, **arguments)
        sent = Sent(prompt["input_ids"][0].tolist(), arguments, request.handle)
        request.handle.inject = partial(sent.say, request.handle.inject)
        self.requests.append(sent)
        return request

    def run(self, count: int) -> None:
        """Let four clients act, and raise the first error."""
        threads = [threading.Thread(target=self._client, args=(number, count // 4)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def _client(self, number: int, count: int) -> None:
        rng = random.Random(f"{self.seed} {number}")
        try:
            for _ in range(count):
                self.act(KEYS[number % 2], rng)
        except BaseException as error:
            self.errors.append(error)

    def act(self, key: str, rng: random.Random) -> None:
        """Do one thing with a key."""
        own = list(self.names[key])
        given = {"temperature": 1.0, "seed": rng.randrange(99), "max_output_tokens": rng.randint(1, 60)}
        new = {"model": MODEL, "input": rng.choice(["Hi", "Hello", "Who"]), **given}
        kind = rng.random()
        if not own or kind < 0.25:
            self.create(key, rng, RESPONSES, new)
        elif kind < 0.35:
            self.create(key, rng, RESPONSES, new | WORKERS | {"max_output_tokens": rng.randint(8, 30)})
        elif kind < 0.7:
            at = rng.choice(["end", {"token": rng.randint(0, 3)}, {"message": 0}])
            suffix = {"input": rng.choice(["x", "y"])} if rng.random() < 0.6 else {}
            path = f"{RESPONSES}/{rng.choice(own)}/fork"
            self.create(key, rng, path, {"n": rng.randint(1, 3), "at": at, **given, **suffix})
        elif kind < 0.78:
            self.speak(key, rng, rng.choice(own))
        elif kind < 0.86:
            name = rng.choice(own)
            assert self.delete(key, name) in (200, 404)
            self.deleted.add(name)
        else:
            others = [name for other in KEYS if other != key for name in self.names[other]]
            if others:
                name = rng.choice(others)
                check_error(post(self.server, f"{RESPONSES}/{name}/fork", key=key), 404)
                check_error(post(self.server, f"{RESPONSES}/{name}/inject", key=key, text="Hm."), 404)

    def speak(self, key: str, rng: random.Random, name: str) -> None:
        """Say something to the workers of a response, if it has workers, and runs."""
        body = {"text": rng.choice(["It rains.", "Hm?"]), "to": rng.choice(["all", 0, "Bob"])}
        response = post(self.server, f"{RESPONSES}/{name}/inject", key=key, **body)
        assert response.status_code in (200, 400, 404, 409), response.text

    def create(self, key: str, rng: random.Random, path: str, body: dict[str, Any]) -> None:
        """Post a body; sometimes read a stream, and sometimes only its beginning."""
        has_workers = "num_workers" in body
        ends_early = rng.random() < 0.2
        if not (ends_early or has_workers) and rng.random() < 0.7:
            response = post(self.server, path, key=key, **body)
            assert response.status_code in (200, 400, 404), response.text
            if response.status_code == 200:
                data = response.json()
                self.names[key] += [one["id"] for one in data.get("data", [data])]
            return
        url, headers = self.server.url + path, {"Authorization": f"Bearer {key}"}
        with httpx.stream("POST", url, json={**body, "stream": True}, headers=headers, timeout=600) as response:
            assert response.status_code in (200, 400, 404), response.read()
            created = 0
            for index, line in enumerate(response.iter_lines()):
                if line.startswith("data: {") and '"response.created"' in line:
                    created += 1
                    self.names[key].append(json.loads(line[6:])["response"]["id"])
                    if has_workers:
                        self.speak(key, rng, self.names[key][-1])
                if index == 8 and has_workers:
                    self.speak(key, rng, self.names[key][-1])
                elif index == 8 and rng.random() < 0.6:  # while it runs
                    self.create(key, rng, f"{RESPONSES}/{self.names[key][-1]}/fork", {**body, "n": 2})
                if ends_early and index > 12 and created == body.get("n", 1):  # else it could not delete all of them
                    return

    def delete(self, key: str, name: str) -> int:
        """Delete a response. Return the status."""
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.delete(f"{self.server.url}{RESPONSES}/{name}", headers=headers, timeout=600).status_code


@pytest.mark.parametrize(("seeds", "count"), [([0], 60), pytest.param(range(1, 4), 150, marks=pytest.mark.slow)])
def test_random_sequences_of_requests_leave_nothing_behind_and_cross_no_keys(seeds: list[int], count: int) -> None:
    totals = sum((run_random_sequence(seed, count) for seed in seeds), Counter[str]())
    assert totals["ended"]
    if len(seeds) > 1:  # a short sequence may miss one
        assert min(totals[name] for name in ("preemptions", "forks", "texts")) > 0, totals


def run_random_sequence(seed: int, count: int) -> Counter[str]:
    """Run a random sequence of actions with a server, check it, and return how much of what has happened."""
    model, tokenizer = small_model()
    hf_parallel.enable(model, batch_invariant=True)
    rng = random.Random(seed)
    with Engine(model, tokenizer) as engine:
        token = engine._storage.arena.bytes_per_token
    limits = Limits(max_leases=4, lease_ttl=rng.choice([0.2, 600]), max_lease_bytes=120 * token)
    budget = rng.choice([420, 560]) * token
    totals = Counter[str]()
    with Engine(model, tokenizer, max_kv_bytes=budget) as engine, served(engine, limits, api_keys=KEYS) as server:
        clients = Clients(server, seed)
        clients.run(count)
        wait_until_idle(engine)
        totals["preemptions"] = engine.stats.preemptions
        for key, names in clients.names.items():
            for name in names:
                clients.delete(key, name)
                if name in clients.deleted:
                    check_error(post(server, f"{RESPONSES}/{name}/fork", key=key), 404)
        assert server.wait_until(lambda stats: stats.leases == 0, seconds=60)
        assert engine.stats.lease_bytes == 0
        assert_nothing_is_held(engine)
    ended = [sent for sent in clients.requests if sent.handle.done and sent.handle.error is None]
    totals["requests"] = len(clients.requests)
    totals["ended"] = len(ended)
    with Engine(model, tokenizer) as engine:
        for number, sent in enumerate(ended):
            totals["forks"] += sent.arguments["parent"] is not None
            if not sent.has_workers:
                cold = engine.submit(sent.prompt, cache_salt=str(number), **sent.settings()).result(600)
                assert cold.sequences.tolist() == sent.handle.result().sequences.tolist()
    for sent in ended:
        if sent.has_workers:
            totals["texts"] += len(sent.heard())
            assert sent.in_session(model, tokenizer) == sent.handle.result().sequences.tolist()
    return totals
