"""The API on NATS: a subject for each view of each name of each model (`penstock.v1.chat.<slug>`), for vectors and for tokens.

A request is the view's JSON with a reply inbox; headers as in `common/protocol/headers.py`. `stream` is true unless the body
says otherwise. The answer is one message per chunk, each with its sequence number; the last has the final marker, and of a chat
or completion finish reason and usage (not streamed: the one message with the whole body). An error is a final message with
error headers and the view's error object.

The handler of a message only starts a task: requests never wait for each other. What can't be answered safely is dropped and
counted: no reply subject, or one that is not among `reply_prefixes`, or would make us publish where clients may not (`$…`,
`penstock.v1.…`). Who may cancel what is in `live_requests.py`. A tenant has all of this below a subject of its own, which its
permissions keep to it; there its requests are answered on inboxes of its own only, and cancels reach nobody else's.

A client that is gone is noticed through its inbox: now and then a chunk carries a control subject of ours as its reply, and
the server answers there when nobody listens any more. While many requests wait for their first token, and for a while after
one of them had nobody who listened, the server is asked before work on another one begins: requests of clients that left must
not fill the queue that all clients share.
"""

from __future__ import annotations

import functools
import time

import anyio
import msgspec
from anyio.abc import ObjectReceiveStream, TaskGroup

from common.protocol import headers, subjects
from common.protocol.errors import (
    BusError,
    Cancelled,
    Overloaded,
    PayloadTooLarge,
    PenstockError,
    ReplyNotAllowed,
    ShuttingDown,
    drop_frames,
)
from common.runtime import logs
from common.runtime.bus import Bus, BusMessage, Endpoint, Subscription
from common.runtime.routing import is_no_responders
from services.gateway import bodies
from services.gateway.access_log import GONE_CODE, GONE_STATUS, AccessRecord
from services.gateway.answer import Answer, Core
from services.gateway.catalog import Catalog
from services.gateway.collect import Collector, Holding
from services.gateway.config import GatewayConfig
from services.gateway.door import Door
from services.gateway.live_requests import LiveRequests
from services.gateway.logprobs import TokenNames
from services.gateway.namesakes import Namesakes
from services.gateway.nats_reply import Link, Reply, check_reply, is_inbox_of
from services.gateway.nats_subjects import Listed, listed
from services.gateway.nats_whole import Incoming, WholeReplies
from services.gateway.server_span import begin_span
from services.gateway.tenants import Visit
from services.gateway.views.registry import new_id, view_of

log = logs.get(__name__)

_MAX_REFUSALS = 1024
_LOG_PERIOD_S = 1.0
_LAST_WORD_S = 0.5
CROWD = 16
"""With more requests than this before their first token, inboxes are looked at before work begins."""
SUSPICION_S = 5.0
"""And for so long after one was found where nobody listens: short answers would keep a flood of them below the crowd."""
MAX_PROBES = 64
"""Inboxes looked at at a time: in a flood, the server's answers must not wait behind thousands of each other."""


class NatsFront:
    """Run `run` in a task group of the gateway's; `drain` before it ends."""

    def __init__(self, gateway: Core, catalog: Catalog, bus: Bus, config: GatewayConfig, door: Door) -> None:
        """`catalog` and `door` are what this edge shares with the HTTP edge."""
        self._gateway = gateway
        self._catalog = catalog
        self._door = door
        self._bus = bus
        self._link = Link(bus)
        self._config = config
        self._intake = catalog.intake
        self._metrics = catalog.models[0].metrics  # errors, which may come before a model is known, are counted for all
        self._whole = WholeReplies(catalog, bus, self._metrics)
        self._control = bus.new_inbox()
        self._live = LiveRequests[Reply]()
        self._num_unstarted = 0
        self._suspicious_until = 0.0
        self._probing = anyio.CapacityLimiter(MAX_PROBES)
        self._num_arrived = 0
        self._namesakes = Namesakes(lambda: gateway.ref)
        self._listed = listed(catalog, tenants=door.has_tenants)
        self._cancels = Endpoint(name="cancel", subject=subjects.any_cancel())
        self._cancel_subjects = [subjects.any_cancel()]
        if door.has_tenants:
            self._cancel_subjects.append(subjects.of_any_tenant(subjects.any_cancel()))
        self._public: list[Subscription] = []
        self._group: TaskGroup | None = None
        self._idle: anyio.Event | None = None  # set when draining and nothing is live
        self._quiet_until = 0.0
        self._refuse, self._refusals = anyio.create_memory_object_stream[tuple[Reply, PenstockError]](_MAX_REFUSALS)

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def endpoints(self) -> list[Endpoint]:
        """What it listens to now: nothing before `run` and after `drain`."""
        return [*(listed.endpoint for listed in self._listed), self._cancels] if self._public else []

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled; started once the server knows of every subscription.

        :raises ConfigError: a gateway that started earlier serves another model under the same subjects.
        """
        private: list[Subscription] = []
        try:
            async with anyio.create_task_group() as group, self._refuse, self._refusals:
                self._group = group
                group.start_soon(self._send_refusals, self._refusals)
                private.append(await self._bus.subscribe(f"{self._control}.*", self._on_control))
                for subject in self._cancel_subjects:
                    private.append(await self._bus.subscribe(subject, self._on_cancel))
                private.append(await self._bus.subscribe(subjects.presence_of("gateway"), self._namesakes.hear))
                for listed in self._listed:
                    handler, endpoint = functools.partial(self._admit, listed), listed.endpoint
                    self._public.append(await self._bus.subscribe(endpoint.subject, handler, queue=endpoint.queue))
                task_status.started()
                await self._namesakes.collision()
                group.cancel_scope.cancel()
        finally:
            self._group = None
            with anyio.CancelScope(shield=True):
                for subscription in [*self._public, *private]:
                    await subscription.unsubscribe()
        raise await self._namesakes.collision()  # outside the group, which would wrap what its tasks make of their end

    async def drain(self) -> None:
        """Takes no more requests, and returns when the last one has its answer."""
        while self._public:
            await self._public.pop().unsubscribe()
        self._idle = anyio.Event()
        if self._live:
            await self._idle.wait()

    def _admit(self, listed: Listed, message: BusMessage) -> None:
        """Starts a task for the request, or refuses it; nothing here waits."""
        endpoint = listed.endpoint
        endpoint.num_requests += 1
        self._num_arrived += 1
        tenant = subjects.tenant_of(message.subject)
        try:
            check_reply(message.reply, self._config.reply_prefixes, tenant)
        except ReplyNotAllowed as error:
            endpoint.num_errors += 1
            endpoint.last_error = error.code
            self._drop("unsafe_reply" if message.reply else "no_reply", message.subject, message.reply)
            return
        if self._group is None:
            return
        minted = new_id(listed.kind)
        asked = message.headers.get(headers.REQUEST_ID)
        reply = Reply(
            self._link,
            message.reply,
            minted,
            f"{self._control}.{minted}",
            message.headers.get(headers.TRACEPARENT, ""),
            view_of(listed.kind),
        )
        reply.tenant = tenant
        reply.span = begin_span(self._gateway.tracing, message.headers.get)
        visit: Visit | None = None
        room = self._intake.room()
        try:
            if len(self._live) >= self._config.max_requests:
                raise Overloaded("too many requests at once: try again in a moment")
            if len(message.data) > self._config.max_body_bytes:
                raise PayloadTooLarge(f"the body is larger than {self._config.max_body_bytes} bytes")
            if tenant:
                visit = self._door.enter(self._door.tenant(tenant))
            if asked is not None:
                id = subjects.token(asked, what="request id")
                self._live.check_new(id, message.reply)
                reply.request = id
            room.take(len(message.data))
        except PenstockError as error:
            self._record(message.subject, reply, visit).close(error.http_status, error.code)
            _count_error(endpoint, error)
            try:
                self._refuse.send_nowait((reply, error))
            except anyio.WouldBlock:
                self._drop("flood", message.subject)
            return
        self._live.add(reply)
        if self._live.was_cancelled(reply, number=self._num_arrived):
            reply.scope.cancel()
        self._num_unstarted += 1
        self._group.start_soon(self._serve, Incoming(listed, message, room, visit), reply)

    def _has_started(self, reply: Reply) -> None:
        if not reply.started:
            reply.started = True
            self._num_unstarted -= 1

    def _record(self, subject: str, reply: Reply, visit: Visit | None) -> AccessRecord:
        logged = self._config.access_log
        record = AccessRecord("nats", subject, reply.minted, self._metrics, enabled=logged, span=reply.span)
        record.client_id = reply.request
        record.visit = visit
        return record

    async def _serve(self, incoming: Incoming, reply: Reply) -> None:
        failure: PenstockError | None = ShuttingDown("the gateway stopped: send the request again")
        record = self._record(incoming.subject, reply, incoming.visit)
        began = time.perf_counter_ns()
        try:
            with reply.scope:
                await self._answer(incoming, reply, record)
            failure = Cancelled("the request was cancelled") if reply.scope.cancelled_caught else None
        except Exception as error:
            if not isinstance(error, PenstockError):
                log.exception("request_failed", request=reply.minted)
                error = bodies.internal_error(reply.minted)
            drop_frames(error)
            failure = error
        finally:
            incoming.room.give_back()
            self._has_started(reply)
            if reply.gone:
                record.close(GONE_STATUS, GONE_CODE)
            else:
                record.close(200 if failure is None else failure.http_status, "" if failure is None else failure.code)
            if failure is not None and not reply.gone:
                _count_error(incoming.listed.endpoint, failure)
                # also when this front was cancelled: the client would wait for ever
                with anyio.move_on_after(_LAST_WORD_S, shield=True):
                    await self._send_failure(reply, failure)
            incoming.listed.endpoint.processing_ns += time.perf_counter_ns() - began
            self._live.remove(reply)
            if self._idle is not None and not self._live:
                self._idle.set()

    async def _answer(self, incoming: Incoming, reply: Reply, record: AccessRecord) -> None:
        """:raises PenstockError: what the client is told; nothing is held for it any more then."""
        if self._num_unstarted > CROWD or time.monotonic() < self._suspicious_until:
            async with self._probing:
                reply.gone = await reply.is_deserted()
            if reply.gone:
                self._suspicious_until = time.monotonic() + SUSPICION_S
                self._drop("nobody_listens", incoming.subject)
                return
        kind = incoming.listed.kind
        if kind not in ("chat", "completion", "responses", "messages"):
            await self._whole.send(kind, incoming, reply, record)
            return
        model, job, notes = await self._catalog.prepare(
            kind,
            incoming.take_body(),
            id=reply.minted,
            shown_id=reply.request,
            deadline_ms=incoming.deadline_ms,
            stream_default=True,
            of_subject=incoming.listed.model,
            tenant=incoming.tenant,
        )
        incoming.room.give_back()
        self._metrics.ignored(notes.labels)
        reply.warning = job.warning
        if incoming.visit is not None:
            incoming.visit.reserve(job.max_tokens_in_all, time.monotonic())
        on_start = functools.partial(self._has_started, reply)
        answer = record.answer = Answer(
            model.core, job, model.bundle.tokenizer, model.metrics, on_start=on_start, arrival=record.arrival
        )
        await answer.run(functools.partial(self._stream if job.stream else self._collect, answer, model.token_names, reply))

    async def _collect(self, answer: Answer, names: TokenNames, reply: Reply) -> None:
        with Collector(answer, names, self._intake, max_bytes=self._bus.max_payload) as collector:
            body = await collector.body()
            await reply.last(b"".join(body))

    async def _stream(self, answer: Answer, names: TokenNames, reply: Reply) -> None:
        writer = answer.job.writers.stream(answer.job, names, answer.usage, sse=False)
        deltas = await answer.next()
        with Holding(self._intake) as holding:
            holding.hold(writer.size)
            chunks = writer.opening()
            while not answer.finished:
                for index, delta in deltas:
                    chunks += writer.delta(index, delta)
                for chunk in chunks:
                    await reply.chunk(chunk)
                chunks = []
                if writer.size:
                    self._check_size(writer.size)
                    holding.hold(writer.size)
                deltas = await answer.next()
            for index, delta in deltas[:-1]:
                chunks += writer.delta(index, delta)
            *chunks, last = [*chunks, *writer.ending(*deltas[-1])]
            if writer.size:
                self._check_size(max(map(len, chunks), default=0), len(last))
            for chunk in chunks:
                await reply.chunk(chunk)
            await reply.last(last)

    def _check_size(self, *sizes: int) -> None:
        """:raises PayloadTooLarge: if a message of an answer is larger than the bus takes."""
        if max(sizes) > self._bus.max_payload:
            raise PayloadTooLarge(
                f"the answer is longer than a message may be ({self._bus.max_payload} bytes): ask for less, or over HTTP"
            )

    async def _send_refusals(self, refusals: ObjectReceiveStream[tuple[Reply, PenstockError]]) -> None:
        async for reply, error in refusals:
            await self._send_failure(reply, error)

    async def _send_failure(self, reply: Reply, error: PenstockError) -> None:
        try:
            await reply.fail(error)
        except BusError:
            log.warning("answer_lost", request=reply.request, code=error.code)

    def _on_control(self, message: BusMessage) -> None:
        """The server says that nobody listens on an inbox any more."""
        reply = self._live.get(subjects.last_token(message.subject))
        if reply is not None and is_no_responders(message):
            reply.nobody_listens()
            if reply.gone:
                log.debug("client_gone", request=reply.minted)

    def _on_cancel(self, message: BusMessage) -> None:
        self._cancels.num_requests += 1
        id, tenant = subjects.last_token(message.subject), subjects.tenant_of(message.subject)
        if tenant and not is_inbox_of(message.reply, self._config.reply_prefixes, tenant):
            message = msgspec.structs.replace(message, reply="")  # another one's inbox is no proof of anything
        reply = self._live.cancelled_by(id, message.reply)
        if reply is not None:
            if reply.tenant == tenant:
                reply.scope.cancel()
        elif waiting := sum(subscription.num_waiting for subscription in self._public):
            self._live.expect_cancelled(id, message.reply, until=self._num_arrived + waiting)

    def _drop(self, reason: str, subject: str, reply: str = "") -> None:
        self._metrics.dropped(reason)
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + _LOG_PERIOD_S
            log.warning("request_dropped", reason=reason, subject=subject[:128], reply=reply[:128])


def _count_error(endpoint: Endpoint, error: PenstockError) -> None:
    endpoint.num_errors += 1
    endpoint.last_error = error.code
