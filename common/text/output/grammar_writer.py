"""Write the grammar of an answer that calls tools, as llguidance's Lark text. Pure.

Rules and terminals are numbered as they are made. A mark that is a special token of the vocabulary is written as that token;
in all other places text is matched, so free text excludes a mark in either form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from common.protocol.errors import InvalidParameter

WHITESPACE = r"[ \t\n\r]{0,32}"
"""Between the tokens of JSON: enough to indent, and bounded, since models that may write white space for ever sometimes do."""

MAX_CALLS = 128
"""Calls of one answer."""
MAX_ARGUMENTS = 64
"""Arguments of a call that its tool's schema does not name."""

_ANYTHING = "(?s:.*)"
_OF_NO_PARAMETERS = frozenset({"type", "properties", "required", "$schema", "title", "description"})


_WHOLE_BOUND = re.compile(r'("(?:min|max)(?:Length|Items|Properties)":[0-9]+)\.0(?=[,}])')


def schema_text(schema: Mapping[str, Any]) -> str:
    """Return a JSON schema as llguidance reads it, for which 8.0 is no length, as it is in JSON Schema."""
    return _WHOLE_BOUND.sub(r"\1", msgspec.json.encode(schema).decode())


class Callee(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that may be called. `parameters`: the JSON schema that its arguments match; None: any object will do.

    `place`: what errors call the schema.
    """

    name: str
    parameters: Mapping[str, Any] | None
    place: str


class CallSyntax(msgspec.Struct, frozen=True, kw_only=True):
    """Expressions of one answer. `calls`: calls alone. `free`: text, with calls in it. `frame`: what stands before an answer of
    another form. `is_marked`: whether a mark tells calls from other text."""

    calls: str
    free: str
    frame: str = ""
    is_marked: bool = True


class GrammarWriter:
    """`template`: the source of the model's chat template, which shows the variant of a family's format.

    `special`: which texts are tokens of their own that no text matches. `many`: whether several calls may follow each other.
    `excluded`: what no free text may hold.
    """

    def __init__(
        self,
        *,
        template: str = "",
        special: Mapping[str, int] | None = None,
        many: bool = True,
        excluded: Sequence[str] = (),
    ) -> None:
        self.template = template
        self.many = many
        self._excluded = tuple(excluded)
        self._special = dict(special or {})
        self._lines: list[str] = []
        self._names: dict[str, str] = {}  # of expressions
        self._known: set[str] = set()

    def text(self, start: str) -> str:
        """Return the grammar whose answers match `start`."""
        return "\n".join([f"start: {start}", *self._lines])

    # ── literals ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def write(self, text: str) -> str:
        """Return an expression for `text`, in which special tokens are such."""
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else literal(piece) for piece in self._split(text)
        )

    def _split(self, text: str) -> list[str]:
        """Return `text` in pieces, each a special token or free of them."""
        pieces = [text]
        for mark in sorted(self._special, key=len, reverse=True):
            pieces = [
                part
                for piece in pieces
                for part in ([piece] if piece in self._special else _interleaved(piece.split(mark), mark))
                if part
            ]
        return pieces

    # ── rules ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def rule(self, expression: str) -> str:
        """Return the name of a rule."""
        return expression if expression in self._known else self._named("r", expression)

    def terminal(self, expression: str) -> str:
        """Return the name of a terminal, which is matched as one regular expression."""
        return expression if expression in self._known else self._named("T", expression)

    def either(self, expressions: Sequence[str]) -> str:
        return self.rule(" | ".join(expressions))

    def repeated(self, expression: str, separator: str = "") -> str:
        """Return an expression for one, or several where there may be."""
        if not self.many:
            return expression
        item = self.rule(expression)
        return f"{item} ({separator} {item}){{0,{MAX_CALLS - 1}}}"

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return a rule for JSON of a schema."""
        own = {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}
        return self.rule(f"%json {schema_text(own)}")

    def arguments(self, callee: Callee) -> str:
        """Return a rule for a call's arguments as a JSON object.

        :raises InvalidParameter: as `object_schema`.
        """
        return self.json(object_schema(callee))

    # ── free text ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def free_text(self, excluded: Iterable[str], also: str = "") -> str:
        """Return a terminal for text that holds none of `excluded`, and does not begin with `also`, a terminal's expression."""
        text = self._without([*excluded, *self._excluded], _ANYTHING)
        return self.terminal(f"{text} & ~({also} {self.terminal(f'/{_ANYTHING}/')})" if also else text)

    def until(self, closing: str, excluded: Iterable[str], shape: str = _ANYTHING) -> str:
        """Return an expression for text of `shape`, a regular expression, that holds none of `excluded`, and `closing`."""
        text = self._without(list(excluded), shape)
        first, *others = self._split(closing)
        if first in self._special:
            begun = f"{self.terminal(text)} {self.write(first)}"
        else:
            begun = self.terminal(f"{text} {literal(first)}")
        return " ".join([begun, *map(self.write, others)])

    def _without(self, excluded: Sequence[str], shape: str) -> str:
        anything = self.terminal(f"/{_ANYTHING}/")
        text = anything if shape == _ANYTHING else f"/{shape}/"
        if not excluded:
            return text
        return self.terminal(f"{text} & ~({anything} ({' | '.join(map(literal, excluded))}) {anything})")

    def blocks(
        self, opening: str, block: str, *, separator: str = "", repeats: bool = True, excluded: Sequence[str] = ()
    ) -> CallSyntax:
        """Return the syntax of a family whose calls stand behind a mark: `opening`, `block`, and that again with `repeats`.

        `excluded`: other texts that would begin a call.
        """
        marks = [opening, *excluded]
        calls = f"{self.write(opening)} {block}"
        said = self.free_text(marks)
        begun = f"{self.until(opening, [*marks, *self._excluded])} {block}"
        several = self.many and repeats
        return CallSyntax(
            calls=self.repeated(calls, separator) if repeats else calls,
            free=self.rule(f"({begun}){{0,{MAX_CALLS}}} {said}" if several else f"{begun} | {said}"),
        )

    def _named(self, kind: str, expression: str) -> str:
        key = f"{kind}{expression}"
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"{kind}{len(self._names)}"
            self._known.add(name)
            self._lines.append(f"{name}: {expression}")
        return name


def literal(text: str) -> str:
    """Return `text` as a string of a Lark grammar."""
    return msgspec.json.encode(text).decode()


def object_schema(callee: Callee) -> dict[str, Any]:
    """Return the schema of a call's arguments: an object; `{}` alone for a tool that says it knows no parameter.

    Any other schema allows properties that it does not name unless it says otherwise, as schemas do.

    :raises InvalidParameter: if the schema is none of objects.
    """
    parameters = callee.parameters
    if parameters is None:
        return {"type": "object"}
    kind = parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidParameter(f"{callee.place} must be a schema of objects", param=callee.place)
    schema = {**parameters, "type": "object"}
    says_none = not parameters or parameters.get("properties") == {}
    if says_none and parameters.keys() <= _OF_NO_PARAMETERS and not parameters.get("required"):
        schema["additionalProperties"] = False
    return schema


def _interleaved(pieces: list[str], mark: str) -> list[str]:
    result = [pieces[0]]
    for piece in pieces[1:]:
        result += [mark, piece]
    return result
