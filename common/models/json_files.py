"""JSON files of a model's folder. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.protocol.errors import ConfigError


def read_object(path: Path) -> dict[str, Any]:
    """:raises ConfigError: if there is no such file, or it is not a JSON object."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return value


def read_object_if_any(path: Path) -> dict[str, Any]:
    """Empty when there is no such file. :raises ConfigError: if there is one that is not a JSON object."""
    return read_object(path) if path.is_file() else {}
