"""The requests of the load: every view and every kind of answer, the same ones for each model and each tenant. Pure.

All are deterministic, greedy or seeded, so that whoever answers, and whatever dies meanwhile, must give the same answer.
"""

from __future__ import annotations

import json
import random
import string
from collections.abc import Sequence
from typing import Any

import msgspec

from bench.mixed_load.answers import PATHS, Answer, View

LETTERS = string.ascii_lowercase + "     "
STOP_TOKENS = 3
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo", "Lima"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 30},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["city", "days", "note"],
    "additionalProperties": False,
}
NAMES = ("weather", "trains")


class Ask(msgspec.Struct, frozen=True):
    """One request. `body` lacks the model and whether it is streamed."""

    kind: str
    view: View
    body: dict[str, Any]


def pool(seed: int, per_kind: int) -> list[Ask]:
    """Return `per_kind` requests of each kind."""
    rng = random.Random(seed)
    prefixes = [words(rng, length) for length in (200, 400, 900)]
    found: list[Ask] = []
    for number in range(per_kind):
        short = words(rng, rng.randrange(8, 60))
        long = prefixes[number % len(prefixes)] + words(rng, rng.randrange(20, 200))
        tokens = rng.randrange(16, 64)
        free = {"max_tokens": tokens, "temperature": 0}
        drawn = {"max_tokens": tokens, "temperature": 0.8, "seed": rng.randrange(1 << 30)}
        found += [
            Ask("chat", "chat", {"messages": _said(short), **free}),
            Ask("chat, T=0.8", "chat", {"messages": _said(short), **drawn}),
            Ask("chat, long prompt", "chat", {"messages": _said(long), **free}),
            Ask("chat, log-probabilities", "chat", {"messages": _said(short), "logprobs": True, "top_logprobs": 2, **free}),
            Ask("chat, JSON schema", "chat", {"messages": _said(short), **drawn, **_form(), "max_tokens": 300}),
            Ask("chat, tools", "chat", {"messages": _said(short), **drawn, **_tools(), "max_tokens": 300}),
            Ask("completion", "completions", {"prompt": short, **free}),
            Ask("completion, long prompt", "completions", {"prompt": long, **drawn}),
            Ask("completion, n=2", "completions", {"prompt": short, "n": 2, **drawn}),
            Ask("completion, long answer", "completions", {"prompt": short, **drawn, "max_tokens": 300, "ignore_eos": True}),
            Ask("response", "responses", {"input": long, "max_output_tokens": tokens, "temperature": 0}),
            Ask("message", "messages", {"messages": _said(short), **drawn}),
        ]
    return found


def with_stop(ask: Ask, text: str) -> Ask | None:
    """Return `ask` with a stop string from the middle of its answer, `text`; None where that has no plain one."""
    middle = text[len(text) // 3 :]
    for begin in range(len(middle) - STOP_TOKENS):
        stop = middle[begin : begin + STOP_TOKENS]
        if stop.isascii() and stop.isprintable() and len(set(stop)) > 1:
            return Ask(f"{ask.kind}, stop string", ask.view, {**ask.body, "stop": [stop]})
    return None


def keeps_form(ask: Ask, answer: Answer) -> bool:
    """Return whether each choice of `answer` has the form that `ask` wants: the schema's, one call, or any."""
    if "response_format" in ask.body:
        return all(said.finish == "stop" and _is_trip(said.text) for said in answer.choices)
    if "tools" in ask.body:
        return all(len(said.calls) == 1 and said.calls[0][0] in NAMES and _is_trip(said.calls[0][1]) for said in answer.choices)
    return True


def _is_trip(text: str) -> bool:
    """Return whether `text` is JSON that matches `SCHEMA`."""
    try:
        trip = json.loads(text)
    except ValueError:
        return False
    return (
        isinstance(trip, dict)
        and set(trip) == set(SCHEMA["required"])
        and trip["city"] in SCHEMA["properties"]["city"]["enum"]
        and type(trip["days"]) is int
        and 1 <= trip["days"] <= SCHEMA["properties"]["days"]["maximum"]
        and isinstance(trip["note"], str)
        and len(trip["note"]) <= SCHEMA["properties"]["note"]["maxLength"]
    )


def words(rng: random.Random, length: int) -> str:
    """Return random text of so many characters, each a token."""
    return "".join(rng.choices(LETTERS, k=length))


def batch_line(ask: Ask, model: str, custom_id: str) -> dict[str, Any]:
    """Return `ask` as a line of a batch's file."""
    return {"custom_id": custom_id, "method": "POST", "url": PATHS[ask.view], "body": {"model": model, **ask.body}}


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _form() -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}}


def _tools(names: Sequence[str] = NAMES) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}} for name in names]
    return {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
