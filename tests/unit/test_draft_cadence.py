"""When a draft worker expects to hear more of a decode worker."""

from __future__ import annotations

from common.protocol.handles import WorkerRef
from services.draft.cadence import Cadence

ONE, OTHER = WorkerRef("decode", "one", 1), WorkerRef("decode", "other", 1)


def test_an_update_is_expected_after_as_long_as_the_last_one_took() -> None:
    cadence = Cadence()
    cadence.heard(ONE, 1.0)
    assert not cadence.is_due(9.0, 1.0), "nobody knows yet how long it takes"
    cadence.heard(ONE, 1.5)
    assert not cadence.is_due(1.9, 1.5)
    assert cadence.is_due(2.0, 1.5)
    cadence.heard(ONE, 1.7)
    assert cadence.is_due(1.9, 1.7)


def test_one_that_is_late_is_not_waited_for() -> None:
    cadence = Cadence()
    cadence.heard(ONE, 1.0)
    cadence.heard(ONE, 2.0)
    assert cadence.is_due(3.5, 3.1)
    assert not cadence.is_due(3.5, 3.3)


def test_of_several_workers_nothing_is_expected_until_all_but_one_are_silent() -> None:
    cadence = Cadence()
    for now in (1.0, 2.0):
        cadence.heard(ONE, now)
        cadence.heard(OTHER, now)
    assert not cadence.is_due(3.5, 2.5)
    cadence.heard(ONE, 3.0)
    assert cadence.is_due(4.0, 3.5), "the other one is late by now"


def test_workers_of_old_are_not_kept() -> None:
    cadence = Cadence()
    for epoch in range(100):
        for now in (100.0 * epoch, 100.0 * epoch + 1):
            cadence.heard(WorkerRef("decode", "one", epoch), now)
    assert len(cadence._heard) == 1
