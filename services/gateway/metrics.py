"""What the edges count, under the names that vLLM's dashboards graph where there is one.

A name that begins with `vllm:` has one meaning in all of Penstock: of whole requests, as clients see them, it is a gateway's;
of an engine (its cache, its drafts, its preemptions), it is a worker's (`common/worker/metrics.py`).

Gaps between outputs are observed for every chunk of every stream, so that histogram keeps plain counters and is turned into
Prometheus's form only when it is scraped.
"""

from __future__ import annotations

import itertools
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
ALERTING = ("no_workers", "workers_died")
"""Codes of errors that alerts are about. Their series begin at 0: in one that begins with an error Prometheus sees no
increase."""


class Observations:
    """One model's part of a histogram, whose buckets end at `bounds`."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def counts(self) -> tuple[int, ...]:
        """Observations so far in each bucket, the last one without an upper bound. Not cumulative."""
        return tuple(self._counts)

    def cumulative(self) -> list[tuple[str, float]]:
        counts = itertools.accumulate(self._counts)
        return list(zip((*map(str, self.bounds), "+Inf"), counts, strict=True))


class FastHistogram(Collector):
    """A histogram by model, whose observations cost a bisection and two additions. One event loop only."""

    def __init__(self, name: str, description: str, bounds: tuple[float, ...], registry: CollectorRegistry) -> None:
        self._name = name
        self._description = description
        self._bounds = bounds
        self._by_model: dict[str, Observations] = {}
        registry.register(self)

    def of(self, model: str) -> Observations:
        """What has been observed of this model."""
        return self._by_model.setdefault(model, Observations(self._bounds))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._description, labels=[MODEL_LABEL])
        for model, seen in self._by_model.items():
            family.add_metric([model], seen.cumulative(), seen.sum)
        yield family


class _Families:
    """What all models of one gateway share: each metric once, with a label for the model where dashboards expect it."""

    known: ClassVar[WeakKeyDictionary[Metrics, _Families]] = WeakKeyDictionary()

    def __init__(self, metrics: Metrics) -> None:
        by_model = [MODEL_LABEL]
        self.models: dict[str, EdgeMetrics] = {}
        self.open = metrics.gauge("open_choices", "Choices that clients wait for, queued ones included")
        self.prompt_tokens = metrics.counter("vllm:prompt_tokens", "Tokens of prompts of ended requests", by_model)
        self.generated = metrics.counter("vllm:generation_tokens", "Generated tokens of ended requests", by_model)
        self.success = metrics.counter(
            "vllm:request_success",
            "Requests that were answered to their end, by finish reason",
            [MODEL_LABEL, "finished_reason"],
        )
        self.cached_tokens = metrics.counter(
            "cached_prompt_tokens_total", "Prompt tokens of ended requests that did not have to be computed", by_model
        )
        self.errors = metrics.counter("request_errors_total", "Refused, failed and cancelled requests", ["edge", "code"])
        for edge, code in itertools.product(("http", "nats"), ALERTING):
            self.errors.labels(edge, code)
        self.dropped = metrics.counter("nats_dropped_total", "NATS messages dropped without an answer", ["reason"])
        self.ignored = metrics.counter(
            "ignored_arguments_total",
            "Arguments that had no effect, named in a warning; `unknown`: in no known API",
            ["argument"],
        )
        registry = metrics.registry
        self.ttft = FastHistogram("vllm:time_to_first_token_seconds", "Time to a request's first tokens", _SHORT_S, registry)
        self.itl = FastHistogram("vllm:inter_token_latency_seconds", "Time between a request's outputs", _SHORT_S, registry)
        self.e2e = FastHistogram(
            "vllm:e2e_request_latency_seconds", "Time from a request's admission to its end", _LONG_S, registry
        )


class EdgeMetrics:
    """What the HTTP and the NATS edge of one gateway count together of one model; see `of`."""

    @classmethod
    def of(cls, metrics: Metrics, model: str) -> EdgeMetrics:
        """The one instance for this model that is registered with `metrics`. `model` is its name for clients, no alias."""
        if metrics not in _Families.known:
            _Families.known[metrics] = _Families(metrics)
        families = _Families.known[metrics]
        if model not in families.models:
            families.models[model] = cls(families, model)
        return families.models[model]

    @classmethod
    def known(cls, metrics: Metrics) -> list[EdgeMetrics]:
        """Those of all models that are registered with `metrics`."""
        families = _Families.known.get(metrics)
        return [] if families is None else list(families.models.values())

    def __init__(self, families: _Families, model: str) -> None:
        self._open = families.open
        self._prompt_tokens = families.prompt_tokens.labels(model)
        self._generated = families.generated.labels(model)
        self._success = families.success
        self._cached_tokens = families.cached_tokens.labels(model)
        self._errors = families.errors
        self._dropped = families.dropped
        self._ignored = families.ignored
        self._model = model
        self.ttft = families.ttft.of(model)
        self.itl = families.itl.of(model)
        self.first_token = self.ttft.observe
        self.gap = self.itl.observe
        self._observe_e2e = families.e2e.of(model).observe

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
        self._observe_e2e(elapsed_s)

    def failed(self, edge: str, code: str) -> None:
        """A request ended with this error's code, whether or not anything had been generated."""
        self._errors.labels(edge, code).inc()

    def ignored(self, labels: Iterable[str]) -> None:
        for label in labels:
            self._ignored.labels(label).inc()

    def dropped(self, reason: str) -> None:
        self._dropped.labels(reason).inc()
