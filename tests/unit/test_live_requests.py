"""Who may cancel which request, and cancels that are handled before the request they mean."""

from __future__ import annotations

import msgspec
import pytest

from common.protocol.errors import DuplicateRequest
from services.gateway.live_requests import MAX_EARLY, LiveRequests


class Request(msgspec.Struct):
    minted: str
    request: str
    inbox: str


def test_a_name_belongs_to_its_inbox_and_a_minted_id_to_whoever_knows_it() -> None:
    live = LiveRequests[Request]()
    named, other, secret = Request("1", "mine", "a"), Request("2", "mine", "b"), Request("3", "3", "c")
    for request in (named, other, secret):
        live.check_new(request.request, request.inbox)
        live.add(request)
    with pytest.raises(DuplicateRequest):
        live.check_new("mine", "a")
    assert live.cancelled_by("mine", "a") is named
    assert live.cancelled_by("mine", "b") is other
    assert live.cancelled_by("mine", "c") is None
    assert live.cancelled_by("1", "c") is None, "its client chose another name"
    assert live.cancelled_by("3", "anywhere") is secret
    live.remove(named)
    assert live.cancelled_by("mine", "a") is None
    live.check_new("mine", "a")


def test_an_early_cancel_holds_for_what_had_arrived_alone() -> None:
    live = LiveRequests[Request]()
    request = Request("1", "mine", "a")
    live.expect_cancelled("mine", "a", until=7)
    assert not live.was_cancelled(Request("2", "mine", "b"), number=6)
    assert not live.was_cancelled(Request("3", "yours", "a"), number=6)
    assert live.was_cancelled(request, number=7)
    assert not live.was_cancelled(request, number=7), "one cancel, one request"
    live.expect_cancelled("mine", "a", until=7)
    assert not live.was_cancelled(request, number=8), "it came after the cancel"


def test_early_cancels_are_bounded() -> None:
    live = LiveRequests[Request]()
    for number in range(3 * MAX_EARLY):
        live.expect_cancelled(f"id-{number}", "a", until=10)
    assert not live.was_cancelled(Request("1", f"id-{2 * MAX_EARLY - 1}", "a"), number=1)
    assert live.was_cancelled(Request("2", f"id-{2 * MAX_EARLY}", "a"), number=1)
