"""How long a step may take before the engine counts as hung. Pure: `now` is an argument, in seconds of the worker's clock.

The bound is learned from the engine's own steps: `FACTOR` times the slowest of late, and never less than `floor_s`. A step that
may compile kernels gets `compile_s` instead. Time during which this process did not run (it was stopped, or its machine was
suspended) does not count.
"""

from __future__ import annotations

from collections import deque

FACTOR = 20.0
DECAY = 0.998
"""By which the slowest step counts less with each later one: half after some 350 steps."""


class StepWatch:
    """Steps end in the order in which they began; one begins to run when the one before it has ended."""

    def __init__(self, *, floor_s: float, compile_s: float) -> None:
        self.floor_s = floor_s
        self.compile_s = compile_s
        self.num_steps = 0
        """Steps that have ended, well or not."""
        self._flights: deque[bool] = deque()
        self._since = 0.0
        self._slowest_s = 0.0
        self._seen_at = -1.0

    def began(self, now: float, *, compiling: bool = False) -> None:
        """A step was given to the engine; `compiling`: it may have to compile for it."""
        if not self._flights:
            self._since = now
        self._flights.append(compiling)

    def ended(self, now: float) -> None:
        """The oldest step under way has ended."""
        compiling = self._flights.popleft()
        self.num_steps += 1
        if not compiling:
            self._slowest_s = max(now - self._since, DECAY * self._slowest_s)
        self._since = now

    def age_s(self, now: float) -> float:
        """How long the oldest step has been running; 0 when none is."""
        return max(0.0, now - self._since) if self._flights else 0.0

    @property
    def may_compile(self) -> bool:
        """Whether the step that is running may be compiling."""
        return bool(self._flights) and self._flights[0]

    @property
    def limit_s(self) -> float:
        """How long the step that is running may take."""
        return self.compile_s if self.may_compile else max(self.floor_s, FACTOR * self._slowest_s)

    def overdue(self, now: float, *, period_s: float) -> bool:
        """Whether the engine is to be given up. Call it every `period_s`: what a call comes late is time that nothing ran."""
        if self._seen_at >= 0:
            self._since += max(0.0, now - self._seen_at - 2 * period_s)
        self._seen_at = now
        return self.age_s(now) > self.limit_s
