"""What is answered with one message over NATS and is no generation: vectors, counts of tokens, and tokens."""

from __future__ import annotations

import time

from common.protocol import headers
from common.protocol.errors import PayloadTooLarge
from common.runtime.bus import Bus, BusMessage
from services.gateway.access_log import AccessRecord
from services.gateway.catalog import Catalog
from services.gateway.intake import Room
from services.gateway.metrics import EdgeMetrics
from services.gateway.nats_reply import Reply
from services.gateway.nats_subjects import Listed
from services.gateway.tenants import Tenant, Visit
from services.gateway.token_bodies import TokenKind
from services.gateway.vector_answer import VectorAnswer
from services.gateway.vectors import VectorKind
from services.gateway.views.registry import COUNTING, CountKind
from services.gateway.whole import Pieces


class Incoming:
    """A request that was let in. `body` is forgotten once it has been read, for the request may go on for long; `room` is its
    memory."""

    def __init__(self, listed: Listed, message: BusMessage, room: Room, visit: Visit | None) -> None:
        self.listed = listed
        self.visit = visit
        self.subject = message.subject
        self.body = message.data
        self.deadline_ms = message.headers.get(headers.DEADLINE_MS)
        self.room = room

    @property
    def tenant(self) -> Tenant | None:
        return None if self.visit is None else self.visit.tenant

    def take_body(self) -> bytes:
        """The body, which is forgotten here."""
        body, self.body = self.body, b""
        return body


class WholeReplies:
    """One per NATS edge. `metrics`: of errors and arguments that may come before a model is known."""

    def __init__(self, catalog: Catalog, bus: Bus, metrics: EdgeMetrics) -> None:
        self._catalog = catalog
        self._bus = bus
        self._metrics = metrics

    async def send(
        self, kind: TokenKind | VectorKind | CountKind, incoming: Incoming, reply: Reply, record: AccessRecord
    ) -> None:
        """Answer one request.

        :raises PenstockError: what the client is told; nothing is held for it any more then.
        """
        if kind == "embedding" or kind == "score":
            await self._send_vectors(kind, incoming, reply, record)
        elif kind == "input_tokens" or kind == "count_tokens":
            count, notes = await self._catalog.count(
                COUNTING[kind], incoming.take_body(), incoming.tenant, of_subject=incoming.listed.model
            )
            self._metrics.ignored(notes.labels)
            reply.warning = notes.text
            await reply.last(COUNTING[kind].count_body(count))
        else:
            _, pieces, notes = await self._catalog.tokens(
                kind, incoming.take_body(), incoming.tenant, of_subject=incoming.listed.model
            )
            incoming.room.give_back()
            self._metrics.ignored(notes.labels)
            reply.warning = notes.text
            if pieces.size > self._bus.max_payload:
                raise PayloadTooLarge(f"the answer is longer than a message may be ({self._bus.max_payload} bytes)")
            await reply.last(b"".join(pieces))

    async def _send_vectors(self, kind: VectorKind, incoming: Incoming, reply: Reply, record: AccessRecord) -> None:
        model, job, notes = await self._catalog.prepare_vectors(
            kind,
            incoming.take_body(),
            id=reply.minted,
            deadline_ms=incoming.deadline_ms,
            of_subject=incoming.listed.model,
            tenant=incoming.tenant,
        )
        incoming.room.give_back()
        self._metrics.ignored(notes.labels)
        reply.warning = job.warning
        if incoming.visit is not None:
            incoming.visit.reserve(sum(map(len, job.prompts)), time.monotonic())
        limit, intake = self._bus.max_payload, self._catalog.intake
        answer = VectorAnswer(model.core, job, model.metrics, intake, max_bytes=limit, arrival=record.arrival)
        record.answer = answer

        async def send(pieces: Pieces) -> None:
            await reply.last(b"".join(pieces))

        await answer.run(send)
