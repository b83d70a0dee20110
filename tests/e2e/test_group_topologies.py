"""Models with and without cache groups share a bus, a gateway and a kvstore; a model's cache layout changes while it serves."""

from __future__ import annotations

import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import anyio
import pytest
import pytest_asyncio

from tests.e2e.oracle import Case, Oracle
from tests.e2e.stack import Stack
from tests.e2e.test_families import model_of
from tests.e2e.test_right import cached, check, counted, run
from tests.fixtures.nats import LocalNatsServer

pytestmark = [pytest.mark.asyncio(loop_scope="class"), pytest.mark.timeout(300), pytest.mark.slow]

GROUPS, ONE = "gpt-oss", "llama"
ENGINE = ("--dtype", "float32", "--token-budget", "50", "--num-blocks", "120")


@dataclass
class Site:
    stack: Stack
    folders: dict[str, Path]
    oracles: dict[str, Oracle]

    async def check(self, seed: int, *names: str, repeats: int = 1) -> dict[str, int]:
        """The same prompts to each model at once; return how many of their tokens came out of a cache."""
        found: dict[str, int] = {}

        async def one(name: str) -> None:
            cases = [Case(prompt, 30) for prompt in prompts(seed)] * repeats
            replies = await run(self.stack, cases, gateway="gateway-0", spread_s=0.5, model=name)
            await check(self.oracles[name], cases, replies)
            found[name] = cached(replies)

        async with anyio.create_task_group() as group:
            for name in names:
                group.start_soon(one, name)
        return found

    async def start(self, name: str, suffix: str = "", *flags: str) -> list[str]:
        """A prefill and a decode worker of a model."""
        model = ("--model", str(self.folders[name]))
        return [
            await self.stack.start("prefill", *model, *flags, name=f"prefill-{name}{suffix}"),
            await self.stack.start("decode", *model, *flags, name=f"decode-{name}{suffix}"),
        ]


def prompts(seed: int) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(256) for _ in range(length)] for length in (5, 33, 90, 140, 200)]


@pytest_asyncio.fixture(scope="class", loop_scope="class")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    directory = tmp_path_factory.mktemp("topologies")
    server = LocalNatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    made = {name: model_of(name, directory) for name in (GROUPS, ONE)}
    folders = {name: folder for name, (folder, _) in made.items()}
    settings = directory / "models.toml"
    settings.write_text("".join(f'[[models]]\nmodel = "{folder}"\n' for folder in folders.values()))
    async with Stack(server.url, directory, engine_flags=ENGINE) as stack:
        found = Site(stack, folders, {name: oracle for name, (_, oracle) in made.items()})
        await stack.start("gateway", "--config", str(settings), "--direct-max-tokens", "-1")
        await stack.start("kvstore")
        for name in folders:
            await found.start(name)
        await stack.ready()
        yield found
    server.stop()


class TestTwoModels:
    async def test_each_model_has_its_own_tokens_and_blocks(self, site: Site) -> None:
        stack = site.stack
        assert await site.check(1, GROUPS, ONE) == {GROUPS: 0, ONE: 0}
        assert [len(stack.presence(f"decode-{name}").kv.groups) for name in (GROUPS, ONE)] == [2, 0]
        assert not any("pull_failed" in stack.log(f"decode-{name}") for name in (GROUPS, ONE))
        with anyio.fail_after(10):
            while await counted(stack, "kvstore", "penstock_kvstore_arenas") < 3:
                await anyio.sleep(0.1)
        again = await site.check(1, GROUPS, ONE)
        assert again[GROUPS] == again[ONE] > 0, "the same prompts, so the same blocks are found"
        await stack.clean()

    async def test_a_layout_changes_while_requests_run(self, site: Site) -> None:
        """Workers with blocks of another size join, take over in the middle of it, and the old ones leave."""
        stack = site.stack
        joined = await site.start(GROUPS, "-new", "--block-tokens", "32")
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: site.check(2, GROUPS, ONE, repeats=4))
            await stack.ready(*joined)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: site.check(3, GROUPS, ONE, repeats=4))
            await anyio.sleep(0.2)
            for worker in (f"prefill-{GROUPS}", f"decode-{GROUPS}"):
                stack.send_signal(worker, signal.SIGTERM)
                assert await stack.ended(worker) == 0
        mixed = stack.log(joined[1]).count("pull_failed")
        assert (await site.check(4, GROUPS, ONE))[ONE] == 0
        assert stack.log(joined[1]).count("pull_failed") == mixed, "workers of one layout hand over to each other"
        assert len(stack.presence(joined[1]).kv.groups) == 2
        with anyio.fail_after(10):
            while await counted(stack, "kvstore", "penstock_kvstore_arenas") < 5:
                await anyio.sleep(0.1)
        await stack.clean()
