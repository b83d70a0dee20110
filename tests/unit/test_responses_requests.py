"""What `/v1/responses` asks for, as the chat that it is: with the same arguments, and mistakes in its own words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.protocol.errors import InvalidParameter
from services.gateway import objects, openai, tools
from services.gateway.arguments import Notes
from services.gateway.openai import ChatMessage, ChatRequest, ContentPart
from services.gateway.parse import SMALL_BYTES
from services.gateway.views.responses import RESPONSES
from services.gateway.views.responses_body import IGNORED, REFUSED, ResponsesRequest
from tests.unit.parsing import MAX_PROMPT_TOKENS, finish

HI: dict[str, Any] = {"role": "user", "content": "hi"}
CALL: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "42"}
TOOL: dict[str, Any] = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}}


def chat_of(body: dict[str, Any], *, notes: Notes | None = None, padding: int = 0) -> ChatRequest:
    data = json.dumps({"input": "hi", **body}).encode() + b" " * padding
    parsed = finish(RESPONSES.parse(data, max_prompt_tokens=MAX_PROMPT_TOKENS, notes=notes or Notes()))
    assert isinstance(parsed.request, ChatRequest)
    return parsed.request


def refusal(body: dict[str, Any]) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        chat_of(body)
    return caught.value


def call(id: str, name: str = "f", arguments: str = '{"x": 1}') -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_a_string_is_a_users_message_and_instructions_come_first() -> None:
    assert chat_of({"instructions": "be brief"}).messages == [
        ChatMessage("system", content="be brief"),
        ChatMessage("user", content="hi"),
    ]


def test_what_the_model_said_is_one_message_until_somebody_else_speaks() -> None:
    items = [
        HI,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [
            {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
        CALL,
        {**CALL, "call_id": "c2", "arguments": ""},
        RESULT,
        {**RESULT, "call_id": "c2", "output": [{"type": "input_text", "text": "43"}]},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "developer", "content": [{"type": "input_text", "text": "go on"}]},
    ]  # fmt: skip
    notes = Notes()
    assert chat_of({"input": items}, notes=notes).messages == [
        ChatMessage("user", content="hi"),
        ChatMessage(
            "assistant",
            content="I look.",
            tool_calls=[call("c1"), call("c2", arguments="{}")],
            reasoning_content="hm",
        ),
        ChatMessage("tool", content="42", tool_call_id="c1"),
        ChatMessage("tool", content=[ContentPart("text", "43")], tool_call_id="c2"),
        ChatMessage("assistant", content="one"),
        ChatMessage("assistant", content="two"),
        ChatMessage("developer", content=[ContentPart("text", "go on")]),
    ]
    assert notes.text == ""


def test_arguments_have_their_counterparts() -> None:
    schema = {"type": "object"}
    chat = chat_of(
        {
            "max_output_tokens": 7,
            "temperature": 0.5,
            "seed": 3,
            "stop": ["x"],
            "reasoning": {"effort": "low"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}},
            "tools": [TOOL],
            "tool_choice": "none",
            "parallel_tool_calls": False,
        }
    )
    assert (chat.max_completion_tokens, chat.temperature, chat.seed, chat.stop) == (7, 0.5, 3, ["x"])
    assert chat.reasoning_effort == "low" and chat.parallel_tool_calls is False and chat.tool_choice == "none"
    assert chat.response_format == {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert chat.tools == [{"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": 5}, "input", "expected str"),
        ({"input": []}, "input", "empty"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing"),
        ({"input": [{"content": "x"}]}, "input[0].role", "missing"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "'tool'"),
        ({"input": [HI, {"type": "web_search_call"}]}, "input[1].type", "'web_search_call'"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "nothing is stored"),
        ({"input": [HI, RESULT]}, "input[1].call_id", "no call before"),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "c1"}]}, "input[1].output", "missing"),
        ({"input": [{**CALL, "call_id": None}]}, "input[0].call_id", "missing"),
        ({"input": [{**CALL, "name": "a b"}]}, "input[0]", "input[0].name"),
        ({"input": [{**HI, "content": 5}]}, "input[0].content", "expected str"),
        ({"input": [{**HI, "content": [{"type": "input_text"}]}]}, "input[0].content", "input_text"),
        ({"input": [{**HI, "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content", "image_url"),
        ({"input": [{**HI, "content": [{"type": "input_file", "file_id": "x"}]}]}, "input[0].content", "file_id"),
        ({"input": [{**HI, "content": [{"type": "input_audio", "input_audio": {}}]}]}, "input[0].content", "input_audio"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"max_output_tokens": -5}, "max_output_tokens", ">= 1"),
        ({"max_tokens": 5}, "max_tokens", "send max_output_tokens"),
        ({"messages": [HI]}, "messages", "send input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "nothing is stored"),
        ({"conversation": "conv_1"}, "conversation", "nothing is stored"),
        ({"background": True}, "background", "not supported"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"logprobs": True}, "logprobs", "send include"),
        ({"top_logprobs": 2}, "top_logprobs", "message.output_text.logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs", "<= 20"),
        ({"tools": [{"type": "local_shell"}]}, "tools", "'local_shell'"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "not known"),
        ({"tools": [{"type": "namespace", "tools": [TOOL]}]}, "tools[0].name", "missing"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": {}}]}, "tools[0].tools", "a list"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace"}]}]}, "tools", "tools[0].tools[0]"),
        ({"tools": [{"type": "web_search"}, TOOL, {**TOOL, "name": "a b"}]}, "tools", "tools[2].name"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{**TOOL, "parameters": 5}]}]}, "tools", "tools[0].tools[0].p"),
        ({"tools": [{**TOOL, "name": "n__f"}, {"type": "namespace", "name": "n", "tools": [TOOL]}]}, "tools", "'n__f'"),
        ({"tools": [{"type": "custom"}]}, "tools", "tools[0].name is missing"),
        ({"tools": [{"type": "custom", "name": "c", "format": {"type": "xml"}}]}, "tools[0].format", "not known"),
        ({"tools": [{"type": "custom", "name": "c", "format": {"type": "grammar"}}]}, "tools[0].format", "syntax"),
        ({"input": [HI, {"type": "custom_tool_call", "name": "c", "input": "x"}]}, "input[1].call_id", "missing"),
        ({"tools": [{"name": "f"}]}, "tools", "missing"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools", "tools[0].parameters"),
        ({"tools": [TOOL] * 1025}, "tools", "1024"),
        ({"metadata": {"a": 5}}, "metadata", "expected str"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "16"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not supported"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_in_the_views_words(body: dict[str, Any], param: str, words: str) -> None:
    error = refusal(body)
    assert error.param == param and words in str(error)


@pytest.mark.parametrize(
    "body",
    [
        {"store": False, "truncation": "disabled", "background": False, "previous_response_id": None, "include": []},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}, "service_tier": "auto", "top_logprobs": 0},
        {"metadata": {"a": "b"}, "user": "me", "stream_options": {"include_obfuscation": False}},
    ],
)
def test_what_clients_send_by_default_is_not_even_named(body: dict[str, Any]) -> None:
    notes = Notes()
    chat_of(body, notes=notes)
    assert notes.text == ""


def test_what_has_no_effect_is_named() -> None:
    notes = Notes()
    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": "abc"}
    chat_of(
        {
            "store": True,
            "include": ["reasoning.encrypted_content"],
            "reasoning": {"summary": "auto"},
            "input": [HI, reasoning],
            "whatever": 1,
        },
        notes=notes,
    )
    assert set(notes.text.removeprefix("ignored: ").split(", ")) == {
        "store", "include.reasoning.encrypted_content", "reasoning.summary", "input[].encrypted_content", "whatever",
    }  # fmt: skip


def test_the_functions_of_a_namespace_have_its_name_before_theirs() -> None:
    inner = [{**TOOL, "strict": None}, {"type": "custom", "name": "g"}]
    tools = [
        {"type": "namespace", "name": "mcp__a.b__", "tools": inner},
        {"type": "namespace", "name": "n" * 70, "tools": [TOOL]},
    ]
    called = [{**CALL, "namespace": "mcp__a.b__"}, {**CALL, "call_id": "c2", "namespace": "elsewhere"}]
    chat = chat_of(
        {"tools": tools, "tool_choice": {"type": "function", "name": "f", "namespace": "mcp__a.b__"}, "input": called}
    )
    assert [tool["function"]["name"] for tool in chat.tools or []] == ["mcp__a_b__f", "mcp__a_b__g", "f"]
    assert chat.tools is not None and chat.tools[0]["function"]["parameters"] == TOOL["parameters"]
    assert chat.tool_choice == {"type": "function", "function": {"name": "mcp__a_b__f"}}
    assert chat.messages == [ChatMessage("assistant", tool_calls=[call("c1", "mcp__a_b__f"), call("c2", "elsewhere__f")])]


def test_a_custom_tool_is_a_function_of_one_text() -> None:
    lark = {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"}
    digits = {"type": "grammar", "syntax": "regex", "definition": "[0-9]+"}
    tools = [
        {"type": "custom", "name": "plain", "description": "d"},
        {"type": "custom", "name": "parsed", "description": "d", "format": lark},
        {"type": "custom", "name": "digits", "format": digits},
    ]
    said = [
        {"type": "custom_tool_call", "id": "ctc_1", "status": "completed", "call_id": "c1", "name": "plain", "input": 'a "b"'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "42"},
    ]
    chat = chat_of({"tools": tools, "tool_choice": {"type": "custom", "name": "digits"}, "input": [HI, *said]})
    plain, parsed, digit = (tool["function"] for tool in chat.tools or [])
    assert plain["description"] == "d" and plain["parameters"]["properties"] == {"input": {"type": "string"}}
    assert plain["parameters"]["required"] == ["input"]
    assert "start: /a+/" in parsed["description"]
    assert digit["parameters"]["properties"]["input"]["pattern"] == "^(?:[0-9]+)$"
    assert chat.tool_choice == {"type": "function", "function": {"name": "digits"}}
    assert chat.messages[1:] == [
        ChatMessage("assistant", tool_calls=[call("c1", "plain", '{"input":"a \\"b\\""}')]),
        ChatMessage("tool", content="42", tool_call_id="c1"),
    ]


def test_what_only_openais_servers_run_is_left_out_and_named() -> None:
    notes = Notes()
    tools = [{"type": "web_search", "external_web_access": False}, TOOL, {"type": "image_generation"}, {"type": "tool_search"}]
    chat = chat_of({"tools": tools, "tool_choice": "auto"}, notes=notes)
    assert [tool["function"]["name"] for tool in chat.tools or []] == ["f"]
    assert notes.labels == ["tools.web_search", "tools.image_generation", "tools.tool_search"]
    assert "tools.web_search (it is not run here)" in notes.text
    assert chat_of({"tools": [{"type": "web_search_preview_2025_03_11"}]}).tools is None
    with pytest.raises(InvalidParameter, match=r"tools\.web_search has no effect here"):
        chat_of({"tools": tools}, notes=Notes(strict=True))


def test_every_argument_of_a_chat_is_obeyed_refused_or_named() -> None:
    known = {*ResponsesRequest.__struct_fields__, *REFUSED, *IGNORED}
    assert set(ChatRequest.__struct_fields__) <= known


@pytest.mark.parametrize("slice_bytes", [24, 64 * 1024])
def test_a_large_body_is_read_like_a_small_one(slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects.json_slices, "SLICE_BYTES", slice_bytes)
    text = 'ein "Text" \\ \n' * 9
    body = {
        "instructions": text,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": text, "odd": 1}] * 3},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}], "content": None},
            CALL,
            {**RESULT, "output": text, "status": "completed"},
            {"role": "user", "content": text, "strange": True},
        ],
        "tools": [TOOL],
        "reasoning": {"summary": "auto"},
        "metadata": {"a": "b"},
        "unknown": [1],
    }
    small, large = Notes(), Notes()
    assert chat_of(body, notes=small) == chat_of(body, notes=large, padding=SMALL_BYTES)
    assert sorted(small.labels) == sorted(large.labels)
    assert chat_of({"input": text}) == chat_of({"input": text}, padding=SMALL_BYTES)


def test_a_large_body_is_bounded() -> None:
    part = {"type": "input_text", "text": ""}
    for body in ({"input": [HI] * (openai.MAX_MESSAGES + 1)}, {"input": [{**HI, "content": [part] * (openai.MAX_PARTS + 1)}]}):
        assert refusal(body).param == "input"
    assert refusal({"input": [{**HI, "content": [part] * (openai.MAX_PARTS // 2 + 1)}] * 2}).param == "input"


def test_scores_of_the_prompt_have_no_place_in_the_answer_so_they_are_refused() -> None:
    assert chat_of({"prompt_logprobs": None}).prompt_logprobs is None
    assert refusal({"prompt_logprobs": 0}).param == "prompt_logprobs"


def test_arguments_of_a_call_are_bounded_as_in_a_chat() -> None:
    assert chat_of({"input": [{**CALL, "arguments": "x" * tools.MAX_CALL_BYTES}, RESULT]})
    error = refusal({"input": [{**CALL, "arguments": "x" * (tools.MAX_CALL_BYTES + 1)}, RESULT]})
    assert error.param == "input[0]" and str(error) == "input[0].arguments has more than 262144 bytes"
