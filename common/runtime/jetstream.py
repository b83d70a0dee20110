"""Streams on NATS JetStream, by its wire API (NATS ADR-1, ADR-13, ADR-31) over a `Bus`.

Everything is requests and replies on the bus, so it comes back with the bus by itself. nats-py's JetStream context is bound
to one client, and the bus replaces clients. Reading in batches needs nats-server 2.11.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import anyio
import msgspec

from common.protocol.errors import (
    BusError,
    JetStreamOff,
    NoResponders,
    RequestTimeout,
    StorageFull,
    StreamConflict,
)
from common.runtime import logs
from common.runtime.bus import Bus, BusMessage, Subscription
from common.runtime.routing import STATUS_HEADER
from common.runtime.streams import Delivery, Stored, StreamSpec

log = logs.get(__name__)

TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 2.0
READ_BYTES = 2 * 1024 * 1024
MAX_UNACKED = 65536

_API = "$JS.API"
_EXPECTED_LAST = "Nats-Expected-Last-Subject-Sequence"
_WRONG_LAST, _OTHER_CONFIG, _NO_STREAM = 10071, 10058, 10059
_FULL = {10023, 10047, 10077, 10048, 10028}  # resources, storage, bytes of a stream, memory, storage of an account
_OFF = {10039, 10076}  # not enabled for the account, not enabled
_NOT_NOW = {10008, 10009}
_NOT_FOUND, _END = "404", "204"
_NOTHING_MORE = {"404", "408"}


class _ApiError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _Answer(msgspec.Struct):
    """What of an answer's JSON is looked at: `seq` of an append's, `purged` of a purge's."""

    error: _ApiError | None = None
    seq: int = 0
    purged: int = 0


class JetStream:
    """`Streams` of the server that `bus` is connected to."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._numbers = itertools.count()
        self._inbox = ""
        self._opening = anyio.Lock()
        self._reads: dict[str, _Read] = {}
        self._told: set[str] = set()

    async def available(self) -> bool:
        try:
            await self._api("INFO", timeout_s=PROBE_TIMEOUT_S)
        except (JetStreamOff, RequestTimeout):  # a user without permission is never answered
            return False
        return True

    async def ensure(self, spec: StreamSpec) -> None:
        config = {
            "name": spec.name,
            "subjects": list(spec.subjects),
            "retention": "workqueue" if spec.is_queue else "limits",
            "storage": "file",
            "discard": "new",
            "max_bytes": spec.max_bytes,
            "max_age": int(spec.max_age_s * 1e9),
            "max_msgs_per_subject": 1 if spec.latest_only else -1,
            "num_replicas": spec.replicas,
            "allow_direct": True,
        }
        if spec.latest_only:  # the new message of a subject takes the old one's place, whatever `discard` says
            config["discard"] = "old"
        error = (await self._ask(f"{_API}.STREAM.CREATE.{spec.name}", config)).error
        if error is not None and error.err_code in {_OTHER_CONFIG, *_FULL}:
            refused = (await self._ask(f"{_API}.STREAM.UPDATE.{spec.name}", config)).error
            if refused is None or refused.err_code in _FULL:  # it is there, as it was
                self._tell_of_bounds(spec.name, refused)
                return
            error = error if refused.err_code == _NO_STREAM else refused
        if error is not None:
            raise _error(error)

    def _tell_of_bounds(self, stream: str, refused: _ApiError | None) -> None:
        """A server that starts again counts what its streams hold as room that it does not have, and refuses their bounds."""
        if refused is None:
            self._told.discard(stream)
        elif stream not in self._told:
            self._told.add(stream)
            log.warning("stream_keeps_its_bounds", stream=stream, reason=refused.description)

    async def append(
        self, subject: str, data: bytes, *, headers: Mapping[str, str] | None = None, expected_last: int | None = None
    ) -> int:
        fields = dict(headers or {})
        if expected_last is not None:
            fields[_EXPECTED_LAST] = str(expected_last)
        try:
            reply = await self._bus.request(subject, data, timeout_s=TIMEOUT_S, headers=fields)
        except NoResponders as error:  # streams of a server that has just started may not be there yet
            raise RequestTimeout(f"no stream takes {subject}") from error
        answer = msgspec.json.decode(reply.data, type=_Answer)
        if answer.error is not None:
            raise _error(answer.error)
        return answer.seq

    async def last(self, stream: str, subject: str) -> Stored | None:
        try:
            reply = await self._bus.request(f"{_API}.DIRECT.GET.{stream}.{subject}", b"", timeout_s=TIMEOUT_S)
        except NoResponders as error:
            raise RequestTimeout(f"the stream {stream} does not answer") from error
        if reply.headers.get(STATUS_HEADER) == _NOT_FOUND:
            return None
        return _stored(reply)

    async def read(self, stream: str, subjects: str, *, after: int = 0, limit: int = 256) -> list[Stored]:
        await self._open()
        token = str(next(self._numbers))
        read = self._reads[token] = _Read()
        wanted = {"batch": limit, "seq": after + 1, "next_by_subj": subjects, "max_bytes": READ_BYTES}
        try:
            await self._bus.publish(f"{_API}.DIRECT.GET.{stream}", msgspec.json.encode(wanted), reply=f"{self._inbox}.{token}")
            with anyio.move_on_after(TIMEOUT_S):
                await read.ended.wait()
        finally:
            del self._reads[token]
        if not read.is_whole:
            raise RequestTimeout(f"the stream {stream} does not answer")
        return read.found

    async def purge(self, stream: str, subjects: str) -> int:
        return (await self._api(f"STREAM.PURGE.{stream}", {"filter": subjects})).purged

    async def queue(self, stream: str, name: str, subjects: Sequence[str], *, ack_wait_s: float = 30.0) -> PullQueue:
        config = {
            "durable_name": name,
            "name": name,
            "ack_policy": "explicit",
            "ack_wait": int(ack_wait_s * 1e9),
            "max_deliver": -1,
            "max_ack_pending": MAX_UNACKED,
            "filter_subjects": list(subjects),
        }
        await self._api(f"CONSUMER.CREATE.{stream}.{name}", {"stream_name": stream, "config": config})
        queue = PullQueue(self._bus, f"{_API}.CONSUMER.MSG.NEXT.{stream}.{name}")
        await queue.open()
        return queue

    # -- inside

    async def _open(self) -> None:
        async with self._opening:
            if not self._inbox:
                inbox = self._bus.new_inbox()
                await self._bus.subscribe(f"{inbox}.*", self._on_read)
                self._inbox = inbox

    def _on_read(self, message: BusMessage) -> None:
        read = self._reads.get(message.subject.rsplit(".", 1)[-1])
        if read is not None:
            read.take(message)

    async def _api(self, name: str, body: dict[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S) -> _Answer:
        answer = await self._ask(f"{_API}.{name}", body, timeout_s=timeout_s)
        if answer.error is not None:
            raise _error(answer.error)
        return answer

    async def _ask(self, subject: str, body: dict[str, Any] | None, *, timeout_s: float = TIMEOUT_S) -> _Answer:
        data = b"" if body is None else msgspec.json.encode(body)
        try:
            reply = await self._bus.request(subject, data, timeout_s=timeout_s)
        except NoResponders as error:
            raise _off() from error
        return msgspec.json.decode(reply.data, type=_Answer)


class _Read:
    """The answers to one question for many messages: each names the one before it, so that a gap is seen."""

    def __init__(self) -> None:
        self.found: list[Stored] = []
        self.ended = anyio.Event()
        self.is_whole = False

    def take(self, message: BusMessage) -> None:
        status = message.headers.get(STATUS_HEADER, "")
        if not status:
            self.found.append(_stored(message))
            return
        last = self.found[-1].sequence if self.found else 0
        self.is_whole = status == _NOT_FOUND or (status == _END and int(message.headers.get("Nats-Last-Sequence", 0)) == last)
        if self.is_whole:
            linked = zip([0, *(stored.sequence for stored in self.found)], self.found, strict=False)
            self.is_whole = all(int(stored.headers.get("Nats-Last-Sequence", 0)) in (0, before) for before, stored in linked)
        self.ended.set()


class PullQueue:
    """A consumer's messages, pulled as they are wanted. See `WorkQueue`."""

    def __init__(self, bus: Bus, subject: str) -> None:
        self._bus = bus
        self._subject = subject
        self._inbox = bus.new_inbox()
        self._subscription: Subscription | None = None
        self._arrived: list[BusMessage] = []
        self._news = anyio.Event()

    async def open(self) -> None:
        self._subscription = await self._bus.subscribe(self._inbox, self._on_message)

    async def fetch(self, count: int, wait_s: float) -> list[Delivery]:
        found = await self._pull({"batch": count, "no_wait": True}, count, TIMEOUT_S)
        return found or await self._pull({"batch": 1, "expires": int(wait_s * 1e9)}, 1, wait_s + 1)

    async def close(self) -> None:
        subscription, self._subscription = self._subscription, None
        if subscription is not None:
            await subscription.unsubscribe()

    async def _pull(self, wanted: dict[str, Any], count: int, timeout_s: float) -> list[Delivery]:
        """Messages of an earlier pull that came too late for it are taken as well."""
        found: list[Delivery] = []
        ends_at = time.monotonic() + timeout_s
        await self._bus.publish(self._subject, msgspec.json.encode(wanted), reply=self._inbox)
        while len(found) < count:
            while self._arrived and len(found) < count:
                message = self._arrived.pop(0)
                status = message.headers.get(STATUS_HEADER)
                if status is None or message.reply.startswith("$JS.ACK."):
                    found.append(JetStreamDelivery(self._bus, message))
                elif status not in _NOTHING_MORE:
                    raise RequestTimeout(f"the queue does not answer: {message.headers.get('Description', status)}")
                else:
                    return found
            if len(found) >= count:
                break
            self._news = anyio.Event()
            with anyio.move_on_after(ends_at - time.monotonic()) as waiting:
                await self._news.wait()
            if waiting.cancelled_caught:
                break
        return found

    def _on_message(self, message: BusMessage) -> None:
        self._arrived.append(message)
        self._news.set()


class JetStreamDelivery:
    """See `Delivery`. The subject that acks go to tells sequence and number of deliveries (NATS ADR-15)."""

    def __init__(self, bus: Bus, message: BusMessage) -> None:
        self._bus = bus
        self._ack = message.reply
        tokens = message.reply.split(".")
        *_, deliveries, sequence, _, _, _ = tokens if len(tokens) == 9 else tokens[:11]
        self.num_deliveries = int(deliveries)
        self.message = Stored(message.subject, message.data, int(sequence), message.headers)

    async def ack(self) -> None:
        await self._bus.publish(self._ack, b"+ACK")

    async def working(self) -> None:
        await self._bus.publish(self._ack, b"+WPI")

    async def give_back(self, delay_s: float = 0.0) -> None:
        await self._bus.publish(self._ack, b'-NAK {"delay":%d}' % math.ceil(delay_s * 1e9))


def _stored(reply: BusMessage) -> Stored:
    return Stored(reply.headers["Nats-Subject"], reply.data, int(reply.headers["Nats-Sequence"]), reply.headers)


def _off() -> JetStreamOff:
    return JetStreamOff(
        "files and batches need a NATS server with JetStream, which this one has not: `penstock up` starts one, "
        "elsewhere add `jetstream {}` to its configuration"
    )


def _error(error: _ApiError) -> BusError | JetStreamOff | StorageFull:
    if error.err_code == _WRONG_LAST:
        return StreamConflict(error.description)
    if error.err_code in _OFF:
        return _off()
    if error.err_code in _FULL:
        return StorageFull("the space for files and batches is full: delete files, or try again later")
    if error.err_code not in _NOT_NOW:
        log.warning("jetstream_error", code=error.err_code, reason=error.description)
    return RequestTimeout(f"JetStream refuses: {error.description}")
