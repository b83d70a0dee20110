"""How long nothing has come of a request, and what has been asked for since. Pure.

Only tokens are a sign of life. A worker that answers a fetch with nothing new may wait for room, or hang: what its heartbeats
say of its engine tells.
"""

from __future__ import annotations


class Silence:
    """Times are seconds. `heard_at`: when something came that counts; `progressed_at`: the last token, or since when a gap is
    known; `fetches`: fetches since then that brought nothing."""

    def __init__(self, now: float) -> None:
        self.heard_at = now
        self.progressed_at = now
        self.fetched_at = 0.0
        self.fetches = 0
        self.gap = False

    def began(self, now: float) -> None:
        """Another state began, or another worker has the request."""
        self.heard_at = now

    def handed_over(self, now: float) -> None:
        self.heard_at = self.progressed_at = now
        self.fetches = 0

    def placed(self) -> None:
        self.fetches = 0
        self.gap = False

    def heard(self, now: float) -> None:
        self.heard_at = now
        self.fetches = 0

    def progressed(self, now: float) -> None:
        self.progressed_at = now
        self.gap = False

    def away(self, now: float) -> None:
        """Nothing could come until now: the bus was away, or this process."""
        self.heard_at = self.progressed_at = now
        self.fetches = 0

    def saw_gap(self, now: float, refetch_s: float) -> bool:
        """A frame came that is not the next one. Returns whether to fetch what is missing."""
        if not self.gap:
            self.gap = True
            self.progressed_at = now
            return True
        return now - self.fetched_at >= refetch_s

    def fetched(self, now: float) -> None:
        self.fetched_at = now

    def lasts(self, now: float, stall_s: float) -> bool:
        """Nothing has come for so long, nor was anything asked for."""
        return now - max(self.heard_at, self.fetched_at) >= stall_s
