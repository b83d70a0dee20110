"""What the edges count, under the names that vLLM's dashboards graph.

Gaps between outputs are observed for every chunk of every stream, so that histogram keeps plain counters and is turned into
Prometheus's form only when it is scraped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import ClassVar
from weakref import WeakKeyDictionary

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from common.runtime.metrics import Metrics
from services.gateway.bodies import Usage

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
_OUTCOMES = ("stop", "length", "cancelled", "error")


class FastHistogram(Collector):
    """A histogram whose `observe` costs a bisection and two additions. One event loop only."""

    def __init__(self, name: str, description: str, bounds: tuple[float, ...], registry: CollectorRegistry) -> None:
        self._name = name
        self._description = description
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        cumulative = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            cumulative += count
            buckets.append((bound, cumulative))
        family = HistogramMetricFamily(self._name, self._description)
        family.add_metric([], buckets, self._sum)
        yield family


class EdgeMetrics:
    """What the HTTP and the NATS edge of one gateway count together; see `of`."""

    _known: ClassVar[WeakKeyDictionary[Metrics, EdgeMetrics]] = WeakKeyDictionary()

    @classmethod
    def of(cls, metrics: Metrics) -> EdgeMetrics:
        """The one instance that is registered with `metrics`."""
        if metrics not in cls._known:
            cls._known[metrics] = cls(metrics)
        return cls._known[metrics]

    def __init__(self, metrics: Metrics) -> None:
        self._running = metrics.gauge("vllm:num_requests_running", "Choices being generated, queued ones included")
        self._prompt_tokens = metrics.counter("vllm:prompt_tokens", "Tokens of prompts of ended requests")
        self._cached_tokens = metrics.counter("vllm:prefix_cache_hits", "Prompt tokens found in a prefix cache")
        self._generated = metrics.counter("vllm:generation_tokens", "Generated tokens")
        self._success = metrics.counter("vllm:request_success", "Ended requests, by how", ["finished_reason"])
        self._errors = metrics.counter("request_errors_total", "Refused and failed requests", ["edge", "code"])
        self._dropped = metrics.counter("nats_dropped_total", "NATS messages dropped without an answer", ["reason"])
        registry = metrics.registry
        self._ttft = FastHistogram("vllm:time_to_first_token_seconds", "To a request's first tokens", _SHORT_S, registry)
        self._itl = FastHistogram("vllm:inter_token_latency_seconds", "Between a request's outputs", _SHORT_S, registry)
        self._e2e = FastHistogram("vllm:e2e_request_latency_seconds", "From admission to the end", _LONG_S, registry)
        self.first_token = self._ttft.observe
        self.gap = self._itl.observe

    def began(self, num_choices: int) -> None:
        self._running.inc(num_choices)

    def ended(self, outcome: str, elapsed_s: float, usage: Usage, num_choices: int) -> None:
        """`outcome`: a finish reason, or an error's code."""
        self._running.dec(num_choices)
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc(usage.cached_tokens)
        self._generated.inc(usage.completion_tokens)
        self._success.labels(outcome if outcome in _OUTCOMES else "error").inc()
        self._e2e.observe(elapsed_s)

    def refused(self, edge: str, code: str) -> None:
        self._errors.labels(edge, code).inc()

    def dropped(self, reason: str) -> None:
        self._dropped.labels(reason).inc()
