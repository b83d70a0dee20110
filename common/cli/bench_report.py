"""What `penstock bench` measured, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
from rich.table import Table

from common.cli.chunks import Timing

PERCENTS = (50, 90, 99)


class Report(msgspec.Struct, kw_only=True):
    """What a run measured. `timings` are those of the requests that succeeded, `reasons` counts why others failed."""

    requests: int
    model: str = ""
    failed: int = 0
    elapsed_s: float = 0.0
    timings: list[Timing] = []
    reasons: Counter[str] = msgspec.field(default_factory=Counter)

    @property
    def generated_tokens(self) -> int:
        return sum(timing.tokens for timing in self.timings)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens of all requests over the whole time."""
        return self.generated_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def ttfts_s(self) -> list[float]:
        return [timing.ttft_s for timing in self.timings]

    @property
    def itls_s(self) -> list[float]:
        """The mean of each request that has more than one token."""
        return [timing.itl_s for timing in self.timings if timing.tokens > 1]

    @property
    def durations_s(self) -> list[float]:
        return [timing.last - timing.started for timing in self.timings]


def percentile(values: list[float], percent: float) -> float:
    """Nearest rank; 0 for no values.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 50), percentile([4.0, 1.0, 3.0, 2.0], 99), percentile([], 50)
    (2.0, 4.0, 0.0)
    """
    if not values:
        return 0.0
    ordered = sorted(values)
    rank = -(-percent * len(ordered) // 100)
    return ordered[max(0, int(rank) - 1)]


def table(report: Report) -> Table:
    shown = Table(box=None, header_style="bold", pad_edge=False)
    shown.add_column("")
    for percent in PERCENTS:
        shown.add_column(f"p{percent}", justify="right")
    rows = {"TTFT": report.ttfts_s, "ITL (mean of a request)": report.itls_s, "whole request": report.durations_s}
    for name, values in rows.items():
        shown.add_row(name, *(f"{percentile(values, percent) * 1000:.1f} ms" if values else "-" for percent in PERCENTS))
    shown.caption = (
        f"{len(report.timings)} requests in {report.elapsed_s:.1f} s · "
        f"{report.tokens_per_s:.1f} generated tok/s · {report.failed} failed"
    )
    return shown


def summary(report: Report) -> dict[str, Any]:
    """All figures with their units in the names, for `--json`. Percentiles of nothing are null."""
    return {
        "model": report.model,
        "requests": report.requests,
        "failed": report.failed,
        "failures": dict(report.reasons),
        "duration_s": round(report.elapsed_s, 6),
        "generated_tokens": report.generated_tokens,
        "tokens_per_s": round(report.tokens_per_s, 3),
        "requests_per_s": round(len(report.timings) / report.elapsed_s, 3) if report.elapsed_s else 0.0,
        "ttft_ms": _percentiles_ms(report.ttfts_s),
        "itl_ms": _percentiles_ms(report.itls_s),
        "request_ms": _percentiles_ms(report.durations_s),
    }


def _percentiles_ms(values_s: list[float]) -> dict[str, float | None]:
    found: dict[str, float | None] = {"mean": round(sum(values_s) / len(values_s) * 1000, 3) if values_s else None}
    for percent in PERCENTS:
        found[f"p{percent}"] = round(percentile(values_s, percent) * 1000, 3) if values_s else None
    return found
