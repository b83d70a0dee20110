"""Files and batches of one gateway: everything that runs behind `/v1/files`, `/v1/batches` and `penstock.v1.batch.<slug>`.

Without JetStream nothing here runs, and who asks is told so; it is looked for now and then, and whenever the bus comes back.
"""

from __future__ import annotations

import os
import time

import anyio

from common.protocol import subjects
from common.protocol.errors import BusError, JetStreamOff, StorageFull
from common.runtime import logs
from common.runtime.bus import Bus, Endpoint
from services.gateway.answer import Core
from services.gateway.batches.keeper import Keeper
from services.gateway.batches.metrics import BatchMetrics
from services.gateway.batches.records import Batch, BatchRequest
from services.gateway.batches.results import OVERHEAD_BYTES
from services.gateway.batches.runner import Room, Runner
from services.gateway.batches.store import BatchEnded, Store, TooManyBatches, stream_specs
from services.gateway.batches.submissions import Submissions
from services.gateway.catalog import Catalog
from services.gateway.config import GatewayConfig
from services.gateway.door import Door
from services.gateway.tenants import Tenant

log = logs.get("batches")

LOOK_AGAIN_S = 10.0
CLIENT_PATIENCE_S = 5.0
"""How long a client waits for a bus that is away."""
MAX_LINE_BYTES = 1024 * 1024


class Batches:
    """One per gateway. `run` it in a task group of the gateway's, `drain` before it ends."""

    def __init__(self, gateway: Core, catalog: Catalog, bus: Bus, config: GatewayConfig, *, room: Room, door: Door) -> None:
        self.config = config
        self._door = door
        self._catalog = catalog
        self._bus = bus
        self._metrics = BatchMetrics(gateway.metrics)
        self._room = room
        self._name = f"{gateway.ref.id}-{os.urandom(4).hex()}"
        self._store = Store(bus.streams, patience_s=CLIENT_PATIENCE_S)
        self._is_open = False
        self._problem = ""
        self._looked = anyio.Event()
        self._news = anyio.Event()
        self._scope = anyio.CancelScope()
        self._started = False
        self._stopped = anyio.Event()
        self.submissions = Submissions(catalog, bus, self._store, config, max_line_bytes=self.max_line_bytes)

    @property
    def endpoints(self) -> list[Endpoint]:
        """What it listens to now."""
        return self.submissions.endpoints

    @property
    def max_line_bytes(self) -> int:
        return min(MAX_LINE_BYTES, self._bus.max_payload - OVERHEAD_BYTES)

    async def store(self, tenant: Tenant | None) -> Store:
        """Where a tenant's files and batches are, or those of nobody in particular.

        :raises JetStreamOff: nowhere. :raises StorageFull: the server has too little room to begin with.
        """
        with anyio.move_on_after(CLIENT_PATIENCE_S):
            await self._looked.wait()
        if self._problem:
            raise StorageFull(self._problem)
        if not self._is_open:
            raise JetStreamOff(
                "files and batches need a NATS server with JetStream, which this one has not: `penstock up` starts one, "
                "elsewhere add `jetstream {}` to its configuration"
            )
        return self._store if tenant is None else self._store.of(tenant.name)

    async def create(self, store: Store, request: BatchRequest, window_s: float, *, max_batches: int = 0) -> Batch:
        """A batch that will be seen through, whatever happens to this gateway. `max_batches`: of this owner's that have not
        ended, at a time; 0: any number.

        :raises FileNotFound: there is no such file. :raises TooManyBatches:
        """
        file = await store.file(request.input_file_id)
        if max_batches and sum(not batch.has_ended for batch in await store.batches()) >= max_batches:
            raise TooManyBatches(
                f"{store.owner} has {max_batches} batches that have not ended, as many as it may: wait for one, or cancel it"
            )
        now = int(time.time())
        batch = Batch(
            id=f"batch_{int(time.time() * 1000):012x}{os.urandom(10).hex()}",  # in order of time
            endpoint=request.endpoint,
            input_file=file.id,
            completion_window=request.completion_window,
            created_at=now,
            expires_at=now + int(window_s),
            metadata=request.metadata,
        )
        await store.add_batch(batch, subjects.slug(self._catalog.models[0].name))
        return batch

    async def cancel(self, store: Store, id: str) -> Batch:
        """:raises BatchNotFound: :raises BatchEnded: it is too late."""

        def cancelling(batch: Batch) -> Batch:
            if batch.status == "cancelling":
                return batch
            if batch.status not in ("validating", "in_progress"):
                raise BatchEnded(f"the batch {id} is {batch.status} and can't be cancelled", param="batch_id")
            return batch.moved("cancelling", time.time())

        return await store.change(id, cancelling)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Until `drain`, or cancelled."""
        self._bus.on_connection_change(lambda connected: self._news.set())
        self._started = True
        task_status.started()
        try:
            with self._scope:
                while True:
                    await self._serve()
                    await self._wait()
        finally:
            self._is_open = False
            self._stopped.set()

    async def drain(self) -> None:
        """Give back what runs, and take no more."""
        self._scope.cancel()
        if self._started:
            await self._stopped.wait()

    async def _serve(self) -> None:
        """For as long as nothing unforeseen happens: whatever it is must not end the gateway."""
        is_open = await self._open()
        self._looked.set()
        if not is_open:
            return
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._stay_open)
                group.start_soon(self._runner().run, self._bus.streams)
                group.start_soon(self._keeper().run, self._bus.streams)
                group.start_soon(self.submissions.run)
        except* Exception:
            log.exception("batches_failed")

    async def _open(self) -> bool:
        config = self.config
        try:
            if not await self._bus.streams.available():
                return False
            for spec in stream_specs(config.batch_storage_mb << 20, config.batch_retention_s, config.batch_replicas):
                await self._bus.streams.ensure(spec)
        except (BusError, JetStreamOff) as error:
            log.debug("jetstream_does_not_answer", reason=str(error))
            return False
        except StorageFull:
            if not self._problem:  # said once, and looked at again and again
                self._problem = f"the NATS server has no room for batch_storage_mb = {config.batch_storage_mb}: set less"
                log.error("batches_off", reason=self._problem)
            return False
        self._problem = ""
        if not self._is_open:
            log.info("batches_on", keeper=self._name)
        self._is_open = True
        return True

    async def _stay_open(self) -> None:
        """The server may come back with less than it had."""
        while True:
            await self._wait()
            if self._bus.connected:
                await self._open()

    async def _wait(self) -> None:
        self._news = anyio.Event()
        with anyio.move_on_after(LOOK_AGAIN_S):
            await self._news.wait()

    def _runner(self) -> Runner:
        config = self.config
        store = Store(self._bus.streams, patience_s=None)
        return Runner(
            self._catalog,
            store,
            self._metrics,
            room=self._room,
            tenant_of=self._door.tenant if self._door.has_tenants else None,
            max_running=config.batch_max_running,
            max_answer_bytes=self._bus.max_payload - OVERHEAD_BYTES,
            access_log=config.access_log,
        )

    def _keeper(self) -> Keeper:
        store = Store(self._bus.streams, patience_s=None)
        return Keeper(
            self._catalog,
            store,
            self._metrics,
            name=self._name,
            max_lines=self.config.batch_max_lines,
            max_line_bytes=self.max_line_bytes,
        )
