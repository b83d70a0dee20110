"""Tools and reasoning over both edges, streamed and whole, from the request to what the openai client makes of the answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from openai import AsyncOpenAI

from common.text.template import ChatTemplate
from services.gateway.config import GatewayConfig
from tests.actors.both_edges import Edge, Seen, ask, body_of, says
from tests.actors.edge import BUNDLE, EOS, ScriptedCore, ScriptedStream, app_of, ids

TEMPLATE = """{%- if tools %}{{- '<tools>' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}{{- '</tools>' }}{% endif %}
{%- for m in messages %}
{{- '<|' + m.role + '|>' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
{{- '}</tool_call>' }}
{%- endfor %}
{%- if m.tool_call_id %}{{- '#' + m.tool_call_id }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|bot|>' }}
{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
QWEN = msgspec.structs.replace(BUNDLE, template=ChatTemplate(TEMPLATE), max_context=4096)
PLAIN = msgspec.structs.replace(QWEN, reasoning_parser="none")
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
ARGUMENTS = '{"city": "M\\u00fcnchen"}'
CALLS = (
    '<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "weather", "arguments": '
    + ARGUMENTS
    + '}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
HI = {"role": "user", "content": "hi"}

four_ways = pytest.mark.parametrize(
    ("edge", "stream"), [(edge, stream) for edge in ("http", "nats") for stream in (True, False)]
)


def message_of(seen: Seen, index: int = 0) -> dict[str, Any]:
    """A choice's message, put together from chunks as clients do, and its finish reason."""
    message: dict[str, Any] = {}
    for choice in [choice for chunk in seen.chunks for choice in chunk["choices"] if choice["index"] == index]:
        message["finish"] = choice["finish_reason"]
        if "message" in choice:
            return {**choice["message"], "finish": choice["finish_reason"]}
        delta = dict(choice["delta"])
        for piece in delta.pop("tool_calls", []):
            calls = message.setdefault("tool_calls", [])
            if piece["index"] == len(calls):
                calls.append({**piece, "function": dict(piece["function"])})
                del calls[-1]["index"]
            else:
                calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
        for name, text in delta.items():
            before = message.get(name)
            message[name] = text if before is None or text is None else before + text
    return message


def bytewise(text: str) -> Callable[[ScriptedStream], None]:
    """A script that says `text` in one go, ended as a model does."""
    return lambda stream: stream.give([*ids(text), EOS], finish="stop")


async def asked(
    edge: Edge, stream: bool, core: ScriptedCore, *, bundle: Any = QWEN, n: int = 1, settings: Any = None, **arguments: Any
) -> Seen:
    arguments = {"tools": [WEATHER, NOW], **arguments}
    return await ask(edge, core, "chat", body_of("chat", stream, n, **arguments), bundle=bundle, **(settings or {}))


@four_ways
@pytest.mark.parametrize("n", [1, 3])
async def test_calls_reasoning_and_text_reach_the_client_apart(edge: Edge, stream: bool, n: int) -> None:
    core = ScriptedCore(bytewise(CALLS))
    seen = await asked(edge, stream, core, n=n, stream_options={"include_usage": True} if stream else None)
    found: set[str] = set()
    for index in range(n):
        message = message_of(seen, index)
        assert message["role"] == "assistant" and message["content"] == "I look."
        assert message["reasoning_content"] == "hm"
        assert message["finish"] == "tool_calls"
        assert [(call["type"], call["function"]) for call in message["tool_calls"]] == [
            ("function", {"name": "weather", "arguments": ARGUMENTS}),
            ("function", {"name": "now", "arguments": "{}"}),
        ]
        found |= {call["id"] for call in message["tool_calls"]}
    assert len(found) == 2 * n
    reasoning = len(">\nhm\n</think>")  # the token that ends the first mark, and all up to the second
    assert seen.usage["completion_tokens"] == n * (len(ids(CALLS)) + 1)
    assert seen.usage["completion_tokens_details"] == {"reasoning_tokens": n * reasoning}


@four_ways
async def test_content_is_null_where_there_are_calls_alone(edge: Edge, stream: bool) -> None:
    core = ScriptedCore(bytewise('<tool_call>{"name": "now", "arguments": {}}</tool_call>'))
    message = message_of(await asked(edge, stream, core))
    assert message["content"] is None and "reasoning_content" not in message
    message = message_of(await asked(edge, stream, ScriptedCore(bytewise(""))))
    assert message["content"] == ("" if not stream else None) and message["finish"] == "stop"


@four_ways
async def test_a_call_that_is_cut_off_is_delivered_as_far_as_it_went(edge: Edge, stream: bool) -> None:
    core = ScriptedCore(says_cut('<tool_call>{"name": "weather", "arguments": {"city": "M'))
    message = message_of(await asked(edge, stream, core))
    assert message["finish"] == "length"
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"city": "M']


def says_cut(text: str) -> Callable[[ScriptedStream], None]:
    return lambda stream: stream.say(text, finish="length")


@four_ways
async def test_one_call_is_the_last_where_calls_are_not_parallel(edge: Edge, stream: bool) -> None:
    core = ScriptedCore(lambda stream: stream.say(CALLS + "…"))  # it would go on
    message = message_of(await asked(edge, stream, core, parallel_tool_calls=False))
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert message["finish"] == "tool_calls"
    assert not core.live


@four_ways
async def test_stop_strings_end_text_and_never_a_call(edge: Edge, stream: bool) -> None:
    core = ScriptedCore(
        bytewise("<think>stop</think>go" + '<tool_call>{"name": "weather", "arguments": {"city": "stop"}}</tool_call>')
    )
    message = message_of(await asked(edge, stream, core, stop=["stop"]))
    assert message["finish"] == "tool_calls" and message["tool_calls"][0]["function"]["arguments"] == '{"city": "stop"}'
    assert message["reasoning_content"] == "stop" and message["content"] == "go"
    core = ScriptedCore(bytewise("<think>stop</think>go on and stop here"))
    message = message_of(await asked(edge, stream, core, stop=["stop"]))
    assert message["content"] == "go on and " and message["finish"] == "stop"


@four_ways
async def test_log_probabilities_are_of_every_token_that_was_delivered(edge: Edge, stream: bool) -> None:
    seen = await asked(edge, stream, ScriptedCore(bytewise(CALLS)), logprobs=True)
    scores = [choice["logprobs"] for chunk in seen.chunks for choice in chunk["choices"] if choice.get("logprobs")]
    assert "".join(entry["token"] for score in scores for entry in score["content"]) == CALLS
    seen = await asked(edge, stream, ScriptedCore(bytewise("go on stop here")), logprobs=True, stop="stop")
    scores = [choice["logprobs"] for chunk in seen.chunks for choice in chunk["choices"] if choice.get("logprobs")]
    assert "".join(entry["token"] for score in scores for entry in score["content"]).rstrip() == "go on"


@four_ways
async def test_reasoning_can_be_left_out(edge: Edge, stream: bool) -> None:
    core = ScriptedCore(bytewise("<think>hm</think>So."))
    seen = await asked(edge, stream, core, include_reasoning=False, tools=None)
    message = message_of(seen)
    assert message["content"] == "So." and "reasoning_content" not in message
    assert seen.usage["completion_tokens_details"]["reasoning_tokens"] == len(">hm</think>") if not stream else True
    raw = await asked(edge, stream, core, bundle=PLAIN, tools=None)
    assert message_of(raw)["content"] == "<think>hm</think>So."


@four_ways
async def test_without_tools_a_call_is_text(edge: Edge, stream: bool) -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    asks: list[dict[str, Any]] = [{"tools": None}, {"tool_choice": "none"}, {"tools": []}]
    for more in asks:
        message = message_of(await asked(edge, stream, ScriptedCore(bytewise(text)), **more))
        assert message["content"] == text and "tool_calls" not in message and message["finish"] == "stop"


def prompt_of(core: ScriptedCore) -> str:
    return BUNDLE.tokenizer.decode(core.streams[-1].request.prompt)


async def test_the_template_gets_tools_calls_and_results() -> None:
    core = ScriptedCore(says("ok"))
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    messages = [
        HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "20 C"}]},
    ]
    assert (await asked("http", False, core, messages=messages)).error is None
    tools = "".join(json.dumps(tool) for tool in (WEATHER, NOW))
    assert prompt_of(core) == (
        f"<tools>{tools}</tools><|user|>hi<|assistant|>"
        '<tool_call>{"name": "weather", "arguments": {"city": "München"}}</tool_call><|tool|>20 C#call_1<|bot|>'
    )
    await asked("http", False, core, tool_choice="none")
    assert prompt_of(core) == "<|user|>hi<|bot|>"
    special = {**NOW, "function": {"name": "now", "description": "<|end|>"}}
    await asked("http", False, core, tools=[special])
    assert EOS not in core.streams[-1].request.prompt


@pytest.mark.parametrize("content", ["{% if m.content is none %}", "{% if m.content == '' %}", "{% if true %}"])
@pytest.mark.parametrize("sent", [None, ""])
async def test_calls_reach_the_template_in_the_form_it_takes(content: str, sent: str | None) -> None:
    shown = "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    source = "{% for m in messages %}" + content + shown + "{% endif %}{% endfor %}"
    bundle = msgspec.structs.replace(QWEN, template=ChatTemplate(source))
    call = {"id": "call_1", "function": {"name": "weather", "arguments": ARGUMENTS}}
    core = ScriptedCore(says("ok"))
    messages = [HI, {"role": "assistant", "content": sent, "tool_calls": [call]}, HI]
    assert (await asked("http", False, core, bundle=bundle, messages=messages, tools=None)).error is None
    assert prompt_of(core) == 'weather{"city": "München"}'


async def test_a_models_own_template_for_tools_is_used_with_tools() -> None:
    bundle = msgspec.structs.replace(QWEN, named_templates={"tool_use": QWEN.template}, template=BUNDLE.template)
    core = ScriptedCore(says("ok"))
    await asked("http", False, core, bundle=bundle)
    assert prompt_of(core).startswith("<tools>")
    await asked("http", False, core, bundle=bundle, tools=None)
    assert prompt_of(core) == "<|user|>hi<|bot|>"


@pytest.mark.parametrize("edge", ["http", "nats"])
async def test_thinking_is_switched_where_the_template_knows_it(edge: Edge) -> None:
    core = ScriptedCore(bytewise("So."))
    switch = {"enable_thinking": False}
    asks: list[dict[str, Any]] = [switch, {"reasoning_effort": "none"}, {"chat_template_kwargs": switch}]
    for more in asks:
        assert message_of(await asked(edge, False, core, tools=None, **more))["content"] == "So."
        assert prompt_of(core).endswith("</think>\n\n")
    for thinks in (False, True):  # of a model that does not reason
        assert (await asked(edge, False, core, bundle=BUNDLE, tools=None, enable_thinking=thinks)).error is None


async def test_a_field_of_messages_is_no_switch_and_no_place_for_tools() -> None:
    """gpt-oss' template reads `message.thinking`, Phi-4-mini's `message['tools']`: neither says what a request may set."""
    source = "{% for m in messages %}{{ m.thinking or m['tools'] or m.content }}<think>{% endfor %}"
    bundle = msgspec.structs.replace(QWEN, template=ChatTemplate(source), tool_parser="hermes")
    for param, more in (("enable_thinking", {"tools": None, "enable_thinking": False}), ("tools", {})):
        seen = await asked("http", False, ScriptedCore(says("ok")), bundle=bundle, **more)
        assert seen.error is not None and seen.error["param"] == param


async def test_reasoning_that_the_prompt_has_opened_needs_no_mark() -> None:
    source = TEMPLATE.replace("'<|bot|>'", "'<|bot|><think>\\n'")
    bundle = msgspec.structs.replace(QWEN, template=ChatTemplate(source))
    message = message_of(await asked("http", False, ScriptedCore(bytewise("hm\n</think>\n\nSo.")), bundle=bundle, tools=None))
    assert (message["reasoning_content"], message["content"]) == ("hm", "So.")


async def test_an_answer_with_a_form_and_without_tools_has_no_reasoning() -> None:
    source = TEMPLATE.replace("'<|bot|>'", "'<|bot|><think>\\n'")
    bundle = msgspec.structs.replace(QWEN, template=ChatTemplate(source))
    form: dict[str, Any] = {"response_format": {"type": "json_object"}}
    core = ScriptedCore(bytewise("{}"))
    message = message_of(await asked("http", False, core, bundle=bundle, tools=None, **form))
    assert message["content"] == "{}" and "reasoning_content" not in message


@pytest.mark.parametrize("edge", ["http", "nats"])
@pytest.mark.parametrize(
    "more",
    [
        {"messages": [HI, {"role": "assistant", "content": " So it", "prefix": True}]},
        {"messages": [HI, {"role": "assistant", "content": " So it"}], "continue_final_message": True},
        {
            "messages": [HI, {"role": "assistant", "content": " So it"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ],
)
async def test_an_answer_that_the_client_began_goes_on(edge: Edge, more: dict[str, Any]) -> None:
    core = ScriptedCore(bytewise(" is."))
    message = message_of(await asked(edge, False, core, tools=None, **more))
    assert prompt_of(core) == "<|user|>hi<|assistant|> So it"
    assert message["content"] == " is."


MANY = [{"type": "function", "function": {"name": f"f{index}"}} for index in range(10_000)]


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize("edge", ["http", "nats"])
@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"tools": MANY}, "tools"),
        ({"tools": [named("a b")]}, "tools"),
        ({"tools": [named("a" * 65)]}, "tools"),
        ({"tools": [named("")]}, "tools"),
        ({"tools": [named(5)]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": deep(40)}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": "yes"}}]}, "tools[0].function.strict"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 100_000}}]}, "tools"),
        ({"tools": ["f"]}, None),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "now"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice"),
        ({"tool_choice": "required", "min_tokens": 5}, "min_tokens"),
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}] * 129}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a b"}}]}]}, "messages[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": 5}}]}]}, "messages[0]"),
        (
            {"messages": [{"role": "tool", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
        ),
        ({"messages": [HI], "continue_final_message": True}, "continue_final_message"),
        ({"messages": [{"role": "user", "content": "x", "prefix": True}]}, "messages[0].prefix"),
        (
            {
                "messages": [{"role": "assistant", "content": "x"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
            "continue_final_message",
        ),
    ],
)
async def test_what_cannot_be_served_is_a_400_that_names_it(edge: Edge, arguments: dict[str, Any], param: str | None) -> None:
    core = ScriptedCore(says("ok"))
    seen = await asked(edge, False, core, **arguments)
    assert seen.error is not None and seen.error["code"] in ("invalid_parameter", "context_length_exceeded"), seen
    if param is not None:
        assert seen.error["param"] == param
    assert not core.streams


@pytest.mark.parametrize("edge", ["http", "nats"])
async def test_tools_are_refused_where_the_model_knows_none(edge: Edge) -> None:
    core = ScriptedCore(says("ok"))
    for bundle in (BUNDLE, msgspec.structs.replace(QWEN, tool_parser="none")):
        seen = await asked(edge, False, core, bundle=bundle)
        assert seen.error is not None and seen.error["param"] == "tools"
        assert (await asked(edge, False, core, bundle=bundle, tool_choice="none")).error is None
    assert len(core.streams) == 2


async def test_a_thousand_tools_that_fit_are_served() -> None:
    core = ScriptedCore(says("ok"))
    bundle = msgspec.structs.replace(QWEN, max_context=1_000_000)
    tools = [{"type": "function", "function": {"name": f"f{index}", "description": "x" * 500}} for index in range(1000)]
    assert (await asked("http", False, core, bundle=bundle, tools=tools)).error is None
    assert prompt_of(core).count('"description"') == 1000
    assert (await asked("http", False, core, tools=tools)).error is not None


@asynccontextmanager
async def openai(core: ScriptedCore) -> AsyncIterator[AsyncOpenAI]:
    app = app_of(core, GatewayConfig(), bundle=QWEN)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://gateway") as http:
        transport: Any = http
        yield AsyncOpenAI(base_url="http://gateway/v1", api_key="none", http_client=transport, max_retries=0)


async def test_the_openai_client_reads_calls_and_can_send_them_back() -> None:
    core = ScriptedCore(bytewise(CALLS))
    async with openai(core) as client:
        tools: Any = [WEATHER, NOW]
        messages: list[Any] = [HI]
        whole = await client.chat.completions.create(model="Small/Model-1", messages=messages, tools=tools)
        async with client.chat.completions.stream(model="Small/Model-1", messages=messages, tools=tools) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_completion()
        for completion in (whole, streamed):
            choice = completion.choices[0]
            assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
            assert choice.message.to_dict()["reasoning_content"] == "hm"
            calls: list[Any] = list(choice.message.tool_calls or [])
            assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [
                ("function", "weather", ARGUMENTS),
                ("function", "now", "{}"),
            ]
            usage: Any = completion.usage
            assert usage is None or usage.completion_tokens_details.reasoning_tokens > 0
            sent: list[Any] = [HI, choice.message.to_dict(), {"role": "tool", "tool_call_id": calls[0].id, "content": "20 C"}]
            answer = await client.chat.completions.create(model="Small/Model-1", messages=sent, tools=tools)
            assert answer.choices[0].message.tool_calls
        assert "tool_calls.function.arguments.delta" in kinds
