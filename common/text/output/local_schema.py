"""JSON schemas whose references point into themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEFINITIONS = ("$defs", "definitions")
_MAX_HOPS = 8


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return what `schema` refers to within `root` if it is such a reference; else itself."""
    for _ in range(_MAX_HOPS):
        target = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(target, str) or not target.startswith("#/"):
            break
        found: Any = root
        for part in target[2:].split("/"):
            found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        if found is None:
            break
        schema = found
    return schema


def standing_alone(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return `schema`, a part of `root`, with the definitions that it may refer to."""
    definitions = {key: root[key] for key in DEFINITIONS if key in root}
    return {**schema, **definitions} if isinstance(schema, Mapping) else {"not": {}} if schema is False else dict(definitions)
