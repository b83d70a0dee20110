"""Every value that was granted comes back exactly once, whatever happens to its holder."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from common.protocol.handles import WorkerRef
from common.runtime.leases import LeaseTable

DECODE = WorkerRef("decode", "decode-1", 1)
OTHER = WorkerRef("decode", "decode-2", 1)


def table(**grants: int) -> LeaseTable[int]:
    leases: LeaseTable[int] = LeaseTable(5.0)
    for key, value in grants.items():
        leases.grant(key, DECODE, value, 0.0)
    return leases


def test_a_lease_ends_when_nobody_renews_it():
    leases = table(a=1, b=2)
    assert leases.renew(DECODE, ["a"], 4.0) == []
    assert leases.expire(4.9) == []
    assert leases.expire(5.0) == [("b", 2)]
    assert leases.expire(9.0) == [("a", 1)] and len(leases) == 0


def test_release_gives_the_value_once_and_is_harmless_twice():
    leases = table(a=1)
    assert leases.release("a") == 1
    assert leases.release("a") is None
    assert leases.expire(100.0) == []


def test_renewing_names_what_the_holder_does_not_hold():
    leases = table(a=1)
    assert leases.renew(OTHER, ["a", "x"], 1.0) == ["a", "x"]
    assert leases.renew(WorkerRef("decode", "decode-1", 2), ["a"], 1.0) == ["a"], "a new epoch is another holder"
    assert leases.expire(5.0) == [("a", 1)]


def test_a_key_is_granted_once_but_may_move_to_another_holder():
    leases = table(a=1)
    with pytest.raises(KeyError):
        leases.grant("a", OTHER, 2, 1.0)
    assert leases.move("a", OTHER, 4.0) and leases.holder("a") == OTHER and leases.get("a") == 1
    assert leases.renew(DECODE, ["a"], 4.0) == ["a"]
    assert leases.expire(8.9) == [] and leases.expire(9.0) == [("a", 1)]
    assert not leases.move("a", DECODE, 9.0)


def test_a_lost_holder_gives_everything_back_at_once():
    leases = table(a=1, b=2)
    leases.grant("c", OTHER, 3, 0.0)
    assert leases.release_holder("decode-1") == [("a", 1), ("b", 2)]
    assert leases.keys() == ["c"] and leases.values() == [3] and "c" in leases


def test_time_without_a_bus_does_not_count():
    leases = table(a=1)
    leases.pause(3.0)
    leases.pause(50.0)
    leases.grant("late", DECODE, 2, 60.0)
    assert leases.expire(100.0) == []
    leases.resume(103.0)
    leases.resume(200.0)
    assert leases.expire(104.9) == []
    assert leases.expire(105.0) == [("a", 1)]
    assert leases.expire(107.9) == [], "no lease gets more than a whole term"
    assert leases.expire(108.0) == [("late", 2)]


def test_clear_gives_everything_back():
    leases = table(a=1, b=2)
    assert leases.clear() == [("a", 1), ("b", 2)] and leases.clear() == []


class Histories(RuleBasedStateMachine):
    """Random grants, renewals, releases, losses and outages: what is held and what came back is all there is."""

    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.leases: LeaseTable[str] = LeaseTable(5.0)
        self.now = 0.0
        self.granted: list[str] = []
        self.returned: list[str] = []

    @rule(target=keys, holder=st.sampled_from([DECODE, OTHER]))
    def grant(self, holder: WorkerRef) -> str:
        key = str(len(self.granted))
        self.leases.grant(key, holder, key, self.now)
        self.granted.append(key)
        return key

    @rule(key=keys, holder=st.sampled_from([DECODE, OTHER]))
    def renew(self, key: str, holder: WorkerRef) -> None:
        held = self.leases.holder(key) == holder
        assert self.leases.renew(holder, [key], self.now) == ([] if held else [key])

    @rule(key=keys)
    def release(self, key: str) -> None:
        value = self.leases.release(key)
        assert value in (None, key)
        self.returned += [value] if value is not None else []

    @rule(holder=st.sampled_from([DECODE, OTHER]))
    def lose(self, holder: WorkerRef) -> None:
        self.returned += [value for _, value in self.leases.release_holder(holder.id)]

    @rule(seconds=st.floats(0.0, 6.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.returned += [value for _, value in self.leases.expire(self.now)]

    @rule(seconds=st.floats(0.0, 60.0))
    def outage(self, seconds: float) -> None:
        before = len(self.leases)
        self.leases.pause(self.now)
        self.now += seconds
        assert self.leases.expire(self.now) == []
        self.leases.resume(self.now)
        assert len(self.leases) == before

    @invariant()
    def every_value_is_held_or_came_back_once(self) -> None:
        assert sorted(self.returned + self.leases.values()) == sorted(self.granted)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
