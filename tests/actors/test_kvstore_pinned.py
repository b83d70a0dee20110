"""Workers that pin a kvstore's memory, as those with a GPU do, with host memory in a GPU's place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import anyio
import numpy as np
import pytest
import torch

from common.protocol.messages import KvUsage
from common.transfer import mapping, segment_pins
from common.transfer.block_memory import BlockMemory
from common.transfer.host_stage import DIRECT_BYTES, HostStage
from common.transfer.pinned_memory import PinnedMemory
from tests.actors.kvstore_site import CHAIN, Site, Worker, running, spoil, temporary_site, until

BLOCK = DIRECT_BYTES


class Pins(PinnedMemory):
    """Remembers what is pinned, as a driver would."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        super().__init__(self.pinned.__setitem__, self.pinned.__delitem__)

    def check(self) -> None:
        """:raises AssertionError: pinned memory has been taken, which would leave a GPU with the old pages."""
        for address, num_bytes in list(self.pinned.items()):
            assert list(mapping._resident(address, num_bytes)) == [(0, num_bytes)] or address not in self.pinned


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(mapping, "EVERY_S", 0.01)
    monkeypatch.setattr(segment_pins, "EXTENT_BYTES", BLOCK)
    with temporary_site() as made:
        yield made


@pytest.fixture
def staged(site: Site) -> Iterator[Callable[..., tuple[Worker, Pins]]]:
    """Makes workers; in the end nothing of theirs is pinned, and every slot of their stages is free."""
    stages, every = list[HostStage](), list[Pins]()

    def memory(blocks: np.ndarray) -> BlockMemory:
        stage = HostStage([torch.from_numpy(blocks)], 4 * BLOCK)
        assert stage._large is not None
        stage._large.pinned = every[-1]
        stages.append(stage)
        return stage.groups[0]

    def make(fill: int, fingerprint: str = "m") -> tuple[Worker, Pins]:
        every.append(Pins())
        worker = Worker(site.broker, site.shm_dir, fill=fill, fingerprint=fingerprint, block_bytes=BLOCK, memory=memory)
        # the client's own transport, as that of a worker without NIXL
        worker.store._is_direct = True
        return worker, every[-1]

    yield make
    for stage in stages:
        assert stage.num_free_slots == stage.num_slots
        stage.close()
    assert not any(pins.pinned for pins in every)


async def test_pinned_memory_is_written_and_read(site: Site, staged: Callable[..., tuple[Worker, Pins]]):
    store, (giver, giving), (taker, taking) = site.make_store(capacity_mb=8), staged(1), staged(0)
    plain = site.make_worker(block_bytes=BLOCK)
    async with running(store, giver, taker, plain):
        await giver.store.offer(CHAIN, range(10))
        await until(lambda: store.usage().cached == 10 and len(giving.pinned) >= 10)
        assert await taker.store.fetch(CHAIN, range(9, -1, -1)) == 10, "through the stage: nothing was pinned yet"
        await until(lambda: len(taking.pinned) >= 10)
        taker.blocks[:] = 0
        assert await taker.store.fetch(CHAIN, range(9, -1, -1)) == 10
        assert (taker.blocks[::-1] == giver.blocks).all()
        again = [b"again-%02d" % number for number in range(10)]
        await giver.store.offer(again, range(9, -1, -1))
        await until(lambda: store.usage().cached == 20)
        assert await plain.store.fetch(again, range(10)) == 10
        assert (plain.blocks[::-1] == giver.blocks).all(), "checksums are zlib's"


async def test_a_damaged_block_is_found(site: Site, staged: Callable[..., tuple[Worker, Pins]]):
    store, (worker, pins) = site.make_store(capacity_mb=8), staged(1)
    async with running(store, worker):
        await worker.store.offer(CHAIN, range(10))
        await until(lambda: store.usage().cached == 10 and len(pins.pinned) >= 10)
        arena = next(iter(store.arenas.values()))
        spoil(arena, 6)
        content = worker.blocks.copy()
        assert await worker.store.fetch(CHAIN, range(10)) == 6
        assert (worker.blocks[:6] == content[:6]).all()
        await until(lambda: store.usage().cached == 9)


async def test_another_model_gets_memory_that_was_pinned(site: Site, staged: Callable[..., tuple[Worker, Pins]]):
    store, (first, pins), (second, others) = site.make_store(capacity_mb=3), staged(1), staged(2, "another")
    async with running(store, first, second):
        await first.store.offer(CHAIN, range(10))
        await until(lambda: store.usage() == KvUsage(total=12, free=2, cached=10) and len(pins.pinned) >= 10)

        async def all_are_kept() -> bool:
            await second.store.offer(CHAIN, range(10))
            return await second.store.find(CHAIN, [0] * 10, 0) == 10

        tried = 0
        while not await all_are_kept():
            tried += 1
            assert tried < 200, "pinned memory stays with its model"
            await anyio.sleep(0.02)
        assert len(pins.pinned) < 10
        await until(lambda: bool(others.pinned))
        content = second.blocks.copy()
        second.blocks[:] = 0
        assert await second.store.fetch(CHAIN, range(10)) == 10
        assert (second.blocks == content).all()


@pytest.mark.parametrize("seed", range(4))
async def test_models_take_memory_from_each_other_at_random(
    site: Site, staged: Callable[..., tuple[Worker, Pins]], seed: int, monkeypatch: pytest.MonkeyPatch
):
    """Whoever has pinned what: what is fetched is what was offered, no pinned memory is taken, and none beyond the capacity."""
    monkeypatch.setattr(segment_pins, "QUIET_S", 0.02)
    monkeypatch.setattr(segment_pins, "MAX_QUIET_S", 0.02)
    dice = np.random.default_rng(seed)
    store = site.make_store(capacity_mb=7)
    workers = [staged(1 + number, "mn"[number % 2]) for number in range(4)]
    offered: dict[tuple[str, int], np.ndarray] = {}
    num_fetched, most_pinned = 0, 0
    async with running(store, *(worker for worker, _ in workers)):
        for _ in range(60):
            number, chain = int(dice.integers(4)), int(dice.integers(4))
            worker, _pins = workers[number]
            hashes, model = [b"%d-%014d" % (chain, index) for index in range(10)], "mn"[number % 2]
            if dice.random() < 0.5:
                content = np.random.default_rng(chain).integers(0, 256, worker.blocks.shape, np.uint8)
                offered[model, chain], worker.blocks[:] = content, content
                await worker.store.offer(hashes, range(10))
            else:
                worker.blocks[:] = 0
                found = await worker.store.fetch(hashes, range(10))
                num_fetched += found
                assert not found or (worker.blocks[:found] == offered[model, chain][:found]).all()
            await anyio.sleep(float(dice.choice([0, 0.02, 0.06])))
            for _, pins in workers:
                pins.check()
            most_pinned = max(most_pinned, *(len(pins.pinned) for _, pins in workers))
            assert store.arenas.memory_bytes <= 7 << 20
        assert num_fetched > 20 and most_pinned > 4
