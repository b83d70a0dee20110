"""`response_format` and `structured_outputs` become a grammar, or an error that names what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from common.protocol.errors import InvalidParameter
from common.text.grammar import GrammarCompiler
from services.gateway.structured import MAX_CHOICES, structure_of
from tests.actors.edge import BUNDLE, EOS, ids

COMPILER = GrammarCompiler(BUNDLE.tokenizer)


def matches(text: str, *, response_format: Any = None, structured_outputs: Any = None) -> bool:
    grammar, param = structure_of(response_format, structured_outputs)
    assert param == ("response_format" if response_format else "structured_outputs")
    return bool(COMPILER.compile(grammar).consume_tokens([*ids(text), EOS]))


def test_nothing_asked_for_is_no_grammar() -> None:
    for nothing in (None, {}, {"type": "text"}):
        assert structure_of(nothing, None) == ("", "")
    for nothing in (None, {}, {"json": None}, {"json_object": False}, {"disable_any_whitespace": False}):
        assert structure_of(None, nothing) == ("", "")


def test_what_openai_has() -> None:
    anything = {"type": "json_object"}
    assert matches('{"a": [1, {}]}', response_format=anything)
    assert not matches("[1]", response_format=anything) and not matches('{"a": 1', response_format=anything)
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    named = {"type": "json_schema", "json_schema": {"name": "n", "description": "d", "strict": True, "schema": schema}}
    assert matches('{"a": 1}', response_format=named) and matches('{"a":1}', response_format=named)
    assert not matches("{}", response_format=named) and not matches('{"a": 1, "b": 2}', response_format=named)


def test_a_length_may_be_a_float_without_a_fraction() -> None:
    for schema, good, bad in (
        ({"type": "string", "minLength": 1.0, "maxLength": 2.0}, '"ab"', '"abc"'),
        ({"type": "array", "items": {"type": "null"}, "minItems": 1.0}, "[null]", "[]"),
    ):
        assert matches(good, structured_outputs={"json": schema})
        assert not matches(bad, structured_outputs={"json": schema})
    schema = {"const": '"maxLength":2.0,', "description": '"maxLength":2.0,'}
    assert matches(r'"\"maxLength\":2.0,"', structured_outputs={"json": schema})
    with pytest.raises(InvalidParameter):
        COMPILER.compile(structure_of(None, {"json": {"type": "string", "maxLength": 2.5}})[0])


def test_white_space_is_bounded() -> None:
    assert matches("{" + " " * 32 + "}", response_format={"type": "json_object"})
    assert not matches("{" + " " * 33 + "}", response_format={"type": "json_object"})
    assert matches("{}", structured_outputs={"json_object": True, "disable_any_whitespace": True})
    assert not matches("{ }", structured_outputs={"json_object": True, "disable_any_whitespace": True})
    assert not matches("{\n}", structured_outputs={"json_object": True, "whitespace_pattern": " ?"})


@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"json": {"type": "boolean"}}, "true", "1"),
        ({"json": '{"type": "boolean"}'}, "false", '"'),
        ({"regex": "[0-9]{3}-[a-z]+"}, "123-abc", "123-"),
        ({"choice": ["yes", 'no "way"', "línea\n2"]}, 'no "way"', "no"),
        ({"choice": ["yes", 'no "way"', "línea\n2"]}, "línea\n2", "maybe"),
        ({"grammar": 'start: "x" NUMBER\nNUMBER: /[0-9]{2}/'}, "x12", "x1"),
        ({"grammar": 'root ::= "ab" [0-9]+ "."'}, "ab12.", "ab."),
        ({"json_object": True, "regex": None}, '{"a": null}', "null"),
    ],
)
def test_what_vllm_has(asked: dict[str, Any], good: str, bad: str) -> None:
    assert matches(good, structured_outputs=asked)
    assert not matches(bad, structured_outputs=asked)


@pytest.mark.parametrize(
    ("response_format", "structured_outputs", "param"),
    [
        ({"type": "xml"}, None, "response_format.type"),
        ({"json_schema": {"schema": {}}}, None, "response_format.type"),
        ({"type": ["json_object"]}, None, "response_format.type"),
        ({"type": "json_object", "schema": {}}, None, "response_format"),
        ({"type": "json_schema"}, None, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": [1]}, None, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, None, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": True}}, None, "response_format.json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "more": 1}}, None, "response_format.json_schema"),
        (None, {"json": "{"}, "structured_outputs.json"),
        (None, {"json": 3}, "structured_outputs.json"),
        (None, {"json": {}, "regex": "a"}, "structured_outputs"),
        (None, {"structural_tag": {}}, "structured_outputs"),
        (None, {"regex": 3}, "structured_outputs.regex"),
        (None, {"regex": ""}, "structured_outputs.regex"),
        (None, {"choice": []}, "structured_outputs.choice"),
        (None, {"choice": ["a", 1]}, "structured_outputs.choice"),
        (None, {"choice": ["a", ""]}, "structured_outputs.choice"),
        (None, {"choice": [str(number) for number in range(MAX_CHOICES + 1)]}, "structured_outputs.choice"),
        (None, {"grammar": "  "}, "structured_outputs.grammar"),
        (None, {"grammar": "root ::= ("}, "structured_outputs.grammar"),
        (None, {"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
        (None, {"json": {}, "whitespace_pattern": 3}, "structured_outputs.whitespace_pattern"),
        ({"type": "json_object"}, {"regex": "a"}, "structured_outputs"),
    ],
)
def test_mistakes_are_named(response_format: Any, structured_outputs: Any, param: str) -> None:
    with pytest.raises(InvalidParameter) as raised:
        structure_of(response_format, structured_outputs)
    assert raised.value.param == param


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strin"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "https://example.com/schema.json"},
        {"not": {"type": "string"}},
        {"type": "string", "minLength": 5, "maxLength": 2},
        {"type": "string", "pattern": "((("},
        {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
    ],
)
def test_schemas_that_cannot_be_kept_are_refused(schema: Any) -> None:
    grammar = structure_of({"type": "json_schema", "json_schema": {"schema": schema}}, None).grammar
    with pytest.raises(InvalidParameter, match="can't be used"):
        COMPILER.compile(grammar)


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "(a|aa)+$"},
        {"regex": "(a|b)*a(a|b){500}"},
        {"regex": "(x{0,1000}){0,1000}"},
        {"regex": "((a{0,100}){0,100}){0,100}"},
        {"regex": r"\p{L}{1,5000}"},
        {"json": _nested(120)},
        {"json": {"$ref": "#"}},
        {"json": {"type": "array", "items": {"$ref": "#"}, "minItems": 10_000}},
        {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}},
        {"json": {"enum": [f"value {i}" for i in range(3000)]}},
        {"json": {"type": "string", "maxLength": 10**9}},
        {"json": {"allOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for i in range(30) for j in range(20)]}},
    ],
)
def test_what_would_explode_is_bounded(asked: dict[str, Any]) -> None:
    """Taken or refused, and some steps of whatever was taken end, within a time that a neighbour does not notice."""
    try:
        matcher = COMPILER.compile(structure_of(None, asked).grammar)
    except InvalidParameter:
        return
    for _ in range(64):
        words = matcher.compute_bitmask()
        token = next((index for index in range(8 * len(words)) if words[index // 8] >> index % 8 & 1), EOS)
        if matcher.is_stopped() or not matcher.consume_token(token):
            return
