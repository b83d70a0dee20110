"""anthropic's client over /v1/messages: whole and streamed answers, tools, JSON schemas, counted tokens, typed errors."""

from __future__ import annotations

from typing import Literal

import anthropic
import pytest
from anthropic import Anthropic
from asked import PARIS
from pydantic import BaseModel
from running import KEY, MODEL, Penstock

HI = [{"role": "user", "content": "What is the capital of France?"}]
TOWN = {"type": "string", "enum": ["Paris", "Rome"]}
TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"town": TOWN}, "required": ["town"]}}
GREEDY = {"temperature": 0}
"""In `extra_body`: a parameter of the API that this client does not name."""


class Town(BaseModel):
    """A town. It has no bounds of lengths: this client takes them out of the schema that it sends."""

    size: Literal["small", "large"]
    capital: bool


@pytest.fixture
def client(penstock: Penstock) -> Anthropic:
    return Anthropic(base_url=penstock.url, api_key=KEY, max_retries=0)


def test_a_conversation_whole_and_streamed(client: Anthropic) -> None:
    asked = {"model": MODEL, "messages": HI, "max_tokens": 24, "system": "Answer in one sentence.", "extra_body": GREEDY}
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


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_that_must_be_made_is_made(client: Anthropic, choice: dict[str, object]) -> None:
    choice = choice | {"disable_parallel_tool_use": True}
    asked = {"model": MODEL, "messages": HI, "tools": [TOOL], "tool_choice": choice, "max_tokens": 200, "extra_body": GREEDY}
    whole = client.messages.create(**asked)
    [use] = [block for block in whole.content if block.type == "tool_use"]
    assert whole.stop_reason == "tool_use" and use.name == "weather" and use.input["town"] in ("Paris", "Rome")
    with client.messages.stream(**asked) as stream:
        [streamed] = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert streamed.input == use.input


def test_a_pydantic_model_is_parsed(client: Anthropic) -> None:
    messages = [{"role": "user", "content": PARIS}]
    answer = client.messages.parse(model=MODEL, messages=messages, max_tokens=200, output_format=Town)
    assert isinstance(answer.parsed_output, Town)


def test_tokens_are_counted_as_a_request_has_them(client: Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HI).input_tokens
    usage = client.messages.create(model=MODEL, messages=HI, max_tokens=1).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_errors_have_their_types(client: Anthropic, penstock: Penstock) -> None:
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=MODEL, messages=HI, max_tokens=8, extra_body={"temperature": 9})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", messages=HI, max_tokens=8)
    with pytest.raises(anthropic.AuthenticationError):
        Anthropic(base_url=penstock.url, api_key="wrong", max_retries=0).messages.create(model=MODEL, messages=HI, max_tokens=8)
