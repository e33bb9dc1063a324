"""Cached logits behind the API: requests with `replay` get the answers that they get without it."""

from __future__ import annotations

import json
import random
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("prometheus_client")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")

from serving import MODEL, Served, check_error, served, small_model  # noqa: E402
from test_server import command, events, exit_status, folder, idle, send, small  # noqa: E402, F401

from hf_parallel import LogitsCache  # noqa: E402
from hf_parallel.cli.main import main  # noqa: E402
from hf_parallel.engine import Engine  # noqa: E402
from hf_parallel.engine.server.logits_cache import open_cache, save_cache  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = [{"role": "user", "content": "Hello"}]
REPLAY = {"replay": "stepwise"}
KEYS = ["one", "two"]


def long_model() -> tuple[Any, Any]:
    """Return the small model, with a context that holds the instructions of modes."""
    model, tokenizer = small_model()
    model.config.max_position_embeddings = 4096
    return model, tokenizer


@contextmanager
def replaying(max_bytes: int = 1 << 26, **settings: Any) -> Iterator[tuple[Served, LogitsCache]]:
    """Run a server with an empty cache."""
    torch.set_num_threads(1)
    cache = LogitsCache(max_bytes)
    engine_settings = {name: settings.pop(name) for name in ("max_kv_bytes", "max_rows") if name in settings}
    with (
        Engine(*long_model(), **engine_settings) as engine,
        served(engine, logits_cache=cache, **settings) as running,
    ):
        yield running, cache


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with replaying() as (running, _):
        yield running


@pytest.fixture
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def metrics(server: Served, key: str = "") -> dict[str, float]:
    headers = {"Authorization": f"Bearer {key}"} if key else None
    text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=600).text
    found = re.findall(r"^hf_parallel_(\w+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def replayed(answer: dict[str, Any]) -> int:
    return answer["usage"]["completion_tokens_details"]["replayed_tokens"]


def texts(answer: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return what answers to the same request have in common."""
    choices = []
    for choice in answer["choices"]:
        logged = (choice.get("logprobs") or {}).get("content") or []
        tokens = [entry["token"] for entry in logged]
        choices.append((choice["index"], choice["message"]["content"], choice["finish_reason"], tokens))
    return choices


def test_the_client_of_openai_gets_and_streams_the_same_answers_from_cached_logits(client: Any) -> None:
    arguments: dict[str, Any] = {"model": MODEL, "messages": CHAT, "temperature": 1, "seed": 4, "max_tokens": 24}
    alone = client.chat.completions.create(**arguments)
    arguments["extra_body"] = REPLAY
    for number in range(2):
        answer = client.chat.completions.create(**arguments)
        assert answer.choices[0].message.content == alone.choices[0].message.content
        assert answer.usage.completion_tokens_details.replayed_tokens == 24 * number
        assert answer.usage.forward_passes == 0 or number == 0
    *chunks, usage = client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == alone.choices[0].message.content
    assert usage.usage.completion_tokens_details.replayed_tokens == 24
    asked: dict[str, Any] = {
        "model": MODEL,
        "input": "Hello",
        "max_output_tokens": 5,
        "extra_body": REPLAY | {"seed": 1},
    }
    assert client.responses.create(**asked).usage.output_tokens_details.replayed_tokens > 0  # the first is the chat's
    assert client.responses.create(**asked).usage.output_tokens_details.replayed_tokens == 5


@pytest.mark.parametrize(
    "settings",
    [
        {"n": 3, "temperature": 0.7},
        {"logprobs": True, "top_logprobs": 3},
        {"top_p": 0.8, "repetition_penalty": 1.3},
        {"temperature": 0},
        {"generation_mode": "resample", "n": 2},
        {"logit_bias": {"40": 5}, "presence_penalty": 1, "min_new_tokens": 3},
    ],
    ids=str,
)
def test_settings_of_a_request_hold_for_replayed_tokens(server: Served, settings: dict[str, Any]) -> None:
    settings = {"temperature": 1, "seed": 7, "max_tokens": 40, **settings}
    plain = {name: value for name, value in settings.items() if name != "generation_mode"}
    alone = server.chat(**plain)
    stop = alone["choices"][0]["message"]["content"][10:13]
    stopped = server.chat(**plain, stop=[stop])
    first = server.chat(**settings, **REPLAY)
    second = server.chat(**settings, **REPLAY)
    assert texts(first) == texts(second) == texts(alone)
    assert replayed(second) == second["usage"]["completion_tokens"] > 0
    assert replayed(alone) == 0
    again = server.chat(**settings, **REPLAY, stop=[stop])
    assert texts(again) == texts(stopped)
    assert again["choices"][0]["finish_reason"] == "stop"
    for ours, theirs in zip(first["choices"] + second["choices"], 2 * alone["choices"], strict=True):
        logged = zip(*(choice["logprobs"]["content"] for choice in (ours, theirs) if choice["logprobs"]), strict=True)
        for entry, other in logged:
            assert entry["logprob"] == pytest.approx(other["logprob"], abs=1e-5)
            assert [top["token"] for top in entry["top_logprobs"]] == [top["token"] for top in other["top_logprobs"]]


def test_log_probabilities_of_a_prompt_come_with_a_replayed_answer(server: Served) -> None:
    settings = {"prompt": "A river", "max_tokens": 6, "seed": 1, "temperature": 1, "logprobs": 2, "echo": True}
    found = []
    for replay in ({}, REPLAY, REPLAY):
        response = server.post("/v1/completions", **settings, **replay)
        assert response.status_code == 200, response.text
        found.append(response.json())
    assert replayed(found[2]) == 6
    first, *others = [answer["choices"][0] for answer in found]
    for choice in others:
        assert choice["text"] == first["text"]
        assert choice["logprobs"]["tokens"] == first["logprobs"]["tokens"]
        values = zip(choice["logprobs"]["token_logprobs"][1:], first["logprobs"]["token_logprobs"][1:], strict=True)
        assert all(ours == pytest.approx(theirs, abs=1e-5) for ours, theirs in values)


@pytest.mark.parametrize("mode", ["shared_prefix", "hogwild", "pdos", "self_consistency", "skeleton_of_thought"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_modes_replay(server: Served, mode: str) -> None:
    settings = {"generation_mode": mode, "temperature": 1, "seed": 2, "max_tokens": 24}
    alone = texts(server.chat(**settings))
    assert texts(server.chat(**settings, **REPLAY)) == alone
    again = server.chat(**settings, **REPLAY)
    assert texts(again) == alone
    assert replayed(again) == again["usage"]["completion_tokens"]


def test_what_a_request_cannot_have_is_an_error_that_names_the_field(server: Served) -> None:
    def error(running: Served, **body: Any) -> tuple[str, str]:
        found = check_error(running.post("/v1/chat/completions", messages=CHAT, **body), 400)
        return found["param"], found["message"]

    assert error(server, replay="sometimes") == ("replay", "replay must be one of ['hotspot', 'stepwise'] or a "
                                                 "ReplayPolicy, got 'sometimes'")  # fmt: skip
    for value in (5, True, ["stepwise"], {"name": "stepwise"}):
        assert error(server, replay=value)[0] == "replay"
    assert error(server, generation_mode="best_of", **REPLAY)[0] == "replay"
    assert error(server, logits_cache="x")[0] == "logits_cache"
    with Engine(*small_model()) as engine, served(engine) as without:
        for body, field in (({"replay": "hotspot"}, "replay"), ({"generation_mode": "resample"}, "generation_mode")):
            param, message = error(without, **body)
            assert param == field
            assert "--logits-cache" in message
        assert "logits_cache_hits_total" not in metrics(without)
        assert without.chat(replay=None)["choices"]
        assert '"resample"' not in httpx.get(without.url).text
    assert '"resample"' in httpx.get(server.url).text


def test_keys_and_salts_draw_from_their_own_logits_only(tmp_path: Path) -> None:
    """Also after a restart with other keys, in another order."""

    def ask(running: Served, key: str, **body: Any) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else None
        body = {"prompt": "Hello", "max_tokens": 8, "seed": 1, **REPLAY, **body}
        return replayed(running.post("/v1/completions", headers, **body).json())

    path = tmp_path / "logits"
    with replaying(api_keys=KEYS) as (running, cache):
        assert ask(running, "one") == 0
        assert metrics(running, "one")["logits_cache_hits_total"] == 0
        assert ask(running, "two") == 0
        for key, salt in (("one", "0:"), ("two", "0:"), ("one", "1")):
            assert ask(running, key, cache_salt=salt) == 0
        assert metrics(running, "one")["logits_cache_hits_total"] == 0
        assert ask(running, "one") == ask(running, "two", cache_salt="0:") == 8
        found = metrics(running, "one")
        assert found["logits_cache_hits_total"] == found["replayed_tokens_total"] == 16
        assert found["logits_cache_misses_total"] > 0
        assert found["logits_cache_bytes"] == cache.num_bytes <= found["max_logits_cache_bytes"] == cache.max_bytes
        save_cache(cache, path)
    assert path.stat().st_mode & 0o077 == 0
    assert b"one" not in path.read_bytes()[:2000]
    for keys, expected in ((["three", "two", "one"], [0, 8, 8]), (["four"], [0]), ([], [0])):
        with (
            Engine(*long_model()) as engine,
            served(engine, api_keys=keys, logits_cache=open_cache(1 << 26, path)) as running,
        ):
            assert [ask(running, key) for key in keys or [""]] == expected


def test_equal_requests_at_the_same_time_are_computed_once() -> None:
    """Those that wait draw from what the first one computes."""
    count = 6
    with replaying() as (running, _), ThreadPoolExecutor(count) as pool:
        barrier = threading.Barrier(count)

        def ask(number: int) -> dict[str, Any]:
            barrier.wait()
            return running.chat(max_tokens=200, logit_bias={"2": -100}, **REPLAY)

        answers = list(pool.map(ask, range(count)))
        steps = running.engine.stats.steps
    assert all(texts(answer) == texts(answers[0]) for answer in answers)
    assert sum(map(replayed, answers)) >= 200 * (count - 1) - count  # of the token at which one arrives
    assert steps < 200 + 2 * count


@pytest.mark.parametrize("rounds", [40, pytest.param(150, marks=pytest.mark.slow)])
def test_random_requests_get_the_answers_that_they_get_without_a_cache(rounds: int) -> None:
    """With two keys, salts, seeds, little memory for logits and for keys and values, and clients that leave."""
    rng = random.Random(0)
    requests = []
    for _ in range(rounds):
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": rng.choice(["Hello", "Help", "A long river is"])}],
            "temperature": rng.choice([0.1, 0.6, 1]),
            "seed": rng.randrange(3),
            "max_tokens": rng.randint(1, 24),
            "n": rng.choice([1, 1, 2]),
            "logprobs": rng.random() < 0.3,
            "stop": rng.choice([None, "e", "th"]),
        }
        replay: dict[str, Any] = rng.choice([{}, REPLAY, REPLAY, {"generation_mode": "resample"}])
        requests.append((rng.choice(KEYS), rng.choice(["", "", "salt"]), body, replay, rng.choice("wsslx")))
    scopes = {(key, salt) for key, salt, _, replay, _ in requests if replay}
    most_bytes = 0
    known: dict[str, Any] = {}
    with (
        replaying(60_000, max_kv_bytes=40_000, max_rows=8, api_keys=KEYS) as (running, cache),
        ThreadPoolExecutor(4) as pool,
    ):

        def ask(request: tuple[Any, ...]) -> Any:
            nonlocal most_bytes
            key, salt, body, replay, how = request
            headers = {"Authorization": f"Bearer {key}"}
            body = {"model": MODEL, **body, **replay, **({"cache_salt": salt} if salt else {})}
            url = f"{running.url}/v1/chat/completions"
            if how == "w":
                response = httpx.post(url, json=body, headers=headers, timeout=600)
                assert response.status_code == 200, response.text
                most_bytes = max(most_bytes, cache.num_bytes)
                return texts(response.json())
            with httpx.stream("POST", url, json=body | {"stream": True}, headers=headers, timeout=600) as response:
                assert response.status_code == 200
                if how == "x":
                    next(response.iter_lines())
                    return None
                chunks = events(response)
            most_bytes = max(most_bytes, cache.num_bytes)
            return joined(chunks, body["n"])

        found = list(pool.map(ask, requests))
        assert running.wait_until(idle)
        stats = running.engine.stats
        assert stats.replayed_tokens == metrics(running, "one")["replayed_tokens_total"] > 0
        assert stats.failed == 0
        assert stats.evicted_tokens + stats.preemptions > 0
        for (_, _, body, _, how), answer in zip(requests, found, strict=True):
            name = json.dumps(body)
            if name not in known:
                known[name] = ask(("one", "", body, {}, "w"))
            assert answer is None or answer == known[name], (body, how)
        fingerprint = running.engine._storage.fingerprint
        allowed = {cache.root_key(fingerprint, f"{sha256(key.encode()).hexdigest()}:{salt}") for key, salt in scopes}
        assert {key for key, _ in cache.nodes()} <= allowed
        assert most_bytes <= cache.max_bytes
        assert sum(node.num_bytes for _, node in cache.nodes()) == cache.num_bytes <= cache.max_bytes
        assert all(node.pins == 0 for _, node in cache.nodes())
        assert not cache.computing


def joined(chunks: list[Any], count: int) -> list[tuple[Any, ...]]:
    """Return the answers of a stream as `texts` does."""
    assert chunks[-1] == "[DONE]", chunks[-1]
    contents = [""] * count
    reasons = [None] * count
    tokens: list[list[str]] = [[] for _ in range(count)]
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            index = choice["index"]
            contents[index] += choice["delta"].get("content") or ""
            reasons[index] = choice["finish_reason"] or reasons[index]
            tokens[index] += [entry["token"] for entry in (choice["logprobs"] or {}).get("content", [])]
    return list(zip(range(count), contents, reasons, tokens, strict=True))


# The command


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_restart_keeps_the_logits(folder: Path, tmp_path: Path, number: int) -> None:  # noqa: F811
    path = tmp_path / "logits"
    options = ["--logits-cache", "16M", "--logits-cache-path", str(path)]
    for expected in (0, 12):
        with command(folder, options=options) as (process, url):
            client = openai.OpenAI(base_url=url, api_key="secret", max_retries=0)
            answer = client.chat.completions.create(
                model="tiny", messages=CHAT, max_tokens=12, seed=1, logit_bias={"2": -100}, extra_body=REPLAY
            )
            assert answer.usage.completion_tokens_details.replayed_tokens == expected
            send(process, number)
            assert exit_status(process) in (0, 130)
        assert [file.name for file in tmp_path.iterdir() if file.name != "tiny"] == ["logits"]


def test_serve_names_a_file_of_logits_that_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "logits"
    save_cache(LogitsCache(), path)
    path.write_bytes(path.read_bytes()[:-3] + b"abc")
    for given, words in (
        (["--logits-cache=16M", "--logits-cache-path", str(path)], f"{path} is not a readable LogitsCache"),
        (
            ["--logits-cache=16M", "--logits-cache-path", str(tmp_path)],
            f"--logits-cache-path {tmp_path} must be a file",
        ),
        (["--logits-cache-path", str(path)], "needs --logits-cache"),
        (["--logits-cache=0"], "--logits-cache"),
    ):
        try:
            status = main(["serve", "--port", "0", *given])
        except SystemExit as error:  # of the parser
            status = error.code
        assert status == 2
        assert words in capsys.readouterr().err
