"""Requests that wait for a worker, oldest first, wherever they come back from. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from services.gateway.actions import State
from services.gateway.requests import Request


class WaitingLine:
    """`order` is the request's age, unique. Who is in line is `QUEUED`; others that are still in the heaps have left."""

    def __init__(self) -> None:
        self._members: set[int] = set()
        self._line: list[tuple[int, Request]] = []
        self._delayed: list[tuple[float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, order: int) -> bool:
        return order in self._members

    def join(self, order: int, request: Request) -> None:
        self._members.add(order)
        heapq.heappush(self._line, (order, request))
        if len(self._line) > 2 * len(self._members) + 64:
            self._line = [entry for entry in self._line if entry[0] in self._members]
            heapq.heapify(self._line)

    def join_later(self, order: int, request: Request, not_before: float) -> None:
        """It waits from now on, but has no turn until `wake` is called at `not_before` or later."""
        self._members.add(order)
        heapq.heappush(self._delayed, (not_before, order, request))

    def wake(self, now: float) -> None:
        while self._delayed and self._delayed[0][0] <= now:
            _, order, request = heapq.heappop(self._delayed)
            if order in self._members:
                self.join(order, request)

    def leave(self, order: int) -> None:
        """Harmless for one that is not in line."""
        self._members.discard(order)

    def turns(self) -> Iterator[Request]:
        """Who waits, oldest first; each has left the line, and joins again if there is still no place for it."""
        while self._line:
            order, request = heapq.heappop(self._line)
            if order in self._members and request.state is State.QUEUED:
                self._members.discard(order)
                yield request
