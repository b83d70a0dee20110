"""What the disk tier counts: for `/metrics`, for heartbeats, and of single requests."""

from __future__ import annotations

from typing import get_args

from common.protocol.explain_messages import RequestContext, WorkerEvent
from common.runtime.metrics import Metrics
from common.runtime.request_records import RequestRecords
from common.transfer.measured import TransferCounts
from common.transfer.paths import Operation


class DiskCounts:
    """Blocks since the start of the process. `records`: what is remembered of requests."""

    def __init__(self, metrics: Metrics, transfers: TransferCounts, records: RequestRecords) -> None:
        self._transfers = transfers
        self._records = records
        self.hits = self.damaged = self.evicted = 0
        self._hits = metrics.counter("kvstore_disk_hit_blocks_total", "Blocks read from disk for a lookup")
        self._written = metrics.counter("kvstore_disk_written_blocks_total", "Blocks written to disk")
        self._missed = metrics.counter(
            "kvstore_disk_missed_blocks_total", "Blocks never written to disk: gone from memory first, or no room for them"
        )
        self._evicted = metrics.counter("kvstore_disk_evicted_blocks_total", "Blocks on disk given up for others")
        self._damaged = metrics.counter("kvstore_disk_damaged_blocks_total", "Blocks on disk that failed their checksum")
        self._errors = metrics.counter("kvstore_disk_errors_total", "Reads and writes that the disk refused", ["operation"])
        for operation in get_args(Operation):  # from 0: in a series that begins with an error Prometheus sees no increase
            self._errors.labels(operation)

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
        self._transfers.failed("disk", "read", "checksum")
        self._damaged.inc()

    def copied(self, operation: Operation, num_bytes: int, seconds: float) -> None:
        """So many bytes of blocks were read from disk together, or written there."""
        if num_bytes:
            self._transfers.copied("disk", operation, num_bytes, seconds)

    def remember(self, context: RequestContext, event: WorkerEvent) -> None:
        """Something was done for a request."""
        self._records.note(context, event)

    def failed(self, operation: Operation) -> None:
        """The disk refused."""
        self._transfers.failed("disk", operation, "os_error")
        self._errors.labels(operation).inc()
