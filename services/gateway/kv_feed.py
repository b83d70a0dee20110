"""Hears what workers tell of their prefix caches, and asks for snapshots where a message is missing. `kv_index` decides.

KvEvents ─► the index of the model that the worker serves ─► a snapshot is wanted ─► KvSnapshotRequest, part by part
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from common.protocol import messages, subjects
from common.protocol.errors import PenstockError, ProtocolError, from_wire
from common.protocol.handles import WorkerRef
from common.protocol.kv_events import KvEvents, KvSnapshot, KvSnapshotRequest
from common.protocol.messages import Message, Rejected
from common.runtime import logs
from common.runtime.bus import Bus, BusMessage
from common.runtime.metrics import Metrics
from services.gateway.index_metrics import IndexMetrics
from services.gateway.kv_index import KvIndex
from services.gateway.model_core import ModelCore

log = logs.get("kv_feed")

LOOK_EVERY_S = 0.1
MAX_ASKED = 4
"""Workers that are asked for snapshots at once."""
ANSWER_TIMEOUT_S = 4.0
"""For one part of a snapshot."""


class Host(Protocol):
    """What this needs of the gateway's actor."""

    bus: Bus
    clock: Callable[[], float]
    cores: list[ModelCore]
    metrics: Metrics
    task_group: TaskGroup

    async def ask(self, to: WorkerRef, message: Message, timeout_s: float, *, repeat: bool = False) -> Message: ...


class KvFeed:
    def __init__(self, host: Host) -> None:
        self._host = host
        self._indices: Sequence[KvIndex] = [core.router.prefixes.index for core in host.cores]
        self._num_asked = 0
        self._undecodable = host.metrics.messages_undecodable
        self._bytes = host.metrics.counter("kv_event_bytes_total", "Bytes of messages in which workers told of their caches")
        host.metrics.registry.register(IndexMetrics({core.name: core.router.prefixes.index for core in host.cores}))

    async def run(self) -> None:
        """Listen for ever, where a model has an index."""
        if not any(index.max_blocks for index in self._indices):
            return
        subscription = await self._host.bus.subscribe(subjects.any_kv_events(), self._on_message)
        try:
            while True:
                await anyio.sleep(LOOK_EVERY_S)
                self._look()
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(1.0):
                await subscription.unsubscribe()

    def _on_message(self, message: BusMessage) -> None:
        try:
            events = messages.decode(message.data)
        except ProtocolError:
            events = None
        if not isinstance(events, KvEvents) or not subjects.is_kv_events_of(
            message.subject, events.worker.role, events.worker.id
        ):
            self._undecodable.inc()  # a worker speaks for itself alone
            return
        self._bytes.inc(len(message.data))
        for index in self._indices:
            if index.knows(events.worker):
                index.apply(events, self._host.clock())

    def _look(self) -> None:
        """Ask for the snapshots that are wanted."""
        now = self._host.clock()
        for index in self._indices:
            for ref in index.wanted(now):
                if self._num_asked >= MAX_ASKED or not self._host.bus.connected:
                    return
                self._num_asked += 1
                self._host.task_group.start_soon(self._fetch, index, ref)

    async def _fetch(self, index: KvIndex, ref: WorkerRef) -> None:
        try:
            arriving = index.begin(ref)
            if arriving is None:
                return
            try:
                while not arriving.is_complete and not arriving.is_too_large:
                    request = KvSnapshotRequest(number=arriving.number, offset=arriving.offset)
                    answer = await self._host.ask(ref, request, ANSWER_TIMEOUT_S, repeat=True)
                    if isinstance(answer, Rejected):
                        raise from_wire(answer.code, answer.message)
                    if not isinstance(answer, KvSnapshot) or answer.worker != ref:
                        raise ProtocolError("no snapshot of that worker")
                    arriving.add(answer)
            except PenstockError as error:
                log.info("kv_snapshot_failed", worker=ref.id, code=error.code, reason=str(error))
                index.fail(ref, self._host.clock())
                return
            index.finish(ref, arriving, self._host.clock())
            if arriving.is_too_large:
                log.warning(
                    "kv_index_full",
                    worker=ref.id,
                    consequence="where its prefixes are is guessed from what was sent there",
                    advice="raise --kv-index-blocks",
                )
        finally:
            self._num_asked -= 1
