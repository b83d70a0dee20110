"""litellm: a conversation whose messages are sent back as litellm made them, streams, and JSON schemas."""

from __future__ import annotations

import litellm
import pytest
from asked import PARIS, City
from running import KEY, MODEL, Penstock


@pytest.fixture(params=["openai", "hosted_vllm"])
def provider(request: pytest.FixtureRequest, penstock: Penstock) -> dict[str, str]:
    return {"model": f"{request.param}/{MODEL}", "api_base": penstock.v1, "api_key": KEY}


def test_several_turns(provider: dict[str, str]) -> None:
    messages: list[object] = [{"role": "user", "content": "What is the capital of France?"}]
    for question in ("And of Italy?", "And of Spain?", None):
        answer = litellm.completion(**provider, messages=messages, max_tokens=24, temperature=0)
        message = answer.choices[0].message
        assert message.content and answer.usage.completion_tokens <= 24
        messages += [message if question == "And of Spain?" else message.model_dump(), {"role": "user", "content": question}]


def test_a_stream_says_what_a_whole_answer_says(provider: dict[str, str]) -> None:
    asked = {**provider, "messages": [{"role": "user", "content": "Count to five."}], "max_tokens": 24, "temperature": 0}
    chunks = litellm.completion(**asked, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == litellm.completion(**asked).choices[0].message.content


def test_a_json_schema(provider: dict[str, str]) -> None:
    messages = [{"role": "user", "content": PARIS}]
    answer = litellm.completion(**provider, messages=messages, response_format=City, max_tokens=200)
    City.model_validate_json(answer.choices[0].message.content)


def test_an_error_has_its_type(provider: dict[str, str]) -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**provider, messages=[{"role": "user", "content": "hi"}], temperature=9)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**provider | {"api_key": "wrong"}, messages=[{"role": "user", "content": "hi"}])
