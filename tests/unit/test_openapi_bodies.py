"""`/openapi.json` says of bodies what the parser does: each bound is tried from both sides."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from common.protocol.errors import RequestError
from services.gateway.api_bodies import BODIES, body_schemas
from services.gateway.arguments import Notes
from services.gateway.batches.records import parse_request
from services.gateway.config import GatewayConfig
from services.gateway.openapi import document
from services.gateway.parse import parse
from services.gateway.parse_tokens import parse_detokenize, parse_tokenize
from services.gateway.vectors import parse_vectors
from services.gateway.views.messages import MESSAGES
from services.gateway.views.responses import RESPONSES
from tests.unit.parsing import finish

MAX_N = 128
SCHEMAS = body_schemas(max_n=MAX_N)
MESSAGE = {"role": "user", "content": "x"}
LAST = {"role": "assistant", "content": "x"}

# What makes an argument meaningful, so that a refusal is about the argument itself.
BASES: dict[str, dict[str, Any]] = {
    "ChatRequest": {"messages": [MESSAGE], "logprobs": True, "stream": True},
    "CompletionRequest": {"prompt": "x", "stream": True},
    "TokenizeRequest": {"messages": [MESSAGE]},
    "DetokenizeRequest": {"tokens": [1]},
    "StreamOptions": {},
    "ChatMessage": {"role": "assistant", "content": "x"},
    "ContentPart": {"type": "text", "text": "x", "refusal": "x"},
    "ResponsesRequest": {"input": "x", "include": ["message.output_text.logprobs"]},
    "InputItem": {"role": "user", "content": "x"},
    "InputPart": {"type": "input_text", "text": "x"},
    "ReasoningOptions": {},
    "TextOptions": {},
    "MessagesRequest": {"messages": [MESSAGE], "max_tokens": 9},
    "Message": MESSAGE,
    "Block": {"type": "text", "text": "x"},
    "InnerBlock": {"type": "text", "text": "x"},
    "Thinking": {"type": "adaptive"},
    "OutputConfig": {},
    "ToolChoice": {"type": "auto"},
    "EmbeddingRequest": {"input": "x"},
    "ScoreRequest": {"text_1": "x", "text_2": "x"},
    "BatchRequest": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
}
INSIDE: dict[str, tuple[str, Callable[[Any], dict[str, Any]]]] = {
    "StreamOptions": ("ChatRequest", lambda it: {"stream_options": it}),
    "ChatMessage": ("ChatRequest", lambda it: {"messages": [it]}),
    "ContentPart": ("ChatRequest", lambda it: {"messages": [{"role": "user", "content": [it]}]}),
    "InputItem": ("ResponsesRequest", lambda it: {"input": [it]}),
    "InputPart": ("ResponsesRequest", lambda it: {"input": [{"role": "user", "content": [it]}]}),
    "ReasoningOptions": ("ResponsesRequest", lambda it: {"reasoning": it}),
    "TextOptions": ("ResponsesRequest", lambda it: {"text": it}),
    "Message": ("MessagesRequest", lambda it: {"messages": [it]}),
    "Block": ("MessagesRequest", lambda it: {"messages": [{"role": "user", "content": [it]}]}),
    "InnerBlock": ("MessagesRequest", lambda it: {"system": [it]}),
    "Thinking": ("MessagesRequest", lambda it: {"thinking": it}),
    "OutputConfig": ("MessagesRequest", lambda it: {"output_config": it}),
    "ToolChoice": ("MessagesRequest", lambda it: {"tool_choice": it}),
}
"""Objects in a body: which one, and where in it."""
# Arguments whose values are checked against more than a bound, by tests of their own.
ELSEWHERE = {
    "response_format",
    "structured_outputs",
    "tool_choice",
    "best_of",
    "stream_options",
    "prompt",
    "tools",
    "tool_calls",
    "InputItem.type",
}
NEEDED = {"prompt", "messages", "content", "text", "InputItem.role", "MessagesRequest.max_tokens"}
"""Arguments that may be null in other cases than that of their base."""

EMPTY_PROMPTS = ("", [])
"""Refused when they are made tokens of, as `empty_prompt`."""


def parsed(kind: str, body: dict[str, Any]) -> None:
    """:raises RequestError: as the parser does for this object of a body."""
    if kind in INSIDE:
        kind, place = INSIDE[kind]
        base = {} if "messages" in place(body) and kind == "ChatRequest" else BASES[kind]
        body = {**base, **place(body)}
    raw = json.dumps(body).encode()
    notes = Notes()
    match kind:
        case "TokenizeRequest":
            finish(parse_tokenize(raw, notes))
        case "DetokenizeRequest":
            finish(parse_detokenize(raw, notes, max_tokens=10**6))
        case "ResponsesRequest":
            finish(RESPONSES.parse(raw, max_prompt_tokens=10**6, notes=notes))
        case "MessagesRequest":
            finish(MESSAGES.parse(raw, max_prompt_tokens=10**6, notes=notes))
        case "EmbeddingRequest" | "ScoreRequest":
            vectors = "embedding" if kind == "EmbeddingRequest" else "score"
            finish(parse_vectors(vectors, raw, max_prompt_tokens=10**6, notes=notes))
        case "BatchRequest":
            parse_request(raw)
        case _:
            finish(parse("chat" if kind == "ChatRequest" else "completion", raw, max_prompt_tokens=10**6, notes=notes))


def refused(kind: str, body: dict[str, Any]) -> str:
    """What the parser says, empty if nothing."""
    try:
        parsed(kind, body)
    except RequestError as error:
        return str(error) or "refused"
    return ""


def alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for alternative in schema.get("anyOf", [schema]):
        reference = alternative.get("$ref", "").rsplit("/", 1)[-1]
        found.append(SCHEMAS[reference] if reference else alternative)
    return found


def example(schema: dict[str, Any]) -> Any:
    if "$ref" in schema:
        return BASES[schema["$ref"].rsplit("/", 1)[-1]]
    if "anyOf" in schema:
        return example(schema["anyOf"][0])
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema["type"]
    least = schema.get("minimum", 0)
    return {"string": "x", "integer": max(least, 0), "number": 0.5, "boolean": True, "array": [], "object": {}}[kind]


def edges(schema: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
    """Values at a schema's bounds, and whether they are within."""
    match schema.get("type"):
        case "integer" | "number":
            for bound, step in (("minimum", -1), ("maximum", 1)):
                if bound in schema:
                    yield schema[bound], True
                    yield schema[bound] + step, False
            if "exclusiveMinimum" in schema:
                yield schema["exclusiveMinimum"], False
            if "not" in schema:
                yield schema["not"]["const"], False
        case "string":
            if "enum" in schema:
                yield from ((value, True) for value in schema["enum"])
                yield "another", False
                return
            for bound, step in (("minLength", -1), ("maxLength", 1)):
                if bound in schema:
                    yield "x" * schema[bound], True
                    yield "x" * (schema[bound] + step), False
        case "array":
            item = example(schema["items"])
            if schema["items"].get("type") == "integer":
                yield [-1], False
            for bound, step in (("minItems", -1), ("maxItems", 1)):
                if bound in schema:
                    yield [item] * schema[bound], True
                    yield [item] * (schema[bound] + step), False
        case "object":
            if "maxProperties" in schema:
                value = example(schema.get("additionalProperties", {"type": "string"}))
                yield {str(index): value for index in range(schema["maxProperties"])}, True
                yield {str(index): value for index in range(schema["maxProperties"] + 1)}, False
        case _:
            return


CASES = [
    (kind.__name__, name)
    for kind, scope in BODIES.items()
    for name in SCHEMAS[kind.__name__]["properties"]
    if name in scope.obeyed
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_each_bound_is_the_parsers(kind: str, name: str) -> None:
    schema, base = SCHEMAS[kind]["properties"][name], BASES[kind]
    if kind == "ChatMessage" and name == "role":
        assert all(not refused(kind, {**base, name: role}) for role in schema["enum"])
    for alternative in alternatives(schema):
        for value, within in edges(alternative):
            said = refused(kind, {**base, name: value})
            if within and not {name, f"{kind}.{name}"} & ELSEWHERE and "is too large" not in said:
                assert not said, (value, said)
            elif not within and value not in EMPTY_PROMPTS:
                assert said, f"{kind}.{name} took {value!r:.80}"


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_each_type_is_the_parsers(kind: str, name: str) -> None:
    schema, base = SCHEMAS[kind]["properties"][name], BASES[kind]
    kinds = {alternative.get("type", "object" if "properties" in alternative else "") for alternative in alternatives(schema)}
    kinds |= {"string"} if "enum" in schema else set()
    if kinds == {""}:
        return  # any JSON, such as a call's input
    values: dict[str, Any] = {"string": "x", "integer": 1, "number": 1.5, "boolean": True, "array": [1.5], "object": {"a": 1}}
    if "number" in kinds:
        kinds.add("integer")
    for other, value in values.items():
        if other not in kinds:
            assert refused(kind, {**base, name: value}), f"{kind}.{name} took {value!r}"
    if "null" in kinds:
        assert not refused(kind, {**base, name: None}) or {name, f"{kind}.{name}"} & NEEDED


@pytest.mark.parametrize("kind", [kind.__name__ for kind in BODIES])
def test_what_is_required_is_the_parsers(kind: str) -> None:
    required = SCHEMAS[kind]["required"]
    for name in required:
        body = {key: value for key, value in BASES[kind].items() if key != name}
        assert "missing" in refused(kind, body) or refused(kind, body)
    assert not refused(kind, BASES[kind])


@pytest.mark.parametrize("kind", list(BODIES))
def test_what_is_refused_and_what_has_no_effect_are_the_parsers(kind: type) -> None:
    scope, name = BODIES[kind], kind.__name__
    properties = SCHEMAS[name]["properties"]
    base = {key: value for key, value in BASES[name].items() if key != "stream"}
    for argument, neutral in scope.refused.items():
        if argument in scope.obeyed:
            continue
        assert properties[argument]["enum"] == [None, *neutral]
        assert not any(refused(name, {**base, argument: value}) for value in properties[argument]["enum"])
        assert refused(name, {**base, argument: {"another": "value"}})
    for argument in scope.ignored:
        if argument not in scope.obeyed and argument not in scope.refused:
            assert not refused(name, {**base, argument: {"another": "value"}})


def test_prompts_tools_and_formats_are_described_as_they_are_read() -> None:
    def both(kind: str, body: dict[str, Any], *, good: bool) -> None:
        validator = Draft202012Validator(
            {"$ref": f"#/components/schemas/{kind}", "components": document(GatewayConfig(max_n=MAX_N))["components"]}
        )
        assert validator.is_valid(body) == good, body
        assert (not refused(kind, body)) == good, body

    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    for function in (
        tool["function"],
        {"name": "a" * 64},
        {"name": "x", "description": None, "parameters": None},
        {"name": "x", "strict": True},
    ):
        both("ChatRequest", {"messages": [MESSAGE], "tools": [{"type": "function", "function": function}]}, good=True)
    for wrong in ({"name": "a b"}, {"name": "a" * 65}, {"name": "x", "parameters": []}, {"name": "x", "description": 1}, {}):
        both("ChatRequest", {"messages": [MESSAGE], "tools": [{"type": "function", "function": wrong}]}, good=False)
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    calls = {"role": "assistant", "content": None, "tool_calls": [call]}
    both("ChatRequest", {"messages": [calls]}, good=True)
    for wrong in ({**call, "id": 1}, {**call, "type": "other"}, {**call, "function": {"name": "x", "arguments": []}}):
        both("ChatRequest", {"messages": [{**calls, "tool_calls": [wrong]}]}, good=False)
    for prompt in ("x", ["x", "y"], [1, 2], [[1], [2, 3]]):
        both("CompletionRequest", {"prompt": prompt}, good=True)
    for prompt in (1, [[-1]], [1.5], [["x"]], {}):
        both("CompletionRequest", {"prompt": prompt}, good=False)
    for bias, good in (({"1": 5}, True), ({"a": 1}, False), ({"1": 101}, False)):
        both("CompletionRequest", {"prompt": "x", "logit_bias": bias}, good=good)
    for format in SCHEMAS["ChatRequest"]["properties"]["response_format"]["anyOf"][0]["properties"]["type"]["enum"]:
        both("ChatRequest", {"messages": [MESSAGE], "response_format": {"type": format}}, good=True)


def test_the_limit_of_choices_is_the_gateways() -> None:
    properties = document(GatewayConfig(max_n=3))["components"]["schemas"]["ChatRequest"]["properties"]
    assert properties["n"]["anyOf"][0]["maximum"] == 3


def test_every_reference_leads_somewhere_and_every_schema_is_one() -> None:
    described = document(GatewayConfig())
    schemas = described["components"]["schemas"]
    assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(described))) <= set(schemas)
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
