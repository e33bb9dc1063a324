"""Clients of a server at random: good ones, whose tokens are known, and those that leave, are slow, send malformed
requests, or make the model or a processor fail."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx2 as httpx
import torch
from engine_requests import assert_nothing_is_held
from serving import MODEL, served, small_model

from hf_parallel.engine import Engine, QueueFullError
from hf_parallel.engine.server import Limits

MARK = "😀"
"""A token of the small tokenizer whose values are NaN. No good request has it."""
LIMITS = Limits(body_seconds=2)
TOPICS = ("rivers", "cities of the north", "students", "the price of noise", "headings", "Anna Berg and Tom Hill")


CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
MALFORMED = ({"n": 0}, {"stop": [1]}, {"generation_mode": "nothing"}, {"max_tokens": 10**6}, {"unknown": 1})


class InjectedError(Exception):
    """Raised by a processor."""


class ServerFaults:
    """A server with a small budget and its random clients. `outcomes` counts what happened to their requests."""

    def __init__(self, seed: int) -> None:
        self.rng, self.outcomes, self.wrong = random.Random(seed), Counter[str](), list[str]()
        self.model, self.tokenizer = small_model()
        (self.mark,) = self.tokenizer(MARK, add_special_tokens=False)["input_ids"]
        self.cases = [self._case() for _ in range(10)]

    def run(self, rounds: int, clients: int = 6) -> Counter[str]:
        """Run random clients of a server; check good answers, and that nothing is held afterwards."""
        before = set(threading.enumerate())
        settings = {"max_kv_bytes": 220_000, "max_rows": 12, "max_waiting": 8}
        with Engine(self.model, self.tokenizer, **settings) as engine, served(engine, LIMITS) as server:
            self.server, self.address = server, urlsplit(server.url)
            answers = [(case, server.post(case[0], **case[1])) for case in self.cases]
            # Some need more memory alone than the budget.
            self.good = [(case, self._texts(answer.json())) for case, answer in answers if answer.status_code == 200]
            self.cases = [case for case, _ in self.good]
            with poisoned(self.model, self.mark):
                threads = [threading.Thread(target=self._client, args=(i, rounds)) for i in range(clients)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                for (path, body), texts in self.good[:4]:
                    assert self._texts(server.post(path, **body).json()) == texts
            assert_nothing_is_held(engine)
            state = server.server.server_state
            assert wait_until(lambda: not state.connections and not state.tasks), "connections are left"
            self.outcomes["preempted"] = engine.stats.preemptions
        assert wait_until(lambda: set(threading.enumerate()) <= before), set(threading.enumerate()) - before
        assert not self.wrong, self.wrong[:5]
        return self.outcomes

    def _case(self) -> tuple[str, dict[str, Any]]:
        """Return a random good request: its path and body."""
        rng = self.rng
        body: dict[str, Any] = {"max_tokens": rng.randint(4, 60), "logit_bias": {str(self.mark): -100}}
        body |= rng.choice([{"temperature": 0}, {"temperature": 1, "seed": rng.randrange(100), "n": rng.randint(1, 3)}])
        body |= rng.choice([{}, {}, {"stop": ["e", "\n"]}, {"repetition_penalty": 1.2}])
        if rng.random() < 0.3:
            body |= {"generation_mode": "hogwild", "num_workers": 2, "max_tokens": 16, "n": 1, "seed": 1}
        system = {"role": "system", "content": "Answer in a few words. " * rng.choice([1, 4])}
        user = {"role": "user", "content": f"Tell me about {rng.choice(TOPICS)}."}
        if rng.random() < 0.7 or "generation_mode" in body:
            return CHAT, {**body, "messages": [system, user]}
        return COMPLETION, {**body, "prompt": user["content"]}

    def _client(self, index: int, rounds: int) -> None:
        rng = random.Random(f"{self.rng.random()} {index}")
        actions: list[Callable[[random.Random], str]] = [self._ask, self._ask, self._leave, self._read_slowly]
        actions += [self._send_malformed, self._make_nan, self._fail_in_processor, self._cancel]
        for _ in range(rounds):
            for action in rng.sample(actions, len(actions)):
                try:
                    self.outcomes[action(rng)] += 1
                except Exception as error:
                    self.wrong.append(f"{action.__name__}: {type(error).__name__}: {error}")

    # Good requests

    def _ask(self, rng: random.Random) -> str:
        (path, body), expected = rng.choice(self.good)
        if rng.random() < 0.5:
            response = self.server.post(path, **body)
            if response.status_code == 429:
                return "429"
            found = self._texts(response.json())
        else:
            url, given = self.server.url + path, {"model": MODEL, **body, "stream": True}
            with httpx.stream("POST", url, json=given, timeout=600) as response:
                if response.status_code == 429:
                    return "429"
                found = self._streamed(line for line in response.iter_lines() if line)
        assert found == expected, f"{body}: {found} instead of {expected}"
        return "right"

    @staticmethod
    def _texts(response: Any) -> dict[int, str]:
        """Return the texts of a response by index."""
        choices = response["choices"]
        return {c["index"]: c["text"] if "text" in c else c["message"]["content"] for c in choices}

    @staticmethod
    def _streamed(lines: Iterator[str]) -> dict[int, str]:
        texts: dict[int, str] = {}
        for line in lines:
            if line == "data: [DONE]":
                return texts
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
        raise AssertionError("the stream broke off")

    # Bad clients

    @contextmanager
    def _sent(self, path: str, body: Any, part: float = 1) -> Iterator[socket.socket]:
        """Send a part of a request over a socket with a small buffer."""
        content = json.dumps({"model": MODEL, **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nConnection: close\r\n"
        sent = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(600)
            connection.connect((self.address.hostname, self.address.port))
            connection.sendall(sent[: int(len(sent) * part)])
            yield connection

    def _leave(self, rng: random.Random) -> str:
        """Close the connection in the request, before the answer, or in its midst."""
        path, body = rng.choice(self.cases)
        longer = {**body, "max_tokens": 100, "stream": rng.random() < 0.7}
        with self._sent(path, longer, rng.choice([0.5, 1, 1, 1])) as connection:
            time.sleep(rng.choice([0, 0.01, 0.1]))
            connection.setblocking(False)
            if rng.random() < 0.5:
                try:
                    connection.recv(rng.choice([10, 1000]))
                except BlockingIOError:
                    return "left before an answer"
        return "left"

    def _read_slowly(self, rng: random.Random) -> str:
        """Read a stream in small parts with pauses."""
        (path, body), expected = rng.choice(self.good)
        received = bytearray()
        with self._sent(path, {**body, "stream": True}) as connection:
            while part := connection.recv(rng.choice([100, 1000])):
                received += part
                time.sleep(0.002)
        head, _, rest = bytes(received).partition(b"\r\n\r\n")
        if b" 429 " in head:
            return "429"
        lines = [line for line in rest.decode().splitlines() if line.startswith("data: ")]
        assert self._streamed(iter(lines)) == expected
        return "read slowly"

    def _send_malformed(self, rng: random.Random) -> str:
        path, body = rng.choice(self.cases)
        content = json.dumps({**body, **rng.choice(MALFORMED)}).encode()
        response = httpx.post(self.server.url + path, content=rng.choice([content, content[:-1]]), headers=JSON)
        if not 400 <= response.status_code < 500:
            self.wrong.append(f"malformed: {response.status_code} {response.text[:200]}")
        return "malformed"

    def _make_nan(self, rng: random.Random) -> str:
        """Ask with the token whose values are NaN, after a prefix that good requests have."""
        path, body = rng.choice([case for case in self.cases if "generation_mode" not in case[1]])
        if "prompt" in body:
            body = {**body, "prompt": body["prompt"] + MARK}
        else:
            *messages, last = body["messages"]
            body = {**body, "messages": [*messages, {**last, "content": last["content"] + MARK}]}
        response = self.server.post(path, **body, stream=rng.random() < 0.5)
        assert response.status_code in (500, 429), f"{response.status_code} {response.text[:200]}"
        return "NaN"

    # Requests of the engine's own callers

    def _fail_in_processor(self, rng: random.Random) -> str:
        left = rng.randint(0, 8)

        def fail(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            nonlocal left
            left -= 1
            if left < 0:
                raise InjectedError
            return scores

        try:
            self.server.engine.submit(rng.choice(TOPICS), logits_processor=[fail], max_new_tokens=20).result(600)
        except InjectedError:
            return "processor"
        except QueueFullError:
            return "429"
        return "ended before the processor failed"

    def _cancel(self, rng: random.Random) -> str:
        try:
            handle = self.server.engine.submit(rng.choice(TOPICS), max_new_tokens=100, do_sample=False)
            for _ in zip(range(rng.randint(0, 9)), handle, strict=False):
                pass
            handle.cancel()
            handle.result(600)
        except CancelledError:
            return "cancelled"
        except QueueFullError:
            return "429"
        return "ended before it was cancelled"


@contextmanager
def poisoned(model: Any, token: int) -> Iterator[None]:
    """Make the values of a token NaN in the first layer.

    Keys would not do: PyTorch's attention on a CPU ignores a key that is NaN if it is the only one of a block.
    """
    ids: list[torch.Tensor] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        ids[:] = [kwargs["input_ids"][0]]

    def hook(module: Any, args: Any, output: torch.Tensor) -> None:
        output[0, ids[0] == token] = float("nan")

    hooks = [
        model.register_forward_pre_hook(note, with_kwargs=True),
        model.model.layers[0].self_attn.v_proj.register_forward_hook(hook),
    ]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def wait_until(condition: Callable[[], bool], seconds: float = 600) -> bool:
    """Wait until a condition holds; return whether it does."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()
