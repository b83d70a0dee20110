"""A kvstore on one host, workers on the other: prefixes are read over NIXL and TCP, the same tokens, whatever the link does."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
import pytest_asyncio

from tests.e2e.stack import ROOT, Stack
from tests.fixtures.nats import LocalNatsServer
from tests.fixtures.two_hosts import LINK, TwoHosts

pytest.importorskip("nixl", reason="NIXL is not installed: pip install --no-deps nixl nixl-cu13")

pytestmark = [pytest.mark.asyncio(loop_scope="class"), pytest.mark.timeout(300), pytest.mark.slow]

NIXL = ("--kv-transfer", "nixl", "--nixl-interface", LINK, "--nixl-transports", "tcp")
PROMPT_TOKENS, PREFIX_TOKENS = 250, 240
ANSWER_TOKENS = 16
BATCHES = {"prefill": 8, "decode": 8, "partition": 2, "healed": 8, "killed": 2, "restarted": 8}
"""Prompts of each test, all of which host 0's store has been given. Each is asked once on host 1, which keeps what it saw."""


def prompts(batch: str) -> list[list[int]]:
    dice = random.Random(batch)
    return [[dice.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(BATCHES[batch])]


class Site:
    """`expected`: what a worker of host 0 has answered, which computed everything."""

    def __init__(self, stack: Stack, hosts: TwoHosts, server: LocalNatsServer) -> None:
        self.stack = stack
        self.hosts = hosts
        self.server = server
        self.expected: dict[str, list[str]] = {}
        self.store = self.decode = ""

    async def start(self, role: str, host: int, *flags: str, name: str = "") -> str:
        """A service on a host. Workers fetch what there is, however long that was measured to take."""
        shm_dir = self.stack.directory / f"shm-{host}"
        shm_dir.mkdir(exist_ok=True)
        more = ("--shm-dir", str(shm_dir), "--nats-url", self.hosts.nats_url(host, self.server.port), *NIXL, *flags)
        paths = [str(ROOT / "tests/chaos/inject"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {"CHAOS": "fetch=always", "PYTHONPATH": os.pathsep.join(paths)}
        within = self.hosts.within(host)
        return await self.stack.start(role, *more, within=within, environment=environment, name=name)  # pyright: ignore[reportArgumentType]

    async def start_store(self, name: str = "") -> str:
        folder: Path = self.stack.directory / "kv"
        return await self.start("kvstore", 0, "--capacity-mb", "1024", "--kv-disk", str(folder), "--kv-disk-gb", "2", name=name)

    async def ask(self, asked: list[list[int]]) -> list[str]:
        replies = [await self.stack.complete(prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True) for prompt in asked]
        assert [(reply.error, reply.finish) for reply in replies] == [(None, "length")] * len(asked)
        return [reply.text for reply in replies]

    async def answers(self, batch: str) -> bool:
        """Ask the prompts of a batch: the same tokens as ever."""
        return await self.ask(prompts(batch)) == self.expected[batch]

    def remote_tokens(self, worker: str) -> int:
        return self.stack.presence(worker).traffic.remote_tokens

    async def can_read(self, worker: str, times: int, within_s: float = 60) -> None:
        """Wait until a worker's log says so often that its path to the store works."""
        with anyio.fail_after(within_s):
            while self.log(worker).count("kv_path ") < times:
                await anyio.sleep(0.1)

    def log(self, worker: str) -> str:
        return "\n".join(line for line in self.stack.log(worker).splitlines() if self.store in line)

    async def reads(self, worker: str, batch: str) -> None:
        """Ask prompts of a batch, one after the other, until one of them was read from the store; all get the same tokens. A
        store that is slow for a moment is left alone for some seconds."""
        before = self.remote_tokens(worker)
        for prompt, expected in zip(prompts(batch), self.expected[batch], strict=True):
            assert await self.ask([prompt]) == [expected]
            await anyio.sleep(1)  # some heartbeats
            if (read := self.remote_tokens(worker) - before) > 0:
                assert read <= PREFIX_TOKENS
                return
        pytest.fail("nothing was read")


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def site(two_hosts: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A kvstore on host 0, filled by a decode worker there that is gone; a decode worker on host 1."""
    directory = tmp_path_factory.mktemp("stores")
    server = LocalNatsServer(directory / "nats", address="0.0.0.0")
    server.start()
    async with Stack(server.url, directory, engine_flags=("--num-blocks", "700")) as stack:
        made = Site(stack, two_hosts, server)
        await stack.start("gateway", "--direct-max-tokens", "100000")
        made.store, giver = await made.start_store(), await made.start("decode", 0, "--head", "off")
        await stack.ready()
        made.expected = {batch: await made.ask(prompts(batch)) for batch in BATCHES}
        num_blocks = sum(BATCHES.values()) * PREFIX_TOKENS // 16
        with anyio.fail_after(60):
            while not all(tier.blocks >= num_blocks and not tier.queued_blocks for tier in stack.presence(made.store).tiers):
                await anyio.sleep(0.1)
        stack.kill(giver)
        made.decode = await made.start("decode", 1, "--head", "off", "--nixl-timeout-s", "4")
        await stack.ready()
        await made.can_read(made.decode, 1)
        yield made
    server.stop()


class TestStoresOfTwoHosts:
    async def test_a_decode_worker_reads_the_other_hosts_store(self, site: Site) -> None:
        assert site.stack.presence(site.store).host != site.stack.presence(site.decode).host
        await site.reads(site.decode, "decode")
        await site.stack.clean()
        assert site.stack.presence(site.store).traffic.leases == 0

    async def test_a_partition_costs_computation_and_heals(self, site: Site) -> None:
        before = site.remote_tokens(site.decode)
        site.hosts.link("down")
        assert await site.answers("partition")
        assert site.remote_tokens(site.decode) == before
        site.hosts.link("up")
        await site.can_read(site.decode, 2)
        await site.reads(site.decode, "healed")
        await site.stack.clean(within_s=5)

    async def test_a_store_that_is_killed_is_missed_by_nobody_and_read_again_once_it_is_back(self, site: Site) -> None:
        site.stack.kill(site.store)
        assert await site.answers("killed")
        tried = site.log(site.decode).count("kv_path ")
        await site.start_store(name=site.store)
        await site.stack.ready(site.store)
        await site.can_read(site.decode, tried + 1)
        await site.reads(site.decode, "restarted")
        await site.stack.clean(within_s=5)

    async def test_a_prefill_worker_reads_the_other_hosts_store(self, site: Site) -> None:
        site.stack.kill("gateway-0")
        prefill = await site.start("prefill", 1, "--nixl-timeout-s", "4")
        await site.stack.start("gateway", "--direct-max-tokens", "-1", name="gateway-0")
        await site.stack.ready()
        await site.can_read(prefill, 1)
        await site.reads(prefill, "prefill")
        await site.stack.clean()
