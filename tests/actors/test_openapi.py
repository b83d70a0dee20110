"""`/openapi.json` lists every route and every error there is, and answers are as it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import pytest
from jsonschema import Draft202012Validator
from starlette.applications import Starlette
from starlette.routing import Route

from common.protocol.errors import Cancelled, DuplicateRequest, ReplyNotAllowed, RequestError, ServiceError
from common.testing.memory_bus import MemoryBroker
from common.text.template import ChatTemplate
from services.gateway.api_batches import BATCH_OPERATIONS
from services.gateway.api_operations import OPERATIONS
from services.gateway.batches.submissions import ResultPending
from services.gateway.config import GatewayConfig
from services.gateway.http import create_app
from services.gateway.http_body import ClientGone
from services.gateway.openapi import document
from services.gateway.page_files import page_files
from tests.actors.edge import BUNDLE, EOS, ScriptedCore, ScriptedStream, app_of, ids
from tests.actors.http_client import CHAT, COMPLETIONS, HI, client, config
from tests.actors.test_batches import Gateway, answers, lines
from tests.actors.test_dashboard import serving as with_dashboard
from tests.actors.test_http_vectors import embed
from tests.actors.views_site import MESSAGES, RESPONSES

DOCUMENT = document(GatewayConfig())
API_PAGE = Path(__file__).parents[2] / "docs" / "http.md"
TOLD_TO_NOBODY = {ResultPending, ClientGone, Cancelled, DuplicateRequest, ReplyNotAllowed, RequestError, ServiceError}
"""Errors that no HTTP client sees: of clients that left, of NATS alone, and the tree's inner nodes."""


def routes_of(app: Starlette) -> set[tuple[str, str]]:
    files = {f"/dashboard/{name}" for name in page_files()}
    return {
        (method, route.path.replace(":path}", "}"))
        for route in app.routes
        if isinstance(route, Route) and route.path not in files
        for method in route.methods or ()
        if method != "HEAD"
    }


async def test_every_route_is_described_and_nothing_else() -> None:
    described = {(operation.method, operation.path) for operation in OPERATIONS}
    async with with_dashboard() as (made, _):
        assert made.gateway.catalog is not None
        app = create_app(
            made.gateway,
            made.gateway.catalog,
            GatewayConfig(),
            dashboard=made.gateway.dashboard,
            batches=made.gateway.batches,
            explainer=made.gateway.explainer,
        )
        assert routes_of(app) == described


async def test_with_zero_retention_nothing_of_files_and_batches_is_described() -> None:
    async with client(ScriptedCore(), zero_retention=True) as http:
        described = (await http.get("/openapi.json")).json()["paths"]
        assert set(DOCUMENT["paths"]) - set(described) == {operation.path for operation in BATCH_OPERATIONS}
        assert (await http.get("/v1/files")).status_code == 404


async def test_metrics_of_tenants_without_a_key_answer_as_described(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("[tenants.acme]\n")
    async with client(ScriptedCore(), api_keys=str(keys)) as http:
        response = await http.get("/metrics")
        assert response.status_code == 401
        check(response, "get", "/metrics")


def subclasses(kind: type[Exception]) -> Iterator[type[Any]]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


def test_every_error_that_a_client_may_get_is_described() -> None:
    told = {error for operation in OPERATIONS for error in operation.all_errors}
    made_here = {kind for base in (RequestError, ServiceError) for kind in subclasses(base) if "tests." not in kind.__module__}
    codes = {error.code for error in told | TOLD_TO_NOBODY}
    assert {kind.__name__ for kind in made_here if kind.code not in codes} == set()


def test_the_page_of_the_api_lists_every_error_under_its_status() -> None:
    rows = re.findall(r"^\| (\d{3}) \|([^|]*)\|", API_PAGE.read_text(), re.MULTILINE)
    listed = {(int(status), code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    described = {(error.http_status, error.code) for operation in OPERATIONS for error in operation.all_errors}
    assert listed - {(405, "method_not_allowed")} == described


EVENTS = {CHAT: "ChatCompletionChunk", RESPONSES: "ResponseEvent", MESSAGES: "MessageEvent"}


def check(response: httpx.Response, method: str, path: str) -> None:
    """The status, media type and body are among the described ones."""
    described = DOCUMENT["paths"][path][method]["responses"][str(response.status_code)]
    media = response.headers.get("content-type", "").split(";")[0]
    content = described.get("content", {})
    if not content:
        assert response.content == b""
        return
    schema = content[media]["schema"]
    if media == "application/json":
        validate(schema, response.json())
    elif media == "text/event-stream":
        chunk = EVENTS.get(path, "Completion")
        for line in response.text.splitlines():
            if line.startswith("data: {"):
                validate({"$ref": f"#/components/schemas/{chunk}"}, json.loads(line[6:]))


def validate(schema: dict[str, Any], body: Any) -> None:
    Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(body)


def script(stream: ScriptedStream) -> None:
    stream.give([*ids("so it is"), EOS], finish="stop", cached=2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HI),
        (CHAT, {**HI, "n": 2, "logprobs": True, "top_logprobs": 3}),
        (CHAT, {**HI, "logprobs": True}),
        (COMPLETIONS, {"prompt": ["a", "b"], "echo": True}),
        (COMPLETIONS, {"prompt": "a", "logprobs": 2}),
        (COMPLETIONS, {"prompt": "a", "logprobs": 0}),
    ],
)
async def test_generations_answer_as_described(path: str, body: dict[str, Any], stream: bool) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with client(ScriptedCore(script)) as http:
        for more in ({}, {"stream_options": options} if stream else {"max_tokens": 9}):
            response = await http.post(path, json={**body, "stream": stream, **more})
            assert response.status_code == 200, response.text
            check(response, "post", path)


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_and_reasoning_answer_as_described(stream: bool) -> None:
    source = "{{ tools | tojson if tools }}<think>{% for m in messages %}{{ m.content }}{% endfor %}<tool_call></think>"
    bundle = msgspec.structs.replace(BUNDLE, template=ChatTemplate(source))
    said = '<think>hm</think>text\n<tool_call>\n{"name": "look", "arguments": {"at": 1}}\n</tool_call>'
    core = ScriptedCore(lambda stream: stream.say(said, finish="stop"))
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    transport = httpx.ASGITransport(app=app_of(core, config(), bundle=bundle))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
        response = await http.post(CHAT, json={**HI, "tools": tools, "stream": stream})
        assert "tool_calls" in response.text and "reasoning_content" in response.text
        check(response, "post", CHAT)
        function = {"type": "function", "name": "look", "parameters": {"type": "object"}}
        body: dict[str, Any] = {"input": "hi", "tools": [function], "stream": stream}
        response = await http.post(RESPONSES, json=body)
        assert '"function_call"' in response.text and '"reasoning_text"' in response.text
        check(response, "post", RESPONSES)
        offered = {"name": "look", "input_schema": {"type": "object"}}
        response = await http.post(MESSAGES, json={**HI, "max_tokens": 99, "tools": [offered], "stream": stream})
        assert '"tool_use"' in response.text and '"thinking"' in response.text
        check(response, "post", MESSAGES)


async def test_everything_else_answers_as_described() -> None:
    async with client(ScriptedCore(script), api_key="key") as http:
        key = {"authorization": "Bearer key"}
        model = BUNDLE.name
        for path, url in (
            ("/v1/models", "/v1/models"),
            ("/v1/models/{model}", f"/v1/models/{model}"),
            ("/tokenizer_info", f"/tokenizer_info?model={model}"),
            ("/tokenizer_info", "/tokenizer_info"),
            ("/health", "/health"),
            ("/ready", f"/ready?model={model}"),
            ("/ping", "/ping"),
            ("/version", "/version"),
            ("/metrics", "/metrics"),
            ("/openapi.json", "/openapi.json"),
            ("/docs", "/docs"),
        ):
            response = await http.get(url, headers=key)
            assert response.status_code == 200
            check(response, "get", path)
        for path, url in (
            ("/v1/models/{model}", "/v1/models/none"),
            ("/ready", "/ready?model=none"),
            ("/tokenizer_info", "/tokenizer_info?model=none"),
        ):
            response = await http.get(url, headers=key)
            assert response.status_code == 404
            check(response, "get", path)
        bodies: dict[str, Any] = {
            CHAT: HI,
            RESPONSES: {"input": "hi", "user": "me", "metadata": {"a": "b"}},
            f"{RESPONSES}/input_tokens": {"input": "hi"},
            MESSAGES: {**HI, "max_tokens": 9},
            f"{MESSAGES}/count_tokens": HI,
            COMPLETIONS: {"prompt": "x"},
            "/tokenize": {"prompt": "x"},
            "/detokenize": {"tokens": []},
        }
        for path, body in bodies.items():
            for headers in (key, {}):
                check(await http.post(path, json=body, headers=headers), "post", path)
            for wrong in (b"", b"[]", b"{}", b'{"model": "none", "prompt": "x", "tokens": [], "messages": [1]}'):
                check(await http.post(path, content=wrong, headers={**key, "content-type": "application/json"}), "post", path)
                check(await http.post(path, content=wrong, headers=key), "post", path)


async def test_vectors_answer_as_described() -> None:
    key = {"authorization": "Bearer key"}
    texts = {"text_1": "a", "text_2": ["b", "c"]}
    asked: list[tuple[str, Any]] = [("/v1/embeddings", {"input": "a"}), ("/v1/score", texts), ("/score", texts)]
    asked += [("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"})]
    async with client(ScriptedCore(embed), api_key="key") as http:
        for path, body in asked:
            response = await http.post(path, json=body, headers=key)
            assert response.status_code == 200, response.text
            check(response, "post", path)
            for headers, wrong in (({}, body), (key, {**body, "model": "none"}), (key, {}), (key, {**body, "pooling": 1})):
                response = await http.post(path, json=wrong, headers=headers)
                assert response.status_code in (400, 401, 404)
                check(response, "post", path)


@pytest.mark.virtual_time
async def test_files_and_batches_answer_as_described() -> None:
    broker = MemoryBroker()
    broker.store.enabled = True
    gateway = Gateway(broker, answers)
    http = gateway.http
    none_yet = await http.get("/v1/files")
    assert none_yet.status_code == 501
    check(none_yet, "get", "/v1/files")
    async with anyio.create_task_group() as group:
        await group.start(gateway.run)
        await gateway.until_on()
        id = await gateway.batch(lines(2))
        batch = await gateway.ended(id)
        file = batch["output_file_id"]
        for path, url, status in (
            ("/v1/batches", "/v1/batches", 200),
            ("/v1/batches", "/v1/batches?limit=0", 400),
            ("/v1/batches/{id}", f"/v1/batches/{id}", 200),
            ("/v1/batches/{id}", "/v1/batches/none", 404),
            ("/v1/files", "/v1/files?order=asc&purpose=batch", 200),
            ("/v1/files/{id}", f"/v1/files/{file}", 200),
            ("/v1/files/{id}", "/v1/files/none", 404),
            ("/v1/files/{id}/content", f"/v1/files/{file}/content", 200),
            ("/v1/files/{id}/content", "/v1/files/none/content", 404),
        ):
            response = await http.get(url)
            assert response.status_code == status, url
            check(response, "get", path)
        check(await http.post(f"/v1/batches/{id}/cancel"), "post", "/v1/batches/{id}/cancel")
        check(await http.post("/v1/batches/none/cancel"), "post", "/v1/batches/{id}/cancel")
        check(await http.post("/v1/batches", json={}), "post", "/v1/batches")
        for sent in ({"file": ("x", b"")}, {"other": ("x", b"")}):
            check(await http.post("/v1/files", files=sent, data={"purpose": "batch"}), "post", "/v1/files")
        for name, status in ((file, 200), ("none", 404)):
            response = await http.delete(f"/v1/files/{name}")
            assert response.status_code == status
            check(response, "delete", "/v1/files/{id}")
        gateway.scope.cancel()


async def test_the_document_is_the_one_that_is_served_without_a_key() -> None:
    async with client(ScriptedCore(), api_key="key", max_n=4) as http:
        served = await http.get("/openapi.json")
        assert served.json() == document(GatewayConfig(max_n=4))
        assert "docs.js" in (await http.get("/docs")).text


async def test_the_key_is_taken_in_every_way_that_is_described() -> None:
    schemes = DOCUMENT["components"]["securitySchemes"]
    sent = {"http": {"authorization": "Bearer key"}, "apiKey": {schemes["x-api-key"]["name"]: "key"}}
    ways = [way for way in DOCUMENT["paths"]["/v1/models"]["get"]["security"] if way]
    assert [name for way in ways for name in way] == list(schemes)
    async with client(ScriptedCore(), api_key="key") as http:
        for scheme in schemes.values():
            assert (await http.get("/v1/models", headers=sent[scheme["type"]])).status_code == 200


async def test_the_routes_of_the_dashboard_answer_as_described() -> None:
    async with with_dashboard() as (_, http):
        for path, url in (("/", "/"), ("/sd", "/sd"), ("/dashboard/requests/{name}", "/dashboard/requests/none")):
            check(await http.get(url), "get", path)
