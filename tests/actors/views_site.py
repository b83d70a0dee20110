"""`/v1/responses` and `/v1/messages` over either edge, with what clients make of their events: for the views' tests."""

from __future__ import annotations

import json
from typing import Any

import httpx

from common.protocol import headers
from common.text.bundle import TextBundle
from services.gateway.config import GatewayConfig
from tests.actors.both_edges import Edge, nats_edge
from tests.actors.edge import BUNDLE, ScriptedCore, app_of

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

Event = dict[str, Any]


async def ask(
    edge: Edge, core: ScriptedCore, path: str, body: dict[str, Any], *, bundle: TextBundle = BUNDLE, **settings: Any
) -> list[Event]:
    """The events of a stream, or the one body, or the error's."""
    if edge == "nats":
        async with nats_edge(core, bundle, **settings) as client:
            await client.ask(body, kind=path.rsplit("/", 1)[-1])
            last = await client.final()
            assert (headers.ERROR in last.headers) == ('"error":{' in last.data.decode())
            return [json.loads(reply.data) for reply in client.replies]
    response = await post(core, path, body, bundle=bundle, **settings)
    return sse(response.text) if response.headers["content-type"].startswith("text/event-stream") else [response.json()]


async def post(
    core: ScriptedCore,
    path: str,
    body: dict[str, Any],
    *,
    bundle: TextBundle = BUNDLE,
    fields: dict[str, str] | None = None,
    **settings: Any,
) -> httpx.Response:
    transport = httpx.ASGITransport(app=app_of(core, GatewayConfig(**settings), bundle=bundle))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        return await http.post(path, json=body, headers=fields)


def sse(text: str) -> list[Event]:
    """Server-sent events, each of which has its type as its name."""
    events: list[Event] = []
    for block in text.split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


CALLED = {"function_call": "arguments", "custom_tool_call": "input"}
"""Items that are calls, and the member that says what with."""
NAMED = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
"""What the deltas of an item's text are called."""


def response_of(events: list[Event]) -> Event:
    """What a stream's events add up to, whose order is checked; a whole answer as it is."""
    if "type" not in events[0]:
        return events[0]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert all(event["response"]["status"] == "in_progress" and event["response"]["output"] == [] for event in events[:2])
    items: list[Event] = []
    current: Event | None = None
    text, stage = "", "closed"
    for event in events[2:-1]:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items)
        if kind == "output_item.added":
            assert stage == "closed"
            current, text, stage = event["item"], "", "added"
            assert current is not None and current["status"] == "in_progress"
            assert current.get("content", []) == [] and current.get(CALLED.get(current["type"], ""), "") == ""
            continue
        assert current is not None
        if kind == "output_item.done":
            assert stage == ("done" if current["type"] in CALLED else "part done")
            item = event["item"]
            said = CALLED.get(item["type"], "content")
            assert {**item, "status": 0, said: 0} == {**current, "status": 0, said: 0}
            assert text == (item[said] if item["type"] in CALLED else item["content"][0]["text"])
            items.append(item)
            stage = "closed"
            continue
        assert event["item_id"] == current["id"]
        if kind == "content_part.added":
            assert stage == "added" and event["part"]["text"] == ""
            stage = "part"
        elif kind == "content_part.done":
            assert stage == "done" and event["part"]["text"] == text
            stage = "part done"
        else:
            name, _, end = kind.rpartition(".")
            assert name == NAMED[current["type"]]
            assert stage == ("added" if current["type"] in CALLED else "part")
            if end == "delta":
                assert event["delta"]
                text += event["delta"]
            else:
                assert event[CALLED.get(current["type"], "text")] == text
                stage = "done"
    last = events[-1]
    assert last["type"] == f"response.{last['response']['status']}"
    if last["type"] != "response.failed":
        assert stage == "closed" and last["response"]["output"] == items
    return last["response"]


def message_of(events: list[Event]) -> Event:
    """What a stream's events add up to, whose order is checked; a whole answer as it is."""
    if events[0]["type"] == "message":
        return events[0]
    assert events[0]["type"] == "message_start" and [event["type"] for event in events[-2:]] == [
        "message_delta",
        "message_stop",
    ]
    message = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    names = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
    is_open, pieces = False, ""
    for event in events[1:-2]:
        assert event["index"] == len(message["content"]) - is_open
        if event["type"] == "content_block_start":
            assert not is_open
            is_open, pieces = True, ""
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert is_open
            pieces += event["delta"][names[event["delta"]["type"]]]
        else:
            assert event["type"] == "content_block_stop" and is_open
            is_open = False
            block = message["content"][-1]
            if block["type"] == "tool_use":
                block["input"] = json.loads(pieces) if pieces else {}
            else:
                block[block["type"]] += pieces
    assert not is_open
    end = events[-2]
    return {**message, **end["delta"], "usage": end["usage"]}
