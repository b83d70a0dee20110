"""Requests that wait for a worker, oldest first, wherever they come back from. Pure.

There is a line for each thing that one may wait for, so that nobody waits for what somebody else needs: a short prompt does not
stand behind a long one for which there is no prefill worker.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import Literal

from services.gateway.actions import State
from services.gateway.requests import Request

Line = Literal["alone", "canary", "direct", "prefill", "read"]
"""For a worker that has nothing else to do; for one certain worker; for room at decode; for room at prefill, and at decode
afterwards; for room at prefill alone."""

_LINES: tuple[Line, ...] = ("alone", "canary", "direct", "prefill", "read")


class WaitingLine:
    """`order` is the request's age, unique. Who is in line is `QUEUED`; others that are still in the heap have left."""

    def __init__(self) -> None:
        self.members: dict[int, Request] = {}
        self._heap: list[int] = []

    def join(self, order: int, request: Request) -> None:
        self.members[order] = request
        heapq.heappush(self._heap, order)
        if len(self._heap) > 2 * len(self.members) + 64:
            self._heap = sorted(self.members)

    def leave(self, order: int) -> None:
        """Harmless for one that is not in line."""
        self.members.pop(order, None)

    def first(self) -> int | None:
        """The oldest's order."""
        while self._heap:
            request = self.members.get(self._heap[0])
            if request is not None and request.state is State.QUEUED:
                return self._heap[0]
            self.leave(heapq.heappop(self._heap))
        return None

    def pop(self) -> Request:
        """The oldest, who leaves the line. Call `first` before."""
        return self.members.pop(heapq.heappop(self._heap))


class WaitingRoom:
    """All lines, and those who are to come back later."""

    def __init__(self) -> None:
        self._lines = {line: WaitingLine() for line in _LINES}
        self._delayed: list[tuple[float, int, Line, Request]] = []
        self._away: set[int] = set()

    def __len__(self) -> int:
        return sum(len(line.members) for line in self._lines.values()) + len(self._away)

    def __contains__(self, order: int) -> bool:
        return order in self._away or any(order in line.members for line in self._lines.values())

    def members(self, line: Line) -> list[tuple[int, Request]]:
        return list(self._lines[line].members.items())

    def join(self, line: Line, order: int, request: Request) -> None:
        self._lines[line].join(order, request)

    def join_later(self, line: Line, order: int, request: Request, not_before: float) -> None:
        """It waits from now on, but has no turn until `wake` is called at `not_before` or later."""
        self._away.add(order)
        heapq.heappush(self._delayed, (not_before, order, line, request))

    def wake(self, now: float) -> None:
        while self._delayed and self._delayed[0][0] <= now:
            _, order, line, request = heapq.heappop(self._delayed)
            if order in self._away:
                self._away.discard(order)
                self.join(line, order, request)

    def leave(self, order: int) -> None:
        """Harmless for one that does not wait."""
        self._away.discard(order)
        for line in self._lines.values():
            line.leave(order)

    def next(self, closed: Collection[Line]) -> tuple[Line, int, Request] | None:
        """Whose turn it is among the lines that are not `closed`: it leaves its line, and joins again if there is no place for
        it. Who must run alone comes first, while workers are idle; the others by age."""
        found: tuple[int, Line] | None = None
        for name in _LINES:
            first = None if name in closed else self._lines[name].first()
            if first is not None and (found is None or first < found[0]):
                found = first, name
                if name == "alone":
                    break
        if found is None:
            return None
        order, name = found
        return name, order, self._lines[name].pop()
