"""Fair shares of what several tenants wait for: start-time fair queueing (Goyal, Vin and Cheng, 1996). Pure.

Each tenant has a virtual time, which grows by what it is given over its weight; who is behind has the next turn. One that comes
back starts at most BURST_TOKENS behind whoever had the last turn. So one that asks for less than its share on average has its
turn at once, also when its requests come in bursts; nobody saves up more than that; and one that used idle workers alone owes
nothing for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator
from typing import Protocol, TypeVar

QUANTUM_TOKENS = 4096
"""A prompt up to this length that has begun is not interrupted for another tenant's that is as far behind."""

BURST_TOKENS = 8192
"""What a tenant may be given, in a burst, before others that wait."""
PRIORITY_STEP_S = 10.0
"""A request of one step lower priority lets pass what its tenant sends in so many seconds after it."""
MAX_PRIORITY = 60
"""So it is passed for ten minutes at the most, and nobody waits for ever."""
BACKGROUND_PRIORITY = 30


def bounded(priority: int, *, background: bool = False) -> int:
    """The priority that counts. In the background it is behind that of every request which asks for none, and reorders only
    what is there, too."""
    if background:
        return max(1, min(BACKGROUND_PRIORITY + priority, MAX_PRIORITY))
    return max(-MAX_PRIORITY, min(priority, MAX_PRIORITY)) if priority else 0


class Owned(Protocol):
    """Work of a tenant's."""

    @property
    def tenant(self) -> str: ...


W = TypeVar("W", bound=Owned)


class Shares:
    """Virtual times of those that wait now, and of those that are ahead of the others."""

    def __init__(self) -> None:
        self._times: dict[str, float] = {}
        self._begun: dict[str, float] = {}
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._times)

    def time(self, tenant: str) -> float:
        return self._times.get(tenant, self._now - BURST_TOKENS)

    def arrive(self, tenant: str, *, alone: bool) -> None:
        """It had nothing that waits, and has something now. `alone`: nobody else waits."""
        earliest = self._now if alone else self._now - BURST_TOKENS
        self._times[tenant] = max(self._times.get(tenant, earliest), earliest)

    def leave(self, tenant: str) -> None:
        """It has nothing that waits. Forgotten, unless it is ahead of the others."""
        self._begun.pop(tenant, None)
        if self._times.get(tenant, self._now) <= self._now - BURST_TOKENS:
            self._times.pop(tenant, None)

    def forget(self, waiting: Collection[str]) -> None:
        """Let go of those that are not `waiting`, as far as they are not ahead of the others."""
        if len(self._times) > len(waiting):
            for tenant in [tenant for tenant in self._times if tenant not in waiting]:
                self.leave(tenant)

    def charge(self, tenant: str, tokens: float, weight: float) -> None:
        """It had a turn, and was given so many tokens."""
        time = self.time(tenant)
        self._now = max(self._now, time)
        self._times[tenant] = time + tokens / weight

    def correct(self, tenant: str, tokens: float, weight: float) -> None:
        """It was given so many tokens more than it was charged for, or fewer if negative."""
        if tenant in self._times or tokens > 0:
            self._times[tenant] = self.time(tenant) + tokens / weight

    def serve(self, tenant: str, tokens: int, weight: float, *, ends: bool) -> None:
        """A part of a prompt has its turn; it is charged at the prompt's end (`ends`), and after each QUANTUM_TOKENS."""
        begun = self._begun.pop(tenant, 0.0) + tokens
        if ends or begun >= QUANTUM_TOKENS:
            self.charge(tenant, begun, weight)
        else:
            self._now = max(self._now, self.time(tenant))
            self._begun[tenant] = begun

    def key(self, tenant: str) -> tuple[float, float]:
        """The least has the next turn; of two that are as far, the one whose prompt has not begun: it has waited longer."""
        return self.time(tenant), self._begun.get(tenant, 0.0)


class TurnTaking:
    """The order in which a worker computes prompts of several tenants. Between prompts of one tenant it changes nothing."""

    def __init__(self) -> None:
        self.shares = Shares()
        self._present: set[str] = set()

    def in_turn(self, waiting: list[W]) -> Iterable[W]:
        """Yield `waiting`, which is in the order that holds within a tenant, tenants by turns. Call `served` for each one that
        is given something, before the next is taken."""
        if not waiting and not self._present:
            return waiting
        present = {work.tenant for work in waiting}
        for tenant in self._present - present:
            self.shares.leave(tenant)
        for tenant in present - self._present:
            self.shares.arrive(tenant, alone=len(present) == 1)
        self._present = present
        return waiting if len(present) < 2 else self._by_turns(waiting)

    def served(self, tenant: str, tokens: int, weight: float, *, ends: bool) -> None:
        self.shares.serve(tenant, tokens, weight, ends=ends)

    def _by_turns(self, waiting: list[W]) -> Iterator[W]:
        queues: dict[str, list[W]] = {}
        for work in reversed(waiting):
            queues.setdefault(work.tenant, []).append(work)
        turns = [(self.shares.key(tenant), tenant) for tenant in queues]
        heapq.heapify(turns)
        while turns:
            _, tenant = heapq.heappop(turns)
            yield queues[tenant].pop()
            if queues[tenant]:
                heapq.heappush(turns, (self.shares.key(tenant), tenant))
