"""Embeddings, scores and counts of tokens over NATS: the bodies of HTTP's answers, in one message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common.protocol import headers, subjects
from common.protocol.errors import NoWorkers
from common.testing.memory_bus import MemoryBroker
from services.gateway.config import GatewayConfig
from tests.actors.edge import BUNDLE, AsgiClient, ScriptedCore, ScriptedStream, app_of, ids, until
from tests.actors.nats_client import HI, SLUG, front
from tests.actors.test_http_vectors import embed, vector
from tests.actors.test_nats_tenants import tenants

COUNTED = {**HI, "max_tokens": 8, "model": BUNDLE.name}


async def over_http(path: str, body: Any) -> Any:
    client = AsgiClient(app_of(ScriptedCore(embed), GatewayConfig()), path, body)
    await client.run()
    return json.loads(client.body)


async def test_an_embedding_in_one_message() -> None:
    async with front(ScriptedCore(embed)) as setup:
        await setup.client.ask({"input": ["hey", "you two"]}, kind="embeddings")
        last = await setup.client.final()
        body = json.loads(last.data)
        assert [one["embedding"] for one in body["data"]] == [vector(ids("hey")), vector(ids("you two"))]
        assert body["id"].startswith("embd-") and last.headers[headers.SEQUENCE] == "0"
        assert len(setup.client.replies) == 1


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        ("embeddings", "/v1/embeddings", {"input": "hey", "encoding_format": "base64"}),
        ("score", "/v1/score", {"text_1": "hey", "text_2": ["you", "hey"]}),
        ("input_tokens", "/v1/responses/input_tokens", {"input": "hey", "model": BUNDLE.name}),
        ("count_tokens", "/v1/messages/count_tokens", COUNTED),
    ],
)
async def test_the_body_is_that_of_http(kind: str, path: str, body: Any) -> None:
    async with front(ScriptedCore(embed)) as setup:
        await setup.client.ask(body, kind=kind)
        told = json.loads((await setup.client.final()).data)
        expected = await over_http(path, body)
        for answer in (told, expected):
            for name in ("id", "created"):
                answer.pop(name, None)
        assert told == expected


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        ("embeddings", {"input": "a", "dimensions": 0}, "dimensions"),
        ("embeddings", {"input": "a", "normalize": False}, "normalize"),
        ("score", {"text_1": "a"}, "text_2"),
        ("input_tokens", {"input": 5}, "input"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(kind: str, body: Any, param: str) -> None:
    async with front(ScriptedCore(embed)) as setup:
        await setup.client.ask(body, kind=kind)
        await setup.client.final()
        assert setup.client.check_error("invalid_parameter")["param"] == param
        assert not setup.core.streams


async def test_a_count_for_anthropics_clients_fails_in_their_form() -> None:
    async with front() as setup:
        await setup.client.ask({"max_tokens": 8, "model": BUNDLE.name}, kind="count_tokens")
        body = json.loads((await setup.client.final()).data)
        assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"


async def test_another_models_name_is_not_for_this_subject() -> None:
    async with front(ScriptedCore(embed)) as setup:
        for kind, body in (("embeddings", {"input": "a"}), ("input_tokens", {"input": "a"})):
            await setup.client.ask({**body, "model": "gpt-4"}, kind=kind)
        await until(lambda: len(setup.client.finals) == 2)
        assert {reply.headers[headers.ERROR_CODE] for reply in setup.client.finals} == {"model_not_found"}


async def test_a_failure_of_one_input_is_the_answer() -> None:
    def fail(stream: ScriptedStream) -> None:
        stream.give([], error=NoWorkers("none"))

    async with front(ScriptedCore(fail)) as setup:
        await setup.client.ask({"input": ["a", "b"]}, kind="embeddings")
        await setup.client.final()
        setup.client.check_error("no_workers")


async def test_a_cancel_ends_every_input() -> None:
    async with front(ScriptedCore()) as setup:
        await setup.client.ask({"input": ["a"] * 50}, kind="embeddings", **{headers.REQUEST_ID: "job-1"})
        await until(lambda: len(setup.core.live) == 32)
        await setup.client.cancel("job-1")
        await setup.client.final()
        setup.client.check_error("cancelled")
        assert not setup.core.live


async def test_an_answer_that_no_message_holds_is_refused_before_all_is_computed() -> None:
    def large(stream: ScriptedStream) -> None:
        stream._waiting.embedding = bytes(4 * 4096)
        stream.give([], finish="stop")

    async with front(ScriptedCore(large), broker=MemoryBroker(max_payload=100_000)) as setup:
        await setup.client.ask({"input": ["a"] * 200, "encoding_format": "base64"}, kind="embeddings")
        await setup.client.final()
        assert "send fewer inputs, or over HTTP" in setup.client.check_error("payload_too_large")["message"]
        assert len(setup.core.streams) < 50


async def test_a_tenant_has_subjects_of_its_own_for_all_of_it(tmp_path: Path) -> None:
    core = ScriptedCore(embed)
    asked = {
        subjects.embeddings(SLUG): {"input": "hey"},
        subjects.score(SLUG): {"text_1": "hey", "text_2": "you"},
        subjects.input_tokens(SLUG): {"input": "hey"},
        subjects.count_tokens(SLUG): COUNTED,
    }
    async with tenants(tmp_path, core, "acme") as (_, [acme]):
        for subject, body in asked.items():
            await acme.bus.publish(subjects.of_tenant("acme", subject), json.dumps(body).encode(), reply=acme.inbox)
        await until(lambda: len(acme.replies) == len(asked))
        assert not any(headers.ERROR in reply.headers for reply in acme.replies)
        assert {(stream.request.tenant, bool(stream.request.salt)) for stream in core.streams} == {("acme", True)}
