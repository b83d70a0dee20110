"""One worker is emptied for requests that must run alone, where no worker is ever idle. Pure.

    somebody waits ─► the least loaded worker gets nothing new ─► it has ended what it had ─► who waits goes there

Never the last worker that others can use: then who must be alone waits for chance, as long as `placement.py` lets it.
"""

from __future__ import annotations

from common.protocol.handles import WorkerRef
from services.gateway.router import Job, Router


class Clearing:
    """At most one worker at a time. `look` once a heartbeat, `open` before requests are placed."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._worker: WorkerRef | None = None

    def look(self, job: Job | None) -> None:
        """Choose a worker, or let go of it. `job`: of a request that must be alone; None where none waits."""
        if self._worker is not None and (job is None or not self._router.may_clear(self._worker)):
            self._end()
        if self._worker is None and job is not None:
            self._worker = self._router.choose_to_clear(job)
            if self._worker is not None:
                self._router.reserve(self._worker)

    def open(self) -> None:
        """Let requests go to the worker again if it is idle: the next one is who must be alone."""
        if self._worker is not None and self._router.is_idle(self._worker):
            self._end()

    def _end(self) -> None:
        if self._worker is not None:
            self._router.reserve(self._worker, reserved=False)
            self._worker = None
