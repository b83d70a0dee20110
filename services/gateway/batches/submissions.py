"""Lines that come over NATS one by one, and what became of them.

    penstock.v1.batch.<slug>      one line of a batch, as in a file ─► JetStream's own acknowledgement once it is kept
    penstock.v1.result.<line id>  ─► its result; `result_pending` while it has none

So `js.publish` of any NATS client works, but no client writes to a stream: the server would answer wherever its reply subject
says, and permissions could not tell one client's lines from another one's. A line is called by the header
`Penstock-Request-Id`, or is given a name in the answer's. The same name is the same line, so that who has no answer may send it
again.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Awaitable, Callable

import anyio
import msgspec
from anyio.abc import TaskGroup

from common.protocol import headers, subjects
from common.protocol.errors import (
    BusError,
    InvalidParameter,
    Overloaded,
    PayloadTooLarge,
    PenstockError,
    ReplyNotAllowed,
    RequestError,
    drop_frames,
)
from common.runtime import logs
from common.runtime.bus import Bus, BusMessage, Endpoint, Subscription
from services.gateway import bodies
from services.gateway.batches.lines import WrongLine, parse_line
from services.gateway.batches.store import StorageUnavailable, Store, insist
from services.gateway.catalog import Catalog, OfferedModel
from services.gateway.config import GatewayConfig
from services.gateway.nats_reply import check_reply

log = logs.get("batches")

DIRECT = "direct"
"""Stands in place of a batch's id for lines that came without one."""
MAX_OPEN = 1024
"""Lines and questions that are answered at a time; more are refused."""


class ResultPending(RequestError):
    """The line has no result yet, or nobody has sent it."""

    code = "result_pending"
    http_status = 404


class Submissions:
    """`run` it while there are streams."""

    def __init__(self, catalog: Catalog, bus: Bus, store: Store, config: GatewayConfig, *, max_line_bytes: int) -> None:
        self._catalog = catalog
        self._bus = bus
        self._store = store
        self._config = config
        self._max_line_bytes = max_line_bytes
        self._num_open = 0
        self._group: TaskGroup | None = None
        self._listed: list[tuple[Endpoint, Callable[[BusMessage], Awaitable[bytes]]]] = []
        for model in catalog.models:
            for slug in dict.fromkeys(map(subjects.slug, model.names)):
                endpoint = Endpoint(name=f"batch-{slug}", subject=subjects.batch(slug), queue=subjects.GATEWAY_QUEUE)
                if all(endpoint.subject != other.subject for other, _ in self._listed):
                    self._listed.append((endpoint, functools.partial(self._keep, model)))
        question = Endpoint(name="result", subject=subjects.any_result(), queue=subjects.GATEWAY_QUEUE)
        self._listed.append((question, self._find))

    @property
    def endpoints(self) -> list[Endpoint]:
        return [endpoint for endpoint, _ in self._listed] if self._group is not None else []

    async def run(self) -> None:
        """Serves until cancelled."""
        subscriptions: list[Subscription] = []
        try:
            async with anyio.create_task_group() as self._group:
                for endpoint, answer in self._listed:
                    handler = functools.partial(self._admit, endpoint, answer)
                    subscribe = functools.partial(self._bus.subscribe, endpoint.subject, handler, queue=endpoint.queue)
                    subscriptions.append(await insist(subscribe))
                await anyio.sleep_forever()
        finally:
            self._group = None
            with anyio.CancelScope(shield=True):
                for subscription in subscriptions:
                    await subscription.unsubscribe()

    def _admit(self, endpoint: Endpoint, answer: Callable[[BusMessage], Awaitable[bytes]], message: BusMessage) -> None:
        endpoint.num_requests += 1
        try:
            check_reply(message.reply, self._config.reply_prefixes)
        except ReplyNotAllowed as error:
            endpoint.num_errors += 1
            endpoint.last_error = error.code
            return
        if self._group is not None and self._num_open <= 2 * MAX_OPEN:  # beyond it, in a flood, nobody is even refused
            self._num_open += 1
            self._group.start_soon(self._serve, endpoint, answer, message)

    async def _serve(self, endpoint: Endpoint, answer: Callable[[BusMessage], Awaitable[bytes]], message: BusMessage) -> None:
        asked = message.headers.get(headers.REQUEST_ID)
        said = {headers.REQUEST_ID: asked} if asked is not None and _is_token(asked) else {}
        try:
            if self._num_open > MAX_OPEN:
                raise Overloaded("too many lines at once: try again in a moment")
            if not said and endpoint.name != "result":
                if asked is not None:
                    subjects.token(asked, what="request id")
                said[headers.REQUEST_ID] = asked = f"line-{os.urandom(16).hex()}"
                message = msgspec.structs.replace(message, headers={**message.headers, headers.REQUEST_ID: asked})
            await self._bus.publish(message.reply, await answer(message), headers=said)
        except Exception as error:
            if isinstance(error, BusError):
                error = StorageUnavailable()
            elif not isinstance(error, PenstockError):
                log.exception("line_failed")
                error = bodies.internal_error("line")
            drop_frames(error)
            endpoint.num_errors += 1
            endpoint.last_error = error.code
            try:
                await self._bus.publish(message.reply, _failure(error, endpoint), headers=said | _error_headers(error))
            except BusError:
                log.warning("answer_lost", code=error.code)
        finally:
            self._num_open -= 1

    async def _keep(self, model: OfferedModel, message: BusMessage) -> bytes:
        """JetStream's acknowledgement of the line that `message` is.

        :raises PenstockError: it is not kept.
        """
        if len(message.data) > self._max_line_bytes:
            raise PayloadTooLarge(f"a line of a batch has at most {self._max_line_bytes} bytes")

        def choose(name: str | None) -> str:
            return self._catalog.choose(name, of_subject=model).name

        try:
            parse_line(message.data, choose=choose)
        except WrongLine as error:
            raise InvalidParameter(error.message, param=error.param) from error
        id = message.headers[headers.REQUEST_ID]
        done = await self._store.result(DIRECT, id) is not None
        sequence = 0 if done else await self._store.add_line(subjects.slug(model.name), DIRECT, id, message.data)
        said = {"stream": subjects.LINES, "seq": sequence}
        return msgspec.json.encode(said if sequence else {**said, "duplicate": True})

    async def _find(self, message: BusMessage) -> bytes:
        """:raises ResultPending: there is none yet. :raises InvalidParameter: no line is called so."""
        id = subjects.token(subjects.last_token(message.subject), what="line id")
        result = await self._store.result(DIRECT, id)
        if result is None:
            raise ResultPending(f"the line {id} has no result yet, or was never sent: ask again")
        return result.data


def _is_token(value: str) -> bool:
    try:
        subjects.token(value)
    except InvalidParameter:
        return False
    return True


def _error_headers(error: PenstockError) -> dict[str, str]:
    return {headers.ERROR: str(error).replace("\n", " "), headers.ERROR_CODE: error.code}


def _failure(error: PenstockError, endpoint: Endpoint) -> bytes:
    """An error in JetStream's form to who sends a line, so that its clients raise it; in OpenAI's to who asks for a result."""
    if endpoint.name == "result":
        return bodies.failure_body(error)
    said = {"code": error.http_status, "err_code": 0, "description": f"{error.code}: {error}"}
    return msgspec.json.encode({"error": said})
