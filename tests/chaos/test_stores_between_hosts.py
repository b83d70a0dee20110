"""Prefill on one host, decode and the kvstore on another, over real NIXL: no wrong token, and nothing stays held."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from common.protocol.handles import Role
from common.runtime.actor import Actor
from common.testing.memory_bus import MemoryBus
from common.transfer import nixl as nixl_transport
from common.worker import remote_kv, remote_paths, store_lookups
from common.worker.fetch_rate import FetchRates
from services.kvstore.actor import KvstoreActor
from services.kvstore.config import KvstoreConfig
from tests.chaos.test_between_hosts import WINDOWED, Faults, TwoHosts

pytest.importorskip("nixl", reason="NIXL is not installed: pip install --no-deps nixl nixl-cu13")

READ = 'kv_transfer_bytes_total{operation="read",path="kvstore_nixl"}'
HITS = 'prefix_hit_tokens_total{tier="kvstore_remote"'
STORE = "decode-kvstore"
"""Its host is the decode worker's: see `TwoHosts._shm_dir`."""
ASKED_S = 30.0
"""How long a store's answer is waited for: a machine that is busy is no store that failed."""


class Hosts(TwoHosts):
    """Prompts have one of a few prefixes."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.prefixes = [[self.dice.randrange(997) for _ in range(60)] for _ in range(3)]

    def _actor(self, role: Role, name: str, bus: MemoryBus) -> Actor:
        if role != "kvstore":
            return super()._actor(role, name, bus)
        common: dict[str, Any] = {"worker_id": name, "shm_dir": str(self._shm_dir(name)), "http_port": -1, "capacity_mb": 1}
        config = KvstoreConfig(**common, kv_transfer="nixl", nixl_transports="tcp", staging_mb=1)
        return KvstoreActor(bus=bus, config=config, clock=time.monotonic)

    @property
    def store(self) -> KvstoreActor:
        actor = self.processes[STORE].actor
        assert isinstance(actor, KvstoreActor)
        return actor

    async def shared_crowd(self, count: int, *, cancel: bool = False) -> None:
        """Send prompts, a few at a time; wait until all have ended and everything was given back."""
        for _ in range(count):
            prompt = list(self.dice.choice(self.prefixes))
            if self.dice.random() < 0.5:  # a cache group with a window finds a prompt that came before, and no part of it
                prompt += [self.dice.randrange(997) for _ in range(self.dice.randrange(8, 40))]
            after_s = self.dice.uniform(0, 0.1) if cancel and self.dice.random() < 0.3 else None
            self.submit(prompt, max_tokens=8, cancel_after_s=after_s)
            await anyio.sleep(0.03)
        await self.all_ended(within_s=60)
        await self.clean(within_s=ASKED_S + 15)  # a store that was killed while it was asked does not answer
        self.check_outcomes()

    async def store_is_at_rest(self) -> None:
        """Nobody reads there, and its staging buffer is empty."""
        with anyio.fail_after(15):
            while len(self.store.leases) or self.store.readers.free_bytes != 1 << 20:
                await anyio.sleep(0.05)
        self.store.readers.check()

    async def forgets(self) -> None:
        """The prefill worker begins anew: what its own cache held is gone, and it can read the store again."""
        await self.kill("prefill-1")
        await self.start("prefill", name="prefill-1")
        await self.reads_store()

    async def reads_store(self) -> None:
        prefill = self.processes["prefill-1"].actor
        with anyio.fail_after(60):
            while (remote := prefill.store.remote if prefill.ready else None) is None or not remote.stores():  # pyright: ignore[reportAttributeAccessIssue]
                await anyio.sleep(0.05)


@pytest.fixture(autouse=True)
def faults(monkeypatch: pytest.MonkeyPatch) -> type[Faults]:
    monkeypatch.setattr(remote_kv, "NixlAgent", Faults)
    monkeypatch.setattr(nixl_transport, "RETRY_FIRST_S", 0.02)
    monkeypatch.setattr(nixl_transport, "RETRY_MOST_S", 0.1)
    monkeypatch.setattr(remote_paths, "RETRY_PATH_S", 0.1)
    monkeypatch.setattr(store_lookups, "SKIP_FAILED_S", 0.05)
    monkeypatch.setattr(store_lookups, "ASK_TIMEOUT_S", ASKED_S)
    monkeypatch.setattr(FetchRates, "pays", lambda *_, **__: True)  # the simulated engine is faster than any path
    for name in ("fail_every", "damage_every", "num_reads"):
        monkeypatch.setattr(Faults, name, 0)
    return Faults


@asynccontextmanager
async def world(shm_dir: Path, **named: Any) -> AsyncIterator[Hosts]:
    async with anyio.create_task_group() as task_group:
        made = Hosts(task_group, shm_dir, seed=random.randrange(1 << 30), **named)
        await made.start("gateway")
        await made.start("kvstore", name=STORE)
        await made.start("decode", name="decode-1")
        await made.start("prefill", name="prefill-1")
        await made.reads_store()
        yield made
        await made.end()
        task_group.cancel_scope.cancel()


async def until_read(hosts: Hosts) -> None:
    """Prompts come until one's prefix was read from the other host's store."""
    with anyio.fail_after(90):
        while True:
            await hosts.forgets()
            await hosts.shared_crowd(4)
            await hosts.store_is_at_rest()
            if hosts.total(HITS):
                assert hosts.total(READ) > 0
                return


@pytest.mark.parametrize("windows", [(), WINDOWED], ids=["one group", "two groups"])
async def test_a_prefill_worker_reads_what_the_other_hosts_store_has(tmp_path: Path, windows: Any):
    async with world(tmp_path, windows=windows) as hosts:
        await hosts.shared_crowd(10)
        await until_read(hosts)
        assert hosts.total("store_failures_total") == 0


async def test_operations_that_fail_and_bytes_that_are_wrong_change_no_token(tmp_path: Path, faults: type[Faults]):
    async with world(tmp_path) as hosts:
        await hosts.shared_crowd(10)
        faults.fail_every, faults.damage_every = 7, 11
        for _ in range(4):
            await hosts.forgets()
            await hosts.shared_crowd(12, cancel=True)
        faults.fail_every = faults.damage_every = 0
        await until_read(hosts)


@pytest.mark.slow
async def test_a_store_that_is_killed_at_any_moment_costs_no_token(tmp_path: Path):
    async with world(tmp_path) as hosts:
        await hosts.shared_crowd(10)
        for _ in range(3):
            await hosts.forgets()
            async with anyio.create_task_group() as group:
                group.start_soon(hosts.shared_crowd, 10)
                await anyio.sleep(hosts.dice.uniform(0, 0.3))
                await hosts.kill(STORE)
            await hosts.start("kvstore", name=STORE)
            await hosts.reads_store()
            await hosts.shared_crowd(6)
        await until_read(hosts)
