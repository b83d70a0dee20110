"""What a gateway knows of workers' prefix caches, in numbers: the index's own counters, read when they are scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.runtime.metrics import MODEL_LABEL
from services.gateway.kv_index import KvIndex

Read = Callable[[KvIndex], int]

_GAUGES: Sequence[tuple[str, str, Read]] = (
    ("penstock_kv_index_blocks", "Cached blocks of workers that this gateway knows of", lambda index: index.num_blocks),
    ("penstock_kv_index_workers", "Workers whose prefix caches this gateway knows", lambda index: index.num_covered),
    ("penstock_kv_index_left_out", "Workers whose blocks do not fit into the index", lambda index: index.num_too_large),
)
_COUNTERS: Sequence[tuple[str, str, Read]] = (
    ("penstock_kv_events_received", "Messages of workers about their prefix caches", lambda index: index.num_events),
    ("penstock_kv_event_gaps", "Times when a message about a prefix cache was missing", lambda index: index.num_gaps),
    ("penstock_kv_events_malformed", "Messages about prefix caches that made no sense", lambda index: index.num_malformed),
    ("penstock_kv_snapshots_received", "Snapshots of workers' prefix caches taken", lambda index: index.num_snapshots),
)


class IndexMetrics(Collector):
    """`indices`: of each model, by its name for clients."""

    def __init__(self, indices: Mapping[str, KvIndex]) -> None:
        self._indices = indices

    def collect(self) -> Iterator[Metric]:
        for kind, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, description, read in metrics:
                family = kind(name, description, labels=[MODEL_LABEL])
                for model, index in self._indices.items():
                    family.add_metric([model], read(index))
                yield family
