"""What a user's programs see of a whole Penstock with real weights: the official client over HTTP, plain nats-py over NATS.

Every claim is about the model's words or about fields of the answers; that the words are the model's is `test_right.py`'s.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from typing import Any

import anyio
import nats
import nats.errors
import openai
import pytest
import pytest_asyncio
from nats.aio.client import Client
from nats.aio.msg import Msg
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from common.models.source import ModelFiles
from common.protocol import headers, subjects
from tests.e2e.stack import Stack

MODEL = "smollm2-135m-instruct"
ROLES = ("gateway", "prefill", "decode", "draft", "kvstore")
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
CAPITAL = "The capital of France is"
LONG = "The miller opens the gate a little, and the stones begin to turn. " * 24

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(nats_server: str, smollm2: ModelFiles, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder = tmp_path_factory.mktemp("user")
    async with Stack(nats_server, folder, flags=("--model", smollm2.name), engine_flags=("--kv-cache-mb", "256")) as stack:
        for role in ROLES:
            await stack.start(role)
        await stack.ready()
        yield stack
        await stack.clean()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stack.url()}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wire(nats_server: str, stack: Stack) -> AsyncIterator[Client]:
    """A connection of plain nats-py."""
    connection = await nats.connect(nats_server)
    yield connection
    await connection.close()


async def chat(client: AsyncOpenAI, **arguments: Any) -> Any:
    body = {"model": MODEL, "messages": FRANCE, "temperature": 0, "max_completion_tokens": 12, **arguments}
    return await client.chat.completions.create(**body)


async def complete(client: AsyncOpenAI, **arguments: Any) -> Any:
    body = {"model": MODEL, "prompt": CAPITAL, "temperature": 0, "max_tokens": 12, **arguments}
    return await client.completions.create(**body)


async def text_of(client: AsyncOpenAI, **arguments: Any) -> str:
    return (await complete(client, **arguments)).choices[0].text


# ── the official client ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_models_are_listed(client: AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError, match=MODEL):
        await client.models.retrieve("gpt-4")


async def test_a_chat_says_the_same_at_once_and_as_a_stream(client: AsyncOpenAI) -> None:
    whole = await chat(client)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "stop"

    chunks = [chunk async for chunk in await chat(client, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


async def test_a_completion_says_the_same_at_once_as_a_stream_and_from_token_ids(client: AsyncOpenAI) -> None:
    whole = await complete(client, logprobs=0)
    assert whole.choices[0].text.startswith(" Paris")
    assert (whole.choices[0].finish_reason, whole.usage.completion_tokens) == ("length", 12)
    assert "".join([chunk.choices[0].text async for chunk in await complete(client, stream=True)]) == whole.choices[0].text
    assert await text_of(client, prompt=[504, 3575, 282, 4649, 314]) == whole.choices[0].text
    assert await text_of(client, echo=True) == CAPITAL + whole.choices[0].text
    several = await complete(client, prompt=["Water is", CAPITAL])
    assert [choice.index for choice in several.choices] == [0, 1]
    assert several.choices[1].text == whole.choices[0].text


async def test_two_choices_differ_and_a_seed_brings_both_back(client: AsyncOpenAI) -> None:
    async def choices(n: int, seed: int) -> list[str]:
        answer = await chat(client, n=n, temperature=1, seed=seed, max_completion_tokens=8)
        return [choice.message.content for choice in answer.choices]

    two = await choices(2, 5)
    assert two[0] != two[1]
    assert await choices(2, 5) == two
    assert await choices(1, 5) == two[:1]
    assert await choices(1, 6) != two[:1]
    streamed = ["", ""]
    async for chunk in await chat(client, n=2, temperature=1, seed=5, max_completion_tokens=8, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == two


async def test_stop_strings_end_an_answer_before_themselves(client: AsyncOpenAI) -> None:
    free = await text_of(client, max_tokens=24)
    stop = free[9:13]  # in the middle of a token or not, wherever that is
    cut = await complete(client, max_tokens=24, stop=["no such words", stop])
    assert cut.choices[0].text == free[: free.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    streamed = [chunk.choices[0].text async for chunk in await complete(client, max_tokens=24, stop=stop, stream=True)]
    assert "".join(streamed) == cut.choices[0].text
    kept = await text_of(client, max_tokens=24, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept == cut.choices[0].text + stop


async def test_chat_logprobs_are_those_of_the_text(client: AsyncOpenAI) -> None:
    choice = (await chat(client, logprobs=True, top_logprobs=3)).choices[0]
    tokens = choice.logprobs.content
    said = b"".join(bytes(token.bytes) for token in tokens if token.token != "<|im_end|>")
    assert said.decode() == choice.message.content
    for token in tokens:
        listed = [other.logprob for other in token.top_logprobs]
        assert len(listed) == 3 and listed == sorted(listed, reverse=True)
        assert token.logprob == listed[0] <= 0  # greedy takes the likeliest
        assert sum(map(math.exp, listed)) <= 1.0001
    streamed = [chunk async for chunk in await chat(client, logprobs=True, top_logprobs=3, stream=True)]
    again = [token for chunk in streamed if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert [token.token for token in again] == [token.token for token in tokens]
    assert [token.logprob for token in again] == pytest.approx([token.logprob for token in tokens], abs=1e-4)


async def test_completion_logprobs_are_those_of_the_text(client: AsyncOpenAI) -> None:
    choice = (await complete(client, logprobs=2)).choices[0]
    scores = choice.logprobs
    assert "".join(scores.tokens) == choice.text
    assert scores.text_offset == [len("".join(scores.tokens[:i])) for i in range(len(scores.tokens))]
    for token, logprob, likeliest in zip(scores.tokens, scores.token_logprobs, scores.top_logprobs, strict=True):
        assert likeliest[token] == logprob == max(likeliest.values())


async def test_logit_bias_forces_and_forbids_a_token(client: AsyncOpenAI) -> None:
    assert await text_of(client, max_tokens=1) == " Paris"
    forced = await text_of(client, max_tokens=4, logit_bias={"1000": 100})
    assert forced == forced[: len(forced) // 4] * 4
    assert await text_of(client, max_tokens=1, logit_bias={"7042": -100}) != " Paris"


async def test_penalties_break_a_repetition(client: AsyncOpenAI) -> None:
    async def repeated(**arguments: Any) -> int:
        answer = await complete(client, prompt="one two one two one two one two", max_tokens=32, logprobs=0, **arguments)
        tokens = answer.choices[0].logprobs.tokens
        return len(tokens) - len(set(tokens))

    plain = await repeated()
    assert plain > 8
    assert await repeated(frequency_penalty=2) < plain
    assert await repeated(presence_penalty=2) < plain
    assert await repeated(extra_body={"repetition_penalty": 1.5}) < plain


async def test_usage_counts_what_was_said_and_what_the_cache_spared(client: AsyncOpenAI) -> None:
    first = (await complete(client, prompt=LONG, max_tokens=3)).usage
    assert first.completion_tokens == 3
    assert first.total_tokens == first.prompt_tokens + 3
    assert first.prompt_tokens > 300
    chunks = [chunk async for chunk in await complete(client, prompt=LONG, stream=True, stream_options={"include_usage": True})]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert first.prompt_tokens - 32 <= chunks[-1].usage.prompt_tokens_details.cached_tokens < first.prompt_tokens
    assert chunks[-1].usage.prompt_tokens == first.prompt_tokens


async def test_what_vllm_adds_goes_through_extra_body(client: AsyncOpenAI) -> None:
    greedy = await text_of(client)
    assert await text_of(client, temperature=1, extra_body={"top_k": 1}) == greedy
    assert await text_of(client, temperature=1, extra_body={"min_p": 1}) == greedy
    ended = await chat(client, max_completion_tokens=40)
    endless = await chat(client, max_completion_tokens=40, extra_body={"ignore_eos": True})
    assert ended.choices[0].finish_reason == "stop" and ended.usage.completion_tokens < 40
    assert endless.choices[0].finish_reason == "length" and endless.usage.completion_tokens == 40
    longer = await chat(client, max_completion_tokens=40, extra_body={"min_tokens": 20})
    assert longer.usage.completion_tokens >= 20
    stopped = await complete(client, extra_body={"stop_token_ids": [7042]})  # " Paris"
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")


@pytest.mark.parametrize(
    ("arguments", "kind", "code", "says"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "model_not_found", MODEL),
        ({"temperature": -1}, openai.BadRequestError, "invalid_parameter", "temperature"),
        ({"extra_body": {"repeat_penalty": 2}}, openai.BadRequestError, "invalid_parameter", "send repetition_penalty"),
        ({"max_completion_tokens": 9000}, openai.BadRequestError, "context_length_exceeded", "at most 8155"),
        ({"messages": []}, openai.BadRequestError, "invalid_parameter", "at least one message"),
        ({"user": "x" * (9 << 20)}, openai.APIStatusError, "payload_too_large", "8388608 bytes"),
        ({"extra_body": {"timeout": 0.001}}, openai.InternalServerError, "deadline_exceeded", "deadline"),
    ],
)
async def test_errors_are_the_clients_own_classes(
    client: AsyncOpenAI, arguments: dict[str, Any], kind: type[openai.APIStatusError], code: str, says: str
) -> None:
    with pytest.raises(kind, match=says) as caught:
        await chat(client, **arguments)
    assert caught.value.code == code


async def test_a_deadline_in_a_stream_is_an_error_of_the_client(client: AsyncOpenAI) -> None:
    stream = await complete(client, max_tokens=2000, stream=True, extra_body={"timeout": 0.6, "ignore_eos": True})
    with pytest.raises(openai.APIError, match="deadline"):
        async for _ in stream:
            pass


# ── plain NATS ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def ask(wire: Client, subject: str, body: Any, fields: dict[str, str] | None = None) -> AsyncIterator[Msg]:
    """Every reply to a request, the final one last."""
    inbox = wire.new_inbox()
    replies = await wire.subscribe(inbox)
    await wire.publish(subject, json.dumps(body).encode(), reply=inbox, headers=fields)
    while True:
        reply = await replies.next_msg(timeout=60)
        yield reply
        if headers.FINAL in (reply.headers or {}):
            await replies.unsubscribe()
            return


async def test_nats_chunks_are_numbered_and_say_what_http_says(client: AsyncOpenAI, wire: Client) -> None:
    body = {"messages": FRANCE, "temperature": 0, "max_tokens": 12}
    replies = [reply async for reply in ask(wire, subjects.chat(MODEL), body, {headers.REQUEST_ID: "mine-1"})]
    marks = [reply.headers or {} for reply in replies]
    assert [mark[headers.SEQUENCE] for mark in marks] == [str(i) for i in range(len(replies))]
    assert {mark[headers.REQUEST_ID] for mark in marks} == {"mine-1"}
    assert [headers.FINAL in mark for mark in marks] == [False] * (len(marks) - 1) + [True]
    chunks = [json.loads(reply.data) for reply in replies]
    said = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert said == (await chat(client)).choices[0].message.content
    assert chunks[-1]["usage"]["completion_tokens"] > 3
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_every_view_says_the_same_over_http_and_nats(client: AsyncOpenAI, wire: Client) -> None:
    said = (await chat(client)).choices[0].message.content
    response = await client.responses.create(model=MODEL, input=FRANCE, temperature=0, max_output_tokens=12)
    assert (response.output_text, response.status, response.to_dict()["store"]) == (said, "completed", False)
    events = [event async for event in await client.responses.create(model=MODEL, input=FRANCE, temperature=0, stream=True)]
    assert events[-1].type == "response.completed" and events[-1].response.output_text == said
    body: dict[str, Any] = {"messages": FRANCE, "temperature": 0, "max_tokens": 12}
    message: Any = await client.post("/messages", cast_to=object, body=body)
    assert message["content"] == [{"type": "text", "text": said}] and message["stop_reason"] == "end_turn"
    replies = [json.loads(reply.data) async for reply in ask(wire, subjects.messages(MODEL), body)]
    assert "".join(reply["delta"]["text"] for reply in replies if reply["type"] == "content_block_delta") == said
    body = {"input": FRANCE, "temperature": 0}
    replies = [json.loads(reply.data) async for reply in ask(wire, subjects.responses(MODEL), body)]
    assert replies[-1]["response"]["output"][0]["content"][0]["text"] == said


async def test_a_model_that_nobody_serves_has_no_responders(wire: Client) -> None:
    with pytest.raises(nats.errors.NoRespondersError):
        await wire.request(subjects.chat("gpt-4"), json.dumps({"messages": FRANCE}).encode(), timeout=5)


async def test_nats_errors_are_typed_and_final(wire: Client) -> None:
    cases = [
        (subjects.chat(MODEL), {"messages": FRANCE, "model": "gpt-4"}, {}, "model_not_found"),
        (subjects.chat(MODEL), {"messages": FRANCE, "n": 10**9}, {}, "invalid_parameter"),
        (subjects.completions(MODEL), {"prompt": ""}, {}, "empty_prompt"),
        (subjects.chat(MODEL), {"messages": FRANCE}, {headers.DEADLINE_MS: "1"}, "deadline_exceeded"),
        (subjects.chat(MODEL), {"messages": FRANCE}, {headers.REQUEST_ID: "a.*.>"}, "invalid_parameter"),
    ]
    for subject, body, fields, code in cases:
        replies = [reply async for reply in ask(wire, subject, body, fields)]
        mark = replies[-1].headers or {}
        assert mark[headers.ERROR_CODE] == code
        assert mark[headers.ERROR]
        assert json.loads(replies[-1].data)["error"]["code"] == code


@pytest.mark.parametrize("chosen", ["", "endless"])
async def test_a_published_cancel_ends_a_stream_and_frees_its_workers(stack: Stack, wire: Client, chosen: str) -> None:
    """By the id that the gateway minted alone; by one that the client chose, with its inbox, which nobody else knows."""
    body = {"prompt": CAPITAL, "max_tokens": 4000, "ignore_eos": True}
    stream = ask(wire, subjects.completions(MODEL), body, {headers.REQUEST_ID: chosen} if chosen else {})
    first = [await anext(stream) for _ in range(3)]
    assert headers.FINAL not in (first[-1].headers or {})
    request = (first[-1].headers or {})[headers.REQUEST_ID]
    if chosen:
        await wire.publish(subjects.cancel(request), b"")
        await wire.publish(subjects.cancel(request), b"", reply=wire.new_inbox())
        later = [await anext(stream) for _ in range(50)]
        assert headers.FINAL not in (later[-1].headers or {})
    await wire.publish(subjects.cancel(request), b"", reply=first[0].subject if chosen else "")
    with anyio.fail_after(5):
        rest = [reply async for reply in stream]
    assert (rest[-1].headers or {})[headers.ERROR_CODE] == "cancelled"
    await stack.clean()


# ── watching it ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_every_service_answers_ping_info_and_stats(stack: Stack, wire: Client) -> None:
    async def told(verb: str) -> dict[str, dict[str, Any]]:
        """Service name → its answer, of this stack's workers."""
        inbox = wire.new_inbox()
        replies = await wire.subscribe(inbox)
        await wire.publish(f"$SRV.{verb}", b"", reply=inbox)
        answers: dict[str, dict[str, Any]] = {}
        with anyio.fail_after(5):
            while len(answers) < len(ROLES):
                answer = json.loads((await replies.next_msg(timeout=5)).data)
                answers[answer["name"]] = answer
        await replies.unsubscribe()
        return answers

    names = {f"penstock-{role}" for role in ROLES}
    for verb in ("PING", "INFO", "STATS"):
        answers = await told(verb)
        assert answers.keys() == names
        for name, answer in answers.items():
            role = name.removeprefix("penstock-")
            assert answer["type"] == f"io.nats.micro.v1.{verb.lower()}_response"
            assert answer["version"] == "0.1.0"
            assert answer["metadata"].items() >= {"role": role, "model": MODEL, "worker": f"{role}-0"}.items()
    stats = await told("STATS")
    assert "kv" in json.dumps(stats["penstock-decode"]["endpoints"])


async def test_every_process_has_metrics_health_and_ready(stack: Stack) -> None:
    for name in stack.processes:
        for path in ("/health", "/ready"):
            assert (await stack.client.get(stack.url(name) + path)).status_code == 200, (name, path)
        page = (await stack.client.get(stack.url(name) + "/metrics")).text
        families = list(text_string_to_metric_families(page))
        assert any(family.name.startswith("penstock_") for family in families), name
        assert all(family.documentation and family.type != "unknown" for family in families), name
