"""The chat that a body of `/v1/responses` is. Pure.

Nothing is stored here, so a conversation comes whole, as `input`. Its items are one assistant's turn for as long as they are
the model's: reasoning, then text, then calls are one message of a chat, as the template expects them.
"""

from __future__ import annotations

import re
from typing import Any

from common.protocol.errors import InvalidParameter
from services.gateway import openai, tools
from services.gateway.arguments import Notes
from services.gateway.json_slices import Steps
from services.gateway.openai import ChatMessage, ChatRequest, ContentPart, SharedArguments
from services.gateway.views.responses_body import (
    INCLUDE,
    LOGPROBS,
    MAX_ITEMS,
    STATELESS,
    InputItem,
    InputPart,
    ResponsesRequest,
    TextOptions,
    too_many_items,
    too_many_parts,
)
from services.gateway.views.responses_tools import Offered, custom_arguments

_ITEMS_AT_A_TIME = 512  # less than three milliseconds
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_TOOL_PLACE = re.compile(r"tools\[(\d+)\]")
_ROLES = ("user", "assistant", "system", "developer")


def chat_of(request: ResponsesRequest, offered: Offered, notes: Notes) -> Steps[ChatRequest]:
    """The chat that a request is. `offered`: its tools.

    :raises InvalidParameter: for what can't be served, with a chat's names for arguments where it is a chat's mistake.
    """
    scores = LOGPROBS in (request.include or ())
    for entry in request.include or ():
        if entry not in INCLUDE.obeyed:
            notes.judge(INCLUDE, entry, b"true", place="include")
    if request.top_logprobs and not scores:
        raise InvalidParameter(f"top_logprobs needs include: [{LOGPROBS}]", param="top_logprobs")
    messages = yield from _messages(request, offered)
    chat = ChatRequest(
        **{name: getattr(request, name) for name in SharedArguments.__struct_fields__},
        messages=messages,
        max_completion_tokens=request.max_output_tokens,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        response_format=_response_format(request.text),
        tools=offered.tools or None,
        tool_choice=_chat_choice(request.tool_choice, offered),
        parallel_tool_calls=request.parallel_tool_calls,
        logprobs=scores,
        top_logprobs=request.top_logprobs if scores else None,
    )
    try:
        yield from openai.check_chat(chat)
    except InvalidParameter as error:
        raise _placed(error, offered) from error
    return chat


# ── tools and formats ────────────────────────────────────────────────────────────────────────────────────────────────────


def _placed(error: InvalidParameter, offered: Offered) -> InvalidParameter:
    """`error`, with the places that the body has for the chat's tools."""

    def place(found: re.Match[str]) -> str:
        index = int(found[1])
        return offered.places[index] if index < len(offered.places) else found[0]

    param = None if error.param is None else _TOOL_PLACE.sub(place, error.param)
    return InvalidParameter(_TOOL_PLACE.sub(place, str(error)), param=param)


def _chat_choice(choice: str | dict[str, Any] | None, offered: Offered) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    match choice:
        case {"type": "function" | "custom", "name": str(name)}:
            namespace = choice.get("namespace")
            shown = offered.name_of(name, namespace if isinstance(namespace, str) else None)
            return {"type": "function", "function": {"name": shown}}
        case {"type": "allowed_tools", "mode": mode, "tools": list(allowed)}:
            named = [_chat_choice(tool, offered) if isinstance(tool, dict) else tool for tool in allowed]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
        case _:
            return choice


def _response_format(text: TextOptions | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    form = {name: value for name, value in text.format.items() if value is not None}
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}


# ── items ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Turn:
    """What the model said until somebody else spoke."""

    def __init__(self) -> None:
        self.reasoning: list[str] = []
        self.content: list[str] = []
        self.calls: list[dict[str, Any]] = []

    @property
    def has_answer(self) -> bool:
        return bool(self.content) and not self.calls

    def message(self) -> ChatMessage:
        return ChatMessage(
            "assistant",
            content="".join(self.content) if self.content else None,
            tool_calls=self.calls or None,
            reasoning_content="".join(self.reasoning) if self.reasoning else None,
        )


def _messages(request: ResponsesRequest, offered: Offered) -> Steps[list[ChatMessage]]:
    """:raises InvalidParameter: for an item that can't be served."""
    messages = [ChatMessage("system", content=request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        return [*messages, ChatMessage("user", content=request.input)]
    if not request.input:
        raise InvalidParameter("input is empty: send at least one item", param="input")
    if len(request.input) > MAX_ITEMS:
        raise too_many_items()
    turn: _Turn | None = None
    called: set[str] = set()
    num_parts = 0
    for index, item in enumerate(request.input):
        if index % _ITEMS_AT_A_TIME == _ITEMS_AT_A_TIME - 1:
            yield
        place = f"input[{index}]"
        num_parts += sum(len(parts) for parts in (item.content, item.output) if isinstance(parts, list))
        if num_parts > openai.MAX_PARTS:
            raise too_many_parts()
        kind = item.type or "message"
        is_call = kind in _CALLS
        is_ours = is_call or kind == "reasoning" or (kind == "message" and item.role == "assistant")
        if turn is not None and (not is_ours or (turn.has_answer and not is_call)):
            messages.append(turn.message())
            turn = None
        if is_ours:
            turn = turn or _Turn()
            _add_to_turn(turn, item, kind, place, offered)
            if is_call and item.call_id:
                called.add(item.call_id)
        elif kind == "message":
            messages.append(_message(item, place))
        elif kind in _OUTPUTS:
            messages.append(_result(item, place, called))
        else:
            hint = f": {STATELESS}" if kind == "item_reference" else ""
            raise InvalidParameter(f"items of type {kind!r} are not supported yet{hint}", param=f"{place}.type")
    if turn is not None:
        messages.append(turn.message())
    return messages


def _message(item: InputItem, place: str) -> ChatMessage:
    if item.role not in _ROLES:
        shown = "missing" if item.role is None else f"{item.role[:64]!r}"
        raise InvalidParameter(f"the role is {shown}: use one of {', '.join(_ROLES)}", param=f"{place}.role")
    if item.content is None:
        raise InvalidParameter("content is missing", param=f"{place}.content")
    if isinstance(item.content, str):
        return ChatMessage(item.role, content=item.content)
    texts = _texts(item.content, f"{place}.content")
    return ChatMessage(item.role, content=[ContentPart("text", text) for text in texts])


def _add_to_turn(turn: _Turn, item: InputItem, kind: str, place: str, offered: Offered) -> None:
    if kind in _CALLS:
        if not item.call_id:
            raise InvalidParameter("call_id is missing", param=f"{place}.call_id")
        arguments = item.arguments or "{}" if kind == "function_call" else custom_arguments(item.input or "")
        function = {"name": offered.name_of(item.name, item.namespace), "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        tools.check_calls([call], place)
        turn.calls.append(call)
        if len(turn.calls) > tools.MAX_CALLS:
            raise InvalidParameter(f"input has more than {tools.MAX_CALLS} calls in one turn", param=place)
    elif kind == "reasoning":
        parts = item.content or item.summary or []
        turn.reasoning += [parts] if isinstance(parts, str) else _texts(parts, f"{place}.content")
    else:
        if item.content is None:
            raise InvalidParameter("content is missing", param=f"{place}.content")
        turn.content += [item.content] if isinstance(item.content, str) else _texts(item.content, f"{place}.content")


def _result(item: InputItem, place: str, called: set[str]) -> ChatMessage:
    if item.call_id not in called:
        shown = "missing" if item.call_id is None else f"{item.call_id[:64]!r}, which no call before has"
        raise InvalidParameter(f"the call_id of this output is {shown}", param=f"{place}.call_id")
    if item.output is None:
        raise InvalidParameter("output is missing", param=f"{place}.output")
    content: Any = item.output
    if isinstance(content, list):
        content = [ContentPart("text", text) for text in _texts(content, f"{place}.output")]
    return ChatMessage("tool", content=content, tool_call_id=item.call_id)


_TEXT_PARTS = openai.TEXT_PARTS | {"reasoning_text", "summary_text"}


def _texts(parts: list[InputPart], place: str) -> list[str]:
    texts: list[str] = []
    for part in parts:
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in _TEXT_PARTS or text is None:
            raise InvalidParameter(f"content of type {part.type[:64]!r} is not supported yet: send text", param=place)
        texts.append(text)
    return texts
