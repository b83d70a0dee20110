"""Deaths and pauses at random, and which failures of requests they explain."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import anyio
import msgspec

from bench.mixed_load.clients import Edge, Result
from bench.mixed_load.site import Site

REFUSALS = {"overloaded", "rate_limit_exceeded", "no_workers", "gateway_busy", "shutting_down"}
"""Errors that a client may be given at any time: it is to come back later."""
RETRY_AFTER_STATUS = (429, 503)
BEFORE_S = 1.0
"""What a request that was sent just after a death may still have met."""
START_S = 80.0
"""Within this time a gateway, or the bus, that died is there again: `penstock up` waits up to a minute after many deaths."""
PAUSE_S = (1.0, 8.0)
WORKERS = ("decode", "prefill", "draft", "kvstore")


class Outage(msgspec.Struct, frozen=True):
    """One blow. `kind`: kill or pause. `target`: the process. `at`: monotonic seconds."""

    kind: str
    target: str
    at: float

    @property
    def role(self) -> str:
        return "nats" if self.target.startswith("nats") else self.target.split("-")[0]


def verdict(result: Result, edge: Edge, began: float, ended: float, outages: Sequence[Outage]) -> str:
    """Return "" for a failure that must not be, else what to count it as.

    An error needs a code and, with its own status, a retry-after. A stream may break while its gateway, or for a request over
    NATS also the bus, is killed, and then alone.
    """

    def killed(role: str, since: float = began - BEFORE_S) -> bool:
        return any(each.kind == "kill" and each.role == role and since <= each.at <= ended for each in outages)

    if result.ending == "error":
        if result.code not in REFUSALS or (result.status in RETRY_AFTER_STATUS and not result.retry_after):
            return ""
        return f"refused: {result.code}"
    if result.ending == "nobody":
        roles = ("gateway", "nats") if edge == "nats" else ("gateway",)
        return "nobody there after a kill" if any(killed(role, began - START_S) for role in roles) else ""
    if killed("gateway"):
        return "broken: its gateway was killed"
    if edge == "nats" and killed("nats"):
        return "broken: the bus was killed"
    return ""


WEIGHTS: Mapping[str, int] = {"decode": 6, "prefill": 4, "kvstore": 2, "draft": 2, "gateway": 3, "nats": 2, "pause": 4}
"""How often each role is killed, and any worker paused, beside each other."""


class Outages:
    """Strikes at random and remembers. `kinds`: of `WEIGHTS`. `spared`: processes that are paused at the most, so that their
    memory can be watched."""

    def __init__(self, site: Site, *, every_s: float, seed: int, kinds: Sequence[str], spared: Sequence[str]) -> None:
        self._site = site
        self._every_s = every_s
        self._rng = random.Random(seed)
        self._spared = frozenset(spared)
        self._weights = {kind: WEIGHTS[kind] for kind in kinds}
        self.struck: list[Outage] = []

    async def run(self) -> None:
        """Strike until cancelled; nothing stays paused."""
        while True:
            await anyio.sleep(self._rng.expovariate(1 / self._every_s))
            processes = self._site.processes()
            (chosen,) = self._rng.choices(list(self._weights), list(self._weights.values()))
            if chosen == "pause":
                targets = [name for name in processes if name.startswith(WORKERS)]
            else:
                targets = [name for name in processes if name.startswith(chosen) and name not in self._spared]
            if not targets:
                continue
            target = self._rng.choice(sorted(targets))
            self.struck.append(Outage("pause" if chosen == "pause" else "kill", target, time.monotonic()))
            if chosen == "pause":
                await self._pause(processes[target], self._rng.uniform(*PAUSE_S))
            else:
                _signal(processes[target], signal.SIGKILL)

    async def _pause(self, pid: int, seconds: float) -> None:
        try:
            _signal(pid, signal.SIGSTOP)
            await anyio.sleep(seconds)
        finally:
            _signal(pid, signal.SIGCONT)

    def counts(self) -> dict[str, int]:
        return dict(Counter(f"{each.kind} {each.role}" for each in self.struck))


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
