"""What the dashboard shows: once a second a point of its curves, and while somebody looks a snapshot of workers and requests.

    run ─► every second: point ─► (viewers?) census in slices, a turn of the event loop for each ─► encoded once ─► viewers wake
                                                                        each viewer sends the newest; a slow one skips some

Nothing here is on a token's path: requests note their own steps, and the dashboard reads them. There is never a word of a
prompt or an answer in it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import anyio
import anyio.lowlevel
import msgspec

from common.protocol.errors import NotFound, Overloaded
from common.protocol.handles import WorkerRef
from common.protocol.messages import Presence
from common.runtime.metrics import Metrics
from services.gateway import request_rows
from services.gateway.census import SLICE, Census, PoolRow, WatchedModel, WorkerList
from services.gateway.curves import Acceptance, Curves, Point, Totals, added
from services.gateway.discovery import targets_of
from services.gateway.metrics import EdgeMetrics
from services.gateway.request_rows import EndedRequests, Flow, RequestRow

EVERY_S = 1.0
AT_MOST_EVERY_S = 0.2
"""Somebody who opens a page gets a snapshot at once, unless there was one just now."""
MAX_VIEWERS = 16
MAX_SEARCH = 64


class Watched(Protocol):
    """What the dashboard needs of the gateway's actor."""

    @property
    def ref(self) -> WorkerRef: ...

    @property
    def state(self) -> Literal["starting", "ready", "draining"]: ...

    @property
    def ready(self) -> bool: ...

    @property
    def metrics(self) -> Metrics: ...

    def workers(self) -> list[Presence]: ...

    def announcement(self) -> Presence: ...


class Snapshot(msgspec.Struct, kw_only=True):
    """What all viewers get, once a second. `at`: seconds since 1970. `ready`: whether clients are served."""

    at: float
    gateway: str
    state: str
    ready: bool
    uptime_s: float
    models: list[str]
    flow: Flow
    point: Point
    pools: list[PoolRow]
    running: list[RequestRow]
    num_ended: int
    retries: int
    resumes: int


class Dashboard:
    """`models()`: what is served now."""

    def __init__(
        self, gateway: Watched, models: Callable[[], Sequence[WatchedModel]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._gateway = gateway
        self._models = models
        self._clock = clock
        self._began = clock()
        self._curves = Curves()
        self._acceptance = Acceptance()
        self._census = Census((), 0.0)
        self._snapshot = b""
        self._number = 0
        self._news = anyio.Event()
        self._opened = anyio.Event()
        self._encoder = msgspec.json.Encoder()
        self.ended = EndedRequests()
        self.num_viewers = 0
        self.closed = False

    # -- what is looked at

    async def run(self) -> None:
        """Look once a second, until cancelled; then viewers are told that it is over."""
        try:
            while True:
                await self.look()
                self._opened = anyio.Event()
                await anyio.sleep(AT_MOST_EVERY_S)
                with anyio.move_on_after(EVERY_S - AT_MOST_EVERY_S):
                    await self._opened.wait()
        finally:
            self.closed = True
            self._news.set()

    async def look(self) -> None:
        """Add a point to the curves. For viewers, take a snapshot, too."""
        presences = self._gateway.workers()
        self._acceptance.observe(presence for presence in presences if presence.worker.role == "decode")
        flow = self._flow()
        point = self._sample(flow)
        if not self.num_viewers:
            return
        await anyio.lowlevel.checkpoint()
        census = Census(self._models(), self._clock())
        for start in range(0, len(presences), SLICE):
            census.add(presences[start : start + SLICE])
            await anyio.lowlevel.checkpoint()
        pools = census.pools()
        await anyio.lowlevel.checkpoint()
        self._census = census
        self._snapshot = self._event("snapshot", self._snapshot_of(pools, flow, point))
        self._number += 1
        news, self._news = self._news, anyio.Event()
        news.set()

    def request(self, name: str) -> bytes:
        """What became of one request, as JSON.

        :raises NotFound: it never came to this gateway, or many have ended since.
        """
        for model in self._models():
            request = request_rows.find(model.dispatcher.requests, name)
            if request is not None:
                return self._encoder.encode(request_rows.request_row(request, model.name, self._clock()))
        row = self.ended.find(name)
        if row is None:
            raise NotFound(f"no request {name[:100]!r} is known to this gateway: another one may have it, or it ended long ago")
        return self._encoder.encode(row)

    def targets(self) -> bytes:
        """Return where the metrics of this gateway and of all its workers are, in Prometheus's format for discovery."""
        return self._encoder.encode(targets_of([*self._gateway.workers(), self._gateway.announcement()]))

    # -- viewers

    @contextlib.contextmanager
    def viewer(self, search: str) -> Iterator[Viewer]:
        """:raises Overloaded: enough others look."""
        if self.num_viewers >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} dashboards are open at this gateway; close one, or try again later")
        self.num_viewers += 1
        self._opened.set()
        try:
            yield Viewer(self, search[:MAX_SEARCH], self._number)
        finally:
            self.num_viewers -= 1

    async def after(self, number: int) -> int:
        """Wait for a snapshot later than this one, and return its number; at once when the dashboard is closed."""
        while self._number <= number and not self.closed:
            await self._news.wait()
        return self._number

    def opening(self) -> bytes:
        """The curves so far."""
        return self._event("history", list(self._curves.points))

    def news(self, search: str, ended_since: int) -> list[bytes]:
        """The newest snapshot's events, for somebody who looks for `search` and knows of requests up to a number."""
        workers: WorkerList = self._census.rows(search)
        return [self._snapshot, self._event("workers", workers), self._event("ended", list(self.ended.since(ended_since)))]

    # -- inside

    def _event(self, name: str, content: object) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (name.encode(), self._encoder.encode(content))

    def _flow(self) -> Flow:
        whole = Flow()
        for model in self._models():
            flow = request_rows.flow_of(model.dispatcher.requests.values())
            for field in Flow.__struct_fields__:
                setattr(whole, field, getattr(whole, field) + getattr(flow, field))
        return whole

    def _sample(self, flow: Flow) -> Point:
        edges = EdgeMetrics.known(self._gateway.metrics)
        totals = Totals(
            now=self._clock(),
            tokens=self.ended.tokens + flow.tokens,
            requests=self.ended.num_ended,
            ttft=added(edge.ttft.counts for edge in edges),
            itl=added(edge.itl.counts for edge in edges),
            draft_tokens=self._acceptance.draft_tokens,
            accepted_tokens=self._acceptance.accepted_tokens,
        )
        bounds = edges[0].ttft.bounds if edges else ()
        running = flow.placing + flow.prefilling + flow.handing_off + flow.decoding
        return self._curves.sample(totals, bounds, at=time.time(), running=running, waiting=flow.queued)

    def _snapshot_of(self, pools: list[PoolRow], flow: Flow, point: Point) -> Snapshot:
        models = self._models()
        now = self._clock()
        stats = [model.dispatcher.stats for model in models]
        running = [row for model in models for row in request_rows.newest(model.dispatcher.requests, model.name, now)]
        running.sort(key=lambda row: row.age_ms)
        return Snapshot(
            at=time.time(),
            gateway=self._gateway.ref.id,
            state=self._gateway.state,
            ready=self._gateway.ready,
            uptime_s=round(now - self._began, 1),
            models=[model.name for model in models],
            flow=flow,
            point=point,
            pools=pools,
            running=running[: request_rows.MAX_RUNNING],
            num_ended=self.ended.num_ended,
            retries=sum(one.retries for one in stats),
            resumes=sum(one.resumes for one in stats),
        )


class Viewer:
    """One open page. `search`: which workers it lists. `seen`: the number of the last snapshot that it does not need."""

    def __init__(self, dashboard: Dashboard, search: str, seen: int) -> None:
        self._dashboard = dashboard
        self._search = search
        self._seen = seen
        self._ended = 0
        self._opened = False

    async def next(self) -> bytes:
        """Wait for news and return them as events; empty when the dashboard is closed."""
        dashboard = self._dashboard
        seen = await dashboard.after(self._seen)
        if dashboard.closed:
            return b""
        parts = [] if self._opened else [dashboard.opening()]
        self._opened = True
        parts += dashboard.news(self._search, self._ended)
        self._seen = seen
        self._ended = dashboard.ended.num_ended
        return b"".join(parts)
