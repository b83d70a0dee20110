"""Answers `penstock explain`, over HTTP (`GET /v1/explain/{id}`) and over NATS (`penstock.v1.explain`, also a tenant's own).

    question ─► whose? ─► the ring, or what runs ─► Explain to each worker that took part
        ─► Explain to each kvstore and draft worker that those had asked ─► one timeline, as JSON

Over NATS every gateway hears the question. Whichever holds the request answers; the others say `not_found`. A tenant is told of
its own requests; anybody else's do not exist for it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import anyio
import msgspec

from common.protocol import headers, subjects
from common.protocol.errors import (
    BusError,
    InvalidParameter,
    NoResponders,
    NotFound,
    Overloaded,
    PenstockError,
    ReplyNotAllowed,
)
from common.protocol.explain_messages import Explain, Explained, Explanation
from common.protocol.explain_messages import Explanations as Answer
from common.protocol.handles import WorkerRef
from common.protocol.messages import Message
from common.runtime import logs
from common.runtime.bus import Bus, BusMessage, Endpoint
from services.gateway import bodies
from services.gateway.explanations import Ended, Explanations, Told, explanation, holders_of, workers_of
from services.gateway.nats_reply import check_reply
from services.gateway.requests import Request

log = logs.get("gateway")

ASK_TIMEOUT_S = 1.0
"""A worker that takes longer is left out, and named."""
MAX_QUESTIONS = 8
"""Questions that are answered at a time."""
PACE_S = 0.05
"""Each waits so long, so that a flood of them takes little of the event loop: looking for a request among ten thousand takes a
millisecond."""
MAX_NAME = 256
MAX_PEERS = 16
"""Kvstores and draft workers that are asked about a request."""


class Host(Protocol):
    """What this needs of the gateway's actor."""

    clock: Callable[[], float]

    @property
    def ref(self) -> WorkerRef: ...

    async def ask(self, to: WorkerRef, message: Message, timeout_s: float, *, repeat: bool = False) -> Message: ...


class Question(msgspec.Struct):
    """What a client sends over NATS."""

    request: str


class Explainer:
    """`running()`: the requests that run now, by the name of their model. `reply_prefixes`: see `check_reply`."""

    def __init__(
        self,
        host: Host,
        running: Callable[[], Iterable[tuple[str, dict[str, Request]]]],
        *,
        reply_prefixes: Sequence[str],
        tenants: bool,
    ) -> None:
        self._host = host
        self._running = running
        self._reply_prefixes = reply_prefixes
        self._num_questions = 0
        self._ring = Explanations()
        self.ended = self._ring.add  # (request, model, now)
        every = [Endpoint(name="explain", subject=subjects.explain())]
        if tenants:
            every.append(Endpoint(name="tenants-explain", subject=subjects.of_any_tenant(subjects.explain())))
        self._listed = every
        self.endpoints: list[Endpoint] = []

    async def explain(self, name: str, tenant: str | None) -> bytes:
        """Return the timelines of a request's choices, as JSON. `tenant`: whose it must be; None: anybody's.

        :raises NotFound: there is no such request here, or it is another tenant's, or many have ended since.
        :raises Overloaded: too many questions are being answered.
        """
        if self._num_questions >= MAX_QUESTIONS:
            raise Overloaded("too many requests are being explained: try again in a moment")
        self._num_questions += 1
        try:
            await anyio.sleep(PACE_S)
            found = self._ring.find(name, self._running(), self._host.clock(), tenant) if 0 < len(name) <= MAX_NAME else []
            if not found:
                raise NotFound(f"no request {name[:100]!r} is known here: another gateway may have it, or it ended long ago")
            silent: dict[WorkerRef, str] = {}
            return msgspec.json.encode(Answer(requests=[await self._explain(record, silent) for record in found]))
        finally:
            self._num_questions -= 1

    async def _explain(self, record: Ended, gone: dict[WorkerRef, str]) -> Explanation:
        """`gone`: workers that did not answer about another choice, and why. They are not asked again."""
        told: list[Told] = []
        silent: dict[str, str] = {}
        holders = {worker.id for worker in holders_of(record)}

        async def ask(worker: WorkerRef) -> None:
            asked_at = self._host.clock()
            try:
                answer = await self._host.ask(worker, Explain(request=record.id), ASK_TIMEOUT_S)
            except NoResponders:
                gone[worker] = "the process is gone, and what it knew with it"
            except PenstockError as error:
                gone[worker] = error.code
            else:
                if isinstance(answer, Explained) and answer.records:
                    told.append(Told(answer, _offset_s(answer.now, asked_at, self._host.clock())))
                elif worker.id in holders:  # who refused it knows nothing, nor does a kvstore that had nothing to do for it
                    silent[worker.id] = "it knows nothing of the request: it has started anew, or has forgotten it"

        async def ask_all(some: list[WorkerRef]) -> None:
            async with anyio.create_task_group() as group:
                for worker in some:
                    if worker not in gone:
                        group.start_soon(ask, worker)

        workers = _latest_lives(workers_of(record))
        await ask_all(workers)
        peers = _latest_lives([peer for answer, _ in told for one in answer.records for peer in one.peers])[:MAX_PEERS]
        await ask_all(peers)
        workers += peers
        silent |= {worker.id: gone[worker] for worker in workers if worker in gone}
        now, wall_s = self._host.clock(), time.time()
        return explanation(record, told, gateway=self._host.ref.id, silent=silent, now=now, wall_s=wall_s)

    # -- over NATS

    async def run(self, bus: Bus) -> None:
        """Answer questions on the bus until cancelled."""
        async with anyio.create_task_group() as group:
            subscriptions = [
                await bus.subscribe(endpoint.subject, functools.partial(self._arrived, bus, group, endpoint))
                for endpoint in self._listed
            ]
            self.endpoints = self._listed
            try:
                await anyio.sleep_forever()
            finally:
                self.endpoints = []
                with anyio.CancelScope(shield=True):
                    for subscription in subscriptions:
                        await subscription.unsubscribe()

    def _arrived(self, bus: Bus, group: anyio.abc.TaskGroup, endpoint: Endpoint, message: BusMessage) -> None:
        endpoint.num_requests += 1
        tenant = subjects.tenant_of(message.subject)
        try:
            check_reply(message.reply, self._reply_prefixes, tenant)
        except ReplyNotAllowed as error:
            endpoint.num_errors, endpoint.last_error = endpoint.num_errors + 1, error.code
            return
        group.start_soon(self._reply, bus, endpoint, message, tenant or None)

    async def _reply(self, bus: Bus, endpoint: Endpoint, message: BusMessage, tenant: str | None) -> None:
        fields = {headers.FINAL: "1"}
        try:
            body = await self.explain(_name_in(message.data), tenant)
            if len(body) > bus.max_payload:
                raise Overloaded(
                    "the timeline is longer than a message may be: ask over HTTP, or for one choice (<id>-<number>)"
                )
        except PenstockError as error:
            endpoint.num_errors, endpoint.last_error = endpoint.num_errors + 1, error.code
            text = str(error).encode("ascii", "replace").decode()[:512]
            fields |= {headers.ERROR: text, headers.ERROR_CODE: error.code}
            body = bodies.failure_body(error)
        try:
            await bus.publish(message.reply, body, headers=fields)
        except BusError as error:
            log.debug("explanation_lost", code=error.code)


def _name_in(data: bytes) -> str:
    """:raises InvalidParameter: the question is none."""
    try:
        return msgspec.json.decode(data, type=Question).request
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidParameter('send {"request": "<id>"}') from error


def _latest_lives(workers: list[WorkerRef]) -> list[WorkerRef]:
    """One of each id: a worker's inbox is the same in all its lives."""
    return list({worker.id: worker for worker in workers}.values())


def _offset_s(theirs: float, asked_at: float, answered_at: float) -> float:
    """Return what to add to a worker's times. Monotonic clocks are one and the same on one machine."""
    return 0.0 if asked_at <= theirs <= answered_at else (asked_at + answered_at) / 2 - theirs
