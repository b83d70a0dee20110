"""Where one NATS request is answered, and how: numbered chunks, one final message, and now and then a look at the inbox.

While the bus is away nothing is published: what comes then goes out as one larger chunk. When it is back, our clients may be
on their way yet (nats-py and others try every two seconds): a message that finds nobody is sent again, until somebody is there
or `RETURN_GRACE_S` is over.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence

import anyio

from common.protocol import headers, subjects
from common.protocol.errors import PenstockError, RateLimited, ReplyNotAllowed, RequestTimeout
from common.runtime.bus import Bus
from services.gateway.server_span import ServerSpan
from services.gateway.views.view import View

CHECK_EVERY_S = 0.25
"""How often a stream asks the server whether its client still listens."""

RETURN_GRACE_S = 5.0
"""How long after the bus came back a client may still be on its way."""

_TRY_AGAIN_S = 0.1
_ANSWER_S = 0.02
"""The server's word that nobody listens comes before the end of a flush, and is handled a little later."""
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


def is_inbox_of(subject: str, prefixes: Sequence[str], tenant: str) -> bool:
    """Whether `subject` is below a tenant's name, and that below one of `prefixes`."""
    return subject.startswith(tuple(f"{prefix}{tenant}." for prefix in prefixes))


def check_reply(subject: str, prefixes: Sequence[str], tenant: str = "") -> None:
    """Check what a client named as its inbox: it must begin with one of `prefixes`, or be one that `Bus.new_inbox` made; a
    tenant's must be below its name.

    :raises ReplyNotAllowed: nothing may be published there, not even this error.
    """
    if not is_safe_reply(subject):
        raise ReplyNotAllowed("the reply subject is no inbox")
    if tenant:
        if not is_inbox_of(subject, prefixes, tenant):
            raise ReplyNotAllowed(f"reply subjects of {tenant} must begin with {' or '.join(prefixes)}{tenant}.")
        return
    if not subject.startswith((*prefixes, f"{subjects.ROOT}.")):
        raise ReplyNotAllowed(f"reply subjects must begin with {' or '.join(prefixes)}")


class Link:
    """The bus, and when it came back last."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.outages = 0
        self.back_at = -math.inf
        self._is_back = anyio.Event()
        if bus.connected:
            self._is_back.set()
        bus.on_connection_change(self._on_change)

    async def connected(self) -> None:
        await self._is_back.wait()

    def _on_change(self, connected: bool) -> None:
        if connected:
            self.back_at = time.monotonic()
            self._is_back.set()
        else:
            self.outages += 1
            self._is_back = anyio.Event()


class Reply:
    """One request's inbox. `scope` is around the work for it; `gone`: nobody listens on the inbox any more.

    `control`: our subject where the server says so, see `CHECK_EVERY_S`.
    """

    def __init__(self, link: Link, subject: str, minted: str, control: str, traceparent: str, view: View) -> None:
        self.minted = minted  # names the request inside
        self.request = minted  # and to the client, unless it chose a name itself
        self.scope = anyio.CancelScope()
        self.gone = False
        self.started = False  # the first tokens have come
        self.warning = ""
        self.tenant = ""
        self.span: ServerSpan | None = None
        self._link = link
        self._view = view
        self._outages = link.outages  # until then, the client was there
        self._unheard = False
        self.inbox = subject
        self._control = control
        self._traceparent = traceparent if _TRACEPARENT.fullmatch(traceparent) else ""
        self._sequence = 0
        self._checked_at = -CHECK_EVERY_S

    async def is_deserted(self) -> bool:
        """Whether it is certain that nobody listens on the inbox. Not while clients may be on their way back."""
        link = self._link
        if self._outages != link.outages or time.monotonic() - link.back_at < RETURN_GRACE_S or not link.bus.connected:
            return False
        return await link.bus.has_listener(self.inbox) is False

    async def chunk(self, body: bytes) -> None:
        now = time.monotonic()
        control = ""
        if now - self._checked_at >= CHECK_EVERY_S:
            self._checked_at = now
            control = self._control
        fields = {headers.REQUEST_ID: self.request, headers.SEQUENCE: str(self._sequence)}
        if self._sequence == 0:
            if self._traceparent:
                fields[headers.TRACEPARENT] = self._traceparent
            if self.warning:
                fields[headers.WARNING] = self.warning
        await self._publish(body, fields, control)

    async def last(self, body: bytes, more: Mapping[str, str] | None = None) -> None:
        fields = {headers.REQUEST_ID: self.request, headers.SEQUENCE: str(self._sequence), headers.FINAL: "1"}
        if self._traceparent:
            fields[headers.TRACEPARENT] = self._traceparent
        if self._sequence == 0 and self.warning:
            fields[headers.WARNING] = self.warning
        await self._publish(body, fields | dict(more or {}))

    async def fail(self, error: PenstockError) -> None:
        text = " ".join(str(error).split())  # a header is one line
        text = text.encode("ascii", "replace").decode()[:512]
        fields = {headers.ERROR: text, headers.ERROR_CODE: error.code}
        if isinstance(error, RateLimited):
            fields[headers.RETRY_AFTER] = str(max(1, math.ceil(error.retry_after_s)))
        await self.last(self._view.error_body(error), fields)

    def nobody_listens(self) -> None:
        """The server says so of the last message that asked."""
        if self._outages == self._link.outages:
            self.gone = True
            self.scope.cancel()
        else:
            self._unheard = True

    async def _publish(self, body: bytes, fields: Mapping[str, str], control: str = "") -> None:
        link = self._link
        await link.connected()  # a request that is cancelled until here has not used the number
        self._sequence += 1
        if self._outages == link.outages:
            await self._hand_over(body, fields, control)
            return
        while True:
            outages, self._unheard = link.outages, False
            await self._hand_over(body, fields, self._control)
            try:
                await link.bus.flush()
            except RequestTimeout:
                continue
            await anyio.sleep(_ANSWER_S)
            if outages != link.outages:  # the server is away again, or was: nobody knows whether it got there
                await link.connected()
            elif not self._unheard or time.monotonic() - link.back_at > RETURN_GRACE_S:
                self._outages = outages  # the next look at the inbox ends the request, if there is still nobody
                return
            else:
                await anyio.sleep(_TRY_AGAIN_S)

    async def _hand_over(self, body: bytes, fields: Mapping[str, str], control: str) -> None:
        """Publish, even if the request is cancelled meanwhile: without this number, the next one would seem to follow a loss.

        The bus bounds how long it takes.
        """
        with anyio.CancelScope(shield=True):
            await self._link.bus.publish(self.inbox, body, reply=control, headers=fields)
