"""A worker's place for a sequence that shorter ones keep passing by."""

from __future__ import annotations

import pytest

from common.protocol.errors import OutOfCredits
from services.decode.kept_place import MAX_WAITING, OVERTAKEN_S, KeptPlace

LAPSE_S = 1.0


def waited(place: KeptPlace, request: str = "long", *, since: float = 0.0, for_s: float = OVERTAKEN_S) -> float:
    """Offer a request four times a second for so long; return when that was last."""
    now = since
    while now < since + for_s:
        place.check(request, now)
        place.refused(request, 1000, now)
        now += 0.25
    place.refused(request, 1000, now)
    return now


def test_a_request_is_passed_by_for_a_while_and_then_no_more() -> None:
    place = KeptPlace(lapse_s=LAPSE_S)
    now = waited(place, for_s=OVERTAKEN_S - 0.5)
    place.check("short", now)
    now = waited(place, since=now, for_s=0.75)
    with pytest.raises(OutOfCredits, match="a longer request"):
        place.check("short", now)
    place.check("long", now)
    place.admitted("long")
    place.check("short", now)


def test_one_that_is_offered_no_more_keeps_nothing() -> None:
    place = KeptPlace(lapse_s=LAPSE_S)
    now = waited(place)
    place.check("short", now + LAPSE_S + 0.01)
    place.refused("long", 1000, now + LAPSE_S + 0.02)
    place.check("short", now + LAPSE_S + 0.03)  # it waits anew


def test_of_two_that_wait_one_comes_after_the_other() -> None:
    place = KeptPlace(lapse_s=LAPSE_S)
    now = 0.0
    while now <= OVERTAKEN_S:
        place.refused("one", 1000, now)
        place.refused("two", 1000, now)
        now += 0.25
    with pytest.raises(OutOfCredits):
        place.check("two", now)
    place.admitted("one")
    place.check("two", now)
    place.refused("two", 1000, now)
    with pytest.raises(OutOfCredits):
        place.check("short", now)


def test_nobody_lapses_while_gateways_are_told_that_there_is_no_room() -> None:
    place = KeptPlace(lapse_s=LAPSE_S)
    place.refused("long", 1000, 0.0)
    for quarter in range(40):
        place.full(quarter / 4)
    place.refused("long", 1000, 10.0)
    with pytest.raises(OutOfCredits):
        place.check("short", 10.0)


def test_the_longest_are_remembered() -> None:
    place = KeptPlace(lapse_s=LAPSE_S)
    for number in range(3 * MAX_WAITING):
        place.refused(f"request-{number}", number, 0.0)
    place.refused("shorter than all", 1, 0.0)
    assert set(place._waiting) == {f"request-{number}" for number in range(2 * MAX_WAITING, 3 * MAX_WAITING)}
    place.refused("later", 1, 10.0)
    assert set(place._waiting) == {"later"}
