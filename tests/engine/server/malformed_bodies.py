"""Requests that the server must reject, each as what is sent and how the rejection may look.

Most are built: each place of a body that takes a value, with each JSON value that is not valid there.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from serving import MODEL

from hf_parallel.engine.server.submission import COMMON
from hf_parallel.generation import MODES

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
JSON = {"Content-Type": "application/json"}
DEEP = 200
"""Depth of values that are nested deeply."""
VALUES = {
    "null": "null",
    "a truth value": "true",
    "text": '"a"',
    "empty text": '""',
    "a number as text": '"1"',
    "a lone surrogate": '"a\\ud800b"',
    "long text": json.dumps("x" * 5000),
    "zero": "0",
    "one": "1",
    "a negative number": "-1",
    "a fraction": "1.5",
    "a large number": "1e300",
    "a number of 400 digits": "1" + "0" * 400,
    "a number of 400 digits below zero": "-1" + "0" * 400,
    "a number of 5000 digits": "9" * 5000,
    "a number beyond floats": "1e999",
    "NaN": "NaN",
    "Infinity": "Infinity",
    "-Infinity": "-Infinity",
    "an empty list": "[]",
    "a list with null": "[null]",
    "a list of lists": "[[[1]]]",
    "nested lists": "[" * DEEP + "]" * DEEP,
    "an empty object": "{}",
    "an object": '{"a": 1}',
    "nested objects": '{"a": ' * DEEP + "1" + "}" * DEEP,
}
"""JSON values by name, as they are sent."""
TEXTS = {"text", "empty text", "a number as text", "long text", "a lone surrogate"}


@dataclass(frozen=True)
class Malformed:
    """One request. `fields` are those of which the error must name one; None: it names none."""

    name: str
    content: bytes
    path: str = CHAT
    fields: Collection[str | None] = (None,)
    status: int = 400
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)


@dataclass(frozen=True)
class Place:
    """Where a body takes a value: `@` in the JSON text of a field. `valid` are the names of values that are valid."""

    field: str
    text: str = "@"
    valid: Collection[str] = ("null",)
    beside: Mapping[str, str] = field(default_factory=dict)
    """Further fields, as JSON text."""

    def malformed(self, path: str, value: str) -> Malformed | None:
        """Return a request to `path` with the value of this name; None: it is valid."""
        if value in self.valid:
            return None
        fields = {**BASE[path], **self.beside, self.field: self.text.replace("@", VALUES[value])}
        named = None if value == "a number of 5000 digits" else self.field  # Python refuses to read it
        status = 404 if self.field == "model" and value in TEXTS else 400
        beside = "".join(f" with {name}={text}" for name, text in self.beside.items())
        name = f"{path} {self.field}={self.text}{beside}: {value}"
        return Malformed(name, body(fields), path, (named,), status)


def body(fields: Mapping[str, str]) -> bytes:
    """Return a body of fields whose values are JSON text."""
    return ("{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}").encode()


BASE = {
    CHAT: {"model": f'"{MODEL}"', "max_tokens": "2", "messages": '[{"role": "user", "content": "a"}]'},
    COMPLETION: {"model": f'"{MODEL}"', "max_tokens": "2", "prompt": '"a"'},
}
"""Valid bodies, as JSON text by field."""
STREAM = {"stream": "true"}
NOTHING = {"null", "an empty list"}
NUMBERS = {"null", "zero", "one"}
SHORT = {"text", "empty text", "a number as text"}
SHARED = [
    Place("model", valid=()),
    Place("generation_mode"),
    Place("max_tokens", valid={"null", "one"}),
    Place("temperature", valid={*NUMBERS, "a fraction"}),
    Place("top_p", valid={"null", "one"}),
    Place("n", valid={"null", "one"}),
    Place("stop", valid={"null", "text", "a number as text", "an empty list"}),
    Place("stop", '["b", @]', valid={"text", "a number as text"}),
    Place("seed", valid={*NUMBERS, "a negative number"}),
    Place("stream", valid={"null", "a truth value"}),
    Place("stream_options", valid={"null", "an empty object"}, beside=STREAM),
    Place("stream_options", '{"include_usage": @}', valid={"a truth value"}, beside=STREAM),
    Place("stream_options", '{"unknown": @}', valid=NOTHING, beside=STREAM),
    Place("logit_bias", valid={"null", "an empty object"}),
    Place("logit_bias", '{"5": @}', valid={"zero", "one", "a negative number", "a fraction"}),
    Place("frequency_penalty", valid={"null", "zero"}),
    Place("presence_penalty", valid={"null", "zero"}),
    Place("response_format", valid={"null"}),
    Place("response_format", '{"type": @}', valid=()),
    Place("response_format", '{"type": "text", "unknown": @}', valid=NOTHING),
    Place("response_format", '{"type": "json_schema", "json_schema": @}', valid=()),
    Place(
        "response_format",
        '{"type": "json_schema", "json_schema": {"schema": @}}',
        valid={"an empty object", "an object"},
    ),
    Place(
        "response_format",
        '{"type": "json_schema", "json_schema": {"schema": {}, "strict": @}}',
        valid={"null", "a truth value"},
    ),
    Place(
        "response_format", '{"type": "json_schema", "json_schema": {"schema": {}, "name": @}}', valid={"null", *TEXTS}
    ),
    Place("response_format", '{"type": "json_object", "schema": @}', valid=NOTHING),
    Place("top_k", valid=NUMBERS),
    Place("min_p", valid=NUMBERS),
    Place("typical_p", valid={"null", "one"}),
    Place("repetition_penalty", valid={"null", "one", "a fraction"}),
    Place("no_repeat_ngram_size", valid=NUMBERS),
    Place("min_new_tokens", valid=NUMBERS),
    Place("agent_hints", valid={"null", "an empty object"}),
    Place("agent_hints", '{"workflow_id": "a", "agent_id": @}', valid={"null", *SHORT}),
    Place("agent_hints", '{"step_id": @}', valid={"null", *SHORT}),
    Place("agent_hints", '{"expected_tool_duration_ms": @}', valid={*NUMBERS, "a fraction", "a large number"}),
    Place("agent_hints", '{"agent": @}', valid=NOTHING),
    Place("user", valid={"null", *TEXTS}),
    Place("chat_template_kwargs", valid={"null", "an empty object", "an object", "nested objects"}),
    Place("metadata", valid={"null", "an empty object"}),
    Place("metadata", '{"a": @}', valid=TEXTS),
    Place("store", valid={"null", "a truth value"}),
    Place("service_tier", valid={"null", *TEXTS}),
    Place("tools", valid={"null", "an empty list"}),
    Place("tool_choice"),
    Place("functions", valid={"null", "an empty list"}),
    Place("function_call"),
    Place("parallel_tool_calls", valid={"null", "a truth value"}),
    Place("modalities"),
    Place("audio"),
    Place("echo"),
    Place("suffix", valid={"null", "empty text"}),
    Place("unknown", valid=()),
    Place("chat_template", valid=()),
]
CHATS = [
    Place("messages", valid=()),
    Place("messages", "[@]", valid=()),
    Place("messages", '[{"role": "user", "content": "a"}, @]', valid=()),
    Place("messages", '[{"role": @, "content": "a"}]', valid=()),
    Place("messages", '[{"role": "user", "content": @}]', valid={"text", "empty text", "a number as text"}),
    Place("messages", '[{"role": "user", "content": [@]}]', valid=()),
    Place("messages", '[{"role": "user", "content": [{"type": @, "text": "a"}]}]', valid=()),
    Place(
        "messages",
        '[{"role": "user", "content": [{"type": "text", "text": @}]}]',
        valid={"text", "empty text", "a number as text"},
    ),
    Place("messages", '[{"role": "user", "content": [{"type": "text", "text": "a", "image_url": @}]}]', valid=NOTHING),
    Place("messages", '[{"role": "user", "content": "a", "name": @}]', valid={"null", *TEXTS}),
    Place("messages", '[{"role": "assistant", "content": "a", "tool_calls": @}]', valid=NOTHING),
    Place("max_completion_tokens", valid={"null", "one"}),
    Place("logprobs", valid={"null", "a truth value"}),
    Place("top_logprobs", valid=NUMBERS, beside={"logprobs": "true"}),
    Place("prompt", valid=()),
    Place("best_of", valid=()),
]
COMPLETIONS = [
    Place("prompt", valid={"text", "a number as text"}),
    Place("prompt", "[@]", valid={"text", "a number as text", "zero", "one"}),
    Place("prompt", '["b", @]', valid={"text", "a number as text"}),
    Place("prompt", "[5, @]", valid={"zero", "one"}),
    Place("prompt", "[[5], @]", valid=()),
    Place("prompt", "[[5, @]]", valid={"zero", "one"}),
    Place("best_of", valid={"null", "one"}),
    Place("logprobs", valid=NUMBERS),
    Place("messages", valid=()),
    Place("top_logprobs", valid=()),
]


def mode_places() -> Iterator[Place]:
    """Yield the settings of each mode; the values that are not valid follow from their type."""
    for mode, cls in sorted(MODES.items()):
        types = {} if cls.traits.needs_logits_cache else get_type_hints(cls)
        for name in cls.fields():
            if name not in types or name in (*COMMON, *cls.not_remote()):
                continue
            valid = next((names for kind, names in OF_TYPE.items() if kind in str(types[name])), {"null"})
            yield Place(name, valid=valid, beside={"generation_mode": json.dumps(mode)})


OF_TYPE = {
    "Sequence": NOTHING,
    "str": {"null", *TEXTS},
    "int": NUMBERS,
    "bool": {"null", "a truth value"},
    "Any": {*NUMBERS, "a truth value"},
}
"""Names of values that may be valid for a setting of a mode, by its type."""


def malformed_values() -> Iterator[Malformed]:
    """Yield places with values; those of both endpoints are divided between them."""
    for index, place in enumerate([*SHARED, *mode_places()]):
        for number, value in enumerate(VALUES, index):
            if (found := place.malformed((CHAT, COMPLETION)[number % 2], value)) is not None:
                yield found
    for path, places in ((CHAT, CHATS), (COMPLETION, COMPLETIONS)):
        for place in places:
            yield from filter(None, (place.malformed(path, value) for value in VALUES))


FIELDS: dict[str, dict[str, Any]] = {
    "no messages": {"messages": None},
    "no message": {"messages": []},
    "messages are text": {"messages": "Hello"},
    "a message is text": {"messages": ["Hello"]},
    "a message without role": {"messages": [{"content": "Hello"}]},
    "a message without content": {"messages": [{"role": "user"}]},
    "content is null": {"messages": [{"role": "user", "content": None}]},
    "content is a number": {"messages": [{"role": "user", "content": 1}]},
    "content is an image": {
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    },
    "role is unknown": {"messages": [{"role": "nobody", "content": "Hello"}]},
    "role is a number": {"messages": [{"role": 1, "content": "Hello"}]},
    "lone surrogate": {"messages": [{"role": "user", "content": "a\ud800b"}]},
    "no model": {"model": None},
    "a model that is a number": {"model": 1},
    "another model": {"model": "gpt"},
    "a model that is a path": {"model": "../../etc/passwd"},
    **{f"max_tokens={value!r}": {"max_tokens": value} for value in (0, -1, 1.5, "5", True, [5], 10**6, 10**30)},
    "max_completion_tokens": {"max_completion_tokens": 10**5},
    **{f"temperature={value!r}": {"temperature": value} for value in (-0.1, 2.1, "1", True, [], 1e308)},
    **{f"top_p={value!r}": {"top_p": value} for value in (0, -1, 1.01, "1", {})},
    **{f"n={value!r}": {"n": value} for value in (0, -1, 1.5, "2", 10**6, 65, 10**40)},
    "several greedy answers": {"n": 2, "temperature": 0},
    **{f"stop={value!r}": {"stop": value} for value in ("", [""], [1], 1, ["a"] * 99, "x" * 999, {"a": 1}, "\ud800")},
    **{f"seed={value!r}": {"seed": value} for value in (1.5, "1", True, 2**63, [1])},
    **{f"stream={value!r}": {"stream": value} for value in ("yes", 1, [])},
    "stream_options": {"stream": True, "stream_options": {"include_usage": 3}},
    **{f"logit_bias={value!r}": {"logit_bias": value} for value in ([1], {"a": 1}, {"1": 101}, {"99999999": 1})},
    **{f"bias of {token!r}": {"logit_bias": {token: 1}} for token in ("-1", "1.0", "", " 1", "01", "²", "9" * 50)},
    "bias is text": {"logit_bias": {"1": "a"}},
    **{f"logprobs={value!r}": {"logprobs": value} for value in (3, "yes", [])},
    **{f"top_logprobs={value!r}": {"logprobs": True, "top_logprobs": value} for value in (-1, 21, 1.5, "2")},
    "alternatives without log-probabilities": {"top_logprobs": 2},
    "options of a stream that is none": {"stream": False, "stream_options": {"include_usage": True}},
    "more new tokens than at most": {"min_new_tokens": 5},
    "a long answer without a token twice": {"no_repeat_ngram_size": 1, "max_tokens": 900},
    "a long n-gram": {"no_repeat_ngram_size": 33},
    "a stop text of 132 bytes": {"stop": ["a", "ß" * 66]},
    "many texts that end a sentence": {"generation_mode": "hogwild", "sentence_ends": [".", "!"] * 40},
    "an agent with a long name": {"agent_hints": {"agent_id": "x" * 257}},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "presence_penalty": {"presence_penalty": -0.5},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "tool_choice": {"tool_choice": "required"},
    "functions": {"functions": [{"name": "f"}]},
    "audio": {"modalities": ["audio"]},
    "format": {"response_format": {"type": "xml"}},
    "format is text": {"response_format": "json"},
    "format without schema": {"response_format": {"type": "json_schema"}},
    "schema is a list": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}},
    "mode is unknown": {"generation_mode": "nothing"},
    "mode is a number": {"generation_mode": 1},
    "mode is a path": {"generation_mode": "/etc/passwd"},
    "mode needs an object": {"generation_mode": "resample"},
    "settings without a mode": {"num_workers": 2},
    "settings of another mode": {"generation_mode": "shared_prefix", "num_workers": 2},
    "too many workers": {"generation_mode": "hogwild", "num_workers": 1000},
    "very many workers": {"generation_mode": "hogwild", "num_workers": 10**12},
    "many answers to vote on": {"generation_mode": "self_consistency", "num_answers": 1000},
    "a setting is an object": {"generation_mode": "hogwild", "layout": {"a": 1}},
    "a template with attributes": {"generation_mode": "hogwild", "task_prompt": "{task.__class__.__mro__}"},
    "a template with attributes of items": {"generation_mode": "hogwild", "task_prompt": "{task[0].__class__}"},
    "a regular expression": {"generation_mode": "self_consistency", "answer_pattern": "(a+)+$"},
    "log-probabilities of a mode": {"generation_mode": "hogwild", "logprobs": True},
    "JSON of a mode": {"generation_mode": "hogwild", "response_format": {"type": "json_object"}},
    **{
        f"{name} of generate": {name: value}
        for name, value in {
            "chat_template": "{{ 1 }}",
            "custom_generate": "user/repository",
            "tokenizer": "user/tokenizer",
            "logits_cache": "/tmp/cache",
            "past_key_values": [],
            "parallel_config": {"num_workers": 2},
            "generation_config": {"max_new_tokens": 10},
            "logits_processor": ["print"],
            "streamer": "sys.stdout",
            "assistant_model": "user/model",
            "trust_remote_code": True,
            "input_ids": [[1]],
            "max_new_tokens": 10,
            "stop_strings": ["a"],
            "watermarking_config": {"context_width": 10**9},
            "cache_implementation": "offloaded",
            "levels": [[1, 2]],
            "submitter": "me",
            "priority": 100,
        }.items()
    },
    **{f"top_k={value!r}": {"top_k": value} for value in (-1, 1.5, "5", 10**30, [1])},
    **{f"min_p={value!r}": {"min_p": value} for value in (-1, 2, "a")},
    **{f"repetition_penalty={value!r}": {"repetition_penalty": value} for value in (0, -1, 1e300, "a", [])},
    "a text setting that is too long": {"generation_mode": "hogwild", "separator": "x" * 5000},
    "JSON without repeated tokens": {"response_format": {"type": "json_object"}, "no_repeat_ngram_size": 1},
}
"""Fields of a chat that are not valid together or one by one, by what is wrong."""
COMPLETION_FIELDS: list[dict[str, Any]] = [
    *({"prompt": prompt} for prompt in ([1, "a"], [10**6], [-1], [True], ["a"] * 65, [[]], "word " * 2000)),
    {"prompt": list(range(3, 90)) * 20},
    {"prompt": [[5]] * 65},
    *({"best_of": 1, "n": 2}, {"best_of": 2, "stream": True}, {"best_of": 65}),
    *({"logprobs": 100}, {"echo": True}, {"suffix": "x"}),
]


def malformed_fields() -> Iterator[Malformed]:
    """Yield bodies whose fields are not valid; chats are streamed, too."""
    chat: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    for name, fields in FIELDS.items():
        status = 404 if isinstance(fields.get("model"), str) else 400
        for more in ({}, {"stream": True}):
            content = json.dumps({**chat, **more, **fields}).encode()
            yield Malformed(f"{name} {more}", content, CHAT, {*fields, "max_tokens"}, status)
    for fields in COMPLETION_FIELDS:
        content = json.dumps({"model": MODEL, "prompt": "Hello", **fields}).encode()
        yield Malformed(str(fields)[:100], content, COMPLETION, fields)


VALID = json.dumps(
    {"model": MODEL, "messages": [{"role": "user", "content": "Größe"}], "prompt": "a"}, ensure_ascii=False
)
BODIES: dict[str, bytes] = {
    "empty": b"",
    "a space": b" ",
    "no JSON": b"hello",
    "a form": b"model=small&prompt=a",
    **{f"the value {value}": value.encode() for value in ("[]", "1", "null", "true", '"small"', "[{}]", "NaN")},
    "two objects": b"{}{}",
    "an object and more": b'{"model": "small"} x',
    "a comment": b'{"model": "small" /* the model */}',
    "a comma at the end": b'{"model": "small",}',
    "single quotes": b"{'model': 'small'}",
    "names without quotes": b'{model: "small"}',
    "an octal number": b'{"model": "small", "max_tokens": 07}',
    "a hexadecimal number": b'{"model": "small", "max_tokens": 0x7}',
    "a number with a plus": b'{"model": "small", "max_tokens": +7}',
    "True of Python": b'{"model": "small", "stream": True}',
    "a line break in a text": b'{"model": "sm\nall"}'.replace(b"\\n", b"\n"),
    "a null byte in a text": b'{"model": "sm\x00all"}',
    "an unknown escape": b'{"model": "sm\\xall"}',
    "half an escape": b'{"model": "\\ud8"}',
    "control characters around it": b"\x01{}\x02",
    "bytes that are not UTF-8": b'{"model": "\xff\xfe"}',
    "an overlong encoding": b'{"model": "\xc0\xae"}',
    "a surrogate in UTF-8": b'{"model": "\xed\xa0\x80"}',
    "half a character": VALID.encode().replace("ß".encode(), "ß".encode()[:1]),
    **{f"encoded as {name}": VALID.encode(name) for name in ("utf-16", "utf-16-le", "utf-32", "latin-1", "cp500")},
    "compressed": gzip.compress(VALID.encode()),
    "two byte order marks": b"\xef\xbb\xbf" * 2 + VALID.encode(),
    "lists nested deeply": b'{"model": "small", "messages": ' + b"[" * 50_000,
    "lists nested deeply and closed": b'{"model": "small", "messages": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "objects nested deeply": b'{"model": ' * 20_000,
    "an integer of many digits": b'{"model": "small", "seed": ' + b"9" * 6000 + b"}",
    **{f"cut off at {at}": VALID.encode()[:at] for at in range(1, len(VALID) - 1, 4)},
    **{f"two fields {name}": f'{{"{name}": 1, {VALID[1:-1]}, "{name}": 1}}'.encode() for name in ("model", "n", "x")},
    "two roles in a message": VALID.replace('"role": "user"', '"role": "user", "role": "user"').encode(),
}
"""Bodies that are no JSON object."""


def malformed_http() -> Iterator[Malformed]:
    """Yield bodies, content types, methods and paths that are not those of the API."""
    for path in (CHAT, COMPLETION):
        yield from (Malformed(f"{path} {name}", content, path) for name, content in BODIES.items())
        types = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a", "*/*", "json")
        for media_type in (*types, "application/jsonx", "application/json2; charset=utf-8", "text/json", ""):
            headers = {"Content-Type": media_type}
            yield Malformed(f"{path} as {media_type}", VALID.encode(), path, status=415, headers=headers)
        for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FETCH"):
            yield Malformed(f"{method} {path}", b"", path, status=405, method=method)
    for path in ("/v1/models", f"/v1/models/{MODEL}", "/health", "/metrics", "/stats"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            yield Malformed(f"{method} {path}", b"{}", path, status=405, method=method)
    names = ("", "/v1", "/v2/chat/completions", "/v1/chat", "/v1//chat/completions", "/v1/chat/completions/x", "/docs")
    for path in ("/", *names, "/v1/embeddings", "/%00", "/%ff", "/x" * 3000):
        yield Malformed(f"POST {path}", VALID.encode(), path, status=404)
    for name in ("other", "..%2f..%2fetc%2fpasswd", "../../../etc/passwd", "%00", "x" * 3000):
        fields = ("model",) if "../" not in name else ("model", None)
        yield Malformed(f"GET model {name}", b"", f"/v1/models/{name}", fields, 404, "GET")


def large_bodies(size: int) -> Iterator[Malformed]:
    """Yield bodies of nearly `size` bytes."""
    text, ids, many = (
        json.dumps("x" * size),
        json.dumps([5] * (size // 4)),
        "[" + ", ".join(['"a"'] * (size // 8)) + "]",
    )
    listed = "[" + ", ".join(['{"role": "user", "content": "a"}'] * (size // 40)) + "]"
    parts = "[" + ", ".join(['{"type": "text", "text": "a"}'] * (size // 40)) + "]"
    biases = "{" + ", ".join(f'"{token}": 1' for token in range(size // 14)) + "}"
    tags = "{" + ", ".join(f'"{index}": 1' for index in range(size // 14)) + "}"
    words = json.dumps("word " * (size // 5))
    cases = (
        *(("messages", CHAT, value) for value in (text, listed, f'[{{"role": "user", "content": {parts}}}]')),
        *(("messages", CHAT, f'[{{"role": "user", "content": {value}}}]') for value in (text, words)),
        *(("messages", CHAT, f'[{{"role": {value}, "content": "a"}}]') for value in (text, ids)),
        *(("prompt", COMPLETION, value) for value in (text, words, ids, many, f"[{ids}]")),
        *((name, CHAT, value) for name in ("model", "stop", "generation_mode", "unknown") for value in (text, many)),
        *(("logit_bias", CHAT, biases), ("metadata", CHAT, tags), ("tools", COMPLETION, many)),
        *(
            ("n", COMPLETION, ids),
            ("response_format", CHAT, f'{{"type": "json_schema", "json_schema": {{"schema": {tags}}}}}'),
        ),
    )
    for index, (name, path, value) in enumerate(cases):
        status = 404 if name == "model" and value is text else 400
        yield Malformed(
            f"large body {index} {name}={value[:20]}", body({**BASE[path], name: value}), path, (name,), status
        )
    yield Malformed("a field with a long name", body({**BASE[CHAT], "x" * size: "1"}), CHAT, ("x" * size,))
    yield Malformed("too large", b" " * (size + 2000), CHAT, status=413)
