"""The grammar of arguments that are written one by one: what `tagged_arguments` and `families.pythonic` read. Pure.

Strings stand without quotes in tags, so a schema's `pattern` or `format` can't be kept there. Other values are JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from common.protocol.errors import InvalidParameter
from common.text.output.grammar_writer import Callee, GrammarWriter, literal, object_schema
from common.text.output.local_schema import DEFINITIONS, resolved, standing_alone
from common.text.output.tools import Kind, ToolSet

_NOTES = frozenset(
    {"title", "description", "default", "examples", "deprecated", "$comment", "$schema", "$id", "x-guidance", *DEFINITIONS}
)
"""Keywords that say nothing of what is valid, or nothing by themselves."""
_OF_OBJECTS = frozenset({"type", "properties", "required", "additionalProperties", *_NOTES})
_OF_STRINGS = frozenset({"type", "minLength", "maxLength", *_NOTES})
_NAME = re.compile(r"[\w.-]{1,64}")


class Argument(msgspec.Struct, frozen=True, kw_only=True):
    """`schema` stands alone; `root` is that of all arguments."""

    name: str
    schema: Mapping[str, Any]
    root: Mapping[str, Any]
    kind: Kind
    is_required: bool
    place: str


def arguments_of(callee: Callee) -> list[Argument]:
    """Return the arguments that a schema names. No others are written, though it may allow some.

    :raises InvalidParameter: if it is none of objects, or says more of them than their properties and which are required.
    """
    root = object_schema(callee)
    if unknown := root.keys() - _OF_OBJECTS:
        raise _cannot(callee.place, f"{min(unknown)} at the top")
    properties = root.get("properties", {})
    required = root.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise InvalidParameter(f"{callee.place} is no valid schema", param=callee.place)
    others = root.get("additionalProperties", True)
    found = {**properties, **{name: others for name in required if isinstance(name, str) and name not in properties}}
    tools = ToolSet([{"function": {"name": callee.name, "parameters": root}}])
    result: list[Argument] = []
    for name, schema in found.items():
        if schema is False:
            continue
        if not _NAME.fullmatch(name):
            raise _cannot(callee.place, f"the name {name[:64]!r}")
        result.append(
            Argument(
                name=name,
                schema=standing_alone(schema, root),
                root=root,
                kind=tools.kind_of(callee.name, name),
                is_required=name in required,
                place=callee.place,
            )
        )
    return result


def in_order(arguments: list[Argument], expressions: list[str]) -> str:
    """Return an expression for `expressions`, one of each argument; those that are not required may be left out."""
    return " ".join(
        expression if argument.is_required else f"({expression})?"
        for argument, expression in zip(arguments, expressions, strict=True)
    )


def separated(writer: GrammarWriter, arguments: list[Argument], expressions: list[str], separator: str) -> str:
    """Return what `in_order` does, with a separator between them; empty if there are none."""
    begun = following = ""  # expressions for the rest of the list: as its beginning, and behind another argument
    for argument, expression in reversed(list(zip(arguments, expressions, strict=True))):
        here = writer.rule(f"{expression} {following}")
        after = f"{separator} {here}"
        if argument.is_required:
            begun, following = here, writer.rule(after)
        else:
            begun = writer.rule(f"{here} | {begun}") if begun else f"{here}?"
            following = writer.rule(f"{after} | {following}") if following else f"({after})?"
    return begun


def raw_value(writer: GrammarWriter, argument: Argument, closing: str, mark: str) -> str:
    """Return an expression for a string without quotes, and `closing`, in which stands `mark`: the text holds none.

    :raises InvalidParameter: if the schema says what can't be kept of such a string.
    """
    choices: list[str] = []
    for schema in _branches(argument.schema, argument.root):
        match _values(schema):
            case None if schema.get("type", "string") == "null":
                choices.append(f"{literal('null')} {writer.write(closing)}")
            case None:
                choices.append(writer.until(closing, [mark], _shape(schema, argument.place)))
            case values:
                choices += [f"{literal(_text(value, mark, argument.place))} {writer.write(closing)}" for value in values]
    return writer.either(choices)


def is_plain(argument: Argument) -> bool:
    """Return whether `raw_value` can keep what the schema says."""
    return all(_values(schema) is not None or not _too_much(schema) for schema in _branches(argument.schema, argument.root))


def _branches(schema: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the alternatives of a schema, each without alternatives unless it says more besides."""
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return [{}]
    for key in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(key)
        if isinstance(inner, list) and schema.keys() <= {key, *_NOTES} and (key != "allOf" or len(inner) == 1):
            return [branch for each in inner for branch in _branches(each, root)]
    kinds = schema.get("type")
    if isinstance(kinds, list) and _values(schema) is None:
        return [{**schema, "type": kind} for kind in kinds]
    return [schema]


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists, None if it lists none, or says more."""
    if schema.keys() <= {"type", "enum", *_NOTES} and isinstance(schema.get("enum"), list):
        return [value for value in schema["enum"] if isinstance(value, str if schema.get("type") == "string" else str | None)]
    return [schema["const"]] if "const" in schema and schema.keys() <= {"type", "const", *_NOTES} else None


def _too_much(schema: Mapping[str, Any]) -> str:
    """Return a keyword that can't be kept of a string without quotes."""
    if schema.get("type") == "null":
        return ""
    unknown = schema.keys() - _OF_STRINGS
    return min(unknown) if unknown else "type" if schema.get("type", "string") != "string" else ""


def _shape(schema: Mapping[str, Any], place: str) -> str:
    if found := _too_much(schema):
        raise _cannot(place, f"{found[:64]} of a string")
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    if not isinstance(low, int) or not isinstance(high, int | str):
        raise InvalidParameter(f"{place} is no valid schema", param=place)
    return f"(?s:.{{{low},{high}}})" if low or high != "" else "(?s:.*)"


def _text(value: Any, mark: str, place: str) -> str:
    text = "null" if value is None else str(value)
    if mark in text:
        raise _cannot(place, f"a value with {mark}")
    return text


def _cannot(place: str, what: str) -> InvalidParameter:
    return InvalidParameter(f"{place}: {what} can't be kept in the format of this model's calls", param=place)
