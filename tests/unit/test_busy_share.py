"""How busy a draft worker says it is."""

from __future__ import annotations

import pytest

from services.draft.actor import BusyShare


def test_a_share_follows_the_last_seconds() -> None:
    busy, now, share = BusyShare(period_s=3.0), 10.0, 1.0
    assert busy.share(now) == 0.0
    for _ in range(60):
        busy.add(0.1)
        now += 0.25
        share = busy.share(now)
    assert share == pytest.approx(0.4, abs=0.01)
    assert busy.share(now) == share, "no time has passed"
    assert busy.share(now + 30.0) < 0.01


def test_a_step_longer_than_a_heartbeat_counts_as_busy_at_most() -> None:
    busy = BusyShare(period_s=0.1)
    busy.share(0.0)
    busy.add(5.0)
    assert busy.share(1.0) <= 1.0
