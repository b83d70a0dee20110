"""What each model and tenant holds of a store, in `/metrics`: counted as blocks come and go, read when it is scraped.

A store knows a tenant by `owner_of` its name. Its hexadecimal digits are the label, and `penstock keys id NAME` prints them.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.kvstore.eviction import LeafOrder

MAX_SERIES = 100
"""Of each tier: the largest. What all others hold is told as one, of the model and tenant OTHERS."""
OTHERS = "others"
LABELS = ("tier", "model", "tenant")


class HeldMetrics(Collector):
    """`tiers`: by name, what returns fingerprints and the order of their blocks. `names`: models by fingerprint, as they are
    known now; what is not among them keeps its latest name, and has its fingerprint if it never had one."""

    def __init__(
        self,
        tiers: Mapping[str, Callable[[], Iterable[tuple[str, LeafOrder]]]],
        names: Callable[[], Mapping[str, str]],
    ) -> None:
        self._tiers = tiers
        self._names = names
        self._known: dict[str, str] = {}

    def collect(self) -> Iterator[Metric]:
        what = "by tier, model and tenant (what `penstock keys id` says of its name; empty: requests without a tenant)"
        blocks = GaugeMetricFamily("penstock_kvstore_tenant_blocks", f"Blocks {what}", labels=LABELS)
        sizes = GaugeMetricFamily("penstock_kvstore_tenant_bytes", f"Bytes of blocks {what}", labels=LABELS)
        for tier, held in self._held().items():
            for (model, tenant), (count, size) in _largest(held):
                blocks.add_metric([tier, model, tenant], count)
                sizes.add_metric([tier, model, tenant], size)
        yield blocks
        yield sizes

    def _held(self) -> dict[str, dict[tuple[str, str], tuple[int, int]]]:
        """Return blocks and bytes by model and tenant, of each tier."""
        orders = {tier: list(read()) for tier, read in self._tiers.items()}
        present = {_model_of(fingerprint) for known in orders.values() for fingerprint, _ in known}
        names = {**self._known, **self._names()}
        self._known = {model: name for model, name in names.items() if model in present}
        found: dict[str, dict[tuple[str, str], tuple[int, int]]] = {}
        for tier, known in orders.items():
            counts: Counter[tuple[str, str]] = Counter()
            sizes: Counter[tuple[str, str]] = Counter()
            for fingerprint, order in known:
                model = _model_of(fingerprint)
                for owner, count in order.num_by_owner.items():
                    key = self._known.get(model, model), owner.hex()
                    counts[key] += count
                    sizes[key] += count * order.block_bytes
            found[tier] = {key: (count, sizes[key]) for key, count in counts.items()}
        return found


def _model_of(fingerprint: str) -> str:
    """Return the fingerprint without the number of the cache group: what workers announce."""
    return fingerprint.partition("-")[0]


def _largest(held: Mapping[tuple[str, str], tuple[int, int]]) -> list[tuple[tuple[str, str], tuple[int, int]]]:
    if len(held) <= MAX_SERIES:
        return list(held.items())
    shown = heapq.nlargest(MAX_SERIES - 1, held.items(), key=lambda item: item[1][1])
    left = [sum(one[part] for one in held.values()) - sum(one[part] for _, one in shown) for part in (0, 1)]
    return [*shown, ((OTHERS, OTHERS), (left[0], left[1]))]
