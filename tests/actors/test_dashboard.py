"""The dashboard of a real gateway between worker doubles, behind the real server: what it shows, to whom, at what cost."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from common.runtime import endpoints
from common.runtime.http_access import HttpAccess
from services.gateway.census import MAX_ROWS, WatchedModel
from services.gateway.dashboard import MAX_VIEWERS, Dashboard
from services.gateway.page_files import FILES, page_files
from tests.actors.edge import BUNDLE
from tests.actors.gateway_site import LONG, Site, read, read_some, site
from tests.unit.presences import presence

pytestmark = pytest.mark.virtual_time

KEY = {"authorization": "Bearer secret"}
EVENTS = "/dashboard/events"


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[Site, httpx.AsyncClient]]:
    """A site whose gateway is reached over a real socket."""
    options: dict[str, Any] = {"prefill": 1, "decode": 2, "slow_reader_timeout_s": 1.0, **settings}
    async with site(bundle=BUNDLE, **options) as made:
        listener = endpoints.bind("127.0.0.1", 0)
        app = made.gateway.http_app()
        assert app is not None
        guarded = endpoints.guarded(app, HttpAccess("127.0.0.1"), made.gateway.metrics.http_refused)
        server = endpoints.HttpServer(guarded, stall_timeout_s=1.0)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(server.run_until_finished, listener)
                await made.until(lambda: server.started)
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                try:
                    async with httpx.AsyncClient(base_url=url, timeout=10) as client:
                        yield made, client
                finally:
                    server.finish(at_once=True)
        finally:
            listener.close()


class Watcher:
    """What an open page knows."""

    def __init__(self, response: httpx.Response) -> None:
        self._lines = response.aiter_lines()
        self.raw = ""
        self.history: list[Any] = []
        self.snapshot: dict[str, Any] = {}
        self.workers: dict[str, Any] = {}
        self.ended: list[dict[str, Any]] = []

    async def next(self) -> None:
        """Read up to the end of one round of events."""
        event = ""
        with anyio.fail_after(5):
            async for line in self._lines:
                self.raw += line
                if line.startswith("event: "):
                    event = line[7:]
                elif line.startswith("data: "):
                    data = json.loads(line[6:])
                    if event == "ended":
                        self.ended += data
                        return
                    setattr(self, event, data)
        raise EOFError

    async def until(self, condition: Any) -> None:
        with anyio.fail_after(10):
            while not condition():
                await self.next()

    def worker(self, id: str) -> dict[str, Any] | None:
        return next((row for row in self.workers["rows"] if row["id"] == id), None)


@asynccontextmanager
async def watching(client: httpx.AsyncClient, path: str = EVENTS, **more: Any) -> AsyncIterator[Watcher]:
    async with client.stream("GET", path, **more) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        watcher = Watcher(response)
        await watcher.next()
        yield watcher


async def test_a_page_sees_pools_workers_and_a_request_from_beginning_to_end() -> None:
    async with serving() as (made, client), watching(client) as page:
        assert page.snapshot["models"] == [BUNDLE.name] and page.snapshot["gateway"] == made.gateway.ref.id
        assert [(pool["role"], pool["workers"]) for pool in page.snapshot["pools"]] == [("prefill", 1), ("decode", 2)]
        assert {row["id"] for row in page.workers["rows"]} == {"prefill-1", "decode-1", "decode-2"}
        for double in made.decode:
            double.step_s = 0.015  # the page looks once a second
        stream = made.generate(LONG, max_tokens=200, id="chatcmpl-00112233445566778899aabb")
        await read_some(stream, 20)
        await page.until(lambda: page.snapshot["flow"]["decoding"] == 1)
        (running,) = page.snapshot["running"]
        assert running["name"] == "chatcmpl-00112233" and running["tokens"] >= 20 and not running["finish"]
        await read(stream)
        await page.until(lambda: page.ended)
        (ended,) = page.ended
        assert (ended["finish"], ended["tokens"], ended["prompt_tokens"]) == ("length", 200, len(LONG))
        assert [step[1] for step in ended["steps"]] == ["queued", "placing", "prefilling", "handing_off", "decoding"]
        assert (await client.get("/dashboard/requests/chatcmpl-00112233")).json() == ended
        assert (await client.get("/dashboard/requests/chatcmpl-99999999")).status_code == 404
        assert "44556677" not in page.raw, "the rest of the id would let a viewer cancel the request"
        async with watching(client) as later:
            assert max(point[1] for point in later.history) > 0, "tokens per second"


async def test_a_killed_worker_leaves_the_page_and_the_request_shows_that_it_moved() -> None:
    async with serving() as (made, client), watching(client) as page:
        for double in made.decode:
            double.step_s = 0.008
        stream = made.generate(LONG, max_tokens=400, id="r1")
        await read_some(stream, 20)
        (held,) = (double for double in made.decode if double.held)
        await made.kill(held)
        await page.until(lambda: page.worker(held.ref.id) is None)
        await read(stream)
        await page.until(lambda: page.ended)
        (ended,) = page.ended
        assert ("queued", "worker_lost") in [(step[1], step[5]) for step in ended["steps"]]
        assert len({step[4] for step in ended["steps"] if step[1] == "decoding"}) == 2
        assert page.snapshot["resumes"] == 1


async def test_no_word_of_a_prompt_or_an_answer_is_in_it() -> None:
    async with serving() as (_, client), watching(client) as page:
        text = "a quite unmistakable sentence"
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200
        await page.until(lambda: page.ended)
        shown = page.raw + (await client.get(f"/dashboard/requests/{page.ended[0]['name']}")).text
        assert "unmistakable" not in shown
        fields = set(re.findall(r'"(\w+)":', shown))
        assert not fields & {"text", "content", "messages", "prompt", "logprobs"}


async def test_with_an_api_key_the_page_loads_and_its_data_does_not() -> None:
    async with serving(api_key="secret") as (made, client):
        page = await client.get("/")
        assert page.status_code == 200 and "<title>Penstock</title>" in page.text
        for path in (EVENTS, "/dashboard/requests/r1", "/sd"):
            for headers in ({}, {"authorization": "Bearer wrong"}):
                refused = await client.get(path, headers=headers)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert (await client.get(f"{path}?key=secret")).status_code == 401, "keys in URLs end in logs"
        assert made.gateway.dashboard.num_viewers == 0
        async with watching(client, headers=KEY) as watcher:
            assert len(watcher.workers["rows"]) == 3


async def test_the_page_loads_nothing_from_elsewhere_and_browsers_are_told_so() -> None:
    async with serving() as (_, client):
        for name in page_files():
            path = {"index.html": "/", "docs.html": "/docs"}.get(name, f"/dashboard/{name}")
            answer = await client.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "*" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            links = set(re.findall(r"(?:https?:)?//[\w.-]+", re.sub(r"^\s*//.*$", "", answer.text, flags=re.MULTILINE)))
            assert links <= {"http://www.w3.org"}, name
            again = await client.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        assert sorted(page_files()) == sorted(path.name for path in FILES.iterdir())
        for path in ("/dashboard/nothing.js", "/dashboard/../config.py", "/dashboard/%2e%2e/config.py"):
            assert (await client.get(path)).status_code == 404


async def test_pages_of_other_sites_are_refused() -> None:
    async with serving() as (_, client):
        for path in ("/", EVENTS):
            assert (await client.get(path, headers={"host": "attacker.example"})).status_code == 421
            assert (await client.get(path, headers={"origin": "https://attacker.example"})).status_code == 403


async def test_pages_are_bounded_and_one_that_leaves_makes_room() -> None:
    async with serving() as (made, client), contextlib.AsyncExitStack() as pages:
        for _ in range(MAX_VIEWERS - 1):
            await pages.enter_async_context(watching(client))
        async with watching(client):
            refused = await client.get(EVENTS)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert refused.headers["retry-after"]
        await made.until(lambda: made.gateway.dashboard.num_viewers == MAX_VIEWERS - 1)
        async with watching(client):
            pass


async def test_a_page_that_reads_nothing_is_cut_off_and_skips_what_it_missed() -> None:
    async with serving() as (made, client):
        dashboard = made.gateway.dashboard
        for number in range(600):  # snapshots of some size
            made.gateway.registry.observe(presence("kvstore", number), made.gateway.clock() + 60)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", client.base_url.port))
            connection.sendall(f"GET {EVENTS} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
            await made.until(lambda: dashboard.num_viewers == 1)
            async with anyio.create_task_group() as group:
                group.start_soon(_look_often, dashboard)
                await made.until(lambda: dashboard.num_viewers == 0, 30)
                group.cancel_scope.cancel()


async def _look_often(dashboard: Dashboard) -> None:
    while True:
        await dashboard.look()
        await anyio.sleep(0.01)


async def test_an_open_page_ends_with_the_gateway_and_does_not_hold_it_up() -> None:
    async with serving() as (made, client), watching(client) as page:
        made.gateway.begin_drain()
        with pytest.raises(EOFError), anyio.fail_after(5):
            while True:
                await page.next()
        assert page.snapshot["state"] in ("ready", "draining")


async def test_a_search_lists_other_workers_and_the_list_is_bounded() -> None:
    async with serving() as (made, client):
        for number in range(2 * MAX_ROWS):
            made.gateway.registry.observe(presence("kvstore", number), made.gateway.clock() + 60)
        async with watching(client) as page:
            assert len(page.workers["rows"]) == MAX_ROWS and page.workers["known"] == 2 * MAX_ROWS + 3
        async with watching(client, f"{EVENTS}?search=kvstore-19") as page:
            assert [row["id"] for row in page.workers["rows"]] == ["kvstore-19", *(f"kvstore-19{n}" for n in range(10))]
        async with watching(client, f"{EVENTS}?search={'x' * 5000}") as page:
            assert page.workers["rows"] == []


async def test_nobody_looking_costs_no_snapshot() -> None:
    async with serving() as (made, _):
        dashboard = made.gateway.dashboard
        before = len(dashboard._curves.points)
        await dashboard.look()
        assert len(dashboard._curves.points) == before + 1
        assert dashboard._number == 0 and dashboard._census.num_workers == 0


async def test_a_thousand_workers_do_not_hold_the_event_loop_for_long() -> None:
    """In CPU time of one turn, the best of several looks; the gateway's own heartbeat is left out."""
    async with site(bundle=BUNDLE) as made:
        workers = [presence("decode", n, model=BUNDLE.name, running=n % 5, credits=4) for n in range(1000)]
        made.gateway.workers = lambda: workers  # pyright: ignore[reportAttributeAccessIssue]
        dashboard = Dashboard(made.gateway, lambda: (WatchedModel("m", made.core.dispatcher),))
        turns: list[float] = []

        async def watch_turns() -> None:
            before = time.thread_time()
            while True:
                await anyio.lowlevel.checkpoint()
                now = time.thread_time()
                turns.append(now - before)
                before = now

        worst: list[float] = []
        with dashboard.viewer("") as viewer:
            async with anyio.create_task_group() as group:
                group.start_soon(watch_turns)
                for _ in range(8):
                    turns.clear()
                    group.start_soon(dashboard.look)
                    assert b'"known":1000' in await viewer.next()
                    worst.append(max(turns))
                group.cancel_scope.cancel()
        assert len(turns) > 10
        assert min(worst) < 0.005, worst
