"""openai-python: chat, streams, completions, tools, JSON schemas, models, and errors with types."""

from __future__ import annotations

import json

import openai
import pytest
from asked import PARIS, WEATHER_TOOL, City
from openai import OpenAI
from running import KEY, MODEL, Penstock

HI = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(penstock: Penstock) -> OpenAI:
    return OpenAI(base_url=penstock.v1, api_key=KEY, max_retries=0)


def test_a_conversation(client: OpenAI) -> None:
    messages = [*HI]
    for _ in range(2):
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=24, temperature=0)
        choice = answer.choices[0]
        assert choice.message.role == "assistant" and choice.message.content
        assert answer.usage is not None and answer.usage.completion_tokens <= 24
        messages += [choice.message.model_dump(exclude_none=True), {"role": "user", "content": "And of Italy?"}]
    assert "Paris" in messages[1]["content"]


def test_a_stream_says_what_a_whole_answer_says(client: OpenAI) -> None:
    asked = {"model": MODEL, "messages": HI, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    )
    assert chunks[-1].usage is not None and chunks[-1].usage == whole.usage
    with client.chat.completions.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.content == whole.choices[0].message.content
    assert kinds.count("content.delta") > 1 and kinds.count("content.done") == 1  # a step may give several tokens


def test_completions_with_log_probabilities(client: OpenAI) -> None:
    asked = {"model": MODEL, "prompt": ["One, two,", "Red, green,"], "max_tokens": 6, "temperature": 0, "logprobs": 2}
    answer = client.completions.create(**asked)
    assert len(answer.choices) == 2 and answer.usage.completion_tokens == 12
    for choice in answer.choices:
        assert "".join(choice.logprobs.tokens) == choice.text
        assert all(len(top) in (2, 3) for top in choice.logprobs.top_logprobs)
    streamed = list(client.completions.create(**asked, stream=True))
    for index in (0, 1):
        text = "".join(choice.text for chunk in streamed for choice in chunk.choices if choice.index == index)
        assert text == answer.choices[index].text


def test_chat_log_probabilities(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=HI, max_tokens=4, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert len(content) == 4 and all(len(token.top_logprobs) == 3 for token in content)


def test_a_pydantic_model_is_parsed(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": PARIS}], response_format=City, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, City)
    with client.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": PARIS}], response_format=City, max_tokens=200
    ) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, City)


def test_json_mode(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PARIS}],
        response_format={"type": "json_object"},
        max_tokens=300,
        temperature=0,
    )
    assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(answer.choices[0].message.content), dict)


def test_tools_and_their_results_are_taken(client: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Paris", "days": 1}'}}
    messages = [
        {"role": "user", "content": "How is the weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, tools=[WEATHER_TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=24
        )
        assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_made_is_made(client: OpenAI, choice: object) -> None:
    asked = {"model": MODEL, "messages": HI, "max_tokens": 200, "temperature": 0}
    asked |= {"tools": [WEATHER_TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    [call] = client.chat.completions.create(**asked).choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["town"] in ("Paris", "Rome")
    with client.chat.completions.stream(**asked) as stream:
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments


def test_models_are_listed(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


def test_errors_have_their_types(client: OpenAI, penstock: Penstock) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=9)
    assert (bad.value.code, bad.value.param) == ("invalid_parameter", "temperature")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-5", messages=HI)
    assert unknown.value.code == "model_not_found" and MODEL in str(unknown.value)
    with pytest.raises(openai.AuthenticationError):
        OpenAI(base_url=penstock.v1, api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 20_000}])
    assert long.value.code == "context_length_exceeded"


async def _ask_at_once(url: str) -> list[str]:
    async with openai.AsyncOpenAI(base_url=url, api_key=KEY) as client:
        tasks = [client.chat.completions.create(model=MODEL, messages=HI, max_tokens=8, seed=n) for n in range(4)]
        return [(await task).choices[0].message.content for task in tasks]


def test_the_asynchronous_client(penstock: Penstock) -> None:
    import asyncio

    assert len(asyncio.run(_ask_at_once(penstock.v1))) == 4
