"""Batches of gateways that come and go, on the memory bus, with a core that plays a script."""

from __future__ import annotations

import functools
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

from common.protocol import headers, subjects
from common.protocol.errors import InternalError, NoWorkers, RequestTimeout
from common.runtime.bus import BusMessage
from common.testing.memory_bus import MemoryBroker, MemoryBus
from common.testing.memory_streams import MemoryStreams
from services.gateway.batches import keeper, runner, taking
from services.gateway.batches.service import Batches
from services.gateway.catalog import Catalog, OfferedModel
from services.gateway.config import GatewayConfig
from services.gateway.door import Door
from services.gateway.http import create_app
from tests.actors.edge import BUNDLE, ScriptedCore, ScriptedStream
from tests.actors.http_client import CHAT, MODEL, check_error
from tests.actors.test_many_models import ONE, models, over_http

pytestmark = pytest.mark.virtual_time

Script = Callable[[ScriptedStream], None]
SLUG = subjects.slug(MODEL)


def answers(stream: ScriptedStream) -> None:
    stream.say("yes", finish="stop")


def hangs(stream: ScriptedStream) -> None:
    return None


class Gateway:
    """One gateway's batches, with its HTTP routes. `kill` is kill -9."""

    def __init__(self, broker: MemoryBroker, script: Script, *, room: int = 8, **settings: Any) -> None:
        self.core = ScriptedCore(script)
        self._num_places = room
        self.bus: MemoryBus = broker.connect("gateway")
        config = GatewayConfig(**settings)
        catalog = Catalog.of_one(self.core, BUNDLE, config)
        self.door = Door(config)
        self.batches = Batches(self.core, catalog, self.bus, config, room=self._room, door=self.door)
        app = create_app(self.core, catalog, config, batches=self.batches, door=self.door)
        self._transport = httpx.ASGITransport(app=app)
        self.http = self.client()
        self.scope = anyio.CancelScope()

    def _room(self, model: OfferedModel) -> int:
        return self._num_places - len(self.core.live)

    def client(self, key: str = "") -> httpx.AsyncClient:
        fields = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.AsyncClient(transport=self._transport, base_url="http://gateway", headers=fields)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with self.scope:
            await self.batches.run(task_status=task_status)

    def kill(self) -> None:
        self.bus.kill()
        self.scope.cancel()

    async def until_on(self) -> None:
        with anyio.fail_after(5):
            while (await self.http.get("/v1/files")).status_code != 200:
                await anyio.sleep(0.01)

    async def batch(self, lines: list[dict[str, Any]]) -> str:
        return await batch_of(self.http, lines)

    async def until(self, id: str, done: Callable[[dict[str, Any]], bool], within_s: float = 15) -> dict[str, Any]:
        with anyio.fail_after(within_s):
            while True:
                batch = (await self.http.get(f"/v1/batches/{id}")).json()
                if done(batch):
                    return batch
                await anyio.sleep(0.02)

    async def ended(self, id: str) -> dict[str, Any]:
        return await self.until(id, lambda batch: batch["status"] == "completed")

    async def results(self, file: str | None) -> list[dict[str, Any]]:
        text = "" if file is None else (await self.http.get(f"/v1/files/{file}/content")).text
        return [json.loads(line) for line in text.splitlines()]


async def batch_of(http: httpx.AsyncClient, lines: list[dict[str, Any]], endpoint: str = CHAT) -> str:
    """The id of a new batch."""
    content = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    file = await http.post("/v1/files", files={"file": ("x.jsonl", content)}, data={"purpose": "batch"})
    assert file.status_code == 200, file.text
    body = {"input_file_id": file.json()["id"], "endpoint": endpoint, "completion_window": "24h"}
    batch = await http.post("/v1/batches", json=body)
    assert batch.status_code == 200, batch.text
    return batch.json()["id"]


def lines(count: int) -> list[dict[str, Any]]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    return [{"custom_id": f"line-{n}", "method": "POST", "url": CHAT, "body": body} for n in range(count)]


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> MemoryBroker:
    """With streams, and work that goes to somebody else after half a second of silence."""
    monkeypatch.setattr(taking, "ACK_WAIT_S", 0.5)
    for module in (runner, keeper):
        monkeypatch.setattr(module, "WORKING_EVERY_S", 0.1)
    found = MemoryBroker()
    found.store.enabled = True
    return found


@asynccontextmanager
async def running(*gateways: Gateway) -> AsyncIterator[None]:
    async with anyio.create_task_group() as group:
        for gateway in gateways:
            await group.start(gateway.run)
        yield
        for gateway in gateways:
            gateway.scope.cancel()


async def check_whole(gateway: Gateway, batch: dict[str, Any], count: int) -> None:
    assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
    found = Counter(result["custom_id"] for result in await gateway.results(batch["output_file_id"]))
    assert found == Counter(f"line-{n}" for n in range(count))


async def test_a_killed_gateway_leaves_its_lines_and_its_batch_to_another_one(broker: MemoryBroker) -> None:
    def answers_some(stream: ScriptedStream) -> None:
        if len(first.core.streams) <= 5:
            answers(stream)

    first, second = Gateway(broker, answers_some), Gateway(broker, answers)
    async with running(first):
        id = await first.batch(lines(20))
        await first.until(id, lambda batch: batch["request_counts"]["completed"] == 5)
        assert len(first.core.live) == 8
        first.kill()
        async with running(second):
            await check_whole(second, await second.ended(id), 20)
    assert len(second.core.streams) == 15, "what has a result is not run again"


async def test_a_gateway_that_stops_gives_back_what_it_holds_at_once(
    broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking, "ACK_WAIT_S", 60.0)
    first, second = Gateway(broker, hangs), Gateway(broker, answers)
    async with running(first):
        id = await first.batch(lines(4))
        with anyio.fail_after(5):
            while len(first.core.live) < 4:
                await anyio.sleep(0.01)
        await first.batches.drain()
        assert not first.core.live
        async with running(second):
            await check_whole(second, await second.ended(id), 4)


async def test_a_gateway_that_was_away_for_long_is_superseded_and_counts_nothing_twice(broker: MemoryBroker) -> None:
    first, second = Gateway(broker, hangs), Gateway(broker, answers)
    async with running(first):
        id = await first.batch(lines(12))
        await first.until(id, lambda batch: batch["status"] == "in_progress")
        with anyio.fail_after(5):
            while len(first.core.live) < 8:
                await anyio.sleep(0.01)
        broker.cut(first.bus)
        async with running(second):
            batch = await second.ended(id)
            broker.heal(first.bus)
            for stream in first.core.live:  # as late as that
                answers(stream)
            await anyio.sleep(0.3)
            assert await second.ended(id) == batch
            await check_whole(second, batch, 12)
            files = (await second.http.get("/v1/files")).json()["data"]
    assert [file["purpose"] for file in files].count("batch_output") == 1


async def test_a_server_that_is_away_for_a_while_costs_nothing_but_time(broker: MemoryBroker) -> None:
    one = Gateway(broker, answers, room=1)
    async with running(one):
        id = await one.batch(lines(200))
        for _ in range(3):
            await anyio.sleep(0.1)
            broker.stop()
            await anyio.sleep(0.1)
            broker.start()
        await check_whole(one, await one.ended(id), 200)


@pytest.mark.parametrize("what", ['"status":"completed"', '"status":"finalizing"', "custom_id"])
async def test_an_answer_of_the_server_that_is_lost_loses_no_file(
    broker: MemoryBroker, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = MemoryStreams.append
    lost: list[str] = []

    async def lossy(self: MemoryStreams, subject: str, data: bytes, **more: Any) -> int:
        sequence = await append(self, subject, data, **more)
        if what.encode() in data and subject not in lost:
            lost.append(subject)
            raise RequestTimeout("lost")
        return sequence

    monkeypatch.setattr(MemoryStreams, "append", lossy)
    one = Gateway(broker, answers)
    async with running(one):
        batch = await one.ended(await one.batch(lines(5)))
        await anyio.sleep(0.4)  # until the gateway has asked again, and made of the answer what it will
        await check_whole(one, batch, 5)
    assert lost and len(one.core.streams) == 5


async def test_while_the_server_does_not_answer_files_and_batches_say_so_and_when_to_try_again(broker: MemoryBroker) -> None:
    one = Gateway(broker, answers)
    async with running(one):
        await one.until_on()
        broker.stop()
        for answer in (await one.http.get("/v1/files"), await one.http.get("/v1/batches/batch-1")):
            check_error(answer, 503, "storage_unavailable")
            assert answer.headers["retry-after"] == "1"
        broker.start()
        await one.until_on()


async def test_what_is_nobodys_fault_is_no_result(broker: MemoryBroker) -> None:
    def refuses_first(stream: ScriptedStream) -> None:
        if len(one.core.streams) == 1:
            stream.say(error=NoWorkers("nobody there"))
        else:
            answers(stream)

    one = Gateway(broker, refuses_first)
    async with running(one):
        await check_whole(one, await one.ended(await one.batch(lines(1))), 1)
    assert len(one.core.streams) == 2


async def test_a_line_that_always_fails_ends_with_its_error(broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "MAX_DELAY_S", 0.05)
    one = Gateway(broker, lambda stream: stream.say(error=InternalError("broken")))
    async with running(one):
        batch = await one.ended(await one.batch(lines(1)))
        (result,) = await one.results(batch["error_file_id"])
    assert result["response"]["status_code"] == 500 and result["response"]["body"]["error"]["code"] == "internal_error"
    assert len(one.core.streams) == runner.MAX_DOUBTFUL_RUNS


async def test_nothing_runs_without_room(broker: MemoryBroker) -> None:
    one = Gateway(broker, answers, room=0)
    async with running(one):
        id = await one.batch(lines(3))
        await one.until(id, lambda batch: batch["status"] == "in_progress")
        await anyio.sleep(0.3)
        assert not one.core.streams
        cancelled = await one.http.post(f"/v1/batches/{id}/cancel")
        assert cancelled.json()["status"] == "cancelling"
        batch = await one.until(id, lambda batch: batch["status"] == "cancelled")
    assert batch["request_counts"] == {"total": 3, "completed": 0, "failed": 3}


async def test_without_jetstream_the_routes_say_so_by_name(broker: MemoryBroker) -> None:
    broker.store.enabled = False
    one = Gateway(broker, answers)
    async with running(one):
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches/x"), ("POST", "/v1/batches")):
            answer = await one.http.request(method, path)
            assert answer.status_code == 501 and answer.json()["error"]["code"] == "no_jetstream"
            assert "penstock up" in answer.json()["error"]["message"]


async def test_an_api_key_is_asked_for(broker: MemoryBroker) -> None:
    one = Gateway(broker, answers, api_key="secret")
    async with running(one):
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches"), ("POST", "/v1/batches")):
            assert (await one.http.request(method, path)).status_code == 401


@asynccontextmanager
async def client_of(broker: MemoryBroker) -> AsyncIterator[tuple[MemoryBus, list[BusMessage]]]:
    bus = broker.connect("client")
    heard: list[BusMessage] = []
    await bus.subscribe("_INBOX.client.>", heard.append)
    yield bus, heard
    await bus.close()


async def test_a_line_whose_acknowledgement_would_go_elsewhere_is_dropped(broker: MemoryBroker) -> None:
    one = Gateway(broker, answers)
    async with running(one), client_of(broker) as (bus, _):
        await one.until_on()
        await anyio.sleep(0.05)
        for reply in ("$JS.API.STREAM.PURGE.PENSTOCK_LINES", subjects.line_result("direct", "x"), "billing.events", ""):
            await bus.publish(subjects.batch(SLUG), json.dumps(lines(1)[0]).encode(), reply=reply)
        await anyio.sleep(0.1)
        assert one.batches.endpoints[0].num_errors == 4
        assert not one.core.streams


async def test_a_line_without_a_name_gets_one_that_nobody_guesses(broker: MemoryBroker) -> None:
    one = Gateway(broker, answers)
    async with running(one), client_of(broker) as (bus, heard):
        await one.until_on()
        await anyio.sleep(0.05)
        for _ in range(2):
            await bus.publish(subjects.batch(SLUG), json.dumps(lines(1)[0]).encode(), reply="_INBOX.client.1")
        with anyio.fail_after(5):
            while len(heard) < 2:
                await anyio.sleep(0.01)
        names = {message.headers[headers.REQUEST_ID] for message in heard}
        assert len(names) == 2 and all(len(name) > 32 for name in names)
        assert all(json.loads(message.data)["seq"] > 0 for message in heard)
        await bus.publish(subjects.batch(SLUG), b"{", reply="_INBOX.client.2", headers={headers.REQUEST_ID: "a.b"})
        await bus.publish(subjects.batch(SLUG), b"{", reply="_INBOX.client.3")
        with anyio.fail_after(5):
            while len(heard) < 4:
                await anyio.sleep(0.01)
        assert {message.headers[headers.ERROR_CODE] for message in heard[2:]} == {"invalid_parameter"}


async def test_a_batch_leaves_room_and_waits_behind_interactive_requests(broker: MemoryBroker) -> None:
    """A whole gateway, with a worker of eight places."""
    async with models(ONE, broker=broker, direct_max_tokens=1000) as at, over_http(at) as http:
        (decode,) = at.decode

        def num_running() -> int:
            return sum(not held.finished for held in decode.held.values())

        decode.credits, decode.step_s = 8, 0.02
        await at.until(lambda: at.gateway.cores[0].room_behind == 6)
        body = {"model": ONE, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 25, "ignore_eos": True}
        id = await batch_of(http, [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": body} for n in range(30)])
        await at.until(lambda: num_running() == 6)
        for _ in range(20):
            await anyio.sleep(0.02)
            assert num_running() <= 6, "a quarter of the places stays free"
        began = time.monotonic()
        async with anyio.create_task_group() as group:
            for number in range(2):
                asked = {"prompt": [number + 1, 7], "max_tokens": 2, "ignore_eos": True}
                group.start_soon(functools.partial(http.post, "/v1/completions", json=asked))
        assert time.monotonic() - began < 0.4, "they waited for no line, which takes half a second"
        with anyio.fail_after(20):
            while (await http.get(f"/v1/batches/{id}")).json()["status"] != "completed":
                await anyio.sleep(0.05)
        assert at.gateway.endpoints()[-1].subject == subjects.any_result()
