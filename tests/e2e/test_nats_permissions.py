"""What each user of a bus of `penstock up` may say and hear, as a real nats-server enforces it, and that the whole works so."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import nats
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from common.protocol import messages, subjects
from common.protocol.errors import BusRefused
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence
from common.runtime import nats_bus, nats_client
from common.runtime.bus_login import BusLogin, run_folder, write_private
from common.runtime.nats_access import ROLES, USERS, Credentials, draw_credentials, server_config
from tests.fixtures.nats import LocalNatsServer

WORKERS = ("prefill", "decode", "draft", "kvstore")
CLIENTS = ("client", "alice", "monitor")
EVERYTHING = 'authorization { users: [ { user: "watcher", password: "watcher" },'


class Site:
    """A server with every user, a further client, and one who may do everything."""

    def __init__(self, server: LocalNatsServer, known: dict[str, Credentials]) -> None:
        self.server = server
        self.known = known

    @asynccontextmanager
    async def connected(self, user: str, password: str | None = None) -> AsyncIterator[Client]:
        denied: list[str] = []

        async def on_error(error: Exception) -> None:
            denied.append(str(error))

        client = await nats.connect(
            self.server.url,
            user=user,
            password=self.known[user].password if password is None else password,
            error_cb=on_error,
            allow_reconnect=False,
        )
        client.__dict__["denied"] = denied
        try:
            yield client
        finally:
            await client.close()

    async def publishable(self, user: str, wanted: list[str]) -> set[str]:
        """Those of `wanted` that reach somebody who hears everything."""
        heard: set[str] = set()

        async def hear(message: Msg) -> None:
            heard.add(message.subject)

        async with self.connected("watcher", "watcher") as watcher, self.connected(user) as client:
            await watcher.subscribe(">", cb=hear)
            await nats_client.flush(watcher, 5)
            for subject in wanted:
                await client.publish(subject, b"x")
            await nats_client.flush(client, 5)
            await settled(heard, watcher)
        return heard & set(wanted)

    async def audible(self, user: str, subscriptions: list[str], published: list[str]) -> set[str]:
        """Those of `published` that `user` hears with all of `subscriptions`."""
        heard: set[str] = set()

        async def hear(message: Msg) -> None:
            heard.add(message.subject)

        async with self.connected("watcher", "watcher") as watcher, self.connected(user) as client:
            for subject in subscriptions:
                await client.subscribe(subject, cb=hear)
            await nats_client.flush(client, 5)
            for subject in published:
                await watcher.publish(subject, b"x")
            await nats_client.flush(watcher, 5)
            await settled(heard, client)
        return heard


async def settled(heard: set[str], client: Client) -> None:
    """Return once everything that has arrived at `client` was handled."""
    before = -1
    while before != len(heard):
        before = len(heard)
        await nats_client.flush(client, 5)
        while any(subscription.pending_msgs for subscription in client._subs.values()):
            await anyio.sleep(0.01)
        await anyio.sleep(0.05)


@pytest.fixture
def site(nats_server_factory: Callable[[str], LocalNatsServer]) -> Site:
    known = draw_credentials("nats://127.0.0.1", (*USERS, "alice"))
    config = server_config(known).replace("authorization {\n  users: [", EVERYTHING, 1)
    return Site(nats_server_factory(config), known)


REQUESTS = [
    "penstock.v1.chat.some-model",
    "penstock.v1.completions.some-model",
    "penstock.v1.embeddings.some-model",
    "penstock.v1.score.some-model",
    "penstock.v1.input_tokens.some-model",
    "penstock.v1.count_tokens.some-model",
    "penstock.v1.tokenize.some-model",
    "penstock.v1.detokenize.some-model",
    "penstock.v1.cancel.some-id",
    "penstock.v1.batch.some-model",
    "penstock.v1.result.some-line",
]
KEPT = [
    subjects.record("batch", "batch-1"),
    subjects.file_part("file-1", 0),
    subjects.line("some-model", "batch-1", "0"),
    subjects.keep("some-model", "batch-1"),
    subjects.line_result("batch-1", "0"),
]
"""What gateways keep of files and batches."""
STREAM_API = [
    "$JS.API.INFO",
    "$JS.API.STREAM.CREATE.PENSTOCK_LINES",
    "$JS.API.STREAM.PURGE.PENSTOCK_RESULTS",
    "$JS.API.DIRECT.GET.PENSTOCK_FILES",
    "$JS.API.DIRECT.GET.PENSTOCK_RECORDS.penstock.v1.int.batch.record.batch.b",
    "$JS.API.CONSUMER.CREATE.PENSTOCK_LINES.lines-some-model",
    "$JS.API.CONSUMER.MSG.NEXT.PENSTOCK_LINES.lines-some-model",
    "$JS.ACK.PENSTOCK_LINES.lines-some-model.1.1.1.1.0",
]
SRV = ["$SRV.PING", "$SRV.INFO.penstock-decode", "$SRV.STATS"]
INTERNAL = [
    *(subjects.inbox(role, "w-1") for role in ROLES),
    *(subjects.presence(role, "w-1") for role in ROLES),
    *(f"{subjects.replies_of(role)}.connection.7" for role in ROLES),
    *(subjects.kv_events(role, "w-1") for role in ROLES),
]
INBOXES = [f"_INBOX.{user}.abc" for user in CLIENTS] + ["_INBOX.abc"]
OTHERS = [
    "billing.events",
    "$JS.API.STREAM.DELETE.PROD",
    "$JS.API.STREAM.PURGE.PROD",
    "$JS.API.STREAM.DELETE.PENSTOCK_LINES",
    "$JS.API.CONSUMER.DELETE.PENSTOCK_LINES.lines-some-model",
    "$JS.API.STREAM.MSG.GET.PENSTOCK_FILES",
    "$SYS.REQ.SERVER.PING",
    "penstock.v1.else",
    "penstock.v2.chat.x",
]
ASKS = [subjects.explain()]
EVERY_SUBJECT = [*REQUESTS, *ASKS, *SRV, *INTERNAL, *KEPT, *STREAM_API, *INBOXES, *OTHERS]


@pytest.mark.parametrize(("user", "more"), [("client", ASKS), ("alice", [])])
async def test_a_client_asks_and_cancels_and_says_nothing_else(site: Site, user: str, more: list[str]) -> None:
    assert await site.publishable(user, EVERY_SUBJECT) == {*REQUESTS, *more}


async def test_the_monitor_asks_services_about_themselves_and_says_nothing_else(site: Site) -> None:
    assert await site.publishable("monitor", EVERY_SUBJECT) == set(SRV)


@pytest.mark.parametrize("user", CLIENTS)
async def test_clients_hear_heartbeats_and_their_own_inboxes_alone(site: Site, user: str) -> None:
    heartbeats = {subjects.presence(role, "w-1") for role in ROLES}
    for subscriptions in ([">"], ["_INBOX.>", "_INBOX.*.*", "penstock.v1.>", "penstock.v1.int.>", "*.>"], EVERY_SUBJECT):
        heard = await site.audible(user, [*subscriptions, f"_INBOX.{user}.>", subjects.any_presence()], EVERY_SUBJECT)
        assert heard == {f"_INBOX.{user}.abc", *heartbeats}


@pytest.mark.parametrize("role", WORKERS)
async def test_a_worker_is_no_gateway_and_no_other_worker(site: Site, role: str) -> None:
    said = await site.publishable(role, EVERY_SUBJECT)
    assert {subject for subject in said if ".presence." in subject} == {subjects.presence(role, "w-1")}
    caches = {subjects.kv_events(role, "w-1")} if role in ("prefill", "decode") else set()
    assert {subject for subject in said if ".kv." in subject} == caches
    assert not said & {
        *REQUESTS,
        *ASKS,
        *SRV,
        *KEPT,
        *STREAM_API,
        *OTHERS,
        "_INBOX.client.abc",
        "_INBOX.alice.abc",
        "_INBOX.abc",
    }
    heard = await site.audible(role, [">", *EVERY_SUBJECT], EVERY_SUBJECT)
    assert not heard & {*REQUESTS, *ASKS, *INBOXES, *OTHERS, *(subjects.kv_events(other, "w-1") for other in ROLES)}
    assert {subject for subject in heard if ".inbox." in subject} == {subjects.inbox(role, "w-1")}
    assert {subject for subject in heard if ".reply." in subject} == {f"{subjects.replies_of(role)}.connection.7"}


async def test_a_gateway_answers_clients_and_asks_workers_and_touches_nothing_else(site: Site) -> None:
    said = await site.publishable("gateway", EVERY_SUBJECT)
    assert said >= {*INBOXES, *KEPT, *STREAM_API, *(subjects.inbox(role, "w-1") for role in WORKERS)}
    assert not said & {*REQUESTS, *ASKS, *SRV, *OTHERS, *(subjects.presence(role, "w-1") for role in WORKERS)}
    caches = {subjects.kv_events(role, "w-1") for role in ROLES}
    assert not said & caches
    heard = await site.audible("gateway", [">", *EVERY_SUBJECT], EVERY_SUBJECT)
    assert not heard & {*INBOXES, *OTHERS} and heard >= caches


@pytest.mark.parametrize("user", CLIENTS)
async def test_the_server_reports_nothing_to_where_a_user_may_not_publish(site: Site, user: str) -> None:
    """Message tracing and replies are two more ways to have the server publish."""
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(message.subject)

    async with site.connected("watcher", "watcher") as watcher, site.connected(user) as client:
        await watcher.subscribe("penstock.v1.int.>", cb=hear)
        await nats_client.flush(watcher, 5)
        forged = subjects.presence("decode", "decode-1")
        for subject in (*REQUESTS, "$SRV.PING"):
            await client.publish(subject, b"x", headers={"Nats-Trace-Dest": forged})
            await client.publish(subject, b"x", reply=forged)  # nobody responds: told to the sender's own subscriptions only
        await nats_client.flush(client, 5)
        await anyio.sleep(0.1)
    assert heard == []


@pytest.mark.parametrize(
    "login", [{}, {"user": "client"}, {"user": "client", "pass": "wrong"}, {"user": "nobody", "pass": "x"}]
)
def test_nobody_is_let_in_without_credentials(site: Site, login: dict[str, str]) -> None:
    with socket.create_connection(("127.0.0.1", site.server.port), timeout=5) as connection:
        options = json.dumps({"verbose": False, **login})
        connection.sendall(f"CONNECT {options}\r\nPUB penstock.v1.chat.x 1\r\nx\r\nPING\r\n".encode())
        answer = b""
        while more := connection.recv(4096):
            answer += more
    assert b"Authorization Violation" in answer and b"PONG" not in answer


async def test_wrong_credentials_are_an_error_of_their_own(site: Site) -> None:
    with pytest.raises(BusRefused, match="wants other credentials"):
        await nats_bus.connect(site.server.url, name="test", connect_timeout_s=0.5)


async def test_what_the_server_did_not_allow_is_known_and_logged(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "run" / "client.json"
    write_private(path, msgspec.json.encode(site.known["client"]).decode())
    bus = await nats_bus.connect(site.server.url, name="test", login=BusLogin(credentials_file=str(path)))
    try:
        forged = Presence(worker=WorkerRef("gateway", "gateway-1", 2**62), state="ready")
        await bus.publish(subjects.presence("gateway", "gateway-1"), messages.encode(forged))
        await bus.flush()
        await anyio.sleep(0.05)
        assert len(bus.denied) == 1 and "penstock.v1.int.presence.gateway.gateway-1" in bus.denied[0]
    finally:
        await bus.close()


def test_the_configuration_is_one_that_the_server_reads_as_meant(site: Site) -> None:
    config = (site.server.directory / "nats-server.conf").read_text()
    for user in USERS:
        assert json.dumps(site.known[user].password) in config


# nats-py leaves the sockets of attempts that were refused to the garbage collector
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_worker_comes_back_to_a_bus_that_has_new_passwords(
    nats_server_factory: Callable[[str], LocalNatsServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when `penstock up` ends and another one starts on its port."""
    monkeypatch.setenv("PENSTOCK_HOME", str(tmp_path))
    known = draw_credentials("nats://127.0.0.1")
    server = nats_server_factory(server_config(known))
    path = run_folder(server.port) / "decode.json"
    write_private(path, msgspec.json.encode(known["decode"]).decode())
    bus = await nats_bus.connect(server.url, name="test", user="decode")
    try:
        server.stop()
        path.unlink()
        with anyio.fail_after(20):
            while bus.connected:
                await anyio.sleep(0.01)
            known = draw_credentials("nats://127.0.0.1")
            server.more_config = server_config(known)
            server.start()
            await anyio.sleep(0.5)
            assert not bus.connected
            write_private(path, msgspec.json.encode(known["decode"]).decode())
            while not bus.connected:
                await anyio.sleep(0.01)
            await bus.flush()
    finally:
        await bus.close()
