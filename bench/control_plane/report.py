"""What the benchmark measured, and how it is shown. Pure."""

from __future__ import annotations

import msgspec

from bench.common.stats import Percentiles, Usage


class ProbeTimes(msgspec.Struct, frozen=True, kw_only=True):
    """First-token times of probes: the client's, the engine's (seen on the bus), and their difference, which is ours."""

    count: int
    unclean: int
    added_ms: Percentiles
    ttft_ms: Percentiles
    engine_ms: Percentiles


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the load generator saw. `window` is in seconds since 1970."""

    streams: int
    seconds: float
    window: tuple[float, float]
    tokens_per_s: float
    requests_per_s: float
    errors: dict[str, int]
    ttft_ms: Percentiles
    idle_probes: ProbeTimes
    loaded_probes: ProbeTimes
    frame_messages_per_s: float
    frame_bytes_per_s: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`messages_per_step`: token messages to the gateway per engine step, over all workers (0: steps unknown).

    `gateway_us_per_token`: the gateway's CPU time, which says more than the rate on a machine that others use, too.
    """

    workers: dict[str, int]
    engine_tokens_per_s: float
    load: Load
    steps_per_s: float
    messages_per_step: float
    gateway_us_per_token: float
    processes: dict[str, Usage]


def render(report: Report) -> str:
    load = report.load
    lines = [
        f"workers              {', '.join(f'{count} {role}' for role, count in report.workers.items())}"
        + (f", paced at {report.engine_tokens_per_s:,.0f} tokens/s" if report.engine_tokens_per_s else ", as fast as they go"),
        f"streams              {load.streams} for {load.seconds:.0f} s",
        f"tokens/s             {load.tokens_per_s:,.0f}",
        f"gateway              {report.gateway_us_per_token:.1f} µs of CPU per token",
        f"requests/s           {load.requests_per_s:,.1f}, errors {sum(load.errors.values())}",
        f"token messages/s     {load.frame_messages_per_s:,.0f},"
        f" {_ratio(load.tokens_per_s, load.frame_messages_per_s):.0f} tokens"
        f" and {_ratio(load.frame_bytes_per_s, load.frame_messages_per_s):,.0f} bytes each"
        + (f", {report.messages_per_step:.2f} per engine step" if report.messages_per_step else ""),
        _probes("first token, idle", load.idle_probes),
        _probes("first token, loaded", load.loaded_probes),
        f"all streams' TTFT    p50 {load.ttft_ms.p50:.1f} ms, p99 {load.ttft_ms.p99:.1f} ms",
    ]
    for name, usage in report.processes.items():
        lines.append(
            f"{name:<20} {usage.cpu_percent:.0f}% CPU, RSS {usage.rss_mb_first:.0f} → {usage.rss_mb_last:.0f} MB"
            f" ({usage.rss_growth_mb_per_min:+.2f} MB/min)"
        )
    lines += [f"error × {count}: {error}" for error, count in load.errors.items()]
    return "\n".join(lines)


def _ratio(amount: float, per: float) -> float:
    return amount / per if per else 0.0


def _probes(title: str, times: ProbeTimes) -> str:
    return (
        f"{title:<20} added p50 {times.added_ms.p50:.2f} ms, p99 {times.added_ms.p99:.2f} ms"
        f" (client {times.ttft_ms.p50:.2f}, engine {times.engine_ms.p50:.2f}; {times.count} probes, {times.unclean} unclean)"
    )
