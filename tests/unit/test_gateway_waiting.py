"""The gateway's queue: oldest first, nobody twice, nobody behind who needs something else, and no memory of those who left."""

from __future__ import annotations

from collections.abc import Collection

from common.protocol.handles import WorkerRef
from common.protocol.messages import SamplingParams
from services.gateway.actions import Limits
from services.gateway.requests import GenerationRequest, Request
from services.gateway.waiting import Line, WaitingRoom

GATEWAY = WorkerRef("gateway", "gateway-1", 1)


def request(name: int) -> Request:
    asked = GenerationRequest(id=str(name), prompt=[1], sampling=SamplingParams(), deadline_s=60.0)
    return Request(asked, wire_id=str(name), gateway=GATEWAY, limits=Limits(), now=0.0, wall_ms=0)


def turns(room: WaitingRoom, *, closed: Collection[Line] = ()) -> list[str]:
    found: list[str] = []
    while (turn := room.next(closed)) is not None:
        found.append(turn[2].id)
    return found


def test_who_came_first_has_the_first_turn_also_when_it_comes_back() -> None:
    room = WaitingRoom()
    lines: list[tuple[int, Line]] = [(3, "direct"), (1, "prefill"), (2, "direct")]
    for order, line in lines:
        room.join(line, order, request(order))
    turn = room.next(())
    assert turn is not None and turn[2].id == "1"
    room.put_back(*turn)
    assert turns(room) == ["1", "2", "3"]
    assert len(room) == 0


def test_nobody_waits_for_what_somebody_else_needs() -> None:
    room = WaitingRoom()
    lines: list[tuple[int, Line]] = [(1, "prefill"), (2, "prefill"), (3, "direct"), (4, "canary"), (5, "direct")]
    for order, line in lines:
        room.join(line, order, request(order))
    assert turns(room, closed={"prefill"}) == ["3", "4", "5"]
    assert len(room) == 2 and turns(room) == ["1", "2"]


def test_who_is_late_comes_last() -> None:
    room = WaitingRoom()
    lines: list[tuple[int, Line]] = [(1, "late"), (2, "late"), (3, "direct"), (4, "canary"), (5, "prefill")]
    for order, line in lines:
        room.join(line, order, request(order))
    assert turns(room, closed={"late"}) == ["3", "4", "5"]
    assert turns(room) == ["1", "2"]


def test_who_must_run_alone_comes_first() -> None:
    room = WaitingRoom()
    lines: list[tuple[int, Line]] = [(1, "direct"), (2, "alone"), (3, "alone")]
    for order, line in lines:
        room.join(line, order, request(order))
    assert turns(room) == ["2", "3", "1"]


def test_who_left_has_no_turn() -> None:
    room = WaitingRoom()
    room.join("direct", 1, request(1))
    room.join("direct", 2, request(2))
    room.leave(1)
    room.leave(1)
    assert 1 not in room and 2 in room
    assert turns(room) == ["2"]


def test_who_was_sent_away_for_a_while_counts_but_has_no_turn_yet() -> None:
    room = WaitingRoom()
    room.join_later("direct", 1, request(1), not_before=5.0)
    room.wake(4.9)
    assert len(room) == 1 and 1 in room
    assert not turns(room)
    room.wake(5.0)
    assert turns(room) == ["1"]


def test_clients_that_come_and_go_leave_no_memory_behind_while_the_head_waits() -> None:
    room = WaitingRoom()
    room.join("direct", 0, request(0))
    for order in range(1, 10_000):
        room.join("direct", order, request(order))
        room.leave(order)
    assert len(room) == 1
    assert room._lines["direct"].num_kept < 200
