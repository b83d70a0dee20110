"""Where one NATS request is answered, and how: numbered chunks, one final message, and now and then a look at the inbox."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

import anyio

from common.protocol import headers, subjects
from common.protocol.errors import PenstockError
from common.runtime.bus import Bus
from services.gateway import bodies

CHECK_EVERY_S = 0.25
"""How often a stream asks the server whether its client still listens."""

_MAX_REPLY_CHARS = 256
_MAX_REPLY_TOKENS = 16
_UNSAFE_REPLY = re.compile(r"[\s*>]|[^\x21-\x7e]")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def is_safe_reply(subject: str) -> bool:
    """Whether answers may be published to what a client named as its inbox."""
    if not subject or len(subject) > _MAX_REPLY_CHARS or _UNSAFE_REPLY.search(subject):
        return False
    tokens = subject.split(".")
    if "" in tokens or len(tokens) > _MAX_REPLY_TOKENS:
        return False
    if subject == subjects.ROOT or subject.startswith(f"{subjects.ROOT}."):
        return subjects.is_client_inbox(subject)
    return not subject.startswith("$")


class Reply:
    """One request's inbox. `scope` is around the work for it; `gone`: nobody listens on the inbox any more.

    `control`: our subject where the server says so, see `CHECK_EVERY_S`.
    """

    def __init__(self, bus: Bus, subject: str, minted: str, control: str, traceparent: str) -> None:
        self.minted = minted  # names the request inside
        self.request = minted  # and to the client, unless it chose a name itself
        self.scope = anyio.CancelScope()
        self.gone = False
        self._bus = bus
        self._subject = subject
        self._control = control
        self._traceparent = traceparent if _TRACEPARENT.fullmatch(traceparent) else ""
        self._sequence = 0
        self._checked_at = -CHECK_EVERY_S

    async def chunk(self, body: bytes) -> None:
        now = time.monotonic()
        control = ""
        if now - self._checked_at >= CHECK_EVERY_S:
            self._checked_at = now
            control = self._control
        sequence = self._sequence
        self._sequence += 1
        fields = {headers.REQUEST_ID: self.request, headers.SEQUENCE: str(sequence)}
        if sequence == 0 and self._traceparent:
            fields[headers.TRACEPARENT] = self._traceparent
        await self._bus.publish(self._subject, body, reply=control, headers=fields)

    async def last(self, body: bytes, more: Mapping[str, str] | None = None) -> None:
        fields = {headers.REQUEST_ID: self.request, headers.SEQUENCE: str(self._sequence), headers.FINAL: "1"}
        if self._traceparent:
            fields[headers.TRACEPARENT] = self._traceparent
        await self._bus.publish(self._subject, body, headers=fields | dict(more or {}))

    async def fail(self, error: PenstockError) -> None:
        text = " ".join(str(error).split())  # a header is one line
        text = text.encode("ascii", "replace").decode()[:512]
        await self.last(bodies.failure_body(error), {headers.ERROR: text, headers.ERROR_CODE: error.code})
