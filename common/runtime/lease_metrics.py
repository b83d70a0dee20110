"""Leases by age in `/metrics`, read when it is scraped: one that is old belongs to a reader that hangs, or was forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

AGES: tuple[tuple[str, float], ...] = (("0-1s", 1.0), ("1-5s", 5.0), ("5-15s", 15.0), ("15-60s", 60.0), ("60s+", float("inf")))
"""Values of the label `age`, and the age in seconds where each ends. Each lease is in one of them."""


class LeaseMetrics(Collector):
    """`ages`: by the kind of lease, what returns the ages in seconds of those that are held now."""

    def __init__(self, ages: Mapping[str, Callable[[], Sequence[float]]]) -> None:
        self._ages = ages

    def collect(self) -> Iterator[Metric]:
        held = GaugeMetricFamily("penstock_kv_leases", "Leases held on KV blocks, by kind and age", labels=["kind", "age"])
        oldest = GaugeMetricFamily(
            "penstock_kv_lease_oldest_seconds", "Age of the oldest lease; 0: none is held", labels=["kind"]
        )
        for kind, read in self._ages.items():
            ages = read()
            oldest.add_metric([kind], max(ages, default=0.0))
            began = 0.0
            for age, end in AGES:
                held.add_metric([kind, age], sum(began <= one < end for one in ages))
                began = end
        yield held
        yield oldest
