"""anthropic's client over /v1/messages: whole and streamed answers, tools, counted tokens, and errors with types."""

from __future__ import annotations

import json
import urllib.request

import anthropic
import pytest
from anthropic import Anthropic
from running import KEY, MODEL, Penstock

HI = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]}}


@pytest.fixture
def client(penstock: Penstock) -> Anthropic:
    with urllib.request.urlopen(f"{penstock.url}/openapi.json") as answer:
        if "/v1/messages" not in json.load(answer)["paths"]:
            pytest.skip("there is no /v1/messages yet")
    return Anthropic(base_url=penstock.url, api_key=KEY, max_retries=0)


def test_a_conversation_whole_and_streamed(client: Anthropic) -> None:
    asked = {"model": MODEL, "messages": HI, "max_tokens": 24, "temperature": 0, "system": "Answer in one sentence."}
    whole = client.messages.create(**asked)
    assert whole.role == "assistant" and whole.content[0].type == "text" and whole.usage.output_tokens > 0
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
    messages = [*HI, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "And of Italy?"}]
    assert client.messages.create(model=MODEL, messages=messages, max_tokens=24).content[0].text


def test_tools_and_their_results_are_taken(client: Anthropic) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"town": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}
    messages = [*HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    answer = client.messages.create(model=MODEL, messages=messages, tools=[TOOL], max_tokens=24)
    assert answer.stop_reason in ("end_turn", "max_tokens", "tool_use")


def test_tokens_are_counted_as_a_request_has_them(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HI).input_tokens
    assert counted == client.messages.create(model=MODEL, messages=HI, max_tokens=1).usage.input_tokens


def test_errors_have_their_types(client: Anthropic, penstock: Penstock) -> None:
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=MODEL, messages=HI, max_tokens=8, temperature=9)
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", messages=HI, max_tokens=8)
    with pytest.raises(anthropic.AuthenticationError):
        Anthropic(base_url=penstock.url, api_key="wrong", max_retries=0).messages.create(model=MODEL, messages=HI, max_tokens=8)
