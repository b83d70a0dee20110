"""The grammar of an answer to a request with tools: what `tool_choice`, `strict` and `parallel_tool_calls` ask for. Pure.

| tool_choice | the answer |
|---|---|
| `required` | one call or more, whose arguments match the tools' schemas |
| a function | one call of it, whose arguments match its schema |
| `auto`, and a tool is `strict` | text, and calls; those of strict tools match their schemas |
| `auto`, and a form is asked for | calls, or the form |
| `auto` otherwise | whatever the model writes: no grammar |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from common.protocol.errors import InvalidParameter
from common.text.grammar import GrammarCompiler
from common.text.output.answer_grammar import Wanted, answer_grammar
from common.text.output.grammar_writer import Callee
from services.gateway.choice_events import AnswerFormat
from services.gateway.openai import ChatRequest
from services.gateway.structured import Structure
from services.gateway.tools import named_tool


def needs_grammar(request: ChatRequest, form: str) -> bool:
    """Return whether anything is asked for that a model could miss. `form`: of an answer without calls."""
    return _must_call(request) or bool(form) or any(map(_is_strict, request.offered_tools))


def calls_of(request: ChatRequest, format: AnswerFormat, form: str, *, template: str, grammars: GrammarCompiler) -> Structure:
    """Return the grammar, which was compiled once. Takes milliseconds for each tool: call it in a thread.

    `template`: the source of the chat template.

    :raises InvalidParameter: if this model can't keep what is asked for; it names the tool, if it is one.
    """
    if request.continues and format.dialect.tools == "harmony":
        raise InvalidParameter("a call can't continue a message of this model", param="tool_choice")
    special = grammars.special_token_ids(format.dialect.marks(tools=True, reasoning=True))
    wanted = Wanted(callees=_callees(request), must_call=_must_call(request), many=format.max_calls is None, form=form)

    def compiled(wanted: Wanted) -> str:
        grammar = answer_grammar(wanted, format.dialect, template=template, special=special, is_open=format.is_open)
        grammars.compile(grammar)
        return grammar

    try:
        grammar = compiled(wanted)
    except InvalidParameter as error:
        raise _explained(error, wanted, compiled) from error
    return Structure(grammar, "tool_choice" if wanted.must_call else "tools")


def _explained(error: InvalidParameter, wanted: Wanted, compiled: Callable[[Wanted], str]) -> InvalidParameter:
    """Return the error of the tool whose schema can't be kept, or `error`, if all are too much together.

    Looks for it by halves: compiling a thousand tools one by one would take one of the few threads for half a minute.
    """
    suspects, reason = wanted.callees, error
    while True:
        half = suspects[: len(suspects) // 2] or suspects
        try:
            compiled(msgspec.structs.replace(wanted, callees=half, form=""))
        except InvalidParameter as found:
            suspects, reason = half, found
            if len(suspects) == 1:
                return InvalidParameter(f"{suspects[0].place}: {reason}", param=suspects[0].place)
        else:
            if len(suspects) == 1:
                return InvalidParameter(str(error), param="tools")
            suspects = suspects[len(half) :]


def _must_call(request: ChatRequest) -> bool:
    return request.tool_choice == "required" or named_tool(request.tool_choice) is not None


def _is_strict(tool: dict[str, Any]) -> bool:
    return bool(tool["function"].get("strict"))


def _callees(request: ChatRequest) -> list[Callee]:
    """Return the tools that may be called, with the schemas that are kept."""
    name, keeps_all = named_tool(request.tool_choice), _must_call(request)
    return [
        Callee(
            name=tool["function"]["name"],
            parameters=(tool["function"].get("parameters") or {}) if keeps_all or _is_strict(tool) else None,
            place=f"tools[{index}].function.parameters",
        )
        for index, tool in enumerate(request.offered_tools)
        if name in (None, tool["function"]["name"])
    ]
