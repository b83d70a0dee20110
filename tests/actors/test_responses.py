"""`/v1/responses` over both edges on a scripted core, from the body to what the openai client makes of the answer."""

from __future__ import annotations

import json
from typing import Any

import anyio
import httpx
import msgspec
import pytest
from openai import AsyncOpenAI

from common.protocol import headers
from common.protocol.errors import NoWorkers
from services.gateway.config import GatewayConfig
from tests.actors.both_edges import Edge, nats_edge
from tests.actors.edge import BUNDLE, EOS, AsgiClient, ScriptedCore, app_of, ids, until
from tests.actors.http_client import config, says
from tests.actors.test_answer_events import ARGUMENTS, CALLS, QWEN, bytewise, four_ways
from tests.actors.views_site import RESPONSES, ask, post, response_of, sse

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"type": "function", "name": "now"},
]
HI: dict[str, Any] = {"input": "hi"}


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id", "status")} for item in items]


def a_message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "content": [part]}


@four_ways
async def test_text_is_a_message(edge: Edge, stream: bool) -> None:
    core = ScriptedCore(says("Hello", finish="stop", cached=2))
    events = await ask(edge, core, RESPONSES, {**HI, "instructions": "be", "stream": stream})
    response = response_of(events)
    assert (len(events) > 5) == stream
    assert response["object"] == "response" and response["status"] == "completed" and response["id"].startswith("resp_")
    assert without_ids(response["output"]) == [a_message("Hello")]
    prompt = "<|system|>be<|user|>hi<|bot|>"
    assert core.streams[0].request.prompt == ids(prompt)
    assert response["usage"]["input_tokens"] == len(prompt) and response["usage"]["output_tokens"] == 5
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 2}
    assert not core.live


@four_ways
async def test_reasoning_text_and_calls_are_items(edge: Edge, stream: bool) -> None:
    body = {**HI, "stream": stream, "tools": TOOLS}
    response = response_of(await ask(edge, ScriptedCore(bytewise(CALLS)), RESPONSES, body, bundle=QWEN))
    reasoning = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    assert without_ids(response["output"]) == [
        reasoning,
        a_message("I look."),
        {"type": "function_call", "name": "weather", "arguments": ARGUMENTS},
        {"type": "function_call", "name": "now", "arguments": "{}"},
    ]
    assert [item["id"][:3] for item in response["output"]] == ["rs_", "msg", "fc_", "fc_"]
    assert len({item["id"] for item in response["output"]}) == 4 and response["output"][2]["call_id"]
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert response["tools"] == [{"description": None, "strict": False, "parameters": None, **tool} for tool in TOOLS]


PATCH = 'a "b"\n\u00fc'
AGENT_CALLS = (
    '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "n__weather", "arguments": '
    + ARGUMENTS
    + '}\n</tool_call>\n<tool_call>\n{"name": "patch", "arguments": '
    + json.dumps({"input": PATCH})
    + '}\n</tool_call>\n<tool_call>\n{"name": "patch", "arguments": {"text": 1}}\n</tool_call>'
)
AGENT_TOOLS: list[dict[str, Any]] = [
    {"type": "namespace", "name": "n", "description": "d", "tools": TOOLS},
    {"type": "web_search"},
    {"type": "custom", "name": "patch", "description": "d", "format": {"type": "text"}},
]


@four_ways
async def test_calls_of_namespaces_and_custom_tools_have_the_clients_names(edge: Edge, stream: bool) -> None:
    body = {**HI, "stream": stream, "tools": AGENT_TOOLS}
    response = response_of(await ask(edge, ScriptedCore(bytewise(AGENT_CALLS)), RESPONSES, body, bundle=QWEN))
    assert without_ids(response["output"])[1:] == [
        {"type": "function_call", "name": "weather", "namespace": "n", "arguments": ARGUMENTS},
        {"type": "custom_tool_call", "name": "patch", "input": PATCH},
        {"type": "custom_tool_call", "name": "patch", "input": '{"text": 1}'},
    ]
    assert [item["id"].partition("_")[0] for item in response["output"]] == ["rs", "fc", "ctc", "ctc"]
    assert response["tools"] == AGENT_TOOLS
    function, custom, _ = response["output"][1:]
    again = [
        {"role": "user", "content": "hi"},
        *response["output"],
        {"type": "function_call_output", "call_id": function["call_id"], "output": "1"},
        {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "2"},
    ]
    core = ScriptedCore(says("So."))
    await ask(edge, core, RESPONSES, {**body, "input": again}, bundle=QWEN)
    prompt = QWEN.tokenizer.decode(core.streams[0].request.prompt)
    assert "n__weather" in prompt and "patch" in prompt and "web_search" not in prompt
    assert prompt.count("<|tool|>") == 2


@four_ways
async def test_a_call_of_a_custom_tool_that_was_cut_off_has_what_came(edge: Edge, stream: bool) -> None:
    begun = AGENT_CALLS[: AGENT_CALLS.index("\\n", AGENT_CALLS.index("patch"))]
    body = {**HI, "stream": stream, "tools": AGENT_TOOLS}
    core = ScriptedCore(lambda asked: asked.say(begun, finish="length"))
    response = response_of(await ask(edge, core, RESPONSES, body, bundle=QWEN))
    assert response["status"] == response["output"][-1]["status"] == "incomplete"
    assert response["output"][-1]["type"] == "custom_tool_call" and response["output"][-1]["input"].startswith('{"input": "a')


@four_ways
async def test_an_answer_that_was_cut_off_is_incomplete(edge: Edge, stream: bool) -> None:
    body = {**HI, "stream": stream, "max_output_tokens": 3}
    response = response_of(await ask(edge, ScriptedCore(says("abc")), RESPONSES, body))
    assert response["status"] == "incomplete" and response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete" and response["output"][0]["content"][0]["text"] == "abc"


async def test_levels_of_reasoning_that_a_model_has_not_are_named() -> None:
    body = {**HI, "reasoning": {"effort": "high"}}
    answered = await post(ScriptedCore(says("x")), RESPONSES, body)
    assert answered.headers["warning"] == '299 penstock "ignored: reasoning.effort (this model has no such levels)"'
    refused = await post(ScriptedCore(), RESPONSES, body, strict=True)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "reasoning.effort"


@four_ways
async def test_what_was_asked_for_comes_back(edge: Edge, stream: bool) -> None:
    asked = {
        "instructions": "be", "metadata": {"a": "b"}, "user": "me", "temperature": 0.5, "top_p": 0.9,
        "max_output_tokens": 5, "parallel_tool_calls": False, "tool_choice": "none",
    }  # fmt: skip
    response = response_of(
        await ask(edge, ScriptedCore(says("x")), RESPONSES, {**HI, **asked, "store": True, "stream": stream})
    )
    assert {name: response[name] for name in asked} == asked
    assert response["store"] is False and response["previous_response_id"] is None and response["truncation"] == "disabled"
    assert response["text"] == {"format": {"type": "text"}} and response["error"] is None


async def test_what_fails_before_the_first_token_has_a_status_of_its_own() -> None:
    core = ScriptedCore(lambda stream: stream.say("ab", error=NoWorkers("none")))
    refused = await post(core, RESPONSES, {**HI, "stream": True})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "no_workers"
    async with nats_edge(core, BUNDLE) as client:
        await client.ask(HI, kind="responses")
        await client.final()
        client.check_error("no_workers")


async def test_a_stream_that_fails_on_its_way_says_so_in_its_last_event() -> None:
    core = ScriptedCore()
    request = AsgiClient(app_of(core, config()), RESPONSES, {**HI, "stream": True})
    async with anyio.create_task_group() as group:
        group.start_soon(request.run)
        stream = await core.nth(0)
        stream.say("Hel")
        await until(lambda: b"Hel" in request.body)
        stream.say("", error=NoWorkers("none"))
        await until(lambda: request.done)
        group.cancel_scope.cancel()
    response = response_of(sse(request.body.decode()))
    assert response["status"] == "failed" and response["error"] == {"code": "no_workers", "message": "none"}
    assert response["output"][0]["content"][0]["text"] == "Hel" and response["output"][0]["status"] == "incomplete"
    assert not core.live


async def test_a_client_that_leaves_frees_its_request() -> None:
    core = ScriptedCore()
    request = AsgiClient(app_of(core, config()), RESPONSES, {**HI, "stream": True})
    async with anyio.create_task_group() as group:
        group.start_soon(request.run)
        (await core.nth(0)).say("Hel")
        await until(lambda: b"Hel" in request.body)
        request.hang_up()
        await until(lambda: not core.live)
        group.cancel_scope.cancel()


@four_ways
async def test_a_mistake_found_behind_the_view_is_in_its_words(edge: Edge, stream: bool) -> None:
    [body] = await ask(edge, ScriptedCore(), RESPONSES, {**HI, "max_output_tokens": 10**6, "stream": stream})
    assert body["error"]["param"] == "max_output_tokens" and "max_output_tokens can be at most" in body["error"]["message"]
    assert body["error"]["code"] == "context_length_exceeded"
    [body] = await ask(edge, ScriptedCore(), RESPONSES, {**HI, "input": "x " * 900, "stream": stream})
    assert body["error"]["param"] == "input" and body["error"]["message"].startswith("the prompt has ")
    [body] = await ask(edge, ScriptedCore(), RESPONSES, {**HI, "chat_template_kwargs": {"messages": 1}, "stream": stream})
    assert body["error"]["param"] == "chat_template_kwargs"
    [body] = await ask(edge, ScriptedCore(), RESPONSES, {**HI, "text": {"format": {"type": "xml"}}, "stream": stream})
    assert body["error"]["param"] == "text.format.type"
    [body] = await ask(edge, ScriptedCore(), RESPONSES, {"input": "x" * 5000, "stream": stream})
    assert body["error"]["param"] == "input"


async def test_what_is_kept_for_the_end_of_a_stream_is_bounded_with_all_answers() -> None:
    core = ScriptedCore(lambda stream: stream.say("x" * 400, finish="stop"))
    many = {**HI, "tools": [{"type": "function", "name": "f", "description": "d" * 900}] * 200}
    bundle = msgspec.structs.replace(QWEN, max_context=10**6)
    for edge in ("http", "nats"):
        [refused] = await ask(edge, core, RESPONSES, {**many, "stream": True}, bundle=bundle, max_collected_bytes=100_000)
        assert refused["error"]["code"] == "overloaded"
    assert not core.live


async def test_the_openai_client_reads_streams_and_bodies() -> None:
    core = ScriptedCore(bytewise(CALLS))
    app = app_of(core, GatewayConfig(), bundle=QWEN)
    http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway")
    tools: Any = TOOLS
    async with AsyncOpenAI(api_key="x", base_url="http://gateway/v1", http_client=http) as client:
        async with client.responses.stream(model="Small/Model-1", input="hi", tools=tools) as stream:
            async for _ in stream:
                pass
            streamed = await stream.get_final_response()
        whole = await client.responses.create(model="Small/Model-1", input="hi", tools=tools)
        assert streamed.output_text == whole.output_text == "I look."
        assert [item.type for item in streamed.output] == [item.type for item in whole.output]
        assert streamed.output[2].to_dict()["arguments"] == ARGUMENTS
        again: Any = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in whole.output)]
        again += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "42"}
            for item in whole.output
            if item.type == "function_call"
        ]
        core.streams.clear()
        raw = await client.responses.with_raw_response.create(model="Small/Model-1", input=again, tools=tools)
        assert "warning" not in raw.headers
        prompt = BUNDLE.tokenizer.decode(core.streams[-1].request.prompt)
        assert prompt.count("<|assistant|>I look.<tool_call>") == 1 and prompt.count("<|tool|>42#") == 2


async def test_the_openai_client_reads_calls_of_namespaces_and_custom_tools() -> None:
    app = app_of(ScriptedCore(bytewise(AGENT_CALLS)), GatewayConfig(), bundle=QWEN)
    http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway")
    tools: Any = AGENT_TOOLS
    async with AsyncOpenAI(api_key="x", base_url="http://gateway/v1", http_client=http) as client:
        whole = await client.responses.create(model="Small/Model-1", input="hi", tools=tools)
        streamed: Any = None
        async for event in await client.responses.create(model="Small/Model-1", input="hi", tools=tools, stream=True):
            streamed = event.response if event.type == "response.completed" else streamed
    for response in (whole, streamed):
        items: Any = response.output
        function, custom, _ = items[1:]
        assert (function.type, function.name, function.to_dict()["namespace"]) == ("function_call", "weather", "n")
        assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "patch", PATCH)


async def test_a_prompt_can_be_counted() -> None:
    answer = (await post(ScriptedCore(), f"{RESPONSES}/input_tokens", {"input": "hi"})).json()
    assert answer == {"object": "response.input_tokens", "input_tokens": len("<|user|>hi<|bot|>")}


async def test_over_nats_the_last_message_is_the_whole_response() -> None:
    core = ScriptedCore(lambda stream: stream.give([*ids("Hello"), EOS], finish="stop"))
    async with nats_edge(core, BUNDLE) as client:
        await client.ask(HI, kind="responses", **{headers.REQUEST_ID: "mine-1"})
        last = await client.final()
    response = json.loads(last.data)["response"]
    assert response["id"] == "mine-1" and response["output"][0]["content"][0]["text"] == "Hello"
    assert [reply.headers[headers.SEQUENCE] for reply in client.replies] == [str(n) for n in range(len(client.replies))]


@pytest.mark.parametrize("name", ["authorization", "x-api-key"])
async def test_either_header_carries_the_key(name: str) -> None:
    right = {name: "Bearer secret" if name == "authorization" else "secret"}
    answer = await post(ScriptedCore(says("x")), RESPONSES, HI, fields=right, api_key="secret")
    assert answer.status_code == 200
    for wrong in ({}, {name: "Bearer nope"}, {name: "nope"}):
        answer = await post(ScriptedCore(), RESPONSES, HI, fields=wrong, api_key="secret")
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"


SCORED: dict[str, Any] = {**HI, "include": ["message.output_text.logprobs"], "top_logprobs": 2}


def texts_of(response: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for item in response["output"] if item["type"] == "message" for part in item["content"]]


@four_ways
async def test_log_probabilities_of_the_text_are_told_when_they_are_asked_for(edge: Edge, stream: bool) -> None:
    events = await ask(edge, ScriptedCore(says("Hello", finish="stop")), RESPONSES, {**SCORED, "stream": stream})
    response = response_of(events)
    (part,) = texts_of(response)
    assert response["top_logprobs"] == 2
    assert "".join(entry["token"] for entry in part["logprobs"]) == "Hello"
    for entry in part["logprobs"]:
        assert entry["logprob"] == -0.25 and bytes(entry["bytes"]).decode() == entry["token"]
        assert [other["logprob"] for other in entry["top_logprobs"]] == [-1.0, -2.0]
    if stream:
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert all("".join(entry["token"] for entry in event["logprobs"]) == event["delta"] for event in deltas)
        (done,) = (event for event in events if event["type"] == "response.output_text.done")
        assert done["logprobs"] == part["logprobs"] == [entry for event in deltas for entry in event["logprobs"]]


@four_ways
async def test_reasoning_and_calls_have_no_log_probabilities(edge: Edge, stream: bool) -> None:
    body = {**SCORED, "stream": stream, "tools": TOOLS}
    response = response_of(await ask(edge, ScriptedCore(bytewise(CALLS)), RESPONSES, body, bundle=QWEN))
    assert {item["type"] for item in response["output"]} == {"reasoning", "message", "function_call"}
    for part in texts_of(response):
        told = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"]).decode()
        assert told.strip() == part["text"].strip() != ""


async def test_the_openai_client_reads_log_probabilities() -> None:
    app = app_of(ScriptedCore(says("Hello", finish="stop")), GatewayConfig())
    http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway")
    asked: dict[str, Any] = {"model": "Small/Model-1", "input": "hi", "include": SCORED["include"], "top_logprobs": 1}
    async with AsyncOpenAI(api_key="x", base_url="http://gateway/v1", http_client=http) as client:
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            entries = [
                entry async for event in stream if event.type == "response.output_text.delta" for entry in event.logprobs
            ]
            streamed = await stream.get_final_response()
    assert [entry.logprob for entry in entries] == [-0.25] * 5
    for response in (whole, streamed):
        (message,) = response.output
        assert message.type == "message"
        part = message.content[0]
        assert part.type == "output_text"
        scores = part.logprobs or []
        assert "".join(entry.token for entry in scores) == "Hello" and len(scores[0].top_logprobs) == 1
