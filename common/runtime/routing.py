"""What both buses agree on: which subject matches which pattern, how large a message is, and who waits for which reply."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Mapping

import msgspec

from common.protocol.errors import InvalidParameter, NoResponders, PayloadTooLarge, RequestTimeout
from common.runtime.bus import BusMessage

STATUS_HEADER = "Status"
NO_RESPONDERS_STATUS = "503"

_UNPUBLISHABLE = re.compile(r"[\s*>]|\.\.|^\.|\.$|^$")


def check_subject(subject: str) -> str:
    """`subject` as one that can be published to.

    :raises InvalidParameter: if it is empty, or holds white space, a wildcard or an empty token.
    """
    if _UNPUBLISHABLE.search(subject):
        raise InvalidParameter("a subject must be dot-separated tokens without white space and wildcards", param="subject")
    return subject


def matches(pattern: list[str], subject: list[str]) -> bool:
    """Whether the tokens of a subject match those of a pattern: `*` is one token, a last `>` is one or more."""
    for index, token in enumerate(pattern):
        if token == ">":
            return len(subject) > index
        if index >= len(subject) or (token != "*" and token != subject[index]):
            return False
    return len(pattern) == len(subject)


def check_size(data: bytes, headers: Mapping[str, str] | None, limit_bytes: int) -> None:
    """The server counts headers too, and closes the connection of a client that sends more than the limit.

    :raises PayloadTooLarge: if the message is larger than `limit_bytes`.
    """
    size = len(data)
    if headers:
        size += 16 + sum(len(name) + len(value.encode()) + 4 for name, value in headers.items())
    if size > limit_bytes:
        raise PayloadTooLarge(f"a message of {size} bytes is over the bus's limit of {limit_bytes}")


def is_no_responders(message: BusMessage) -> bool:
    return not message.data and message.headers.get(STATUS_HEADER) == NO_RESPONDERS_STATUS


class _TraceEvent(msgspec.Struct):
    """`in`: the message reached a server; every other kind is a way on from there."""

    type: str


class _Trace(msgspec.Struct):
    events: list[_TraceEvent]


def leads_on(trace: BusMessage) -> bool | None:
    """Whether a traced message found anybody, by what the first server says of it (NATS ADR-41); None if that can't be read."""
    try:
        return any(event.type != "in" for event in msgspec.json.decode(trace.data, type=_Trace).events)
    except msgspec.DecodeError:
        return None


class PendingReplies:
    """Requests of one connection that wait for their answer, below one reply prefix."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._waiting: dict[str, asyncio.Future[BusMessage]] = {}
        self._counter = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def pattern(self) -> str:
        """Subscribe to this, and hand what arrives to `deliver`."""
        return f"{self.prefix}.*"

    def new_subject(self) -> str:
        return f"{self.prefix}.{next(self._counter)}"

    def expect(self, subject: str) -> asyncio.Future[BusMessage]:
        """Call before the request is published: an answer may come at once."""
        future: asyncio.Future[BusMessage] = asyncio.get_running_loop().create_future()
        self._waiting[subject] = future
        return future

    def forget(self, subject: str) -> None:
        self._waiting.pop(subject, None)

    def deliver(self, message: BusMessage) -> None:
        """Only the first answer counts; one that nobody waits for is dropped."""
        future = self._waiting.get(message.subject)
        if future is not None and not future.done():
            future.set_result(message)

    def interrupt(self) -> None:
        """The server was away: questions and answers under way may be lost, so nobody waits for them any longer."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(RequestTimeout("the bus was away, and may have lost the question or its answer"))

    async def wait(self, subject: str, future: asyncio.Future[BusMessage], timeout_s: float, *, target: str) -> BusMessage:
        """:raises NoResponders, RequestTimeout: as `Bus.request` says."""
        try:
            async with asyncio.timeout(timeout_s):
                message = await future
        except TimeoutError:
            raise RequestTimeout(f"no answer from {target} within {timeout_s:g} s") from None
        if is_no_responders(message):
            raise NoResponders(f"nobody listens on {target}")
        return message
