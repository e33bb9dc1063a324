"""Grammars of tool calls: whatever the model, a call is valid JSON for the parameters of its tool."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance")

from serving import small_model  # noqa: E402

from hf_parallel.engine.server.structured.grammar import JSONProcessor, call_grammar  # noqa: E402

CALL = '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>'
WORDS = ("city", "straße", "数", 'a"b', "back\\slash", "emoji☃", "</tool_call>")


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["enum", "boolean", "integer", "string", "const", *(["object", "array", "anyOf"] if depth < 3 else [])]
    kind = "object" if depth == 0 else rng.choice(kinds)
    if kind == "object":
        names = rng.sample(WORDS, rng.randint(0, 3))
        properties = {name: random_schema(rng, depth + 1) for name in names}
        required = [name for name in names if rng.random() < 0.7]
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        return {"type": "array", "items": random_schema(rng, depth + 1), "maxItems": rng.randint(0, 3)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "enum":
        return {"enum": rng.sample([*WORDS, None, 3, True], 3)}
    if kind == "const":
        return {"const": rng.choice(WORDS)}
    limits = {"integer": {"minimum": -50, "maximum": 999}, "string": {"maxLength": 8}, "boolean": {}}
    return {"type": kind, **limits[kind]}


def matches(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is valid for a schema of `random_schema`."""
    for name in schema.keys() & {"anyOf", "enum", "const"}:
        given = schema[name]
        return (
            any(matches(value, one) for one in given) if name == "anyOf" else value in ([given], given)[name == "enum"]
        )
    if schema["type"] == "object":
        known = schema["properties"]
        if not isinstance(value, dict) or not set(schema["required"]) <= value.keys() <= known.keys():
            return False
        return all(matches(one, known[name]) for name, one in value.items())
    if schema["type"] == "array":
        within = isinstance(value, list) and len(value) <= schema["maxItems"]
        return within and all(matches(one, schema["items"]) for one in value)
    if schema["type"] == "string":
        return isinstance(value, str) and len(value) <= schema["maxLength"]
    if schema["type"] == "boolean":
        return isinstance(value, bool)
    return type(value) is int and schema["minimum"] <= value <= schema["maximum"]


def written(grammar: str, tokenizer: Any, seed: int, most: int = 400) -> str:
    """Return a text that random tokens write under a grammar."""
    size, end, generator = len(tokenizer), tokenizer.eos_token_id, torch.Generator().manual_seed(seed)
    processor, tokens = JSONProcessor(grammar, tokenizer, size, [end], 0), list[int]()
    while len(tokens) < most:
        scores = processor(torch.tensor([tokens], dtype=torch.int64), torch.randn(1, size, generator=generator))
        if (token := int(scores[0].argmax())) == end:
            return tokenizer.decode(tokens)
        tokens.append(token)
    raise AssertionError(f"no end: {tokenizer.decode(tokens)}")


def check(trials: range) -> None:
    _, tokenizer = small_model()
    head, tail = CALL.split("ARGUMENTS")
    for seed in trials:
        schemas = {f"tool_{i}": random_schema(random.Random(seed + 1000 * i)) for i in range(2)}
        tools = [{"function": {"name": name, "parameters": schema}} for name, schema in schemas.items()]
        text = written(call_grammar(CALL, tools, None, tokenizer), tokenizer, seed)
        name = next(name for name in schemas if text.startswith(head.replace("NAME", name)))
        assert text.endswith(tail)
        arguments = json.loads(text[len(head.replace("NAME", name)) : -len(tail)])
        assert matches(arguments, schemas[name]), (arguments, schemas[name])


def test_calls_match_the_schema_of_their_tool() -> None:
    check(range(4))


@pytest.mark.slow
def test_calls_of_many_random_tools_match_their_schemas() -> None:
    check(range(4, 154))  # two tools each


def test_special_tokens_of_a_call_are_tokens_and_bad_parameters_are_named() -> None:
    _, tokenizer = small_model()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[CALL]"]})
    tools = [{"function": {"name": "now"}}]
    text = written(call_grammar("[CALL]NAMEARGUMENTS", tools, None, tokenizer), tokenizer, 0)
    assert text == "[CALL]now{}"
    bad = [{"function": {"name": "odd", "parameters": {"properties": {"x": {"$ref": "#/none"}}}}}]
    with pytest.raises(ValueError, match="'odd' are not supported"):
        call_grammar(CALL, bad, None, tokenizer)


@pytest.mark.parametrize("between", [None, "", "; "])
def test_calls_are_separated_as_the_format_says(between: str | None) -> None:
    _, tokenizer = small_model()
    call, size, end = '{"name": "NAME", "parameters": ARGUMENTS}', len(tokenizer), tokenizer.eos_token_id
    one = '{"name": "now", "parameters": {}}'
    grammar = call_grammar(call, [{"function": {"name": "now"}}], between, tokenizer)
    for text, may_end in (
        (one, True),
        (f"{one}{between or ''}{one}", between is not None),
        (f"{one}{between}", not between),
    ):
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        processor = JSONProcessor(grammar, tokenizer, size, [end], 0)
        if between is None and text != one:
            continue
        scores = processor(torch.tensor([tokens]), torch.zeros(1, size))[0]
        assert torch.isfinite(scores[end]).item() == may_end, text
        assert (scores.isfinite().sum() > may_end).item() == (between is not None), text


Z = {"type": "object", "properties": {"z": {"type": "integer"}}, "required": ["z"]}
Y = {"type": "object", "properties": {"y": {"type": "boolean"}}, "required": ["y"]}
NODE = {**Z, "properties": {**Z["properties"], "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}}}
ROOTS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    # parameters, arguments that match, arguments that do not
    ({"$ref": "#/$defs/Node", "$defs": {"Node": NODE}}, ['{"z": 1, "next": {"z": 2, "next": null}}'], ["{}"]),
    ({}, ["{}"], ['{"z": 1}']),
    (Z, ['{"z": 1}'], ["{}", '{"z": 1, "y": true}']),
    ({**Z, "type": ["object", "null"]}, ['{"z": 1}'], ["null", '{"z": 1, "y": true}']),
    ({"$ref": "#/$defs/Z", "$defs": {"Z": Z}}, ['{"z": 1}'], ["{}", '{"z": 1, "y": true}']),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#/$defs/Z"}, "Z": Z}}, ['{"z": 1}'], ["{}"]),
    ({"anyOf": [Z, Y, {"type": "null"}]}, ['{"z": 1}', '{"y": true}', '{"z": 1, "q": 2}'], ["{}", "null", "1"]),
    ({"oneOf": [Z, {"type": "string"}]}, ['{"z": 1}'], ["{}", '"a"']),
    ({"allOf": [Z, Y]}, ['{"z": 1, "y": true}'], ['{"z": 1}', '{"y": true}']),
    ({"const": {"z": 1}}, ['{"z": 1}'], ["{}", '{"z": 2}']),
    ({"enum": [{"z": 1}, {"y": True}, 3]}, ['{"z": 1}', '{"y": true}'], ["{}", "3"]),
    ({"minProperties": 1}, ['{"z": 1}'], ["{}"]),
]


def compact(arguments: str) -> str:
    """Return JSON as grammars write it, without spaces."""
    return json.dumps(json.loads(arguments), separators=(",", ":"))


def is_accepted(grammar: Any, text: str) -> bool:
    """Whether a grammar, or the schema of a `response_format`, allows a text, which then may end."""
    _, tokenizer = small_model()
    end = tokenizer.eos_token_id
    processor = JSONProcessor(grammar, tokenizer, len(tokenizer), [end], 0)
    tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
    for length, token in enumerate(tokens):
        scores = processor(torch.tensor([tokens[:length]], dtype=torch.int64), torch.zeros(1, len(tokenizer)))
        if not scores[0, token].isfinite() or processor.error_of([*tokens[:length], token]):
            return False
    return True


@pytest.mark.parametrize(("parameters", "right", "wrong"), ROOTS)
def test_parameters_may_have_any_root_that_a_response_format_may_have(
    parameters: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    _, tokenizer = small_model()
    begin, end = CALL.split("ARGUMENTS")
    begin = begin.replace("NAME", "get_ARGUMENTS")
    tool = {"function": {"name": "get_ARGUMENTS", "parameters": parameters}}
    grammar = call_grammar(CALL, [tool], None, tokenizer)
    for arguments in (*right, *wrong):
        assert is_accepted(grammar, begin + compact(arguments) + end) == (arguments in right), arguments
    if "$ref" not in parameters:
        assert all(is_accepted(parameters, compact(arguments)) for arguments in right)


@pytest.mark.parametrize("kind", ["string", ["array", "null"]])
def test_parameters_that_no_object_matches_are_named(kind: Any) -> None:
    _, tokenizer = small_model()
    with pytest.raises(ValueError, match="parameters of 'f' must be an object"):
        call_grammar(CALL, [{"function": {"name": "f", "parameters": {"type": kind}}}], None, tokenizer)
