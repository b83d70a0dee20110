"""Tenants over NATS: a subject, inboxes and ids of their own, and what they used."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from common.protocol import headers, subjects
from common.runtime.bus import BusMessage
from common.runtime.metrics import Metrics
from common.testing.memory_bus import MemoryBroker, MemoryBus
from services.gateway.usage import MAX_LABELS, OTHERS, UsageEvent, UsageReports
from tests.actors.edge import ScriptedCore, until
from tests.actors.nats_client import HI, SLUG, Setup, front, says

CHAT = subjects.chat(SLUG)


class Tenant:
    """A tenant's client, with an inbox below its name."""

    def __init__(self, bus: MemoryBus, name: str) -> None:
        self.bus, self.name = bus, name
        self.inbox = f"_INBOX.{name}.abc"
        self.replies: list[BusMessage] = []

    async def ask(self, *, reply: str | None = None, request: str = "", tenant: str = "", **body: object) -> None:
        fields = {headers.REQUEST_ID: request} if request else {}
        subject = subjects.of_tenant(tenant or self.name, CHAT)
        data = json.dumps({**HI, **body}).encode()
        await self.bus.publish(subject, data, reply=self.inbox if reply is None else reply, headers=fields)

    async def cancel(self, request: str, *, reply: str | None = None) -> None:
        subject = subjects.of_tenant(self.name, subjects.cancel(request))
        await self.bus.publish(subject, b"", reply=self.inbox if reply is None else reply)

    async def final(self) -> BusMessage:
        await until(lambda: any(headers.FINAL in reply.headers for reply in self.replies))
        return self.replies[-1]


@asynccontextmanager
async def tenants(
    tmp_path: Path, core: ScriptedCore, *names: str, tables: str = "[tenants.acme]\n[tenants.zoo]\n"
) -> AsyncIterator[tuple[Setup, list[Tenant]]]:
    path = tmp_path / "keys.toml"
    path.write_text(tables)
    async with front(core, api_keys=str(path)) as setup:
        clients = [Tenant(setup.broker.connect(name), name) for name in names]
        for client in clients:
            await client.bus.subscribe(f"_INBOX.{client.name}.>", client.replies.append)
        yield setup, clients


async def test_a_tenant_asks_below_its_own_subject_and_has_its_limits_there(tmp_path: Path) -> None:
    tables = "[tenants.acme]\nrequests_per_minute = 1\nweight = 2\n[tenants.zoo]\n"
    core = says("hello")
    async with tenants(tmp_path, core, "acme", tables=tables) as (_, [acme]):
        await acme.ask()
        assert (await acme.final()).headers[headers.FINAL] == "1"
        assert (core.streams[0].request.tenant, core.streams[0].request.weight) == ("acme", 2.0)
        acme.replies.clear()
        await acme.ask()
        refused = await acme.final()
        assert refused.headers[headers.ERROR_CODE] == "rate_limit_exceeded"
        assert 58 <= int(refused.headers[headers.RETRY_AFTER]) <= 60
    assert len(core.streams) == 1


async def test_a_tenant_that_is_not_in_the_file_is_refused(tmp_path: Path) -> None:
    core = says("hello")
    async with tenants(tmp_path, core, "nobody") as (_, [nobody]):
        await nobody.ask()
        assert (await nobody.final()).headers[headers.ERROR_CODE] == "forbidden"
    assert not core.streams


@pytest.mark.parametrize("reply", ["_INBOX.zoo.abc", "_INBOX.acme", "_INBOX.acmeish.x", "_INBOX.x", "penstock.v1.t.acme.x", ""])
async def test_a_tenant_is_answered_on_inboxes_of_its_own_only(tmp_path: Path, reply: str) -> None:
    core = says("hello")
    async with tenants(tmp_path, core, "acme", "zoo") as (setup, [acme, zoo]):
        await acme.ask(reply=reply)
        await acme.ask()  # handled after it
        await acme.final()
        assert not zoo.replies and len(core.streams) == 1
        assert setup.dropped("unsafe_reply" if reply else "no_reply").endswith(" 1.0")


async def test_two_tenants_may_use_the_same_id_and_each_cancels_its_own(tmp_path: Path) -> None:
    core = ScriptedCore()
    async with tenants(tmp_path, core, "acme", "zoo") as (_, [acme, zoo]):
        await acme.ask(request="job-1")
        await zoo.ask(request="job-1")
        await until(lambda: len(core.streams) == 2)
        await zoo.cancel("job-1", reply=acme.inbox)  # knows acme's inbox, and may not speak for it
        await zoo.bus.publish(subjects.cancel("job-1"), b"", reply=acme.inbox)
        await anyio.sleep(0.05)
        assert len(core.live) == 2
        await zoo.cancel("job-1")
        assert (await zoo.final()).headers[headers.ERROR_CODE] == "cancelled"
        assert len(core.live) == 1 and not acme.replies
        await acme.cancel("job-1")
        assert (await acme.final()).headers[headers.ERROR_CODE] == "cancelled"


async def test_an_id_that_the_gateway_minted_is_its_tenants_too(tmp_path: Path) -> None:
    core = ScriptedCore()
    async with tenants(tmp_path, core, "acme", "zoo") as (_, [acme, zoo]):
        await acme.ask()
        stream = await core.nth(0)
        stream.say("h")
        await until(lambda: bool(acme.replies))
        minted = acme.replies[0].headers[headers.REQUEST_ID]
        await zoo.cancel(minted)
        await zoo.bus.publish(subjects.cancel(minted), b"")
        await anyio.sleep(0.05)
        assert len(core.live) == 1
        await acme.cancel(minted)
        assert (await acme.final()).headers[headers.ERROR_CODE] == "cancelled"


async def test_without_a_file_nobody_listens_to_tenants_subjects() -> None:
    async with front(says("hello")) as setup:
        acme = setup.broker.connect("acme")
        assert await acme.has_listener(subjects.of_tenant("acme", CHAT)) is False


def event(tenant: str, **more: object) -> UsageEvent:
    given: dict[str, object] = {
        "tenant": tenant,
        "request": "chatcmpl-1",
        "client_id": "job-1",
        "edge": "nats",
        "model": "m",
        "status": 200,
        "code": "",
        "prompt_tokens": 10,
        "completion_tokens": 5,
        "cached_tokens": 0,
        "at": 1.0,
        "duration_s": 0.1,
    }
    return UsageEvent(**(given | more))  # pyright: ignore[reportArgumentType]


async def test_what_a_tenant_used_is_counted_and_told_on_its_subject() -> None:
    broker, metrics = MemoryBroker(), Metrics(role="gateway")
    reports, heard = UsageReports(metrics), list[BusMessage]()
    await broker.connect("books").subscribe("penstock.v1.usage.*", heard.append)
    async with anyio.create_task_group() as group:
        group.start_soon(reports.run, broker.connect("gateway"))
        reports.add(event("acme"))
        reports.add(event("zoo", code="no_workers", completion_tokens=0))
        await until(lambda: len(heard) == 2)
        group.cancel_scope.cancel()
    assert [message.subject for message in heard] == ["penstock.v1.usage.acme", "penstock.v1.usage.zoo"]
    assert json.loads(heard[0].data)["completion_tokens"] == 5
    page = metrics.render().decode()
    assert 'penstock_tenant_prompt_tokens_total{tenant="acme"} 10.0' in page
    assert 'penstock_tenant_requests_total{code="no_workers",tenant="zoo"} 1.0' in page


async def test_labels_and_waiting_events_are_bounded() -> None:
    metrics = Metrics(role="gateway")
    reports = UsageReports(metrics)
    for number in range(12_000):
        reports.add(event(f"tenant-{number % (MAX_LABELS + 50)}"))
    page = metrics.render().decode()
    assert page.count("penstock_tenant_prompt_tokens_total{") == MAX_LABELS + 1
    assert f'penstock_tenant_prompt_tokens_total{{tenant="{OTHERS}"}}' in page
    assert "penstock_usage_events_lost_total 2000.0" in page
