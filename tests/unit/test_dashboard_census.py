"""Workers as the dashboard shows them: as a gateway sees their health, in a time and a size that do not hold anyone up."""

from __future__ import annotations

import time

import msgspec
import pytest

from common.protocol.handles import WorkerRef
from common.protocol.messages import KvUsage, Presence
from services.gateway.census import MAX_NAME, MAX_ROWS, MAX_WORKERS, SLICE, Census, PoolRow, WatchedModel
from services.gateway.dispatch import Dispatcher
from services.gateway.health import STRIKES, Health
from services.gateway.placement import Placement
from services.gateway.router import Router
from tests.unit.presences import presence

KV = KvUsage(total=100, free=50, owned=20, leased=5, cached=25)


def served(*presences: Presence, trusting: bool = True) -> WatchedModel:
    placement = Placement(Router(direct_max_tokens=4), Health(trusting=trusting))
    dispatcher = Dispatcher(placement=placement, max_queue=8, max_requests=8, no_workers_grace_s=1.0, now=0.0)
    dispatcher.refresh(presences, 0.0)
    return WatchedModel("tiny", dispatcher)


def census(model: WatchedModel, *presences: Presence) -> Census:
    made = Census([model], 0.0)
    made.add(presences)
    return made


def test_a_pool_is_the_sum_of_its_workers() -> None:
    workers = [presence("decode", n, running=n, credits=4 - n, kv=KV, tokens_per_s=10.0) for n in range(3)]
    pool, store = census(served(*workers), *workers, presence("kvstore", kv=KV, running=2)).pools()
    assert (pool.role, pool.workers, pool.ready, pool.running, pool.credits, pool.tokens_per_s) == ("decode", 3, 3, 3, 9, 30.0)
    assert (pool.kv.total, pool.kv.owned, pool.kv.leased, pool.kv.cached) == (300, 60, 15, 75)
    assert (pool.marks, store.marks) == ("025", "5")


def test_a_gateway_shows_whom_it_does_not_trust_and_whom_it_leaves_alone() -> None:
    workers = [presence("decode", n) for n in range(4)]
    stuck = presence("decode", 4, step_age_ms=60_000.0, step_ms=10.0)
    starting = presence("decode", 5, state="starting", loaded=0.5)
    stranger = presence("decode", 6, model="other")
    model = served(*workers, stuck, starting, trusting=False)
    health = model.dispatcher.health
    health.succeeded(workers[0].worker, 0.0)
    for _ in range(STRIKES):
        health.failed(workers[1].worker, 0.0)
    health.succeeded(stuck.worker, 0.0)
    reborn = msgspec.structs.replace(workers[3], worker=WorkerRef("decode", "decode-3", 9))
    made = census(model, *workers[:3], reborn, stuck, starting, stranger, presence("draft"))
    seen = {row.id: row.health for row in made.rows().rows}
    assert seen == {
        "decode-0": "ok",
        "decode-1": "quarantined",
        "decode-2": "unproven",
        "decode-3": "unused",
        "decode-4": "stuck",
        "decode-5": "unproven",
        "decode-6": "unused",
        "draft-0": "",
    }
    marks = {(pool.role, pool.model): pool.marks for pool in made.pools()}
    assert marks == {("decode", "tiny"): "0quoxs", ("decode", "other"): "o", ("draft", "tiny"): "0"}


def test_workers_are_found_by_any_of_their_words_and_those_in_trouble_come_first() -> None:
    workers = [presence("decode", n) for n in range(2 * MAX_ROWS)]
    ill = presence("decode", 999, state="draining")
    made = census(served(*workers), *workers, ill)
    listed = made.rows()
    assert (listed.known, listed.matching, len(listed.rows)) == (2 * MAX_ROWS + 1, 2 * MAX_ROWS + 1, MAX_ROWS)
    assert listed.rows[0].id == "decode-999"
    assert [row.id for row in made.rows("DRAIN").rows] == ["decode-999"]
    assert [row.id for row in made.rows("decode-17").rows] == ["decode-17", *(f"decode-17{n}" for n in range(10))]
    assert made.rows("nobody").rows == []


def test_what_is_shown_of_a_flood_of_workers_is_bounded() -> None:
    made = Census([served()], 0.0)
    made.add(presence("decode", n, model="m" * 10_000) for n in range(MAX_WORKERS + 100))
    (pool,) = made.pools()
    assert (made.rows().known, pool.workers, len(pool.marks), len(pool.model)) == (
        MAX_WORKERS + 100,
        MAX_WORKERS,
        MAX_WORKERS,
        MAX_NAME,
    )


@pytest.mark.parametrize("num_workers", [1000])
def test_a_snapshot_of_a_thousand_workers_holds_the_event_loop_for_a_few_milliseconds(num_workers: int) -> None:
    """In CPU time, and the best of several tries, because others use this machine, too."""
    workers = [presence("decode" if n % 2 else "prefill", n, kv=KV, running=n % 7, credits=3) for n in range(num_workers)]
    model = served(*workers)
    worst_s: list[float] = []
    pools: list[PoolRow] = []
    size = 0
    for _ in range(7):
        turns: list[float] = []
        made = Census([model], 0.0)
        for start in range(0, num_workers, SLICE):
            began = time.thread_time()
            made.add(workers[start : start + SLICE])
            turns.append(time.thread_time() - began)
        began = time.thread_time()
        pools = made.pools()
        turns.append(time.thread_time() - began)
        began = time.thread_time()
        size = len(msgspec.json.encode([pools, made.rows()]))
        turns.append(time.thread_time() - began)
        worst_s.append(max(turns))
    assert sum(pool.workers for pool in pools) == num_workers
    assert size < 64 * 1024
    assert min(worst_s) < 0.004, worst_s
