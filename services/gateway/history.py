"""How one request went: when it entered each state, on which workers and why these, where its stream stalled, and why an
attempt ended. Spans and `penstock explain` are made of it. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from common.protocol.handles import WorkerRef
from services.gateway.actions import State
from services.gateway.routes import Choice, Costed, ReadChoice, Reason

MAX_STEPS = 48
"""What is kept of a request that goes from worker to worker: its arrival and its latest steps. Hand-offs that were refused one
after the other go first."""
MAX_ROUTES = MAX_STEPS
"""Of how many placements the reasons are kept: of the first one and of all that are among the latest steps."""
MAX_COMPARISONS = 8
"""Of how many of these, what was compared."""
MAX_STALLS = 16
"""The latest stalls that are kept."""
STALL_NOTED_S = 1.0
"""A stream that gives no token for so long has stalled."""


class Step(NamedTuple):
    """At `at`, the request entered `state` in this attempt. `reason`: the code of the error that ended the attempt before."""

    at: float
    state: State
    attempt: int
    prefill: WorkerRef | None
    decode: WorkerRef | None
    reason: str


class Route(NamedTuple):
    """Why an attempt was placed where it was. `uncached_tokens`: of the prompt, expected to be computed there.
    `costs`: what was compared, if that is still kept."""

    at: float
    attempt: int
    prefill: WorkerRef | None
    decode: WorkerRef | None
    uncached_tokens: int
    reason: Reason
    costs: Sequence[Costed]


class Stall(NamedTuple):
    """No token came from `since` to `until`."""

    since: float
    until: float
    attempt: int


class History:
    """`received_at`: when the edge got the request, before it was read and tokenized."""

    def __init__(self, arrived_at: float, received_at: float = 0.0) -> None:
        self.received_at = received_at or arrived_at
        self.steps = [Step(arrived_at, State.QUEUED, 0, None, None, "")]
        self.routes: list[Route] = []
        self.stalls: list[Stall] = []

    def note(
        self, now: float, state: State, attempt: int, prefill: WorkerRef | None, decode: WorkerRef | None, reason: str
    ) -> None:
        if len(self.steps) >= MAX_STEPS:
            del self.steps[self._first_repeated()]
        self.steps.append(Step(now, state, attempt, prefill, decode, reason))

    def _first_repeated(self) -> int:
        """Return the index of a step in which nothing changed but the decode worker that was asked; 1: there is none."""
        pairs = enumerate(itertools.pairwise(self.steps), 1)
        repeated = (index for index, (before, step) in pairs if (step.state, step.attempt) == (before.state, before.attempt))
        return next(repeated, 1)

    def routed(self, now: float, attempt: int, choice: Choice | ReadChoice) -> None:
        if len(self.routes) >= MAX_ROUTES:
            del self.routes[1]
        route = Route(now, attempt, choice.prefill, choice.decode, choice.uncached_tokens, choice.reason, choice.costs)
        self.routes.append(route)
        if len(self.routes) > MAX_COMPARISONS:
            self.routes[-MAX_COMPARISONS] = self.routes[-MAX_COMPARISONS]._replace(costs=())

    def stalled(self, since: float, until: float, attempt: int) -> None:
        if len(self.stalls) >= MAX_STALLS:
            del self.stalls[0]
        self.stalls.append(Stall(since, until, attempt))
