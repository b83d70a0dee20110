"""The tools of a body of `/v1/responses` as functions of a chat, and what the client calls them. Pure.

Chats have functions alone. Those of a namespace get its name before theirs, and a custom tool is a function of one string. What
OpenAI's own servers would run is left out: a model need not call what it may.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from common.protocol.errors import InvalidParameter
from services.gateway.arguments import Notes

INPUT = "input"
"""The argument of a custom tool."""

_NOT_RUN = re.compile(r"(web_search|image_generation|tool_search)(_.*)?")
_NO_LETTER = re.compile(r"[^a-zA-Z0-9_-]")
_MAX_NAME_CHARS = 64
_SEPARATOR = "__"


class Callee(NamedTuple):
    """What a client calls a function of the chat. `is_custom`: calls of it have one text, not arguments."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


class Offered(NamedTuple):
    """`tools`: a chat's; `places`: where the body has each of them. `callees`: by the chat's name, those whose calls are told
    in another way than a function's. `in_namespaces`: the chat's name of each function of a namespace, by that and its own."""

    tools: list[dict[str, Any]]
    places: list[str]
    callees: dict[str, Callee]
    in_namespaces: dict[tuple[str, str], str]

    def name_of(self, name: str | None, namespace: str | None) -> str | None:
        """The chat's name of a tool that the client calls so."""
        if name is None or namespace is None:
            return name
        return self.in_namespaces.get((namespace, name)) or _joined(namespace, name)


def offered_tools(tools: Sequence[Mapping[str, Any]], notes: Notes) -> Offered:
    """The functions that a chat offers for `tools`. What is wrong with a function itself is found in the chat.

    :raises InvalidParameter: for a tool that is none of these, or if two get the same name.
    """
    offered = Offered([], [], {}, {})
    for index, tool in enumerate(tools):
        place, kind = f"tools[{index}]", tool.get("type")
        if kind == "namespace":
            _add_namespace(offered, tool, place)
        elif isinstance(kind, str) and (hosted := _NOT_RUN.fullmatch(kind)):
            notes.note(f"tools.{hosted[1]}", "it is not run here")
        else:
            _add(offered, tool, place)
    if offered.callees:
        names = Counter(str(tool["function"].get("name")) for tool in offered.tools)
        if twice := next((name for name in offered.callees if names[name] > 1), None):
            raise InvalidParameter(f"two tools would be called {twice[:64]!r}: rename one", param="tools")
    return offered


def custom_arguments(text: str) -> str:
    """The arguments of a function that stands for a custom tool."""
    return msgspec.json.encode({INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """The text in the arguments of a function that stands for a custom tool; the arguments, where a model wrote others."""
    try:
        written: Any = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return arguments
    text = written.get(INPUT) if isinstance(written, dict) else None
    return text if isinstance(text, str) else arguments


def _add_namespace(offered: Offered, tool: Mapping[str, Any], place: str) -> None:
    name, inner = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not name:
        raise InvalidParameter(f"{place}.name is missing", param=f"{place}.name")
    if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
        raise InvalidParameter(f"{place}.tools must be a list of tools", param=f"{place}.tools")
    for index, one in enumerate(inner):
        _add(offered, one, f"{place}.tools[{index}]", name)


def _add(offered: Offered, tool: Mapping[str, Any], place: str, namespace: str | None = None) -> None:
    kind, name = tool.get("type"), tool.get("name")
    if kind not in ("function", "custom"):
        shown = "missing" if kind is None else f"{str(kind)[:64]!r}"
        raise InvalidParameter(f"{place}: the type is {shown}, and only function and custom are supported yet", param="tools")
    function = {key: value for key, value in tool.items() if key not in ("type", "format") and value is not None}
    if kind == "custom":
        function |= _text_function(tool, place)
    if isinstance(name, str) and (namespace is not None or kind == "custom"):
        if namespace is not None:
            function["name"] = offered.in_namespaces[namespace, name] = _joined(namespace, name)
        offered.callees[function["name"]] = Callee(name, namespace, kind == "custom")
    offered.tools.append({"type": "function", "function": function})
    offered.places.append(place)


def _joined(namespace: str, name: str) -> str:
    """`namespace__name`; the name alone where that is too long."""
    before = _NO_LETTER.sub("_", namespace)
    joined = before + (name if before.endswith(_SEPARATOR) else _SEPARATOR + name)
    return joined if len(joined) <= _MAX_NAME_CHARS else name


def _text_function(tool: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The description and parameters of a custom tool. A regular expression holds wherever schemas are kept; of a grammar the
    model is told."""
    form = tool.get("format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") not in ("text", "grammar"):
        raise InvalidParameter(f"{place}.format is not known: send text or grammar", param=f"{place}.format")
    description, text = tool.get("description") or "", {"type": "string"}
    if form["type"] == "grammar":
        syntax, definition = form.get("syntax"), form.get("definition")
        if syntax not in ("lark", "regex") or not isinstance(definition, str):
            raise InvalidParameter(f"{place}.format needs a syntax, lark or regex, and a definition", param=f"{place}.format")
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        elif isinstance(description, str):
            description += f"\n\n{INPUT} follows this Lark grammar:\n{definition}"
    parameters = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
    return {"description": description, "parameters": parameters}
