"""Ids of calls: what a tool's result refers to.

Most templates show them as they are or not at all; Mistral's insist on nine letters and digits.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

_LENGTH = 24
_PLAIN = re.compile(r"[a-zA-Z0-9]*")


def call_id(request: str, choice: int, index: int, length: int = 0) -> str:
    """Return the id of call `index` of a choice; `length` characters of letters and digits, or OpenAI's form for 0."""
    digest = hashlib.blake2b(f"{request}/{choice}/{index}".encode(), person=b"tool_call").hexdigest()
    return digest[:length] if length else f"call_{digest[:_LENGTH]}"


def with_short_ids(messages: Sequence[Mapping[str, Any]], length: int) -> list[dict[str, Any]]:
    """Return messages whose ids of calls are `length` letters and digits; others are replaced, in calls and results alike."""

    def short(id: Any) -> Any:
        if not isinstance(id, str) or (len(id) == length and _PLAIN.fullmatch(id)):
            return id
        return hashlib.blake2b(id.encode(errors="surrogatepass"), person=b"tool_call").hexdigest()[:length]

    result: list[dict[str, Any]] = []
    for message in messages:
        changed = dict(message)
        if "tool_call_id" in changed:
            changed["tool_call_id"] = short(changed["tool_call_id"])
        if changed.get("tool_calls"):
            changed["tool_calls"] = [
                dict(call) | ({"id": short(call["id"])} if "id" in call else {}) for call in changed["tool_calls"]
            ]
        result.append(changed)
    return result
