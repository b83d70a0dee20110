"""What each tenant's requests took: counters, and an event on the bus for each request.

    penstock.v1.usage.<tenant>   {"tenant": "acme", "request": "chatcmpl-…", "model": "…", "prompt_tokens": 12, …}

Tenants are those of the file of keys, so there are as many labels as the operator made, and MAX_LABELS at the most. Events are
for books and quotas of others; what nobody hears is lost, and while the bus is away MAX_WAITING wait. No text is in them.
"""

from __future__ import annotations

from collections import deque

import anyio
import msgspec

from common.protocol import subjects
from common.protocol.errors import BusError
from common.runtime.bus import Bus
from common.runtime.metrics import Metrics

MAX_LABELS = 1000
OTHERS = "others"
MAX_WAITING = 10_000


class UsageEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a tenant's, after its end. `at`: seconds since 1970; `status` and `code` as in the access log."""

    tenant: str
    request: str
    client_id: str
    edge: str
    model: str
    status: int
    code: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    at: float
    duration_s: float


class UsageReports:
    """`add` may be called at any time; `run` sends what was added."""

    def __init__(self, metrics: Metrics) -> None:
        labels = ["tenant"]
        self._requests = metrics.counter("tenant_requests_total", "Requests of a tenant that ended", ["tenant", "code"])
        self._prompt = metrics.counter("tenant_prompt_tokens_total", "Prompt tokens of a tenant's ended requests", labels)
        self._cached = metrics.counter(
            "tenant_cached_tokens_total", "Prompt tokens of a tenant's ended requests that were not computed", labels
        )
        self._completion = metrics.counter("tenant_completion_tokens_total", "Generated tokens of a tenant's requests", labels)
        self._lost = metrics.counter("usage_events_lost_total", "Usage events that were not sent, since the bus was away")
        self._known: set[str] = set()
        self._waiting: deque[UsageEvent] = deque()
        self._came = anyio.Event()

    def add(self, event: UsageEvent) -> None:
        if event.tenant not in self._known and len(self._known) < MAX_LABELS:
            self._known.add(event.tenant)
        label = event.tenant if event.tenant in self._known else OTHERS
        self._requests.labels(label, event.code).inc()
        self._prompt.labels(label).inc(event.prompt_tokens)
        self._cached.labels(label).inc(event.cached_tokens)
        self._completion.labels(label).inc(event.completion_tokens)
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(event)
            self._came.set()
        else:
            self._lost.inc()

    async def run(self, bus: Bus) -> None:
        """Send events until cancelled; what comes while the bus is away waits."""
        bus.on_connection_change(lambda connected: self._came.set())
        encoder = msgspec.json.Encoder()
        while True:
            await self._came.wait()
            self._came = anyio.Event()
            while self._waiting and bus.connected:
                event = self._waiting.popleft()
                try:
                    await bus.publish(subjects.usage(event.tenant), encoder.encode(event))
                except BusError:
                    self._lost.inc()
