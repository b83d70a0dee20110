"""Prometheus metrics: one collector registry per actor, and what every actor counts.

Services add their own with `metrics.counter`, `gauge` and `histogram`; the HTTP endpoints in `endpoints.py` show them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.gc_collector import GCCollector
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

PREFIX = "penstock_"
MODEL_LABEL = "model_name"
"""Every `vllm:…` metric has it: the name of the model for clients, as in vLLM."""
PLAIN_TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_OPENMETRICS_VERSIONS = ("", "1.0.0")


class Metrics:
    """The metrics of one actor. Names get the prefix `penstock_`, unless they bring one with a colon (`vllm:…`)."""

    def __init__(self, *, role: str) -> None:
        self.role = role
        self.registry = CollectorRegistry()
        self.messages_received = self.counter("messages_received_total", "Messages that were decoded", ["type"])
        self.messages_undecodable = self.counter("messages_undecodable_total", "Messages that could not be decoded")
        self.handler_errors = self.counter("handler_errors_total", "Messages whose handler raised an error")
        self.outbox_dropped = self.counter("outbox_dropped_total", "Messages dropped because they could not be sent")
        self.peers_lost = self.counter("peers_lost_total", "Workers that were found dead; not those that stopped in order")
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
        """Return all metrics in Prometheus's classic text format."""
        return generate_latest(self.registry)

    def page(self, accept: str) -> tuple[bytes, str]:
        """Return what `/metrics` answers to a request with this Accept header, and its content type: OpenMetrics for those who
        ask for it, else the classic text format."""
        if accepts_openmetrics(accept):
            # any other escaping makes `vllm_…` of `vllm:…`
            return openmetrics.generate_latest(self.registry, escaping=openmetrics.ALLOWUTF8), OPENMETRICS
        return self.render(), PLAIN_TEXT


def accepts_openmetrics(accept: str) -> bool:
    """Whether an Accept header asks for OpenMetrics 1.0.0, and does not prefer plain text. `*/*` asks for neither."""
    qualities = {"application/openmetrics-text": 0.0, "text/plain": 0.0}
    for accepted in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in accepted.split(";"))
        values = {name: value for name, _, value in (parameter.partition("=") for parameter in parameters)}
        if kind not in qualities or (kind != "text/plain" and values.get("version", "") not in _OPENMETRICS_VERSIONS):
            continue
        try:
            quality = float(values.get("q", "1"))
        except ValueError:
            continue
        qualities[kind] = max(qualities[kind], quality)
    return (
        qualities["application/openmetrics-text"] > 0 and qualities["application/openmetrics-text"] >= qualities["text/plain"]
    )


def _full(name: str) -> str:
    return name if ":" in name else PREFIX + name
