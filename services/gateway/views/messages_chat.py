"""The chat that a body of `/v1/messages` is. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from common.protocol.errors import InvalidParameter
from services.gateway import openai, tools
from services.gateway.arguments import Notes
from services.gateway.decoding import malformed
from services.gateway.json_slices import Steps
from services.gateway.openai import ChatMessage, ChatRequest, ContentPart, SharedArguments
from services.gateway.views.messages_body import (
    BUDGET,
    TOOL,
    Block,
    InnerBlock,
    Message,
    MessagesRequest,
    ToolChoice,
    too_many_blocks,
    too_many_messages,
)

_MESSAGES_AT_A_TIME = 512  # less than three milliseconds
_BLOCKS_AT_A_TIME = 2048


def chat_of(request: MessagesRequest, notes: Notes, *, counts: bool = False) -> Steps[ChatRequest]:
    """The chat that a request is. `counts`: its tokens are to be counted, so `max_tokens` may be left out.

    :raises InvalidParameter: for what can't be served, with a chat's names for arguments where it is a chat's mistake.
    """
    if request.max_tokens is None and not counts:
        raise InvalidParameter("max_tokens is missing", param="max_tokens")
    if request.stop is not None and request.stop_sequences is not None:
        raise InvalidParameter("stop and stop_sequences are both given: send stop_sequences", param="stop")
    messages = yield from _messages(request)
    shared = {name: getattr(request, name) for name in SharedArguments.__struct_fields__}
    config, choice = request.output_config, request.tool_choice
    chat = ChatRequest(
        **{**shared, "stop": request.stop if request.stop_sequences is None else request.stop_sequences or None},
        messages=messages,
        max_tokens=request.max_tokens,
        response_format=_response_format(request.output_format if config is None or config.format is None else config.format),
        tools=[_chat_tool(tool, f"tools[{index}]", notes) for index, tool in enumerate(request.tools or [])] or None,
        tool_choice=None if choice is None else _chat_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        continue_final_message=messages[-1].role == "assistant" or None,
        **_reasoning(request, notes),
    )
    yield from openai.check_chat(chat)
    return chat


# ── tools, formats, reasoning ────────────────────────────────────────────────────────────────────────────────────────────


def _chat_tool(tool: dict[str, Any], place: str, notes: Notes) -> dict[str, Any]:
    """A tool as chats have it. What is wrong with a function is found there."""
    if tool.get("type", "custom") not in ("custom", None):
        raise InvalidParameter(
            f"{place}: tools of type {str(tool['type'])[:64]!r} are not supported yet: send tools with an input_schema",
            param="tools",
        )
    for name, value in tool.items():
        if name not in TOOL.obeyed:
            notes.judge(TOOL, name, msgspec.json.encode(value)[:80], place=place)
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidParameter(f"{place}.input_schema is missing: send a JSON schema, an object", param=f"{place}.input_schema")
    function = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": {**function, "parameters": tool["input_schema"]}}


def _chat_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidParameter("tool_choice.name is missing", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _response_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form.get("type") != "json_schema":
        return form
    inner = {name: value for name, value in form.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": {"name": "output", **inner}}


def _reasoning(request: MessagesRequest, notes: Notes) -> dict[str, Any]:
    """The chat's arguments about reasoning. Without `thinking`, the model does what it always does."""
    thinking = request.thinking
    effort = None if request.output_config is None else request.output_config.effort
    if thinking is None or thinking.type == "adaptive":
        return {"reasoning_effort": effort}
    if thinking.type == "disabled":
        return {"reasoning_effort": "none", "include_reasoning": False}
    budget = thinking.budget_tokens
    if budget is not None:
        if request.max_tokens is not None and budget >= request.max_tokens:
            raise InvalidParameter(
                f"thinking.budget_tokens is {budget}, which must be less than max_tokens, {request.max_tokens}",
                param="thinking.budget_tokens",
            )
        notes.judge(BUDGET, "budget_tokens", b"1", place="thinking")
    return {"reasoning_effort": effort, "enable_thinking": True}


# ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _messages(request: MessagesRequest) -> Steps[list[ChatMessage]]:
    """:raises InvalidParameter: for a block that can't be served."""
    if not request.messages:
        raise InvalidParameter("messages is empty: send at least one message", param="messages")
    if len(request.messages) > openai.MAX_MESSAGES:
        raise too_many_messages()
    messages: list[ChatMessage] = []
    if isinstance(request.system, str) and request.system:
        messages.append(ChatMessage("system", content=request.system))
    elif isinstance(request.system, list) and request.system:
        parts = [_text_part(block, f"system[{index}]") for index, block in enumerate(request.system)]
        messages.append(ChatMessage("system", content=parts))
    used: set[str] = set()
    num_blocks = 0
    last = len(request.messages) - 1
    for index, message in enumerate(request.messages):
        if index % _MESSAGES_AT_A_TIME == _MESSAGES_AT_A_TIME - 1:
            yield
        place = f"messages[{index}]"
        if isinstance(message.content, list):
            num_blocks += len(message.content)
            num_blocks += sum(len(block.content) for block in message.content if isinstance(block.content, list))
            if num_blocks > openai.MAX_PARTS:
                raise too_many_blocks()
        if message.role == "user":
            messages += yield from _of_user(message, place, used)
        elif message.role == "system":
            content: Any = message.content
            if isinstance(content, list):
                content = [_text_part(block, f"{place}.content[{number}]") for number, block in enumerate(content)]
            messages.append(ChatMessage("system", content=content))
        elif message.role == "assistant":
            answer = _of_assistant(message, place)
            used.update(call["id"] for call in answer.tool_calls or ())
            if index < last or answer.content or answer.tool_calls:
                messages.append(answer)
        else:
            raise InvalidParameter(f"the role is {message.role[:64]!r}: use user, assistant or system", param=f"{place}.role")
    if not messages:
        raise InvalidParameter("messages are empty: send some text", param="messages")
    return messages


def _of_user(message: Message, place: str, used: set[str]) -> Steps[list[ChatMessage]]:
    """Results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [ChatMessage("user", content=message.content)]
    if not message.content:
        raise InvalidParameter("content is empty", param=f"{place}.content")
    messages: list[ChatMessage] = []
    parts: list[ContentPart] = []
    for index, block in enumerate(message.content):
        inside = f"{place}.content[{index}]"
        if index % _BLOCKS_AT_A_TIME == _BLOCKS_AT_A_TIME - 1:
            yield
        if block.type != "tool_result":
            parts.append(_text_part(block, inside))
            continue
        if parts:
            messages.append(ChatMessage("user", content=parts))
            parts = []
        if block.tool_use_id not in used:
            shown = "missing" if block.tool_use_id is None else f"{block.tool_use_id[:64]!r}, which no tool_use before has"
            raise InvalidParameter(f"the tool_use_id of this result is {shown}", param=f"{inside}.tool_use_id")
        content: Any = block.content or ""
        if isinstance(content, list):
            content = [_text_part(part, f"{inside}.content") for part in content]
        messages.append(ChatMessage("tool", content=content, tool_call_id=block.tool_use_id))
    return [*messages, ChatMessage("user", content=parts)] if parts else messages


def _of_assistant(message: Message, place: str) -> ChatMessage:
    if isinstance(message.content, str):
        return ChatMessage("assistant", content=message.content)
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        inside = f"{place}.content[{index}]"
        match block.type:
            case "thinking":
                thoughts.append(block.thinking or "")
            case "redacted_thinking":
                pass  # its data is noted as ignored
            case "tool_use":
                calls.append(_call(block, inside))
            case _:
                texts.append(_text_part(block, inside).text or "")
    if len(calls) > tools.MAX_CALLS:
        raise InvalidParameter(f"{place} has more than {tools.MAX_CALLS} calls", param=f"{place}.content")
    return ChatMessage(
        "assistant",
        content="".join(texts) or None,
        tool_calls=calls or None,
        reasoning_content="".join(thoughts) or None,
    )


def _call(block: Block, place: str) -> dict[str, Any]:
    if not block.id:
        raise InvalidParameter("id is missing", param=f"{place}.id")
    raw = bytes(block.input) or b"{}"
    if raw[:1] != b"{":
        raise InvalidParameter("input must be an object", param=f"{place}.input")
    if len(raw) > tools.MAX_CALL_BYTES:
        raise InvalidParameter(f"input has more than {tools.MAX_CALL_BYTES} bytes", param=f"{place}.input")
    try:
        arguments = raw.decode()
    except UnicodeDecodeError as error:  # strings of a member that is kept raw have not been looked at
        raise malformed(error) from error
    call = {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}
    tools.check_calls([call], place)
    return call


def _text_part(block: Block | InnerBlock, place: str) -> ContentPart:
    if block.type != "text" or block.text is None:
        raise InvalidParameter(f"content of type {block.type[:64]!r} is not supported yet: send text", param=place)
    return ContentPart("text", block.text)
