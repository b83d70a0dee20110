"""Percentiles and slopes, and what a process used. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Percentiles(msgspec.Struct, frozen=True):
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0

    @classmethod
    def of_seconds(cls, seconds: Sequence[float]) -> Percentiles:
        """In milliseconds; zeros when there is nothing to rank."""
        ranked = sorted(seconds)
        if not ranked:
            return cls()
        return cls(*(round(1000 * ranked[min(len(ranked) - 1, int(len(ranked) * share))], 3) for share in (0.5, 0.9, 0.99)))

    def __str__(self) -> str:
        return f"{self.p50:.2f} / {self.p90:.2f} / {self.p99:.2f}"


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """One process in the window. `rss_growth_mb_per_min` is the slope of a least-squares line."""

    cpu_percent: float
    rss_mb_first: float
    rss_mb_last: float
    rss_mb_max: float
    rss_growth_mb_per_min: float


def slope_per_min(samples: Sequence[tuple[float, float]]) -> float:
    """samples: (seconds, value). Least squares; 0 for fewer than two."""
    if len(samples) < 2:
        return 0.0
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return 60.0 * sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0
