"""How long a crashed process waits before it is started again. Pure: `now` is an argument."""

from __future__ import annotations

from collections import deque

FIRST_S = 0.5
MAX_S = 60.0
WINDOW_S = 600.0
"""Crashes of this period count. It holds enough of them at `MAX_S` apart that a process that keeps crashing stays there."""
_MAX_DOUBLINGS = 16


class Backoff:
    """The crashes of one process. A process that ran well comes back at once; each further crash doubles the delay.

    >>> backoff = Backoff()
    >>> [backoff.crashed(now) for now in (0.0, 1.0, 2.0, 3.0)], backoff.crashed(700.0)
    ([0.0, 0.5, 1.0, 2.0], 0.0)
    """

    def __init__(self) -> None:
        self._crashed_at: deque[float] = deque()

    @property
    def num_recent(self) -> int:
        """Crashes that count, as of the last one."""
        return len(self._crashed_at)

    def crashed(self, now: float) -> float:
        """Record a crash and return the delay until the next start, in seconds."""
        self._crashed_at.append(now)
        while self._crashed_at[0] <= now - WINDOW_S:
            self._crashed_at.popleft()
        if len(self._crashed_at) == 1:
            return 0.0
        return min(MAX_S, FIRST_S * 2 ** min(len(self._crashed_at) - 2, _MAX_DOUBLINGS))
