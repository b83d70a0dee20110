"""Points of the dashboard's curves, from counters that only grow. Pure: `now` is an argument.

Once a second `Curves.sample` is given totals and adds one point: rates over the last seconds, quantiles of what was observed in
the last WINDOW_S. Points of the last KEEP_POINTS seconds are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence

WINDOW_S = 10.0
RATE_WINDOW_S = 3.0
KEEP_POINTS = 600

Histogram = tuple[Sequence[float], Sequence[int]]
"""Upper bounds of the buckets in seconds, and how many observations each has, with one more for those beyond the last bound."""


class Point(msgspec.Struct, array_like=True):
    """`at`: seconds since 1970. Times are milliseconds, `acceptance` is a share; None where nothing was observed."""

    at: float
    tokens_per_s: float
    requests_per_s: float
    running: int
    waiting: int
    ttft_p50_ms: float | None
    ttft_p95_ms: float | None
    itl_p50_ms: float | None
    itl_p95_ms: float | None
    acceptance: float | None


class Totals(msgspec.Struct, frozen=True):
    """What has been counted up to `now`, a monotonic time."""

    now: float
    tokens: int
    requests: int
    ttft: tuple[int, ...]
    itl: tuple[int, ...]
    draft_tokens: int
    accepted_tokens: int


class Acceptance:
    """Totals of proposed and of accepted tokens over all decode workers, those that are gone included."""

    def __init__(self) -> None:
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self._said: dict[WorkerRef, tuple[int, int]] = {}

    def observe(self, presences: Iterable[Presence]) -> None:
        """What every living decode worker says now. What one had counted before it was first heard of is left out."""
        said: dict[WorkerRef, tuple[int, int]] = {}
        for presence in presences:
            proposed, accepted = said[presence.worker] = presence.draft_tokens, presence.accepted_tokens
            before = self._said.get(presence.worker)
            if before is not None:
                self.draft_tokens += max(0, proposed - before[0])
                self.accepted_tokens += max(0, accepted - before[1])
        self._said = said


class Curves:
    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=KEEP_POINTS)
        self._totals: deque[Totals] = deque()

    def sample(self, totals: Totals, bounds: Sequence[float], *, at: float, running: int, waiting: int) -> Point:
        """`bounds`: of both histograms."""
        history = self._totals
        while history and totals.now - history[0].now > WINDOW_S + 0.5:
            history.popleft()
        first = history[0] if history else totals
        recent = next((one for one in history if totals.now - one.now <= RATE_WINDOW_S + 0.5), totals)
        elapsed_s = totals.now - recent.now
        ttft, itl = _since(totals.ttft, first.ttft), _since(totals.itl, first.itl)
        proposed = totals.draft_tokens - first.draft_tokens
        point = Point(
            at=round(at, 1),
            tokens_per_s=_rate(totals.tokens - recent.tokens, elapsed_s),
            requests_per_s=_rate(totals.requests - recent.requests, elapsed_s),
            running=running,
            waiting=waiting,
            ttft_p50_ms=_ms(quantile((bounds, ttft), 0.5)),
            ttft_p95_ms=_ms(quantile((bounds, ttft), 0.95)),
            itl_p50_ms=_ms(quantile((bounds, itl), 0.5)),
            itl_p95_ms=_ms(quantile((bounds, itl), 0.95)),
            acceptance=round((totals.accepted_tokens - first.accepted_tokens) / proposed, 3) if proposed > 0 else None,
        )
        history.append(totals)
        self.points.append(point)
        return point


def quantile(histogram: Histogram, share: float) -> float | None:
    """The value below which `share` of the observations lie, as far as buckets tell: linear within one; None for none at all.

    >>> quantile(((1.0, 2.0), (0, 4, 0)), 0.5)
    1.5
    """
    bounds, counts = histogram
    wanted = share * sum(counts)
    if wanted <= 0:
        return None
    seen = 0
    for index, count in enumerate(counts):
        if count and seen + count >= wanted:
            if index >= len(bounds):
                break
            lower = bounds[index - 1] if index else 0.0
            return lower + (bounds[index] - lower) * (wanted - seen) / count
        seen += count
    return bounds[-1]


def added(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """Bucket by bucket; the models of a gateway have the same bounds."""
    return tuple(map(sum, zip(*counts, strict=True)))


def _since(now: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    if len(before) != len(now):
        return tuple(now)
    return tuple(later - earlier for later, earlier in zip(now, before, strict=True))


def _rate(count: int, elapsed_s: float) -> float:
    return round(max(0, count) / elapsed_s, 1) if elapsed_s > 0 else 0.0


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)
