"""What `/v1/messages` asks for, as the chat that it is: with the same arguments, and mistakes in its own words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from common.protocol.errors import InvalidParameter
from services.gateway import objects, openai
from services.gateway.arguments import Notes
from services.gateway.openai import ChatMessage, ChatRequest, ContentPart
from services.gateway.parse import SMALL_BYTES
from services.gateway.views.messages import MESSAGES, MESSAGES_COUNT
from services.gateway.views.messages_body import IGNORED, REFUSED, MessagesRequest
from tests.unit.parsing import MAX_PROMPT_TOKENS, finish

HI: dict[str, Any] = {"role": "user", "content": "hi"}
USE: dict[str, Any] = {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "t1", "content": "42"}
TOOL: dict[str, Any] = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


def chat_of(
    body: dict[str, Any], *, notes: Notes | None = None, padding: int = 0, view: Any = MESSAGES, raw: bytes | None = None
) -> ChatRequest:
    data = raw or json.dumps({"max_tokens": 9, "messages": [HI], **body}).encode() + b" " * padding
    parsed = finish(view.parse(data, max_prompt_tokens=MAX_PROMPT_TOKENS, notes=notes or Notes()))
    assert isinstance(parsed.request, ChatRequest)
    return parsed.request


def refusal(body: dict[str, Any]) -> InvalidParameter:
    with pytest.raises(InvalidParameter) as caught:
        chat_of(body)
    return caught.value


def said(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": None}


def test_blocks_become_messages() -> None:
    messages = [
        said(text("a"), text("b")),
        said({"type": "thinking", "thinking": "hm", "signature": "x"}, text("I look."), USE, role="assistant"),
        said(RESULT, text("c")),
        said({**USE, "id": "t2", "input": {}}, role="assistant"),
        said({**RESULT, "tool_use_id": "t2", "content": [text("43")]}, {**RESULT, "content": None}),
    ]
    notes = Notes()
    assert chat_of({"messages": messages, "system": [text("be"), text("brief")]}, notes=notes).messages == [
        ChatMessage("system", content=[ContentPart("text", "be"), ContentPart("text", "brief")]),
        ChatMessage("user", content=[ContentPart("text", "a"), ContentPart("text", "b")]),
        ChatMessage("assistant", content="I look.", tool_calls=[call("t1", '{"x": 1}')], reasoning_content="hm"),
        ChatMessage("tool", content="42", tool_call_id="t1"),
        ChatMessage("user", content=[ContentPart("text", "c")]),
        ChatMessage("assistant", tool_calls=[call("t2", "{}")]),
        ChatMessage("tool", content=[ContentPart("text", "43")], tool_call_id="t2"),
        ChatMessage("tool", content="", tool_call_id="t1"),
    ]
    assert notes.text == ""


def call(id: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_arguments_have_their_counterparts() -> None:
    schema = {"type": "object"}
    chat = chat_of(
        {
            "system": "be brief",
            "stop_sequences": ["x"],
            "top_k": 3,
            "temperature": 0.5,
            "tools": [TOOL],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": schema}},
        }
    )
    assert chat.messages[0] == ChatMessage("system", content="be brief")
    assert (chat.max_tokens, chat.stop, chat.top_k, chat.temperature) == (9, ["x"], 3, 0.5)
    assert chat.tools == [{"type": "function", "function": {"name": "f", "description": "d", "parameters": schema}}]
    assert chat.tool_choice == "auto" and chat.parallel_tool_calls is False and chat.reasoning_effort == "low"
    assert chat.response_format == {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    assert chat_of({"tool_choice": {"type": "none"}}).tool_choice == "none"


def test_a_float_without_a_fraction_is_an_integer() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024.0, "display": "full"}
    request = chat_of({"max_tokens": 2e3, "top_k": 5.0, "thinking": thinking})
    assert repr((request.max_tokens, request.top_k)) == "(2000, 5)"
    assert refusal({"max_tokens": 9.5}).param == "max_tokens"


def test_thinking_switches_reasoning() -> None:
    on = chat_of({"thinking": {"type": "enabled", "budget_tokens": 8}})
    off = chat_of({"thinking": {"type": "disabled"}})
    assert (on.enable_thinking, on.reasoning_effort) == (True, None)
    assert (off.enable_thinking, off.reasoning_effort, off.include_reasoning) == (None, "none", False)
    for body in ({}, {"thinking": {"type": "adaptive"}}):
        left = chat_of(body)
        assert (left.enable_thinking, left.reasoning_effort, left.include_reasoning) == (None, None, None)


def test_an_answer_that_was_begun_is_continued() -> None:
    chat = chat_of({"messages": [HI, {"role": "assistant", "content": "It is"}]})
    assert chat.continues and chat.messages[-1].content == "It is"
    assert not chat_of({"messages": [HI, {"role": "assistant", "content": ""}]}).continues
    assert not chat_of({}).continues
    error = refusal({"messages": [HI, said(USE, role="assistant")]})
    assert error.param == "messages"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"max_tokens": None}, "max_tokens", "missing"),
        ({"max_tokens": -1}, "max_tokens", ">= 1"),
        ({"messages": []}, "messages", "empty"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages", "empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'tool'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "empty"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "expected str"),
        ({"messages": [said({"type": "image", "source": {}})]}, "messages[0].content[0]", "source"),
        ({"messages": [said({"type": "document", "source": {}})]}, "messages[0].content[0]", "source"),
        ({"messages": [said({"type": "search_result"})]}, "messages[0].content[0]", "'search_result'"),
        ({"messages": [said(text("x"), RESULT)]}, "messages[0].content[1].tool_use_id", "no tool_use before"),
        (
            {"messages": [HI, said(USE, role="assistant"), said({**RESULT, "content": [{"type": "image", "source": {}}]})]},
            "messages[2].content[0].content[0]",
            "source",
        ),
        ({"messages": [HI, said({**USE, "input": "x"}, role="assistant"), HI]}, "messages[1].content[0].input", "object"),
        ({"messages": [HI, said({**USE, "id": None}, role="assistant"), HI]}, "messages[1].content[0].id", "missing"),
        ({"messages": [HI, said({**USE, "name": "a b"}, role="assistant"), HI]}, "messages[1].content[0]", "].name"),
        ({"system": 5}, "system", "expected str"),
        ({"system": [{"type": "image"}]}, "system[0]", "'image'"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens", ">= 1"),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking.budget_tokens", "less than max_tokens"),
        ({"thinking": {"type": "what"}}, "thinking.type", "what"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "missing"),
        ({"tools": [{**TOOL, "name": "a b"}]}, "tools", "tools[0].name"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools", "bash_20250124"),
        ({"tools": [TOOL] * 1025}, "tools", "1024"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "missing"),
        ({"tool_choice": {"type": "what"}}, "tool_choice.type", "what"),
        ({"tool_choice": "auto"}, "tool_choice", "object"),
        ({"stop_sequences": [""]}, "stop_sequences[0]", "length"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences", "16"),
        ({"stop_sequences": ["x"], "stop": "y"}, "stop", "send stop_sequences"),
        ({"mcp_servers": [{}]}, "mcp_servers", "not supported"),
        ({"instructions": "x"}, "instructions", "send system"),
        ({"response_format": {"type": "json_object"}}, "response_format", "output_config"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_in_the_views_words(body: dict[str, Any], param: str, words: str) -> None:
    error = refusal(body)
    assert error.param == param and words in str(error)


def test_what_clients_send_by_default_is_not_even_named() -> None:
    notes = Notes()
    body = {
        "system": "",
        "metadata": {},
        "tools": [],
        "stop_sequences": [],
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    chat = chat_of(body, notes=notes)
    assert notes.text == "" and (chat.messages, chat.tools, chat.stop) == ([ChatMessage("user", content="hi")], None, None)
    assert refusal({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}).param == "context_management"


def test_what_has_no_effect_is_named() -> None:
    notes = Notes()
    messages = [
        said({"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}),
        said({"type": "redacted_thinking", "data": "abc"}, USE, role="assistant"),
        said({**RESULT, "is_error": True}),
    ]
    chat_of(
        {"messages": messages, "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 5}, "odd": 1},
        notes=notes,
    )
    assert set(notes.text.removeprefix("ignored: ").split(", ")) == {
        "metadata", "odd", "thinking.budget_tokens",
        "messages[].content[].cache_control", "messages[].content[].data", "messages[].content[].is_error",
    }  # fmt: skip


def test_a_count_needs_no_max_tokens() -> None:
    body = json.dumps({"messages": [HI], "tools": [TOOL]}).encode()
    assert chat_of({}, raw=body, view=MESSAGES_COUNT).messages == [ChatMessage("user", content="hi")]


def test_every_argument_of_a_chat_is_obeyed_refused_or_named() -> None:
    known = {*MessagesRequest.__struct_fields__, *REFUSED, *IGNORED}
    assert set(ChatRequest.__struct_fields__) <= known


@pytest.mark.parametrize("slice_bytes", [24, 64 * 1024])
def test_a_large_body_is_read_like_a_small_one(slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects.json_slices, "SLICE_BYTES", slice_bytes)
    long = 'ein "Text" \\ \n' * 9
    body = {
        "system": [text(long)],
        "messages": [
            {"role": "user", "content": long},
            said({"type": "thinking", "thinking": long, "signature": "s"}, {**USE, "odd": 1}, role="assistant"),
            said({**RESULT, "content": [text(long), text("y")]}, {**RESULT, "content": long}, {**text(long), "odd": 1}),
        ],
        "tools": [TOOL],
        "thinking": {"type": "disabled", "odd": 2},
        "unknown": [1],
    }
    small, large = Notes(), Notes()
    assert chat_of(body, notes=small) == chat_of(body, notes=large, padding=SMALL_BYTES)
    assert sorted(small.labels) == sorted(large.labels)


def test_a_large_body_is_bounded() -> None:
    for messages in (
        [HI] * (openai.MAX_MESSAGES + 1),
        [said(*[text("")] * (openai.MAX_PARTS + 1))],
        [said(*[text("")] * (openai.MAX_PARTS // 2 + 1))] * 2,
        [HI, said(USE, role="assistant"), said({**RESULT, "content": [text("")] * (openai.MAX_PARTS + 1)})],
    ):
        assert refusal({"messages": messages}).param == "messages"


@pytest.mark.parametrize("padding", [0, SMALL_BYTES])
def test_an_input_that_is_not_utf_8_is_refused(padding: int) -> None:
    raw = json.dumps({"max_tokens": 9, "messages": [said(USE, role="assistant"), HI]}).encode().replace(b'"x"', b'"\xff"')
    with pytest.raises(InvalidParameter, match="UTF-8"):
        chat_of({}, raw=raw + b" " * padding)


def test_scores_of_the_prompt_have_no_place_in_the_answer_so_they_are_refused() -> None:
    assert chat_of({"prompt_logprobs": None}).prompt_logprobs is None
    assert refusal({"prompt_logprobs": 0}).param == "prompt_logprobs"
