"""What an answer says, whatever view and way it came by, so that answers can be compared. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

View = Literal["chat", "completions", "responses", "messages"]
PATHS: dict[View, str] = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
LOGPROB_TOLERANCE = 1e-3


class Said(msgspec.Struct, frozen=True):
    """One choice. `calls`: names and arguments. `logprobs`: of its tokens, in order, where they were asked for."""

    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    finish: str = ""
    logprobs: tuple[float, ...] = ()


class Answer(msgspec.Struct, frozen=True):
    """A complete answer. `cached_tokens`: of its prompt, -1 where the answer does not say it."""

    model: str
    choices: tuple[Said, ...]
    cached_tokens: int = -1


class Incomplete(ValueError):
    """The stream ended before the answer did, or its parts contradict each other."""


def whole(view: View, body: dict[str, Any]) -> Answer:
    """Read an answer that came in one piece."""
    if view == "responses":
        return _of_response(body)
    if view == "messages":
        return _of_message(body)
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    return Answer(body["model"], tuple(map(_of_choice, choices)), _cached(body.get("usage")))


def streamed(view: View, events: Sequence[dict[str, Any]]) -> Answer:
    """Read an answer that came as a stream of events.

    :raises Incomplete: its end is missing, or the text of its events is not that of its end.
    """
    if view == "responses":
        return _streamed_response(events)
    if view == "messages":
        return _streamed_message(events)
    return _streamed_choices(events)


def differences(expected: Answer, found: Answer, *, model: str) -> list[str]:
    """Return what is wrong with `found`, in words; nothing if it is what was `expected` of `model`."""
    wrong: list[str] = []
    if found.model != model:
        wrong.append(f"model {found.model!r}, not {model!r}")
    if len(found.choices) != len(expected.choices):
        return [*wrong, f"{len(found.choices)} choices, not {len(expected.choices)}"]
    for number, (ours, theirs) in enumerate(zip(found.choices, expected.choices, strict=True)):
        for name in ("text", "calls", "finish"):
            if getattr(ours, name) != getattr(theirs, name):
                wrong.append(f"choice {number}: {name} {getattr(ours, name)!r}, not {getattr(theirs, name)!r}")
        if len(ours.logprobs) != len(theirs.logprobs) or any(
            abs(a - b) > LOGPROB_TOLERANCE for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)
        ):
            wrong.append(f"choice {number}: other log-probabilities")
    return wrong


def _cached(usage: dict[str, Any] | None) -> int:
    details = (usage or {}).get("prompt_tokens_details")
    return details["cached_tokens"] if details else -1


def _logprobs(found: dict[str, Any] | None) -> tuple[float, ...]:
    if not found:
        return ()
    if found.get("content") is not None:
        return tuple(each["logprob"] for each in found["content"])
    return tuple(value for value in found.get("token_logprobs") or () if value is not None)


def _of_choice(choice: dict[str, Any]) -> Said:
    message = choice.get("message") or {}
    calls = tuple((call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ())
    text = choice["text"] if "text" in choice else message.get("content") or ""
    return Said(text, calls, choice["finish_reason"] or "", _logprobs(choice.get("logprobs")))


def _streamed_choices(events: Sequence[dict[str, Any]]) -> Answer:
    texts: dict[int, str] = {}
    calls: dict[int, dict[int, list[str]]] = {}
    finish: dict[int, str] = {}
    logprobs: dict[int, tuple[float, ...]] = {}
    cached = -1
    for event in events:
        cached = max(cached, _cached(event.get("usage")))
        for choice in event["choices"]:
            index = choice["index"]
            delta = choice.get("delta") or {}
            texts[index] = texts.get(index, "") + (choice.get("text") or delta.get("content") or "")
            logprobs[index] = logprobs.get(index, ()) + _logprobs(choice.get("logprobs"))
            for call in delta.get("tool_calls") or ():
                parts = calls.setdefault(index, {}).setdefault(call["index"], ["", ""])
                parts[0] += call["function"].get("name") or ""
                parts[1] += call["function"].get("arguments") or ""
            if choice["finish_reason"]:
                finish[index] = choice["finish_reason"]
    if not texts or set(finish) != set(texts):
        raise Incomplete(f"{len(finish)} of {len(texts)} choices have an end")
    said = (
        Said(texts[index], tuple((name, text) for name, text in calls.get(index, {}).values()), finish[index], logprobs[index])
        for index in sorted(texts)
    )
    return Answer(events[0]["model"], tuple(said), cached)


def _of_response(body: dict[str, Any]) -> Answer:
    text, calls = "", []
    for item in body["output"]:
        if item["type"] == "message":
            text += "".join(part["text"] for part in item["content"])
        elif item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
    finish = body["status"]
    if body.get("incomplete_details"):
        finish += f": {body['incomplete_details']['reason']}"
    usage = body.get("usage") or {}
    cached = (usage.get("input_tokens_details") or {}).get("cached_tokens", -1)
    return Answer(body["model"], (Said(text, tuple(calls), finish),), cached)


def _streamed_response(events: Sequence[dict[str, Any]]) -> Answer:
    last = events[-1] if events else {}
    if last.get("type") not in ("response.completed", "response.incomplete"):
        raise Incomplete(f"the last event is {last.get('type')}")
    answer = _of_response(last["response"])
    text = _joined(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    if text != answer.choices[0].text:
        raise Incomplete(f"the events have the text {text!r}, the response {answer.choices[0].text!r}")
    return answer


def _of_message(body: dict[str, Any]) -> Answer:
    text = _joined(block["text"] for block in body["content"] if block["type"] == "text")
    calls = tuple((block["name"], _canonical(block["input"])) for block in body["content"] if block["type"] == "tool_use")
    finish = body["stop_reason"] + (f": {body['stop_sequence']}" if body.get("stop_sequence") else "")
    return Answer(body["model"], (Said(text, calls, finish),), (body.get("usage") or {}).get("cache_read_input_tokens", -1))


def _streamed_message(events: Sequence[dict[str, Any]]) -> Answer:
    if not events or events[-1]["type"] != "message_stop":
        raise Incomplete("there is no message_stop")
    message: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "message_start":
            message = dict(event["message"])
        elif event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]) | {"json": ""})
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
            blocks[-1]["text"] += event["delta"]["text"]
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            blocks[-1]["json"] += event["delta"]["partial_json"]
        elif event["type"] == "message_delta":
            message |= event["delta"]
            message["usage"] = {**(message.get("usage") or {}), **(event.get("usage") or {})}
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["json"] or "{}")
    return _of_message({**message, "content": blocks})


def _joined(parts: Iterable[str]) -> str:
    return "".join(parts)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
