"""KV blocks by cache group and state in `/metrics`, read when it is scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from common.protocol.messages import KvUsage
from common.runtime.metrics import MODEL_LABEL

STATES = ("free", "owned", "leased", "cached")


class KvBlocks(Collector):
    """`model`: its name for clients. `usage`: the blocks of the pool; the only cache group of a model is group 0."""

    def __init__(self, model: str, usage: Callable[[], KvUsage]) -> None:
        self._model = model
        self._usage = usage

    def collect(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily(
            "penstock_kv_blocks",
            "KV blocks by cache group and state; of a group they add up to its pool",
            labels=[MODEL_LABEL, "group", "state"],
        )
        usage = self._usage()
        for number, group in enumerate(usage.groups or [usage]):
            for state in STATES:
                blocks.add_metric([self._model, str(number), state], getattr(group, state))
        yield blocks
