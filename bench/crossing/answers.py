"""What a client has of an answer in the end, as one text, streamed or not: texts, calls of tools, and why it ended."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import httpx

from bench.crossing.requests import PATHS, Asked

LEFT = "left"
"""Of a client that went away."""
FAILED = "failed: "
"""How what no client should see begins: answers of 500 and more, and connections that break."""
_LINES_READ = 6
"""By a client before it goes away."""


async def ask(http: httpx.AsyncClient, asked: Asked, model: str) -> str:
    """Return the answer; what a request was refused for is one, too."""
    body = {**asked.body, "model": model}
    try:
        if asked.body["stream"]:
            return await _streamed(http, asked, body)
        response = await http.post(PATHS[asked.kind], json=body)
        return _refused(response) if response.status_code != httpx.codes.OK else _whole(asked.kind, response.json())
    except httpx.HTTPError as error:
        return f"{FAILED}{error!r}"


def _refused(response: httpx.Response) -> str:
    text = f"{response.status_code} {response.text[:200]}"
    return f"{FAILED}{text}" if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR else text


def _whole(kind: str, answer: dict[str, Any]) -> str:
    match kind:
        case "chat":
            choices = [
                (one["message"].get("content") or "", _calls(one["message"].get("tool_calls") or []), one["finish_reason"])
                for one in answer["choices"]
            ]
            return json.dumps(choices)
        case "completions":
            return json.dumps([(one["text"], one["finish_reason"]) for one in answer["choices"]])
        case "responses":
            parts = [part.get("text", "") for item in answer["output"] for part in item.get("content", [])]
            return json.dumps(("".join(parts), answer["status"]))
        case _:
            return json.dumps(("".join(part.get("text", "") for part in answer["content"]), answer["stop_reason"]))


def _calls(calls: list[dict[str, Any]]) -> str:
    return "".join((call["function"].get("name") or "") + (call["function"].get("arguments") or "") for call in calls)


async def _streamed(http: httpx.AsyncClient, asked: Asked, body: dict[str, Any]) -> str:
    texts, calls, reasons = defaultdict[int, str](str), defaultdict[int, str](str), dict[int, str]()
    async with http.stream("POST", PATHS[asked.kind], json=body) as response:
        if response.status_code != httpx.codes.OK:
            await response.aread()
            return _refused(response)
        lines = 0
        async for line in response.aiter_lines():
            lines += 1
            if asked.leaves and lines > _LINES_READ:
                return LEFT
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event.get("error"):
                return f"{FAILED}{str(event['error'])[:200]}"
            for index, text, call, reason in _pieces(asked.kind, event):
                texts[index] += text
                calls[index] += call
                if reason:
                    reasons[index] = reason
    found = [(texts[index], calls[index], reasons[index]) for index in sorted(reasons)]
    if asked.kind == "chat":
        return json.dumps(found)
    if asked.kind == "completions":
        return json.dumps([(text, reason) for text, _, reason in found])
    return json.dumps((texts[0], reasons.get(0)))


def _pieces(kind: str, event: dict[str, Any]) -> list[tuple[int, str, str, str | None]]:
    """Return of an event the choices' pieces of text and of calls, and reasons of their ends."""
    match kind, event.get("type"):
        case "chat", _:
            deltas = [(one["index"], one["delta"], one["finish_reason"]) for one in event.get("choices", [])]
            return [(at, delta.get("content") or "", _calls(delta.get("tool_calls") or []), end) for at, delta, end in deltas]
        case "completions", _:
            return [(one["index"], one["text"], "", one["finish_reason"]) for one in event.get("choices", [])]
        case "responses", "response.output_text.delta":
            return [(0, event["delta"], "", None)]
        case "responses", "response.completed" | "response.incomplete" | "response.failed":
            return [(0, "", "", event["response"]["status"])]
        case "messages", "content_block_delta":
            return [(0, event["delta"].get("text", ""), "", None)]
        case "messages", "message_delta":
            return [(0, "", "", event["delta"]["stop_reason"])]
    return []
