"""Keeps a decode worker's blocks for a long sequence that shorter ones keep overtaking. Pure: time comes in as an argument.

    offered, too few blocks ─► and again, for OVERTAKEN_S ─► nobody else is admitted ─► admitted, or offered no more

A gateway does the same among its own requests (`services/gateway/placement.py`), and knows nothing of other gateways'.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.protocol.errors import OutOfCredits

OVERTAKEN_S = 5.0
"""A sequence that lacks blocks is overtaken for so long."""
MAX_WAITING = 64
"""Of so many requests that lack blocks it is remembered since when: of the longest."""


@dataclass(slots=True)
class _Waiting:
    num_tokens: int
    since: float
    seen_at: float


class KeptPlace:
    """`lapse_s`: a request that its gateway has not offered for so long, although it could have, is forgotten: it may run
    elsewhere, or have been cancelled."""

    def __init__(self, *, lapse_s: float) -> None:
        self.lapse_s = lapse_s
        self._waiting: dict[str, _Waiting] = {}
        self._kept = ""

    def check(self, request: str, now: float) -> None:
        """:raises OutOfCredits: blocks are kept for another request."""
        if not self._kept or self._kept == request:
            return
        if now - self._waiting[self._kept].seen_at <= self.lapse_s:
            raise OutOfCredits("blocks become free for a longer request, which has waited for them")
        self.admitted(self._kept)

    def refused(self, request: str, num_tokens: int, now: float) -> None:
        """There were too few blocks for it."""
        waiting = self._waiting.get(request)
        if waiting is None or now - waiting.seen_at > self.lapse_s:
            self._remember(request, _Waiting(num_tokens, now, now))
            return
        waiting.seen_at = now
        if not self._kept and now - waiting.since >= OVERTAKEN_S:
            self._kept = request

    def full(self, now: float) -> None:
        """Gateways are told that there is no room, so they offer nothing: no request is forgotten for that."""
        for waiting in self._waiting.values():
            waiting.seen_at = now

    def admitted(self, request: str) -> None:
        """It waits no more. Harmless for one that did not."""
        if self._waiting.pop(request, None) is not None and self._kept == request:
            self._kept = ""

    def _remember(self, request: str, waiting: _Waiting) -> None:
        for known in [known for known, one in self._waiting.items() if waiting.since - one.seen_at > self.lapse_s]:
            self.admitted(known)
        if len(self._waiting) >= MAX_WAITING:
            shortest = min(self._waiting, key=lambda known: self._waiting[known].num_tokens)
            if self._waiting[shortest].num_tokens >= waiting.num_tokens or shortest == self._kept:
                return
            self.admitted(shortest)
        self._waiting[request] = waiting
