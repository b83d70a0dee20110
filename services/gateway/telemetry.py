"""What the core counts: queue, placements, retries, lost frames. The edges count what clients see (`metrics.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.runtime.metrics import MODEL_LABEL, Metrics
from services.gateway.dispatch import Dispatcher, Stats
from services.gateway.routes import Reason

_QUEUE_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_COUNTERS: tuple[tuple[str, str, Callable[[Stats], int]], ...] = (
    ("penstock_request_retries", "Attempts beyond a request's first", lambda stats: stats.retries),
    ("penstock_request_resumes", "Streams that went on at another worker", lambda stats: stats.resumes),
    (
        "penstock_frames_dropped",
        "Frames late, repeated, beyond a gap or of a fenced worker",
        lambda stats: stats.dropped_frames,
    ),
    ("penstock_frames_fetched", "Times that frames were asked for again", lambda stats: stats.fetches),
)


class Telemetry(Collector):
    """Reads the dispatchers' own counters when it is scraped."""

    def __init__(self, metrics: Metrics) -> None:
        self._all_stats: list[Stats] = []
        self._routes: dict[str, Mapping[Reason, int]] = {}
        by_model = [MODEL_LABEL]
        self._running = metrics.gauge("vllm:num_requests_running", "Requests that workers hold", by_model)
        self._waiting = metrics.gauge("vllm:num_requests_waiting", "Requests that wait for a worker", by_model)
        self._queue_time = metrics.histogram(
            "vllm:request_queue_time_seconds", "Time before a request is sent to a worker, for each attempt", _QUEUE_S, by_model
        )
        metrics.registry.register(self)

    def watch(self, model: str, dispatcher: Dispatcher) -> Callable[[float], None]:
        """Count for `model`, its name for clients. Return what observes how long a request of it waited."""
        self._all_stats.append(dispatcher.stats)
        self._routes[model] = dispatcher.placement.routes
        self._running.labels(model).set_function(lambda: float(dispatcher.num_running))
        self._waiting.labels(model).set_function(lambda: float(dispatcher.num_waiting))
        return self._queue_time.labels(model).observe

    def collect(self) -> Iterator[Metric]:
        for name, description, read in _COUNTERS:
            family = CounterMetricFamily(name, description)
            family.add_metric([], sum(map(read, self._all_stats)))
            yield family
        routes = CounterMetricFamily(
            "penstock_routes", "Attempts sent to workers, by why they took their path", labels=[MODEL_LABEL, "reason"]
        )
        for model, counts in self._routes.items():
            for reason, count in counts.items():
                routes.add_metric([model, reason], count)
        yield routes
