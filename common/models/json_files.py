"""JSON files of a model's folder. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.protocol.errors import ConfigError

_MAX_DEPTH = 100
"""Levels of nesting. Far less than Python's limit of recursion, which printing or comparing a value meets as well."""


def read_object(path: Path) -> dict[str, Any]:
    """:raises ConfigError: if there is no such file, or it is not a JSON object, nested too deeply, or with half characters."""
    try:
        data = path.read_bytes()
        value = json.loads(data)
        if b"\\ud" in data.lower():  # an escape of half a character, which must have another half
            json.dumps(value, ensure_ascii=False).encode()
        if _is_deeper(value, _MAX_DEPTH):
            raise RecursionError
    except RecursionError as error:
        raise ConfigError(f"{path} can't be read: it is nested more than {_MAX_DEPTH} levels deep") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


def _is_deeper(value: object, depth: int) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth < 0 or any(_is_deeper(item, depth - 1) for item in items)


def read_object_if_any(path: Path) -> dict[str, Any]:
    """Empty when there is no such file. :raises ConfigError: if there is one that is not a JSON object."""
    return read_object(path) if path.is_file() else {}
