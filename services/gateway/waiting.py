"""Requests that wait for a worker: tenants by fair shares, and those of one tenant by age and priority. Pure.

There is a line for each thing that one may wait for, so that nobody waits for what somebody else needs: a short prompt does not
stand behind a long one for which there is no prefill worker. A request keeps its rank wherever it comes back from.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from typing import Literal

from common.engine.shares import Shares
from services.gateway.actions import State
from services.gateway.requests import Request

Line = Literal["alone", "canary", "direct", "prefill", "large", "read", "late"]
"""For a worker that has nothing else to do; for one certain worker; for room at decode; for room at prefill, and at decode
afterwards; for room at workers that hold more tokens than others; for room at prefill alone; for a worker that has next to no
prompts."""

_LINES: tuple[Line, ...] = ("alone", "canary", "direct", "prefill", "large", "read", "late")
_Turn = tuple[float, float, int]
"""Virtual time of the tenant, rank and order of the request."""
SHARED: tuple[Line, ...] = ("direct", "prefill", "large", "read")
"""The lines that tenants share."""
FIRST_GUESS_TOKENS = 64.0
LEARNT_SHARE = 0.1
MAX_GUESSES = 10_000


class ExpectedAnswers:
    """How long a tenant's answers are: a moving average."""

    def __init__(self) -> None:
        self._mean: dict[str, float] = {}

    def expected(self, tenant: str, max_tokens: int) -> float:
        return min(max_tokens, self._mean.get(tenant, FIRST_GUESS_TOKENS))

    def ended(self, tenant: str, num_tokens: int) -> None:
        if tenant in self._mean or len(self._mean) < MAX_GUESSES:
            mean = self._mean.get(tenant, FIRST_GUESS_TOKENS)
            self._mean[tenant] = mean + LEARNT_SHARE * (num_tokens - mean)


class _Queue:
    """One tenant's in a line, by rank. `size` are in line; others that are still in the heap have left."""

    __slots__ = ("heap", "size")

    def __init__(self) -> None:
        self.heap: list[tuple[float, int]] = []
        self.size = 0


class WaitingLine:
    """`order` is the request's age, unique. Who is in line is `QUEUED`. `on_left` is called with each that leaves."""

    def __init__(self, on_left: Callable[[Request], None]) -> None:
        self.members: dict[int, Request] = {}
        self._on_left = on_left
        self._queues: dict[str, _Queue] = {}
        self._turns: list[tuple[float, str]] = []

    @property
    def num_kept(self) -> int:
        """Entries in memory, those that have left included."""
        return len(self._turns) + sum(len(queue.heap) for queue in self._queues.values())

    def join(self, order: int, request: Request, time: float) -> None:
        """`time`: its tenant's virtual time."""
        self.members[order] = request
        queue = self._queues.get(request.tenant)
        if queue is None:
            queue = self._queues[request.tenant] = _Queue()
            self.turn(request.tenant, time)
        queue.size += 1
        heapq.heappush(queue.heap, (request.rank, order))
        if len(queue.heap) > 2 * queue.size + 64:
            queue.heap = sorted({entry for entry in queue.heap if entry[1] in self.members})

    def turn(self, tenant: str, time: float) -> None:
        """Its virtual time may be less than it was, or it has been held back until now."""
        if tenant in self._queues:
            heapq.heappush(self._turns, (time, tenant))
            if len(self._turns) > 2 * len(self._queues) + 64:
                self._turns = [(min(at for at, name in self._turns if name == tenant), tenant) for tenant in self._queues]
                heapq.heapify(self._turns)

    def leave(self, order: int) -> None:
        """Harmless for one that is not in line."""
        request = self.members.pop(order, None)
        if request is not None:
            self._queues[request.tenant].size -= 1
            self._on_left(request)

    def pop(self, order: int) -> Request:
        """The first leaves the line. Call `first` before, which says its order."""
        request = self.members[order]
        heapq.heappop(self._queues[request.tenant].heap)
        self.leave(order)
        return request

    def first(self, shares: Shares, held: Collection[str]) -> _Turn | None:
        """Whose turn it is. `held`: tenants that have none; call `turn` when they do again."""
        while self._turns:
            time, tenant = self._turns[0]
            queue = self._queues.get(tenant)
            head = None if queue is None else self._head(queue)
            if head is None or tenant in held:
                heapq.heappop(self._turns)
                if head is None:
                    self._queues.pop(tenant, None)
                continue
            now = shares.time(tenant)
            if now == time:
                return time, *head
            heapq.heapreplace(self._turns, (now, tenant))
        return None

    def _head(self, queue: _Queue) -> tuple[float, int] | None:
        while queue.heap:
            request = self.members.get(queue.heap[0][1])
            if request is not None and request.state is State.QUEUED:
                return queue.heap[0]
            self.leave(heapq.heappop(queue.heap)[1])
        return None


class WaitingRoom:
    """All lines, and those who are to come back later. Requests of nobody in particular are one tenant's."""

    def __init__(self) -> None:
        self._shares = Shares()
        self._lines = {line: WaitingLine(self._left) for line in _LINES}
        self._num_in_line: dict[str, int] = {}
        self._delayed: list[tuple[float, int, Line, Request]] = []
        self._away: set[int] = set()
        self._held: set[str] = set()
        self._is_stale = False
        """Turns of the only tenant that waits were not kept up to date."""

    def __len__(self) -> int:
        return sum(len(line.members) for line in self._lines.values()) + len(self._away)

    def __contains__(self, order: int) -> bool:
        return order in self._away or any(order in line.members for line in self._lines.values())

    def is_within_share(self, tenant: str, room: int) -> bool:
        """Whether a tenant has no more in line than its share of `room`, whoever else waits."""
        return self._num_in_line.get(tenant, 0) * len(self._num_in_line) <= room

    def members(self, line: Line) -> list[tuple[int, Request]]:
        return list(self._lines[line].members.items())

    def join(self, line: Line, order: int, request: Request) -> None:
        if request.tenant not in self._num_in_line:
            self._shares.arrive(request.tenant, alone=not self._num_in_line)
            if self._is_stale:
                self._is_stale = False
                for tenant in self._num_in_line:
                    self._turn(tenant)
        self.put_back(line, order, request)

    def put_back(self, line: Line, order: int, request: Request) -> None:
        """Whose turn it was, and for whom there was no place: it waits on as if it had not had its turn."""
        self._num_in_line[request.tenant] = self._num_in_line.get(request.tenant, 0) + 1
        self._lines[line].join(order, request, self._shares.time(request.tenant))

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
        self._shares.forget(self._num_in_line)

    def leave(self, order: int) -> None:
        """Harmless for one that does not wait."""
        self._away.discard(order)
        for line in self._lines.values():
            line.leave(order)

    def hold(self, tenant: str) -> None:
        """It has no turn until `let_go`."""
        self._held.add(tenant)

    def let_go(self) -> None:
        """Whoever was held may have a turn again."""
        if self._held:
            for tenant in self._held:
                self._turn(tenant)
            self._held.clear()

    def charge(self, tenant: str, tokens: float, weight: float) -> None:
        """Its request was placed, and is expected to take so many tokens."""
        self._shares.charge(tenant, tokens, weight)

    def correct(self, tenant: str, tokens: float, weight: float) -> None:
        """It took so many more, or fewer if negative."""
        self._shares.correct(tenant, tokens, weight)
        if len(self._num_in_line) < 2:
            self._is_stale = True
        elif tokens < 0:
            self._turn(tenant)

    def next(self, closed: Collection[Line]) -> tuple[Line, int, Request] | None:
        """Whose turn it is among the lines that are not `closed`: it leaves its line; `put_back` if there is no place for it.
        Who must run alone comes first, while workers are idle; the others by tenants' shares, and within a tenant by rank; who
        is late comes last."""
        if not self._num_in_line:
            return None
        alone = None if "alone" in closed else self._first("alone")
        if alone is not None:
            return self._taken("alone", alone)
        best: _Turn | None = None
        line: Line = "direct"
        for name in SHARED:
            first = None if name in closed else self._first(name)
            if first is not None and (best is None or first < best):
                best, line = first, name
        canary = None if "canary" in closed else self._first("canary")
        if canary is not None and (best is None or canary[1:] < best[1:]):  # nobody's in particular: by rank alone
            best, line = canary, "canary"
        if best is None and "late" not in closed:
            best, line = self._first("late"), "late"
        return None if best is None else self._taken(line, best)

    def _first(self, line: Line) -> _Turn | None:
        found = self._lines[line]
        return found.first(self._shares, self._held) if found.members else None

    def _taken(self, line: Line, turn: _Turn) -> tuple[Line, int, Request]:
        order = turn[2]
        return line, order, self._lines[line].pop(order)

    def _left(self, request: Request) -> None:
        tenant = request.tenant
        self._num_in_line[tenant] -= 1
        if not self._num_in_line[tenant]:
            del self._num_in_line[tenant]

    def _turn(self, tenant: str) -> None:
        for line in self._lines.values():
            line.turn(tenant, self._shares.time(tenant))
