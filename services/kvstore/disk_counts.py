"""What the disk tier counts: for `/metrics` and for heartbeats."""

from __future__ import annotations

from common.runtime.metrics import Metrics


class DiskCounts:
    """Blocks since the start of the process."""

    def __init__(self, metrics: Metrics) -> None:
        self.hits = self.damaged = self.evicted = 0
        self._hits = metrics.counter("kvstore_disk_hit_blocks_total", "Blocks read from disk for a lookup")
        self._written = metrics.counter("kvstore_disk_written_blocks_total", "Blocks written to disk")
        self._missed = metrics.counter(
            "kvstore_disk_missed_blocks_total", "Blocks never written to disk: gone from memory first, or no room for them"
        )
        self._evicted = metrics.counter("kvstore_disk_evicted_blocks_total", "Blocks on disk given up for others")
        self._damaged = metrics.counter("kvstore_disk_damaged_blocks_total", "Blocks on disk that failed their checksum")
        self._errors = metrics.counter("kvstore_disk_errors_total", "Reads and writes that the disk refused", ["operation"])

    def hit(self, blocks: int) -> None:
        self.hits += blocks
        self._hits.inc(blocks)

    def wrote(self, blocks: int) -> None:
        self._written.inc(blocks)

    def missed(self, blocks: int = 1) -> None:
        self._missed.inc(blocks)

    def evicted_so_far(self, blocks: int) -> None:
        """The index has given up so many blocks since its start."""
        self._evicted.inc(blocks - self.evicted)
        self.evicted = blocks

    def damage(self) -> None:
        self.damaged += 1
        self._damaged.inc()

    def failed(self, operation: str) -> None:
        """`operation`: read or write."""
        self._errors.labels(operation).inc()
