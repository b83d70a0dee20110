"""/v1/embeddings and /v1/score over HTTP."""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import anyio
from starlette.types import Receive, Scope, Send

from common.protocol import headers
from services.gateway.access_log import AccessRecord
from services.gateway.catalog import Catalog
from services.gateway.config import GatewayConfig
from services.gateway.http_body import header, read_body
from services.gateway.http_io import Exchange
from services.gateway.tenants import Visit
from services.gateway.vector_answer import VectorAnswer
from services.gateway.vectors import VectorKind
from services.gateway.views.registry import new_id, view_of
from services.gateway.views.view import View
from services.gateway.whole import Pieces

Serve = Callable[[str, Scope, Exchange, AccessRecord], Awaitable[None]]

_DEADLINE_HEADER = headers.DEADLINE_MS.lower().encode()


class Api(Protocol):
    """What this needs of the HTTP edge."""

    catalog: Catalog
    config: GatewayConfig

    async def answer(self, id: str, view: View, serve: Serve, scope: Scope, receive: Receive, send: Send) -> None: ...

    def check(self, scope: Scope, record: AccessRecord) -> Visit | None: ...

    async def watch(self, exchange: Exchange, id: str, scope: anyio.CancelScope) -> None: ...


class Vectors:
    """One endpoint: an ASGI app, so that starlette hands it `receive` and `send` as they are."""

    def __init__(self, api: Api, kind: VectorKind) -> None:
        self._api = api
        self._kind: VectorKind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._api.answer(new_id(self._kind), view_of(self._kind), self._serve, scope, receive, send)

    async def _serve(self, id: str, scope: Scope, exchange: Exchange, record: AccessRecord) -> None:
        """:raises PenstockError: what the client is told; nothing is held for it any more then."""
        api = self._api
        visit = api.check(scope, record)
        tenant = None if visit is None else visit.tenant
        with api.catalog.intake.room() as room:
            body = await read_body(scope, exchange.receive, api.config.max_body_bytes, room)
            deadline = header(scope, _DEADLINE_HEADER)
            deadline_ms = None if deadline is None else deadline.decode("latin-1")
            model, job, notes = await api.catalog.prepare_vectors(
                self._kind, body, id=id, deadline_ms=deadline_ms, tenant=tenant
            )
            del body
        model.metrics.ignored(notes.labels)
        if job.warning:
            exchange.headers.append((b"warning", b'299 penstock "%b"' % job.warning.encode()))
        if visit is not None:
            visit.reserve(sum(map(len, job.prompts)), time.monotonic())
        answer = record.answer = VectorAnswer(model.core, job, model.metrics, api.catalog.intake, arrival=record.arrival)

        async def respond(pieces: Pieces) -> None:
            await exchange.respond(200, pieces, pieces.size)

        await answer.run(respond, watch=functools.partial(api.watch, exchange, id))
