"""What a gateway counts of batches."""

from __future__ import annotations

from collections.abc import Collection

from common.runtime.metrics import Metrics
from services.gateway.batches.records import Batch


class BatchMetrics:
    """One per gateway."""

    def __init__(self, metrics: Metrics) -> None:
        self.lines = metrics.counter(
            "batch_lines_total",
            "Lines of batches that this gateway ran, by outcome; repeated: they had a result already; given_back: run later",
            ["outcome"],
        )
        self.running = metrics.gauge("batch_lines_running", "Lines of batches that run at this gateway")
        self.kept = metrics.gauge("batches_kept", "Batches that this gateway sees through")
        self.requests = metrics.gauge(
            "batch_requests", "Lines of the batches that this gateway sees through, by how far they are", ["state"]
        )
        self.tell(())

    def tell(self, kept: Collection[Batch]) -> None:
        """Set what the gauges say of the batches that this gateway sees through now."""
        self.kept.set(len(kept))
        for state in ("total", "completed", "failed"):
            self.requests.labels(state).set(sum(getattr(batch, state) for batch in kept))
