"""Calls that a request asks for: valid, and the same alone, together, with drafts and after a death; over HTTP and NATS."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import jsonschema
import pytest

from common.protocol import subjects
from tests.chaos.site import FASTER_ENGINE
from tests.e2e.stack import Stack
from tests.e2e.tiny import save_byte_tokenizer
from tests.fixtures.slow import some_slow
from tests.models.oracles import build, save

pytestmark = pytest.mark.timeout(300)

MODEL = "caller"
TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}
{%- for m in messages %}{{ m.content }}{% endfor %}{# <tool_call> #}"""
SCHEMAS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 4}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}} for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "weather"}}
ENGINES = {"simulated": FASTER_ENGINE, "torch": ("--dtype", "float32", "--num-blocks", "200")}
ANSWER = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": ANSWER}}}
Message = dict[str, Any]


def jobs() -> list[dict[str, Any]]:
    """What asks for calls, beside an answer that is free."""
    asks: list[dict[str, Any]] = [
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": NAMED},
        {"tool_choice": "auto", "parallel_tool_calls": False, **FORM},
        {"tool_choice": "none", "max_tokens": 20},
    ]
    return [
        {
            "messages": [{"role": "user", "content": f"Day {seed}"}],
            "tools": TOOLS,
            "max_tokens": 400,
            "seed": seed,
            "temperature": float(seed > 0),
            **ask,
        }
        for seed in range(2)
        for ask in asks
    ]


def check(job: dict[str, Any], message: Message) -> None:
    if job["tool_choice"] == "none":
        return
    calls = message.get("tool_calls") or []
    for call in calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMAS[call["function"]["name"]])
    assert message["finish"] == ("tool_calls" if calls else "stop"), message
    if job["tool_choice"] == "auto" and not calls:
        jsonschema.validate(json.loads(message["content"]), ANSWER)
    else:
        assert len(calls) == 1 and not message["content"]
    assert job["tool_choice"] != NAMED or calls[0]["function"]["name"] == "weather"


async def ask(stack: Stack, job: dict[str, Any], *, gateway: str, stream: bool, begun: anyio.Event | None = None) -> Message:
    """The message of an answer over HTTP, with its finish reason and without the ids of calls."""
    body = {"model": MODEL, **job}
    if not stream:
        response = await stack.client.post(f"{stack.url(gateway)}/v1/chat/completions", json=body)
        return whole(response.json())
    message: Message = {"content": None}
    async for event in stack.stream("/v1/chat/completions", body, gateway=gateway):
        for choice in event["choices"]:
            message["finish"] = choice["finish_reason"]
            if choice["delta"].get("content"):
                message["content"] = (message["content"] or "") + choice["delta"]["content"]
            for piece in choice["delta"].get("tool_calls", []):
                calls = message.setdefault("tool_calls", [])
                if piece["index"] == len(calls):
                    calls.append({"function": {"name": piece["function"]["name"], "arguments": ""}})
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
            if begun is not None and (message["content"] or message.get("tool_calls")):
                begun.set()
    return message


def whole(answer: dict[str, Any]) -> Message:
    choice = answer["choices"][0]
    message: Message = {"content": choice["message"]["content"] or None, "finish": choice["finish_reason"]}
    if choice["message"].get("tool_calls"):
        message["tool_calls"] = [{"function": call["function"]} for call in choice["message"]["tool_calls"]]
    return message


async def together(stack: Stack, gateway: str, *, stream: bool, begun: anyio.Event | None = None) -> list[Message]:
    found: dict[int, Message] = {}

    async def run(index: int, job: dict[str, Any]) -> None:
        found[index] = await ask(stack, job, gateway=gateway, stream=stream, begun=begun)

    async with anyio.create_task_group() as group:
        for index, job in enumerate(jobs()):
            group.start_soon(run, index, job)
    return [found[index] for index in range(len(found))]


@pytest.mark.parametrize("engine", some_slow(["simulated", "torch"], quick=["simulated"]))
async def test_calls_are_valid_and_the_same_whatever_happens(engine: str, nats_server: str, tmp_path: Path) -> None:
    model = tmp_path / MODEL
    save(build("llama"), model)
    save_byte_tokenizer(model, "<|end|>")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    async with Stack(nats_server, tmp_path, flags=("--model", str(model)), engine_flags=ENGINES[engine]) as stack:
        await stack.start("gateway", "--direct-max-tokens", "-1", name="prefill")
        await stack.start("gateway", "--direct-max-tokens", "100000", name="direct")
        await stack.start("prefill")
        await stack.start("decode", "--speculation-tokens", "0")
        await stack.ready()
        expected = [await ask(stack, job, gateway="direct", stream=False) for job in jobs()]
        for job, message in zip(jobs(), expected, strict=True):
            check(job, message)
        assert len({json.dumps(message) for message in expected}) > len(expected) // 2
        for job, message in zip(jobs()[:4], expected, strict=False):
            body = json.dumps({**job, "model": MODEL, "stream": False}).encode()
            reply = await stack.bus.request(subjects.chat(MODEL), body, timeout_s=60)
            assert whole(json.loads(reply.data)) == message

        await stack.start("decode", "--speculation-tokens", "8", "--verify", "always")
        await stack.start("draft")
        await stack.ready()
        for gateway, stream in (("prefill", True), ("direct", False)):
            assert await together(stack, gateway, stream=stream) == expected
        begun = anyio.Event()

        async def kill() -> None:
            await begun.wait()
            stack.kill(max(("decode-0", "decode-1"), key=lambda name: stack.presence(name).running))

        async with anyio.create_task_group() as group:
            group.start_soon(kill)
            assert await together(stack, "prefill", stream=True, begun=begun) == expected
        await stack.clean(within_s=3)
