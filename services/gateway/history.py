"""How one request went: when it entered each state, on which workers, and why an attempt ended. Pure."""

from __future__ import annotations

from typing import NamedTuple

from common.protocol.handles import WorkerRef
from services.gateway.actions import State

MAX_STEPS = 48
"""What is kept of a request that goes from worker to worker: its arrival and its latest steps."""


class Step(NamedTuple):
    """At `at`, the request entered `state` in this attempt. `reason`: the code of the error that ended the attempt before."""

    at: float
    state: State
    attempt: int
    prefill: WorkerRef | None
    decode: WorkerRef | None
    reason: str


class History:
    def __init__(self, arrived_at: float) -> None:
        self.steps = [Step(arrived_at, State.QUEUED, 0, None, None, "")]

    def note(
        self, now: float, state: State, attempt: int, prefill: WorkerRef | None, decode: WorkerRef | None, reason: str
    ) -> None:
        if len(self.steps) >= MAX_STEPS:
            del self.steps[1]
        self.steps.append(Step(now, state, attempt, prefill, decode, reason))
