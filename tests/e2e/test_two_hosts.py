"""Prefill on one host, decode on another, KV over NIXL and TCP between them: the same tokens, whatever the link does."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator

import anyio
import pytest
import pytest_asyncio

from tests.e2e.stack import ROOT, Reply, Stack
from tests.fixtures.nats import LocalNatsServer
from tests.fixtures.two_hosts import LINK, TwoHosts

pytest.importorskip("nixl", reason="NIXL is not installed: pip install --no-deps nixl nixl-cu13")

pytestmark = [pytest.mark.asyncio(loop_scope="class"), pytest.mark.timeout(300), pytest.mark.slow]

NIXL = ("--kv-transfer", "nixl", "--nixl-interface", LINK, "--nixl-transports", "tcp", "--nixl-timeout-s", "0.5")
METRICS = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
ANSWER_TOKENS = 24


class Site:
    def __init__(self, stack: Stack, hosts: TwoHosts, server: LocalNatsServer) -> None:
        self.stack = stack
        self.hosts = hosts
        self.server = server
        self.expected: dict[str, list[str]] = {}
        self.prefill = self.decode = ""

    async def start(self, role: str, host: int, *flags: str, chaos: str = "") -> str:
        shm_dir = self.stack.directory / f"shm-{host}"
        shm_dir.mkdir(exist_ok=True)
        more = ("--shm-dir", str(shm_dir), "--nats-url", self.hosts.nats_url(host, self.server.port), *NIXL, *flags)
        paths = [str(ROOT / "tests/chaos/inject"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        environment = {"CHAOS": chaos, "PYTHONPATH": os.pathsep.join(paths)} if chaos else {}
        within = self.hosts.within(host)
        return await self.stack.start(role, *more, within=within, environment=environment)  # pyright: ignore[reportArgumentType]

    def counted(self, metric: str) -> float:
        """Sum of a metric's samples, as the decode worker's own endpoint gives them on its host."""
        url = f"http://127.0.0.1:{self.stack.presence(self.decode).http_port}/metrics"
        command = [*self.hosts.within(1), sys.executable, "-c", METRICS, url]
        page = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"penstock_{metric}"))

    def remote_bytes(self) -> float:
        return self.counted('kv_transfer_bytes_total{operation="read",path="nixl"}')

    async def pulls_again(self, within_s: float = 60) -> None:
        """Ask until KV comes from the other host: a path that failed is tried again after some seconds."""
        before = self.remote_bytes()
        with anyio.fail_after(within_s):
            while self.remote_bytes() == before:
                await self.ask(prompts(f"probe {random.random()}", count=1))
                await anyio.sleep(0.3)

    async def ask(self, prompts: list[list[int]], *, spread_s: float = 0.0) -> list[str]:
        """The answers to prompts that are sent `spread_s` apart; each must end well."""
        replies = [Reply() for _ in prompts]
        async with anyio.create_task_group() as group:
            for prompt, reply in zip(prompts, replies, strict=True):
                group.start_soon(self._ask, prompt, reply)
                await anyio.sleep(spread_s)
        assert [(reply.error, reply.finish) for reply in replies] == [(None, "length")] * len(prompts)
        return [reply.text for reply in replies]

    async def _ask(self, prompt: list[int], reply: Reply) -> None:
        await self.stack.complete(prompt, reply=reply, max_tokens=ANSWER_TOKENS, ignore_eos=True)


BATCHES = {"same": 6, "partition": 8, "healed": 4, "cut off": 8, "back": 4, "restarted": 4, "faults": 24, "too slow": 2}
"""Prompts of each test."""


def prompts(batch: str, count: int = 0) -> list[list[int]]:
    dice = random.Random(batch)
    return [[dice.randrange(1000, 40000) for _ in range(250)] for _ in range(count or BATCHES[batch])]


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def site(two_hosts: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A prefill worker on host 0, a decode worker on host 1, and what one worker that does both has answered."""
    directory = tmp_path_factory.mktemp("two-hosts")
    server = LocalNatsServer(directory / "nats", address="0.0.0.0")
    server.start()
    async with Stack(server.url, directory, engine_flags=("--num-blocks", "400")) as stack:
        await stack.start("gateway", "--direct-max-tokens", "8")
        alone = await stack.start("decode", "--head", "off", name="alone")
        await stack.ready()
        made = Site(stack, two_hosts, server)
        made.expected = {batch: await made.ask(prompts(batch)) for batch in BATCHES}
        stack.kill(alone)
        made.prefill, made.decode = await made.start("prefill", 0), await made.start("decode", 1, "--head", "off")
        await stack.ready()
        yield made
    server.stop()


class TestTwoHosts:
    async def test_prefill_and_decode_of_two_hosts_give_the_same_tokens(self, site: Site) -> None:
        prefill, decode = site.stack.presence(site.prefill), site.stack.presence(site.decode)
        assert prefill.host != decode.host
        assert await site.ask(prompts("same")) == site.expected["same"]
        assert site.remote_bytes() >= len(prompts("same")) * 200 * 10_000
        assert site.counted("kv_path_gb_per_s") > 0.001
        assert site.counted("kv_remote_failures_total") == 0
        assert "pull_failed" not in site.stack.log(site.decode)
        await site.stack.clean()
        assert site.stack.presence(site.decode).endpoints[0].pull_us_per_token > 0

    async def test_a_partition_of_the_kv_link_loses_no_request_and_heals(self, site: Site) -> None:
        async with anyio.create_task_group() as group:

            async def break_the_link() -> None:
                await anyio.sleep(0.8)
                site.hosts.link("down")

            group.start_soon(break_the_link)
            assert await site.ask(prompts("partition"), spread_s=0.4) == site.expected["partition"]
        assert site.counted("kv_remote_failures_total") > 0
        assert "pull_failed" in site.stack.log(site.decode)
        await site.stack.clean(within_s=3)
        site.hosts.link("up")
        await site.pulls_again()
        assert await site.ask(prompts("healed")) == site.expected["healed"]
        await site.stack.clean()

    async def test_a_host_that_is_cut_off_loses_no_request_and_comes_back(self, site: Site) -> None:
        async with anyio.create_task_group() as group:

            async def cut_off() -> None:
                await anyio.sleep(0.8)
                site.hosts.link("down")
                site.hosts.control(0, "down")

            group.start_soon(cut_off)
            assert await site.ask(prompts("cut off"), spread_s=0.4) == site.expected["cut off"]
        site.hosts.link("up")
        site.hosts.control(0, "up")
        with anyio.fail_after(60):
            while site.stack.state(site.prefill) != "ready":
                await anyio.sleep(0.1)
        await site.pulls_again()
        assert await site.ask(prompts("back")) == site.expected["back"]
        await site.stack.clean(within_s=3)

    async def test_a_prefill_worker_killed_and_started_again_under_its_name_is_read_again(self, site: Site) -> None:
        site.stack.kill(site.prefill)
        again = await site.start("prefill", 0, "--worker-id", site.prefill)
        site.stack.processes[site.prefill] = site.stack.processes.pop(again)
        await site.stack.ready(site.prefill)
        await site.pulls_again()
        assert await site.ask(prompts("restarted")) == site.expected["restarted"]
        await site.stack.clean()

    async def test_operations_that_fail_and_bytes_that_are_wrong_change_no_token_and_lose_no_block(self, site: Site) -> None:
        site.stack.kill(site.decode)
        site.decode = await site.start("decode", 1, "--head", "off", chaos="nixl_fail=16 nixl_damage=7")
        await site.stack.ready()
        assert await site.ask(prompts("faults"), spread_s=0.4) == site.expected["faults"]
        log = site.stack.log(site.decode)
        assert "reason=chaos" in log
        assert "damaged" in log or "was reused" in log or "damages" in log
        assert site.remote_bytes() > 0
        await site.stack.clean()

    async def test_a_path_slower_than_promised_is_an_error_and_not_used(self, site: Site) -> None:
        site.stack.kill(site.decode)
        site.decode = await site.start("decode", 1, "--head", "off", "--nixl-min-gb-per-s", "100")
        await site.stack.ready()
        assert await site.ask(prompts("too slow")) == site.expected["too slow"]
        assert "kv_path_failed" in site.stack.log(site.decode)
        assert "promises 100" in site.stack.log(site.decode)
        assert site.remote_bytes() == 0
        await site.stack.clean()
