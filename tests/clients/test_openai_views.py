"""openai-python over what is not a chat: responses, embeddings, and files with their batches."""

from __future__ import annotations

import json
import re
import time

import openai
import pytest
from asked import PARIS, City
from openai import OpenAI
from running import KEY, MODEL, Penstock

HI = "What is the capital of France?"
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["town"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture
def client(penstock: Penstock) -> OpenAI:
    return OpenAI(base_url=penstock.v1, api_key=KEY, max_retries=0)


def test_a_response_whole_and_streamed(client: OpenAI) -> None:
    asked = {"model": MODEL, "input": HI, "instructions": "Be brief.", "max_output_tokens": 32, "temperature": 0}
    whole = client.responses.create(**asked)
    assert "Paris" in whole.output_text and whole.usage is not None and whole.usage.output_tokens <= 32
    events = list(client.responses.create(**asked, stream=True))
    assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == f"response.{whole.status}" and events[-1].response.usage.total_tokens == whole.usage.total_tokens
    with client.responses.stream(**asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert len(deltas) > 1 and "".join(deltas) == whole.output_text  # a step may give several tokens, in one event
        assert stream.get_final_response().output_text == whole.output_text


def test_a_conversation_of_responses(client: OpenAI) -> None:
    items = [{"role": "user", "content": HI}]
    first = client.responses.create(model=MODEL, input=items, max_output_tokens=24, temperature=0)
    items += [*first.output, {"role": "user", "content": "And of Italy?"}]
    assert client.responses.create(model=MODEL, input=items, max_output_tokens=24).output_text
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(model=MODEL, input=HI, previous_response_id=first.id)
    assert refused.value.param == "previous_response_id"


def test_a_response_is_parsed(client: OpenAI) -> None:
    found = client.responses.parse(model=MODEL, input=PARIS, text_format=City, max_output_tokens=200)
    assert isinstance(found.output_parsed, City)


def test_a_call_of_a_response_and_its_result(client: OpenAI) -> None:
    asked = {"model": MODEL, "tools": [TOOL], "parallel_tool_calls": False, "max_output_tokens": 100, "temperature": 0}
    first = client.responses.create(**asked, input="How is the weather in Paris?", tool_choice="required")
    [call] = [item for item in first.output if item.type == "function_call"]
    assert call.name == "weather" and json.loads(call.arguments)["town"] in ("Paris", "Rome")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    items = [{"role": "user", "content": "How is the weather in Paris?"}, *first.output, result]
    answer = client.responses.create(**asked, input=items, tool_choice="none")
    assert answer.output_text and all(item.type == "message" for item in answer.output)


def test_calls_of_a_namespace_and_of_a_custom_tool(client: OpenAI) -> None:
    digits = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"}
    tools = [
        {"type": "namespace", "name": "forecasts", "description": "What is to come.", "tools": [TOOL]},
        {"type": "web_search"},
        {"type": "custom", "name": "dial", "description": "Dials a number.", "format": digits},
    ]
    asked = {"model": MODEL, "tools": tools, "parallel_tool_calls": False, "max_output_tokens": 100, "temperature": 0}
    items = [{"role": "user", "content": "How is the weather in Paris?"}]
    first = client.responses.create(
        **asked, input=items, tool_choice={"type": "function", "name": "weather", "namespace": "forecasts"}
    )
    [call] = first.output
    assert (call.type, call.name, call.to_dict()["namespace"]) == ("function_call", "weather", "forecasts")
    assert json.loads(call.arguments)["town"] in ("Paris", "Rome")
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    events = list(client.responses.create(**asked, input=items, tool_choice={"type": "custom", "name": "dial"}, stream=True))
    [call] = events[-1].response.output
    assert (call.type, call.name) == ("custom_tool_call", "dial") and re.fullmatch("[0-9]{3}", call.input)
    assert [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"] == [call.input]
    items += [call, {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "no answer"}]
    assert client.responses.create(**asked, input=items, tool_choice="none").output_text


def test_embeddings(client: OpenAI) -> None:
    texts = ["a cat", "a kitten", "the stock market"]
    answer = client.embeddings.create(model=MODEL, input=texts)
    vectors = [item.embedding for item in answer.data]
    assert [item.index for item in answer.data] == [0, 1, 2] and answer.usage.prompt_tokens > 0
    assert all(len(vector) == 576 and abs(sum(x * x for x in vector) - 1) < 1e-3 for vector in vectors)
    floats = client.embeddings.create(model=MODEL, input=texts[0], encoding_format="float").data[0].embedding
    assert floats == pytest.approx(vectors[0], abs=1e-6)


def test_a_file_and_its_batch(simulated: Penstock) -> None:
    client = OpenAI(base_url=simulated.v1, api_key=KEY, max_retries=0)
    bodies = [{"model": MODEL, "messages": [{"role": "user", "content": HI}], "max_tokens": 4}] * 2
    bodies.append(bodies[0] | {"temperature": 9})
    lines = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/chat/completions", "body": body} for n, body in enumerate(bodies)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    assert client.files.retrieve(file.id) == file and file in client.files.list().data
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    ended = time.monotonic() + 60
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < ended, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed" and batch in client.batches.list().data
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (3, 2, 1)
    results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    assert sorted(result["custom_id"] for result in results) == ["0", "1"]
    [failed] = [json.loads(line) for line in client.files.content(batch.error_file_id).text.splitlines()]
    assert failed["custom_id"] == "2" and failed["response"]["status_code"] == 400
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
