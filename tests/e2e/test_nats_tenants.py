"""A tenant with the generated permissions can do nothing but its own requests: a real nats-server, every subject tried."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest
from nats.aio.msg import Msg

from common.cli.write_access import write
from common.protocol import headers, subjects
from common.protocol.errors import ConfigError
from common.runtime import nats_client
from common.runtime.bus_login import write_private
from common.runtime.nats_access import ROLES, USERS, draw_credentials, server_config
from tests.e2e.stack import ROOT, Stack
from tests.e2e.test_nats_permissions import EVERY_SUBJECT, EVERYTHING, Site
from tests.fixtures.nats import LocalNatsServer

TENANTS = ("acme", "zoo", "acme2")
MODEL = "smollm2-135m-instruct"


@pytest.fixture
def site(nats_server_factory: Callable[[str], LocalNatsServer]) -> Site:
    known = draw_credentials("nats://127.0.0.1", USERS, tenants=TENANTS)
    config = server_config(known).replace("authorization {\n  users: [", EVERYTHING, 1)
    return Site(nats_server_factory(config), known)


def of(tenant: str) -> list[str]:
    of_model = (subjects.chat, subjects.completions, subjects.embeddings, subjects.score, subjects.count_tokens)
    public = (*(subject("some-model") for subject in of_model), subjects.cancel("some-id"), subjects.explain())
    return [subjects.of_tenant(tenant, subject) for subject in public]


ALL_TENANTS = [subject for tenant in TENANTS for subject in of(tenant)]
USAGE = [subjects.usage(tenant) for tenant in TENANTS]
INBOXES = [f"_INBOX.{tenant}.abc" for tenant in TENANTS]
MORE = [*ALL_TENANTS, *USAGE, *INBOXES, "penstock.v1.t.acme", "penstock.v1.t", "penstock.v1.usage"]
TRIED = [*EVERY_SUBJECT, *MORE]


@pytest.mark.parametrize("tenant", TENANTS)
async def test_a_tenant_says_nothing_but_its_own_requests_and_cancels(site: Site, tenant: str) -> None:
    assert await site.publishable(tenant, TRIED) == set(of(tenant))


async def test_a_tenant_hears_its_inboxes_and_its_usage_and_nothing_else(site: Site) -> None:
    wildcards = [">", "*.>", "_INBOX.>", "_INBOX.*.*", "penstock.v1.>", "penstock.v1.t.>", "penstock.v1.t.acme.>", "$SRV.>"]
    for subscriptions in (wildcards, TRIED):
        heard = await site.audible("acme", [*subscriptions, "_INBOX.acme.>", "penstock.v1.usage.acme"], TRIED)
        assert heard == {"_INBOX.acme.abc", "penstock.v1.usage.acme"}


async def test_a_tenant_joins_no_queue_group_and_has_the_server_publish_nothing(site: Site) -> None:
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(message.subject)

    async with site.connected("watcher", "watcher") as watcher, site.connected("acme") as tenant:
        await watcher.subscribe("penstock.v1.int.>", cb=hear)
        await watcher.subscribe("_INBOX.zoo.>", cb=hear)
        await nats_client.flush(watcher, 5)
        for subject in (*ALL_TENANTS, subjects.chat("some-model")):
            await tenant.subscribe(subject, queue=subjects.GATEWAY_QUEUE, cb=hear)
            for target in (subjects.presence("decode", "decode-1"), "_INBOX.zoo.abc"):
                await tenant.publish(subject, b"x", headers={"Nats-Trace-Dest": target})
                await tenant.publish(subject, b"x", reply=target)
        await nats_client.flush(tenant, 5)
        await watcher.publish(subjects.of_tenant("acme", subjects.chat("some-model")), b"x")
        await nats_client.flush(watcher, 5)
        await anyio.sleep(0.1)
    assert heard == []


async def test_gateways_hear_tenants_and_tell_usage_and_workers_do_neither(site: Site) -> None:
    assert await site.publishable("gateway", TRIED) >= {*USAGE, *INBOXES}
    assert await site.audible("gateway", ["penstock.v1.t.>"], TRIED) == {*ALL_TENANTS, "penstock.v1.t.acme"}
    for role in ROLES:
        if role != "gateway":
            assert not await site.publishable(role, MORE)
            assert not await site.audible(role, [">", *MORE], MORE)
    assert await site.audible("monitor", [">", "penstock.v1.usage.*"], TRIED) == set(USAGE)
    assert not await site.publishable("client", MORE) & {*ALL_TENANTS, *USAGE, *INBOXES}


@pytest.mark.parametrize("tenant", ["gateway", "client", "monitor"])
def test_a_tenant_with_the_name_of_another_user_is_refused(tenant: str) -> None:
    with pytest.raises(ConfigError, match=tenant):
        draw_credentials("nats://127.0.0.1", USERS, tenants=[tenant])


def test_access_for_containers_has_a_login_for_each_tenant(tmp_path: Path) -> None:
    assert write(tmp_path, "nats://nats:4222", ["acme"])
    login = json.loads((tmp_path / "acme" / "login.json").read_bytes())
    assert (login["tenant"], login["inbox_prefix"]) == ("acme", "_INBOX.acme")
    assert "penstock.v1.t.acme.>" in (tmp_path / "nats" / "nats-server.conf").read_text()


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_tenant_is_served_with_real_services_and_reaches_nothing_of_another_one(site: Site, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f"[tenants.{tenant}]\n" for tenant in TENANTS))
    logins = {}
    for tenant in TENANTS:
        logins[tenant] = tmp_path / "logins" / f"{tenant}.json"
        write_private(logins[tenant], msgspec.json.encode(site.known[tenant]).decode())
    url = f"nats://watcher:watcher@127.0.0.1:{site.server.port}"
    async with Stack(url, tmp_path, engine_flags=("--engine", "simulated", "--time-scale", "1")) as stack:
        await stack.start("gateway", "--api-keys", str(keys))
        await stack.start("decode")
        await stack.ready()

        def generate(tenant: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "common.cli", "generate", "Hello", "--model", MODEL, "--max-tokens", "4"]
            env = {"PATH": "/usr/bin:/bin", "PENSTOCK_NATS_CREDENTIALS_FILE": str(logins[tenant])}
            command += ["--nats-url", site.server.url]
            return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)

        ended = await anyio.to_thread.run_sync(generate, "acme")
        assert ended.returncode == 0 and ended.stdout.strip(), ended.stderr

        replies: dict[str, list[Msg]] = {"acme": [], "zoo": []}
        async with site.connected("acme") as acme, site.connected("zoo") as zoo:
            for name, client in (("acme", acme), ("zoo", zoo)):

                async def hear(message: Msg, name: str = name) -> None:
                    replies[name].append(message)

                await client.subscribe(f"_INBOX.{name}.>", cb=hear)
                body = {"messages": [{"role": "user", "content": name}], "max_tokens": 4000, "ignore_eos": True}
                subject = subjects.of_tenant(name, subjects.chat(subjects.slug(MODEL)))
                await client.publish(
                    subject, json.dumps(body).encode(), reply=f"_INBOX.{name}.x", headers={headers.REQUEST_ID: "job"}
                )
            with anyio.fail_after(30):
                while not (replies["acme"] and replies["zoo"]):
                    await anyio.sleep(0.02)
            await zoo.publish(subjects.of_tenant("zoo", subjects.cancel("job")), b"", reply="_INBOX.acme.x")
            await zoo.publish(subjects.of_tenant("acme", subjects.cancel("job")), b"", reply="_INBOX.acme.x")
            await zoo.publish(subjects.cancel("job"), b"", reply="_INBOX.acme.x")
            await zoo.publish(subjects.of_tenant("zoo", subjects.cancel("job")), b"", reply="_INBOX.zoo.x")
            with anyio.fail_after(10):
                while not any(headers.FINAL in (message.headers or {}) for message in replies["zoo"]):
                    await anyio.sleep(0.02)
            before = len(replies["acme"])
            await anyio.sleep(1.0)
            assert len(replies["acme"]) > before, "zoo ended acme's request"
            assert all(message.subject == "_INBOX.acme.x" for message in replies["acme"])
