"""A prefix that a kvstore has is computed where that is measured to be faster than copying it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from common.protocol.errors import StaleHandle
from common.protocol.messages import KvUsage
from common.worker import fetch_rate
from common.worker.fetch_rate import FetchRates
from common.worker.store_lookups import Search
from tests.actors.kvstore_site import BLOCK_BYTES, CHAIN, Site, Worker, running, settled, temporary_site, until

TOKENS = 16


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(fetch_rate, "FORGET_S", float("inf"))
    with temporary_site() as made:
        yield made


def search(worker: Worker) -> Search:
    return Search(block_tokens=TOKENS, block_bytes=sum(worker.store.block_bytes))


def skipped(worker: Worker, path: str) -> float:
    return worker.metrics.registry.get_sample_value("penstock_prefix_fetches_skipped_total", {"path": path}) or 0.0


def computing(worker: Worker, tokens_per_s: float) -> FetchRates:
    """Have the worker know how fast it computes prompts."""
    worker.store.choice._rates = FetchRates(lambda: tokens_per_s)
    return worker.store.choice._rates


async def test_what_is_computed_sooner_is_not_fetched_and_nothing_is_held(site: Site):
    store, worker = site.make_store(lease_s=60.0), site.make_worker(fill=1)
    rates = computing(worker, 1e9)  # ten blocks in 160 ns: no copy is that fast
    async with running(store, worker):
        await worker.store.offer(CHAIN, range(10))
        await until(lambda: store.usage().cached == 10)
        for _ in range(3):
            assert not skipped(worker, "kvstore"), "it starts with fetching"
            assert await worker.store.fetch(CHAIN, range(10), 0, search(worker)) == 10
        found = search(worker)
        assert await worker.store.fetch(CHAIN, range(10), 0, found) == 0
        assert (found.num_skipped, found.num_bytes, found.error) == (10, 0, "")
        assert skipped(worker, "kvstore") == 1
        await settled(store, KvUsage(total=16, free=6, cached=10))
        assert await worker.store.fetch(CHAIN, range(10)) == 10, "nobody said how many tokens it has"
        rates._fetches["kvstore"].clear()  # as time does
        assert await worker.store.fetch(CHAIN, range(10), 0, search(worker)) == 10


async def test_what_is_fetched_sooner_is_fetched(site: Site):
    store, worker = site.make_store(), site.make_worker(fill=1)
    rates = computing(worker, 1e-3)
    async with running(store, worker):
        await worker.store.offer(CHAIN, range(10))
        await until(lambda: store.usage().cached == 10)
        for _ in range(8):
            assert await worker.store.fetch(CHAIN, range(10), 0, search(worker)) == 10
        assert not skipped(worker, "kvstore")
        assert rates.bytes_per_s("kvstore", 10 * BLOCK_BYTES, time.monotonic()) > 0


async def test_what_was_decided_holds_for_all_groups_of_a_search(site: Site):
    store, worker = site.make_store(), site.make_worker(fill=1)
    computing(worker, 1e9)
    async with running(store, worker):
        await worker.store.offer(CHAIN, range(10))
        await until(lambda: store.usage().cached == 10)
        first = search(worker)
        for _ in range(6):
            assert await worker.store.fetch(CHAIN, range(10), 0, first) == 10
        assert await worker.store.fetch(CHAIN, range(10), 0, search(worker)) == 0


async def test_a_failed_copy_is_not_measured(site: Site):
    store, worker = site.make_store(), site.make_worker(fill=1)
    rates = computing(worker, 1e9)

    def fail() -> None:
        raise StaleHandle("injected")

    async with running(store, worker):
        await worker.store.offer(CHAIN, range(10))
        await until(lambda: store.usage().cached == 10)
        worker.transport.before = fail
        for _ in range(4):
            worker.store.lookups.forgive()
            assert await worker.store.fetch(CHAIN, range(10), 0, search(worker)) == 0
        assert rates.bytes_per_s("kvstore", 1, time.monotonic()) == 0 and not skipped(worker, "kvstore")
        await settled(store, KvUsage(total=16, free=6, cached=10))
