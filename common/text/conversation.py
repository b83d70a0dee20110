"""Conversations for templates that take less than a client may send: one system message, at the beginning; one call in a
message. Pure.

Messages are normalized ones (`template.normalize_messages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_SYSTEM = ("system", "developer")


def num_leading_systems(messages: Sequence[dict[str, Any]]) -> int:
    """Return how many messages of the system or the developer come before all others."""
    return next((index for index, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages))


def with_one_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` with those of the system and the developer that begin them as one."""
    count = num_leading_systems(messages)
    if count < 2:
        return list(messages)
    texts = [message["content"] for message in messages[:count] if message["content"]]
    return [{**messages[0], "content": "\n\n".join(texts)}, *messages[count:]]


def has_late_systems(messages: Sequence[dict[str, Any]]) -> bool:
    """Return whether a message of the system or the developer comes behind another one."""
    return any(message["role"] in _SYSTEM for message in messages[num_leading_systems(messages) :])


def with_systems_first(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` with those of the system and the developer before all others."""
    return sorted(messages, key=lambda message: message["role"] not in _SYSTEM)


def with_single_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `messages` with a message for each call, and the call's result right behind it.

    What an assistant's message holds besides its calls stays with the first one. Results whose id is no call's keep their
    order, behind the last call.
    """
    result: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        if len(calls) < 2:
            result.append(message)
            continue
        begin = at
        while at < len(messages) and messages[at]["role"] == "tool":
            at += 1
        waiting = list(messages[begin:at])
        for index, call in enumerate(calls):
            first = message if index == 0 else {"role": message["role"], "content": None}
            result.append({**first, "tool_calls": [call]})
            found = [one for one in waiting if call.get("id") and one.get("tool_call_id") == call["id"]]
            result += found
            waiting = [one for one in waiting if one not in found]
        result += waiting
    return result
