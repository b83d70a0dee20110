"""What the core counts: queue, placements, retries, lost frames. The edges count what clients see (`metrics.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.runtime.metrics import MODEL_LABEL, Metrics
from services.gateway.dispatch import Dispatcher

_QUEUE_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Telemetry(Collector):
    """Reads the dispatcher's own counters when it is scraped."""

    def __init__(self, metrics: Metrics, dispatcher: Dispatcher, *, model: str) -> None:
        """`model`: its name for clients."""
        self._stats = dispatcher.stats
        for name, description, read in (
            ("vllm:num_requests_running", "Requests that workers hold", lambda: float(dispatcher.num_running)),
            ("vllm:num_requests_waiting", "Requests that wait for a worker", lambda: float(dispatcher.num_waiting)),
        ):
            metrics.gauge(name, description, [MODEL_LABEL]).labels(model).set_function(read)
        queue_time = metrics.histogram(
            "vllm:request_queue_time_seconds", "Before a request is sent to a worker, for each attempt", _QUEUE_S, [MODEL_LABEL]
        )
        self.waited = queue_time.labels(model).observe
        metrics.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        for name, description, value in (
            ("penstock_request_retries", "Attempts beyond a request's first", stats.retries),
            ("penstock_request_resumes", "Streams that went on at another worker", stats.resumes),
            (
                "penstock_frames_dropped",
                "Frames late, repeated, beyond a gap or of a fenced worker",
                stats.dropped_frames,
            ),
            ("penstock_frames_fetched", "Times that frames were asked for again", stats.fetches),
        ):
            family = CounterMetricFamily(name, description)
            family.add_metric([], value)
            yield family
