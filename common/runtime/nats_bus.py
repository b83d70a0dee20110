"""The bus on NATS: beside `nats_client` and `nats_micro`, the only file that imports `nats`.

`connect` returns a connection that comes back by itself, for ever, about 100 ms after the server does. nats-py reconnects by
itself after a broken connection, but closes for good when the server sends an error (a slow consumer after SIGSTOP, for
example): then a new client takes over the same subscriptions.

What is published meanwhile waits in a buffer of `MAX_PENDING_BYTES`; what is beyond it is dropped, counted and logged rather
than raised, because nobody could do better: every stream numbers its messages and fetches again what is missing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping

import anyio
import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from common.protocol import errors
from common.protocol.errors import BusClosed, BusError, BusRefused, ConfigError, InvalidParameter, RequestTimeout
from common.runtime import logs, nats_client
from common.runtime.bus import BusMessage, Handler, ServiceInfo
from common.runtime.bus_login import BusLogin, ResolvedLogin
from common.runtime.jetstream import JetStream
from common.runtime.nats_access import CLIENT
from common.runtime.nats_client import NatsClient
from common.runtime.nats_micro import MicroService
from common.runtime.nats_url import check_nats_url, redacted, servers
from common.runtime.routing import PendingReplies, check_size, check_subject, leads_on

log = logs.get("nats")

MAX_PENDING_BYTES = 16 * 1024 * 1024
SUBSCRIPTION_PENDING_BYTES = 128 * 1024 * 1024
RECONNECT_WAIT_S = 0.1
ATTEMPT_TIMEOUT_S = 2
PING_INTERVAL_S = 2
"""A server that answers none for three times as long hangs: sooner than requests are refused because no worker is heard."""
FLUSH_TIMEOUT_S = 10.0
DRAIN_TIMEOUT_S = 5
CLOSE_TIMEOUT_S = 5
POLL_S = 0.01
MESSAGES_PER_TURN = 32
TRACING_SINCE = (2, 11)
TRACE_TIMEOUT_S = 1.0
TLS_ERROR = "[SSL"
MAX_DENIED = 100

_NO_HEADERS: dict[str, str] = {}


async def connect(
    url: str, *, name: str, user: str = CLIENT, login: BusLogin | None = None, connect_timeout_s: float = 10
) -> NatsBus:
    """Connect as `user`, a role or a client, with what `login` says or what is found for a bus of this machine. `url` may name
    several servers of a cluster, with commas between: the first that answers is used, and another one when it is gone.

    :raises BusError: if no server answers at `url` in time. :raises BusRefused: if it wants other credentials, or TLS fails.
    :raises ConfigError: if `url` is not a NATS URL, or `login` names a file that is wrong.
    """
    check_nats_url(url)
    bus = NatsBus(url, name, (login or BusLogin()).resolve(url, user=user))
    try:
        within_s = connect_timeout_s + ATTEMPT_TIMEOUT_S * (len(servers(url)) - 1)  # a host that is off does not even refuse
        with anyio.fail_after(within_s):  # asyncio.timeout cancels once, and nats-py may swallow a cancellation
            await bus._open()
    except TimeoutError:
        await bus.close()
        if bus.was_refused:
            raise BusRefused(
                f"the NATS server at {redacted(url)} wants other credentials: name a file of yours with nats_credentials_file "
                "(PENSTOCK_NATS_CREDENTIALS_FILE), nats_creds or nats_nkey"
            ) from None
        if TLS_ERROR in bus.last_error:
            raise BusRefused(
                f"no TLS with the NATS server at {redacted(url)}: {bus.last_error}. nats_tls_ca (PENSTOCK_NATS_TLS_CA) names "
                "its authority, nats_tls_cert and nats_tls_key a certificate of yours"
            ) from None
        reason = f" ({bus.last_error})" if bus.last_error else ""
        raise BusError(f"no NATS server answers at {redacted(url)}{reason}; is one running?") from None
    return bus


class BusSubscription:
    """What was asked for, and the present client's part of it."""

    def __init__(self, bus: NatsBus, subject: str, handler: Handler, queue: str, max_pending: int) -> None:
        self.bus = bus
        self.subject = subject
        self.handler = handler
        self.queue = queue
        self.max_pending = max_pending
        self.inner: NatsSubscription | None = None
        self._delivered = 0
        self._delivering = False

    @property
    def num_waiting(self) -> int:
        return (self.inner.pending_msgs if self.inner is not None else 0) + self._delivering

    async def deliver(self, message: Msg) -> None:
        self._delivered += 1
        self._delivering = True
        if self._delivered % MESSAGES_PER_TURN == 0:  # nats-py would hand over all that has arrived in one turn of the loop
            await asyncio.sleep(0)
        try:
            self.handler(BusMessage(message.subject, message.data, message.reply, message.headers or _NO_HEADERS))
        except Exception:
            log.exception("bus_handler_failed", subject=message.subject)
        finally:
            self._delivering = False

    async def unsubscribe(self) -> None:
        """Messages that have arrived but were not handled yet are dropped. Harmless twice."""
        self.bus._subscriptions.discard(self)
        inner, self.inner = self.inner, None
        if inner is not None:
            try:
                await inner.unsubscribe()
            except nats.errors.Error as error:
                log.debug("unsubscribe_failed", subject=self.subject, reason=str(error))


class NatsBus:
    """One connection to NATS; implements `Bus`. Make one with `connect`."""

    def __init__(self, url: str, name: str, login: ResolvedLogin) -> None:
        self.name = name
        self.tenant = login.tenant
        self.denied: list[str] = []
        """What the server did not let this connection do, the first few times."""
        self.num_dropped = 0
        self.num_slow_consumer = 0
        self.last_error = ""
        self.was_refused = False  # by any attempt: the next one may end with a reset before the server's reason is read
        self.streams = JetStream(self)
        self._url = url
        self._login = login
        self._client = NatsClient()
        self._connected = False
        self._closed = False
        self._callbacks: list[Callable[[bool], None]] = []
        self._subscriptions: set[BusSubscription] = set()
        self._service: ServiceInfo | None = None
        self._replies = PendingReplies(f"{login.inbox_prefix}.{os.urandom(8).hex()}")

    @property
    def connected(self) -> bool:
        return self._connected and self._client.is_connected

    @property
    def max_payload(self) -> int:
        return self._client.max_payload

    def on_connection_change(self, callback: Callable[[bool], None]) -> None:
        self._callbacks.append(callback)

    async def publish(self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None) -> None:
        if self._closed:
            raise BusClosed
        check_subject(subject)
        if reply:
            check_subject(reply)
        check_size(data, headers, self._client.max_payload)
        if self._client.pending_data_size + len(data) > MAX_PENDING_BYTES and not await self._has_room(len(data)):
            self._drop(subject)
            return
        try:
            await self._client.publish(subject, data, reply, dict(headers) if headers else None)
        except nats.errors.MaxPayloadError as error:
            raise errors.PayloadTooLarge from error
        except (nats.errors.BadSubjectError, nats.errors.BadHeaderError) as error:
            raise InvalidParameter(f"can't publish: {error}") from error
        except nats.errors.Error:
            if self._closed:
                raise BusClosed from None
            self._drop(subject)

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> BusMessage:
        reply = self._replies.new_subject()
        future = self._replies.expect(reply)
        try:
            await self.publish(subject, data, reply=reply, headers=headers)
            return await self._replies.wait(reply, future, timeout_s, target=subject)
        finally:
            self._replies.forget(reply)

    async def has_listener(self, subject: str) -> bool | None:
        """By NATS's message tracing: the server says where it would deliver a message, and delivers nothing."""
        check_subject(subject)
        version = self._client.connected_server_version
        if not self.connected or (version.major, version.minor) < TRACING_SINCE:
            return None
        reply = self._replies.new_subject()
        future = self._replies.expect(reply)
        try:
            await self._client.publish(subject, b"", headers={"Nats-Trace-Dest": reply, "Nats-Trace-Only": "true"})
            return leads_on(await self._replies.wait(reply, future, TRACE_TIMEOUT_S, target="message tracing"))
        except (nats.errors.Error, BusError):
            return None
        finally:
            self._replies.forget(reply)

    async def subscribe(self, subject: str, handler: Handler, *, queue: str = "", max_pending: int = 65536) -> BusSubscription:
        """:raises RequestTimeout: if the server stays away for 10 s. :raises InvalidParameter: the subject is none.
        :raises BusClosed: the bus was closed."""
        if self._closed:
            raise BusClosed
        subscription = BusSubscription(self, subject, handler, queue, max_pending)
        await self._wait_connected()
        self._subscriptions.add(subscription)
        try:
            await self._attach(subscription)
        except nats.errors.BadSubjectError as error:
            self._subscriptions.discard(subscription)
            raise InvalidParameter(f"can't subscribe to {subject!r}") from error
        except nats.errors.Error as error:
            log.debug("subscribing_after_reconnect", subject=subject, reason=str(error))
        await self.flush()
        return subscription

    def new_inbox(self) -> str:
        return f"{self._replies.prefix}-inbox.{os.urandom(8).hex()}"

    async def register(self, service: ServiceInfo) -> None:
        self._service = service
        await self._wait_connected()
        await MicroService(self._client, service).start()

    async def flush(self) -> None:
        """:raises RequestTimeout: if the server stays away for 10 s. :raises BusClosed: after close."""
        while True:
            await self._wait_connected()
            try:
                await nats_client.flush(self._client, FLUSH_TIMEOUT_S)
            except (nats.errors.FlushTimeoutError, TimeoutError):
                if self._client.is_connected:
                    raise RequestTimeout("the NATS server does not answer") from None
            except (nats.errors.Error, OSError) as error:
                log.debug("flush_interrupted", reason=str(error))
            else:
                return

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        client = self._client
        try:
            if client.is_connected:
                with anyio.fail_after(DRAIN_TIMEOUT_S + 1):
                    await client.drain()
        except (nats.errors.Error, OSError, TimeoutError) as error:
            log.debug("drain_failed", reason=str(error))
        if not client.is_closed:
            with anyio.move_on_after(CLOSE_TIMEOUT_S):  # the other end of a TLS connection may never say goodbye
                try:
                    await client.close()  # writes what is left, perhaps to a transport that is gone
                except (nats.errors.Error, OSError, RuntimeError) as error:
                    log.debug("close_failed", reason=str(error))
        self._connected = False

    # -- one client after another

    async def _open(self) -> None:
        """Connect a new client, which takes over every subscription. Tries until it succeeds or is cancelled."""
        while True:
            client = self._client = NatsClient()
            try:
                await client.connect(
                    servers(self._url),
                    name=self.name,
                    error_cb=self._on_error,
                    disconnected_cb=self._on_disconnected,
                    reconnected_cb=self._on_reconnected,
                    closed_cb=self._on_closed,
                    allow_reconnect=True,
                    connect_timeout=ATTEMPT_TIMEOUT_S,
                    reconnect_time_wait=RECONNECT_WAIT_S,  # pyright: ignore[reportArgumentType]  # seconds, fractions work
                    max_reconnect_attempts=-1,
                    ping_interval=PING_INTERVAL_S,
                    max_outstanding_pings=2,
                    drain_timeout=DRAIN_TIMEOUT_S,
                    pending_size=4 * MAX_PENDING_BYTES,
                    dont_randomize=True,
                    **self._login.options,
                )
                for subscription in list(self._subscriptions):
                    await self._attach(subscription)
                await client.subscribe(self._replies.pattern, cb=self._on_reply, pending_msgs_limit=65536)
                if self._service is not None:
                    await MicroService(client, self._service).start()
                await nats_client.flush(client, ATTEMPT_TIMEOUT_S)
            except ValueError as error:
                raise ConfigError(f"{redacted(self._url)} is not a NATS URL: {error}") from error
            except (nats.errors.Error, OSError, TimeoutError) as error:
                if "invalid" in str(error) and "url" in str(error):
                    raise ConfigError(f"{redacted(self._url)} is not a NATS URL; try nats://127.0.0.1:4222") from error
                self._note(str(error))
                await asyncio.sleep(RECONNECT_WAIT_S)
            else:
                self._set_connected(True)
                return

    async def _attach(self, subscription: BusSubscription) -> None:
        subscription.inner = await self._client.subscribe(
            subscription.subject,
            queue=subscription.queue,
            cb=subscription.deliver,
            pending_msgs_limit=subscription.max_pending,
            pending_bytes_limit=SUBSCRIPTION_PENDING_BYTES,
        )

    async def _wait_connected(self) -> None:
        waited_s = 0.0
        while not self.connected:
            if self._closed:
                raise BusClosed
            if waited_s >= FLUSH_TIMEOUT_S:
                raise RequestTimeout("the NATS server is away")
            await asyncio.sleep(POLL_S)
            waited_s += POLL_S

    async def _has_room(self, size: int) -> bool:
        """The buffer is full: let the socket take some, but never hold a heartbeat up for long."""
        for _ in range(5):
            if not self.connected:
                return False
            await asyncio.sleep(POLL_S)
            if self._client.pending_data_size + size <= MAX_PENDING_BYTES:
                return True
        return False

    def _drop(self, subject: str) -> None:
        self.num_dropped += 1
        if self.num_dropped % 1000 == 1:
            log.warning("publish_dropped", subject=subject, dropped=self.num_dropped, connected=self.connected)

    def _set_connected(self, connected: bool) -> None:
        if connected == self._connected or self._closed:
            return
        self._connected = connected
        if connected:
            self._replies.interrupt()
        for callback in self._callbacks:
            callback(connected)

    # -- what nats-py calls

    async def _on_reply(self, message: Msg) -> None:
        self._replies.deliver(BusMessage(message.subject, message.data, message.reply, message.headers or _NO_HEADERS))

    async def _on_disconnected(self) -> None:
        if self._connected and not self._closed:
            log.warning("nats_disconnected", url=redacted(self._url))
        self._set_connected(False)

    async def _on_reconnected(self) -> None:
        log.info("nats_reconnected", url=redacted(self._url))
        self._set_connected(True)

    async def _on_closed(self) -> None:
        """Runs in nats-py's own task, so the loop in `_open` has an owner."""
        if self._closed:
            return
        self._set_connected(False)
        log.warning("nats_closed_by_server", url=redacted(self._url), reason=str(self._client.last_error or ""))
        await self._open()
        log.info("nats_reconnected", url=redacted(self._url))
        if self._closed:
            await self._client.close()

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self.num_slow_consumer += 1
            if (dropped := self.num_slow_consumer) % 1000 == 1:
                log.warning("slow_consumer", subject=error.subject, dropped=dropped)
            return
        self._note(str(error) or type(error).__name__)
        if "permissions violation" in self.last_error.lower() and len(self.denied) < MAX_DENIED:
            self.denied.append(self.last_error)
            log.warning("nats_denied", reason=self.last_error)
        else:
            log.debug("nats_error", reason=self.last_error)

    def _note(self, reason: str) -> None:
        self.last_error = reason
        self.was_refused = self.was_refused or "authorization violation" in reason.lower()
