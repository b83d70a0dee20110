"""A client of the public NATS subjects, as the commands use it: OpenAI JSON out, chunks in.

    async with ChatStream(bus, model, body) as stream:
        async for chunk in stream: …

Leaving the block early cancels the request. `stream.timing` holds when what arrived.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import anyio
import msgspec

from common.cli.chunks import Chunk, Timing
from common.models.naming import is_gguf, model_name
from common.protocol import headers, messages, subjects
from common.protocol.errors import (
    BusError,
    BusRefused,
    Forbidden,
    InvalidParameter,
    NoWorkers,
    PenstockError,
    ProtocolError,
    RequestTimeout,
    UnknownModel,
    from_wire,
)
from common.protocol.handles import Role
from common.protocol.messages import Presence
from common.runtime.bus import Bus, BusMessage, Subscription
from common.runtime.bus_login import BusLogin
from common.runtime.nats_url import redacted
from common.runtime.routing import is_no_responders

CONNECT_TIMEOUT_S = 3.0
LISTEN_S = 0.6
"""Seconds to listen for gateways: more than two heartbeats."""
DENIED_WITHIN_S = 0.5
"""After which the server has said that it did not take a request."""
STARTING_S = 1.4
"""Additional seconds to listen if no gateway was heard."""
HOW_TO_START = "start Penstock with `penstock up`, or name a bus with --nats-url"


@asynccontextmanager
async def connected(
    url: str,
    command: str,
    *,
    login: BusLogin | None = None,
    timeout_s: float = CONNECT_TIMEOUT_S,
    advice: str = HOW_TO_START,
) -> AsyncIterator[Bus]:
    """A connection for one command, closed with the block. `login`: by default what the environment says.

    :raises BusError: nothing answers on `url` within `timeout_s`; the message ends with `advice`.
    :raises BusRefused: the server wants other credentials, or TLS with it fails.
    """
    from common.runtime.nats_bus import connect  # nats-py takes a while to import

    try:
        login = BusLogin.of_environment(os.environ) if login is None else login
        bus = await connect(url, name=f"penstock-{command}", login=login, connect_timeout_s=timeout_s)
    except BusRefused:
        raise
    except BusError as error:
        raise BusError(f"no NATS server on {redacted(url)}: {advice}") from error
    try:
        yield bus
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(CONNECT_TIMEOUT_S):
            await bus.close()


class ChatStream:
    """One streamed chat request. Iterating yields chunks until the last one.

    :raises PenstockError: while iterating: the error that the gateway sent, `Forbidden` when the bus took no request,
        `UnknownModel` or `NoWorkers` when nobody serves the model (see `not_served`), `RequestTimeout` after `timeout_s` of
        silence, `ProtocolError` when a chunk was lost.
    """

    def __init__(self, bus: Bus, model: str, body: dict[str, Any], *, timeout_s: float = 60.0) -> None:
        self._bus = bus
        self._model = model
        self._subject = self._mine(subjects.chat(subjects.slug(model)))
        self._body = msgspec.json.encode({"stream_options": {"include_usage": True}, **body, "model": model, "stream": True})
        self._timeout_s = timeout_s
        self._send, self._receive = anyio.create_memory_object_stream[BusMessage](100_000)
        self._inbox = bus.new_inbox()
        self._subscription: Subscription | None = None
        self._expected = 0
        self._ended = False
        self.request_id = f"cli-{os.urandom(8).hex()}"
        self.timing = Timing(0.0)

    def _mine(self, subject: str) -> str:
        return subjects.of_tenant(self._bus.tenant, subject) if self._bus.tenant else subject

    async def __aenter__(self) -> ChatStream:
        inbox = self._inbox
        self._subscription = await self._bus.subscribe(inbox, self._arrived)
        self.timing = Timing(time.monotonic())
        await self._bus.publish(self._subject, self._body, reply=inbox, headers={headers.REQUEST_ID: self.request_id})
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(2):
            if not self._ended:
                await self._bus.publish(self._mine(subjects.cancel(self.request_id)), b"", reply=self._inbox)
                await self._bus.flush()
            if self._subscription is not None:
                await self._subscription.unsubscribe()
        self._send.close()
        self._receive.close()

    def __aiter__(self) -> ChatStream:
        return self

    async def __anext__(self) -> Chunk:
        if self._ended:
            raise StopAsyncIteration
        try:
            with anyio.fail_after(self._timeout_s):
                message = await (self._receive.receive() if self._expected else self._first())
        except TimeoutError as error:
            raise RequestTimeout(f"nothing arrived for {self._timeout_s:.0f} s: look at `penstock status`") from error
        if is_no_responders(message):
            self._ended = True
            raise await not_served(self._bus, self._model)
        return self._read(message)

    async def _first(self) -> BusMessage:
        """Return the first message. That the server took no request it says beside them, and at once.

        :raises Forbidden: this user of the bus may not send requests.
        """
        with anyio.move_on_after(DENIED_WITHIN_S):
            return await self._receive.receive()
        if any(f'publish to "{self._subject}"' in denied for denied in getattr(self._bus, "denied", ())):
            self._ended = True
            raise Forbidden("this user of the bus may not send requests there: use the client's or a tenant's credentials")
        return await self._receive.receive()

    def _arrived(self, message: BusMessage) -> None:
        try:
            self._send.send_nowait(message)
        except (anyio.WouldBlock, anyio.ClosedResourceError, anyio.BrokenResourceError):
            return  # the gap in the sequence tells, or nobody listens any more

    def _read(self, message: BusMessage) -> Chunk:
        fields = message.headers
        if fields.get(headers.FINAL):
            self._ended = True
        if code := fields.get(headers.ERROR_CODE):
            self._ended = True
            raise from_wire(code, fields.get(headers.ERROR, code))
        try:
            sequence = int(fields.get(headers.SEQUENCE, self._expected))
        except ValueError as error:
            raise ProtocolError(f"the gateway sent a reply numbered {fields[headers.SEQUENCE]!r}") from error
        if sequence < self._expected:  # sent again, after the bus went away
            return Chunk()
        if sequence > self._expected:
            raise ProtocolError("a chunk was lost on the way: this client read too slowly, or the bus went away")
        self._expected += 1
        if not message.data:
            return Chunk()
        try:
            chunk = msgspec.json.decode(message.data, type=Chunk)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"the gateway sent a chunk that is no OpenAI chunk: {error}") from error
        if chunk.says_something:
            self.timing.saw_text(time.monotonic())
        if chunk.usage is not None:
            self.timing.tokens = chunk.usage.completion_tokens
        return chunk


async def watch_presence(bus: Bus, seconds: float, *, until_role: Role | None = None) -> dict[str, Presence]:
    """The latest heartbeat of every worker heard within `seconds`, by worker id.

    Returns early once a ready worker of `until_role` was heard.
    """
    heard: dict[str, Presence] = {}
    enough = anyio.Event()

    def arrived(message: BusMessage) -> None:
        presence = decode_presence(message)
        if presence is None:
            return
        heard[presence.worker.id] = presence
        if presence.worker.role == until_role and presence.state == "ready":
            enough.set()

    subscription = await bus.subscribe(subjects.any_presence(), arrived)
    with anyio.move_on_after(seconds):
        await enough.wait()
    await subscription.unsubscribe()
    return heard


def decode_presence(message: BusMessage) -> Presence | None:
    """The heartbeat in `message`; None for anything else, such as a newer version's."""
    try:
        decoded = messages.decode(message.data)
    except PenstockError:
        return None
    if not isinstance(decoded, Presence):
        return None
    worker = decoded.worker
    return decoded if subjects.is_presence_of(message.subject, worker.role, worker.id) else None


def gateway_models(heard: Mapping[str, Presence], *, ready: bool = False, aliases: bool = False) -> list[str]:
    """Return the models that gateways among `heard` serve; with `ready`, only those of gateways that are ready; with `aliases`,
    each also by its other names."""
    gateways = (presence for presence in heard.values() if presence.worker.role == "gateway")
    served = [model for gateway in gateways if not ready or gateway.state == "ready" for model in gateway.served]
    return sorted({name for model in served for name in (model.name, *(model.aliases if aliases else ()))})


async def served_model(bus: Bus, wanted: str = "") -> str:
    """Return `wanted`, or the only model on the bus.

    A path that no gateway serves under that name stands for the name that it is served as.

    :raises NoWorkers: no gateway was heard within two seconds. :raises InvalidParameter: several models are served.
    """
    if wanted and "/" not in wanted and not is_gguf(Path(wanted)):
        return wanted
    heard = await watch_presence(bus, LISTEN_S)
    if wanted:
        served = gateway_models(heard, aliases=True)
        return wanted if wanted in served or not served else model_name(wanted)
    if not gateway_models(heard, ready=True):
        heard |= await watch_presence(bus, STARTING_S, until_role="gateway")
    served = gateway_models(heard, ready=True) or gateway_models(heard)
    if not served and getattr(bus, "denied", ()):
        raise NoWorkers("this user of the bus may not hear who is there: name the model with --model")
    if not served:
        raise NoWorkers("no gateway on this bus: start one with `penstock up`, or name another bus with --nats-url")
    if len(served) > 1:
        raise InvalidParameter(f"this bus serves {', '.join(served)}: choose one with --model", param="model")
    return served[0]


async def check_served(bus: Bus, model: str) -> None:
    """Check that a gateway on the bus serves `model`, as far as this user of the bus may hear them.

    :raises UnknownModel: the message names the models that are served. :raises NoWorkers: no gateway was heard.
    """
    if bus.tenant:
        return
    heard = await watch_presence(bus, LISTEN_S, until_role="gateway")
    if model in gateway_models(heard, aliases=True) or getattr(bus, "denied", ()):
        return
    error = await not_served(bus, model)  # having listened for longer
    if isinstance(error, UnknownModel) or not heard:
        raise error


async def not_served(bus: Bus, model: str) -> PenstockError:
    """Return the reason why nobody listens to requests for `model`; an `UnknownModel` names the models that are served."""
    names = gateway_models(await watch_presence(bus, LISTEN_S), aliases=True)
    if not names:
        return NoWorkers(f"nobody listens on {subjects.chat(subjects.slug(model))}: start Penstock with `penstock up`")
    if model in names:
        return NoWorkers(f"the gateway of {model!r} takes no requests now: look at `penstock status`")
    served = f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
    return UnknownModel(f"the model {model[:100]!r} is not served on this bus; {served}", param="model")
