"""Canaries: tiny requests, one to each worker when it appears and now and then for ever, so that no client finds out first.

a worker appears, or has given no token for `interval_s` ─► a canary that only it may run ─► proven, or a failure (`health.py`)

Ready means that a request went through by every path that there is: a decode worker is proven and, if there are prefill
workers, one of them is. A worker that is full is left alone: what it runs proves it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import anyio
from anyio.abc import TaskGroup

from common.engine.shares import MAX_PRIORITY
from common.protocol.errors import Overloaded, PenstockError, ShuttingDown
from common.protocol.handles import WorkerRef
from common.protocol.messages import SamplingParams
from common.runtime import logs
from services.gateway.actions import Path
from services.gateway.health import STRIKES, Health
from services.gateway.requests import GenerationRequest
from services.gateway.router import Router
from services.gateway.stream import Stream, end_of

log = logs.get("gateway.canary")

LOST_AFTER_S = 2.0
"""Without a decode worker for so long, the gateway is no longer ready."""
LOOK_EVERY_S = 0.1
TRY_AGAIN_S = 1.0
AT_ONCE = 16
PROMPT = [1, 2, 3, 4]
"""Any ids that every vocabulary has."""

Generate = Callable[[GenerationRequest, Path, WorkerRef], Stream]


class Canary:
    """`passed` says whether a canary, or a client's request, went through by each path, and there has been a worker since.
    `failure`: of the latest canary, until all is well."""

    def __init__(
        self,
        *,
        router: Router,
        health: Health,
        generate: Generate,
        clock: Callable[[], float],
        timeout_s: float,
        interval_s: float,
        enabled: bool,
        model: str = "",
    ) -> None:
        """`model`: its name, for the log."""
        self.passed, self.failure = False, ""
        self._model = model
        self._router = router
        self._health = health
        self._generate = generate
        self._clock = clock
        self._timeout_s = timeout_s
        self._interval_s = interval_s
        self._enabled = enabled
        self._seen_at = clock()
        self._numbers = itertools.count(1)
        self._singing: dict[WorkerRef, anyio.CancelScope] = {}
        self._not_before: dict[WorkerRef, float] = {}

    def tick(self, now: float, *, connected: bool) -> None:
        """Once a heartbeat. Nobody is missed while the bus is away."""
        if self._router.decode.usable or not connected:
            self._seen_at = now
        elif self.passed and now - self._seen_at > LOST_AFTER_S:
            log.warning("not_ready", reason="no decode worker", model=self._model)
            self.passed = False
        self._pass_if_proven()

    def _pass_if_proven(self) -> None:
        if not self.passed and self._every_path():
            log.info("canary_passed", model=self._model)
            self.passed, self.failure = True, ""

    async def run(self) -> None:
        """Send canaries to whom they are due, for ever."""
        async with anyio.create_task_group() as tasks:
            while True:
                if self._enabled:
                    self._send_due(tasks)
                await anyio.sleep(LOOK_EVERY_S)

    def _every_path(self) -> bool:
        """Whether every kind of worker has one that is proven."""
        pools = [self._router.decode, *([self._router.prefill] if self._router.can_prefill else [])]
        if not self._enabled:
            return self._router.decode.usable > 0
        return all(any(worker.usable and self._health.proven(worker.ref) for worker in pool.members.values()) for pool in pools)

    def _send_due(self, tasks: TaskGroup) -> None:
        now = self._clock()
        members = [*self._router.decode.members.values(), *self._router.prefill.members.values()]
        self._not_before = {worker.ref: self._not_before.get(worker.ref, 0.0) for worker in members}
        for gone in self._singing.keys() - self._not_before.keys():
            self._singing[gone].cancel()  # nobody else may run it, and its failure would count against the worker's next life
        for worker in members:
            ref = worker.ref
            if len(self._singing) >= AT_ONCE:
                return
            due = worker.usable and worker.spare > 0 and now >= self._not_before[ref] and ref not in self._singing
            if due and now - self._health.proven_at(ref) >= self._interval_s and self._reachable(ref):
                self._singing[ref] = anyio.CancelScope()
                tasks.start_soon(self._sing, ref)

    def _reachable(self, worker: WorkerRef) -> bool:
        return worker.role == "decode" or self._router.can_prefill

    async def _sing(self, worker: WorkerRef) -> None:
        """One request to `worker`, while it lives. A failure counts against it."""
        began = self._clock()
        try:
            with self._singing[worker] as scope:
                await self._send(worker)
        except (Overloaded, ShuttingDown):
            self._not_before[worker] = self._clock() + TRY_AGAIN_S
        except PenstockError as error:
            self._not_before[worker] = self._clock() + TRY_AGAIN_S
            self._health.failed(worker, self._clock(), strikes=STRIKES)  # it can't be the canary's fault
            self.failure = f"{worker.id}: {error}"
            log.warning("canary_failed", worker=worker.id, code=error.code, reason=str(error))
        else:
            event = "canary_given_up" if scope.cancelled_caught else "canary_came_back"
            log.debug(event, worker=worker.id, elapsed_ms=round((self._clock() - began) * 1000, 1))
            self._pass_if_proven()
        finally:
            del self._singing[worker]

    async def _send(self, worker: WorkerRef) -> None:
        """:raises PenstockError: what a client would have been told."""
        request = GenerationRequest(
            id=f"canary-{next(self._numbers)}",
            prompt=PROMPT,
            sampling=SamplingParams(temperature=0.0, max_tokens=2),
            deadline_s=self._timeout_s,
            priority=-MAX_PRIORITY,  # a few tokens, ahead of long prompts: behind them it would miss its deadline
        )
        stream = self._generate(request, "prefill" if worker.role == "prefill" else "direct", worker)
        await end_of(stream)
