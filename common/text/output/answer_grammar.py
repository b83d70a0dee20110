"""The grammar of a whole answer: reasoning first, then calls, text with calls in it, or an answer of another form. Pure.

What it allows, `OutputParser` reads as whole calls whose arguments match their schemas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from common.protocol.errors import InvalidParameter
from common.text.output.formats import Dialect
from common.text.output.grammar_writer import Callee, GrammarWriter

_BREAKS = r"/\n{0,2}/"
"""Between reasoning and what follows."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer may be. `callees`: the tools that it may call. `must_call`: it is calls and nothing else.

    `many`: several calls may follow each other. `form`: llguidance's text for an answer without calls; empty: any text.
    """

    callees: Sequence[Callee]
    must_call: bool
    many: bool = True
    form: str = ""


def answer_grammar(
    wanted: Wanted, dialect: Dialect, *, template: str = "", special: Mapping[str, int] | None = None, is_open: bool = False
) -> str:
    """Return llguidance's text. `template`: the source of the chat template. `special`: see `GrammarWriter`.

    `is_open`: the prompt ended inside reasoning, so the answer begins with the rest of it.

    :raises InvalidParameter: if a tool's schema, or the form beside calls, can't be kept in this dialect.
    """
    tools, reasoning = dialect.tool_format, dialect.reasoning_format
    if tools is None:
        raise InvalidParameter("it is not known how this model calls tools (tool_parser): send none", param="tools")
    marks = (reasoning.opening, reasoning.closing) if reasoning is not None and reasoning.opening else None
    excluded = () if marks is None or is_open else (marks[0],)
    writer = GrammarWriter(template=template, special=special, many=wanted.many, excluded=excluded)
    syntax = tools.grammar(writer, wanted.callees)
    thought = ""
    if marks is not None:
        closed = writer.until(marks[1], [marks[1]])
        thought = closed if is_open else f"({writer.write(marks[0])} {closed})?"
    pause = _BREAKS if thought else ""
    if wanted.must_call:
        return writer.text(f"{thought} {pause} {syntax.calls}")
    if not wanted.form:
        return writer.text(f"{thought} {syntax.free}")
    if not syntax.is_marked:
        raise InvalidParameter(
            "the calls of this model can't be told from an answer of another form: let tool_choice be required or none",
            param="tools",
        )
    answer = writer.rule("@answer")
    text = writer.text(f"{thought} {pause} ({syntax.calls} | {syntax.frame} {answer})")
    return msgspec.json.encode({"grammars": [{"lark_grammar": text}, *_named(wanted.form)]}).decode()


def _named(form: str) -> list[dict[str, Any]]:
    """Return the grammars of `form`, of which the first is called `answer`."""
    try:
        decoded = msgspec.json.decode(form)
        first, *others = decoded["grammars"]
    except (msgspec.DecodeError, TypeError, KeyError, ValueError):  # Lark's text
        first, others = {"lark_grammar": form}, []
    return [{**first, "name": "answer"}, *others]
