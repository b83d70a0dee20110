"""What an answer must look like: OpenAI's `response_format` and vLLM's `structured_outputs`, as one grammar. Pure.

Grammars are llguidance's text; whether a vocabulary can match one is found out by compiling it (`common.text.grammar`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from llguidance import LLMatcher
from llguidance.gbnf_to_lark import gbnf_to_lark

from common.protocol.errors import InvalidParameter
from common.text.output.grammar_writer import WHITESPACE, schema_text

MAX_CHOICES = 1024
INLINE_GRAMMAR_CHARS = 512
FORMATS = ("text", "json_object", "json_schema")
_ANY_OBJECT = {"type": "object"}
_SCHEMA_FIELDS = frozenset({"name", "description", "schema", "strict"})


class Structure(NamedTuple):
    """`grammar`: empty if any text will do. `param`: the argument that asked for it."""

    grammar: str = ""
    param: str = ""


def takes_long(structured_outputs: Mapping[str, Any] | None) -> bool:
    """Whether `structure_of` belongs in a thread: translating 64 KiB of GBNF takes half a second."""
    text = (structured_outputs or {}).get("grammar")
    return isinstance(text, str) and len(text) > INLINE_GRAMMAR_CHARS


def structure_of(response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None) -> Structure:
    """:raises InvalidParameter: naming what is wrong in either of them, or if both ask for something."""
    structures = [
        Structure(_of_format(response_format or {}), "response_format"),
        Structure(_of_outputs(structured_outputs or {}), "structured_outputs"),
    ]
    found = [structure for structure in structures if structure.grammar]
    if len(found) > 1:
        raise InvalidParameter("response_format and structured_outputs are both given: send one", param="structured_outputs")
    return found[0] if found else Structure()


# ── OpenAI ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_format(asked: Mapping[str, Any]) -> str:
    if not asked:
        return ""
    kind = asked.get("type")
    if kind not in FORMATS:
        shown = "missing" if kind is None else f"{str(kind)[:64]!r}"
        raise InvalidParameter(f"the type is {shown}: use one of {', '.join(FORMATS)}", param="response_format.type")
    _refuse_others(asked, {"type", "json_schema"} if kind == "json_schema" else {"type"}, "response_format")
    if kind == "text":
        return ""
    if kind == "json_object":
        return _json(_ANY_OBJECT)
    inner = asked.get("json_schema")
    place = "response_format.json_schema"
    if not isinstance(inner, Mapping) or "schema" not in inner:
        raise InvalidParameter(f"{place} must be an object with a schema", param=place)
    _refuse_others(inner, _SCHEMA_FIELDS, place)
    return _json(_checked_schema(inner["schema"], f"{place}.schema"))


# ── vLLM ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_outputs(asked: Mapping[str, Any]) -> str:
    place = "structured_outputs"
    given = {name: value for name, value in asked.items() if value is not None and value is not False}
    kinds = [name for name in given if name in _KINDS]
    _refuse_others(given, {*_KINDS, *_OPTIONS}, place)
    if not kinds:
        return ""
    if len(kinds) > 1:
        raise InvalidParameter(f"{place} has {' and '.join(sorted(kinds))}: send one", param=place)
    [kind] = kinds
    options = {name: given[name] for name in _OPTIONS if name in given}
    if options and kind not in ("json", "json_object"):
        raise InvalidParameter(f"{min(options)} goes with json alone", param=f"{place}.{min(options)}")
    return _KINDS[kind](given[kind], options)


def _outputs_json(schema: Any, options: Mapping[str, Any]) -> str:
    place = "structured_outputs.json"
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise InvalidParameter(f"the schema is not valid JSON: {error}", param=place) from error
    return _json(_checked_schema(schema, place), options)


def _outputs_object(_: Any, options: Mapping[str, Any]) -> str:
    return _json(_ANY_OBJECT, options)


def _outputs_regex(pattern: Any, _: Mapping[str, Any]) -> str:
    if not isinstance(pattern, str) or not pattern:
        raise InvalidParameter("the pattern must be a string", param="structured_outputs.regex")
    return LLMatcher.grammar_from_regex(pattern)


def _outputs_choice(choices: Any, _: Mapping[str, Any]) -> str:
    place = "structured_outputs.choice"
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidParameter("the choices must be strings with something in them", param=place)
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise InvalidParameter(f"{len(choices)} choices; send 1 to {MAX_CHOICES}", param=place)
    return LLMatcher.grammar_from_lark("start: " + " | ".join(msgspec.json.encode(choice).decode() for choice in choices))


def _outputs_grammar(text: Any, _: Mapping[str, Any]) -> str:
    place = "structured_outputs.grammar"
    if not isinstance(text, str) or not text.strip():
        raise InvalidParameter("the grammar must be Lark or GBNF text", param=place)
    if "::=" not in text:
        return LLMatcher.grammar_from_lark(text)
    try:
        return LLMatcher.grammar_from_lark(gbnf_to_lark(text))
    except Exception as error:  # whatever a translator makes of nonsense
        raise InvalidParameter(f"the grammar is no valid GBNF: {str(error)[:200]}", param=place) from error


_KINDS: dict[str, Callable[[Any, Mapping[str, Any]], str]] = {
    "json": _outputs_json,
    "json_object": _outputs_object,
    "regex": _outputs_regex,
    "choice": _outputs_choice,
    "grammar": _outputs_grammar,
}
_OPTIONS = ("disable_any_whitespace", "whitespace_pattern")


# ── both ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _checked_schema(schema: Any, place: str) -> Mapping[str, Any]:
    """What is true or false as a JSON schema allows anything or nothing; it is not what anybody means."""
    if not isinstance(schema, Mapping):
        raise InvalidParameter("the schema must be an object", param=place)
    return schema


def _json(schema: Mapping[str, Any], options: Mapping[str, Any] | None = None) -> str:
    options = options or {}
    spaces: dict[str, Any] = {"whitespace_pattern": options.get("whitespace_pattern", WHITESPACE)}
    if not isinstance(spaces["whitespace_pattern"], str):
        raise InvalidParameter("the pattern must be a string", param="structured_outputs.whitespace_pattern")
    if options.get("disable_any_whitespace"):
        spaces = {"whitespace_flexible": False}
    try:
        return LLMatcher.grammar_from_json_schema(schema_text(schema), overrides=spaces)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise InvalidParameter(f"the schema can't be used: {str(error)[:200]}", param="schema") from error


def _refuse_others(given: Mapping[str, Any], known: Any, place: str) -> None:
    for name in given:
        if name not in known:
            raise InvalidParameter(f"{place}.{name[:64]} is not supported yet: leave it out", param=place)
