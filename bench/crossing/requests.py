"""Requests as many kinds of clients make them, drawn at random by their numbers: they do not depend on who answers."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
TEXTS = (
    "Name three colours and say why.",
    "Write a haiku about rivers.",
    "Repeat after me: one two three four five one two three four five.",
    "Explain what a penstock is, in two sentences.",
    "List the planets. List the planets again.",
    "def add(a, b):\n    return",
    "Translate to French: The cat sleeps on the red sofa.",
)
LONG = " ".join(f"{number} bottles of beer on the wall, {number * 7 % 13} of them green;" for number in range(60))
SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "age"],
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
}
TOOL = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class Asked(NamedTuple):
    """kind: of PATHS. body: without the model's name. leaves: whether the client goes away amid its stream."""

    kind: str
    body: dict[str, Any]
    leaves: bool


def drawn(number: int) -> Asked:
    """Return the request of a number. Sampled ones have a seed."""
    draw = random.Random(number)
    kind = draw.choice(["chat", "chat", "completions", "responses", "messages"])
    temperature, max_tokens = draw.choice([0, 0, 0.7, 1.0]), draw.choice([1, 7, 24, 48, 150])
    text = draw.choice(TEXTS) + (" " + draw.choice(TEXTS) if draw.random() < 0.4 else "")
    if draw.random() < 0.2:  # a long prompt beside rows that decode
        text = LONG[: draw.randrange(500, 2500)] + text
    body: dict[str, Any] = {"temperature": temperature, "stream": draw.random() < 0.4}
    if temperature:
        body["seed"] = draw.randrange(1000)
    match kind:
        case "responses":
            body |= {"input": text, "max_output_tokens": max(16, max_tokens)}
        case "messages":
            body |= {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
        case "chat":
            body |= {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
            body |= _sampling(draw, text, max_tokens) | _form(draw)
        case _:
            body |= {"prompt": text if draw.random() < 0.7 else [text, draw.choice(TEXTS)], "max_tokens": max_tokens}
            body |= _sampling(draw, text, max_tokens) | _some(draw, 0.2, echo=True) | _some(draw, 0.2, logprobs=2)
    if "n" in body:
        body["stream"] = False
    return Asked(kind, body, body["stream"] and draw.random() < 0.1)


def _some(draw: random.Random, chance: float, **arguments: Any) -> dict[str, Any]:
    return arguments if draw.random() < chance else {}


def _sampling(draw: random.Random, text: str, max_tokens: int) -> dict[str, Any]:
    return {
        **_some(draw, 0.3, top_p=0.9),
        **_some(draw, 0.2, top_k=20),
        **_some(draw, 0.2, presence_penalty=0.6),
        **_some(draw, 0.2, repetition_penalty=1.2),
        **_some(draw, 0.2, stop=["the", "."]),
        **_some(draw, 0.2, logit_bias={"28": 3, "30": -5}),
        **_some(draw, 0.25, n=draw.choice([2, 3])),
        **_some(draw, 0.15, min_tokens=min(6, max_tokens)),
        **_some(draw, 0.15, ignore_eos=True),
        **_some(draw, 0.3, prediction={"type": "content", "content": 2 * text}),
    }


def _form(draw: random.Random) -> dict[str, Any]:
    """What a chat's answer must look like."""
    found, kind = _some(draw, 0.2, logprobs=True, top_logprobs=3), draw.random()
    if kind < 0.15:
        return found | {"response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}}
    if kind < 0.25:
        choice = draw.choice(["auto", "required"])
        return found | {"tools": [{"type": "function", "function": TOOL}], "tool_choice": choice}
    return found
