"""Takes the notes of batches that need somebody, and has each seen through: see `passage.py`.

keep.<model>.<batch> ─► validate, feed lines, count results, write files ─► ack
             └── a gateway that dies leaves it to another one, which counts the results again and goes on
"""

from __future__ import annotations

import functools

import anyio

from common.protocol import headers, subjects
from common.protocol.errors import PenstockError
from common.runtime import logs
from common.runtime.streams import Delivery, Streams
from services.gateway.batches.metrics import BatchMetrics
from services.gateway.batches.passage import Passage, Superseded
from services.gateway.batches.records import Batch
from services.gateway.batches.store import BatchNotFound, Store
from services.gateway.batches.taking import WORKING_EVERY_S, Taker, quietly
from services.gateway.catalog import Catalog

log = logs.get("batches")

MAX_KEPT = 64
"""Batches that one gateway sees through at a time."""
RETRY_S = 5.0
TELL_EVERY_S = 1.0
ORPHAN_DELIVERIES = 10
"""A note without a batch is dropped then: its gateway died before anybody was told of the batch."""


class Keeper:
    """`run` it in a task group; cancelling it leaves its batches to others."""

    def __init__(
        self, catalog: Catalog, store: Store, metrics: BatchMetrics, *, name: str, max_lines: int, max_line_bytes: int
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._metrics = metrics
        self._name = name
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._slug = subjects.slug(catalog.models[0].name)
        self._kept: dict[str, Batch] = {}

    async def run(self, streams: Streams) -> None:
        held: dict[int, Delivery] = {}
        async with (
            Taker(streams, f"keep-{self._slug}", subjects.batches_to_keep(self._slug)) as taker,
            anyio.create_task_group() as group,
        ):
            group.start_soon(self._keep_working, held)
            while True:
                if len(held) >= MAX_KEPT:
                    await anyio.sleep(TELL_EVERY_S)
                    continue
                for delivery in await taker.take(MAX_KEPT - len(held)):
                    sequence = delivery.message.sequence
                    if sequence not in held:
                        group.start_soon(self._hold, delivery, held)
                    held[sequence] = delivery  # delivered again: the server heard nothing of us for a while

    async def _keep_working(self, held: dict[int, Delivery]) -> None:
        while True:
            await anyio.sleep(WORKING_EVERY_S)
            for delivery in list(held.values()):
                await quietly(delivery.working)

    async def _hold(self, delivery: Delivery, held: dict[int, Delivery]) -> None:
        id, sequence = subjects.last_token(delivery.message.subject), delivery.message.sequence
        try:
            await self._passage(delivery.message.headers.get(headers.TENANT, "")).see_through(id)
            await quietly(held[sequence].ack)
        except Superseded:
            log.info("batch_superseded", batch=id)  # the note is the other gateway's now: neither acked nor given back
        except BaseException as error:
            if isinstance(error, BatchNotFound) and delivery.num_deliveries >= ORPHAN_DELIVERIES:
                await quietly(held[sequence].ack)
                return
            delay_s = RETRY_S if isinstance(error, Exception) else 0.0
            if isinstance(error, BatchNotFound):  # the batch itself is kept just after the note of it
                delay_s = min(RETRY_S, 0.1 * 2**delivery.num_deliveries)
            with anyio.move_on_after(0.5, shield=True):
                await quietly(functools.partial(held[sequence].give_back, delay_s))
            if isinstance(error, BatchNotFound):
                log.debug("batch_not_there_yet", batch=id)
            elif isinstance(error, PenstockError):
                log.warning("batch_waits", batch=id, code=error.code, reason=str(error))
            elif isinstance(error, Exception):
                log.exception("batch_waits", batch=id)
            else:
                raise
        finally:
            del held[sequence]
            self._count(id, None)

    def _passage(self, owner: str) -> Passage:
        return Passage(
            self._catalog,
            self._store.of(owner),
            name=self._name,
            max_lines=self._max_lines,
            max_line_bytes=self._max_line_bytes,
            tell=self._count,
        )

    def _count(self, id: str, batch: Batch | None) -> None:
        if batch is None:
            self._kept.pop(id, None)
        else:
            self._kept[id] = batch
        self._metrics.tell(self._kept.values())
