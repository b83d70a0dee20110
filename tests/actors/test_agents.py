"""Requests as coding agents send them, with fewer tools and shorter texts, are answered by models without their extras."""

from __future__ import annotations

from typing import Any

import pytest

from tests.actors.both_edges import Edge
from tests.actors.edge import MAX_CONTEXT, ScriptedCore
from tests.actors.http_client import says
from tests.actors.test_answer_events import PLAIN, bytewise
from tests.actors.views_site import MESSAGES, RESPONSES, ask, message_of, post, response_of

CHAT = "/v1/chat/completions"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"cmd": {"type": "string"}},
    "required": ["cmd"],
    "additionalProperties": False,
}

CODEX: dict[str, Any] = {  # 0.171
    "model": "Small/Model-1",
    "stream": True,
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "You are"}]},
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "description": "d", "strict": False, "parameters": SCHEMA},
        {
            "type": "namespace",
            "name": "multi_agent_v1",
            "description": "d",
            "tools": [{"type": "function", "name": "close_agent", "description": "d", "strict": False, "parameters": SCHEMA}],
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "key",
    "client_metadata": {"session_id": "1"},
}
CLAUDE_CODE: dict[str, Any] = {  # 2.1.197
    "model": "Small/Model-1",
    "max_tokens": PLAIN.max_context - 50,  # 32,000 of a context of 32,768
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197;"},
        {"type": "text", "text": "You are", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "system", "content": "Available agent types"},
    ],
    "tools": [
        {"name": "Bash", "description": "d", "input_schema": {"$schema": "http://json-schema.org/draft-07/schema#", **SCHEMA}}
    ],
    "metadata": {"user_id": "{}"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
CALL = '<tool_call>\n{"name": "%s", "arguments": {"cmd": "ls"}}\n</tool_call>'


@pytest.mark.parametrize("edge", ["http", "nats"])
async def test_codex_is_answered_and_gets_calls_by_its_names(edge: Edge) -> None:
    calls = CALL % "exec_command" + "\n" + CALL % "multi_agent_v1__close_agent"
    response = response_of(await ask(edge, ScriptedCore(bytewise(calls)), RESPONSES, CODEX, bundle=PLAIN))
    assert [(item["type"], item["name"], item.get("namespace")) for item in response["output"]] == [
        ("function_call", "exec_command", None),
        ("function_call", "close_agent", "multi_agent_v1"),
    ]
    assert response["tools"] == CODEX["tools"]


@pytest.mark.parametrize("edge", ["http", "nats"])
async def test_claude_code_is_answered_with_more_max_tokens_than_the_context_has_left(edge: Edge) -> None:
    message = message_of(await ask(edge, ScriptedCore(bytewise(CALL % "Bash")), MESSAGES, CLAUDE_CODE, bundle=PLAIN))
    assert message["stop_reason"] == "tool_use" and message["content"][-1]["input"] == {"cmd": "ls"}
    core = ScriptedCore(says("So"))
    message = message_of(await ask(edge, core, MESSAGES, CLAUDE_CODE, bundle=PLAIN))
    assert message["stop_reason"] == "model_context_window_exceeded"
    asked = core.streams[0].request
    assert len(asked.prompt) + asked.sampling.max_tokens == PLAIN.max_context


async def test_what_agents_ask_in_vain_is_named() -> None:
    """In a whole answer's header; a stream has the same."""
    codex = await post(ScriptedCore(says("So.", finish="stop")), RESPONSES, {**CODEX, "stream": False}, bundle=PLAIN)
    assert codex.status_code == 200
    for name in (
        "tools.web_search (it is not run here)",
        "reasoning.effort (this model has no such levels)",
        "client_metadata",
    ):
        assert name in codex.headers["warning"]
    claude = await post(ScriptedCore(says("So.", finish="stop")), MESSAGES, {**CLAUDE_CODE, "stream": False}, bundle=PLAIN)
    assert claude.status_code == 200
    assert "output_config.effort (this model has no such levels)" in claude.headers["warning"]


@pytest.mark.parametrize("max_tokens", [MAX_CONTEXT - 30, MAX_CONTEXT])
async def test_an_agent_that_asks_a_chat_for_all_of_the_context_is_answered(max_tokens: int) -> None:
    """Qwen Code and opencode ask for 8,000, 32,000 or 64,000, whatever the model has."""
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens}
    answer = await post(ScriptedCore(says("So")), CHAT, body)
    assert answer.status_code == 200 and answer.json()["choices"][0]["finish_reason"] == "length"
