"""Workers of two hosts over real NIXL, in one process: whatever the path does, no wrong token and no lost block."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

from common.cache.retention import KEEP_ALL, Retention
from common.engine.engine import Engine
from common.protocol.errors import TransportUnavailable
from common.protocol.handles import Role
from common.runtime.actor import Actor
from common.testing.memory_bus import MemoryBus
from common.transfer import nixl as nixl_transport
from common.transfer.nixl_agent import NixlAgent
from common.transfer.shm import ShmTransport
from common.worker import remote_kv, remote_paths
from services.decode.actor import DecodeActor
from services.decode.config import DecodeConfig
from services.prefill.actor import PrefillActor
from services.prefill.config import PrefillConfig
from tests.chaos.world import World

pytest.importorskip("nixl", reason="NIXL is not installed: pip install --no-deps nixl nixl-cu13")

NIXL_BYTES = 'kv_transfer_bytes_total{operation="read",path="nixl"}'
WINDOWED = ((Retention(window=8), 256),)


class Faults(NixlAgent):
    """Every `fail_every`th operation of all agents fails, every `damage_every`th brings a wrong byte. 0: none."""

    fail_every = damage_every = num_reads = 0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._failing: set[int] = set()
        self._damaged: dict[int, int] = {}

    def begin_read(self, peer: str, local: np.ndarray, remote: np.ndarray) -> int:
        Faults.num_reads += 1
        operation = super().begin_read(peer, local, remote)
        if Faults.fail_every and Faults.num_reads % Faults.fail_every == 0:
            self._failing.add(operation)
        if Faults.damage_every and Faults.num_reads % Faults.damage_every == 0:
            self._damaged[operation] = int(local[0, 0])
        return operation

    def is_done(self, operation: int) -> bool:
        if not super().is_done(operation):
            return False
        if operation in self._failing:
            self._failing.remove(operation)
            raise TransportUnavailable("injected")
        if (address := self._damaged.pop(operation, 0)) != 0:
            ctypes.c_ubyte.from_address(address).value ^= 0x10
        return True


class TwoHosts(World):
    """Prefill workers on one host, decode workers on the other: each has a shm_dir of its own."""

    nixl_timeout_s = 1.0

    def _shm_dir(self, name: str) -> Path:
        folder = self.shm_dir / name.split("-")[0]
        folder.mkdir(exist_ok=True)
        return folder

    def _actor(self, role: Role, name: str, bus: MemoryBus) -> Actor:
        if role not in ("prefill", "decode"):
            return super()._actor(role, name, bus)
        common: dict[str, Any] = {"worker_id": name, "shm_dir": str(self._shm_dir(name)), "http_port": -1, "model": "simulated"}
        common |= {
            "kv_transfer": "nixl",
            "nixl_transports": "tcp",
            "nixl_timeout_s": self.nixl_timeout_s,
            "max_running": self.max_running,
        }
        if role == "prefill":
            prefill = PrefillConfig(**common, token_budget=16)
            return PrefillActor(bus=bus, config=prefill, open_engine=self._open_engine, clock=time.monotonic)
        decode = DecodeConfig(**common, token_budget=8 + self.max_running, verify="always")
        transport = ShmTransport(str(self._shm_dir(name)))
        return DecodeActor(bus=bus, config=decode, open_engine=self._open_engine, transport=transport, clock=time.monotonic)

    def _open_engine(self, segment_name: str, on_progress: Callable[[int, int], None]) -> Engine:
        world = World(self.task_group, self._shm_dir(segment_name), num_blocks=self.num_blocks, windows=self.windows)
        return world._open_engine(segment_name, on_progress)

    def total(self, metric: str) -> float:
        """Sum of a metric over all decode workers."""
        pages = [process.actor.metrics.render().decode() for process in self.processes.values()]
        lines = [line for page in pages for line in page.splitlines() if line.startswith(f"penstock_{metric}")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    async def crowd(self, count: int, *, cancel: bool = False) -> None:
        """Send prompts, a few at a time, wait until all have ended and everything was given back."""
        for _ in range(count):
            prompt = [self.dice.randrange(997) for _ in range(self.dice.randrange(20, 120))]
            after_s = self.dice.uniform(0, 0.1) if cancel and self.dice.random() < 0.4 else None
            self.submit(prompt, max_tokens=8, cancel_after_s=after_s)
            await anyio.sleep(0.03)
        await self.all_ended(within_s=60)
        await self.clean(within_s=8)
        self.check_outcomes()


@pytest.fixture(autouse=True)
def faults(monkeypatch: pytest.MonkeyPatch) -> type[Faults]:
    monkeypatch.setattr(remote_kv, "NixlAgent", Faults)
    monkeypatch.setattr(nixl_transport, "RETRY_FIRST_S", 0.02)
    monkeypatch.setattr(nixl_transport, "RETRY_MOST_S", 0.1)
    monkeypatch.setattr(remote_paths, "RETRY_PATH_S", 0.2)
    for name in ("fail_every", "damage_every", "num_reads"):
        monkeypatch.setattr(Faults, name, 0)
    return Faults


@asynccontextmanager
async def world(shm_dir: Path, *, windows: tuple[tuple[Retention, int], ...] = ()) -> AsyncIterator[TwoHosts]:
    async with anyio.create_task_group() as task_group:
        made = TwoHosts(task_group, shm_dir, seed=random.randrange(1 << 30), windows=windows, keeps=KEEP_ALL)
        await made.start("gateway")
        await made.start("prefill", name="prefill-1")
        await made.start("decode", name="decode-1")
        with anyio.fail_after(90):
            while not made.total("kv_path_gb_per_s"):
                await anyio.sleep(0.05)
        yield made
        await made.end()
        task_group.cancel_scope.cancel()


@pytest.mark.parametrize("windows", [(), WINDOWED], ids=["one group", "two groups"])
async def test_prompts_computed_on_one_host_go_on_on_the_other(tmp_path: Path, windows: tuple[tuple[Retention, int], ...]):
    async with world(tmp_path, windows=windows) as hosts:
        await hosts.crowd(20)
        assert hosts.total(NIXL_BYTES) > 0
        assert hosts.total("kv_remote_failures_total") == 0


async def test_every_sixteenth_operation_fails_and_nothing_is_lost(tmp_path: Path, faults: type[Faults]):
    async with world(tmp_path) as hosts:
        faults.fail_every = 16
        await hosts.crowd(60, cancel=True)
        assert hosts.total(NIXL_BYTES) > 0
        assert hosts.total("kv_remote_failures_total") > 0


async def test_bytes_that_are_wrong_are_computed_anew(tmp_path: Path, faults: type[Faults]):
    async with world(tmp_path) as hosts:
        faults.damage_every = 5
        await hosts.crowd(60)
        assert hosts.total(NIXL_BYTES) > 0
        assert hosts.total("kv_remote_failures_total") > 3


async def test_a_path_that_fails_is_left_alone_by_gateways_and_taken_again(tmp_path: Path, faults: type[Faults]):
    async with world(tmp_path) as hosts:
        decode, gateway = (hosts.processes[name].actor for name in ("decode-1", hosts.alive("gateway")[0]))
        assert isinstance(decode, DecodeActor)
        [prefill] = decode.registry.alive("prefill", time.monotonic())

        def unreachable() -> list[str]:
            [said] = gateway.registry.alive("decode", time.monotonic())
            return said.endpoints[0].unreachable

        assert unreachable() == []
        faults.fail_every = 1
        with anyio.fail_after(60):
            while b'reason="no_working_path"' not in gateway.metrics.render():
                await hosts.crowd(2)
        assert unreachable() == [prefill.endpoints[0].agent]
        before = hosts.total(NIXL_BYTES)
        await hosts.crowd(4)
        assert hosts.total(NIXL_BYTES) == before
        faults.fail_every = 0
        with anyio.fail_after(60):
            while hosts.total(NIXL_BYTES) == before:
                await hosts.crowd(2)
        assert unreachable() == []


async def test_owners_that_die_and_return_under_their_name_lose_nothing(tmp_path: Path):
    async with world(tmp_path) as hosts:
        for _ in range(2):
            hosts.submit([hosts.dice.randrange(997) for _ in range(100)], max_tokens=8)
            await hosts.kill("prefill-1")
            await hosts.start("prefill", name="prefill-1")
            before = hosts.total(NIXL_BYTES)
            with anyio.fail_after(30):
                while hosts.total(NIXL_BYTES) == before:
                    await hosts.crowd(4)


async def test_a_worker_without_nixl_is_read_on_its_own_host_alone(tmp_path: Path):
    async with world(tmp_path) as hosts:
        decode = hosts.processes["decode-1"].actor
        assert isinstance(decode, DecodeActor)
        [prefill] = decode.registry.alive("prefill", time.monotonic())
        assert decode.remote.transport_to(prefill, decode.transport, decode.host, "lease") is not decode.transport
        assert decode.remote.transport_to(prefill, decode.transport, prefill.host, "lease") is decode.transport
        with pytest.raises(TransportUnavailable):
            await decode.remote.reach(decode.presence("ready"))  # it shares nothing
