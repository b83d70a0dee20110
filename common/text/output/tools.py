"""What parsers must know of the tools that a request offers: their names, and which arguments are strings.

Formats that mark arguments with tags write strings without quotes, so only the tool's schema says whether `5` is a number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from common.text.output.local_schema import resolved

Kind = Literal["string", "nullable", "json", "unknown"]
"""Of an argument: a string; a string or null; anything else; not said."""

_BRANCHES = ("anyOf", "oneOf", "allOf")


class ToolSet:
    """The tools of one request, in OpenAI's form."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool["function"]
            parameters = function.get("parameters")
            self._schemas[function["name"]] = parameters if isinstance(parameters, Mapping) else {}

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    @property
    def names(self) -> list[str]:
        return list(self._schemas)

    def schema(self, name: str) -> Mapping[str, Any]:
        """Return the JSON schema of the arguments of tool `name`, empty if there is none."""
        return self._schemas.get(name, {})

    def kind_of(self, tool: str, argument: str) -> Kind:
        """Return what the schema says of an argument. References are followed within the tool's schema."""
        root = self.schema(tool)
        properties = root.get("properties")
        schema = resolved(properties.get(argument), root) if isinstance(properties, Mapping) else None
        types = _types(schema, root) if isinstance(schema, Mapping) else set()
        if not types:
            return "unknown"
        if types == {"string"}:
            return "string"
        return "nullable" if types == {"string", "null"} else "json"


def _types(schema: Mapping[str, Any], root: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that `schema` allows, as far as it says so directly or one level down."""
    found: set[str] = set()
    branches = [resolved(branch, root) for key in _BRANCHES for branch in _list(schema.get(key))]
    for each in (schema, *(branch for branch in branches if isinstance(branch, Mapping))):
        kind = each.get("type")
        found |= {kind} if isinstance(kind, str) else {one for one in _list(kind) if isinstance(one, str)}
        values = [*_list(each.get("enum")), *([each["const"]] if "const" in each else [])]
        if kind is None and values:
            found |= {"string" if isinstance(value, str) else "null" if value is None else "other" for value in values}
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
