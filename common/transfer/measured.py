"""Counts what is copied over each path, whichever transport copies it: bytes, time, and failures by their reason.

    MeasuredTransport.read ─► the transport's ─► TransferCounts: /metrics, and totals for heartbeats

A transport itself counts nothing. What is written to a kvstore, and what a kvstore reads from its disk and writes there, is
counted with `TransferCounts.measure`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from prometheus_client import Counter, Histogram

from common.protocol.errors import Cancelled, PenstockError
from common.protocol.kv_messages import PathTraffic
from common.runtime.metrics import Metrics
from common.transfer.awaited import Awaited
from common.transfer.base import LocalBlocks, RemoteBlocks, Transport
from common.transfer.paths import KvPath, Operation
from common.transfer.transfer import Transfer

SECONDS_BUCKETS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""From a block in shared memory to gigabytes from a slow disk."""


@dataclass(slots=True)
class Copy:
    """One copy that is under way. `num_bytes`: what it has copied, set before it ends."""

    num_bytes: int = 0


class TransferCounts:
    """Of one process. Safe to call from several threads."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.perf_counter) -> None:
        labels = ("path", "operation")
        self._clock = clock
        self._bytes = metrics.counter("kv_transfer_bytes_total", "KV bytes copied, by path", labels)
        self._seconds = metrics.histogram(
            "kv_transfer_seconds", "Time of one copy of KV that did not fail, by path", SECONDS_BUCKETS, labels
        )
        self._failures = metrics.counter(
            "kv_transfer_failures_total", "Copies of KV that failed, by path and reason", [*labels, "reason"]
        )
        self._children: dict[tuple[KvPath, Operation], tuple[Counter, Histogram]] = {}
        self._totals: dict[tuple[KvPath, Operation], PathTraffic] = {}
        self._lock = threading.Lock()

    @contextmanager
    def measure(self, path: KvPath, operation: Operation) -> Iterator[Copy]:
        """Time a copy and count it, with the `num_bytes` that were set meanwhile; count it as failed if an error is raised.

        A copy that was given up (`Cancelled`) has not failed: what it has copied counts.
        """
        copy, began_at = Copy(), self._clock()
        try:
            yield copy
        except Cancelled:
            self.copied(path, operation, copy.num_bytes, self._clock() - began_at)
            raise
        except PenstockError as error:
            self.failed(path, operation, error.code)
            raise
        except OSError:
            self.failed(path, operation, "os_error")
            raise
        self.copied(path, operation, copy.num_bytes, self._clock() - began_at)

    def copied(self, path: KvPath, operation: Operation, num_bytes: int, seconds: float) -> None:
        """A copy has ended well."""
        children = self._children.get((path, operation))
        if children is None:
            children = self._bytes.labels(path, operation), self._seconds.labels(path, operation)
            self._children[path, operation] = children
        children[0].inc(num_bytes)
        children[1].observe(seconds)
        self._add(path, operation, num_bytes, seconds, 1, 0)

    def failed(self, path: KvPath, operation: Operation, reason: str) -> None:
        """A copy has failed. `reason`: an error's code, or a word of that kind."""
        self._failures.labels(path, operation, reason).inc()
        self._add(path, operation, 0, 0.0, 0, 1)

    def totals(self) -> list[PathTraffic]:
        """Return what was copied since the start of the process, of each path and operation that was used."""
        with self._lock:
            return list(self._totals.values())

    def _add(self, path: KvPath, operation: Operation, num_bytes: int, seconds: float, copies: int, failures: int) -> None:
        with self._lock:
            was = self._totals.get((path, operation), PathTraffic(path, operation))
            self._totals[path, operation] = PathTraffic(
                path,
                operation,
                was.bytes + num_bytes,
                round(was.seconds + seconds, 6),
                was.copies + copies,
                was.failures + failures,
            )


class _MeasuredTransfer(Transfer):
    """Counts as one copy, however many slices it has."""

    def __init__(
        self, transport: Transport, source: RemoteBlocks, target: LocalBlocks, counts: TransferCounts, after: Awaited | None
    ) -> None:
        size, begin, prepare = transport.slice_bytes, transport.begin, transport.prepare
        super().__init__(transport.read, source, target, slice_bytes=size, begin=begin, prepare=prepare, after=after)
        self._path: KvPath = transport.path_of(source)
        self._counts = counts

    def _copy(self, first: Callable[[], int] | None = None) -> int:
        with self._counts.measure(self._path, "read") as copy:
            try:
                return super()._copy(first)
            finally:
                copy.num_bytes = self.num_bytes


class MeasuredTransport:
    """A transport whose reads are counted."""

    def __init__(self, transport: Transport, counts: TransferCounts) -> None:
        self._transport = transport
        self._counts = counts

    def path_of(self, source: RemoteBlocks) -> KvPath:
        """See `Transport.path_of`."""
        return self._transport.path_of(source)

    def read(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> int:
        """See `Transport.read`."""
        with self._counts.measure(self.path_of(source), "read") as copy:
            copy.num_bytes = self._transport.read(source, into, into_blocks)
        return copy.num_bytes

    def begin(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> Callable[[], int] | None:
        """See `Transport.begin`. `pull` counts what is begun; this alone does not."""
        return self._transport.begin(source, into, into_blocks)

    def prepare(self, source: RemoteBlocks, into: np.ndarray, into_blocks: Sequence[int]) -> Callable[[], int] | None:
        """See `Transport.prepare`. As `begin`."""
        return self._transport.prepare(source, into, into_blocks)

    def progress_of(self, host: str, segment: str, fingerprint: str) -> Callable[[], int] | None:
        """See `Transport.progress_of`."""
        return self._transport.progress_of(host, segment, fingerprint)

    def pull(self, source: RemoteBlocks, target: LocalBlocks, after: Awaited | None = None) -> Transfer:
        """See `Transport.pull`."""
        return _MeasuredTransfer(self._transport, source, target, self._counts, after)

    @property
    def slice_bytes(self) -> int:
        """See `Transport.slice_bytes`."""
        return self._transport.slice_bytes
