"""Sending one request, over HTTP or NATS, as a tenant; and what came back: an answer, a typed error, or a broken connection."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import Any, Literal

import anyio
import httpx
import msgspec

from bench.mixed_load import answers
from bench.mixed_load.answers import PATHS, Answer, View
from common.protocol import headers, subjects
from common.protocol.errors import PenstockError
from common.runtime.bus import Bus, BusMessage
from common.runtime.routing import is_no_responders

SILENCE_S = 60.0
"""A client that hears nothing for so long calls the request hung."""
CANCEL_S = 15.0
"""Within this time a cancelled request over NATS must have its final message."""

Edge = Literal["http", "nats"]
Ending = Literal["answer", "left", "error", "broken", "hung", "nobody"]
"""answer: complete. left: this client went away, as it meant to. error: the server said what is wrong. broken: the connection
ended before the answer, or a message was lost. nobody: no gateway listens on the bus."""

SUBJECTS = {
    "chat": subjects.chat,
    "completions": subjects.completions,
    "responses": subjects.responses,
    "messages": subjects.messages,
}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended. `code`, `status` and `retry_after` are those of an error; `detail` says more of what went wrong."""

    ending: Ending
    answer: Answer | None = None
    code: str = ""
    status: int = 0
    retry_after: str = ""
    detail: str = ""


def failed(body: bytes | dict[str, Any], status: int = 0, retry_after: str = "") -> Result:
    """Read the error object of a response or an event; one that is none has no code."""
    try:
        error = (json.loads(body) if isinstance(body, bytes) else body)["error"]
        code, detail = str(error.get("code") or ""), str(error.get("message") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        code, detail = "", repr(body)[:200]
    return Result(ending="error", code=code, status=status, retry_after=retry_after, detail=detail)


class HttpClient:
    """A tenant's connections. They are not kept for long, so that a gateway that comes back is used again."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(SILENCE_S, pool=None),
            headers={"authorization": f"Bearer {key}"},
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=4, keepalive_expiry=2.0),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, view: View, body: dict[str, Any], *, leave_after: int = 0) -> Result:
        """`leave_after`: close the connection after so many events of a stream."""
        try:
            if not body.get("stream"):
                response = await self._http.post(PATHS[view], json=body)
                if response.status_code != 200:
                    return failed(response.content, response.status_code, response.headers.get("retry-after", ""))
                return Result(ending="answer", answer=answers.whole(view, response.json()))
            return await self._stream(view, body, leave_after)
        except httpx.TimeoutException as error:
            return Result(ending="hung", detail=repr(error))
        except httpx.ConnectError as error:
            return Result(ending="nobody", detail=repr(error))
        except (httpx.HTTPError, LookupError, ValueError) as error:
            return Result(ending="broken", detail=repr(error))

    async def _stream(self, view: View, body: dict[str, Any], leave_after: int) -> Result:
        events: list[dict[str, Any]] = []
        async with self._http.stream("POST", PATHS[view], json=body) as response:
            if response.status_code != 200:
                return failed(await response.aread(), response.status_code, response.headers.get("retry-after", ""))
            async for event in _events(response):
                if "error" in event and event.get("type", "error") == "error":
                    return failed(event, 200)
                if event.get("type") == "response.failed":
                    return failed(event["response"], 200)
                events.append(event)
                if len(events) == leave_after:
                    return Result(ending="left")
        return Result(ending="answer", answer=answers.streamed(view, events))


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if event.get("type") != "ping":
                yield event


class NatsClient:
    """A tenant on the bus, with its own login and below its own subject."""

    def __init__(self, bus: Bus, tenant: str) -> None:
        self._bus = bus
        self._tenant = tenant

    async def send(self, view: View, body: dict[str, Any], *, leave_after: int = 0) -> Result:
        """`leave_after`: cancel after so many messages; the final one must come all the same."""
        try:
            return await self._ask(view, body, leave_after)
        except PenstockError as error:  # the connection to the bus is gone
            return Result(ending="broken", detail=repr(error))

    async def _ask(self, view: View, body: dict[str, Any], leave_after: int) -> Result:
        send, receive = anyio.create_memory_object_stream[BusMessage](100_000)
        inbox, request = self._bus.new_inbox(), f"mixed-{os.urandom(8).hex()}"
        subscription = await self._bus.subscribe(inbox, send.send_nowait)
        try:
            subject = subjects.of_tenant(self._tenant, SUBJECTS[view](subjects.slug(body["model"])))
            data = json.dumps(body).encode()
            await self._bus.publish(subject, data, reply=inbox, headers={headers.REQUEST_ID: request})
            return await self._read(view, body, receive, inbox, request, leave_after)
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(2):
                await subscription.unsubscribe()
            send.close()
            receive.close()

    async def _read(self, view: View, body: dict[str, Any], receive: Any, inbox: str, request: str, leave_after: int) -> Result:
        events: list[dict[str, Any]] = []
        expected, cancelled = 0, False
        while True:
            try:
                with anyio.fail_after(CANCEL_S if cancelled else SILENCE_S):
                    message: BusMessage = await receive.receive()
            except TimeoutError:
                return Result(ending="hung", detail="no final message after the cancel" if cancelled else "silence")
            if is_no_responders(message):
                return Result(ending="nobody")
            fields = message.headers
            sequence = int(fields.get(headers.SEQUENCE, expected))
            if sequence < expected:  # sent again, after the bus went away
                continue
            if sequence > expected:
                return Result(ending="broken", detail=f"message {expected} was lost")
            expected += 1
            if code := fields.get(headers.ERROR_CODE):
                if cancelled and code == "cancelled":
                    return Result(ending="left")
                return Result(
                    ending="error",
                    code=code,
                    retry_after=fields.get(headers.RETRY_AFTER, ""),
                    detail=fields.get(headers.ERROR, ""),
                )
            if message.data:
                events.append(json.loads(message.data))
            if fields.get(headers.FINAL):
                return _answer(view, body, [event for event in events if event.get("type") != "ping"])
            if len(events) == leave_after:
                cancelled = True
                await self._bus.publish(subjects.of_tenant(self._tenant, subjects.cancel(request)), b"", reply=inbox)


def _answer(view: View, body: dict[str, Any], events: list[dict[str, Any]]) -> Result:
    try:
        if body.get("stream"):
            return Result(ending="answer", answer=answers.streamed(view, events))
        return Result(ending="answer", answer=answers.whole(view, events[0]))
    except (LookupError, ValueError) as error:
        return Result(ending="broken", detail=repr(error))
