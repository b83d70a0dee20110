"""Who is alive: heartbeats, epochs, proof of death, and the benefit of the doubt after an outage."""

from __future__ import annotations

from typing import Literal

from common.protocol.handles import Role, WorkerRef
from common.protocol.messages import Presence
from common.runtime.registry import MAX_WORKERS_PER_ROLE, Registry


def presence(
    worker: str = "d1", epoch: int = 1, role: Role = "decode", state: Literal["starting", "ready", "draining"] = "ready"
) -> Presence:
    return Presence(worker=WorkerRef(role, worker, epoch), state=state)


def ids(presences: list[Presence]) -> list[str]:
    return [presence.worker.id for presence in presences]


def test_a_worker_lives_while_it_is_heard_and_is_lost_once():
    registry = Registry(2.0)
    assert registry.observe(presence(), 0.0)
    assert not registry.observe(presence(), 1.0)
    assert ids(registry.alive("decode", 3.0)) == ["d1"] and registry.lost(3.0) == []
    assert registry.alive("decode", 3.1) == []
    assert ids(registry.lost(3.1)) == ["d1"] and registry.lost(3.1) == [] and registry.get("d1") is None
    assert registry.observe(presence(), 4.0), "a false alarm: it is heard again"
    assert ids(registry.alive("decode", 4.0)) == ["d1"]


def test_ready_workers_come_first_and_roles_are_kept_apart():
    registry = Registry(2.0)
    for one in (
        presence("starting", state="starting"),
        presence("p", role="prefill"),
        presence("draining", state="draining"),
        presence("ready"),
    ):
        registry.observe(one, 0.0)
    assert ids(registry.alive("decode", 0.0)) == ["ready", "starting", "draining"]
    assert ids(registry.alive(None, 0.0)) == ["p", "ready", "starting", "draining"] and len(registry) == 4


def test_a_later_epoch_ends_the_life_before_and_an_earlier_one_is_not_listened_to():
    registry = Registry(2.0)
    registry.observe(presence(epoch=5), 0.0)
    assert registry.observe(presence(epoch=6), 0.5)
    assert not registry.observe(presence(epoch=5), 0.6)
    assert [lost.worker.epoch for lost in registry.lost(0.6)] == [5]
    known = registry.get("d1")
    assert known is not None and known.worker.epoch == 6
    assert ids(registry.lost(9.0)) == ["d1"]
    assert not registry.observe(presence(epoch=5), 9.1), "a late heartbeat of an old life does not raise the dead"


def test_proof_of_death_is_believed_at_once():
    registry = Registry(2.0)
    registry.observe(presence(), 0.0)
    registry.mark_lost("d1")
    registry.mark_lost("d1")
    registry.mark_lost("nobody")
    assert registry.alive("decode", 0.0) == [] and ids(registry.lost(0.0)) == ["d1"]


def test_suspects_are_silent_but_not_lost():
    registry = Registry(2.0)
    registry.observe(presence("quiet"), 0.0)
    registry.observe(presence("loud"), 1.0)
    assert ids(registry.suspects(1.0, 0.5)) == ["quiet"]
    registry.touch("quiet", 1.0)
    registry.touch("nobody", 1.0)
    assert registry.suspects(1.0, 0.5) == []


def test_nobody_is_lost_while_the_bus_is_away_and_everybody_gets_time_afterwards():
    registry = Registry(2.0)
    registry.observe(presence(), 0.0)
    registry.pause(1.0)
    assert registry.lost(50.0) == [] and registry.suspects(50.0, 0.5) == []
    assert ids(registry.alive("decode", 50.0)) == ["d1"], "work goes on with whom we knew"
    registry.resume(60.0)
    assert registry.lost(62.0) == [] and registry.suspects(60.4, 0.5) == []
    assert ids(registry.lost(62.1)) == ["d1"]


def test_memory_stays_bounded_over_many_workers():
    registry = Registry(2.0)
    registry.observe(presence("kept", epoch=7), 0.0)
    for number in range(70_000):
        registry.observe(presence(f"w{number}"), 0.0)
        registry.mark_lost(f"w{number}")
        registry.lost(0.0)
    assert len(registry) == 1 and len(registry._newest_epoch) <= 65_536
    assert not registry.observe(presence("kept", epoch=6), 0.0)


def test_a_flood_of_workers_that_do_not_exist_takes_bounded_memory_and_drives_nobody_out():
    registry = Registry(2.0)
    registry.observe(presence("real", role="prefill"), 0.0)
    for number in range(100_000):
        registry.observe(presence(f"fake{number}"), 0.1)
    assert len(registry) <= MAX_WORKERS_PER_ROLE + 1
    assert registry.num_ignored == 100_000 - MAX_WORKERS_PER_ROLE
    assert registry.observe(presence("late", role="prefill"), 0.2), "each role has room of its own"
    assert not registry.observe(presence("late"), 0.2)
    registry.observe(presence("real", role="prefill"), 1.5)
    assert len(registry.lost(2.3)) == MAX_WORKERS_PER_ROLE + 1
    assert ids(registry.alive(None, 2.3)) == ["real"]
    assert registry.observe(presence("late"), 2.4), "there is room again"


def test_a_worker_that_begins_anew_keeps_its_place_in_a_crowd():
    registry = Registry(2.0)
    for number in range(MAX_WORKERS_PER_ROLE):
        registry.observe(presence(f"d{number}"), 0.0)
    assert registry.observe(presence("d7", epoch=2), 0.1)
    assert [lost.worker.epoch for lost in registry.lost(0.1)] == [1]
    assert len(registry) == MAX_WORKERS_PER_ROLE
