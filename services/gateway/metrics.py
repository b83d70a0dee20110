"""What the edges count, under the names that vLLM's dashboards graph where there is one.

A name that begins with `vllm:` has one meaning in all of Penstock: of whole requests, as clients see them, it is a gateway's;
of an engine (its cache, its drafts, its preemptions), it is a worker's (`common/engine/metrics.py`).

Gaps between outputs are observed for every chunk of every stream, so that histogram keeps plain counters and is turned into
Prometheus's form only when it is scraped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import ClassVar
from weakref import WeakKeyDictionary

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from common.runtime.metrics import MODEL_LABEL, Metrics
from services.gateway.bodies import Usage

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0, 960.0)
SUCCESSES = ("stop", "length")


class FastHistogram(Collector):
    """A histogram of one model whose `observe` costs a bisection and two additions. One event loop only."""

    def __init__(
        self, name: str, description: str, bounds: tuple[float, ...], registry: CollectorRegistry, *, model: str
    ) -> None:
        self._name = name
        self._description = description
        self._bounds = bounds
        self._model = model
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def bounds(self) -> tuple[float, ...]:
        return self._bounds

    @property
    def counts(self) -> tuple[int, ...]:
        """Observations so far in each bucket, the last one without an upper bound. Not cumulative."""
        return tuple(self._counts)

    def collect(self) -> Iterator[Metric]:
        cumulative = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            cumulative += count
            buckets.append((bound, cumulative))
        family = HistogramMetricFamily(self._name, self._description, labels=[MODEL_LABEL])
        family.add_metric([self._model], buckets, self._sum)
        yield family


class EdgeMetrics:
    """What the HTTP and the NATS edge of one gateway count together; see `of`."""

    _known: ClassVar[WeakKeyDictionary[Metrics, EdgeMetrics]] = WeakKeyDictionary()

    @classmethod
    def of(cls, metrics: Metrics, model: str) -> EdgeMetrics:
        """The one instance that is registered with `metrics`. `model` is the name that clients use."""
        if metrics not in cls._known:
            cls._known[metrics] = cls(metrics, model)
        return cls._known[metrics]

    @classmethod
    def known(cls, metrics: Metrics) -> list[EdgeMetrics]:
        """All that are registered with `metrics`."""
        return [cls._known[metrics]] if metrics in cls._known else []

    def __init__(self, metrics: Metrics, model: str) -> None:
        by_model = [MODEL_LABEL]
        self._open = metrics.gauge("open_choices", "Choices that clients wait for, queued ones included")
        self._prompt_tokens = metrics.counter("vllm:prompt_tokens", "Tokens of prompts of ended requests", by_model).labels(
            model
        )
        self._generated = metrics.counter("vllm:generation_tokens", "Generated tokens of ended requests", by_model).labels(
            model
        )
        self._success = metrics.counter(
            "vllm:request_success",
            "Requests that were answered to their end, by finish reason",
            [MODEL_LABEL, "finished_reason"],
        )
        self._cached_tokens = metrics.counter(
            "cached_prompt_tokens_total", "Prompt tokens of ended requests that did not have to be computed"
        )
        self._errors = metrics.counter("request_errors_total", "Refused, failed and cancelled requests", ["edge", "code"])
        self._dropped = metrics.counter("nats_dropped_total", "NATS messages dropped without an answer", ["reason"])
        self._ignored = metrics.counter(
            "ignored_arguments_total",
            "Arguments that had no effect, named in a warning; `unknown`: in no known API",
            ["argument"],
        )
        registry = metrics.registry
        self.ttft = FastHistogram(
            "vllm:time_to_first_token_seconds", "To a request's first tokens", _SHORT_S, registry, model=model
        )
        self.itl = FastHistogram(
            "vllm:inter_token_latency_seconds", "Between a request's outputs", _SHORT_S, registry, model=model
        )
        self._e2e = FastHistogram(
            "vllm:e2e_request_latency_seconds", "From admission to the end", _LONG_S, registry, model=model
        )
        self._model = model
        self.first_token = self.ttft.observe
        self.gap = self.itl.observe

    def began(self, num_choices: int) -> None:
        self._open.inc(num_choices)

    def ended(self, finish: str, elapsed_s: float, usage: Usage, num_choices: int) -> None:
        """`finish`: the first choice's finish reason; empty if the request was not answered to its end. An answer that ends
        with calls of tools has stopped, as far as vLLM's dashboards know."""
        self._open.dec(num_choices)
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc(usage.cached_tokens)
        self._generated.inc(usage.completion_tokens)
        if finish == "tool_calls":
            finish = "stop"
        if finish in SUCCESSES:
            self._success.labels(self._model, finish).inc()
        self._e2e.observe(elapsed_s)

    def failed(self, edge: str, code: str) -> None:
        """A request ended with this error's code, whether or not anything had been generated."""
        self._errors.labels(edge, code).inc()

    def ignored(self, labels: Iterable[str]) -> None:
        for label in labels:
            self._ignored.labels(label).inc()

    def dropped(self, reason: str) -> None:
        self._dropped.labels(reason).inc()
