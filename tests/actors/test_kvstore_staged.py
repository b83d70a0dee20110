"""Workers whose blocks pass through a stage, as those of a GPU do, with host memory in a GPU's place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import anyio
import numpy as np
import pytest
import torch

from common.protocol.errors import StaleHandle
from common.protocol.messages import KvUsage
from common.transfer.block_memory import BlockMemory
from common.transfer.host_stage import HostStage
from common.worker.store_lookups import Search
from services.kvstore.actor import KvstoreActor
from tests.actors.kvstore_site import BLOCK_BYTES, CHAIN, Site, Worker, running, settled, spoil, temporary_site, until

ALL = KvUsage(total=16, free=6, cached=10)


@pytest.fixture
def site() -> Iterator[Site]:
    with temporary_site() as made:
        yield made


@pytest.fixture
def staged(site: Site) -> Iterator[Callable[[int], Worker]]:
    """Makes workers; in the end every slot of their stages is free."""
    stages: list[HostStage] = []

    def memory(blocks: np.ndarray) -> BlockMemory:
        stages.append(HostStage([torch.from_numpy(blocks)], 3 * BLOCK_BYTES))
        return stages[-1].groups[0]

    yield lambda fill: Worker(site.broker, site.shm_dir, fill=fill, memory=memory)
    for stage in stages:
        assert stage.num_free_slots == stage.num_slots >= 2
        stage.close()


async def offered(store: KvstoreActor, giver: Worker) -> None:
    await giver.store.offer(CHAIN, [7, 3, 4, 5, 0, 9, 8, 2, 1, 6])
    await until(lambda: store.usage().cached == 10)


async def test_what_one_offers_another_fetches(site: Site, staged: Callable[[int], Worker]):
    """From a stage to a stage, to host memory, and back."""
    store, giver, taker, plain = site.make_store(), staged(1), staged(0), site.make_worker()
    async with running(store, giver, taker, plain):
        await offered(store, giver)
        expected = giver.blocks[[7, 3, 4, 5, 0, 9, 8, 2, 1, 6]]
        search = Search()
        assert await taker.store.fetch(CHAIN, range(9, -1, -1), 0, search) == 10
        assert (taker.blocks[::-1] == expected).all() and search.num_bytes == 10 * BLOCK_BYTES
        assert await plain.store.fetch(CHAIN, range(10)) == 10
        assert (plain.blocks == expected).all(), "checksums are of what was copied"
        await settled(store, ALL)


async def test_a_damaged_block_ends_what_is_fetched(site: Site, staged: Callable[[int], Worker]):
    store, giver, taker = site.make_store(), staged(1), staged(0)
    async with running(store, giver, taker):
        await offered(store, giver)
        arena = store.arenas["m"]
        found = arena.index.find(CHAIN[4])
        assert found is not None
        spoil(arena, found)
        assert await taker.store.fetch(CHAIN, range(10)) == 4
        assert (taker.blocks[:4] == giver.blocks[[7, 3, 4, 5]]).all()
        await until(lambda: store.usage().cached == 9)
        await settled(store, KvUsage(total=16, free=7, cached=9))


async def test_a_failure_in_the_middle_is_a_miss_and_holds_nothing(site: Site, staged: Callable[[int], Worker]):
    store, giver, taker = site.make_store(), staged(1), staged(0)
    calls: list[int] = []
    lock = threading.Lock()

    def fail_fourth() -> None:
        with lock:
            calls.append(1)
            if len(calls) == 4:
                raise StaleHandle("injected")

    async with running(store, giver, taker):
        await offered(store, giver)
        taker.transport.before = fail_fourth
        search = Search()
        copied = await taker.store.fetch(CHAIN, range(10), 0, search)
        assert copied in (0, 3) and search.error == "stale_handle", "a stage holds three blocks at once"
        assert (taker.blocks[:copied] == giver.blocks[[7, 3, 4]][:copied]).all()
        await settled(store, ALL)


async def test_a_cancelled_fetch_ends_when_its_copies_have(site: Site, staged: Callable[[int], Worker]):
    store, giver, taker = site.make_store(lease_s=60.0), staged(1), staged(0)
    began, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        go_on.wait()

    async def fetch() -> None:
        try:
            await taker.store.fetch(CHAIN, range(10))
        finally:
            ended.set()

    async with running(store, giver, taker):
        await offered(store, giver)
        taker.transport.before = slow
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fetch)
            await until(began.is_set)
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.05)
                assert not ended.is_set(), "a thread still writes to the blocks"
                go_on.set()
        assert ended.is_set()
        await settled(store, ALL)
