"""The cheapest honest SSE client: one keep-alive connection on a raw asyncio protocol, no JSON on the hot path.

Chunks are counted by their prefix; the number of tokens comes from the usage chunk at the end of each answer.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass

EVENT = b"data: {"
DONE = b"data: [DONE]"
CONTENT = re.compile(rb'"(?:content|text)":("(?:[^"\\]|\\.)+")')
COMPLETION_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
MAX_HEAD = 65536
MAX_EVENT = 65536
TAIL_BYTES = 600
"""Usage and [DONE] may come in several pieces; this many bytes hold both."""


@dataclass(slots=True)
class Answer:
    """One request as its client saw it. Times are `perf_counter` seconds; `error` is empty when all went well.
    `head_at`: of the response's headers, which come with the first token."""

    sent_at: float
    first_at: float = 0.0
    done_at: float = 0.0
    events: int = 0
    tokens: int = 0
    first_text: str = ""
    error: str = ""
    head_at: float = 0.0


class HttpStream(asyncio.Protocol):
    """One connection; one request at a time. `key`: an API key that is sent with each."""

    def __init__(self, host: str, port: int, *, key: str = "") -> None:
        self.host = host
        self.port = port
        self._authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self.answer: Answer | None = None
        self._transport: asyncio.Transport | None = None
        self._finished: asyncio.Future[None] | None = None
        self._in_body = False
        self._head = b""
        self._before = b""

    async def post(self, path: str, body: bytes, *, timeout_s: float = 120.0) -> Answer:
        """Send, and wait for the last chunk. Never raises for what the server or the network does: see `Answer.error`."""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n{self._authorization}\r\n"
        )
        loop = asyncio.get_running_loop()
        answer = self.answer = Answer(time.perf_counter())
        try:
            async with asyncio.timeout(timeout_s):
                if self._transport is None or self._transport.is_closing():
                    self._transport, _ = await loop.create_connection(lambda: self, self.host, self.port)
                self._in_body, self._head, self._before = False, b"", b""
                self._finished = loop.create_future()
                answer.sent_at = time.perf_counter()
                self._transport.write(head.encode() + body)
                await self._finished
        except (OSError, TimeoutError) as error:
            answer.error = f"{type(error).__name__}: {error}"
            self.close()
        answer.done_at = time.perf_counter()
        return answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    # -- what asyncio calls

    def data_received(self, data: bytes) -> None:
        answer = self.answer
        if answer is None or self._finished is None or self._finished.done():
            return  # the terminating chunk of the answer before
        if not self._in_body and not (data := self._read_head(data)):
            return
        joined = self._before + data
        self.saw(joined.count(EVENT) - self._before.count(EVENT), answer)
        if not answer.first_at:
            self._find_first(joined, answer)
        if DONE in joined:
            tokens = COMPLETION_TOKENS.findall(joined)
            answer.tokens = int(tokens[-1]) if tokens else 0
            if not tokens:
                answer.error = answer.error or "the answer ended without usage"
            self._finished.set_result(None)
        elif joined.startswith(b'{"error"') or b'data: {"error"' in joined:
            answer.error = joined[:300].decode(errors="replace")
            self._finished.set_result(None)
            self.close()
        self._before = joined[self._start_of_tail(joined, answer) :]

    def saw(self, num_events: int, answer: Answer) -> None:
        """`num_events` more have come; a subclass may note when."""
        answer.events += num_events

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._finished is not None and not self._finished.done() and self.answer is not None:
            self.answer.error = self.answer.error or f"connection lost: {exc or 'closed by the server'}"
            self._finished.set_result(None)

    def _read_head(self, data: bytes) -> bytes:
        """What follows the response's headers; empty while they are incomplete."""
        self._head += data
        start = self._head.find(b"HTTP/1.1 ")
        end = self._head.find(b"\r\n\r\n", max(start, 0))
        if start < 0 or end < 0:
            self._head = self._head[-MAX_HEAD:]
            return b""
        status = self._head[start + 9 : start + 12]
        self._in_body = True
        if self.answer is not None:
            self.answer.head_at = time.perf_counter()
        body, self._head = self._head[end + 4 :], b""
        if status != b"200" and self.answer is not None and self._finished is not None:
            self.answer.error = f"HTTP {status.decode(errors='replace')}: {body[:300].decode(errors='replace')}"
            self._finished.set_result(None)
            self.close()
            return b""
        return body

    def _start_of_tail(self, joined: bytes, answer: Answer) -> int:
        """Return where the bytes begin that must be searched again when more have come."""
        start = max(0, len(joined) - TAIL_BYTES)
        if answer.first_at:
            return start
        # the first text may be longer than the tail, and its event is not complete yet
        event = joined.rfind(EVENT, max(0, len(joined) - MAX_EVENT))
        return start if event < 0 else min(start, event)

    def _find_first(self, joined: bytes, answer: Answer) -> None:
        found = CONTENT.search(joined)
        if found:
            answer.first_at = time.perf_counter()
            answer.first_text = json.loads(found[1])
