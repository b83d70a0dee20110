"""The API over HTTP, as raw ASGI under starlette's routes.

The life of a request: authorize → read the body (bounded in bytes and time) → `Catalog.prepare` → `Answer.begin` → wait for the
first output, so that whatever fails before it has a status of its own → stream or collect → one line in the access log. Beside
it one task watches the client: it ends the request when the client is gone or has read nothing for `slow_reader_timeout_s`
(then the connection is broken off, with what it had still to send), and keeps idle streams open.

A stream's chunk is written straight to the server's `send`: no task, timer or middleware of its own. Whatever has arrived
while a write was blocked goes into the next chunk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from common.protocol import headers
from common.protocol.errors import Overloaded, PenstockError, drop_frames
from common.runtime import logs
from common.runtime.endpoints import metrics_page
from common.runtime.version import version
from services.gateway import bodies
from services.gateway.access_log import GONE_CODE, GONE_STATUS, AccessRecord
from services.gateway.answer import Answer, Core
from services.gateway.arguments import Notes
from services.gateway.batches.http import batch_routes
from services.gateway.batches.service import Batches
from services.gateway.catalog import Catalog, OfferedModel
from services.gateway.collect import Collector, Holding
from services.gateway.config import GatewayConfig
from services.gateway.dashboard import Dashboard
from services.gateway.dashboard_http import dashboard_routes
from services.gateway.door import Door
from services.gateway.explain_http import explain_routes
from services.gateway.explainer import Explainer
from services.gateway.http_body import ClientGone, header, read_body, text_header
from services.gateway.http_io import Exchange, error_headers, safe_request_id
from services.gateway.logprobs import TokenNames
from services.gateway.openapi import openapi_routes
from services.gateway.server_span import begin_span
from services.gateway.tenants import Visit
from services.gateway.token_bodies import TokenKind
from services.gateway.tokenizing import tokenizer_info
from services.gateway.vector_http import Serve, Vectors
from services.gateway.views.registry import COUNTING, VIEWS, CountKind, new_id, view_of
from services.gateway.views.view import View, ViewName
from services.gateway.whole import Pieces

log = logs.get(__name__)

DEADLINE_HEADER = headers.DEADLINE_MS.lower().encode()
WARNING = b'299 penstock "%b"'
"""The `warning` header (RFC 7234): 299 is a lasting warning of the sender's own."""

_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def create_app(
    gateway: Core,
    catalog: Catalog,
    config: GatewayConfig,
    dashboard: Dashboard | None = None,
    batches: Batches | None = None,
    door: Door | None = None,
    explainer: Explainer | None = None,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> Starlette:
    """All that `openapi.py` describes; `/` and what is below `/dashboard` with a `dashboard` alone; `/v1/explain/…`
    with an `explainer` alone.

    `catalog` and `door` are what this edge shares with the NATS edge.

    :raises ConfigError: without a `door`, if keys can't be read.
    """
    door = door or Door(config)
    api = _Api(gateway, catalog, config, door, clock)
    return Starlette(
        routes=[
            Route("/v1/models", api.models, methods=["GET"]),
            Route("/v1/models/{model:path}", api.model, methods=["GET"]),
            Route("/v1/chat/completions", _Endpoint(partial(api.generate, "chat")), methods=["POST"]),
            Route("/v1/completions", _Endpoint(partial(api.generate, "completion")), methods=["POST"]),
            Route("/v1/responses", _Endpoint(partial(api.generate, "responses")), methods=["POST"]),
            Route("/v1/responses/input_tokens", _Endpoint(partial(api.count, "input_tokens")), methods=["POST"]),
            Route("/v1/messages", _Endpoint(partial(api.generate, "messages")), methods=["POST"]),
            Route("/v1/messages/count_tokens", _Endpoint(partial(api.count, "count_tokens")), methods=["POST"]),
            Route("/v1/embeddings", Vectors(api, "embedding"), methods=["POST"]),
            Route("/v1/score", Vectors(api, "score"), methods=["POST"]),
            Route("/score", Vectors(api, "score"), methods=["POST"]),
            Route("/tokenize", _Endpoint(partial(api.tokens, "tokenize")), methods=["POST"]),
            Route("/detokenize", _Endpoint(partial(api.tokens, "detokenize")), methods=["POST"]),
            Route("/tokenizer_info", api.tokenizer_info, methods=["GET"]),
            Route("/version", api.version, methods=["GET"]),
            Route("/ping", api.ping, methods=["GET", "POST"]),
            Route("/health", api.health, methods=["GET"]),
            Route("/ready", api.is_ready, methods=["GET"]),
            Route("/metrics", api.metrics_page, methods=["GET"]),
            *openapi_routes(config),
            *([] if dashboard is None else dashboard_routes(dashboard, config, door.authorize_overview)),
            *([] if explainer is None else explain_routes(explainer, door)),
            *([] if batches is None else batch_routes(batches, catalog, door.authorize)),
        ],
        exception_handlers={HTTPException: _routing_error, PenstockError: _typed_error},
    )


class _Endpoint:
    """One that reads a body: an ASGI app, so that starlette hands it `receive` and `send` as they are."""

    def __init__(self, answer: ASGIApp) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


class _Api:
    def __init__(self, gateway: Core, catalog: Catalog, config: GatewayConfig, door: Door, clock: Callable[[], float]) -> None:
        self._gateway = gateway
        self.catalog = catalog
        self.config = config
        self._door = door
        self._clock = clock
        self._intake = catalog.intake
        self._metrics = catalog.models[0].metrics  # errors, which may come before a model is known, are counted for all
        self._created = int(time.time())
        self._active = 0

    async def models(self, request: Request) -> Response:
        tenant = self._door.authorize(request.scope)
        models = [model for model in self.catalog.models if tenant is None or tenant.may_use(model.name)]
        data = [self._model_body(model, name) for model in models for name in model.names]
        return _json({"object": "list", "data": data})

    async def model(self, request: Request) -> Response:
        tenant = self._door.authorize(request.scope)
        name = request.path_params["model"]
        return _json(self._model_body(self.catalog.find(name, tenant), name))

    async def health(self, request: Request) -> Response:
        """200 for as long as the process answers, whatever it could serve: it must not be restarted for want of workers."""
        models = [{"id": model.name, "ready": model.core.ready} for model in self.catalog.models]
        return JSONResponse({"status": "ok", "worker": self._gateway.ref.id, "models": models})

    async def is_ready(self, request: Request) -> Response:
        """Whether `?model=` could be served now, by default any model; if not, why, as far as it is known."""
        name = request.query_params.get("model")
        cores = [model.core for model in self.catalog.models] if name is None else [self.catalog.find(name).core]
        if self._gateway.ready if name is None else cores[0].ready:
            return PlainTextResponse("ready\n")
        text = "; ".join(["not ready", *(core.obstacle for core in cores if core.obstacle)])
        return PlainTextResponse(f"{text}\n", status_code=503)

    async def metrics_page(self, request: Request) -> Response:
        """Without a key, unless there are tenants: their names and what they use are in it."""
        if self._door.has_tenants:
            self._door.authorize_overview(request.scope)
        return metrics_page(self._gateway.metrics, request)

    async def tokenizer_info(self, request: Request) -> Response:
        """What vLLM tells of a tokenizer, of the model that `?model=` names."""
        tenant = self._door.authorize(request.scope)
        model = self.catalog.choose(request.query_params.get("model"), tenant=tenant)
        return _json(tokenizer_info(model.bundle))

    async def version(self, request: Request) -> Response:
        return _json({"version": version()})

    async def ping(self, request: Request) -> Response:
        """As SageMaker asks: 200 once requests would be answered, with an empty body."""
        return Response(status_code=200 if self._gateway.ready else 503)

    async def generate(self, name: ViewName, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(new_id(name), VIEWS[name], partial(self._serve, name), scope, receive, send)

    async def count(self, kind: CountKind, scope: Scope, receive: Receive, send: Send) -> None:
        """Tell how many tokens a prompt has."""
        await self.answer(new_id(kind), view_of(kind), partial(self._count, kind), scope, receive, send)

    async def tokens(self, kind: TokenKind, scope: Scope, receive: Receive, send: Send) -> None:
        await self.answer(new_id(kind), view_of(kind), partial(self._serve_tokens, kind), scope, receive, send)

    async def answer(self, id: str, view: View, serve: Serve, scope: Scope, receive: Receive, send: Send) -> None:
        """One request from its arrival to its line in the log; `serve` answers it or raises what the client is told, in the
        terms of `view`."""
        shown_id = safe_request_id(scope, id)
        exchange = Exchange(scope, receive, send, [(header, shown_id) for header in view.id_headers], self._clock)
        exchange.keep_alive, exchange.error_body = view.keep_alive, view.error_body
        span = begin_span(self._gateway.tracing, partial(text_header, scope))
        record = AccessRecord("http", scope["path"], id, self._metrics, enabled=self.config.access_log, span=span)
        record.client_id = shown_id.decode()
        self._active += 1
        code = GONE_CODE  # if it is cancelled
        try:
            await serve(id, scope, exchange, record)
            code = ""
        except Exception as error:
            if not isinstance(error, PenstockError):
                log.exception("request_failed", request=id)
                error = bodies.internal_error(id)
            drop_frames(error)
            code = error.code
            if isinstance(error, ClientGone):
                exchange.gone = "disconnected"
            else:
                await exchange.fail(error)
        finally:
            self._active -= 1
            if exchange.gone or code == GONE_CODE:
                record.close(GONE_STATUS, GONE_CODE)
            else:
                record.close(exchange.status, code)

    async def _serve(self, name: ViewName, id: str, scope: Scope, exchange: Exchange, record: AccessRecord) -> None:
        """:raises PenstockError: what the client is told; nothing is held for it any more then."""
        visit = self.check(scope, record)
        with self._intake.room() as room:
            body = await read_body(scope, exchange.receive, self.config.max_body_bytes, room)
            deadline = header(scope, DEADLINE_HEADER)
            model, job, notes = await self.catalog.prepare(
                name,
                body,
                id=id,
                deadline_ms=None if deadline is None else deadline.decode("latin-1"),
                tenant=None if visit is None else visit.tenant,
            )
            del body
        self._warn(notes, exchange)
        if visit is not None:
            visit.reserve(job.max_tokens_in_all, self._clock())
        answer = record.answer = Answer(model.core, job, model.bundle.tokenizer, model.metrics, arrival=record.arrival)
        send = partial(self._stream if job.stream else self._collect, answer, model.token_names, exchange)
        await answer.run(send, watch=partial(self.watch, exchange, id))

    async def _count(self, kind: CountKind, id: str, scope: Scope, exchange: Exchange, record: AccessRecord) -> None:
        """:raises PenstockError: what the client is told."""
        visit = self.check(scope, record)
        with self._intake.room() as room:
            body = await read_body(scope, exchange.receive, self.config.max_body_bytes, room)
            tenant = None if visit is None else visit.tenant
            num_tokens, notes = await self.catalog.count(COUNTING[kind], body, tenant)
            del body
        self._warn(notes, exchange)
        answer = COUNTING[kind].count_body(num_tokens)
        await exchange.respond(200, [answer], len(answer))

    async def _serve_tokens(self, kind: TokenKind, id: str, scope: Scope, exchange: Exchange, record: AccessRecord) -> None:
        """:raises PenstockError: what the client is told."""
        visit = self.check(scope, record)
        with self._intake.room() as room:
            body = await read_body(scope, exchange.receive, self.config.max_body_bytes, room)
            _, answer, notes = await self.catalog.tokens(kind, body, None if visit is None else visit.tenant)
            del body
        self._warn(notes, exchange)
        with self._intake.holding(answer.size):
            await exchange.respond(200, answer, answer.size)

    def _warn(self, notes: Notes, exchange: Exchange) -> None:
        """Count what had no effect, and say so in the answer."""
        self._metrics.ignored(notes.labels)
        if notes.text:
            exchange.headers.append((b"warning", WARNING % notes.text.encode()))

    async def _stream(self, answer: Answer, names: TokenNames, exchange: Exchange) -> None:
        writer = answer.job.writers.stream(answer.job, names, answer.usage, sse=True)
        exchange.stream_failure = writer.failure
        deltas = await answer.next()
        with Holding(self._intake) as holding:
            holding.hold(writer.size)
            await exchange.start(200, _SSE_HEADERS)
            parts = writer.opening()
            while not answer.finished:
                for index, delta in deltas:
                    parts += writer.delta(index, delta)
                if writer.size:
                    holding.hold(writer.size)
                if parts:
                    await exchange.write(b"".join(parts))
                    parts = []
                deltas = await answer.next()
            for index, delta in deltas[:-1]:
                parts += writer.delta(index, delta)
            *pieces, last = Pieces([*parts, *writer.ending(*deltas[-1])])
            for piece in pieces:
                await exchange.write(piece)
            await exchange.write(last, more=False)

    async def _collect(self, answer: Answer, names: TokenNames, exchange: Exchange) -> None:
        with Collector(answer, names, self._intake) as collector:
            body = await collector.body()
            await exchange.respond(200, body, body.size)

    def check(self, scope: Scope, record: AccessRecord) -> Visit | None:
        """Whose request it is.

        :raises Unauthorized, RateLimited, Overloaded: nothing of the request has been read.
        """
        visit = record.visit = self._door.enter(self._door.authorize(scope))
        if self._active > self.config.max_requests:
            raise Overloaded("too many requests at once: try again in a moment")
        return visit

    async def watch(self, exchange: Exchange, id: str, scope: anyio.CancelScope) -> None:
        """Ends the request when its client is gone or has stalled."""
        stall_s, keepalive_s = self.config.slow_reader_timeout_s, self.config.sse_keepalive_s
        await exchange.watch(stall_s=stall_s, keepalive_s=keepalive_s)
        if not exchange.gone:
            return
        log.debug("client_gone", request=id, reason=exchange.gone)
        if exchange.gone == "stalled":
            exchange.abort()
        scope.cancel()

    def _model_body(self, model: OfferedModel, name: str) -> dict[str, Any]:
        return bodies.model_body(name, self._created, model.max_context, root=model.name)


def _json(body: object) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _routing_error(request: Request, error: Exception) -> Response:
    """No such route, or not with this method, in OpenAI's form."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"[:200]
    message = {404: f"no such endpoint: {where}", 405: f"{where}: method not allowed"}.get(error.status_code, error.detail)
    body = bodies.error_body(message, status=error.status_code)
    return Response(body, error.status_code, headers=error.headers, media_type="application/json")


async def _typed_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PenstockError)
    response = Response(bodies.failure_body(error), error.http_status, media_type="application/json")
    response.raw_headers += error_headers(error)
    return response
