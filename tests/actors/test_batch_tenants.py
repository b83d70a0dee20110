"""Files and batches of tenants: each has its own, within its limits, and its lines run as its requests, behind the others."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import httpx
import msgspec
import pytest

from common.protocol import subjects
from common.testing.memory_bus import MemoryBroker
from services.gateway.batches.records import FileRecord
from services.gateway.batches.store import Store
from services.gateway.tenants import salt_of
from services.gateway.usage import UsageEvent
from tests.actors.edge import ScriptedStream
from tests.actors.http_client import CHAT, HI, MODEL, check_error
from tests.actors.test_batches import Gateway, Script, answers, batch_of, hangs, lines, running
from tests.actors.test_batches import broker as broker  # a fixture
from tests.actors.test_http_tenants import ACME, ZOO, key_file
from tests.actors.test_http_vectors import embed

pytestmark = pytest.mark.virtual_time

OPERATOR = "pk-of-the-operator"
TABLES = "[tenants.acme]\n[tenants.zoo]\n"
COMPLETIONS, RESPONSES, EMBEDDINGS = "/v1/completions", "/v1/responses", "/v1/embeddings"


def gateway(broker: MemoryBroker, tmp_path: Path, script: Script = answers, *, tables: str = TABLES) -> Gateway:
    return Gateway(broker, script, api_keys=str(key_file(tmp_path, tables)), api_key=OPERATOR)


@asynccontextmanager
async def clients(one: Gateway) -> AsyncIterator[list[httpx.AsyncClient]]:
    """The operator, acme and zoo."""
    async with running(one), one.client(OPERATOR) as operator, one.client(ACME) as acme, one.client(ZOO) as zoo:
        yield [operator, acme, zoo]


async def upload(http: httpx.AsyncClient, content: bytes) -> httpx.Response:
    return await http.post("/v1/files", files={"file": ("x.jsonl", content)}, data={"purpose": "batch"})


async def ended(http: httpx.AsyncClient, id: str) -> dict[str, Any]:
    with anyio.fail_after(15):
        while True:
            batch = (await http.get(f"/v1/batches/{id}")).json()
            if batch["status"] in ("completed", "failed", "cancelled"):
                return batch
            await anyio.sleep(0.02)


async def results(http: httpx.AsyncClient, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await http.get(f"/v1/files/{file}/content")).text.splitlines()]


async def test_what_is_a_tenants_does_not_exist_for_others(broker: MemoryBroker, tmp_path: Path) -> None:
    one = gateway(broker, tmp_path)
    async with clients(one) as [operator, acme, zoo]:
        batch = await ended(acme, await batch_of(acme, lines(3)))
        files = {batch["input_file_id"], batch["output_file_id"]}
        assert {file["id"] for file in (await acme.get("/v1/files")).json()["data"]} == files
        assert [found["id"] for found in (await acme.get("/v1/batches")).json()["data"]] == [batch["id"]]
        for other in (operator, zoo):
            assert (await other.get("/v1/files")).json()["data"] == (await other.get("/v1/batches")).json()["data"] == []
            for file in files:
                for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
                    check_error(await other.request(method, f"/v1/files/{file}{path}"), 404, "file_not_found")
            for method, path in (("GET", ""), ("POST", "/cancel")):
                check_error(await other.request(method, f"/v1/batches/{batch['id']}{path}"), 404, "batch_not_found")
            body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
            check_error(await other.post("/v1/batches", json=body), 404, "file_not_found")
        for file in files:
            assert (await acme.delete(f"/v1/files/{file}")).json()["deleted"]


async def test_what_an_operator_stored_before_there_were_tenants_stays_readable(broker: MemoryBroker, tmp_path: Path) -> None:
    one = gateway(broker, tmp_path)
    async with clients(one) as [operator, acme, _]:
        await one.batches.store(None)
        content = b"".join(json.dumps(line).encode() + b"\n" for line in lines(2))
        kept = FileRecord(id="file-0a", filename="old", purpose="batch", num_bytes=len(content), num_parts=1, created_at=1)
        await one.bus.streams.append("penstock.v1.int.batch.record.file.file-0a", msgspec.json.encode(kept))
        await one.bus.streams.append("penstock.v1.int.batch.file.file-0a.0", content)
        assert (await operator.get("/v1/files/file-0a/content")).content == content
        check_error(await acme.get("/v1/files/file-0a"), 404, "file_not_found")
        body = {"input_file_id": "file-0a", "endpoint": CHAT, "completion_window": "24h"}
        batch = await ended(operator, (await operator.post("/v1/batches", json=body)).json()["id"])
        assert batch["request_counts"]["completed"] == 2
        assert all(stream.request.tenant == "" for stream in one.core.streams)


async def test_lines_are_their_tenants_requests_behind_its_others_and_count_in_no_rate(
    broker: MemoryBroker, tmp_path: Path
) -> None:
    limits = "requests_per_minute = 1\ntokens_per_minute = 1\nmax_concurrent = 1\nweight = 3\n"
    one = gateway(broker, tmp_path, tables=f"[tenants.acme]\n{limits}[tenants.zoo]\n")
    told: list[UsageEvent] = []
    one.door.tenants["acme"].on_usage = told.append
    async with clients(one) as [_, acme, _]:
        batch = await ended(acme, await batch_of(acme, lines(20)))
        assert batch["request_counts"]["completed"] == 20
        asked = [stream.request for stream in one.core.streams]
        assert {(each.tenant, each.weight, each.salt) for each in asked} == {("acme", 3.0, salt_of("acme", None))}
        assert all(each.background for each in asked)
        assert [(event.tenant, event.edge, event.code) for event in told] == [("acme", "batch", "")] * 20
        assert sum(event.completion_tokens for event in told) == 20 * len("yes")
        assert one.door.tenants["acme"].num_running == 0
        assert (await acme.post(CHAT, json=HI)).status_code == 200, "its requests' limits are untouched"
        check_error(await acme.post(CHAT, json=HI), 429, "rate_limit_exceeded")


BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI["messages"]},
    COMPLETIONS: {"prompt": "hi"},
    RESPONSES: {"input": "hi"},
    EMBEDDINGS: {"input": ["hi", "you"]},
}


@pytest.mark.parametrize(
    ("endpoint", "what"),
    [(CHAT, "chat.completion"), (COMPLETIONS, "text_completion"), (RESPONSES, "response"), (EMBEDDINGS, "list")],
)
async def test_lines_may_be_for_each_of_openais_endpoints(
    broker: MemoryBroker, tmp_path: Path, endpoint: str, what: str
) -> None:
    def script(stream: ScriptedStream) -> None:
        (embed if stream.request.pooling else answers)(stream)

    one = gateway(broker, tmp_path, script)
    good = {"custom_id": "good", "method": "POST", "url": endpoint, "body": {"model": MODEL, **BODIES[endpoint]}}
    bad = {"custom_id": "bad", "method": "POST", "url": endpoint, "body": {"model": MODEL, "stream": True}}
    async with clients(one) as [_, acme, _]:
        batch = await ended(acme, await batch_of(acme, [good, bad], endpoint))
        assert batch["status"] == "completed" and batch["endpoint"] == endpoint
        (answered,) = await results(acme, batch["output_file_id"])
        assert answered["custom_id"] == "good" and answered["response"]["body"]["object"] == what
        (refused,) = await results(acme, batch["error_file_id"])
        assert refused["custom_id"] == "bad" and refused["response"]["status_code"] == 400
        assert all(stream.request.background and stream.request.tenant == "acme" for stream in one.core.streams)
        for other in BODIES.keys() - {endpoint}:
            failed = await ended(acme, await batch_of(acme, [good], other))
            assert failed["status"] == "failed" and failed["errors"]["data"][0]["code"] == "invalid_url"


async def test_an_embedding_line_takes_one_place_at_a_time(broker: MemoryBroker, tmp_path: Path) -> None:
    one = gateway(broker, tmp_path, hangs)
    line = {"custom_id": "x", "method": "POST", "url": EMBEDDINGS, "body": {"model": MODEL, "input": ["hi"] * 40}}
    async with clients(one) as [_, acme, _]:
        id = await batch_of(acme, [line], EMBEDDINGS)
        most = 0
        with anyio.fail_after(10):
            while (await acme.get(f"/v1/batches/{id}")).json()["status"] != "completed":
                most = max(most, len(one.core.live))
                for stream in one.core.live:
                    embed(stream)
                await anyio.sleep(0.002)
        assert most == 1 and len(one.core.streams) == 40


async def test_batches_and_bytes_of_a_tenant_are_bounded(broker: MemoryBroker, tmp_path: Path) -> None:
    tables = "[tenants.acme]\nmax_batches = 1\nmax_files_mb = 1\n[tenants.zoo]\n"
    one = gateway(broker, tmp_path, hangs, tables=tables)
    async with clients(one) as [_, acme, zoo]:
        id = await batch_of(acme, lines(1))
        file = (await acme.get(f"/v1/batches/{id}")).json()["input_file_id"]
        body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
        check_error(await acme.post("/v1/batches", json=body), 429, "too_many_batches")
        await batch_of(zoo, lines(1))
        await acme.post(f"/v1/batches/{id}/cancel")
        await ended(acme, id)
        assert (await acme.post("/v1/batches", json=body)).status_code == 200

        first = await upload(acme, b"x" * 900_000)
        assert first.status_code == 200
        check_error(await upload(acme, b"x" * 200_000), 413, "tenant_storage_full")
        assert (await upload(zoo, b"x" * 2_000_000)).status_code == 200
        kept = sum(len(stored.data) for stored in await one.bus.streams.read(subjects.FILES, subjects.any_file_part()))
        assert kept < 3_000_000, "nothing of the refused one is left"
        await acme.delete(f"/v1/files/{first.json()['id']}")
        assert (await upload(acme, b"x" * 200_000)).status_code == 200


async def test_models_that_a_tenant_may_not_use_are_not_used_by_its_lines(broker: MemoryBroker, tmp_path: Path) -> None:
    one = gateway(broker, tmp_path, tables='[tenants.acme]\nmodels = ["another"]\n[tenants.zoo]\n')
    async with clients(one) as [_, acme, _]:
        batch = await ended(acme, await batch_of(acme, lines(2)))
        found = await results(acme, batch["error_file_id"])
        assert [result["response"]["body"]["error"]["code"] for result in found] == ["forbidden"] * 2
        assert not one.core.streams


async def test_lines_of_a_tenant_that_is_no_more_are_not_run(broker: MemoryBroker, tmp_path: Path) -> None:
    one = gateway(broker, tmp_path)
    async with clients(one) as [_, acme, _]:
        store: Store = await one.batches.store(one.door.tenants["acme"])
        one.door.tenants = {}
        batch = await ended(acme, await batch_of(acme, lines(2)))
        assert batch["request_counts"]["failed"] == 2 and not one.core.streams
        assert (await store.batch(batch["id"])).failed == 2


async def test_a_gateway_without_tenants_leaves_their_lines_to_others(broker: MemoryBroker, tmp_path: Path) -> None:
    without, other = Gateway(broker, answers), gateway(broker, tmp_path)
    async with running(without), running(other), other.client(ACME) as acme:
        batch = await ended(acme, await batch_of(acme, lines(4)))
        assert batch["request_counts"]["completed"] == 4
    assert not without.core.streams


async def test_a_killed_gateway_leaves_a_tenants_batch_to_another_one(broker: MemoryBroker, tmp_path: Path) -> None:
    def answers_some(stream: ScriptedStream) -> None:
        if len(first.core.streams) <= 5:
            answers(stream)

    first, second = gateway(broker, tmp_path, answers_some), gateway(broker, tmp_path)
    async with running(first), first.client(ACME) as acme:
        id = await batch_of(acme, lines(20))
        with anyio.fail_after(5):
            while (await acme.get(f"/v1/batches/{id}")).json()["request_counts"]["completed"] < 5:
                await anyio.sleep(0.02)
        first.kill()
        async with running(second), second.client(ACME) as acme:
            batch = await ended(acme, id)
            assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
            assert len({result["custom_id"] for result in await results(acme, batch["output_file_id"])}) == 20
    assert {stream.request.tenant for stream in second.core.streams} == {"acme"}
