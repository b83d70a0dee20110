"""`/tokenize` and `/detokenize`, the same over HTTP and NATS: what is counted is what a generation of the same body has."""

from __future__ import annotations

import json
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import msgspec
import pytest

from common.protocol import headers
from common.testing.memory_bus import MemoryBroker
from common.text.bundle import TextBundle
from common.text.template import ChatTemplate
from services.gateway import tokenizing
from services.gateway.token_bodies import DetokenizeAnswer, TokenizeAnswer
from tests.actors.both_edges import Edge, ask, nats_edge, says
from tests.actors.edge import BUNDLE, EOS, MAX_CONTEXT, ScriptedCore, app_of, front_of, ids
from tests.actors.http_client import check_error, config
from tests.actors.nats_client import Client

edges = pytest.mark.parametrize("edge", ["http", "nats"])
MESSAGES = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi <|end|>"}]
WITH_TOOLS = ChatTemplate("{{ tools | tojson if tools }}{% for m in messages %}{{ m.content }}{% endfor %}<tool_call>")
WITH_DOCUMENTS = ChatTemplate("{% for d in documents or [] %}{{ d.text }};{% endfor %}{{ names[1].first if names }}")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


async def post(
    edge: Edge, kind: str, body: Any, *, bundle: TextBundle = BUNDLE, **settings: Any
) -> tuple[int, dict[str, Any], str]:
    """Status, body and warning; on NATS, the status that HTTP has for the error."""
    core = ScriptedCore()
    if edge == "http":
        transport = httpx.ASGITransport(app=app_of(core, config(**settings), bundle=bundle))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            content, fields = json.dumps(body), {"content-type": "application/json"}
            response = await http.post(f"/{kind}", content=content, headers=fields)
        return response.status_code, response.json(), response.headers.get("warning", "")
    async with nats_edge(core, bundle, **settings) as client:
        await client.ask(body, kind=kind)
        reply = await client.final()
    failed = headers.ERROR in reply.headers
    return 400 if failed else 200, json.loads(reply.data), reply.headers.get(headers.WARNING, "")


@edges
@pytest.mark.parametrize("text", ["", "hi", "größe 😀\x00", "a<|end|>b", "x" * 20_000])
async def test_a_text_is_its_tokens_and_back(edge: Edge, text: str) -> None:
    status, answer, _ = await post(edge, "tokenize", {"prompt": text, "return_token_strs": True})
    assert status == 200
    tokens = BUNDLE.encode_prompt(text)
    assert answer == {
        "count": len(tokens),
        "max_model_len": MAX_CONTEXT,
        "tokens": tokens,
        "token_strs": [BUNDLE.tokenizer.token_name(token) for token in tokens],
    }
    msgspec.convert(answer, TokenizeAnswer)
    status, back, _ = await post(edge, "detokenize", {"tokens": tokens})
    assert (status, back) == (200, {"prompt": text})
    msgspec.convert(back, DetokenizeAnswer)


@edges
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"add_generation_prompt": False},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "so"}], "continue_final_message": True},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 400}]}]},
    ],
)
async def test_messages_have_the_tokens_that_a_chat_has(edge: Edge, arguments: dict[str, Any]) -> None:
    bundle = msgspec.structs.replace(BUNDLE, template=WITH_TOOLS) if "tools" in arguments else BUNDLE
    body = {"messages": MESSAGES, **arguments}
    core = ScriptedCore(says("ok"))
    seen = await ask(edge, core, "chat", body | {"stream": False}, bundle=bundle)
    assert seen.error is None
    status, answer, _ = await post(edge, "tokenize", body, bundle=bundle)
    assert status == 200
    assert answer["tokens"] == core.streams[0].request.prompt
    assert answer["count"] == seen.usage["prompt_tokens"] and answer["token_strs"] is None


@edges
async def test_a_body_of_a_chat_is_counted_and_told_what_has_no_part_in_it(edge: Edge) -> None:
    status, _, warning = await post(edge, "tokenize", {"messages": MESSAGES, "temperature": 0.5, "odd": 1})
    assert status == 200 and "ignored: temperature, odd" in warning
    status, answer, _ = await post(edge, "tokenize", {"messages": MESSAGES, "temperature": 0.5}, strict=True)
    assert status == 400 and answer["error"]["param"] == "temperature"


@edges
async def test_documents_and_lists_go_to_the_template(edge: Edge) -> None:
    bundle = msgspec.structs.replace(BUNDLE, template=WITH_DOCUMENTS)
    beside = {"documents": [{"text": "a"}, {"text": "<|end|>"}], "chat_template_kwargs": {"names": [1, {"first": "Ada"}]}}
    tokens: list[list[int]] = []
    for padding in ({}, {"padding": "x" * 100_000}):
        status, answer, _ = await post(edge, "tokenize", {"messages": MESSAGES, **beside, **padding}, bundle=bundle)
        assert status == 200, answer
        tokens.append(answer["tokens"])
    assert tokens == [ids("a;<|end|>;Ada")] * 2
    as_variable = {"chat_template_kwargs": beside["chat_template_kwargs"] | {"documents": beside["documents"]}}
    status, answer, _ = await post(edge, "tokenize", {"messages": MESSAGES, **as_variable}, bundle=bundle)
    assert status == 200 and answer["tokens"] == ids("a;<|end|>;Ada"), "as at vLLM"
    status, answer, _ = await post(edge, "tokenize", {"messages": MESSAGES, **as_variable})
    assert status == 400 and answer["error"]["param"] == "documents"
    status, answer, _ = await post(edge, "tokenize", {"messages": MESSAGES, **beside})
    assert (status, answer["error"]["param"]) == (400, "documents")


@edges
async def test_longer_than_the_context_is_counted_up_to_a_bound(edge: Edge) -> None:
    status, answer, _ = await post(edge, "tokenize", {"prompt": "x" * 3 * MAX_CONTEXT})
    assert (status, answer["count"]) == (200, 3 * MAX_CONTEXT)
    for body, param in (
        ({"prompt": "x" * (tokenizing.MIN_LIMIT_CHARS + 1)}, "prompt"),
        ({"messages": [{"role": "user", "content": "x" * (tokenizing.MIN_LIMIT_CHARS + 1)}]}, "messages"),
        ({"messages": MESSAGES, "documents": [{"text": "x" * 250_000}] * 5}, "messages"),
    ):
        status, answer, _ = await post(edge, "tokenize", body)
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", param)
    status, answer, _ = await post(edge, "detokenize", {"tokens": [1] * (tokenizing.MIN_LIMIT_TOKENS + 1)})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (400, "context_length_exceeded", "tokens")
    status, answer, _ = await post(edge, "detokenize", {"tokens": ids("x") * tokenizing.MIN_LIMIT_TOKENS})
    assert (status, answer["prompt"]) == (200, "x" * tokenizing.MIN_LIMIT_TOKENS)


BAD = [
    ("tokenize", {}, "prompt"),
    ("tokenize", {"prompt": "x", "messages": MESSAGES}, "messages"),
    ("tokenize", {"prompt": ["x"]}, "prompt"),
    ("tokenize", {"prompt": "\ud800"}, None),
    ("tokenize", {"prompt": "x", "tools": [TOOL]}, "tools"),
    ("tokenize", {"prompt": "x", "truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
    ("tokenize", {"messages": []}, "messages"),
    ("tokenize", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ("tokenize", {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools"),
    ("tokenize", {"messages": MESSAGES, "chat_template": "none"}, "chat_template"),
    ("detokenize", {}, "tokens"),
    ("detokenize", {"tokens": "x"}, "tokens"),
    ("detokenize", {"tokens": [-1]}, "tokens[0]"),
    ("detokenize", {"tokens": [EOS + 1]}, "tokens"),
    ("detokenize", {"tokens": [1, "x"]}, "tokens[1]"),
]


@edges
@pytest.mark.parametrize(("kind", "body", "param"), BAD)
async def test_a_mistake_is_named_in_small_and_large_bodies(
    edge: Edge, kind: str, body: dict[str, Any], param: str | None
) -> None:
    for padding in ({}, {"padding": "x" * 100_000}):
        status, answer, _ = await post(edge, kind, body | padding)
        assert status == 400, answer
        assert answer["error"]["code"] == "invalid_parameter"
        if not (padding and param is None):
            assert answer["error"]["param"] == param


@edges
async def test_an_unknown_model_lists_what_there_is(edge: Edge) -> None:
    for kind, body in (("tokenize", {"prompt": "x"}), ("detokenize", {"tokens": [1]})):
        _, answer, _ = await post(edge, kind, {"model": "other", **body})
        assert answer["error"]["code"] == "model_not_found" and BUNDLE.name in answer["error"]["message"]


async def test_a_long_text_does_not_hold_the_event_loop() -> None:
    """While a megabyte is tokenized, named and encoded, the loop goes round."""
    turns, status, answer = 0, 0, {}

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(count)
        status, answer, _ = await post("http", "tokenize", {"prompt": "xy " * 150_000, "return_token_strs": True})
        group.cancel_scope.cancel()
    assert (status, answer["count"]) == (200, 450_000)
    assert turns > 50


async def test_whole_answers_share_the_memory_for_them() -> None:
    status, answer, _ = await post("http", "tokenize", {"prompt": "x" * 10_000}, max_collected_bytes=10_000)
    assert (status, answer["error"]["code"]) == (429, "overloaded")


async def test_over_nats_an_answer_is_no_larger_than_a_message() -> None:
    broker = MemoryBroker(max_payload=50_000)
    edge, client = front_of(ScriptedCore(), broker.connect("gateway"), config()), Client(broker.connect("client"))
    await client.listen()
    async with anyio.create_task_group() as group:
        await group.start(edge.run)
        await client.ask({"prompt": "x" * 40_000}, kind="tokenize")
        await client.final()
        client.check_error("payload_too_large")
        group.cancel_scope.cancel()


async def test_what_a_client_needs_that_makes_prompts_itself() -> None:
    transport = httpx.ASGITransport(app=app_of(ScriptedCore(), config(api_key="key")))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        check_error(await http.get("/tokenizer_info"), 401, "invalid_api_key")
        told = (await http.get("/tokenizer_info", headers={"authorization": "Bearer key"})).json()
    assert BUNDLE.template is not None and told["chat_template"] == BUNDLE.template.source
    assert told["model_max_length"] == MAX_CONTEXT and "eos_token" in told


async def test_the_api_key_is_asked_for() -> None:
    transport = httpx.ASGITransport(app=app_of(ScriptedCore(), config(api_key="secret")))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        for path in ("/tokenize", "/detokenize"):
            check_error(await http.post(path, json={}), 401, "invalid_api_key")
        assert (await http.get("/version")).json()["version"]
        for method in ("GET", "POST"):
            pong = await http.request(method, "/ping")
            assert (pong.status_code, pong.content) == (200, b"")


async def test_ping_says_whether_requests_would_be_answered() -> None:
    core = ScriptedCore()
    core.ready = False
    transport = httpx.ASGITransport(app=app_of(core, config()))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        assert (await http.get("/ping")).status_code == 503
