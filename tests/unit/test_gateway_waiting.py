"""The gateway's queue: oldest first, nobody twice, and no memory of those who left."""

from __future__ import annotations

from common.protocol.handles import WorkerRef
from common.protocol.messages import SamplingParams
from services.gateway.actions import Limits
from services.gateway.requests import GenerationRequest, Request
from services.gateway.waiting import WaitingLine

GATEWAY = WorkerRef("gateway", "gateway-1", 1)


def request(name: int) -> Request:
    asked = GenerationRequest(id=str(name), prompt=[1], sampling=SamplingParams(), deadline_s=60.0)
    return Request(asked, wire_id=str(name), gateway=GATEWAY, limits=Limits(), now=0.0, wall_ms=0)


def test_who_came_first_has_the_first_turn_also_when_it_comes_back() -> None:
    line = WaitingLine()
    for order in (3, 1, 2):
        line.join(order, request(order))
    first = next(line.turns())
    assert first.id == "1"
    line.join(1, first)
    assert [each.id for each in line.turns()] == ["1", "2", "3"]
    assert len(line) == 0


def test_who_left_has_no_turn() -> None:
    line = WaitingLine()
    line.join(1, request(1))
    line.join(2, request(2))
    line.leave(1)
    line.leave(1)
    assert [each.id for each in line.turns()] == ["2"]


def test_who_was_sent_away_for_a_while_counts_but_has_no_turn_yet() -> None:
    line = WaitingLine()
    line.join_later(1, request(1), not_before=5.0)
    line.wake(4.9)
    assert len(line) == 1
    assert not list(line.turns())
    line.wake(5.0)
    assert [each.id for each in line.turns()] == ["1"]


def test_clients_that_come_and_go_leave_no_memory_behind_while_the_head_waits() -> None:
    line = WaitingLine()
    line.join(0, request(0))
    for order in range(1, 10_000):
        line.join(order, request(order))
        line.leave(order)
    assert len(line) == 1
    assert len(line._line) < 200
