"""Tells gateways which blocks of this worker's prefix cache can be found by content.

    a block is published or evicted ─► noted ─► COALESCE_S later: KvEvents, numbered
    a gateway saw a gap, or is new  ─► KvSnapshotRequest ─► what is noted is told first, then KvSnapshot, a part at a time

Nothing waits for a gateway, and nothing is kept for one, but for the last snapshot: a gateway that misses a message sees a gap
in the numbers. While the bus is away changes are noted and not sent. Where more have come than may wait, they are forgotten and
a number is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import anyio

from common.cache.contents import PoolContents
from common.cache.grouped_pool import GroupedPool
from common.protocol import subjects
from common.protocol.handles import WorkerRef
from common.protocol.kv_events import KvEvents, KvLayout, KvSnapshot, KvSnapshotRequest
from common.protocol.messages import Message, Rejected
from common.runtime import logs
from common.runtime.bus import Bus
from common.runtime.metrics import Metrics

log = logs.get("kv_events")

COALESCE_S = 0.03
"""Changes of this time are one message."""
REPEAT_S = 1.0
"""A worker with nothing to tell repeats its last number this often."""
HASHES_PER_MESSAGE = 16384
OTHER_BYTES = 4096
"""What a message holds beside hashes, at most."""
MESSAGES_PER_ROUND = 4
"""More changes than these hold wait for the next round."""
SNAPSHOT_KEPT_S = 10.0
"""How long a snapshot is kept after it was asked for last."""
SNAPSHOT_FRESH_S = 1.0
"""Gateways that begin within this time of one another are given the same snapshot."""


class Worker(Protocol):
    """What this needs of its worker."""

    bus: Bus
    metrics: Metrics
    clock: Callable[[], float]

    @property
    def ref(self) -> WorkerRef: ...

    def send(self, to: WorkerRef | str, message: Message) -> None: ...
    def answer(self, reply: str, message: Message) -> None: ...


class Snapshot:
    """What all groups held when the message `number` was sent: `counts[i]` hashes of group i, 8 bytes each."""

    def __init__(self, number: int, contents: list[bytes], now: float) -> None:
        self.number = number
        self.counts = [len(hashes) // 8 for hashes in contents]
        self.hashes = b"".join(contents)
        self.made_at = self.asked_at = now


class KvEventPublisher:
    """`backlog`: hashes of changes that may wait in each cache group; 0: gateways are told nothing. A worker that caches
    nothing has nothing to tell either."""

    def __init__(self, worker: Worker, pool: GroupedPool, fingerprint: str, *, backlog: int) -> None:
        self.enabled = backlog > 0 and pool.keeps_content
        self.number = 0
        self._worker = worker
        retentions = [(group.retention.window, group.retention.chunk) for group in pool.groups]
        self.layout = KvLayout(fingerprint, pool.block_tokens, retentions)
        self._changed = anyio.Event()
        self._snapshot: Snapshot | None = None
        self._contents: list[PoolContents] = []
        if not self.enabled:
            return
        for group in pool.groups:
            group.pool.contents = PoolContents(group.pool.num_blocks, max_pending=backlog, on_change=self._wake)
            self._contents.append(group.pool.contents)
        metrics = worker.metrics
        self._messages = metrics.counter("kv_events_sent_total", "Messages to gateways about changes of the prefix cache")
        self._hashes = metrics.counter("kv_event_blocks_total", "Blocks stored or removed that gateways were told of")
        self._overflows = metrics.counter(
            "kv_event_overflows_total", "Times when more changes waited than may: gateways ask for a snapshot then"
        )
        self._snapshots = metrics.counter("kv_snapshots_sent_total", "Snapshots of the prefix cache begun for gateways")

    async def run(self) -> None:
        """Tell gateways of changes, for ever."""
        while self.enabled:
            with anyio.move_on_after(REPEAT_S) as quiet:
                await self._changed.wait()
            if quiet.cancelled_caught:
                self._repeat()
                continue
            await anyio.sleep(COALESCE_S)
            self._changed = anyio.Event()
            if self._worker.bus.connected:
                self.tell(MESSAGES_PER_ROUND)
            if self._has_news:
                self._wake()

    def tell(self, max_messages: float = math.inf) -> None:
        """Send what is noted, in at most so many messages."""
        sent = 0
        while sent < max_messages and self._has_news:
            if any(contents.has_lost for contents in self._contents):
                self.number += 1
                self._overflows.inc()
                log.warning("kv_events_lost", worker=self._worker.ref.id, reason="more changes of cached blocks than may wait")
            left, changes = self._per_message, list[tuple[bytes, bytes]]()
            for contents in self._contents:
                changes.append(contents.take(left))
                left -= sum(map(len, changes[-1])) // 8
            self.number += 1
            stored, removed = [stored for stored, _ in changes], [removed for _, removed in changes]
            ref, layout = self._worker.ref, self.layout
            self._send(KvEvents(worker=ref, number=self.number, layout=layout, stored=stored, removed=removed))
            self._hashes.inc(self._per_message - left)
            sent += 1

    def on_request(self, request: KvSnapshotRequest, reply: str) -> None:
        """Answer with a part of a snapshot."""
        snapshot = self._find(request) if self.enabled else None
        if snapshot is None:
            reason = "that snapshot is not kept any more" if self.enabled else "this worker tells nothing of its cache"
            self._worker.answer(reply, Rejected(worker=self._worker.ref, code="not_found", message=reason))
            return
        part = snapshot.hashes[8 * request.offset : 8 * (request.offset + self._per_message)]
        answer = KvSnapshot(
            worker=self._worker.ref,
            number=snapshot.number,
            layout=self.layout,
            counts=snapshot.counts,
            offset=request.offset,
            hashes=part,
        )
        self._worker.answer(reply, answer)

    def tick(self, now: float) -> None:
        if self._snapshot is not None and now - self._snapshot.asked_at > SNAPSHOT_KEPT_S:
            self._snapshot = None

    @property
    def _has_news(self) -> bool:
        return any(contents.num_pending or contents.has_lost for contents in self._contents)

    @property
    def _per_message(self) -> int:
        """Hashes that fit into one message."""
        return max(1, min(HASHES_PER_MESSAGE, (self._worker.bus.max_payload - OTHER_BYTES) // 8))

    def _find(self, request: KvSnapshotRequest) -> Snapshot | None:
        now, known = self._worker.clock(), self._snapshot
        if request.offset:
            if known is None or known.number != request.number:
                return None
        elif known is None or known.number < request.number or now - known.made_at > SNAPSHOT_FRESH_S:
            self.tell()
            known = self._snapshot = Snapshot(self.number, [contents.all() for contents in self._contents], now)
            self._snapshots.inc()
        known.asked_at = now
        return known

    def _repeat(self) -> None:
        if self._worker.bus.connected:
            self._send(KvEvents(worker=self._worker.ref, number=self.number, layout=self.layout))

    def _send(self, message: KvEvents) -> None:
        self._messages.inc()
        self._worker.send(subjects.kv_events(message.worker.role, message.worker.id), message)

    def _wake(self) -> None:
        self._changed.set()
