"""`/v1/messages` over both edges on a scripted core."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from common.protocol.errors import NoWorkers
from tests.actors.both_edges import Edge
from tests.actors.edge import MAX_CONTEXT, AsgiClient, ScriptedCore, app_of, ids, until
from tests.actors.http_client import config, says
from tests.actors.test_answer_events import ARGUMENTS, CALLS, PLAIN, QWEN, bytewise, four_ways
from tests.actors.views_site import MESSAGES, ask, message_of, post

TOOLS: list[dict[str, Any]] = [
    {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"name": "now", "input_schema": {"type": "object"}},
]
HI: dict[str, Any] = {"max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}


@four_ways
async def test_text_is_a_block(edge: Edge, stream: bool) -> None:
    core = ScriptedCore(says("Hello", finish="stop", cached=2))
    events = await ask(edge, core, MESSAGES, {**HI, "system": "be", "stream": stream})
    message = message_of(events)
    assert (len(events) > 5) == stream
    assert message["id"].startswith("msg_") and message["role"] == "assistant" and message["model"] == "Small/Model-1"
    assert message["content"] == [{"type": "text", "text": "Hello"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    prompt = "<|system|>be<|user|>hi<|bot|>"
    assert core.streams[0].request.prompt == ids(prompt)
    expected = {"input_tokens": len(prompt) - 2, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 2}
    assert message["usage"] == {**expected, "output_tokens": 5}
    if stream:
        assert events[0]["message"]["usage"] == {**expected, "output_tokens": 0}
    assert not core.live


@four_ways
async def test_thinking_text_and_tool_use_are_blocks(edge: Edge, stream: bool) -> None:
    body = {**HI, "stream": stream, "tools": TOOLS}
    message = message_of(await ask(edge, ScriptedCore(bytewise(CALLS)), MESSAGES, body, bundle=QWEN))
    assert message["content"][:2] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "I look."},
    ]
    calls = message["content"][2:]
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "weather", {"city": "München"}),
        ("tool_use", "now", {}),
    ]
    assert len({call["id"] for call in calls}) == 2
    assert message["stop_reason"] == "tool_use" and "\\u00fc" in ARGUMENTS
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] > 0


@four_ways
async def test_why_an_answer_ended(edge: Edge, stream: bool) -> None:
    body = {**HI, "stream": stream, "stop_sequences": ["wo", "rld"]}
    message = message_of(await ask(edge, ScriptedCore(says("Hello world", finish="stop")), MESSAGES, body))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "wo")
    assert message["content"] == [{"type": "text", "text": "Hello "}]
    message = message_of(await ask(edge, ScriptedCore(says("Hello")), MESSAGES, body))
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    message = message_of(await ask(edge, ScriptedCore(says("Hello")), MESSAGES, {**body, "max_tokens": MAX_CONTEXT}))
    assert (message["stop_reason"], message["stop_sequence"]) == ("model_context_window_exceeded", None)
    message = message_of(await ask(edge, ScriptedCore(bytewise("<think>wo</think>a world")), MESSAGES, body, bundle=QWEN))
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "wo")
    assert message["content"][-1] == {"type": "text", "text": "a "}
    one = {**HI, "stream": stream, "tools": TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    message = message_of(await ask(edge, ScriptedCore(bytewise(CALLS)), MESSAGES, one, bundle=QWEN))
    assert [block.get("name") for block in message["content"]] == [None, None, "weather"]


@four_ways
async def test_thinking_is_switched_where_the_template_can(edge: Edge, stream: bool) -> None:
    core = ScriptedCore(bytewise("So."))
    off = {**HI, "stream": stream, "thinking": {"type": "disabled"}}
    message = message_of(await ask(edge, core, MESSAGES, off, bundle=QWEN))
    assert message["content"] == [{"type": "text", "text": "So."}]
    assert core.streams[-1].request.prompt == ids("<|user|>hi<|bot|><think>\n\n</think>\n\n")
    on = {**HI, "stream": stream, "thinking": {"type": "enabled", "budget_tokens": 50}}
    await ask(edge, core, MESSAGES, on, bundle=QWEN)
    assert core.streams[-1].request.prompt == ids("<|user|>hi<|bot|>")
    for more in (on, {**HI, "stream": stream, "thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}):
        assert message_of(await ask(edge, core, MESSAGES, more))["content"] == [{"type": "text", "text": "So."}]
    [refused] = await ask(edge, core, MESSAGES, on, strict=True)
    assert refused["error"]["type"] == "invalid_request_error" and "thinking" in refused["error"]["message"]
    assert message_of(await ask(edge, core, MESSAGES, off))["content"] == [{"type": "text", "text": "So."}]
    assert message_of(await ask(edge, core, MESSAGES, off, bundle=PLAIN))["content"] == [{"type": "text", "text": "So."}]


@four_ways
async def test_an_answer_that_was_begun_is_continued(edge: Edge, stream: bool) -> None:
    core = ScriptedCore(says(" Paris", finish="stop"))
    begun = {"role": "assistant", "content": [{"type": "text", "text": "It is"}]}
    message = message_of(await ask(edge, core, MESSAGES, {**HI, "messages": [*HI["messages"], begun], "stream": stream}))
    assert message["content"] == [{"type": "text", "text": " Paris"}]
    assert core.streams[0].request.prompt == ids("<|user|>hi<|assistant|>It is")


@pytest.mark.parametrize(
    ("body", "settings", "status", "kind"),
    [
        ({**HI, "max_tokens": 0}, {}, 400, "invalid_request_error"),
        ({**HI, "model": "none"}, {}, 404, "not_found_error"),
        ({**HI, "system": "x" * 2000}, {"max_body_bytes": 1024}, 413, "request_too_large"),
        (HI, {"max_requests": 0}, 429, "rate_limit_error"),
        (HI, {"api_key": "secret"}, 401, "authentication_error"),
    ],
)
async def test_an_error_is_anthropics(body: dict[str, Any], settings: dict[str, Any], status: int, kind: str) -> None:
    answer = await post(ScriptedCore(), MESSAGES, body, **settings)
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert error["error"]["message"] and answer.headers["request-id"] == answer.headers["x-request-id"]
    if status != 401:
        core = ScriptedCore()
        [told] = await ask("nats", core, MESSAGES, body, **settings)
        assert told["error"]["type"] == kind


async def test_an_error_before_the_first_token_has_a_status_and_one_after_it_an_event() -> None:
    refused = await post(
        ScriptedCore(lambda stream: stream.say("ab", error=NoWorkers("none"))), MESSAGES, {**HI, "stream": True}
    )
    assert refused.status_code == 503 and refused.json()["error"]["type"] == "overloaded_error"
    core = ScriptedCore()
    request = AsgiClient(app_of(core, config(sse_keepalive_s=0.05)), MESSAGES, {**HI, "stream": True})
    async with anyio.create_task_group() as group:
        group.start_soon(request.run)
        stream = await core.nth(0)
        stream.say("Hel")
        await until(lambda: b'event: ping\ndata: {"type":"ping"}\n\n' in request.body)
        stream.say("", error=NoWorkers("none"))
        await until(lambda: request.done)
        group.cancel_scope.cancel()
    last = request.body.decode().split("\n\n")[-2]
    assert last == (
        'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"none","code":"no_workers"}}'
    )
    assert not core.live


async def test_either_header_carries_the_key() -> None:
    for fields in ({"x-api-key": "secret", "anthropic-version": "2023-06-01"}, {"authorization": "Bearer secret"}):
        answer = await post(ScriptedCore(says("x")), MESSAGES, HI, fields=fields, api_key="secret")
        assert answer.status_code == 200
    answer = await post(ScriptedCore(), MESSAGES, HI, fields={"x-api-key": "nope"}, api_key="secret")
    assert answer.status_code == 401


async def test_a_prompt_can_be_counted() -> None:
    core = ScriptedCore()
    body = {"messages": HI["messages"], "system": "be"}
    answer = (await post(core, f"{MESSAGES}/count_tokens", body)).json()
    assert answer == {"input_tokens": len("<|system|>be<|user|>hi<|bot|>")}
    assert not core.streams
    with_tools = (await post(core, f"{MESSAGES}/count_tokens", {**body, "tools": TOOLS}, bundle=QWEN)).json()
    assert with_tools["input_tokens"] > answer["input_tokens"]
    warned = await post(core, f"{MESSAGES}/count_tokens", {**body, "metadata": {"user_id": "x"}})
    assert warned.headers["warning"] == '299 penstock "ignored: metadata"'
    refused = await post(core, f"{MESSAGES}/count_tokens", {"messages": []})
    assert refused.status_code == 400 and refused.json()["error"]["type"] == "invalid_request_error"
    assert (await post(core, f"{MESSAGES}/count_tokens", body, api_key="secret")).status_code == 401
