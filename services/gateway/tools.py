"""The tools that a request offers, and calls and results in its messages: what is refused in them, and why. Pure.

Tools and calls are OpenAI's objects. They go to the template as they came, so what they hold besides is not lost.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from common.protocol.errors import InvalidParameter
from services.gateway.json_slices import Steps

MAX_TOOLS = 1024
MAX_TOOL_BYTES = 64 * 1024
MAX_TOOLS_BYTES = 1024 * 1024
MAX_CALLS = 128
"""Calls of one message."""
MAX_CALL_BYTES = 256 * 1024
MAX_DEPTH = 24
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_MAX_ID_CHARS = 256
_CONTAINERS = (dict, list)


def check_tools(tools: Sequence[Any]) -> Steps[None]:
    """Check the tools, one a step.

    :raises InvalidParameter: for the first that can't be served.
    """
    if len(tools) > MAX_TOOLS:
        raise too_many_tools()
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
        yield


def too_many_tools() -> InvalidParameter:
    return InvalidParameter(f"tools has more than {MAX_TOOLS} entries", param="tools")


def _check_tool(tool: Any, where: str) -> None:
    kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
    if kind is None:
        raise InvalidParameter(f"{where} must be an object with type and function", param="tools")
    if kind != "function":
        raise InvalidParameter(
            f"{where}: tools of type {str(kind)[:64]!r} are not supported yet: send functions", param="tools"
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidParameter(f"{where}.function is missing: tools without one are not supported yet", param="tools")
    _check_name(function.get("name"), f"{where}.function.name", "tools")
    if not isinstance(function.get("description", ""), str | None):
        raise InvalidParameter(f"invalid {where}.function.description: expected a string", param="tools")
    if not isinstance(function.get("parameters"), Mapping | None):
        raise InvalidParameter(f"invalid {where}.function.parameters: expected a JSON schema, an object", param="tools")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidParameter(f"invalid {where}.function.strict: expected true or false", param=f"{where}.function.strict")
    check_depth(tool, where, "tools")


def check_tool_choice(choice: Any, tools: Sequence[Mapping[str, Any]]) -> None:
    """Check the choice between `tools`, which were checked.

    :raises InvalidParameter: if it is none that is known, or there is no such tool.
    """
    if choice in (None, "auto", "none"):
        return
    name = named_tool(choice)
    if choice != "required" and name is None:
        shown = f": {choice[:64]!r}" if isinstance(choice, str) else ""
        raise InvalidParameter(
            f"tool_choice{shown} is not known: send auto, none, required, or a function with its name", param="tool_choice"
        )
    if not tools:
        raise InvalidParameter("tool_choice asks for a call, but there are no tools", param="tool_choice")
    if name is not None and name not in [tool["function"]["name"] for tool in tools]:
        raise InvalidParameter(f"tool_choice names {name[:64]!r}, which is none of the tools", param="tool_choice")


def named_tool(choice: Any) -> str | None:
    """Return the name of the function that a `tool_choice` names, None if it names none."""
    if not isinstance(choice, Mapping) or choice.get("type", "function") != "function":
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def check_calls(calls: Sequence[Any], where: str) -> None:
    """Check the calls of an assistant's message.

    :raises InvalidParameter: for the first that no template can show.
    """
    if len(calls) > MAX_CALLS:
        raise too_many_calls(where)
    for index, call in enumerate(calls):
        place = f"{where}.tool_calls[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            raise InvalidParameter(f"{place} must be the call of a function", param=where)
        if not isinstance(call.get("id", ""), str) or len(call.get("id", "")) > _MAX_ID_CHARS:
            raise InvalidParameter(f"invalid {place}.id: expected a short string", param=where)
        _check_name(function.get("name"), f"{place}.function.name", where)
        arguments = function.get("arguments")
        if not isinstance(arguments, str | Mapping | None):
            raise InvalidParameter(f"invalid {place}.function.arguments: expected a string of JSON", param=where)
        if isinstance(arguments, str) and len(arguments) > MAX_CALL_BYTES:
            raise InvalidParameter(f"{place}.function.arguments has more than {MAX_CALL_BYTES} bytes", param=where)
        check_depth(call, place, where)


def too_many_calls(where: str) -> InvalidParameter:
    return InvalidParameter(f"{where}.tool_calls has more than {MAX_CALLS} entries", param=where)


def template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call as templates expect it: with a type, and arguments."""
    function = dict(call["function"])
    if function.get("arguments") is None:
        function["arguments"] = "{}"
    return {"type": "function", **call, "function": function}


def size_of(objects: Sequence[Mapping[str, Any]]) -> int:
    """Return about how many characters tools or calls, which were checked, have in a prompt."""
    return len(msgspec.json.encode(objects)) if objects else 0


def _check_name(name: Any, where: str, param: str) -> None:
    if not isinstance(name, str):
        raise InvalidParameter(f"{where} is missing", param=param)
    if not _NAME.fullmatch(name):
        raise InvalidParameter(f"invalid {where}: expected up to 64 letters, digits, underscores and dashes", param=param)


def check_depth(value: Any, where: str, param: str) -> None:
    """:raises InvalidParameter: if lists and objects are nested more than MAX_DEPTH levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inside = (each.values() if type(each) is dict else each for each in level)
        level = [item for items in inside for item in items if type(item) in _CONTAINERS]
        if not level:
            return
    raise InvalidParameter(f"{where} is nested more than {MAX_DEPTH} levels deep", param=param)
