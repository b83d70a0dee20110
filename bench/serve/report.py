"""What a run of `bench.serve` found, as Markdown and as a plot. Pure but for `draw`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench.common.machine import Machine
from bench.common.plot import figure
from bench.common.stats import Usage
from bench.common.table import markdown, number, percent
from bench.serve.client import Objective, Point

METHOD = (
    "Method: clients over HTTP (POST /v1/completions, streamed), prompts of random token ids. Latencies are of all requests\n"
    "sent in the window, each waited for; TTFT: from sending to the first text; ITL: between pieces of text, a token each as\n"
    "a rule; TPOT: a request's mean of it. Percentiles are p50 / p90 / p99, milliseconds."
)


class EngineRate(msgspec.Struct, kw_only=True):
    """Tokens per second of the engine without a bus or HTTP, `rows` requests always in work; and how that is known."""

    rows: int
    tok_s: float
    source: str


class Report(msgspec.Struct, kw_only=True):
    """`processes`: of each point, what each process of ours used in its window."""

    machine: Machine
    command: str
    served: str
    workers: str
    prompt: str
    output: str
    objective: Objective
    engine: EngineRate | None = None
    points: list[Point] = []
    processes: dict[str, dict[str, Usage]] = {}


def render(report: Report) -> str:
    head = f"# Serving benchmark\n\n{report.machine}\n\n    {report.command}\n\n{METHOD}"
    about = (
        f"{report.served}: {report.workers}. Prompts {report.prompt} tokens, answers {report.output}. Good: first token within"
        f" {report.objective.ttft_ms:g} ms and {report.objective.tpot_ms:g} ms a token."
    )
    parts = [head, about, _points(report)]
    if report.engine:
        parts.append(_engine(report, report.engine))
    errors = [f"{point.name}: {count} x {error}" for point in report.points for error, count in point.errors.items()]
    return "\n\n".join([*parts, *errors])


def _points(report: Report) -> str:
    rows = []
    for point in report.points:
        processes = report.processes.get(point.name, {})
        gateway = processes.get("gateway")
        rows.append(
            (
                point.name,
                f"{point.seconds:.0f} s",
                str(point.sent),
                str(point.failed),
                number(point.tokens_per_s, 0 if point.tokens_per_s > 99 else 1),
                number(point.requests_per_s, 2),
                number(point.good, 2),
                percent(point.good_share, 1.0) if point.good_share else "0%",
                str(point.ttft_ms),
                str(point.itl_ms),
                str(point.tpot_ms),
                f"{gateway.cpu_percent:.0f}%" if gateway else "—",
            )
        )
    titles = ("load", "window", "sent", "failed", "tok/s", "req/s", "good/s", "good", "TTFT", "ITL", "TPOT", "gateway CPU")
    return markdown(titles, rows)


def _engine(report: Report, engine: EngineRate) -> str:
    lines = [f"The engine alone ({engine.source}): {engine.tok_s:,.1f} tok/s at {engine.rows} rows."]
    name = f"{engine.rows} streams"
    lines += [
        f"Through the whole stack: {point.tokens_per_s:,.1f} tok/s, {100 * point.tokens_per_s / engine.tok_s:.1f}% of it."
        for point in report.points
        if point.name == name and engine.tok_s
    ]
    return " ".join(lines)


def draw(report: Report, path: Path) -> bool:
    """Latency over throughput, a point per load. False: nothing to draw, or nothing to draw with."""
    points = [point for point in report.points if point.sent > point.failed]
    if not points:
        return False
    with figure(path, f"{report.served}, {report.workers}\n{report.machine}", columns=2) as axes:
        if axes is None:
            return False
        for axis, name in zip(axes, ("ttft_ms", "tpot_ms"), strict=True):
            for share, style in (("p50", "o-"), ("p90", "s--"), ("p99", "^:")):
                values = [getattr(getattr(point, name), share) for point in points]
                axis.plot([point.tokens_per_s for point in points], values, style, label=share)
            for point in points:
                axis.annotate(point.name, (point.tokens_per_s, getattr(point, name).p50), fontsize=6)
            axis.axhline(getattr(report.objective, name), color="grey", linewidth=0.7, label="objective")
            axis.set_xlabel("generated tokens per second")
            axis.set_ylabel(f"{name.removesuffix('_ms').upper()}, ms")
            axis.set_yscale("log")
            axis.grid(alpha=0.3)
            axis.legend(fontsize=7)
    return True
