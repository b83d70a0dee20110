"""When a decode worker will say more, as far as its steps so far tell. Pure.

What a draft worker has under way when an update says otherwise is void, and runs all the same. So a step that would begin when
the next update has come is not put behind one that runs: what that update says makes a better step.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.protocol.handles import WorkerRef

_SLACK = 0.2
"""Of an interval, after which an update is not waited for any longer."""
_KEPT_S = 60.0
"""After which a worker that says nothing is forgotten."""


@dataclass(slots=True)
class _Heard:
    """interval_s: between the last two updates; 0 after the first."""

    at: float
    interval_s: float = 0.0

    @property
    def due_at(self) -> float:
        return self.at + self.interval_s

    def is_overdue(self, now: float) -> bool:
        return not self.interval_s or now > self.due_at + _SLACK * self.interval_s


class Cadence:
    """When updates came, and how often, of each decode worker."""

    def __init__(self) -> None:
        self._heard: dict[WorkerRef, _Heard] = {}

    def heard(self, worker: WorkerRef, now: float) -> None:
        """An update of the worker has come."""
        last = self._heard.get(worker)
        if last is None:
            self._heard = {one: heard for one, heard in self._heard.items() if now - heard.at < _KEPT_S}
        self._heard[worker] = _Heard(now, 0.0 if last is None else now - last.at)

    def is_due(self, moment: float, now: float) -> bool:
        """Return whether an update is expected by `moment`. Of several workers nothing is expected: whenever a step begins, one
        of them is about to say more."""
        awaited = [heard for heard in self._heard.values() if not heard.is_overdue(now)]
        return len(awaited) == 1 and awaited[0].due_at <= moment
