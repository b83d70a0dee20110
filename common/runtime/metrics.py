"""Prometheus metrics: one collector registry per actor, and what every actor counts.

Services add their own with `metrics.counter`, `gauge` and `histogram`; the HTTP endpoints in `endpoints.py` show them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

PREFIX = "penstock_"
MODEL_LABEL = "model_name"
"""Every `vllm:…` metric has it: the name of the model for clients, as in vLLM."""


class Metrics:
    """The metrics of one actor. Names get the prefix `penstock_`, unless they bring one with a colon (`vllm:…`)."""

    def __init__(self, *, role: str) -> None:
        self.role = role
        self.registry = CollectorRegistry()
        self.messages_received = self.counter("messages_received_total", "Messages that were decoded", ["type"])
        self.messages_undecodable = self.counter("messages_undecodable_total", "Messages that could not be decoded")
        self.handler_errors = self.counter("handler_errors_total", "Messages whose handler raised")
        self.outbox_dropped = self.counter("outbox_dropped_total", "Messages dropped because they could not be sent")
        self.peers_lost = self.counter("peers_lost_total", "Workers that were found dead")
        self.http_refused = self.counter("http_refused_total", "HTTP requests refused for their Host or Origin", ["code"])
        self.fences = self.counter("fences_total", "Times this process was stopped for so long that others gave it up")

    def observe_process(self) -> None:
        """Add memory, CPU and garbage collection of this process; once per process, so not in tests of many actors."""
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)

    def counter(self, name: str, description: str, labels: Sequence[str] = ()) -> Counter:
        return Counter(_full(name), description, labels, registry=self.registry)

    def gauge(
        self, name: str, description: str, labels: Sequence[str] = (), *, read: Callable[[], float] | None = None
    ) -> Gauge:
        """`read` is asked at each scrape; without it the gauge is set."""
        gauge = Gauge(_full(name), description, labels, registry=self.registry)
        if read is not None:
            gauge.set_function(read)
        return gauge

    def histogram(self, name: str, description: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        return Histogram(_full(name), description, labels, buckets=tuple(buckets), registry=self.registry)

    def render(self) -> bytes:
        """The text format that Prometheus scrapes."""
        return generate_latest(self.registry)


def _full(name: str) -> str:
    return name if ":" in name else PREFIX + name
