"""Runs lines that wait, in what room interactive requests leave.

    room for one more ─► fetch ─► has it a result already? ─► the way of every request ─► its result is kept ─► ack

A line whose gateway dies is delivered to another one after a while (see `taking.py`). It may then be run twice, but the first
result that is kept is the only one. What is nobody's fault (no worker, no room, the gateway stops) is no result: the line is
given back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

import anyio
import msgspec
from anyio.abc import TaskGroup

from common.protocol import errors, headers, subjects
from common.protocol.errors import InvalidParameter, PenstockError, drop_frames
from common.runtime import logs
from common.runtime.streams import Delivery, Streams
from services.gateway import bodies
from services.gateway.access_log import AccessRecord
from services.gateway.answer import Answer
from services.gateway.batches import results
from services.gateway.batches.lines import Line, WrongLine, parse_line
from services.gateway.batches.metrics import BatchMetrics
from services.gateway.batches.records import ENDPOINTS, LineKind
from services.gateway.batches.results import Result
from services.gateway.batches.store import Store
from services.gateway.batches.taking import WORKING_EVERY_S, Taker, quietly
from services.gateway.catalog import Catalog, OfferedModel
from services.gateway.collect import Collector
from services.gateway.tenants import Tenant
from services.gateway.vector_answer import VectorAnswer
from services.gateway.vector_prepare import VectorJob
from services.gateway.views.registry import new_id
from services.gateway.whole import Pieces

log = logs.get("batches")

LOOK_EVERY_S = 0.05
"""How often a gateway without room for a line looks whether it has some now; and whenever a line ends."""
MAX_DELAY_S = 15.0
MAX_DOUBTFUL_RUNS = 3
"""How often a line is run that ends in a way which may be its own fault or not."""

_NOT_ITS_FAULT = (
    errors.Overloaded,
    errors.NoWorkers,
    errors.GatewayBusy,
    errors.ShuttingDown,
    errors.Cancelled,
    errors.BusError,
)
_DOUBTFUL = (errors.InternalError, errors.DeadlineExceeded, errors.WorkerError)


class Room(Protocol):
    def __call__(self, model: OfferedModel) -> int:
        """How many more requests a model's workers would take now without keeping others waiting."""
        ...


class _Running:
    """A line in work. `submitted`: it counts in the room that is left."""

    def __init__(self, delivery: Delivery) -> None:
        self.delivery = delivery
        self.submitted = False


class Runner:
    """`run` it in a task group; cancelling it gives back what it runs. `max_running`: lines of each model at once.
    `tenant_of`: the tenant of a name; it raises Forbidden if there is none. None: this gateway knows of no tenants, and leaves
    their lines to others."""

    def __init__(
        self,
        catalog: Catalog,
        store: Store,
        metrics: BatchMetrics,
        *,
        room: Room,
        tenant_of: Callable[[str], Tenant] | None,
        max_running: int,
        max_answer_bytes: int,
        access_log: bool,
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._metrics = metrics
        self._room = room
        self._tenant_of = tenant_of
        self._max_running = max_running
        self._max_answer_bytes = max_answer_bytes
        self._access_log = access_log
        self._one_ended = anyio.Event()
        self._running: dict[str, dict[int, _Running]] = {model.name: {} for model in catalog.models}

    async def run(self, streams: Streams) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._keep_working)
            for model in self._catalog.models:
                for slug in dict.fromkeys(map(subjects.slug, model.names)):
                    group.start_soon(self._serve, streams, model, slug, group)

    async def _serve(self, streams: Streams, model: OfferedModel, slug: str, group: TaskGroup) -> None:
        running = self._running[model.name]
        async with Taker(streams, f"lines-{slug}", subjects.lines_of_model(slug)) as taker:
            while True:
                unsubmitted = sum(not line.submitted for line in running.values())
                free = min(self._max_running - len(running), self._room(model) - unsubmitted)
                if free <= 0 or not model.core.ready:
                    with anyio.move_on_after(LOOK_EVERY_S):
                        await self._one_ended.wait()
                    continue
                for delivery in await taker.take(free):
                    sequence = delivery.message.sequence
                    if sequence in running:  # the server heard nothing of us for a while
                        running[sequence].delivery = delivery
                    else:
                        running[sequence] = _Running(delivery)
                        self._metrics.running.inc()
                        group.start_soon(self._work_on, model, running[sequence])

    async def _keep_working(self) -> None:
        """Tell the server of what takes long, so that nobody else is given it."""
        while True:
            await anyio.sleep(WORKING_EVERY_S)
            for running in self._running.values():
                for line in list(running.values()):
                    await quietly(line.delivery.working)

    async def _work_on(self, model: OfferedModel, running: _Running) -> None:
        message = running.delivery.message
        _, batch, id = message.subject.rsplit(".", 2)
        settled = False
        try:
            settled = await self._settle(model, running, batch, id)
            if settled:
                await quietly(running.delivery.ack)
        except PenstockError as error:  # its result can't be kept now
            log.warning("line_given_back", batch=batch, line=id, code=error.code, reason=str(error))
        finally:
            del self._running[model.name][message.sequence]
            self._one_ended.set()
            self._one_ended = anyio.Event()
            self._metrics.running.dec()
            if not settled:
                self._metrics.lines.labels("given_back").inc()
                with anyio.move_on_after(0.5, shield=True):
                    delivery = running.delivery
                    delay_s = min(MAX_DELAY_S, 0.5 * 2 ** min(delivery.num_deliveries, 6))
                    await quietly(functools.partial(delivery.give_back, delay_s))

    async def _settle(self, model: OfferedModel, running: _Running, batch: str, id: str) -> bool:
        """Whether the line has its result now."""
        if await self._store.result(batch, id) is not None:
            self._metrics.lines.labels("repeated").inc()
            return True
        try:
            line = parse_line(running.delivery.message.data, choose=lambda name: name or model.name)
        except WrongLine as error:  # nobody who checks lines has put it there
            log.warning("line_dropped", batch=batch, line=id, code=error.code)
            return True
        result = await self._result(model, line, running)
        if result is None:
            return False
        is_first = await self._store.add_result(batch, id, result)
        self._metrics.lines.labels(result.outcome if is_first else "repeated").inc()
        return True

    async def _result(self, model: OfferedModel, line: Line, running: _Running) -> Result | None:
        """None: it is to be run again."""
        owner = running.delivery.message.headers.get(headers.TENANT, "")
        if owner and self._tenant_of is None:
            return None
        id = new_id(line.kind)
        record = AccessRecord("batch", _PATHS[line.kind], id, model.metrics, enabled=self._access_log)
        record.client_id = line.custom_id[:128]
        try:
            if owner and self._tenant_of is not None:
                record.visit = self._tenant_of(owner).enter_in_background()
            body = await self._answer(model, line, id, record, running)
        except Exception as error:
            if not isinstance(error, PenstockError):
                log.exception("request_failed", request=id)
                error = bodies.internal_error(id)
            drop_frames(error)
            record.close(error.http_status, error.code)
            may_doubt = running.delivery.num_deliveries < MAX_DOUBTFUL_RUNS
            if isinstance(error, _NOT_ITS_FAULT) or (may_doubt and isinstance(error, _DOUBTFUL)):
                return None
            return results.refused(line.custom_id, id, error)
        record.close(200)
        return results.answered(line.custom_id, id, body)

    async def _answer(self, model: OfferedModel, line: Line, id: str, record: AccessRecord, running: _Running) -> bytes:
        """:raises PenstockError: why there is none."""
        intake = self._catalog.intake
        tenant = None if record.visit is None else record.visit.tenant
        with intake.room() as room:
            room.take(len(line.body))
            if line.kind == "embedding":
                model, vectors, _ = await self._catalog.prepare_vectors(
                    line.kind, line.body, id=id, of_subject=model, tenant=tenant
                )
                return await self._vectors(model, vectors, record, running)
            model, job, _ = await self._catalog.prepare(line.kind, line.body, id=id, of_subject=model, tenant=tenant)
        if job.stream:
            raise InvalidParameter("a line of a batch can't be streamed: leave stream out", param="stream")
        job = msgspec.structs.replace(job, background=True)
        answer = record.answer = Answer(model.core, job, model.bundle.tokenizer, model.metrics, arrival=record.arrival)
        collected: list[bytes] = []

        async def collect() -> None:
            running.submitted = True
            with Collector(answer, model.token_names, intake, max_bytes=self._max_answer_bytes) as collector:
                collected.extend(await collector.body())

        await answer.run(collect)
        return b"".join(collected)

    async def _vectors(self, model: OfferedModel, job: VectorJob, record: AccessRecord, running: _Running) -> bytes:
        job = msgspec.structs.replace(job, background=True)
        answer = VectorAnswer(
            model.core, job, model.metrics, self._catalog.intake, max_bytes=self._max_answer_bytes, arrival=record.arrival
        )
        record.answer = answer
        collected: list[bytes] = []

        async def collect(pieces: Pieces) -> None:
            collected.extend(pieces)

        running.submitted = True
        await answer.run(collect)
        return b"".join(collected)


_PATHS: dict[LineKind, str] = {kind: path for path, kind in ENDPOINTS.items()}
