"""Ready means that a request went through: a tiny one, by every path that there is.

a decode worker appears ─► canary direct ─► canary through prefill, if there is one ─► ready
no decode worker for a while ─► not ready, and the same again
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import anyio

from common.protocol.errors import PenstockError
from common.protocol.messages import SamplingParams
from common.runtime import logs
from services.gateway.actions import Path
from services.gateway.requests import GenerationRequest
from services.gateway.router import Router
from services.gateway.stream import Stream

log = logs.get("gateway.canary")

LOST_AFTER_S = 2.0
"""Without a decode worker for so long, the gateway is no longer ready."""
LOOK_EVERY_S = 0.1
TRY_AGAIN_S = 1.0
PROMPT = [1, 2, 3, 4]
"""Any ids that every vocabulary has."""

Generate = Callable[[GenerationRequest, Path], Stream]


class Canary:
    """`passed` says whether the last canary went through and there has been a decode worker since."""

    def __init__(
        self, *, router: Router, generate: Generate, clock: Callable[[], float], timeout_s: float, enabled: bool
    ) -> None:
        self.passed = False
        self._router = router
        self._generate = generate
        self._clock = clock
        self._timeout_s = timeout_s
        self._enabled = enabled
        self._seen_at = clock()
        self._numbers = itertools.count(1)

    def tick(self, now: float, *, connected: bool) -> None:
        """Once a heartbeat. Nobody is missed while the bus is away."""
        if self._router.decode.usable or not connected:
            self._seen_at = now
        elif self.passed and now - self._seen_at > LOST_AFTER_S:
            log.warning("not_ready", reason="no decode worker")
            self.passed = False

    async def run(self) -> None:
        while True:
            if self.passed or not self._router.decode.usable:
                await anyio.sleep(LOOK_EVERY_S)
                continue
            self.passed = await self.sing()
            if not self.passed:
                await anyio.sleep(TRY_AGAIN_S)

    async def sing(self) -> bool:
        """One request by each path. False, and a log line, if one of them failed."""
        if not self._enabled:
            return True
        began = self._clock()
        paths: list[Path] = ["direct", "prefill"] if self._router.can_prefill else ["direct"]
        for path in paths:
            try:
                await self._send(path)
            except PenstockError as error:
                log.warning("canary_failed", path=path, code=error.code, reason=str(error))
                return False
        log.info("canary_passed", paths=paths, elapsed_ms=round((self._clock() - began) * 1000, 1))
        return True

    async def _send(self, path: Path) -> None:
        """:raises PenstockError: what a client would have been told."""
        request = GenerationRequest(
            id=f"canary-{next(self._numbers)}",
            prompt=PROMPT,
            sampling=SamplingParams(temperature=0.0, max_tokens=2),
            deadline_s=self._timeout_s,
        )
        stream = self._generate(request, path)
        try:
            while True:
                output = await stream.next()
                if output.error is not None:
                    raise output.error
                if output.finish is not None:
                    return
        finally:
            stream.cancel()
