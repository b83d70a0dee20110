"""Hand-offs between hosts of KV that passes through stages, as that of GPUs does: no wrong token, and nothing stays held.

Over real NIXL, in one process, with host memory in the GPUs' place.
"""

from __future__ import annotations

import random
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from common.cache.retention import KEEP_ALL, Retention
from common.engine.engine import Engine
from common.protocol.handles import WorkerRef
from common.protocol.transfer_messages import BlocksStaged, StageLeased
from common.runtime.metrics import Metrics
from common.transfer import nixl as nixl_transport
from common.transfer.block_memory import BlockMemory, T, Take
from common.transfer.nixl import Agent
from common.transfer.staging import Staging
from common.worker import remote_kv
from common.worker.actor import EngineWorker
from services.decode.actor import DecodeActor
from services.prefill.actor import PrefillActor
from tests.chaos import test_between_hosts
from tests.chaos.test_between_hosts import NIXL_BYTES, WINDOWED, Faults, TwoHosts
from tests.chaos.world import World

pytest.importorskip("nixl", reason="NIXL is not installed: pip install --no-deps nixl nixl-cu13")
faults = test_between_hosts.faults

STAGING_BYTES = 2048
"""Parts of 16 blocks, four at once: a few prompts fill it."""


class Stuck(Faults):
    """While `is_cut`, nothing that was begun ends, as on a network that is cut."""

    is_cut = False

    def is_done(self, operation: int) -> bool:
        return not Stuck.is_cut and super().is_done(operation)


class StagedHosts(TwoHosts):
    nixl_timeout_s = 30.0

    def _open_engine(self, segment_name: str, on_progress: Callable[[int, int], None]) -> Engine:
        folder = self._shm_dir(segment_name)
        world = World(self.task_group, folder, num_blocks=self.num_blocks, windows=self.windows, staged=True)
        return world._open_engine(segment_name, on_progress)

    @property
    def workers(self) -> list[EngineWorker]:
        actors = [process.actor for process in self.processes.values()]
        return [actor for actor in actors if isinstance(actor, EngineWorker)]

    def prefill(self, name: str = "prefill-1") -> PrefillActor:
        actor = self.processes[name].actor
        assert isinstance(actor, PrefillActor)
        return actor

    def decode(self, name: str = "decode-1") -> DecodeActor:
        actor = self.processes[name].actor
        assert isinstance(actor, DecodeActor)
        return actor

    async def at_rest(self) -> None:
        """Every block, slot of a stage, and byte of a staging buffer is free again."""
        await self.all_ended(within_s=60)
        await self.clean(within_s=30)
        self.check_outcomes()
        with anyio.fail_after(30):
            while not all(map(is_idle, self.workers)):
                await anyio.sleep(0.02)

    async def connected(self, *names: str) -> None:
        """These decode workers can read every prefill worker."""
        with anyio.fail_after(60):
            while any(b"kv_path_gb_per_s{" not in self.decode(name).metrics.render() for name in names):
                await anyio.sleep(0.02)


def is_idle(worker: EngineWorker) -> bool:
    stage, handoffs = worker.engine.stage, worker.remote.handoffs
    assert stage is not None
    if handoffs is not None:
        handoffs.staging.check()
    is_empty = handoffs is None or handoffs.staging.free_bytes == STAGING_BYTES
    return is_empty and stage.num_free_slots == stage.num_slots


def small_staging(agent: Agent, num_bytes: int, metrics: Metrics, owner: str) -> Staging:
    assert num_bytes == 128 << 20
    return Staging(agent, STAGING_BYTES, metrics, owner)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, faults: type[Faults]) -> None:
    monkeypatch.setattr(remote_kv, "NixlAgent", Stuck)
    monkeypatch.setattr(remote_kv, "Staging", small_staging)
    monkeypatch.setattr(Stuck, "is_cut", False)


@asynccontextmanager
async def hosts(
    shm_dir: Path, *, windows: tuple[tuple[Retention, int], ...] = (), num_decode: int = 1
) -> AsyncIterator[StagedHosts]:
    async with anyio.create_task_group() as task_group:
        made = StagedHosts(task_group, shm_dir, seed=random.randrange(1 << 30), windows=windows, keeps=KEEP_ALL, staged=True)
        await made.start("gateway")
        await made.start("prefill", name="prefill-1")
        names = [f"decode-{number}" for number in range(1, num_decode + 1)]
        for name in names:
            await made.start("decode", name=name)
        await made.connected(*names)
        yield made
        await made.at_rest()
        await made.end()
        task_group.cancel_scope.cancel()


@pytest.mark.parametrize("windows", [(), WINDOWED], ids=["one group", "two groups"])
async def test_blocks_of_a_gpu_go_on_on_another_host(tmp_path: Path, windows: tuple[tuple[Retention, int], ...]):
    async with hosts(tmp_path, windows=windows) as world:
        assert world.prefill().remote._shared is None, "its own blocks can't be read"
        await world.crowd(20)
        assert world.total(NIXL_BYTES) > 0
        assert world.total("kv_staged_bytes_total") >= world.total(NIXL_BYTES)
        assert world.total('kv_handoffs_total{outcome="ok"}') > 0


async def test_parts_of_a_long_prompt_go_to_another_host_while_it_is_computed(tmp_path: Path):
    async with hosts(tmp_path) as world:
        with anyio.fail_after(60):
            while not world.total("kv_streamed_bytes_total"):
                world.submit([world.dice.randrange(997) for _ in range(230)], max_tokens=4)
                await world.at_rest()
        assert world.total(NIXL_BYTES) > 0


async def test_many_readers_at_once_get_the_right_bytes_or_none(tmp_path: Path):
    async with hosts(tmp_path, num_decode=3) as world:
        for _ in range(24):
            world.submit([world.dice.randrange(997) for _ in range(200)], max_tokens=4)
        await world.at_rest()
        assert world.total('kv_handoffs_total{outcome="ok"}') > 0


def fill_staging(world: StagedHosts) -> Staging:
    """Somebody else has the whole buffer, under the name `full`."""
    handoffs = world.prefill().remote.handoffs
    assert handoffs is not None
    copy = handoffs.staging.begin("full", WorkerRef("decode", "another", 1), 1, STAGING_BYTES, set())
    assert handoffs.staging.copied(copy, 1) and not handoffs.staging.free_bytes
    return handoffs.staging


async def test_a_full_buffer_is_waited_for(tmp_path: Path):
    async with hosts(tmp_path) as world:
        staging = fill_staging(world)
        world.submit([world.dice.randrange(997) for _ in range(100)], max_tokens=4)
        with anyio.fail_after(60):
            while not world.total('kv_staging_refusals_total{reason="full"}'):
                await anyio.sleep(0.02)
        staging.end(["full"])
        await world.at_rest()
        assert world.total('kv_handoffs_total{outcome="ok"}') == 1 and world.total(NIXL_BYTES) > 0


async def test_a_buffer_that_stays_full_costs_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StagedHosts, "nixl_timeout_s", 0.5)
    async with hosts(tmp_path) as world:
        staging = fill_staging(world)
        with anyio.fail_after(60):
            while not world.total('kv_handoffs_total{outcome="out_of_credits"}'):
                world.submit([world.dice.randrange(997) for _ in range(100)], max_tokens=4)
                await world.all_ended(within_s=60)
        assert world.total(NIXL_BYTES) == 0
        staging.end(["full"])


class Gated:
    """Blocks that nobody can read before `may_read`. `is_read`: somebody tries."""

    def __init__(self, memory: BlockMemory) -> None:
        self.num_blocks, self.block_bytes, self.num_at_once = memory.num_blocks, memory.block_bytes, memory.num_at_once
        self.is_read, self.may_read = threading.Event(), threading.Event()
        self._memory = memory
        self.pinned, self.write = memory.pinned, memory.write

    def read(self, blocks: Sequence[int], take: Take[T]) -> list[T]:
        self.is_read.set()
        assert self.may_read.wait(60)
        return self._memory.read(blocks, take)


async def test_a_lease_that_ends_while_its_blocks_are_copied_frees_them_afterwards(tmp_path: Path):
    async with hosts(tmp_path) as world:
        prefill = world.prefill()
        handoffs = prefill.remote.handoffs
        assert handoffs is not None
        memory = Gated(handoffs._memories[0])
        handoffs._memories = [memory]
        try:
            world.submit([world.dice.randrange(997) for _ in range(100)], max_tokens=4)
            with anyio.fail_after(60):
                while not memory.is_read.is_set():
                    await anyio.sleep(0.01)
            for lease in list(prefill.leases.keys()):
                prefill.end_lease(lease)
            assert handoffs.staging.free_bytes < STAGING_BYTES, "a thread still writes there"
            usage = prefill.pool.usage()
            assert usage.leased + usage.owned > 0, "and reads these"
        finally:
            memory.may_read.set()
        await world.at_rest()
        assert world.total('kv_staging_refusals_total{reason="stale_handle"}') > 0


async def test_a_gpu_that_fails_has_prompts_computed_elsewhere(tmp_path: Path):
    async with hosts(tmp_path) as world:
        stage = world.prefill().engine.stage
        assert stage is not None
        stage.close()
        with anyio.fail_after(60):
            while not world.total('kv_handoffs_total{outcome="transport_unavailable"}'):
                await world.crowd(4)  # drawn prompts: all four may go to a decode worker at once
        assert world.total(NIXL_BYTES) == 0


async def test_every_sixteenth_operation_fails_and_nothing_is_lost(tmp_path: Path, faults: type[Faults]):
    async with hosts(tmp_path) as world:
        faults.fail_every = 16
        await world.crowd(60, cancel=True)
        assert world.total(NIXL_BYTES) > 0
        assert world.total("kv_remote_failures_total") > 0


async def test_bytes_that_are_wrong_are_computed_anew(tmp_path: Path, faults: type[Faults]):
    async with hosts(tmp_path) as world:
        faults.damage_every = 5
        await world.crowd(60)
        assert world.total(NIXL_BYTES) > 0
        assert world.total("kv_remote_failures_total") > 0


async def test_an_owner_that_is_killed_and_returns_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StagedHosts, "nixl_timeout_s", 1.0)
    async with hosts(tmp_path) as world:
        for _ in range(2):
            for _ in range(4):
                world.submit([world.dice.randrange(997) for _ in range(200)], max_tokens=8)
            await anyio.sleep(world.dice.uniform(0, 0.05))
            await world.kill("prefill-1")
            await world.start("prefill", name="prefill-1")
            before = world.total(NIXL_BYTES)
            with anyio.fail_after(60):
                while world.total(NIXL_BYTES) == before:
                    await world.crowd(4)


async def test_a_reader_that_is_killed_holds_nothing(tmp_path: Path):
    """Its copies end with its leases, which nobody renews any more."""
    async with hosts(tmp_path, num_decode=2) as world:
        prefill, answers = world.prefill(), 0
        answer = prefill.answer

        def then_kill(reply: str, message: Any) -> None:
            nonlocal answers
            answers += isinstance(message, BlocksStaged)
            if answers:  # nothing of the reader arrives any more, and there are copies for it
                world.processes["decode-1"].bus.kill()
            answer(reply, message)

        prefill.answer = then_kill
        with anyio.fail_after(60):
            while not answers:
                world.submit([world.dice.randrange(997) for _ in range(100)], max_tokens=4)
                await anyio.sleep(0.05)
        prefill.answer = answer
        await world.kill("decode-1")
        await world.at_rest()


async def test_a_worker_that_takes_a_new_epoch_frees_its_copies(tmp_path: Path):
    async with hosts(tmp_path) as world:
        for _ in range(6):
            world.submit([world.dice.randrange(997) for _ in range(200)], max_tokens=4)
        with anyio.fail_after(60):
            while not world.total("kv_staged_bytes_total"):
                await anyio.sleep(0.002)
        prefill = world.prefill()
        prefill._begin_anew(prefill.ref.epoch)
        await world.at_rest()
        before = world.total(NIXL_BYTES)
        with anyio.fail_after(60):
            while world.total(NIXL_BYTES) == before:
                await world.crowd(4)


async def test_a_network_that_is_cut_costs_a_timeout_and_heals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StagedHosts, "nixl_timeout_s", 0.5)
    async with hosts(tmp_path) as world:
        await world.crowd(4)
        Stuck.is_cut = True
        with anyio.fail_after(60):
            while not world.total("kv_remote_failures_total"):
                await world.crowd(1)
        await world.at_rest()
        Stuck.is_cut = False
        before = world.total(NIXL_BYTES)
        with anyio.fail_after(60):
            while world.total(NIXL_BYTES) == before:
                await world.crowd(2)
        pulls = world.decode().remote._pulls
        assert pulls is not None
        with anyio.fail_after(30):
            while pulls.nixl.num_free_buffers < nixl_transport.NUM_BUFFERS:
                await anyio.sleep(0.02)


async def test_blocks_that_a_lease_does_not_cover_are_refused(tmp_path: Path):
    async with hosts(tmp_path) as world:
        asked: list[StageLeased] = []
        prefill, decode = world.prefill(), world.decode()
        stage = prefill.remote.stage

        def noted(worker: Any, question: StageLeased, leased: Any, reply: str) -> None:
            asked.append(question)
            stage(worker, question, None, reply)

        prefill.remote.stage = noted
        with anyio.fail_after(60):
            while not asked:
                await world.crowd(1)
        assert all(question.holder == decode.ref for question in asked)
        assert world.total('kv_handoffs_total{outcome="stale_handle"}') > 0
        assert world.total(NIXL_BYTES) == 0
