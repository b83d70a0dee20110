"""A run's tables, for a terminal and for Markdown. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.common.table import markdown
from bench.mixed_load.greedy import ShapeReport, percentile
from bench.mixed_load.mixed import MixedReport

MAX_RATIO = 1.5
"""Of the time to the first token at p99, beside a greedy tenant by alone."""


def mixed(report: MixedReport) -> str:
    """Return what the mixed run came to."""
    tally = report.tally
    rate = tally.num_answered / report.seconds
    rows = [
        ["answered as they must be", f"{tally.num_answered:,} ({rate:.1f}/s), {len(tally.answered)} kinds"],
        ["by way", _listed(tally.by_edge)],
        ["excused", _listed(tally.excused)],
        ["blows", f"{sum(report.blows.values())}: {_listed(report.blows)}"],
        ["prefixes of others", _listed(tally.salts)],
        ["batches", _listed(tally.batches)],
        ["wrong", _listed(tally.wrong)],
        ["memory that grows", ", ".join(each.name for each in report.memory if each.grows) or "none"],
        ["held at the end", "; ".join(f"{name}: {what}" for name, what in report.held.items()) or "nothing"],
    ]
    memory = [
        [each.name, f"{each.minutes:.1f}", f"{each.settled_mb:.0f}", f"{each.last_mb:.0f}", f"{each.mb_per_min:+.2f}"]
        for each in report.memory
    ]
    parts = [*(f"fault: {fault}" for fault in tally.faults)]
    if memory:
        parts.append(markdown(["process", "min", "MiB at 20 %", "MiB at the end", "MiB/min"], memory))
    parts.append(markdown([f"mixed load, {report.seconds / 60:.1f} min", "right" if report.is_right else "NOT RIGHT"], rows))
    return "\n\n".join(parts)


def greedy(reports: Sequence[ShapeReport]) -> str:
    """Return what greed did to the modest tenant: milliseconds over all turns, and ratios as medians of turns."""
    titles = ["TTFT, ms", "modest/s", "greedy/s", "alone p50 / p99", "beside p50 / p99", "ratio p50", "ratio p99", "failed"]
    rows: list[list[str]] = []
    for each in reports:
        alone, beside = ([ttft for half in halves for ttft in half.ttft_s] for halves in (each.alone, each.beside))
        rows.append(
            [
                each.name,
                f"{each.modest:.1f}",
                f"{each.greedy_answered:.1f} (alone {each.capacity:.1f})",
                *(f"{1e3 * percentile(of, 0.5):.1f} / {1e3 * percentile(of, 0.99):.1f}" for of in (alone, beside)),
                f"{each.ratio(0.5):.2f}",
                f"{each.ratio(0.99):.2f}",
                str(sum(half.failed for half in (*each.alone, *each.beside))),
            ]
        )
    return markdown(titles, rows)


def is_fair(reports: Sequence[ShapeReport]) -> bool:
    """Return whether each shape was measured and kept to the bound."""
    return all(0 < each.ratio(0.99) <= MAX_RATIO for each in reports)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items())) or "none"
