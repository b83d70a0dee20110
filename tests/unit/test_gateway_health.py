"""Whom the gateway trusts with requests: who gave tokens, and did not fail again and again since."""

from __future__ import annotations

from common.protocol.handles import WorkerRef
from services.gateway.health import FIRST_QUARANTINE_S, FORGET_AFTER_S, STRIKES, Health

D1, D2 = (WorkerRef("decode", f"decode-{n}", 1) for n in (1, 2))


def test_a_worker_is_proven_by_a_token_and_each_life_anew() -> None:
    health = Health()
    assert health.doubtful([D1, D2], 0.0) == {"decode-1", "decode-2"}
    health.succeeded(D1, 1.0)
    assert health.proven(D1) and health.doubtful([D1, D2], 1.0) == {"decode-2"}
    assert not health.proven(WorkerRef("decode", "decode-1", 2))
    assert Health(trusting=True).doubtful([D1, D2], 0.0) == frozenset()


def test_failures_in_a_row_quarantine_a_worker_for_longer_each_time() -> None:
    health = Health(trusting=True)
    assert [health.failed(D1, float(n)) for n in range(STRIKES)] == [False] * (STRIKES - 1) + [True]
    assert health.doubtful([D1, D2], 3.0) == {"decode-1"}
    assert not health.quarantined(D1, STRIKES - 1 + FIRST_QUARANTINE_S)
    health.failed(D1, 10.0)
    assert health.quarantined(D1, 10.0 + 2 * FIRST_QUARANTINE_S - 0.1)
    reborn = WorkerRef("decode", "decode-1", 2)
    assert health.quarantined(reborn, 11.0), "its deaths count"


def test_a_success_forgives_and_failures_far_apart_are_forgotten() -> None:
    health = Health(trusting=True)
    for turn in range(20):
        assert not health.failed(D1, 2.0 * turn)
        health.succeeded(D1, 2.0 * turn + 1)
    for turn in range(20):
        assert not health.failed(D2, turn * (FORGET_AFTER_S + 1))


def test_a_failed_canary_is_enough() -> None:
    health = Health()
    health.succeeded(D1, 0.0)
    assert health.failed(D1, 1.0, strikes=STRIKES) and not health.proven(D1)
    health.succeeded(D1, 2.0)
    assert health.proven(D1) and health.doubtful([D1], 2.0) == frozenset()


def test_what_is_known_of_those_who_are_gone_is_dropped_once_it_counts_no_longer() -> None:
    health = Health()
    for number in range(1000):
        health.failed(WorkerRef("decode", f"w{number}", 1), 0.0)
    health.forget(["w1"], FORGET_AFTER_S - 1)
    assert len(health._records) == 1000
    health.forget(["w1"], FORGET_AFTER_S + 1)
    assert list(health._records) == ["w1"]
